"""What a session saves: the same conversation as a session, and sent whole each turn to a server without reuse.

    python benchmarks/reuse.py --output benchmarks/results/reuse.json

Two servers run the same model on this machine's CPU. On one, each turn of a session sends its new message. To the
other, whose prefix cache is off, each turn is a new session that is given the whole conversation. The turns alternate,
so that both see the same machine. Everything is greedy, and the gate is that both give the same answers, that a
session's turn computes at most its new tokens + 1, and that the other computes its whole prompt; if it fails, nothing
is reported.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import sys
from datetime import date
from pathlib import Path
from statistics import median
from typing import Any

from tokenspeed import Client
from tokenspeed.cli.running import BackgroundServer, engine_config

TURNS = 12
CONTEXT_TOKENS = 3000
ANSWER_TOKENS = 48


def notes(rng: random.Random, count: int) -> str:
    """Facts to fill a context with, `count` lines."""
    things = ["door", "gate", "vault", "locker", "garage", "cabin", "office", "shed"]
    colours = ["red", "blue", "green", "white", "black", "yellow"]
    return "\n".join(
        f"The code of the {rng.choice(colours)} {rng.choice(things)} {number} is {rng.randrange(1000, 10000)}."
        for number in range(1, count + 1)
    )


def questions(rng: random.Random) -> list[str]:
    return [
        f"My lucky number of day {day} is {rng.randrange(100, 1000)}. Please remember it." for day in range(1, TURNS)
    ]


def fill(client: Client, tokens: int) -> str:
    """Notes that come to about `tokens` tokens with this model's tokenizer."""
    lines = 50
    with client.session() as session:
        used = session.turn(notes(random.Random(0), lines), max_tokens=1).usage.prompt
    return notes(random.Random(0), lines * tokens // used)


def run(model: str | None) -> dict[str, Any]:
    """The rows of both sides, turn by turn. Raises SystemExit where the gate fails."""
    # One thread each: two engines whose threads wait for each other on two cores would measure that.
    warm_config = engine_config(model, threads=1)
    cold_config = engine_config(model, threads=1, prefix_cache=False)
    with BackgroundServer(warm_config) as warm, BackgroundServer(cold_config) as cold:
        with Client(warm.started.url) as sessions, Client(cold.started.url) as whole:
            text = fill(whole, CONTEXT_TOKENS)
            said = [f"Here are my notes.\n{text}\nThank you!", *questions(random.Random(1))]
            rows, history, known = [], [], 0
            with sessions.session(temperature=0, max_tokens=ANSWER_TOKENS) as session:
                for number, message in enumerate(said, 1):
                    turn = session.turn(message)
                    history.append({"type": "message", "role": "user", "content": message})
                    with whole.session(temperature=0, max_tokens=ANSWER_TOKENS) as fresh:
                        again = fresh.turn(history)
                    history.append({"type": "message", "role": "assistant", "content": turn.text})
                    new = turn.usage.prompt - known
                    known = turn.usage.prompt + turn.usage.output
                    gate(number, turn, again, new)
                    rows.append(
                        {
                            "turn": number,
                            "prompt": turn.usage.prompt,
                            "new": new,
                            "session": {"computed": turn.usage.computed, "ttft_s": round(turn.timings.ttft_s, 4)},
                            "whole": {"computed": again.usage.computed, "ttft_s": round(again.timings.ttft_s, 4)},
                        }
                    )
        return {"model": warm.started.info.model, "dtype": warm.started.info.dtype, "rows": rows}


def gate(number: int, turn: Any, again: Any, new: int) -> None:
    checks = {
        f"the answers are the same: {turn.text!r} and {again.text!r}": turn.text == again.text,
        f"the session computed {turn.usage.computed} of {new} new tokens": turn.usage.computed <= new + 1,
        f"without reuse all {again.usage.prompt} are computed": again.usage.computed == again.usage.prompt,
        f"both saw one prompt: {turn.usage.prompt} and {again.usage.prompt}": turn.usage.prompt == again.usage.prompt,
    }
    failed = [what for what, holds in checks.items() if not holds]
    if failed:
        sys.exit(f"turn {number}: the gate failed: {'; '.join(failed)}")


def summary(rows: list[dict[str, Any]]) -> dict[str, float]:
    later = rows[1:]
    prompt = sum(row["prompt"] for row in rows)
    reused = prompt - sum(row["session"]["computed"] for row in rows)
    return {
        "hit_rate": round(reused / prompt, 4),
        "hit_rate_bound": round((prompt - sum(row["new"] for row in rows)) / prompt, 4),
        "computed_ratio": round(
            sum(row["whole"]["computed"] for row in later) / sum(row["session"]["computed"] for row in later), 1
        ),
        "ttft_ratio": round(
            median(row["whole"]["ttft_s"] for row in later) / median(row["session"]["ttft_s"] for row in later), 1
        ),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="a model directory; the pocket model if left out")
    parser.add_argument("--output", type=Path, help="where to write the figures as JSON")
    options = parser.parse_args()
    result = run(options.model)
    rows = result["rows"]
    print(f"{'turn':>4} {'prompt':>7} {'new':>5} {'computed':>9} {'whole':>7} {'TTFT ms':>8} {'whole ms':>9}")
    for row in rows:
        warm, whole = row["session"], row["whole"]
        print(
            f"{row['turn']:>4} {row['prompt']:>7} {row['new']:>5} {warm['computed']:>9} {whole['computed']:>7} "
            f"{warm['ttft_s'] * 1000:>8.0f} {whole['ttft_s'] * 1000:>9.0f}"
        )
    figures = summary(rows)
    print(", ".join(f"{name} {value}" for name, value in figures.items()))
    if options.output:
        about = {
            "command": "python benchmarks/reuse.py --output benchmarks/results/reuse.json",
            "date": date.today().isoformat(),
            "machine": f"{platform.machine()} CPU",
            "workload": f"{TURNS} turns over a context of about {CONTEXT_TOKENS} tokens, empty cache at the start",
            "ratios": "medians over turns 2 to 12, whole conversation without reuse ÷ session",
        }
        options.output.write_text(json.dumps(about | figures | result, indent=1) + "\n")


if __name__ == "__main__":
    main()
