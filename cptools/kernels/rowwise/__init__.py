"""Row-wise dense operations: linear, norms, rotary embedding, SwiGLU.

The reference computes in fixed row tiles, so that a row's bits depend on that row alone (batch invariance). On other
devices the same functions run torch's own kernels on whole tensors, and RMS norm and rotation one kernel of ours each.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..arguments import FLOATS
from ..impl import Choice, choose, triton_obstacle
from ..row_tiles import ROW_TILE, WIDTH_MULTIPLE, pad_widths
from . import reference
from .fp32_product import linear_in_fp32
from .reference import RopeAngles, check_rope, head_linear, layer_norm, linear, silu, sum_columns, swiglu

__all__ = [
    "ROW_TILE",
    "WIDTH_MULTIPLE",
    "RopeAngles",
    "choose_rms_norm",
    "choose_rope_interleaved",
    "head_linear",
    "layer_norm",
    "linear",
    "linear_in_fp32",
    "pad_widths",
    "rms_norm",
    "rope_interleaved",
    "silu",
    "sum_columns",
    "swiglu",
]

_MAX_WIDTH = 16384  # a row is one block of a program


def rms_norm(x: Tensor, weight: Tensor, eps: float, *, impl: str = "auto") -> Tensor:
    """weight * x * rsqrt(mean(x^2) + eps) over the last dim of x [T, D]; float32 inside, cast before the weight.

    The result has x's dtype, whatever the weight's. Raises ValueError where shapes or devices do not fit, and for what
    is not of floats. Local; the kernel may be captured in a CUDA graph. impl: "auto" | "reference" | "triton".
    """
    reference.check_norm("rms_norm", x, weight)
    if choose_rms_norm(x, weight, impl=impl).impl == "triton":
        from . import triton

        normed: Tensor = triton.rms_norm(x, weight, eps)
        return normed
    return reference.rms_norm(x, weight, eps)


def choose_rms_norm(x: Tensor, weight: Tensor, *, impl: str = "auto") -> Choice:
    """What `rms_norm` would run for these inputs, and why nothing faster."""
    obstacle = triton_obstacle(x.device)
    if obstacle is None:
        if x.dtype not in FLOATS or weight.dtype != x.dtype:
            obstacle = f"x and weight are {x.dtype} and {weight.dtype}"
        elif x.shape[-1] > _MAX_WIDTH:
            obstacle = f"rows are {x.shape[-1]} wide, more than {_MAX_WIDTH}"
        elif x.stride(-1) != 1 or weight.stride(-1) != 1:
            obstacle = f"a tensor is not dense in its last dim, strides {x.stride()} and {weight.stride()}"
    return choose("rms_norm", impl, {"triton": obstacle})


def rope_interleaved(x: Tensor, angles: RopeAngles, *, impl: str = "auto") -> Tensor:
    """Rotate the pairs (2i, 2i + 1) of the last dim of x [T, D] or [T, H, D]; the pairs stay where they are.

    Every step rounds to x's dtype. Raises ValueError where shapes or devices do not fit, and for what is not of floats.
    Local; the kernel may be captured in a CUDA graph. impl: as in `rms_norm`.
    """
    check_rope("rope_interleaved", x, angles)
    if choose_rope_interleaved(x, angles, impl=impl).impl == "triton":
        from . import triton

        turned: Tensor = triton.rope_interleaved(x if x.dim() == 3 else x.unsqueeze(1), angles.cos, angles.sin)
        return turned if x.dim() == 3 else turned.squeeze(1)
    return reference.rope_interleaved(x, angles)


def choose_rope_interleaved(x: Tensor, angles: RopeAngles, *, impl: str = "auto") -> Choice:
    """What `rope_interleaved` would run for these inputs, and why nothing faster."""
    obstacle = triton_obstacle(x.device)
    if obstacle is None:
        cos, sin = angles.cos, angles.sin
        if x.dtype not in FLOATS or cos.dtype != torch.float32 or cos.stride() != sin.stride():
            obstacle = f"x is {x.dtype}, cos {cos.dtype}, their strides {cos.stride()} and {sin.stride()}"
        elif x.stride(-1) != 1 or cos.stride(-1) != 1:
            obstacle = f"a tensor is not dense in its last dim, strides {x.stride()} and {cos.stride()}"
    return choose("rope_interleaved", impl, {"triton": obstacle})
