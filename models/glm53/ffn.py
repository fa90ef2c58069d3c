"""The two feed-forward kinds: dense SwiGLU, and a sigmoid-routed mixture of experts with a shared expert.

p = sigmoid(u Wgate^T)    sel = top-k of p + bias    g = p[sel] / sum(p[sel]) * routed_scaling_factor
y = sum_j g_j SwiGLU_sel_j(u) + SwiGLU_shared(u)

Over ranks: TP splits the widths of dense layers and of the shared expert, and those of the routed experts where EP does
not spread them; what is split so is a sum over the ranks. With EP each row is routed on one of the ranks that hold it
alike, and its experts' outputs are added on that rank in ascending order of the experts, as on one rank.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from cptools import ExpertExchange
from cptools.kernels import expert_routing
from cptools.kernels.grouped_swiglu import dense_swiglu, grouped_swiglu
from cptools.kernels.rowwise import linear_in_fp32

from .config import GLM53Config
from .layer_split import StepSplit
from .weights import DenseFFNWeights, MoEWeights

CPU_BLOCK_ROWS = 2048
GPU_BLOCK_ROWS = 8192
"""Rows of a rank that are routed at once: bounds what the experts' inputs and outputs take, see `ExpertExchange`. Each
block reads all experts' weights, which on a GPU takes longer than the products of 2048 rows; at the size of GLM-5.3 in
BF16 the inputs and the outputs of 8192 take 0.8 GB each."""


def feed_forward(u: Tensor, w: DenseFFNWeights | MoEWeights, config: GLM53Config, split: StepSplit) -> Tensor:
    """u [local rows, hidden] -> the same. Collective over TP and EP, also without rows.

    With TP one sum. With EP, in a mixture, one exchange of each block of rows (of the rank that has most), and the
    results all-gathered among the ranks that hold the rows alike; or, where `LayerSplit` says so, in steps of decode
    rows alone one sum over the experts' ranks, no sync, capturable.
    """
    tp, exchange = split.modules.tp, split.modules.experts
    if isinstance(w, DenseFFNWeights):
        return tp.sum(dense_swiglu(u, w.gate_up, w.down))
    shared = dense_swiglu(u, w.shared.gate_up, w.shared.down)
    if exchange.world_size == 1:
        return tp.sum(_routed(u, w, config, exchange, most_rows=u.shape[0]) + shared)
    if split.expert_sum is not None:
        return split.expert_sum.sum(_own_experts(u, w, config, exchange)) + tp.sum(shared)
    own = _routed(split.share(u), w, config, exchange, most_rows=split.most_rows)
    return split.collect(own) + tp.sum(shared)


def route(u: Tensor, w: MoEWeights, config: GLM53Config) -> tuple[Tensor, Tensor]:
    """(experts [T, k] int64 ascending, gates [T, k] float32) of rows u [T, hidden]. The bias only selects."""
    return expert_routing.route(
        linear_in_fp32(u, w.router),
        w.bias,
        k=config.num_experts_per_tok,
        normalise=config.norm_topk_prob,
        scaling=config.routed_scaling_factor,
    )


def _blocks(rows: int, device: torch.device) -> Iterator[slice]:
    size = CPU_BLOCK_ROWS if device.type == "cpu" else GPU_BLOCK_ROWS
    return (slice(start, start + size) for start in range(0, rows, size))


def _routed(u: Tensor, w: MoEWeights, config: GLM53Config, exchange: ExpertExchange, *, most_rows: int) -> Tensor:
    """The routed experts' part of rows u [T, hidden]; T <= most_rows, a number that all ranks of the exchange share."""
    out = torch.empty_like(u)
    for block in _blocks(most_rows, u.device):
        experts, gates = route(u[block], w, config)
        sent = exchange.dispatch(u[block], experts)
        results = exchange.results(grouped_swiglu(sent.rows, sent.counts, w.gate_up, w.down), sent)
        out[block] = expert_routing.combine(results, sent.slots, gates)
    return out


def _own_experts(u: Tensor, w: MoEWeights, config: GLM53Config, exchange: ExpertExchange) -> Tensor:
    """This rank's addend to the routed experts' part of rows u [T, hidden] that all ranks hold alike."""
    out = torch.empty_like(u)
    for block in _blocks(u.shape[0], u.device):
        experts, gates = route(u[block], w, config)
        own = exchange.own_rows(u[block], experts)
        outputs = grouped_swiglu(own.rows, own.counts, w.gate_up, w.down)
        # What other ranks compute adds nothing here; the row that stands for it was never written, and may be NaN.
        outputs[-1:].masked_fill_(own.counts.sum() < outputs.shape[0], 0.0)
        out[block] = expert_routing.combine(outputs, own.slots, gates)
    return out
