# mypy: disable-error-code="untyped-decorator,no-untyped-def"
"""The producer of the seesaw decode kernel: FP8 rows out of the pool, dequantised into shared tiles.

It loads half a block (64 rows x 256 columns) ahead in registers; the rotary part goes by cp.async.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

TILE_WORDS = gl.constexpr(gl.NVMMASharedLayout(128, 32, 2))
# Four lanes a row: no bank conflicts between the rows of a store, and two rows a thread to address.
BYTES = gl.constexpr(gl.BlockedLayout([1, 4], [8, 4], [4, 1], [1, 0]))
BYTES_OUT = gl.constexpr(gl.BlockedLayout([1, 8], [8, 4], [4, 1], [1, 0]))
HALVES = gl.constexpr(gl.BlockedLayout([1, 8], [8, 4], [4, 1], [1, 0]))
ROWS = gl.constexpr(gl.SliceLayout(1, BYTES))

# Half tiles in the order in which they are filled and come free: left half of block 0, right of 1, right of 0, left of
# 1. A half has its place in `k`, its barrier in `free` and two (quarters) in `full`; then come the rotary parts.
LEFT_0 = gl.constexpr(0)
RIGHT_1 = gl.constexpr(1)
RIGHT_0 = gl.constexpr(2)
LEFT_1 = gl.constexpr(3)
ROPE_0 = gl.constexpr(8)
ROPE_1 = gl.constexpr(9)


@gluon.jit
def load_slots(slots, first, stop):
    """Slots of the 64 columns from ``first``, -1 from ``stop`` on."""
    column = first + gl.arange(0, 64, ROWS)
    return gl.load(slots + column, mask=column < stop, other=-1)


@gluon.jit
def rows_of(slot, num_slots):
    """-1 where nothing is to be read."""
    return gl.where((slot >= 0) & (slot < num_slots), slot, -1).to(gl.int32)


@gluon.jit
def load_rows(slots, first, stop, num_slots):
    return rows_of(load_slots(slots, first, stop), num_slots)


@gluon.jit
def load_hinted(words, row, valid):
    """16 bytes a lane with hints that gl.load has no words for: fetch 256 bytes to L2, keep in L1."""
    place: gl.constexpr = gl.BlockedLayout([1, 1], [8, 4], [4, 1], [1, 0])
    lane = gl.expand_dims(gl.arange(0, 4, gl.SliceLayout(0, place)) * 4, 0)
    row = gl.expand_dims(gl.convert_layout(row, gl.SliceLayout(1, place), assert_trivial=True), 1)
    valid = gl.expand_dims(gl.convert_layout(valid.to(gl.int32), gl.SliceLayout(1, place), assert_trivial=True), 1)
    w0, w1, w2, w3 = gl.inline_asm_elementwise(
        """{
        .reg .pred p;
        setp.ne.b32 p, $5, 0;
        mov.b32 $0, 0;
        mov.b32 $1, 0;
        mov.b32 $2, 0;
        mov.b32 $3, 0;
        @p ld.global.nc.L1::evict_last.L2::256B.v4.b32 {$0, $1, $2, $3}, [$4];
        }""",
        "=&r,=&r,=&r,=&r,l,r",
        [words + (row + lane), valid],
        dtype=(gl.int32, gl.int32, gl.int32, gl.int32),
        is_pure=False,
        pack=1,
    )
    raw = gl.reshape(gl.join(gl.join(w0, w2), gl.join(w1, w3)), [64, 16])
    return gl.convert_layout(raw, BYTES, assert_trivial=True)


@gluon.jit
def load_half(words, rows, half: gl.constexpr):
    """Half ``half`` of a block, four pieces of 64 rows x 64 columns, four bytes an int32 (bytes would take a register
    each), and the scales of its two quarters.
    """
    first: gl.constexpr = (half + 1) // 2 % 2 * 64
    valid = rows >= 0
    row = gl.where(valid, rows, 0).to(gl.int64) * 164
    r0 = load_hinted(words + first, row, valid)
    r1 = load_hinted(words + (first + 16), row, valid)
    r2 = load_hinted(words + (first + 32), row, valid)
    r3 = load_hinted(words + (first + 48), row, valid)
    s0 = gl.load(words + row + (128 + first // 32), mask=valid, other=0)
    s1 = gl.load(words + row + (129 + first // 32), mask=valid, other=0)
    return (r0, r1, r2, r3), (s0, s1)


@gluon.jit
def dequantise(raw, scale):
    """int32 [64, 16] of e4m3 -> int32 [64, 32] of bf16 pairs. Through fp32, so that any scale is rounded once."""
    low, high = gl.inline_asm_elementwise(
        """{
        .reg .b16 b0, b1, h0, h1, h2, h3;
        .reg .b32 p0, p1;
        .reg .f32 f0, f1, f2, f3;
        mov.b32 {b0, b1}, $2;
        cvt.rn.f16x2.e4m3x2 p0, b0;
        cvt.rn.f16x2.e4m3x2 p1, b1;
        mov.b32 {h0, h1}, p0;
        mov.b32 {h2, h3}, p1;
        cvt.f32.f16 f0, h0;
        cvt.f32.f16 f1, h1;
        cvt.f32.f16 f2, h2;
        cvt.f32.f16 f3, h3;
        mul.f32 f0, f0, $3;
        mul.f32 f1, f1, $3;
        mul.f32 f2, f2, $3;
        mul.f32 f3, f3, $3;
        cvt.rn.bf16x2.f32 $0, f1, f0;
        cvt.rn.bf16x2.f32 $1, f3, f2;
        }""",
        "=r,=r,r,r",
        [raw, gl.expand_dims(scale.to(gl.float32, bitcast=True), 1)],
        dtype=(gl.int32, gl.int32),
        is_pure=True,
        pack=1,
    )
    return gl.convert_layout(gl.reshape(gl.join(low, high), [64, 32]), BYTES_OUT)


@gluon.jit
def put_rope(tile, halves, rows, full):
    row = gl.convert_layout(rows, gl.SliceLayout(1, HALVES), assert_trivial=True)
    valid = gl.expand_dims(row >= 0, 1)
    at = gl.expand_dims(gl.where(row >= 0, row, 0).to(gl.int64) * 328 + 264, 1)
    at += gl.expand_dims(gl.arange(0, 64, gl.SliceLayout(0, HALVES)), 0)
    async_copy.async_copy_global_to_shared(tile, halves + at, mask=valid)
    async_copy.mbarrier_arrive(full, increment_count=False)


@gluon.jit
def produce(
    words, halves, slots, start, stop, num_slots, num_pairs, k, k_rope, used, full, free
):  # fmt: skip
    """Fill the halves of the tiles, loading a half ahead."""
    tiles = k._reinterpret(gl.int32, [4, 64, 128], TILE_WORDS)
    rows0 = load_rows(slots, start, stop, num_slots)
    rows1 = load_rows(slots, start + 64, stop, num_slots)
    raws, scales = load_half(words, rows0, 0)
    for i in range(num_pairs):
        slot0 = rows0
        slot1 = rows1
        for half in gl.static_range(4):
            for piece in gl.static_range(4):
                pairs = dequantise(raws[piece], scales[piece // 2])
                if piece == 0:
                    if half == 3:
                        rows1 = rows_of(slot1, num_slots)
                        new_rows0 = rows_of(slot0, num_slots)
                    mbarrier.wait(free.index(half), (i & 1) ^ 1)
                    if half == 0:
                        used.index(0).store((rows0 >= 0).to(gl.int32))
                    if half == 1:
                        used.index(1).store((rows1 >= 0).to(gl.int32))
                        put_rope(k_rope.index(1), halves, rows1, full.index(ROPE_1))
                    if half == 2:
                        put_rope(k_rope.index(0), halves, rows0, full.index(ROPE_0))
                tiles.index(half).slice(32 * piece, 32, 1).store(pairs)
                if piece == 0:
                    # The next loads, only now that the last ones were used: all loads of a warp count on one
                    # scoreboard, so those issued before would be waited for with the last ones.
                    gl.thread_barrier()
                    if half == 0:
                        new_raws, new_scales = load_half(words, rows1, 1)
                    if half == 1:
                        new_raws, new_scales = load_half(words, rows0, 2)
                    if half == 2:
                        slot0 = load_slots(slots, start + (i + 1) * 128, stop)
                        slot1 = load_slots(slots, start + (i + 1) * 128 + 64, stop)
                        new_raws, new_scales = load_half(words, rows1, 3)
                    if half == 3:
                        new_raws, new_scales = load_half(words, new_rows0, 0)
                if piece % 2 == 1:
                    mbarrier.arrive(full.index(2 * half + piece // 2), count=1)
            raws = new_raws
            scales = new_scales
        rows0 = new_rows0
