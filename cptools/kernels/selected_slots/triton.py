"""From selected positions to slots: a program a row and block of its columns."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..arguments import dense, dense_rows
from ..compile_spec import CompileSpec

_BLOCK = 1024


@triton.jit
def selected_slots_kernel(
    out,
    positions,
    request_ids,
    tables,
    columns,
    requests,
    blocks,
    out_stride,
    position_stride,
    table_stride,
    rank,
    WORLD: tl.constexpr,
    INTERLEAVE: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < columns
    request = tl.load(request_ids + row).to(tl.int64)
    wide = tl.load(positions + row * position_stride + column, mask=inside, other=-1)
    at = tl.where(wide > 0x7FFFFFFF, -1, wide).to(tl.int32)  # 64-bit divisions cost a call each
    page = at // (PAGE_SIZE * WORLD)
    mine = (at >= 0) & (at // INTERLEAVE % WORLD == rank) & (page < blocks) & (request >= 0) & (request < requests)
    page_id = tl.load(tables + request * table_stride + page, mask=mine, other=-1).to(tl.int64)
    local = at // (WORLD * INTERLEAVE) * INTERLEAVE + at % INTERLEAVE
    slot = tl.where(mine & (page_id >= 0), page_id * PAGE_SIZE + (local - page * PAGE_SIZE), -1)
    tl.store(out + row * out_stride + column, slot.to(out.dtype.element_ty), mask=inside)


@torch.library.custom_op("cptools::selected_slots", mutates_args=("out",))
def selected_slots(
    out: Tensor,
    positions: Tensor,
    request_ids: Tensor,
    tables: Tensor,
    world_size: int,
    interleave: int,
    page_size: int,
    rank: int,
) -> None:
    """See `cptools.kernels.selected_slots`."""
    rows, columns = positions.shape
    if not rows or not columns:
        return
    positions, tables, made = dense_rows(positions), dense_rows(tables), dense_rows(out)
    selected_slots_kernel[(rows, triton.cdiv(columns, _BLOCK))](
        made,
        positions,
        dense(request_ids),
        tables,
        columns,
        tables.shape[0],
        tables.shape[1],
        made.stride(0),
        positions.stride(0),
        tables.stride(0),
        rank,
        WORLD=world_size,
        INTERLEAVE=interleave,
        PAGE_SIZE=page_size,
        BLOCK=_BLOCK,
        num_warps=4,
    )
    if made is not out:
        out.copy_(made)


@selected_slots.register_fake
def _(
    out: Tensor,
    positions: Tensor,
    request_ids: Tensor,
    tables: Tensor,
    world_size: int,
    interleave: int,
    page_size: int,
    rank: int,
) -> None:
    return None


def compile_specs() -> list[CompileSpec]:
    pointers = {"out": "*i32", "positions": "*i64", "request_ids": "*i64", "tables": "*i64"}
    sizes = dict.fromkeys(
        ["columns", "requests", "blocks", "out_stride", "position_stride", "table_stride", "rank"], "i32"
    )
    specs = []
    for world_size in (1, 3, 8):
        constexprs = {"WORLD": world_size, "INTERLEAVE": 1, "PAGE_SIZE": 64, "BLOCK": _BLOCK}
        specs.append(
            CompileSpec(
                f"selected_slots-{world_size}",
                selected_slots_kernel,
                pointers | sizes | dict.fromkeys(constexprs, "constexpr"),
                constexprs,
                divisible_by_16=("out", "positions", "out_stride", "position_stride"),
            )
        )
    return specs
