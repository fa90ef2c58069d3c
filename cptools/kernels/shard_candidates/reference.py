"""Between the selections of shards and that of the whole sequence."""

from __future__ import annotations

import torch
from torch import Tensor

from ...layout import KVLayout
from ..topk_select import INVALID, decode_order, encode_order


def encode_candidates(positions: Tensor, scores: Tensor, *, layout: KVLayout, rank: int) -> Tensor:
    order = encode_order(scores, layout.position(rank, positions.clamp(min=0)))
    return order.masked_fill_(positions < 0, INVALID)


def chosen_positions(keys: Tensor) -> Tensor:
    _, positions = decode_order(keys)
    last = torch.iinfo(torch.int64).max
    ordered = torch.sort(torch.where(positions < 0, last, positions), dim=1).values
    return torch.where(ordered == last, -1, ordered)
