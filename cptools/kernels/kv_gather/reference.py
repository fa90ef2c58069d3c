"""Read packed rows of a paged cache into contiguous memory."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ...formats import MlaRows
from ..arguments import ANY, check_count, check_integers, check_one_device, check_tensor
from ..kv_store.reference import check_pages, check_slots, page_planes

_BYTES = (torch.uint8,)


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


def check_gather(op: str, pages: Tensor, slots: Tensor | None, *, planes: Sequence[int], page_size: int) -> None:
    """ValueError unless pages have this layout, and slots, if any, are integers [T] beside them."""
    check_pages(op, pages, planes, page_size)
    if slots is not None:
        check_integers(op, "slots", slots, (ANY,))
        check_one_device(op, pages=pages, slots=slots)


def check_sequences(
    pages: Tensor, tables: Tensor, lens: Sequence[int], *, planes: Sequence[int], page_size: int
) -> None:
    """ValueError unless pages have this layout, and there is one length per table and none beyond its table."""
    op = "gather_sequences"
    check_pages(op, pages, planes, page_size)
    check_integers(op, "tables", tables, (ANY, ANY))
    check_one_device(op, pages=pages, tables=tables)
    for length in lens:
        check_count(op, "length", length)
    if len(lens) != tables.shape[0] or max(lens, default=0) > tables.shape[1] * page_size:
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
    """ValueError unless both hold uint8 rows of one width, and there is one source id per target id, on one device."""
    op = "copy_rows"
    check_tensor(op, "target", target, _BYTES, (ANY, ANY))
    check_tensor(op, "source", source, _BYTES, (ANY, target.shape[1]))
    check_integers(op, "target_rows", target_rows, (ANY,))
    check_integers(op, "source_rows", source_rows, (target_rows.shape[0],))
    check_one_device(op, target=target, target_rows=target_rows, source_rows=source_rows)
    if source.device != target.device and source.device.type != "cpu":
        raise ValueError(f"{op}: the source must be on {target.device} or in host memory, got {source.device}")
