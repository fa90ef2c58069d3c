"""M11: prompts of at most top-k tokens may take dense attention with expanded keys; the result is the same function."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from models.glm53 import GLM53
from tests.checkpoints import KDIM, TINY, random_prompts, save_random


@pytest.mark.parametrize(("config", "lengths"), [(TINY, (1, 2, 15, 16, 17, 40)), (KDIM, (3, 63, 64, 65))])
def test_dense_path_equals_sparse_path(tmp_path: Path, config, lengths: tuple[int, ...]) -> None:
    path = save_random(tmp_path, config)
    prompts = random_prompts(lengths, config.vocab_size)
    sparse = GLM53.from_pretrained(path).generate_batch(prompts, 3, prompt_logits="all")
    dense_model = GLM53.from_pretrained(path, sparse_mla_force_mqa=False)
    dense_rows: dict[int, int] = {}

    def observe(layer, step, prompt_topk, decode_topk) -> None:
        if step.prompt.num_tokens:
            dense_rows[layer] = int((prompt_topk < 0).all(1).sum())

    dense = dense_model.generate_batch(prompts, 3, prompt_logits="all", observer=observe)
    # On the dense path nothing is selected: exactly the prompts that fit in top-k took it, in every layer.
    expected = sum(n for n in lengths if n <= config.index_topk)
    assert dense_rows == dict.fromkeys(range(config.num_hidden_layers), expected)
    for x, y, n in zip(sparse.prompt_logits, dense.prompt_logits, lengths, strict=True):
        torch.testing.assert_close(x, y, atol=1e-4, rtol=0)
        assert torch.equal(x, y) or n <= config.index_topk
    assert sparse.ids == dense.ids


def test_path_follows_the_whole_length_not_the_chunk(tmp_path: Path) -> None:
    """A short chunk behind a long context is not a short prompt."""
    model = GLM53.from_pretrained(save_random(tmp_path, TINY), sparse_mla_force_mqa=False)
    ids = random_prompts((40,), TINY.vocab_size)[0]
    cache = model.new_cache(1)
    request = cache.open()
    paths = []
    for start, stop in ((0, 10), (10, 16), (16, 17), (17, 40)):
        result = model.step(cache, prompts={request: ids[start:stop]})
        paths.append({block.path for block in result.kv.blocks})
    assert paths == [{"dense"}, {"dense"}, {"sparse"}, {"sparse"}]
