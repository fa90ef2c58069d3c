"""Rows reach the ranks of their experts once, results return to their (token, column), whatever the router chose."""

from __future__ import annotations

from collections.abc import Callable
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from cptools.collectives import all_to_all_rows
from cptools.expert_exchange import ExpertExchange
from tests.ranks.collective_counter import CollectiveCounter
from tests.ranks.harness import run_ranks

EXPERTS, COLUMNS = 12, 3
TOKENS = [(0, 0, 0, 0), (1, 0, 0, 0), (5, 1, 0, 67), (13, 13, 13, 13), (0, 3, 0, 2)]


def _random(tokens: int, generator: torch.Generator) -> Tensor:
    return torch.rand(tokens, EXPERTS, generator=generator).argsort(1)[:, :COLUMNS].sort(1).values


ROUTERS: dict[str, Callable[[int, torch.Generator], Tensor]] = {
    "random": _random,
    "unsorted": lambda tokens, generator: _random(tokens, generator).flip(1),
    "all to three experts": lambda tokens, generator: torch.tensor([[4, 5, 7]]).repeat(tokens, 1),
    "first and last": lambda tokens, generator: torch.tensor([[0, 1, 11]]).repeat(tokens, 1),
}


def _routed(rank: int, tokens: int, router: str) -> Tensor:
    return ROUTERS[router](tokens, torch.Generator().manual_seed(rank))


def _named_rows(rank: int, tokens: int, dtype: torch.dtype) -> Tensor:
    """Each row says whose it is: rank, token, and three more columns."""
    token = torch.arange(tokens)
    return torch.stack([torch.full((tokens,), rank), token, token + 7, -token, token % 3], dim=1).to(dtype)


def _outputs(rows: Tensor, experts: Tensor) -> Tensor:
    """What the experts make of rows: a value that names both."""
    return torch.cat([rows, experts.to(rows.dtype).unsqueeze(1)], dim=1)[:, 1:]


def exchange_everything(rank: int, world_size: int) -> list[dict[str, int]]:
    exchange = ExpertExchange(num_experts=EXPERTS, group=dist.group.WORLD)
    issued = []
    torch.use_deterministic_algorithms(True)  # torch.empty holds NaN
    for counts in TOKENS:
        for router in ROUTERS:
            for dtype in (torch.float32, torch.bfloat16):
                tokens = counts[:world_size]
                rows = [_named_rows(r, n, dtype) for r, n in enumerate(tokens)]
                routed = [_routed(r, n, router) for r, n in enumerate(tokens)]
                with CollectiveCounter() as seen:
                    sent = exchange.dispatch(rows[rank], routed[rank])
                    local = torch.repeat_interleave(torch.tensor(exchange.local_experts), sent.counts)
                    back = exchange.results(_outputs(sent.rows, local), sent)[sent.slots]
                issued.append(dict(seen.counts))
                want = [
                    rows[r][(routed[r] == expert).any(1)]
                    for expert in exchange.local_experts
                    for r in range(world_size)
                ]
                assert torch.equal(sent.rows, torch.cat(want))
                every = torch.cat(routed).flatten()
                assert sent.counts.tolist() == [int((every == e).sum()) for e in exchange.local_experts]
                assert back.shape == (tokens[rank], COLUMNS, 5)
                own = rows[rank].repeat_interleave(COLUMNS, 0)
                assert torch.equal(back.flatten(0, 1), _outputs(own, routed[rank].flatten()))
    torch.use_deterministic_algorithms(False)
    return issued


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_rows_arrive_grouped_and_results_come_back(world_size: int) -> None:
    first, *others = run_ranks(exchange_everything, world_size)
    assert all(issued == first for issued in others)
    kinds = [] if world_size == 1 else [{"alltoall_base_": 3}]
    assert all(issued in (kinds or [{}]) for issued in first)


def count_travelling_rows(rank: int, world_size: int) -> list[list[int]]:
    """Rows that this rank sends to each rank, in each of the three all-to-alls."""
    exchange = ExpertExchange(num_experts=4, group=dist.group.WORLD)
    x = torch.randn(3, 8)
    experts = torch.tensor([[0, 1, 3], [0, 1, 2], [0, 2, 3]]) if rank == 0 else torch.tensor([[0, 2, 3]] * 3)
    seen: list[list[int]] = []

    def recording(rows: Tensor, in_counts: list[int], out_counts: list[int], *, group: dist.ProcessGroup) -> Tensor:
        seen.append(list(in_counts))
        return all_to_all_rows(rows, in_counts, out_counts, group=group)

    with mock.patch("cptools.expert_exchange.all_to_all_rows", recording):
        sent = exchange.dispatch(x, experts)
        exchange.results(sent.rows, sent)
    most = exchange.received_bytes(3, 3, 32)
    assert (seen[1][0] + seen[1][1]) * (32 + 12) <= most == 2 * 3 * 44
    assert sent.rows.shape[0] <= exchange.pairs(3, 3) == 2 * 3 * 2
    return seen


def test_a_row_for_several_experts_of_a_rank_travels_there_once() -> None:
    """Nor is anything padded: three tokens with three experts each are six journeys and nine results."""
    first, second = run_ranks(count_travelling_rows, 2)
    assert first == [[1, 1], [3, 3], [5, 3]]
    assert second == [[1, 1], [3, 3], [4, 6]]


def refuse_ids(rank: int, world_size: int) -> list[str]:
    exchange = ExpertExchange(num_experts=4, group=dist.group.WORLD)
    said = []
    for wrong in (4, -1):
        experts = torch.tensor([[0, 3], [1, wrong if rank == 1 else 2]])
        with CollectiveCounter() as seen, pytest.raises(ValueError) as error:
            exchange.dispatch(torch.zeros(2, 8), experts)
        assert sum(seen.counts.values()) == 1
        said.append(str(error.value))
    return said


def test_ids_of_no_expert_are_refused_by_all_ranks_before_rows_travel() -> None:
    results = run_ranks(refuse_ids, 2)
    assert results == [["ranks [1] have experts outside [0, 4)"] * 2] * 2
    with pytest.raises(ValueError, match=r"experts in \[0, 4\], there are 4"):
        ExpertExchange(num_experts=4, world_size=1, rank=0).dispatch(torch.zeros(1, 8), torch.tensor([[0, 4]]))


def test_plan_without_a_group_and_misfits() -> None:
    exchange = ExpertExchange(num_experts=256, world_size=8, rank=3)
    assert exchange.local_experts == range(96, 128)
    assert exchange.pairs(2048, 8) == 8 * 2048 * 8
    assert exchange.received_bytes(2048, 8, 12288) == 8 * 2048 * 12320
    with pytest.raises(ValueError, match="dispatch over world_size=8 ranks needs group="):
        exchange.dispatch(torch.zeros(1, 4), torch.zeros(1, 8, dtype=torch.int64))
    with pytest.raises(ValueError, match="world_size=4 must divide num_experts=10"):
        ExpertExchange(num_experts=10, world_size=4, rank=0)
    alone = ExpertExchange(num_experts=4, world_size=1, rank=0)
    for x, experts in ((torch.zeros(2, 8), torch.zeros(3, 2).long()), (torch.zeros(2, 8), torch.zeros(2, 2))):
        with pytest.raises(ValueError, match="experts int64"):
            alone.dispatch(x, experts)
    sent = alone.dispatch(torch.zeros(2, 8), torch.tensor([[0, 1], [2, 3]]))
    with pytest.raises(ValueError, match="for 4 rows"):
        alone.results(torch.zeros(3, 8), sent)


@pytest.mark.parametrize("tokens", [0, 1, 67])
def test_own_rows_of_all_ranks_are_all_pairs(tokens: int) -> None:
    """Rows that every rank holds: each takes those of its experts, the pairs of others stand behind them."""
    x, experts = torch.randn(tokens, 8), _random(tokens, torch.Generator().manual_seed(0))
    seen = torch.zeros(tokens, COLUMNS, dtype=torch.int64)
    for rank in range(3):
        exchange = ExpertExchange(num_experts=EXPERTS, world_size=3, rank=rank)
        own = exchange.own_rows(x, experts)
        count = int(own.counts.sum())
        assert own.counts.tolist() == [int((experts == e).sum()) for e in exchange.local_experts]
        mine = own.slots < count
        seen += mine
        assert torch.equal(own.rows[own.slots[mine]], x.unsqueeze(1).expand(-1, COLUMNS, -1)[mine])
        assert (own.slots[~mine] == tokens * COLUMNS - 1).all()
        local = torch.repeat_interleave(torch.tensor(exchange.local_experts), own.counts)
        assert torch.equal(local[own.slots[mine]], experts[mine])
    assert (seen == 1).all()
