"""Random batches, numbers of drafts, chunks and layouts: drafts change no greedy token and no logit."""

from __future__ import annotations

import dataclasses
import random

import pytest
import torch

from models.glm53 import GLM53
from tests.checkpoints import TINY, random_prompts, save_guessable

pytestmark = pytest.mark.long


@pytest.mark.parametrize("seed", range(40))
def test_drafts_change_nothing(tmp_path_factory: pytest.TempPathFactory, seed: int) -> None:
    draw = random.Random(seed)
    path = save_guessable(tmp_path_factory.mktemp("model"), TINY, seed=seed, doubt=draw.choice([0.0, 0.05, 0.1, 0.3]))
    page_size = draw.choice([4, 8, 64])
    model = GLM53.from_pretrained(
        path,
        kv_rows=draw.choice(["fp32", "bf16", "fp8"]),
        page_size=page_size,
        interleave=draw.choice([1, 2, 4]),
        decode_parts=draw.choice([1, 1, 2, 3]),
        sparse_mla_force_mqa=draw.random() < 0.7,
    )
    model.config = dataclasses.replace(
        model.config,
        index_share_for_mtp_iteration=draw.random() < 0.6,
        eos_token_ids=tuple(draw.sample(range(TINY.vocab_size), 30)) if draw.random() < 0.5 else (),
    )
    lengths = tuple(draw.choice([1, 2, 3, 7, 15, 16, 17, 33, 64, 65, 120]) for _ in range(draw.randint(1, 6)))
    prompts = random_prompts(lengths, TINY.vocab_size, seed=seed)
    new, k = draw.randint(1, 25), draw.randint(1, 7)
    chunk = draw.choice([None, 1 + draw.randrange(70)])
    options = {"stop_at_eos": True, "prompt_logits": draw.choice(["last", "all"])}
    # Dense or sparse is chosen by the length of what has come so far, which chunks change.
    plain = model.generate_batch(prompts, new, chunk=chunk if model.dense_up_to else None, **options)
    drafted = model.generate_batch(prompts, new, chunk=chunk, draft_tokens=k, **options)
    assert drafted.ids == plain.ids
    assert all(map(torch.equal, drafted.decode_logits, plain.decode_logits))
    assert all(map(torch.equal, drafted.prompt_logits, plain.prompt_logits))
