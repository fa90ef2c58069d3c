"""Read packed rows of a paged cache into contiguous memory."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ...formats import MlaRows
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
    check_lens(tables, lens, page_size)
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


def check_lens(tables: Tensor, lens: Sequence[int], page_size: int) -> None:
    """ValueError unless there is one length per table, and none is negative or beyond its table."""
    if len(lens) != tables.shape[0] or min(lens, default=0) < 0 or max(lens, default=0) > tables.shape[1] * page_size:
        raise ValueError(f"gather_sequences: lens {list(lens)} do not fit tables {tuple(tables.shape)} of {page_size}")


def unpack_rows(
    pages: Tensor, slots: Tensor | None, *, row_format: MlaRows, page_size: int, dtype: torch.dtype
) -> Tensor:
    """MLA rows at slots [T], or all rows of the pages in order, -> [T, latent + rope]; slot -1 gives zeros. Local."""
    if slots is None:
        rows = pages.reshape(-1, row_format.row_bytes)
        return row_format.unpack_joint(rows).to(dtype)
    rows = gather_rows(pages, slots, planes=row_format.planes, page_size=page_size)
    return row_format.unpack_joint(rows).to(dtype)


def copy_rows(source: Tensor, source_rows: Tensor, target: Tensor, target_rows: Tensor) -> None:
    """target[target_rows[i]] = source[source_rows[i]] where both ids are in range. Local."""
    here, there = source_rows.to(source.device), target_rows.to(source.device)
    kept = (here >= 0) & (here < source.shape[0]) & (there >= 0) & (there < target.shape[0])
    target[there[kept].to(target.device)] = source[here[kept]].to(target.device)


def check_copy(source: Tensor, source_rows: Tensor, target: Tensor, target_rows: Tensor) -> None:
    """ValueError unless both tables hold uint8 rows of one width, and there is one source row per target row."""
    if source.dtype != torch.uint8 or target.dtype != torch.uint8 or source.shape[1:] != target.shape[1:]:
        raise ValueError(
            f"copy_rows: rows must be uint8 of one width, got {source.dtype} {tuple(source.shape)} and "
            f"{target.dtype} {tuple(target.shape)}"
        )
    if source.dim() != 2 or source_rows.dim() != 1 or source_rows.shape != target_rows.shape:
        raise ValueError(
            f"copy_rows: want [S, bytes], [n], [D, bytes], [n], got {tuple(source.shape)}, {tuple(source_rows.shape)}, "
            f"{tuple(target.shape)}, {tuple(target_rows.shape)}"
        )
