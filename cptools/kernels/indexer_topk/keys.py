"""FP8 index keys as the scoring kernels read them: back to back, or in pages with one table per request."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ...formats import FP8, SCALE_BLOCK


@dataclass(frozen=True)
class IndexKeys:
    """e4m3 keys and their float32 scales, one a key: key = value x scale. Views of what they were made from.

    values, scales: [S, D] and [S], D <= 128; with ``block_tables`` [R, blocks] (integers), the planes of pages,
    [P, page_size * D] and [P, page_size]: position p of request r is offset ``p % page_size`` of page
    ``block_tables[r, p // page_size]``. A page id that no page has reads as keys of zeros, and only pages within a
    row's length are read.
    """

    values: Tensor
    scales: Tensor
    block_tables: Tensor | None = None

    def __post_init__(self) -> None:
        if self.values.dtype != FP8 or self.scales.dtype != torch.float32:
            raise ValueError(f"IndexKeys: want e4m3 and float32, got {self.values.dtype} and {self.scales.dtype}")
        if self.values.dim() != 2 or self.values.shape[0] != self.scales.shape[0]:
            raise ValueError(
                f"IndexKeys: values {tuple(self.values.shape)} and scales {tuple(self.scales.shape)} do not fit"
            )
        tables = self.block_tables
        if tables is None:
            if self.scales.dim() != 1 or self.values.shape[1] > SCALE_BLOCK:
                raise ValueError(
                    f"IndexKeys: want values [S, D <= {SCALE_BLOCK}] and scales [S], "
                    f"got {tuple(self.values.shape)} and {tuple(self.scales.shape)}"
                )
        elif tables.dim() != 2 or self.scales.dim() != 2 or self.values.shape[1] % max(self.scales.shape[1], 1):
            raise ValueError(
                f"IndexKeys: want values [P, page_size * D], scales [P, page_size] and block tables [R, blocks], got "
                f"{tuple(self.values.shape)}, {tuple(self.scales.shape)}, {tuple(tables.shape)}"
            )

    @classmethod
    def from_rows(cls, rows: Tensor) -> IndexKeys:
        """Packed rows uint8 [S, D + 4] of `formats.IndexRows` (one scale a row), copied into two planes. Local."""
        dim = rows.shape[1] - 4
        return cls(rows[:, :dim].contiguous().view(FP8), rows[:, dim:].contiguous().view(torch.float32)[:, 0])

    @classmethod
    def from_pages(cls, pages: Tensor, block_tables: Tensor, *, page_size: int) -> IndexKeys:
        """Index pages uint8 [P, page_size * (D + 4)], all keys of a page and then its scales. A view; local."""
        if pages.dtype != torch.uint8 or pages.dim() != 2 or pages.shape[1] % page_size:
            raise ValueError(
                f"IndexKeys: want pages uint8 [P, page_size * (D + 4)], got {pages.dtype} {tuple(pages.shape)}, "
                f"page_size={page_size}"
            )
        split = pages.shape[1] - 4 * page_size
        return cls(pages[:, :split].view(FP8), pages[:, split:].view(torch.float32), block_tables)

    @property
    def page_size(self) -> int:
        """Keys of a page; 0 where keys lie back to back."""
        return 0 if self.block_tables is None else self.scales.shape[1]

    @property
    def dim(self) -> int:
        return self.values.shape[1] // max(self.page_size, 1)

    @property
    def capacity(self) -> int:
        """No row can see more keys than this."""
        return self.values.shape[0] if self.block_tables is None else self.block_tables.shape[1] * self.page_size

    def dequantized(self) -> tuple[Tensor, Tensor | None]:
        """float32 keys [S, D], and for pages the start [R] of each request's keys among them. Local."""
        if self.block_tables is None:
            return self.values.float() * self.scales.unsqueeze(1), None
        pages, requests = self.block_tables.long(), self.block_tables.shape[0]
        exists = (pages >= 0) & (pages < self.values.shape[0])
        if not self.values.shape[0]:
            keys = self.scales.new_zeros(requests * self.capacity, self.dim)
        else:
            page = torch.where(exists, pages, 0).flatten()
            keys = self.values.view(torch.uint8)[page].view(FP8).float().unflatten(1, (self.page_size, self.dim))
            keys = keys * self.scales[page].unsqueeze(2)
            keys = torch.where(exists.flatten()[:, None, None], keys, 0.0).flatten(0, 1)
        return keys, torch.arange(requests, device=keys.device) * self.capacity
