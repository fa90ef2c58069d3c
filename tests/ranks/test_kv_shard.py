import pytest
import torch
import torch.distributed as dist

from cptools.collectives import as_byte_rows
from cptools.kv_shard import RoundRobinKVShard
from tests.ranks.collective_counter import CollectiveCounter
from tests.ranks.harness import run_ranks

DTYPES = [torch.uint8, torch.bool, torch.int64, torch.float32, torch.bfloat16, torch.float8_e4m3fn]
SEQ_LENS = [[], [0], [1], [3], [0, 1, 0], [3, 0, 8, 17], [2, 5, 7, 11, 13, 61], [257, 1, 130], [1021]]


def context(seq_lens: list[int], dtype: torch.dtype, width: int) -> torch.Tensor:
    """Rows [sum, width] that differ, as far as the dtype has values for it."""
    numbers = torch.arange(sum(seq_lens) * width).view(-1, width)
    if dtype.itemsize > 1:
        return numbers.to(dtype)
    raw = (numbers * 37 % 251).to(torch.uint8)
    return raw % 2 == 1 if dtype == torch.bool else raw.view(dtype)


def gathers(rank: int, world_size: int) -> list[dict[str, int]]:
    issued = []
    for interleave, page_size in ((1, 1), (1, 64), (4, 8), (64, 64)):
        shard = RoundRobinKVShard(group=dist.group.WORLD, interleave=interleave, page_size=page_size)
        for seq_lens in SEQ_LENS:
            position = torch.tensor([t for n in seq_lens for t in range(n)], dtype=torch.int64)
            mine = position // interleave % world_size == rank
            assert int(mine.sum()) == int(shard.local_lens(seq_lens).sum())
            for dtype in DTYPES:
                full = context(seq_lens, dtype, 3)
                with CollectiveCounter() as counter:
                    got = shard.gather_context(full[mine], seq_lens)
                issued.append(dict(counter.counts))
                assert got.dtype == dtype
                assert torch.equal(as_byte_rows(got), as_byte_rows(full))
                out = torch.zeros_like(full)
                assert shard.gather_context(full[mine], torch.tensor(seq_lens, dtype=torch.int32), out=out) is out
                assert torch.equal(as_byte_rows(out), as_byte_rows(full))
            assert torch.equal(shard.gather_context(position[mine], seq_lens), position)
            deep = torch.arange(len(position) * 6).view(-1, 2, 3)
            assert torch.equal(shard.gather_context(deep[mine], seq_lens), deep)
    return issued


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_gather_context_is_in_position_order(world_size) -> None:
    issued = run_ranks(gathers, world_size)
    assert all(numbers == issued[0] for numbers in issued)
    assert all(counts in ({}, {"_allgather_base_": 1}) for counts in issued[0])


def store_then_gather(rank: int, world_size: int, seq_lens: list[int], interleave: int) -> None:
    """Rows of whole sequences through pages and back: each is written once, by its owner, and found again."""
    page_size = 8
    shard = RoundRobinKVShard(group=dist.group.WORLD, interleave=interleave, page_size=page_size)
    blocks = [int(n) for n in shard.layout.pages(torch.tensor(seq_lens))]
    page_ids = torch.randperm(sum(blocks), generator=torch.Generator().manual_seed(0)).tolist()
    table = torch.full((len(seq_lens), max(blocks)), -1)
    for row, count in enumerate(blocks):
        table[row, :count] = torch.tensor([page_ids.pop() for _ in range(count)], dtype=torch.int64)
    positions = torch.tensor([t for n in seq_lens for t in range(n)])
    request_ids = torch.tensor([r for r, n in enumerate(seq_lens) for _ in range(n)])
    rows = torch.arange(len(positions)) + 1

    slots = shard.slot_mapping(positions, request_ids, table)
    kept = slots >= 0
    writers = kept.long()
    dist.all_reduce(writers)
    assert (writers == 1).all()
    cache = torch.zeros(sum(blocks) * page_size, dtype=torch.int64)
    cache[slots[kept]] = rows[kept]
    assert int((cache > 0).sum()) == int(kept.sum())

    # The shard of each request, read back page by page in local order.
    local = [
        cache.view(-1, page_size)[table[r, : blocks[r]]].view(-1)[:n]
        for r, n in enumerate(shard.local_lens(seq_lens).tolist())
    ]
    assert torch.equal(shard.gather_context(torch.cat(local), seq_lens), rows)


@pytest.mark.parametrize("interleave", [1, 4, 8])
@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_pages_round_trip(world_size, interleave) -> None:
    run_ranks(store_then_gather, world_size, [3, 0, 70, 1, 129], interleave)


def misfit_rows(rank: int, world_size: int) -> None:
    shard = RoundRobinKVShard(group=dist.group.WORLD)
    with pytest.raises(ValueError, match=rf"\(9, 2\), but rank {rank} of 2 holds {3 - rank} rows of seq_lens=\[5\]"):
        shard.gather_context(torch.zeros(9, 2), [5])
    with pytest.raises(ValueError, match=r"out must be torch.float32 \(5, 2\)"):
        shard.gather_context(torch.zeros(3 - rank, 2), [5], out=torch.zeros(4, 2))


def test_misfits_are_refused_on_every_rank() -> None:
    run_ranks(misfit_rows, 2)


def candidates_without_rows(rank: int, world_size: int) -> list[tuple[int, ...]]:
    shard = RoundRobinKVShard(group=dist.group.WORLD)
    return [
        tuple(shard.gather_candidates(torch.zeros(n, c, dtype=torch.int64)).shape) for n, c in ((0, 8), (3, 0), (2, 5))
    ]


def test_candidates_without_rows_keep_their_columns() -> None:
    assert run_ranks(candidates_without_rows, 2) == [[(0, 16), (3, 0), (2, 10)]] * 2
