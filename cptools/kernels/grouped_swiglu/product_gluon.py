"""Products of rows with matrices on Hopper, block-FP8 or BF16: grouped by expert or dense, with SwiGLU behind or not.

One program an SM walks over jobs: a tile of up to 128 rows of one expert times 256 rows of its matrix (of gate and up
those that belong together, else neighbours), or a part of the columns of these. A producer warp fills a ring of shared
memory by TMA, across jobs; each of two warpgroups multiplies 64 rows. Sums of 128 FP8 products stay in the matrix unit,
their scaled sum is kept in fp32 registers: one warpgroup adds while the other multiplies. A tile of at most 64 rows
leaves the second warpgroup idle; so few rows are bound by the matrices' bytes, not by that.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ..arguments import aligned
from .triton import FIELDS, TILE_ROWS

LINE_BYTES = 128
"""Of a row or a matrix in one step."""
LAUNCH = {"STAGES": 4, "CONSUMER_REGISTERS": 216, "PRODUCER_REGISTERS": 72, "OVERLAP": True}
HALF = gl.constexpr(64)  # rows of a warpgroup
SLICE = gl.constexpr(128)  # matrix rows of one product
TILE_FIELDS = gl.constexpr(FIELDS)
FP8_SUMS = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 32]))
BF16_SUMS = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16]))


@gluon.jit
def place(table, sizes, job, DENSE: gl.constexpr):
    """(expert, first row, rows, column, part, first step, steps) of a job; those of one tile come one after the other.

    A column is 256 rows of the matrix, a part a share of the steps over its depth.
    """
    _, columns, _, steps, parts, all_rows = sizes
    column = job % columns
    if DENSE:
        part = job // columns % parts
        tile = job // (columns * parts)
        share = (steps + parts - 1) // parts
        row = tile * (2 * HALF)
        rows = gl.minimum(all_rows - row, 2 * HALF)
        begin = part * share
        return 0, row, rows, column, part, begin, gl.minimum(share, steps - begin)
    else:
        at = table + job // columns * TILE_FIELDS
        return gl.load(at), gl.load(at + 1), gl.load(at + 2), column, 0, 0, steps


@gluon.jit
def produce(x, w, tiles, table, sizes, GATED: gl.constexpr, DENSE: gl.constexpr, STAGES: gl.constexpr):
    x_tiles, w_tiles, full, free = tiles
    jobs, outputs = sizes[0], sizes[2]
    WIDE: gl.constexpr = x.block_type.shape[1]
    turn = 0
    for job in range(gl.program_id(0), jobs, gl.num_programs(0)):
        expert, row, rows, column, _, begin, steps = place(table, sizes, job, DENSE)
        both = rows > HALF
        first = expert * outputs
        if GATED:
            first += column * SLICE
            second = first + outputs // 2
        else:
            first += column * (2 * SLICE)
            second = first + SLICE
        for step in range(steps):
            slot = turn % STAGES
            mbarrier.wait(free.index(slot), ((turn // STAGES) & 1) ^ 1)
            ready = full.index(slot)
            at = (begin + step) * WIDE
            mbarrier.expect(ready, (2 * SLICE + HALF) * 128, pred=rows <= HALF)
            mbarrier.expect(ready, (2 * SLICE + 2 * HALF) * 128, pred=both)
            tma.async_copy_global_to_shared(x, [row, at], ready, x_tiles.index(2 * slot))
            tma.async_copy_global_to_shared(x, [row + HALF, at], ready, x_tiles.index(2 * slot + 1), pred=both)
            tma.async_copy_global_to_shared(w, [first, at], ready, w_tiles.index(2 * slot))
            tma.async_copy_global_to_shared(w, [second, at], ready, w_tiles.index(2 * slot + 1))
            turn += 1


@gluon.jit
def multiply_fp8(tiles, scales, step_range, row_part, turn, WHICH: gl.constexpr, STAGES: gl.constexpr):
    """Both products of 64 rows; each step's sum is scaled by its row's and its block's scale."""
    x_tiles, w_tiles, full, free = tiles
    x_scale, x_scale_stride, first_scale, second_scale = scales
    rows, line = row_part
    # Per thread, not as scalars: the compiler waits for those in the midst of a product.
    spread = gl.zeros([HALF], gl.int32, gl.SliceLayout(1, FP8_SUMS))
    live = line < rows
    x_next = gl.load(x_scale + line, mask=live, other=0.0)
    first_next = gl.load(first_scale + spread)
    second_next = gl.load(second_scale + spread)
    first = gl.zeros([HALF, SLICE], gl.float32, FP8_SUMS)
    second = gl.zeros([HALF, SLICE], gl.float32, FP8_SUMS)
    for step in range(step_range):
        slot = turn % STAGES
        first_factor = (x_next * first_next)[:, None]
        second_factor = (x_next * second_next)[:, None]
        ahead = gl.minimum(step + 1, step_range - 1)
        x_next = gl.load(x_scale + ahead * x_scale_stride + line, mask=live, other=0.0)
        first_next = gl.load(first_scale + ahead + spread)
        second_next = gl.load(second_scale + ahead + spread)
        mbarrier.wait(full.index(slot), (turn // STAGES) & 1)
        rows_here = x_tiles.index(2 * slot + WHICH)
        part = warpgroup_mma(
            rows_here, w_tiles.index(2 * slot).permute((1, 0)), gl.zeros_like(first), use_acc=False, is_async=True
        )
        part = warpgroup_mma_wait(0, deps=[part])
        first += part * first_factor
        part = warpgroup_mma(
            rows_here, w_tiles.index(2 * slot + 1).permute((1, 0)), gl.zeros_like(first), use_acc=False, is_async=True
        )
        part = warpgroup_mma_wait(0, deps=[part])
        mbarrier.arrive(free.index(slot))
        second += part * second_factor
        turn += 1
    return first, second


@gluon.jit
def multiply_bf16(tiles, step_range, turn, WHICH: gl.constexpr, STAGES: gl.constexpr):
    x_tiles, w_tiles, full, free = tiles
    first = gl.zeros([HALF, SLICE], gl.float32, BF16_SUMS)
    second = gl.zeros([HALF, SLICE], gl.float32, BF16_SUMS)
    for step in range(step_range):
        slot = turn % STAGES
        mbarrier.wait(full.index(slot), (turn // STAGES) & 1)
        rows_here = x_tiles.index(2 * slot + WHICH)
        first = warpgroup_mma(rows_here, w_tiles.index(2 * slot).permute((1, 0)), first, is_async=True)
        second = warpgroup_mma(rows_here, w_tiles.index(2 * slot + 1).permute((1, 0)), second, is_async=True)
        # The step before is done, this one goes on behind the next wait.
        first, second = warpgroup_mma_wait(2, deps=[first, second])
        mbarrier.arrive(free.index((turn + STAGES - 1) % STAGES), pred=step > 0)
        turn += 1
    first, second = warpgroup_mma_wait(0, deps=[first, second])
    mbarrier.arrive(free.index((turn + STAGES - 1) % STAGES))
    return first, second


@gluon.jit
def store_slice(sums, out, stride, rows, width, LAYOUT: gl.constexpr):
    row = gl.arange(0, HALF, gl.SliceLayout(1, LAYOUT))[:, None]
    column = gl.arange(0, SLICE, gl.SliceLayout(0, LAYOUT))[None, :]
    at = out + row.to(gl.int64) * stride + column
    gl.store(at, sums.to(out.dtype.element_ty), mask=(row < rows) & (column < width))


@gluon.jit
def consume(
    tiles,
    scales,
    result,
    table,
    sizes,
    WHICH: gl.constexpr,
    GATED: gl.constexpr,
    FP8: gl.constexpr,
    DENSE: gl.constexpr,
    STAGES: gl.constexpr,
):
    """Rows [64 * WHICH, 64 * WHICH + 64) of each tile."""
    LAYOUT: gl.constexpr = FP8_SUMS if FP8 else BF16_SUMS
    x_scales, x_scale_stride, w_scales = scales
    out, out_stride, out_scales, out_scale_stride = result
    jobs, _, outputs, all_steps, _, all_rows = sizes
    turn = 0
    for job in range(gl.program_id(0), jobs, gl.num_programs(0)):
        expert, row, rows, column, part, begin, steps = place(table, sizes, job, DENSE)
        row += WHICH * HALF
        rows -= WHICH * HALF
        if rows > 0:
            at = out + (part * all_rows + row).to(gl.int64) * out_stride
            if FP8:
                line = gl.arange(0, HALF, gl.SliceLayout(1, FP8_SUMS))
                blocks = (outputs + SLICE - 1) // SLICE
                first_block = expert * blocks + (column if GATED else 2 * column)
                # The last part of an odd number of blocks has no second one: its product is not stored.
                second_block = first_block + (blocks // 2 if GATED else gl.where(2 * column + 1 < blocks, 1, 0))
                first_scale = w_scales + first_block.to(gl.int64) * all_steps + begin
                second_scale = w_scales + second_block.to(gl.int64) * all_steps + begin
                x_scale = x_scales + begin * x_scale_stride + row
                step_scales = (x_scale, x_scale_stride, first_scale, second_scale)
                first, second = multiply_fp8(tiles, step_scales, steps, (rows, line), turn, WHICH, STAGES)
            else:
                first, second = multiply_bf16(tiles, steps, turn, WHICH, STAGES)
            if GATED:
                first = first / (1.0 + gl.exp(-first)) * second
                if FP8:
                    scale = gl.maximum(gl.max(gl.abs(first), 1), 1e-12) * (1 / 448)
                    first *= (1.0 / scale)[:, None]
                    scale_at = out_scales + column.to(gl.int64) * out_scale_stride + row + line
                    gl.store(scale_at, scale, mask=line < rows)
                at += column * SLICE
                store_slice(first, at, out_stride, rows, outputs // 2 - column * SLICE, LAYOUT)
            else:
                at += column * (2 * SLICE)
                left = outputs - column * (2 * SLICE)
                store_slice(first, at, out_stride, rows, left, LAYOUT)
                store_slice(second, at + SLICE, out_stride, rows, left - SLICE, LAYOUT)
            turn += steps
        else:
            for _ in range(steps):
                mbarrier.wait(tiles[2].index(turn % STAGES), (turn // STAGES) & 1)
                mbarrier.arrive(tiles[3].index(turn % STAGES))
                turn += 1


@gluon.jit
def first_half(
    tiles,
    scales,
    result,
    table,
    sizes,
    GATED: gl.constexpr,
    FP8: gl.constexpr,
    DENSE: gl.constexpr,
    STAGES: gl.constexpr,
):
    consume(tiles, scales, result, table, sizes, 0, GATED, FP8, DENSE, STAGES)


@gluon.jit
def second_half(
    tiles,
    scales,
    result,
    table,
    sizes,
    GATED: gl.constexpr,
    FP8: gl.constexpr,
    DENSE: gl.constexpr,
    STAGES: gl.constexpr,
):
    consume(tiles, scales, result, table, sizes, 1, GATED, FP8, DENSE, STAGES)


@gluon.jit
def grouped_kernel(
    x,
    w,
    x_scales,
    w_scales,
    out,
    out_scales,
    table,
    total,
    columns,
    outputs,
    steps,
    parts,
    rows,
    x_scale_stride,
    out_stride,
    out_scale_stride,
    GATED: gl.constexpr,
    FP8: gl.constexpr,
    DENSE: gl.constexpr,
    STAGES: gl.constexpr,
    CONSUMER_REGISTERS: gl.constexpr,
    PRODUCER_REGISTERS: gl.constexpr,
    OVERLAP: gl.constexpr,
):
    if OVERLAP:
        gdc_launch_dependents()
    WIDE: gl.constexpr = x.block_type.shape[1]
    x_tiles = gl.allocate_shared_memory(x.dtype, [2 * STAGES, HALF, WIDE], x.layout)
    w_tiles = gl.allocate_shared_memory(w.dtype, [2 * STAGES, SLICE, WIDE], w.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(free.index(stage), count=2)
    fence_async_shared()
    if OVERLAP:
        gdc_wait()
    count = (rows + 2 * HALF - 1) // (2 * HALF) * parts if DENSE else gl.load(total)
    sizes = (count * columns, columns, outputs, steps, parts, rows)
    tiles = (x_tiles, w_tiles, full, free)
    scales = (x_scales, x_scale_stride, w_scales)
    result = (out, out_stride, out_scales, out_scale_stride)
    gl.warp_specialize(
        [
            (first_half, (tiles, scales, result, table, sizes, GATED, FP8, DENSE, STAGES)),
            (second_half, (tiles, scales, result, table, sizes, GATED, FP8, DENSE, STAGES)),
            (produce, (x, w, tiles, table, sizes, GATED, DENSE, STAGES)),
        ],
        [4, 1],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )


class Tiles(NamedTuple):
    """Tiles of 128 rows of one expert: int32 [most, 3], how many of them are used [1], most."""

    table: Tensor
    total: Tensor
    most: int


def product(
    x: Tensor,
    x_scales: Tensor | None,
    w: Tensor,
    w_scales: Tensor | None,
    tiles: Tiles | None,
    out: Tensor,
) -> Tensor | None:
    """x [P, D] times w [E, O, D], tile by tile, into out [P, O], or into [P, O / 2] SwiGLU of it.

    Without tiles all rows belong to the one matrix w [O, D]; then out may be fp32 [parts, P, O], sums over parts of D.
    In FP8 the scales are [D / 128, P] and [E, ceil(O / 128), D / 128]. An FP8 out gets scales [O / 2 / 128, P],
    which are returned. Nothing is written for a row of no tile.
    """
    outputs, depth = w.shape[-2:]
    x, w = aligned(x, 16), aligned(w, 16)  # a trace chooses without addresses
    rows = x.shape[0]
    gated = out.shape[-1] != outputs
    fp8 = x_scales is not None
    wide = LINE_BYTES // x.element_size()
    layout = gl.NVMMASharedLayout(128, 8 * x.element_size(), 2)
    columns = triton.cdiv(outputs, 256)
    parts = out.shape[0] if out.dim() == 3 else 1
    most = triton.cdiv(rows, TILE_ROWS) * parts if tiles is None else tiles.most
    out_scales = None
    if fp8 and gated:
        out_scales = torch.empty(columns, rows, dtype=torch.float32, device=out.device)
    programs = torch.cuda.get_device_properties(x.device).multi_processor_count
    grouped_kernel[(min(programs, most * columns),)](
        TensorDescriptor.from_tensor(x, [64, wide], layout),
        TensorDescriptor.from_tensor(w.view(-1, depth), [128, wide], layout),
        x_scales,
        w_scales,
        out,
        out_scales,
        tiles.table if tiles is not None else None,
        tiles.total if tiles is not None else None,
        columns,
        outputs,
        depth // wide,
        parts,
        rows,
        x_scales.stride(0) if x_scales is not None else 0,
        out.stride(-2),
        rows,
        GATED=gated,
        FP8=fp8,
        DENSE=tiles is None,
        **LAUNCH,
        launch_pdl=True,
        num_warps=4,
    )
    return out_scales
