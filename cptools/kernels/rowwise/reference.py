"""Row-wise operations whose result for a row does not depend on the other rows, nor on how many there are.

On the CPU they work on row tiles. Transcendental functions are built on ``torch.exp`` over whole tiles, because
``torch.sigmoid`` and ``silu`` treat the tail of a tensor differently from its body.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..arguments import ANY, FLOATS_AND_DOUBLE, check_count, check_integers, check_one_device, check_tensor
from ..block_fp8 import BlockFP8, block_fp8_linear
from ..row_tiles import in_tiles, pad_widths, tiled_product


def _check(x: Tensor, width: int, name: str) -> None:
    if x.dim() != 2 or x.shape[1] != width:
        raise ValueError(f"{name}: rows must be [T, {width}], got {tuple(x.shape)}")


def linear(x: Tensor, weight: Tensor | BlockFP8) -> Tensor:
    """x [T, D] times weight [O, D] transposed -> [T, O] in x's dtype.

    Rows of x are rounded to e4m3 where the weight is block-FP8; see `block_fp8_linear`.
    """
    _check(x, weight.shape[1], "linear")
    if isinstance(weight, BlockFP8):
        return block_fp8_linear(x, weight)
    return tiled_product(x, weight)


def head_linear(x: Tensor, weight: Tensor, *, out: Tensor | None = None) -> Tensor:
    """One matrix per head: x [T, H, D], weight [H, D, O] -> [T, H, O] in x's dtype; in ``out`` if given.

    ``out`` may have any strides. On the GPU nothing is copied on the way, whatever the strides of x.
    """
    heads, depth, width = weight.shape
    if x.dim() != 3 or x.shape[1:] != (heads, depth):
        raise ValueError(f"head_linear: x must be [T, {heads}, {depth}], got {tuple(x.shape)}")
    shape = (x.shape[0], heads, width)
    if out is not None and (out.shape != shape or out.dtype != x.dtype):
        raise ValueError(f"head_linear: out must be {x.dtype} {shape}, got {out.dtype} {tuple(out.shape)}")
    if x.device.type != "cpu":
        out = x.new_empty(shape) if out is None else out
        # Strided in and out: nothing is copied.
        torch.bmm(x.transpose(0, 1), weight, out=out.transpose(0, 1))
        return out
    x, weight = pad_widths(x, 2), pad_widths(weight, 1, 2)

    def product(tile: Tensor) -> Tensor:
        by_head = tile.view(-1, *x.shape[1:]).transpose(0, 1).contiguous()
        mixed = torch.bmm(by_head, weight)[:, :, :width]
        return mixed.transpose(0, 1).flatten(1)

    made = in_tiles(x.flatten(1), heads * width, product, x.dtype).view(shape)
    return made if out is None else out.copy_(made)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """weight * x * rsqrt(mean(x^2) + eps) over the last dim of x [T, D]; float32 inside, cast before the weight."""

    def norm(tile: Tensor) -> Tensor:
        wide = tile.float()
        scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
        # A product with a weight of another dtype is as wide as the wider of the two.
        return (weight * (wide * scale).to(tile.dtype)).to(tile.dtype)

    return in_tiles(x, x.shape[1], norm, x.dtype)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """Layer norm with affine part over the last dim of x [T, D]."""
    check_norm("layer_norm", x, weight, bias)
    return in_tiles(
        x, x.shape[1], lambda tile: torch.nn.functional.layer_norm(tile, weight.shape, weight, bias, eps), x.dtype
    )


def check_norm(op: str, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> None:
    """ValueError unless x is floats [T, D], and weight and bias are floats [D] beside it."""
    check_tensor(op, "x", x, FLOATS_AND_DOUBLE, (ANY, ANY))
    width = x.shape[1:]
    check_tensor(op, "weight", weight, FLOATS_AND_DOUBLE, width)
    if bias is not None:
        check_tensor(op, "bias", bias, FLOATS_AND_DOUBLE, width)
    check_one_device(op, x=x, weight=weight, bias=bias)


@dataclass(frozen=True, eq=False)
class RopeAngles:
    """cos and sin of position * theta^(-2i / dim), float32 [T, dim / 2]; made once a step, used by every layer."""

    cos: Tensor
    sin: Tensor

    @classmethod
    def at(cls, positions: Tensor, dim: int, theta: float) -> RopeAngles:
        """Angles for absolute positions [T] (integers) and an even dim. Local."""
        check_integers("RopeAngles.at", "positions", positions, (ANY,))
        check_count("RopeAngles.at", "dim", dim)
        if dim % 2:
            raise ValueError(f"RopeAngles.at: dim={dim} must be even")
        steps = torch.arange(0, dim, 2, dtype=torch.float32, device=positions.device)
        frequencies = 1.0 / (theta ** (steps / dim))
        column = positions.to(torch.float32).unsqueeze(1)
        half = dim // 2
        cos = in_tiles(column, half, lambda tile: torch.cos(tile * frequencies), torch.float32)
        sin = in_tiles(column, half, lambda tile: torch.sin(tile * frequencies), torch.float32)
        return cls(cos, sin)

    def __getitem__(self, rows: slice) -> RopeAngles:
        return RopeAngles(self.cos[rows], self.sin[rows])


def rope_interleaved(x: Tensor, angles: RopeAngles) -> Tensor:
    """Rotate the pairs (2i, 2i + 1) of the last dim of x [T, D] or [T, H, D]; the pairs stay where they are."""
    cos, sin = angles.cos.to(x.dtype), angles.sin.to(x.dtype)
    if x.dim() == 3:
        cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    even, odd = x[..., 0::2], x[..., 1::2]
    return torch.stack([even * cos - odd * sin, odd * cos + even * sin], dim=-1).flatten(-2)


def check_rope(op: str, x: Tensor, angles: RopeAngles) -> None:
    """ValueError unless x is floats [T, D] or [T, H, D], and angles are those of T tokens and D / 2 pairs beside it."""
    shape = x.shape
    if len(shape) not in (2, 3) or shape[-1] % 2 or x.dtype not in FLOATS_AND_DOUBLE:
        raise ValueError(f"{op}: x must be floats [T, D] or [T, H, D], D even, got {x.dtype} {list(shape)}")
    check_angles(op, angles, (shape[0], shape[-1] // 2))
    check_one_device(op, x=x, cos=angles.cos, sin=angles.sin)


def check_angles(op: str, angles: RopeAngles, shape: tuple[int, int]) -> None:
    """ValueError unless both cos and sin are floats in the shape (tokens, pairs), in which `ANY` is any size."""
    check_tensor(op, "cos", angles.cos, FLOATS_AND_DOUBLE, shape)
    check_tensor(op, "sin", angles.sin, FLOATS_AND_DOUBLE, angles.cos.shape)


def silu(x: Tensor) -> Tensor:
    """x * sigmoid(x)."""
    return x / (1.0 + torch.exp(-x))


def swiglu(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """(silu(x gate^T) * (x up^T)) down^T for x [T, D], gate and up [I, D], down [D, I]."""
    _check(x, gate.shape[1], "swiglu")
    outputs = down.shape[0]
    if x.device.type == "cpu":
        x, gate, up, down = pad_widths(x, 1), *(pad_widths(weight, 0, 1) for weight in (gate, up, down))

    def product(tile: Tensor) -> Tensor:
        return ((silu(tile @ gate.t()) * (tile @ up.t())) @ down.t())[:, :outputs]

    return in_tiles(x, outputs, product, x.dtype)


def sum_columns(x: Tensor) -> Tensor:
    """Sum over dim 1 of x [T, K, ...], left to right: the same order for any T."""
    total = x[:, 0].clone()
    for column in range(1, x.shape[1]):
        total += x[:, column]
    return total
