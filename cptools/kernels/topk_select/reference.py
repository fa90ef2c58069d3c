"""Top-k by a total order: score descending, position ascending, -0.0 equal to 0.0, NaN above everything.

A (score, position) pair becomes one int64 whose natural order is that total order. All keys differ, so any correct
top-k names the same set in the same order, on every rank, split and implementation; and a key is all that ranks need to
exchange.
"""

from __future__ import annotations

import torch
from torch import Tensor

INVALID = torch.iinfo(torch.int64).min
"""Below every valid key: no candidate."""

_MAX_POSITION = 0xFFFFFFFF
_MAGNITUDE = 0x7FFFFFFF
_NAN_BITS = 0x7FC00000


def encode_order(scores: Tensor, positions: Tensor) -> Tensor:
    """float32 scores and integer positions (0 <= position < 2^32, broadcastable) -> int64 keys."""
    bits = (scores + 0.0).view(torch.int32)  # -0.0 + 0.0 is +0.0
    bits = torch.where(scores.isnan(), _NAN_BITS, bits)  # a NaN of either sign stays visible on top
    # Two's complement order of the bits: negative floats count downwards, so their magnitude is flipped.
    ordered = bits ^ ((bits >> 31) & _MAGNITUDE)
    return (ordered.to(torch.int64) << 32) | (_MAX_POSITION - positions.to(torch.int64))


def decode_order(keys: Tensor) -> tuple[Tensor, Tensor]:
    """int64 keys -> (float32 scores, int64 positions); INVALID gives (-inf, -1)."""
    valid = keys != INVALID
    ordered = (keys >> 32).to(torch.int32)
    scores = (ordered ^ ((ordered >> 31) & _MAGNITUDE)).view(torch.float32)
    positions = _MAX_POSITION - (keys & _MAX_POSITION)
    return torch.where(valid, scores, -torch.inf), torch.where(valid, positions, -1)


def merge_orders(keys: Tensor, k: int) -> Tensor:
    """The k largest of int64 keys [T, C], descending, padded with INVALID -> [T, k]."""
    if keys.shape[1] < k:
        keys = torch.nn.functional.pad(keys, (0, k - keys.shape[1]), value=INVALID)
    return torch.topk(keys, k, dim=1, sorted=True).values


def check_topk_select(scores: Tensor, k: int, lengths: Tensor | None) -> None:
    """ValueError unless these are arguments of `topk_select`."""
    if scores.dim() != 2 or scores.dtype != torch.float32 or k < 1:
        raise ValueError(f"topk_select: scores must be float32 [T, S] and k >= 1, got {tuple(scores.shape)}, k={k}")
    if lengths is not None and lengths.shape != scores.shape[:1]:
        raise ValueError(f"topk_select: lengths must be [{scores.shape[0]}], got {tuple(lengths.shape)}")


def topk_select(scores: Tensor, k: int, *, lengths: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Exact top-k of each row: scores [T, S] float32 -> (positions [T, k] int64, scores [T, k] float32).

    Row t considers its first ``lengths[t]`` columns (clamped to [0, S]; all of them by default). Valid entries come
    first, in order; the rest is position -1, score -inf.
    """
    check_topk_select(scores, k, lengths)
    columns = torch.arange(scores.shape[1], device=scores.device)
    keys = encode_order(scores, columns)
    if lengths is not None:
        keys = keys.masked_fill(columns >= lengths.unsqueeze(1), INVALID)
    chosen_scores, positions = decode_order(merge_orders(keys, k))
    return positions, chosen_scores
