"""What a scheduler works within."""

from __future__ import annotations

from dataclasses import dataclass

MAX_MARKS = 4


@dataclass(frozen=True)
class Limits:
    """What the scheduler works within. `depth`: steps whose results are not read yet when a step is planned.
    `prefix_cache`: whether prompts reuse what is cached. `forced_tokens`: whether turns may force their output.
    `junction_tokens`, `checkpoint_interval`: see `EngineConfig`."""

    page_size: int
    pages: int
    rows: int
    max_sequences: int
    prefill_chunk: int
    depth: int
    max_context: int
    max_queue: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    prefix_cache: bool = True
    forced_tokens: bool = False
    junction_tokens: int = 1024
    checkpoint_interval: int = 8192

    def check(self) -> None:
        """Raise ValueError where one turn alone would not fit."""
        pages = -(-self.max_context // self.page_size) + 1
        if pages > self.pages - 1:
            raise ValueError(f"a context of {self.max_context} tokens needs {pages} pages; there are {self.pages - 1}")
        rows = self.depth + 1 + MAX_MARKS
        if rows > self.rows - 1:
            raise ValueError(f"one turn needs {rows} state rows; there are {self.rows - 1}")
