"""The multi-token-prediction layer: from a token's successor and the target's hidden state to the token after it."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from cptools.cp_kv import KVStep
from cptools.kernels.rowwise import linear, rms_norm
from cptools.layer_context import Selection

from .block import Pass, decoder_block, make_pass
from .layer_split import StepSplit
from .weights import ModelWeights, MTPWeights

if TYPE_CHECKING:
    from .model import GLM53


def mtp_hidden(next_embedding: Tensor, previous_hidden: Tensor, w: MTPWeights, layer: int, run: Pass) -> Tensor:
    """m [local rows, hidden], whose lm_head product are the draft logits.

    Row i brings the embedding of token i + 1 (zeroed at position 0, as vLLM does) and the target's hidden state of
    token i after its final norm; in further draft steps, this function's result takes the target's place.
    """
    eps = run.config.rms_norm_eps
    at_start = (run.step.positions == 0).unsqueeze(1)
    embedding = torch.where(at_start, 0.0, next_embedding)
    joined = torch.cat([rms_norm(embedding, w.enorm, eps), rms_norm(previous_hidden, w.hnorm, eps)], dim=1)
    return rms_norm(decoder_block(linear(joined, w.eh_proj), layer, w.layer, run), w.norm, eps)


def mtp_pass(
    model: GLM53,
    step: KVStep,
    split: StepSplit,
    previous_hidden: Tensor,
    next_ids: Tensor,
    *,
    shared: Selection | None = None,
) -> tuple[Tensor, Tensor]:
    """The MTP layer over local rows: (m [rows, hidden], positions selected for them int64 [rows, index_topk]).

    previous_hidden [rows, hidden]; next_ids int64 [rows]: the tokens that follow. shared: attend to this selection,
    without the indexer and without a new index key (IndexShare). Collective as one layer; no sync, except with ep > 1.
    """
    weights = mtp_weights(model.weights)
    run = make_pass(model.config, step, split)
    run.span = model.span
    if shared is not None:
        run.selected = shared
        weights = replace(weights, layer=replace(weights.layer, indexer=None))
    embedding = model.weights.embed[next_ids]
    hidden = mtp_hidden(embedding, previous_hidden, weights, model.config.num_hidden_layers, run)
    return hidden, run.selected.positions


def mtp_weights(weights: ModelWeights) -> MTPWeights:
    """The layer's weights; ValueError if there are none."""
    if weights.mtp is None:
        raise ValueError("the checkpoint has no MTP layer (num_nextn_predict_layers=0)")
    return weights.mtp
