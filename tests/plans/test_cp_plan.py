"""CPPlan against cutting the prompts token by token."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cptools.cp_plan import STRATEGIES, CPPlan, make_cp_plan


def plans(query_lens, context_lens=None, *, world_size, strategy="zigzag") -> list[CPPlan]:
    plan = make_cp_plan(query_lens, context_lens, world_size=world_size, rank=0, strategy=strategy)
    return [plan.for_rank(rank) for rank in range(world_size)]


def zigzag_owners(query_lens, world_size) -> list[list[int]]:
    """Rank of each token of each request: the rule of the remainder dealt out one token at a time."""
    turn, owners = 0, []
    for query_len in query_lens:
        base, rem = divmod(query_len, 2 * world_size)
        extras = [0] * world_size
        for _ in range(rem):
            extras[turn % world_size] += 1
            turn += 1
        front, back = [], []
        for rank, extra in enumerate(extras):
            at_front = extra == 2 or (extra == 1 and rem <= world_size)
            front.append([rank] * (base + at_front))
            back.append([rank] * (base + extra - at_front))
        owners.append([*itertools.chain(*front, *reversed(back))])
    return owners


def interleave_owners(query_lens, world_size) -> list[list[int]]:
    packed = itertools.count()
    return [[next(packed) % world_size for _ in range(query_len)] for query_len in query_lens]


def check(query_lens, context_lens, world_size, strategy):
    """Compare all fields of all ranks with a loop over tokens."""
    oracle = zigzag_owners if strategy == "zigzag" else interleave_owners
    rows: list[list[tuple[int, int, int]]] = [[] for _ in range(world_size)]
    packed = 0
    for request, owners in enumerate(oracle(query_lens, world_size)):
        for offset, rank in enumerate(owners):
            rows[rank].append((packed, context_lens[request] + offset, request))
            packed += 1
    result = plans(query_lens, context_lens, world_size=world_size, strategy=strategy)
    for rank, plan in enumerate(result):
        assert (plan.world_size, plan.rank, plan.strategy) == (world_size, rank, strategy)
        assert (plan.query_lens, plan.context_lens) == (tuple(query_lens), tuple(context_lens))
        columns = torch.stack((plan.token_index, plan.positions, plan.request_ids), dim=1)
        assert [tuple(row) for row in columns.tolist()] == rows[rank]
        assert plan.kv_lens.tolist() == [position + 1 for _, position, _ in rows[rank]]
        assert plan.counts == tuple(len(r) for r in rows)
        assert plan.pairs == tuple(sum(position + 1 for _, position, _ in r) for r in rows)
        assert all(type(n) is int for n in plan.counts + plan.pairs + plan.query_lens + plan.context_lens)
        assert plan.num_tokens == packed
        assert torch.cat([p.token_index for p in result])[plan.restore_index].tolist() == list(range(packed))
        for index in (plan.token_index, plan.positions, plan.request_ids, plan.kv_lens, plan.restore_index):
            assert index.dtype == torch.int64
    assert max(map(len, rows)) - min(map(len, rows)) <= 1


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("world_size", range(1, 9))
def test_one_request_of_any_small_length(world_size, strategy):
    for query_len in range(6 * world_size + 2):
        check([query_len], [0], world_size, strategy)
        check([query_len], [5], world_size, strategy)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_three_requests_of_all_small_lengths(world_size, strategy):
    for query_lens in itertools.product(range(6), repeat=3):
        check(query_lens, (0, 7, 2), world_size, strategy)


@pytest.mark.parametrize("strategy", STRATEGIES)
@settings(max_examples=60, deadline=None)
@given(batch=st.lists(st.tuples(st.integers(0, 70), st.integers(0, 2**40)), max_size=12), world_size=st.integers(1, 17))
def test_any_batch(batch, world_size, strategy):
    check([q for q, _ in batch], [c for _, c in batch], world_size, strategy)


@pytest.mark.parametrize("world_size", range(1, 9))
def test_zigzag_cuts_chunks_that_differ_by_one_token(world_size):
    for query_len in range(8 * world_size):
        owners = zigzag_owners([query_len], world_size)[0]
        chunks = [len(list(same)) for _, same in itertools.groupby(owners)]
        if query_len >= 2 * world_size and world_size > 1:
            # The two chunks of the last rank are neighbours.
            middle = chunks.pop(world_size - 1)
            chunks += [middle // 2, middle - middle // 2]
            assert len(chunks) == 2 * world_size
            assert max(chunks) - min(chunks) <= 1


@pytest.mark.parametrize("world_size", range(1, 9))
def test_zigzag_work_is_even_from_64_tokens_a_rank_on(world_size):
    lengths = [*range(64 * world_size, 68 * world_size + 1), *range(4096, 4096 + 2 * world_size), 65535, 1048575]
    for query_len in lengths:
        pairs = make_cp_plan([query_len], world_size=world_size, rank=0).pairs
        assert max(pairs) * world_size / sum(pairs) <= 1.02, query_len


def test_zigzag_work_of_8_ranks_is_within_one_percent_from_1024_tokens_on():
    for query_len in [*range(1024, 1024 + 64), 2047, 8637, 16383]:
        pairs = make_cp_plan([query_len], world_size=8, rank=0).pairs
        assert max(pairs) * 8 / sum(pairs) <= 1.01, query_len


def test_extra_tokens_of_many_requests_do_not_pile_up():
    for world_size, query_len in itertools.product((2, 4, 8), range(1, 20)):
        counts = make_cp_plan([query_len] * 257, world_size=world_size, rank=0).counts
        assert max(counts) - min(counts) <= 1


def test_positions_second_sequence():
    front, back = plans([4, 8], [10, 100], world_size=2)
    assert front.positions.tolist() == [10, 13, 100, 101, 106, 107]
    assert back.positions.tolist() == [11, 12, 102, 103, 104, 105]
    assert back.kv_lens.tolist() == [12, 13, 103, 104, 105, 106]


@pytest.mark.parametrize(
    "world_size, query_len, owned",
    [
        (2, 8, [[0, 1, 6, 7], [2, 3, 4, 5]]),
        (4, 8, [[0, 7], [1, 6], [2, 5], [3, 4]]),
        (4, 9, [[0, 1, 8], [2, 7], [3, 6], [4, 5]]),
    ],
)
def test_known_cuts(world_size, query_len, owned):
    assert [plan.token_index.tolist() for plan in plans([query_len], world_size=world_size)] == owned


def test_requests_shorter_than_two_tokens_a_rank():
    """Field case A1."""
    check([2, 1, 3, 16], [0, 0, 0, 0], 2, "zigzag")
    parts = plans([2, 1, 3, 16], world_size=2)
    assert torch.equal(torch.cat([part.token_index for part in parts]).sort().values, torch.arange(22))


def test_tail_token_not_dropped():
    """Field case A4: 698 tokens, which 8 chunks do not divide, need no padding and lose nothing."""
    parts = plans([698], world_size=4)
    assert sum(parts[0].counts) == 698
    x = torch.arange(704.0)
    x[698:] = torch.nan
    for _ in range(2):
        rows = torch.cat([x[part.token_index] for part in parts])
        assert torch.equal(rows[parts[0].restore_index], x[:698])


def test_packed_requests_do_not_leak_into_each_other():
    """Field case A5: the next token, as a draft head wants it, is looked up by request, not by neighbouring row."""
    query_lens = [5, 3, 1]
    starts = torch.tensor([0, 5, 8])
    for plan in plans(query_lens, world_size=2):
        assert torch.equal(plan.token_index, starts[plan.request_ids] + plan.positions)
        following = plan.positions + 1 < torch.tensor(query_lens)[plan.request_ids]
        last = plan.token_index[~following]
        assert set(last.tolist()) <= {4, 7, 8}


@pytest.mark.parametrize("offsets", [[0, 16, 40, 40, 40], [0, 16, 16, 40]])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_requests_of_zero_tokens_at_the_end_and_in_the_middle(offsets, strategy):
    """Field case A6."""
    query_lens = torch.tensor(offsets).diff()
    check(query_lens.tolist(), [3] * len(query_lens), 2, strategy)
    dense = plans([16, 24], world_size=2, strategy=strategy)
    for plan, other in zip(plans(query_lens, world_size=2, strategy=strategy), dense, strict=True):
        assert torch.equal(plan.token_index, other.token_index)


def test_offsets_longer_than_the_batch_are_refused_and_a_slice_is_taken():
    """Field case A7."""
    buffer = torch.tensor([0, 16, 40, -1, -1])
    with pytest.raises(ValueError, match=r"query_lens\[2\]=-41 is negative"):
        make_cp_plan(buffer.diff(), world_size=2, rank=0)
    assert make_cp_plan(buffer[:3].diff(), world_size=2, rank=0).query_lens == (16, 24)
    with pytest.raises(ValueError, match="4 context_lens for 2 query_lens"):
        make_cp_plan(buffer[:3].diff(), [0, 0, 0, 0], world_size=2, rank=0)


@pytest.mark.parametrize("rows_per_rank", [8192, 65536])
def test_long_prompts_take_the_same_path(rows_per_rank):
    """Field case A11."""
    parts = plans([rows_per_rank * 4 - 5, 5], [0, 9], world_size=4)
    assert parts[0].counts == (rows_per_rank,) * 4
    assert torch.equal(torch.cat([p.token_index for p in parts]).sort().values, torch.arange(4 * rows_per_rank))
    for part in parts:
        assert part.pairs[part.rank] == int(part.kv_lens.sum())


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_no_request_and_no_token(strategy):
    for query_lens in ([], [0], [0, 0]):
        check(query_lens, query_lens, 3, strategy)


def test_lengths_may_be_any_integers():
    expected = make_cp_plan([3, 9], [1, 0], world_size=2, rank=1)
    for dtype in (torch.int32, torch.int64, torch.uint8):
        plan = make_cp_plan(torch.tensor([3, 9], dtype=dtype), torch.tensor([1, 0]), world_size=2, rank=1)
        assert plan == expected
        assert torch.equal(plan.positions, expected.positions)
    assert make_cp_plan((3, 9), range(1, -1, -1), world_size=2, rank=1) == expected


def test_plans_are_equal_by_what_they_were_made_from():
    plan = make_cp_plan([8], world_size=2, rank=0)
    assert plan == make_cp_plan([8], [0], world_size=2, rank=0)
    assert hash(plan) == hash(make_cp_plan([8], [0], world_size=2, rank=0))
    assert plan.for_rank(0) is plan
    assert plan.for_rank(1).for_rank(0) == plan
    assert len({plan, plan.for_rank(1), make_cp_plan([8], [1], world_size=2, rank=0)}) == 3
    assert plan != make_cp_plan([8], world_size=2, rank=0, strategy="interleave")
    with pytest.raises(AttributeError):
        plan.rank = 1


@pytest.mark.parametrize(
    "query_lens, context_lens, sizes, message",
    [
        ([3, -2], None, {}, r"query_lens\[1\]=-2 is negative"),
        ([3], [-1], {}, r"context_lens\[0\]=-1 is negative"),
        ([3], [1, 2], {}, "2 context_lens for 1 query_lens"),
        ([], [1], {}, "1 context_lens for 0 query_lens"),
        ([3.0], None, {}, "query_lens must be integers, not float64"),
        ([True], None, {}, "query_lens must be integers, not bool"),
        (torch.tensor([3.0]), None, {}, "query_lens must be integers, not float32"),
        ([[3]], None, {}, r"query_lens must be one-dimensional, not of shape \(1, 1\)"),
        (torch.tensor(3), None, {}, r"query_lens must be one-dimensional, not of shape \(\)"),
        ([3], None, {"world_size": 0}, "world_size=0"),
        ([3], None, {"rank": 2}, "rank=2 is outside world_size=2"),
        ([3], None, {"rank": -1}, "rank=-1 is outside world_size=2"),
        ([3], None, {"strategy": "ring"}, "strategy='ring'"),
    ],
)
def test_wrong_arguments_are_refused(query_lens, context_lens, sizes, message):
    with pytest.raises(ValueError, match=message):
        make_cp_plan(query_lens, context_lens, **{"world_size": 2, "rank": 0} | sizes)


def test_for_rank_refuses_ranks_that_are_not_there():
    with pytest.raises(ValueError, match="rank=2 is outside world_size=2"):
        make_cp_plan([3], world_size=2, rank=0).for_rank(2)


def test_work_beyond_int64_is_refused() -> None:
    for query, context in (([3], [2**63 - 1]), ([2**40], [2**40]), ([3], np.array([2**63], np.uint64))):
        with pytest.raises(ValueError, match=r"causal pairs|beyond 2\^62"):
            make_cp_plan(query, context, world_size=2, rank=0)
