"""Histograms and slots for appending, by atomics on shared memory, which Triton itself does not offer.

All of it is inline PTX. Functions that act on tensors repeat their effect where a layout repeats elements, so they must
be given at least one element a thread.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls

from __future__ import annotations

import triton
import triton.language as tl

WARPS = 16
"""Of the programs that use this."""
BINS = 2048

_CLAIM_PACK = tl.constexpr(8)
_BINS = tl.constexpr(BINS)
# Offsets in the array: bins, then a counter, what find_bin found, and a number a warp.
_COUNTER = tl.constexpr(4 * BINS)
_FOUND = 4 * BINS + 16
_WARP_TOTALS = 4 * BINS + 32
# A static array of its own, whose address is a plain number.
_SHARED = tl.constexpr(
    f"{{ .shared .align 16 .b8 topk_select_shared[{_WARP_TOTALS + 128}]; mov.u32 $0, topk_select_shared; }}"
)


def _claim_asm(pack: int) -> tuple[str, str]:
    """Slots for flagged elements, one atomic a warp; neighbours of a warp get neighbouring slots for each element.

    Inputs: flags, address of the counter.
    """
    lines = ["{ .reg .pred p; .reg .b32 votes, below, total, base;", "mov.b32 total, 0; mov.u32 below, %lanemask_lt;"]
    for i in range(pack):
        lines += [f"setp.ne.b32 p, ${pack + i}, 0; vote.sync.ballot.b32 votes, p, -1;"]
        lines += [f"and.b32 ${i}, votes, below; popc.b32 ${i}, ${i}; add.u32 ${i}, ${i}, total;"]
        lines += ["popc.b32 votes, votes; add.u32 total, total, votes;"]
    lines += ["mov.b32 base, 0; setp.eq.u32 p, below, 0;", f"@p atom.shared.add.u32 base, [${2 * pack}], total;"]
    lines += ["shfl.sync.idx.b32 base, base, 0, 31, -1;"]
    lines += [f"add.u32 ${i}, ${i}, base;" for i in range(pack)]
    return "\n".join([*lines, "}"]), ",".join(["=&r"] * pack + ["r"] * (2 * pack))


def _scan_lines(shared: str) -> list[str]:
    """A thread takes 4 bins at `place` into b0..b3, thread 0 the highest.

    `own` is their sum, `sum` that of the bins of all earlier threads.
    """
    lines = [
        ".reg .pred p; .reg .b32 tid, lane, warp, place, row, b<4>, own, sum, other;",
        "bar.sync 0;",
        "mov.u32 tid, %tid.x; mov.u32 lane, %laneid; shr.u32 warp, tid, 5;",
        f"shl.b32 place, tid, 4; sub.u32 place, {shared}, place; add.u32 place, place, {4 * BINS - 16};",
        "ld.shared.v4.b32 {b0, b1, b2, b3}, [place];",
        "add.u32 own, b0, b1; add.u32 other, b2, b3; add.u32 own, own, other; mov.b32 sum, own;",
    ]
    for distance in (1, 2, 4, 8, 16):
        lines += [f"shfl.sync.up.b32 other|p, sum, {distance}, 0, -1; @p add.u32 sum, sum, other;"]
    return [
        *lines,
        f"shl.b32 row, warp, 2; add.u32 row, row, {shared}; setp.eq.u32 p, lane, 31;",
        f"@p st.shared.b32 [row + {_WARP_TOTALS}], sum;",
        "bar.sync 0;",
        f"mov.b32 other, 0; setp.lt.u32 p, lane, warp; shl.b32 row, lane, 2; add.u32 row, row, {shared};",
        f"@p ld.shared.b32 other, [row + {_WARP_TOTALS}];",
        "redux.sync.add.s32 other, other, -1;",
        "add.u32 sum, sum, other; sub.u32 sum, sum, own;",
    ]


def _find_asm() -> str:
    """The thread that crosses tells. $0 bin, $1 counts above it, $2 its count; $3 shared, $4 the number to reach."""
    lines = [
        "{ .reg .pred found, q; .reg .b32 bin;",
        *_scan_lines("$3"),
        "mov.b32 other, 0; st.shared.v4.b32 [place], {other, other, other, other};",
        "add.u32 own, own, sum; setp.ge.s32 found, own, $4; setp.lt.and.s32 found, sum, $4, found;",
        f"shl.b32 bin, tid, 2; sub.u32 bin, {BINS - 1}, bin;",
    ]
    for i in (2, 1, 0):  # b3 becomes the count of the bin that crosses
        lines += ["add.u32 other, sum, b3; setp.lt.s32 q, other, $4;"]
        lines += [f"@q mov.b32 sum, other; @q mov.b32 b3, b{i}; @q sub.u32 bin, bin, 1;"]
    lines += [
        f"@found st.shared.v4.b32 [$3 + {_FOUND}], {{bin, sum, b3, b3}};",
        "bar.sync 0;",
        f"ld.shared.v4.b32 {{$0, $1, $2, other}}, [$3 + {_FOUND}];",
        "}",
    ]
    return "\n".join(lines)


def _starts_asm() -> str:
    """Counts of bins become the counts above them. $0 the largest count, the counter being 0; $1 shared."""
    lines = [
        "{ .reg .b32 most;",
        *_scan_lines("$1"),
        "max.s32 most, b0, b1; max.s32 other, b2, b3; max.s32 most, most, other;",
        "redux.sync.max.s32 most, most, -1;",
        "setp.eq.u32 p, lane, 0;",
        f"@p red.shared.max.s32 [$1 + {4 * BINS}], most;",
        "add.u32 b3, sum, b3; add.u32 b2, b3, b2; add.u32 b1, b2, b1;",
        "st.shared.v4.b32 [place], {b1, b2, b3, sum};",
        "bar.sync 0;",
        f"ld.shared.b32 $0, [$1 + {4 * BINS}];",
        "}",
    ]
    return "\n".join(lines)


def _append_asm(pack: int, *, grouped: bool = False) -> tuple[str, str]:
    """Keys of the scores above a threshold to the buffer: few pass, so a thread loops over those of its own that do.

    Inputs: scores, positions, threshold, stop, address of the counter, row, buffer. grouped: positions are places that
    become positions, and those not below one more input leave an invalid key.
    """
    score, place, threshold, stop, counter, row, buffer, length = (pack * (1 + i) for i in range(8))
    lines = [
        "{ .reg .pred p, q; .reg .b32 mask, slot, i, bits, pos, t; .reg .b64 a;",
        f".reg .b32 step<{pack.bit_length() - 1}>;",
        "mov.b32 mask, 0; mov.b32 slot, 0;",
    ]
    for i in range(pack):
        lines += [f"setp.gtu.f32 p, ${score + i}, ${threshold}; setp.lt.and.s32 p, ${place + i}, ${stop}, p;"]
        lines += [f"@p or.b32 mask, mask, {1 << i};"]
    # The layout of a tensor is linear in the bits of the index.
    lines += [f"sub.s32 step{j}, ${place + (1 << j)}, ${place};" for j in range(pack.bit_length() - 1)]
    lines += [
        "popc.b32 t, mask; setp.ne.b32 p, t, 0;",
        f"@p atom.shared.add.u32 slot, [${counter}], t;",
        "NEXT:",
        "setp.eq.b32 p, mask, 0;",
        "@p bra DONE;",
        "bfind.u32 i, mask; shl.b32 t, 1, i; xor.b32 mask, mask, t;",
        f"mov.b32 pos, ${place};",
    ]
    for j in range(pack.bit_length() - 1):
        lines += [f"bfe.u32 t, i, {j}, 1; mad.lo.s32 pos, t, step{j}, pos;"]
    lines += [
        f"mad.wide.s32 a, pos, 4, ${row}; ld.global.b32 bits, [a];",
        "setp.nan.f32 q, bits, bits; add.f32 bits, bits, 0f00000000; selp.b32 bits, 0x7FC00000, bits, q;",
        "shr.s32 t, bits, 31; and.b32 t, t, 0x7FFFFFFF; xor.b32 bits, bits, t;"
        f"{_position_text(length) if grouped else ''} not.b32 pos, pos;",
        f"mad.wide.s32 a, slot, 8, ${buffer}; st.global.v2.b32 [a], {{pos, bits}}; add.s32 slot, slot, 1;",
        "bra NEXT;",
        "DONE:",
        *(f"mov.b32 ${i}, 0;" for i in range(pack)),
        "}",
    ]
    kinds = ["=&r", "r", "r", "r", "r", "r", "l", "l", *("r" if grouped else "")]
    return "\n".join(lines), ",".join(kind for kind in kinds for _ in range(pack))


def _position_text(length: int) -> str:
    """pos becomes the position of that place; ~pos and bits become those of INVALID beyond the length."""
    return f"""
and.b32 i, pos, -512; bfe.u32 t, pos, 4, 3; or.b32 i, i, t; bfe.u32 t, pos, 2, 1; shl.b32 t, t, 3;
or.b32 i, i, t; bfe.u32 t, pos, 7, 2; shl.b32 t, t, 4; or.b32 i, i, t; and.b32 t, pos, 3; shl.b32 t, t, 6;
or.b32 i, i, t; bfe.u32 t, pos, 3, 1; shl.b32 t, t, 8; or.b32 pos, i, t;
setp.ge.s32 q, pos, ${length}; @q mov.b32 pos, -1; @q mov.b32 bits, 0x80000000;
"""


_APPEND, _APPEND_CONSTRAINTS = (tl.constexpr(text) for text in _append_asm(8))
_APPEND_GROUPED, _APPEND_GROUPED_CONSTRAINTS = (tl.constexpr(text) for text in _append_asm(8, grouped=True))
_CLAIM, _CLAIM_CONSTRAINTS = (tl.constexpr(text) for text in _claim_asm(8))
_FIND = tl.constexpr(_find_asm())
_STARTS = tl.constexpr(_starts_asm())


@triton.jit
def shared_store(address, value):
    tl.inline_asm_elementwise(
        "st.shared.b32 [$1], $2; mov.b32 $0, 0;", "=r,r,r", [address, value], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def shared_load(address):
    return tl.inline_asm_elementwise(
        "ld.shared.b32 $0, [$1];", "=r,r", [address], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def shared_base():
    """The address of the program's array; all bins are 0."""
    shared = tl.inline_asm_elementwise(_SHARED, "=r,r", [0], dtype=tl.int32, is_pure=False, pack=1)
    clear_bins(shared)
    return shared


@triton.jit
def clear_bins(shared):
    shared_store(shared + 4 * tl.arange(0, _BINS), 0)
    tl.debug_barrier()


@triton.jit
def count_where(shared, bins, flag):
    """Count flagged elements in their bins."""
    tl.inline_asm_elementwise(
        "{ .reg .pred p; setp.ne.b32 p, $2, 0; @p red.shared.add.u32 [$1], 1; mov.b32 $0, 0; }",
        "=r,r,r",
        [shared + 4 * bins, flag.to(tl.int32)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def find_bin(shared, wanted):
    """The highest bin that with all above it counts `wanted`, the counts above it, its count. Clears the bins."""
    return tl.inline_asm_elementwise(
        _FIND,
        "=&r,=&r,=&r,r,r",
        [shared, wanted],
        dtype=(tl.int32, tl.int32, tl.int32),
        is_pure=False,
        pack=1,
    )


@triton.jit
def take_where(shared, bins, flag):
    """Count flagged elements in their bins; gives what was counted there before each."""
    return tl.inline_asm_elementwise(
        "{ .reg .pred p; setp.ne.b32 p, $2, 0; mov.b32 $0, 0; @p atom.shared.add.u32 $0, [$1], 1; }",
        "=&r,r,r",
        [shared + 4 * bins, flag.to(tl.int32)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def bin_starts(shared):
    """Replace the counts of bins by the counts in all bins above; gives the largest count. The counter must be 0."""
    return tl.inline_asm_elementwise(_STARTS, "=&r,r", [shared], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def claim(shared, flag):
    """A slot of its own for every flagged element, from the counter on."""
    return tl.inline_asm_elementwise(
        _CLAIM,
        _CLAIM_CONSTRAINTS,
        [flag.to(tl.int32), shared + _COUNTER],
        dtype=tl.int32,
        is_pure=False,
        pack=_CLAIM_PACK,
    )


@triton.jit
def append_above(shared, buffer, row, scores, positions, threshold, stop):
    """Append to the buffer the keys of the scores that exceed the threshold (or compare with nothing) before `stop`."""
    tl.inline_asm_elementwise(
        _APPEND,
        _APPEND_CONSTRAINTS,
        [scores, positions, threshold, stop, shared + _COUNTER, row.to(tl.int64), buffer.to(tl.int64)],
        dtype=tl.int32,
        is_pure=False,
        pack=_CLAIM_PACK,
    )


@triton.jit
def append_grouped(shared, buffer, row, scores, places, threshold, stop, length):
    """`append_above` for scores in groups; places beyond the length leave INVALID."""
    tl.inline_asm_elementwise(
        _APPEND_GROUPED,
        _APPEND_GROUPED_CONSTRAINTS,
        [scores, places, threshold, stop, shared + _COUNTER, row.to(tl.int64), buffer.to(tl.int64), length],
        dtype=tl.int32,
        is_pure=False,
        pack=_CLAIM_PACK,
    )


@triton.jit
def read_counter(shared):
    tl.debug_barrier()
    count = shared_load(shared + _COUNTER)
    tl.debug_barrier()
    return count


@triton.jit
def set_counter(shared, value):
    tl.debug_barrier()
    shared_store(shared + _COUNTER, value)
    tl.debug_barrier()


@triton.jit
def store_where(pointers, values, flag):
    """tl.store in the layout that the values have; tl.store may exchange them first."""
    if values.dtype.primitive_bitwidth == 64:
        tl.inline_asm_elementwise(
            "{ .reg .pred p; setp.ne.b32 p, $3, 0; @p st.global.b64 [$1], $2; mov.b32 $0, 0; }",
            "=r,l,l,r",
            [pointers.to(tl.int64), values, flag.to(tl.int32)],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
    else:
        tl.inline_asm_elementwise(
            "{ .reg .pred p; setp.ne.b32 p, $3, 0; @p st.global.b32 [$1], $2; mov.b32 $0, 0; }",
            "=r,l,r,r",
            [pointers.to(tl.int64), values.to(tl.int32, bitcast=True), flag.to(tl.int32)],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
