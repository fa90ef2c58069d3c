"""One pass over a row: what may be among the best k goes to a buffer, which is cut to the k best where it fills up."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls

from __future__ import annotations

import triton
import triton.language as tl

from .narrowing import CAPACITY, cut
from .order_keys import encode, float_below
from .shared_atomics import append_above, append_grouped, claim, read_counter, set_counter, store_where

TILE = 4096
"""Scores that a program reads at a time; k + TILE must fit in CAPACITY."""

_TILE = tl.constexpr(TILE)
_CAPACITY = tl.constexpr(CAPACITY)
_INVALID = tl.constexpr(-(2**63))
_NO_ORDER = tl.constexpr(-(2**31))
# Shifts of a first histogram: over all keys, and over 4 octaves from a known lowest score on.
_ALL = tl.constexpr(53)
_OCTAVES = tl.constexpr(46)


@triton.jit
def _load_tile(source, start, stop, OTHER: tl.constexpr):
    offsets = start // _TILE * _TILE + tl.arange(0, _TILE)  # the same, said so that loads can be wide
    if start + _TILE <= stop:
        tile = tl.load(source + offsets)
    else:
        tile = tl.load(source + offsets, mask=offsets < stop, other=OTHER)
    return tile


@triton.jit
def bounds(order):
    """Where narrowing may begin, given the least order of the scores that were kept: (low, shift)."""
    if order == _NO_ORDER:
        low, shift = tl.full((), _INVALID + 1, tl.int64), tl.full((), _ALL, tl.int32)
    else:
        low, shift = order.to(tl.int64) << 32, tl.full((), _OCTAVES, tl.int32)
    return low, shift


@triton.jit
def stream_scores(
    shared, buffer, row, start, stop, order, k, CUT: tl.constexpr, length=0, GROUPED: tl.constexpr = False
):
    """Append the keys of scores of this order and above to the buffer: (their number, low, shift) for `narrow`.

    Where the buffer fills up, it is cut to the k best (CUT), or the rest is skipped and the number exceeds CAPACITY.
    GROUPED: the scores stand as in `append_grouped`, whose length it is; places of a tile are positions of a tile.
    """
    set_counter(shared, 0)
    threshold = float_below(order)
    low, shift = bounds(order)
    start = tl.zeros((), tl.int32) + start
    bound = 0
    tile = _load_tile(row, start, stop, 0.0)
    while start < stop:
        if bound + _TILE > _CAPACITY:
            bound = read_counter(shared)
            if bound + _TILE > _CAPACITY:
                if CUT:
                    low, _floor = cut(shared, buffer, bound, k, low, shift)
                    shift = tl.full((), _OCTAVES, tl.int32)
                    threshold = float_below((low >> 32).to(tl.int32) + 1)  # equal scores further on lose
                    bound = k
                else:
                    bound = 2 * _CAPACITY
                    start = stop
        if start < stop:
            positions = start + tl.arange(0, _TILE)
            following = _load_tile(row, start + _TILE, stop, 0.0)
            if GROUPED:
                append_grouped(shared, buffer, row, tile, positions, threshold, stop, length)
            else:
                append_above(shared, buffer, row, tile, positions, threshold, stop)
            tile = following
            bound += _TILE
            start += _TILE
    count = read_counter(shared)
    return tl.where(bound > _CAPACITY, bound, count), low, shift


@triton.jit
def copy_scores(buffer, row, stop):
    """Keys of all scores of a row that is not longer than the buffer, for `narrow`: (their number, low, shift)."""
    for start in tl.range(0, stop, _TILE):
        positions = start + tl.arange(0, _TILE)
        tile = _load_tile(row, start, stop, 0.0)
        store_where(buffer + positions, encode(tile, positions), positions < stop)
    tl.debug_barrier()
    low, shift = bounds(tl.full((), _NO_ORDER, tl.int32))
    return tl.zeros((), tl.int32) + stop, low, shift


@triton.jit
def stream_keys(shared, buffer, row, stop, k):
    """`stream_scores` for keys, from the lowest on."""
    set_counter(shared, 0)
    low = tl.full((), _INVALID + 1, tl.int64)
    shift = tl.full((), _ALL, tl.int32)
    floor = low - 1
    bound = 0
    start = 0
    while start < stop:
        if bound + _TILE > _CAPACITY:
            bound = read_counter(shared)
            if bound + _TILE > _CAPACITY:
                low, floor = cut(shared, buffer, bound, k, low, shift)
                shift = tl.full((), _OCTAVES, tl.int32)
                bound = k
        keys = _load_tile(row, start, stop, _INVALID)
        flag = keys > floor
        store_where(buffer + claim(shared, flag), keys, flag)
        bound += _TILE
        start += _TILE
    return read_counter(shared), low, shift
