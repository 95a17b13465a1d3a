"""The model as conversations see it: tokenizer, chat format, sampling defaults, and the bounds of the context."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import ParamSpec, TypeVar

import msgspec

from tokenspeed.client.protocol.commands import ReasoningRule, Sampling
from tokenspeed.client.protocol.errors import SessionError
from tokenspeed.client.protocol.items import FunctionTool, InputItem
from tokenspeed.config.sampling import SamplingParams
from tokenspeed.engine.messages import EngineInfo
from tokenspeed.sessions.bounds import check_instructions, check_labels, check_tools
from tokenspeed.sessions.defaults import Defaults
from tokenspeed.sessions.formats.arguments import ParameterTypes
from tokenspeed.sessions.formats.qwen import QwenFormat
from tokenspeed.sessions.formats.selftest import self_test
from tokenspeed.sessions.formats.template import ChatTemplate
from tokenspeed.sessions.sampling import checkpoint_sampling, resolve
from tokenspeed.sessions.tokenizer import ChatTokenizer
from tokenspeed.sessions.transcript import Transcript
from tokenspeed.sessions.turn import Prompt, Turn

P = ParamSpec("P")
T = TypeVar("T")

_LONG_TEXT = 16_384
"""Characters from which text is tokenised on a thread, so that the event loop is not held up by it."""


class ChatModel:
    """What a model directory and the engine's facts make of conversations. It knows no sessions.

    Attributes:
        name: what clients call the model.
        bare: the defaults of a session for which nothing is given.
    """

    def __init__(self, info: EngineInfo, directory: Path, name: str | None) -> None:
        """Raises: ValueError, if the tokenizer, the template or the sampling defaults cannot be used."""
        self.name = name or info.model
        self.tokenizer = ChatTokenizer(directory)
        if self.tokenizer.largest_id >= info.vocab_size:
            raise ValueError(
                f"the tokenizer has ids up to {self.tokenizer.largest_id}, the model only up to {info.vocab_size - 1}"
            )
        template = ChatTemplate.load(directory)
        self.format = QwenFormat(template, self.tokenizer)
        self_test(self.format, template)
        self.transcript = Transcript(self.format, self.tokenizer)
        self._info = info
        self._checkpoint_sampling = checkpoint_sampling(directory)
        preamble = self.transcript.preamble(None, [])
        self.bare = Defaults(None, [], Sampling(), "keep", {}, preamble, ParameterTypes([]))

    def sampling(self, *layers: Sampling | None) -> SamplingParams:
        """The first layer counts most, the checkpoint's defaults least. Raises: SessionError `bad_request`."""
        params = resolve([*layers, self._checkpoint_sampling], self._info.vocab_size)
        end = self.tokenizer.added[self.format.end_of_turn]
        if params.ignore_eos or end in self._info.eos_token_ids:
            return params
        # The format's own end of a turn ends it, whatever the checkpoint's list says.
        return msgspec.structs.replace(params, stop_token_ids=(*params.stop_token_ids, end))

    def stop_ids(self, sampling: SamplingParams) -> frozenset[int]:
        stops = frozenset(sampling.stop_token_ids)
        return stops if sampling.ignore_eos else stops | frozenset(self._info.eos_token_ids)

    async def changed(
        self,
        defaults: Defaults,
        instructions: str | None = None,
        tools: list[FunctionTool] | None = None,
        sampling: Sampling | None = None,
        reasoning: ReasoningRule | None = None,
        labels: dict[str, str] | None = None,
    ) -> Defaults:
        """`defaults` with what is given in place of theirs; `defaults` themselves if that is nothing new.

        Raises:
            SessionError: `bad_request`, `context_length_exceeded`.
        """
        if reasoning == "drop" and self.format.visible_opening is None:
            raise SessionError("bad_request", "this model's chat template keeps all reasoning; it cannot be dropped")
        check_instructions(instructions)
        size = check_tools(tools or [])
        check_labels(labels or {})
        self.sampling(sampling)
        text = defaults.instructions if instructions is None else instructions or None
        offered = defaults.tools if tools is None else tools
        preamble, types = defaults.preamble, defaults.types
        if (text, offered) != (defaults.instructions, defaults.tools):
            preamble = await _off_loop(len(text or "") + size, self.transcript.preamble, text, offered)
            self.check_length(len(preamble.ids))
            types = ParameterTypes(offered)
        new = Defaults(
            instructions=text,
            tools=offered,
            sampling=defaults.sampling if sampling is None else sampling,
            reasoning=reasoning or defaults.reasoning,
            labels=defaults.labels if labels is None else labels,
            preamble=preamble,
            types=types,
        )
        return defaults if new == defaults else new

    async def prompt(self, defaults: Defaults, head: Turn | None, items: list[InputItem], generate: bool) -> Prompt:
        """The prompt of the turn after `head`, however long. Raises: SessionError `bad_request`."""
        given = (defaults.preamble, defaults.reasoning, head, items, generate)
        return await _off_loop(sum(len(item.text) for item in items), self.transcript.prompt, *given)

    def check_length(self, length: int) -> None:
        """Raises: SessionError `context_length_exceeded`."""
        limit = self._info.max_context
        if length >= limit:
            raise SessionError(
                "context_length_exceeded",
                f"the maximum context length is {limit} tokens; the prompt has {length}, and one is needed to answer",
                detail={"limit": limit, "prompt": length},
            )


async def _off_loop(characters: int, work: Callable[P, T], *given: P.args, **named: P.kwargs) -> T:
    if characters < _LONG_TEXT:
        return work(*given, **named)
    return await asyncio.to_thread(work, *given, **named)
