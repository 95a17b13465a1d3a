"""Logits of a whole engine, of prompts and of recorded decode steps, beside the reference operators' in float32."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tokenspeed.cache.pools import PagePool, StateRows
from tokenspeed.config.engine import EngineConfig
from tokenspeed.config.model import ModelConfig
from tokenspeed.config.sampling import SamplingParams
from tokenspeed.engine.core import EngineCore
from tokenspeed.engine.messages import Generate
from tokenspeed.kernels.registry import select
from tokenspeed.models.batch import Batch
from tokenspeed.models.loading import load_model
from tokenspeed.models.qwen35 import Qwen35, cache_geometry
from tokenspeed.models.random_weights import random_tensors, tiny_config, write_checkpoint
from tokenspeed.scheduler.plan import LogEntry, Plan

CPU = torch.device("cpu")
MOE, DENSE = "qwen3_5_moe_text", "qwen3_5_text"
HEAD_64 = {
    "hidden_size": 128,
    "head_dim": 64,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "intermediate_size": 192,
    "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 64,
    "vocab_size": 512,
}
HEAD_256 = HEAD_64 | {
    "head_dim": 256,
    "num_attention_heads": 8,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "num_experts": 16,
    "num_experts_per_tok": 4,
}
MODELS: dict[str, dict[str, Any]] = {
    "moe": {"model_type": MOE},
    "dense": {"model_type": DENSE},
    "dense, heads of 64": {"model_type": DENSE} | HEAD_64,
    "moe, heads of 256": {"model_type": MOE} | HEAD_256,
}
PROMPTS, OUTPUT = (5, 50, 130), 24
CHUNK = 64

FLOAT32_BOUND = 1e-3
"""‖logits − expected‖ ÷ ‖expected‖. Products and sums in float32 are off by about 1e-6."""
BFLOAT16_MEDIAN, BFLOAT16_FAR = 2.0, 5.0
"""How many times the median of what rounding to bfloat16 does to the reference the engine may be off, in the median
and anywhere: its kernels round at other places than the reference, so the errors are alike in size but not the same."""
FLIPPED, FLIPPED_BOUND = 0.2, 0.6
"""In a mixture of experts a rounding may lead to another expert. Of six references, rounded, up to a tenth of the
positions were so far off, and none by more than 0.31."""


class Watch:
    """What `Qwen35.logits` gave; of recorded steps the memory that every replay writes again."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.recorded: dict[int, Tensor] = {}
        self.eager: list[Tensor] = []
        logits = Qwen35.logits

        def watched(model: Qwen35, hidden: Tensor) -> Tensor:
            result = logits(model, hidden)
            if result.is_cuda and torch.cuda.is_current_stream_capturing():
                self.recorded[len(result)] = result
            else:
                self.eager.append(result)
            return result

        monkeypatch.setattr(Qwen35, "logits", watched)


def checkpoint(directory: Path, changes: dict[str, Any]) -> Path:
    """A model whose weights are bfloat16, so that engines of both types have the same."""
    raw = tiny_config(**changes)
    config = ModelConfig.parse(raw, directory / "config.json")
    write_checkpoint(directory, raw, dict(random_tensors(config, 7, torch.bfloat16, CPU)))
    return directory


def sequences(vocabulary: int) -> list[list[int]]:
    rng = np.random.default_rng(5)
    return [rng.integers(2, vocabulary, length + OUTPUT).tolist() for length in PROMPTS]


def reference(directory: Path, dtype: torch.dtype, vocabulary: int) -> list[Tensor]:
    """Logits [OUTPUT, vocabulary] of each sequence by the reference operators on the CPU, computed in one piece."""
    model = load_model(directory, select(CPU, dtype), dtype, CPU, "auto", 0, None)
    expected = []
    for prompt, ids in zip(PROMPTS, sequences(vocabulary), strict=True):
        count, geometry = len(ids), cache_geometry(model.config, 16, dtype)
        needed = -(-count // 16)
        pages, rows = PagePool(geometry, needed + 1, CPU), StateRows(geometry, 2, CPU)
        positions = torch.arange(count)
        batch = Batch(
            positions=positions,
            starts=torch.tensor([0, count]),
            lengths=torch.tensor([count]),
            page_table=torch.arange(1, needed + 1)[None],
            kv_rows=positions + 16,
            read_rows=torch.tensor([0]),
            write_rows=torch.tensor([1]),
            decode=False,
            stores=None,
            longest_query=count,
            longest=count,
        )
        hidden = model.forward(torch.tensor(ids), batch, pages, rows)
        expected.append(model.logits(hidden[prompt - 1 : prompt - 1 + OUTPUT]).double())
    return expected


def through_the_engine(
    directory: Path, dtype: str, device: torch.device, watch: Watch, vocabulary: int
) -> tuple[list[Tensor], EngineCore]:
    """The same logits by an engine, the three side by side: prompts in chunks, then steps of up to three; what goes
    through the model is forced, so that no near tie leads elsewhere."""
    core = EngineCore(
        EngineConfig(
            model=str(directory),
            device=str(device),
            dtype=dtype,  # type: ignore[arg-type]
            depth=1,
            page_size=16,
            pages=64,
            rows=40,
            prefill_chunk=CHUNK,
            max_sequences=3,
            max_context=256,
            forced_tokens=True,
        )
    )
    got: dict[str, list[Tensor]] = {str(number): [] for number in range(len(PROMPTS))}
    watch.eager.clear()

    def on_tick(entry: LogEntry, plan: Plan) -> None:
        names = {run: state.turn.name for run, state in core.scheduler.running.items()}
        eager = [tensor.double().cpu() for tensor in watch.eager]
        watch.eager.clear()
        sampling = [chunk.run for chunk in plan.prefills if chunk.sample]
        if sampling:
            for run, row in zip(sampling, eager.pop(0), strict=True):
                got[names[run]].append(row)
        if plan.decodes:
            if watch.recorded:
                size = min(size for size in watch.recorded if size >= len(plan.decodes))
                eager.append(watch.recorded[size].double().cpu()[: len(plan.decodes)])
            for (_, run), row in zip(plan.decodes, eager.pop(0), strict=True):
                got[names[run]].append(row)
        assert not eager

    core.on_tick = on_tick
    for number, (prompt, ids) in enumerate(zip(PROMPTS, sequences(vocabulary), strict=True)):
        params = SamplingParams(temperature=0, max_tokens=OUTPUT, ignore_eos=True, forced_token_ids=tuple(ids[prompt:]))
        core.submit(Generate(str(number), "t", np.asarray(ids[:prompt], "<i4").tobytes(), params))
    while core.busy:
        core.step()
    return [torch.stack(rows) for rows in got.values()], core


def errors(got: list[Tensor], expected: list[Tensor]) -> Tensor:
    """Of every position of every sequence."""
    assert [len(rows) for rows in got] == [OUTPUT] * len(PROMPTS)
    both = zip(got, expected, strict=True)
    return torch.cat([(one - other).norm(dim=-1) / other.norm(dim=-1) for one, other in both])


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_logits_are_the_references(
    name: str, dtype: str, device: torch.device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = checkpoint(tmp_path, MODELS[name])
    vocabulary = tiny_config(**MODELS[name])["vocab_size"]
    expected = reference(directory, torch.float32, vocabulary)
    rounded = errors(reference(directory, torch.bfloat16, vocabulary), expected)
    got, core = through_the_engine(directory, dtype, device, Watch(monkeypatch), vocabulary)
    off = errors(got, expected)
    print(
        f"\n{name}, {dtype}: median {off.median():.1e}, most {off.max():.1e}; the reference rounded to bfloat16: "
        f"median {rounded.median():.1e}, most {rounded.max():.1e}"
    )
    assert core.stats().late_compilations == 0
    if dtype == "float32":
        assert off.max() <= FLOAT32_BOUND
    else:
        assert off.median() <= BFLOAT16_MEDIAN * rounded.median()
        far = (off > BFLOAT16_FAR * rounded.median()).double().mean()
        assert far <= (FLIPPED if "moe" in name else 0.0)
        assert off.max() <= FLIPPED_BOUND
