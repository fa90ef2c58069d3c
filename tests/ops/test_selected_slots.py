"""Slots of selected positions, against `slot_mapping`, which maps the tokens one by one."""

from __future__ import annotations

import pytest
import torch

from cptools import RoundRobinKVShard
from cptools.kernels.selected_slots import choose_selected_slots, selected_slots


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize(("world_size", "interleave", "page_size"), [(1, 1, 64), (2, 1, 16), (3, 4, 8), (8, 16, 16)])
def test_slots_of_every_rank_are_those_of_the_mapping(world_size, interleave, page_size, dtype) -> None:
    generator = torch.Generator().manual_seed(world_size)
    requests, blocks = 3, 5
    tables = torch.randperm(requests * blocks, generator=generator).view(requests, blocks)
    span = blocks * page_size * world_size
    request_ids = torch.tensor([2, 0, 0, 1, 2])
    positions = torch.randint(0, span, (5, 37), generator=generator)
    positions[torch.rand(5, 37, generator=generator) < 0.2] = -1
    held = torch.zeros(5, 37, dtype=torch.int64)
    for rank in range(world_size):
        shard = RoundRobinKVShard(world_size=world_size, rank=rank, interleave=interleave, page_size=page_size)
        want = shard.slot_mapping(positions.flatten(), request_ids.repeat_interleave(37), tables)
        out = torch.full((5, 37), 12345, dtype=dtype)
        selected_slots(out, positions, request_ids, tables, layout=shard.layout, rank=rank)
        assert torch.equal(out.long(), want.view(5, 37))
        held += out >= 0
    assert torch.equal(held, (positions >= 0).long())


def test_what_no_table_has_becomes_a_hole() -> None:
    layout = RoundRobinKVShard(world_size=1, rank=0, page_size=4).layout
    tables = torch.tensor([[7, -1]])
    out = torch.empty(3, 3, dtype=torch.int32)
    positions = torch.tensor([[3, 4, 8], [0, 1, 2], [0, 1, 2]])
    selected_slots(out, positions, torch.tensor([0, 1, -1]), tables, layout=layout, rank=0)
    assert out.tolist() == [[31, -1, -1], [-1] * 3, [-1] * 3]
    selected_slots(out, positions, torch.tensor([0, 0, 0]), tables[:, :0], layout=layout, rank=0)
    assert (out == -1).all()


def test_misfits_are_refused() -> None:
    layout = RoundRobinKVShard(world_size=1, rank=0).layout
    positions, ids, tables = torch.zeros(2, 3, dtype=torch.int64), torch.zeros(2, dtype=torch.int64), torch.zeros(1, 1)
    with pytest.raises(ValueError, match=r"out must be .* \[2, 3\], got int32 \[2, 2\]"):
        selected_slots(torch.empty(2, 2, dtype=torch.int32), positions, ids, tables.long(), layout=layout, rank=0)
    with pytest.raises(ValueError, match=r"out must be int64 or int32 \[2, 3\], got float32 \[2, 3\]"):
        selected_slots(torch.empty(2, 3), positions, ids, tables.long(), layout=layout, rank=0)
    choice = choose_selected_slots(positions, tables)
    assert choice.impl == "reference"
    assert choice.fallback_reason == "triton: tensors are on cpu"
