"""Prompts of the examples: lists of token ids, read or drawn, and what the model can not run of them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import torch

from models.glm53 import GLM53Config


def read_prompts(file: Path) -> list[list[int]]:
    """A JSON list of lists of token ids. Raises ValueError on anything else, OSError where there is no such file."""
    try:
        prompts = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{file} is not JSON: {error}") from error
    if not (isinstance(prompts, list) and all(isinstance(p, list) and {*map(type, p)} <= {int} for p in prompts)):
        raise ValueError(f"{file} is not a list of lists of token ids")
    return prompts


def random_prompts(lengths: Sequence[int], config: GLM53Config, *, seed: int = 0) -> list[list[int]]:
    """ValueError unless all lengths are positive."""
    if min(lengths, default=1) < 1:
        raise ValueError(f"lengths {', '.join(map(str, lengths))} of random prompts must be positive")
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(config.vocab_size, (n,), generator=generator).tolist() for n in lengths]


def check_prompts(prompts: Sequence[Sequence[int]], config: GLM53Config, *, new_positions: int) -> None:
    """ValueError unless the model can run each and ``new_positions`` tokens behind it. Before anything is loaded."""
    if not prompts:
        raise ValueError("there are no prompts")
    for i, prompt in enumerate(prompts):
        if not prompt:
            raise ValueError(f"prompt {i} is empty")
        if outside := sorted({token for token in prompt if not 0 <= token < config.vocab_size}):
            raise ValueError(f"prompt {i} has ids outside [0, {config.vocab_size}), among them {outside[:4]}")
        if len(prompt) + new_positions > config.max_position_embeddings:
            raise ValueError(
                f"prompt {i}: {len(prompt)} tokens and {new_positions} behind them exceed "
                f"max_position_embeddings={config.max_position_embeddings}"
            )
