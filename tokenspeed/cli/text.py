"""What a turn looks like in a terminal."""

from __future__ import annotations

from rich.console import Console
from rich.text import Text

from tokenspeed.client import Delta, Turn

# A model's text must not move the cursor or change colours: control characters become visible stand-ins.
_CONTROLS = {code: 0xFFFD for code in [*range(32), *range(0x7F, 0xA0)] if chr(code) not in "\n\t"}


def printable(text: str) -> str:
    """`text` without characters that a terminal would obey."""
    return text.translate(_CONTROLS)


class StreamPrinter:
    """Prints deltas as they come: reasoning dimmed, tool calls by name, the answer plain.

    Without colours the three are told apart by their labels, `thinking:` and `calls`, which are always there.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self._item: tuple[str, int] | None = None

    def show(self, delta: Delta) -> None:
        item = (delta.turn, delta.item)
        text = printable(delta.text)
        if item != self._item:
            if delta.channel == "reasoning" and not text.strip():
                return  # an empty thought is not worth a line
            self._start(delta)
            self._item = item
            text = text.lstrip("\n")
        self._print(text, "dim" if delta.channel == "reasoning" else "cyan" if delta.channel == "arguments" else "")

    def end(self) -> None:
        """Finish the line."""
        if self._item is not None:
            self._console.print()
        self._item = None

    def _start(self, delta: Delta) -> None:
        self.end()
        if delta.channel == "reasoning":
            self._print("thinking: ", "dim")
        elif delta.channel == "arguments":
            self._print(f"calls {printable(delta.name or '')} ", "cyan")

    def _print(self, text: str, style: str) -> None:
        self._console.print(Text(text, style=style), end="", soft_wrap=True)


def cost_line(turn: Turn) -> str:
    """What a turn cost, in one line."""
    usage, timings = turn.usage, turn.timings
    return (
        f"prompt {usage.prompt} · reused {usage.reused.total} · computed {usage.computed} · output {usage.output} · "
        f"TTFT {timings.ttft_s * 1000:.0f} ms · {timings.tokens_per_s:.1f} tokens/s"
    )
