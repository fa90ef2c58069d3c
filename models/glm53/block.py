"""One decoder block over this rank's rows: x += Attn(RMS(x)); x += FFN(RMS(x))."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from cptools.cp_kv import KVStep
from cptools.kernels.rowwise import RopeAngles, rms_norm
from cptools.step_plan import StepPlan

from . import attention, indexer
from .config import GLM53Config
from .ffn import feed_forward
from .weights import LayerWeights

SelectionObserver = Callable[[int, StepPlan, Tensor, Tensor], None]
"""Called on every rank per layer: (layer, step, positions selected for its prompt rows, for the decode rows)."""


@dataclass
class Pass:
    """What the layers of one forward pass share."""

    config: GLM53Config
    step: KVStep
    angles: RopeAngles
    selected: Tensor
    """int64 [local rows, index_topk]: positions each row attends to, ascending, then -1. Set by full layers, read by
    the layers that share their indexer; all -1 for rows on the dense path."""
    observer: SelectionObserver | None = None


def make_pass(config: GLM53Config, step: KVStep, observer: SelectionObserver | None = None) -> Pass:
    positions = step.plan.positions.to(step.cache.device)
    angles = RopeAngles.at(positions, config.qk_rope_head_dim, config.rope_theta)
    selected = torch.full((len(positions), config.index_topk), -1, dtype=torch.int64, device=positions.device)
    return Pass(config, step, angles, selected, observer)


def decoder_block(x: Tensor, layer: int, w: LayerWeights, run: Pass) -> Tensor:
    """x [local rows, hidden] -> the same. Every rank calls it with the same step, also with zero rows."""
    eps = run.config.rms_norm_eps
    x = x + _attention(rms_norm(x, w.input_norm, eps), layer, w, run)
    return x + feed_forward(rms_norm(x, w.post_attention_norm, eps), w.ffn, run.config)


def _attention(u: Tensor, layer: int, w: LayerWeights, run: Pass) -> Tensor:
    config, step, angles, cache = run.config, run.step, run.angles, run.step.cache
    new_index_rows = None
    if w.indexer is not None:
        new_index_rows = indexer.index_rows(u, w.indexer, angles, config, cache.index)
    step.append(layer, attention.mla_rows(u, w.attention, angles, config, cache.mla), new_index_rows)

    out = torch.empty_like(u)
    with step.context(layer, with_index=w.indexer is not None) as context:
        for block in step.blocks:
            rows = block.rows
            qr = attention.query_residual(u[rows], w.attention, config)
            q_nope, q_pe = attention.query_heads(qr, w.attention, angles[rows], config)
            if block.path == "dense":
                sequence = context.prompt_sequence(block.request)
                lens = step.kv_lens[rows]
                out[rows] = attention.dense_output(q_nope, q_pe, sequence, lens, w.attention, config)
                continue
            if w.indexer is not None:
                query, weights = indexer.index_query(qr, u[rows], w.indexer, angles[rows], config)
                run.selected[rows] = context.select(block, query, weights, config.index_topk)
            query = attention.absorb(q_nope, q_pe, w.attention)
            latent = context.attend(block, query, run.selected[rows], scale=config.softmax_scale)
            out[rows] = attention.output(latent, w.attention)
    if run.observer is not None:
        prompt_rows = step.plan.prompt_rows
        run.observer(layer, step.plan, run.selected[:prompt_rows], run.selected[prompt_rows:])
    return out
