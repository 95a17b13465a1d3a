"""How each place's next token is chosen, on the device."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from tokenspeed.kernels.registry import Operators
from tokenspeed.scheduler.plan import Choice


@dataclass(frozen=True)
class Drawn:
    """Chosen tokens [n]; where asked for, their log-probabilities [n] and the most likely ids and theirs [n, top]."""

    tokens: Tensor
    logprobs: tuple[Tensor, Tensor, Tensor] | None


class Choices:
    """Sampling options by place.

    Penalties and biases look at [places, vocabulary] arrays: the ids of the prompt, the counts in the output, and what
    is added. A step that has no place with any of them leaves them alone.
    """

    def __init__(
        self, ops: Operators, places: int, vocabulary: int, positions: int | None, device: torch.device
    ) -> None:
        """
        Args:
            positions: length of a full context, where turns may force their output; None where they may not.
        """
        self._ops = ops
        self._device = device
        self._temperature, self._top_p, self._min_p, self._repetition, self._presence, self._frequency = (
            torch.zeros(places, dtype=torch.float32, device=device) for _ in range(6)
        )
        self._top_k, self._seed = (torch.zeros(places, dtype=torch.int64, device=device) for _ in range(2))
        self._in_prompt = torch.zeros((places, vocabulary), dtype=torch.bool, device=device)
        self._counts = torch.zeros((places, vocabulary), dtype=torch.int32, device=device)
        self._bias = torch.zeros((places, vocabulary), dtype=torch.float32, device=device)
        shape = (places, positions + 1) if positions is not None else None
        self._forced = torch.full(shape, -1, dtype=torch.int32, device=device) if shape is not None else None
        # On the host: what a step with these places needs.
        self._adjusted: set[int] = set()
        self._reported: dict[int, int] = {}

    def admit(self, place: int, choice: Choice) -> None:
        """A new turn takes a place."""
        self._temperature[place] = choice.temperature
        self._top_k[place] = choice.top_k
        self._top_p[place] = choice.top_p
        self._min_p[place] = choice.min_p
        self._seed[place] = choice.seed - 2**64 if choice.seed >= 2**63 else choice.seed
        self._reported.pop(place, None)
        if choice.logprobs is not None:
            self._reported[place] = choice.logprobs
        self._adjusted.discard(place)
        if choice.penalties is not None or choice.bias:
            self._adjusted.add(place)
            self._adjust(place, choice)
        if self._forced is not None:
            row, ids = self._forced[place], self._ids(choice.forced)
            row.fill_(-1)
            end = min(choice.forced_from + len(ids), len(row))
            row[choice.forced_from : end] = ids[: end - choice.forced_from]

    def _adjust(self, place: int, choice: Choice) -> None:
        repetition, presence, frequency = choice.penalties or (1.0, 0.0, 0.0)
        self._repetition[place], self._presence[place], self._frequency[place] = repetition, presence, frequency
        self._in_prompt[place] = False
        self._in_prompt[place, self._ids(choice.prompt).long()] = True
        output = self._ids(choice.output).long()
        self._counts[place] = torch.bincount(output, minlength=self._counts.shape[1]).int()
        self._bias[place] = 0
        if choice.bias:
            ids, values = zip(*choice.bias, strict=True)
            self._bias[place, torch.tensor(ids, device=self._device)] = torch.tensor(values, device=self._device)

    def draw(self, logits: Tensor, at: list[int], places: Tensor, positions: Tensor, live: Tensor) -> Drawn:
        """Choose from `logits` [n, vocabulary] the tokens that sequences in `places` [n], the same as `at` on the host,
        will have at `positions` [n]. Those not `live` [n] choose anything and leave no trace."""
        adjusted = logits
        if not self._adjusted.isdisjoint(at):
            adjusted = self._ops.adjust_logits(
                logits,
                self._in_prompt[places],
                self._counts[places],
                self._neutral(self._repetition, at, places, 1.0),
                self._neutral(self._presence, at, places, 0.0),
                self._neutral(self._frequency, at, places, 0.0),
                self._neutral(self._bias, at, places, 0.0),
            )
        tokens = self._ops.sample(
            adjusted,
            self._temperature[places],
            self._top_k[places],
            self._top_p[places],
            self._min_p[places],
            self._seed[places],
            positions,
        )
        if self._forced is not None:
            forced = self._forced[places, positions].long()
            tokens = torch.where((forced >= 0) & (tokens >= 0), forced, tokens)
        if not self._adjusted.isdisjoint(at):
            counted = (live & (tokens >= 0)).int()
            self._counts.index_put_((places, tokens.clamp(min=0)), counted, accumulate=True)
        top = [self._reported[place] for place in at if place in self._reported]
        return Drawn(tokens, self._ops.token_logprobs(logits, tokens, max(top)) if top else None)

    def reported(self, place: int) -> int | None:
        """How many of the most likely ids the turn in `place` wants beside the chosen one's log-probability."""
        return self._reported.get(place)

    def _neutral(self, values: Tensor, at: list[int], places: Tensor, off: float) -> Tensor:
        """`values` of the places, `off` for those without penalties and bias, whose arrays are stale."""
        on = torch.tensor([place in self._adjusted for place in at], device=self._device)
        return torch.where(on.view(-1, *[1] * (values.dim() - 1)), values[places], off)

    def _ids(self, data: bytes) -> Tensor:
        return torch.as_tensor(np.frombuffer(data, "<i4").copy(), device=self._device)
