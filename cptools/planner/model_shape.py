"""The sizes of a model that decide what a context costs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from types import MappingProxyType

from cptools.integers import require_int

_LAYER_LISTS = {"indexer_types": ("full", "shared"), "mlp_layer_types": ("dense", "sparse")}


@dataclass(frozen=True)
class ModelShape:
    """GLM-5 and its family, under the names of the released config.json. All sizes are counts of values or layers.

    Raises one ValueError that lists every size below 1 and every inconsistency of the layer lists.
    """

    vocab_size: int
    hidden_size: int
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
    max_position_embeddings: int
    num_nextn_predict_layers: int = 0
    """MTP layers: 0 or 1. It owns an indexer and a mixture of experts."""
    weight_block_size: tuple[int, int] | None = None
    """(out, in) rows and columns that share one scale in a block-FP8 checkpoint."""

    def __post_init__(self) -> None:
        problems = []
        for item in fields(self):
            if item.type == "int":
                try:
                    minimum = 0 if item.name == "num_nextn_predict_layers" else 1
                    require_int(item.name, getattr(self, item.name), minimum=minimum)
                except ValueError as error:
                    problems.append(str(error))
        for name, allowed in _LAYER_LISTS.items():
            types = getattr(self, name)
            wrong = {layer: kind for layer, kind in enumerate(types) if kind not in allowed}
            if wrong:
                problems.append(f"{name} holds other values than {' and '.join(allowed)}, by layer: {wrong}")
        if len(self.indexer_types) != len(self.mlp_layer_types) or not self.indexer_types:
            problems.append(
                f"indexer_types has {len(self.indexer_types)} entries and mlp_layer_types {len(self.mlp_layer_types)}"
            )
        elif self.indexer_types[0] == "shared":
            problems.append("indexer_types[0]='shared' has no earlier layer whose top-k it could use")
        if self.num_nextn_predict_layers not in (0, 1):
            problems.append(f"num_nextn_predict_layers={self.num_nextn_predict_layers} is neither 0 nor 1")
        if problems:
            raise ValueError("this is no usable model shape:\n" + "\n".join(f"- {problem}" for problem in problems))

    @property
    def num_hidden_layers(self) -> int:
        """Decoder layers, without MTP."""
        return len(self.indexer_types)

    @property
    def num_cache_layers(self) -> int:
        """Layers that cache an MLA row of each token: the decoder layers and the MTP layer."""
        return self.num_hidden_layers + self.num_nextn_predict_layers

    @property
    def num_decoder_index_layers(self) -> int:
        """Decoder layers that run an indexer."""
        return self.indexer_types.count("full")

    @property
    def num_index_layers(self) -> int:
        """Layers that cache an index key of each token: the full decoder layers and the MTP layer."""
        return self.num_decoder_index_layers + self.num_nextn_predict_layers

    @property
    def num_sparse_layers(self) -> int:
        """Layers with a mixture of experts, the MTP layer among them."""
        return self.mlp_layer_types.count("sparse") + self.num_nextn_predict_layers

    def without_mtp(self) -> ModelShape:
        """The same model without its MTP layer."""
        return replace(self, num_nextn_predict_layers=0)


_GLM_5_3 = ModelShape(
    vocab_size=154_880,
    hidden_size=6144,
    num_attention_heads=64,
    q_lora_rank=2048,
    kv_lora_rank=512,
    qk_nope_head_dim=192,
    qk_rope_head_dim=64,
    v_head_dim=256,
    index_n_heads=32,
    index_head_dim=128,
    index_topk=2048,
    indexer_types=("full",) * 2 + ("full", "shared", "shared", "shared") * 19,
    mlp_layer_types=("dense",) * 3 + ("sparse",) * 75,
    intermediate_size=12_288,
    moe_intermediate_size=2048,
    n_routed_experts=256,
    n_shared_experts=1,
    max_position_embeddings=1_048_576,
    num_nextn_predict_layers=1,
    weight_block_size=(128, 128),
)
# GLM-5 and 5.1 index on every layer and stop at fewer positions.
_GLM_5_1 = replace(_GLM_5_3, indexer_types=("full",) * 78, max_position_embeddings=202_752)

MODEL_SHAPES: Mapping[str, ModelShape] = MappingProxyType(
    {"glm-5": _GLM_5_1, "glm-5.1": _GLM_5_1, "glm-5.2": _GLM_5_3, "glm-5.3": _GLM_5_3}
)
"""Released models by the name that `cptools plan --model` takes; of each the block-FP8 build."""
