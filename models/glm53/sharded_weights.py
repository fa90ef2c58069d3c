"""The part of a whole model's weights that one rank keeps, by a `WeightSplit`."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from .config import GLM53Config
from .weight_split import WeightSplit
from .weights import AttentionWeights, DenseFFNWeights, LayerWeights, ModelWeights, MoEWeights


def check_split(config: GLM53Config, split: WeightSplit) -> None:
    """ValueError, naming each, unless every size of the model that the split divides can be divided."""
    sizes = {"num_attention_heads": config.num_attention_heads}
    if "dense" in config.mlp_layer_types:
        sizes["intermediate_size"] = config.intermediate_size
    if any(config.is_sparse(layer) for layer in range(config.num_cache_layers)):
        sizes["moe_intermediate_size * n_shared_experts"] = config.moe_intermediate_size * config.n_shared_experts
        if split.ep == 1:
            sizes["moe_intermediate_size"] = config.moe_intermediate_size
    faults = [f"tp={split.tp} must divide {name}={size}" for name, size in sizes.items() if size % split.tp]
    if config.n_routed_experts % split.ep:
        faults.append(f"ep={split.ep} must divide n_routed_experts={config.n_routed_experts}")
    if faults:
        raise ValueError("; ".join(faults))


def split_weights(weights: ModelWeights, split: WeightSplit) -> ModelWeights:
    """What one rank keeps of the weights of a whole model. Local.

    Parts are copies, so that the whole can be freed; what is not split is shared with it. With nothing to split it is
    ``weights`` itself. Raises ValueError where a size cannot be divided.
    """
    if split.tp == split.ep == 1:
        return weights
    mtp = weights.mtp
    return replace(
        weights,
        layers=tuple(_layer(layer, split) for layer in weights.layers),
        mtp=None if mtp is None else replace(mtp, layer=_layer(mtp.layer, split)),
    )


def _layer(w: LayerWeights, split: WeightSplit) -> LayerWeights:
    ffn = _moe(w.ffn, split) if isinstance(w.ffn, MoEWeights) else _dense(w.ffn, split)
    return replace(w, attention=_attention(w.attention, split), ffn=ffn)


def _attention(w: AttentionWeights, split: WeightSplit) -> AttentionWeights:
    if split.tp == 1:
        return w
    heads = split.shard(w.w_uk.shape[0])
    by_head = w.q_b.unflatten(0, (w.w_uk.shape[0], -1))
    columns = split.shard(w.o.shape[1])
    return replace(
        w,
        q_b=by_head[heads].flatten(0, 1).clone(),
        w_uk=w.w_uk[heads].clone(),
        w_uv=w.w_uv[heads].clone(),
        o=w.o[:, columns].clone(),
    )


def _dense(w: DenseFFNWeights, split: WeightSplit) -> DenseFFNWeights:
    if split.tp == 1:
        return w
    return DenseFFNWeights(gate_up=_widths(w.gate_up, split), down=w.down[:, split.shard(w.down.shape[1])].clone())


def _moe(w: MoEWeights, split: WeightSplit) -> MoEWeights:
    shared = _dense(w.shared, split)
    if split.ep > 1:
        own = split.experts(w.gate_up.shape[0])
        return replace(w, gate_up=w.gate_up[own].clone(), down=w.down[own].clone(), shared=shared)
    down = w.down[:, :, split.shard(w.down.shape[2])].clone()
    return replace(w, gate_up=_widths(w.gate_up, split), down=down, shared=shared)


def _widths(gate_up: Tensor, split: WeightSplit) -> Tensor:
    """This rank's rows of gate and of up: [..., 2 * width, hidden] -> [..., 2 * width / tp, hidden]."""
    gate, up = gate_up.chunk(2, dim=-2)
    own = split.shard(gate.shape[-2])
    return torch.cat([gate[..., own, :], up[..., own, :]], dim=-2)
