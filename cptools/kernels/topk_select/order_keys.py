"""int64 keys whose order is that of a top-k, as `encode_order` of the reference makes them."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def flip_order(bits):
    """The bits of a float as an int32 of the same order, and back."""
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def encode(scores, positions):
    bits = (scores + 0.0).to(tl.int32, bitcast=True)
    bits = tl.where(scores != scores, 0x7FC00000, bits)
    return (flip_order(bits).to(tl.int64) << 32) | (~positions).to(tl.uint32).to(tl.int64)


@triton.jit
def score_of(ordered):
    return flip_order(ordered).to(tl.float32, bitcast=True)


@triton.jit
def float_below(ordered):
    """The float that exactly the scores of this order and above exceed (and NaN), NaN if that is all scores."""
    below = tl.where(ordered == 0, -2, ordered - 1)  # -1 would be -0.0, which 0.0 does not exceed
    below = tl.where(ordered <= -0x7F800001, 0x7FC00000, tl.minimum(below, 0x7F800000))
    return score_of(below)


@triton.jit
def by_position(keys):
    """Keys of the same content whose descending order is that of ascending positions (below 2^31)."""
    return ((keys & 0x7FFFFFFF) << 32) | ((keys >> 32) & 0xFFFFFFFF)


@triton.jit
def by_score(keys):
    """The inverse of `by_position`."""
    return ((keys & 0xFFFFFFFF) << 32) | (keys >> 32) | 0x80000000
