"""The two feed-forward kinds: dense SwiGLU, and a sigmoid-routed mixture of experts with a shared expert.

p = sigmoid(u Wgate^T)    sel = top-k of p + bias    g = p[sel] / sum(p[sel]) * routed_scaling_factor
y = sum_j g_j SwiGLU_sel_j(u) + SwiGLU_shared(u)
"""

from __future__ import annotations

import torch
from torch import Tensor

from cptools.kernels.rowwise import linear, sum_columns, swiglu

from .config import GLM53Config
from .weights import DenseFFNWeights, MoEWeights

BLOCK_ROWS = 2048
"""Tokens routed at once: bounds the memory of per-(token, expert) outputs."""


def feed_forward(u: Tensor, w: DenseFFNWeights | MoEWeights, config: GLM53Config) -> Tensor:
    """u [T, hidden] -> [T, hidden]."""
    if isinstance(w, DenseFFNWeights):
        return _swiglu(u, w.gate_up, w.down)
    out = torch.empty_like(u)
    for start in range(0, u.shape[0], BLOCK_ROWS):
        block = slice(start, start + BLOCK_ROWS)
        out[block] = _mixture(u[block], w, config)
    return out


def route(u: Tensor, w: MoEWeights, config: GLM53Config) -> tuple[Tensor, Tensor]:
    """(experts [T, k] int64 ascending, gates [T, k] float32) of rows u [T, hidden]. The bias only selects."""
    p = 1.0 / (1.0 + torch.exp(-linear(u.float(), w.router)))
    # A stable sort, so that equal scores choose the lower expert everywhere.
    order = torch.sort(p + w.bias, dim=1, descending=True, stable=True).indices
    experts = torch.sort(order[:, : config.num_experts_per_tok], dim=1).values
    gates = p.gather(1, experts)
    if config.norm_topk_prob:
        gates = gates / (sum_columns(gates) + 1e-20).unsqueeze(1)
    return experts, gates * config.routed_scaling_factor


def _mixture(u: Tensor, w: MoEWeights, config: GLM53Config) -> Tensor:
    experts, gates = route(u, w, config)
    tokens, k = experts.shape
    pairs = torch.argsort(experts.flatten(), stable=True)
    outputs = torch.empty(tokens * k, u.shape[1], dtype=u.dtype, device=u.device)
    counts = torch.bincount(experts.flatten(), minlength=config.n_routed_experts).tolist()
    for expert, own in enumerate(torch.split(pairs, counts)):
        if len(own):
            outputs[own] = _swiglu(u[own // k], w.gate_up[expert], w.down[expert])
    weighted = outputs.unflatten(0, (tokens, k)) * gates.to(u.dtype).unsqueeze(2)
    return sum_columns(weighted) + _swiglu(u, w.shared.gate_up, w.shared.down)


def _swiglu(u: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2)
    return swiglu(u, gate, up, down)
