"""What each token id writes, for stop strings."""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer


def token_bytes(directory: Path) -> list[bytes | None]:
    """The bytes of every id of the directory's byte-level tokenizer; None for added tokens, which are no text.

    Empty where the directory has no tokenizer: token ids in, token ids out needs none.
    """
    path = directory / "tokenizer.json"
    if not path.exists():
        return []
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # tokenizers raises nothing narrower
        raise ValueError(f"{path} cannot be read: {error}") from error
    added = tokenizer.get_added_tokens_decoder()
    alphabet = _byte_alphabet()
    table: list[bytes | None] = []
    for token_id in range(tokenizer.get_vocab_size()):
        written = tokenizer.id_to_token(token_id)
        if token_id in added or written is None or not alphabet.keys() >= set(written):
            table.append(None)
        else:
            table.append(bytes(alphabet[character] for character in written))
    return table


def _byte_alphabet() -> dict[str, int]:
    """Byte-level BPE's alphabet: printable Latin-1 stands for itself, the other bytes, in order, for U+0100 on (Radford
    et al., 2019, GPT-2)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(others)}
