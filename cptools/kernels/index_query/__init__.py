"""Indexer queries as the scoring kernels read them, from the raw projection."""

from __future__ import annotations

import torch
from torch import Tensor

from ...formats import SCALE_BLOCK
from ..impl import Choice, choose, triton_obstacle
from ..rowwise import RopeAngles
from . import reference
from .reference import rotated_query

__all__ = ["choose_fp8_query", "fp8_query", "rotated_query"]

_FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def fp8_query(
    query: Tensor, weights: Tensor, angles: RopeAngles | None = None, *, impl: str = "auto"
) -> tuple[Tensor, Tensor]:
    """query [T, H, D <= 128] -> e4m3, and its scale of each head multiplied into weights [T, H], float32.

    With angles the first pairs of each head are rotated before, rounding to the query's dtype at every step. Scales are
    powers of two, so that this scores bit for bit as `IndexRows.round_query` of the rotated query does.

    Local, on the current stream; the kernel makes no sync and may be captured in a CUDA graph. impl: "auto" |
    "reference" | "triton".
    """
    if query.dim() != 3 or weights.shape != query.shape[:2] or query.shape[2] > SCALE_BLOCK:
        raise ValueError(
            f"fp8_query: want query [T, H, D <= {SCALE_BLOCK}] and weights [T, H], "
            f"got {tuple(query.shape)} and {tuple(weights.shape)}"
        )
    if angles is not None and (angles.cos.shape[0] != query.shape[0] or 2 * angles.cos.shape[1] > query.shape[2]):
        raise ValueError(f"fp8_query: angles {tuple(angles.cos.shape)} do not fit query {tuple(query.shape)}")
    if choose_fp8_query(query, weights, angles, impl=impl).impl == "triton":
        from . import triton

        cos, sin = (None, None) if angles is None else (angles.cos, angles.sin)
        made: tuple[Tensor, Tensor] = triton.fp8_query(query, weights, cos, sin)
        return made
    return reference.fp8_query(query, weights, angles)


def choose_fp8_query(query: Tensor, weights: Tensor, angles: RopeAngles | None = None, *, impl: str = "auto") -> Choice:
    """What `fp8_query` would run for these inputs, and why nothing faster."""
    obstacle = triton_obstacle(query.device)
    if obstacle is None:
        dense = [query, weights] if angles is None else [query, weights, angles.cos, angles.sin]
        if query.dtype not in _FLOATS or weights.dtype not in _FLOATS:
            obstacle = f"query and weights are {query.dtype} and {weights.dtype}"
        elif any(x.stride(-1) != 1 for x in dense):
            obstacle = "a tensor is not dense in its last dim"
        elif angles is not None and (angles.cos.dtype != torch.float32 or angles.cos.stride() != angles.sin.stride()):
            obstacle = f"cos and sin are not alike in float32, strides {angles.cos.stride()}, {angles.sin.stride()}"
    return choose("fp8_query", impl, {"triton": obstacle})
