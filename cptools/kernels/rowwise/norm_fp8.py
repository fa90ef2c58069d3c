"""RMS norm whose result goes on both as it is and in FP8, into products with block-FP8 matrices."""

from __future__ import annotations

from torch import Tensor

from ..arguments import dense
from ..block_fp8 import QuantisedRows, choose_quantise_rows, quantise_rows
from ..impl import Choice, choose
from .reference import check_norm, rms_norm

_MAX_WIDTH = 16384  # a program holds a row in registers


def rms_norm_quantise(x: Tensor, weight: Tensor, eps: float, *, impl: str = "auto") -> tuple[Tensor, QuantisedRows]:
    """(rms_norm(x, weight, eps), the same rows quantised) for x [T, D]. Local, no sync, capturable.

    The quantised rows have the bits of `quantise_rows` of the first result. The kernel is one launch.
    """
    check_norm("rms_norm_quantise", x, weight)
    if choose_rms_norm_quantise(x, impl=impl).impl == "triton":
        from ..block_fp8 import triton

        normed, values, scales = triton.rms_norm_quantise(x, dense(weight), eps)
        return normed, QuantisedRows(values, scales.t())
    normed = rms_norm(x, weight, eps)
    return normed, quantise_rows(normed)


def choose_rms_norm_quantise(x: Tensor, *, impl: str = "auto") -> Choice:
    """What `rms_norm_quantise` would run, and why nothing faster."""
    obstacle = None
    if (alone := choose_quantise_rows(x)).impl == "reference":
        obstacle = str(alone.fallback_reason).removeprefix("triton: ")
    elif x.shape[1] > _MAX_WIDTH:
        obstacle = f"rows are {x.shape[1]} wide, more than {_MAX_WIDTH}"
    return choose("rms_norm_quantise", impl, {"triton": obstacle})
