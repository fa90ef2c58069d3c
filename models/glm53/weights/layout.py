"""Where the weights of a rank come from: which cut of which released tensor lands where in which parameter.

Plain integers; reading a checkpoint, drawing random weights and counting bytes all follow this one description.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor

from cptools.kernels.block_fp8 import BLOCK, scale_shape

from ..config import GLM53Config
from ..weight_split import WeightSplit
from .model_weights import (
    AttentionWeights,
    DenseFFNWeights,
    IndexerWeights,
    LayerWeights,
    ModelWeights,
    MoEWeights,
    MTPWeights,
    Weight,
)
from .released import Shape, expected_tensors

WEIGHT_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
"""Of plain tensors; fp32 ones and those kept in FP8 have their own."""


@dataclass(frozen=True)
class Cut:
    """A rectangle of a released tensor, and where it lands in a parameter.

    start, shape: of the rectangle, one entry a dim of the released tensor. at: index of the place of its first value,
    one entry a dim of the parameter, whose last dims are those of the released tensor.
    """

    name: str
    start: Shape
    shape: Shape
    at: Shape

    def in_rows(self, most_values: int) -> Iterator[Cut]:
        """The same in runs of whole rows of at most ``most_values`` values, or of one row."""
        rows, per_row = self.shape[0], math.prod(self.shape[1:])
        step = max(1, most_values // max(1, per_row))
        dim = len(self.at) - len(self.shape)
        for row in range(0, rows, step):
            yield Cut(
                self.name,
                (self.start[0] + row, *self.start[1:]),
                (min(step, rows - row), *self.shape[1:]),
                (*self.at[:dim], self.at[dim] + row, *self.at[dim + 1 :]),
            )

    @property
    def place(self) -> tuple[int | slice, ...]:
        """What to index the parameter with to get the place of the rectangle."""
        dims = len(self.shape)
        inner = zip(self.at[-dims:], self.shape, strict=True)
        return (*self.at[:-dims], *(slice(first, first + size) for first, size in inner))


@dataclass(frozen=True)
class Parameter:
    """One tensor of `ModelWeights` on one rank.

    kind: "matrix" has the model's dtype or stays in FP8, "plain" has the model's dtype, "fp32" is always fp32.
    """

    shape: Shape
    cuts: tuple[Cut, ...]
    kind: Literal["matrix", "plain", "fp32"]


class Maker(Protocol):
    """Makes the tensors of `assemble`."""

    def tensor(self, parameter: Parameter) -> Tensor:
        """Of the kinds "plain" and "fp32"."""

    def matrix(self, parameter: Parameter) -> Weight: ...


def assemble(config: GLM53Config, split: WeightSplit, make: Maker) -> ModelWeights:
    """The weights that a rank keeps, each made by ``make``. Local.

    Raises ValueError where the split does not divide heads, widths or experts.
    """
    parts = _Assembly(config, split, make)
    layers = [parts.layer(layer) for layer in range(config.num_cache_layers)]
    mtp = parts.mtp(layers.pop()) if config.num_nextn_predict_layers else None
    return ModelWeights(
        embed=parts.whole("model.embed_tokens.weight"),
        layers=tuple(layers),
        norm=parts.whole("model.norm.weight"),
        lm_head=parts.whole("lm_head.weight"),
        mtp=mtp,
    )


def parameters(config: GLM53Config, split: WeightSplit) -> list[Parameter]:
    """All parameters of a rank. Raises ValueError as `assemble` does."""
    recorder = _Recorder()
    assemble(config, split, recorder)
    return recorder.seen


def check_weight_types(dtype: torch.dtype, keep_fp8: bool) -> None:
    """ValueError unless weights can be had in ``dtype``."""
    if dtype not in WEIGHT_DTYPES:
        names = ", ".join(str(each).removeprefix("torch.") for each in WEIGHT_DTYPES)
        raise ValueError(f"dtype={dtype} is not one of {names}")
    if not isinstance(keep_fp8, bool):
        raise ValueError(f"keep_fp8={keep_fp8!r} must be True or False")


def weight_bytes(
    config: GLM53Config, *, dtype: torch.dtype, keep_fp8: bool = False, split: WeightSplit | None = None
) -> int:
    """Bytes of the weights that a rank keeps of a checkpoint of this config, FP8 scales included."""
    check_weight_types(dtype, keep_fp8)
    total = 0
    keep_fp8 = keep_fp8 and config.weight_block_size is not None
    for parameter in parameters(config, split or WeightSplit()):
        values = math.prod(parameter.shape)
        if parameter.kind == "matrix" and keep_fp8:
            scales = scale_shape(parameter.shape[-2:], (BLOCK, BLOCK))
            total += values + 4 * math.prod(parameter.shape[:-2]) * math.prod(scales)
        else:
            total += values * (torch.float32 if parameter.kind == "fp32" else dtype).itemsize
    return total


class _Recorder:
    def __init__(self) -> None:
        self.seen: list[Parameter] = []

    def tensor(self, parameter: Parameter) -> Tensor:
        self.seen.append(parameter)
        return torch.empty(parameter.shape, device="meta")

    def matrix(self, parameter: Parameter) -> Weight:
        return self.tensor(parameter)


class _Assembly:
    def __init__(self, config: GLM53Config, split: WeightSplit, make: Maker) -> None:
        self.config, self.split, self.make = config, split, make
        self.shapes = expected_tensors(config)
        self.heads = split.shard(config.num_attention_heads, "num_attention_heads")

    def whole(self, name: str, kind: Literal["plain", "fp32"] = "plain") -> Tensor:
        shape = self.shapes[name]
        zeros = (0,) * len(shape)
        return self.make.tensor(Parameter(shape, (Cut(name, zeros, shape, zeros),), kind))

    def matrix(self, name: str, *, rows: slice | None = None, columns: slice | None = None) -> Weight:
        """A matrix, or these rows or columns of it."""
        start, shape = _rectangle(self.shapes[name], rows, columns)
        return self.make.matrix(Parameter(shape, (Cut(name, start, shape, (0, 0)),), "matrix"))

    def layer(self, layer: int) -> LayerWeights:
        prefix = f"model.layers.{layer}."
        return LayerWeights(
            input_norm=self.whole(prefix + "input_layernorm.weight"),
            post_attention_norm=self.whole(prefix + "post_attention_layernorm.weight"),
            attention=self.attention(prefix + "self_attn."),
            indexer=self.indexer(prefix + "self_attn.indexer.") if self.config.is_full(layer) else None,
            ffn=self.moe(prefix + "mlp.") if self.config.is_sparse(layer) else self.dense_ffn(prefix + "mlp."),
        )

    def attention(self, prefix: str) -> AttentionWeights:
        c, kv_b = self.config, prefix + "kv_b_proj.weight"
        return AttentionWeights(
            q_a=self.matrix(prefix + "q_a_proj.weight"),
            q_a_norm=self.whole(prefix + "q_a_layernorm.weight"),
            q_b=self.matrix(prefix + "q_b_proj.weight", rows=_times(self.heads, c.qk_head_dim)),
            kv_a=self.matrix(prefix + "kv_a_proj_with_mqa.weight"),
            kv_a_norm=self.whole(prefix + "kv_a_layernorm.weight"),
            w_uk=self.per_head(kv_b, 0, c.qk_nope_head_dim),
            w_uv=self.per_head(kv_b, c.qk_nope_head_dim, c.v_head_dim),
            o=self.matrix(prefix + "o_proj.weight", columns=_times(self.heads, c.v_head_dim)),
        )

    def per_head(self, name: str, first: int, count: int) -> Tensor:
        """[this rank's heads, count, columns]: rows first..first + count of each head of a kv_b."""
        rows, columns = self.shapes[name]
        each = rows // self.config.num_attention_heads
        heads = range(self.heads.start, self.heads.stop)
        cuts = tuple(Cut(name, (head * each + first, 0), (count, columns), (i, 0, 0)) for i, head in enumerate(heads))
        return self.make.tensor(Parameter((len(heads), count, columns), cuts, "plain"))

    def indexer(self, prefix: str) -> IndexerWeights:
        return IndexerWeights(
            wq_b=self.matrix(prefix + "wq_b.weight"),
            wk=self.whole(prefix + "wk.weight"),
            k_norm_weight=self.whole(prefix + "k_norm.weight"),
            k_norm_bias=self.whole(prefix + "k_norm.bias"),
            weights_proj=self.whole(prefix + "weights_proj.weight", "fp32"),
        )

    def dense_ffn(self, prefix: str) -> DenseFFNWeights:
        width, _ = self.shapes[prefix + "gate_proj.weight"]
        own = self.split.shard(width, f"the width of {prefix}gate_proj")
        return DenseFFNWeights(
            gate_up=self.make.matrix(_unstacked(self.gate_up([prefix], own))),
            down=self.matrix(prefix + "down_proj.weight", columns=own),
        )

    def moe(self, prefix: str) -> MoEWeights:
        own = self.split.experts(self.config.n_routed_experts)
        experts = [f"{prefix}experts.{expert}." for expert in range(own.start, own.stop)]
        width = self.config.moe_intermediate_size
        rows = self.split.shard(width, "moe_intermediate_size") if self.split.ep == 1 else slice(0, width)
        return MoEWeights(
            router=self.whole(prefix + "gate.weight", "fp32"),
            bias=self.whole(prefix + "gate.e_score_correction_bias", "fp32"),
            gate_up=self.make.matrix(self.gate_up(experts, rows)),
            down=self.make.matrix(self.down(experts, rows)),
            shared=self.dense_ffn(prefix + "shared_experts."),
        )

    def gate_up(self, prefixes: Sequence[str], rows: slice) -> Parameter:
        """[prefixes, 2 * rows, hidden], gate first."""
        cuts = []
        for i, prefix in enumerate(prefixes):
            for half, name in enumerate(("gate_proj.weight", "up_proj.weight")):
                start, shape = _rectangle(self.shapes[prefix + name], rows, None)
                cuts.append(Cut(prefix + name, start, shape, (i, half * shape[0], 0)))
        return Parameter((len(prefixes), 2 * shape[0], shape[1]), tuple(cuts), "matrix")

    def down(self, prefixes: Sequence[str], columns: slice) -> Parameter:
        """[prefixes, hidden, columns]."""
        names = [prefix + "down_proj.weight" for prefix in prefixes]
        start, shape = _rectangle(self.shapes[names[0]], None, columns)
        cuts = tuple(Cut(name, start, shape, (i, 0, 0)) for i, name in enumerate(names))
        return Parameter((len(names), *shape), cuts, "matrix")

    def mtp(self, layer: LayerWeights) -> MTPWeights:
        prefix = f"model.layers.{self.config.num_hidden_layers}."
        return MTPWeights(
            enorm=self.whole(prefix + "enorm.weight"),
            hnorm=self.whole(prefix + "hnorm.weight"),
            eh_proj=self.whole(prefix + "eh_proj.weight"),
            layer=layer,
            norm=self.whole(prefix + "shared_head.norm.weight"),
        )


def _times(part: slice, each: int) -> slice:
    return slice(part.start * each, part.stop * each)


def _rectangle(shape: Shape, rows: slice | None, columns: slice | None) -> tuple[Shape, Shape]:
    """(start, shape) of these rows and columns of a matrix, all of them where None."""
    parts = [slice(0, size) if part is None else part for size, part in zip(shape, (rows, columns), strict=True)]
    return tuple(part.start for part in parts), tuple(part.stop - part.start for part in parts)


def _unstacked(parameter: Parameter) -> Parameter:
    """The one matrix of a stack of one."""
    cuts = (Cut(cut.name, cut.start, cut.shape, cut.at[1:]) for cut in parameter.cuts)
    return Parameter(parameter.shape[1:], tuple(cuts), parameter.kind)
