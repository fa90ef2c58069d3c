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


def gather_sequences(
    pages: Tensor, tables: Tensor, lens: Sequence[int], *, planes: Sequence[int], page_size: int
) -> Tensor:
    """Whole sequences by their block tables: rows 0 ... lens[r] - 1 of each, request after request.

    pages [P, page_size * row_bytes] uint8, tables int64 [R, blocks] page ids, lens the rows of each sequence (host
    integers) -> uint8 [sum(lens), row_bytes]. Index work is per page, not per row. Local. Raises ValueError on a
    length beyond its table and on a page id outside the pages.
    """
    if len(lens) != tables.shape[0] or min(lens, default=0) < 0 or max(lens, default=0) > tables.shape[1] * page_size:
        raise ValueError(f"gather_sequences: lens {list(lens)} do not fit tables {tuple(tables.shape)} of {page_size}")
    counts = [-(-length // page_size) for length in lens]
    ids = torch.cat([tables.new_empty(0), *(row[:count] for row, count in zip(tables, counts, strict=True))])
    if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < pages.shape[0]:
        raise ValueError(
            f"gather_sequences: page ids from {int(ids.min())} to {int(ids.max())}, there are {pages.shape[0]} pages"
        )
    rows = torch.empty(len(ids) * page_size, sum(planes), dtype=torch.uint8, device=pages.device)
    for view, start, stop in page_planes(pages, planes, page_size):
        rows[:, start:stop] = view[ids].flatten(0, 1)
    sequences = rows.split([count * page_size for count in counts])
    kept = [sequence[:length] for sequence, length in zip(sequences, lens, strict=True)]
    return kept[0] if len(kept) == 1 else torch.cat([rows[:0], *kept])
