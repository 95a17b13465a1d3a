"""The gated full-attention mixer."""

from __future__ import annotations

from torch import Tensor

from tokenspeed.cache.pools import PagePool
from tokenspeed.config.model import ModelConfig
from tokenspeed.kernels.registry import Operators
from tokenspeed.models.batch import Batch
from tokenspeed.models.linear import Dense, Linear
from tokenspeed.models.weights import Parameters


class GatedAttention:
    """Full-attention layer number `index` among those of its kind: its memory is `pages.k[index]`, `pages.v[index]`."""

    def __init__(self, config: ModelConfig, ops: Operators, parameters: Parameters, index: int) -> None:
        self.ops = ops
        self.index = index
        self.eps = config.eps
        self.heads = config.heads
        self.kv_heads = config.kv_heads
        self.input = Linear(Dense(parameters["input"], ops))
        self.output = Linear(Dense(parameters["output"], ops))
        self.q_norm = parameters["q_norm"]
        self.k_norm = parameters["k_norm"]

    def forward(self, projected: Tensor, rotary: tuple[Tensor, Tensor], batch: Batch, pages: PagePool) -> Tensor:
        """projected: [tokens, queries, gates, keys and values], of `input`; rotary: cosine and sine of `rotary_table`.
        Returns [tokens, hidden]."""
        ops = self.ops
        k_pages, v_pages = pages.k[self.index], pages.v[self.index]
        q, gate = ops.qk_norm_rope_write(
            projected,
            self.q_norm,
            self.k_norm,
            *rotary,
            k_pages,
            v_pages,
            batch.kv_rows,
            self.heads,
            self.kv_heads,
            self.eps,
        )
        if batch.decode:
            attended = ops.attention_decode(q, gate, k_pages, v_pages, batch.page_table, batch.lengths, batch.longest)
        else:
            attended = ops.attention_prefill(
                q,
                gate,
                k_pages,
                v_pages,
                batch.page_table,
                batch.positions,
                batch.starts,
                batch.lengths,
                batch.longest,
                batch.bounds,
            )
        return self.output(attended)
