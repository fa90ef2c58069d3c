"""Row-wise dense operations: linear, norms, rotary embedding, SwiGLU.

The reference computes in fixed row tiles, so that a row's bits depend on that row alone (batch invariance). On other
devices the same functions run torch's own kernels on whole tensors.
"""

from ..row_tiles import ROW_TILE, WIDTH_MULTIPLE, pad_widths
from .reference import (
    RopeAngles,
    head_linear,
    layer_norm,
    linear,
    rms_norm,
    rope_interleaved,
    silu,
    sum_columns,
    swiglu,
)

__all__ = [
    "ROW_TILE",
    "WIDTH_MULTIPLE",
    "RopeAngles",
    "head_linear",
    "layer_norm",
    "linear",
    "pad_widths",
    "rms_norm",
    "rope_interleaved",
    "silu",
    "sum_columns",
    "swiglu",
]
