"""Commands of the native protocol. Each carries the client's `id`; the reply echoes it."""

from __future__ import annotations

from typing import Literal

import msgspec

from tokenspeed.client.protocol.items import FunctionTool, InputItem

ReasoningRule = Literal["keep", "drop"]


class Sampling(msgspec.Struct, omit_defaults=True, forbid_unknown_fields=False):
    """Sampling defaults of a session or options of a turn; a field left out falls back to the session's, then to the
    checkpoint's `generation_config.json`.

    `max_tokens` bounds a turn's output; `temperature` 0 is greedy; `top_k` 0, `top_p` 1 and `min_p` 0 are off.
    `stop`: strings that end the turn, in reasoning, text and calls alike; the text is cut before them, a call that one
    ends is incomplete. `logit_bias`: by token id, in decimal. `logprobs`: deltas carry the log-probability of each
    sampled token, and those of the `top_logprobs` most likely ones.
    `forced_token_ids`, where the server allows it, are what the output begins with.
    """

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    seed: int | None = None
    max_tokens: int | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    stop: list[str] | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    forced_token_ids: list[int] | None = None


class SessionOpen(msgspec.Struct, tag_field="type", tag="session.open", omit_defaults=True):
    """A session at the start, or at the turn `from`.

    What is left out is taken from the session in which that turn was made; at the start it is nothing, and the
    reasoning rule `keep`. Empty instructions, tools or labels are none.
    """

    id: str
    model: str | None = None
    instructions: str | None = None
    tools: list[FunctionTool] | None = None
    sampling: Sampling | None = None
    reasoning: ReasoningRule | None = None
    labels: dict[str, str] | None = None
    from_: str | None = msgspec.field(default=None, name="from")


class TurnCreate(msgspec.Struct, tag_field="type", tag="turn.create", omit_defaults=True):
    """A turn on a `session`, or after a turn `parent` in a new, unnamed session that the reply returns.

    `tools` or `instructions` that differ from the session's are an update, for this turn and those to come; empty ones
    are none. `generate=False` is a warm-up: it computes the input, without the generation prompt, and the turn has no
    output; the input of a turn behind it may be empty, which only asks for the answer. `n` > 1, with `parent` alone,
    takes n turns in n sessions; a seed counts up from one to the next. `expect_head`: refuse with `head_moved` if the
    session stands elsewhere; `start` is no turn. `token_ids` asks for the turn's exact ids in `turn.ended`.
    """

    id: str
    session: str | None = None
    input: str | list[InputItem] = []
    sampling: Sampling | None = None
    token_ids: bool = False
    parent: str | None = None
    tools: list[FunctionTool] | None = None
    instructions: str | None = None
    generate: bool = True
    n: int = 1
    expect_head: str | None = None


class SessionRegenerate(msgspec.Struct, tag_field="type", tag="session.regenerate", omit_defaults=True):
    """Another answer to the input of a turn of the lineage (`of`; the head if absent), which becomes the head. Its
    parent is that turn's parent."""

    id: str
    session: str
    of: str | None = None
    sampling: Sampling | None = None
    token_ids: bool = False


class SessionUpdate(msgspec.Struct, tag_field="type", tag="session.update", omit_defaults=True):
    """Replace what is given; empty instructions, tools or labels remove them. `tools`, `instructions` and `reasoning`
    want an idle session. The reply's `lost_tokens` says how many cached tokens the next turn cannot reuse."""

    id: str
    session: str
    instructions: str | None = None
    tools: list[FunctionTool] | None = None
    sampling: Sampling | None = None
    reasoning: ReasoningRule | None = None
    labels: dict[str, str] | None = None


class TurnGet(msgspec.Struct, tag_field="type", tag="turn.get", omit_defaults=True):
    """One turn of any session, running or ended, as the only one of the reply's `turns`."""

    id: str
    turn: str
    token_ids: bool = False


class TurnCancel(msgspec.Struct, tag_field="type", tag="turn.cancel", omit_defaults=True):
    id: str
    turn: str
    keep: Literal["partial", "nothing"] = "partial"


class SessionFork(msgspec.Struct, tag_field="type", tag="session.fork", omit_defaults=True):
    id: str
    session: str
    at: str | None = None
    n: int = 1


class SessionRewind(msgspec.Struct, tag_field="type", tag="session.rewind", omit_defaults=True):
    """`to`: a turn of the session's lineage, or `start`."""

    id: str
    session: str
    to: str


class SessionGet(msgspec.Struct, tag_field="type", tag="session.get", omit_defaults=True):
    """The session's record, with its residency and its cheap rewind points."""

    id: str
    session: str


class SessionList(msgspec.Struct, tag_field="type", tag="session.list", omit_defaults=True):
    """Sessions that bear all of `labels`, in the order of their opening: at most `limit` after the session `after`.
    The reply's `after` asks for the next page; it is absent on the last."""

    id: str
    labels: dict[str, str] = {}
    limit: int = 100
    after: str | None = None


class SessionTurns(msgspec.Struct, tag_field="type", tag="session.turns", omit_defaults=True):
    """`token_ids` asks for the exact ids of each turn."""

    id: str
    session: str
    token_ids: bool = False


class SessionUsage(msgspec.Struct, tag_field="type", tag="session.usage", omit_defaults=True):
    id: str
    session: str


class SessionClose(msgspec.Struct, tag_field="type", tag="session.close", omit_defaults=True):
    id: str
    session: str


Command = (
    SessionOpen
    | TurnCreate
    | TurnGet
    | TurnCancel
    | SessionRegenerate
    | SessionUpdate
    | SessionFork
    | SessionRewind
    | SessionGet
    | SessionList
    | SessionTurns
    | SessionUsage
    | SessionClose
)
