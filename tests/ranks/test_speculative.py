"""Drafts over ranks: the tokens of plain decoding on one rank, and the very drafts that one rank makes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cptools import ParallelConfig, ParallelGroups
from cptools.kernels.sampling import Sampling
from models.glm53 import GLM53
from tests.checkpoints import TINY, random_prompts, save_guessable
from tests.ranks.collective_counter import CollectiveCounter
from tests.ranks.harness import run_ranks

LENGTHS = (1, 2, 17, 70)
NEW_TOKENS = 9
CASES = [  # rows, tokens in a chunk, interleave, IndexShare, sampling
    ("fp32", None, 1, True, Sampling()),
    ("fp8", 50, 4, False, Sampling()),
    ("fp32", 9, 1, True, Sampling(0.5, top_p=0.9, seed=3)),
]


@pytest.fixture(scope="module")
def guessable(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_guessable(tmp_path_factory.mktemp("guessable"), TINY)


def _load(path: str, kv_rows: str, interleave: int, share: bool, **more: Any) -> GLM53:
    model = GLM53.from_pretrained(path, kv_rows=kv_rows, interleave=interleave, **more)  # type: ignore[arg-type]
    model.config = replace(model.config, index_share_for_mtp_iteration=share)
    return model


def _run(model: GLM53, chunk: int | None, sampling: Sampling, k: int) -> Any:
    prompts = random_prompts(LENGTHS, model.config.vocab_size)
    out = model.generate_batch(prompts, NEW_TOKENS, chunk=chunk, sampling=sampling, draft_tokens=k)
    return out.ids, [x.numpy().tobytes() for x in out.decode_logits], out.accepted


def _parallel(rank: int, world_size: int, path: str, sizes: ParallelConfig) -> Any:
    with ParallelGroups.from_world(sizes) as groups:
        return [
            _run(_load(path, kv_rows, interleave, share, parallel=groups), chunk, sampling, 3)
            for kv_rows, chunk, interleave, share, sampling in CASES
        ]


@pytest.mark.parametrize(
    "sizes",
    [
        ParallelConfig(pcp=2),
        ParallelConfig(dcp=2),
        ParallelConfig(pcp=2, dcp=2, ep=2),
        pytest.param(ParallelConfig(pcp=4, dcp=2), marks=pytest.mark.long),
    ],
    ids=lambda sizes: f"pcp{sizes.pcp}-dcp{sizes.dcp}-ep{sizes.ep}",
)
def test_drafts_over_ranks_are_those_of_one_rank(guessable: Path, sizes: ParallelConfig) -> None:
    """Field case A19 among it: several requests, and draft steps on ranks that computed none of their prompts."""
    per_rank = run_ranks(_parallel, sizes.world_size, str(guessable), sizes, timeout=120)
    for number, (kv_rows, chunk, interleave, share, sampling) in enumerate(CASES):
        alone = _load(str(guessable), kv_rows, interleave, share, decode_parts=sizes.dcp)
        plain = _run(alone, None, sampling, 0)
        drafted = _run(alone, chunk, sampling, 3)
        if sampling.temperature == 0:
            assert drafted[:2] == plain[:2]
        assert sum(drafted[2][1:]) > 0
        for ranks in per_rank:
            assert ranks[number] == drafted, CASES[number]


def _collectives(rank: int, world_size: int, path: str, share: bool) -> list[dict[str, int]]:
    counts = []
    with ParallelGroups.from_world(ParallelConfig(pcp=2, dcp=2)) as groups:
        model = _load(path, "fp32", 1, share, parallel=groups)
        for draft_tokens in (0, 1, 3):
            with CollectiveCounter() as seen:
                model.generate_batch([[5]], 2, draft_tokens=draft_tokens)
            counts.append(dict(seen.counts))
    return counts


@pytest.mark.parametrize("share", [True, False])
def test_collectives_of_drafts_are_those_of_the_docs(guessable: Path, share: bool) -> None:
    """One token, which the other rank has no row of: both take part in everything."""
    first, second = run_ranks(_collectives, 2, str(guessable), share)
    assert first == second
    plain, one, three = (sum(counts.values()) for counts in first)
    # The MTP layer over the prompt: new rows, context, index context, and two gathers of the last row; over the decode
    # row: candidates and merge.
    assert one - plain == 5 + 2
    # Two more drafts in each of the two steps: merge, and without IndexShare candidates.
    assert three - one == 2 * 2 * (1 if share else 2)


def _refusals(rank: int, world_size: int, path: str) -> list[str]:
    messages = []
    with ParallelGroups.from_world(ParallelConfig(pcp=2)) as groups:
        model = _load(path, "fp32", 1, True, parallel=groups)
        for options in ({"draft_tokens": -1}, {"draft_tokens": 2, "synthetic_acceptance_length": 3.5}):
            with pytest.raises(ValueError) as error:
                model.generate_batch([[1, 2]], 2, **options)
            messages.append(str(error.value))
        assert model.generate([1, 2, 3], 4, draft_tokens=2) == model.generate([1, 2, 3], 4)
    return messages


def test_bad_options_give_the_same_error_on_every_rank(guessable: Path) -> None:
    first, second = run_ranks(_refusals, 2, str(guessable))
    assert first == second
    assert "draft_tokens=-1" in first[0]
    assert "outside [1, 3]" in first[1]
