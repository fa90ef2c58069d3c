# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls
"""Scores of FP8 queries against FP8 keys back to back: one warpgroup, 128 columns, key tiles of 64 by TMA."""

from __future__ import annotations

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from .layouts_gluon import scores_layout


@gluon.jit(do_not_specialize=["queries"])  # the last block of rows takes the kernel of the others
def contiguous_kernel(
    query,
    weights,
    keys,
    scales,
    starts,
    lens,
    out,
    queries,
    num_keys,
    first,
    columns,
    tiles,
    out_stride,
    QUERIES: gl.constexpr,
    HEADS: gl.constexpr,
    DEPTH: gl.constexpr,
    HAS_STARTS: gl.constexpr,
    STAGES: gl.constexpr,
):
    TILE: gl.constexpr = 64
    WIDTH: gl.constexpr = QUERIES * HEADS
    NEAR: gl.constexpr = 8 // QUERIES  # heads next to each other: four lanes hold 8 columns of a row
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 32])
    OUT: gl.constexpr = scores_layout(QUERIES)
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
    limit = gl.minimum(gl.maximum(length - first - column0, 0), width).to(gl.int32)
    column = gl.arange(0, TILE, layout=gl.SliceLayout(1, OUT))
    out_at = out + column0 + ((row0 + row) * out_stride)[None, :] + column[:, None]

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
        used = 0
        for leader in range(QUERIES if HAS_STARTS else 1):
            # Rows of a group that start at the same key are scored together, by the first of them.
            mine = exists
            begin = (first + column0).to(gl.int64)
            if HAS_STARTS:
                start = gl.sum(gl.where(row == leader, start_of, 0), 0)
                mine = exists & (start_of == start)
                earlier = gl.max(gl.where(mine & (row < leader), 1, 0), 0)
                mine = mine & (earlier == 0)
                begin += start
            rest = gl.where(mine, limit, 0)
            left = gl.max(rest, 0)
            count = gl.cdiv(left, TILE).to(gl.int32)
            scale_at = scales + begin
            here = begin.to(gl.int32)
            for stage in gl.static_range(STAGES - 1):
                if left > stage * TILE:
                    slot = (used + stage) % STAGES
                    mbarrier.expect(ready.index(slot), TILE * DEPTH)
                    tma.async_copy_global_to_shared(keys, [here, 0], ready.index(slot), key_tiles.index(slot))
                here += TILE
            left -= (STAGES - 1) * TILE
            store_at = out_at
            scale_here = scale_at + gl.zeros([TILE, QUERIES], gl.int32, OUT) + column[:, None]
            for i in range(count):
                turn = used + i
                slot = turn % STAGES
                mbarrier.wait(ready.index(slot), (turn // STAGES) & 1)
                acc = gl.zeros([TILE, WIDTH], gl.float32, ACC)
                acc = warpgroup_mma(
                    key_tiles.index(slot), query_tile.permute((1, 0)), acc, use_acc=False, is_async=True
                )
                seen = column[:, None] < rest[None, :]
                scale = gl.load(scale_here, mask=seen, other=0.0)
                more = left > 0
                next_slot = (turn + STAGES - 1) % STAGES
                gl.thread_barrier()  # all warps are done with the product that read this slot
                refilled, next_tile = ready.index(next_slot), key_tiles.index(next_slot)
                mbarrier.expect(refilled, TILE * DEPTH, pred=more)
                tma.async_copy_global_to_shared(keys, [here, 0], refilled, next_tile, pred=more)
                here += TILE
                left -= TILE
                scale_here += TILE
                acc = warpgroup_mma_wait(0, deps=[acc])
                products = gl.maximum(acc, 0.0, propagate_nan=tl.PropagateNan.ALL) * weight
                products = gl.sum(products.reshape([TILE, WIDTH // 8, QUERIES, NEAR]), 1)
                score = gl.convert_layout(gl.sum(products, 2), OUT, assert_trivial=True) * scale
                gl.store(store_at, score, mask=seen)
                store_at += TILE
                rest -= TILE
            used += count
            gl.thread_barrier()
