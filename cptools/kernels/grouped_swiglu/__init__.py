"""SwiGLU feed-forward: of one expert over all rows, and of many experts over rows grouped by expert."""

from __future__ import annotations

import torch
from torch import Tensor

from cptools.kernels.impl import Choice, choose, triton_obstacle

from ..arguments import is_aligned
from ..block_fp8 import BLOCK, BlockFP8
from . import reference

__all__ = ["choose_dense_swiglu", "choose_grouped_swiglu", "dense_swiglu", "grouped_swiglu"]

Weight = Tensor | BlockFP8

_FLOATS = (torch.bfloat16, torch.float16, torch.float32)


def dense_swiglu(x: Tensor, gate_up: Weight, down: Weight, *, impl: str = "auto") -> Tensor:
    """(silu(x gate^T) * (x up^T)) down^T for x [T, D], gate_up [2 * I, D] with gate first, down [D, I] -> [T, D].

    In x's dtype. Local, no sync, may be captured in a CUDA graph. impl: "auto" | "reference" | "gluon", the last for
    `BlockFP8`; `choose_dense_swiglu` says what would run.
    """
    _check(x, gate_up, down, stack=0)
    chosen = choose_dense_swiglu(x, gate_up, down, impl=impl).impl
    if chosen == "gluon" and isinstance(gate_up, BlockFP8) and isinstance(down, BlockFP8):
        from . import gluon

        weights = (gate_up.values, gate_up.scales, down.values, down.scales)
        out: Tensor = gluon.dense_swiglu_fp8(x, *weights)
        return out
    return reference.dense_swiglu(x, gate_up, down)


def grouped_swiglu(
    x: Tensor, counts: Tensor, gate_up: Weight, down: Weight, *, source: Tensor | None = None, impl: str = "auto"
) -> Tensor:
    """`dense_swiglu` of each expert over its own rows, which stand together: those of expert 0 first. Local.

    The kernel does not sync and may be captured in a CUDA graph; the counts may change between replays. The reference
    waits for the counts on the host.

    Args:
        x: [T, D]. Without ``source`` its rows are the grouped ones.
        source: integers [P], the row of x that each grouped row is, e.g. ``groups.order // k``; else P = T.
        counts: int32 or int64 [E], rows of each expert, on x's device; 0 <= counts, sum(counts) <= P. Rows beyond the
            sum belong to nobody: what they hold does not matter, and what stands in their place in the result is not
            specified.
        gate_up: [E, 2 * I, D], gate first. down: [E, D, I]. Each a tensor of x's dtype or `BlockFP8`.
        impl: "auto" | "reference" | "gluon"; `choose_grouped_swiglu` says what would run.

    Returns:
        [P, D] in x's dtype, in grouped order.
    """
    _check(x, gate_up, down, stack=1)
    experts = gate_up.shape[0]
    if list(counts.shape) != [experts]:
        raise ValueError(f"grouped_swiglu: counts must be [{experts}], got {list(counts.shape)}")
    if source is not None and source.dim() != 1:
        raise ValueError(f"grouped_swiglu: source must be [P], got {list(source.shape)}")
    if choose_grouped_swiglu(x, gate_up, down, impl=impl).impl == "gluon":
        from . import gluon

        if isinstance(gate_up, BlockFP8) and isinstance(down, BlockFP8):
            weights = (gate_up.values, gate_up.scales, down.values, down.scales)
            fp8: Tensor = gluon.grouped_swiglu_fp8(x, source, counts, *weights)
            return fp8
        bf16: Tensor = gluon.grouped_swiglu_bf16(x, source, counts, gate_up, down)
        return bf16
    return reference.grouped_swiglu(x if source is None else x[source], counts, gate_up, down)


def choose_dense_swiglu(x: Tensor, gate_up: Weight, down: Weight, *, impl: str = "auto") -> Choice:
    """What `dense_swiglu` would run for these inputs, and why nothing faster."""
    obstacle = _obstacle(x, gate_up, down)
    if obstacle is None and isinstance(gate_up, Tensor):
        obstacle = "the matrices are not block-FP8: torch's own products serve them"
    return choose("dense_swiglu", impl, {"gluon": obstacle})


def choose_grouped_swiglu(x: Tensor, gate_up: Weight, down: Weight, *, impl: str = "auto") -> Choice:
    """What `grouped_swiglu` would run for these inputs, and why nothing faster."""
    return choose("grouped_swiglu", impl, {"gluon": _obstacle(x, gate_up, down)})


def _obstacle(x: Tensor, gate_up: Weight, down: Weight) -> str | None:
    if obstacle := triton_obstacle(x.device):
        return obstacle
    experts, width, columns = gate_up.shape[0] if len(gate_up.shape) == 3 else 1, down.shape[-1], x.shape[1]
    step = BLOCK
    tensors = [x]
    if isinstance(gate_up, BlockFP8) and isinstance(down, BlockFP8):
        if x.dtype not in _FLOATS:
            return f"rows are {x.dtype}, not BF16, FP16 or FP32"
        tensors += [gate_up.values, gate_up.scales, down.values, down.scales]
    elif isinstance(gate_up, Tensor) and isinstance(down, Tensor):
        if {x.dtype, gate_up.dtype, down.dtype} != {torch.bfloat16}:
            return f"rows and matrices are {x.dtype}, {gate_up.dtype}, {down.dtype}, not all BF16"
        step = BLOCK // 2
        tensors += [gate_up, down]
    else:
        return "one of the matrices is block-FP8, the other is not"
    if columns % step or width % BLOCK:
        return f"rows are {columns} wide, not a multiple of {step}, or experts {width}, not one of {BLOCK}"
    if experts > 1024:
        return f"{experts} experts are more than 1024"
    if any(not t.is_contiguous() or not is_aligned(t, 16) for t in tensors):
        return "rows or matrices are strided or not aligned to 16 bytes"
    return None


def _check(x: Tensor, gate_up: Weight, down: Weight, *, stack: int) -> None:
    fits = len(gate_up.shape) == len(down.shape) == 2 + stack and x.dim() == 2
    fits = fits and gate_up.shape[:stack] == down.shape[:stack]
    if not fits or list(gate_up.shape[stack:]) != [2 * down.shape[-1], x.shape[1]] or down.shape[-2] != x.shape[1]:
        raise ValueError(
            f"swiglu: x {list(x.shape)}, gate_up {list(gate_up.shape)}, down {list(down.shape)} do not fit together"
        )
