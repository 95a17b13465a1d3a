"""How things are worded: leads, requests and questions, in combinations from one side of the split."""

from __future__ import annotations

from collections.abc import Sequence

from values import Values, wordings

TABLES = wordings("chat")
GREETINGS, SYSTEMS, THOUGHTFUL = TABLES["greetings"], TABLES["systems"], TABLES["thoughtful"]
ERRORS, ACKS, CONFIRMED = TABLES["errors"], TABLES["acks"], TABLES["confirmed"]
LEADS, IMPERATIVES, REMARKS, CHAT = TABLES["leads"], TABLES["imperatives"], TABLES["remarks"], TABLES["chat"]
QUOTES = (('"', '"'), ('"', '"'), ("'", "'"), ("`", "`"), ("“", "”"))


def capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def small(text: str) -> str:
    """The sentence with a small first letter, where its first word is an ordinary one."""
    first = text.split(" ")[0]
    return (
        text
        if first in ("I", "I'm") or first[1:].lower() != first[1:] or ("'" in first and first[0] == "I")
        else text[:1].lower() + text[1:]
    )


def one_of(values: Values, texts: Sequence[str], *key: object) -> str:
    """A wording from this side of the split."""
    text = values.pick(texts)
    for _ in range(30):
        if values.form(text, *key):
            break
        text = values.pick(texts)
    return text


def question(values: Values, texts: Sequence[str], key: str) -> str:
    """A question with what may come before it; the pair is from this side of the split."""
    for _ in range(30):
        lead, text = values.pick(LEADS), values.pick(texts)
        if values.form(lead, text, key):
            break
    if not text.endswith("?"):
        text += values.pick((".", "", ", please."))
    if text.endswith("?") and values.chance(0.14):
        if values.chance(0.4):
            text = text.replace(" is ", " was ").replace("What's ", "What was ").replace("When's ", "When was ")
        text = f"{text[:-1]} again?"
    text = lead + (small(text) if lead and not text.startswith(("{e}", "I")) else text)
    return text.lower() if values.chance(0.05) and "{" not in text else text


def request(values: Values, ask: str, texts: dict[int, str], key: str, decorate: bool = True) -> str:
    """The user's sentence for one request."""
    for number in texts:
        ask = ask.replace(f"{{{number}}}", f"\0{number}\0")
    if ask.startswith("!"):
        for _ in range(30):
            form = values.pick(IMPERATIVES)
            if values.form(form, ask, key):
                break
        text = form.format(c=capital(ask[1:]), l=ask[1:]) if decorate else ask[1:]
        free_end = ask.endswith("\0") and ": \0" in ask
        if free_end and decorate:
            text = f"{values.pick(('', 'Please '))}{ask[1:]}"
            text = capital(text)
    else:
        lead = values.pick(LEADS) if decorate else ""
        text = lead + (small(ask) if lead and ask[0] != "\0" else ask)
    for number, value in texts.items():
        text = text.replace(f"\0{number}\0", value)
    return text
