"""The sizes and switches of a GLM-5 / 5.1 / 5.2 / 5.3 checkpoint (``model_type: glm_moe_dsa``)."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from cptools.integers import require_int

from .config_json import (
    IMPLEMENTED,
    IMPLEMENTED_QUANTIZATION,
    SIZES,
    ConfigReader,
    scheduled_indexer_types,
    scheduled_mlp_layer_types,
)

_POSITIVE_REALS = ("routed_scaling_factor", "rms_norm_eps", "latent_norm_eps", "rope_theta")


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

    def indexer_group(self, layer: int) -> range:
        """The decoder layers that attend to the same selection as ``layer``: its full layer and those that share it."""
        first = last = self.indexer_of(layer)
        while last + 1 < self.num_hidden_layers and not self.is_full(last + 1):
            last += 1
        return range(first, last + 1)

    def excerpt(self, layers: Sequence[int], *, experts: int | None = None, mtp: bool = False) -> GLM53Config:
        """The model that consists of these decoder layers of this one, at full width, with ``experts`` experts.

        A token of the excerpt goes to no more experts than there are. mtp: with the MTP layer. The vocabulary stays.

        Raises ValueError unless the layers are this model's, ascending, and every shared one comes with its indexer.
        """
        layers = [require_int("layers", layer) for layer in layers]
        wrong = [layer for layer in layers if not 0 <= layer < self.num_hidden_layers]
        if wrong or not layers or layers != sorted(set(layers)):
            raise ValueError(f"layers={layers} are not some of 0..{self.num_hidden_layers - 1}, ascending")
        for layer, before in zip(layers, (None, *layers[:-1]), strict=True):
            if not self.is_full(layer) and (before is None or self.indexer_of(before) != self.indexer_of(layer)):
                raise ValueError(f"layers={layers}: {layer} needs the indexer of layer {self.indexer_of(layer)}")
        experts = self.n_routed_experts if experts is None else require_int("experts", experts)
        if not 1 <= experts <= self.n_routed_experts:
            raise ValueError(f"experts={experts} is not in 1..{self.n_routed_experts}")
        if mtp and not self.num_nextn_predict_layers:
            raise ValueError("mtp=True, but num_nextn_predict_layers=0")
        return replace(
            self,
            num_hidden_layers=len(layers),
            indexer_types=tuple(self.indexer_types[layer] for layer in layers),
            mlp_layer_types=tuple(self.mlp_layer_types[layer] for layer in layers),
            n_routed_experts=experts,
            num_experts_per_tok=min(self.num_experts_per_tok, experts),
            num_nextn_predict_layers=int(mtp),
        )

    def _check_layer(self, layer: int) -> None:
        if not 0 <= layer < self.num_cache_layers:
            raise ValueError(f"layer={layer} is outside 0..{self.num_cache_layers - 1}")

    @classmethod
    def from_pretrained(cls, path: str | Path, *, latent_norm_eps: float | None = None) -> GLM53Config:
        """Read ``path/config.json``."""
        file = Path(path) / "config.json"
        try:
            source = json.loads(file.read_text(encoding="utf-8"))
        except ValueError as error:
            raise ValueError(f"{file} is not JSON: {error}") from error
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
        reader = ConfigReader(d)
        for name in SIZES:
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
            indexer_types=scheduled_indexer_types(layers, freq=4, offset=3),
            mlp_layer_types=scheduled_mlp_layer_types(layers, first_k_dense=3, freq=1),
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
            **IMPLEMENTED,
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
                **IMPLEMENTED_QUANTIZATION,
                "weight_block_size": list(self.weight_block_size),
            }
        return result


def _inconsistencies(values: Mapping[str, Any]) -> list[str]:
    """What is wrong with these constructor arguments, of which any may be absent."""
    problems = [f"{name}={values[name]!r} is not an integer" for name in SIZES if type(values.get(name, 1)) is not int]
    if problems:
        return problems
    problems = [f"{name}={values[name]} is not positive" for name in SIZES if values.get(name, 1) < 1]
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

    vocabulary = values.get("vocab_size", math.inf)
    if any(not 0 <= token < vocabulary for token in values.get("eos_token_ids", ())):
        problems.append(f"eos_token_ids={values['eos_token_ids']} holds an id outside [0, vocab_size={vocabulary})")
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
