"""Sorting the chosen keys: a counting sort by their leading bits, then each key is compared with those of its bin."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls

from __future__ import annotations

import triton
import triton.language as tl

from .narrowing import MAX_K
from .order_keys import by_position, by_score
from .shared_atomics import BINS, bin_starts, clear_bins, set_counter, shared_load, store_where, take_where

_MAX_K = tl.constexpr(MAX_K)
_LAST_BIN = tl.constexpr(BINS - 1)
_INVALID = tl.constexpr(-(2**63))
_LAST = tl.constexpr(2**63 - 1)
_CROWD = tl.constexpr(64)
"""Keys in one bin from which on a bitonic sort is faster."""


@triton.jit
def ranked(shared, buffer, count, POSITIONS: tl.constexpr):
    """(keys, places) of the first `count` <= MAX_K keys of the buffer: places[i] is the rank of keys[i], INVALID last.

    Descending; POSITIONS: by ascending positions. Overwrites the buffer.
    """
    slots = tl.arange(0, _MAX_K)
    valid = slots < count
    keys = tl.load(buffer + slots, mask=valid, other=_INVALID)
    if POSITIONS:
        keys = tl.where(valid, by_position(keys), _INVALID)
    low = tl.min(tl.where(valid, keys, _LAST))
    span = tl.maximum(tl.max(keys), low) - low
    leading_zeros = tl.inline_asm_elementwise("clz.b64 $0, $1;", "=r,l", [span], dtype=tl.int32, is_pure=True, pack=1)
    shift = tl.maximum(53 - leading_zeros, 0).to(tl.uint64)
    bins = tl.minimum((keys - low).to(tl.uint64) >> shift, _LAST_BIN).to(tl.int32)
    inner = take_where(shared, bins, valid)
    set_counter(shared, 0)
    most = bin_starts(shared)
    if most <= _CROWD:
        store_where(buffer + shared_load(shared + 4 * bins) + inner, keys, valid)
        tl.debug_barrier()
        keys = tl.load(buffer + slots, mask=valid, other=_INVALID)
        bins = tl.minimum((keys - low).to(tl.uint64) >> shift, _LAST_BIN).to(tl.int32)
        start = shared_load(shared + 4 * bins)
        stop = tl.where(bins > 0, shared_load(shared + 4 * tl.maximum(bins - 1, 0)), count)
        places = start
        for step in tl.range(0, most):
            other = tl.load(buffer + start + step, mask=valid & (start + step < stop), other=_INVALID)
            # Equal keys, which merge_orders may be given, keep their order.
            places += tl.where((other > keys) | ((other == keys) & (start + step < slots)), 1, 0)
        places = tl.where(valid, places, slots)
    else:
        keys = tl.sort(keys, descending=True)
        places = slots
    tl.debug_barrier()
    clear_bins(shared)
    if POSITIONS:
        keys = tl.where(places < count, by_score(keys), _INVALID)
    return keys, places
