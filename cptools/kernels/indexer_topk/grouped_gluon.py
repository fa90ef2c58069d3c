# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls
"""Scores as `contiguous_gluon` makes them, in an order of their own: what a thread holds stands together, 16 keys,
beside the maximum of those."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
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

from ..compile_spec import CompileSpec
from ..relaunch import Relaunched
from .gluon import DEPTH, LAUNCH, TILE, WIDTH, tiles_a_program
from .layouts_gluon import scores_layout

_TILES = 64
_SPAN_TILES = 8


@gluon.constexpr_function
def groups_layout(queries: int) -> Any:
    """[32, queries, 8]: the scores of four tiles as `scores_layout` has them, by thread."""
    lanes = [[0, 0, 0], [0, 0, 0]]
    if queries == 2:
        lanes = [[0, 0, 0], [0, 1, 0]]
    elif queries == 4:
        lanes = [[0, 1, 0], [0, 2, 0]]
    return gl.DistributedLinearLayout(
        reg_bases=[[0, 0, 1], [0, 0, 2], [0, 0, 4]],
        lane_bases=[*lanes, [1, 0, 0], [2, 0, 0], [4, 0, 0]],
        warp_bases=[[8, 0, 0], [16, 0, 0]],
        block_bases=[],
        shape=[32, queries, 8],
    )


@gluon.jit
def _by_thread(score, QUERIES: gl.constexpr):
    """[64, queries] -> [32, queries, 2]: a thread's two keys."""
    return score.reshape([4, 2, 8, QUERIES]).permute((0, 2, 3, 1)).reshape([32, QUERIES, 2])


@gluon.jit
def _pinned(score):
    """The same, computed before the next product: the compiler would compute those of all products after the last."""
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [score], dtype=gl.float32, is_pure=False, pack=1)


@gluon.jit
def _larger(a, b):
    return gl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@gluon.jit
def _largest(pairs):
    low, high = gl.split(_larger(_larger(pairs[0], pairs[1]), _larger(pairs[2], pairs[3])))
    return _larger(low, high)


@gluon.jit
def _joined(pairs):
    """The last bits of an index are those of the pair's number."""
    return gl.join(gl.join(pairs[0], pairs[2]), gl.join(pairs[1], pairs[3]))


@gluon.jit(do_not_specialize=["queries"])  # the last block of rows takes the kernel of the others
def grouped_kernel(
    query,
    weights,
    keys,
    scales,
    starts,
    lens,
    out,
    maxima,
    queries,
    num_keys,
    columns,
    tiles,
    out_stride,
    maxima_stride,
    QUERIES: gl.constexpr,
    HEADS: gl.constexpr,
    DEPTH: gl.constexpr,
    HAS_STARTS: gl.constexpr,
):
    """tiles: a multiple of 8. Whole groups of 512 keys are written, -inf beyond a row's length."""
    TILE: gl.constexpr = 64
    STAGES: gl.constexpr = 4
    SPAN: gl.constexpr = 2 * STAGES * TILE
    WIDTH: gl.constexpr = QUERIES * HEADS
    NEAR: gl.constexpr = 8 // QUERIES  # heads next to each other: four lanes hold 8 columns of a row
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 32])
    OUT: gl.constexpr = scores_layout(QUERIES)
    GROUPS: gl.constexpr = groups_layout(QUERIES)
    MAXIMA: gl.constexpr = gl.SliceLayout(2, GROUPS)
    COPY: gl.constexpr = gl.BlockedLayout([1, 16], [4, 8], [4, 1], [1, 0])
    SHARED: gl.constexpr = gl.NVMMASharedLayout(128, 8, 2)

    row0 = gl.program_id(0).to(gl.int64) * QUERIES
    column0 = gl.program_id(1) * (tiles * TILE)
    width = gl.minimum(columns - column0, tiles * TILE)

    # From here on columns count from column0.
    row = gl.arange(0, QUERIES, layout=gl.SliceLayout(0, OUT))
    exists = row < queries - row0
    length = gl.load(lens + row0 + row, mask=exists, other=0).to(gl.int64)
    if HAS_STARTS:
        start_of = gl.load(starts + row0 + row, mask=exists, other=0).to(gl.int64)
        length = gl.where(start_of < 0, 0, length)
    else:
        start_of = gl.zeros_like(length)
    length = gl.minimum(length, num_keys - start_of)
    limit = gl.minimum(gl.maximum(length - column0, 0), width).to(gl.int32)
    column = gl.arange(0, TILE, layout=gl.SliceLayout(1, OUT))
    group_row = gl.arange(0, QUERIES, layout=gl.SliceLayout(0, MAXIMA))
    group = gl.arange(0, 32, layout=gl.SliceLayout(1, MAXIMA))
    within = gl.arange(0, 8, layout=gl.SliceLayout(0, gl.SliceLayout(0, GROUPS)))
    group_at = ((row0 + group_row) * out_stride)[None, :] + (group * 16)[:, None]
    out_at = out + column0 + group_at.expand_dims(2) + within.expand_dims(0).expand_dims(0)
    maxima_at = maxima + column0 // 16 + ((row0 + group_row) * maxima_stride)[None, :] + group[:, None]

    if gl.max(limit, 0) > 0:
        byte = gl.arange(0, DEPTH, layout=gl.SliceLayout(0, COPY))
        near = gl.arange(0, WIDTH, layout=gl.SliceLayout(1, COPY))
        near_query = (near // NEAR) % QUERIES
        near_row = near_query * HEADS + near // 8 * NEAR + near % NEAR
        query_bytes = gl.load(
            query + row0 * (HEADS * DEPTH) + near_row[:, None] * DEPTH + byte[None, :],
            mask=(near_query < queries - row0)[:, None],
            other=0.0,
        )
        query_tile = gl.allocate_shared_memory(query_bytes.dtype, [WIDTH, DEPTH], SHARED, query_bytes)
        wide = gl.arange(0, WIDTH, layout=gl.SliceLayout(0, ACC))
        wide_query = (wide // NEAR) % QUERIES
        weight = gl.load(
            weights + row0 * HEADS + wide_query * HEADS + wide // 8 * NEAR + wide % NEAR,
            mask=wide_query < queries - row0,
            other=0.0,
        )[None, :]
        key_tiles = gl.allocate_shared_memory(query_bytes.dtype, [STAGES, TILE, DEPTH], SHARED)
        ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
        for stage in gl.static_range(STAGES):
            mbarrier.init(ready.index(stage), count=1)
        fence_async_shared()
        used = 0  # rounds of all stages
        for leader in range(QUERIES if HAS_STARTS else 1):
            # Rows of a group that start at the same key are scored together, by the first of them.
            mine = exists
            begin = column0.to(gl.int64)
            if HAS_STARTS:
                start = gl.sum(gl.where(row == leader, start_of, 0), 0)
                mine = exists & (start_of == start)
                earlier = gl.max(gl.where(mine & (row < leader), 1, 0), 0)
                mine = mine & (earlier == 0)
                begin += start
            rest = gl.where(mine, limit, 0)
            rounds = gl.cdiv(gl.max(rest, 0), SPAN) * 2
            scale_at = scales + begin
            here = begin.to(gl.int32)
            for stage in gl.static_range(STAGES - 1):
                if rounds > 0:
                    mbarrier.expect(ready.index(stage), TILE * DEPTH)
                    tma.async_copy_global_to_shared(keys, [here, 0], ready.index(stage), key_tiles.index(stage))
                here += TILE
            scale_here = scale_at + gl.zeros([TILE, QUERIES], gl.int32, OUT) + column[:, None]
            best = gl.full([32, QUERIES], -float("inf"), gl.float32, MAXIMA)
            stored = gl.convert_layout(mine.to(gl.int32), gl.SliceLayout(0, MAXIMA)) > 0
            for i in range(rounds):
                pairs = ()
                for slot in gl.static_range(STAGES):
                    mbarrier.wait(ready.index(slot), (used + i) & 1)
                    acc = gl.zeros([TILE, WIDTH], gl.float32, ACC)
                    acc = warpgroup_mma(
                        key_tiles.index(slot), query_tile.permute((1, 0)), acc, use_acc=False, is_async=True
                    )
                    seen = column[:, None] < rest[None, :]
                    scale = gl.load(scale_here, mask=seen, other=0.0)
                    more = (i + 1 < rounds) | (slot == 0)
                    gl.thread_barrier()  # all warps are done with the product that read this slot
                    refilled = ready.index((slot + STAGES - 1) % STAGES)
                    next_tile = key_tiles.index((slot + STAGES - 1) % STAGES)
                    mbarrier.expect(refilled, TILE * DEPTH, pred=more)
                    tma.async_copy_global_to_shared(keys, [here, 0], refilled, next_tile, pred=more)
                    here += TILE
                    scale_here += TILE
                    acc = warpgroup_mma_wait(0, deps=[acc])
                    products = gl.maximum(acc, 0.0, propagate_nan=tl.PropagateNan.ALL) * weight
                    products = gl.sum(products.reshape([TILE, WIDTH // 8, QUERIES, NEAR]), 1)
                    score = gl.convert_layout(gl.sum(products, 2), OUT, assert_trivial=True) * scale
                    score = _pinned(gl.where(seen, score, -float("inf")))
                    pairs = pairs + (_by_thread(score, QUERIES),)  # type: ignore[assignment]
                    rest -= TILE
                round_best = gl.convert_layout(_largest(pairs), MAXIMA, assert_trivial=True)
                best = _larger(gl.where(i % 2 == 1, best, -float("inf")), round_best)
                joined = _joined(pairs).reshape([32, QUERIES, 8])
                joined = gl.convert_layout(joined, GROUPS, assert_trivial=True)
                there = stored[None, :]
                gl.store(out_at + (i // 2 * SPAN + i % 2 * 8), joined, mask=there.expand_dims(2))
                gl.store(maxima_at + i // 2 * 32, best, mask=there & (i % 2 == 1))
            used += rounds
            gl.thread_barrier()


class GroupedScores:
    """`ContiguousScores` in groups, beside their maxima."""

    def __init__(self, keys: Tensor, scales: Tensor, *, heads: int, rows: int, columns: int, starts: bool) -> None:
        self._together = WIDTH // heads
        tiles = tiles_a_program(triton.cdiv(rows, self._together), columns, _TILES)
        tiles = triton.cdiv(tiles, _SPAN_TILES) * _SPAN_TILES
        self._keys = TensorDescriptor.from_tensor(keys, [TILE, DEPTH], gl.NVMMASharedLayout(128, 8, 2))
        self._scales = scales
        self._numbers = keys.shape[0], columns, tiles
        self._programs = triton.cdiv(columns, tiles * TILE)
        constants = {"QUERIES": self._together, "HEADS": heads, "DEPTH": DEPTH, "HAS_STARTS": starts}
        self._launch = Relaunched(grouped_kernel, constants, **LAUNCH)

    def __call__(
        self,
        stream: torch.cuda.Stream,
        out: Tensor,
        maxima: Tensor,
        query: Tensor,
        weights: Tensor,
        starts: Tensor | None,
        lens: Tensor,
    ) -> None:
        """Into out [T, padded columns] and maxima [T, padded columns / 16], on a stream of the current device."""
        rows = out.shape[0]
        some = lens if starts is None else starts  # stands in, is not read
        self._launch(
            stream, (triton.cdiv(rows, self._together), self._programs, 1),
            query, weights, self._keys, self._scales, some, lens, out, maxima,
            rows, *self._numbers, out.stride(0), maxima.stride(0),
        )  # fmt: skip


def _spec(heads: int, queries: int, *, starts: bool = False) -> CompileSpec:
    constexprs: dict[str, Any] = {"QUERIES": queries, "HEADS": heads, "DEPTH": DEPTH, "HAS_STARTS": starts}
    return CompileSpec(
        name=f"indexer_scores_grouped_{heads}_heads_{queries}_queries{'_starts' if starts else ''}",
        fn=grouped_kernel,
        signature={
            "query": "*fp8e4nv",
            "weights": "*fp32",
            "keys": f"tensordesc<fp8e4nv[{TILE},{DEPTH}],NVMMASharedLayout(128,8,2)>",
            "scales": "*fp32",
            "starts": "*i64",
            "lens": "*i64",
            "out": "*fp32",
            "maxima": "*fp32",
            **dict.fromkeys(("queries", "num_keys", "columns", "tiles", "out_stride", "maxima_stride"), "i32"),
            **dict.fromkeys(constexprs, "constexpr"),
        },
        constexprs=constexprs,
        gluon=True,
        options={"maxnreg": LAUNCH["maxnreg"]},
        divisible_by_16=("query", "weights", "scales", "lens", "out", "maxima", "out_stride", "maxima_stride"),
        # Addresses, two of them read again once in four products.
        max_spill_bytes=64,
    )


def compile_specs() -> list[CompileSpec]:
    return [_spec(32, 4), _spec(32, 4, starts=True), _spec(64, 2), _spec(64, 2, starts=True)]
