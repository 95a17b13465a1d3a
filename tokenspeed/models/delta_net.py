"""The gated delta net mixer: projections, causal convolution, gated delta rule, gated norm."""

from __future__ import annotations

import torch
from torch import Tensor

from tokenspeed.cache.pools import StateRows
from tokenspeed.config.model import ModelConfig
from tokenspeed.kernels.registry import Operators
from tokenspeed.models.batch import Batch
from tokenspeed.models.linear import Dense, Linear
from tokenspeed.models.weights import Parameters


class DeltaNet:
    """Linear-attention layer number `index` among those of its kind: its memory is `rows.conv[index]` and
    `rows.matrix[index]`."""

    def __init__(self, config: ModelConfig, ops: Operators, parameters: Parameters, index: int) -> None:
        self.ops = ops
        self.index = index
        self.eps = config.eps
        self.value_shape = (config.value_heads, config.value_dim)
        value = config.value_heads * config.value_dim
        self.splits = [config.conv_channels, value, config.value_heads, config.value_heads]
        self.input = Linear(Dense(parameters["input"], ops))
        self.output = Linear(Dense(parameters["output"], ops))
        self.conv = parameters["conv"]
        self.a_log = parameters["a_log"]
        self.dt_bias = parameters["dt_bias"]
        self.norm = parameters["norm"]

    def forward(self, x: Tensor, batch: Batch, rows: StateRows) -> Tensor:
        """x: [tokens, hidden]. Returns [tokens, hidden]."""
        qkv, z, b, a = torch.split(self.input(x), self.splits, dim=-1)
        mixed = self._mix(qkv, a, b, batch, rows.conv[self.index], rows.matrix[self.index])
        gated = self.ops.gated_rms_norm(mixed, z.reshape(-1, *self.value_shape), self.norm, self.eps)
        return self.output(gated.flatten(1))

    def _mix(self, qkv: Tensor, a: Tensor, b: Tensor, batch: Batch, windows: Tensor, matrices: Tensor) -> Tensor:
        """[tokens, value_heads, value_dim]"""
        ops, read, write = self.ops, batch.read_rows, batch.write_rows
        if batch.decode:
            qkv = ops.causal_conv_step(qkv, self.conv, windows, read, write)
            return ops.gated_delta_step(qkv, a, b, self.a_log, self.dt_bias, matrices, read, write)
        qkv = ops.causal_conv_prefill(qkv, self.conv, windows, batch.starts, read, write, batch.stores)
        return ops.gated_delta_prefill(
            qkv, a, b, self.a_log, self.dt_bias, matrices, batch.starts, read, write, batch.stores
        )
