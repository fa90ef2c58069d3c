"""Heads, sums and shared rows over ranks; replicas that step together."""

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist

from cptools import LoadBalancedCPShard, ParallelConfig, ParallelGroups
from cptools.lockstep import Lockstep
from cptools.shared_rows import SharedRows
from cptools.tensor_parallel import TensorParallel
from tests.ranks.collective_counter import CollectiveCounter
from tests.ranks.harness import run_ranks

ROWS = (0, 1, 2, 3, 67)


def sum_and_gather(rank: int, world_size: int) -> list[torch.Tensor]:
    tp = TensorParallel(group=dist.group.WORLD)
    sums = []
    for rows in ROWS:
        for dtype in (torch.float32, torch.bfloat16, torch.float64):
            parts = torch.randn(world_size, rows, 5, generator=torch.Generator().manual_seed(rows)).to(dtype)
            got = tp.sum(parts[rank])
            wide = parts if dtype.itemsize >= 4 else parts.float()
            want = wide[0].clone()
            for part in wide[1:]:
                want += part
            assert torch.equal(got, want.to(dtype))
            sums.append(got)
        heads = torch.arange(rows * world_size * 2 * 3).view(rows, world_size * 2, 3)
        with CollectiveCounter() as seen:
            everyone = tp.gather_heads(tp.own_heads(heads))
        assert torch.equal(everyone, heads)
        assert sum(seen.counts.values()) == (world_size > 1 and rows > 0)
    return sums


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_sums_have_the_bits_of_the_rank_order_on_all_ranks(world_size: int) -> None:
    first, *others = run_ranks(sum_and_gather, world_size)
    assert all(torch.equal(a, b) for other in others for a, b in zip(first, other, strict=True))


def share_and_collect(rank: int, world_size: int) -> None:
    shared = SharedRows(group=dist.group.WORLD)
    for rows in ROWS:
        x = torch.arange(rows * 2).view(rows, 2)
        own = shared.share(x)
        assert own.shape[0] == shared.counts(rows)[rank]
        assert torch.equal(shared.collect(own, rows), x)
        if rows:
            with pytest.raises(ValueError, match=f"rank {rank} of {world_size} shares"):
                shared.collect(x.repeat(2, 1), rows)


@pytest.mark.parametrize("world_size", [1, 3])
def test_shared_rows_come_back(world_size: int) -> None:
    run_ranks(share_and_collect, world_size)


def test_modules_without_a_group_refuse_collectives() -> None:
    tp, shared = TensorParallel(world_size=2, rank=1), SharedRows(world_size=2, rank=1)
    assert tp.own_heads(torch.arange(8).view(1, 4, 2)).tolist() == [[[4, 5], [6, 7]]]
    for collective in (lambda: tp.sum(torch.zeros(1, 2)), lambda: tp.gather_heads(torch.zeros(1, 2, 3))):
        with pytest.raises(ValueError, match="world_size=2 ranks needs group="):
            collective()
    with pytest.raises(ValueError, match="world_size=2 ranks needs group="):
        shared.collect(torch.zeros(1, 2), 2)
    with pytest.raises(ValueError, match=r"\(1, 3, 2\) has no heads for 2 ranks alike"):
        tp.own_heads(torch.zeros(1, 3, 2))


def step_together(rank: int, world_size: int) -> list[str]:
    lockstep = Lockstep(group=dist.group.WORLD)
    assert [lockstep.most(amount) for amount in (rank, 5 * (rank == 1), 0)] == [world_size - 1, 5, 0]
    said = []
    begin = time.monotonic()
    for refusing in ({0}, {1, 2}):
        try:
            with lockstep.checks():
                if rank in refusing:
                    raise ValueError(f"replica {rank} has a wrong prompt")
            lockstep.most(1)
        except ValueError as error:
            said.append(str(error))
    assert time.monotonic() - begin < 10
    assert lockstep.most(rank) == world_size - 1
    return said


def test_a_replica_that_refuses_tells_the_others() -> None:
    first, second, third = run_ranks(step_together, 3)
    assert first == ["replica 0 has a wrong prompt", "replicas [1, 2] of 3 refused this step, so no other can take it"]
    assert second == ["replicas [0] of 3 refused this step, so no other can take it", "replica 1 has a wrong prompt"]
    assert third[1] == "replica 2 has a wrong prompt"
    alone = Lockstep()
    assert alone.most(7) == 7
    with pytest.raises(ValueError, match="amount=-1"):
        alone.most(-1)


def gather_over_both(rank: int, world_size: int) -> None:
    sizes = ParallelConfig(pcp=3, tp=2)
    with ParallelGroups.from_world(sizes) as groups:
        cp, tp = LoadBalancedCPShard(group=groups.pcp), TensorParallel(group=groups.tp)
        plan = cp.plan([7, 5])
        rows = torch.arange(12).view(12, 1) * 100 + torch.arange(4)  # 12 tokens x 4 heads
        local = tp.own_heads(cp.shard(rows, plan))
        assert local.shape == (4, 2)
        assert torch.equal(cp.unshard(local, plan), tp.own_heads(rows))
        assert torch.equal(tp.gather_heads(local), cp.shard(rows, plan))


def test_rows_gather_over_pcp_and_heads_over_tp_where_their_sizes_differ() -> None:
    """Field case A13: with W = 3 and TP = 2 a gather over the wrong group has the wrong shape."""
    run_ranks(gather_over_both, 6)
