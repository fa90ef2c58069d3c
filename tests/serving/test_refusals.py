"""What the runner refuses it refuses before any work, and what can never work when it is made."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from cptools.kernels.sampling import Sampling
from models.glm53 import GLM53
from serving.engine import ModelRunner
from serving.engine.step_graphs import StepGraphs
from tests.checkpoints import TINY, random_prompts, save_random

VOCAB = TINY.vocab_size


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_random(tmp_path_factory.mktemp("tiny"), TINY)


@pytest.fixture(scope="module")
def model(tiny: Path) -> GLM53:
    return GLM53.from_pretrained(tiny)


def test_following_tokens_are_checked_before_any_work(model: GLM53) -> None:
    runner = ModelRunner(model, model.new_cache(4), max_requests=2, max_tokens=50, draft_tokens=2)
    request, other = runner.open(), runner.open()
    for arguments, message in (
        ({"prompts": {request: [1, 2]}, "following": {request: VOCAB}}, f"following={VOCAB}, the vocabulary has"),
        ({"prompts": {request: [1, 2]}, "following": {request: -1}}, "following=-1"),
        ({"prompts": {request: [1, 2]}, "following": {request: 1.5}}, "following=1.5 must be an integer"),
        ({"prompts": {request: [1, 2]}, "following": {request: 3, other: 3}}, r"\[2\] are given a following token"),
        ({"prompts": {request: [1, 2]}, "ending": [request], "following": {request: 3}}, "no chunk that it follows"),
        ({"prompts": {request: 7}}, "sequences of token ids"),
    ):
        with pytest.raises(ValueError, match=message):
            runner.step(**arguments)
        assert runner.cache.lengths == {request: 0, other: 0}
    prompt = random_prompts((9,), VOCAB)[0]
    runner.step(prompts={request: prompt[:4]}, following={request: prompt[4]})
    got = runner.step(prompts={request: prompt[4:]}, ending=[request]).tokens()[request]
    got += runner.step(decodes=[request]).tokens()[request]
    assert got == model.generate(prompt, len(got))


def test_without_drafts_following_tokens_are_checked_alike(model: GLM53) -> None:
    runner = ModelRunner(model, model.new_cache(4), max_requests=1, max_tokens=50)
    request = runner.open()
    with pytest.raises(ValueError, match="following=9999"):
        runner.step(prompts={request: [1, 2]}, following={request: 9999})


def test_settings_that_can_never_work_are_refused_at_once(tmp_path: Path, model: GLM53) -> None:
    config = dataclasses.replace(TINY, num_nextn_predict_layers=0, index_share_for_mtp_iteration=False)
    plain = GLM53.from_pretrained(save_random(tmp_path, config))
    sizes = {"max_requests": 2, "max_tokens": 64}
    for subject, cache, options, message in (
        (plain, plain, {"draft_tokens": 2}, "no MTP layer"),
        (model, model, {"logprobs": VOCAB + 1}, f"logprobs={VOCAB + 1} is more than the vocabulary, {VOCAB}"),
        (model, GLM53(TINY, model.weights, cp=model.cp, kv=model.kv, kv_rows="bf16"), {}, "made by another model"),
        (model, model, {"batch_sizes": [1, 2.5]}, "batch_sizes=2.5 must be an integer"),
        (model, model, {"table_blocks": [1.5]}, "table_blocks=1.5 must be an integer"),
    ):
        with pytest.raises(ValueError, match=message):
            ModelRunner(subject, cache.new_cache(2), **sizes, **options)
    assert ModelRunner(plain, plain.new_cache(2), **sizes, logprobs=VOCAB).draft_tokens == 0


def test_failed_open_keeps_its_row(model: GLM53) -> None:
    runner = ModelRunner(model, model.new_cache(2), max_requests=1, max_tokens=50)
    for wrong in ({"temperature": 1}, 0, 0.7):
        with pytest.raises(ValueError, match="is no Sampling"):
            runner.open(wrong)
    request = runner.open(Sampling(1.0))
    assert runner.cache.lengths == {request: 0}


def test_tickets_hand_out_their_own_copies_to_nobody(model: GLM53) -> None:
    runner = ModelRunner(model, model.new_cache(2), max_requests=1, max_tokens=50, logprobs=1)
    request = runner.open()
    ticket = runner.step(prompts={request: [1, 2]}, ending=[request])
    tokens, logprobs = ticket.tokens(), ticket.logprobs()
    want = list(tokens[request]), list(logprobs[request])
    for handed in (tokens, logprobs):
        handed[request].clear()
        handed[99] = []
    assert (ticket.tokens(), ticket.logprobs()) == ({request: want[0]}, {request: want[1]})


class _Recorded(StepGraphs):
    def __init__(self) -> None:
        super().__init__(capture=True)
        self.keys: list[tuple[int, int, bool, bool]] = []

    def record(self, key, run) -> None:
        self.keys.append((key.requests, key.blocks, key.greedy, key.truncated))


@pytest.mark.parametrize(
    ("flags", "kinds"),
    [
        ({}, [(True, False)]),
        ({"truncated": True}, [(True, False), (False, True)]),
        ({"greedy": False, "drawn": True}, [(False, False)]),
        ({"drawn": True, "truncated": True}, [(True, False), (False, False), (False, True)]),
        ({"greedy": False}, []),
    ],
)
def test_warm_up_captures_every_kind_that_is_asked_for(model: GLM53, flags, kinds) -> None:
    runner = ModelRunner(
        model, model.new_cache(2), max_requests=4, max_tokens=200, batch_sizes=[1, 4], table_blocks=[2, 5]
    )
    runner.graphs = graphs = _Recorded()
    runner.warm_up(blocks=1, **flags)
    assert graphs.keys == [(size, 2, *kind) for size in (4, 1) for kind in kinds]
    for blocks in (0, -1, 1.5, 6):
        with pytest.raises(ValueError, match="blocks"):
            runner.warm_up(blocks=blocks)
