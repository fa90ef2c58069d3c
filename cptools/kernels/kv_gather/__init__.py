"""Rows out of pages: by slot or whole sequences by block table, packed or unpacked; and rows from table to table."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ...formats import FP8, SCALE_BLOCK, MlaRows
from ..arguments import is_aligned
from ..impl import Choice, choose, triton_obstacle
from ..kv_store import rows_obstacle
from . import reference

__all__ = [
    "choose_copy_rows",
    "choose_gather_rows",
    "choose_gather_sequences",
    "choose_unpack_rows",
    "copy_rows",
    "gather_rows",
    "gather_sequences",
    "unpack_rows",
]


def gather_rows(pages: Tensor, slots: Tensor, *, planes: Sequence[int], page_size: int, impl: str = "auto") -> Tensor:
    """Rows at slots [T] int64 of pages [P, page_size * row_bytes] -> uint8 [T, row_bytes]; slot -1 reads zeros.

    Local, on the current stream. The reference raises ValueError on a slot below -1 or beyond the pages. Kernels can
    not without a sync: there it reads zeros; they may be captured in a CUDA graph. Both raise ValueError where shapes,
    dtypes or devices do not fit.
    """
    reference.check_gather("gather_rows", pages, slots, planes=planes, page_size=page_size)
    if choose_gather_rows(pages, slots, planes=planes, impl=impl).impl == "triton":
        from . import triton

        rows: Tensor = triton.gather_rows(pages, slots, planes, page_size)
        return rows
    return reference.gather_rows(pages, slots, planes=planes, page_size=page_size)


def choose_gather_rows(pages: Tensor, slots: Tensor, *, planes: Sequence[int], impl: str = "auto") -> Choice:
    """What `gather_rows` would run for these tensors, and why nothing faster."""
    return choose("gather_rows", impl, {"triton": rows_obstacle(pages, planes=planes)})


def gather_sequences(
    pages: Tensor, tables: Tensor, lens: Sequence[int], *, planes: Sequence[int], page_size: int, impl: str = "auto"
) -> Tensor:
    """Whole sequences by their block tables: rows 0 ... lens[r] - 1 of each, request after request.

    pages [P, page_size * row_bytes] uint8, tables int64 [R, blocks] page ids, lens the rows of each sequence (host
    integers) -> uint8 [sum(lens), row_bytes]. Index work is per page, not per row. Local, on the current stream; the
    lengths go to the device by a copy that nobody waits for.

    Raises ValueError on a length beyond its table, and where shapes, dtypes or devices do not fit. The reference raises
    it on a page id outside the pages too, where kernels read zeros.
    """
    reference.check_sequences(pages, tables, lens, planes=planes, page_size=page_size)
    if choose_gather_sequences(pages, tables, planes=planes, impl=impl).impl == "triton":
        from . import triton

        rows: Tensor = triton.gather_sequences(pages, tables, list(lens), planes, page_size)
        return rows
    return reference.gather_sequences(pages, tables, lens, planes=planes, page_size=page_size)


def choose_gather_sequences(pages: Tensor, tables: Tensor, *, planes: Sequence[int], impl: str = "auto") -> Choice:
    """What `gather_sequences` would run for these tensors, and why nothing faster."""
    return choose("gather_sequences", impl, {"triton": rows_obstacle(pages, planes=planes)})


def unpack_rows(
    pages: Tensor,
    slots: Tensor | None,
    *,
    row_format: MlaRows,
    page_size: int,
    dtype: torch.dtype = torch.bfloat16,
    impl: str = "auto",
) -> Tensor:
    """MLA rows as a kernel that reads no packed rows wants them: latent and rotary part joined, [T, latent + rope].

    pages [P, page_size * row_bytes] uint8; slots int64 [T], -1 gives zeros, or None for all rows in order (a gathered
    context is pages with page_size 1). FP8 values are multiplied by their scale in float32 and rounded once. Local, on
    the current stream; slots out of range as in `gather_rows`. Raises ValueError where shapes, dtypes or devices do not
    fit, the dtype of the result included, which must be one of floats.
    """
    if not dtype.is_floating_point:
        raise ValueError(f"unpack_rows: dtype {dtype} is not one of floats")
    reference.check_gather("unpack_rows", pages, slots, planes=row_format.planes, page_size=page_size)
    if choose_unpack_rows(pages, slots, row_format=row_format, dtype=dtype, impl=impl).impl == "triton":
        from . import triton

        joint: Tensor = triton.unpack_fp8_rows(pages, slots, row_format.latent, row_format.rope, page_size, dtype)
        return joint
    return reference.unpack_rows(pages, slots, row_format=row_format, page_size=page_size, dtype=dtype)


def choose_unpack_rows(
    pages: Tensor,
    slots: Tensor | None,
    *,
    row_format: MlaRows,
    dtype: torch.dtype = torch.bfloat16,
    impl: str = "auto",
) -> Choice:
    """What `unpack_rows` would run for these tensors, and why nothing faster."""
    obstacle = rows_obstacle(pages, planes=row_format.planes)
    blocks, rope = row_format.latent // SCALE_BLOCK, row_format.rope
    if row_format.dtype != FP8:
        obstacle = f"rows are {row_format.dtype}, the kernel unpacks float8_e4m3fn"
    elif row_format.latent % SCALE_BLOCK or blocks & (blocks - 1) or rope & (rope - 1):
        obstacle = f"latent={row_format.latent} is not 128 * 2^i, or rope={rope} no power of two"
    elif dtype not in (torch.bfloat16, torch.float32):
        obstacle = f"dtype {dtype} is not bfloat16 or float32"
    elif not is_aligned(pages, 4) or (pages.shape[0] > 1 and pages.stride(0) % 4):
        obstacle = "pages are not aligned to 4 bytes"
    return choose("unpack_rows", impl, {"triton": obstacle})


def copy_rows(source: Tensor, source_rows: Tensor, target: Tensor, target_rows: Tensor, *, impl: str = "auto") -> None:
    """target[target_rows[i]] = source[source_rows[i]] for all i, in place; pairs with an id out of range are skipped.

    source uint8 [S, row_bytes], target uint8 [D, row_bytes], ids integers [n] on the target's device. Target ids that
    are not skipped must be unique, and where source and target share memory, no row that is written may be read too:
    rows move in any order, so they can not be swapped in place. The source may be pinned memory of the host while the
    target is on a GPU: then the kernel reads it over the bus, row by row. Local, on the current stream, no sync, may be
    captured in a CUDA graph; the source must keep its memory and its rows until the stream has passed.

    Raises ValueError where shapes, dtypes or devices do not fit.
    """
    reference.check_copy(source, source_rows, target, target_rows)
    if choose_copy_rows(source, source_rows, target, target_rows, impl=impl).impl == "triton":
        from . import triton

        triton.copy_rows(source, source_rows, target, target_rows)
        return
    reference.copy_rows(source, source_rows, target, target_rows)


def choose_copy_rows(
    source: Tensor, source_rows: Tensor, target: Tensor, target_rows: Tensor, *, impl: str = "auto"
) -> Choice:
    """What `copy_rows` would run for these tensors, and why nothing faster."""
    obstacle = triton_obstacle(target.device)
    if obstacle is None and source.device.type == "cpu" and not source.is_pinned():
        obstacle = "the source is in host memory that is not pinned"
    elif source.stride(1) != 1 or target.stride(1) != 1:
        obstacle = f"bytes of a row are {source.stride(1)} and {target.stride(1)} apart"
    return choose("copy_rows", impl, {"triton": obstacle})
