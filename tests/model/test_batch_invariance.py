"""On the CPU a token's result is the same bits whatever shares the batch and however the prompt is cut."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from models.glm53 import GLM53
from tests.checkpoints import TINY, random_prompts, save_random

LENGTHS = (1, 2, 3, 7, 63, 64, 65, 311)
NEW_TOKENS = 6


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_random(tmp_path_factory.mktemp("tiny"), TINY)


@pytest.fixture(scope="module", params=["fp32", "bf16", "fp8"])
def model(request: pytest.FixtureRequest, checkpoint: Path) -> GLM53:
    return GLM53.from_pretrained(checkpoint, kv_rows=request.param)


@pytest.fixture(scope="module")
def whole(model: GLM53):
    return model.generate_batch(random_prompts(LENGTHS, TINY.vocab_size), NEW_TOKENS, prompt_logits="all")


def assert_same(a, b) -> None:
    assert a.ids == b.ids
    for x, y in zip(a.prompt_logits + a.decode_logits, b.prompt_logits + b.decode_logits, strict=True):
        assert torch.equal(x, y)


@pytest.mark.parametrize("chunk", [7, 64, 299])
def test_chunked_prefill_equals_one_shot(model: GLM53, whole, chunk: int) -> None:
    """Requests finish their prompts in different steps, so decode rows share steps with prompt rows."""
    prompts = random_prompts(LENGTHS, TINY.vocab_size)
    assert_same(model.generate_batch(prompts, NEW_TOKENS, chunk=chunk, prompt_logits="all"), whole)


@pytest.mark.parametrize("number", range(len(LENGTHS)))
def test_prompt_alone_equals_prompt_in_batch(model: GLM53, whole, number: int) -> None:
    prompt = random_prompts(LENGTHS, TINY.vocab_size)[number]
    alone = model.generate_batch([prompt], NEW_TOKENS, prompt_logits="all")
    assert alone.ids[0] == whole.ids[number]
    assert torch.equal(alone.prompt_logits[0], whole.prompt_logits[number])
    assert torch.equal(alone.decode_logits[0], whole.decode_logits[number])


def test_two_threads_equal_one(model: GLM53, whole) -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(3 - min(threads, 2))
    try:
        prompts = random_prompts(LENGTHS, TINY.vocab_size)
        assert_same(model.generate_batch(prompts, NEW_TOKENS, prompt_logits="all"), whole)
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize(("page_size", "interleave"), [(1, 1), (16, 4), (64, 64)])
def test_page_geometry_does_not_matter(checkpoint: Path, page_size: int, interleave: int) -> None:
    prompts = random_prompts((3, 65, 130), TINY.vocab_size)
    usual = GLM53.from_pretrained(checkpoint, kv_rows="fp8").generate_batch(prompts, 4, prompt_logits="all")
    other = GLM53.from_pretrained(checkpoint, kv_rows="fp8", page_size=page_size, interleave=interleave)
    assert_same(other.generate_batch(prompts, 4, prompt_logits="all"), usual)


def test_second_turn_equals_prefilling_the_whole(model: GLM53) -> None:
    """A turn of any length behind a prefilled context, several turns, beside another request."""
    ids, other = random_prompts((400, 90), TINY.vocab_size, seed=3)
    want = model.prefill_logits(ids)
    cache = model.new_cache(32)
    request, neighbour = cache.open(), cache.open()
    got, start = [], 0
    for turn in (150, 1, 64, 185):
        prompts = {request: ids[start : start + turn]}
        if start == 0:
            prompts[neighbour] = other
        logits = model.prompt_logits(model.step(cache, prompts=prompts))
        got.append(logits[:turn])
        start += turn
    assert torch.equal(torch.cat(got), want)


def test_decode_in_parts_keeps_the_prefill_and_moves_decode_by_rounding_only(checkpoint: Path) -> None:
    prompts = random_prompts((1, 40, 130), TINY.vocab_size)
    plain = GLM53.from_pretrained(checkpoint).generate_batch(prompts, 6, prompt_logits="all")
    parts = GLM53.from_pretrained(checkpoint, decode_parts=3).generate_batch(prompts, 6, prompt_logits="all")
    for x, y in zip(plain.prompt_logits, parts.prompt_logits, strict=True):
        assert torch.equal(x, y)
    assert plain.ids == parts.ids
    for x, y in zip(plain.decode_logits, parts.decode_logits, strict=True):
        torch.testing.assert_close(x, y, atol=1e-4, rtol=0)


def test_verification_rows_equal_single_decode_steps(checkpoint: Path) -> None:
    """Several decode rows of a request in one step see one key more each (bounds are made local per row)."""
    model = GLM53.from_pretrained(checkpoint, decode_parts=2)
    prompt, fed = random_prompts((45, 4), TINY.vocab_size, seed=5)

    def run(*pieces: list[int]) -> torch.Tensor:
        cache = model.new_cache(4)
        request = cache.open()
        model.step(cache, prompts={request: prompt})
        return torch.cat([model.last_logits(model.step(cache, decodes={request: piece})) for piece in pieces])

    assert torch.equal(run(fed), run(*([token] for token in fed)))
