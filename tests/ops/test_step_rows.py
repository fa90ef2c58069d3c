"""Decode rows in persistent, padded buffers are the rows of a planned step bit for bit, and padding touches nothing."""

from __future__ import annotations

import pytest
import torch

from cptools import RoundRobinKVShard
from cptools.cp_plan import make_cp_plan
from cptools.formats import FP8
from cptools.step_plan import make_step_plan
from cptools.step_rows import DecodeRows, PromptRows
from tests.decode_problem import SMALL, DecodeProblem

CPU = torch.device("cpu")
CONTEXTS = [0, 1, 63, 64, 200]


def planned(kv: RoundRobinKVShard, contexts: list[int], per_request: int, tables: torch.Tensor) -> DecodeRows:
    plan = make_step_plan(
        make_cp_plan([], world_size=1, rank=0),
        torch.empty(0, 0, dtype=torch.int64),
        decode_context_lens=contexts,
        decode_query_lens=[per_request] * len(contexts),
        decode_tables=tables,
    )
    return DecodeRows.of_plan(kv, plan, CPU)


@pytest.mark.parametrize("per_request", [1, 2, 3, 4, 5, 7])
@pytest.mark.parametrize(("world_size", "interleave"), [(1, 1), (2, 1), (3, 4)])
def test_buffers_give_the_rows_of_the_plan(world_size: int, interleave: int, per_request: int) -> None:
    problem = DecodeProblem(SMALL, torch.float32, num_pages=12, page_size=64)
    tables = problem.tables(CONTEXTS, per_request, width=4)
    for rank in range(world_size):
        kv = RoundRobinKVShard(world_size=world_size, rank=rank, interleave=interleave, page_size=64)
        want = planned(kv, CONTEXTS, per_request, tables)
        got = DecodeRows.of_buffers(kv, torch.tensor(CONTEXTS), tables, per_request=per_request)
        for name in ("positions", "request_ids", "slots", "kv_lens", "local_lens"):
            assert torch.equal(getattr(got, name), getattr(want, name)), name
        assert len(got) == len(CONTEXTS) * per_request
        assert torch.equal(got.tables_of(slice(0, len(got))), tables)
        odd = slice(1, len(got))
        assert torch.equal(got.tables_of(odd), tables[got.request_ids[odd]] if per_request > 1 else tables[1:])


@pytest.mark.parametrize(("world_size", "interleave"), [(1, 1), (1, 4), (2, 1), (3, 4)])
def test_context_slots_are_where_the_ranks_keep_each_position(world_size: int, interleave: int) -> None:
    """Of two requests and one of them in pages out of order; each position is kept by one rank."""
    new, cached = [3, 0, 130], [0, 7, 61]
    tables = torch.tensor([[9, -1, -1], [4, -1, -1], [7, 2, 11]])
    page_size, seen = 64, []
    for rank in range(world_size):
        kv = RoundRobinKVShard(world_size=world_size, rank=rank, interleave=interleave, page_size=page_size)
        plan = make_cp_plan(new, cached, world_size=1, rank=0)
        want = [
            (int(tables[request, kv.layout.local_index(p) // page_size]) * page_size)
            + kv.layout.local_index(p) % page_size
            if kv.layout.owner(p) == rank
            else -1
            for request, length in enumerate(n + c for n, c in zip(new, cached, strict=True))
            for p in range(length)
        ]
        slots = PromptRows(kv, plan, tables, CPU).context_slots
        assert slots.tolist() == want
        seen.append(slots)
    assert (torch.stack(seen) >= 0).sum(0).tolist() == [1] * (3 + 7 + 191)


def test_context_slots_of_no_prompt_are_none() -> None:
    kv = RoundRobinKVShard(world_size=1, rank=0, page_size=64)
    rows = PromptRows(kv, make_cp_plan([], world_size=1, rank=0), torch.empty(0, 0, dtype=torch.int64), CPU)
    assert rows.context_slots.shape == (0,)


def test_padding_sees_no_key_and_has_no_slot() -> None:
    kv = RoundRobinKVShard(world_size=2, rank=1, page_size=4)
    tables = torch.tensor([[-1, -1], [5, 6], [123456, 123456]])
    rows = DecodeRows.of_buffers(kv, torch.tensor([-1, 6, -1]), tables, per_request=2)
    assert rows.positions.tolist() == [-1, -1, 6, 7, -1, -1]
    assert rows.kv_lens.tolist() == [0, 0, 7, 8, 0, 0]
    assert rows.local_lens.tolist() == [0, 0, 3, 4, 0, 0]
    assert rows.slots.tolist() == [-1, -1, -1, 5 * 4 + 3, -1, -1]


@pytest.mark.parametrize("per_request", [1, 4])
@pytest.mark.parametrize("kv_rows", [torch.float32, FP8])
def test_padded_buffers_compute_the_same_bits_and_write_the_same_bytes(kv_rows: torch.dtype, per_request: int) -> None:
    """Field case B5: padding of NaN beside live rows. Wider tables, stale pages in them, requests in other places."""
    results = []
    for padded in (False, True):
        problem = DecodeProblem(SMALL, kv_rows, num_pages=40, page_size=16)
        tables = problem.tables(CONTEXTS, per_request, width=13)
        given = problem.new_rows(len(CONTEXTS) * per_request)
        live = torch.arange(len(CONTEXTS))
        if padded:
            live = torch.tensor([1, 2, 4, 6, 7])
            contexts, wide = torch.full((9,), -1), torch.full((9, 30), 3)
            contexts[live], wide[live] = torch.tensor(CONTEXTS), torch.nn.functional.pad(tables, (0, 17), value=7)
            rows = DecodeRows.of_buffers(problem.cache.kv, contexts, wide, per_request=per_request)
        else:
            rows = planned(problem.cache.kv, CONTEXTS, per_request, tables)
        at = (live.unsqueeze(1) * per_request + torch.arange(per_request)).flatten()
        spread = {}
        for name, value in given.items():
            spread[name] = torch.full((len(rows), *value.shape[1:]), torch.nan)
            spread[name][at] = value
        outs = problem.run(rows, spread)
        idle = torch.ones(len(rows), dtype=torch.bool)
        idle[at] = False
        assert (outs[0][idle] == 0).all()
        assert (outs[2][idle] == -1).all()
        pages = problem.cache.mla_rows.pages, problem.cache.index_rows.pages
        results.append([out[at] for out in outs] + list(pages))
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)


def test_rows_that_do_not_fit_the_tables_are_refused() -> None:
    kv = RoundRobinKVShard(world_size=1, rank=0)
    two = torch.zeros(2, dtype=torch.int64)
    with pytest.raises(ValueError, match="2 rows are not 2 for each of 2 requests"):
        DecodeRows(kv, two, two, torch.zeros(2, 1, dtype=torch.int64), two, per_request=2)


def test_more_rows_than_slots_of_32_bits_are_refused_before_any_memory() -> None:
    with pytest.raises(ValueError, match="33554432 pages of 64 rows"):
        DecodeProblem(SMALL, torch.float32, num_pages=2**25)
