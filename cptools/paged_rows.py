"""Paged cache rows of one format on one device."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .formats import IndexRows, MlaRows
from .integers import require_int
from .kernels.kv_gather import gather_rows, gather_sequences
from .kernels.kv_store import store_rows


class PagedRows:
    """``num_layers`` x ``num_pages`` pages of ``page_size`` rows: uint8 [layers, pages, page_size * row_bytes].

    Memory is not cleared: a row is defined once it was stored. Local; not thread-safe. What does not fit raises
    ValueError; slots and page ids out of range are as in the ops of `cptools.kernels.kv_store` and `kv_gather`.
    """

    def __init__(
        self,
        row_format: MlaRows | IndexRows,
        *,
        num_layers: int,
        num_pages: int,
        page_size: int,
        device: torch.device | str = "cpu",
    ) -> None:
        if num_layers < 0 or num_pages < 0 or page_size < 1:
            raise ValueError(f"PagedRows: num_layers={num_layers}, num_pages={num_pages}, page_size={page_size}")
        self.row_format = row_format
        self.page_size = page_size
        shape = (num_layers, num_pages, page_size * row_format.row_bytes)
        self.pages = torch.empty(shape, dtype=torch.uint8, device=device)

    def store(self, layer: int, slots: Tensor, rows: Tensor) -> None:
        """rows uint8 [T, row_bytes] -> slots int64 [T]; slot -1 is skipped."""
        store_rows(self._layer(layer), slots, rows, planes=self.row_format.planes, page_size=self.page_size)

    def gather(self, layer: int, slots: Tensor) -> Tensor:
        """Rows at slots int64 [T] -> uint8 [T, row_bytes]; slot -1 reads zeros."""
        return gather_rows(self._layer(layer), slots, planes=self.row_format.planes, page_size=self.page_size)

    def gather_sequences(self, layer: int, tables: Tensor, lens: Sequence[int]) -> Tensor:
        """First ``lens[r]`` rows of each sequence by its pages, tables int64 [R, blocks] -> uint8 [sum, row_bytes]."""
        return gather_sequences(
            self._layer(layer), tables, lens, planes=self.row_format.planes, page_size=self.page_size
        )

    def _layer(self, layer: int) -> Tensor:
        if type(layer) is not int:
            layer = require_int("layer", layer)
        if not 0 <= layer < self.pages.shape[0]:
            raise ValueError(f"layer={layer} is outside num_layers={self.pages.shape[0]}")
        return self.pages[layer]
