"""What fixes a draw with drafts: the settings, the prompt and the position, and not where the output is cut."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from cptools.kernels.sampling import Sampling
from models.glm53 import GLM53
from tests.checkpoints import TINY, random_prompts, save_guessable


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_guessable(tmp_path_factory.mktemp("guessable"), TINY)


@pytest.fixture(scope="module")
def model(tiny: Path) -> GLM53:
    return GLM53.from_pretrained(tiny)


@pytest.mark.parametrize("most_likely", [False, True])
def test_drafted_draws_do_not_depend_on_max_new_tokens(model: GLM53, most_likely: bool) -> None:
    prompts = [[0, 7], *random_prompts((1, 17), TINY.vocab_size)]
    settings = [Sampling(1.0, seed=0), Sampling(0.5, seed=1), Sampling(0.6, top_k=9, seed=2)]
    options = {"sampling": settings, "draft_tokens": 4, "most_likely_drafts": most_likely}
    longest = model.generate_batch(prompts, 9, **options)
    assert sum(longest.accepted[1:]) > 0
    for new in (1, 2, 3, 4, 6):
        out = model.generate_batch(prompts, new, **options)
        assert out.ids == [ids[:new] for ids in longest.ids]
        assert [len(rows) for rows in out.decode_logits] == [new - 1] * 3


@pytest.mark.parametrize("k", [1, 4])
def test_drafts_end_where_the_positions_do(model: GLM53, k: int) -> None:
    config = dataclasses.replace(TINY, max_position_embeddings=24)
    short = GLM53(config, model.weights, cp=model.cp, kv=model.kv)
    prompts = random_prompts((5, 14), TINY.vocab_size)
    want = short.generate_batch(prompts, 11)
    got = short.generate_batch(prompts, 11, draft_tokens=k)
    assert got.ids == want.ids
    with pytest.raises(ValueError, match="25 positions"):
        short.generate_batch(prompts, 12, draft_tokens=k)


def test_a_batch_with_drafts_needs_pages_for_them(model: GLM53) -> None:
    """8 new tokens behind 57 fit a page of 64; 3 drafts behind them do not."""
    (prompt,) = random_prompts((57,), TINY.vocab_size)
    assert model.generate_batch([prompt], 8, cache=model.new_cache(1)).ids
    with pytest.raises(ValueError, match="1 free pages, the batch needs 2"):
        model.generate_batch([prompt], 8, cache=model.new_cache(1), draft_tokens=3)


@pytest.mark.parametrize("k", [0, 2])
def test_prompts_of_one_sampling_draw_alike_until_request_tells_them_apart(model: GLM53, k: int) -> None:
    (prompt,), shared = random_prompts((9,), TINY.vocab_size), Sampling(1.0, seed=3)
    a, b = model.generate_batch([prompt] * 2, 8, sampling=shared, draft_tokens=k).ids
    assert a == b
    each = [dataclasses.replace(shared, request=i) for i in range(2)]
    a, b = model.generate_batch([prompt] * 2, 8, sampling=each, draft_tokens=k).ids
    assert a != b


@pytest.mark.parametrize("stop", [False, True])
def test_progress_counts_the_tokens_that_are_kept(model: GLM53, stop: bool) -> None:
    """An eos inside a round of accepted drafts cuts it, and so does the last new token."""
    prompts = random_prompts((3, 12, 30), TINY.vocab_size)
    long = model.generate_batch(prompts, 12).ids
    cuts = []
    for at in range(1, 11):
        config = dataclasses.replace(TINY, eos_token_ids=(long[0][at], long[1][at]))
        subject = GLM53(config, model.weights, cp=model.cp, kv=model.kv)
        gained: list[int] = []
        out = subject.generate_batch(
            prompts,
            at + 1,
            stop_at_eos=stop,
            draft_tokens=3,
            progress=lambda plan, tokens, gained=gained: gained.extend(tokens),
        )
        assert sum(gained) == sum(map(len, out.ids))
        cuts.append(sum((1 + j) * n for j, n in enumerate(out.accepted)) - sum(gained) + len(prompts))
    assert max(cuts) > 0
