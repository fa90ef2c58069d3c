# mypy: disable-error-code="untyped-decorator,no-untyped-def"
"""The producer of the decode kernel: FP8 rows out of the pool, dequantised into the tiles of the consumers.

It takes quarters, 64 rows x 128 columns. Bytes come by cp.async into a ring of two, each to the thread that copied it:
two quarters are on their way at any time, and each is waited for by itself, where all loads into registers of a warp
would count on one scoreboard. Behind a job's last pair come the rows of the program's next job.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from .decode_relay import EVEN_ROPE_FULL, FREE, ODD_ROPE_FULL, job
from .gluon_relay_parts import BLOCK, EVEN_ROPE, ODD_ROPE, ROPE

PIECE_WORDS = gl.constexpr(16)
ROW_WORDS = gl.constexpr(164)
TILE_WORDS = gl.constexpr(gl.NVMMASharedLayout(128, 32, 2))
PIECE = gl.constexpr(gl.SwizzledSharedLayout(4, 1, 1, [1, 0]))
# Four lanes a row: no bank conflicts between the rows of a store, and two rows a thread to address.
BYTES = gl.constexpr(gl.BlockedLayout([1, 4], [8, 4], [4, 1], [1, 0]))
BYTES_OUT = gl.constexpr(gl.BlockedLayout([1, 8], [8, 4], [4, 1], [1, 0]))
HALVES = gl.constexpr(gl.BlockedLayout([1, 8], [8, 4], [4, 1], [1, 0]))
ROWS = gl.constexpr(gl.SliceLayout(1, BYTES.value))


@gluon.jit
def ring_slot():
    return gl.allocate_shared_memory(gl.int32, [BLOCK, PIECE_WORDS], PIECE)


@gluon.jit
def load_slots(slots, first, stop):
    """Slots of the 64 columns from ``first``, -1 from ``stop`` on."""
    column = first + gl.arange(0, BLOCK, ROWS)
    return gl.load(slots + column, mask=column < stop, other=-1)


@gluon.jit
def rows_of(slot, num_slots):
    """-1 where nothing is to be read."""
    return gl.where((slot >= 0) & (slot < num_slots), slot, -1).to(gl.int32)


@gluon.jit
def copy_piece(to, words, rows, first: gl.constexpr):
    """One cp.async group: the 16 words from ``first`` of 64 rows, zeros where a row is not to be read."""
    at = words + gl.where(rows >= 0, rows, 0).to(gl.int64) * ROW_WORDS
    lane = first + gl.arange(0, PIECE_WORDS, gl.SliceLayout(0, BYTES))
    async_copy.async_copy_global_to_shared(to, at[:, None] + lane[None, :], mask=(rows >= 0)[:, None])
    async_copy.commit_group()


@gluon.jit
def copy_rope(tile, halves, rows, full):
    row = gl.convert_layout(rows, gl.SliceLayout(1, HALVES), assert_trivial=True)
    at = halves + gl.where(row >= 0, row, 0).to(gl.int64) * (2 * ROW_WORDS) + 264
    column = gl.arange(0, ROPE, gl.SliceLayout(0, HALVES))
    async_copy.async_copy_global_to_shared(tile, at[:, None] + column[None, :], mask=(row >= 0)[:, None])
    async_copy.mbarrier_arrive(full, increment_count=False)


@gluon.jit
def load_scales(words, rows, first: gl.constexpr):
    """Of the two quarters of a half."""
    at = words + gl.where(rows >= 0, rows, 0).to(gl.int64) * ROW_WORDS + (128 + first)
    return gl.load(at, mask=rows >= 0, other=0), gl.load(at + 1, mask=rows >= 0, other=0)


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
    return gl.convert_layout(gl.reshape(gl.join(low, high), [BLOCK, 2 * PIECE_WORDS]), BYTES_OUT)


@gluon.jit
def produce(words, halves, all_slots, num_slots, sizes, jobs, tiles, used, bars, ring):
    """Fill the half tiles in the order in which they come free: even block left, right, odd block right, left."""
    columns = sizes[2]
    token, _f, _p, start, stop, pairs = job(sizes, gl.program_id(0))
    slots = all_slots + token * columns
    rows0 = rows_of(load_slots(slots, start, stop), num_slots)
    rows1 = rows_of(load_slots(slots, start + BLOCK, stop), num_slots)
    for piece in gl.static_range(4):
        copy_piece(ring[piece], words, rows0, 16 * piece)
    scales = load_scales(words, rows0, 0)
    turn = 0
    for number in range(gl.program_id(0), jobs, gl.num_programs(0)):
        following = number + gl.num_programs(0)
        token, _f, _p, next_start, next_stop, next_pairs = job(sizes, gl.minimum(following, jobs - 1))
        next_stop = gl.where(following < jobs, next_stop, 0)
        next_slots = all_slots + token * columns
        for pair in range(pairs):
            slot0 = rows0
            slot1 = rows1
            new_rows0 = rows0
            new_rows1 = rows1
            for half in gl.static_range(4):
                tile = tiles[half]._reinterpret(gl.int32, [1, BLOCK, 128], TILE_WORDS).index(0)
                # The bytes of the next half follow those of this one into the ring.
                if half == 0:
                    rows = rows0
                elif half < 3:
                    rows = rows1
                else:
                    new_rows0 = rows_of(slot0, num_slots)
                    new_rows1 = rows_of(slot1, num_slots)
                    rows = new_rows0
                for quarter in gl.static_range(2):
                    async_copy.wait_group(2)
                    left_raw = ring[2 * quarter].load(BYTES)
                    right_raw = ring[2 * quarter + 1].load(BYTES)
                    copy_piece(ring[2 * quarter], words, rows, (half < 2) * 64 + 32 * quarter)
                    copy_piece(ring[2 * quarter + 1], words, rows, (half < 2) * 64 + 32 * quarter + 16)
                    left = dequantise(left_raw, scales[quarter])
                    if quarter == 0:
                        mbarrier.wait(bars[FREE + half], (turn & 1) ^ 1)
                        if half == 0:
                            used[0].store((rows0 >= 0).to(gl.int32))
                        if half == 1:
                            copy_rope(tiles[EVEN_ROPE].index(0), halves, rows0, bars[EVEN_ROPE_FULL])
                            if pair + 1 < pairs:
                                first = start + (pair + 1) * (2 * BLOCK)
                                limit = stop
                                ahead = slots
                            else:
                                first = next_start
                                limit = next_stop
                                ahead = next_slots
                            slot0 = load_slots(ahead, first, limit)
                            slot1 = load_slots(ahead, first + BLOCK, limit)
                        if half == 2:
                            used[1].store((rows1 >= 0).to(gl.int32))
                        if half == 3:
                            copy_rope(tiles[ODD_ROPE].index(0), halves, rows1, bars[ODD_ROPE_FULL])
                        next_scales = load_scales(words, rows, 2 * (half < 2))
                    tile.slice(4 * PIECE_WORDS * quarter, 2 * PIECE_WORDS, 1).store(left)
                    right = dequantise(right_raw, scales[quarter])
                    tile.slice(4 * PIECE_WORDS * quarter + 2 * PIECE_WORDS, 2 * PIECE_WORDS, 1).store(right)
                    mbarrier.arrive(bars[2 * half + quarter], count=1)
                scales = next_scales
            rows0 = new_rows0
            rows1 = new_rows1
            turn += 1
        start = next_start
        stop = next_stop
        pairs = next_pairs
        slots = next_slots
    async_copy.wait_group(0)
