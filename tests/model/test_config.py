"""GLM53Config: the numbers of the released config.json, and the refusal of every other model."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from models.glm53 import GLM53Config

FULL_LAYERS = (0, 1, *range(2, 78, 4))
RELEASED: dict[str, Any] = {
    "architectures": ["GlmMoeDsaForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "dtype": "bfloat16",
    "eos_token_id": [154820, 154827, 154829],
    "ep_size": 1,
    "first_k_dense_replace": 3,
    "head_dim": 192,
    "hidden_act": "silu",
    "hidden_size": 6144,
    "index_head_dim": 128,
    "index_n_heads": 32,
    "index_share_for_mtp_iteration": True,
    "index_skip_topk_offset": 3,
    "index_topk": 2048,
    "index_topk_freq": 4,
    "index_topk_pattern": None,
    "indexer_rope_interleave": True,
    "indexer_types": ["full" if layer in FULL_LAYERS else "shared" for layer in range(78)],
    "initializer_range": 0.02,
    "intermediate_size": 12288,
    "kv_lora_rank": 512,
    "max_position_embeddings": 1048576,
    "mlp_layer_types": ["dense"] * 3 + ["sparse"] * 75,
    "model_type": "glm_moe_dsa",
    "moe_intermediate_size": 2048,
    "moe_layer_freq": 1,
    "moe_router_dtype": "float32",
    "n_group": 1,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 64,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 78,
    "num_key_value_heads": 64,
    "num_nextn_predict_layers": 1,
    "pad_token_id": 154820,
    "pretraining_tp": 1,
    "q_lora_rank": 2048,
    "qk_head_dim": 256,
    "qk_nope_head_dim": 192,
    "qk_rope_head_dim": 64,
    "quantization_config": {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "modules_to_not_convert": ["lm_head", "model.layers.0.self_attn.indexers_proj"],
        "quant_method": "fp8",
        "weight_block_size": [128, 128],
    },
    "rms_norm_eps": 1e-05,
    "rope_interleave": True,
    "rope_parameters": {"rope_theta": 8000000, "rope_type": "default"},
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "tie_word_embeddings": False,
    "topk_group": 1,
    "topk_method": "noaux_tc",
    "transformers_version": "5.15.0",
    "use_cache": True,
    "v_head_dim": 256,
    "vocab_size": 154880,
}


def without(*keys: str, **changes: Any) -> dict[str, Any]:
    return {key: value for key, value in {**RELEASED, **changes}.items() if key not in keys}


def error_of(source: dict[str, Any]) -> str:
    with pytest.raises(ValueError, match=r"no usable GLM-5\.3 configuration") as caught:
        GLM53Config.from_dict(source)
    return str(caught.value)


def test_full_config_is_what_the_released_file_says() -> None:
    assert GLM53Config.from_dict(RELEASED) == GLM53Config.glm53()


def test_derived_numbers_of_the_full_config() -> None:
    config = GLM53Config.glm53()
    assert config.qk_head_dim == 256
    assert config.softmax_scale == 1 / 16
    assert (config.mla_row_dim, config.index_row_dim) == (576, 128)
    assert config.num_cache_layers == 79
    assert config.latent_norm_eps == 1e-5
    assert config.rope_theta == 8e6


def test_21_layers_and_the_mtp_layer_index() -> None:
    config = GLM53Config.glm53()
    assert config.index_layers == (*FULL_LAYERS, 78)
    assert len(FULL_LAYERS) == 21
    groups: dict[int, list[int]] = {}
    for layer in range(79):
        groups.setdefault(config.indexer_of(layer), []).append(layer)
    assert groups == {0: [0], 1: [1], **{first: [*range(first, first + 4)] for first in range(2, 78, 4)}, 78: [78]}


def test_bytes_of_a_token_in_fp8_rows() -> None:
    config = GLM53Config.glm53()
    assert config.num_cache_layers * 656 + len(config.index_layers) * 132 == 54_728


@given(st.lists(st.sampled_from(["full", "shared"]), min_size=1, max_size=12))
def test_indexer_of_is_the_nearest_earlier_full_layer(tail: list[str]) -> None:
    types = ("full", *tail)
    config = replace(
        GLM53Config.glm53(),
        num_hidden_layers=len(types),
        indexer_types=types,
        mlp_layer_types=("sparse",) * len(types),
    )
    for layer in range(len(types)):
        owner = config.indexer_of(layer)
        assert types[owner : layer + 1] == ("full",) + ("shared",) * (layer - owner)
    assert config.indexer_of(len(types)) == len(types)


@pytest.mark.parametrize("layer", [-1, 79])
def test_layers_outside_the_model_are_refused(layer: int) -> None:
    with pytest.raises(ValueError, match=f"layer={layer} is outside 0..78"):
        GLM53Config.glm53().indexer_of(layer)


def test_mtp_layer_is_a_sparse_one_with_an_indexer() -> None:
    config = GLM53Config.glm53()
    assert config.is_full(78)
    assert config.is_sparse(78)
    with pytest.raises(ValueError, match="layer=78"):
        replace(config, num_nextn_predict_layers=0).is_full(78)


def test_indexer_types_win_over_pattern_and_formula() -> None:
    source = {**RELEASED, "index_topk_pattern": "F" * 78, "index_topk_freq": 1}
    assert GLM53Config.from_dict(source) == GLM53Config.glm53()


def test_indexer_types_from_the_pattern() -> None:
    pattern = "FS" * 39
    config = GLM53Config.from_dict(without("indexer_types", index_topk_pattern=pattern))
    assert config.indexer_types == ("full", "shared") * 39


def test_indexer_types_from_the_formula() -> None:
    assert GLM53Config.from_dict(without("indexer_types")) == GLM53Config.glm53()
    every_layer = without("indexer_types", "index_topk_freq", "index_skip_topk_offset")
    assert set(GLM53Config.from_dict(every_layer).indexer_types) == {"full"}


def test_mlp_layer_types_from_the_formula() -> None:
    assert GLM53Config.from_dict(without("mlp_layer_types")) == GLM53Config.glm53()
    config = GLM53Config.from_dict(without("mlp_layer_types", first_k_dense_replace=1, moe_layer_freq=2))
    assert config.mlp_layer_types[:6] == ("dense", "dense", "sparse", "dense", "sparse", "dense")


@pytest.mark.parametrize(("value", "ids"), [(7, (7,)), ([7, 8], (7, 8)), (None, ())])
def test_end_ids_as_number_list_or_nothing(value: object, ids: tuple[int, ...]) -> None:
    assert GLM53Config.from_dict({**RELEASED, "eos_token_id": value}).eos_token_ids == ids


def test_rope_theta_at_either_place() -> None:
    assert GLM53Config.from_dict(without("rope_parameters", rope_theta=1e6)).rope_theta == 1e6
    assert GLM53Config.from_dict({**RELEASED, "rope_theta": 1e6}).rope_theta == 8e6


def test_latent_norm_eps_is_the_argument_else_the_file_else_1e_5() -> None:
    assert GLM53Config.from_dict(RELEASED).latent_norm_eps == 1e-5
    source = {**RELEASED, "latent_norm_eps": 1e-6}
    assert GLM53Config.from_dict(source).latent_norm_eps == 1e-6
    assert GLM53Config.from_dict(source, latent_norm_eps=1e-4).latent_norm_eps == 1e-4


def test_head_dim_is_ignored() -> None:
    assert GLM53Config.from_dict({**RELEASED, "head_dim": 12345}) == GLM53Config.glm53()


def test_unquantised_checkpoint_has_no_blocks() -> None:
    assert GLM53Config.from_dict(without("quantization_config")).weight_block_size is None


def test_what_it_writes_it_reads() -> None:
    config = GLM53Config.glm53()
    for variant in (
        config,
        replace(config, weight_block_size=None, eos_token_ids=(), num_nextn_predict_layers=0, latent_norm_eps=1e-6),
        replace(config, n_shared_experts=2, norm_topk_prob=False, mlp_layer_types=("sparse", "dense") * 39),
    ):
        assert GLM53Config.from_dict(json.loads(json.dumps(variant.to_dict()))) == variant


def test_from_pretrained_reads_config_json(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(RELEASED))
    assert GLM53Config.from_pretrained(tmp_path, latent_norm_eps=1e-6).latent_norm_eps == 1e-6
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ValueError, match="holds a list"):
        GLM53Config.from_pretrained(tmp_path)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("model_type", "glm5_next", "model_type='glm5_next' is not 'glm_moe_dsa'"),
        ("hidden_act", "gelu", "hidden_act='gelu' is not implemented (only 'silu')"),
        ("attention_bias", True, "attention_bias=True"),
        ("tie_word_embeddings", True, "tie_word_embeddings=True"),
        ("rope_interleave", False, "rope_interleave=False is not implemented"),
        ("indexer_rope_interleave", False, "indexer_rope_interleave=False"),
        ("scoring_func", "softmax", "scoring_func='softmax'"),
        ("topk_method", "greedy", "topk_method='greedy'"),
        ("n_group", 8, "n_group=8"),
        ("topk_group", 4, "topk_group=4"),
        ("num_key_value_heads", 8, "num_key_value_heads=8 is not implemented (only 64)"),
        ("qk_head_dim", 192, "qk_head_dim=192 is not implemented (only 256)"),
        ("layer_types", ["linear_attention"] * 78, "linear_attention"),
        ("rope_parameters", {"rope_type": "yarn", "rope_theta": 8e6}, "rope type 'yarn'"),
        ("rope_scaling", {"type": "yarn", "factor": 4}, "rope type 'yarn'"),
        ("rope_parameters", {"rope_type": "default"}, "rope_theta is missing"),
        ("rope_parameters", {"rope_theta": -1.0}, "rope_theta=-1.0 is not positive"),
        ("rope_parameters", 8e6, "rope_parameters=8000000.0 is not an object"),
        ("num_nextn_predict_layers", 2, "num_nextn_predict_layers=2 is neither 0 nor 1"),
        ("n_shared_experts", 0, "n_shared_experts=0 is not positive"),
        ("hidden_size", 0, "hidden_size=0 is not positive"),
        ("num_hidden_layers", 0, "num_hidden_layers=0 is not positive"),
        ("vocab_size", "many", "vocab_size='many' is not of type int"),
        ("num_attention_heads", True, "num_attention_heads=True is not of type int"),
        ("rms_norm_eps", 0, "rms_norm_eps=0.0 is not positive"),
        ("latent_norm_eps", "small", "latent_norm_eps='small' is not of type float"),
        ("routed_scaling_factor", float("nan"), "routed_scaling_factor=nan is not positive"),
        ("norm_topk_prob", 1, "norm_topk_prob=1 is not of type bool"),
        ("qk_rope_head_dim", 63, "qk_rope_head_dim=63 is odd"),
        ("index_head_dim", 32, "index_head_dim=32 is less than the qk_rope_head_dim=64"),
        ("num_experts_per_tok", 257, "num_experts_per_tok=257 is more than n_routed_experts=256"),
        ("indexer_types", ["full"] * 77, "indexer_types has 77 entries for num_hidden_layers=78"),
        ("indexer_types", ["shared"] + ["full"] * 77, "indexer_types[0]='shared'"),
        ("indexer_types", ["full", "own"] * 39, "indexer_types holds other values than full and shared"),
        ("indexer_types", "full", "indexer_types='full' is not a list"),
        ("mlp_layer_types", ["sparse"] * 79, "mlp_layer_types has 79 entries for num_hidden_layers=78"),
        ("mlp_layer_types", ["moe"] * 78, "mlp_layer_types holds other values than dense and sparse"),
        ("eos_token_id", "<|user|>", "eos_token_id='<|user|>'"),
        ("eos_token_id", [1, -1], r"holds an id outside [0, vocab_size=154880)"),
        ("eos_token_id", [1, 154880], r"holds an id outside [0, vocab_size=154880)"),
        ("quantization_config", {"quant_method": "gptq"}, "quantization_config.quant_method='gptq'"),
        ("quantization_config", {"weight_block_size": [128, 128]}, "quantization_config.quant_method is missing"),
        ("quantization_config", {"quant_method": "fp8"}, "weight_block_size=None is not a pair"),
        ("quantization_config", {"quant_method": "fp8", "weight_block_size": [0, 1]}, "(0, 1) is not positive"),
        ("quantization_config", {"quant_method": "fp8", "fmt": "e5m2", "weight_block_size": [1, 1]}, "fmt='e5m2'"),
        ("quantization_config", "fp8", "quantization_config='fp8' is not an object"),
    ],
)
def test_each_fault_is_named(key: str, value: object, message: str) -> None:
    _, *faults = error_of({**RELEASED, key: value}).splitlines()
    assert any(message in fault for fault in faults), faults
    # No more than it and what it contradicts.
    assert len(faults) <= 3, faults


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"index_topk_pattern": "FX"}, "index_topk_pattern='FX' is not a string of F and S"),
        ({"index_topk_pattern": "FS"}, "indexer_types has 2 entries for num_hidden_layers=78"),
        ({"index_topk_freq": 0}, "index_topk_freq=0 is not positive"),
    ],
)
def test_faults_of_the_indexer_schedule(changes: dict[str, Any], message: str) -> None:
    assert message in error_of(without("indexer_types", **changes))


def test_faults_of_the_expert_schedule() -> None:
    assert "moe_layer_freq=0 is not positive" in error_of(without("mlp_layer_types", moe_layer_freq=0))
    assert "first_k_dense_replace is missing" in error_of(without("mlp_layer_types", "first_k_dense_replace"))


def test_every_fault_is_listed_at_once() -> None:
    broken = without("kv_lora_rank", "model_type", n_group=2, num_experts_per_tok=300, rope_parameters={})
    faults = error_of(broken).splitlines()[1:]
    assert sorted(faults) == [
        "- kv_lora_rank is missing",
        "- model_type=None is not 'glm_moe_dsa'",
        "- n_group=2 is not implemented (only 1)",
        "- num_experts_per_tok=300 is more than n_routed_experts=256",
        "- rope_theta is missing",
    ]


def test_an_empty_file_names_every_missing_key() -> None:
    error = error_of({})
    for key in ("vocab_size", "index_topk", "rms_norm_eps", "norm_topk_prob", "rope_theta", "max_position_embeddings"):
        assert f"- {key} is missing" in error


def test_construction_refuses_the_same() -> None:
    with pytest.raises(ValueError, match="is odd") as caught:
        replace(GLM53Config.glm53(), qk_rope_head_dim=63, num_experts_per_tok=300)
    assert "num_experts_per_tok=300" in str(caught.value)


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
        {"rope_type": "default", "type": "yarn", "rope_theta": 1e4},
    ],
)
def test_rope_keys_that_change_the_meaning_are_refused(rope: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="not implemented"):
        GLM53Config.from_dict({**GLM53Config.glm53().to_dict(), "rope_parameters": rope})
