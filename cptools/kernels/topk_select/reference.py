"""Top-k by a total order: score descending, position ascending, -0.0 equal to 0.0, NaN above everything.

A (score, position) pair becomes one int64 whose natural order is that total order. All keys differ, so any correct
top-k names the same set in the same order, on every rank, split and implementation; and a key is all that ranks need to
exchange.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..arguments import ANY, INTEGERS, check_count, check_integers, check_one_device, check_tensor

INVALID = torch.iinfo(torch.int64).min
"""Below every valid key: no candidate."""

_MAX_POSITION = 0xFFFFFFFF
_MAGNITUDE = 0x7FFFFFFF
_NAN_BITS = 0x7FC00000


def encode_order(scores: Tensor, positions: Tensor) -> Tensor:
    """float32 scores and integer positions (0 <= position < 2^32, broadcastable) -> int64 keys."""
    fits = positions.shape == scores.shape or positions.shape == scores.shape[-1:]
    if scores.dtype != torch.float32 or positions.dtype not in INTEGERS or not (fits or _broadcast(scores, positions)):
        raise ValueError(
            f"encode_order: want float32 scores and int64 or int32 positions that fit, got {scores.dtype} "
            f"{tuple(scores.shape)} and {positions.dtype} {tuple(positions.shape)}"
        )
    check_one_device("encode_order", scores=scores, positions=positions)
    bits = (scores + 0.0).view(torch.int32)  # -0.0 + 0.0 is +0.0
    bits = torch.where(scores.isnan(), _NAN_BITS, bits)  # a NaN of either sign stays visible on top
    # Two's complement order of the bits: negative floats count downwards, so their magnitude is flipped.
    ordered = bits ^ ((bits >> 31) & _MAGNITUDE)
    return (ordered.to(torch.int64) << 32) | (_MAX_POSITION - positions.to(torch.int64))


def _broadcast(a: Tensor, b: Tensor) -> bool:
    pairs = zip(reversed(a.shape), reversed(b.shape), strict=False)
    return all(x == y or 1 in (x, y) for x, y in pairs)


def decode_order(keys: Tensor) -> tuple[Tensor, Tensor]:
    """int64 keys -> (float32 scores, int64 positions); INVALID gives (-inf, -1)."""
    if keys.dtype != torch.int64:
        raise ValueError(f"decode_order: keys must be int64, got {keys.dtype} {tuple(keys.shape)}")
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
    check_tensor("topk_select", "scores", scores, (torch.float32,), (ANY, ANY))
    check_count("topk_select", "k", k, minimum=1)
    if lengths is not None:
        check_integers("topk_select", "lengths", lengths, (scores.shape[0],))
        check_one_device("topk_select", scores=scores, lengths=lengths)


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
