"""How each place's next token is chosen, on the device."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from tokenspeed.execution.staging import Staging
from tokenspeed.kernels.registry import Operators
from tokenspeed.kernels.sampling import Chosen, SamplingOptions, Word, pack_scalars
from tokenspeed.scheduler.plan import Choice


class Choices:
    """Sampling options by place.

    Admissions put them on the device, and a step looks at them only there, so that one recorded step serves all. The
    host knows what results to read, and which rows a former turn has left something in.
    """

    def __init__(
        self, ops: Operators, places: int, vocabulary: int, positions: int | None, device: torch.device
    ) -> None:
        """
        Args:
            positions: length of a full context, where turns may force their output; None where they may not.
        """
        self._ops = ops
        self._staged = Staging(device).tensor
        self.options = SamplingOptions.empty(places, vocabulary, positions, device)
        self._reported: dict[int, int] = {}
        self._forcing: set[int] = set()

    def admit(self, place: int, choice: Choice) -> None:
        """A new turn takes a place."""
        adjusted = choice.penalties is not None or bool(choice.bias)
        repetition, presence, frequency = choice.penalties or (1.0, 0.0, 0.0)
        scalars = pack_scalars(
            temperature=choice.temperature,
            top_p=choice.top_p,
            min_p=choice.min_p,
            repetition=repetition,
            presence=presence,
            frequency=frequency,
            top_k=choice.top_k,
            reported=-1 if choice.logprobs is None else choice.logprobs,
            adjusted=adjusted,
            seed=choice.seed,
        )
        self.options.scalars[place] = self._staged(scalars)
        self._reported.pop(place, None)
        if choice.logprobs is not None:
            self._reported[place] = choice.logprobs
        if adjusted:
            self._adjust(place, choice)
        if self.options.forced is not None:
            self._force(self.options.forced[place], place, choice)

    def allow(self, place: int, mask: bytes) -> None:
        """From the next step on the turn in a place may only choose ids of a mask (of `Allow`); empty: all ids."""
        if mask:
            self.options.allowed[place] = self._ids(mask)
        self.options.scalars.view(torch.int32)[place, Word.MASKED].fill_(bool(mask))

    def _adjust(self, place: int, choice: Choice) -> None:
        in_prompt, counts, bias = (
            array[place].zero_() for array in (self.options.in_prompt, self.options.counts, self.options.bias)
        )
        in_prompt.index_fill_(0, self._ids(choice.prompt).long(), True)
        output = self._ids(choice.output).long()
        counts.index_add_(0, output, torch.ones_like(output, dtype=counts.dtype))
        if choice.bias:
            values = dict(choice.bias)
            ids = self._staged(list(values))
            bias.index_copy_(0, ids, self._staged(list(values.values())))

    def _force(self, row: Tensor, place: int, choice: Choice) -> None:
        if place in self._forcing:
            row.fill_(-1)
            self._forcing.discard(place)
        if choice.forced:
            self._forcing.add(place)
            ids = self._ids(choice.forced)
            end = min(choice.forced_from + len(ids), len(row))
            row[choice.forced_from : end] = ids[: end - choice.forced_from]

    def choose(self, logits: Tensor, places: Tensor, positions: Tensor, live: Tensor) -> Chosen:
        """Choose from `logits` [n, vocabulary] the tokens that sequences in `places` [n] will have at `positions` [n].
        Those not `live` [n] choose nothing and leave no trace."""
        return self._ops.choose(logits, self.options, places, positions, live)

    def reported(self, place: int) -> int | None:
        """How many of the most likely ids the turn in `place` wants beside the chosen one's log-probability."""
        return self._reported.get(place)

    def _ids(self, data: bytes) -> Tensor:
        return self._staged(np.frombuffer(data, "<i4").copy())
