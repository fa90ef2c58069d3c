"""Exact top-k with one total order: score descending, position ascending."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from .. import impl as implementations
from ..arguments import ANY, check_count, check_tensor, dense, dense_rows
from . import reference
from .reference import INVALID, decode_order, encode_order

__all__ = [
    "INVALID",
    "MAX_K",
    "choose_merge_orders",
    "choose_topk_select",
    "decode_order",
    "encode_order",
    "merge_orders",
    "topk_select",
]

MAX_K = 2048
"""Largest k of the Triton kernel."""
MAX_COLUMNS = 2**31 - 2**14
"""Longest row of the Triton kernel, which counts in int32."""


def _triton_obstacle(rows: Tensor, k: int) -> str | None:
    if rows.device.type == "cuda" and k > MAX_K:
        return f"k is {k}, more than {MAX_K}"
    if rows.device.type == "cuda" and rows.dim() == 2 and rows.shape[1] > MAX_COLUMNS:
        return f"rows of {rows.shape[1]} columns, more than {MAX_COLUMNS}"
    return implementations.triton_obstacle(rows.device)


def choose_topk_select(scores: Tensor, k: int, *, impl: str = "auto") -> implementations.Choice:
    """What `topk_select` would run for these inputs."""
    return implementations.choose("topk_select", impl, {"triton": _triton_obstacle(scores, k)})


def choose_merge_orders(keys: Tensor, k: int, *, impl: str = "auto") -> implementations.Choice:
    """What `merge_orders` would run for these inputs."""
    return implementations.choose("merge_orders", impl, {"triton": _triton_obstacle(keys, k)})


def topk_select(
    scores: Tensor,
    k: int,
    *,
    lengths: Tensor | None = None,
    sorted_by: Literal["score", "position", "none"] = "score",
    positions_dtype: torch.dtype = torch.int64,
    impl: str = "auto",
) -> tuple[Tensor, Tensor]:
    """Exact top-k of each row: scores [T, S] float32 -> (positions [T, k], scores [T, k] float32).

    Row t considers its first ``lengths[t]`` columns (int32 or int64, clamped to [0, S]; all of them by
    default). The set is that of score descending, position ascending, with -0.0 equal to 0.0 and NaN above everything;
    valid entries come first, the rest is position -1, score -inf. sorted_by: "score" gives the valid entries in that
    order, "position" by ascending position; "none" in any, which is faster and may differ from run to run.
    positions_dtype: int64 or int32.

    Local, on the current stream; with the Triton kernel no host sync, and allowed in CUDA-graph capture.
    """
    if sorted_by not in ("score", "position", "none"):
        raise ValueError(f"topk_select: sorted_by must be 'score', 'position' or 'none', got {sorted_by!r}")
    if positions_dtype not in (torch.int64, torch.int32):
        raise ValueError(f"topk_select: positions_dtype must be int64 or int32, got {positions_dtype}")
    reference.check_topk_select(scores, k, lengths)
    if choose_topk_select(scores, k, impl=impl).impl == "reference":
        positions, chosen = reference.topk_select(scores, k, lengths=lengths)
        if sorted_by == "position":
            order = torch.where(positions < 0, scores.shape[1], positions).argsort(dim=1, stable=True)
            positions, chosen = positions.gather(1, order), chosen.gather(1, order)
        return positions.to(positions_dtype), chosen
    from .triton import topk_select as kernel

    scores, lengths = dense_rows(scores), None if lengths is None else dense(lengths)
    selected: tuple[Tensor, Tensor] = kernel(scores, k, lengths, sorted_by, positions_dtype)
    return selected


def merge_orders(keys: Tensor, k: int, *, impl: str = "auto") -> Tensor:
    """The k largest of int64 keys [T, C], descending, padded with INVALID -> [T, k]. As `topk_select` runs."""
    check_tensor("merge_orders", "keys", keys, (torch.int64,), (ANY, ANY))
    check_count("merge_orders", "k", k, minimum=1)
    if choose_merge_orders(keys, k, impl=impl).impl == "reference":
        return reference.merge_orders(keys, k)
    from .triton import merge_orders as kernel

    merged: Tensor = kernel(dense_rows(keys), k)
    return merged
