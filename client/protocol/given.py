"""Items as a client gives them: read strictly, so that nothing it says is passed over without a word.

What the server says is read leniently, for a newer one may say more. But what a client puts into a field that items do
not have would never reach the model, so it is refused, and the field named.
"""

from __future__ import annotations

import operator
from functools import reduce
from typing import Any, get_args

from tokenspeed.client.protocol.commands import Command, TurnCreate
from tokenspeed.client.protocol.items import (
    FunctionCallOutputItem,
    InputTextPart,
    MessageItem,
    OutputTextPart,
    TextPart,
)


class GivenTextPart(TextPart, forbid_unknown_fields=True):
    """Text of a message or of a tool's result."""


class GivenInputTextPart(InputTextPart, forbid_unknown_fields=True):
    """The same, by the name that the Responses API has for what people say."""


class GivenOutputTextPart(OutputTextPart, forbid_unknown_fields=True):
    """The same, by the name that the Responses API has for what the model says."""


GivenPart = GivenTextPart | GivenInputTextPart | GivenOutputTextPart


class GivenMessage(MessageItem, forbid_unknown_fields=True):
    """A message. Its parts are joined with nothing between them."""

    content: str | list[GivenPart]  # type: ignore[assignment]  # the parts, too, are strict


class GivenResult(FunctionCallOutputItem, forbid_unknown_fields=True):
    """The result of a call of the turn before."""

    output: str | list[GivenPart]  # type: ignore[assignment]


GivenItem = GivenMessage | GivenResult


class GivenTurn(TurnCreate):
    input: str | list[GivenItem] = []  # type: ignore[assignment]  # noqa: RUF012


GivenTurn.__doc__ = TurnCreate.__doc__

GIVEN_COMMAND: Any = reduce(
    operator.or_, (GivenTurn if command is TurnCreate else command for command in get_args(Command))
)
"""The type of a client's command, for decoders."""
