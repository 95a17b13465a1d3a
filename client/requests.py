"""From Python arguments to commands: what both fronts share."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypedDict

import msgspec

from tokenspeed.client.errors import ProtocolError
from tokenspeed.client.loop import DEFAULT_MAX_STEPS
from tokenspeed.client.protocol.commands import (
    ReasoningRule,
    Sampling,
    SessionOpen,
    SessionRegenerate,
    SessionUpdate,
    TurnCreate,
)
from tokenspeed.client.protocol.events import Reply, SessionRecord
from tokenspeed.client.protocol.given import GivenItem
from tokenspeed.client.protocol.items import FunctionCallOutputItem, FunctionTool, InputItem, MessageItem
from tokenspeed.client.tools import Tool, Toolset
from tokenspeed.client.turns import Turn

TurnInput = str | MessageItem | FunctionCallOutputItem | Mapping[str, Any] | Sequence[Any]
"""Text of the user, or one item, or several: structs of `tokenspeed.client` or dicts of the Responses API's form."""


Begin = TurnCreate | SessionRegenerate
"""A command that begins a turn."""


class SamplingOptions(TypedDict, total=False):
    """Options of `Sampling`, as keywords. `stop` may be one string, and the keys of `logit_bias` may be ints."""

    temperature: float | None
    top_k: int | None
    top_p: float | None
    min_p: float | None
    seed: int | None
    max_tokens: int | None
    stop_token_ids: list[int] | None
    ignore_eos: bool | None
    stop: str | list[str] | None
    repetition_penalty: float | None
    presence_penalty: float | None
    frequency_penalty: float | None
    logit_bias: Mapping[int, float] | Mapping[str, float] | None
    logprobs: bool | None
    top_logprobs: int | None
    forced_token_ids: list[int] | None


def sampling_of(sampling: Sampling | Mapping[str, Any] | None, options: Mapping[str, Any]) -> Sampling | None:
    """`sampling` with `options` over it; None if nothing is set. Raises TypeError on an unknown name or type."""
    if sampling is None and not options:
        return None
    base: dict[str, Any] = msgspec.to_builtins(sampling) if isinstance(sampling, Sampling) else dict(sampling or {})
    values = {**base, **options}
    unknown = sorted(values.keys() - set(Sampling.__struct_fields__))
    if unknown:
        raise TypeError(f"unknown option {unknown[0]!r}; there are: {', '.join(Sampling.__struct_fields__)}")
    if isinstance(values.get("stop"), str):
        values["stop"] = [values["stop"]]
    if isinstance(values.get("logit_bias"), Mapping):
        values["logit_bias"] = {_key(key): bias for key, bias in values["logit_bias"].items()}
    try:
        return msgspec.convert(values, Sampling)
    except msgspec.ValidationError as error:
        raise TypeError(f"sampling: {error}") from None


def _key(token_id: object) -> object:
    return str(token_id) if isinstance(token_id, int) and not isinstance(token_id, bool) else token_id


def input_of(value: TurnInput) -> str | list[InputItem]:
    """A turn's input in the wire's form. Raises TypeError on anything that is no text and no item."""
    if isinstance(value, str):
        return value
    if isinstance(value, MessageItem | FunctionCallOutputItem | Mapping):
        return [_item(value)]
    return [_item(item) for item in value]


def _item(value: object) -> InputItem:
    if isinstance(value, MessageItem | FunctionCallOutputItem):
        return value
    if isinstance(value, str):
        return MessageItem("user", value)
    if not isinstance(value, Mapping):
        raise TypeError(f"an input item is a dict or an item, not {type(value).__name__}")
    # A message may be given as Chat Completions has it, without its type.
    typed = value if "type" in value or "role" not in value else {"type": "message", **value}
    try:
        msgspec.convert(typed, GivenItem)  # raises for a field that items do not have, too
        return msgspec.convert(typed, InputItem)  # type: ignore[no-any-return]
    except msgspec.ValidationError as error:
        raise TypeError(f"an input item: {error}") from None


def session_open(
    tools: Toolset | None,
    instructions: str | None,
    model: str | None,
    reasoning: ReasoningRule | None,
    labels: Mapping[str, str] | None,
    sampling: Sampling | None,
    from_: Turn | str | None,
) -> SessionOpen:
    return SessionOpen(
        "", model, instructions, _offered(tools), sampling, reasoning, _as_dict(labels), from_=turn_id(from_)
    )


def session_update(
    session: str,
    instructions: str | None,
    tools: Toolset | None,
    sampling: Sampling | None,
    reasoning: ReasoningRule | None,
    labels: Mapping[str, str] | None,
) -> SessionUpdate:
    return SessionUpdate("", session, instructions, _offered(tools), sampling, reasoning, _as_dict(labels))


def opened_tools(record: SessionRecord, tools: Toolset | None) -> Toolset:
    """The tools of a session that has just been opened: those given, else what it took over."""
    return tools if tools is not None else Toolset(record.tools)


def check_attach(**defaults: object) -> None:
    """Raise TypeError if any default was given although the session exists already."""
    given = [name for name, value in defaults.items() if value is not None]
    if given:
        raise TypeError(f"{given[0]} cannot be given with id: the session has its own")


def attached_tools(record: SessionRecord, tools: Iterable[Tool]) -> Toolset:
    """The tools of a session that exists, with functions for those of the same name.

    Raises:
        ValueError: a tool that the session does not have.
    """
    attached = Toolset(record.tools)
    functions = Toolset(tools)
    names = [tool.name for tool in attached.offered]
    for tool in functions.offered:
        if tool.name not in names:
            raise ValueError(f"the session has no tool {tool.name!r}; it has: {', '.join(names) or 'none'}")
    attached.functions = functions.functions
    return attached


def record_in(reply: Reply) -> SessionRecord:
    """The session that a reply describes."""
    if reply.session is not None:
        return reply.session
    if not reply.sessions:
        raise ProtocolError(f"the reply {reply.id} names no session")
    return reply.sessions[0]


class StepOptions(SamplingOptions, total=False):
    """Options of taking turns, beside those of sampling.

    `max_steps`: how many turns may be taken for one input. `token_ids`: ask for the exact ids of prompt and output.
    `sampling`: options as a bundle; single ones win over it.
    """

    max_steps: int
    token_ids: bool
    sampling: Sampling | Mapping[str, Any] | None


class TurnOptions(StepOptions, total=False):
    """Options of a turn.

    `tools`, `instructions`: replace the session's from here on; empty ones remove them. `generate`: False only computes
    the input. `expect_head`: a turn, or `start`; refuse if the session stands elsewhere.
    """

    tools: Iterable[Tool] | None
    instructions: str | None
    generate: bool
    expect_head: Turn | str | None


@dataclass(frozen=True, slots=True)
class TurnRequest:
    """A turn to take. `tools`: what runs its calls from here on; None for the session's own."""

    command: Begin
    max_steps: int
    tools: Toolset | None = None


def turn_request(
    session: str | None,
    value: TurnInput,
    options: TurnOptions,
    parent: Turn | str | None = None,
    n: int = 1,
) -> TurnRequest:
    """Raises TypeError on what is no input or no option."""
    rest: dict[str, Any] = dict(options)
    tools = rest.pop("tools", None)
    toolset = Toolset(tools) if tools is not None else None
    instructions, generate = rest.pop("instructions", None), rest.pop("generate", True)
    expect_head = turn_id(rest.pop("expect_head", None))
    max_steps, token_ids, sampling = _step(rest)
    command = TurnCreate(
        "",
        session,
        input_of(value),
        sampling,
        token_ids,
        turn_id(parent),
        _offered(toolset),
        instructions,
        generate,
        n,
        expect_head,
    )
    return TurnRequest(command, max_steps, toolset)


def regenerate_request(session: str, of: Turn | str | None, options: StepOptions) -> TurnRequest:
    """Raises TypeError on what is no option."""
    max_steps, token_ids, sampling = _step(dict(options))
    return TurnRequest(SessionRegenerate("", session, turn_id(of), sampling, token_ids), max_steps)


def _step(options: dict[str, Any]) -> tuple[int, bool, Sampling | None]:
    max_steps, token_ids = options.pop("max_steps", DEFAULT_MAX_STEPS), options.pop("token_ids", False)
    return max_steps, token_ids, sampling_of(options.pop("sampling", None), options)


def with_held(command: TurnCreate, held: Sequence[FunctionCallOutputItem]) -> TurnCreate:
    """`command` with the answers to calls of the turn before that belong into the same input; those that the caller
    gives too are the caller's."""
    if not held or isinstance(command.input, str):
        return command
    given = {item.call_id for item in command.input if isinstance(item, FunctionCallOutputItem)}
    if not given:
        return command
    items = [*(output for output in held if output.call_id not in given), *command.input]
    return msgspec.structs.replace(command, input=items)


def next_step(command: Begin, session: str, answers: list[FunctionCallOutputItem]) -> TurnCreate:
    """The turn that tells the model what its calls came to, with the options of the one that called."""
    return TurnCreate("", session, list(answers), command.sampling, command.token_ids)


def branch_records(reply: Reply) -> list[SessionRecord]:
    """The sessions that a turn after another one has opened."""
    return reply.sessions if reply.sessions is not None else [record_in(reply)]


def _offered(tools: Toolset | None) -> list[FunctionTool] | None:
    return tools.offered if tools is not None else None


def _as_dict(labels: Mapping[str, str] | None) -> dict[str, str] | None:
    return dict(labels) if labels is not None else None


def turn_id(turn: Turn | str | None) -> str | None:
    """The id of a turn that was given as such or by id."""
    return turn.id if isinstance(turn, Turn) else turn
