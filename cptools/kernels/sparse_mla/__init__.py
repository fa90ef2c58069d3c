"""Absorbed MLA attention over selected rows."""

from __future__ import annotations

import torch
from torch import Tensor

from ...formats import FP8, MlaRows
from ..arguments import ANY, check_count, check_integers, check_one_device, check_tensor, dense, holds_words, is_aligned
from ..impl import HOPPER, Choice, choose, triton_obstacle
from ..kv_gather import unpack_rows
from . import reference
from .decode import choose_sparse_mla_decode, sparse_mla_decode
from .reference import QUERY_TILE

__all__ = ["QUERY_TILE", "choose_sparse_mla", "choose_sparse_mla_decode", "sparse_mla", "sparse_mla_decode"]

KERNEL_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
OUT_DTYPES = (torch.float32, torch.bfloat16)
MAX_WIDTH = 512  # of the values, and of what the key has beyond them: one program holds both
RELAY_DIMS = (576, 512)


def sparse_mla(
    query: Tensor,
    rows: Tensor,
    ids: Tensor,
    *,
    scale: float,
    v_dim: int,
    counts: Tensor | None = None,
    row_format: MlaRows | None = None,
    out_dtype: torch.dtype = torch.float32,
    impl: str = "auto",
) -> tuple[Tensor, Tensor]:
    """Attention of each query over the rows that its ids name: (out [T, H, v_dim] out_dtype, lse [T, H] float32).

    query: [T, H, D]. rows: [S, D], or packed rows [S, row_format.row_bytes] uint8, which are up-converted as a whole
    first (so hand in a gathered context; `sparse_mla_decode` reads a few rows of a large pool in place). Values are
    the first ``v_dim`` columns. ids: [T, K] integers; an id outside [0, S) is ignored wherever it stands, and what
    other rows hold never matters, NaN included. counts: [T], if given only so many of the first ids of a query count.
    scale multiplies the scores; for MLA it is qk_head_dim ** -0.5. lse is the natural log; no row at all gives out 0,
    lse -inf. Local; on the GPU without a sync and capturable, unless the reference runs.

    On Hopper BF16 rows of 512 + 64 columns take the Gluon kernel (heads padded to a multiple of 64 inside), others
    the Triton one. Kernels round the weights to the rows' dtype, as FlashMLA does; the reference stays in float32.
    """
    check_inputs(query, rows, ids, counts, v_dim, row_format)
    if out_dtype not in OUT_DTYPES:
        raise ValueError(f"sparse_mla: out_dtype={out_dtype} is not float32 or bfloat16")
    choice = choose_sparse_mla(query, rows, ids, scale=scale, v_dim=v_dim, row_format=row_format, impl=impl)
    if choice.impl == "reference":
        if row_format is not None:
            rows = row_format.unpack_joint(rows)
        if counts is not None:
            ids = ids.masked_fill(torch.arange(ids.shape[1], device=ids.device) >= counts.unsqueeze(1), -1)
        out, lse = reference.sparse_mla(query, rows, ids, scale=scale, v_dim=v_dim)
        return out.to(out_dtype), lse
    if row_format is not None:
        rows = unpacked_rows(rows, row_format)
    counts = None if counts is None else dense(counts)
    if choice.impl == "gluon":
        from . import gluon

        out, lse = gluon.sparse_mla_gluon(query, rows, ids, counts, scale, out_dtype)
        return out, lse
    from . import triton

    out, lse = triton.sparse_mla_triton(query, rows, ids, counts, scale, v_dim, out_dtype)
    return out, lse


def check_inputs(
    query: Tensor, rows: Tensor, ids: Tensor, counts: Tensor | None, v_dim: int, row_format: MlaRows | None
) -> None:
    """ValueError unless these are arguments of `sparse_mla`."""
    if row_format is not None:
        check_tensor("sparse_mla", "packed rows", rows, (torch.uint8,), (ANY, row_format.row_bytes))
    elif not rows.is_floating_point():
        raise ValueError(f"sparse_mla: rows must be floats, got {rows.dtype} {tuple(rows.shape)}")
    if not query.is_floating_point():
        raise ValueError(f"sparse_mla: query must be floats, got {query.dtype} {tuple(query.shape)}")
    check_count("sparse_mla", "v_dim", v_dim, minimum=1)
    dim = row_format.latent + row_format.rope if row_format is not None else rows.shape[-1] if rows.dim() else 0
    if query.dim() != 3 or rows.dim() != 2 or query.shape[2] != dim or v_dim > dim:
        raise ValueError(
            f"sparse_mla: want query [T, H, D], rows [S, D] and v_dim <= D, "
            f"got {tuple(query.shape)}, {tuple(rows.shape)}, v_dim={v_dim}"
        )
    check_integers("sparse_mla", "ids", ids, (query.shape[0], ANY))
    if counts is not None:
        check_integers("sparse_mla", "counts", counts, (query.shape[0],))
    check_one_device("sparse_mla", query=query, rows=rows, ids=ids, counts=counts)


def choose_sparse_mla(
    query: Tensor,
    rows: Tensor,
    ids: Tensor,
    *,
    scale: float,
    v_dim: int,
    row_format: MlaRows | None = None,
    impl: str = "auto",
) -> Choice:
    """Which implementation `sparse_mla` runs for these inputs, and why nothing faster does. Local.

    It does not depend on the number of queries, so a query's bits do not either: few queries that want to be split
    over the chip call `sparse_mla_decode`, by the phase of their request.
    """
    device = triton_obstacle(query.device)
    obstacles = {"gluon": device or relay_obstacle(query, rows, ids, scale, v_dim, row_format)}
    obstacles["triton"] = device or triton_shape_obstacle(query, rows, ids, v_dim, row_format)
    return choose("sparse_mla", impl, obstacles)


def unpacked_rows(rows: Tensor, row_format: MlaRows) -> Tensor:
    """Packed rows [S, row_bytes] on the GPU -> [S, D]: a view of float rows, BF16 copies of FP8 ones."""
    if row_format.dtype != FP8:
        return rows.view(row_format.dtype)
    return unpack_rows(rows, None, row_format=row_format, page_size=1)


def value_dtype(rows: Tensor, row_format: MlaRows | None) -> torch.dtype:
    """What the kernels see of the rows."""
    if row_format is None:
        return rows.dtype
    return torch.bfloat16 if row_format.dtype == FP8 else row_format.dtype


def rows_obstacle(rows: Tensor, ids: Tensor, row_format: MlaRows | None) -> str | None:
    if ids.dtype not in (torch.int32, torch.int64):
        return f"ids are {ids.dtype}, not int32 or int64"
    if value_dtype(rows, row_format) not in KERNEL_DTYPES:
        return f"rows are {rows.dtype}"
    if row_format is not None and not rows.is_contiguous():
        return f"packed rows are not contiguous, strides {rows.stride()}"
    if row_format is not None and row_format.dtype != FP8 and not holds_words(rows, row_format.dtype.itemsize):
        return f"packed rows do not start at a multiple of {row_format.dtype.itemsize} bytes"
    return None


def triton_shape_obstacle(
    query: Tensor, rows: Tensor, ids: Tensor, v_dim: int, row_format: MlaRows | None
) -> str | None:
    if query.dtype not in KERNEL_DTYPES:
        return f"the query is {query.dtype}"
    if v_dim > MAX_WIDTH or query.shape[2] - v_dim > MAX_WIDTH:
        return f"values of {v_dim} of {query.shape[2]} columns, more than {MAX_WIDTH} and {MAX_WIDTH}"
    return rows_obstacle(rows, ids, row_format)


def relay_obstacle(
    query: Tensor, rows: Tensor, ids: Tensor, scale: float, v_dim: int, row_format: MlaRows | None
) -> str | None:
    if query.dtype != torch.bfloat16 or value_dtype(rows, row_format) != torch.bfloat16:
        return f"query and rows are {query.dtype} and {value_dtype(rows, row_format)}, not bfloat16"
    if (query.shape[2], v_dim) != RELAY_DIMS:
        return f"values are {v_dim} of {query.shape[2]} columns, not {RELAY_DIMS[1]} of {RELAY_DIMS[0]}"
    if not scale > 0:
        return f"scale={scale} is not positive"
    if row_format is None and (rows.stride(1) != 1 or rows.stride(0) % 16):
        return f"rows are not dense or not multiples of 16 elements apart, strides {rows.stride()}"
    if not is_aligned(rows, 16) and (row_format is None or row_format.dtype != FP8):
        return "rows do not start at a multiple of 16 bytes"
    if torch.cuda.get_device_capability(query.device)[0] != HOPPER[0]:
        return "wgmma exists on Hopper only"
    return rows_obstacle(rows, ids, row_format)
