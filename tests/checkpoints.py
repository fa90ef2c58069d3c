"""Small random checkpoints for tests that need a model but no reference."""

from __future__ import annotations

from pathlib import Path

import torch

from models.glm53 import GLM53Config
from models.glm53.weights import random_tensors, save_checkpoint

_COMMON = dict(
    num_hidden_layers=7,
    num_attention_heads=8,
    n_routed_experts=16,
    n_shared_experts=1,
    num_experts_per_tok=4,
    routed_scaling_factor=2.5,
    norm_topk_prob=True,
    rms_norm_eps=1e-5,
    rope_theta=8e6,
    indexer_types=("full", "full", "full", "shared", "shared", "shared", "full"),
    mlp_layer_types=("dense",) * 3 + ("sparse",) * 4,
    num_nextn_predict_layers=1,
    index_share_for_mtp_iteration=True,
)

TINY = GLM53Config(
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
    **_COMMON,
)
"""Everything small; more keys than top-k from position 16 on."""

KDIM = GLM53Config(
    vocab_size=1024,
    hidden_size=256,
    intermediate_size=512,
    moe_intermediate_size=128,
    q_lora_rank=256,
    kv_lora_rank=512,
    qk_nope_head_dim=192,
    qk_rope_head_dim=64,
    v_head_dim=256,
    index_n_heads=32,
    index_head_dim=128,
    index_topk=64,
    max_position_embeddings=8192,
    **_COMMON,
)
"""The head, latent, rope and index widths of GLM-5.3."""


def save_random(path: Path, config: GLM53Config, *, seed: int = 0) -> Path:
    save_checkpoint(path, config, random_tensors(config, seed=seed))
    return path


def random_prompts(lengths: tuple[int, ...], vocab_size: int, *, seed: int = 0) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, vocab_size, (n,), generator=generator).tolist() for n in lengths]
