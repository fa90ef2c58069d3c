"""Requests that begin with cached pages give, bit for bit, what they give when everything is computed."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from cptools.page_allocator import PageAllocator
from models.glm53 import GLM53
from serving.core import BlockPool, PrefixCache
from tests.checkpoints import TINY, random_prompts, save_guessable
from tests.serving.conversations import DRAFTS, PAGE, Engine, converse

SMALL = 27
"""Pages for the two longest conversations side by side, and not for all three."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> GLM53:
    return GLM53.from_pretrained(save_guessable(tmp_path_factory.mktemp("tiny"), TINY), page_size=PAGE)


@pytest.fixture(scope="module")
def want(model: GLM53) -> list[list]:
    return converse(Engine(model, 60, cached=False), chunk=1000)[0]


def test_further_turns_after_evictions_and_in_chunks_are_bit_equal(model: GLM53, want) -> None:
    """Tokens, their log-probabilities and how many drafts came through, of conversations behind one system prompt. The
    pool is too small for all of them, and pages that were given up are full of NaN."""
    engine = Engine(model, SMALL)
    got, found = converse(engine, chunk=16)
    assert got == want
    assert {len(tokens) for rounds in want for tokens, _ in rounds} >= {1, 2, DRAFTS + 1}
    assert engine.pool.evicted_blocks > 20
    assert found == engine.prefixes.stats.gpu_hit_tokens > 250
    assert engine.prefixes.stats.cold_requests == 3  # the first one, and the strangers


def test_answers_depend_on_what_the_cached_pages_hold(model: GLM53) -> None:
    """Negative control: other bytes in a cached page, another answer; so the pages found are those read."""
    engine = Engine(model, 30)
    (prompt,) = random_prompts((50,), TINY.vocab_size)
    (cold,), (warm,) = engine.answer([prompt], 4, 50), engine.answer([prompt], 4, 50)
    assert (cold.cached, warm.cached, warm.rounds) == (0, 48, cold.rounds)
    (page,) = engine.pool.match(engine.prefixes.blocks(prompt).hashes[:1])
    engine.cache.kv.mla_rows.pages[:, page] = engine.cache.kv.mla_rows.pages[:, page].roll(4, -1)
    (wrong,) = engine.answer([prompt], 4, 50)
    assert wrong.cached == 48
    assert wrong.rounds != cold.rounds


def _rows_behind(engine: Engine, first: list[int], second: list[int]) -> tuple[int, torch.Tensor]:
    """Answer one prompt, then open another: what it found, and all rows of all layers of it once it is computed."""
    if first:
        engine.answer([first], 4, 100)
    blocks = engine.prefixes.blocks(second)
    admission = engine.prefixes.admit(blocks)
    request = engine.runner.open(prefix=admission.prefix, own=admission.own)
    engine.runner.step(prompts={request: second[admission.cached_tokens :]}, ending=[request])
    rows, table = engine.cache.kv.mla_rows, engine.cache.tables.table([request])
    layers = range(rows.pages.shape[0])
    made = torch.stack([rows.gather_sequences(layer, table, [len(second)]) for layer in layers])
    engine.runner.close(request)
    return admission.cached_tokens, made


def test_rows_of_the_mtp_layer_stand_for_the_token_that_follows(model: GLM53) -> None:
    """Two prompts share 48 tokens, 6 blocks, and no more: the last row of the MTP layer there belongs to the first
    prompt alone. Without the token behind it in a block's hash (the control) the second would take it."""
    shared, one, other = random_prompts((48, 9, 9), TINY.vocab_size)
    other[0] = (one[0] + 1) % TINY.vocab_size
    _, fresh = _rows_behind(Engine(model, 30), [], shared + other)
    found, rows = _rows_behind(Engine(model, 30), shared + one, shared + other)
    assert found == 40
    assert torch.equal(rows, fresh)
    careless = Engine(model, 30)
    careless.prefixes = PrefixCache(replace(careless.prefixes.identity, mtp=False), careless.pool)
    found, rows = _rows_behind(careless, shared + one, shared + other)
    assert found == 48
    different = (rows != fresh).any(-1)
    assert different[-1].nonzero().flatten().tolist() == [47]
    assert not different[:-1].any()


def test_without_drafts_all_shared_blocks_are_found(model: GLM53) -> None:
    shared, one, other = random_prompts((48, 9, 9), TINY.vocab_size)
    other[0] = (one[0] + 1) % TINY.vocab_size
    _, fresh = _rows_behind(Engine(model, 30, drafts=0), [], shared + other)
    found, rows = _rows_behind(Engine(model, 30, drafts=0), shared + one, shared + other)
    assert found == 48
    assert torch.equal(rows[: TINY.num_hidden_layers], fresh[: TINY.num_hidden_layers])


def test_shared_tokens_can_not_be_forgotten_or_written(model: GLM53) -> None:
    engine = Engine(model, 12)
    (prompt,) = random_prompts((50,), TINY.vocab_size)
    engine.answer([prompt], 1, 50)
    admission = engine.prefixes.admit(engine.prefixes.blocks(prompt))
    request = engine.cache.open(admission.prefix, admission.own)
    assert engine.cache.lengths[request] == engine.cache.tables.read_only_tokens(request) == 48
    model.step(engine.cache, prompts={request: prompt[48:]})
    engine.cache.truncate(request, 48)
    with pytest.raises(ValueError, match="shares its first 48 tokens and can not be cut to 47"):
        engine.cache.truncate(request, 47)
    engine.cache.close(request)
    with pytest.raises(ValueError, match=r"pages \[11\]: they are free"):
        engine.cache.open([11])
    assert engine.cache.lengths == {}


def test_a_cache_over_another_count_of_pages_is_refused(model: GLM53) -> None:
    with pytest.raises(ValueError, match="an allocator of 3 pages for a cache of 4"):
        model.new_cache(4, allocator=BlockPool(PageAllocator(3)))
