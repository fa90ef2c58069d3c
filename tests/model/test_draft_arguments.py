"""What drafts are asked of, checked before the MTP layer runs; and what a model is made of, before it is read."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from cptools.kernels.sampling import Verified
from models.glm53 import GLM53
from models.glm53.speculative import Continuing, draft
from tests.checkpoints import TINY, random_prompts, save_random

VOCAB = TINY.vocab_size


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_random(tmp_path_factory.mktemp("tiny"), TINY)


@pytest.fixture(scope="module")
def model(tiny: Path) -> GLM53:
    return GLM53.from_pretrained(tiny)


@pytest.mark.parametrize(
    ("next_ids", "message"),
    [
        ([2, VOCAB, 0], rf"token ids in \[0, {VOCAB}\]"),
        ([2, -1, 0], r"token ids in \[-1, 2\]"),
        ([2, 1.5, 0], "token id=1.5 must be an integer"),
        ([2, 1], "2 next_ids for 3"),
        ([], "0 next_ids for 3"),
        (7, "must be a sequence"),
    ],
)
def test_tokens_that_follow_are_checked_wherever_they_are_given(model: GLM53, next_ids, message: str) -> None:
    cache = model.new_cache(2)
    result = model.step(cache, prompts={cache.open(): [1, 2, 3]})
    continuing = Continuing.of(result.plan, [0], 2)
    first = torch.tensor([5])
    verified = Verified(torch.tensor([[5, -1, -1]]), torch.zeros_like(first))
    cache.kv.mla_rows.pages[-1].fill_(0xFF)
    before = cache.kv.mla_rows.pages.clone()
    for call in (
        lambda: model.mtp_step(result, next_ids),
        lambda: model.draft_prompts(result, next_ids, [0], first, 2),
        lambda: draft(model, result, continuing, verified, next_ids, draft_tokens=2),
    ):
        with pytest.raises(ValueError, match=message):
            call()
        assert torch.equal(cache.kv.mla_rows.pages, before)


def test_places_and_first_tokens_of_ending_prompts_are_checked(model: GLM53) -> None:
    cache = model.new_cache(2)
    request = cache.open()
    result = model.step(cache, prompts={request: [1, 2, 3]})
    for ending, tokens, message in (
        ([1], [5], r"places \[1\] of a step of 1 prompts"),
        ([-1], [5], r"places \[-1\]"),
        ([0.5], [5], "place=0.5"),
        ([0], [5, 6], r"tokens \(2,\) of 1 ending prompts"),
        ([], [5], r"tokens \(1,\) of 0 ending prompts"),
    ):
        with pytest.raises(ValueError, match=message):
            model.draft_prompts(result, [2, 3, 0], ending, torch.tensor(tokens), 2)
    assert model.draft_prompts(result, [2, 3, 0], [0], torch.tensor([5]), 2).shape == (1, 2)
    decoded = model.step(cache, decodes={request: [5]})
    with pytest.raises(ValueError, match="1 decode rows"):
        model.draft_prompts(decoded, [], [], torch.empty(0, dtype=torch.int64), 2)


def test_prompts_of_a_step_may_have_more_tokens_together_than_one_has_positions(model: GLM53) -> None:
    config = dataclasses.replace(TINY, max_position_embeddings=16)
    short = GLM53(config, model.weights, cp=model.cp, kv=model.kv)
    prompts = random_prompts((10, 12), VOCAB)
    cache = short.new_cache(2)
    result = short.step(cache, prompts={cache.open(): prompt for prompt in prompts})
    got = short.mtp_step(result, [*prompts[0][1:], 1, *prompts[1][1:], 2])
    want = [short.mtp_logits(prompt, following) for prompt, following in zip(prompts, (1, 2), strict=True)]
    assert torch.equal(short.logits(got), torch.cat(want))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kv_rows": "fp4"}, "kv_rows='fp4'"),
        ({"decode_parts": 0}, "decode_parts=0"),
        ({"decode_parts": 1.5}, "decode_parts=1.5"),
        ({"sparse_mla_force_mqa": "no"}, "sparse_mla_force_mqa='no'"),
        ({"page_size": 0}, "page_size=0"),
        ({"interleave": 3}, "interleave=3"),
        ({"dtype": torch.int8}, "int8"),
    ],
)
def test_arguments_are_checked_before_a_weight_is_read(tiny: Path, model: GLM53, options, message: str) -> None:
    read: list[int] = []
    with pytest.raises(ValueError, match=message):
        GLM53.from_pretrained(tiny, progress=lambda done, total: read.append(done), **options)
    assert not read
    if "dtype" not in options:
        with pytest.raises(ValueError, match=message):
            GLM53.over(None, TINY, lambda part: read.append(1), **options)
    assert not read
