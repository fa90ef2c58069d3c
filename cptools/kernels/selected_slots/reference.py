"""From selected positions to slots, by the arithmetic of the layout."""

from __future__ import annotations

import torch
from torch import Tensor

from ...layout import KVLayout


def selected_slots(
    out: Tensor, positions: Tensor, request_ids: Tensor, tables: Tensor, *, layout: KVLayout, rank: int
) -> None:
    """See `cptools.kernels.selected_slots`; out [T, K] is written."""
    requests, blocks = tables.shape
    if not requests * blocks:
        out.fill_(-1)
        return
    at = positions.long().clamp(min=0)
    page = at // layout.virtual_block
    request = request_ids.long().unsqueeze(1)
    mine = (positions >= 0) & (layout.owner(at) == rank) & (page < blocks) & (request >= 0) & (request < requests)
    page_id = tables.long()[request.clamp(0, requests - 1), page.clamp(max=blocks - 1)]
    slots = (page_id - page) * layout.page_size + layout.local_index(at)
    out.copy_(torch.where(mine & (page_id >= 0), slots, -1))
