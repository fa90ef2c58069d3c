# mypy: disable-error-code="untyped-decorator,no-untyped-def"
"""The two attending warpgroups of the seesaw decode kernel, after FlashMLA's schedule.

Blocks of 64 selected rows come in pairs. The even warpgroup scores the first block of a pair, the odd one the second;
each keeps 64 x 256 of the output in registers (even: columns 0-255, odd: the rest) and so needs the weights of both
blocks: its own from registers, the other's through shared memory, with the running maxima.
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

from .decode_producer import LEFT_0, LEFT_1, RIGHT_0, RIGHT_1, ROPE_0, ROPE_1

SCORES = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16]))
OUTPUT = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 256, 16]))
WIDE = gl.constexpr(gl.BlockedLayout([1, 8], [1, 32], [4, 1], [1, 0]))
INF = gl.constexpr(float("inf"))

# Barriers between the warpgroups.
TOP_0 = gl.constexpr(0)
TOP_1 = gl.constexpr(1)
WEIGHTS_0 = gl.constexpr(2)
WEIGHTS_1 = gl.constexpr(3)
SUM_0 = gl.constexpr(4)
SUM_1 = gl.constexpr(5)
QUERY = gl.constexpr(6)


@gluon.jit
def copy_query(tile, query, heads_left, first: gl.constexpr, WIDTH: gl.constexpr):
    """cp.async of WIDTH columns of 64 heads, zeros for heads beyond the last."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    head = gl.arange(0, 64, gl.SliceLayout(1, layout))
    column = gl.arange(0, WIDTH, gl.SliceLayout(0, layout))
    at = query + gl.expand_dims(head * 576, 1) + gl.expand_dims(first + column, 0)
    async_copy.async_copy_global_to_shared(tile, at, mask=gl.expand_dims(head < heads_left, 1))


@gluon.jit
def score_quarter(s, q, k, full, phase, index, quarter: gl.constexpr, FIRST: gl.constexpr):
    mbarrier.wait(full, phase)
    fence_async_shared()  # here, where no load is outstanding: in the producer it would wait for those loads
    a = q.index(index + quarter // 2).slice(128 * (quarter % 2), 128, 1)
    return warpgroup_mma(a, k.slice(128 * (quarter % 2), 128, 1).permute((1, 0)), s, use_acc=not FIRST, is_async=True)


@gluon.jit
def masked_scores(s, used):
    live = used.load(gl.SliceLayout(0, SCORES))
    return gl.where(gl.expand_dims(live, 0) != 0, s, -INF)


@gluon.jit
def finite(top):
    return gl.where(top == -INF, 0.0, top)


@gluon.jit
def rescale(o, keep):
    return o * gl.expand_dims(gl.convert_layout(keep, gl.SliceLayout(1, OUTPUT)), 1)


@gluon.jit
def attend_even(
    query, out, lse, totals_at, heads_left, scale, num_pairs, q, q_rope, k, k_rope, weights1, used, tops, sums, full,
    free, step, WHOLE: gl.constexpr,
):  # fmt: skip
    copy_query(q.index(0), query, heads_left, 0, 256)
    copy_query(q_rope.index(0), query, heads_left, 512, 64)
    async_copy.mbarrier_arrive(step.index(QUERY), increment_count=False)
    o = gl.zeros([64, 256], gl.float32, OUTPUT)
    s0 = gl.zeros([64, 64], gl.float32, SCORES)
    top = gl.full([64], -INF, gl.float32, gl.SliceLayout(1, SCORES))
    total = gl.zeros([64], gl.float32, gl.SliceLayout(1, SCORES))
    scale_log2 = scale * 1.4426950408889634
    mbarrier.wait(step.index(QUERY), 0)
    fence_async_shared()
    for i in range(num_pairs):
        phase = i & 1
        z = i >> 30  # 0, but not to the compiler, which would keep every wgmma descriptor in registers
        left = k.index(z + LEFT_0)
        right = k.index(z + RIGHT_0)
        s = score_quarter(s0, q, left, full.index(2 * LEFT_0), phase, z, 0, True)
        s = score_quarter(s, q, left, full.index(2 * LEFT_0 + 1), phase, z, 1, False)
        s = score_quarter(s, q, right, full.index(2 * RIGHT_0), phase, z, 2, False)
        s = score_quarter(s, q, right, full.index(2 * RIGHT_0 + 1), phase, z, 3, False)
        mbarrier.wait(full.index(ROPE_0), phase)
        fence_async_shared()
        s = warpgroup_mma(q_rope.index(z), k_rope.index(z).permute((1, 0)), s, is_async=True)
        s = warpgroup_mma_wait(0, deps=[s])

        s = masked_scores(s, used.index(0))
        new_top = gl.maximum(top, gl.max(s, 1))
        tops.index(0).store(new_top)
        mbarrier.arrive(step.index(TOP_0), count=1)
        base = finite(new_top)
        # The difference first: scale * score - scale * top, contracted to an fma, is not 0 for the top at 1e30.
        p = gl.exp2((s - gl.expand_dims(base, 1)) * scale_log2)
        keep = gl.exp2((top - base) * scale_log2)
        total = total * keep + gl.sum(p, 1)
        o = rescale(o, keep)
        own = gl.convert_layout(p.to(gl.bfloat16), gl.DotOperandLayout(0, OUTPUT, 2))
        o = warpgroup_mma(own, left, o, is_async=True)

        mbarrier.wait(step.index(TOP_1), phase)
        top = tops.index(1).load(gl.SliceLayout(1, SCORES))
        keep = gl.exp2((new_top - finite(top)) * scale_log2)
        # The rotary part of block 0 was read by this warpgroup alone; its place now takes the weights.
        k_rope.index(z).store((p * gl.expand_dims(keep, 1)).to(gl.bfloat16))
        fence_async_shared()
        mbarrier.arrive(step.index(WEIGHTS_0), count=1)
        o = warpgroup_mma_wait(0, deps=[o])
        mbarrier.arrive(free.index(LEFT_0), count=1)
        total = total * keep
        o = rescale(o, keep)
        mbarrier.wait(step.index(WEIGHTS_1), phase)
        o = warpgroup_mma(weights1.index(z), k.index(z + LEFT_1), o, is_async=True)
        o = warpgroup_mma_wait(0, deps=[o])
        mbarrier.arrive(free.index(LEFT_1), count=1)
    sums.index(0).store(total)
    mbarrier.arrive(step.index(SUM_0), count=1)
    mbarrier.wait(step.index(SUM_1), 0)
    total = total + sums.index(1).load(gl.SliceLayout(1, SCORES))
    head = gl.arange(0, 64, gl.SliceLayout(1, SCORES))
    if WHOLE:
        gl.store(lse + head, gl.where(total == 0.0, -INF, top * scale + gl.log(total)), mask=head < heads_left)
    else:
        gl.store(lse + head, top, mask=head < heads_left)
        gl.store(lse + totals_at + head, total, mask=head < heads_left)
    store_half(o, total, q, out, heads_left, 0)


@gluon.jit
def attend_odd(
    query, out, heads_left, scale, num_pairs, q, q_rope, k, k_rope, weights1, used, tops, sums, full, free, step
):  # fmt: skip
    copy_query(q.index(1), query, heads_left, 256, 256)
    async_copy.mbarrier_arrive(step.index(QUERY), increment_count=False)
    o = gl.zeros([64, 256], gl.float32, OUTPUT)
    s0 = gl.zeros([64, 64], gl.float32, SCORES)
    top = gl.full([64], -INF, gl.float32, gl.SliceLayout(1, SCORES))
    total = gl.zeros([64], gl.float32, gl.SliceLayout(1, SCORES))
    scale_log2 = scale * 1.4426950408889634
    mbarrier.wait(step.index(QUERY), 0)
    fence_async_shared()
    for i in range(num_pairs):
        phase = i & 1
        z = i >> 30
        left = k.index(z + LEFT_1)
        right = k.index(z + RIGHT_1)
        s = score_quarter(s0, q, right, full.index(2 * RIGHT_1), phase, z, 2, True)
        s = score_quarter(s, q, right, full.index(2 * RIGHT_1 + 1), phase, z, 3, False)
        s = score_quarter(s, q, left, full.index(2 * LEFT_1), phase, z, 0, False)
        s = score_quarter(s, q, left, full.index(2 * LEFT_1 + 1), phase, z, 1, False)
        mbarrier.wait(full.index(ROPE_1), phase)
        fence_async_shared()
        s = warpgroup_mma(q_rope.index(z), k_rope.index(z + 1).permute((1, 0)), s, is_async=True)
        s = warpgroup_mma_wait(0, deps=[s])

        s = masked_scores(s, used.index(1))
        peak = gl.max(s, 1)
        mbarrier.wait(step.index(TOP_0), phase)
        new_top = gl.maximum(tops.index(0).load(gl.SliceLayout(1, SCORES)), peak)
        tops.index(1).store(new_top)
        mbarrier.arrive(step.index(TOP_1), count=1)
        base = finite(new_top)
        p = gl.exp2((s - gl.expand_dims(base, 1)) * scale_log2)
        keep = gl.exp2((top - base) * scale_log2)
        top = new_top
        total = total * keep + gl.sum(p, 1)
        o = rescale(o, keep)
        narrow = p.to(gl.bfloat16)
        own = gl.convert_layout(narrow, gl.DotOperandLayout(0, OUTPUT, 2))
        o = warpgroup_mma(own, right, o, is_async=True)
        weights1.index(z).store(narrow)
        fence_async_shared()
        mbarrier.arrive(step.index(WEIGHTS_1), count=1)
        mbarrier.wait(step.index(WEIGHTS_0), phase)
        o = warpgroup_mma(k_rope.index(z), k.index(z + RIGHT_0), o, is_async=True)
        o = warpgroup_mma_wait(1, deps=[o])
        mbarrier.arrive(free.index(RIGHT_1), count=1)
        o = warpgroup_mma_wait(0, deps=[o])
        mbarrier.arrive(free.index(RIGHT_0), count=1)
    sums.index(1).store(total)
    mbarrier.arrive(step.index(SUM_1), count=1)
    mbarrier.wait(step.index(SUM_0), 0)
    total = total + sums.index(0).load(gl.SliceLayout(1, SCORES))
    store_half(o, total, q, out, heads_left, 1)


@gluon.jit
def store_half(o, total, q, out, heads_left, half: gl.constexpr):
    empty = total == 0.0
    o = rescale(o, gl.where(empty, 0.0, 1.0 / gl.where(empty, 1.0, total)))
    if out.dtype.element_ty == gl.bfloat16:
        # Nobody reads the query any more. From the accumulators' layout, stores would be 4 bytes each.
        q.index(half).store(o.to(gl.bfloat16))
        gl.thread_barrier()
        store_columns(q.index(half).load(WIDE), out, heads_left, half, WIDE)
    else:
        store_columns(o, out, heads_left, half, OUTPUT)


@gluon.jit
def store_columns(value, out, heads_left, half: gl.constexpr, layout: gl.constexpr):
    head = gl.arange(0, 64, gl.SliceLayout(1, layout))
    column = half * 256 + gl.arange(0, 256, gl.SliceLayout(0, layout))
    to = out + gl.expand_dims(head * 512, 1) + gl.expand_dims(column, 0)
    gl.store(to, value, mask=gl.expand_dims(head < heads_left, 1))
