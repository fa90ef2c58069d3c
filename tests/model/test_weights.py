"""Released checkpoints: names, shapes and bytes, what loading makes of each dtype, and what it refuses."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import Tensor

from cptools.kernels.block_fp8 import dequantise_blocks, quantise_blocks, scale_shape
from models.glm53 import GLM53Config
from models.glm53.weights import (
    DenseFFNWeights,
    LayerWeights,
    ModelWeights,
    MoEWeights,
    expected_tensors,
    is_released_as_fp8,
    load_weights,
    random_tensors,
    save_checkpoint,
)
from tests.oracle.checkpoints import dequantised, preset_config

FULL = GLM53Config.glm53()
TINY = preset_config("tiny")
TINY_FP8 = preset_config("tiny", fp8=True)


def load(path: Path, dtype: torch.dtype = torch.float32) -> ModelWeights:
    return load_weights(path, GLM53Config.from_pretrained(path), device="cpu", dtype=dtype)


def by_released_name(weights: ModelWeights) -> Iterator[tuple[str, Tensor]]:
    """The checkpoint a model's weights come from, spelled out once more."""
    yield "model.embed_tokens.weight", weights.embed
    yield "model.norm.weight", weights.norm
    yield "lm_head.weight", weights.lm_head
    layers = list(weights.layers)
    if weights.mtp is not None:
        mtp = f"model.layers.{len(layers)}."
        yield mtp + "enorm.weight", weights.mtp.enorm
        yield mtp + "hnorm.weight", weights.mtp.hnorm
        yield mtp + "eh_proj.weight", weights.mtp.eh_proj
        yield mtp + "shared_head.norm.weight", weights.mtp.norm
        layers.append(weights.mtp.layer)
    for index, layer in enumerate(layers):
        for name, value in layer_by_released_name(layer):
            yield f"model.layers.{index}.{name}", value


def layer_by_released_name(layer: LayerWeights) -> Iterator[tuple[str, Tensor]]:
    attention, indexer, ffn = layer.attention, layer.indexer, layer.ffn
    yield "input_layernorm.weight", layer.input_norm
    yield "post_attention_layernorm.weight", layer.post_attention_norm
    yield "self_attn.q_a_proj.weight", attention.q_a
    yield "self_attn.q_a_layernorm.weight", attention.q_a_norm
    yield "self_attn.q_b_proj.weight", attention.q_b
    yield "self_attn.kv_a_proj_with_mqa.weight", attention.kv_a
    yield "self_attn.kv_a_layernorm.weight", attention.kv_a_norm
    per_head = [torch.cat([k, v]) for k, v in zip(attention.w_uk, attention.w_uv, strict=True)]
    yield "self_attn.kv_b_proj.weight", torch.cat(per_head)
    yield "self_attn.o_proj.weight", attention.o
    if indexer is not None:
        yield "self_attn.indexer.wq_b.weight", indexer.wq_b
        yield "self_attn.indexer.wk.weight", indexer.wk
        yield "self_attn.indexer.k_norm.weight", indexer.k_norm_weight
        yield "self_attn.indexer.k_norm.bias", indexer.k_norm_bias
        yield "self_attn.indexer.weights_proj.weight", indexer.weights_proj
    if isinstance(ffn, DenseFFNWeights):
        yield from swiglu_by_released_name("mlp.", *ffn.gate_up.chunk(2), ffn.down)
    else:
        yield "mlp.gate.weight", ffn.router
        yield "mlp.gate.e_score_correction_bias", ffn.bias
        for expert, matrices in enumerate(zip(*ffn.gate_up.chunk(2, dim=1), ffn.down, strict=True)):
            yield from swiglu_by_released_name(f"mlp.experts.{expert}.", *matrices)
        yield from swiglu_by_released_name("mlp.shared_experts.", *ffn.shared.gate_up.chunk(2), ffn.shared.down)


def swiglu_by_released_name(prefix: str, gate: Tensor, up: Tensor, down: Tensor) -> Iterator[tuple[str, Tensor]]:
    yield prefix + "gate_proj.weight", gate
    yield prefix + "up_proj.weight", up
    yield prefix + "down_proj.weight", down


def assert_holds(weights: ModelWeights, expected: dict[str, Tensor]) -> None:
    found = dict(by_released_name(weights))
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(found[name].float(), value.float()), name


# ---- names and shapes --------------------------------------------------------------------------------------------


def test_parameters_of_the_full_model() -> None:
    """The published count, in which the router's selection bias is a buffer."""
    shapes = expected_tensors(FULL)
    parameters = {name: math.prod(shape) for name, shape in shapes.items() if not name.endswith("correction_bias")}
    assert sum(parameters.values()) == 753_329_921_024
    assert sum(name.startswith("model.layers.78.") for name in shapes) == 791


def test_bytes_of_the_full_model_in_fp8() -> None:
    """Per layer, scales included."""
    layers: dict[int, int] = {}
    for name, shape in expected_tensors(FULL).items():
        if is_released_as_fp8(name, shape):
            size = math.prod(shape) + 4 * math.prod(scale_shape(shape, (128, 128)))
        else:
            size = math.prod(shape) * (4 if name.endswith("correction_bias") else 2)
        if name.startswith("model.layers."):
            layer = int(name.split(".")[2])
            layers[layer] = layers.get(layer, 0) + size
        elif name != "model.norm.weight":
            assert size == 1_903_165_440, name
    norms = 2 * 6144 * 2 + (2048 + 512) * 2
    assert layers[0] == layers[1] == layers[2] == 401_208_448
    assert layers[6] == 9_881_601_152
    assert layers[3] == 9_872_030_144
    assert layers[78] == 10_032_632_960
    assert layers[6] - layers[3] == 9_571_008, "an indexer"
    assert layers[0] == 165_060_032 + 9_571_008 + 226_547_712 + norms


def test_kv_a_has_five_rows_of_scales() -> None:
    shape = expected_tensors(FULL)["model.layers.0.self_attn.kv_a_proj_with_mqa.weight"]
    assert shape == (576, 6144)
    assert scale_shape(shape, (128, 128)) == (5, 48)


def test_shared_layers_have_no_indexer() -> None:
    owners = {int(name.split(".")[2]) for name in expected_tensors(FULL) if ".indexer." in name}
    assert owners == set(FULL.index_layers)


# ---- blocks ------------------------------------------------------------------------------------------------------


@settings(deadline=None)
@given(
    rows=st.integers(1, 40),
    columns=st.integers(1, 40),
    block=st.tuples(st.integers(1, 17), st.integers(1, 17)),
    seed=st.integers(0, 2**16),
)
def test_blocks_round_to_e4m3(rows: int, columns: int, block: tuple[int, int], seed: int) -> None:
    weight = torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))
    quantised, scale = quantise_blocks(weight, block)
    assert quantised.dtype == torch.float8_e4m3fn
    assert scale.shape == scale_shape((rows, columns), block)
    result = dequantise_blocks(quantised, scale, block)
    assert torch.equal(result, dequantised({"w": quantised, "w_scale_inv": scale}, block)["w"])
    for i in range(scale.shape[0]):
        for j in range(scale.shape[1]):
            here = slice(i * block[0], (i + 1) * block[0]), slice(j * block[1], (j + 1) * block[1])
            # 3 mantissa bits: half a step is 1/16 of a value, or of the smallest normal one, 2^-6 in units of scale.
            bound = weight[here].abs().clamp(min=float(scale[i, j]) * 2**-6) / 16 * (1 + 1e-5)
            assert ((result[here] - weight[here]).abs() <= bound).all()


def test_last_block_of_576_rows_is_half_a_block() -> None:
    weight = torch.ones(576, 256)
    weight[512:] = 1000.0
    quantised, scale = quantise_blocks(weight, (128, 128))
    assert scale.shape == (5, 2)
    assert torch.equal(dequantise_blocks(quantised, scale, (128, 128)), weight)


def test_a_block_of_zeros_stays_zero() -> None:
    quantised, scale = quantise_blocks(torch.zeros(3, 3), (2, 2))
    assert torch.equal(dequantise_blocks(quantised, scale, (2, 2)), torch.zeros(3, 3))


# ---- loading -----------------------------------------------------------------------------------------------------


def test_fp32_checkpoint_round_trip(tmp_path: Path) -> None:
    tensors = random_tensors(TINY, seed=0)
    save_checkpoint(tmp_path, TINY, tensors)
    assert GLM53Config.from_pretrained(tmp_path) == TINY
    assert_holds(load(tmp_path), tensors)


def test_bf16_checkpoint_round_trip(tmp_path: Path) -> None:
    tensors = {name: value.bfloat16() for name, value in random_tensors(TINY, seed=0).items()}
    save_checkpoint(tmp_path, TINY, tensors)
    assert json.loads((tmp_path / "config.json").read_text())["dtype"] == "bfloat16"
    assert_holds(load(tmp_path), tensors)
    assert_holds(load(tmp_path, torch.bfloat16), tensors)


@pytest.mark.parametrize("preset", ["tiny", "kdim"])
def test_fp8_checkpoint_is_dequantised(tmp_path: Path, preset: str) -> None:
    config = preset_config(preset, fp8=True)
    tensors = random_tensors(config, seed=0, fp8=True)
    save_checkpoint(tmp_path, config, tensors)
    assert GLM53Config.from_pretrained(tmp_path) == config
    assert_holds(load(tmp_path), dequantised(tensors, config.weight_block_size))


def test_fp8_checkpoint_has_the_dtypes_of_the_released_one() -> None:
    tensors = random_tensors(TINY_FP8, seed=0, fp8=True)
    dtypes = {name.removeprefix("model.layers.7."): value.dtype for name, value in tensors.items()}
    for name in ("self_attn.q_a_proj", "self_attn.kv_b_proj", "self_attn.indexer.wk", "mlp.experts.3.down_proj"):
        assert dtypes[f"{name}.weight"] == torch.float8_e4m3fn
        assert dtypes[f"{name}.weight_scale_inv"] == torch.float32
    for name in ("self_attn.indexer.weights_proj", "mlp.gate", "eh_proj", "enorm", "lm_head", "model.embed_tokens"):
        assert dtypes[f"{name}.weight"] == torch.bfloat16
        assert f"{name}.weight_scale_inv" not in dtypes
    assert dtypes["mlp.gate.e_score_correction_bias"] == torch.float32


def test_what_decides_stays_fp32(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, TINY, random_tensors(TINY, seed=0))
    layer = load(tmp_path, torch.bfloat16).layers[6]
    assert isinstance(layer.ffn, MoEWeights)
    assert layer.indexer is not None
    for value in (layer.ffn.router, layer.ffn.bias, layer.indexer.weights_proj):
        assert value.dtype == torch.float32
    for value in (layer.ffn.gate_up, layer.ffn.shared.down, layer.attention.w_uk, layer.indexer.k_norm_bias):
        assert value.dtype == torch.bfloat16
        assert value.is_contiguous()


def test_checkpoint_without_mtp(tmp_path: Path) -> None:
    config = replace(TINY, num_nextn_predict_layers=0)
    tensors = random_tensors(config, seed=0)
    save_checkpoint(tmp_path, config, tensors)
    weights = load(tmp_path)
    assert weights.mtp is None
    assert_holds(weights, tensors)


def shard(path: Path, tensors: dict[str, Tensor], *, index: bool) -> None:
    """Split the checkpoint of ``path`` in three, a matrix and its scale in different files."""
    (path / "model.safetensors").unlink()
    names = sorted(tensors)
    weight_map = {name: f"model-0000{1 + i % 3}-of-00003.safetensors" for i, name in enumerate(names)}
    for file in set(weight_map.values()):
        save_file({name: tensors[name] for name in names if weight_map[name] == file}, path / file)
    if index:
        (path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


@pytest.mark.parametrize("index", [True, False])
def test_sharded_checkpoint(tmp_path: Path, index: bool) -> None:
    tensors = random_tensors(TINY_FP8, seed=0, fp8=True)
    save_checkpoint(tmp_path, TINY_FP8, tensors)
    shard(tmp_path, tensors, index=index)
    assert_holds(load(tmp_path), dequantised(tensors, TINY_FP8.weight_block_size))


def test_files_outside_the_index_are_not_read(tmp_path: Path) -> None:
    tensors = random_tensors(TINY, seed=0)
    save_checkpoint(tmp_path, TINY, tensors)
    shard(tmp_path, tensors, index=True)
    save_file({"stray": torch.zeros(1)}, tmp_path / "other.safetensors")
    assert_holds(load(tmp_path), tensors)


def test_rotary_frequencies_are_ignored(tmp_path: Path) -> None:
    tensors = random_tensors(TINY, seed=0)
    save_checkpoint(tmp_path, TINY, tensors | {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)})
    assert_holds(load(tmp_path), tensors)


# ---- refusals ----------------------------------------------------------------------------------------------------


def faults_of(path: Path) -> list[str]:
    with pytest.raises(ValueError, match=r"does not fit its config\.json") as caught:
        load(path)
    return sorted(line.removeprefix("- ") for line in str(caught.value).splitlines()[1:])


def without_count(faults: list[str]) -> tuple[list[str], int]:
    """Those that are named, and how many there are in all."""
    named = [fault for fault in faults if "more like these" not in fault]
    return named, len(named) + sum(int(fault.split()[1]) for fault in faults if fault not in named)


def test_all_faults_are_named_at_once(tmp_path: Path) -> None:
    tensors = random_tensors(TINY_FP8, seed=0, fp8=True)
    layer = "model.layers.3."
    del tensors["model.norm.weight"]
    del tensors[layer + "mlp.experts.5.up_proj.weight"]
    del tensors[layer + "mlp.experts.5.up_proj.weight_scale_inv"]
    del tensors[layer + "self_attn.q_a_proj.weight_scale_inv"]
    tensors[layer + "self_attn.o_proj.weight_scale_inv"] = torch.ones(2, 2)
    tensors[layer + "self_attn.q_b_proj.weight_scale_inv"] = torch.ones(3, 1).bfloat16()
    tensors[layer + "mlp.gate.weight"] = torch.zeros(17, 128)
    tensors[layer + "mlp.gate.e_score_correction_bias"] = torch.zeros(16, dtype=torch.float16)
    tensors[layer + "input_layernorm.weight"] = torch.ones(128).to(torch.float8_e4m3fn)
    tensors[layer + "self_attn.indexer.wk.weight"] = torch.zeros(32, 128)
    tensors["lm_head.weight_scale_inv"] = torch.ones(4, 1)
    save_checkpoint(tmp_path, TINY_FP8, tensors)
    readable = "which is not F32, BF16 or, for a matrix, F8_E4M3"
    assert faults_of(tmp_path) == sorted(
        [
            "model.norm.weight is missing",
            f"{layer}mlp.experts.5.up_proj.weight is missing",
            f"{layer}self_attn.q_a_proj.weight is F8_E4M3, but {layer}self_attn.q_a_proj.weight_scale_inv is missing",
            f"{layer}self_attn.o_proj.weight_scale_inv has shape [2, 2], not [1, 2]",
            f"{layer}self_attn.q_b_proj.weight_scale_inv has dtype BF16, not F32",
            f"{layer}mlp.gate.weight has shape [17, 128], not [16, 128]",
            f"{layer}mlp.gate.e_score_correction_bias has dtype F16, {readable}",
            f"{layer}input_layernorm.weight has dtype F8_E4M3, {readable}",
            f"{layer}self_attn.indexer.wk.weight is unexpected",
            "lm_head.weight_scale_inv is unexpected",
        ]
    )


def test_fp8_without_block_size_is_refused(tmp_path: Path) -> None:
    tensors = random_tensors(TINY_FP8, seed=0, fp8=True)
    save_checkpoint(tmp_path, TINY, tensors)
    faults, count = without_count(faults_of(tmp_path))
    scales = sum(name.endswith("_scale_inv") for name in tensors)
    assert count == sum(value.dtype == torch.float8_e4m3fn for value in tensors.values()) == scales > len(faults)
    assert all("is F8_E4M3, but config.json gives no weight_block_size" in fault for fault in faults)


def test_tensor_in_two_files_is_refused(tmp_path: Path) -> None:
    tensors = random_tensors(TINY, seed=0)
    save_checkpoint(tmp_path, TINY, tensors)
    shard(tmp_path, tensors, index=False)
    save_file({"lm_head.weight": tensors["lm_head.weight"]}, tmp_path / "again.safetensors")
    assert faults_of(tmp_path) == ["lm_head.weight is in 2 files"]


def test_mtp_tensors_need_an_mtp_layer(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, replace(TINY, num_nextn_predict_layers=0), random_tensors(TINY, seed=0))
    faults, count = without_count(faults_of(tmp_path))
    assert count == sum(name.startswith("model.layers.7.") for name in random_tensors(TINY, seed=0))
    assert all(fault.startswith("model.layers.7.") for fault in faults)


def test_absent_shards_are_named(tmp_path: Path) -> None:
    tensors = random_tensors(TINY, seed=0)
    save_checkpoint(tmp_path, TINY, tensors)
    shard(tmp_path, tensors, index=True)
    (tmp_path / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(ValueError, match=r"lacks 1 of 3 files:\n- model-00002-of-00003\.safetensors"):
        load(tmp_path)


def test_directory_without_weights_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="lacks safetensors files"):
        load_weights(tmp_path, TINY, device="cpu", dtype=torch.float32)


# ---- random checkpoints ------------------------------------------------------------------------------------------


def test_random_tensors_depend_on_the_seed_only() -> None:
    first, again, other = (random_tensors(TINY, seed=seed) for seed in (3, 3, 4))
    assert {name: value.shape for name, value in first.items()} == expected_tensors(TINY)
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not any(torch.equal(first[name], other[name]) for name in first)


def test_random_fp8_needs_blocks() -> None:
    with pytest.raises(ValueError, match="weight_block_size"):
        random_tensors(TINY, seed=0, fp8=True)


def test_unreadable_files_are_named(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, TINY, random_tensors(TINY, seed=0))
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:1000])
    with pytest.raises(ValueError, match="can not be read"):
        load_weights(tmp_path, TINY, device="cpu", dtype=torch.float32)
    file.unlink()
    (tmp_path / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(ValueError, match="is not JSON with a weight_map"):
        load_weights(tmp_path, TINY, device="cpu", dtype=torch.float32)
    (tmp_path / "config.json").write_text("")
    with pytest.raises(ValueError, match="is not JSON"):
        GLM53Config.from_pretrained(tmp_path)
