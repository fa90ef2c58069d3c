"""Which keys are the best: an interval of them, narrowed by histograms until its rest is wanted whole."""

# mypy: allow-untyped-defs, allow-untyped-calls

from __future__ import annotations

import triton
import triton.language as tl

from .order_keys import encode, float_below
from .shared_atomics import claim, count_where, set_counter, shared_load, shared_store, store_where

CAPACITY = 8192
"""Keys that a program keeps."""
MAX_K = 2048

_CAPACITY = tl.constexpr(CAPACITY)
_SAMPLE = tl.constexpr(4096)
_BINS_LOG2 = tl.constexpr(11)
_BINS = tl.constexpr(2048)
_MAX_K = tl.constexpr(MAX_K)
_INVALID = tl.constexpr(-(2**63))
_LAST = tl.constexpr(2**63 - 1)


@triton.jit
def _narrow(shared, keys, wanted, slack, shift_limit):
    """An interval [low, high] that ends the best `wanted` keys: all above it are among them, and `rest` of the
    `inside` in it. Stops when `inside` exceeds `rest` by no more than slack, or the interval is under 2^shift_limit.
    There must be `wanted` keys."""
    bins = tl.arange(0, _BINS)
    low = tl.min(tl.where(keys == _INVALID, _LAST, keys))
    high = tl.max(keys)
    rest = wanted
    inside = wanted + slack + 1
    shift = 64
    while (inside > rest + slack) & (shift > shift_limit):
        span = high - low
        shift = (
            64
            - _BINS_LOG2
            - tl.inline_asm_elementwise("clz.b64 $0, $1;", "=r,l", [span], dtype=tl.int32, is_pure=True, pack=1)
        )
        shift = tl.maximum(shift, 0)
        tl.debug_barrier()
        shared_store(shared + 4 * bins, 0)
        tl.debug_barrier()
        places = ((keys - low).to(tl.uint64) >> shift.to(tl.uint64)).to(tl.int32)
        count_where(shared + 4 * places, (keys >= low) & (keys <= high))
        tl.debug_barrier()
        counts = shared_load(shared + 4 * bins)
        reached = tl.cumsum(counts, 0, reverse=True)
        packed = (bins.to(tl.int64) << 40) | (reached.to(tl.int64) << 20) | counts.to(tl.int64)
        found = tl.max(tl.where(reached >= rest, packed, 0))
        inside = (found & 0xFFFFF).to(tl.int32)
        rest -= ((found >> 20) & 0xFFFFF).to(tl.int32) - inside
        low += (found >> 40) << shift.to(tl.int64)
        width = (1 << shift.to(tl.int64)) - 1
        high = tl.where((high - low).to(tl.uint64) > width.to(tl.uint64), low + width, high)
    return low, high, rest, inside


@triton.jit
def sampled_threshold(shared, row, length, k):
    """A score that a little more than k of the first `length` scores exceed, NaN if the sample can not tell."""
    draws = tl.arange(0, _SAMPLE)
    stride = length // _SAMPLE
    # Jitter, so that no period in the scores can hide from the sample.
    jitter = ((draws * -1640531527).to(tl.uint32) >> 8) % tl.maximum(stride, 1).to(tl.uint32)
    places = draws * stride + (draws * (length % _SAMPLE)) // _SAMPLE + jitter.to(tl.int32)
    expected = k * (_SAMPLE * 1.0 / length)
    wanted = (expected + 4.0 * tl.sqrt(expected) + 8.0).to(tl.int32)
    threshold = float("nan")
    if wanted < _SAMPLE:
        keys = encode(tl.load(row + places), places)
        low, _high, _rest, _inside = _narrow(shared, keys, wanted, wanted // 8, 32)
        threshold = float_below(low)
    return threshold


@triton.jit
def keep_best(shared, buffer, count, k):
    """Cut the buffer to its k best keys; gives a key that no other of them is worse than."""
    slots = tl.arange(0, _CAPACITY)
    keys = tl.load(buffer + slots, mask=slots < count, other=_INVALID)
    low, high, rest, inside = _narrow(shared, keys, k, 0, 0)
    # More keys than wanted in an interval of one: equal keys, which only merge_orders may be given. They fill the end.
    chosen = keys > tl.where(inside > rest, high, low - 1)
    set_counter(shared, 0)
    places = claim(shared, chosen)
    store_where(buffer + places, keys, chosen)
    fill = k - tl.where(inside > rest, rest, 0) + tl.arange(0, _MAX_K)
    tl.store(buffer + fill, low + tl.zeros_like(fill), mask=fill < k)
    set_counter(shared, k)
    return tl.where(inside > rest, low, tl.min(tl.where(chosen, keys, _LAST)))
