"""The multi-token-prediction layer: from a token's successor and the target's hidden state to the token after it."""

from __future__ import annotations

import torch
from torch import Tensor

from cptools.kernels.rowwise import linear, rms_norm

from .block import Pass, decoder_block
from .weights import MTPWeights


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
