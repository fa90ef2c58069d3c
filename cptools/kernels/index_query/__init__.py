"""Indexer queries as the scoring kernels read them, from the raw projection."""

from __future__ import annotations

import torch
from torch import Tensor

from ...formats import SCALE_BLOCK
from ..arguments import ANY, FLOATS, FLOATS_AND_DOUBLE, check_one_device, check_tensor
from ..impl import Choice, choose, triton_obstacle
from ..rowwise.reference import RopeAngles, check_angles
from . import reference
from .reference import rotated_query

__all__ = ["choose_fp8_query", "fp8_query", "rotated_query"]


def fp8_query(
    query: Tensor, weights: Tensor, angles: RopeAngles | None = None, *, impl: str = "auto"
) -> tuple[Tensor, Tensor]:
    """query [T, H, 1 <= D <= 128] -> e4m3, and its scale of each head multiplied into weights [T, H], float32.

    With angles the first pairs of each head are rotated before, rounding to the query's dtype at every step. Scales are
    powers of two, so that this scores bit for bit as `IndexRows.round_query` of the rotated query does.

    Local, on the current stream; the kernel makes no sync and may be captured in a CUDA graph. impl: "auto" |
    "reference" | "triton". Raises ValueError where shapes or devices do not fit, and for what is not of floats.
    """
    _check(query, weights, angles)
    if choose_fp8_query(query, weights, angles, impl=impl).impl == "triton":
        from . import triton

        cos, sin = (None, None) if angles is None else (angles.cos, angles.sin)
        made: tuple[Tensor, Tensor] = triton.fp8_query(query, weights, cos, sin)
        return made
    return reference.fp8_query(query, weights, angles)


def _check(query: Tensor, weights: Tensor, angles: RopeAngles | None) -> None:
    op = "fp8_query"
    check_tensor(op, "query", query, FLOATS_AND_DOUBLE, (ANY, ANY, ANY))
    tokens, heads, dim = query.shape
    if not 1 <= dim <= SCALE_BLOCK:
        raise ValueError(f"{op}: want query [T, H, 1 <= D <= {SCALE_BLOCK}], got {list(query.shape)}")
    check_tensor(op, "weights", weights, FLOATS_AND_DOUBLE, (tokens, heads))
    if angles is None:
        check_one_device(op, query=query, weights=weights)
        return
    check_angles(op, angles, (tokens, ANY))
    if 2 * angles.cos.shape[1] > dim:
        raise ValueError(f"{op}: angles {list(angles.cos.shape)} do not fit query {list(query.shape)}")
    check_one_device(op, query=query, weights=weights, cos=angles.cos, sin=angles.sin)


def choose_fp8_query(query: Tensor, weights: Tensor, angles: RopeAngles | None = None, *, impl: str = "auto") -> Choice:
    """What `fp8_query` would run for these inputs, and why nothing faster."""
    obstacle = triton_obstacle(query.device)
    if obstacle is None:
        dense = [query, weights] if angles is None else [query, weights, angles.cos, angles.sin]
        if query.dtype not in FLOATS or weights.dtype not in FLOATS:
            obstacle = f"query and weights are {query.dtype} and {weights.dtype}"
        elif any(x.stride(-1) != 1 for x in dense):
            obstacle = "a tensor is not dense in its last dim"
        elif angles is not None and (angles.cos.dtype != torch.float32 or angles.cos.stride() != angles.sin.stride()):
            obstacle = f"cos and sin are not alike in float32, strides {angles.cos.stride()}, {angles.sin.stride()}"
    return choose("fp8_query", impl, {"triton": obstacle})
