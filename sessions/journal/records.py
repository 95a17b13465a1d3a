"""Rows of the journal: MessagePack objects with named fields, so that a field can be added.

Token ids are little-endian int32. What clients give as free JSON stays JSON text: MessagePack has no large integers.
"""

from __future__ import annotations

import json
import sys
from array import array
from typing import Any, Literal

import msgspec

from tokenspeed.client.protocol.commands import ReasoningRule, Sampling
from tokenspeed.client.protocol.events import Timings, TurnReason, TurnStatus, Usage
from tokenspeed.client.protocol.items import FunctionTool, InputItem, Item
from tokenspeed.sessions.defaults import Defaults
from tokenspeed.sessions.formats.arguments import ParameterTypes
from tokenspeed.sessions.formats.qwen import Cut
from tokenspeed.sessions.journal.store import Put
from tokenspeed.sessions.preamble import Preamble
from tokenspeed.sessions.session import Session, Totals
from tokenspeed.sessions.tokenizer import Ids
from tokenspeed.sessions.turn import Prompt, Turn

Kind = Literal["tokens", "preamble", "defaults", "turn", "session"]


class TokensRecord(msgspec.Struct):
    """What the journal's token ids mean. `fingerprint`: of tokenizer and chat template; `model`: whose they were."""

    fingerprint: str
    model: str


class PreambleRecord(msgspec.Struct):
    """`tools`: JSON, as the chat template reads them."""

    system: str | None
    tools: str
    ids: bytes
    brought: str | None


class DefaultsRecord(msgspec.Struct):
    """`tools`: JSON. `preamble`: the row's id."""

    instructions: str | None
    tools: str
    sampling: Sampling
    reasoning: ReasoningRule
    labels: dict[str, str]
    preamble: str


class PromptRecord(msgspec.Struct):
    """`base`: a turn's id. `preamble`: the row's id."""

    base: str | None
    keep: int
    fresh: bytes
    input_ids: bytes
    preamble: str
    input_end: int
    marks: list[int]


class TurnRow(msgspec.Struct):
    """`parent`: a turn's id. `defaults`: the row's id."""

    tenant: str
    parent: str | None
    prompt: PromptRecord
    input: list[InputItem]
    output: list[Item]
    output_ids: bytes
    hidden: list[tuple[int, int]]
    cut: Cut | None
    status: TurnStatus
    reason: TurnReason
    usage: Usage
    timings: Timings
    defaults: str
    stop_string: str | None


class TotalsRecord(msgspec.Struct):
    turns: int
    prompt: int
    reused: int
    computed: int
    output: int
    reasoning: int


class SessionRow(msgspec.Struct):
    """`head`: the turn it stands on; `latest`: the turn that it began last. `defaults`: the row's id."""

    tenant: str
    defaults: str
    head: str | None
    latest: str | None
    totals: TotalsRecord


def put_tokens(record: TokensRecord) -> Put:
    """The one row of its kind."""
    return Put("tokens", "tokens", encoded(record))


def preamble_record(preamble: Preamble) -> PreambleRecord:
    return PreambleRecord(preamble.system, json.dumps(preamble.tools), packed(preamble.ids), preamble.brought)


def preamble_of(record: PreambleRecord) -> Preamble:
    return Preamble(record.system, json.loads(record.tools), unpacked(record.ids), record.brought)


def defaults_record(defaults: Defaults, preamble: str) -> DefaultsRecord:
    tools = json.dumps([msgspec.to_builtins(tool) for tool in defaults.tools])
    return DefaultsRecord(
        defaults.instructions, tools, defaults.sampling, defaults.reasoning, defaults.labels, preamble
    )


def defaults_of(record: DefaultsRecord, preamble: Preamble) -> Defaults:
    tools = msgspec.convert(json.loads(record.tools), list[FunctionTool])
    types = ParameterTypes(tools)
    return Defaults(record.instructions, tools, record.sampling, record.reasoning, record.labels, preamble, types)


def turn_row(tenant: str, turn: Turn, preamble: str, defaults: str) -> TurnRow:
    """`preamble`, `defaults`: ids of the rows."""
    prompt = turn.prompt
    return TurnRow(
        tenant=tenant,
        parent=turn.parent.id if turn.parent else None,
        prompt=PromptRecord(
            base=prompt.base.id if prompt.base else None,
            keep=prompt.keep,
            fresh=packed(prompt.fresh),
            input_ids=packed(prompt.input_ids),
            preamble=preamble,
            input_end=prompt.input_end,
            marks=list(prompt.marks),
        ),
        input=turn.input,
        output=turn.output,
        output_ids=packed(turn.output_ids),
        hidden=list(turn.hidden),
        cut=turn.cut,
        status=turn.status,
        reason=turn.reason,
        usage=turn.usage,
        timings=turn.timings,
        defaults=defaults,
        stop_string=turn.stop_string,
    )


def turn_of(
    turn_id: str, row: TurnRow, parent: Turn | None, base: Turn | None, preamble: Preamble, defaults: Defaults
) -> Turn:
    """Raises: ValueError, if its lengths do not fit together."""
    prompt = Prompt(
        base=base,
        keep=row.prompt.keep,
        fresh=unpacked(row.prompt.fresh),
        input_ids=unpacked(row.prompt.input_ids),
        preamble=preamble,
        input_end=row.prompt.input_end,
        marks=tuple(row.prompt.marks),
    )
    if not (0 <= prompt.keep <= (base.length if base else 0) and 0 <= prompt.input_end <= prompt.length):
        raise ValueError(f"it keeps {prompt.keep} ids and its input ends at {prompt.input_end} of {prompt.length}")
    return Turn(
        id=turn_id,
        parent=parent,
        prompt=prompt,
        input=row.input,
        output=row.output,
        output_ids=unpacked(row.output_ids),
        hidden=tuple(row.hidden),
        cut=row.cut,
        status=row.status,
        reason=row.reason,
        usage=row.usage,
        timings=row.timings,
        defaults=defaults,
        stop_string=row.stop_string,
    )


def session_row(session: Session, defaults: str) -> SessionRow:
    """`defaults`: the row's id."""
    totals = session.totals
    return SessionRow(
        tenant=session.tenant,
        defaults=defaults,
        head=session.head.id if session.head else None,
        latest=session.latest,
        totals=TotalsRecord(
            totals.turns, totals.prompt, totals.reused, totals.computed, totals.output, totals.reasoning
        ),
    )


def session_of(session_id: str, row: SessionRow, head: Turn | None, defaults: Defaults) -> Session:
    totals = Totals()
    for name in TotalsRecord.__struct_fields__:
        setattr(totals, name, getattr(row.totals, name))
    return Session(session_id, row.tenant, defaults, head=head, latest=row.latest, totals=totals)


def encoded(record: msgspec.Struct) -> bytes:
    return msgspec.msgpack.encode(record)


def packed(ids: Ids) -> bytes:
    return _little_endian(ids).tobytes()


def unpacked(data: bytes) -> Ids:
    """Raises: ValueError, if there is a piece of an id."""
    ids: Ids = array("i")
    ids.frombytes(data)
    return _little_endian(ids)


def _little_endian(ids: Ids) -> Ids:
    """Between the machine's order and the journal's."""
    if sys.byteorder == "little":
        return ids
    swapped: Any = array("i", ids)
    swapped.byteswap()
    return swapped  # type: ignore[no-any-return]
