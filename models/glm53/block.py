"""One decoder block over this rank's rows: x += Attn(RMS(x)); x += FFN(RMS(x))."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from cptools.cp_kv import KVStep
from cptools.kernels.rowwise import RopeAngles, rms_norm
from cptools.layer_context import Selection
from cptools.spans import Span, no_span
from cptools.step_plan import StepPlan

from . import attention, indexer
from .config import GLM53Config
from .ffn import feed_forward
from .layer_split import StepSplit
from .weights import LayerWeights

SelectionObserver = Callable[[int, StepPlan, Tensor, Tensor], None]
"""Called on every rank per layer: (layer, step, positions selected for its prompt rows, for the decode rows)."""


@dataclass
class Pass:
    """What the layers of one forward pass share."""

    config: GLM53Config
    step: KVStep
    split: StepSplit
    angles: RopeAngles
    selected: Selection
    """[local rows, index_topk]: what each row attends to. Set by full layers, read by the layers that share their
    indexer; nothing for rows on the dense path."""
    observer: Callable[[int, Tensor, Tensor], None] | None = None
    span: Span = no_span
    """What the parts of each layer run in."""


def make_pass(
    config: GLM53Config,
    step: KVStep,
    split: StepSplit,
    observer: SelectionObserver | None = None,
    plan: StepPlan | None = None,
) -> Pass:
    """A pass over a step; an observer is told ``plan``, which must then be given."""
    angles = RopeAngles.at(step.positions, config.qk_rope_head_dim, config.rope_theta)
    selected = Selection.empty(len(step.positions), config.index_topk, step.positions.device)
    if observer is None:
        return Pass(config, step, split, angles, selected)
    if plan is None:
        raise ValueError("make_pass: an observer needs the plan of the step")
    return Pass(config, step, split, angles, selected, lambda layer, *chosen: observer(layer, plan, *chosen))


def decoder_block(x: Tensor, layer: int, w: LayerWeights, run: Pass) -> Tensor:
    """x [local rows, hidden] -> the same. Every rank calls it with the same step, also with zero rows."""
    eps = run.config.rms_norm_eps
    with run.span(f"layer {layer}"):
        x = x + _attention(rms_norm(x, w.input_norm, eps), layer, w, run)
        with run.span("feed forward"):
            return x + feed_forward(rms_norm(x, w.post_attention_norm, eps), w.ffn, run.config, run.split)


def _attention(u: Tensor, layer: int, w: LayerWeights, run: Pass) -> Tensor:
    config, step, angles, span = run.config, run.step, run.angles, run.span
    with span("new rows"):
        keys = None if w.indexer is None else indexer.new_keys(u, w.indexer)
        step.append(layer, angles, attention.new_latents(u, w.attention, config), keys)

    split = run.split.modules
    outs = [u[:0]]
    with span("context"):
        context = step.context(layer, with_index=w.indexer is not None)
    with context:
        for block in step.blocks:
            rows = block.rows
            with span("queries"):
                qr = attention.query_residual(u[rows], w.attention, config)
                q_nope, q_pe = attention.query_heads(qr, w.attention, angles[rows], config)
            if block.path == "dense":
                with span("attend"):
                    sequence = context.prompt_sequence(block.request)
                    lens = step.prompt.kv_lens[rows]
                    outs.append(attention.dense_output(q_nope, q_pe, sequence, lens, w.attention, config))
                continue
            if w.indexer is not None:
                with span("select"):
                    query, weights = indexer.index_query(qr, u[rows], w.indexer, config)
                    context.select(block, query, weights, angles[rows], run.selected[rows])
            with span("attend"):
                query = attention.absorb(q_nope, q_pe, w.attention)
                all_heads = block.path == "decode" and split.decode_all_heads
                if all_heads:
                    query = split.tp.gather_heads(query)
                latent = context.attend(block, query, run.selected[rows], scale=config.softmax_scale)
                if latent.shape[1] > q_nope.shape[1]:
                    latent = split.tp.own_heads(latent)
            with span("output"):
                outs.append(attention.output(latent, w.attention))
    if run.observer is not None:
        prompt_rows = step.prompt.rows
        run.observer(layer, run.selected.positions[:prompt_rows], run.selected.positions[prompt_rows:])
    # Blocks are consecutive; of one, nothing is copied.
    return split.tp.sum(outs[-1] if len(outs) <= 2 else torch.cat(outs))
