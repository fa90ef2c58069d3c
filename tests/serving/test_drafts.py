"""Rounds of drafts in the runner: as many tokens a step as are accepted, and the tokens of decoding without them."""

from __future__ import annotations

import pytest
import torch

from cptools.kernels.sampling import Sampling
from models.glm53 import GLM53
from serving.engine import ModelRunner
from tests.checkpoints import TINY, random_prompts, save_random

LENGTHS = (1, 63, 64, 130)
K = 3


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> GLM53:
    return GLM53.from_pretrained(save_random(tmp_path_factory.mktemp("tiny"), TINY), kv_rows="fp8")


@pytest.fixture(scope="module")
def want(model: GLM53) -> list[list[int]]:
    return model.generate_batch(random_prompts(LENGTHS, TINY.vocab_size), 40).ids


def runner_of(model: GLM53, pages: int = 16, **options) -> ModelRunner:
    cache = model.new_cache(pages)
    cache.kv.mla_rows.pages.fill_(0xFF)
    cache.kv.index_rows.pages.fill_(0xFF)
    return ModelRunner(model, cache, **{"max_requests": 6, "max_tokens": 300, "draft_tokens": K, **options})


def prefill(runner: ModelRunner, chunk: int, settings: list[Sampling] | None = None) -> dict[int, list[int]]:
    """Opens a request for each prompt and prefills them in chunks, each told the token that follows it."""
    prompts = random_prompts(LENGTHS, TINY.vocab_size)
    requests = [runner.open(s) for s in settings or [Sampling()] * len(prompts)]
    got: dict[int, list[int]] = {}
    for start in range(0, max(LENGTHS), chunk):
        parts = {r: p[start : start + chunk] for r, p in zip(requests, prompts, strict=True) if len(p) > start}
        rest = {r: p[start + chunk] for r, p in zip(requests, prompts, strict=True) if len(p) > start + chunk}
        ticket = runner.step(prompts=parts, ending=[r for r in parts if r not in rest], following=rest)
        got.update(ticket.tokens())
    return {request: got[request] for request in requests}


@pytest.mark.parametrize(("chunk", "batch_sizes"), [(130, None), (50, [6])])
def test_greedy_tokens_stay_the_same_while_drafts_come_true_or_not(model: GLM53, want, chunk, batch_sizes) -> None:
    """Drafts that are right, right at first, or wrong in turn, other ones for each request at each step. Every ticket
    is read while the next step runs, so that the host plans each with lengths that count all drafts."""
    runner = runner_of(model, batch_sizes=batch_sizes)
    got = prefill(runner, chunk)
    requests, true = list(got), dict(zip(got, want, strict=True))
    device_counts = dict.fromkeys(requests, 1)  # what the device knows; the host lags by one ticket
    expected: list[dict[int, int]] = []
    ticket = None
    for step in range(12):
        accept = {request: (K, 1, 0, 2)[(step + i) % 4] for i, request in enumerate(requests)}
        for request, right in accept.items():
            known = device_counts[request]
            drafts = true[request][known : known + K]
            drafts[right:] = [(token + 1) % TINY.vocab_size for token in drafts[right:]]
            runner.state.drafts[runner.row(request)] = torch.tensor((drafts + [0] * K)[:K])
            device_counts[request] += min(right, max(len(true[request]) - known, 0)) + 1
        expected.append({request: right + 1 for request, right in accept.items()})
        following = runner.step(decodes=requests)
        if ticket is not None:
            for request, tokens in ticket.tokens().items():
                got[request] += tokens
                if len(got[request]) < 36:
                    assert len(tokens) == expected[step - 1][request]
        ticket = following
    for request, tokens in ticket.tokens().items():
        got[request] += tokens
    for number, (request, tokens) in enumerate(got.items()):
        assert tokens[:40] == want[number][: len(tokens)]
        assert runner.cache.lengths[request] == LENGTHS[number] + len(tokens) - 1
    lengths = [int(runner.state.lengths[runner.row(request)]) for request in requests]
    assert lengths == [runner.cache.lengths[request] for request in requests]


def test_own_drafts_leave_greedy_tokens_and_draws_alone_in_any_batch(model: GLM53, want) -> None:
    settings = [Sampling(), Sampling(0.9, seed=3), Sampling(1.1, top_k=8, seed=4), Sampling()]
    runs = []
    for batch_sizes in ([4], [1, 6]):
        runner = runner_of(model, batch_sizes=batch_sizes)
        got = prefill(runner, 64, settings)
        for _ in range(6):
            # One batch of all, or each alone and in another order.
            groups = [list(got)] if batch_sizes == [4] else [[request] for request in reversed(got)]
            for group in groups:
                for request, tokens in runner.step(decodes=group).tokens().items():
                    got[request] += tokens
        runs.append(list(got.values()))
    assert runs[0] == runs[1]
    for number in (0, 3):
        assert runs[0][number] == want[number][: len(runs[0][number])]


def test_last_tokens_before_the_limit_may_be_drafted_beyond_it(model: GLM53, want) -> None:
    runner = runner_of(model, max_tokens=132)
    got = prefill(runner, 130)
    request = list(got)[-1]
    while runner.cache.lengths[request] < 132:
        got[request] += runner.step(decodes=[request]).tokens()[request]
    assert got[request] == want[-1][: len(got[request])]
    with pytest.raises(ValueError, match="max_tokens=132"):
        runner.step(decodes=[request])


def test_chunk_without_its_following_token_is_refused(model: GLM53) -> None:
    runner = runner_of(model)
    request = runner.open()
    with pytest.raises(ValueError, match="needs the token following"):
        runner.step(prompts={request: [1, 2]})
    assert runner.cache.lengths == {request: 0}
