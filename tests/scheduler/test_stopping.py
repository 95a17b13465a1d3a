"""Stop strings against the whole text."""

from __future__ import annotations

import hypothesis.strategies as st
from hypothesis import given, settings

from tokenspeed.scheduler.stopping import StopStrings

PIECES = [b"a", b"b", b"ab", b"\xc3", b"\xa9", b"\xf0\x9f", b"\x99\x82", b"ba\xc3\xa9", b"", None]
STOPS = ["ab", "aab", "é", "🙂", "bé", "b", "aé🙂", "bbbb"]


def first_stop(tokens: list[int], strings: list[str]) -> tuple[int, str] | None:
    """By search in everything written so far, token by token."""
    for count in range(1, len(tokens) + 1):
        text = b""
        for token in tokens[:count]:
            piece = PIECES[token]
            text = b"" if piece is None else text + piece
        ends = [(text.find(one.encode()) + len(one.encode()), -len(one.encode()), one) for one in strings]
        found = [end for end in ends if end[2].encode() in text]
        if found:
            return count, min(found)[2]
    return None


@settings(deadline=None, max_examples=300)
@given(st.lists(st.integers(0, len(PIECES) - 1), max_size=12), st.lists(st.sampled_from(STOPS), max_size=3))
def test_the_first_to_be_complete_ends_it(tokens: list[int], strings: list[str]) -> None:
    watch = StopStrings(strings, PIECES)
    got = None
    for count, token in enumerate(tokens, 1):
        stopped = watch.after(token)
        if stopped is not None:
            got = (count, stopped)
            break
    assert got == first_stop(tokens, strings)


def test_ids_beyond_the_table_are_no_text() -> None:
    watch = StopStrings(["ab"], [b"a", b"b"])
    assert [watch.after(token) for token in (0, 7, 1, 0, 1)] == [None, None, None, None, "ab"]
