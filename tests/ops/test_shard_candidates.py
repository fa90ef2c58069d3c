"""Candidates of shards and the positions chosen of them, against sorted lists."""

from __future__ import annotations

import pytest
import torch

from cptools.kernels.shard_candidates import choose_shard_candidates, chosen_positions, encode_candidates
from cptools.kernels.topk_select import INVALID, merge_orders
from cptools.layout import KVLayout


@pytest.mark.parametrize(("world_size", "interleave"), [(1, 1), (2, 1), (3, 4), (8, 2)])
def test_the_best_of_all_shards_are_the_best_of_the_sequence(world_size: int, interleave: int) -> None:
    """Field case D21: all of the best on one rank, spread, and ties across ranks."""
    layout, k = KVLayout(world_size, interleave, 8), 12
    generator = torch.Generator().manual_seed(3)
    scores = torch.randint(-3, 4, (4, 100), generator=generator).float()
    scores[0, layout.owner(torch.arange(100)) == world_size - 1] += 10
    scores[1], scores[2, 7], scores[2, 3] = -0.0, 0.0, torch.nan
    nominated = []
    for rank in range(world_size):
        held = layout.position(rank, torch.arange(layout.local_len(100, rank)))
        best = scores[:, held].sort(dim=1, descending=True, stable=True)
        local = torch.full((4, k), -1)
        values = torch.full((4, k), torch.nan)
        count = min(k, len(held))
        local[:, :count], values[:, :count] = best.indices[:, :count], best.values[:, :count]
        nominated.append(encode_candidates(local, values, layout=layout, rank=rank))
    got = chosen_positions(merge_orders(torch.cat(nominated, dim=1), k))
    for row in range(4):
        ranked = scores[row].nan_to_num(torch.inf)
        want = sorted(range(100), key=lambda t, ranked=ranked: (-float(ranked[t]), t))[:k]
        assert got[row].tolist() == sorted(want)


def test_what_lacks_is_last() -> None:
    layout = KVLayout(2)
    keys = encode_candidates(torch.tensor([[4, -1, 0], [-1, -1, -5]]), torch.zeros(2, 3), layout=layout, rank=1)
    assert keys[1].tolist() == [INVALID] * 3
    assert chosen_positions(keys).tolist() == [[1, 9, -1], [-1] * 3]
    assert chosen_positions(keys[:0]).shape == (0, 3)


def test_misfits_are_refused() -> None:
    keys = torch.zeros(2, 3, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"scores must be float32 \[2, 3\], got float32 \[2, 2\]"):
        encode_candidates(keys, torch.zeros(2, 2), layout=KVLayout(2), rank=0)
    with pytest.raises(ValueError, match=r"got float32 \[2, 3\]"):
        chosen_positions(torch.zeros(2, 3))
    assert choose_shard_candidates(keys).fallback_reason == "triton: tensors are on cpu"
