"""What shards nominate for a selection over the whole sequence, and what was chosen of it."""

from __future__ import annotations

import torch
from torch import Tensor

from ...layout import KVLayout
from ..arguments import ANY, check_count, check_integers, check_one_device, check_tensor
from ..impl import Choice, choose, triton_obstacle
from . import reference

__all__ = ["choose_shard_candidates", "chosen_positions", "encode_candidates"]

_MAX_K = 4096  # a row is sorted by one program


def encode_candidates(positions: Tensor, scores: Tensor, *, layout: KVLayout, rank: int, impl: str = "auto") -> Tensor:
    """A shard's best keys as orders of `cptools.kernels.topk_select` that ranks can compare: int64 [T, k].

    positions int64 [T, k]: indices among the tokens that ``rank`` holds, negative for none; scores float32 [T, k].
    Orders carry positions in the whole sequence, below 2^32. Local, no sync, may be captured in a CUDA graph.
    """
    check_integers("encode_candidates", "positions", positions, (ANY, ANY))
    check_tensor("encode_candidates", "scores", scores, (torch.float32,), tuple(positions.shape))
    check_one_device("encode_candidates", positions=positions, scores=scores)
    check_count("encode_candidates", "rank", rank)
    if rank >= layout.world_size:
        raise ValueError(f"encode_candidates: rank={rank} of world_size={layout.world_size}")
    if choose_shard_candidates(positions, impl=impl).impl == "reference":
        return reference.encode_candidates(positions, scores, layout=layout, rank=rank)
    from . import triton

    keys: Tensor = triton.encode_candidates(
        positions.contiguous(), scores.contiguous(), layout.world_size, layout.interleave, rank
    )
    return keys


def chosen_positions(keys: Tensor, *, impl: str = "auto") -> Tensor:
    """Positions of orders int64 [T, k], such as `merge_orders` chose: ascending, then -1. Local as above."""
    check_tensor("chosen_positions", "keys", keys, (torch.int64,), (ANY, ANY))
    if choose_shard_candidates(keys, impl=impl).impl == "reference":
        return reference.chosen_positions(keys)
    from . import triton

    positions: Tensor = triton.chosen_positions(keys.contiguous())
    return positions


def choose_shard_candidates(rows: Tensor, *, impl: str = "auto") -> Choice:
    """What either op would run for [T, k] rows, and why nothing faster."""
    obstacle = triton_obstacle(rows.device)
    if obstacle is None and rows.shape[-1] > _MAX_K:
        obstacle = f"rows of {rows.shape[-1]} candidates, more than {_MAX_K}"
    return choose("shard_candidates", impl, {"triton": obstacle})
