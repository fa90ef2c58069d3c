"""What a step computes, against lists written out by hand or by a loop."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cptools.cp_plan import make_cp_plan
from cptools.step_plan import make_step_plan

NO_TABLE = torch.empty(0, 0, dtype=torch.int64)


def no_prompt():
    return make_cp_plan([], world_size=2, rank=0)


def table(requests: int) -> torch.Tensor:
    return torch.arange(3 * requests).view(requests, 3)


def test_decode_rows_of_several_lengths():
    """One sampled row, four rows of verification, a request that idles, two rows."""
    plan = make_step_plan(
        no_prompt(),
        NO_TABLE,
        decode_context_lens=[10, 100, 7, 0],
        decode_query_lens=[1, 4, 0, 2],
        decode_tables=table(4),
    )
    assert plan.decode_positions.tolist() == [10, 100, 101, 102, 103, 0, 1]
    assert plan.decode_request_ids.tolist() == [0, 1, 1, 1, 1, 3, 3]
    assert plan.decode_positions.dtype == plan.decode_request_ids.dtype == torch.int64
    assert (plan.prompt_rows, plan.decode_rows) == (0, 7)
    assert plan.positions.tolist() == plan.decode_positions.tolist()
    assert plan.decode_query_lens == (1, 4, 0, 2)
    assert plan.decode_context_lens == (10, 100, 7, 0)


def test_one_row_each_unless_said():
    plan = make_step_plan(no_prompt(), NO_TABLE, decode_context_lens=[5, 0, 9], decode_tables=table(3))
    assert plan.decode_query_lens == (1, 1, 1)
    assert plan.decode_positions.tolist() == [5, 0, 9]
    assert plan.decode_request_ids.tolist() == [0, 1, 2]


@pytest.mark.parametrize("rank", [0, 1])
def test_prompt_rows_come_first_and_decode_rows_are_on_every_rank(rank):
    """Prompts of 4 and 1 tokens over 2 ranks, beside two decoding requests."""
    prompt = make_cp_plan([4, 1], [0, 8], world_size=2, rank=rank)
    plan = make_step_plan(
        prompt, table(2), decode_context_lens=[20, 30], decode_query_lens=[1, 2], decode_tables=table(2)
    )
    assert plan.prompt_rows == prompt.counts[rank] == len(prompt.positions)
    assert plan.positions.tolist() == prompt.positions.tolist() + [20, 30, 31]
    assert plan.decode_rows == 3


def test_prompt_rows_are_those_of_the_rank():
    prompt = make_cp_plan([5], world_size=4, rank=0)
    rows = [make_step_plan(prompt.for_rank(rank), table(1)).prompt_rows for rank in range(4)]
    assert rows == list(prompt.counts)
    assert sum(rows) == 5


def test_nothing_to_do():
    plan = make_step_plan(no_prompt(), NO_TABLE)
    assert (plan.prompt_rows, plan.decode_rows) == (0, 0)
    assert plan.positions.shape == plan.decode_positions.shape == plan.decode_request_ids.shape == (0,)
    assert plan.positions.dtype == torch.int64
    plan = make_step_plan(no_prompt(), NO_TABLE, decode_context_lens=[3], decode_query_lens=[0], decode_tables=table(1))
    assert plan.decode_rows == 0
    assert plan.decode_positions.shape == (0,)


@given(st.lists(st.tuples(st.integers(0, 2**40), st.integers(0, 5)), max_size=8))
def test_positions_go_on_from_the_context(requests):
    contexts, queries = [c for c, _ in requests], [q for _, q in requests]
    plan = make_step_plan(
        no_prompt(),
        NO_TABLE,
        decode_context_lens=contexts,
        decode_query_lens=queries,
        decode_tables=table(len(requests)),
    )
    assert plan.decode_positions.tolist() == [c + i for c, q in requests for i in range(q)]
    assert plan.decode_request_ids.tolist() == [r for r, (_, q) in enumerate(requests) for _ in range(q)]
    assert plan.decode_rows == sum(queries)


def test_mismatches_raise_with_the_numbers():
    prompt = make_cp_plan([4, 1], world_size=2, rank=0)
    with pytest.raises(ValueError, match="2 lengths, 1 tables"):
        make_step_plan(prompt, table(1))
    with pytest.raises(ValueError, match="2 context lengths, 1 query lengths, 2 tables"):
        make_step_plan(no_prompt(), NO_TABLE, decode_context_lens=[1, 2], decode_query_lens=[1], decode_tables=table(2))
    with pytest.raises(ValueError, match="2 context lengths, 2 query lengths, 3 tables"):
        make_step_plan(no_prompt(), NO_TABLE, decode_context_lens=[1, 2], decode_tables=table(3))
    with pytest.raises(ValueError, match="1 context lengths, 1 query lengths, 0 tables"):
        make_step_plan(no_prompt(), NO_TABLE, decode_context_lens=[1])
    with pytest.raises(ValueError, match="decode_context_lens=-1 must be >= 0"):
        make_step_plan(no_prompt(), NO_TABLE, decode_context_lens=[3, -1], decode_tables=table(2))
    with pytest.raises(ValueError, match="decode_query_lens=-2 must be >= 0"):
        make_step_plan(no_prompt(), NO_TABLE, decode_context_lens=[3], decode_query_lens=[-2], decode_tables=table(1))
