"""Weights of GLM-5.3: what the layers read, what a released checkpoint holds, and the ways from one to the other."""

from .layout import weight_bytes
from .load import load_weights
from .model_weights import (
    AttentionWeights,
    DenseFFNWeights,
    IndexerWeights,
    LayerWeights,
    ModelWeights,
    MoEWeights,
    MTPWeights,
    Weight,
)
from .progress import LoadProgress, progress_bar
from .random_source import RandomSource
from .random_tensors import random_tensors
from .random_weights import random_weights
from .released import expected_tensors, is_released_as_fp8, scale_name
from .save import save_checkpoint, save_sharded_checkpoint

__all__ = [
    "AttentionWeights",
    "DenseFFNWeights",
    "IndexerWeights",
    "LayerWeights",
    "LoadProgress",
    "MTPWeights",
    "MoEWeights",
    "ModelWeights",
    "RandomSource",
    "Weight",
    "expected_tensors",
    "is_released_as_fp8",
    "load_weights",
    "progress_bar",
    "random_tensors",
    "random_weights",
    "save_checkpoint",
    "save_sharded_checkpoint",
    "scale_name",
    "weight_bytes",
]
