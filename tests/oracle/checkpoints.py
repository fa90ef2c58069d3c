"""The small models of the oracles, and what a checkpoint of theirs stands for; no transformers needed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from torch import Tensor

from models.glm53.config import GLM53Config


def preset_config(preset: str, *, fp8: bool = False) -> GLM53Config:
    """``tiny``: everything small, sparse from position 17 on, matrices that end inside an FP8 block.
    ``kdim``: the per-head, latent and index widths of GLM-5.3 itself, which kernels need; the rest small.
    """
    full = GLM53Config.glm53()
    layers = 7
    shared = replace(
        full,
        num_hidden_layers=layers,
        indexer_types=full.indexer_types[:layers],
        mlp_layer_types=full.mlp_layer_types[:layers],
        num_attention_heads=8,
        n_routed_experts=16,
        num_experts_per_tok=4,
        eos_token_ids=(),
        weight_block_size=full.weight_block_size if fp8 else None,
    )
    if preset == "tiny":
        # 16 index heads: with few, all their relus can be 0, and equal scores make exact ties.
        return replace(
            shared,
            vocab_size=512,
            hidden_size=128,
            intermediate_size=256,
            moe_intermediate_size=64,
            q_lora_rank=64,
            kv_lora_rank=64,
            qk_nope_head_dim=24,
            qk_rope_head_dim=16,
            v_head_dim=32,
            index_n_heads=16,
            index_head_dim=32,
            index_topk=16,
            max_position_embeddings=4096,
        )
    if preset == "kdim":
        return replace(
            shared,
            vocab_size=1024,
            hidden_size=256,
            intermediate_size=512,
            moe_intermediate_size=128,
            q_lora_rank=256,
            index_topk=64,
            max_position_embeddings=8192,
        )
    raise ValueError(f"preset={preset!r} is neither 'tiny' nor 'kdim'")


def prompt_lengths(topk: int) -> tuple[int, ...]:
    """Never sparse; sparse for one query; for half of them; for most."""
    return max(4, topk // 2), topk + 1, 2 * topk + 3, 5 * topk + 5


def dequantised(tensors: Mapping[str, Tensor], block: tuple[int, int] | None) -> dict[str, Tensor]:
    """fp32 values of a stored checkpoint. Block by block, to share nothing with the loader under test."""
    result: dict[str, Tensor] = {}
    for name, stored in tensors.items():
        if name.endswith("_scale_inv"):
            continue
        value = stored.float()
        scale = tensors.get(f"{name}_scale_inv")
        if scale is not None and block is not None:
            for i, row in enumerate(scale.tolist()):
                for j, factor in enumerate(row):
                    value[i * block[0] : (i + 1) * block[0], j * block[1] : (j + 1) * block[1]] *= factor
        result[name] = value
    return result
