"""Whether a device answers as the CPU does in float32: the pocket model on 200 held-out dialogues.

    python benchmarks/agreement.py --write-expected benchmarks/results/agreement-cpu.json
    python benchmarks/agreement.py --device cuda --dtype bfloat16 --dtype float32 \\
        --expected benchmarks/results/agreement-cpu.json --output benchmarks/results/agreement.json

Each dialogue is cut before one of its answers, which is decoded greedily. The first command notes the float32 engine's
ids, and at each of them the runner-up and the gap between the two largest logits. The second decodes the same on a
device and compares. The first id in which two answers differ may do so only where the gap is below a bound
(`GAP_BOUNDS`); after it they see different texts. Then the noted ids are forced through the device's engine, which
shows how far every gap is from the noted one, whether or not it changes an answer.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np

from tokenspeed.config.engine import EngineConfig
from tokenspeed.config.sampling import SamplingParams
from tokenspeed.engine.core import EngineCore
from tokenspeed.engine.messages import Ended, Generate, Rejected, Release, Tokens
from tokenspeed.pocket import DIRECTORY

FIRST_SEED = 1_000_000_009_000_000  # beyond training's seeds and the evaluator's
EXCHANGES = 8
LIMIT = 64
TOP = 20
GAP_BOUNDS = {"float32": 1e-3, "bfloat16": 0.2}
"""Twice what rounding to bfloat16 does by itself: of the 117 gaps below 2 (a change of answer is at stake there) the
CPU's own bfloat16 engine moves none by more than 0.094, and its answers part at gaps up to 0.039. In float32 the CPU's
engine, with other prompts side by side, moves no gap by more than 6e-5; a GPU adds in another order altogether."""
CLOSE = 2.0
"""Gaps below it are those in which an answer could change."""


@dataclass
class Answer:
    """Greedy ids; at each the runner-up, and by how much its logit is less."""

    ids: list[int]
    others: list[int]
    gaps: list[float]


@dataclass
class Decoded:
    """What an engine says: ids, and beside each the most likely ids with their log-probabilities."""

    ids: list[int]
    top: list[list[tuple[int, float]]]


@dataclass
class Difference:
    """The first id in which two answers differ: of which dialogue, where, and the gap there."""

    dialogue: int
    position: int
    gap: float


def held_out_prompts(count: int) -> tuple[list[list[int]], int]:
    """Prompts that end where an answer begins, one a dialogue, and the id that ends an answer."""
    sys.path.insert(0, str(Path(__file__).parent.parent / "examples" / "pocket"))
    from generate import Dialogue
    from render import CLOSE, opening, render
    from tokenizer import Encoder

    encoder = Encoder(DIRECTORY / "tokenizer.json")
    prompts = []
    for number in range(count):
        dialogue = Dialogue(FIRST_SEED + number, evaluation=True, most_tools=8, least_tools=3)
        for _ in range(EXCHANGES):
            dialogue.extend()
        answers = [place for place, message in enumerate(dialogue.messages) if message.role == "assistant"]
        place = random.Random(number).choice(answers)
        history = render(dialogue.schemas, dialogue.system, dialogue.messages[:place])
        prompts.append(encoder.segments(history + opening())[0])
    return prompts, encoder.control[CLOSE]


def decode(
    core: EngineCore, prompts: list[list[int]], end: int, batch: int, forced: list[list[int]] | None = None
) -> list[Decoded]:
    """Answers to the prompts, `batch` side by side; `forced`: what they must be."""
    answers = [Decoded([], []) for _ in prompts]
    order = sorted(range(len(prompts)), key=lambda index: len(prompts[index]))
    for start in range(0, len(order), batch):
        group = order[start : start + batch]
        for index in group:
            must = tuple(forced[index]) if forced is not None else ()
            params = SamplingParams(
                temperature=0,
                max_tokens=len(must) or LIMIT,
                stop_token_ids=(end,),
                ignore_eos=True,
                logprobs=True,
                top_logprobs=TOP,
                forced_token_ids=must,
            )
            core.submit(Generate(str(index), "t", np.asarray(prompts[index], "<i4").tobytes(), params))
        while core.busy:
            for event in core.step():
                if isinstance(event, Tokens):
                    answers[int(event.turn)].ids.extend(event.tokens)
                    answers[int(event.turn)].top.extend(event.top_logprobs or [])
                elif isinstance(event, Rejected) or (isinstance(event, Ended) and event.reason == "error"):
                    sys.exit(f"dialogue {event.turn}: {event.message}")
        core.submit(Release([str(index) for index in group]))
        note(f"{start + len(group)} of {len(order)} answers")
    return answers


def answer_of(decoded: Decoded) -> Answer:
    for token, top in zip(decoded.ids, decoded.top, strict=True):
        assert token == top[0][0], "not greedy"
    return Answer(
        decoded.ids,
        [top[1][0] for top in decoded.top],
        [round(top[0][1] - top[1][1], 6) for top in decoded.top],
    )


def first_differences(expected: list[Answer], got: list[Decoded]) -> list[Difference]:
    found = []
    for number, (answer, other) in enumerate(zip(expected, got, strict=True)):
        if answer.ids == other.ids:
            continue
        # One cannot be the beginning of the other: both go on to the same end.
        place = next(n for n, (one, two) in enumerate(zip(answer.ids, other.ids, strict=False)) if one != two)
        found.append(Difference(number, place, answer.gaps[place]))
    return found


def gap_errors(expected: list[Answer], forced: list[Decoded]) -> list[tuple[float, float]]:
    """Each gap, and how far it is from the expected one, where both ids are among those reported."""
    errors = []
    for answer, other in zip(expected, forced, strict=True):
        assert other.ids == answer.ids
        for first, second, gap, top in zip(answer.ids, answer.others, answer.gaps, other.top, strict=True):
            by_id = dict(top)
            if first in by_id and second in by_id:
                errors.append((gap, abs(by_id[first] - by_id[second] - gap)))
    return errors


def engine(device: str, dtype: str, batch: int) -> EngineCore:
    return EngineCore(
        EngineConfig(
            model=str(DIRECTORY),
            device=device,
            dtype=dtype,  # type: ignore[arg-type]
            cache_bytes=2 << 30,
            max_sequences=batch,
            max_context=2048,
            prefill_chunk=512 if device == "cpu" else 1024,
            forced_tokens=True,
        )
    )


def compare(dtype: str, device: str, batch: int, prompts: list[list[int]], end: int, expected: list[Answer]) -> Any:
    """Rows' names and values, and why the gate fails, if it does."""
    began = time.monotonic()
    core = engine(device, dtype, batch)
    note(f"{dtype}: ready after {time.monotonic() - began:.0f} s")
    differences = first_differences(expected, decode(core, prompts, end, batch))
    moved = gap_errors(expected, decode(core, prompts, end, batch, [answer.ids for answer in expected]))
    errors = [error for _, error in moved]
    note(f"{dtype}: done after {time.monotonic() - began:.0f} s")
    bound = GAP_BOUNDS[dtype]
    values = {
        "dialogues": len(prompts),
        "identical": round(1 - len(differences) / len(prompts), 4),
        "largest_gap_at_a_difference": max((difference.gap for difference in differences), default=0.0),
        "gap_bound": bound,
        "gaps_compared": len(errors),
        "gap_error_p50": round(float(np.quantile(errors, 0.5)), 6),
        "gap_error_p99": round(float(np.quantile(errors, 0.99)), 6),
        "gap_error_max": round(max(errors), 6),
        "gap_error_max_where_close": round(max((error for gap, error in moved if gap < CLOSE), default=0.0), 6),
        "late_compilations": core.stats().late_compilations,
    }
    problems = [f"{dtype}: {difference}" for difference in differences if difference.gap >= bound]
    return {f"agreement_{dtype}_{name}": value for name, value in values.items()}, problems


def digest(prompts: list[list[int]]) -> str:
    """Of the prompts and the model that answers them."""
    weights = (DIRECTORY / "model.safetensors").read_bytes()
    return hashlib.sha256(json.dumps(prompts).encode() + weights).hexdigest()


def commit() -> str:
    try:
        found = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return found.stdout.strip()


def note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write-expected", type=Path, help="note here what the CPU says in float32, and stop")
    parser.add_argument("--expected", type=Path, help="what the CPU said; computed again if left out")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", action="append", choices=sorted(GAP_BOUNDS), help="may be given more than once")
    parser.add_argument("--count", type=int, default=200, help="dialogues")
    parser.add_argument("--batch", type=int, default=0, help="dialogues side by side; 8 on a CPU, else 32")
    parser.add_argument("--commit", default=None, help="of the code that runs; git's answer if left out")
    parser.add_argument("--output", type=Path, help="where to write the rows as JSON; others that are there stay")
    options = parser.parse_args()
    batch = options.batch or (8 if options.device == "cpu" else 32)

    prompts, end = held_out_prompts(options.count)
    note(f"{len(prompts)} prompts of {min(map(len, prompts))} to {max(map(len, prompts))} tokens")
    if options.expected:
        noted = json.loads(options.expected.read_text())
        if noted["digest"] != digest(held_out_prompts(noted["count"])[0]):
            sys.exit(f"{options.expected} is of other prompts or another model")
        expected = [Answer(**answer) for answer in noted["answers"]][: options.count]
    else:
        expected = [answer_of(decoded) for decoded in decode(engine("cpu", "float32", 8), prompts, end, 8)]
    if options.write_expected:
        content = {"digest": digest(prompts), "count": len(prompts), "answers": [asdict(answer) for answer in expected]}
        options.write_expected.write_text(json.dumps(content, separators=(",", ":")) + "\n")
        return

    about = {
        "command": "python benchmarks/agreement.py " + " ".join(sys.argv[1:]),
        "date": date.today().isoformat(),
        "commit": options.commit or commit(),
    }
    rows: list[dict[str, Any]] = []
    failed: list[str] = []
    for dtype in options.dtype or ["bfloat16"]:
        values, problems = compare(dtype, options.device, batch, prompts, end, expected)
        rows += [{"name": name, "value": value, **about} for name, value in values.items()]
        failed += problems
    print(json.dumps({row["name"]: row["value"] for row in rows}, indent=1))
    if failed:
        sys.exit("answers differ where the gap is too large:\n" + "\n".join(failed))
    if options.output:
        before = json.loads(options.output.read_text()) if options.output.exists() else []
        new = {row["name"] for row in rows}
        rows = [row for row in before if row["name"] not in new] + rows
        options.output.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
