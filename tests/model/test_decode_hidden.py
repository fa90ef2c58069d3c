"""Decode rows in padded buffers on the device give the model the bits of a planned step."""

from __future__ import annotations

import pytest
import torch

from cptools.step_rows import DecodeRows
from models.glm53 import GLM53
from tests.checkpoints import TINY, random_prompts, save_random

LENGTHS = (1, 16, 63, 64, 131)


@pytest.fixture(scope="module", params=[("fp32", 1), ("fp8", 2)], ids=["fp32", "fp8-two-parts"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> GLM53:
    path = save_random(tmp_path_factory.mktemp("tiny"), TINY)
    return GLM53.from_pretrained(path, kv_rows=request.param[0], decode_parts=request.param[1])


def prefilled(model: GLM53):
    cache = model.new_cache(16)
    cache.kv.mla_rows.pages.fill_(0xFF)
    cache.kv.index_rows.pages.fill_(0xFF)
    requests = [cache.open() for _ in LENGTHS]
    prompts = random_prompts(LENGTHS, TINY.vocab_size)
    model.step(cache, prompts=dict(zip(requests, prompts, strict=True)))
    return cache, requests


@pytest.mark.parametrize("per_request", [1, 3])
def test_padded_buffers_equal_a_step(model: GLM53, per_request: int) -> None:
    ids = torch.randint(0, TINY.vocab_size, (len(LENGTHS), per_request), generator=torch.Generator().manual_seed(7))
    cache, requests = prefilled(model)
    want = model.step(cache, decodes=dict(zip(requests, ids.tolist(), strict=True)))

    padded, requests = prefilled(model)
    padded.tables.reserve({request: n + per_request for request, n in padded.lengths.items()})
    live = torch.tensor([0, 2, 3, 5, 8])
    contexts, tables = torch.full((9,), -1), torch.full((9, 7), -1)
    own = padded.tables.table(requests)
    contexts[live], tables[live, : own.shape[1]] = torch.tensor(LENGTHS), own
    spread = torch.full((9, per_request), 511)
    spread[live] = ids
    rows = DecodeRows.of_buffers(model.kv, contexts, tables, per_request=per_request)
    hidden = model.decode_hidden(padded.kv, rows, spread.flatten()).view(9, per_request, -1)
    assert torch.equal(hidden[live].flatten(0, 1), want.hidden)
    assert torch.equal(padded.kv.mla_rows.pages, cache.kv.mla_rows.pages)
    assert torch.equal(padded.kv.index_rows.pages, cache.kv.index_rows.pages)
    assert torch.isfinite(hidden).all()
