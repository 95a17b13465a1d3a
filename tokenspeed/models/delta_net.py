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

    def forward(self, projected: Tensor, batch: Batch, rows: StateRows) -> Tensor:
        """projected: [tokens, qkv, z, b and a], of `input`. Returns [tokens, hidden]."""
        ops, windows, matrices = self.ops, rows.conv[self.index], rows.matrix[self.index]
        read, write = batch.read_rows, batch.write_rows
        gates = (self.a_log, self.dt_bias)
        if batch.decode:
            weights = (self.conv, *gates, self.norm)
            return self.output(ops.delta_net_step(projected, *weights, windows, matrices, read, write, self.eps))
        qkv, z, b, a = torch.split(projected, self.splits, dim=-1)
        qkv = ops.causal_conv_prefill(qkv, self.conv, windows, batch.starts, read, write, batch.stores)
        mixed = ops.gated_delta_prefill(qkv, a, b, *gates, matrices, batch.starts, read, write, batch.stores)
        gated = ops.gated_rms_norm(mixed, z.reshape(-1, *self.value_shape), self.norm, self.eps)
        return self.output(gated.flatten(1))
