"""Indexer scores in plain Triton: any number of heads, widths up to 256, keys contiguous or in pages, FP8 or floats.

One program scores one query against a block of its keys, with the heads as columns of the product. And the step that
carries running candidates from one chunk of keys to the next.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..compile_spec import CompileSpec

_BLOCK = 128
_CARRY_BLOCK = 1024
_FILL_BLOCK = 4096


@triton.jit
def scores_kernel(
    query,
    weights,
    keys,
    scales,
    tables,
    starts,
    lens,
    out,
    queries,
    num_keys,
    first,
    columns,
    depth,
    key_stride,
    table_stride,
    key_page_stride,
    scale_page_stride,
    out_stride,
    HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PAGE: tl.constexpr,
    HAS_SCALES: tl.constexpr,
    HAS_STARTS: tl.constexpr,
    WIDEN: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    position = first + column.to(tl.int64)
    length = tl.load(lens + token).to(tl.int64)
    if PAGE == 0:
        start = 0
        if HAS_STARTS:
            start = tl.load(starts + token).to(tl.int64)
            length = tl.where(start < 0, 0, length)
        length = tl.minimum(length, num_keys - start)
    seen = (position < length) & (column < columns)
    if first + tl.program_id(1).to(tl.int64) * BLOCK < length:
        if PAGE == 0:
            key_at = (start + position) * key_stride
            scale_at = start + position
            exists = seen
        else:
            page = tl.load(tables + token // queries * table_stride + position // PAGE, mask=seen, other=-1)
            exists = (page >= 0) & (page < num_keys)
            page = tl.where(exists, page, 0).to(tl.int64)
            key_at = page * key_page_stride + position % PAGE * key_stride
            scale_at = page * scale_page_stride + position % PAGE
        at = tl.arange(0, BLOCK_D)
        key = tl.load(keys + key_at[:, None] + at[None, :], mask=exists[:, None] & (at < depth)[None, :], other=0.0)
        total = tl.zeros([BLOCK], tl.float32)
        for head0 in range(0, HEADS, BLOCK_H):
            head = head0 + tl.arange(0, BLOCK_H)
            q = tl.load(
                query + (token * HEADS + head)[None, :] * depth + at[:, None],
                mask=(head < HEADS)[None, :] & (at < depth)[:, None],
                other=0.0,
            )
            weight = tl.load(weights + token * HEADS + head, mask=head < HEADS, other=0.0)
            if WIDEN:
                products = tl.dot(key.to(tl.float32), q.to(tl.float32), input_precision="ieee")
            else:
                products = tl.dot(key, q)
            # A NaN stays visible: ReLU by a comparison would drop it.
            products = tl.maximum(products, 0.0, propagate_nan=tl.PropagateNan.ALL)
            total += tl.sum(products * weight[None, :], 1)
        if HAS_SCALES:
            total *= tl.load(scales + scale_at, mask=exists, other=0.0)
        tl.store(out + token * out_stride + column, total, mask=seen)


@triton.jit
def fill_kernel(starts, lens, out, num_keys, columns, out_stride, BLOCK: tl.constexpr, HAS_STARTS: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    length = tl.load(lens + token).to(tl.int64)
    if HAS_STARTS:
        start = tl.load(starts + token).to(tl.int64)
        num_keys -= start
        length = tl.where(start < 0, 0, length)
    length = tl.minimum(length, num_keys)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    if length < (tl.program_id(1) + 1) * BLOCK:
        beyond = (column >= length) & (column < columns)
        tl.store(out + token * out_stride + column, tl.full([BLOCK], -float("inf"), tl.float32), mask=beyond)


@triton.jit
def carry_kernel(
    chosen, scores, old_positions, new_positions, workspace, position0, k, workspace_stride, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    slot = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = slot < k
    column = tl.load(chosen + row * k + slot, mask=inside, other=-1)
    score = tl.load(scores + row * k + slot, mask=inside, other=0.0)
    old = tl.load(old_positions + row * k + column, mask=(column >= 0) & (column < k), other=-1)
    position = tl.where(column < k, old, position0 + column - k)
    tl.store(new_positions + row * k + slot, position, mask=inside)
    tl.store(workspace + row * workspace_stride + slot, score, mask=inside)


@torch.library.custom_op("cptools::indexer_scores_triton", mutates_args=("out",))
def scores_into(
    out: Tensor,
    query: Tensor,
    weights: Tensor,
    keys: Tensor,
    scales: Tensor | None,
    tables: Tensor | None,
    starts: Tensor | None,
    lens: Tensor,
    first: int,
    page_size: int,
) -> None:
    """Scores of positions [first, first + columns) into out [T, columns]; nothing beyond a row's length.

    keys [S, D], or with tables [R, blocks] the key plane of pages [P, page_size * D]; scales likewise. Rows t of equal
    ``t // (T // R)`` share a table.
    """
    rows, heads, depth = query.shape
    columns = out.shape[1]
    if not rows or not columns:
        return
    paged = tables is not None
    some = keys  # stands in for absent tensors
    widen = query.dtype != keys.dtype or query.dtype == torch.float32
    block = 64 if widen else _BLOCK
    scores_kernel[(rows, triton.cdiv(columns, block))](
        query,
        weights,
        keys,
        some if scales is None else scales,
        some if tables is None else tables,
        some if starts is None else starts,
        lens,
        out,
        rows // tables.shape[0] if tables is not None else rows,
        keys.shape[0],
        first,
        columns,
        depth,
        depth if paged else keys.stride(0),
        tables.stride(0) if tables is not None else 0,
        keys.stride(0) if paged else 0,
        scales.stride(0) if paged and scales is not None else 0,
        out.stride(0),
        HEADS=heads,
        BLOCK=block,
        BLOCK_H=16 if widen else min(64, max(16, triton.next_power_of_2(heads))),  # what fits registers
        BLOCK_D=max(32, triton.next_power_of_2(depth)),
        PAGE=page_size if paged else 0,
        HAS_SCALES=scales is not None,
        HAS_STARTS=starts is not None,
        WIDEN=widen,
        num_warps=8 if widen else 4,
    )


@scores_into.register_fake
def _(
    out: Tensor,
    query: Tensor,
    weights: Tensor,
    keys: Tensor,
    scales: Tensor | None,
    tables: Tensor | None,
    starts: Tensor | None,
    lens: Tensor,
    first: int,
    page_size: int,
) -> None:
    return None


@torch.library.custom_op("cptools::indexer_fill_triton", mutates_args=("out",))
def fill_beyond(out: Tensor, lens: Tensor, starts: Tensor | None, num_keys: int) -> None:
    """-inf into columns of out [T, columns] at and beyond a row's length, or beyond the last of ``num_keys`` keys."""
    rows, columns = out.shape
    if rows and columns:
        fill_kernel[(rows, triton.cdiv(columns, _FILL_BLOCK))](
            lens if starts is None else starts,
            lens,
            out,
            num_keys,
            columns,
            out.stride(0),
            BLOCK=_FILL_BLOCK,
            HAS_STARTS=starts is not None,
            num_warps=4,
        )


@fill_beyond.register_fake
def _(out: Tensor, lens: Tensor, starts: Tensor | None, num_keys: int) -> None:
    return None


@torch.library.custom_op("cptools::indexer_carry_triton", mutates_args=("new_positions", "workspace"))
def carry_into(
    new_positions: Tensor, workspace: Tensor, chosen: Tensor, scores: Tensor, old_positions: Tensor, position0: int
) -> None:
    """Candidates chosen from [old candidates | chunk]: columns chosen [T, k] -> positions, scores to workspace[:, :k].

    Column c < k is old candidate c, and column k + i is position0 + i.
    """
    rows, k = chosen.shape
    if rows:
        carry_kernel[(rows, triton.cdiv(k, _CARRY_BLOCK))](
            chosen,
            scores,
            old_positions,
            new_positions,
            workspace,
            position0,
            k,
            workspace.stride(0),
            BLOCK=_CARRY_BLOCK,
            num_warps=4,
        )


@carry_into.register_fake
def _(
    new_positions: Tensor, workspace: Tensor, chosen: Tensor, scores: Tensor, old_positions: Tensor, position0: int
) -> None:
    return None


def _spec(
    name: str,
    dtype: str,
    *,
    block: int,
    heads: int,
    depth: int,
    page: int = 0,
    starts: bool = True,
    widen: bool = False,
) -> CompileSpec:
    scaled = dtype == "fp8e4nv"
    return CompileSpec(
        name=f"indexer_scores_{name}",
        fn=scores_kernel,
        signature={
            "query": f"*{dtype}",
            "weights": "*fp32",
            "keys": f"*{dtype}",
            "scales": "*fp32",
            "tables": "*i64",
            "starts": "*i64",
            "lens": "*i64",
            "out": "*fp32",
            **dict.fromkeys(("queries", "num_keys", "first", "columns", "depth", "key_stride"), "i32"),
            **dict.fromkeys(("table_stride", "key_page_stride", "scale_page_stride", "out_stride"), "i64"),
            **dict.fromkeys(
                ("HEADS", "BLOCK", "BLOCK_H", "BLOCK_D", "PAGE", "HAS_SCALES", "HAS_STARTS", "WIDEN"), "constexpr"
            ),
        },
        constexprs={
            "HEADS": heads,
            "BLOCK": block,
            "BLOCK_H": 16 if widen else heads,
            "BLOCK_D": depth,
            "PAGE": page,
            "HAS_SCALES": scaled,
            "HAS_STARTS": starts,
            "WIDEN": widen,
        },
        num_warps=8 if widen else 4,
        divisible_by_16=("query", "weights", "keys", "out", "depth", "key_stride", "key_page_stride"),
    )


def compile_specs() -> list[CompileSpec]:
    return [
        _spec("fp8", "fp8e4nv", block=_BLOCK, heads=32, depth=128),
        _spec("fp8_paged", "fp8e4nv", block=_BLOCK, heads=32, depth=128, page=64, starts=False),
        _spec("fp8_paged_16", "fp8e4nv", block=_BLOCK, heads=64, depth=128, page=16, starts=False),
        _spec("bf16", "bf16", block=_BLOCK, heads=64, depth=128),
        _spec("fp32", "fp32", block=64, heads=32, depth=128, widen=True),
        CompileSpec(
            name="indexer_carry",
            fn=carry_kernel,
            signature={
                "chosen": "*i64",
                "scores": "*fp32",
                "old_positions": "*i64",
                "new_positions": "*i64",
                "workspace": "*fp32",
                "position0": "i32",
                "k": "i32",
                "workspace_stride": "i32",
                "BLOCK": "constexpr",
            },
            constexprs={"BLOCK": _CARRY_BLOCK},
        ),
        CompileSpec(
            name="indexer_fill",
            fn=fill_kernel,
            signature={
                "starts": "*i64",
                "lens": "*i64",
                "out": "*fp32",
                **dict.fromkeys(("num_keys", "columns", "out_stride"), "i32"),
                **dict.fromkeys(("BLOCK", "HAS_STARTS"), "constexpr"),
            },
            constexprs={"BLOCK": _FILL_BLOCK, "HAS_STARTS": True},
        ),
    ]
