"""The tokenizer: byte-level BPE whose pre-tokens are letter runs, single digits, runs of spaces, single newlines and
single punctuation marks, so that a value splits the same way in a request, a schema and a call.

    python examples/pocket/tokenizer.py tokenspeed/pocket        # train and write tokenizer.json
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from generate import Dialogue
from render import ADDED, SPECIAL, Segment, render

VOCABULARY = 3072
# The template's own tags and the marks of JSON between values are pre-tokens too: they never touch a value's letters.
PATTERN = "|".join(
    [
        r"</?(?:function|parameter)[=>]",
        r'"\}\}, "|"\}, "|"\}\}|": \{"|": \["|": "|", "|"\], "|"\]\}\}|"\]\}|"\}|\{"|"\]|\["|": |, "|":"|","|":',
        r"\p{L}+",
        r"\p{N}",
        r"\n",
        r" +",
        r"[^\s\p{L}\p{N}]",
        r"\s",
    ]
)


def train(dialogues: int) -> Tokenizer:
    """A tokenizer trained on the text segments of generated dialogues."""

    def texts():
        for seed in range(dialogues):
            dialogue = Dialogue(7_000_000 + seed)
            for _ in range(12):
                dialogue.extend()
            for segment in render(dialogue.schemas, dialogue.system, dialogue.messages):
                if not segment.control:
                    yield segment.text

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY - len(SPECIAL) - len(ADDED),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts(), trainer)
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIAL])
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in ADDED])
    return tokenizer


class Encoder:
    """Encodes segments: control tokens by id, text by the tokenizer without its added tokens."""

    def __init__(self, path: Path) -> None:
        stored = json.loads(path.read_text())
        self.control = {entry["content"]: entry["id"] for entry in stored["added_tokens"]}
        stored["added_tokens"] = []
        self.plain = Tokenizer.from_str(json.dumps(stored))
        self.whole = Tokenizer.from_file(str(path))
        self.known: dict[str, list[int]] = {}

    def text(self, text: str) -> list[int]:
        """The ids of plain text."""
        ids = self.known.get(text)
        if ids is None:
            ids = self.plain.encode(text).ids
            if len(text) < 24 and len(self.known) < 50_000:
                self.known[text] = ids
        return ids

    def segments(self, segments: list[Segment]) -> tuple[list[int], list[str]]:
        """Ids of segments and each id's label."""
        ids: list[int] = []
        labels: list[str] = []
        for segment in segments:
            piece = [self.control[segment.text]] if segment.control else self.text(segment.text)
            ids += piece
            labels += [segment.label] * len(piece)
        return ids, labels

    def decode(self, ids: list[int]) -> str:
        """The text of ids, control tokens included."""
        return self.whole.decode(ids, skip_special_tokens=False)


def main() -> None:
    parser = argparse.ArgumentParser(description="Train the pocket model's tokenizer.")
    parser.add_argument("directory", type=Path, help="where to write tokenizer.json and tokenizer_config.json")
    parser.add_argument("--dialogues", type=int, default=6000)
    arguments = parser.parse_args()
    tokenizer = train(arguments.dialogues)
    tokenizer.save(str(arguments.directory / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "model_max_length": 32768,
        "clean_up_tokenization_spaces": False,
    }
    (arguments.directory / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
    print(f"{tokenizer.get_vocab_size()} tokens")


if __name__ == "__main__":
    main()
