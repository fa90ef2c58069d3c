"""Rows into pages by slot."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ..impl import Choice, choose, triton_obstacle
from . import reference
from .reference import page_planes

__all__ = ["choose_store_rows", "page_planes", "rows_obstacle", "store_rows"]


def store_rows(
    pages: Tensor, slots: Tensor, rows: Tensor, *, planes: Sequence[int], page_size: int, impl: str = "auto"
) -> None:
    """Write rows [T, row_bytes] uint8 to slots [T] int64 of pages [P, page_size * row_bytes] in place; -1 is skipped.

    Local, on the current stream. Slots must be unique (the caller's slot mapping names one writer per row): of those
    that are not, any may win.

    The reference raises ValueError on a slot below -1 or beyond the pages. Kernels can not without a sync, and skip
    it; they may be captured in a CUDA graph. Both raise ValueError where shapes, dtypes or devices do not fit.
    """
    reference.check_store(pages, slots, rows, planes=planes, page_size=page_size)
    choice = choose_store_rows(pages, slots, rows, planes=planes, impl=impl)
    if choice.impl == "triton":
        from . import triton

        triton.store_rows(pages, slots, rows, planes, page_size)
        return
    reference.store_rows(pages, slots, rows, planes=planes, page_size=page_size)


def choose_store_rows(
    pages: Tensor, slots: Tensor, rows: Tensor, *, planes: Sequence[int], impl: str = "auto"
) -> Choice:
    """What `store_rows` would run for these tensors, and why nothing faster."""
    return choose("store_rows", impl, {"triton": rows_obstacle(pages, planes=planes)})


def rows_obstacle(pages: Tensor, *, planes: Sequence[int]) -> str | None:
    """Why the kernel that moves rows does not serve these pages; None if it does."""
    if not 1 <= len(planes) <= 2:
        return f"pages hold {len(planes)} planes, the kernel moves 1 or 2"
    if pages.stride(-1) != 1:
        return f"pages have stride {pages.stride(-1)} between bytes"
    return triton_obstacle(pages.device)
