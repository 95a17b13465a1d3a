"""What a turn is refused for, before anything is allocated."""

from __future__ import annotations

import numpy as np

from tokenspeed.cache.lineage import Lineage
from tokenspeed.config.sampling import SamplingParams
from tokenspeed.scheduler.limits import MAX_MARKS, Limits
from tokenspeed.scheduler.messages import Generate, Rejected


def refusal(
    command: Generate, parent: Lineage | None, limits: Limits, taken: bool, queued: int, spells: bool
) -> Rejected | None:
    """Why the turn cannot be taken, or None.

    Args:
        parent: the lineage of `command.parent`, if it is known.
        taken: there is a turn of that name. queued: turns that wait. spells: it is known what token ids write.
    """

    def bad(message: str) -> Rejected:
        return Rejected(command.turn, "bad_request", message)

    if taken:
        return bad(f"turn {command.turn!r} exists already")
    if command.parent is not None and parent is None:
        return Rejected(command.turn, "unknown_lineage", f"no lineage {command.parent!r}")
    if parent is None and command.keep is not None:
        return bad("keep needs a parent")
    length = parent.length if parent is not None else 0
    keep = length if command.keep is None else command.keep
    if not 0 <= keep <= length:
        return bad(f"keep is {keep}; the parent has {length} ids")
    if len(command.tokens) % 4:
        return bad(f"tokens holds {len(command.tokens)} bytes, which is no number of int32 ids")
    own = np.frombuffer(command.tokens, "<i4")
    if len(own) and not 0 <= own.min() <= own.max() < limits.vocab_size:
        return bad(f"token ids must be in 0 … {limits.vocab_size - 1}; got {own.min()} … {own.max()}")
    total = keep + len(own)
    if total == 0:
        return bad("the prompt is empty")
    if total >= limits.max_context:
        return Rejected(
            command.turn,
            "context_length_exceeded",
            f"maximum context length is {limits.max_context} tokens, but the prompt has {total} and at least one more "
            "is needed for the output",
        )
    marks = command.marks
    if len(marks) > MAX_MARKS or list(marks) != sorted(set(marks)) or not all(0 < mark <= total for mark in marks):
        return bad(f"marks must be at most {MAX_MARKS} ascending lengths in 1 … {total}; got {list(marks)}")
    complaint = _sampling_complaint(command.sampling, limits, spells)
    if complaint is not None:
        return bad(complaint)
    if queued >= limits.max_queue:
        return Rejected(command.turn, "queue_full", f"{queued} turns are waiting; no more are taken")
    return None


def _sampling_complaint(params: SamplingParams, limits: Limits, spells: bool) -> str | None:
    try:
        params.check()
    except ValueError as error:
        return str(error)
    if params.stop and not spells:
        return "stop strings need the model's tokenizer, which its directory does not have"
    if params.forced_token_ids and not limits.forced_tokens:
        return "forced_token_ids are not allowed by this engine's configuration"
    lists = {
        "stop_token_ids": params.stop_token_ids,
        "forced_token_ids": params.forced_token_ids,
        "logit_bias": [token for token, _ in params.logit_bias],
    }
    for name, tokens in lists.items():
        if not all(0 <= token < limits.vocab_size for token in tokens):
            return f"{name} must be of ids in 0 … {limits.vocab_size - 1}"
    return None
