"""Pearson's chi-square, for tests of what is drawn at random from fixed seeds."""

from __future__ import annotations

import torch
from torch import Tensor

SIGNIFICANCE = 1e-6
"""A right implementation fails a test once, when it is written, with this probability, and never again. That wrong ones
fail is for the test to show."""


def p_value(counts: Tensor, expected: Tensor) -> float:
    """How likely counts [n] are to be this far from the probabilities ``expected`` [n] or farther."""
    possible = expected > 0
    if bool((counts[~possible] > 0).any()):
        return 0.0
    want = expected[possible].double() * counts.sum()
    statistic = ((counts[possible].double() - want) ** 2 / want).sum()
    freedom = torch.tensor((int(possible.sum()) - 1) / 2, dtype=torch.float64)
    return float(torch.special.gammaincc(freedom, statistic / 2)) if freedom > 0 else 1.0


def histogram(tokens: Tensor, vocab: int) -> Tensor:
    return torch.bincount(tokens, minlength=vocab)
