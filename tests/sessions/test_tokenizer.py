from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from tokenspeed.sessions.tokenizer import ChatTokenizer, Detokenizer, TokenizerError

TEXTS = ["", "Hello, world.", "naïve 東京 😀👩‍👩‍👧", "a\n\n\nb\t c", '{"k": ["v", null]}', "\u0000\ufffd\u2028"]


@pytest.mark.parametrize("text", TEXTS)
def test_ids_are_the_ones_transformers_gives(directory: Path, tokenizer: ChatTokenizer, text: str) -> None:
    expected = PreTrainedTokenizerFast(tokenizer_file=str(directory / "tokenizer.json"))
    marked = f"<|im_start|>user\n{text}<|im_end|><think>"
    assert list(tokenizer.encode_control(marked)) == expected.encode(marked, add_special_tokens=False)
    assert list(tokenizer.encode_plain(text)) == expected.encode(text, add_special_tokens=False)


def test_every_added_token_typed_by_a_user_stays_text(tokenizer: ChatTokenizer) -> None:
    added = set(tokenizer.added.values())
    assert len(added) == 9
    for name, token_id in tokenizer.added.items():
        assert list(tokenizer.encode_control(name)) == [token_id]
        for text in (name, f"a{name}b", name * 3, f" {name}\n"):
            ids = tokenizer.encode_plain(text)
            assert not added & set(ids)
            assert tokenizer.decode(ids) == text


@given(st.text())
def test_plain_text_comes_back(tokenizer: ChatTokenizer, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode_plain(text)) == text


@given(st.text(alphabet="aé東😀\n <>", max_size=20))
def test_no_piece_holds_half_a_character(tokenizer: ChatTokenizer, text: str) -> None:
    detokenizer = Detokenizer(tokenizer)
    pieces = [detokenizer.feed(token_id) for token_id in tokenizer.encode_plain(text)]
    assert "\ufffd" not in "".join(pieces)
    assert "".join(pieces) == text
    assert detokenizer.flush() == ""


@given(st.lists(st.integers(0, 3062)))
def test_any_ids_are_the_bytes_they_stand_for(tokenizer: ChatTokenizer, token_ids: list[int]) -> None:
    expected = b"".join(tokenizer.token_bytes(token_id) for token_id in token_ids).decode("utf-8", errors="replace")
    assert tokenizer.decode(token_ids) == expected


def test_every_byte_has_a_token(tokenizer: ChatTokenizer) -> None:
    assert {tokenizer.token_bytes(token_id) for token_id in range(3063)} >= {bytes([byte]) for byte in range(256)}


def test_an_emoji_split_over_tokens_is_held_back(tokenizer: ChatTokenizer) -> None:
    ids = tokenizer.encode_plain("😀")
    assert len(ids) > 1
    detokenizer = Detokenizer(tokenizer)
    assert [detokenizer.feed(token_id) for token_id in ids] == [""] * (len(ids) - 1) + ["😀"]


def test_an_unfinished_character_ends_at_a_control_token_and_at_the_end(tokenizer: ChatTokenizer) -> None:
    half = tokenizer.encode_plain("😀")[0]
    assert tokenizer.decode([half, tokenizer.added["<think>"], half]) == "\ufffd<think>\ufffd"


def test_a_lone_surrogate_is_refused(tokenizer: ChatTokenizer) -> None:
    with pytest.raises(UnicodeEncodeError):
        tokenizer.encode_plain("a\ud800")


def test_an_unknown_id_is_no_text(tokenizer: ChatTokenizer) -> None:
    assert tokenizer.decode([10**6]) == ""


def _write(path: Path, spec: object) -> Path:
    (path / "tokenizer.json").write_text(spec if isinstance(spec, str) else json.dumps(spec))
    return path


def test_an_unusable_tokenizer_says_why(directory: Path, tmp_path: Path) -> None:
    spec = json.loads((directory / "tokenizer.json").read_text())
    with pytest.raises(TokenizerError, match="is missing"):
        ChatTokenizer(tmp_path)
    for broken, reason in [
        ("{", "cannot be read"),
        ("[]", "it has no model"),
        (spec | {"model": {"type": "BPE"}}, "cannot be loaded"),
        (spec | {"decoder": {"type": "Metaspace", "replacement": "_", "prepend_scheme": "always"}}, "ByteLevel"),
    ]:
        with pytest.raises(TokenizerError, match=reason):
            ChatTokenizer(_write(tmp_path, broken))


def test_a_tokenizer_that_makes_control_tokens_of_user_text_is_refused(directory: Path, tmp_path: Path) -> None:
    spec = json.loads((directory / "tokenizer.json").read_text())
    spec["added_tokens"].append(spec["added_tokens"][0] | {"id": spec["model"]["vocab"]["a"], "content": "a"})
    with pytest.raises(TokenizerError, match="'a' cannot be kept out of user text"):
        ChatTokenizer(_write(tmp_path, spec))


def test_a_truncating_tokenizer_does_not_cut(directory: Path, tmp_path: Path) -> None:
    spec = json.loads((directory / "tokenizer.json").read_text())
    spec["truncation"] = {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0}
    assert len(ChatTokenizer(_write(tmp_path, spec)).encode_plain("a b c d e f")) > 4
