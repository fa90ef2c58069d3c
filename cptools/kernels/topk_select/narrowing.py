"""Which keys are the best: an interval of them, narrowed by histograms until its rest is wanted whole."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls

from __future__ import annotations

import triton
import triton.language as tl

from .order_keys import encode
from .shared_atomics import BINS, claim, count_where, find_bin, set_counter, store_where

CAPACITY = 8192
"""Keys that a program keeps."""
MAX_K = 2048

_SAMPLE = tl.constexpr(4096)
_LENGTH_A_SAMPLE = tl.constexpr(2**18)
_MAX_SAMPLES = tl.constexpr(8)
_LAST_BIN = tl.constexpr(BINS - 1)
_TILE = tl.constexpr(4096)
_MAX_K = tl.constexpr(MAX_K)
_INVALID = tl.constexpr(-(2**63))
_LAST = tl.constexpr(2**63 - 1)


@triton.jit
def _sampled(row, length, first, sample):
    """Ordered scores of pairs of neighbours from pair `first` of a sample on: they read fewer sectors than scores
    apart. Jitter, so that no period can hide."""
    pairs = first + tl.arange(0, _SAMPLE // 2)
    stride = length // sample
    hashes = (pairs * -1640531527).to(tl.uint32)
    places = pairs * stride + (pairs * (length % sample)) // sample
    places += tl.umulhi(hashes, stride.to(tl.uint32)).to(tl.int32)
    places = places[:, None] * 2 + tl.arange(0, 2)[None, :]
    return (encode(tl.load(row + places), places) >> 32).to(tl.int32)


@triton.jit
def sampled_order(shared, row, length, k, margin):
    """An ordered score that a little more than `margin` times k of the first `length` scores should reach.

    The least int where all will be needed. A long row needs a larger sample for so few of its scores.
    """
    sample = tl.minimum(tl.maximum(length // _LENGTH_A_SAMPLE, 1), _MAX_SAMPLES) * _SAMPLE
    expected = margin * k * (sample * 1.0 / length)
    wanted = (expected + 4.0 * tl.sqrt(expected) + 8.0).to(tl.int32)
    low = tl.full((), -(2**31), tl.int32)
    if wanted < sample:
        for first in tl.range(0, sample // 2, _SAMPLE // 2):
            ordered = _sampled(row, length, first, sample)
            count_where(shared, (ordered >> 21) + 1024, ordered == ordered)
        found, above, inside = find_bin(shared, wanted)
        low = (found - 1024) << 21
        if above + inside > wanted + wanted // 8:
            for first in tl.range(0, sample // 2, _SAMPLE // 2):
                ordered = _sampled(row, length, first, sample)
                rest = ordered - low
                count_where(shared, rest >> 10, (rest >= 0) & (rest < (1 << 21)) & (ordered >= low))
            found, _above, _inside = find_bin(shared, wanted - above)
            low += found << 10
    return low


@triton.jit
def narrow(shared, buffer, count, wanted, low, shift):
    """(low, floor, missing): the best `wanted` of the buffer's keys are those above the floor, and `missing` times low.

    Some are missing only where equal keys compete for the last places, which merge_orders alone may be given. All keys
    must reach the given low, and there must be `wanted` of them; shift is that of the first histogram.
    """
    high = tl.full((), _LAST, tl.int64)
    rest = wanted
    inside = wanted + 1
    while (inside > rest) & (high > low):
        for start in tl.range(0, count, _TILE):
            slots = start + tl.arange(0, _TILE)
            keys = tl.load(buffer + slots, mask=slots < count, other=_INVALID)
            bins = tl.minimum((keys - low).to(tl.uint64) >> shift.to(tl.uint64), _LAST_BIN).to(tl.int32)
            count_where(shared, bins, (keys >= low) & (keys <= high))
        found, above, inside = find_bin(shared, rest)
        rest -= above
        low += found.to(tl.int64) << shift.to(tl.int64)
        width = (1 << shift.to(tl.int64)) - 1
        if (found < _LAST_BIN) & ((high - low).to(tl.uint64) > width.to(tl.uint64)):
            high = low + width
        leading_zeros = tl.inline_asm_elementwise(
            "clz.b64 $0, $1;", "=r,l", [high - low], dtype=tl.int32, is_pure=True, pack=1
        )
        shift = tl.maximum(53 - leading_zeros, 0)
    missing = tl.where(inside > rest, rest, 0)
    return low, tl.where(missing > 0, low, low - 1), missing


@triton.jit
def cut(shared, buffer, count, k, low, shift):
    """Cut the buffer to its k best keys, in any order, and set the counter to k. Gives narrow's low and floor."""
    low, floor, missing = narrow(shared, buffer, count, k, low, shift)
    set_counter(shared, 0)
    for start in tl.range(0, count, _TILE):
        slots = start + tl.arange(0, _TILE)
        keys = tl.load(buffer + slots, mask=slots < count, other=_INVALID)
        chosen = keys > floor
        tl.debug_barrier()  # all have read before anyone writes
        store_where(buffer + claim(shared, chosen), keys, chosen)
    if missing > 0:
        slots = k - missing + tl.arange(0, _MAX_K)
        tl.store(buffer + slots, low + tl.zeros_like(slots), mask=slots < k)
    set_counter(shared, k)
    return low, floor
