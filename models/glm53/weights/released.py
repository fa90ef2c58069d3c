"""The tensors of a released GLM-5.3 checkpoint: names, shapes, and which of them the FP8 build quantises."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ..config import GLM53Config

Shape = tuple[int, ...]
# What the released block-FP8 build leaves in BF16, besides everything that is not a matrix.
_UNQUANTISED = ("embed_tokens.weight", "lm_head.weight", "mlp.gate.weight", "weights_proj.weight", "eh_proj.weight")


def expected_tensors(config: GLM53Config) -> dict[str, Shape]:
    """Released names and shapes of all parameters; scales of block-FP8 matrices are not among them."""
    h = config.hidden_size
    shapes: dict[str, Shape] = {
        "model.embed_tokens.weight": (config.vocab_size, h),
        "model.norm.weight": (h,),
        "lm_head.weight": (config.vocab_size, h),
    }
    for layer in range(config.num_cache_layers):
        prefix = f"model.layers.{layer}."
        shapes |= {prefix + name: shape for name, shape in _layer_tensors(config, layer)}
    return shapes


def _layer_tensors(config: GLM53Config, layer: int) -> Iterator[tuple[str, Shape]]:
    h, heads, latent = config.hidden_size, config.num_attention_heads, config.kv_lora_rank
    yield "input_layernorm.weight", (h,)
    yield "post_attention_layernorm.weight", (h,)
    yield "self_attn.q_a_proj.weight", (config.q_lora_rank, h)
    yield "self_attn.q_a_layernorm.weight", (config.q_lora_rank,)
    yield "self_attn.q_b_proj.weight", (heads * config.qk_head_dim, config.q_lora_rank)
    yield "self_attn.kv_a_proj_with_mqa.weight", (latent + config.qk_rope_head_dim, h)
    yield "self_attn.kv_a_layernorm.weight", (latent,)
    yield "self_attn.kv_b_proj.weight", (heads * (config.qk_nope_head_dim + config.v_head_dim), latent)
    yield "self_attn.o_proj.weight", (h, heads * config.v_head_dim)
    if config.is_full(layer):
        yield "self_attn.indexer.wq_b.weight", (config.index_n_heads * config.index_head_dim, config.q_lora_rank)
        yield "self_attn.indexer.wk.weight", (config.index_head_dim, h)
        yield "self_attn.indexer.k_norm.weight", (config.index_head_dim,)
        yield "self_attn.indexer.k_norm.bias", (config.index_head_dim,)
        yield "self_attn.indexer.weights_proj.weight", (config.index_n_heads, h)
    if config.is_sparse(layer):
        yield "mlp.gate.weight", (config.n_routed_experts, h)
        yield "mlp.gate.e_score_correction_bias", (config.n_routed_experts,)
        for expert in range(config.n_routed_experts):
            yield from _swiglu_tensors(f"mlp.experts.{expert}.", h, config.moe_intermediate_size)
        # Several shared experts are stored as one wide one.
        yield from _swiglu_tensors("mlp.shared_experts.", h, config.moe_intermediate_size * config.n_shared_experts)
    else:
        yield from _swiglu_tensors("mlp.", h, config.intermediate_size)
    if layer == config.num_hidden_layers:
        yield "enorm.weight", (h,)
        yield "hnorm.weight", (h,)
        yield "eh_proj.weight", (h, 2 * h)
        yield "shared_head.norm.weight", (h,)


def _swiglu_tensors(prefix: str, hidden: int, width: int) -> Iterator[tuple[str, Shape]]:
    yield prefix + "gate_proj.weight", (width, hidden)
    yield prefix + "up_proj.weight", (width, hidden)
    yield prefix + "down_proj.weight", (hidden, width)


def is_released_as_fp8(name: str, shape: Sequence[int]) -> bool:
    """Whether the released block-FP8 build quantises this parameter."""
    return len(shape) == 2 and not name.endswith(_UNQUANTISED)


def scale_name(weight_name: str) -> str:
    """Of the scales that go with a block-FP8 matrix."""
    return weight_name + "_scale_inv"
