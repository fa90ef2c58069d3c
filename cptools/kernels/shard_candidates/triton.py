"""Orders from positions and scores, and positions from orders: a program a row."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..compile_spec import CompileSpec
from ..topk_select import INVALID

_INVALID = tl.constexpr(INVALID)


@triton.jit
def encode_kernel(positions, scores, keys, k, rank, WORLD: tl.constexpr, INTERLEAVE: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * k + tl.arange(0, BLOCK)
    inside = tl.arange(0, BLOCK) < k
    local = tl.load(positions + at, mask=inside, other=-1)
    score = tl.load(scores + at, mask=inside, other=0.0) + 0.0
    bits = tl.where(score != score, 0x7FC00000, score.to(tl.int32, bitcast=True))
    bits = tl.where(bits == -0x80000000, 0, bits)  # where -0.0 + 0.0 was folded away
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    index = tl.maximum(local, 0).to(tl.uint32)  # 64-bit divisions cost a call each
    position = index // INTERLEAVE * (WORLD * INTERLEAVE) + rank * INTERLEAVE + index % INTERLEAVE
    key = (ordered.to(tl.int64) << 32) | (0xFFFFFFFF - position.to(tl.int64))
    tl.store(keys + at, tl.where(local < 0, _INVALID, key), mask=inside)


@triton.jit
def chosen_kernel(keys, positions, k, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * k + tl.arange(0, BLOCK)
    inside = tl.arange(0, BLOCK) < k
    key = tl.load(keys + at, mask=inside, other=_INVALID)
    valid = key != _INVALID
    # Nothing sorts last, after or beside a position of 2^32 - 1.
    position = tl.where(valid, 0xFFFFFFFF - (key & 0xFFFFFFFF), 0xFFFFFFFF).to(tl.uint32)
    ordered = tl.sort(position).to(tl.int64)
    there = tl.arange(0, BLOCK) < tl.sum(valid.to(tl.int32))
    tl.store(positions + at, tl.where(there, ordered, -1), mask=inside)


@torch.library.custom_op("cptools::encode_candidates", mutates_args=())
def encode_candidates(positions: Tensor, scores: Tensor, world_size: int, interleave: int, rank: int) -> Tensor:
    """positions int64 and scores float32 [T, k], contiguous -> int64 [T, k]."""
    rows, k = positions.shape
    keys = torch.empty(rows, k, dtype=torch.int64, device=positions.device)
    if rows and k:
        encode_kernel[(rows,)](
            positions, scores, keys, k, rank, WORLD=world_size, INTERLEAVE=interleave, BLOCK=triton.next_power_of_2(k)
        )
    return keys


@encode_candidates.register_fake
def _(positions: Tensor, scores: Tensor, world_size: int, interleave: int, rank: int) -> Tensor:
    return torch.empty_like(positions)


@torch.library.custom_op("cptools::chosen_positions", mutates_args=())
def chosen_positions(keys: Tensor) -> Tensor:
    """int64 [T, k], contiguous -> int64 [T, k]."""
    rows, k = keys.shape
    positions = torch.empty(rows, k, dtype=torch.int64, device=keys.device)
    if rows and k:
        chosen_kernel[(rows,)](keys, positions, k, BLOCK=triton.next_power_of_2(k), num_warps=8)
    return positions


@chosen_positions.register_fake
def _(keys: Tensor) -> Tensor:
    return torch.empty_like(keys)


def compile_specs() -> list[CompileSpec]:
    encode = {"WORLD": 8, "INTERLEAVE": 1, "BLOCK": 2048}
    pointers = {"positions": "*i64", "scores": "*fp32", "keys": "*i64"}
    return [
        CompileSpec(
            "encode_candidates",
            encode_kernel,
            pointers | {"k": "i32", "rank": "i32"} | dict.fromkeys(encode, "constexpr"),
            encode,
            divisible_by_16=(*pointers, "k"),
        ),
        CompileSpec(
            "chosen_positions",
            chosen_kernel,
            {"keys": "*i64", "positions": "*i64", "k": "i32", "BLOCK": "constexpr"},
            {"BLOCK": 2048},
            num_warps=8,
            divisible_by_16=("keys", "positions", "k"),
        ),
    ]
