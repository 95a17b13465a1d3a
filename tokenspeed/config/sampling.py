"""Sampling parameters of one turn."""

from __future__ import annotations

import msgspec

MAX_STOP_IDS = 64
MAX_STOPS = 16
MAX_STOP_CHARACTERS = 1024
MAX_BIASES = 1024
MAX_TOP_LOGPROBS = 20


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How a turn's tokens are chosen and when it ends.

    Attributes:
        temperature: 0 is greedy.
        top_k: only the k most likely tokens; 0 is off.
        top_p: the smallest set of most likely tokens with at least this probability; 1 is off.
        min_p: only tokens at least this share of the most likely one's probability; 0 is off.
        seed: with the position and the token id it determines the noise; None draws one.
        max_tokens: bound on the output; None is up to the end of the context.
        repetition_penalty: logits of ids seen in prompt or output are divided (positive) or multiplied by it; 1 is off.
        presence_penalty, frequency_penalty: subtracted once, or once per occurrence, from logits of ids in the output.
        logit_bias: (id, added to its logit) pairs.
        stop: strings that end the turn; its ids end with the one that completes the first of them.
        stop_token_ids: ids that end the turn (kept as its last token), beside the checkpoint's end-of-turn ids.
        ignore_eos: do not end at the checkpoint's end-of-turn ids.
        logprobs: report the log-probability of each sampled token under the unmodified distribution.
        top_logprobs: and those of so many most likely ids; needs `logprobs`.
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
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    stop: tuple[str, ...] = ()
    logprobs: bool = False
    top_logprobs: int = 0
    forced_token_ids: tuple[int, ...] = ()

    def check(self) -> None:
        """Raise ValueError on a value out of range (NaN included)."""
        limits = [
            ("temperature", self.temperature, 0.0, 100.0),
            ("top_k", self.top_k, 0, 2**31 - 1),
            ("top_p", self.top_p, 0.0, 1.0),
            ("min_p", self.min_p, 0.0, 1.0),
            ("seed", self.seed, 0, 2**64 - 1),
            ("repetition_penalty", self.repetition_penalty, 0.01, 100.0),
            ("presence_penalty", self.presence_penalty, -100.0, 100.0),
            ("frequency_penalty", self.frequency_penalty, -100.0, 100.0),
            ("top_logprobs", self.top_logprobs, 0, MAX_TOP_LOGPROBS),
            ("max_tokens", self.max_tokens, 1, 2**31 - 1),
        ]
        for name, value, low, high in limits:
            if value is not None and not low <= value <= high:
                raise ValueError(f"{name} is {value}; it must be between {low} and {high}")
        if self.top_p == 0.0:
            raise ValueError("top_p is 0; it must be above 0")
        sizes = [
            ("stop_token_ids", len(self.stop_token_ids), MAX_STOP_IDS),
            ("stop", len(self.stop), MAX_STOPS),
            ("logit_bias", len(self.logit_bias), MAX_BIASES),
        ]
        for name, size, most in sizes:
            if size > most:
                raise ValueError(f"{name} has {size} entries; at most {most} are allowed")
        for text in self.stop:
            if not 1 <= len(text) <= MAX_STOP_CHARACTERS:
                raise ValueError(f"a stop string has {len(text)} characters; 1 to {MAX_STOP_CHARACTERS} are allowed")
        for token, bias in self.logit_bias:
            if not -100.0 <= bias <= 100.0:
                raise ValueError(f"logit_bias of id {token} is {bias}; it must be between -100.0 and 100.0")
        if self.top_logprobs and not self.logprobs:
            raise ValueError(f"top_logprobs is {self.top_logprobs}, but logprobs is off")
