"""Store packed rows in a paged cache. A page holds ``planes`` one after the other (see ``cptools.formats``)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from ..arguments import ANY, check_count, check_integers, check_one_device, check_tensor

_BYTES = (torch.uint8,)


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
    check_slots("store_rows", slots, pages.shape[0] * page_size)
    kept = slots >= 0
    slots, rows = slots[kept], rows[kept]
    page, offset = slots // page_size, slots % page_size
    for view, start, stop in page_planes(pages, planes, page_size):
        view[page, offset] = rows[:, start:stop]


def check_pages(op: str, pages: Tensor, planes: Sequence[int], page_size: int) -> int:
    """Bytes of a row; ValueError unless pages are uint8 [P, page_size * row_bytes]."""
    check_count(op, "page_size", page_size, minimum=1)
    if not planes or min(planes) < 1:
        raise ValueError(f"{op}: planes {list(planes)} must be at least one width, each >= 1")
    row_bytes = sum(planes)
    check_tensor(op, "pages", pages, _BYTES, (ANY, page_size * row_bytes))
    return row_bytes


def check_store(pages: Tensor, slots: Tensor, rows: Tensor, *, planes: Sequence[int], page_size: int) -> None:
    """ValueError unless pages have this layout and there is one row of their width a slot, all on one device."""
    op = "store_rows"
    row_bytes = check_pages(op, pages, planes, page_size)
    check_integers(op, "slots", slots, (ANY,))
    check_tensor(op, "rows", rows, _BYTES, (slots.shape[0], row_bytes))
    check_one_device(op, pages=pages, slots=slots, rows=rows)


def check_slots(op: str, slots: Tensor, num_slots: int) -> None:
    """ValueError unless every slot is -1 or in [0, num_slots)."""
    if slots.numel() and (int(slots.min()) < -1 or int(slots.max()) >= num_slots):
        raise ValueError(f"{op}: slots in [{int(slots.min())}, {int(slots.max())}] do not fit {num_slots} slots")
