"""`tokenspeed demo`: a scripted session of twelve turns, and what each of them cost."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from tokenspeed.cli.errors import CommandError
from tokenspeed.cli.loading import LoadingBar
from tokenspeed.cli.running import BackgroundServer, engine_config
from tokenspeed.cli.text import printable
from tokenspeed.client import Client, ConnectionFailed, Session, SessionError, StepLimitExceeded, Turn

INSTRUCTIONS = "You are a helpful assistant. Use the tools when they help."
FORK_AFTER = 8
"""A branch leaves after this turn and asks a question of its own; the session then goes on as if nothing had been."""
BRANCH = "Thank you!"

TURNS = (
    ("Hello!", ""),
    ("My name is Ines.", ""),
    ("The door code is 7319.", ""),
    ("What is 1234 plus 5678?", "6912"),
    ("What is the weather in Oslo?", "cloudy"),
    ("What is the door code?", "7319"),
    ("Where is my order KX-4821?", "shipped"),
    ("What is the weather in Lima?", "sunny"),
    ("What is my name?", "Ines"),
    ("What is 700 plus 21?", "721"),
    ("What is the status of order B-77?", "packed"),
    ("Thank you!", ""),
)
"""What the user says, and a word that a right answer has: of a tool's result, or of something told before."""

WEATHER = {"Oslo": (4, "cloudy"), "Lima": (19, "sunny")}
ORDERS = {"KX-4821": ("shipped", "Friday"), "B-77": ("packed", "Monday")}


def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: The first number.
        b: The second number.
    """
    return a + b


def get_weather(city: str) -> dict[str, int | str]:
    """Get the weather for a city.

    Args:
        city: The city.
    """
    temperature, sky = WEATHER[city]
    return {"temperature": temperature, "sky": sky}


def lookup_order(order_id: str) -> dict[str, str]:
    """Look up an order by its id.

    Args:
        order_id: The order.
    """
    status, eta = ORDERS[order_id]
    return {"status": status, "eta": eta}


TOOLS: tuple[Callable[..., Any], ...] = (add, get_weather, lookup_order)


@dataclass(frozen=True)
class Row:
    """One turn of the model.

    Attributes:
        label: the user's turn, and which of the model's turns for it.
        wanted: a word that the answer should have; empty where any will do, and where the model calls a tool first.
        new: tokens of the prompt that are not in the parent's prompt and output.
    """

    label: str
    wanted: str
    turn: Turn
    new: int

    @property
    def exact(self) -> bool:
        """Whether the turn cost no more than promised: its new tokens, and the last one that was sampled before."""
        usage = self.turn.usage
        return usage.computed <= self.new + 1 and usage.prompt == usage.reused.total + usage.computed


def run(model: str | None, **settings: Any) -> None:
    """Print the session, the table and the checks.

    Raises:
        CommandError: a check failed, or the model cannot be served.
    """
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=110)
    config = engine_config(model, **settings)
    with LoadingBar(model or "tokenspeed-pocket") as bar, BackgroundServer(config, bar) as server:
        bar.__exit__(None, None, None)
        console.print(f"serving {server.started.info.model} at {server.started.url}", markup=False)
        try:
            with Client(server.started.url) as client:
                rows = take_turns(client, lambda text: console.print(text, markup=False))
        except (SessionError, StepLimitExceeded, ConnectionFailed) as error:
            raise CommandError(str(error)) from None
    console.print(table(rows))
    failures = [text for text, passed in checks(rows) if not passed]
    for text, passed in checks(rows):
        console.print(f"{'ok' if passed else 'FAILED'}: {text}", markup=False)
    if failures:
        raise CommandError(f"{len(failures)} of the demo's checks failed")


def take_turns(client: Client, say: Callable[[str], None]) -> list[Row]:
    """The scripted session, a row for each turn of the model; `say` gets the conversation as it goes."""
    rows: list[Row] = []
    with client.session(instructions=INSTRUCTIONS, tools=TOOLS, temperature=0, max_tokens=160) as session:
        before: Turn | None = None
        for number, (text, wanted) in enumerate(TURNS, 1):
            taken = _take(session, str(number), text, wanted, before, say)
            rows += taken
            before = taken[-1].turn
            if number == FORK_AFTER:
                with session.fork() as branch:
                    rows += _take(branch, "fork", BRANCH, "", before, say)
    return rows


def _take(
    session: Session, label: str, text: str, wanted: str, before: Turn | None, say: Callable[[str], None]
) -> list[Row]:
    say(f"{label:>4}  {text}")
    turn = session.turn(text)
    rows: list[Row] = []
    for step in turn.steps:
        calls = ", ".join(f"{call.name}({call.arguments})" for call in step.tool_calls)
        say(f"      {printable(f'calls {calls}' if calls else step.text.strip())}")
        known = 0 if before is None else before.usage.prompt + before.usage.output
        number = label if len(turn.steps) == 1 else f"{label}.{len(rows) + 1}"
        rows.append(Row(number, wanted if step is turn.steps[-1] else "", step, step.usage.prompt - known))
        before = step
    return rows


def table(rows: Sequence[Row]) -> Table:
    """What each turn cost."""
    shown = Table(title="tokens by turn")
    for column in ("turn", "prompt", "reused", "new", "computed", "output", "TTFT ms", "tokens/s"):
        shown.add_column(column, justify="right")
    for row in rows:
        usage, timings = row.turn.usage, row.turn.timings
        counts = (usage.prompt, usage.reused.total, row.new, usage.computed, usage.output)
        shown.add_row(row.label, *map(str, counts), f"{timings.ttft_s * 1000:.0f}", f"{timings.tokens_per_s:.1f}")
    return shown


def checks(rows: Sequence[Row]) -> list[tuple[str, bool]]:
    """What the demo shows, and whether it did."""
    prompt = sum(row.turn.usage.prompt for row in rows)
    reused = sum(row.turn.usage.reused.total for row in rows)
    called = {call.name for row in rows for call in row.turn.tool_calls}
    asked = [row for row in rows if row.wanted]
    right = sum(row.wanted in row.turn.text for row in asked)
    branch, after = (
        next(row for row in rows if row.label.startswith(label)) for label in ("fork", str(FORK_AFTER + 1))
    )
    return [
        (
            f"every turn computed at most its new tokens + 1 ({reused} of {prompt} prompt tokens, "
            f"{reused / prompt:.1%}, came from the cache)",
            all(row.exact for row in rows),
        ),
        (
            f"the fork and the session went on from the same turn {branch.turn.parent}",
            branch.turn.parent == after.turn.parent,
        ),
        (f"the model called {len(called)} of {len(TOOLS)} tools", len(called) == len(TOOLS)),
        (f"{right} of {len(asked)} answers have what was told or returned", right >= len(asked) - 1),
        ("every turn was completed", all(row.turn.status == "completed" for row in rows)),
    ]
