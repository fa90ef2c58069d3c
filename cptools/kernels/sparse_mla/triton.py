"""Sparse MLA over selected rows in plain Triton: any number of heads, any widths, float32, float16 and bfloat16.

One program takes one query and a tile of heads, and walks over the query's ids, a block of rows at a time, with the
running maximum and sum of FlashAttention. A row is read once and used as key (all columns) and value (the first ones).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..compile_spec import CompileSpec

MAX_WIDTH = 512
"""Widest value and widest key remainder that a program holds in registers."""


# Sizes that change from call to call are not worth a compilation each.
@triton.jit(do_not_specialize=["heads", "num_rows", "columns"])
def sparse_mla_kernel(
    query,
    rows,
    ids,
    counts,
    out,
    lse,
    scale,
    heads,
    num_rows,
    columns,
    v_dim,
    rest_dim,
    query_stride_t,
    query_stride_h,
    row_stride,
    ids_stride,
    HAS_COUNTS: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_R: tl.constexpr,
    PRECISION: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    value_at = tl.arange(0, BLOCK_V)
    rest_at = tl.arange(0, BLOCK_R)
    query_at = query + token * query_stride_t + head[:, None].to(tl.int64) * query_stride_h
    query_value = tl.load(
        query_at + value_at[None, :], mask=(head < heads)[:, None] & (value_at < v_dim)[None, :], other=0.0
    )
    query_rest = tl.load(
        query_at + v_dim + rest_at[None, :], mask=(head < heads)[:, None] & (rest_at < rest_dim)[None, :], other=0.0
    )
    if HAS_COUNTS:
        columns = tl.minimum(tl.maximum(tl.load(counts + token), 0), columns).to(tl.int32)
    top = tl.full([BLOCK_H], -float("inf"), tl.float32)
    total = tl.zeros([BLOCK_H], tl.float32)
    acc = tl.zeros([BLOCK_H, BLOCK_V], tl.float32)
    for start in range(0, columns, BLOCK_N):
        column = start + tl.arange(0, BLOCK_N)
        row = tl.load(ids + token * ids_stride + column, mask=column < columns, other=-1)
        used = (row >= 0) & (row < num_rows)
        row_at = rows + tl.where(used, row, 0).to(tl.int64)[:, None] * row_stride
        # Unused rows are not read: a weight of 0 would not cancel a NaN in them.
        value = tl.load(row_at + value_at[None, :], mask=used[:, None] & (value_at < v_dim)[None, :], other=0.0)
        rest = tl.load(row_at + v_dim + rest_at[None, :], mask=used[:, None] & (rest_at < rest_dim)[None, :], other=0.0)
        value = value.to(query_value.dtype)
        scores = tl.dot(query_value, tl.trans(value), input_precision=PRECISION)
        scores = tl.dot(query_rest, tl.trans(rest.to(query_value.dtype)), scores, input_precision=PRECISION)
        scores = tl.where(used[None, :], scores * scale, -float("inf"))
        new_top = tl.maximum(top, tl.max(scores, 1))
        shift = tl.where(new_top == -float("inf"), 0.0, new_top)
        # The difference first, then the base: two roundings of equal scores must cancel at any magnitude.
        weights = tl.exp2((scores - shift[:, None]) * 1.4426950408889634)
        fade = tl.exp2((top - shift) * 1.4426950408889634)
        total = total * fade + tl.sum(weights, 1)
        acc = tl.dot(weights.to(value.dtype), value, acc * fade[:, None], input_precision=PRECISION)
        top = new_top
    empty = total == 0.0
    acc = acc / tl.where(empty, 1.0, total)[:, None]
    tl.store(lse + token * heads + head, tl.where(empty, -float("inf"), top + tl.log(total)), mask=head < heads)
    out_at = out + (token * heads + head)[:, None] * v_dim + value_at[None, :]
    tl.store(out_at, acc.to(out.dtype.element_ty), mask=(head < heads)[:, None] & (value_at < v_dim)[None, :])


def tile(heads: int, v_dim: int, rest_dim: int, dtype: torch.dtype) -> dict[str, int | str]:
    """Tile sizes as keyword arguments of the kernel; float32 operands get small ones, to fit shared memory."""
    wide = dtype == torch.float32
    return {
        "BLOCK_H": 16 if wide or heads <= 16 else 32 if heads <= 32 else 64,
        "BLOCK_N": 16 if wide else 64,
        "BLOCK_V": max(16, triton.next_power_of_2(v_dim)),
        "BLOCK_R": max(16, triton.next_power_of_2(max(rest_dim, 1))),
        "PRECISION": "ieee",
    }


def num_warps(dtype: torch.dtype) -> int:
    return 4 if dtype == torch.float32 else 8


@torch.library.custom_op("cptools::sparse_mla_triton", mutates_args=())
def sparse_mla_triton(
    query: Tensor, rows: Tensor, ids: Tensor, counts: Tensor | None, scale: float, v_dim: int, out_dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """query [T, H, D], rows [S, D], ids [T, K] -> (out [T, H, v_dim] of out_dtype, lse [T, H] float32).

    counts [T], if given: only so many of the first ids of a query are looked at.
    """
    tokens, heads, dim = query.shape
    out = torch.empty(tokens, heads, v_dim, dtype=out_dtype, device=query.device)
    lse = torch.empty(tokens, heads, dtype=torch.float32, device=query.device)
    if tokens == 0 or heads == 0:
        return out, lse
    query = query.to(torch.promote_types(query.dtype, rows.dtype))
    query = query if query.stride(2) == 1 else query.contiguous()
    rows = rows if rows.stride(1) == 1 else rows.contiguous()
    # A block of 64-bit ids would cost the registers that keep the kernel from spilling.
    ids = ids.clamp(-1, torch.iinfo(torch.int32).max).int() if ids.dtype == torch.int64 else ids
    ids = ids if ids.stride(1) == 1 else ids.contiguous()
    sizes = tile(heads, v_dim, dim - v_dim, query.dtype)
    sparse_mla_kernel[(tokens, triton.cdiv(heads, sizes["BLOCK_H"]))](
        query,
        rows,
        ids,
        ids if counts is None else counts,
        out,
        lse,
        scale,
        heads,
        rows.shape[0],
        ids.shape[1],
        v_dim,
        dim - v_dim,
        query.stride(0),
        query.stride(1),
        rows.stride(0),
        ids.stride(0),
        HAS_COUNTS=counts is not None,
        **sizes,
        num_warps=num_warps(query.dtype),
        num_stages=2,
    )
    return out, lse


@sparse_mla_triton.register_fake
def sparse_mla_triton_fake(
    query: Tensor, rows: Tensor, ids: Tensor, counts: Tensor | None, scale: float, v_dim: int, out_dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    tokens, heads, _ = query.shape
    return query.new_empty(tokens, heads, v_dim, dtype=out_dtype), query.new_empty(tokens, heads, dtype=torch.float32)


def compile_specs() -> list[CompileSpec]:
    names = {torch.float32: "fp32", torch.bfloat16: "bf16"}
    integers = "heads num_rows columns v_dim rest_dim query_stride_t query_stride_h row_stride ids_stride".split()
    specs = []
    for heads, dtype, counts in [
        (64, torch.bfloat16, False),
        (128, torch.bfloat16, True),
        (8, torch.bfloat16, False),
        (64, torch.float32, True),
    ]:
        name = names[dtype]
        pointers = {"query": f"*{name}", "rows": f"*{name}", "ids": "*i32", "counts": "*i64"}
        pointers |= {"out": "*fp32", "lse": "*fp32"}
        constexprs = {"HAS_COUNTS": counts, **tile(heads, 512, 64, dtype)}
        specs.append(
            CompileSpec(
                name=f"sparse_mla_{name}_{heads}_heads{'_counts' * counts}",
                fn=sparse_mla_kernel,
                signature={
                    **pointers,
                    "scale": "fp32",
                    **dict.fromkeys(integers, "i32"),
                    **dict.fromkeys(constexprs, "constexpr"),
                },
                constexprs=constexprs,
                num_warps=num_warps(dtype),
                num_stages=2,
                divisible_by_16=(
                    *pointers,
                    *"v_dim rest_dim query_stride_t query_stride_h row_stride ids_stride".split(),
                ),
            )
        )
    return specs
