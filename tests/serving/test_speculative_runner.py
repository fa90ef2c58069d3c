"""The runner with drafts that come true by themselves, against `generate_batch`, greedy and drawn."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from cptools.kernels.sampling import Sampling
from models.glm53 import GLM53
from serving.engine import ModelRunner
from tests.checkpoints import TINY, random_prompts, save_guessable

LENGTHS = (1, 17, 62, 64, 130)
NEW = 20


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> GLM53:
    return GLM53.from_pretrained(save_guessable(tmp_path_factory.mktemp("guessable"), TINY), kv_rows="fp8")


def run(model: GLM53, k: int, *, ahead: bool, chunk: int = 40, sampling: Sampling | None = None, **options):
    """Tokens of each prompt, and rounds: every request decodes until it has NEW tokens, then it is closed."""
    cache = model.new_cache(40)
    cache.kv.mla_rows.pages.fill_(0xFF)
    cache.kv.index_rows.pages.fill_(0xFF)
    runner = ModelRunner(model, cache, max_requests=6, max_tokens=400, draft_tokens=k, **options)
    prompts = random_prompts(LENGTHS, TINY.vocab_size)
    requests = [runner.open(sampling and dataclasses.replace(sampling, request=i)) for i in range(len(prompts))]
    got: dict[int, list[int]] = {request: [] for request in requests}
    rounds, tickets = 0, []

    def read() -> None:
        for request, tokens in tickets.pop(0).tokens().items():
            got[request] += tokens

    for start in range(0, max(LENGTHS), chunk):
        parts = {r: p[start : start + chunk] for r, p in zip(requests, prompts, strict=True) if start < len(p)}
        ending = [r for r, p in zip(requests, prompts, strict=True) if r in parts and start + chunk >= len(p)]
        following = {r: p[start + chunk] for r, p in zip(requests, prompts, strict=True) if start + chunk < len(p)}
        tickets.append(runner.step(prompts=parts, ending=ending, following=following))
    while open_ones := [request for request in requests if len(got[request]) < NEW]:
        tickets.append(runner.step(decodes=open_ones))
        rounds += 1
        while len(tickets) > ahead:
            read()
    while tickets:
        read()
    return [got[request][:NEW] for request in requests], rounds


def test_greedy_rounds_give_the_tokens_of_plain_decoding(model: GLM53) -> None:
    want = model.generate_batch(random_prompts(LENGTHS, TINY.vocab_size), NEW)
    got, rounds = run(model, 2, ahead=True)
    assert got == want.ids
    assert rounds < NEW - 1


def test_what_is_drawn_does_not_depend_on_how_the_engine_runs(model: GLM53) -> None:
    """Nor on padding, nor on when the host learns of it; and it is what `generate_batch` draws."""
    sampling = Sampling(0.4, top_k=20, seed=5)
    prompts = random_prompts(LENGTHS, TINY.vocab_size)
    each = [dataclasses.replace(sampling, request=i) for i in range(len(prompts))]
    want = model.generate_batch(prompts, NEW, sampling=each, draft_tokens=3, most_likely_drafts=True).ids
    assert run(model, 3, ahead=False, sampling=sampling)[0] == want
    assert run(model, 3, ahead=True, chunk=200, sampling=sampling, batch_sizes=[6])[0] == want


def test_rounds_without_index_share(model: GLM53) -> None:
    config = dataclasses.replace(TINY, index_share_for_mtp_iteration=False)
    alone = GLM53(config, model.weights, cp=model.cp, kv=model.kv)
    want = alone.generate_batch(random_prompts(LENGTHS, TINY.vocab_size), NEW)
    assert run(alone, 3, ahead=True)[0] == want.ids


def test_idle_rows_of_a_round_store_nothing(model: GLM53) -> None:
    """Field case A21: a batch size that was warmed up with padding alone, then a round that fills a third of it."""
    cache = model.new_cache(4)
    cache.kv.mla_rows.pages.fill_(0xFF)
    cache.kv.index_rows.pages.fill_(0xFF)
    runner = ModelRunner(model, cache, max_requests=6, max_tokens=100, draft_tokens=3, batch_sizes=[6])
    request, other = runner.open(), runner.open()
    prompt = random_prompts((30,), TINY.vocab_size)[0]
    got = runner.step(prompts={request: prompt, other: prompt}, ending=[request, other]).tokens()[request]
    before = cache.kv.mla_rows.pages.clone()
    got += runner.step(decodes=[request]).tokens()[request]
    page, free = (int(cache.tables.table([who])[0, 0]) for who in (request, other))
    changed = (before != cache.kv.mla_rows.pages).any(2).any(0).nonzero().flatten().tolist()
    assert changed == [page]
    assert torch.equal(before[:, free], cache.kv.mla_rows.pages[:, free])
    assert got == model.generate(prompt, len(got))
