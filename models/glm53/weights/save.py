"""Writing a checkpoint directory."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from ..config import GLM53Config
from .checkpoint_files import INDEX_FILE


def save_checkpoint(path: str | Path, config: GLM53Config, tensors: Mapping[str, Tensor]) -> None:
    """Write config.json and model.safetensors of released names into ``path``, which is created."""
    directory = Path(path)
    directory.mkdir(parents=True, exist_ok=True)
    _write_config(directory, config, tensors["lm_head.weight"].dtype)
    contiguous = {name: tensor.detach().contiguous() for name, tensor in tensors.items()}
    save_file(contiguous, directory / "model.safetensors", metadata={"format": "pt"})


def save_sharded_checkpoint(
    path: str | Path, config: GLM53Config, tensors: Iterable[tuple[str, Tensor]], *, shard_bytes: int = 2**29
) -> None:
    """Write config.json and shards with their index, as large checkpoints are released, into ``path``.

    tensors: (released name, tensor on any device), taken one at a time in the order of the files. Host memory: a shard,
    which has at most ``shard_bytes`` unless one tensor is larger.

    Raises ValueError where ``path`` holds a model.safetensors, which readers would prefer, or without an lm_head.
    """
    directory = Path(path)
    directory.mkdir(parents=True, exist_ok=True)
    if (directory / "model.safetensors").exists():
        raise ValueError(f"{directory} holds a model.safetensors, which would hide the shards")
    shards: list[list[str]] = []
    pending: dict[str, Tensor] = {}
    total = size = 0
    head_dtype = None

    def write() -> None:
        save_file(pending, _part(directory, len(shards)), metadata={"format": "pt"})
        shards.append(list(pending))
        pending.clear()

    for name, tensor in tensors:
        if pending and size + tensor.nbytes > shard_bytes:
            write()
            size = 0
        pending[name] = tensor.detach().cpu().contiguous()
        size += tensor.nbytes
        total += tensor.nbytes
        head_dtype = tensor.dtype if name == "lm_head.weight" else head_dtype
    if head_dtype is None:
        raise ValueError("there is no lm_head.weight among the tensors")
    write()

    weight_map: dict[str, str] = {}
    for number, names in enumerate(shards):
        file = f"model-{number + 1:05}-of-{len(shards):05}.safetensors"
        _part(directory, number).rename(directory / file)
        weight_map |= dict.fromkeys(names, file)
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    (directory / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    _write_config(directory, config, head_dtype)


def _part(directory: Path, number: int) -> Path:
    """A shard before the number of shards, which is in its name, is known."""
    return directory / f"model-{number + 1:05}.part"


def _write_config(directory: Path, config: GLM53Config, dtype: torch.dtype) -> None:
    description = config.to_dict() | {"dtype": str(dtype).removeprefix("torch.")}
    (directory / "config.json").write_text(json.dumps(description, indent=2) + "\n", encoding="utf-8")
