"""Sparse MLA of few queries straight from a paged cache: the columns of a query are split over the chip and merged.

With a handful of queries a program a query would leave most of the chip idle and one program would read 1.3 MB row by
row; so each query's columns are cut in parts, which leave partial states (out, lse), and a second launch merges them.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from ...formats import FP8, MlaRows
from ..arguments import ANY, check_integers, check_one_device, dense, is_aligned
from ..impl import Choice, choose, triton_obstacle
from .decode_reference import sparse_mla_decode_reference

MAX_HEADS = 128
HEAD_TILE = 64
H200_SMS = 132
TRITON_PROGRAMS = 2
"""Up to so many (query, head tile) pairs plain Triton is faster: its blocks of 32 columns spread over more programs."""
PART_COUNTS = (1, 2, 3, 4, 5, 6, 7, 8, 16, 24, 32, 48, 64)
"""Numbers of parts that the merge is built for."""


@functools.lru_cache(maxsize=4096)
def plan_parts(programs: int, columns: int, *, unit: int, unit_us: float, fixed_us: float) -> int:
    """In how many parts to cut ``columns`` of each of ``programs`` (query, head tile) pairs. Pure integers out.

    unit: columns that a kernel takes at a time, unit_us and fixed_us: what such a step and what a program cost; the
    merge costs about 2 us and 0.2 us per MB of partial states. The cheapest count in whole waves of programs wins, the
    smaller of equals.
    """
    units = -(-columns // unit)

    def cost(parts: int) -> float:
        waves = -(-programs * parts // H200_SMS)
        merge_us = 2.0 + 0.2 * programs * parts / 16 if parts > 1 else 0.0
        return waves * (fixed_us + unit_us * -(-units // parts)) + merge_us

    # Pairs rather than a key, which torch.compile can not trace.
    return min([(cost(parts), parts) for parts in PART_COUNTS if parts <= max(units, 1)])[1]


def choose_sparse_mla_decode(
    query: Tensor, pool: Tensor, slots: Tensor, *, row_format: MlaRows, impl: str = "auto"
) -> Choice:
    """Which implementation `sparse_mla_decode` runs for these inputs, and why. Local."""
    obstacle = triton_obstacle(query.device)
    if obstacle is None:
        if row_format.latent != 512 or row_format.rope != 64 or row_format.dtype not in (FP8, torch.bfloat16):
            obstacle = f"rows are {row_format.latent}+{row_format.rope} {row_format.dtype}, not 512+64 fp8 or bf16"
        elif query.dtype != torch.bfloat16:
            obstacle = f"the query is {query.dtype}, not bfloat16"
        elif query.shape[1] > MAX_HEADS:
            obstacle = f"{query.shape[1]} heads, more than {MAX_HEADS}"
        elif not is_aligned(pool, 16):
            obstacle = "the pool does not start at a multiple of 16 bytes"
    gluon_obstacle = obstacle
    if gluon_obstacle is None:
        capability = torch.cuda.get_device_capability(query.device)
        if capability[0] != 9:
            gluon_obstacle = f"it is built for compute capability 9.0, the GPU has {capability[0]}.{capability[1]}"
        elif row_format.dtype != FP8:
            gluon_obstacle = f"rows are {row_format.dtype}, it reads fp8"
    obstacles = {"gluon": gluon_obstacle, "triton": obstacle}
    if query.shape[0] * -(-query.shape[1] // HEAD_TILE) <= TRITON_PROGRAMS:
        obstacles = {"triton": obstacle, "gluon": gluon_obstacle}
    return choose("sparse_mla_decode", impl, obstacles)


def sparse_mla_decode(
    query: Tensor,
    pool: Tensor,
    slots: Tensor,
    *,
    row_format: MlaRows,
    scale: float,
    counts: Tensor | None = None,
    out_dtype: torch.dtype = torch.float32,
    impl: str = "auto",
) -> tuple[Tensor, Tensor]:
    """Attention of each query over the cache rows at its slots: (out [T, H, latent], lse [T, H] float32, natural log).

    Made for few queries (1 to 256); any number is served. Local, on the current stream, capturable in a CUDA graph.

    Args:
        query: [T, H, latent + rope], absorbed; bfloat16 for the kernels, H at most 128.
        pool: uint8 [pages, page_size * row_bytes] or [S, row_bytes], contiguous: rows back to back.
        slots: int32 or int64 [T, K]; a slot outside [0, S) is ignored wherever it stands, what other rows hold never
            matters. A slot that stands twice counts twice.
        row_format: FP8_MLA or BF16_MLA for the kernels. FP8 scales enter as float32, the product is rounded to
            bfloat16: exact for powers of two.
        scale: of the scores, positive; qk_head_dim ** -0.5 for MLA.
        counts: int32 or int64 [T]: columns at and after it are ignored too; None: all K count.
        out_dtype: float32 or bfloat16; the partial states of a split have it too.

    Returns:
        out 0 and lse -inf where no column counts.

    Raises:
        ValueError: shapes or dtypes do not fit, or ``impl`` does not serve them.
    """
    dim = row_format.latent + row_format.rope
    if query.dim() != 3 or query.shape[2] != dim or not query.is_floating_point():
        raise ValueError(f"sparse_mla_decode: query must be [T, H, {dim}], got {query.dtype} {tuple(query.shape)}")
    if (
        pool.dtype != torch.uint8
        or pool.dim() != 2
        or pool.shape[1] % row_format.row_bytes
        or not pool.shape[1]
        or not pool.is_contiguous()
    ):
        raise ValueError(
            f"sparse_mla_decode: pool must be contiguous uint8 [pages, page_size * {row_format.row_bytes}], "
            f"got {pool.dtype} {tuple(pool.shape)}, strides {pool.stride()}"
        )
    check_integers("sparse_mla_decode", "slots", slots, (query.shape[0], ANY))
    if counts is not None:
        check_integers("sparse_mla_decode", "counts", counts, (query.shape[0],))
    if out_dtype not in (torch.bfloat16, torch.float32):
        raise ValueError(f"sparse_mla_decode: out_dtype={out_dtype} is not bfloat16 or float32")
    if not scale > 0:
        raise ValueError(f"sparse_mla_decode: scale={scale} must be positive")
    check_one_device("sparse_mla_decode", query=query, pool=pool, slots=slots, counts=counts)

    rows = pool.view(-1, row_format.row_bytes)
    choice = choose_sparse_mla_decode(query, pool, slots, row_format=row_format, impl=impl)
    tokens, heads, _ = query.shape
    if choice.impl == "reference" or not tokens or not heads:
        out, lse = sparse_mla_decode_reference(query, rows, slots, counts, row_format=row_format, scale=scale)
        return out.to(out_dtype), lse
    query, slots = query.contiguous(), slots.contiguous()
    counts = None if counts is None else dense(counts)
    programs, columns = tokens * -(-heads // HEAD_TILE), slots.shape[1]
    if choice.impl == "gluon":
        from . import decode_gluon

        parts = plan_parts(programs, columns, unit=128, unit_us=6.7, fixed_us=5.0)
        out, lse = decode_gluon.sparse_mla_decode_gluon(query, rows, slots, counts, scale, parts, out_dtype)
    else:
        from . import decode_triton

        parts = plan_parts(programs, columns, unit=32, unit_us=3.5, fixed_us=4.0)
        fp8 = row_format.dtype == FP8
        out, lse = decode_triton.sparse_mla_decode_triton(query, rows, slots, counts, scale, fp8, parts, out_dtype)
    return out, lse
