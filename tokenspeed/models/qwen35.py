"""Qwen3.5: three gated delta net layers to one gated attention layer, dense or a mixture of experts."""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from torch import Tensor

from tokenspeed.cache.pools import CacheGeometry, PagePool, StateRows
from tokenspeed.config.model import ModelConfig
from tokenspeed.kernels.registry import Operators
from tokenspeed.models.attention import GatedAttention
from tokenspeed.models.batch import Batch
from tokenspeed.models.delta_net import DeltaNet
from tokenspeed.models.feed_forward import Mixture, SwiGLU
from tokenspeed.models.qwen35_weights import weight_table
from tokenspeed.models.weights import Parameters, Shard, allocate


def cache_geometry(config: ModelConfig, page_size: int, dtype: torch.dtype) -> CacheGeometry:
    """Shapes of the pages and state rows that `Qwen35` reads and writes, for KV in the model's own type."""
    linear_layers = config.layer_types.count("linear_attention")
    return CacheGeometry(
        attention_layers=len(config.layer_types) - linear_layers,
        linear_layers=linear_layers,
        page_size=page_size,
        kv_heads=config.kv_heads,
        head_dim=config.head_dim,
        conv_channels=config.conv_channels,
        conv_width=config.conv_width,
        value_heads=config.value_heads,
        key_dim=config.key_dim,
        value_dim=config.value_dim,
        hidden=config.hidden,
        kv_dtype=dtype,
        conv_dtype=dtype,
        hidden_dtype=dtype,
        matrix_dtype=torch.promote_types(torch.float32, dtype),
    )


class Layer:
    """Pre-norm mixer and feed-forward on a running residual."""

    def __init__(self, config: ModelConfig, ops: Operators, parameters: Parameters, layer: int) -> None:
        self.ops = ops
        self.eps = config.eps
        kind = config.layer_types[layer]
        index = config.layer_types[:layer].count(kind)
        mixer = DeltaNet if kind == "linear_attention" else GatedAttention
        self.mixer = mixer(config, ops, parameters.under("mixer"), index)
        self.mixer_norm = parameters["mixer_norm"]
        below = parameters.under("feed_forward")
        self.feed_forward = Mixture(config, ops, below) if config.experts else SwiGLU(ops, below)
        self.feed_forward_norm = parameters["feed_forward_norm"]

    def forward(
        self,
        output: Tensor | None,
        residual: Tensor,
        rotary: tuple[Tensor, Tensor],
        batch: Batch,
        pages: PagePool,
        rows: StateRows,
    ) -> tuple[Tensor, Tensor]:
        """`output` is the previous layer's, not yet added to `residual`; None in the first layer. Returns this layer's
        and the residual it is to be added to. All are [tokens, hidden]."""
        mixer, feed_forward = self.mixer, self.feed_forward
        if output is None:
            projected = mixer.input(self.ops.gemma_rms_norm(residual, self.mixer_norm, self.eps))
        else:
            projected, _, residual = mixer.input.after_norm(output, residual, self.mixer_norm, self.eps)
        if isinstance(mixer, DeltaNet):
            output = mixer.forward(projected, batch, rows)
        else:
            output = mixer.forward(projected, rotary, batch, pages)
        projected, normed, residual = feed_forward.input.after_norm(output, residual, self.feed_forward_norm, self.eps)
        return feed_forward.forward(projected, normed), residual


class Qwen35:
    """The model over flat tokens. Its parameters are uninitialised until filled (`tokenspeed.models.loading`).

    Attributes:
        table: its weight table.
        parameters: {name: tensor} of every parameter in the table.
    """

    def __init__(self, config: ModelConfig, ops: Operators, dtype: torch.dtype, device: torch.device) -> None:
        self.config = config
        self.ops = ops
        self.dtype = dtype
        self.device = device
        self.table = weight_table(config)
        self.parameters = allocate(self.table, Shard(), dtype, device)
        parameters = Parameters(self.parameters)
        self.embedding = parameters["embedding"]
        self.layers = [
            Layer(config, ops, parameters.under(f"layers.{layer}"), layer) for layer in range(len(config.layer_types))
        ]
        self.norm = parameters["norm"]
        self.output = parameters["embedding" if config.tied else "output"]

    def one_layer_of_each_kind(self) -> Qwen35:
        """The model cut to its first layer of each kind, which own the first layer of pages and of rows."""
        kinds = self.config.layer_types
        small = copy.copy(self)
        small.layers = [self.layers[kinds.index(kind)] for kind in dict.fromkeys(kinds)]
        return small

    @torch.inference_mode()
    def forward(self, tokens: Tensor, batch: Batch, pages: PagePool, rows: StateRows) -> Tensor:
        """Runs the tokens, writing their K and V to the pages and their states to the rows.

        Args:
            tokens: [tokens] int64.
        Returns:
            [tokens, hidden], after the final norm.
        """
        residual = F.embedding(tokens, self.embedding)
        rotary = self.ops.rotary_table(batch.positions, self.config.rope_theta, self.config.rotary_dim, self.dtype)
        output: Tensor | None = None
        for layer in self.layers:
            output, residual = layer.forward(output, residual, rotary, batch, pages, rows)
        assert output is not None
        hidden, _ = self.ops.add_rms_norm(output, residual, self.norm, self.config.eps)
        rows.hidden[batch.write_rows] = hidden if batch.decode else hidden[batch.starts[1:] - 1]
        if batch.stores is not None:
            last = batch.starts[batch.stores.sequences] + batch.stores.counts - 1
            rows.hidden[batch.stores.rows] = hidden[last]
        return hidden

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """hidden: [n, hidden], of `forward`. Returns [n, vocabulary] in promote(float32, the model's type)."""
        return self.ops.vocabulary_logits(hidden, self.output)
