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


def save_guessable(path: Path, config: GLM53Config, *, seed: int = 0, doubt: float = 0.1) -> Path:
    """A random checkpoint whose drafts are right now and then: layers add little to embeddings (``doubt`` times as much
    as in a random one), and the MTP layer passes on the embedding that it gets. A random one's hardly ever are."""
    tensors = random_tensors(config, seed=seed)
    joining = tensors[f"model.layers.{config.num_hidden_layers}.eh_proj.weight"]
    for name, tensor in tensors.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")) or tensor is joining:
            tensor.mul_(doubt)
    joining += torch.eye(*joining.shape)
    embed = tensors["model.embed_tokens.weight"]
    embed.copy_(torch.randn(embed.shape, generator=torch.Generator().manual_seed(seed)))
    save_checkpoint(path, config, tensors)
    return path


def random_prompts(lengths: tuple[int, ...], vocab_size: int, *, seed: int = 0) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, vocab_size, (n,), generator=generator).tolist() for n in lengths]
