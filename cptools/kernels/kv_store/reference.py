"""Store packed rows in a paged cache. A page holds ``planes`` one after the other (see ``cptools.formats``)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor


def page_planes(pages: Tensor, planes: Sequence[int], page_size: int) -> Iterator[tuple[Tensor, int, int]]:
    """Views of pages [P, page_size * row_bytes]: per plane ([P, page_size, width], first and last byte in a row)."""
    start = 0
    for width in planes:
        yield (
            pages[:, start * page_size : (start + width) * page_size].unflatten(1, (page_size, width)),
            start,
            (start + width),
        )
        start += width


def store_rows(pages: Tensor, slots: Tensor, rows: Tensor, *, planes: Sequence[int], page_size: int) -> None:
    """Write rows [T, row_bytes] uint8 to slots [T] int64 of pages [P, page_size * row_bytes] in place; -1 is skipped.

    Local. Slots must be unique (the caller's slot mapping names one writer per row). Raises ValueError on a slot
    below -1 or beyond the pages.
    """
    check_rows(slots, rows, planes)
    check_slots("store_rows", slots, pages.shape[0] * page_size)
    kept = slots >= 0
    slots, rows = slots[kept], rows[kept]
    page, offset = slots // page_size, slots % page_size
    for view, start, stop in page_planes(pages, planes, page_size):
        view[page, offset] = rows[:, start:stop]


def check_rows(slots: Tensor, rows: Tensor, planes: Sequence[int]) -> None:
    """ValueError unless rows are uint8, one a slot, of the width of all planes."""
    if rows.dtype != torch.uint8 or rows.shape != (slots.shape[0], sum(planes)):
        raise ValueError(
            f"store_rows: rows must be uint8 [{slots.shape[0]}, {sum(planes)}], got {rows.dtype} {tuple(rows.shape)}"
        )


def check_slots(op: str, slots: Tensor, num_slots: int) -> None:
    """ValueError unless every slot is -1 or in [0, num_slots)."""
    if slots.numel() and (int(slots.min()) < -1 or int(slots.max()) >= num_slots):
        raise ValueError(f"{op}: slots in [{int(slots.min())}, {int(slots.max())}] do not fit {num_slots} slots")
