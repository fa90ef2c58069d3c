"""Tokens from logits: temperature, top-k, top-p, log-probabilities, and exact verification of drafts.

Plain torch on every device. No operation waits for the host, so all of it may stand in a captured graph.
"""

from .philox import ACCEPT, DRAFT, SAMPLE, uniforms
from .reference import (
    TokenLogprobs,
    Verified,
    draw,
    probabilities,
    sample,
    token_logprobs,
    verify_drafts,
)
from .settings import Sampling, SamplingRows

__all__ = [
    "ACCEPT",
    "DRAFT",
    "SAMPLE",
    "Sampling",
    "SamplingRows",
    "TokenLogprobs",
    "Verified",
    "draw",
    "probabilities",
    "sample",
    "token_logprobs",
    "uniforms",
    "verify_drafts",
]
