"""How events travel from a real engine: one frame for each decode step, however many turns take it."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from websockets.sync.client import connect

TURNS = 4
TOKENS = 40


@pytest.mark.parametrize("encoding", ["json", "msgpack"])
def test_all_deltas_of_a_step_share_a_frame(live: Any, encoding: str) -> None:
    """Four turns side by side write a word a token; the frames with deltas are as many as the steps, not as the
    tokens. A few more are allowed for turns that were admitted a step later than the first."""
    library: Any = getattr(msgspec, encoding)
    with connect(live.websocket_url, subprotocols=[f"tokenspeed.v1.{encoding}"]) as socket:  # type: ignore[list-item]

        def send(commands: list[dict[str, Any]]) -> None:
            data = library.encode(commands)
            socket.send(data.decode() if encoding == "json" else data)

        def frame() -> list[dict[str, Any]]:
            decoded = library.decode(socket.recv(timeout=20))
            return decoded if isinstance(decoded, list) else [decoded]

        send([{"type": "session.open", "id": f"o{number}"} for number in range(TURNS)])
        sessions: list[str] = []
        while len(sessions) < TURNS:
            sessions += [reply["session"]["id"] for reply in frame()]
        sampling = {"temperature": 2.0, "max_tokens": TOKENS, "ignore_eos": True, "seed": 1, "stop_token_ids": []}
        send(
            [
                {"type": "turn.create", "id": session, "session": session, "input": "Hello!", "sampling": sampling}
                for session in sessions
            ]
        )
        ended = deltas = frames = 0
        while ended < TURNS:
            events = frame()
            written = sum(event["type"] == "turn.delta" for event in events)
            deltas += written
            frames += written > 0
            ended += sum(event["type"] == "turn.ended" for event in events)
    assert deltas > 2 * TOKENS
    assert frames <= TOKENS + 2 * TURNS
