from __future__ import annotations

import pytest

from tokenspeed.client.docstrings import parse_docstring

GOOGLE = """Book a table.

    Asks the restaurant first.

    Args:
        name (str): Whose table it is,
            as written on the card.
        seats: How many.

    Returns:
        nothing: ever
    """

NUMPY = """Book a table.

    Asks the restaurant first.

    Parameters
    ----------
    name : str
        Whose table it is,
        as written on the card.
    seats : int, optional
        How many.

    Returns
    -------
    nothing : ever
    """

SPHINX = """Book a table.

    Asks the restaurant first.

    :param str name: Whose table it is,
        as written on the card.
    :param seats: How many.
    :returns: nothing
    """


@pytest.mark.parametrize("text", [GOOGLE, NUMPY, SPHINX])
def test_each_style_says_the_same(text: str) -> None:
    parsed = parse_docstring(text)
    assert parsed.description == "Book a table.\n\nAsks the restaurant first."
    assert parsed.parameters == {"name": "Whose table it is, as written on the card.", "seats": "How many."}


@pytest.mark.parametrize("text", [None, "", "   "])
def test_nothing_is_nothing(text: str | None) -> None:
    assert parse_docstring(text).description == ""
    assert parse_docstring(text).parameters == {}


def test_two_parameters_of_one_numpy_line() -> None:
    parsed = parse_docstring("Add.\n\nParameters\n----------\na, b : int\n    A number.\n")
    assert parsed.parameters == {"a": "A number.", "b": "A number."}


def test_a_colon_in_plain_prose_begins_no_section() -> None:
    parsed = parse_docstring("Note this: prose.\nFor example: more prose.")
    assert parsed.description == "Note this: prose.\nFor example: more prose."
