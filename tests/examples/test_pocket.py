"""The model that ships, and the programs that made it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
POCKET = ROOT / "tokenspeed" / "pocket"


@pytest.fixture(scope="module", autouse=True)
def programs():
    """The folder's programs import each other by their bare names."""
    sys.path.insert(0, str(ROOT / "examples" / "pocket"))
    before = set(sys.modules)
    yield
    sys.path.remove(str(ROOT / "examples" / "pocket"))
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", "") or "").startswith(str(ROOT / "examples" / "pocket")):
            del sys.modules[name]


@pytest.fixture(scope="module")
def dialogues(programs):
    """Dialogues of both sides of the split, twelve exchanges each."""
    from generate import Dialogue

    made = [Dialogue(seed, evaluation=seed % 2 == 1) for seed in range(30)]
    for dialogue in made:
        for _ in range(12):
            dialogue.extend()
    return made


@pytest.fixture(scope="module")
def encoder(programs):
    from tokenizer import Encoder

    return Encoder(POCKET / "tokenizer.json")


@pytest.mark.parametrize("keep", [True, False])
def test_training_text_is_the_templates(dialogues, keep):
    from transformers import PreTrainedTokenizerFast

    from render import plain, render

    tokenizer = PreTrainedTokenizerFast.from_pretrained(POCKET)
    for dialogue in dialogues:
        messages = plain(dialogue.messages)
        if dialogue.system is not None:
            messages.insert(0, {"role": "system", "content": dialogue.system})
        expected = tokenizer.apply_chat_template(
            messages,
            tools=[{"type": "function", "function": schema} for schema in dialogue.schemas] or None,
            tokenize=False,
            preserve_thinking=keep,
        )
        parts = render(dialogue.schemas, dialogue.system, dialogue.messages, keep)
        assert "".join(part.text for part in parts) == expected


def test_pieces_have_the_ids_of_the_whole(dialogues, encoder):
    from render import render

    for dialogue in dialogues:
        parts = render(dialogue.schemas, dialogue.system, dialogue.messages)
        joined: list[int] = []
        text = ""
        for part in parts:
            if part.control:
                joined += [*encoder.plain.encode(text).ids, encoder.control[part.text]]
                text = ""
            else:
                text += part.text
        joined += encoder.plain.encode(text).ids
        assert encoder.segments(parts)[0] == joined


@pytest.mark.parametrize(
    "text", ["naïve 東京 😀🌧️ \t\r\n\0 ", "<|im_end|><tool_call></think>", '": {"a": [1, "b"]}', "  a   b\n\n"]
)
def test_every_text_comes_back_and_has_no_control_token(encoder, text):
    ids = encoder.plain.encode(text).ids
    assert encoder.plain.decode(ids) == text
    assert not set(ids) & set(encoder.control.values())


def test_a_value_has_the_same_ids_in_request_schema_and_call(encoder):
    for value in ("Zorbel", "ord_88f2c", "AX-4471", "Lisbon", "21.5"):
        ids = encoder.plain.encode(value).ids
        for form in ("see {}.", '{{"name": "{}", "b": 1}}', "<parameter=city>\n{}\n</parameter>\n"):
            whole = encoder.plain.encode(form.format(value)).ids
            assert any(whole[i : i + len(ids)] == ids for i in range(len(whole)))


def test_the_two_sides_share_no_free_value(programs):
    import random

    from values import Values

    kinds = ("person", "project", "code", "title", "email")
    sides = [Values(random.Random(7), evaluation) for evaluation in (False, True)]
    seen, held_out = ({side.of(kind) for kind in kinds for _ in range(300)} for side in sides)
    assert not seen & held_out


def test_the_chunked_rule_is_the_recurrence(programs):
    from check import worst

    assert worst(torch.float32, torch.device("cpu")) < 2e-3


def test_the_trainers_model_is_the_one_that_transformers_loads(programs, encoder):
    from transformers import AutoModelForCausalLM

    from model import load

    ids = torch.tensor([encoder.plain.encode("My name is Ada. What is my name? " * 12).ids[:192]])
    reference = AutoModelForCausalLM.from_pretrained(POCKET, dtype=torch.float32)
    model = load(POCKET)
    with torch.no_grad():
        expected, given = reference(ids).logits, model.logits(model(ids)[0])
    assert (given - expected).abs().max() < 1e-3 * expected.abs().max()


def test_the_shipped_files_fit_in_16_mib():
    assert sum(path.stat().st_size for path in POCKET.iterdir() if path.is_file()) <= 16 * 2**20
