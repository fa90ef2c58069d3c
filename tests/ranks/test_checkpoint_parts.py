"""A sharded block-FP8 checkpoint read in parts by two ranks gives the logits of one rank that reads all of it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from cptools import ParallelConfig, ParallelGroups
from models.glm53 import GLM53, GLM53Config
from models.glm53.weight_split import WeightSplit
from models.glm53.weights import ModelWeights, RandomSource, random_weights, save_sharded_checkpoint
from tests.checkpoints import random_prompts
from tests.model.weight_cases import BLOCKY, beyond_the_weights
from tests.ranks.harness import run_ranks

FULL = GLM53Config.glm53()
# (sizes, keep_fp8, dtype)
CASES = [
    ({"pcp": 2, "ep": 2}, False, torch.float32),
    ({"pcp": 2, "ep": 2}, True, torch.bfloat16),
    ({"pcp": 2, "dcp": 2, "ep": 2}, True, torch.float32),
    ({"tp": 2}, False, torch.float32),
    ({"tp": 2, "ep": 2}, True, torch.float32),
]


def _logits(path: Path, prompt: list[int], parallel: ParallelGroups | None, **options: Any) -> Tensor:
    model = GLM53.from_pretrained(path, parallel=parallel, **options)
    return model.prefill_logits(prompt)


def _parallel(rank: int, world_size: int, path: Path, prompt: list[int], sizes: dict[str, int], options: Any) -> Tensor:
    with ParallelGroups.from_world(ParallelConfig(**sizes)) as groups:
        return _logits(path, prompt, groups, **options)


def _check(
    path: Path, prompt: list[int], sizes: dict[str, int], alone: Tensor, *, timeout: float = 60, **options: Any
) -> None:
    results = run_ranks(_parallel, 2, path, prompt, sizes, options, timeout=timeout)
    assert alone.isfinite().all()
    for logits in results:
        if "tp" not in sizes:
            assert torch.equal(logits, alone)
        elif not options["keep_fp8"]:
            assert (logits - alone).abs().max() < 1e-4
        else:  # an activation between two e4m3 values may round either way after a sum in another order
            assert (logits - alone).square().mean() < 0.05**2 * alone.square().mean()


def _drawn(rank: int, world_size: int, prompt: list[int], sizes: dict[str, int]) -> Tensor:
    """The model of the checkpoint, its weights drawn instead of read."""

    def weights(part: WeightSplit) -> ModelWeights:
        options = {"device": "cpu", "dtype": torch.float32, "keep_fp8": True}
        return random_weights(BLOCKY, seed=0, router_skew=0.1, split=part, **options)

    with ParallelGroups.from_world(ParallelConfig(**sizes)) as groups:
        return GLM53.over(groups, BLOCKY, weights).prefill_logits(prompt)


@pytest.fixture(scope="module")
def blocky(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("blocky")
    source = RandomSource(BLOCKY, seed=0, device="cpu", router_skew=0.1)
    save_sharded_checkpoint(path, BLOCKY, source.tensors(), shard_bytes=2**18)
    return path


@pytest.mark.parametrize(("sizes", "keep_fp8", "dtype"), CASES)
def test_two_ranks_equal_one(blocky: Path, sizes: dict[str, int], keep_fp8: bool, dtype: torch.dtype) -> None:
    (prompt,) = random_prompts((BLOCKY.index_topk,), BLOCKY.vocab_size)
    options = {"keep_fp8": keep_fp8, "dtype": dtype}
    _check(blocky, prompt, sizes, _logits(blocky, prompt, None, **options), **options)


def test_drawn_weights_are_those_of_the_checkpoint(blocky: Path) -> None:
    (prompt,) = random_prompts((37,), BLOCKY.vocab_size)
    alone = _logits(blocky, prompt, None, keep_fp8=True)
    for logits in run_ranks(_drawn, 2, prompt, {"pcp": 2, "ep": 2}):
        assert torch.equal(logits, alone)


def test_weights_kept_in_fp8_are_those_dequantised(blocky: Path) -> None:
    """Products with them differ by the rounding of activations to e4m3, 3 mantissa bits, and by no more."""
    config = replace(BLOCKY.excerpt([0]), weight_block_size=(128, 128))  # no router, whose choices could differ
    path = blocky / "dense"
    save_sharded_checkpoint(path, config, RandomSource(config, seed=0, device="cpu").tensors())
    (prompt,) = random_prompts((config.index_topk,), config.vocab_size)
    plain, kept = (_logits(path, prompt, None, keep_fp8=keep) for keep in (False, True))
    error = float((kept - plain).square().mean().sqrt() / plain.square().mean().sqrt())
    assert 1e-3 < error < 0.1


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_true_dims_round_trip(tmp_path: Path) -> None:
    """An IndexShare group of GLM-5.3 at full width with 4 of 256 experts, 1.5 GB, read by one rank and by two."""
    config = replace(FULL.excerpt(FULL.indexer_group(6), experts=4), vocab_size=1024, eos_token_ids=())
    save_sharded_checkpoint(tmp_path, config, RandomSource(config, seed=0, device="cpu").tensors(), shard_bytes=2**28)
    assert sum(file.stat().st_size for file in tmp_path.glob("*.safetensors")) > 1.4e9
    for kind in ("fp8", "dequantised"):
        for ep in (1, 2):
            _, beyond = beyond_the_weights(tmp_path, ep=ep, kind=kind)
            assert beyond < 2**30
    (prompt,) = random_prompts((23,), config.vocab_size)
    alone: dict[tuple[bool, torch.dtype], Tensor] = {}
    for sizes, keep_fp8, dtype in CASES:
        options = {"keep_fp8": keep_fp8, "dtype": dtype}
        if (keep_fp8, dtype) not in alone:
            alone[keep_fp8, dtype] = _logits(tmp_path, prompt, None, **options)
        _check(tmp_path, prompt, sizes, alone[keep_fp8, dtype], timeout=300, **options)
