"""The merge of attention states, as in FlashAttention's split keys and FlashInfer's recursive attention."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from cptools.kernels.arguments import ANY, FLOATS_AND_DOUBLE, check_tensor


def merge_weights(lses: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Shares of P parts in their merge: w_p = exp(lse_p - max) / sum_q exp(lse_q - max).

    Weights are taken relative to the largest lse, never to the merged one: near lse = 1e4 the merged lse is rounded
    to 1e-3, and so would be every weight.

    Args:
        lses: P tensors [T, H], fp32, natural log; -inf marks an empty part.

    Returns:
        weights [P, T, H] fp32: sum 1, exactly 1 where only one part is not empty, 0 where all are empty.
        lse [T, H] fp32: of the union, -inf where all parts are empty.
        NaN or +inf in a part makes the weights and the lse of that (token, head) NaN.
    """
    stacked = torch.stack(tuple(lses))
    peak = stacked.amax(0)
    all_empty = torch.isneginf(peak)
    weights = torch.exp(stacked - torch.where(all_empty, 0.0, peak))
    total = weights[0]
    for weight in weights[1:]:
        total = total + weight
    total = torch.where(all_empty, 1.0, total)
    return weights / total, peak + torch.log(total)


def check_lses(lses: Sequence[Tensor]) -> None:
    """ValueError unless there are P >= 1 tensors [T, H] of one shape in fp32 on one device."""
    if not len(lses):
        raise ValueError("merge_weights: there must be at least one part, got 0")
    shape, device = (lses[0].shape if lses[0].dim() == 2 else (ANY, ANY)), lses[0].device
    for part, lse in enumerate(lses):
        _check_part("merge_weights", f"lses[{part}]", lse, (torch.float32,), shape, device)


def check_parts(outs: Sequence[Tensor] | Tensor, lses: Sequence[Tensor] | Tensor) -> None:
    """ValueError unless there are P >= 1 parts of one shape on one device, each with its lse in fp32."""
    op, floats, single = "merge_states", FLOATS_AND_DOUBLE, (torch.float32,)
    if isinstance(outs, Tensor):
        check_tensor(op, "outs", outs, floats, (ANY, ANY, ANY, ANY))
    parts = len(outs)
    if isinstance(lses, Tensor):
        check_tensor(op, "lses", lses, single, (ANY, ANY, ANY))
    if parts < 1 or len(lses) != parts:
        raise ValueError(f"{op}: there must be at least one part, and an lse for each, got {parts} and {len(lses)}")
    if isinstance(outs, Tensor):
        shape, device = outs.shape[1:], outs.device
    else:
        shape, device = outs[0].shape, outs[0].device
        if len(shape) != 3:
            raise ValueError(f"{op}: outs must be [T, H, D], got {list(shape)}")
        for part, out in enumerate(outs):
            if out.shape != shape or out.dtype not in floats or out.device != device:
                _check_part(op, f"outs[{part}]", out, floats, shape, device)
    rows = shape[:2]
    if isinstance(lses, Tensor):
        _check_part(op, "lses", lses, single, (parts, *rows), device)
    else:
        for part, lse in enumerate(lses):
            if lse.shape != rows or lse.dtype not in single or lse.device != device:
                _check_part(op, f"lses[{part}]", lse, single, rows, device)


def _check_part(
    op: str, name: str, x: Tensor, dtypes: tuple[torch.dtype, ...], shape: tuple[int, ...], device: torch.device
) -> None:
    check_tensor(op, name, x, dtypes, shape)
    if x.device != device:
        raise ValueError(f"{op}: tensors must be on one device, got {name} on {x.device}, others on {device}")


def merge_states(outs: Sequence[Tensor], lses: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Attention over the union of P disjoint parts of the keys: the specification of the merge.

    A part with lse -inf contributes nothing, whatever its out holds (NaN too); a NaN anywhere else stays visible, and
    +inf in an lse gives NaN. Parts are added in list order.

    Args:
        outs: P tensors [T, H, D] of any float dtype; T and H may be 0.
        lses: P tensors [T, H], fp32, natural log of the sum of exp(scaled scores).

    Returns:
        out [T, H, D] in fp32 (fp64 if a part is), 0 where all parts are empty; lse [T, H] fp32, -inf there.
    """
    weights, lse = merge_weights(lses)
    dtype = torch.float64 if any(out.dtype == torch.float64 for out in outs) else torch.float32
    # -0.0 is the neutral element of the addition: x + 0.0 would turn an x of -0.0 into 0.0.
    merged = torch.full(outs[0].shape, -0.0, dtype=dtype, device=outs[0].device)
    for out, part_lse, weight in zip(outs, lses, weights, strict=True):
        term = out.to(dtype) * weight.unsqueeze(-1)
        merged = merged + torch.where(torch.isneginf(part_lse).unsqueeze(-1), -0.0, term)
    return torch.where(torch.isneginf(lse).unsqueeze(-1), 0.0, merged), lse
