"""Sampling parameters of one turn."""

from __future__ import annotations

import msgspec


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How a turn's tokens are chosen and when it ends.

    Attributes:
        temperature: 0 is greedy.
        top_k: only the k most likely tokens; 0 is off.
        top_p: the smallest set of most likely tokens with at least this probability; 1 is off.
        min_p: only tokens at least this share of the most likely one's probability; 0 is off.
        seed: with the position and the token id it determines the noise; None draws one.
        max_tokens: bound on the output; None is up to the end of the context.
        stop_token_ids: ids that end the turn (kept as its last token), beside the checkpoint's end-of-turn ids.
        ignore_eos: do not end at the checkpoint's end-of-turn ids.
        logprobs: report the log-probability of each sampled token under the unmodified distribution.
        forced_token_ids: ids that the output begins with, whatever the model says; they go through it like sampled
            ones. Only for engines that are configured to allow it.

    Raises:
        ValueError: by `check`, naming the field, the value and what is allowed.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    max_tokens: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: bool = False
    forced_token_ids: tuple[int, ...] = ()

    def check(self) -> None:
        """Raise ValueError on a value out of range (NaN included)."""
        limits = [
            ("temperature", self.temperature, 0.0, 100.0),
            ("top_k", self.top_k, 0, 2**31 - 1),
            ("top_p", self.top_p, 0.0, 1.0),
            ("min_p", self.min_p, 0.0, 1.0),
            ("seed", self.seed, 0, 2**64 - 1),
            ("max_tokens", self.max_tokens, 1, 2**31 - 1),
        ]
        for name, value, low, high in limits:
            if value is not None and not low <= value <= high:
                raise ValueError(f"{name} is {value}; it must be between {low} and {high}")
        if self.top_p == 0.0:
            raise ValueError("top_p is 0; it must be above 0")
        if len(self.stop_token_ids) > 64:
            raise ValueError(f"stop_token_ids has {len(self.stop_token_ids)} ids; at most 64 are allowed")
