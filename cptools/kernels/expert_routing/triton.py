"""Routing in three small launches: choose experts, group pairs by expert without a sort, weigh and add the outputs."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import libdevice

from ..compile_spec import CompileSpec

_TOKENS = 4  # of one program of route
_CHUNK = 2048  # pairs that a program of group looks at together
_COLUMNS = 1024  # of one program of combine


@triton.jit
def route_kernel(
    logits,
    bias,
    experts,
    gates,
    tokens,
    number,
    logit_stride,
    scaling,
    NORMALISE: tl.constexpr,
    K: tl.constexpr,
    KP: tl.constexpr,
    EP: tl.constexpr,
    TOKENS: tl.constexpr,
):
    token = (tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)).to(tl.int64)
    expert = tl.arange(0, EP)
    there = (token < tokens)[:, None] & (expert < number)[None, :]
    logit = tl.load(logits + token[:, None] * logit_stride + expert[None, :], mask=there, other=0.0)
    # The accurate exponential and division: the same bits, so the same choice, as the reference makes on a GPU.
    p = tl.div_rn(1.0, 1.0 + libdevice.exp(-logit))
    score = p + tl.load(bias + expert, mask=expert < number, other=0.0)[None, :]
    score = tl.where(score == 0.0, 0.0, score)  # -0.0 ties with 0.0
    bits = score.to(tl.int32, bitcast=True)
    bits = tl.where(score != score, 0x7FFFFFFF, tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits))  # NaN before all
    # One number that says both, equal scores in favour of the lower expert; all different.
    key = (bits.to(tl.int64) << 32) | (EP - 1 - expert)[None, :].to(tl.int64)
    nothing = -0x8000000000000000
    key = tl.where(there, key, nothing)
    column = tl.arange(0, KP)
    chosen = tl.full([TOKENS, KP], 0x7FFFFFFF, tl.int32)
    weight = tl.zeros([TOKENS, KP], tl.float32)
    for j in tl.static_range(K):
        best = tl.max(key, 1)
        hit = key == best[:, None]
        key = tl.where(hit, nothing, key)
        own = EP - 1 - (best & 0xFFFFFFFF).to(tl.int32)
        chosen = tl.where(column[None, :] == j, own[:, None], chosen)
        weight = tl.where(column[None, :] == j, tl.sum(tl.where(hit, p, 0.0), 1)[:, None], weight)
    rank = tl.sum((chosen[:, None, :] < chosen[:, :, None]).to(tl.int32), 2)
    if NORMALISE:
        # In ascending order of experts, as the reference adds.
        total = tl.sum(tl.where(rank == 0, weight, 0.0), 1)
        for j in tl.static_range(1, K):
            total += tl.sum(tl.where(rank == j, weight, 0.0), 1)
        weight = tl.div_rn(weight, tl.broadcast_to((total + 1e-20)[:, None], [TOKENS, KP]))
    at = token[:, None] * K + rank
    mask = (token < tokens)[:, None] & (column < K)[None, :]
    tl.store(experts + at, chosen.to(tl.int64), mask=mask)
    tl.store(gates + at, weight * scaling, mask=mask)


@triton.jit
def group_kernel(experts, order, slots, counts, pairs, CHUNK: tl.constexpr):
    """One program an expert: it counts who comes before its pairs, and gives these their rows."""
    expert = tl.program_id(0)
    lane = tl.arange(0, CHUNK)
    lower = tl.zeros([CHUNK], tl.int32)
    own = tl.zeros([CHUNK], tl.int32)
    for start in range(0, pairs, CHUNK):
        id = tl.load(experts + start + lane, mask=start + lane < pairs, other=0x7FFFFFFF).to(tl.int32)
        lower += (id < expert).to(tl.int32)
        own += (id == expert).to(tl.int32)
    row = tl.sum(lower, 0)
    count = tl.sum(own, 0)
    tl.store(counts + expert, count)
    if count > 0:
        for start in range(0, pairs, CHUNK):
            pair = start + lane
            id = tl.load(experts + pair, mask=pair < pairs, other=0x7FFFFFFF).to(tl.int32)
            mine = id == expert
            rank = tl.cumsum(mine.to(tl.int32), 0)
            here = row + rank - 1
            tl.store(order + here, pair.to(tl.int64), mask=mine)
            tl.store(slots + pair, here.to(tl.int64), mask=mine)
            row += tl.max(rank, 0)


@triton.jit
def combine_kernel(outputs, slots, gates, out, columns, output_stride, K: tl.constexpr, COLUMNS: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros([COLUMNS], tl.float32)
    for j in tl.static_range(K):
        slot = tl.load(slots + token * K + j).to(tl.int64)
        gate = tl.load(gates + token * K + j)
        total += gate * tl.load(outputs + slot * output_stride + column, mask=column < columns, other=0.0).to(
            tl.float32
        )
    tl.store(out + token * columns + column, total.to(out.dtype.element_ty), mask=column < columns)


@torch.library.custom_op("cptools::route_experts", mutates_args=())
def route(logits: Tensor, bias: Tensor, k: int, normalise: bool, scaling: float) -> tuple[Tensor, Tensor]:
    tokens, number = logits.shape
    experts, gates = empty_choice(logits, k)
    if tokens:
        route_kernel[(triton.cdiv(tokens, _TOKENS),)](
            logits,
            bias,
            experts,
            gates,
            tokens,
            number,
            logits.stride(0),
            scaling,
            NORMALISE=normalise,
            K=k,
            KP=triton.next_power_of_2(k),
            EP=triton.next_power_of_2(number),
            TOKENS=_TOKENS,
            num_warps=4,
        )
    return experts, gates


@route.register_fake
def _(logits: Tensor, bias: Tensor, k: int, normalise: bool, scaling: float) -> tuple[Tensor, Tensor]:
    return empty_choice(logits, k)


def empty_choice(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    shape = (logits.shape[0], k)
    return logits.new_empty(shape, dtype=torch.int64), logits.new_empty(shape)


@torch.library.custom_op("cptools::group_by_expert", mutates_args=())
def group_by_expert(experts: Tensor, number: int) -> tuple[Tensor, Tensor, Tensor]:
    order, slots, counts = empty_groups(experts, number)
    group_kernel[(number,)](experts, order, slots, counts, experts.numel(), CHUNK=_CHUNK, num_warps=8)
    return order, slots, counts


@group_by_expert.register_fake
def _(experts: Tensor, number: int) -> tuple[Tensor, Tensor, Tensor]:
    return empty_groups(experts, number)


def empty_groups(experts: Tensor, number: int) -> tuple[Tensor, Tensor, Tensor]:
    return (
        experts.new_empty(experts.numel(), dtype=torch.int64),
        experts.new_empty(experts.shape, dtype=torch.int64),
        experts.new_empty(number, dtype=torch.int32),
    )


@torch.library.custom_op("cptools::combine_experts", mutates_args=())
def combine(outputs: Tensor, slots: Tensor, gates: Tensor) -> Tensor:
    tokens, k = slots.shape
    columns = outputs.shape[1]
    out = outputs.new_empty(tokens, columns)
    if tokens:
        combine_kernel[(tokens, triton.cdiv(columns, _COLUMNS))](
            outputs, slots, gates, out, columns, outputs.stride(0), K=k, COLUMNS=_COLUMNS, num_warps=4
        )
    return out


@combine.register_fake
def _(outputs: Tensor, slots: Tensor, gates: Tensor) -> Tensor:
    return outputs.new_empty(slots.shape[0], outputs.shape[1])


def compile_specs() -> list[CompileSpec]:
    def spec(name, kernel, pointers, integers, constexprs, warps, floats=(), stack=0):
        signature = dict(pointers) | dict.fromkeys(integers, "i32") | dict.fromkeys(floats, "fp32")
        signature = {n: signature.get(n, "constexpr") for n in kernel.arg_names}
        return CompileSpec(
            name=name,
            fn=kernel,
            signature=signature,
            constexprs=constexprs,
            num_warps=warps,
            max_spill_bytes=stack,
            divisible_by_16=tuple(pointers),
        )

    return [
        spec(
            "route_8_of_256",
            route_kernel,
            {"logits": "*fp32", "bias": "*fp32", "experts": "*i64", "gates": "*fp32"},
            ("tokens", "number", "logit_stride"),
            {"NORMALISE": True, "K": 8, "KP": 8, "EP": 256, "TOKENS": _TOKENS},
            4,
            ("scaling",),
            stack=8,  # exact division is a subroutine
        ),
        spec(
            "group_by_expert",
            group_kernel,
            {"experts": "*i64", "order": "*i64", "slots": "*i64", "counts": "*i32"},
            ("pairs",),
            {"CHUNK": _CHUNK},
            8,
        ),
        spec(
            "combine_8",
            combine_kernel,
            {"outputs": "*bf16", "slots": "*i64", "gates": "*fp32", "out": "*bf16"},
            ("columns", "output_stride"),
            {"K": 8, "COLUMNS": _COLUMNS},
            4,
        ),
    ]
