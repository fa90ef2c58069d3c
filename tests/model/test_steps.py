"""Steps: what is refused before any work, what a refusal leaves behind, and what a step costs in cache."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from cptools import PoolExhausted
from models.glm53 import GLM53
from tests.checkpoints import TINY, random_prompts, save_random


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> GLM53:
    return GLM53.from_pretrained(save_random(tmp_path_factory.mktemp("tiny"), TINY))


@pytest.mark.parametrize(
    ("prompts", "arguments", "message"),
    [
        ([[1], []], {}, "prompt 1 is empty"),
        ([[0, 512]], {}, r"token ids in \[0, 512\], the vocabulary has 512"),
        ([[-1]], {}, r"token ids in \[-1, -1\]"),
        (
            [[0] * 4090],
            {"max_new_tokens": 8},
            "needs 4097 positions, 4090 for its ids and 7 for others; .*=4096",
        ),
        ([[1]], {"max_new_tokens": 0}, "max_new_tokens=0"),
        ([[1]], {"chunk": 0}, "chunk=0"),
        ([[1.5, 2]], {}, "token id=1.5 must be an integer"),
        ([[True]], {}, "token id=True must be an integer"),
        ([[1]], {"prompt_logits": "none"}, "prompt_logits='none'"),
        ([1, 2], {}, "prompt 0=1 must be a sequence of token ids"),
        ([[1]], {"sampling": {"temperature": 1.0}}, "must be a Sampling or one for each prompt"),
        ([[1]], {"sampling": [{"temperature": 1.0}]}, "must be a Sampling or one for each prompt"),
        ([[1]], {"sampling": 0.7}, "sampling=0.7 must be a Sampling"),
    ],
)
def test_bad_batches_are_refused(model: GLM53, prompts, arguments, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        model.generate_batch(prompts, **{"max_new_tokens": 4, **arguments})


def test_longest_legal_prompt_is_not_refused(model: GLM53) -> None:
    assert len(model.generate([5] * 4096, 1)) == 1


def test_cache_too_small_for_the_batch_is_refused_before_any_work(model: GLM53) -> None:
    cache = model.new_cache(3)
    with pytest.raises(ValueError, match="3 free pages, the batch needs 4"):
        model.generate_batch([[1] * 100, [1] * 65], 1, cache=cache)
    assert cache.tables.allocator.num_free == 3
    assert cache.kv.traffic.rows_stored == 0


def test_batch_gives_its_pages_back(model: GLM53) -> None:
    cache = model.new_cache(4)
    for _ in range(3):
        model.generate_batch([[1] * 100, [1] * 65], 1, cache=cache)
    assert (cache.tables.allocator.num_free, cache.lengths) == (4, {})


def test_refused_step_changes_nothing(model: GLM53) -> None:
    """Over several requests it is all or nothing, and a retry continues where the last good step ended."""
    ids, other = random_prompts((100, 70), TINY.vocab_size)
    cache = model.new_cache(3)
    first, second = cache.open(), cache.open()
    model.step(cache, prompts={first: ids[:60]})
    with pytest.raises(PoolExhausted, match="3 pages wanted, 2 of 3 are free"):
        model.step(cache, prompts={first: ids[60:], second: other})
    with pytest.raises(ValueError, match="as prompts and as decodes"):
        model.step(cache, prompts={first: ids[60:]}, decodes={first: [1]})
    with pytest.raises(ValueError, match="request 99 is not open"):
        model.step(cache, prompts={99: [1]})
    assert cache.lengths == {first: 60, second: 0}
    assert cache.tables.allocator.num_free == 2
    rest = model.prompt_logits(model.step(cache, prompts={first: ids[60:]}))
    assert torch.equal(rest, model.prefill_logits(ids)[60:])


def test_failure_in_the_middle_of_a_step_leaves_the_lengths(model: GLM53) -> None:
    """Field case F26: half-written rows are written again by the retry, no position is doubled."""
    ids = random_prompts((90,), TINY.vocab_size)[0]
    cache = model.new_cache(2)
    request = cache.open()

    def fail(layer, step, prompt_topk, decode_topk) -> None:
        if layer == 4:
            raise RuntimeError("planned")

    with pytest.raises(RuntimeError, match="planned"):
        model.step(cache, prompts={request: ids}, observer=fail)
    assert cache.lengths[request] == 0
    assert torch.equal(model.prompt_logits(model.step(cache, prompts={request: ids})), model.prefill_logits(ids))


def test_stale_and_foreign_rows_do_not_matter(model: GLM53) -> None:
    """Pages full of NaN bytes before, and of another request's rows beside, give the same bits."""
    ids, other = random_prompts((130, 77), TINY.vocab_size)
    want = model.generate_batch([ids], 5, prompt_logits="all")
    cache = model.new_cache(8)
    cache.kv.mla_rows.pages.fill_(0xFF)
    cache.kv.index_rows.pages.fill_(0xFF)
    held = cache.open()
    model.step(cache, prompts={held: other})
    got = model.generate_batch([ids], 5, prompt_logits="all", cache=cache)
    assert torch.equal(got.prompt_logits[0], want.prompt_logits[0])
    assert torch.equal(got.decode_logits[0], want.decode_logits[0])


def test_generate_stops_after_eos(model: GLM53) -> None:
    prompt = random_prompts((20,), TINY.vocab_size)[0]
    free = model.generate(prompt, 12)
    config = dataclasses.replace(TINY, eos_token_ids=(free[4], 511))
    stopping = GLM53(config, model.weights, cp=model.cp, kv=model.kv)
    assert stopping.generate(prompt, 12) == free[: free.index(free[4]) + 1]


def test_stored_bytes_are_rows_times_row_bytes(model: GLM53) -> None:
    out = model.generate_batch([[1] * 10, [2] * 7], 3)
    rows = 10 + 7 + 2 * 2
    layers, index_layers = TINY.num_hidden_layers, sum(kind == "full" for kind in TINY.indexer_types)
    assert out.traffic.rows_stored == rows
    assert out.traffic.bytes_stored == rows * (layers * model.mla.row_bytes + index_layers * model.index.row_bytes)


def test_ids_may_be_tensors_or_numpy_integers(model: GLM53) -> None:
    ids = random_prompts((20,), TINY.vocab_size)[0]
    want = model.prefill_logits(ids)
    assert torch.equal(model.prefill_logits(torch.tensor(ids)), want)
    assert torch.equal(model.prefill_logits([torch.tensor(token) for token in ids]), want)


def test_next_ids_of_the_mtp_layer_are_checked_before_any_work(model: GLM53) -> None:
    cache = model.new_cache(1)
    result = model.step(cache, prompts={cache.open(): [1, 2, 3]})
    for wrong, message in (
        ([4, 5], "2 next_ids"),
        ([4, 5, 512], "vocabulary"),
        ([4, 5, -1], "vocabulary"),
        ([1.5] * 3, "integer"),
    ):
        with pytest.raises(ValueError, match=message):
            model.mtp_step(result, wrong)


def test_result_of_an_earlier_step_can_not_write_into_pages_of_another(model: GLM53) -> None:
    cache = model.new_cache(1)
    request = cache.open()
    stale = model.step(cache, prompts={request: [1, 2, 3]})
    model.step(cache, decodes={request: [4]})
    with pytest.raises(ValueError, match="left its requests at"):
        model.mtp_step(stale, [2, 3, 4])
    cache.close(request)
    other = cache.open()
    model.step(cache, prompts={other: [7, 8, 9]})
    with pytest.raises(ValueError, match="left its requests at"):
        model.mtp_step(stale, [2, 3, 4])


def test_cache_of_another_model_is_refused(tmp_path: Path, model: GLM53) -> None:
    other = GLM53.from_pretrained(save_random(tmp_path, TINY), kv_rows="fp8")
    with pytest.raises(ValueError, match="another model"):
        model.generate_batch([[1, 2]], 1, cache=other.new_cache(4))


def test_traffic_is_that_of_one_batch(model: GLM53) -> None:
    cache = model.new_cache(4)
    first = model.generate_batch([[1] * 10], 1, cache=cache)
    second = model.generate_batch([[1] * 7], 1, cache=cache)
    assert (first.traffic.rows_stored, second.traffic.rows_stored) == (10, 7)


def test_longest_prompt_has_draft_logits(model: GLM53) -> None:
    """The token after the prompt takes no position."""
    assert model.mtp_logits([5] * 4096, 1).shape == (4096, TINY.vocab_size)
