"""Cached prefixes over PCP x DCP ranks: each rank has its shard of a page, and all take the same pages."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from cptools import ParallelConfig, ParallelGroups
from cptools.page_allocator import PageAllocator
from models.glm53 import GLM53
from serving.core import BlockPool, CacheIdentity, PrefixCache
from tests.checkpoints import TINY, random_prompts, save_guessable
from tests.ranks.harness import run_ranks
from tests.serving.conversations import PAGE, TWO, Engine, converse


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_guessable(tmp_path_factory.mktemp("tiny"), TINY)


def _conversations(rank: int, world_size: int, path: str, pcp: int, dcp: int) -> Any:
    with ParallelGroups.from_world(ParallelConfig(pcp=pcp, dcp=dcp)) as groups:
        model = GLM53.from_pretrained(path, parallel=groups, page_size=PAGE // dcp)
        engine = Engine(model, 18, decoded=dcp == 1)
        rounds, found = converse(engine, chunk=30, groups=TWO, new_tokens=5)
        return rounds, found, engine.pool.evicted_blocks


@pytest.mark.parametrize(("dcp", "pcps"), [(1, (2,)), (2, (1, 2))])
def test_further_turns_over_ranks_are_bit_equal_to_one_rank_without_a_cache(
    tiny: Path, dcp: int, pcps: tuple[int, ...]
) -> None:
    """With drafts, in chunks, after evictions. With DCP only rows of prompts are published here: rows that decode wrote
    come of sums in another order than a prompt's."""
    alone = GLM53.from_pretrained(tiny, page_size=PAGE, decode_parts=dcp)
    want, _ = converse(Engine(alone, 60, cached=False), chunk=1000, groups=TWO, new_tokens=5)
    for pcp in pcps:
        for rounds, found, evicted in run_ranks(_conversations, 2, str(tiny), pcp, dcp):
            assert rounds == want
            assert found > 100, found
            assert evicted > 5, evicted


def _two_turns(model: GLM53, *, close: bool) -> list[torch.Tensor]:
    """Logits of a second turn: of one request that goes on, or of a new one that finds what the first had cached."""
    pool = BlockPool(PageAllocator(12))
    cache = model.new_cache(12, allocator=pool)
    formats = (str(model.mla), str(model.index))
    prefixes = PrefixCache(CacheIdentity("tiny", "0", model.kv.layout, formats), pool)
    first, second = random_prompts((30, 11), TINY.vocab_size)
    request, known = cache.open(), list(first)

    def step(**work: dict[int, list[int]]) -> torch.Tensor:
        return model.last_logits(model.step(cache, **work))

    logits = [step(prompts={request: first})]
    known.append(int(logits[-1].argmax()))
    while cache.lengths[request] < 48:
        logits.append(step(decodes={request: known[-1:]}))
        known.append(int(logits[-1].argmax()))
    if close:
        assert prefixes.publish(prefixes.blocks(known), cache.tables, request, cache.lengths[request]) == 6
        cache.close(request)
        admission = prefixes.admit(prefixes.blocks([*known, *second]))
        assert admission.cached_tokens == 48
        request = cache.open(admission.prefix, admission.own)
    logits.append(step(prompts={request: [*known[48:], *second]}))
    for _ in range(2):
        logits.append(step(decodes={request: [int(logits[-1].argmax())]}))
    return logits


def _both_ways(rank: int, world_size: int, path: str) -> bool:
    with ParallelGroups.from_world(ParallelConfig(pcp=2, dcp=2)) as groups:
        model = GLM53.from_pretrained(path, parallel=groups, page_size=PAGE // 2, interleave=PAGE // 2)
        kept, found = _two_turns(model, close=False), _two_turns(model, close=True)
        return all(torch.equal(x, y) for x, y in zip(kept, found, strict=True))


def test_rows_that_decode_wrote_serve_the_next_turn_as_if_the_request_had_gone_on(tiny: Path) -> None:
    assert run_ranks(_both_ways, 2, str(tiny)) == [True, True]
