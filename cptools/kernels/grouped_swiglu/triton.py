"""What the grouped products start from, in one launch: a list of tiles of one expert's rows, and rows in FP8."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..block_fp8.triton import empty_rows, quantise_part, tiles
from ..compile_spec import CompileSpec
from ..dependent_launch import overlapped, wait_for_inputs

TILE_ROWS = 128
FIELDS = 3
"""int32 of a tile: expert, first row, rows."""
_TILES = 32  # of one program


@triton.jit
def list_tiles(counts, table, total, experts, part, ROWS: tl.constexpr, EP: tl.constexpr, TILES: tl.constexpr):
    """Write tiles [part * TILES, (part + 1) * TILES) of the list, and how many there are in all."""
    expert = tl.arange(0, EP)
    count = tl.load(counts + expert, mask=expert < experts, other=0).to(tl.int32)
    tiles = (count + ROWS - 1) // ROWS
    end = tl.cumsum(tiles, 0)
    first_row = tl.cumsum(count, 0) - count
    tile = part * TILES + tl.arange(0, TILES)
    own = (tile[:, None] < end[None, :]) & (tile[:, None] >= (end - tiles)[None, :])
    rank = tl.sum(tl.where(own, tile[:, None] - (end - tiles)[None, :], 0), 1)
    begin = tl.sum(tl.where(own, first_row[None, :], 0), 1) + rank * ROWS
    left = tl.sum(tl.where(own, count[None, :], 0), 1) - rank * ROWS
    last = tl.sum(tiles, 0)
    at = table + 3 * tile
    tl.store(at, tl.sum(tl.where(own, expert[None, :], 0), 1), mask=tile < last)
    tl.store(at + 1, begin, mask=tile < last)
    tl.store(at + 2, tl.minimum(left, ROWS), mask=tile < last)
    tl.store(total, last, mask=part == 0)


@triton.jit
def prepare_kernel(
    counts,
    table,
    total,
    x,
    source,
    values,
    scales,
    experts,
    list_parts,
    rows,
    columns,
    x_stride,
    row_parts,
    ROWS: tl.constexpr,
    EP: tl.constexpr,
    TILES: tl.constexpr,
    PICKED: tl.constexpr,
    R: tl.constexpr,
    G: tl.constexpr,
    OVERLAP: tl.constexpr,
    EARLY: tl.constexpr,
):
    """The first programs list tiles, the others quantise rows; either may be none."""
    wait_for_inputs(OVERLAP, EARLY)
    part = tl.program_id(0)
    if part < list_parts:
        list_tiles(counts, table, total, experts, part, ROWS, EP, TILES)
    else:
        part -= list_parts
        at = (part % row_parts, part // row_parts)
        quantise_part(x, source, values, scales, rows, columns, x_stride, 0, at[0], at[1], PICKED, False, 1, R, G)


def prepare(
    counts: Tensor, x: Tensor, source: Tensor | None, *, quantise: bool
) -> tuple[Tensor, Tensor, int, Tensor, Tensor]:
    """(list of tiles int32 [most, 3], how many are used [1], most, values [P, D], scales [D / 128, P]). No sync.

    The rows are those of x [T, D] that source [P] names, or x itself; values and scales are empty without ``quantise``.
    """
    experts, columns = counts.shape[0], x.shape[1]
    rows = x.shape[0] if source is None else source.shape[0]
    most = rows // TILE_ROWS + min(experts, rows)
    table = counts.new_empty(most, FIELDS, dtype=torch.int32)
    total = counts.new_empty(1, dtype=torch.int32)
    values, scales = empty_rows(x, rows if quantise else 0, columns)
    list_parts = triton.cdiv(most, _TILES)
    tile = tiles(rows)
    row_parts = triton.cdiv(rows, tile["R"])
    quantise_parts = row_parts * triton.cdiv(scales.shape[0], tile["G"]) if quantise else 0
    prepare_kernel[(list_parts + quantise_parts,)](
        counts,
        table,
        total,
        x,
        source,
        values,
        scales,
        experts,
        list_parts,
        rows,
        columns,
        x.stride(0),
        row_parts,
        ROWS=TILE_ROWS,
        EP=triton.next_power_of_2(experts),
        TILES=_TILES,
        PICKED=source is not None,
        **tile,
        **overlapped(x, early=True),
    )
    return table, total, most, values, scales


def compile_specs() -> list[CompileSpec]:
    specs = []
    for picked, rows in ((False, 1), (False, 8), (True, 8)):
        constexprs = {
            "ROWS": TILE_ROWS,
            "EP": 256,
            "TILES": _TILES,
            "PICKED": picked,
            "OVERLAP": True,
            "EARLY": True,
            **tiles(rows),
        }
        pointers = {"counts": "*i32", "table": "*i32", "total": "*i32", "x": "*bf16", "source": "*i64"}
        pointers |= {"values": "*fp8e4nv", "scales": "*fp32"}
        integers = ("experts", "list_parts", "rows", "columns", "x_stride", "row_parts")
        specs.append(
            CompileSpec(
                name=f"prepare_{rows}{'_picked' if picked else ''}",
                fn=prepare_kernel,
                signature=pointers | dict.fromkeys(integers, "i32") | dict.fromkeys(constexprs, "constexpr"),
                constexprs=constexprs,
                divisible_by_16=("counts", "table", "x", "values", "scales", "columns", "x_stride"),
            )
        )
    return specs
