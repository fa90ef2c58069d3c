import time

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from cptools.collectives import as_byte_rows
from cptools.cp_shard import LoadBalancedCPShard
from tests.ranks.collective_counter import CollectiveCounter
from tests.ranks.harness import RanksFailed, run_ranks

DTYPES = [torch.int64, torch.int32, torch.uint8, torch.bool, torch.float32, torch.bfloat16, torch.float8_e4m3fn]

# New tokens of each request; W up to 4, so 7 and less are shorter than 2W (cases A1, A5, A6, A15).
LENGTHS = [
    [],
    [0],
    [1],
    [0, 0, 0],
    [2, 1, 3, 16],
    [5, 3, 1],
    [16, 0, 24, 0],
    [7],
    [8, 8],
    [9, 1, 1, 1, 1, 1],
    [13, 31, 61, 127],
    [1021],
]


def ids(lengths: list[int], dtype: torch.dtype, width: int | None = None) -> Tensor:
    """Packed tokens that differ, as far as the dtype has values for it, also along the row."""
    total = sum(lengths)
    numbers = torch.arange(total) if width is None else torch.arange(total * width).view(total, width)
    if dtype.itemsize > 1:
        return numbers.to(dtype)
    raw = (numbers * 37 % 251).to(torch.uint8)
    return raw % 2 == 1 if dtype == torch.bool else raw.view(dtype)


def same(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(as_byte_rows(a), as_byte_rows(b))


def round_trips(rank: int, world_size: int, strategy: str) -> list[dict[str, int]]:
    shard = LoadBalancedCPShard(group=dist.group.WORLD, strategy=strategy)
    assert (shard.world_size, shard.rank) == (world_size, rank)
    issued = []
    for lengths in LENGTHS:
        plan = shard.plan(lengths, [3] * len(lengths))
        x = ids(lengths, torch.int64)
        mine = shard.shard(x, plan)
        assert torch.equal(mine, plan.token_index)
        with CollectiveCounter() as counter:
            assert torch.equal(shard.unshard(mine, plan), x)
            # What the plan says of its rows, put in packed order, is what the batch says.
            positions = shard.unshard(plan.positions, plan)
            request_ids = shard.unshard(plan.request_ids, plan)
        assert positions.tolist() == [3 + t for n in lengths for t in range(n)]
        assert request_ids.tolist() == [r for r, n in enumerate(lengths) for _ in range(n)]
        issued.append(dict(counter.counts))
        for dtype in DTYPES:
            x = ids(lengths, dtype, 3)
            assert same(shard.unshard(shard.shard(x, plan), plan), x)
            wide = x.view(-1, 3, 1).movedim(0, 1)
            for dim in (1, -2):
                local = shard.shard(wide, plan, dim=dim)
                assert local.shape == (3, plan.counts[rank], 1)
                assert same(shard.unshard(local, plan, dim=dim), wide)
    return issued


@pytest.mark.parametrize("strategy", ["zigzag", "interleave"])
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_unshard_inverts_shard(world_size, strategy) -> None:
    issued = run_ranks(round_trips, world_size, strategy)
    for lengths, *numbers in zip(LENGTHS, *issued, strict=True):
        moves = world_size > 1 and sum(lengths) > 0
        assert numbers == [{"_allgather_base_": 3} if moves else {}] * world_size


def some_rows(rank: int, world_size: int) -> list[dict[str, int]]:
    shard = LoadBalancedCPShard(group=dist.group.WORLD)
    issued = []
    for lengths in LENGTHS:
        plan, total = shard.plan(lengths), sum(lengths)
        last = [end - 1 for end, n in zip(torch.tensor(lengths).cumsum(0).tolist(), lengths, strict=True) if n]
        picks = [[], last, last[::-1], [0] * 3, list(range(total)), list(range(0, total, 7)) + last]
        for pick in picks if total else [[]]:
            for dtype in (torch.int64, torch.bfloat16, torch.bool):
                x = ids(lengths, dtype, 2)
                mine = shard.shard(x, plan)
                with CollectiveCounter() as counter:
                    assert same(shard.unshard_rows(mine, plan, pick), x[torch.tensor(pick, dtype=torch.int64)])
                issued.append(dict(counter.counts))
            if pick:
                assert same(
                    shard.unshard_rows(mine, plan, torch.tensor(pick, dtype=torch.int32)), x[torch.tensor(pick)]
                )
    return issued


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_unshard_rows_in_the_order_asked_for(world_size) -> None:
    issued = run_ranks(some_rows, world_size)
    assert all(numbers == issued[0] for numbers in issued)
    assert all(sum(counts.values()) <= 1 for counts in issued[0])


def padding_stays_outside(rank: int, world_size: int) -> None:
    """Rows that the plan does not name may hold NaN: none comes back (case A4)."""
    shard = LoadBalancedCPShard(group=dist.group.WORLD)
    plan = shard.plan([698])
    buffer = torch.full((704, 2), float("nan"))
    buffer[:698] = ids([698], torch.float32, 2)
    results = [shard.unshard(shard.shard(buffer[:698], plan), plan) for _ in range(2)]
    for result in results:
        assert torch.equal(result, buffer[:698])
    with pytest.raises(ValueError, match=r"\(704, 2\), but the plan needs 698 rows"):
        shard.shard(buffer, plan)


def test_padding_stays_outside() -> None:
    run_ranks(padding_stays_outside, 4)


def test_planning_and_sharding_need_no_group() -> None:
    shards = [LoadBalancedCPShard(world_size=3, rank=r) for r in range(3)]
    x = ids([10, 1], torch.int64)
    parts = [shard.shard(x, shard.plan([10, 1])) for shard in shards]
    assert sorted(torch.cat(parts).tolist()) == list(range(11))
    with pytest.raises(ValueError, match="world_size=3 ranks needs group="):
        shards[0].unshard(parts[0], shards[0].plan([10, 1]))
    with pytest.raises(ValueError, match="needs group="):
        shards[0].unshard_rows(parts[0], shards[0].plan([10, 1]), [0])


def test_one_rank_needs_no_group() -> None:
    shard = LoadBalancedCPShard(world_size=1, rank=0)
    plan = shard.plan([5, 2])
    x = ids([5, 2], torch.float8_e4m3fn, 2)
    assert same(shard.unshard(shard.shard(x, plan), plan), x)
    assert same(shard.unshard_rows(x, plan, [6, 0]), x[[6, 0]])


def test_misfits_are_refused() -> None:
    shard = LoadBalancedCPShard(world_size=2, rank=0)
    plan, x = shard.plan([8]), torch.zeros(8, 3)
    for other in (plan.for_rank(1), LoadBalancedCPShard(world_size=4, rank=0).plan([8])):
        with pytest.raises(ValueError, match=rf"rank {other.rank} of {other.world_size}, this is rank 0 of 2"):
            shard.shard(x, other)
        with pytest.raises(ValueError, match="this is rank 0 of 2"):
            shard.unshard(x[:4], other)
    with pytest.raises(ValueError, match=r"\(8, 3\), but the plan needs 8 rows along dim 1"):
        shard.shard(x, plan, dim=1)
    with pytest.raises(ValueError, match="dim 2"):
        shard.shard(x, plan, dim=2)
    with pytest.raises(ValueError, match="needs 4 rows"):
        shard.unshard(x, plan)
    for index, message in (
        ([8], r"8\.\.8 .*8 tokens"),
        ([-1, 2], r"-1\.\.2"),
        ([[1]], r"\(1, 1\)"),
        ([0.5], "float32"),
    ):
        with pytest.raises(ValueError, match=message):
            shard.unshard_rows(x[:4], plan, index)
    with pytest.raises(ValueError, match="bool"):
        shard.unshard_rows(x[:4], plan, torch.ones(8, dtype=torch.bool))
    for arguments in ({}, {"rank": 0}, {"world_size": 2, "rank": 2}, {"world_size": 1, "rank": 0, "strategy": "ring"}):
        with pytest.raises(ValueError):
            LoadBalancedCPShard(**arguments)


def one_raises(rank: int, world_size: int) -> None:
    """Rank 1 brings rows that do not fit its plan and never joins the collective."""
    shard = LoadBalancedCPShard(group=dist.group.WORLD)
    plan = shard.plan([9])
    shard.unshard(torch.zeros(plan.counts[rank] + (rank == 1), 2), plan)


def test_a_rank_that_raises_ends_the_others() -> None:
    begin = time.monotonic()
    with pytest.raises(RanksFailed, match=r"ValueError: x has shape \(\d, 2\), but the plan needs \d rows along dim 0"):
        run_ranks(one_raises, 3, timeout=40)
    assert time.monotonic() - begin < 30


def plans_that_differ(rank: int, world_size: int) -> list[str]:
    cp = LoadBalancedCPShard(group=dist.group.WORLD, check_plans=True)
    plan = cp.plan([8, 16])
    x = torch.arange(plan.num_tokens)
    assert torch.equal(cp.unshard(cp.shard(x, plan), plan), x)
    messages = []
    for lengths in ([8, 16] if rank == 0 else [16, 8], [8, 17 - rank]):
        plan = cp.plan(lengths)
        with pytest.raises(ValueError) as error:
            cp.unshard(cp.shard(torch.arange(plan.num_tokens), plan), plan)
        messages.append(str(error.value))
    return messages


def test_ranks_that_disagree_on_lengths_are_told_so_on_all_of_them() -> None:
    """With equal counts the exchange alone would succeed, with wrong rows."""
    for rank, messages in enumerate(run_ranks(plans_that_differ, 2)):
        assert all("ranks [1] do not have that of rank 0" in message for message in messages)
        assert ("(8, 16)" if rank == 0 else "(16, 8)") in messages[0]
