"""FP8 index keys as the scoring kernels read them: back to back, or in pages with one table per request."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ...formats import FP8, SCALE_BLOCK
from ..arguments import ANY, check_count, check_integers, check_one_device, dense_rows, holds_words


def pages_obstacle(pages: Tensor, *, page_size: int) -> str | None:
    """Why the scales of uint8 index pages can not be read in place as float32, where they stand; None if they can."""
    if holds_words(pages, 4, pages.shape[1] - 4 * page_size):
        return None
    return f"scales behind byte {pages.shape[1] - 4 * page_size} of pages, strides {pages.stride()}, are not at words"


@dataclass(frozen=True)
class IndexKeys:
    """e4m3 keys and their float32 scales, one a key: key = value x scale. Views of what they were made from.

    values, scales: [S, D] and [S], D <= 128; with ``block_tables`` [R, blocks] (int32 or int64), the planes of pages,
    [P, page_size * D] and [P, page_size]: position p of request r is offset ``p % page_size`` of page
    ``block_tables[r, p // page_size]``. A page id that no page has reads as keys of zeros, and only pages within a
    row's length are read.
    """

    values: Tensor
    scales: Tensor
    block_tables: Tensor | None = None

    def __post_init__(self) -> None:
        values, scales, tables = self.values, self.scales, self.block_tables
        if values.dtype != FP8 or scales.dtype != torch.float32:
            raise ValueError(f"IndexKeys: want e4m3 and float32, got {values.dtype} and {scales.dtype}")
        dims = 1 if tables is None else 2
        if values.dim() != 2 or scales.dim() != dims or values.shape[0] != scales.shape[0]:
            raise ValueError(
                f"IndexKeys: values {tuple(values.shape)} and scales {tuple(scales.shape)} do not fit, "
                f"with{'out' if tables is None else ''} block tables"
            )
        if tables is None:
            if values.shape[1] > SCALE_BLOCK:
                raise ValueError(f"IndexKeys: want values [S, D <= {SCALE_BLOCK}], got {tuple(values.shape)}")
        else:
            check_integers("IndexKeys", "block_tables", tables, (ANY, ANY))
            page_size = scales.shape[1]
            if not page_size or values.shape[1] % page_size or values.shape[1] > page_size * SCALE_BLOCK:
                raise ValueError(
                    f"IndexKeys: want values [P, page_size * D], D <= {SCALE_BLOCK}, and scales [P, page_size], got "
                    f"{tuple(values.shape)} and {tuple(scales.shape)}"
                )
        check_one_device("IndexKeys", values=values, scales=scales, block_tables=tables)

    @classmethod
    def from_rows(cls, rows: Tensor) -> IndexKeys:
        """Packed rows uint8 [S, D + 4] of `formats.IndexRows` (one scale a row), copied into two planes. Local."""
        if rows.dtype != torch.uint8 or rows.dim() != 2 or rows.shape[1] < 5:
            raise ValueError(f"IndexKeys: want rows uint8 [S, D + 4], got {rows.dtype} {tuple(rows.shape)}")
        dim = rows.shape[1] - 4
        # A copy even where the piece is contiguous, as in a single row: it may stand at an odd address.
        values, scales = (x.clone(memory_format=torch.contiguous_format) for x in (rows[:, :dim], rows[:, dim:]))
        return cls(values.view(FP8), scales.view(torch.float32)[:, 0])

    @classmethod
    def from_pages(cls, pages: Tensor, block_tables: Tensor, *, page_size: int) -> IndexKeys:
        """Index pages uint8 [P, page_size * (D + 4)], all keys of a page and then its scales. A view; local.

        Raises ValueError where the scales do not stand at multiples of four bytes.
        """
        check_count("IndexKeys", "page_size", page_size, minimum=1)
        split = pages.shape[1] - 4 * page_size if pages.dim() == 2 else 0
        if pages.dtype != torch.uint8 or split <= 0 or split % page_size:
            raise ValueError(
                f"IndexKeys: want pages uint8 [P, page_size * (D + 4)], got {pages.dtype} {tuple(pages.shape)}, "
                f"page_size={page_size}"
            )
        obstacle = pages_obstacle(pages, page_size=page_size)
        if obstacle is not None:
            raise ValueError(f"IndexKeys: {obstacle}")
        return cls(pages[:, :split].view(FP8), pages[:, split:].view(torch.float32), block_tables)

    def dense(self) -> IndexKeys:
        """The same, copied where a kernel could not read it: keys and scales not back to back, and strided tables."""
        tables = self.block_tables
        as_is = self.values.stride(-1) == 1 and self.scales.stride(-1) == 1
        if as_is and (tables is None or tables.stride(-1) == 1):
            return self
        return IndexKeys(
            dense_rows(self.values), dense_rows(self.scales), None if tables is None else dense_rows(tables)
        )

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
