import random
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from cptools.kv_shard import RoundRobinKVShard

LAYOUTS = [(n, i, b) for n in (1, 2, 3, 4, 7) for i, b in ((1, 1), (1, 4), (2, 4), (4, 4), (3, 6))]


def shards(n: int, interleave: int, page_size: int) -> Iterator[RoundRobinKVShard]:
    for rank in range(n):
        yield RoundRobinKVShard(world_size=n, rank=rank, interleave=interleave, page_size=page_size)


def owned(seq_len: int, n: int, interleave: int, rank: int) -> list[int]:
    """Positions of a rank, by dealing blocks out."""
    blocks = [list(range(s, min(s + interleave, seq_len))) for s in range(0, seq_len, interleave)]
    return [t for block in blocks[rank::n] for t in block]


def tables_for(seq_lens: list[int], n: int, page_size: int, seed: int = 0) -> Tensor:
    """Distinct shuffled page ids, -1 where a request needs no page."""
    needed = [-(-s // (page_size * n)) for s in seq_lens]
    ids = list(range(sum(needed)))
    random.Random(seed).shuffle(ids)
    table = torch.full((len(seq_lens), max(needed, default=0)), -1)
    for row, count in enumerate(needed):
        table[row, :count] = torch.tensor([ids.pop() for _ in range(count)], dtype=torch.int64)
    return table


@pytest.mark.parametrize("n, interleave, page_size", LAYOUTS)
def test_slots_by_dealing_tokens_out(n, interleave, page_size) -> None:
    """Write the tokens of each rank one after another into its pages, and find every slot so."""
    seq_lens = [0, 1, 3 * n * page_size + 2, 2 * n * page_size, n * interleave + 1, 5]
    table = tables_for(seq_lens, n, page_size)
    tokens = [(t, r) for r, s in enumerate(seq_lens) for t in range(s)]
    random.Random(1).shuffle(tokens)
    positions, request_ids = torch.tensor(tokens).unbind(1)
    for shard in shards(n, interleave, page_size):
        expected = {}
        for r, s in enumerate(seq_lens):
            for j, t in enumerate(owned(s, n, interleave, shard.rank)):
                expected[t, r] = int(table[r, j // page_size]) * page_size + j % page_size
        for dtype in (torch.int64, torch.int32):
            slots = shard.slot_mapping(positions.to(dtype), request_ids.to(dtype), table.to(dtype))
            assert slots.dtype == torch.int64
            assert slots.tolist() == [expected.get(token, -1) for token in tokens]


def test_slots_of_more_tokens_than_one_block_of_the_computation() -> None:
    seq_len, n, page_size = 200_003, 3, 64
    table = tables_for([7, seq_len], n, page_size)
    positions, request_ids = torch.arange(seq_len), torch.ones(seq_len, dtype=torch.int64)
    seen = torch.zeros(seq_len, dtype=torch.int64)
    for shard in shards(n, 4, page_size):
        slots = shard.slot_mapping(positions, request_ids, table)
        kept = slots >= 0
        seen += kept
        mine = positions[kept]
        local = mine // (n * 4) * 4 + mine % 4
        assert torch.equal(slots[kept], table[1, local // page_size] * page_size + local % page_size)
    assert (seen == 1).all()


def test_padding_rows_do_not_touch_page_0() -> None:
    """Three live rows and five of padding, whose request ids are garbage (cases C10, A7)."""
    shard = RoundRobinKVShard(world_size=2, rank=0, page_size=4)
    positions = torch.tensor([0, 2, 4, -1, -1, -1, -1, -1])
    request_ids = torch.tensor([0, 0, 0, -1, 99, 0, -7, 2**40])
    slots = shard.slot_mapping(positions, request_ids, torch.tensor([[3]]))
    assert slots.tolist() == [12, 13, 14, -1, -1, -1, -1, -1]
    pages = torch.zeros(4, 4)
    pages.view(-1)[slots[slots >= 0]] = 1.0
    assert pages[:3].sum() == 0


def test_nothing_but_padding_needs_no_table() -> None:
    shard = RoundRobinKVShard(world_size=2, rank=0)
    nothing = torch.empty(0, dtype=torch.int64)
    for table in (torch.empty(0, 0, dtype=torch.int64), torch.empty(3, 0, dtype=torch.int32)):
        assert shard.slot_mapping(nothing, nothing, table).tolist() == []
        assert shard.slot_mapping(torch.tensor([-1, -1]), torch.tensor([5, 0]), table).tolist() == [-1, -1]


@pytest.mark.parametrize(
    "positions, request_ids, message",
    [
        ([0, 1, -2], [0, 0, 0], "position -2"),
        ([0, 16], [0, 0], "position 16 of request 0 needs block 2, but its table has 2 blocks of 8 positions"),
        ([0, 9], [0, 1], "position 9 of request 1 needs block 1, but its page id is -1"),
        ([0, 1], [0, 2], "request id 2 is outside block_tables of 2 requests"),
        ([0, 1], [0, -1], "request id -1"),
        ([0, -1, 17], [0, 0, 0], "position 17"),
    ],
)
def test_bad_tokens_raise_on_all_ranks_alike(positions, request_ids, message) -> None:
    table = torch.tensor([[4, 5], [6, -1]])
    for shard in shards(2, 1, 4):
        with pytest.raises(ValueError, match=message):
            shard.slot_mapping(torch.tensor(positions), torch.tensor(request_ids), table)


def test_slots_without_checks() -> None:
    """What runs on a GPU: the same slots, and -1 for a token that the CPU refuses."""
    seq_lens = [0, 1, 61, 40]
    table = tables_for(seq_lens, 3, 4)
    positions = torch.tensor([t for s in seq_lens for t in range(s)] + [-1])
    request_ids = torch.tensor([r for r, s in enumerate(seq_lens) for _ in range(s)] + [99])
    bad_positions = torch.tensor([0, 10**12, -2, 0, 0, 2**62])
    bad_requests = torch.tensor([0, 2, 2, -1, 4, 2**62])
    for shard in shards(3, 2, 4):
        expected = shard.slot_mapping(positions, request_ids, table)
        assert torch.equal(shard._slots_unchecked(positions, request_ids, table), expected)
        assert shard._slots_unchecked(bad_positions, bad_requests, table).tolist() == [-1] * 6
        assert shard._slots_unchecked(positions, request_ids, table[:, :0]).tolist() == [-1] * len(positions)


def test_slot_mapping_refuses_misfits() -> None:
    """Also 2P gathered rows with a mapping of length P (case A18)."""
    shard = RoundRobinKVShard(world_size=2, rank=0)
    ids, table = torch.zeros(4, dtype=torch.int64), torch.zeros(1, 1, dtype=torch.int64)
    for bad in ((ids, ids[:2], table), (ids.view(2, 2), ids.view(2, 2), table), (ids, ids, table[0])):
        with pytest.raises(ValueError, match=r"positions \[T\], request_ids \[T\], block_tables \[R, blocks\]"):
            shard.slot_mapping(*bad)
    for bad in ((ids.float(), ids, table), (ids, ids.bool(), table), (ids, ids, table.double())):
        with pytest.raises(ValueError, match="must be integers"):
            shard.slot_mapping(*bad)
    with pytest.raises(ValueError, match="meta"):
        shard.slot_mapping(ids, ids, table.to("meta"))


def test_slots_beyond_int32() -> None:
    """Page ids that need no more than 32 bits make slots that do, and so do positions (case D9)."""
    shard = RoundRobinKVShard(world_size=2, rank=1, page_size=64)
    table = torch.tensor([[0, 2**31 - 1]], dtype=torch.int32)
    slots = shard.slot_mapping(torch.tensor([129], dtype=torch.int32), torch.tensor([0], dtype=torch.int32), table)
    assert slots.tolist() == [(2**31 - 1) * 64]
    far = 2**33 + 1
    assert shard.localize(torch.tensor([[far, far - 1]])).tolist() == [[2**32, -1]]
    assert shard.local_lens([far, far + 1]).tolist() == [2**32, 2**32 + 1]


def test_noncontiguous_inputs() -> None:
    shard = RoundRobinKVShard(world_size=2, rank=0, page_size=2)
    pairs, table = torch.tensor([[0, 0], [4, 1], [5, 1]]), torch.tensor([[9, 1, 9, 2], [9, 3, 9, 4]])
    assert shard.slot_mapping(pairs[:, 0], pairs[:, 1], table[:, 1::2]).tolist() == [2, 8, -1]


@pytest.mark.parametrize("n, interleave, page_size", LAYOUTS)
def test_local_lens_count(n, interleave, page_size) -> None:
    lens = list(range(4 * n * interleave + 3))
    for shard in shards(n, interleave, page_size):
        expected = [len(owned(s, n, interleave, shard.rank)) for s in lens]
        assert shard.local_lens(lens).tolist() == expected
        as_int32 = shard.local_lens(torch.tensor(lens, dtype=torch.int32))
        assert as_int32.dtype == torch.int64
        assert as_int32.tolist() == expected
    assert shard.local_lens([]).dtype == torch.int64
    with pytest.raises(ValueError, match="-3"):
        shard.local_lens([1, -3])
    with pytest.raises(ValueError, match="float32"):
        shard.local_lens(torch.tensor([1.0]))


@pytest.mark.parametrize("n, interleave, page_size", LAYOUTS)
def test_localize_leaves_holes(n, interleave, page_size) -> None:
    """Columns stay; over the ranks every valid position is named once (as for a global top-k, case D21)."""
    generator = torch.Generator().manual_seed(0)
    topk = torch.randint(-2, 6 * n * interleave, (9, 40), generator=generator)
    seq_lens = torch.randint(0, 6 * n * interleave, (9,), generator=generator)
    seq_lens[0] = 0
    named = torch.zeros_like(topk)
    for shard in shards(n, interleave, page_size):
        for dtype in (torch.int64, torch.int32):
            local = shard.localize(topk.to(dtype), seq_lens.to(dtype))
            assert local.dtype == torch.int64
            for row in range(9):
                mine = owned(int(seq_lens[row]), n, interleave, shard.rank)
                expected = [mine.index(t) if t in mine else -1 for t in topk[row].tolist()]
                assert local[row].tolist() == expected
        named += local >= 0
        unbounded = shard.localize(topk)
        assert torch.equal(unbounded >= 0, (topk >= 0) & (shard.layout.owner(topk) == shard.rank))
    assert torch.equal(named, ((topk >= 0) & (topk < seq_lens[:, None])).long())


def test_localize_all_selected_on_one_rank() -> None:
    """The best eight all on rank 2 of four: full there, holes elsewhere (case D21)."""
    topk = torch.tensor([[2, 6, 10, 14, 18, 22, 26, 30]])
    found = [shard.localize(topk).tolist() for shard in shards(4, 1, 64)]
    assert found == [[[-1] * 8], [[-1] * 8], [list(range(8))], [[-1] * 8]]


def test_localize_bounds_each_draft_row() -> None:
    """Rows of one request that see 8, 9 and 10 tokens see 4, 4 and 5 on rank 1 of two, counted from below."""
    shard = RoundRobinKVShard(world_size=2, rank=1)
    local = shard.localize(torch.arange(12).expand(3, 12), torch.tensor([8, 9, 10]))
    assert (local >= 0).sum(1).tolist() == [4, 4, 5]
    assert shard.local_lens(torch.tensor([8, 9, 10])).tolist() == [4, 4, 5]


def test_localize_shapes() -> None:
    shard = RoundRobinKVShard(world_size=2, rank=0)
    assert shard.localize(torch.empty(0, 8, dtype=torch.int64), torch.empty(0, dtype=torch.int64)).shape == (0, 8)
    assert shard.localize(torch.empty(3, 0, dtype=torch.int32)).shape == (3, 0)
    with pytest.raises(ValueError, match=r"\(3, 4\).* \(4,\)"):
        shard.localize(torch.zeros(3, 4, dtype=torch.int64), torch.zeros(4, dtype=torch.int64))
    with pytest.raises(ValueError, match="float32"):
        shard.localize(torch.zeros(3, 4))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.bool, torch.uint8])
def test_gather_context_of_one_rank_needs_no_group(dtype) -> None:
    shard = RoundRobinKVShard(world_size=1, rank=0)
    rows = torch.arange(12).view(6, 2).to(torch.uint8).view(-1).to(dtype).view(6, 2)
    for out in (None, torch.zeros_like(rows)):
        context = shard.gather_context(rows, [4, 0, 2], out=out)
        assert context.dtype == dtype
        assert torch.equal(context.view(torch.uint8), rows.view(torch.uint8))
        assert out is None or context is out
    assert context.data_ptr() != rows.data_ptr()


def test_gather_context_refuses_misfits() -> None:
    shard = RoundRobinKVShard(world_size=1, rank=0)
    rows = torch.zeros(6, 2)
    with pytest.raises(ValueError, match=r"\(6, 2\).* holds 5 rows of seq_lens=\[4, 1\]"):
        shard.gather_context(rows, [4, 1])
    with pytest.raises(ValueError, match=r"\[7, -1\]"):
        shard.gather_context(rows, [7, -1])
    for out in (torch.zeros(5, 2), torch.zeros(6, 2, dtype=torch.bfloat16), torch.zeros(6, 2, device="meta")):
        with pytest.raises(ValueError, match=r"out must be torch.float32 \(6, 2\) on cpu"):
            shard.gather_context(rows, [4, 2], out=out)
    with pytest.raises(ValueError, match="contiguous"):
        shard.gather_context(rows, [4, 2], out=torch.zeros(2, 6).t())
    with pytest.raises(ValueError, match="world_size=2 ranks needs group="):
        RoundRobinKVShard(world_size=2, rank=0).gather_context(rows, [12])


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({}, "world_size=None, rank=None"),
        ({"world_size": 2}, "rank=None"),
        ({"world_size": 2, "rank": 2}, "rank=2 is not a rank of world_size=2"),
        ({"world_size": 0, "rank": 0}, "world_size=0"),
        ({"world_size": 2, "rank": 0, "interleave": 3}, "interleave=3 .*page_size=64"),
    ],
)
def test_bad_shards(arguments, message) -> None:
    with pytest.raises(ValueError, match=message):
        RoundRobinKVShard(**arguments)
