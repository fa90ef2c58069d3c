"""Weights as flat dicts, and what a rank should keep of whole ones, spelled out apart from the loader."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, is_dataclass

import torch
from torch import Tensor

from cptools.kernels.block_fp8 import BlockFP8
from models.glm53 import GLM53Config
from models.glm53.weight_split import WeightSplit
from models.glm53.weights import ModelWeights, Weight


def leaves(weights: object, prefix: str = "") -> Iterator[tuple[str, Weight]]:
    """(dotted name, tensor) of everything in the weights."""
    if isinstance(weights, (Tensor, BlockFP8)):
        yield prefix, weights
    elif isinstance(weights, tuple):
        for i, part in enumerate(weights):
            yield from leaves(part, f"{prefix}.{i}")
    elif is_dataclass(weights):
        for field in fields(weights):
            yield from leaves(getattr(weights, field.name), f"{prefix}.{field.name}")


def plain(weight: Weight, dtype: torch.dtype = torch.float32) -> Tensor:
    return weight.dequantise(dtype) if isinstance(weight, BlockFP8) else weight


def nbytes(weights: ModelWeights) -> int:
    parts = [[w.values, w.scales] if isinstance(w, BlockFP8) else [w] for _, w in leaves(weights)]
    return sum(tensor.nbytes for tensors in parts for tensor in tensors)


def part_of(whole: ModelWeights, config: GLM53Config, split: WeightSplit) -> dict[str, Tensor]:
    """Dequantised, what a rank keeps: heads, widths and experts in equal runs, rank after rank."""

    def run(x: Tensor, parts: int, part: int, dim: int) -> Tensor:
        return x.chunk(parts, dim)[part]

    result = {}
    for name, weight in leaves(whole):
        x = plain(weight, torch.float32 if isinstance(weight, BlockFP8) else weight.dtype)
        field = name.rpartition(".")[2]
        routed = x.dim() == 3 and field in ("gate_up", "down")
        if routed:
            x = run(x, split.ep, split.ep_rank, 0)
        by_width = not routed or split.ep == 1
        if field in ("q_b", "w_uk", "w_uv"):
            x = run(x, split.tp, split.tp_rank, 0)
        elif field == "o" or (field == "down" and by_width):
            x = run(x, split.tp, split.tp_rank, -1)
        elif field == "gate_up" and by_width:
            gate, up = x.chunk(2, -2)
            x = torch.cat([run(half, split.tp, split.tp_rank, -2) for half in (gate, up)], -2)
        result[name] = x
    return result


def assert_same(weights: ModelWeights, expected: dict[str, Tensor]) -> None:
    found = dict(leaves(weights))
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        got = plain(found[name], value.dtype)
        assert got.shape == value.shape, name
        assert got.dtype == value.dtype, name
        assert torch.equal(got, value), name
