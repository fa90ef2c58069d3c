"""Weights drawn or read straight into GPU memory: the CPU's bits, at true size, and little memory beside them."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from cptools.kernels.block_fp8 import BlockFP8
from models.glm53 import GLM53Config
from models.glm53.weight_split import WeightSplit
from models.glm53.weights import (
    ModelWeights,
    RandomSource,
    load_weights,
    random_weights,
    save_sharded_checkpoint,
    weight_bytes,
)
from tests.model.weight_cases import BLOCKY
from tests.model.weight_trees import leaves

pytestmark = pytest.mark.gpu

FULL = GLM53Config.glm53()
OPTIONS = {"dtype": torch.bfloat16, "keep_fp8": True}


def assert_equal_bits(first: ModelWeights, second: ModelWeights) -> None:
    for (name, a), (_, b) in zip(leaves(first), leaves(second), strict=True):
        if isinstance(a, BlockFP8):
            assert isinstance(b, BlockFP8)
            assert torch.equal(a.values.view(torch.uint8).cpu(), b.values.view(torch.uint8).cpu()), name
            assert torch.equal(a.scales.cpu(), b.scales.cpu()), name
        else:
            assert torch.equal(a.cpu(), b.cpu()), name


@pytest.mark.parametrize("keep_fp8", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_one_seed_is_one_model_on_every_device(dtype: torch.dtype, keep_fp8: bool) -> None:
    split = WeightSplit(tp=2, tp_rank=1)
    drawn = [
        random_weights(BLOCKY, device=device, dtype=dtype, keep_fp8=keep_fp8, split=split, router_skew=0.1)
        for device in ("cpu", "cuda")
    ]
    assert_equal_bits(*drawn)


def test_a_group_of_true_size_takes_seconds() -> None:
    config = FULL.excerpt(FULL.indexer_group(6), mtp=False)
    expected = weight_bytes(config, **OPTIONS)
    assert expected > 39.5e9
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    start = time.monotonic()
    weights = random_weights(config, device="cuda", **OPTIONS)
    torch.cuda.synchronize()
    assert time.monotonic() - start < 30
    assert torch.cuda.max_memory_allocated() - before < expected + 2**30
    gate_up = weights.layers[3].ffn.gate_up
    assert isinstance(gate_up, BlockFP8)
    name = "model.layers.3.mlp.experts.255.up_proj.weight"
    rows = RandomSource(config, seed=0, device="cpu").read(name, (1024, 0), (64, 6144))
    assert torch.equal(gate_up.values[255, 2048 + 1024 :][:64].view(torch.uint8).cpu(), rows.view(torch.uint8))


def test_a_checkpoint_goes_straight_to_the_gpu(tmp_path: Path) -> None:
    config = replace(FULL.excerpt(FULL.indexer_group(6), experts=8), vocab_size=1024, eos_token_ids=())
    save_sharded_checkpoint(tmp_path, config, RandomSource(config, seed=3, device="cuda").tensors())
    for split in (WeightSplit(), WeightSplit(tp=2, tp_rank=1, ep=8, ep_rank=7)):
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        loaded = load_weights(tmp_path, config, device="cuda", split=split, **OPTIONS)
        expected = weight_bytes(config, split=split, **OPTIONS)
        assert torch.cuda.max_memory_allocated() - before < expected + 2**30
        assert_equal_bits(loaded, random_weights(config, device="cpu", split=split, seed=3, **OPTIONS))
        del loaded
