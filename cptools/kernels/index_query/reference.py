"""Indexer queries, from the raw projection to what scores keys: rotated, and in FP8 with the scales in the weights."""

from __future__ import annotations

import torch
from torch import Tensor

from ...formats import quantize_fp8
from ..arguments import ANY, FLOATS_AND_DOUBLE, check_one_device, check_tensor
from ..rowwise.reference import RopeAngles, check_angles, rope_interleaved


def rotated_query(query: Tensor, angles: RopeAngles) -> Tensor:
    """query [T, H, D] with its first pairs rotated -> float32. ValueError where the angles do not fit."""
    check_tensor("rotated_query", "query", query, FLOATS_AND_DOUBLE, (ANY, ANY, ANY))
    check_angles("rotated_query", angles, (query.shape[0], ANY))
    check_one_device("rotated_query", query=query, cos=angles.cos, sin=angles.sin)
    width = 2 * angles.cos.shape[1]
    if width > query.shape[2]:
        raise ValueError(f"rotated_query: {angles.cos.shape[1]} pairs to rotate in a query {list(query.shape)}")
    return torch.cat([rope_interleaved(query[..., :width], angles), query[..., width:]], dim=-1).float()


def fp8_query(query: Tensor, weights: Tensor, angles: RopeAngles | None) -> tuple[Tensor, Tensor]:
    """See `cptools.kernels.index_query`."""
    values, scales = quantize_fp8(query if angles is None else rotated_query(query, angles))
    return values, weights.float() * scales.squeeze(2)
