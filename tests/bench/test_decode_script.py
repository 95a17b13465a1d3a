"""benchmarks/decode.py from end to end, with a tiny model on a CPU in place of the large one on a GPU."""

from __future__ import annotations

import json
import weakref
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from tokenspeed.bench.agentic import Workload
from tokenspeed.bench.decode import DecodeBench, Kernel
from tokenspeed.bench.driver import BenchError
from tokenspeed.engine import memory
from tokenspeed.engine.core import EngineCore
from tokenspeed.execution.executor import Executor
from tokenspeed.models.random_weights import tiny_config

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
