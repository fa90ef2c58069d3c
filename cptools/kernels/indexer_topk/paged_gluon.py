# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, disable-error-code="assignment,var-annotated"
"""Scores of FP8 queries against FP8 keys in pages: one warpgroup, up to 128 columns, key tiles of 64 by cp.async."""

from __future__ import annotations

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from .layouts_gluon import scores_layout


@gluon.jit
def copy_tile(
    keys,
    scales,
    left,
    page,
    inside,
    num_pages,
    key_page_stride,
    scale_page_stride,
    key_tile,
    scale_tile,
    DEPTH: gl.constexpr,
    TILE: gl.constexpr,
):
    """Start copying the first ``left`` of TILE keys of a page, and their scales, from key ``inside`` on.

    The others read 0, and so does a page that does not exist."""
    COPY: gl.constexpr = gl.BlockedLayout([1, 16], [4, 8], [4, 1], [1, 0])
    # [16, DEPTH, 4]: a thread's four rows stand apart by a constant, and one address serves them all.
    FOLDED: gl.constexpr = gl.BlockedLayout([1, 16, 4], [4, 8, 1], [4, 1, 1], [2, 1, 0])
    row = gl.arange(0, 16, layout=gl.SliceLayout(1, gl.SliceLayout(2, FOLDED)))
    byte = gl.arange(0, DEPTH, layout=gl.SliceLayout(0, gl.SliceLayout(2, FOLDED)))
    step = gl.arange(0, 4, layout=gl.SliceLayout(0, gl.SliceLayout(1, FOLDED)))
    exists = (page >= 0) & (page < num_pages)
    left = gl.where(exists, left, 0)
    page = gl.where(exists, page, 0).to(gl.int64)
    key = gl.arange(0, TILE, layout=gl.BlockedLayout([1], [32], [4], [0]))
    scale_at = scales + page * scale_page_stride + inside
    async_copy.async_copy_global_to_shared(scale_tile, scale_at + key, mask=key < left)
    key_at = keys + page * key_page_stride + inside * DEPTH
    at = (key_at + row[:, None] * DEPTH + byte[None, :])[:, :, None] + (step * (16 * DEPTH))[None, None, :]
    at = gl.convert_layout(at.permute((2, 0, 1)).reshape([TILE, DEPTH]), COPY, assert_trivial=True)
    at = gl.max_contiguous(gl.multiple_of(at, [1, 16]), [1, 16])
    present = gl.arange(0, TILE, layout=gl.SliceLayout(1, COPY)) < left
    async_copy.async_copy_global_to_shared(key_tile, at, mask=present[:, None])
    async_copy.commit_group()


@gluon.jit
def paged_kernel(
    query,
    weights,
    keys,
    scales,
    tables,
    lens,
    out,
    queries,
    num_pages,
    first,
    columns,
    tiles,
    table_stride,
    key_page_stride,
    scale_page_stride,
    out_stride,
    QUERIES: gl.constexpr,
    HEADS: gl.constexpr,
    DEPTH: gl.constexpr,
    PAGE: gl.constexpr,
    STAGES: gl.constexpr,
    OVERLAP: gl.constexpr,
):
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    TILE: gl.constexpr = 64
    WIDTH: gl.constexpr = QUERIES * HEADS
    NEAR: gl.constexpr = 8 // QUERIES  # heads next to each other: four lanes hold 8 columns of a row
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 32])
    OUT: gl.constexpr = scores_layout(QUERIES)
    COPY: gl.constexpr = gl.BlockedLayout([1, 16], [4, 8], [4, 1], [1, 0])
    SHARED: gl.constexpr = gl.NVMMASharedLayout(128, 8, 2)

    groups = gl.cdiv(queries, QUERIES)
    request = (gl.program_id(0) // groups).to(gl.int64)
    in_request = (gl.program_id(0) % groups) * QUERIES
    row0 = request * queries + in_request
    column0 = gl.program_id(1) * (tiles * TILE)
    width = gl.minimum(columns - column0, tiles * TILE)

    # Loads that need nothing else first: their latencies overlap. What a row does not see is loaded, but not used.
    here = first + column0  # position of the next tile to copy
    table = tables + request * table_stride
    pages = ()
    for stage in gl.static_range(STAGES):
        pages += (gl.load(table + (here + stage * TILE) // PAGE, mask=stage * TILE < width, other=-1),)
    row = gl.arange(0, QUERIES, layout=gl.SliceLayout(0, OUT))
    exists = row < queries - in_request
    length = gl.load(lens + row0 + row, mask=exists, other=0).to(gl.int64)
    byte = gl.arange(0, DEPTH, layout=gl.SliceLayout(0, COPY))
    near = gl.arange(0, WIDTH, layout=gl.SliceLayout(1, COPY))
    near_query = (near // NEAR) % QUERIES
    near_row = near_query * HEADS + near // 8 * NEAR + near % NEAR
    query_bytes = gl.load(
        query + row0 * (HEADS * DEPTH) + near_row[:, None] * DEPTH + byte[None, :],
        mask=(near_query < queries - in_request)[:, None],
        other=0.0,
    )
    wide = gl.arange(0, WIDTH, layout=gl.SliceLayout(0, ACC))
    wide_query = (wide // NEAR) % QUERIES
    weight = gl.load(
        weights + row0 * HEADS + wide_query * HEADS + wide // 8 * NEAR + wide % NEAR,
        mask=wide_query < queries - in_request,
        other=0.0,
    )[None, :]

    # From here on columns count from column0.
    rest = gl.minimum(gl.maximum(length - first - column0, 0), width).to(gl.int32)
    left = gl.max(rest, 0)
    if left > 0:
        key_tiles = gl.allocate_shared_memory(query_bytes.dtype, [STAGES, TILE, DEPTH], SHARED)
        scale_tiles = gl.allocate_shared_memory(gl.float32, [STAGES, TILE], gl.SwizzledSharedLayout(1, 1, 1, [0]))
        count = gl.cdiv(left, TILE).to(gl.int32)
        for stage in gl.static_range(STAGES - 1):
            copy_tile(
                keys, scales, left - stage * TILE, pages[stage], here % PAGE, num_pages, key_page_stride,
                scale_page_stride, key_tiles.index(stage), scale_tiles.index(stage), DEPTH, TILE,
            )  # fmt: skip
            here += TILE
        page = pages[STAGES - 1]
        left -= (STAGES - 1) * TILE
        query_tile = gl.allocate_shared_memory(query_bytes.dtype, [WIDTH, DEPTH], SHARED, query_bytes)
        fence_async_shared()
        column = gl.arange(0, TILE, layout=gl.SliceLayout(1, OUT))
        out_at = out + column0 + ((row0 + row) * out_stride)[None, :] + column[:, None]
        store_at = out_at
        for i in range(count):
            slot = i % STAGES
            async_copy.wait_group(STAGES - 2)
            gl.thread_barrier()
            fence_async_shared()
            acc = gl.zeros([TILE, WIDTH], gl.float32, ACC)
            acc = warpgroup_mma(key_tiles.index(slot), query_tile.permute((1, 0)), acc, use_acc=False, is_async=True)
            next_slot = (i + STAGES - 1) % STAGES
            copy_tile(
                keys, scales, left, page, here % PAGE, num_pages, key_page_stride, scale_page_stride,
                key_tiles.index(next_slot), scale_tiles.index(next_slot), DEPTH, TILE,
            )  # fmt: skip
            left -= TILE
            here += TILE
            page = gl.load(table + here // PAGE, mask=left > 0, other=-1)
            scale = scale_tiles.index(slot).load(gl.SliceLayout(1, OUT))[:, None]
            acc = warpgroup_mma_wait(0, deps=[acc])
            products = gl.maximum(acc, 0.0, propagate_nan=tl.PropagateNan.ALL) * weight
            products = gl.sum(products.reshape([TILE, WIDTH // 8, QUERIES, NEAR]), 1)
            score = gl.convert_layout(gl.sum(products, 2), OUT, assert_trivial=True) * scale
            gl.store(store_at, score, mask=column[:, None] < rest[None, :])
            store_at += TILE
            rest -= TILE
        async_copy.wait_group(0)
