"""Indexer queries, from the raw projection to what scores keys: rotated, and in FP8 with the scales in the weights."""

from __future__ import annotations

import torch
from torch import Tensor

from ...formats import quantize_fp8
from ..rowwise.reference import RopeAngles, rope_interleaved


def rotated_query(query: Tensor, angles: RopeAngles) -> Tensor:
    """query [T, H, D] with its first pairs rotated -> float32."""
    width = 2 * angles.cos.shape[1]
    return torch.cat([rope_interleaved(query[..., :width], angles), query[..., width:]], dim=-1).float()


def fp8_query(query: Tensor, weights: Tensor, angles: RopeAngles | None) -> tuple[Tensor, Tensor]:
    """See `cptools.kernels.index_query`."""
    values, scales = quantize_fp8(query if angles is None else rotated_query(query, angles))
    return values, weights.float() * scales.squeeze(2)
