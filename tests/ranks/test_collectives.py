import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from cptools.collectives import (
    all_gather_rows,
    all_reduce_sum,
    all_to_all_rows,
    as_byte_rows,
    from_byte_rows,
    group_coordinates,
    reduce_scatter_sum,
)
from tests.ranks.collective_counter import CollectiveCounter
from tests.ranks.harness import run_ranks

DTYPES = [
    torch.uint8,
    torch.bool,
    torch.int32,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.complex64,
]


def rows_of(rank: int, count: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Random bits, the same whoever asks: NaNs and all."""
    generator = torch.Generator().manual_seed(1000 + rank)
    high = 2 if dtype == torch.bool else 256
    raw = torch.randint(0, high, (count, *shape, dtype.itemsize), generator=generator).to(torch.uint8)
    return raw.view(dtype).view(count, *shape)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(as_byte_rows(a), as_byte_rows(b))


def test_byte_rows_round_trip() -> None:
    for dtype in DTYPES:
        for shape in ((), (3,), (2, 3), (0,)):
            x = rows_of(0, 5, shape, dtype)
            assert as_byte_rows(x).dtype == torch.uint8
            assert same_bits(from_byte_rows(as_byte_rows(x), x), x)
    for odd in (
        torch.empty(0, dtype=torch.int64).as_strided((0,), (0,)),
        torch.arange(9)[::9],
        torch.ones(1, 4)[:, ::4],
    ):
        assert same_bits(from_byte_rows(as_byte_rows(odd), odd), odd)
    cut = torch.arange(9, dtype=torch.uint8)[None, 1:]
    assert from_byte_rows(cut, torch.empty(1, 2, dtype=torch.int32)).tolist() == [[0x04030201, 0x08070605]]
    strided = torch.arange(12).view(3, 4).t()
    assert torch.equal(from_byte_rows(as_byte_rows(strided), strided), strided)


COUNTS = {
    1: [[0], [1], [5]],
    2: [[0, 0], [1, 1], [0, 3], [7, 2], [1021, 1020]],
    3: [[0, 0, 0], [2, 2, 2], [0, 5, 0], [3, 0, 1], [67, 66, 67]],
    4: [[0, 0, 0, 0], [1, 1, 1, 1], [0, 0, 0, 1], [4, 3, 3, 3], [0, 9, 2, 0]],
}


def gather_everything(rank: int, world_size: int) -> list[int]:
    issued = []
    for counts in COUNTS[world_size]:
        for dtype in DTYPES:
            for shape in ((), (3,), (2, 5), (0, 2)):
                with CollectiveCounter() as counter:
                    got = all_gather_rows(rows_of(rank, counts[rank], shape, dtype), counts, group=dist.group.WORLD)
                everything = torch.cat([as_byte_rows(rows_of(r, c, shape, dtype)) for r, c in enumerate(counts)])
                assert got.dtype == dtype
                assert got.shape == (sum(counts), *shape)
                assert torch.equal(as_byte_rows(got), everything)
                issued.append(sum(counter.counts.values()))
                moves = world_size > 1 and max(counts) > 0 and 0 not in shape
                assert counter.counts == ({"_allgather_base_": 1} if moves else {})
    return issued


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_all_gather_rows(world_size) -> None:
    issued = run_ranks(gather_everything, world_size)
    assert all(numbers == issued[0] for numbers in issued)


def exchange_everything(rank: int, world_size: int) -> list[int]:
    issued = []
    for salt in (0, 1, 5, 11):
        # Rows from a to b: some pairs exchange nothing, and with salt 0 no pair does.
        sent = [[(a * 7 + b * 3 + salt) % 4 * min(salt, 1) for b in range(world_size)] for a in range(world_size)]
        for dtype in (torch.bool, torch.bfloat16, torch.int64, torch.float8_e4m3fn):
            for shape in ((), (3, 2), (0,)):
                blocks = [
                    rows_of(100 * a + b, sent[a][b], shape, dtype) for a in range(world_size) for b in range(world_size)
                ]
                mine = torch.cat([as_byte_rows(x) for x in blocks[rank * world_size : (rank + 1) * world_size]])
                expected = torch.cat([as_byte_rows(x) for x in blocks[rank::world_size]])
                with CollectiveCounter() as counter:
                    got = all_to_all_rows(
                        from_byte_rows(mine, blocks[0]),
                        sent[rank],
                        [sent[a][rank] for a in range(world_size)],
                        group=dist.group.WORLD,
                    )
                assert got.dtype == dtype
                assert torch.equal(as_byte_rows(got), expected)
                issued.append(sum(counter.counts.values()))
    return issued


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_all_to_all_rows(world_size) -> None:
    issued = run_ranks(exchange_everything, world_size)
    assert all(numbers == issued[0] for numbers in issued)
    assert max(issued[0]) == (world_size > 1)


def sum_everything(rank: int, world_size: int) -> None:
    for shape in ((), (3, 2), (0, 4)):
        x = torch.arange(world_size).view(-1, *[1] * len(shape)) * 10.0 + torch.full((world_size, *shape), float(rank))
        before = x.clone()
        got = reduce_scatter_sum(x, group=dist.group.WORLD)
        ranks = sum(range(world_size))
        assert torch.equal(got, torch.full(shape, rank * 10.0 * world_size + ranks))
        assert torch.equal(all_reduce_sum(x[0], group=dist.group.WORLD), torch.full(shape, float(ranks)))
        assert torch.equal(x, before)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_sums(world_size) -> None:
    run_ranks(sum_everything, world_size)


def refuse_misfits(rank: int, world_size: int) -> None:
    """Every rank raises, none issues a collective."""
    group, x = dist.group.WORLD, torch.zeros(2, 3)
    with CollectiveCounter() as counter:
        with pytest.raises(ValueError, match=rf"\(2, 3\), but rank {rank} has counts\[{rank}\]=5"):
            all_gather_rows(x, [5, 5], group=group)
        for counts in ([2], [2, 2, 2], [-1, 2]):
            with pytest.raises(ValueError, match="must be 2 numbers"):
                all_gather_rows(x, counts, group=group)
            with pytest.raises(ValueError, match="in_counts"):
                all_to_all_rows(x, counts, [1, 1], group=group)
        with pytest.raises(ValueError, match=r"x has shape \(2, 3\), but in_counts=\(1, 2\)"):
            all_to_all_rows(x, [1, 2], [1, 2], group=group)
        with pytest.raises(ValueError, match="sends itself"):
            all_to_all_rows(x, [1, 1], [3, 3], group=group)
        with pytest.raises(ValueError, match="2 ranks"):
            reduce_scatter_sum(torch.zeros(3), group=group)
        for collective in (all_reduce_sum, reduce_scatter_sum):
            with pytest.raises(ValueError, match="give group"):
                collective(x, group=None)
        with pytest.raises(ValueError, match="give group"):
            all_gather_rows(x, [2, 2], group=None)
        with pytest.raises(ValueError, match="contradict the group: world_size=2"):
            group_coordinates(group, 3, rank)
        assert group_coordinates(group, 2, None) == (2, rank)
    assert not counter.counts
    others = dist.new_group([0])
    if rank == 1:
        with pytest.raises(ValueError, match="not a member"):
            group_coordinates(others, None, None)


def test_misfits_are_refused_before_anything_is_sent() -> None:
    run_ranks(refuse_misfits, 2)


def one_stays_away(rank: int, world_size: int) -> float:
    group = dist.new_group(timeout=timedelta(seconds=1))
    if rank == 1:
        time.sleep(3)
        return 0.0
    begin = time.monotonic()
    with pytest.raises(RuntimeError):
        all_gather_rows(torch.zeros(1, 2), [1] * world_size, group=group)
    return time.monotonic() - begin


def test_a_rank_that_stays_away_holds_up_the_others_for_the_timeout_only() -> None:
    """It is alive, so that only the timeout can end the wait."""
    assert max(run_ranks(one_stays_away, 3)) < 2.5
