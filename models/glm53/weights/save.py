"""Writing a checkpoint directory."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

from ..config import GLM53Config


def save_checkpoint(path: str | Path, config: GLM53Config, tensors: Mapping[str, Tensor]) -> None:
    """Write config.json and model.safetensors of released names into ``path``, which is created."""
    directory = Path(path)
    directory.mkdir(parents=True, exist_ok=True)
    description = config.to_dict()
    description["dtype"] = str(tensors["lm_head.weight"].dtype).removeprefix("torch.")
    (directory / "config.json").write_text(json.dumps(description, indent=2) + "\n", encoding="utf-8")
    contiguous = {name: tensor.detach().contiguous() for name, tensor in tensors.items()}
    save_file(contiguous, directory / "model.safetensors", metadata={"format": "pt"})
