"""Rows in FP8 times one block-FP8 matrix: the grouped kernel with one group, and split sums where rows are few."""

from __future__ import annotations

import torch
from torch import Tensor

from ..grouped_swiglu.product_gluon import product
from .triton import add_parts

_TILE_ROWS = 128
_TILE_OUTPUTS = 256
_STEP_US = 1.0  # 32 KB of the matrix for each SM
_JOB_STEPS = 2  # what beginning and ending a job costs
_ADD_US = 2.0
_ADD_BYTES_PER_US = 2e6
_MAX_PARTS = 32


def parts_of(rows: int, outputs: int, steps: int, programs: int) -> int:
    """Into how many parts of its depth a product is split: enough to occupy all SMs, if adding them costs less."""
    jobs = -(-rows // _TILE_ROWS) * -(-outputs // _TILE_OUTPUTS)

    def microseconds(parts: int) -> float:
        moved = 8 * parts * rows * outputs if parts > 1 else 0
        adding = _ADD_US + moved / _ADD_BYTES_PER_US if parts > 1 else 0.0
        return -(-jobs * parts // programs) * (-(-steps // parts) + _JOB_STEPS) * _STEP_US + adding

    shares = {-(-steps // parts) for parts in range(1, min(steps, _MAX_PARTS) + 1)}
    return min((-(-steps // share) for share in shares), key=lambda parts: (microseconds(parts), parts))


@torch.library.custom_op("cptools::block_fp8_linear", mutates_args=())
def linear(values: Tensor, scales: Tensor, weight: Tensor, weight_scales: Tensor, out_dtype: torch.dtype) -> Tensor:
    """values [T, D] with scales [D / 128, T] times weight [O, D] transposed -> [T, O]. No sync."""
    rows, depth = values.shape
    out = values.new_empty(rows, weight.shape[0], dtype=out_dtype)
    if out.numel():
        programs = torch.cuda.get_device_properties(values.device).multi_processor_count
        parts = parts_of(rows, out.shape[1], depth // 128, programs)
        if parts == 1:
            product(values, scales, weight, weight_scales, None, out)
        else:
            sums = values.new_empty(parts, *out.shape, dtype=torch.float32)
            product(values, scales, weight, weight_scales, None, sums)
            add_parts(sums, out)
    return out


@linear.register_fake
def _(values: Tensor, scales: Tensor, weight: Tensor, weight_scales: Tensor, out_dtype: torch.dtype) -> Tensor:
    return values.new_empty(values.shape[0], weight.shape[0], dtype=out_dtype)
