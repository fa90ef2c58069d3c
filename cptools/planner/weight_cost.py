"""Bytes of the weights that one GPU keeps."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from cptools.integers import require_int, undivided
from cptools.planner.model_shape import ModelShape

WeightFormat = Literal["fp8", "bf16"]
_BLOCK = 128  # rows and columns that share an FP8 scale
_BYTES = {"plain": 2, "fp32": 4}
_SCALE_BYTES = 4


@dataclass(frozen=True)
class _Matrix:
    """``count`` equal tensors [rows, columns]. kind: "matrix" may stay in FP8, "plain" is BF16, "fp32" is fp32."""

    rows: int
    columns: int
    kind: Literal["matrix", "plain", "fp32"] = "matrix"
    count: int = 1

    def nbytes(self, weights: WeightFormat) -> int:
        values = self.rows * self.columns
        if self.kind == "matrix" and weights == "fp8":
            return self.count * (values + _SCALE_BYTES * -(-self.rows // _BLOCK) * -(-self.columns // _BLOCK))
        return self.count * values * _BYTES["plain" if self.kind == "matrix" else self.kind]


def released_format(shape: ModelShape) -> WeightFormat:
    """How the checkpoint has its matrices: "fp8" in blocks that can be kept, else "bf16"."""
    return "fp8" if shape.weight_block_size == (_BLOCK, _BLOCK) else "bf16"


def weight_bytes_per_gpu(shape: ModelShape, *, tp: int = 1, ep: int = 1, weights: WeightFormat = "fp8") -> int:
    """Bytes that a rank keeps, as the loader of `models.glm53` does, MTP layer included.

    TP splits heads and feed-forward widths, EP whole experts; with ep > 1 routed experts have full width whatever tp
    is. Everything else is whole on every rank. "fp8" keeps released block-FP8 matrices, scales included, and has kv_b,
    the indexer's key projection, embedding and lm_head in BF16; router and index weights are fp32 in both.

    Raises ValueError where tp or ep does not divide a size, the checkpoint is not in FP8 blocks of 128 x 128, or tp
    cuts through one.
    """
    for name, size in (("tp", tp), ("ep", ep)):
        require_int(name, size, minimum=1)
    if weights not in ("fp8", "bf16"):
        raise ValueError(f"weights={weights!r} is not one of fp8, bf16")
    _check_split(shape, tp, ep, weights)
    everything = [*_outside(shape), *_attention(shape, tp), *_indexers(shape), *_feed_forward(shape, tp, ep)]
    return sum(matrix.nbytes(weights) for matrix in everything)


def _outside(shape: ModelShape) -> Iterator[_Matrix]:
    hidden, mtp = shape.hidden_size, shape.num_nextn_predict_layers
    yield _Matrix(shape.vocab_size, hidden, "plain", 2)  # embedding and lm_head
    yield _Matrix(1, hidden, "plain", 1 + 3 * mtp)  # norms: the model's; the MTP layer's enorm, hnorm and its own
    yield _Matrix(hidden, 2 * hidden, "plain", mtp)  # eh_proj


def _attention(shape: ModelShape, tp: int) -> Iterator[_Matrix]:
    layers, hidden, heads = shape.num_cache_layers, shape.hidden_size, shape.num_attention_heads // tp
    yield _Matrix(1, 2 * hidden + shape.q_lora_rank + shape.kv_lora_rank, "plain", layers)  # norms
    yield _Matrix(shape.q_lora_rank, hidden, count=layers)
    yield _Matrix(heads * (shape.qk_nope_head_dim + shape.qk_rope_head_dim), shape.q_lora_rank, count=layers)
    yield _Matrix(shape.kv_lora_rank + shape.qk_rope_head_dim, hidden, count=layers)
    yield _Matrix(heads * (shape.qk_nope_head_dim + shape.v_head_dim), shape.kv_lora_rank, "plain", layers)
    yield _Matrix(hidden, heads * shape.v_head_dim, count=layers)


def _indexers(shape: ModelShape) -> Iterator[_Matrix]:
    layers, hidden, dim = shape.num_index_layers, shape.hidden_size, shape.index_head_dim
    yield _Matrix(shape.index_n_heads * dim, shape.q_lora_rank, count=layers)
    yield _Matrix(dim, hidden + 2, "plain", layers)  # key projection; weight and bias of its norm
    yield _Matrix(shape.index_n_heads, hidden, "fp32", layers)


def _feed_forward(shape: ModelShape, tp: int, ep: int) -> Iterator[_Matrix]:
    sparse, dense, hidden = shape.num_sparse_layers, shape.mlp_layer_types.count("dense"), shape.hidden_size
    yield _Matrix(shape.n_routed_experts, hidden + 1, "fp32", sparse)  # router and its bias
    yield from _swiglu(hidden, shape.intermediate_size // tp, dense)
    yield from _swiglu(hidden, shape.n_shared_experts * shape.moe_intermediate_size // tp, sparse)
    width = shape.moe_intermediate_size // (tp if ep == 1 else 1)
    yield from _swiglu(hidden, width, sparse * (shape.n_routed_experts // ep))


def _swiglu(hidden: int, width: int, count: int) -> Iterator[_Matrix]:
    yield _Matrix(2 * width, hidden, count=count)
    yield _Matrix(hidden, width, count=count)


def _check_split(shape: ModelShape, tp: int, ep: int, weights: WeightFormat) -> None:
    heads = shape.num_attention_heads
    widths = {}
    if "dense" in shape.mlp_layer_types:
        widths["intermediate_size"] = shape.intermediate_size
    if shape.num_sparse_layers:
        widths["moe_intermediate_size * n_shared_experts"] = shape.moe_intermediate_size * shape.n_shared_experts
        if ep == 1:
            widths["moe_intermediate_size"] = shape.moe_intermediate_size
    faults = undivided("tp", tp, {"num_attention_heads": heads, **widths})
    faults += undivided("ep", ep, {"n_routed_experts": shape.n_routed_experts})
    if weights == "fp8" and released_format(shape) != "fp8":
        faults.append(
            f"weights in FP8 need blocks of {_BLOCK} x {_BLOCK}, weight_block_size is {shape.weight_block_size}"
        )
    elif weights == "fp8" and not faults:
        parts = {name: size // tp for name, size in widths.items()}
        if tp > 1:
            query_dim = shape.qk_nope_head_dim + shape.qk_rope_head_dim
            parts["num_attention_heads * qk_head_dim"] = heads // tp * query_dim
            parts["num_attention_heads * v_head_dim"] = heads // tp * shape.v_head_dim
        if ep > 1 and shape.num_sparse_layers:
            parts["moe_intermediate_size (not split)"] = shape.moe_intermediate_size
        faults += [f"tp={tp}: a part of {part} of {n} cuts FP8 blocks" for n, part in parts.items() if part % _BLOCK]
    if faults:
        raise ValueError("; ".join(faults))
