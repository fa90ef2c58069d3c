import os
import time

import pytest
import torch
import torch.distributed as dist

from tests.ranks.harness import RanksFailed, run_ranks


def who(rank: int, world_size: int, offset: int) -> tuple[int, int, int]:
    total = torch.tensor(rank)
    dist.all_reduce(total)
    return rank + offset, dist.get_world_size(), int(total)


def test_results_come_in_rank_order() -> None:
    assert run_ranks(who, 3, 10) == [(10, 3, 3), (11, 3, 3), (12, 3, 3)]
    assert run_ranks(who, 2, 0) == [(0, 2, 1), (1, 2, 1)]


def raises_on_one(rank: int, world_size: int) -> None:
    if rank == 1:
        raise KeyError("the reason")
    dist.barrier()


def dies_on_one(rank: int, world_size: int) -> None:
    if rank == 1:
        print("last words", flush=True)
        os._exit(7)
    dist.barrier()


def sleeps(rank: int, world_size: int) -> None:
    time.sleep(60)


@pytest.mark.parametrize(
    "fn, message", [(raises_on_one, "KeyError: 'the reason'"), (dies_on_one, "exit code 7\nlast words")]
)
def test_a_failing_rank_ends_the_others(fn, message) -> None:
    run_ranks(who, 2, 0)
    begin = time.monotonic()
    with pytest.raises(RanksFailed, match=message):
        run_ranks(fn, 2, timeout=50)
    assert time.monotonic() - begin < 20


def test_a_rank_that_does_not_end_is_killed() -> None:
    run_ranks(who, 1, 0)
    begin = time.monotonic()
    with pytest.raises(RanksFailed, match=r"still running after 1\.5 s"):
        run_ranks(sleeps, 1, timeout=1.5)
    assert time.monotonic() - begin < 10
