"""The engine's runner over PCP x DCP ranks gives the tokens of one rank, whatever share of the rows a rank has."""

from __future__ import annotations

from pathlib import Path

import pytest

from cptools import ParallelConfig, ParallelGroups
from cptools.kernels.sampling import Sampling
from models.glm53 import GLM53
from serving.engine import ModelRunner
from tests.checkpoints import TINY, random_prompts, save_random
from tests.ranks.harness import run_ranks

LENGTHS = (1, 2, 40, 65)


def _tokens(model: GLM53) -> list[list[int]]:
    """Four requests in padded batches of 6; the second half begins while the first decodes, its first prompt of one
    token alone in its step: all ranks but one have no prompt row, and fewer rows than the batch declares."""
    runner = ModelRunner(model, model.new_cache(12), max_requests=6, max_tokens=200, batch_sizes=[6])
    prompts = random_prompts(LENGTHS, TINY.vocab_size)
    settings = [Sampling(), Sampling(0.9, seed=5), Sampling(), Sampling(1.1, top_k=9, seed=5, request=1)]
    requests = [runner.open(s) for s in settings]
    a, b, c, d = requests
    tickets = [
        runner.step(prompts={b: prompts[1], c: prompts[2]}, ending=[b, c]),
        runner.step(prompts={a: prompts[0]}, ending=[a], decodes=[b, c]),
        runner.step(prompts={d: prompts[3][:64]}, decodes=[a, c]),
        runner.step(prompts={d: prompts[3][64:]}, ending=[d], decodes=[a, b, c]),
        *[runner.step(decodes=requests) for _ in range(3)],
    ]
    got: dict[int, list[int]] = {request: [] for request in requests}
    for ticket in tickets:
        for request, tokens in ticket.tokens().items():
            got[request] += tokens
    return list(got.values())


def _parallel(rank: int, world_size: int, path: str, pcp: int, dcp: int, kv_rows: str) -> list[list[int]]:
    with ParallelGroups.from_world(ParallelConfig(pcp=pcp, dcp=dcp)) as groups:
        return _tokens(GLM53.from_pretrained(path, parallel=groups, kv_rows=kv_rows))


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_random(tmp_path_factory.mktemp("tiny"), TINY)


@pytest.mark.parametrize(("pcp", "dcp", "kv_rows"), [(2, 1, "fp8"), (1, 2, "fp32"), (4, 4, "fp8")])
def test_ranks_give_the_tokens_of_one_rank(tiny: Path, pcp: int, dcp: int, kv_rows: str) -> None:
    """Field case A15: padded batches with fewer local rows than decode rows, and with none."""
    want = _tokens(GLM53.from_pretrained(tiny, kv_rows=kv_rows, decode_parts=dcp))
    assert [len(tokens) for tokens in want] == [6, 6, 7, 4]
    assert run_ranks(_parallel, max(pcp, dcp), str(tiny), pcp, dcp, kv_rows) == [want] * max(pcp, dcp)


def _replica(rank: int, world_size: int, path: str, draft_tokens: int) -> tuple[dict[int, list[int]], str]:
    """Two replicas that share experts, each with its own requests: the second begins later and ends earlier."""
    with ParallelGroups.from_world(ParallelConfig(dp=2, ep=2)) as groups:
        model = GLM53.from_pretrained(path, parallel=groups)
        runner = ModelRunner(
            model, model.new_cache(12), max_requests=3, max_tokens=200, batch_sizes=[2], draft_tokens=draft_tokens
        )
        prompts = random_prompts(LENGTHS, TINY.vocab_size)[2 * rank : 2 * rank + 2]
        requests = [runner.open() for _ in prompts]
        got: dict[int, list[int]] = {request: [] for request in requests}
        begin, end = (2, 6) if rank else (0, 9)
        for step in range(10):
            work = {"prompts": dict(zip(requests, prompts, strict=True)), "ending": requests} if step == begin else {}
            if begin < step < end:
                work = {"decodes": requests}
            for request, tokens in runner.step(**work).tokens().items():
                got[request] += tokens
        message = ""
        try:
            # One replica asks for what can not be: neither waits for the other.
            runner.step(prompts={99: [1]} if rank else {})
        except ValueError as error:
            message = str(error)
        # Nor where the token is wrong that follows a chunk, which only the layer that drafts would see.
        new = runner.open() if rank else None
        try:
            runner.step(prompts={new: [1, 2]} if rank else {}, following={new: 9999} if rank else {})
        except ValueError as error:
            message += str(error)
        return dict(enumerate(got.values(), 2 * rank)), message


@pytest.mark.parametrize("draft_tokens", [0, 2])
def test_replicas_that_share_experts_step_together(tiny: Path, draft_tokens: int) -> None:
    want = GLM53.from_pretrained(tiny).generate_batch(random_prompts(LENGTHS, TINY.vocab_size), 30).ids
    (first, told), (second, refused) = run_ranks(_replica, 2, str(tiny), draft_tokens)
    for number, tokens in {**first, **second}.items():
        assert len(tokens) >= (9, 9, 4, 4)[number]
        assert tokens[:30] == want[number][: len(tokens)]
    assert told.count("replicas [1] of 2 refused") == 2
    assert "following=9999, the vocabulary has" in refused
    assert "requests [99] are not open" in refused
