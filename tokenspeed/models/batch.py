"""What a model is told about the tokens of one forward: sequences laid flat, and where their memory is."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Stores:
    """States to keep from inside a forward. Entry i stores, in row `rows[i]`, the state of sequence `sequences[i]`
    after `counts[i]` of its tokens in this batch (1 … its query length). Rows are distinct."""

    sequences: Tensor  # [stores] int64
    counts: Tensor  # [stores] int64
    rows: Tensor  # [stores] int64


@dataclass(frozen=True)
class Batch:
    """One forward's sequences, laid flat.

    Attributes:
        positions: [tokens] int64, the tokens' logical positions.
        starts: [sequences + 1] int64, prefix sums of the query lengths; every query length is at least 1.
        lengths: [sequences] int64, each sequence's length after these tokens.
        page_table: [sequences, pages] int64; entries past the length are 0 (the sink).
        kv_rows: [tokens] int64, the token row of the page pool that K and V are written to. Rows of page 0 are the
            sink. A query at position p attends to positions 0 … p *of the page table*, so a token whose row is the
            sink reads the K and V that its page already holds.
        read_rows: [sequences] int64, the state to continue from; 0 means no history (a zero state, whatever row 0
            holds).
        write_rows: [sequences] int64, where the state after the last token goes; 0 discards it. A row may be read and
            written by the same sequence, and read by several, but is written by at most one. (On a GPU, no row but 0
            is both read and written by a decode step.)
        decode: every query length is 1, and `stores` is None.
        stores: None or the states to keep from inside the forward.
        longest_query: max query length, on the host. longest: max of `lengths`' upper bound, on the host.
        bounds: (query length, length after) of every sequence, on the host; None in a decode step, where only the
            device knows.
    """

    positions: Tensor
    starts: Tensor
    lengths: Tensor
    page_table: Tensor
    kv_rows: Tensor
    read_rows: Tensor
    write_rows: Tensor
    decode: bool
    stores: Stores | None
    longest_query: int
    longest: int
    bounds: tuple[tuple[int, int], ...] | None = None
