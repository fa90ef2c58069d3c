"""Merging attention over disjoint parts of the keys by their log-sum-exp."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from cptools.kernels.impl import Choice, choose, triton_obstacle
from cptools.kernels.lse_merge import reference

__all__ = ["choose_merge_states", "merge_states", "merge_weights"]

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def merge_states(
    outs: Sequence[Tensor] | Tensor,
    lses: Sequence[Tensor] | Tensor,
    *,
    out_dtype: torch.dtype | None = None,
    impl: str = "auto",
) -> tuple[Tensor, Tensor]:
    """Attention over the union of P >= 1 disjoint parts of the keys, as in FlashAttention's split keys.

    A part with lse -inf contributes nothing, whatever its out holds (NaN too); a NaN anywhere else stays visible, and
    +inf in an lse gives NaN. Parts are added in order, in fp32 (fp64 if a part is). Local, on the current stream, no
    sync, may be captured in a CUDA graph.

    Args:
        outs: P tensors [T, H, D] of any float dtype, or one [P, T, H, D] of any strides; T and H may be 0.
        lses: P tensors [T, H] fp32, or one [P, T, H]; natural log of the sum of exp(scaled scores).
        out_dtype: of the result, rounded once; by default fp32 (fp64 if a part is).
        impl: "auto" | "reference" | "triton"; `choose_merge_states` says what would run.

    Returns:
        out [T, H, D], 0 where all parts are empty; lse [T, H] fp32, -inf there.

    Raises:
        ValueError: no part, shapes that differ, an lse that is not fp32, or more than one device.
    """
    reference.check_parts(outs, lses)
    if choose_merge_states(outs, out_dtype=out_dtype, impl=impl).impl == "triton":
        from cptools.kernels.lse_merge.triton import merge

        return merge(outs, lses, out_dtype or torch.float32)
    out, lse = reference.merge_states(list(outs), list(lses))
    return out if out_dtype is None else out.to(out_dtype), lse


def merge_weights(lses: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Shares of P parts in their merge, and the lse of the union: weights [P, T, H], lse [T, H], fp32. Local, no sync.

    Weights sum to 1, and are 0 where all parts are empty; see `cptools.kernels.lse_merge.reference`. Raises ValueError
    where there is no part, or parts differ in shape or device or are not fp32.
    """
    reference.check_lses(lses)
    return reference.merge_weights(lses)


def choose_merge_states(
    outs: Sequence[Tensor] | Tensor, *, out_dtype: torch.dtype | None = None, impl: str = "auto"
) -> Choice:
    """What `merge_states` would run for these parts, and why nothing faster."""
    return choose("merge_states", impl, {"triton": _obstacle(outs, out_dtype)})


def _obstacle(outs: Sequence[Tensor] | Tensor, out_dtype: torch.dtype | None) -> str | None:
    if not len(outs):
        return "there are no parts"
    for dtype in [*({outs.dtype} if isinstance(outs, Tensor) else {out.dtype for out in outs}), out_dtype]:
        if dtype is not None and dtype not in _DTYPES:
            return f"dtype {dtype} is not one of float32, bfloat16, float16"
    return triton_obstacle(outs.device if isinstance(outs, Tensor) else outs[0].device)
