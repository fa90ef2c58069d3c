"""Read packed rows of a paged cache into contiguous memory."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..kv_store.reference import check_slots, page_planes


def gather_rows(pages: Tensor, slots: Tensor, *, planes: Sequence[int], page_size: int) -> Tensor:
    """Rows at slots [T] int64 of pages [P, page_size * row_bytes] -> uint8 [T, row_bytes]; slot -1 reads zeros.

    Local. Raises ValueError on a slot below -1 or beyond the pages.
    """
    check_slots("gather_rows", slots, pages.shape[0] * page_size)
    out = torch.empty(slots.shape[0], sum(planes), dtype=torch.uint8, device=pages.device)
    if pages.shape[0] == 0:
        return out.zero_()
    safe = slots.clamp(min=0)
    page, offset = safe // page_size, safe % page_size
    for view, start, stop in page_planes(pages, planes, page_size):
        out[:, start:stop] = view[page, offset]
    return out.masked_fill_((slots < 0).unsqueeze(1), 0)
