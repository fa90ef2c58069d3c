"""The sizes and switches of a GLM-5 / 5.1 / 5.2 / 5.3 checkpoint (``model_type: glm_moe_dsa``)."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

_SIZES = (
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "q_lora_rank",
    "kv_lora_rank",
    "qk_nope_head_dim",
    "qk_rope_head_dim",
    "v_head_dim",
    "index_n_heads",
    "index_head_dim",
    "index_topk",
    "intermediate_size",
    "moe_intermediate_size",
    "n_routed_experts",
    "n_shared_experts",
    "num_experts_per_tok",
    "max_position_embeddings",
)
_POSITIVE_REALS = ("routed_scaling_factor", "rms_norm_eps", "latent_norm_eps", "rope_theta")
# The one value of each switch that this model implements; a config.json may leave any of them out.
_IMPLEMENTED: Mapping[str, object] = {
    "hidden_act": "silu",
    "attention_bias": False,
    "tie_word_embeddings": False,
    "rope_interleave": True,
    "indexer_rope_interleave": True,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "n_group": 1,
    "topk_group": 1,
}
_IMPLEMENTED_QUANTIZATION: Mapping[str, object] = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic"}
_LAYER_TYPES = ("deepseek_sparse_attention", "indexed_attention")


@dataclass(frozen=True)
class GLM53Config:
    """Everything the model needs to know, under the names of the released config.json.

    Layer indices run over ``range(num_cache_layers)``: the decoder layers, then the MTP layer when there is one.
    Construction raises one ValueError that lists every inconsistency.
    """

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    q_lora_rank: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    index_n_heads: int
    index_head_dim: int
    index_topk: int
    indexer_types: tuple[str, ...]
    """"full" (runs its own indexer) or "shared" (reuses the nearest earlier full layer's top-k) per decoder layer."""
    mlp_layer_types: tuple[str, ...]
    """"dense" or "sparse" (mixture of experts) per decoder layer."""
    intermediate_size: int
    moe_intermediate_size: int
    n_routed_experts: int
    n_shared_experts: int
    num_experts_per_tok: int
    routed_scaling_factor: float
    norm_topk_prob: bool
    rms_norm_eps: float
    rope_theta: float
    max_position_embeddings: int
    latent_norm_eps: float = 1e-5
    """Of q_a_layernorm and kv_a_layernorm: serving engines use 1e-5, transformers 1e-6."""
    num_nextn_predict_layers: int = 0
    index_share_for_mtp_iteration: bool = False
    eos_token_ids: tuple[int, ...] = ()
    weight_block_size: tuple[int, int] | None = None
    """(out, in) rows and columns that share one scale in a block-FP8 checkpoint."""

    def __post_init__(self) -> None:
        _refuse(_inconsistencies({field.name: getattr(self, field.name) for field in fields(self)}))

    @property
    def qk_head_dim(self) -> int:
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def softmax_scale(self) -> float:
        """From the width of an expanded head, also where attention runs in the wider absorbed form."""
        return 1.0 / math.sqrt(self.qk_head_dim)

    @property
    def mla_row_dim(self) -> int:
        """Values of one token in one layer's MLA cache: normed latent, then rotated key part."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    @property
    def index_row_dim(self) -> int:
        """Values of one token in one full layer's index-key cache."""
        return self.index_head_dim

    @property
    def num_cache_layers(self) -> int:
        return self.num_hidden_layers + self.num_nextn_predict_layers

    @property
    def index_layers(self) -> tuple[int, ...]:
        """Layers that own an indexer and hence index-key rows; the MTP layer always does."""
        return tuple(layer for layer in range(self.num_cache_layers) if self.is_full(layer))

    def is_full(self, layer: int) -> bool:
        self._check_layer(layer)
        return layer == self.num_hidden_layers or self.indexer_types[layer] == "full"

    def is_sparse(self, layer: int) -> bool:
        """Whether the feed-forward part is a mixture of experts; the MTP layer's always is."""
        self._check_layer(layer)
        return layer == self.num_hidden_layers or self.mlp_layer_types[layer] == "sparse"

    def indexer_of(self, layer: int) -> int:
        """The layer whose top-k ``layer`` attends to: itself if full, else the nearest earlier full one."""
        while not self.is_full(layer):
            layer -= 1
        return layer

    def _check_layer(self, layer: int) -> None:
        if not 0 <= layer < self.num_cache_layers:
            raise ValueError(f"layer={layer} is outside 0..{self.num_cache_layers - 1}")

    @classmethod
    def from_pretrained(cls, path: str | Path, *, latent_norm_eps: float | None = None) -> GLM53Config:
        """Read ``path/config.json``."""
        file = Path(path) / "config.json"
        source = json.loads(file.read_text(encoding="utf-8"))
        if not isinstance(source, dict):
            raise ValueError(f"{file} holds a {type(source).__name__}, not an object")
        return cls.from_dict(source, latent_norm_eps=latent_norm_eps)

    @classmethod
    def from_dict(cls, d: Mapping[str, object], *, latent_norm_eps: float | None = None) -> GLM53Config:
        """Read a released config.json. ``latent_norm_eps`` overrides the file, whose default is 1e-5.

        Raises one ValueError that lists everything missing, inconsistent or not implemented.
        """
        if latent_norm_eps is not None:
            d = {**d, "latent_norm_eps": latent_norm_eps}
        reader = _Reader(d)
        for name in _SIZES:
            reader.take(name, int)
        reader.take("num_nextn_predict_layers", int, optional=True)
        reader.take("routed_scaling_factor", float)
        reader.take("rms_norm_eps", float)
        reader.take("latent_norm_eps", float, optional=True)
        reader.take("norm_topk_prob", bool)
        reader.take("index_share_for_mtp_iteration", bool, optional=True)
        reader.take_rope_theta()
        reader.take_indexer_types()
        reader.take_mlp_layer_types()
        reader.take_eos_token_ids()
        reader.take_weight_block_size()
        reader.check_switches()
        _refuse(reader.problems + _inconsistencies(reader.values))
        return cls(**reader.values)

    @classmethod
    def glm53(cls) -> GLM53Config:
        """The full GLM-5.3: 78 layers, 256 experts, block-FP8 weights, one MTP layer."""
        layers = 78
        return cls(
            vocab_size=154_880,
            hidden_size=6144,
            num_hidden_layers=layers,
            num_attention_heads=64,
            q_lora_rank=2048,
            kv_lora_rank=512,
            qk_nope_head_dim=192,
            qk_rope_head_dim=64,
            v_head_dim=256,
            index_n_heads=32,
            index_head_dim=128,
            index_topk=2048,
            indexer_types=_scheduled_indexer_types(layers, freq=4, offset=3),
            mlp_layer_types=_scheduled_mlp_layer_types(layers, first_k_dense=3, freq=1),
            intermediate_size=12_288,
            moe_intermediate_size=2048,
            n_routed_experts=256,
            n_shared_experts=1,
            num_experts_per_tok=8,
            routed_scaling_factor=2.5,
            norm_topk_prob=True,
            rms_norm_eps=1e-5,
            rope_theta=8e6,
            max_position_embeddings=1_048_576,
            num_nextn_predict_layers=1,
            index_share_for_mtp_iteration=True,
            eos_token_ids=(154_820, 154_827, 154_829),
            weight_block_size=(128, 128),
        )

    def to_dict(self) -> dict[str, object]:
        """A released-style config.json; ``from_dict(to_dict())`` gives this config back."""
        renamed = {"indexer_types", "mlp_layer_types", "rope_theta", "eos_token_ids", "weight_block_size"}
        result: dict[str, object] = {
            "architectures": ["GlmMoeDsaForCausalLM"],
            "model_type": "glm_moe_dsa",
            **{field.name: getattr(self, field.name) for field in fields(self) if field.name not in renamed},
            **_IMPLEMENTED,
            "num_key_value_heads": self.num_attention_heads,
            "qk_head_dim": self.qk_head_dim,
            "rope_parameters": {"rope_type": "default", "rope_theta": self.rope_theta},
            "indexer_types": list(self.indexer_types),
            "mlp_layer_types": list(self.mlp_layer_types),
            "first_k_dense_replace": (*self.mlp_layer_types, "sparse").index("sparse"),
            "eos_token_id": list(self.eos_token_ids) or None,
        }
        if self.weight_block_size is not None:
            result["quantization_config"] = {
                **_IMPLEMENTED_QUANTIZATION,
                "weight_block_size": list(self.weight_block_size),
            }
        return result


class _Reader:
    """Takes the constructor's arguments out of a config.json.

    What is wrong goes to ``problems`` and stays out of ``values``, so that one error can name all of it.
    """

    def __init__(self, source: Mapping[str, object]) -> None:
        self.source = source
        self.values: dict[str, Any] = {}
        self.problems: list[str] = []

    def take(self, name: str, kind: type, *, optional: bool = False) -> None:
        if optional and self.source.get(name) is None:
            return
        value = self._typed(self.source, name, kind)
        if value is not None:
            self.values[name] = value

    def take_rope_theta(self) -> None:
        rope: dict[str, object] = {}
        for key in ("rope_scaling", "rope_parameters"):
            value = self.source.get(key)
            if isinstance(value, Mapping):
                rope.update(value)
            elif value is not None:
                self.problems.append(f"{key}={value!r} is not an object")
        kind = rope.get("rope_type", rope.get("type", "default"))
        if kind != "default":
            self.problems.append(f"rope type {kind!r} is not implemented (only 'default')")
        theta = self._typed({"rope_theta": self.source.get("rope_theta"), **rope}, "rope_theta", float)
        if theta is not None:
            self.values["rope_theta"] = theta

    def take_indexer_types(self) -> None:
        types = self.source.get("indexer_types")
        pattern = self.source.get("index_topk_pattern")
        layers = self.values.get("num_hidden_layers")
        if types is not None:
            self._take_names("indexer_types", types)
        elif pattern is not None:
            if isinstance(pattern, str) and set(pattern) <= {"F", "S"}:
                self.values["indexer_types"] = tuple({"F": "full", "S": "shared"}[letter] for letter in pattern)
            else:
                self.problems.append(f"index_topk_pattern={pattern!r} is not a string of F and S")
        else:
            freq = self._typed(self.source, "index_topk_freq", int, 1)
            offset = self._typed(self.source, "index_skip_topk_offset", int, 2)
            if freq is not None and freq < 1:
                self.problems.append(f"index_topk_freq={freq} is not positive")
            elif freq is not None and offset is not None and layers is not None:
                self.values["indexer_types"] = _scheduled_indexer_types(layers, freq=freq, offset=offset)

    def take_mlp_layer_types(self) -> None:
        types = self.source.get("mlp_layer_types")
        layers = self.values.get("num_hidden_layers")
        if types is not None:
            self._take_names("mlp_layer_types", types)
            return
        first = self._typed(self.source, "first_k_dense_replace", int)
        freq = self._typed(self.source, "moe_layer_freq", int, 1)
        if freq is not None and freq < 1:
            self.problems.append(f"moe_layer_freq={freq} is not positive")
        elif first is not None and freq is not None and layers is not None:
            self.values["mlp_layer_types"] = _scheduled_mlp_layer_types(layers, first_k_dense=first, freq=freq)

    def take_eos_token_ids(self) -> None:
        value = self.source.get("eos_token_id")
        ids = [] if value is None else value if isinstance(value, list | tuple) else [value]
        if all(type(token) is int for token in ids):
            self.values["eos_token_ids"] = tuple(ids)
        else:
            self.problems.append(f"eos_token_id={value!r} is neither a token id nor a list of them")

    def take_weight_block_size(self) -> None:
        quantization = self.source.get("quantization_config")
        if quantization is None:
            return
        if not isinstance(quantization, Mapping):
            self.problems.append(f"quantization_config={quantization!r} is not an object")
            return
        self._check_values(quantization, _IMPLEMENTED_QUANTIZATION, "quantization_config.")
        if quantization.get("quant_method") is None:
            self.problems.append("quantization_config.quant_method is missing")
        block = quantization.get("weight_block_size")
        if isinstance(block, list | tuple) and len(block) == 2 and all(type(side) is int for side in block):
            self.values["weight_block_size"] = tuple(block)
        else:
            self.problems.append(f"quantization_config.weight_block_size={block!r} is not a pair of block sizes")

    def check_switches(self) -> None:
        """What the constructor does not take, yet must hold for its reading of the file to be right."""
        model_type = self.source.get("model_type")
        if model_type != "glm_moe_dsa":
            self.problems.append(f"model_type={model_type!r} is not 'glm_moe_dsa'")
        self._check_values(self.source, _IMPLEMENTED, "")
        implied: dict[str, object] = {}
        if "num_attention_heads" in self.values:
            implied["num_key_value_heads"] = self.values["num_attention_heads"]
        if {"qk_nope_head_dim", "qk_rope_head_dim"} <= self.values.keys():
            implied["qk_head_dim"] = self.values["qk_nope_head_dim"] + self.values["qk_rope_head_dim"]
        self._check_values(self.source, implied, "")
        types = self.source.get("layer_types")
        if types is not None and not (isinstance(types, list | tuple) and all(kind in _LAYER_TYPES for kind in types)):
            self.problems.append(f"layer_types={types!r} holds other layers than {', '.join(_LAYER_TYPES)}")

    def _typed(self, source: Mapping[str, object], name: str, kind: type, default: object = None) -> Any:
        value = source.get(name)
        if value is None:
            value = default
        if value is None:
            self.problems.append(f"{name} is missing")
            return None
        if kind is float and type(value) is int:
            value = float(value)
        # Not isinstance: True is an int, and "num_hidden_layers": true is a mistake.
        if type(value) is not kind:
            self.problems.append(f"{name}={value!r} is not of type {kind.__name__}")
            return None
        return value

    def _take_names(self, name: str, value: object) -> None:
        if isinstance(value, list | tuple):
            self.values[name] = tuple(value)
        else:
            self.problems.append(f"{name}={value!r} is not a list")

    def _check_values(self, source: Mapping[str, object], wanted: Mapping[str, object], prefix: str) -> None:
        for key, want in wanted.items():
            value = source.get(key)
            if value is not None and value != want:
                self.problems.append(f"{prefix}{key}={value!r} is not implemented (only {want!r})")


def _scheduled_indexer_types(layers: int, *, freq: int, offset: int) -> tuple[str, ...]:
    return tuple("full" if max(layer - offset + 1, 0) % freq == 0 else "shared" for layer in range(layers))


def _scheduled_mlp_layer_types(layers: int, *, first_k_dense: int, freq: int) -> tuple[str, ...]:
    return tuple("sparse" if layer >= first_k_dense and layer % freq == 0 else "dense" for layer in range(layers))


def _inconsistencies(values: Mapping[str, Any]) -> list[str]:
    """What is wrong with these constructor arguments, of which any may be absent."""
    problems = [f"{name}={values[name]} is not positive" for name in _SIZES if values.get(name, 1) < 1]
    for name in _POSITIVE_REALS:
        value = values.get(name, 1.0)
        if not 0 < value < math.inf:
            problems.append(f"{name}={value} is not positive and finite")

    mtp_layers = values.get("num_nextn_predict_layers", 0)
    if mtp_layers not in (0, 1):
        problems.append(f"num_nextn_predict_layers={mtp_layers} is neither 0 nor 1")
    rope, index = values.get("qk_rope_head_dim"), values.get("index_head_dim")
    if rope is not None and rope % 2:
        problems.append(f"qk_rope_head_dim={rope} is odd, rotation needs pairs")
    if rope is not None and index is not None and index < rope:
        problems.append(f"index_head_dim={index} is less than the qk_rope_head_dim={rope} it rotates")
    chosen, experts = values.get("num_experts_per_tok"), values.get("n_routed_experts")
    if chosen is not None and experts is not None and chosen > experts:
        problems.append(f"num_experts_per_tok={chosen} is more than n_routed_experts={experts}")

    problems += _layer_list_problems(values, "indexer_types", ("full", "shared"))
    problems += _layer_list_problems(values, "mlp_layer_types", ("dense", "sparse"))
    indexer_types = values.get("indexer_types", ())
    if indexer_types and indexer_types[0] == "shared":
        problems.append("indexer_types[0]='shared' has no earlier layer whose top-k it could use")

    if any(token < 0 for token in values.get("eos_token_ids", ())):
        problems.append(f"eos_token_ids={values['eos_token_ids']} holds a negative id")
    block = values.get("weight_block_size")
    if block is not None and min(block) < 1:
        problems.append(f"weight_block_size={block} is not positive")
    return problems


def _layer_list_problems(values: Mapping[str, Any], name: str, allowed: Sequence[str]) -> list[str]:
    types = values.get(name)
    if types is None:
        return []
    layers = values.get("num_hidden_layers", len(types))
    problems = [] if len(types) == layers else [f"{name} has {len(types)} entries for num_hidden_layers={layers}"]
    wrong = {layer: kind for layer, kind in enumerate(types) if kind not in allowed}
    if wrong:
        problems.append(f"{name} holds other values than {' and '.join(allowed)}, by layer: {wrong}")
    return problems


def _refuse(problems: Sequence[str]) -> None:
    if problems:
        raise ValueError("this is no usable GLM-5.3 configuration:\n" + "\n".join(f"- {p}" for p in problems))
