"""Time of each operator on a GPU at the shapes of Qwen3.5-35B-A3B, beside the bytes that it must move.

    python benchmarks/kernels.py [--only WORD …] [--output FILE]

Operators of a decode step are recorded many times in a row into one CUDA graph, over weights that together do not fit
into the L2, so that launches overlap as they do in a step. Operators of a prefill are timed one by one. This is for
finding what to mend: correctness is `tests/kernels/triton` on the same machine; figures to publish come from decode.py.
"""

from __future__ import annotations

import argparse
import json
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tokenspeed.bench.bound import read_bandwidth
from tokenspeed.kernels import dense_attention
from tokenspeed.kernels.registry import Operators, select
from tokenspeed.kernels.sampling import SamplingOptions, pack_scalars

DEVICE, DTYPE = torch.device("cuda"), torch.bfloat16
HIDDEN, HEADS, KV_HEADS, HEAD_DIM, PAGE = 2048, 16, 2, 256, 64
KEY_HEADS, VALUE_HEADS, DIM = 16, 32, 128
CHANNELS, EXPERTS, CHOSEN, WIDTH, VOCABULARY = 8192, 256, 8, 512, 248320
INPUTS = CHANNELS + VALUE_HEADS * DIM + 2 * VALUE_HEADS
L2_BYTES = 120 << 20


def randn(*shape: int, scale: float = 1.0, dtype: torch.dtype = DTYPE) -> Tensor:
    return torch.randn(*shape, device=DEVICE, dtype=dtype) * scale


def copies(bytes_each: int) -> int:
    """So many sets of weights that one is out of the cache when it is used again."""
    return max(2, min(64, -(-L2_BYTES // bytes_each)))


def graph_us(runs: list[Callable[[], Any]], launches: int = 60) -> float:
    """Microseconds of one of `runs`, called in turn within a graph."""
    for run in runs[:2]:
        run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    kept = []
    with torch.cuda.graph(graph):
        for index in range(launches):
            kept.append(runs[index % len(runs)]())
    return events_us(graph.replay, 10) / launches


def events_us(run: Callable[[], Any], repeats: int = 5) -> float:
    run()
    times = []
    for _ in range(repeats):
        begun, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begun.record()
        run()
        ended.record()
        ended.synchronize()
        times.append(begun.elapsed_time(ended) * 1e3)
    return sorted(times)[repeats // 2]


Case = tuple[str, float, float]
"""Name, microseconds, bytes that must move (0: bound by arithmetic)."""


def products(ops: Operators) -> Iterator[Case]:
    for outputs, depth in [(INPUTS, 2048), (9216, 2048), (2048, 4096), (256, 2048), (VOCABULARY, 2048)]:
        size = outputs * depth * 2
        weights = [randn(outputs, depth, scale=depth**-0.5) for _ in range(copies(size))]
        for tokens in (1, 8, 32):
            x, residual, norm = randn(tokens, depth), randn(tokens, depth), randn(depth, scale=0.1)
            launches = 60 if outputs < 100000 else 10
            operator = ops.vocabulary_logits if outputs == VOCABULARY else ops.linear
            runs = [lambda w=w, x=x, f=operator: f(x, w) for w in weights]
            yield f"product {outputs}x{depth}, {tokens} tokens", graph_us(runs, launches), size
            if tokens == 1 and outputs in (INPUTS, 256):
                runs = [lambda w=w: ops.add_norm_linear(x, residual, norm, 1e-6, w) for w in weights]
                yield f"add, norm and product {outputs}x{depth}", graph_us(runs), size
    x, residual, norm = randn(1, HIDDEN), randn(1, HIDDEN), randn(HIDDEN)
    yield "add and norm, 1 token", graph_us([lambda: ops.add_rms_norm(x, residual, norm, 1e-6)]), 0


def delta_net_steps(ops: Operators) -> Iterator[Case]:
    conv, norm = randn(CHANNELS, 4), randn(DIM)
    a_log, dt_bias = randn(VALUE_HEADS), randn(VALUE_HEADS)
    rows = 128
    windows = randn(rows, CHANNELS, 3)
    matrices = randn(rows, VALUE_HEADS, DIM, DIM, dtype=torch.float32)
    for n in (1, 8, 32):
        x = randn(n, INPUTS)
        ids = torch.arange(1, rows, device=DEVICE)
        made = [(ids[at : at + n], ids[at + n : at + 2 * n]) for at in range(0, len(ids) - 2 * n + 1, 2 * n)]
        runs = [
            lambda r=r, w=w, x=x: ops.delta_net_step(x, conv, a_log, dt_bias, norm, windows, matrices, r, w, 1e-6)
            for r, w in made
        ]
        yield f"delta net step, {n}", graph_us(runs), n * 2 * (VALUE_HEADS * DIM * DIM * 4 + CHANNELS * 3 * 2)


def attention_steps(ops: Operators) -> Iterator[Case]:
    for n, length in [(1, 1000), (1, 50000), (1, 250000), (8, 8000), (32, 8000)]:
        count = n * -(-length // PAGE)
        sets = copies(count * PAGE * KV_HEADS * HEAD_DIM * 4)
        pages = [tuple(randn(count + 1, PAGE, KV_HEADS, HEAD_DIM) for _ in range(2)) for _ in range(min(sets, 8))]
        table = torch.zeros(n, 16384, dtype=torch.int64, device=DEVICE)
        table[:, : count // n] = 1 + torch.randperm(count, device=DEVICE).view(n, -1)
        lengths = torch.full((n,), length, device=DEVICE)
        q, gate = randn(n, HEADS, HEAD_DIM), randn(n, HEADS, HEAD_DIM)
        runs = [lambda k=k, v=v: ops.attention_decode(q, gate, k, v, table, lengths, length) for k, v in pages]
        yield f"attention, {n} at {length}", graph_us(runs, 20), n * length * KV_HEADS * HEAD_DIM * 4
    qkv, weight = randn(1, 2 * HEADS * HEAD_DIM + 2 * KV_HEADS * HEAD_DIM), randn(HEAD_DIM)
    cos, sin = ops.rotary_table(torch.tensor([77], device=DEVICE), 1e7, 64, DTYPE)
    row = torch.tensor([99], device=DEVICE)
    k, v = pages[0]
    yield (
        "norm, rotation and KV write, 1 token",
        graph_us([lambda: ops.qk_norm_rope_write(qkv, weight, weight, cos, sin, k, v, row, HEADS, KV_HEADS, 1e-6)]),
        0,
    )
    positions = torch.tensor([77], device=DEVICE)
    yield "rotary table, 1 token", graph_us([lambda: ops.rotary_table(positions, 1e7, 64, DTYPE)]), 0


def mixtures(ops: Operators) -> Iterator[Case]:
    one = EXPERTS * 3 * WIDTH * HIDDEN * 2
    weights = [
        (randn(EXPERTS, 2 * WIDTH, HIDDEN, scale=0.02), randn(EXPERTS, HIDDEN, WIDTH, scale=0.04)) for _ in range(3)
    ]
    shared = (randn(2 * WIDTH, HIDDEN, scale=0.02), randn(HIDDEN, WIDTH, scale=0.04), randn(1, HIDDEN, scale=0.02))
    for tokens in (1, 2, 4, 8, 32, 128, 800, 8192):
        x = randn(tokens, HIDDEN)
        chosen = [ops.route(randn(tokens, EXPERTS), CHOSEN) for _ in range(7)]
        touched = sum(int(experts.unique().numel()) for _, experts in chosen) / len(chosen)
        runs = [lambda c=c, w=w, x=x: ops.mixture(x, *c, *w, *shared) for c in chosen for w in weights]
        size = int((touched + 1) * one / EXPERTS)
        if tokens <= 64:
            yield f"mixture, {tokens} tokens", graph_us(runs, 42), size
        else:
            flops = tokens * (CHOSEN + 1) * 6 * WIDTH * HIDDEN
            us = events_us(runs[0])
            yield f"mixture, {tokens} tokens ({flops / us / 1e6:.0f} TFLOP/s)", us, size
    logits = randn(1, EXPERTS)
    yield "route, 1 token", graph_us([lambda: ops.route(logits, CHOSEN)]), 0
    logits8 = randn(8192, EXPERTS)
    yield "route, 8192 tokens", events_us(lambda: ops.route(logits8, CHOSEN)), 0


def sampling(ops: Operators) -> Iterator[Case]:
    for n in (1, 32):
        places = torch.arange(n, device=DEVICE)
        live = torch.ones(n, dtype=torch.bool, device=DEVICE)
        logits = randn(n, VOCABULARY, scale=3.0, dtype=torch.float32)
        for name, words in [
            ("greedy", {"temperature": 0.0}),
            ("temperature", {"temperature": 0.8}),
            ("top-k 20, top-p 0.95", {"temperature": 0.6, "top_k": 20, "top_p": 0.95}),
            ("top-p 0.95", {"temperature": 0.8, "top_p": 0.95}),
            ("penalties", {"temperature": 0.8, "repetition": 1.1, "adjusted": True}),
            ("logprobs", {"temperature": 0.0, "reported": 20}),
        ]:
            options = SamplingOptions.empty(n, VOCABULARY, None, DEVICE)
            options.scalars.copy_(pack_scalars(seed=1, **words).repeat(n, 1))  # type: ignore[arg-type]
            run = lambda options=options, logits=logits, p=places, v=live: ops.choose(logits, options, p, p, v)
            yield f"choose {name}, {n}", graph_us([run], 20), n * VOCABULARY * 4


def prefills(ops: Operators) -> Iterator[Case]:
    for tokens, before in [(8192, 0), (8192, 40960), (800, 50000), (8192, 250000)]:
        length = before + tokens
        count = -(-length // PAGE)
        k, v = (randn(count + 1, PAGE, KV_HEADS, HEAD_DIM) for _ in range(2))
        table = 1 + torch.randperm(count, device=DEVICE)[None]
        positions = torch.arange(before, length, device=DEVICE)
        starts, lengths = torch.tensor([0, tokens], device=DEVICE), torch.tensor([length], device=DEVICE)
        q, gate = randn(tokens, HEADS, HEAD_DIM), randn(tokens, HEADS, HEAD_DIM)
        flops = 4 * HEADS * HEAD_DIM * (tokens * before + tokens * tokens / 2)
        for name, function in attention_ways(ops):
            run = lambda f=function: f(
                q, gate, k, v, table, positions, starts, lengths, length, bounds=((tokens, length),)
            )
            try:
                us = events_us(run, 3)
                yield f"{name}, {tokens} after {before} ({flops / us / 1e6:.0f} TFLOP/s)", us, 0
            except Exception as error:
                yield f"{name}, {tokens} after {before}: {str(error).splitlines()[0][:60]}", float("nan"), 0
    for tokens in (800, 8192):
        x = randn(tokens, INPUTS)
        qkv, z, b, a = x.split([CHANNELS, VALUE_HEADS * DIM, VALUE_HEADS, VALUE_HEADS], dim=-1)
        windows, matrices = randn(4, CHANNELS, 3), randn(4, VALUE_HEADS, DIM, DIM, dtype=torch.float32)
        conv, a_log, dt_bias = randn(CHANNELS, 4), randn(VALUE_HEADS), randn(VALUE_HEADS)
        starts = torch.tensor([0, tokens], device=DEVICE)
        read, write = torch.tensor([1], device=DEVICE), torch.tensor([2], device=DEVICE)
        mixed = randn(tokens, VALUE_HEADS, DIM)
        yield (
            f"convolution, {tokens} tokens",
            events_us(lambda: ops.causal_conv_prefill(qkv, conv, windows, starts, read, write, None)),
            tokens * CHANNELS * 4,
        )
        after = ops.causal_conv_prefill(qkv, conv, windows, starts, read, write, None)
        yield (
            f"delta rule, {tokens} tokens",
            events_us(
                lambda: ops.gated_delta_prefill(after, a, b, a_log, dt_bias, matrices, starts, read, write, None)
            ),
            tokens * (CHANNELS + VALUE_HEADS * DIM) * 2,
        )
        yield (
            f"gated norm, {tokens} tokens",
            events_us(lambda: ops.gated_rms_norm(mixed, z.unflatten(-1, (VALUE_HEADS, DIM)), randn(DIM), 1e-6)),
            tokens * VALUE_HEADS * DIM * 6,
        )
        residual, wide = randn(tokens, HIDDEN), randn(tokens, HIDDEN)
        norm, weight = randn(HIDDEN), randn(INPUTS, HIDDEN)
        yield (
            f"add and norm, {tokens} tokens",
            events_us(lambda: ops.add_rms_norm(wide, residual, norm, 1e-6)),
            tokens * HIDDEN * 8,
        )
        flops = 2 * tokens * HIDDEN * INPUTS
        us = events_us(lambda: ops.linear(wide, weight))
        yield f"product {INPUTS}x{HIDDEN}, {tokens} tokens ({flops / us / 1e6:.0f} TFLOP/s)", us, 0
        qkv9 = randn(tokens, 9216)
        cos, sin = ops.rotary_table(torch.arange(tokens, device=DEVICE), 1e7, 64, DTYPE)
        k, v = (randn(tokens // PAGE + 2, PAGE, KV_HEADS, HEAD_DIM) for _ in range(2))
        rows = torch.arange(PAGE, PAGE + tokens, device=DEVICE)
        head_norm = randn(HEAD_DIM)
        yield (
            f"norm, rotation and KV write, {tokens} tokens",
            events_us(
                lambda: ops.qk_norm_rope_write(qkv9, head_norm, head_norm, cos, sin, k, v, rows, HEADS, KV_HEADS, 1e-6)
            ),
            tokens * 9216 * 4,
        )


def attention_ways(ops: Operators) -> Iterator[tuple[str, Callable[..., Any]]]:
    yield "attention", ops.attention_prefill
    yield "attention by cuDNN", dense_attention.attention_prefill


GROUPS = {
    "products": products,
    "delta": delta_net_steps,
    "attention": attention_steps,
    "mixture": mixtures,
    "sampling": sampling,
    "prefill": prefills,
}


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="*", default=list(GROUPS), choices=list(GROUPS))
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    torch.manual_seed(0)
    bandwidth = read_bandwidth(DEVICE)
    print(f"read-only stream: {bandwidth / 1e12:.2f} TB/s")
    ops = select(DEVICE, DTYPE)
    rows = []
    for name in options.only:
        try:
            for case, us, size in GROUPS[name](ops):
                share = size / bandwidth * 1e6 / us if us else 0
                print(f"{us:10.1f} µs  {share:5.0%}  {case}" if size else f"{us:10.1f} µs         {case}", flush=True)
                rows.append({"case": case, "us": us, "bytes": size, "share_of_stream": share})
        except Exception:
            traceback.print_exc()
    if options.output:
        options.output.write_text(json.dumps({"read_bandwidth": bandwidth, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
