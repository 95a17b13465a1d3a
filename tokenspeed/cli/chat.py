"""`tokenspeed chat`: a conversation in the terminal."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from rich.console import Console

from tokenspeed.cli.errors import CommandError, one_line
from tokenspeed.cli.loading import LoadingBar
from tokenspeed.cli.text import StreamPrinter, cost_line, printable
from tokenspeed.client import Client, ConnectionFailed, Session, SessionError, Turn
from tokenspeed.client.requests import SamplingOptions

HELP = """/fork          go on in a copy of this session; the old one stays as it is
/rewind [TURN] go back to the end of a turn (its number in /turns, or start); one turn if none is named
/turns         the turns so far
/usage         tokens of this session so far
/help          this
/quit          leave"""


def run(
    model: str | None,
    *,
    url: str | None,
    api_key: str | None,
    session: str | None,
    instructions: str | None,
    temperature: float | None,
    max_tokens: int | None,
    **settings: Any,
) -> None:
    """Talk until `/quit`, the end of input, or Ctrl-C at the prompt.

    Raises:
        CommandError: no server, no model, a wrong key, or no such session; or, where nobody sits at a terminal, a line
            that the server refused or failed at. The lines after it were said all the same.
    """
    console = Console(highlight=False)
    sampling: SamplingOptions = {}
    if temperature is not None:
        sampling["temperature"] = temperature
    if max_tokens is not None:
        sampling["max_tokens"] = max_tokens
    with _server(model, url, settings) as base_url:
        try:
            with Client(base_url, api_key) as client:
                if session is not None:
                    talk = Chat(console, client.session(id=session), sampling)
                else:
                    talk = Chat(console, client.session(instructions=instructions), sampling)
                console.print(
                    f"{talk.session.id} at {base_url}; /help lists the commands", markup=False, soft_wrap=True
                )
                talk.run()
                if talk.errors and not sys.stdin.isatty():
                    raise CommandError(f"{talk.errors} of the lines could not be answered")
        except (ConnectionFailed, SessionError, ValueError) as error:
            raise CommandError(str(error)) from None


@contextmanager
def _server(model: str | None, url: str | None, settings: dict[str, Any]) -> Iterator[str]:
    """The URL of the server that runs, or of one that runs as long as this lasts."""
    if url is not None:
        yield url
        return
    from tokenspeed.cli.running import BackgroundServer, engine_config

    config = engine_config(model, **settings)
    with LoadingBar(model or "tokenspeed-pocket") as bar, BackgroundServer(config, bar) as server:
        bar.__exit__(None, None, None)
        yield server.started.url


class Chat:
    """A conversation between a person and a session. `errors` counts what was refused or failed."""

    def __init__(self, console: Console, session: Session, sampling: SamplingOptions) -> None:
        self.session = session
        self.errors = 0
        self._console = console
        self._sampling = sampling

    def run(self) -> None:
        """Until the person leaves. Raises ConnectionFailed if the server goes first."""
        while True:
            try:
                line = self._read()
            except (EOFError, KeyboardInterrupt):
                self._say("")
                return
            if line == "/quit":
                return
            with self._told_errors():
                if line.startswith("/"):
                    self._command(line)
                elif line:
                    self._turn(line)

    def _read(self) -> str:
        if sys.stdin.isatty() and sys.stdout.isatty():
            with suppress(ImportError):
                import readline  # noqa: F401  (gives input() its line editing)
            return input("> ").strip()
        line = sys.stdin.readline().encode(errors="replace").decode()
        if not line:
            raise EOFError
        self._say(f"> {line.strip()}")
        return line.strip()

    def _turn(self, text: str) -> None:
        printer = StreamPrinter(self._console)
        with self.session.turn(text, stream=True, **self._sampling) as stream:
            try:
                for delta in stream:
                    printer.show(delta)
            except KeyboardInterrupt:
                stream.close()
        printer.end()
        turn = stream.result()
        if turn.status != "completed":
            self._say(f"({turn.status}: {turn.reason})", "yellow")
        self._say(cost_line(turn), "dim")

    def _command(self, line: str) -> None:
        name, _, argument = line.partition(" ")
        match name:
            case "/help":
                self._say(HELP)
            case "/fork":
                left, self.session = self.session.id, self.session.fork()
                self._say(f"now on {self.session.id}, a fork of {left}")
            case "/rewind":
                self._rewind(argument.strip())
            case "/turns":
                turns = self.session.turns()
                for number, turn in enumerate(turns, 1):
                    self._say(_listed(number, turn))
                if not turns:
                    self._say("no turns yet")
            case "/usage":
                totals = self.session.usage()
                self._say(
                    f"{totals.turns} turns · prompt {totals.prompt} · reused {totals.reused.total} "
                    f"({totals.hit_rate:.1%}) · computed {totals.computed} · output {totals.output}"
                )
            case _:
                self._say(f"there is no command {printable(name)}; /help lists them", "yellow")

    def _rewind(self, to: str) -> None:
        turns = self.session.turns()
        if not to:
            to = str(len(turns) - 1)
        if to in ("0", "start"):
            self.session.rewind("start")
            self._say("at the start")
        elif to.isascii() and to.isdigit() and int(to) <= len(turns):
            self.session.rewind(turns[int(to) - 1])
            self._say(f"at the end of turn {to}")
        else:
            self._say(f"there is no turn {printable(to)}; there are {len(turns)}", "yellow")

    @contextmanager
    def _told_errors(self) -> Iterator[None]:
        """What the server refuses is said, and the conversation goes on."""
        try:
            yield
        except SessionError as error:
            self.errors += 1
            self._say(f"error: {one_line(error)}", "red")

    def _say(self, text: str, style: str = "") -> None:
        self._console.print(text, style=style, markup=False, soft_wrap=True)


def _listed(number: int, turn: Turn) -> str:
    asked = " ".join(item.text for item in turn.input)
    return f"{number:3}  {_short(asked)}  →  {_short(turn.text or ', '.join(call.name for call in turn.tool_calls))}"


def _short(text: str) -> str:
    line = " ".join(printable(text).split())
    return line if len(line) <= 40 else line[:39] + "…"
