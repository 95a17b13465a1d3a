"""Decode, prefill, next turns and the agentic workload on one GPU, at the shape of Qwen3.5-35B-A3B in bfloat16.

    python benchmarks/decode.py [--only PART …] [--peer] [--commit HASH] [--output FILE]

The weights are random, drawn from the config alone, with a router that spreads. Every figure stands beside what the
memory, or for prompts the matrix units, allow at rates measured in the same run. An engine is checked before it is
timed: what it decodes must agree with a prefill of the same ids (`DecodeBench.check`), and a part whose gate fails
writes nothing. Parts may be run one by one: each writes its rows into the file as soon as it has them, over those of
the same name.

    prefill    a prompt of 50,000 tokens, and 800 new ones behind it
    agentic    the twelve-turn workload, one conversation, beside plain decode at the same contexts
    crowd      the same with 2, 4, 8 and 16 conversations side by side
    decode     one sequence at 1K to 250K
    batch      8 and 32 sequences at 8K
    breakdown  the kernels of one decode step at 1K and at 50K
    long       one sequence at 512K and 1M, with a raised position limit, over pages that were never computed
"""

from __future__ import annotations

import argparse
import gc
import json
import platform
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any

import torch

from tokenspeed.bench.agentic import Workload, measure
from tokenspeed.bench.bound import prefill_bound_s, product_rate, read_bandwidth
from tokenspeed.bench.decode import DecodeBench, DecodeFigures, Kernel, breakdown
from tokenspeed.bench.driver import BenchError
from tokenspeed.bench.in_process import EngineTarget
from tokenspeed.config.engine import EngineConfig
from tokenspeed.engine.core import EngineCore

DEVICE = "cuda"
CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3_5MoeForCausalLM"],
    "model_type": "qwen3_5_moe_text",
    "hidden_size": 2048,
    "num_hidden_layers": 40,
    "vocab_size": 248320,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "num_experts": 256,
    "num_experts_per_tok": 8,
    "max_position_embeddings": 262144,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25},
    "tie_word_embeddings": False,
    "eos_token_id": 1,
}
LONG_POSITIONS = 1_100_000

CHECKED = 1000
"""Tokens of the gate's prompt."""
ONE = {
    "decode_b1_1k": (1_000, 200, 500),
    "decode_b1_50k": (50_000, 150, 425),
    "decode_b1_128k": (131_072, 100, 345),
    "decode_b1_250k": (250_000, 100, 270),
}
"""Context, steps, tokens a second aimed at."""
MANY = {"decode_b8_8k": (8, 8_192, 100, 0.75), "decode_b32_8k": (32, 8_192, 100, 0.80)}
"""Sequences, context of each, steps, share of the bound aimed at."""
LONG = {"decode_b1_512k": (524_288, 100), "decode_b1_1m": (1_048_576, 100)}
STEPS = {"1k": (1_000, 32), "50k": (50_000, 32)}
"""Contexts whose step is broken down by kernel, and steps."""
PROMPT, NEW = 50_000, 800
WORKLOAD = Workload()
PLAIN_STEPS = 100
CROWDS = (2, 4, 8, 16)
SEQUENCES = 32
PEER_CONTEXT, PEER_TOKENS = 1_000, 32

STARTED = time.monotonic()


def say(text: str) -> None:
    print(f"[{time.monotonic() - STARTED:6.1f} s] {text}", flush=True)


class Results:
    """The file of figures. A row replaces the one of its name; the file is written with each."""

    def __init__(self, path: Path, commit: str) -> None:
        self._path = path
        self._commit = commit
        self._content: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
        self._content |= {"machine": machine(), "model": "Qwen3.5-35B-A3B's shape, random weights, bfloat16"}
        self.part = ""

    def put(self, name: str, value: float, unit: str, bound: float | None = None, **more: Any) -> None:
        command = f"python benchmarks/decode.py {self.part}"
        row = {"name": name, "value": short(value), "unit": unit, "bound": short(bound), "command": command}
        row |= {"date": date.today().isoformat(), "commit": self._commit}
        row |= {key: short(extra) for key, extra in more.items()}
        rows = self._content.setdefault("rows", [])
        places = [index for index, other in enumerate(rows) if other["name"] == name]
        if places:
            rows[places[0]] = row
        else:
            rows.append(row)
        beside = "" if bound is None else f", bound {short(bound)}"
        aimed = f", aim {short(more['target'])}" if "target" in more else ""
        say(f"{name}: {short(value)} {unit}{beside}{aimed}")
        self._write()

    def row(self, name: str) -> dict[str, Any]:
        """The row of that name, of this run or an earlier one; empty if there is none."""
        return next((row for row in self._content.get("rows", []) if row["name"] == name), {})

    def add(self, table: str, name: str, content: Any) -> None:
        """A table of its own, beside the rows."""
        self._content.setdefault(table, {})[name] = content
        self._write()

    def _write(self) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._path.write_text(json.dumps(self._content, indent=1) + "\n")


def short(value: Any) -> Any:
    """Figures to five digits."""
    return float(f"{value:.5g}") if isinstance(value, float) else value


def machine() -> str:
    return torch.cuda.get_device_name() if DEVICE == "cuda" else f"{platform.machine()} CPU"


class Machine:
    """Rates of this one, measured now: bytes a second that can be read, FLOP/s of a product."""

    def __init__(self) -> None:
        device = torch.device(DEVICE)
        self.bandwidth = read_bandwidth(device)
        self.flops_per_s = product_rate(device)
        free_memory()


def free_memory() -> None:
    gc.collect()
    if DEVICE == "cuda":
        torch.cuda.empty_cache()


class Bench:
    """A checked engine and what its figures are put beside."""

    def __init__(self, core: EngineCore, rates: Machine, results: Results) -> None:
        self.core = core
        self.rates = rates
        self.results = results
        self.engine = DecodeBench(core, rates.bandwidth)
        self.difference = self.engine.check(CHECKED)
        say(f"gate: log-probabilities of decode and prefill differ by {self.difference:.4f}")

    @property
    def model(self) -> Any:
        return self.core.executor.model

    def put_decode(self, name: str, figures: DecodeFigures, **more: Any) -> None:
        self.results.put(
            name,
            figures.tokens_per_s,
            "tokens/s",
            figures.bound,
            **more,
            share=figures.tokens_per_s / figures.bound,
            step_ms=figures.step_s * 1e3,
            cpu_share=figures.cpu_s / figures.step_s,
            experts_per_layer=figures.experts,
        )


def prefill(bench: Bench) -> None:
    rates = (bench.rates.bandwidth, bench.rates.flops_per_s)
    seconds = sorted(bench.engine.prefill(PROMPT)[0] for _ in range(3))
    bound = prefill_bound_s(bench.model, 0, PROMPT, *rates)
    bench.results.put("prefill_50k", seconds[1], "s", bound, target=1.06, product_tflops=rates[1] / 1e12)
    ttft_s, computed = bench.engine.next_turn(PROMPT, NEW, times=5)
    bound = prefill_bound_s(bench.model, PROMPT, NEW + 1, *rates)
    bench.results.put("next_turn_ttft_50k", ttft_s * 1e3, "ms", bound * 1e3, target=45.0)
    bench.results.put("next_turn_computed_50k", computed, "tokens", NEW + 1, target=NEW + 1)
    if computed > NEW + 1:
        raise BenchError(f"a next turn of {NEW} tokens computed {computed}")


def agentic(bench: Bench) -> None:
    report = measure(EngineTarget(bench.core), WORKLOAD)
    ends = (WORKLOAD.context, WORKLOAD.longest - WORKLOAD.generate)
    plain = [bench.engine.decode([end], PLAIN_STEPS) for end in ends]

    def plain_s(context: float) -> float:
        """A step of plain decode, between the two that were timed."""
        part = (context - ends[0]) / (ends[1] - ends[0])
        first, last = (1 / figures.tokens_per_s for figures in plain)
        return first + part * (last - first)

    turns, spent, plainly, least = [], 0.0, 0.0, 0.0
    for row in report.rows:
        context, answer = row.answer.prompt + row.answer.output // 2, row.answer
        assert answer.tokens_per_s is not None
        turns.append(row.as_dict() | {"plain_tokens_per_s": 1 / plain_s(context)})
        turns[-1]["bound_tokens_per_s"] = 1 / bench.engine.step_bound_s(context)
        spent += answer.output / answer.tokens_per_s
        plainly += answer.output * plain_s(context)
        least += answer.output * bench.engine.step_bound_s(context)
    tokens = sum(row.answer.output for row in report.rows)
    assert report.hit_rate is not None
    results, bound = bench.results, report.hit_rate_bound
    about = {"cache_at_start": report.cache_at_start}
    results.put("agentic_hit_rate", report.hit_rate * 100, "%", bound * 100, target=bound * 100 - 0.1, **about)
    slowest = min(turn["tokens_per_s"] / turn["plain_tokens_per_s"] for turn in turns)
    results.put(
        "agentic_tokens_per_s",
        tokens / spent,
        "tokens/s",
        tokens / least,
        target=0.9 * tokens / plainly,
        plain_decode=tokens / plainly,
        slowest_turn_of_plain=slowest,
        ttft_ms=[short(turn["ttft_s"] * 1e3) for turn in turns],
    )
    results.add("turns", "agentic", [{key: short(value) for key, value in turn.items()} for turn in turns])


def crowd(bench: Bench) -> None:
    for number in CROWDS:
        workload = Workload(
            WORKLOAD.context, WORKLOAD.turns, WORKLOAD.new, WORKLOAD.generate, number, WORKLOAD.salt + number
        )
        report = measure(EngineTarget(bench.core), workload)
        assert report.hit_rate is not None
        rate = report.hit_rate * 100
        name = f"agentic_{number}_side_by_side"
        later = sorted(row.answer.ttft_s for row in report.rows if row.turn > 1)
        bench.results.put(f"{name}_hit_rate", rate, "%", report.hit_rate_bound * 100)
        bench.results.put(
            f"{name}_tokens_per_s",
            report.total_per_s,
            "tokens/s",
            each_while_generating=report.tokens_per_s,
            next_turn_ttft_ms=later[len(later) // 2] * 1e3 if later else None,
            note="all conversations together, prefills included",
        )


def decode(bench: Bench) -> None:
    for name, (context, steps, target) in ONE.items():
        bench.put_decode(name, bench.engine.decode([context], steps), target=target)


def batch(bench: Bench) -> None:
    for name, (sequences, context, steps, share) in MANY.items():
        figures = bench.engine.decode([context] * sequences, steps)
        bench.put_decode(name, figures, target=share * figures.bound)


def steps(bench: Bench) -> None:
    """Kernels of a step. What the engine has cached is lost: this comes last."""
    executor = bench.core.executor
    for label, (context, count) in STEPS.items():
        seconds = bench.engine.replays(context, count)
        bound = bench.engine.step_bound_s(context + count // 2)
        bench.engine.stage(context, 4 * (count + 1))
        with torch.inference_mode():
            kernels = breakdown(partial(executor.replay_s, 0, count), count + 1)
        if not kernels:
            raise BenchError("the profiler saw no kernels")
        moved = kernel_bytes(bench.core, context + count)
        rows = [described(kernel, moved.get(kernel.name), bench.rates.bandwidth) for kernel in kernels]
        bench.results.put(
            f"step_b1_{label}",
            seconds * 1e6,
            "µs",
            bound * 1e6,
            launches=sum(kernel.launches for kernel in kernels),
            kernels_us=sum(kernel.us for kernel in kernels),
            note="recorded steps one after the other, without the host; kernels overlap, so they add up to more",
        )
        bench.results.add("kernels", f"step_b1_{label}", rows)
        for row in rows[:20]:
            share = f"{row['share']:4.0%}" if row["share"] is not None else "    "
            print(f"{row['us']:9.1f} µs {row['launches']:6.1f} × {row['us_each']:7.2f}  {share}  {row['kernel'][:80]}")


def described(kernel: Kernel, moved: int | None, bandwidth: float) -> dict[str, Any]:
    """A kernel's row; `share`, of the read-only stream, where it is known what it must move."""
    share = moved / bandwidth / (kernel.us / 1e6) if moved else None
    row = {"kernel": kernel.name[:200], "launches": kernel.launches, "us": kernel.us, "us_each": kernel.us_each}
    return {key: short(value) for key, value in (row | {"bytes": moved, "share": share}).items()}


def kernel_bytes(core: EngineCore, context: int) -> dict[str, int]:
    """Bytes that the kernels of a step of one token must move, by name, where this file knows them."""
    model, pages, rows = core.executor.model, core.executor.pages.geometry, core.executor.rows
    config = model.config

    def of(*ends: str) -> int:
        return sum(
            value.numel() * value.element_size() for name, value in model.parameters.items() if name.endswith(ends)
        )

    chosen = config.experts_per_token / config.experts if config.experts else 0.0
    states = sum(tensor[0].numel() * tensor.element_size() for tensor in (*rows.conv, *rows.matrix))
    vocabulary = model.output.numel() * model.output.element_size()
    return {
        "_stream_kernel": of("mixer.input", "mixer.output") + vocabulary,
        "_add_norm_linear_kernel": of("feed_forward.router"),
        "_stream_gate_up_kernel": int(chosen * of("feed_forward.gate_up"))
        + of("feed_forward.shared.gate_up", "feed_forward.shared_gate"),
        "_stream_down_kernel": int(chosen * of("feed_forward.down")) + of("feed_forward.shared.down"),
        "_delta_net_step_kernel": 2 * states,
        "_decode_kernel": context * (pages.page_bytes // pages.page_size),
        "_survey_kernel": 4 * config.vocabulary,
    }


def long(bench: Bench) -> None:
    for name, (context, count) in LONG.items():
        seconds = bench.engine.replays(context, count)
        bound = 1 / bench.engine.step_bound_s(context + count // 2)
        bench.results.put(
            name,
            1 / seconds,
            "tokens/s",
            bound,
            share=1 / seconds / bound,
            step_ms=seconds * 1e3,
            note=f"position limit raised to {LONG_POSITIONS:,}; the recorded step replayed, without the host, over a "
            "page table of arbitrary pages of random numbers: the context was never computed",
        )


def peer(results: Results) -> None:
    """Plain `transformers` on the same device: greedy steps of one sequence, the same shape and type."""
    import transformers

    fields = {key: value for key, value in CONFIG.items() if key not in ("architectures", "model_type")}
    config = transformers.Qwen3_5MoeTextConfig(**fields)
    usual = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device(DEVICE):
            model = transformers.Qwen3_5MoeForCausalLM(config).eval()
    finally:
        torch.set_default_dtype(usual)
    say(f"transformers {transformers.__version__}: {sum(p.numel() for p in model.parameters()) / 1e9:.2f} G parameters")
    warm = 4
    with torch.inference_mode():
        ids = torch.randint(0, CONFIG["vocab_size"], (1, PEER_CONTEXT), device=DEVICE)
        output = model(input_ids=ids, use_cache=True, logits_to_keep=1)
        begun = time.perf_counter()
        for step in range(warm + PEER_TOKENS):
            if step == warm:
                synchronize()
                begun = time.perf_counter()
            token = output.logits[:, -1].argmax(-1, keepdim=True)
            output = model(input_ids=token, past_key_values=output.past_key_values, use_cache=True)
        synchronize()
        seconds = time.perf_counter() - begun
        if not bool(output.logits.isfinite().all()):
            raise BenchError("transformers' logits are not finite")
        length = output.past_key_values.get_seq_length()
        if length != PEER_CONTEXT + warm + PEER_TOKENS:
            raise BenchError(f"transformers' cache holds {length} tokens")
    name = "peer_transformers_b1_1k"
    results.put(
        name,
        PEER_TOKENS / seconds,
        "tokens/s",
        results.row("decode_b1_1k").get("bound"),
        about=f"transformers {transformers.__version__}",
    )


def synchronize() -> None:
    if DEVICE == "cuda":
        torch.cuda.synchronize()


PARTS: dict[str, Callable[[Bench], None]] = {
    "prefill": prefill,
    "agentic": agentic,
    "crowd": crowd,
    "decode": decode,
    "batch": batch,
    "breakdown": steps,
}
"""Of the engine at the model's own position limit, in this order."""


@contextmanager
def started(rates: Machine, results: Results, positions: int, sequences: int) -> Iterator[Bench]:
    """A checked engine, for as long as a block lasts."""
    with tempfile.TemporaryDirectory() as directory:
        model = Path(directory, "qwen3.5-35b-a3b-shape")
        model.mkdir()
        (model / "config.json").write_text(json.dumps(CONFIG | {"max_position_embeddings": positions}))
        phases: set[str] = set()

        def progress(phase: str, done: int, total: int) -> None:
            if phase not in phases:
                say(phase)
                phases.add(phase)

        settings = EngineConfig(model=str(model), device=DEVICE, load_format="dummy", max_sequences=sequences)
        bench = Bench(EngineCore(settings, progress=progress), rates, results)
    yield bench


class Runs:
    """Runs parts, and remembers which failed."""

    def __init__(self, results: Results) -> None:
        self.results = results
        self.failed: list[str] = []

    @contextmanager
    def part(self, name: str, command: str | None = None) -> Iterator[None]:
        self.results.part = command or f"--only {name}"
        say(f"part {name}")
        try:
            yield
        except BenchError as error:
            say(f"part {name}: the gate failed: {error}")
            self.failed.append(name)
        except Exception:
            traceback.print_exc()
            self.failed.append(name)

    def main_engine(self, names: list[str], rates: Machine) -> None:
        with started(rates, self.results, CONFIG["max_position_embeddings"], SEQUENCES) as bench:
            say(f"ready; contexts of up to {bench.core.info.max_context} tokens")
            phases = bench.core.info.startup_s
            self.results.part = "--only " + " ".join(names)
            self.results.put("startup", float(sum(phases.values())), "s", phases=phases)
            late = bench.core.stats().late_compilations
            self._late("gate", late)
            for name in names:
                with self.part(name):
                    PARTS[name](bench)
                before, late = late, bench.core.stats().late_compilations
                self._late(name, late - before)

    def long_engine(self, rates: Machine) -> None:
        with started(rates, self.results, LONG_POSITIONS, 1) as bench:
            long(bench)

    def _late(self, name: str, count: int) -> None:
        """What was compiled after the engine was ready, by part; parts of earlier runs are kept."""
        parts = self.results.row("compilations_after_ready").get("parts", {}) | {name: count}
        self.results.put("compilations_after_ready", sum(parts.values()), "kernels", 0, parts=parts)


def git_commit() -> str:
    try:
        found = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True)
        return found.stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="*", choices=[*PARTS, "long"], help="parts to run; all if left out")
    parser.add_argument("--peer", action="store_true", help="time plain transformers, too")
    parser.add_argument("--commit", help="of the code that is measured; git is asked if left out")
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results/h200.json"))
    options = parser.parse_args(arguments)
    torch.manual_seed(0)
    wanted = [*PARTS, "long"] if options.only is None else options.only
    results = Results(options.output, options.commit or git_commit())
    runs = Runs(results)
    if wanted:
        results.part = "--only " + " ".join(wanted)
        rates = Machine()
        results.put("read_bandwidth", rates.bandwidth / 1e12, "TB/s")
        names = [name for name in PARTS if name in wanted]
        if names:
            with runs.part("engine"):
                runs.main_engine(names, rates)
            free_memory()
        if "long" in wanted:
            with runs.part("long"):
                runs.long_engine(rates)
            free_memory()
    if options.peer:
        with runs.part("peer", "--only --peer"):
            peer(results)
    if runs.failed:
        sys.exit(f"failed: {', '.join(runs.failed)}")


if __name__ == "__main__":
    main()
