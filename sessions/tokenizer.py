"""Text to token ids and back: control tokens only where the chat format asks for them, characters never torn."""

from __future__ import annotations

import codecs
import json
from array import array
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from tokenizers import Tokenizer

from tokenspeed.sessions.held import HeldBytes

Ids: TypeAlias = "array[int]"


class TokenizerError(ValueError):
    """A model directory's tokenizer cannot be read or cannot serve chats; the message says why."""


def _encode(encoder: Tokenizer, text: str) -> Ids:
    # A batch of one: other threads go on meanwhile, as they do not beside `encode`, and no offsets are kept.
    return array("i", encoder.encode_batch_fast([text], add_special_tokens=False)[0].ids)


class ChatTokenizer:
    """Two encoders over one `tokenizer.json`.

    The *control* encoder knows the added tokens and reads the format's own text. The *plain* encoder was built without
    them and reads everything that people and tools write, so that a control token spelled by them stays text.
    """

    def __init__(self, directory: Path) -> None:
        spec = _read_spec(directory / "tokenizer.json")
        try:
            self._control = Tokenizer.from_str(json.dumps(spec))
            self._plain = Tokenizer.from_str(json.dumps(spec | {"added_tokens": [], "post_processor": None}))
        except Exception as error:  # the library raises bare Exception
            raise TokenizerError(f"{directory / 'tokenizer.json'} cannot be loaded: {error}") from error
        _check_byte_level(spec, directory)
        # The library numbers added tokens itself where the file's numbers leave gaps.
        numbered = self._control.get_added_tokens_decoder()
        self.added: dict[str, int] = {token.content: token_id for token_id, token in numbered.items()}
        self._added_names = {token_id: name for name, token_id in self.added.items()}
        self._check_plain()
        self._bytes: dict[int, bytes] = {}

    @property
    def largest_id(self) -> int:
        return max(self._control.get_vocab(with_added_tokens=True).values())

    def encode_control(self, text: str) -> Ids:
        """Ids of text of the format's own; added tokens in it become their ids."""
        return _encode(self._control, text)

    def encode_plain(self, text: str) -> Ids:
        """Ids of text written by people and tools; no added token comes out of it.

        Raises:
            UnicodeEncodeError: for a lone surrogate, which no bytes stand for.
        """
        text.encode()
        return _encode(self._plain, text)

    def token_bytes(self, token_id: int) -> bytes:
        """The UTF-8 bytes that the id stands for; none for an id that the tokenizer does not know."""
        known = self._bytes.get(token_id)
        if known is None:
            known = self._bytes[token_id] = self._look_up(token_id)
        return known

    def is_added(self, token_id: int) -> bool:
        return token_id in self._added_names

    def decode(self, token_ids: Iterable[int]) -> str:
        """The text of ids as a whole, added tokens by their names."""
        detokenizer = Detokenizer(self)
        return "".join([detokenizer.feed(token_id) for token_id in token_ids] + [detokenizer.flush()])

    def _look_up(self, token_id: int) -> bytes:
        if token_id in self._added_names:
            return self._added_names[token_id].encode()
        name = self._control.id_to_token(token_id)
        if name is None:
            return b""
        try:
            return bytes(_BYTE_OF[character] for character in name)
        except KeyError:
            return str(name).encode()

    def _check_plain(self) -> None:
        for name, token_id in self.added.items():
            if token_id in self.encode_plain(name):
                raise TokenizerError(f"the added token {name!r} cannot be kept out of user text by this tokenizer")


class Detokenizer:
    """Text of one turn's ids as they come: what is returned is final, an unfinished character is held back, and so is
    what may be the beginning of one of the stop strings.

    The pieces joined equal the bytes of all ids decoded at once with `errors="replace"`, where an added token and
    `flush` end an unfinished character. The cost of an id does not depend on how many came before.
    """

    def __init__(self, tokenizer: ChatTokenizer, stops: Sequence[str] = ()) -> None:
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._held = HeldBytes(stops)

    def feed(self, token_id: int) -> str:
        """The characters that this id completes."""
        piece = self._tokenizer.token_bytes(token_id)
        if self._tokenizer.is_added(token_id):
            return self.flush() + piece.decode()
        return self._decoder.decode(self._held.feed(piece))

    def flush(self) -> str:
        """What was held back; an unfinished character is a replacement character."""
        return self._close(self._held.rest())

    def cut(self, stop: str) -> str:
        """What was held back of the text before `stop`, which the last id has completed."""
        return self._close(self._held.before(stop))

    def _close(self, piece: bytes) -> str:
        text = self._decoder.decode(piece) + self._decoder.decode(b"", final=True)
        self._decoder.reset()
        return text


def _read_spec(path: Path) -> dict[str, Any]:
    try:
        spec = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise TokenizerError(f"{path} is missing") from None
    except (OSError, ValueError) as error:
        raise TokenizerError(f"{path} cannot be read: {error}") from error
    if not isinstance(spec, dict) or "model" not in spec:
        raise TokenizerError(f"{path} is not a tokenizer: it has no model")
    # A tokenizer saved with truncation would cut prompts without a word.
    return spec | {"truncation": None, "padding": None}


def _check_byte_level(spec: dict[str, Any], directory: Path) -> None:
    decoder = spec.get("decoder") or {}
    kinds = [decoder.get("type"), *(part.get("type") for part in decoder.get("decoders", []))]
    if "ByteLevel" not in kinds:
        raise TokenizerError(f"{directory / 'tokenizer.json'} has a decoder of type {kinds[0]}; it must be ByteLevel")


def _byte_alphabet() -> dict[str, int]:
    """The byte-level alphabet's characters: printable Latin-1 stands for itself, the other bytes for U+0100 onward."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = [byte for byte in range(256) if byte not in set(printable)]
    alphabet = {chr(byte): byte for byte in printable}
    alphabet.update({chr(0x100 + place): byte for place, byte in enumerate(rest)})
    return alphabet


_BYTE_OF = _byte_alphabet()
