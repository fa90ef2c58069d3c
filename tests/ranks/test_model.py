"""GLM-5.3 over PCP x DCP gives the bits of one rank, whose decode attention is summed in as many parts."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest
import torch

from cptools import ParallelConfig, ParallelGroups
from models.glm53 import GLM53
from tests.checkpoints import KDIM, TINY, random_prompts, save_random
from tests.ranks.collective_counter import CollectiveCounter
from tests.ranks.harness import run_ranks

LENGTHS = (1, 2, 3, 7, 63, 64, 65, 257)
SPLITS = [(2, 1), (1, 2), (2, 2), (3, 1), (1, 3), (3, 3), (4, 1), (4, 2), (4, 4), (1, 4)]
NEW_TOKENS = 5


def _digest(tensors: list[torch.Tensor]) -> str:
    return hashlib.sha256(b"".join(t.contiguous().numpy().tobytes() for t in tensors)).hexdigest()


def _run(model: GLM53, lengths: tuple[int, ...], chunk: int | None) -> dict[str, Any]:
    prompts = random_prompts(lengths, model.config.vocab_size)
    selections = []

    def observe(layer, step, prompt_topk, decode_topk) -> None:
        selections.extend([model.cp.unshard(prompt_topk, step.prompt), decode_topk])

    out = model.generate_batch(prompts, NEW_TOKENS, chunk=chunk, prompt_logits="all", observer=observe)
    return {
        "ids": out.ids,
        "prefill": _digest(out.prompt_logits),
        "decode": _digest(out.decode_logits),
        "mtp": _digest([model.mtp_logits(prompts[-1], 3)]),
        "selections": _digest(selections),
        "rows": out.traffic.rows_stored,
    }


def _parallel(rank: int, world_size: int, path: str, pcp: int, dcp: int, cases: list[tuple[Any, ...]]) -> Any:
    results = []
    with ParallelGroups.from_world(ParallelConfig(pcp=pcp, dcp=dcp)) as groups:
        for kv_rows, chunk, interleave, lengths in cases:
            model = GLM53.from_pretrained(path, parallel=groups, kv_rows=kv_rows, interleave=interleave)
            results.append(_run(model, lengths, chunk))
    return results


def _check(path: Path, pcp: int, dcp: int, cases: list[tuple[Any, ...]]) -> None:
    per_rank = run_ranks(_parallel, max(pcp, dcp), str(path), pcp, dcp, cases, timeout=120)
    for number, (kv_rows, _, interleave, lengths) in enumerate(cases):
        alone = GLM53.from_pretrained(path, kv_rows=kv_rows, decode_parts=dcp, interleave=interleave)
        want = _run(alone, lengths, None if dcp == 1 else cases[number][1])
        results = [ranks[number] for ranks in per_rank]
        for got in results:
            for key in ("ids", "prefill", "decode", "mtp"):
                assert got[key] == want[key], (cases[number], key)
        if cases[number][1] is None:
            assert {got["selections"] for got in results} == {want["selections"]}
        rows = [got["rows"] for got in results]
        for start in range(0, max(pcp, dcp), dcp):  # each DCP group keeps one copy, evenly spread
            group = rows[start : start + dcp]
            assert sum(group) == want["rows"]
            assert max(group) - min(group) <= interleave * len(lengths)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_random(tmp_path_factory.mktemp("tiny"), TINY)


@pytest.mark.parametrize(("pcp", "dcp"), SPLITS)
def test_ranks_equal_one_rank(tiny: Path, pcp: int, dcp: int) -> None:
    _check(tiny, pcp, dcp, [("fp32", None, 1, LENGTHS), ("fp8", 50, 16, LENGTHS), ("fp32", None, 1, (1,))])


def test_ranks_equal_one_rank_at_true_head_dims(tmp_path: Path) -> None:
    _check(save_random(tmp_path, KDIM), 2, 2, [("fp8", None, 1, (3, 130)), ("fp32", 64, 1, (131,))])


@pytest.mark.long
def test_eight_ranks_equal_one_rank(tiny: Path) -> None:
    _check(tiny, 8, 8, [("fp32", None, 1, LENGTHS), ("fp8", 50, 8, LENGTHS)])


def _collectives(rank: int, world_size: int, path: str, pcp: int, dcp: int) -> list[Any]:
    with ParallelGroups.from_world(ParallelConfig(pcp=pcp, dcp=dcp)) as groups:
        model = GLM53.from_pretrained(path, parallel=groups)
        cache = model.new_cache(4)
        request = cache.open()
        counts = []
        for step in ({"prompts": {request: [5]}}, {"prompts": {request: [6] * 9}}, {"decodes": {request: [7]}}):
            with CollectiveCounter() as seen:
                model.step(cache, **step)
            counts.append(dict(seen.counts))
        return counts


def test_every_rank_issues_the_same_collectives_also_without_tokens(tiny: Path) -> None:
    """One token over four ranks: three of them have no row and no cached key, and take part in everything."""
    first, *others = run_ranks(_collectives, 4, str(tiny), 4, 4)
    assert others == [first] * 3
    layers, full = TINY.num_hidden_layers, sum(kind == "full" for kind in TINY.indexer_types)
    prefill, chunk, decode = (sum(counts.values()) for counts in first)
    # Prefill: new rows (one a layer for both kinds), MLA context of each layer, index context of full layers.
    assert prefill == chunk == 2 * layers + full
    # Decode: candidates of full layers, and one LSE merge a layer.
    assert full + layers <= decode <= full + 2 * layers


def _refusals(rank: int, world_size: int, path: str) -> list[str]:
    messages = []
    with ParallelGroups.from_world(ParallelConfig(pcp=2, dcp=2)) as groups:
        model = GLM53.from_pretrained(path, parallel=groups)
        small = model.new_cache(1)
        for prompts, cache in (([[1, 600]], None), ([[1] * 4097], None), ([[]], None), ([[1] * 129], small)):
            with pytest.raises(ValueError) as error:
                model.generate_batch(prompts, 1, cache=cache)
            messages.append(str(error.value))
        for arguments in ({"decode_parts": 3}, {"kv_rows": "int4"}, {"interleave": 3}):
            with pytest.raises(ValueError) as error:
                GLM53.from_pretrained(path, parallel=groups, **arguments)
            messages.append(str(error.value))
        assert len(model.generate([1, 2, 3], 2)) == 2  # nothing is left in a half-done state
    return messages


def test_bad_input_gives_the_same_error_on_every_rank(tiny: Path) -> None:
    first, second = run_ranks(_refusals, 2, str(tiny))
    assert first == second
    assert "1 free pages, the batch needs 2" in first[3]
    assert "decode_parts=3 does not fit 2 DCP ranks" in first[4]
