"""Random engines: chunks, batches, drafts, tickets read late, requests closed early, pools that are too small."""

from __future__ import annotations

import random

import pytest

from cptools import PoolExhausted
from models.glm53 import GLM53
from serving.engine import ModelRunner
from tests.checkpoints import TINY, random_prompts, save_random

LENGTHS = (1, 2, 16, 17, 63, 64, 65, 129, 190)
NEW = 24


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> GLM53:
    return GLM53.from_pretrained(save_random(tmp_path_factory.mktemp("tiny"), TINY), kv_rows="fp8")


@pytest.fixture(scope="module")
def want(model: GLM53) -> list[list[int]]:
    # A round may bring drafts behind the last token that is compared, and steps are launched ahead of it.
    return model.generate_batch(random_prompts(LENGTHS, TINY.vocab_size), NEW + 24).ids


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.long) for seed in range(1, 12))])
def test_every_request_gets_the_tokens_of_decoding_it_alone(model: GLM53, want, seed: int) -> None:
    rng = random.Random(seed)
    k, ahead, pages = rng.choice([0, 1, 3]), rng.randint(1, 4), rng.randint(8, 20)
    runner = ModelRunner(
        model,
        model.new_cache(pages),
        max_requests=4,
        max_tokens=260,
        draft_tokens=k,
        batch_sizes=rng.choice([[4], [1, 2, 4], [3, 5]]),
        table_blocks=rng.choice([[5], [1, 2, 5], [2, 9]]),
        steps_ahead=ahead,
    )
    prompts = random_prompts(LENGTHS, TINY.vocab_size)
    number: dict[int, int] = {}
    fed: dict[int, int] = {}
    got: dict[int, list[int]] = {}
    unread = []
    finished = exhausted = 0
    for _ in range(150):
        if len(number) < 4 and rng.random() < 0.4:
            request = runner.open()
            number[request], fed[request], got[request] = rng.randrange(len(LENGTHS)), 0, []
        chunks, ending, following, decodes = {}, [], {}, []
        for request, which in number.items():
            prompt = prompts[which]
            if fed[request] < len(prompt):
                if rng.random() < 0.8:
                    stop = min(fed[request] + rng.randint(1, 80), len(prompt))
                    chunks[request] = prompt[fed[request] : stop]
                    if stop == len(prompt):
                        ending.append(request)
                    else:
                        following[request] = prompt[stop]
            elif rng.random() < 0.9 and runner.cache.lengths[request] < 250:
                decodes.append(request)
        rng.shuffle(decodes)
        before = dict(runner.cache.lengths)
        try:
            unread.append(runner.step(prompts=chunks, ending=ending, following=following, decodes=decodes))
        except PoolExhausted:
            exhausted += 1
            # Tickets may have been read, to see whether fewer drafts were accepted than the pages must suffice for.
            assert runner.cache.lengths.keys() == before.keys()
            late = {request: before[request] - length for request, length in runner.cache.lengths.items()}
            assert all(0 <= rows <= k * len(unread) for rows in late.values())
            victim = rng.choice(list(number))
            runner.close(victim)
            del number[victim]
        else:
            for request, ids in chunks.items():
                fed[request] += len(ids)
        while unread and (len(unread) > ahead or rng.random() < 0.5):
            for request, tokens in unread.pop(0).tokens().items():
                got[request] += tokens
        for request in [r for r in number if len(got[r]) >= NEW]:
            runner.close(request)
            finished += 1
            assert got[request][:NEW] == want[number.pop(request)][:NEW]
    assert finished >= 3
    for request in list(number):
        runner.close(request)
    assert runner.cache.tables.allocator.num_free == pages
    assert runner.cache.lengths == {}
