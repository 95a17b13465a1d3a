"""The tensors behind pages and state rows, and the only place that knows their geometry.

Page 0 and row 0 are sinks: never allocated, written by padding and by whatever must not be kept. What nobody has
written may hold anything, NaN included: the tensors are not cleared, so that memory is taken only as it is used.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class CacheGeometry:
    """Shapes of the cache for one rank. All counts are of this rank's heads.

    Attributes:
        attention_layers: layers that own pages.
        linear_layers: layers that own state.
        page_size: token rows in a page.
        kv_heads, head_dim: of the attention layers.
        conv_channels, conv_width: of the linear layers' convolution (its window holds `conv_width - 1` columns).
        value_heads, key_dim, value_dim: of the recurrent matrix.
        hidden: width of the final hidden vector kept beside a state.
        kv_dtype, conv_dtype, hidden_dtype, matrix_dtype: element types.
    """

    attention_layers: int
    linear_layers: int
    page_size: int
    kv_heads: int
    head_dim: int
    conv_channels: int
    conv_width: int
    value_heads: int
    key_dim: int
    value_dim: int
    hidden: int
    kv_dtype: torch.dtype
    conv_dtype: torch.dtype
    hidden_dtype: torch.dtype
    matrix_dtype: torch.dtype

    @property
    def page_bytes(self) -> int:
        return 2 * self.attention_layers * self.page_size * self.kv_heads * self.head_dim * self.kv_dtype.itemsize

    @property
    def row_bytes(self) -> int:
        conv = self.conv_channels * (self.conv_width - 1) * self.conv_dtype.itemsize
        matrix = self.value_heads * self.value_dim * self.key_dim * self.matrix_dtype.itemsize
        return self.linear_layers * (conv + matrix) + self.hidden * self.hidden_dtype.itemsize


class PagePool:
    """K and V of every attention layer.

    `k[layer]`, `v[layer]`: [pages, page_size, kv_heads, head_dim]. `flat_k(layer)` views them as token rows
    [pages * page_size, kv_heads, head_dim]; token row `page * page_size + offset`.
    """

    def __init__(self, geometry: CacheGeometry, pages: int, device: torch.device) -> None:
        shape = (pages, geometry.page_size, geometry.kv_heads, geometry.head_dim)
        self.geometry = geometry
        self.pages = pages
        layers = range(geometry.attention_layers)
        self.k = [torch.empty(shape, dtype=geometry.kv_dtype, device=device) for _ in layers]
        self.v = [torch.empty(shape, dtype=geometry.kv_dtype, device=device) for _ in layers]

    def flat_k(self, layer: int) -> Tensor:
        return self.k[layer].view(-1, *self.k[layer].shape[2:])

    def flat_v(self, layer: int) -> Tensor:
        return self.v[layer].view(-1, *self.v[layer].shape[2:])

    def copy(self, source: Tensor, target: Tensor) -> None:
        """Copy whole pages `source` [n] to `target` [n]; the targets are distinct and none is a source."""
        for tensor in (*self.k, *self.v):
            tensor[target] = tensor[source]


class StateRows:
    """Conv window and recurrent matrix of every linear layer, and the final hidden vector, by row.

    `conv[layer]`: [rows, conv_channels, conv_width - 1], the last raw input columns, oldest first.
    `matrix[layer]`: [rows, value_heads, value_dim, key_dim] (the S of o = S·q).
    `hidden`: [rows, hidden], the output of the final norm at the row's last token.
    """

    def __init__(self, geometry: CacheGeometry, rows: int, device: torch.device) -> None:
        conv = (rows, geometry.conv_channels, geometry.conv_width - 1)
        matrix = (rows, geometry.value_heads, geometry.value_dim, geometry.key_dim)
        layers = range(geometry.linear_layers)
        self.geometry = geometry
        self.rows = rows
        self.conv = [torch.empty(conv, dtype=geometry.conv_dtype, device=device) for _ in layers]
        self.matrix = [torch.empty(matrix, dtype=geometry.matrix_dtype, device=device) for _ in layers]
        self.hidden = torch.empty((rows, geometry.hidden), dtype=geometry.hidden_dtype, device=device)
