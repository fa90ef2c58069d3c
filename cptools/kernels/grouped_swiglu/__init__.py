"""SwiGLU feed-forward: of one expert over all rows, and of many experts over rows grouped by expert."""

from __future__ import annotations

from torch import Tensor

from ..block_fp8 import BlockFP8
from . import reference

__all__ = ["dense_swiglu", "grouped_swiglu"]

Weight = Tensor | BlockFP8


def dense_swiglu(x: Tensor, gate_up: Weight, down: Weight) -> Tensor:
    """(silu(x gate^T) * (x up^T)) down^T for x [T, D], gate_up [2 * I, D] with gate first, down [D, I] -> [T, D].

    In x's dtype. Local, no sync.
    """
    _check(x, gate_up, down, stack=0)
    return reference.dense_swiglu(x, gate_up, down)


def grouped_swiglu(x: Tensor, counts: Tensor, gate_up: Weight, down: Weight) -> Tensor:
    """`dense_swiglu` of each expert over its own rows. Local; the reference waits for the counts on the host.

    Args:
        x: [P, D], rows of expert 0 first, then of expert 1, and so on; P may be 0. Rows beyond sum(counts) belong to
            nobody: they are not read, and what stands in their place in the result is not specified.
        counts: int32 or int64 [E], rows of each expert, on x's device; 0 <= counts, sum(counts) <= P.
        gate_up: [E, 2 * I, D], gate first. down: [E, D, I]. Each a tensor of x's dtype or `BlockFP8`.

    Returns:
        [P, D] in x's dtype, row by row of x.
    """
    _check(x, gate_up, down, stack=1)
    experts = gate_up.shape[0]
    if list(counts.shape) != [experts]:
        raise ValueError(f"grouped_swiglu: counts must be [{experts}], got {list(counts.shape)}")
    return reference.grouped_swiglu(x, counts, gate_up, down)


def _check(x: Tensor, gate_up: Weight, down: Weight, *, stack: int) -> None:
    fits = len(gate_up.shape) == len(down.shape) == 2 + stack and x.dim() == 2
    fits = fits and gate_up.shape[:stack] == down.shape[:stack]
    if not fits or list(gate_up.shape[stack:]) != [2 * down.shape[-1], x.shape[1]] or down.shape[-2] != x.shape[1]:
        raise ValueError(
            f"swiglu: x {list(x.shape)}, gate_up {list(gate_up.shape)}, down {list(down.shape)} do not fit together"
        )
