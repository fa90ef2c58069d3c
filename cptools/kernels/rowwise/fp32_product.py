"""Products in float32 of BF16 rows with a float32 matrix: routers and the weights of index heads."""

from __future__ import annotations

import torch
from torch import Tensor

from .reference import linear

SPLIT_ROWS = 1024
"""From so many rows on, three BF16 products take less time than one in float32, which no matrix unit makes."""


def linear_in_fp32(x: Tensor, weight: Tensor) -> Tensor:
    """x [T, D] times weight float32 [O, D] transposed, computed in float32 -> float32 [T, O]. Local, no sync.

    On a GPU many BF16 rows are multiplied by the matrix in three BF16 parts, whose sum it is: products of BF16 values
    are exact in float32 and are added there, so this differs from one product in float32 by the order of the sum alone.
    Raises ValueError where the matrix is not float32 or the widths differ.
    """
    if weight.dtype != torch.float32 or weight.dim() != 2 or x.dim() != 2 or x.shape[1] != weight.shape[1]:
        raise ValueError(
            f"linear_in_fp32: x {tuple(x.shape)} {x.dtype} and weight {tuple(weight.shape)} {weight.dtype} "
            "must be [T, D] and float32 [O, D]"
        )
    if x.device.type == "cpu" or x.dtype != torch.bfloat16 or x.shape[0] < SPLIT_ROWS:
        return linear(x.float(), weight)
    high, middle, low = (torch.mm(x, part.t(), out_dtype=torch.float32) for part in bf16_parts(weight))
    return high.add_(middle.add_(low))


def bf16_parts(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Three BF16 tensors whose sum is the float32 x exactly, while no part is subnormal: 8 bits of it each."""
    high = x.bfloat16()
    rest = x - high.float()
    middle = rest.bfloat16()
    return high, middle, (rest - middle.float()).bfloat16()
