"""int64 keys whose order is that of a top-k, as `encode_order` of the reference makes them."""

# mypy: allow-untyped-defs, allow-untyped-calls

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
def float_below(key):
    """The float that exactly the scores of this key's score and better exceed, NaN if all do."""
    ordered = (key >> 32).to(tl.int32) - 1
    ordered = tl.where(ordered == -1, -2, ordered)  # -1 would be -0.0, which 0.0 does not exceed
    return score_of(tl.minimum(ordered, 0x7F800000))
