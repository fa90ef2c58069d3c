"""SwiGLU of rows that are grouped by expert, expert after expert, in plain torch: the specification."""

from __future__ import annotations

from torch import Tensor

from ..block_fp8 import BlockFP8
from ..row_tiles import in_tiles
from ..rowwise import linear, silu, swiglu


def dense_swiglu(x: Tensor, gate_up: Tensor | BlockFP8, down: Tensor | BlockFP8) -> Tensor:
    """x [T, D], gate_up [2 * I, D] with gate first, down [D, I] -> [T, D]."""
    if isinstance(gate_up, Tensor) and isinstance(down, Tensor):
        gate, up = gate_up.chunk(2)
        return swiglu(x, gate, up, down)
    inner = linear(x, gate_up)
    width = gate_up.shape[0] // 2
    inner = in_tiles(inner, width, lambda tile: silu(tile[:, :width]) * tile[:, width:], inner.dtype)
    return linear(inner, down)


def grouped_swiglu(x: Tensor, counts: Tensor, gate_up: Tensor | BlockFP8, down: Tensor | BlockFP8) -> Tensor:
    """Waits for the counts on the host."""
    sizes = counts.tolist()
    out = x.new_empty(x.shape[0], down.shape[1])
    start = 0
    for expert, size in enumerate(sizes):
        if size:
            rows = slice(start, start + size)
            out[rows] = dense_swiglu(x[rows], gate_up[expert], down[expert])
        start += size
    return out
