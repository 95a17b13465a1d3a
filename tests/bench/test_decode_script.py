"""benchmarks/decode.py from end to end, with a tiny model on a CPU in place of the large one on a GPU."""

from __future__ import annotations

import json
import weakref
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from tokenspeed.bench.agentic import Workload
from tokenspeed.bench.bound import prefill_bound_s, step_bytes
from tokenspeed.bench.decode import DecodeBench, Kernel
from tokenspeed.bench.driver import BenchError
from tokenspeed.cache.pools import StateRows
from tokenspeed.config.model import ModelConfig
from tokenspeed.engine import memory
from tokenspeed.engine.core import EngineCore
from tokenspeed.execution.executor import Executor
from tokenspeed.kernels.registry import select
from tokenspeed.models.qwen35 import Qwen35, cache_geometry
from tokenspeed.models.random_weights import tiny_config

ROOT = Path(__file__).parents[2]
ROWS = {
    "read_bandwidth",
    "decode_b1_1k",
    "decode_b1_50k",
    "decode_b1_128k",
    "decode_b1_250k",
    "decode_b1_512k",
    "decode_b1_1m",
    "decode_b8_8k",
    "decode_b32_8k",
    "prefill_50k",
    "next_turn_ttft_50k",
    "next_turn_computed_50k",
    "agentic_hit_rate",
    "agentic_tokens_per_s",
}

FIELDS = {"name", "value", "unit", "bound", "command", "date", "commit"}


@pytest.fixture
def tiny_script(script: Any, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    torch.set_num_threads(1)

    def replay_s(self: Executor, place: int, steps: int) -> float:
        """Without recordings: the same steps one by one."""
        for _ in range(steps + 1):
            longest = int(self.channel.length[place]) + 1
            self._step(torch.tensor([place]), -(-longest // self.channel.page_size), longest)
        return 0.001

    def breakdown(run: Callable[[], object], steps: int) -> list[Kernel]:
        for _ in range(2):
            run()
        return [Kernel("_stream_kernel", 4.0, 20.0, 5.0), Kernel("another", 1.0, 2.0, 2.0)]

    small = {
        "DEVICE": "cpu",
        "CONFIG": tiny_config(architectures=["Qwen3_5MoeForCausalLM"], max_position_embeddings=700),
        "LONG_POSITIONS": 3000,
        "CHECKED": 30,
        "ONE": {
            name: (context, 10, target)
            for context, (name, (_, _, target)) in zip((20, 90, 200, 400), script.ONE.items(), strict=True)
        },
        "MANY": {"decode_b8_8k": (3, 30, 10, 0.75), "decode_b32_8k": (5, 30, 10, 0.8)},
        "LONG": {"decode_b1_512k": (1500, 3), "decode_b1_1m": (2900, 3)},
        "STEPS": {"1k": (20, 3), "50k": (100, 3)},
        "PROMPT": 120,
        "NEW": 20,
        "WORKLOAD": Workload(60, 4, 15, 10),
        "PLAIN_STEPS": 10,
        "CROWDS": (2,),
        "SEQUENCES": 5,
        "PEER_CONTEXT": 40,
        "PEER_TOKENS": 4,
        "breakdown": breakdown,
    }
    for name, value in small.items():
        assert hasattr(script, name)
        monkeypatch.setattr(script, name, value)
    monkeypatch.setattr(Executor, "replay_s", replay_s)
    monkeypatch.setattr(memory, "CPU_CACHE_BYTES", 16 << 20)
    return script


def rows_of(path: Path) -> dict[str, Any]:
    return {row["name"]: row for row in json.loads(path.read_text())["rows"]}


def test_every_part_writes_its_rows(tiny_script: Any, tmp_path: Path) -> None:
    output = tmp_path / "results" / "h200.json"
    tiny_script.main(["--output", str(output), "--commit", "abc"])
    rows = rows_of(output)
    assert rows.keys() >= ROWS
    for row in rows.values():
        assert row.keys() >= FIELDS
        assert row["commit"] == "abc"
    assert rows["next_turn_computed_50k"]["value"] == 21
    assert rows["compilations_after_ready"]["value"] == 0
    assert rows["compilations_after_ready"]["parts"].keys() == {"gate", *tiny_script.PARTS}
    prompts = [60, 85, 110, 135]
    assert rows["agentic_hit_rate"]["bound"] == pytest.approx(100 * (1 - (60 + 3 * 15) / sum(prompts)), rel=1e-4)
    assert rows["agentic_hit_rate"]["value"] == pytest.approx(100 * (1 - (60 + 3 * 16) / sum(prompts)), rel=1e-4)
    assert "3,000" in rows["decode_b1_1m"]["note"]
    content = json.loads(output.read_text())
    assert [row["kernel"] for row in content["kernels"]["step_b1_1k"]] == ["_stream_kernel", "another"]
    assert len(content["turns"]["agentic"]) == 4


def test_bytes_and_bounds_of_the_large_shape(script: Any) -> None:
    """Weights 5.893 GB of a step, states 0.129 GB, 20,480 bytes for each token before it; so at 4.53 TB/s 750, 643 and
    270 tokens/s at 1K, 50K and 512K; at 750 TFLOP/s 0.60 s for 50,000 tokens and about 27 ms for 800 behind them."""
    meta = torch.device("meta")
    config = ModelConfig.parse(script.CONFIG, Path("config.json"))
    model = Qwen35(config, select(torch.device("cpu"), torch.bfloat16), torch.bfloat16, meta)
    geometry = cache_geometry(config, 64, torch.bfloat16)
    experts = 8 * 40
    assert step_bytes(model, geometry, [], experts) / 1e9 == pytest.approx(5.893, abs=5e-4)
    step = step_bytes(model, geometry, [1000], experts)
    assert step == step_bytes(model, geometry, [0], experts) + 1000 * 20_480
    assert [round(4.53e12 / step_bytes(model, geometry, [at], experts)) for at in (1000, 50_000, 2**19)] == [
        750,
        643,
        270,
    ]
    assert prefill_bound_s(model, 0, 50_000, 4.53e12, 750e12) == pytest.approx(0.60, abs=0.005)
    assert prefill_bound_s(model, 50_000, 800, 4.53e12, 750e12) == pytest.approx(0.027, abs=0.001)
    executor = SimpleNamespace(model=model, pages=SimpleNamespace(geometry=geometry), rows=StateRows(geometry, 2, meta))
    by_kernel = script.kernel_bytes(SimpleNamespace(executor=executor), 1000)
    assert sum(by_kernel.values()) == pytest.approx(step, rel=1e-3)
    sources = "".join(path.read_text() for path in (ROOT / "kernels" / "triton").glob("*.py"))
    assert all(f"def {kernel}(" in sources for kernel in by_kernel)


def test_parts_are_merged_into_what_is_there(tiny_script: Any, tmp_path: Path) -> None:
    output = tmp_path / "h200.json"
    tiny_script.main(["--only", "prefill", "--output", str(output), "--commit", "old"])
    tiny_script.main(["--only", "batch", "--output", str(output), "--commit", "new"])
    rows = rows_of(output)
    assert (rows["prefill_50k"]["commit"], rows["decode_b8_8k"]["commit"]) == ("old", "new")
    assert rows["decode_b8_8k"]["command"] == "python benchmarks/decode.py --only batch"
    assert rows["compilations_after_ready"]["parts"] == {"gate": 0, "prefill": 0, "batch": 0}
    assert "decode_b1_1k" not in rows


def test_a_failed_gate_writes_no_figure(
    tiny_script: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def check(self: DecodeBench, length: int) -> float:
        raise BenchError("they differ")

    monkeypatch.setattr(DecodeBench, "check", check)
    output = tmp_path / "h200.json"
    with pytest.raises(SystemExit, match="failed: engine, long"):
        tiny_script.main(["--output", str(output), "--commit", "abc"])
    assert rows_of(output).keys() == {"read_bandwidth"}
    assert "the gate failed: they differ" in capsys.readouterr().out


def test_a_part_that_breaks_leaves_the_others(
    tiny_script: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(bench: Any) -> None:
        raise RuntimeError("out of something")

    monkeypatch.setitem(tiny_script.PARTS, "prefill", broken)
    output = tmp_path / "h200.json"
    with pytest.raises(SystemExit, match=r"failed: prefill$"):
        tiny_script.main(["--only", "prefill", "batch", "--output", str(output), "--commit", "abc"])
    assert "decode_b8_8k" in rows_of(output)


def test_the_peer(tiny_script: Any, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    output = tmp_path / "h200.json"
    tiny_script.main(["--only", "--peer", "--output", str(output), "--commit", "abc"])
    assert rows_of(output)["peer_transformers_b1_1k"]["value"] > 0


def test_engines_leave_no_memory_behind(tiny_script: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = []

    class Core(EngineCore):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            kept.append(weakref.ref(self))

    monkeypatch.setattr(tiny_script, "EngineCore", Core)
    tiny_script.main(["--only", "prefill", "decode", "long", "--output", str(tmp_path / "h200.json"), "--commit", "a"])
    assert [made() for made in kept] == [None, None]
