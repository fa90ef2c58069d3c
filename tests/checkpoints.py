"""Small random checkpoints for tests that need a model but no reference: the oracles' presets, without transformers."""

from __future__ import annotations

from pathlib import Path

import torch

from models.glm53 import GLM53Config
from models.glm53.weights import random_tensors, save_checkpoint
from tests.oracle.checkpoints import preset_config

TINY = preset_config("tiny")
KDIM = preset_config("kdim")


def save_random(path: Path, config: GLM53Config, *, seed: int = 0) -> Path:
    save_checkpoint(path, config, random_tensors(config, seed=seed))
    return path


def random_prompts(lengths: tuple[int, ...], vocab_size: int, *, seed: int = 0) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, vocab_size, (n,), generator=generator).tolist() for n in lengths]
