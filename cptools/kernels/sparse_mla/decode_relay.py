# mypy: disable-error-code="untyped-decorator,no-untyped-def"
"""The two attending warpgroups of the decode kernel, in the order of the prefill kernel (`gluon_relay`).

Blocks of 64 selected rows come in pairs. The even warpgroup scores the first block of a pair, the odd one the second;
each keeps 64 x 256 of the output in registers (even: columns 0-255, odd: the rest) and so needs the weights of both
blocks: its own from registers, the other's through shared memory, with the running maxima. The weights lie over the
rotary part of their block, which is dead once the block is scored.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents

from .gluon_relay import times
from .gluon_relay_parts import (
    BLOCK,
    EVEN_LEFT,
    EVEN_RIGHT,
    EVEN_ROPE,
    GATHER,
    HALF,
    HEADS,
    LOG2E,
    LOWEST,
    ODD_LEFT,
    ODD_RIGHT,
    ODD_ROPE,
    OUTPUT,
    PER_HEAD,
    ROPE,
    SCORES,
    WEIGHTS,
)

WIDE = gl.constexpr(gl.BlockedLayout([1, 8], [1, 32], [4, 1], [1, 0]))

# Where the query lies among the tiles; its rotary part stays in registers, which leaves the producer 8 KB.
QUERY_LEFT = gl.constexpr(6)
QUERY_RIGHT = gl.constexpr(7)

# Barriers: two quarters of 128 columns a half tile in the order of the tiles, the rotary parts, a half is free again.
EVEN_ROPE_FULL = gl.constexpr(8)
ODD_ROPE_FULL = gl.constexpr(9)
FREE = gl.constexpr(10)
EVEN_WEIGHTS = gl.constexpr(14)
ODD_WEIGHTS = gl.constexpr(15)
EVEN_TOTAL = gl.constexpr(16)
ODD_TOTAL = gl.constexpr(17)
QUERY_FULL = gl.constexpr(18)


@gluon.jit
def copy_query(to, query, heads_left, first: gl.constexpr, WIDTH: gl.constexpr):
    """cp.async of WIDTH columns of 64 heads, zeros for heads beyond the last."""
    head = gl.arange(0, HEADS, gl.SliceLayout(1, GATHER))[:, None]
    column = first + gl.arange(0, WIDTH, gl.SliceLayout(0, GATHER))[None, :]
    async_copy.async_copy_global_to_shared(to, query + head * (2 * HALF + ROPE) + column, mask=head < heads_left)


@gluon.jit
def rope_operand(query, heads_left):
    """The query's rotary part as an operand from registers."""
    layout: gl.constexpr = gl.DotOperandLayout(0, SCORES, 2)
    head = gl.arange(0, HEADS, gl.SliceLayout(1, layout))[:, None]
    column = 2 * HALF + gl.arange(0, ROPE, gl.SliceLayout(0, layout))[None, :]
    return gl.load(query + head * (2 * HALF + ROPE) + column, mask=head < heads_left, other=0.0)


@gluon.jit
def score_tile(query, keys, bars, scores, phase, zero, FULL: gl.constexpr, FIRST: gl.constexpr):
    """Issue scores (+)= query keys^T over the columns of a half tile, quarter by quarter as they come."""
    for quarter in gl.static_range(2):
        mbarrier.wait(bars[FULL + quarter], phase)
        fence_async_shared()  # here, where no load is outstanding: in the producer it would wait for those loads
        a = query.index(zero).slice(128 * quarter, 128, 1)
        b = keys.index(zero).slice(128 * quarter, 128, 1).permute((1, 0))
        scores = warpgroup_mma(a, b, scores, use_acc=not (FIRST and quarter == 0), is_async=True)
    return scores


@gluon.jit
def score_rope(q_rope, keys, bars, scores, phase, zero, FULL: gl.constexpr):
    mbarrier.wait(bars[FULL], phase)
    fence_async_shared()
    b = keys.index(zero).permute((1, 0))
    scores = warpgroup_mma(q_rope, b, scores, is_async=True)
    return warpgroup_mma_wait(0, deps=[scores])


@gluon.jit
def without_unused(scores, used):
    live = used.load(gl.SliceLayout(0, SCORES))
    return gl.where(live[None, :] != 0, scores, -float("inf"))


@gluon.jit
def even_pair(tiles, used, tops, bars, q_rope, state, scale2, turn, LAST: gl.constexpr):
    """The even warpgroup's part of a pair: scores of its block in, scores of the next pair's block out."""
    scores, acc, running, weight = state
    phase = turn & 1
    # A constant descriptor would be hoisted out of the loop, and spilled with the others.
    zero = turn >> 30
    scores = without_unused(scores, used)
    even_top = gl.maximum(running, gl.max(scores, 1))
    tops[0].store(even_top)
    # The difference first, then the base: equal scores must cancel at any magnitude.
    fade = gl.exp2((running - even_top) * scale2)
    weights = gl.exp2((scores - even_top[:, None]) * scale2)
    handed = weights.to(gl.bfloat16)
    tiles[EVEN_ROPE].index(zero).store(handed)
    fence_async_shared()
    mbarrier.arrive(bars[EVEN_WEIGHTS])
    acc = times(acc, fade)
    acc = warpgroup_mma(gl.convert_layout(handed, WEIGHTS), tiles[EVEN_LEFT].index(zero), acc, is_async=True)
    weight = weight * fade + gl.sum(weights, 1)
    acc = warpgroup_mma_wait(0, deps=[acc])
    mbarrier.arrive(bars[FREE + EVEN_LEFT])
    mbarrier.wait(bars[ODD_WEIGHTS], phase)
    running = tops[1].load(PER_HEAD)
    fade = gl.exp2((even_top - running) * scale2)
    weight *= fade
    acc = times(acc, fade)
    acc = warpgroup_mma(tiles[ODD_ROPE].index(zero), tiles[ODD_LEFT].index(zero), acc, is_async=True)
    if LAST:
        acc = warpgroup_mma_wait(0, deps=[acc])
        mbarrier.arrive(bars[FREE + ODD_LEFT])
    else:
        scores = gl.zeros_like(scores)
        scores = score_tile(
            tiles[QUERY_LEFT], tiles[EVEN_LEFT], bars, scores, phase ^ 1, zero, 2 * EVEN_LEFT, FIRST=True
        )
        acc = warpgroup_mma_wait(2, deps=[acc])
        mbarrier.arrive(bars[FREE + ODD_LEFT])
        scores = score_tile(
            tiles[QUERY_RIGHT], tiles[EVEN_RIGHT], bars, scores, phase ^ 1, zero, 2 * EVEN_RIGHT, FIRST=False
        )
        scores = score_rope(q_rope, tiles[EVEN_ROPE], bars, scores, phase ^ 1, zero, EVEN_ROPE_FULL)
    return scores, acc, running, weight


@gluon.jit
def odd_pair(tiles, used, tops, bars, q_rope, state, scale2, turn, LAST: gl.constexpr):
    """The odd warpgroup's part of a pair."""
    scores, acc, running, weight = state
    phase = turn & 1
    zero = turn >> 30
    scores = without_unused(scores, used)
    own_top = gl.max(scores, 1)
    mbarrier.wait(bars[EVEN_WEIGHTS], phase)
    even_top = tops[0].load(PER_HEAD)
    fade = gl.exp2((running - even_top) * scale2)
    acc = times(acc, fade)
    acc = warpgroup_mma(tiles[EVEN_ROPE].index(zero), tiles[EVEN_RIGHT].index(zero), acc, is_async=True)
    odd_top = gl.maximum(even_top, own_top)
    tops[1].store(odd_top)
    late = gl.exp2((even_top - odd_top) * scale2)
    weights = gl.exp2((scores - odd_top[:, None]) * scale2)
    handed = weights.to(gl.bfloat16)
    tiles[ODD_ROPE].index(zero).store(handed)
    fence_async_shared()
    mbarrier.arrive(bars[ODD_WEIGHTS])
    weight = weight * fade * late + gl.sum(weights, 1)
    acc = warpgroup_mma_wait(0, deps=[acc])
    mbarrier.arrive(bars[FREE + EVEN_RIGHT])
    acc = times(acc, late)
    acc = warpgroup_mma(gl.convert_layout(handed, WEIGHTS), tiles[ODD_RIGHT].index(zero), acc, is_async=True)
    acc = warpgroup_mma_wait(0, deps=[acc])
    mbarrier.arrive(bars[FREE + ODD_RIGHT])
    if not LAST:
        scores = gl.zeros_like(scores)
        scores = score_tile(
            tiles[QUERY_RIGHT], tiles[ODD_RIGHT], bars, scores, phase ^ 1, zero, 2 * ODD_RIGHT, FIRST=True
        )
        scores = score_tile(
            tiles[QUERY_LEFT], tiles[ODD_LEFT], bars, scores, phase ^ 1, zero, 2 * ODD_LEFT, FIRST=False
        )
        scores = score_rope(q_rope, tiles[ODD_ROPE], bars, scores, phase ^ 1, zero, ODD_ROPE_FULL)
    return scores, acc, odd_top, weight


@gluon.jit
def write_half(acc, weight, staging, out, heads_left, COLUMN: gl.constexpr):
    """Normalise half of the output and write it, bfloat16 through a tile: from registers, stores would be 4 bytes."""
    acc = times(acc, 1.0 / gl.where(weight == 0.0, 1.0, weight))
    if out.dtype.element_ty == gl.bfloat16:
        staging.store(acc.to(gl.bfloat16))
        gl.thread_barrier()
        write_columns(staging.load(WIDE), out, heads_left, COLUMN, WIDE)
    else:
        write_columns(acc, out, heads_left, COLUMN, OUTPUT)


@gluon.jit
def write_columns(value, out, heads_left, COLUMN: gl.constexpr, layout: gl.constexpr):
    head = gl.arange(0, HEADS, gl.SliceLayout(1, layout))[:, None]
    column = COLUMN + gl.arange(0, HALF, gl.SliceLayout(0, layout))[None, :]
    gl.store(out + head * (2 * HALF) + column, value, mask=head < heads_left)


@gluon.jit
def job(sizes, number):
    """(query, first head, part, its columns from .. to, pairs of blocks) of a program's share of the work."""
    _heads, head_tiles, columns, columns_per_part, parts, counts = sizes
    part = number % parts
    token = (number // parts // head_tiles).to(gl.int64)
    first = number // parts % head_tiles * HEADS
    start = part * columns_per_part
    stop = gl.minimum(start + columns_per_part, columns)
    if counts is not None:
        stop = gl.minimum(gl.maximum(gl.load(counts + token), 0), stop).to(gl.int32)
    pairs = gl.maximum((stop - start + 2 * BLOCK - 1) // (2 * BLOCK), 1)
    return token, first, part, start, stop, pairs


@gluon.jit
def attend_even(query, result, scale, sizes, jobs, tiles, used, tops, totals, bars, WHOLE: gl.constexpr):
    """Even blocks, output columns 0-255, and the sums."""
    out, lse, tokens = result
    heads = sizes[0]
    parts = sizes[4]
    scale2 = scale * LOG2E
    turn = 0
    nth = 0
    for number in range(gl.program_id(0), jobs, gl.num_programs(0)):
        token, first, part, _start, _stop, pairs = job(sizes, number)
        state_at = token * heads + first
        mine = query + state_at * (2 * HALF + ROPE)
        zero = turn >> 30
        copy_query(tiles[QUERY_LEFT].index(0), mine, heads - first, 0, HALF)
        async_copy.mbarrier_arrive(bars[QUERY_FULL], increment_count=False)
        q_rope = rope_operand(mine, heads - first)
        running = gl.full([HEADS], LOWEST, gl.float32, PER_HEAD)
        weight = gl.zeros([HEADS], gl.float32, PER_HEAD)
        acc = gl.zeros([HEADS, HALF], gl.float32, OUTPUT)
        mbarrier.wait(bars[QUERY_FULL], nth & 1)
        scores = gl.zeros([HEADS, BLOCK], gl.float32, SCORES)
        phase = turn & 1
        scores = score_tile(tiles[QUERY_LEFT], tiles[EVEN_LEFT], bars, scores, phase, zero, 2 * EVEN_LEFT, FIRST=True)
        scores = score_tile(
            tiles[QUERY_RIGHT], tiles[EVEN_RIGHT], bars, scores, phase, zero, 2 * EVEN_RIGHT, FIRST=False
        )
        scores = score_rope(q_rope, tiles[EVEN_ROPE], bars, scores, phase, zero, EVEN_ROPE_FULL)
        for _ in range(pairs - 1):
            state = (scores, acc, running, weight)
            scores, acc, running, weight = even_pair(
                tiles, used[0], tops, bars, q_rope, state, scale2, turn, LAST=False
            )
            turn += 1
        state = (scores, acc, running, weight)
        scores, acc, running, weight = even_pair(tiles, used[0], tops, bars, q_rope, state, scale2, turn, LAST=True)
        turn += 1
        totals[0].store(weight)
        mbarrier.arrive(bars[EVEN_TOTAL])
        mbarrier.wait(bars[ODD_TOTAL], nth & 1)
        weight += totals[1].load(PER_HEAD)
        nth += 1
        if number + gl.num_programs(0) >= jobs:
            gdc_launch_dependents()
        head = gl.arange(0, HEADS, PER_HEAD)
        state_at += part * tokens * heads
        if WHOLE:
            natural = gl.where(weight == 0.0, -float("inf"), running * scale + gl.log(weight))
            gl.store(lse + state_at + head, natural, mask=head < heads - first)
        else:
            gl.store(lse + state_at + head, running, mask=head < heads - first)
            gl.store(lse + parts * tokens * heads + state_at + head, weight, mask=head < heads - first)
        # Both warpgroups have read the query for the last time.
        write_half(acc, weight, tiles[QUERY_LEFT].index(0), out + state_at * (2 * HALF), heads - first, COLUMN=0)
        gl.thread_barrier()


@gluon.jit
def attend_odd(query, result, scale, sizes, jobs, tiles, used, tops, totals, bars):
    """Odd blocks and output columns 256-511."""
    out = result[0]
    tokens = result[2]
    heads = sizes[0]
    scale2 = scale * LOG2E
    turn = 0
    nth = 0
    for number in range(gl.program_id(0), jobs, gl.num_programs(0)):
        token, first, part, _start, _stop, pairs = job(sizes, number)
        state_at = token * heads + first
        mine = query + state_at * (2 * HALF + ROPE)
        zero = turn >> 30
        copy_query(tiles[QUERY_RIGHT].index(0), mine, heads - first, HALF, HALF)
        async_copy.mbarrier_arrive(bars[QUERY_FULL], increment_count=False)
        q_rope = rope_operand(mine, heads - first)
        running = gl.full([HEADS], LOWEST, gl.float32, PER_HEAD)
        weight = gl.zeros([HEADS], gl.float32, PER_HEAD)
        acc = gl.zeros([HEADS, HALF], gl.float32, OUTPUT)
        mbarrier.wait(bars[QUERY_FULL], nth & 1)
        scores = gl.zeros([HEADS, BLOCK], gl.float32, SCORES)
        phase = turn & 1
        scores = score_tile(tiles[QUERY_RIGHT], tiles[ODD_RIGHT], bars, scores, phase, zero, 2 * ODD_RIGHT, FIRST=True)
        scores = score_tile(tiles[QUERY_LEFT], tiles[ODD_LEFT], bars, scores, phase, zero, 2 * ODD_LEFT, FIRST=False)
        scores = score_rope(q_rope, tiles[ODD_ROPE], bars, scores, phase, zero, ODD_ROPE_FULL)
        for _ in range(pairs - 1):
            state = (scores, acc, running, weight)
            scores, acc, running, weight = odd_pair(tiles, used[1], tops, bars, q_rope, state, scale2, turn, LAST=False)
            turn += 1
        state = (scores, acc, running, weight)
        scores, acc, running, weight = odd_pair(tiles, used[1], tops, bars, q_rope, state, scale2, turn, LAST=True)
        turn += 1
        totals[1].store(weight)
        mbarrier.arrive(bars[ODD_TOTAL])
        mbarrier.wait(bars[EVEN_TOTAL], nth & 1)
        weight = totals[0].load(PER_HEAD) + weight
        nth += 1
        state_at += part * tokens * heads
        write_half(acc, weight, tiles[QUERY_RIGHT].index(0), out + state_at * (2 * HALF), heads - first, COLUMN=HALF)
        gl.thread_barrier()
