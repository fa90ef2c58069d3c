"""Which experts a token goes to, the order that groups (token, expert) pairs by expert, and back: in plain torch."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..rowwise import sum_columns


class Groups(NamedTuple):
    """T x k (token, expert) pairs, numbered token * k + j, brought into the order of their experts.

    order: int64 [T * k], the pair of each row of the grouped order; pairs of one expert ascend. slots: int64 [T, k],
    the row of each pair, the inverse of order. counts: int32 [experts], rows of each expert.
    """

    order: Tensor
    slots: Tensor
    counts: Tensor


def route(logits: Tensor, bias: Tensor, *, k: int, normalise: bool, scaling: float) -> tuple[Tensor, Tensor]:
    p = 1.0 / (1.0 + torch.exp(-logits))
    # A stable sort, so that equal scores choose the lower expert everywhere.
    order = torch.sort(p + bias, dim=1, descending=True, stable=True).indices
    experts = torch.sort(order[:, :k], dim=1).values
    gates = p.gather(1, experts)
    if normalise:
        gates = gates / (sum_columns(gates) + 1e-20).unsqueeze(1)
    return experts, gates * scaling


def group_by_expert(experts: Tensor, number: int) -> Groups:
    flat = experts.flatten().long()
    order = torch.argsort(flat, stable=True)
    slots = torch.empty_like(order)
    slots[order] = torch.arange(len(order), device=order.device)
    counts = torch.zeros(number, dtype=torch.int32, device=flat.device)
    counts.index_add_(0, flat, torch.ones_like(flat, dtype=torch.int32))
    return Groups(order, slots.view(experts.shape), counts)


def combine(outputs: Tensor, slots: Tensor, gates: Tensor) -> Tensor:
    """In the dtype of the outputs, which the gates are rounded to first."""
    return sum_columns(outputs[slots] * gates.to(outputs.dtype).unsqueeze(2))
