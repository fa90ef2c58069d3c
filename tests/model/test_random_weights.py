"""Random models that exist nowhere: one model at every cut, device and dtype, with gains near one."""

from __future__ import annotations

import json
import math
import weakref
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cptools.kernels.block_fp8 import BlockFP8
from cptools.kernels.rowwise import linear
from models.glm53 import GLM53Config
from models.glm53.ffn import route
from models.glm53.weight_split import WeightSplit
from models.glm53.weights import (
    DenseFFNWeights,
    MoEWeights,
    RandomSource,
    expected_tensors,
    is_released_as_fp8,
    load_weights,
    random_weights,
    save_checkpoint,
    save_sharded_checkpoint,
    scale_name,
    weight_bytes,
)
from tests.model.weight_cases import BLOCKY, RAGGED, SPLITS, ranks
from tests.model.weight_trees import assert_same, leaves, nbytes, part_of, plain

FULL = GLM53Config.glm53()
GROUP = FULL.excerpt(FULL.indexer_group(6), experts=4)


# ---- the source ----------------------------------------------------------------------------------------------------

SOURCE = RandomSource(RAGGED, seed=0, device="cpu")
WHOLE = dict(SOURCE.tensors())


def test_names_shapes_and_dtypes_are_the_released_ones() -> None:
    shapes = expected_tensors(RAGGED)
    assert {name for name in WHOLE if not name.endswith("_scale_inv")} == set(shapes)
    for name, shape in shapes.items():
        quantised = is_released_as_fp8(name, shape)
        assert (scale_name(name) in WHOLE) == quantised
        if quantised:
            assert WHOLE[name].dtype == torch.float8_e4m3fn
            assert list(WHOLE[scale_name(name)].shape) == [math.ceil(side / 128) for side in shape]
        else:
            fp32 = name.endswith("e_score_correction_bias")
            assert WHOLE[name].dtype == (torch.float32 if fp32 else torch.bfloat16)
        assert WHOLE[name].shape == shape


@settings(deadline=None, max_examples=200)
@given(data=st.data())
def test_any_rectangle_is_that_of_the_whole(data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(sorted(WHOLE)))
    whole = WHOLE[name]
    start = tuple(data.draw(st.integers(0, size - 1)) for size in whole.shape)
    shape = tuple(data.draw(st.integers(1, size - first)) for first, size in zip(start, whole.shape, strict=True))
    part = whole[tuple(slice(first, first + size) for first, size in zip(start, shape, strict=True))]
    assert torch.equal(SOURCE.read(name, start, shape).float(), part.float())


def test_gains_are_near_one() -> None:
    source = RandomSource(GROUP, seed=1, device="cpu")
    x = torch.randn(64, 6144, generator=torch.Generator().manual_seed(0))
    for name in ("model.layers.0.self_attn.q_a_proj.weight", "model.layers.1.mlp.gate.weight"):
        shape = source.shapes[name]
        weight = source.read(name, (0, 0), shape).float()
        assert weight.isfinite().all()
        if is_released_as_fp8(name, shape):
            blocks = source.read(scale_name(name), (0, 0), source.shapes[scale_name(name)])
            assert blocks.unique().numel() > 0.99 * blocks.numel(), "scales differ, so that mixing them up shows"
            weight = BlockFP8(weight.to(torch.float8_e4m3fn), blocks).dequantise()
        y = linear(x, weight)
        assert abs(float(y.std()) - 1) < 0.03
        assert abs(float(y.mean())) < 0.03
    norm = source.read("model.norm.weight", (0,), (6144,)).float()
    assert abs(float(norm.mean()) - 1) < 0.01
    assert abs(float(norm.std()) - 0.1) < 0.01
    embedding = source.read("model.embed_tokens.weight", (150_000, 0), (64, 6144)).float()
    assert abs(float(embedding.std()) - 1) < 0.01


def test_values_are_independent() -> None:
    """No correlation between rows, columns, neighbours, tensors or seeds beyond chance."""

    def values(seed: int, layer: int, row: int) -> torch.Tensor:
        source = RandomSource(GROUP, seed=seed, device="cpu")
        name = f"model.layers.{layer}.self_attn.o_proj.weight"
        return source.read(name, (row, 0), (512, 2048)).float()

    first = values(0, 0, 0)
    others = [values(0, 0, 512), values(0, 1, 0), values(1, 0, 0), first.roll(1, 0), first.roll(1, 1), first.roll(4, 1)]
    for other in others:
        correlation = float((first * other).mean() / first.square().mean())
        assert abs(correlation) < 5 / math.sqrt(first.numel())
    for dim in (0, 1):  # no common pattern in rows or columns
        means = first.mean(dim) / first.std()
        assert float(means.square().mean()) * first.shape[dim] == pytest.approx(1, abs=0.2)


# ---- the weights ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("keep_fp8", [True, False])
@pytest.mark.parametrize(("tp", "ep"), SPLITS)
def test_every_rank_holds_its_part_of_one_model(tmp_path: Path, tp: int, ep: int, keep_fp8: bool) -> None:
    """And it is the model that a checkpoint of the same seed holds."""
    save_sharded_checkpoint(tmp_path, BLOCKY, RandomSource(BLOCKY, seed=5, device="cpu", router_skew=0.3).tensors())
    for split in ranks(tp, ep):
        options = {"device": "cpu", "dtype": torch.bfloat16, "keep_fp8": keep_fp8, "split": split}
        drawn = random_weights(BLOCKY, seed=5, router_skew=0.3, **options)
        assert_same(
            drawn, {name: plain(w, torch.bfloat16) for name, w in leaves(load_weights(tmp_path, BLOCKY, **options))}
        )


def test_fp8_and_dequantised_are_one_model() -> None:
    whole = random_weights(BLOCKY, device="cpu", dtype=torch.float32)
    kept = random_weights(BLOCKY, device="cpu", dtype=torch.float32, keep_fp8=True)
    assert_same(kept, part_of(whole, BLOCKY, WeightSplit()))
    assert any(isinstance(w, BlockFP8) for _, w in leaves(kept))
    assert nbytes(kept) == weight_bytes(BLOCKY, dtype=torch.float32, keep_fp8=True)
    assert nbytes(whole) == weight_bytes(BLOCKY, dtype=torch.float32)


def test_config_without_blocks_gives_plain_weights() -> None:
    config = replace(BLOCKY, weight_block_size=None)
    weights = random_weights(config, device="cpu", dtype=torch.float32)
    q_b = weights.layers[0].attention.q_b
    assert abs(float(q_b.std()) * 128**0.5 - 1) < 0.03
    kept = random_weights(config, device="cpu", dtype=torch.float32, keep_fp8=True)  # as `load_weights` of a BF16 file
    assert_same(kept, dict(leaves(weights)))
    with pytest.raises(ValueError, match=r"keep_fp8 needs blocks of 128 x 128, weight_block_size is \(128, 64\)"):
        random_weights(replace(BLOCKY, weight_block_size=(128, 64)), device="cpu", dtype=torch.float32, keep_fp8=True)


def load_of_experts(router_skew: float) -> torch.Tensor:
    """Tokens of each of 64 experts over the mean, ascending, for normal rows."""
    config = replace(FULL.excerpt([6], experts=64), hidden_size=1024, vocab_size=128, eos_token_ids=())
    source = RandomSource(config, seed=2, device="cpu", router_skew=router_skew)
    router = source.read("model.layers.0.mlp.gate.weight", (0, 0), (64, 1024)).float()
    bias = source.read("model.layers.0.mlp.gate.e_score_correction_bias", (0,), (64,))
    nothing = torch.empty(0)
    weights = MoEWeights(router, bias, nothing, nothing, DenseFFNWeights(nothing, nothing))
    x = torch.randn(4096, 1024, generator=torch.Generator().manual_seed(0))
    experts, _ = route(x, weights, config)
    return torch.bincount(experts.flatten(), minlength=64).sort().values / (4096 * 8 / 64)


def test_routing_is_near_uniform_and_may_be_skewed() -> None:
    uniform, skewed = load_of_experts(0.0), load_of_experts(0.3)
    assert 0.8 < uniform[0] < uniform[-1] < 1.25
    assert skewed[-1] > 2.5
    assert skewed[0] < 0.3
    with pytest.raises(ValueError, match="router_skew=-1"):
        RandomSource(GROUP, seed=0, device="cpu", router_skew=-1)


# ---- saving in shards ----------------------------------------------------------------------------------------------


def test_shards_are_those_of_a_released_checkpoint(tmp_path: Path) -> None:
    source = RandomSource(BLOCKY, seed=0, device="cpu")
    save_sharded_checkpoint(tmp_path, BLOCKY, source.tensors(), shard_bytes=2**18)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    files = sorted(file.name for file in tmp_path.glob("*.safetensors"))
    assert len(files) > 5
    assert files == [f"model-{i:05}-of-{len(files):05}.safetensors" for i in range(1, len(files) + 1)]
    assert set(index["weight_map"]) == set(source.shapes)
    assert set(index["weight_map"].values()) == set(files)
    sizes = [(tmp_path / file).stat().st_size for file in files]
    assert max(sizes) < 2**18 + 2**14
    tensors = dict(source.tensors())
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in tensors.values())
    assert GLM53Config.from_pretrained(tmp_path) == BLOCKY
    assert json.loads((tmp_path / "config.json").read_text())["dtype"] == "bfloat16"
    assert not list(tmp_path.glob("*.part"))


def test_saving_takes_one_tensor_at_a_time(tmp_path: Path) -> None:
    """Tensors of a shard are released before those of the next but one are made."""
    alive: list[weakref.ref[torch.Tensor]] = []
    most = 0

    def tensors():
        nonlocal most
        for i in range(40):
            tensor = torch.full((1024,), float(i))
            alive.append(weakref.ref(tensor))
            yield f"t{i}", tensor
            del tensor
            most = max(most, sum(ref() is not None for ref in alive))
        yield "lm_head.weight", torch.zeros(1)

    save_sharded_checkpoint(tmp_path, BLOCKY, tensors(), shard_bytes=4 * 4096)
    assert most <= 5


def test_a_single_file_would_hide_the_shards(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, BLOCKY, {"lm_head.weight": torch.zeros(1)})
    with pytest.raises(ValueError, match=r"holds a model\.safetensors"):
        save_sharded_checkpoint(tmp_path, BLOCKY, iter(()))


# ---- excerpts ------------------------------------------------------------------------------------------------------


def test_excerpts_of_the_full_model() -> None:
    assert [list(FULL.indexer_group(layer)) for layer in (0, 1, 2, 9, 77)] == [
        [0],
        [1],
        [2, 3, 4, 5],
        [6, 7, 8, 9],
        [74, 75, 76, 77],
    ]
    group = FULL.excerpt(FULL.indexer_group(8))
    assert (group.num_hidden_layers, group.num_cache_layers, group.n_routed_experts) == (4, 4, 256)
    assert group.indexer_types == ("full", "shared", "shared", "shared")
    assert group.mlp_layer_types == ("sparse",) * 4
    assert group.hidden_size == FULL.hidden_size
    dense = FULL.excerpt([0], mtp=True)
    assert (dense.mlp_layer_types, dense.index_layers) == (("dense",), (0, 1))
    few = FULL.excerpt([2, 4, 6], experts=4)
    assert (few.indexer_types, few.num_experts_per_tok) == (("full", "shared", "full"), 4)
    assert FULL.excerpt(range(78), mtp=True) == FULL
    for config in (group, dense, few):
        assert GLM53Config.from_dict(config.to_dict()) == config


@pytest.mark.parametrize(
    ("layers", "options", "message"),
    [
        ([], {}, "are not some of 0..77, ascending"),
        ([77, 78], {}, r"layers=\[77, 78\] are not some of 0..77"),
        ([1, 0], {}, "ascending"),
        ([0, 0], {}, "ascending"),
        ([7], {}, "7 needs the indexer of layer 6"),
        ([2, 7], {}, "7 needs the indexer of layer 6"),
        ([0], {"experts": 257}, "experts=257 is not in 1..256"),
        ([0], {"experts": 0}, "experts=0 is not in 1..256"),
        ([6.0], {}, "layers=6.0 must be an integer"),
        ([True], {}, "layers=True must be an integer"),
        ([6], {"experts": 2.5}, "experts=2.5 must be an integer"),
    ],
)
def test_excerpts_that_make_no_model(layers: list[int], options: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        FULL.excerpt(layers, **options)
    with pytest.raises(ValueError, match="num_nextn_predict_layers=0"):
        FULL.excerpt([0]).excerpt([0], mtp=True)


# ---- bytes of true sizes -------------------------------------------------------------------------------------------


def kept_bytes(layers: list[int], split: WeightSplit) -> int:
    """Of these layers alone, FP8 kept."""
    config = FULL.excerpt(layers)
    outside = (2 * config.vocab_size + 1) * config.hidden_size * 2
    return weight_bytes(config, dtype=torch.bfloat16, keep_fp8=True, split=split) - outside


def test_bytes_of_a_rank_at_true_size() -> None:
    """Stored bytes of a layer's part, and what a rank holds wider than it is stored: kv_b, router, wk, weights_proj."""
    router = 256 * 6144 * 2
    indexer = 128 * 6144 - 48 * 4 + 32 * 6144 * 2

    def kv_b(tp: int) -> int:
        return 28672 // tp * 512 - 224 // tp * 4 * 4

    full, shared, dense = 9_881_601_152, 9_872_030_144, 401_208_448
    assert kept_bytes([6], WeightSplit()) == full + router + indexer + kv_b(1)
    assert kept_bytes([0], WeightSplit()) == dense + indexer + kv_b(1)
    assert kept_bytes([6, 7], WeightSplit()) - kept_bytes([6], WeightSplit()) == shared + router + kv_b(1)
    tp8 = WeightSplit(tp=8, tp_rank=7)
    assert kept_bytes([6], tp8) == 1_260_464_320 + router + indexer + kv_b(8)
    assert kept_bytes([6, 7], tp8) - kept_bytes([6], tp8) == 1_250_893_312 + router + kv_b(8)
    ep8 = WeightSplit(ep=8, ep_rank=3)
    assert kept_bytes([6, 7], ep8) - kept_bytes([6], ep8) == 1_414_248_896 + router + kv_b(1)
