from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from tokenspeed.config.model import ConfigError, ModelConfig
from tokenspeed.kernels.registry import select
from tokenspeed.models.checkpoint import CheckpointError
from tokenspeed.models.loading import load_model
from tokenspeed.models.qwen35 import Qwen35
from tokenspeed.models.random_weights import random_tensors, tiny_checkpoint, tiny_config, write_checkpoint

CPU = torch.device("cpu")
OPS = select(CPU, torch.float32)
QUERY = "model.layers.3.self_attn.q_proj.weight"


def load(directory: Path, dtype: torch.dtype = torch.float32, **options: Any) -> Qwen35:
    return load_model(directory, OPS, dtype, CPU, **options)


def tensors_of(raw: dict[str, Any], **options: Any) -> dict[str, Tensor]:
    config = ModelConfig.parse(raw, Path("config.json"))
    return dict(random_tensors(config, 0, torch.float32, CPU, **options))


@pytest.fixture
def written(tmp_path: Path) -> Callable[..., Path]:
    """Writes a tiny checkpoint whose tensors went through `change`."""

    def write(change: Callable[[dict[str, Tensor]], object] = len, files: int = 1, **changes: Any) -> Path:
        raw = tiny_config(**changes)
        tensors = tensors_of(raw)
        change(tensors)
        write_checkpoint(tmp_path, raw, tensors, files)
        return tmp_path

    return write


def same(first: Qwen35, second: Qwen35) -> bool:
    assert first.parameters.keys() == second.parameters.keys()
    return all(torch.equal(tensor, second.parameters[name]) for name, tensor in first.parameters.items())


def test_parameters_are_the_checkpoints_tensors_joined(written: Callable[..., Path]) -> None:
    tensors = tensors_of(tiny_config())
    parameters = load(written()).parameters

    def joined(*names: str) -> Tensor:
        return torch.cat([tensors[f"model.layers.{name}.weight"] for name in names])

    mixer = [f"0.linear_attn.in_proj_{name}" for name in ("qkv", "z", "b", "a")]
    assert torch.equal(parameters["layers.0.mixer.input"], joined(*mixer))
    assert torch.equal(parameters["layers.0.mixer.conv"], tensors["model.layers.0.linear_attn.conv1d.weight"][:, 0])
    assert torch.equal(parameters["layers.0.mixer.a_log"], tensors["model.layers.0.linear_attn.A_log"])
    attention = [f"3.self_attn.{name}_proj" for name in "qkv"]
    assert torch.equal(parameters["layers.3.mixer.input"], joined(*attention))
    shared = [f"3.mlp.shared_expert.{name}_proj" for name in ("gate", "up")]
    assert torch.equal(parameters["layers.3.feed_forward.shared.gate_up"], joined(*shared))
    assert torch.equal(parameters["layers.1.feed_forward.gate_up"], tensors["model.layers.1.mlp.experts.gate_up_proj"])
    assert torch.equal(parameters["output"], tensors["lm_head.weight"])


@pytest.mark.parametrize("files", [2, 3])
def test_several_files_with_an_index(files: int, written: Callable[..., Path], tmp_path: Path) -> None:
    whole = load(written())
    (tmp_path / "model.safetensors").unlink()
    directory = written(files=files)
    assert len(list(directory.glob("*.safetensors"))) == files
    assert same(load(directory), whole)


def test_a_checkpoint_with_other_modalities_and_experts_apart(written: Callable[..., Path], tmp_path: Path) -> None:
    plain = load(written())
    text = tiny_config()
    nested = {"model_type": "qwen3_5_moe", "text_config": text, "tie_word_embeddings": False}
    tensors = tensors_of(text, prefix="model.language_model.", experts_apart=True)
    assert "model.language_model.layers.2.mlp.experts.7.down_proj.weight" in tensors
    tensors["model.visual.blocks.0.attn.qkv.weight"] = torch.zeros(3)
    tensors["mtp.fc.weight"] = torch.zeros(3)
    write_checkpoint(tmp_path / "nested", nested, tensors)
    loaded = load(tmp_path / "nested")
    # Drawn per expert, the experts' weights are others; joined by hand they must be what was loaded.
    prefix = "model.language_model.layers.2.mlp.experts"
    for expert in range(8):
        gate_up = [tensors[f"{prefix}.{expert}.{name}_proj.weight"] for name in ("gate", "up")]
        assert torch.equal(loaded.parameters["layers.2.feed_forward.gate_up"][expert], torch.cat(gate_up))
        down = tensors[f"{prefix}.{expert}.down_proj.weight"]
        assert torch.equal(loaded.parameters["layers.2.feed_forward.down"][expert], down)
    for name in ("embedding", "layers.3.mixer.input", "layers.0.mixer.input", "output"):
        assert torch.equal(loaded.parameters[name], plain.parameters[name])


def test_tied_checkpoints_have_no_output_or_one_that_is_ignored(written: Callable[..., Path]) -> None:
    model = load(written(tie_word_embeddings=True))
    assert "output" not in model.parameters
    hidden = torch.randn(2, 32)
    torch.testing.assert_close(model.logits(hidden), hidden @ model.parameters["embedding"].T)

    def add_output(tensors: dict[str, Tensor]) -> None:
        tensors["lm_head.weight"] = torch.zeros(96, 32)

    assert same(load(written(add_output, tie_word_embeddings=True)), model)


def test_types_are_converted_and_decay_parameters_stay_exact(written: Callable[..., Path]) -> None:
    directory = written()
    single, half = load(directory), load(directory, torch.bfloat16)
    for name, tensor in half.parameters.items():
        exact = name.endswith(("a_log", "dt_bias"))
        assert tensor.dtype == (torch.float32 if exact else torch.bfloat16), name
        assert torch.equal(tensor, single.parameters[name].to(tensor.dtype))


def test_progress_counts_tensors(written: Callable[..., Path]) -> None:
    calls: list[tuple[int, int]] = []
    load(written(), progress=lambda done, total: calls.append((done, total)))
    count = len(tensors_of(tiny_config()))
    assert calls == [(done, count) for done in range(1, count + 1)]
    calls.clear()
    load(written(), load_format="dummy", progress=lambda done, total: calls.append((done, total)))
    assert calls == [(done, count) for done in range(1, count + 1)]


def drop(*names: str) -> Callable[[dict[str, Tensor]], None]:
    def change(tensors: dict[str, Tensor]) -> None:
        for name in names:
            del tensors[name]

    return change


def put(name: str, tensor: Tensor) -> Callable[[dict[str, Tensor]], None]:
    def change(tensors: dict[str, Tensor]) -> None:
        tensors[name] = tensor

    return change


def twice(tensors: dict[str, Tensor]) -> None:
    tensors["model.language_model.norm.weight"] = tensors["model.norm.weight"].clone()


def lose_an_expert(tensors: dict[str, Tensor]) -> None:
    fused = tensors.pop("model.layers.0.mlp.experts.down_proj")
    for expert in range(7):
        tensors[f"model.layers.0.mlp.experts.{expert}.down_proj.weight"] = fused[expert].clone()


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (drop(QUERY), "layers.3.self_attn.q_proj.weight is missing"),
        (drop("model.layers.0.mlp.experts.gate_up_proj"), "layers.0.mlp.experts.gate_up_proj is missing"),
        (drop("lm_head.weight"), "lm_head.weight is missing"),
        (lose_an_expert, "layers.0.mlp.experts.7.down_proj.weight is missing"),
        (put("model.layers.9.extra.weight", torch.zeros(1)), "model.layers.9.extra.weight is unexpected"),
        (put("strange", torch.zeros(1)), "strange is unexpected"),
        (put(QUERY, torch.zeros(128, 31)), r"q_proj.weight has the shape \[128, 31\] instead of \[128, 32\]"),
        (put(QUERY, torch.zeros(128, 32).char()), "q_proj.weight has the type torch.int8"),
        (twice, "model.norm.weight fills norm a second time"),
    ],
)
def test_what_is_wrong_with_a_tensor_is_named(
    change: Callable[[dict[str, Tensor]], object], complaint: str, written: Callable[..., Path]
) -> None:
    directory = written(change)
    with pytest.raises(CheckpointError, match=complaint) as caught:
        load(directory)
    assert str(directory) in str(caught.value)
    assert str(caught.value).count(";") == 0  # and nothing else is


def test_many_complaints_are_cut_short(written: Callable[..., Path]) -> None:
    with pytest.raises(CheckpointError, match="and 38 more"):
        load(written(lambda tensors: [tensors.pop(name) for name in list(tensors)[:48]]))


def truncate(directory: Path) -> None:
    file = directory / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def corrupt(directory: Path) -> None:
    (directory / "model.safetensors").write_bytes(b"\xff" * 100)


def lose_a_file(directory: Path) -> None:
    next(iter(sorted(directory.glob("model-*.safetensors")))).unlink()


def break_index(directory: Path) -> None:
    (directory / "model.safetensors.index.json").write_text("{")


def empty_index(directory: Path) -> None:
    (directory / "model.safetensors.index.json").write_text("[]")


def promise_too_much(directory: Path) -> None:
    path = directory / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"]["model.more"] = index["weight_map"]["model.norm.weight"]
    path.write_text(json.dumps(index))


@pytest.mark.parametrize(
    ("files", "damage", "complaint"),
    [
        (1, truncate, "model.safetensors: cannot be read"),
        (1, corrupt, "model.safetensors: cannot be read"),
        (1, lambda directory: (directory / "model.safetensors").unlink(), "holds neither model.safetensors nor"),
        (2, lose_a_file, "model-00001-of-00002.safetensors: cannot be read"),
        (2, break_index, "index.json: cannot be read"),
        (2, empty_index, "index.json: it has no weight_map"),
        (2, promise_too_much, "says that it holds model.more"),
    ],
)
def test_unreadable_files(
    files: int, damage: Callable[[Path], object], complaint: str, written: Callable[..., Path]
) -> None:
    directory = written(files=files)
    damage(directory)
    with pytest.raises(CheckpointError, match=complaint):
        load(directory)


def test_a_file_that_holds_no_tensors_of_ours(tmp_path: Path) -> None:
    tiny_checkpoint(tmp_path)
    save_file({"other": torch.zeros(2)}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"other is unexpected; .* is missing"):
        load(tmp_path)


def test_dummy_needs_only_the_config_and_depends_on_the_seed(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(tiny_config()))
    first, again, other = (load(tmp_path, load_format="dummy", seed=seed) for seed in (1, 1, 2))
    assert same(first, again)
    assert not same(first, other)
    with pytest.raises(CheckpointError):
        load(tmp_path)


def test_dummy_equals_the_tiny_checkpoint_of_its_seed(tmp_path: Path) -> None:
    assert same(load(tiny_checkpoint(tmp_path, seed=3)), load(tmp_path, load_format="dummy", seed=3))


def test_a_directory_without_config(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no such file"):
        load(tmp_path)
