"""The last step of a selection: the exact best of the keys in the buffer, in the order wanted."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls

from __future__ import annotations

import triton
import triton.language as tl

from .narrowing import MAX_K, cut, narrow
from .order_keys import score_of
from .ranking import ranked
from .shared_atomics import claim, set_counter, store_where

SORTED_BY = ("none", "score", "position")
"""By the number that kernels know them by."""

_TILE = tl.constexpr(4096)
_MAX_K = tl.constexpr(MAX_K)
_INVALID = tl.constexpr(-(2**63))
_BY_POSITION = tl.constexpr(2)


@triton.jit
def _store_decoded(positions, scores, keys, flag):
    store_where(positions, ((~keys) & 0xFFFFFFFF).to(positions.dtype.element_ty), flag)
    store_where(scores, score_of((keys >> 32).to(tl.int32)), flag)


@triton.jit
def store_best(shared, buffer, count, low, shift, k, positions, scores, KEYS: tl.constexpr, SORTED: tl.constexpr):
    """The k best of the first `count` keys of the buffer to a row of the results, -1 and -inf behind the last.

    low and shift are those of `narrow`. KEYS: positions take keys, in order, and nothing else is written.
    """
    valid = tl.minimum(count, k)
    places = tl.arange(0, _MAX_K)
    if SORTED > 0:
        if count > k:
            cut(shared, buffer, count, k, low, shift)
        keys, ranks = ranked(shared, buffer, valid, SORTED == _BY_POSITION)
        if KEYS:
            store_where(positions + ranks, keys, ranks < k)
        else:
            _store_decoded(positions + ranks, scores + ranks, keys, ranks < valid)
    else:
        floor = tl.full((), _INVALID, tl.int64)
        if count > k:
            _low, floor, _missing = narrow(shared, buffer, count, k, low, shift)
        set_counter(shared, 0)
        for start in tl.range(0, count, _TILE):
            slots = start + tl.arange(0, _TILE)
            keys = tl.load(buffer + slots, mask=slots < count, other=_INVALID)
            chosen = keys > floor
            taken = claim(shared, chosen)
            _store_decoded(positions + taken, scores + taken, keys, chosen)
    if not KEYS:
        unused = (places >= valid) & (places < k)
        tl.store(positions + places, tl.full((_MAX_K,), -1, positions.dtype.element_ty), mask=unused)
        tl.store(scores + places, tl.full((_MAX_K,), float("-inf"), tl.float32), mask=unused)
