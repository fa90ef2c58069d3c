"""The shape of a model from the config.json of its checkpoint."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

from cptools.planner.model_shape import ModelShape

_MODEL_TYPE = "glm_moe_dsa"


def shape_from_config(path: str | Path) -> ModelShape:
    """The shape that ``path``, a config.json or the folder that holds one, describes. Reads nothing else.

    Raises ValueError with everything that is missing or of another type or family; OSError where no file is.
    """
    file = Path(path)
    file = file / "config.json" if file.is_dir() else file
    try:
        source = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{file} is not JSON: {error}") from error
    if not isinstance(source, dict):
        raise ValueError(f"{file} holds a {type(source).__name__}, not an object")
    if source.get("model_type") != _MODEL_TYPE:
        raise ValueError(f"{file}: model_type={source.get('model_type')!r} is not {_MODEL_TYPE!r}")
    reader = _Reader(source)
    values: dict[str, Any] = {}
    for item in fields(ModelShape):
        if item.type == "int":
            values[item.name] = reader.integer(item.name, None if item.default is MISSING else item.default)
    layers = reader.integer("num_hidden_layers")
    values["indexer_types"] = reader.indexer_types(layers)
    values["mlp_layer_types"] = reader.mlp_layer_types(layers)
    values["weight_block_size"] = reader.weight_block_size()
    for name in ("indexer_types", "mlp_layer_types"):
        if len(values[name]) != layers and not reader.problems:
            reader.problems.append(f"{name} has {len(values[name])} entries for num_hidden_layers={layers}")
    if reader.problems:
        raise ValueError(f"{file} describes no model to plan for:\n" + "\n".join(f"- {p}" for p in reader.problems))
    return ModelShape(**values)


class _Reader:
    """Takes values out of a config.json; what is wrong goes to ``problems``, so that one error names all of it."""

    def __init__(self, source: Mapping[str, object]) -> None:
        self.source = source
        self.problems: list[str] = []

    def integer(self, name: str, default: object = None) -> int:
        value = self.source.get(name)
        if value is None:
            value = default
        if type(value) is int:  # not isinstance: true is no size
            return value
        self.problems.append(f"{name} is missing" if value is None else f"{name}={value!r} is not an integer")
        return 1

    def indexer_types(self, layers: int) -> tuple[str, ...]:
        """The list is the authority, then the pattern, then the schedule, as the model's own reader has it."""
        pattern = self.source.get("index_topk_pattern")
        if self.source.get("indexer_types") is not None:
            return self.names("indexer_types")
        if pattern is not None:
            if isinstance(pattern, str) and set(pattern) <= {"F", "S"}:
                return tuple({"F": "full", "S": "shared"}[letter] for letter in pattern)
            self.problems.append(f"index_topk_pattern={pattern!r} is not a string of F and S")
            return ()
        freq, offset = self.positive("index_topk_freq", 1), self.integer("index_skip_topk_offset", 2)
        return tuple("full" if max(layer - offset + 1, 0) % freq == 0 else "shared" for layer in range(layers))

    def mlp_layer_types(self, layers: int) -> tuple[str, ...]:
        if self.source.get("mlp_layer_types") is not None:
            return self.names("mlp_layer_types")
        first, freq = self.integer("first_k_dense_replace"), self.positive("moe_layer_freq", 1)
        return tuple("sparse" if layer >= first and layer % freq == 0 else "dense" for layer in range(layers))

    def weight_block_size(self) -> tuple[int, int] | None:
        quantization = self.source.get("quantization_config")
        if quantization is None:
            return None
        block = quantization.get("weight_block_size") if isinstance(quantization, Mapping) else None
        if isinstance(block, list) and len(block) == 2 and all(type(side) is int and side > 0 for side in block):
            return block[0], block[1]
        self.problems.append(f"quantization_config.weight_block_size={block!r} is not a pair of block sizes")
        return None

    def positive(self, name: str, default: int) -> int:
        value = self.integer(name, default)
        if value < 1:
            self.problems.append(f"{name}={value} is not positive")
        return max(value, 1)

    def names(self, name: str) -> tuple[str, ...]:
        value = self.source[name]
        if isinstance(value, list) and all(isinstance(kind, str) for kind in value):
            return tuple(value)
        self.problems.append(f"{name}={value!r} is not a list of names")
        return ()
