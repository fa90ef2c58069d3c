"""Random checkpoints, all of them in host memory: small models for tests and demos."""

from __future__ import annotations

import torch
from torch import Tensor

from cptools.kernels.block_fp8 import quantise_blocks

from ..config import GLM53Config
from .released import expected_tensors, is_released_as_fp8, scale_name


def random_tensors(config: GLM53Config, *, seed: int, fp8: bool = False) -> dict[str, Tensor]:
    """A checkpoint of random weights whose gains are near one, so that routing and every layer matter.

    fp32 by default; with ``fp8`` the dtypes of the released block-FP8 build, for which the config needs a
    ``weight_block_size``.
    """
    if fp8 and config.weight_block_size is None:
        raise ValueError("fp8=True needs a weight_block_size, the config has None")
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, Tensor] = {}
    for name, shape in expected_tensors(config).items():
        value = torch.randn(shape, generator=generator)
        if name.endswith("bias"):
            value *= 0.1
        elif len(shape) == 1:
            value = 1 + 0.1 * value
        elif name != "model.embed_tokens.weight":
            value *= shape[-1] ** -0.5
        tensors |= _as_released_fp8(name, value, config.weight_block_size) if fp8 else {name: value}
    return tensors


def _as_released_fp8(name: str, value: Tensor, block: tuple[int, int] | None) -> dict[str, Tensor]:
    if block is not None and is_released_as_fp8(name, value.shape):
        quantised, scale = quantise_blocks(value, block)
        return {name: quantised, scale_name(name): scale}
    keeps_fp32 = name.endswith("e_score_correction_bias")
    return {name: value if keeps_fp32 else value.to(torch.bfloat16)}
