"""What the SDK raises beside `SessionError`."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tokenspeed.client.turns import Turn


class ConnectionFailed(ConnectionError):
    """The server could not be reached, or the connection to it was lost.

    Sessions live on in the server: return to one with `client.session(id=…)`; the next call connects again.

    Attributes:
        url: the websocket's URL.
    """

    def __init__(self, url: str, reason: str) -> None:
        super().__init__(f"{url}: {reason}")
        self.url = url


class ProtocolError(Exception):
    """The server sent something that the protocol does not allow, such as a turn's events with one missing."""


class StepLimitExceeded(Exception):
    """The model still called tools after `max_steps` turns of one `Session.turn`.

    Attributes:
        turn: the last turn; its calls are not answered, and the session stands at its end.
    """

    def __init__(self, max_steps: int, turn: Turn) -> None:
        names = ", ".join(call.name for call in turn.tool_calls)
        super().__init__(f"the model still calls tools ({names}) after max_steps={max_steps} turns")
        self.turn = turn
