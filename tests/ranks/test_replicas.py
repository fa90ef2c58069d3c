"""Data-parallel replicas whose experts are spread over all of them step together, and compute as if alone."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from cptools import ParallelConfig, ParallelGroups, PoolExhausted
from models.glm53 import GLM53
from tests.checkpoints import TINY, random_prompts, save_random
from tests.ranks.harness import run_ranks

CONFIG = replace(TINY, num_nextn_predict_layers=1)
LENGTHS, CHUNK = (37, 5, 90, 1), 20
# Which prompts a replica runs, and how many tokens it makes: one is done before another, one has nothing at all.
WORK = [(slice(0, 1), 2), (slice(1, 4), 6), (slice(0, 0), 3)]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_random(tmp_path_factory.mktemp("tiny"), CONFIG)


def _results(model: GLM53, prompts: list[list[int]], new_tokens: int) -> list[Any]:
    out = model.generate_batch(prompts, new_tokens, chunk=CHUNK, prompt_logits="all")
    return [out.ids, out.prompt_logits, out.decode_logits]


def _same(got: list[Any], want: list[Any]) -> bool:
    pairs = [*zip(got[1], want[1], strict=True), *zip(got[2], want[2], strict=True)]
    return got[0] == want[0] and all(torch.equal(a, b) for a, b in pairs)


def uneven(rank: int, world_size: int, path: str, sizes: ParallelConfig) -> list[Any]:
    prompts = random_prompts(LENGTHS, CONFIG.vocab_size)
    with ParallelGroups.from_world(sizes) as groups:
        model = GLM53.from_pretrained(path, parallel=groups)
        which, new_tokens = WORK[groups.coords.dp_rank]
        results = [_results(model, prompts[which], new_tokens)]
        # And once more with the work of the others: nothing is left of the first batch.
        which, new_tokens = WORK[sizes.dp - 1 - groups.coords.dp_rank]
        results.append(_results(model, prompts[which], new_tokens))
        own = prompts[groups.coords.dp_rank]
        return [groups.coords.dp_rank, *results, model.generate(own, 4), model.mtp_logits(own, 3)]


@pytest.mark.parametrize(
    "sizes",
    [ParallelConfig(dp=2, ep=2), ParallelConfig(dp=3, ep=1), ParallelConfig(dp=2, pcp=2, dcp=2, ep=4)],
    ids=["dp2 ep2", "dp3", "dp2 pcp2 dcp2 ep4"],
)
def test_replicas_with_other_prompts_equal_one_rank(checkpoint: Path, sizes: ParallelConfig) -> None:
    prompts = random_prompts(LENGTHS, CONFIG.vocab_size)
    alone = GLM53.from_pretrained(checkpoint, decode_parts=sizes.dcp)
    want = [_results(alone, prompts[which], new_tokens) for which, new_tokens in WORK]
    for replica, first, second, generated, drafts in run_ranks(
        uneven, sizes.world_size, str(checkpoint), sizes, timeout=120
    ):
        assert _same(first, want[replica])
        assert _same(second, want[sizes.dp - 1 - replica])
        assert generated == alone.generate(prompts[replica], 4)
        assert torch.equal(drafts, alone.mtp_logits(prompts[replica], 3))


def one_refuses(rank: int, world_size: int, path: str) -> list[str]:
    said = []
    with ParallelGroups.from_world(ParallelConfig(dp=2, ep=2)) as groups:
        model = GLM53.from_pretrained(path, parallel=groups)
        cache = model.new_cache(1)
        request = cache.open()
        for work in (
            lambda: model.generate_batch([[1, 2], [3, 512 if rank == 1 else 4]], 3),
            lambda: model.generate_batch([[1] * 80], 3, cache=cache if rank == 0 else None),
            lambda: model.step(cache, prompts={request: [1] * (65 if rank == 1 else 5)}),
            lambda: model.step(cache, prompts={request + 7 * rank: [1]}),
        ):
            with pytest.raises((ValueError, PoolExhausted)) as error:
                work()
            said.append(str(error.value))
        assert (cache.lengths, model.split.lockstep.most(rank)) == ({request: 0}, 1)
        said.append(repr(model.generate([5, 6, 7], 3)))
    return said


def test_a_replica_that_refuses_does_not_leave_the_others_waiting(checkpoint: Path) -> None:
    first, second = run_ranks(one_refuses, 2, str(checkpoint), timeout=60)
    other = [f"replicas [{replica}] of 2 refused this step, so no other can take it" for replica in (1, 0, 1, 1)]
    assert [first[0], second[1], first[2], first[3]] == other
    assert "token ids in [3, 512]" in second[0]
    assert "free pages, the batch needs 2" in first[1]
    assert "2 pages wanted" in second[2]
    assert "is not open" in second[3]
    assert first[4] == second[4] == repr(GLM53.from_pretrained(checkpoint).generate([5, 6, 7], 3))


def idle_steps(rank: int, world_size: int, path: str) -> bool:
    """An engine steps a replica that has no work: no prompts, no decodes, and no logits come back."""
    with ParallelGroups.from_world(ParallelConfig(dp=2, ep=2)) as groups:
        model = GLM53.from_pretrained(path, parallel=groups)
        cache = model.new_cache(1)
        request = cache.open()
        if rank == 1:
            result = model.step(cache)
            assert model.last_logits(result).shape == (0, CONFIG.vocab_size)
            assert result.split.goes_on
            assert model.mtp_step(result, []).shape == (0, CONFIG.hidden_size)
        else:
            result = model.step(cache, prompts={request: [7, 8]})
            model.mtp_step(result, [8, 9])
            alone = GLM53.from_pretrained(path)
            other = alone.new_cache(1)
            want = alone.step(other, prompts={other.open(): [7, 8]})
            assert torch.equal(result.hidden, want.hidden)
        return model.step(cache).split.goes_on


def test_an_idle_replica_steps_without_tokens(checkpoint: Path) -> None:
    assert run_ranks(idle_steps, 2, str(checkpoint)) == [False, False]
