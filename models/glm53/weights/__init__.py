"""Weights of GLM-5.3: what the layers read, what a released checkpoint holds, and the ways from one to the other."""

from .load import load_weights
from .model_weights import (
    AttentionWeights,
    DenseFFNWeights,
    IndexerWeights,
    LayerWeights,
    ModelWeights,
    MoEWeights,
    MTPWeights,
)
from .random_tensors import random_tensors
from .released import expected_tensors, is_released_as_fp8, scale_name
from .save import save_checkpoint

__all__ = [
    "AttentionWeights",
    "DenseFFNWeights",
    "IndexerWeights",
    "LayerWeights",
    "MTPWeights",
    "MoEWeights",
    "ModelWeights",
    "expected_tensors",
    "is_released_as_fp8",
    "load_weights",
    "random_tensors",
    "save_checkpoint",
    "scale_name",
]
