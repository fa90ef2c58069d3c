"""Splits of the model together: the matrix, what is refused, the collectives, and rows that must not touch others."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from cptools import ParallelConfig, ParallelGroups
from cptools.tensor_parallel import TensorParallel
from models.glm53 import GLM53
from models.glm53.ffn import feed_forward
from models.glm53.weights import MoEWeights
from tests.checkpoints import TINY, random_prompts, save_random
from tests.ranks import composition_matrix
from tests.ranks.collective_counter import CollectiveCounter
from tests.ranks.harness import run_ranks

PAGE = Path(__file__).resolve().parents[2] / "docs/composition.md"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_random(tmp_path_factory.mktemp("tiny"), TINY)


def test_matrix_is_as_the_docs_say(tmp_path: Path, record_property: Callable[[str, object], None]) -> None:
    table = composition_matrix.run_matrix(tmp_path)
    record_property("table", "\n".join([*table.rows, table.rejections]))
    assert not table.wrong
    assert table.orders_differ
    assert sum(count > 0 for count in table.accepted) > 2  # drafts are rejected and accepted, in turn
    assert table.rejected <= 1
    assert "\n".join(table.rows) in PAGE.read_text()


@pytest.mark.parametrize(
    ("sizes", "reason"),
    [
        ({"tp": 4, "dcp": 2}, r"dcp=2 does not go with pcp=1, tp=4: legal are \[1, 4\]"),
        ({"pcp": 2, "tp": 2, "dcp": 3}, r"legal are \[1, 2, 4\]"),
        ({"pcp": 4, "dcp": 3}, r"legal are \[1, 2, 4\]"),
        ({"pcp": 2, "tp": 2, "ep": 2}, "ep=2 must be 1 or the whole world of 4 ranks"),
        ({"dp": 2, "pcp": 2, "ep": 2}, "ep=2 must be 1 or the whole world of 4 ranks"),
        ({"tp": 3}, "tp=3 must divide num_heads=8"),
        ({"pcp": 3, "ep": 3}, "ep=3 must divide num_experts=16"),
    ],
)
def test_what_does_not_go_together_is_refused(sizes: dict[str, int], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        ParallelConfig(**sizes).validate_model(TINY.num_attention_heads, TINY.n_routed_experts)


def _refused(rank: int, world_size: int, path: str) -> str:
    with ParallelGroups.from_world(ParallelConfig(tp=2)) as groups, pytest.raises(ValueError) as error:
        GLM53.from_pretrained(path, parallel=groups)
    return str(error.value)


def test_widths_that_can_not_be_split_are_refused_on_every_rank(tmp_path: Path) -> None:
    path = save_random(tmp_path, replace(TINY, intermediate_size=255, moe_intermediate_size=63))
    said = "tp=2 must divide intermediate_size=255; tp=2 must divide moe_intermediate_size * n_shared_experts=63"
    assert run_ranks(_refused, 2, str(path)) == [f"{said}; tp=2 must divide moe_intermediate_size=63"] * 2


STEPS = ("one token", "a chunk", "a decode row")


def _collectives(
    rank: int, world_size: int, path: str, cases: list[ParallelConfig]
) -> list[list[tuple[bool, bool, Any]]]:
    """Per case and step whether this rank has rows, whether it has some to share over TP, and what it issues."""
    results = []
    for sizes in cases:
        with ParallelGroups.from_world(sizes) as groups:
            model = GLM53.from_pretrained(path, parallel=groups)
            cache = model.new_cache(4)
            request = cache.open()
            counts = []
            for step in ({"prompts": {request: [5]}}, {"prompts": {request: [6] * 9}}, {"decodes": {request: [7]}}):
                with CollectiveCounter() as seen:
                    result = model.step(cache, **step)
                shared = model.split.pcp_rows.share(result.hidden[result.plan.prompt_rows :])
                counts.append((len(result.hidden) > 0, result.plan.prompt_rows + len(shared) > 0, seen.counts))
            results.append(counts)
    return results


def test_collectives_are_those_of_the_docs_also_on_ranks_without_rows(tiny: Path) -> None:
    """A TP group whose ranks have no rows has nothing to sum, all others are issued by every rank."""
    cases = [
        ParallelConfig(tp=4),
        ParallelConfig(tp=4, ep=4),
        ParallelConfig(pcp=4, ep=4),
        ParallelConfig(pcp=2, tp=2, dcp=4, ep=4),
        ParallelConfig(dp=2, tp=2, ep=4),
    ]
    by_rank = run_ranks(_collectives, 4, str(tiny), cases)
    layers, full = TINY.num_hidden_layers, sum(kind == "full" for kind in TINY.indexer_types)
    mixtures = sum(kind == "sparse" for kind in TINY.mlp_layer_types)
    for number, sizes in enumerate(cases):
        for place, step in enumerate(STEPS):
            for has_rows, shares, seen in (ranks[number][place] for ranks in by_rank):
                decode = step == "a decode row"
                spread, over_dcp = sizes.ep > 1, sizes.dcp > 1
                gathers = 2 * layers * (sizes.tp > 1 and has_rows)  # sums of attention and feed-forward
                gathers += layers * (sizes.pcp > 1 and not decode)  # new rows
                gathers += over_dcp * (layers + full)  # contexts; or candidates and merges
                gathers += over_dcp * layers * (decode and sizes.tp > 1)  # all heads
                gathers += mixtures * spread * (sizes.tp > 1 and shares)  # rows that TP ranks share
                gathers += mixtures * spread * (sizes.pcp > 1 and decode)  # rows that PCP ranks share
                gathers += sizes.dp > 1 and spread
                assert seen["_allgather_base_"] == gathers, (sizes, step)
                assert seen["alltoall_base_"] == 3 * mixtures * spread, (sizes, step)


def _mixture(model: GLM53, rows: torch.Tensor) -> torch.Tensor:
    """The first mixture of a model over decode rows."""
    weights = next(w.ffn for w in model.weights.layers if isinstance(w.ffn, MoEWeights))
    return feed_forward(rows, weights, model.config, model.split.begin_decode(rows.shape[0]))


def _poisoned_rows() -> tuple[torch.Tensor, torch.Tensor]:
    clean = torch.randn(128, TINY.hidden_size, generator=torch.Generator().manual_seed(0))
    poisoned = clean.clone()
    poisoned[127] = torch.nan
    return clean, poisoned


def _mixtures_on_ranks(rank: int, world_size: int, path: str) -> list[tuple[torch.Tensor, torch.Tensor]]:
    results = []
    for sizes in (ParallelConfig(tp=2), ParallelConfig(pcp=2, ep=2), ParallelConfig(dcp=2, ep=2)):
        with ParallelGroups.from_world(sizes) as groups:
            model = GLM53.from_pretrained(path, parallel=groups)
            clean, poisoned = (_mixture(model, rows) for rows in _poisoned_rows())
            results.append((clean, poisoned))
    return results


def test_a_row_of_nan_stays_in_its_row_through_the_experts(tiny: Path) -> None:
    """Field cases B5 and B6: padding that holds NaN shares tiles, experts and sums with live rows."""
    alone = GLM53.from_pretrained(tiny)
    clean, poisoned = (_mixture(alone, rows) for rows in _poisoned_rows())
    for result in run_ranks(_mixtures_on_ranks, 2, str(tiny)):
        for got_clean, got_poisoned in [(clean, poisoned), *result]:
            assert torch.isfinite(got_clean).all()
            assert torch.equal(got_poisoned[:127], got_clean[:127])
            assert torch.isnan(got_poisoned[127]).all()
        _, spread, pure_dcp = result
        assert torch.equal(spread[0], clean)
        assert torch.equal(pure_dcp[0], clean)


def _blocks(rank: int, world_size: int, path: str) -> Any:
    """A mixture in blocks of 7 rows: ranks have 5 and 4 of them, and the last of one is empty."""
    from unittest import mock

    small_blocks = mock.patch("models.glm53.ffn.CPU_BLOCK_ROWS", 7)
    with ParallelGroups.from_world(ParallelConfig(pcp=2, ep=2)) as groups, small_blocks:
        model = GLM53.from_pretrained(path, parallel=groups)
        logits = model.prefill_logits(random_prompts((57,), TINY.vocab_size)[0])
        with CollectiveCounter() as seen:
            _mixture(model, torch.zeros(57, TINY.hidden_size))
        return logits, seen.counts["alltoall_base_"]


def test_rows_are_exchanged_in_blocks_of_which_every_rank_counts_as_many(tiny: Path) -> None:
    want = GLM53.from_pretrained(tiny).prefill_logits(random_prompts((57,), TINY.vocab_size)[0])
    for logits, exchanges in run_ranks(_blocks, 2, str(tiny)):
        assert torch.equal(logits, want)
        assert exchanges == 3 * 5


def _summed(rank: int, world_size: int, path: str) -> list[Any]:
    """Decode whose experts are summed and not exchanged, as on a GPU."""
    prompts, results = random_prompts((19, 1, 40), TINY.vocab_size), []
    torch.use_deterministic_algorithms(True)  # torch.empty holds NaN
    for sizes in (ParallelConfig(tp=2, ep=2), ParallelConfig(pcp=2, dcp=2, ep=2), ParallelConfig(dcp=2, ep=2)):
        with ParallelGroups.from_world(sizes) as groups:
            model = GLM53.from_pretrained(path, parallel=groups)
            assert model.split.expert_sum is None
            model.split = replace(model.split, expert_sum=TensorParallel(group=groups.ep))
            out = model.generate_batch(prompts, 4)
            cache = model.new_cache(1)
            request = cache.open()
            model.step(cache, prompts={request: [5]})
            with CollectiveCounter() as seen:
                model.step(cache, decodes={request: [6]})
            results.append((out.ids, out.decode_logits, dict(seen.counts)))
    torch.use_deterministic_algorithms(False)
    return results


def test_decode_that_adds_up_experts_is_close_to_one_rank_and_exchanges_nothing(tiny: Path) -> None:
    prompts = random_prompts((19, 1, 40), TINY.vocab_size)
    first, second = run_ranks(_summed, 2, str(tiny))
    for number, decode_parts in enumerate((1, 2, 2)):
        want = GLM53.from_pretrained(tiny, decode_parts=decode_parts).generate_batch(prompts, 4)
        for ids, logits, counts in (first[number], second[number]):
            assert ids == want.ids
            assert "alltoall_base_" not in counts
            for got, expected in zip(logits, want.decode_logits, strict=True):
                torch.testing.assert_close(got, expected, atol=1e-4, rtol=0)
        assert all(torch.equal(a, b) for a, b in zip(first[number][1], second[number][1], strict=True))
