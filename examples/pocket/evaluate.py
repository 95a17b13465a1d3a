"""Scores a pocket model on held-out dialogues: recall, tool choice, arguments, use of results, and the draft head.

    python examples/pocket/evaluate.py tokenspeed/pocket --seed 1 --count 300 --write examples/pocket/eval.json

Names, numbers, codes, phrases, verb-object pairs, tool schemas and combinations of wordings come from the part of the
generator's world that training never draws. Every scored answer is decoded greedily after the true history, by default
with the product's own engine on the CPU, with `--trainer` by the training model, which is several times faster.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from decode import Greedy
from generate import Dialogue
from model import CHUNK, Pocket, load
from render import CLOSE, Message, answer, opening, render
from tokenizer import Encoder

Decode = Callable[[list[list[int]], int], list[list[int]]]
LIMIT = 256  # tokens of an answer
FIRST_SEED = 1_000_000_000_000_000  # beyond the 48 bits of training seeds


@dataclass
class Case:
    """One scored answer: the prompt, what is aimed at, and what the model wrote."""

    kind: str
    prompt: list[int]
    message: Message
    request: str
    schemas: list[dict[str, Any]]
    seed: int
    dialogue: list[int]  # the ids of the whole dialogue, of which the prompt is the beginning
    expected: list[int]  # the answer that the dialogue has
    output: list[int] = field(default_factory=list)


@dataclass
class Answer:
    """An answer taken apart."""

    reasoning: str
    content: str
    calls: list[tuple[str, dict[str, str]]]


def parse(text: str) -> Answer:
    """Reasoning, content and calls of an answer that was begun by the generation prompt."""
    reasoning, _, rest = text.partition("\n</think>\n\n")
    rest = rest.removesuffix(CLOSE)
    content, *blocks = rest.split("<tool_call>\n")
    calls = []
    for block in blocks:
        name = re.match(r"<function=([^>\n]+)>\n", block)
        found = re.findall(r"<parameter=([^>\n]+)>\n(.*?)\n</parameter>\n", block, re.DOTALL)
        calls.append((name.group(1) if name else "", dict(found)))
    return Answer(reasoning, content.strip(), calls)


def typed(text: str, schema: dict[str, Any]) -> Any:
    """A parameter's value by its schema's type."""
    try:
        return {"integer": int, "number": float}.get(schema.get("type", "string"), str)(text)
    except ValueError:
        return None


def collect(encoder: Encoder, seed: int, count: int) -> list[Case]:
    """`count` cases of the promised kinds, a third of it of the others."""
    cases: dict[str, list[Case]] = defaultdict(list)
    wanted = dict.fromkeys(("recall", "choice", "result"), count)
    wanted |= dict.fromkeys(("unknown", "parallel", "none"), -(-count // 3))
    dialogue_seed = FIRST_SEED + seed * 1_000_000
    while any(len(cases[kind]) < number for kind, number in wanted.items()):
        dialogue_seed += 1
        dialogue = Dialogue(dialogue_seed, evaluation=True, most_tools=8, least_tools=3)
        for _ in range(13):
            dialogue.extend()
        whole = encoder.segments(render(dialogue.schemas, dialogue.system, dialogue.messages))[0]
        for place, message in enumerate(dialogue.messages):
            kind = message.aim.get("kind", "")
            before = dialogue.messages[place - 1]
            if kind == "call":
                if before.role != "user":
                    continue
                kind = "choice" if len(message.calls) == 1 else "parallel"
            if kind not in wanted or len(cases[kind]) >= wanted[kind]:
                continue
            history = render(dialogue.schemas, dialogue.system, dialogue.messages[:place])
            prompt = encoder.segments(history + opening())[0]
            end = len(encoder.segments(history + answer(message, reasoning=True))[0]) - 1  # but for the last newline
            expected = whole[len(prompt) : end]
            schemas = dialogue.schemas
            cases[kind].append(Case(kind, prompt, message, before.text, schemas, dialogue_seed, whole, expected))
    return [case for kind in wanted for case in cases[kind]]


def words(text: str) -> set[str]:
    return set(re.findall(r"[a-z]+|[^\W\d_a-z]+", re.sub(r"(?<=[a-z])(?=[A-Z])", " ", text).lower()))


def overlap_choice(case: Case) -> str:
    """The offered tool whose name and descriptions share most words with the request."""
    request = words(case.request)

    def shared(schema: dict[str, Any]) -> int:
        properties = schema["parameters"]["properties"]
        text = " ".join(
            [
                schema["name"],
                schema.get("description", ""),
                *properties,
                *(p.get("description", "") for p in properties.values()),
            ]
        )
        return len(request & words(text))

    return max(case.schemas, key=shared)["name"]


def contains(text: str, value: str) -> bool:
    """Whether a value stands in a text and is not part of a longer word or number."""
    left = r"(?<![\w])" if value[:1].isalnum() else ""
    right = r"(?![\w])" if value[-1:].isalnum() else ""
    return re.search(left + re.escape(value) + right, text) is not None


def right(case: Case, given: Answer) -> dict[str, bool]:
    """The scores that one case counts for."""
    aim, message = case.message.aim, case.message
    if case.kind == "recall":
        others = [other for other in aim["others"] if not contains(message.text, other)]
        fine = contains(given.content, aim["value"]) and not any(contains(given.content, other) for other in others)
        return {"recall": fine and not given.calls}
    if case.kind == "unknown":
        others = [other for other in aim["others"] if not contains(message.text, other)]
        fine = "not told me" in given.content and not any(contains(given.content, other) for other in others)
        return {"says_unknown": fine and not given.calls}
    if case.kind == "none":
        return {"says_no_tool": not given.calls and "do not have a tool" in given.content}
    if case.kind == "result":
        return {"tool_result": all(contains(given.content, value) for value in aim["values"])}
    names = [call.name for call in message.calls] == [name for name, _ in given.calls]
    schemas = {schema["name"]: schema["parameters"]["properties"] for schema in case.schemas}
    values = names and all(
        call.arguments == {key: typed(text, schemas[call.name].get(key, {})) for key, text in found.items()}
        for call, (_, found) in zip(message.calls, given.calls, strict=True)
    )
    if case.kind == "parallel":
        return {"parallel_calls": values}
    return {"tool_choice": names, **({"tool_arguments": values} if names else {}), "whole_call": values}


@torch.no_grad()
def draft_acceptance(model: Pocket, cases: list[Case]) -> tuple[float, int]:
    """Share of the greedy tokens that the draft head proposes right, from the hidden vector two tokens before."""
    device = model.model.embed_tokens.weight.device
    hits = total = 0
    for case in cases:
        if len(case.output) < 2:
            continue
        ids = torch.tensor([case.prompt + case.output], device=device)
        padded = F.pad(ids, (0, -ids.shape[1] % CHUNK))
        drafts = model.logits(model.draft(padded, model(padded)[0])).argmax(-1)[0, : ids.shape[1] - 2]
        start = len(case.prompt) - 1  # the first token is the model's own, drafts begin with the second
        agreed = drafts[start:] == ids[0, start + 2 :]
        hits, total = hits + int(agreed.sum()), total + agreed.numel()
    return hits / total, total


def note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def engine_decode(directory: Path, end: int) -> Decode:
    """The product's engine on the CPU."""
    from tokenspeed import Engine, SamplingParams

    engine = Engine(str(directory), device="cpu", dtype="float32")

    def decode(prompts: list[list[int]], limit: int) -> list[list[int]]:
        params = SamplingParams(temperature=0, max_tokens=limit, stop_token_ids=[end])
        results = engine.generate(prompts, params)
        for result in results:
            engine.release(result.turn)
        return [list(result.token_ids) for result in results]

    return decode


@torch.no_grad()
def verify(model: Pocket, cases: list[Case]) -> list[Case]:
    """Give the cases whose greedy answer is the expected one that answer, and return the others.

    One pass over a dialogue shows it for all its cases: greedy decoding gives exactly the expected ids if each of them
    is the most likely one after those before it.
    """
    device = model.model.embed_tokens.weight.device
    dialogues: dict[int, list[Case]] = defaultdict(list)
    for case in cases:
        dialogues[case.seed].append(case)
    for group in dialogues.values():
        ids = torch.tensor([group[0].dialogue], device=device)
        best = model.logits(model(F.pad(ids, (0, -ids.shape[1] % CHUNK)))[0]).argmax(-1)[0].tolist()
        for case in group:
            start = len(case.prompt) - 1
            if best[start : start + len(case.expected)] == case.expected:
                case.output = case.expected
    return [case for case in cases if not case.output]


def main() -> None:
    parser = argparse.ArgumentParser(description="Score a pocket model on held-out dialogues.")
    parser.add_argument("directory", type=Path, help="of the model")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--count", type=int, default=300, help="cases of each promised kind")
    parser.add_argument("--trainer", action="store_true", help="answer with the training model, not the engine")
    parser.add_argument("--batch", type=int, default=16, help="prompts a batch")
    parser.add_argument("--write", type=Path, help="where to write the figures")
    parser.add_argument("--failures", type=int, default=0, help="wrong answers of each score to print")
    arguments = parser.parse_args()

    device = torch.device("cuda" if arguments.trainer and torch.cuda.is_available() else "cpu")
    encoder = Encoder(arguments.directory / "tokenizer.json")
    model = load(arguments.directory).to(device)
    end = encoder.control[CLOSE]
    cases = collect(encoder, arguments.seed, arguments.count)
    began = time.monotonic()
    if arguments.trainer:
        waiting, decode = verify(model, cases), Greedy(model, end)
        note(f"{len(cases) - len(waiting)} of {len(cases)} answers verified, {time.monotonic() - began:.0f} s")
    else:
        waiting, decode = cases, engine_decode(arguments.directory, end)
    waiting = sorted(waiting, key=lambda case: len(case.prompt))
    for start in range(0, len(waiting), arguments.batch):
        group = waiting[start : start + arguments.batch]
        for case, output in zip(group, decode([case.prompt for case in group], LIMIT), strict=True):
            case.output = output
        note(f"{start + len(group)} of {len(waiting)} answers decoded, {time.monotonic() - began:.0f} s")

    scores: dict[str, list[bool]] = defaultdict(list)
    groups: dict[str, list[bool]] = defaultdict(list)
    shown: dict[str, int] = defaultdict(int)
    for case in cases:
        text = encoder.decode(case.output)
        for name, fine in right(case, parse(text)).items():
            scores[name].append(fine)
            if "group" in case.message.aim:
                groups[f"{name}: {case.message.aim['group']}"].append(fine)
            if not fine and shown[name] < arguments.failures:
                shown[name] += 1
                wanted = encoder.decode(encoder.segments(render([], None, [case.message]))[0])
                print(f"--- {name} ({case.seed})\n{case.request}\n=> {text}\nwanted {wanted}")
    choices = [case for case in cases if case.kind == "choice"]
    scores["tool_choice_baseline"] = [overlap_choice(case) == case.message.calls[0].name for case in choices]
    promised = [case for case in cases if case.kind in ("recall", "choice", "result")]
    acceptance, drafted = draft_acceptance(model, promised[:: max(1, len(promised) // 150)])

    report: dict[str, Any] = {name: round(sum(values) / len(values), 4) for name, values in sorted(scores.items())}
    report["mtp_acceptance"] = round(acceptance, 4)
    report["cases"] = {**{name: len(values) for name, values in sorted(scores.items())}, "mtp_acceptance": drafted}
    report["seed"] = arguments.seed
    report["decoder"] = f"training model on {device}" if arguments.trainer else "tokenspeed.Engine on cpu"
    report["command"] = f"python examples/pocket/evaluate.py {' '.join(sys.argv[1:])}"
    report["seconds"] = round(time.monotonic() - began)
    for name, values in sorted(groups.items()):
        print(f"{name}: {sum(values) / len(values):.3f} of {len(values)}")
    print(json.dumps(report, indent=2))
    if arguments.write:
        arguments.write.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
