"""Sparse MLA over BF16 rows of 512 + 64 columns on Hopper: three warpgroups, one program an SM, jobs of 64 heads.

Rows come in pairs of blocks of 64, even and odd. Each of two warpgroups owns half of the output columns, scores one
block of a pair and, as in a relay, hands the weights and the running maximum on to the other through shared memory,
where the weights lie over the rotary part of the block, which is dead once the block is scored. So both halves of the
output take a block as soon as it has weights, its buffer is free early, and one warpgroup scores or takes exponentials
while the other multiplies. (FlashMLA's order instead rescales the even weights by the odd maximum before handing them
on, which frees the even block last.) The producer fills quarter tiles, block x half of the columns, in the order in
which they become free, and goes on to the rows of the next job while the consumers finish one.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False

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

from .gluon_relay_parts import (
    BLOCK,
    EVEN_LEFT,
    EVEN_RIGHT,
    EVEN_ROPE,
    EVEN_TOTAL,
    EVEN_WEIGHTS,
    FREE,
    GATHER,
    HALF,
    HEADS,
    LOG2E,
    LOWEST,
    ODD_LEFT,
    ODD_RIGHT,
    ODD_ROPE,
    ODD_TOTAL,
    ODD_WEIGHTS,
    ONE,
    OUTPUT,
    PER_HEAD,
    PER_ROW,
    Q_LEFT,
    Q_RIGHT,
    Q_ROPE,
    QUERY_FREE,
    QUERY_FULL,
    ROPE,
    SCORES,
    WEIGHTS,
    WRITTEN,
    barrier,
    shared,
    tile,
)


@gluon.jit
def job(sizes, number):
    """(query, first head, heads from there, pairs of blocks, columns) of a program's share of the work."""
    heads, head_tiles, columns, counts = sizes
    token = (number // head_tiles).to(gl.int64)
    first = number % head_tiles * HEADS
    if counts is not None:
        columns = gl.minimum(gl.maximum(gl.load(counts + token), 0), columns).to(gl.int32)
    pairs = gl.maximum((columns + 2 * BLOCK - 1) // (2 * BLOCK), 1)
    return token, first, gl.minimum(heads - first, HEADS), pairs, columns


@gluon.jit
def produce(tiles, even_notes, odd_notes, bars, row_part, query_part, sizes, jobs):
    """Fill the query's tile for each job, and the quarter tiles of each pair as they become free.

    As in FlashMLA there is no proxy fence between these copies and the matrix products that read them: the barrier,
    on which every copying thread arrives, has been enough on Hopper, and the fence costs 1 %.
    """
    rows, row_stride, num_rows, all_ids, ids_stride = row_part
    query, query_stride_t, query_stride_h = query_part
    wide = gl.arange(0, HALF, gl.SliceLayout(0, GATHER))[None, :]
    narrow = gl.arange(0, ROPE, gl.SliceLayout(0, GATHER))[None, :]
    line = gl.arange(0, BLOCK, PER_ROW)
    turn = 0
    nth = 0
    for number in range(gl.program_id(0), jobs, gl.num_programs(0)):
        token, first, heads, pairs, columns = job(sizes, number)
        ids = all_ids + token * ids_stride
        even_next = gl.load(ids + line, mask=line < columns, other=-1)
        odd_next = gl.load(ids + BLOCK + line, mask=BLOCK + line < columns, other=-1)

        query_at = query + token * query_stride_t + (first + line).to(gl.int64) * query_stride_h
        query_at = query_at[:, None]
        real = (line < heads)[:, None]
        mbarrier.wait(bars[QUERY_FREE], (nth & 1) ^ 1)
        async_copy.async_copy_global_to_shared(tiles[Q_LEFT].index(0), query_at + wide, mask=real)
        async_copy.async_copy_global_to_shared(tiles[Q_RIGHT].index(0), query_at + HALF + wide, mask=real)
        async_copy.async_copy_global_to_shared(tiles[Q_ROPE].index(0), query_at + 2 * HALF + narrow, mask=real)
        async_copy.mbarrier_arrive(bars[QUERY_FULL], increment_count=False)
        nth += 1
        for pair in range(pairs):
            even_used = (even_next >= 0) & (even_next < num_rows)
            odd_used = (odd_next >= 0) & (odd_next < num_rows)
            even_at = (rows + gl.where(even_used, even_next, 0).to(gl.int64) * row_stride)[:, None]
            odd_at = (rows + gl.where(odd_used, odd_next, 0).to(gl.int64) * row_stride)[:, None]
            # Ids are read one pair ahead: their latency hides behind the waits below.
            ahead = (pair + 1) * 2 * BLOCK + line
            even_next = gl.load(ids + ahead, mask=ahead < columns, other=-1)
            odd_next = gl.load(ids + BLOCK + ahead, mask=BLOCK + ahead < columns, other=-1)
            unused = gl.sum(gl.where(even_used, 0, 1) + gl.where(odd_used, 0, 256), 0)  # both counts in one reduction
            even_mask = even_used[:, None]
            odd_mask = odd_used[:, None]
            phase = (turn & 1) ^ 1

            mbarrier.wait(bars[FREE + EVEN_LEFT], phase)
            async_copy.async_copy_global_to_shared(tiles[EVEN_LEFT].index(0), even_at + wide, mask=even_mask)
            async_copy.mbarrier_arrive(bars[EVEN_LEFT], increment_count=False)

            mbarrier.wait(bars[FREE + EVEN_RIGHT], phase)
            async_copy.async_copy_global_to_shared(tiles[EVEN_RIGHT].index(0), even_at + HALF + wide, mask=even_mask)
            async_copy.async_copy_global_to_shared(
                tiles[EVEN_ROPE].index(0), even_at + 2 * HALF + narrow, mask=even_mask
            )
            async_copy.mbarrier_arrive(bars[EVEN_RIGHT], increment_count=False)
            even_notes[0].store(gl.where(even_used, 0.0, -float("inf")))
            even_notes[1].store(gl.full([1], 0, gl.int32, ONE) + unused % 256)
            mbarrier.arrive(bars[EVEN_RIGHT])

            mbarrier.wait(bars[FREE + ODD_RIGHT], phase)
            async_copy.async_copy_global_to_shared(tiles[ODD_RIGHT].index(0), odd_at + HALF + wide, mask=odd_mask)
            async_copy.mbarrier_arrive(bars[ODD_RIGHT], increment_count=False)

            mbarrier.wait(bars[FREE + ODD_LEFT], phase)
            async_copy.async_copy_global_to_shared(tiles[ODD_LEFT].index(0), odd_at + wide, mask=odd_mask)
            async_copy.async_copy_global_to_shared(tiles[ODD_ROPE].index(0), odd_at + 2 * HALF + narrow, mask=odd_mask)
            async_copy.mbarrier_arrive(bars[ODD_LEFT], increment_count=False)
            odd_notes[0].store(gl.where(odd_used, 0.0, -float("inf")))
            odd_notes[1].store(gl.full([1], 0, gl.int32, ONE) + unused // 256)
            mbarrier.arrive(bars[ODD_LEFT])
            turn += 1


@gluon.jit
def score_half(query, keys, scores, zero, FIRST: gl.constexpr):
    """Issue scores (+)= query keys^T over the columns of a tile; zero is a 0 that the compiler can not fold."""
    keys = keys.index(zero).permute((1, 0))
    return warpgroup_mma(query.index(zero), keys, scores, use_acc=not FIRST, is_async=True)


@gluon.jit
def without_unused(scores, notes):
    """Scores with -inf at unused rows; most blocks have none, and then nothing is added."""
    if gl.sum(notes[1].load(ONE), 0) > 0:
        scores += notes[0].load(gl.SliceLayout(0, SCORES))[None, :]
    return scores


@gluon.jit
def times(acc, factor):
    return acc * gl.convert_layout(factor, gl.SliceLayout(1, OUTPUT))[:, None]


@gluon.jit
def even_pair(tiles, notes, tops, bars, state, scale2, turn, LAST: gl.constexpr):
    """The even warpgroup's part of a pair: scores of its block in, scores of the next pair's block out."""
    scores, acc, running, weight = state
    phase = turn & 1
    # A constant descriptor would be hoisted out of the loop, and spilled with the others.
    zero = turn >> 30
    scores = without_unused(scores, notes)
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
        mbarrier.wait(bars[EVEN_LEFT], phase ^ 1)
        scores = score_half(tiles[Q_LEFT], tiles[EVEN_LEFT], gl.zeros_like(scores), zero, FIRST=True)
        acc = warpgroup_mma_wait(1, deps=[acc])
        mbarrier.arrive(bars[FREE + ODD_LEFT])
        mbarrier.wait(bars[EVEN_RIGHT], phase ^ 1)
        scores = score_half(tiles[Q_RIGHT], tiles[EVEN_RIGHT], scores, zero, FIRST=False)
        scores = score_half(tiles[Q_ROPE], tiles[EVEN_ROPE], scores, zero, FIRST=False)
        scores = warpgroup_mma_wait(0, deps=[scores])
    return scores, acc, running, weight


@gluon.jit
def odd_pair(tiles, notes, tops, bars, state, scale2, turn, LAST: gl.constexpr):
    """The odd warpgroup's part of a pair."""
    scores, acc, running, weight = state
    phase = turn & 1
    zero = turn >> 30
    scores = without_unused(scores, notes)
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
        mbarrier.wait(bars[ODD_RIGHT], phase ^ 1)
        scores = score_half(tiles[Q_RIGHT], tiles[ODD_RIGHT], gl.zeros_like(scores), zero, FIRST=True)
        mbarrier.wait(bars[ODD_LEFT], phase ^ 1)
        scores = score_half(tiles[Q_LEFT], tiles[ODD_LEFT], scores, zero, FIRST=False)
        scores = score_half(tiles[Q_ROPE], tiles[ODD_ROPE], scores, zero, FIRST=False)
        scores = warpgroup_mma_wait(0, deps=[scores])
    return scores, acc, odd_top, weight


@gluon.jit
def write_half(acc, weight, out, heads, COLUMN: gl.constexpr):
    """Normalise half of the output and write it; out points at the first of this job's heads."""
    acc = times(acc, 1.0 / gl.where(weight == 0.0, 1.0, weight)).to(out.dtype.element_ty)
    layout: gl.constexpr = OUTPUT if out.dtype.element_ty == gl.float32 else WRITTEN
    head = gl.arange(0, HEADS, gl.SliceLayout(1, layout))[:, None]
    column = COLUMN + gl.arange(0, HALF, gl.SliceLayout(0, layout))[None, :]
    gl.store(out + head * (2 * HALF) + column, gl.convert_layout(acc, layout), mask=head < heads)


@gluon.jit
def score_even(tiles, bars, phase, query_phase, zero, wanted):
    """Issue the scores of a job's first even block. Where no job follows they are of stale tiles, and nobody looks."""
    mbarrier.wait(bars[QUERY_FULL], query_phase, pred=wanted)
    mbarrier.wait(bars[EVEN_LEFT], phase, pred=wanted)
    scores = gl.zeros([HEADS, BLOCK], gl.float32, SCORES)
    scores = score_half(tiles[Q_LEFT], tiles[EVEN_LEFT], scores, zero, FIRST=True)
    mbarrier.wait(bars[EVEN_RIGHT], phase, pred=wanted)
    scores = score_half(tiles[Q_RIGHT], tiles[EVEN_RIGHT], scores, zero, FIRST=False)
    return score_half(tiles[Q_ROPE], tiles[EVEN_ROPE], scores, zero, FIRST=False)


@gluon.jit
def score_odd(tiles, bars, phase, query_phase, zero, wanted):
    mbarrier.wait(bars[QUERY_FULL], query_phase, pred=wanted)
    mbarrier.wait(bars[ODD_RIGHT], phase, pred=wanted)
    scores = gl.zeros([HEADS, BLOCK], gl.float32, SCORES)
    scores = score_half(tiles[Q_RIGHT], tiles[ODD_RIGHT], scores, zero, FIRST=True)
    mbarrier.wait(bars[ODD_LEFT], phase, pred=wanted)
    scores = score_half(tiles[Q_LEFT], tiles[ODD_LEFT], scores, zero, FIRST=False)
    return score_half(tiles[Q_ROPE], tiles[ODD_ROPE], scores, zero, FIRST=False)


@gluon.jit
def even_half(tiles, notes, tops, totals, bars, result, sizes, scale, jobs):
    """Even blocks, output columns 0-255, and the log-sum-exp."""
    out, lse = result
    scale2 = scale * LOG2E
    turn = 0
    nth = 0
    scores = score_even(tiles, bars, 0, 0, jobs >> 30, True)
    scores = warpgroup_mma_wait(0, deps=[scores])
    for number in range(gl.program_id(0), jobs, gl.num_programs(0)):
        token, first, heads, pairs, _columns = job(sizes, number)
        running = gl.full([HEADS], LOWEST, gl.float32, PER_HEAD)
        weight = gl.zeros([HEADS], gl.float32, PER_HEAD)
        acc = gl.zeros([HEADS, HALF], gl.float32, OUTPUT)
        for _ in range(pairs - 1):
            state = (scores, acc, running, weight)
            scores, acc, running, weight = even_pair(tiles, notes, tops, bars, state, scale2, turn, LAST=False)
            turn += 1
        mbarrier.arrive(bars[QUERY_FREE])
        state = (scores, acc, running, weight)
        scores, acc, running, weight = even_pair(tiles, notes, tops, bars, state, scale2, turn, LAST=True)
        turn += 1
        totals[0].store(weight)
        mbarrier.arrive(bars[EVEN_TOTAL])
        mbarrier.wait(bars[ODD_TOTAL], nth & 1)
        weight += totals[1].load(PER_HEAD)
        nth += 1
        # The next job's first scores run behind the writing of this one's output.
        ahead = score_even(tiles, bars, turn & 1, nth & 1, turn >> 30, number + gl.num_programs(0) < jobs)
        here = token * sizes[0] + first
        head = gl.arange(0, HEADS, PER_HEAD)
        natural = gl.where(weight == 0.0, -float("inf"), running * scale + gl.log(weight))
        gl.store(lse + here + head, natural, mask=head < heads)
        write_half(acc, weight, out + here * (2 * HALF), heads, COLUMN=0)
        scores = warpgroup_mma_wait(0, deps=[ahead])


@gluon.jit
def odd_half(tiles, notes, tops, totals, bars, result, sizes, scale, jobs):
    """Odd blocks and output columns 256-511."""
    out = result[0]
    scale2 = scale * LOG2E
    turn = 0
    nth = 0
    scores = score_odd(tiles, bars, 0, 0, jobs >> 30, True)
    scores = warpgroup_mma_wait(0, deps=[scores])
    for number in range(gl.program_id(0), jobs, gl.num_programs(0)):
        token, first, heads, pairs, _columns = job(sizes, number)
        running = gl.full([HEADS], LOWEST, gl.float32, PER_HEAD)
        weight = gl.zeros([HEADS], gl.float32, PER_HEAD)
        acc = gl.zeros([HEADS, HALF], gl.float32, OUTPUT)
        for _ in range(pairs - 1):
            state = (scores, acc, running, weight)
            scores, acc, running, weight = odd_pair(tiles, notes, tops, bars, state, scale2, turn, LAST=False)
            turn += 1
        mbarrier.arrive(bars[QUERY_FREE])
        state = (scores, acc, running, weight)
        scores, acc, running, weight = odd_pair(tiles, notes, tops, bars, state, scale2, turn, LAST=True)
        turn += 1
        totals[1].store(weight)
        mbarrier.arrive(bars[ODD_TOTAL])
        mbarrier.wait(bars[EVEN_TOTAL], nth & 1)
        weight = totals[0].load(PER_HEAD) + weight
        nth += 1
        ahead = score_odd(tiles, bars, turn & 1, nth & 1, turn >> 30, number + gl.num_programs(0) < jobs)
        write_half(acc, weight, out + (token * sizes[0] + first) * (2 * HALF), heads, COLUMN=HALF)
        scores = warpgroup_mma_wait(0, deps=[ahead])


# Sizes that change from call to call are not worth a compilation each.
@gluon.jit(do_not_specialize=["heads", "head_tiles", "num_rows", "columns", "ids_stride", "jobs"])
def sparse_mla_kernel(
    query,
    rows,
    ids,
    counts,
    out,
    lse,
    scale,
    heads,
    head_tiles,
    num_rows,
    columns,
    query_stride_t,
    query_stride_h,
    row_stride,
    ids_stride,
    jobs,
    HAS_COUNTS: gl.constexpr,
    CONSUMER_REGISTERS: gl.constexpr,
    PRODUCER_REGISTERS: gl.constexpr,
):
    sizes = (heads, head_tiles, columns, counts if HAS_COUNTS else None)
    result = (out, lse)
    query_part = (query, query_stride_t, query_stride_h)
    row_part = (rows, row_stride, num_rows, ids, ids_stride)

    quarters = (tile(BLOCK, HALF), tile(BLOCK, HALF), tile(BLOCK, HALF), tile(BLOCK, HALF))
    query_tiles = (tile(HEADS, HALF), tile(HEADS, HALF), tile(HEADS, ROPE))
    tiles = quarters + (tile(BLOCK, ROPE), tile(BLOCK, ROPE)) + query_tiles
    even_notes = (shared(gl.float32, BLOCK), shared(gl.int32, 1))
    odd_notes = (shared(gl.float32, BLOCK), shared(gl.int32, 1))
    tops = (shared(gl.float32, HEADS), shared(gl.float32, HEADS))
    totals = (shared(gl.float32, HEADS), shared(gl.float32, HEADS))
    # A copy arrives once a producer thread; where the producer also stores, it arrives once more as a whole.
    full = (barrier(128), barrier(129), barrier(128), barrier(129))
    free = (barrier(1), barrier(1), barrier(1), barrier(1))
    exchange = (barrier(1), barrier(1), barrier(1), barrier(1))
    bars = full + free + (barrier(128), barrier(2)) + exchange
    gl.warp_specialize(
        [
            (even_half, (tiles, even_notes, tops, totals, bars, result, sizes, scale, jobs)),
            (odd_half, (tiles, odd_notes, tops, totals, bars, result, sizes, scale, jobs)),
            (produce, (tiles, even_notes, odd_notes, bars, row_part, query_part, sizes, jobs)),
        ],
        [4, 4],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )
