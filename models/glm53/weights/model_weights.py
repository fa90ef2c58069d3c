"""The weights of a model on one rank, as its layers read them."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from cptools.kernels.block_fp8 import BlockFP8

Weight = Tensor | BlockFP8
"""A matrix of the model's dtype, or one kept in FP8 as released."""


@dataclass(frozen=True, eq=False)
class AttentionWeights:
    """MLA of one layer, ``kv_b_proj`` already split per head for the absorbed form."""

    q_a: Weight  # [q_lora_rank, hidden]
    q_a_norm: Tensor
    q_b: Weight  # [heads * (nope + rope), q_lora_rank], per head nope then rope
    kv_a: Weight  # [latent + rope, hidden]
    kv_a_norm: Tensor
    w_uk: Tensor  # [heads, nope, latent]
    w_uv: Tensor  # [heads, v, latent]
    o: Weight  # [hidden, heads * v]


@dataclass(frozen=True, eq=False)
class IndexerWeights:
    wq_b: Weight  # [index_heads * index_dim, q_lora_rank]
    wk: Tensor  # [index_dim, hidden]
    k_norm_weight: Tensor
    k_norm_bias: Tensor
    weights_proj: Tensor  # [index_heads, hidden], always fp32


@dataclass(frozen=True, eq=False)
class DenseFFNWeights:
    gate_up: Weight  # [2 * width, hidden]: one product makes both, gate first
    down: Weight  # [hidden, width]


@dataclass(frozen=True, eq=False)
class MoEWeights:
    router: Tensor  # [experts, hidden], always fp32
    bias: Tensor  # [experts], always fp32; it selects experts and does not weigh them
    gate_up: Weight  # [experts, 2 * width, hidden], gate first
    down: Weight  # [experts, hidden, width]
    shared: DenseFFNWeights


@dataclass(frozen=True, eq=False)
class LayerWeights:
    input_norm: Tensor
    post_attention_norm: Tensor
    attention: AttentionWeights
    indexer: IndexerWeights | None  # None: the layer uses an earlier layer's top-k
    ffn: DenseFFNWeights | MoEWeights


@dataclass(frozen=True, eq=False)
class MTPWeights:
    enorm: Tensor
    hnorm: Tensor
    eh_proj: Tensor  # [hidden, 2 * hidden], embedding half first
    layer: LayerWeights
    norm: Tensor


@dataclass(frozen=True, eq=False)
class ModelWeights:
    embed: Tensor  # [vocab, hidden]
    layers: tuple[LayerWeights, ...]
    norm: Tensor
    lm_head: Tensor  # [vocab, hidden]
    mtp: MTPWeights | None
