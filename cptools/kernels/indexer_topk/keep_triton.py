# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls
"""Candidate lists of the fused selection: cut to the best, exactly, and decoded.

A list holds int64 keys in the total order of `topk_select`, all different, in any order. Between chunks a list is only
cut when it is long, and to about k: a bound with at least k keys above it is all that is needed to refuse later keys.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..compile_spec import CompileSpec
from ..topk_select import INVALID

SMALL, LARGE = 8192, 16384
"""Keys that one program holds; the second is the capacity of a list."""
SLACK = 512
"""How many more than k a cut may leave, unless it is the last."""
ROOMY = 4096
"""A list of more keys is cut before it takes more."""
MAX_K = ROOMY - SLACK
_WARPS = {SMALL: 8, LARGE: 16}
_PART = 2048
_DECODE_BLOCK = 1024
_INVALID = tl.constexpr(INVALID)


@triton.jit
def score_of(keys):
    """float32 scores of keys: the inverse of `encode_order`."""
    ordered = (keys >> 32).to(tl.int32)
    return (ordered ^ ((ordered >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def keep_kernel(
    lists,
    counts,
    thresholds,
    out,
    k,
    above,
    capacity,
    slack,
    BLOCK: tl.constexpr,
    PART: tl.constexpr,
    LAST: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    count = tl.load(counts + row)
    if (count > above) & (count <= BLOCK):
        slot = tl.arange(0, BLOCK)
        keys = tl.load(lists + row * capacity + slot, mask=slot < count, other=_INVALID)
        # At least k keys reach `low`, fewer than k exceed `high`.
        low = tl.min(tl.where(keys == _INVALID, 0x7FFFFFFFFFFFFFFF, keys))
        high = tl.max(keys)
        kept = count
        while kept > k + slack:
            middle = (low | high) - ((low ^ high) >> 1)  # rounded up, without overflow
            reached = tl.sum((keys >= middle).to(tl.int32))
            enough = reached >= k
            low = tl.where(enough, middle, low)
            high = tl.where(enough, high, middle - 1)
            kept = tl.where(enough, reached, kept)
        # Read once more, a part at a time, which needs fewer registers. Nothing moves up, so the list shrinks in place.
        worst = high
        done = 0
        first = 0
        while first < count:
            at = first + tl.arange(0, PART)
            part = tl.load(lists + row * capacity + at, mask=at < count, other=_INVALID)
            stays = part >= low
            place = done + tl.cumsum(stays.to(tl.int32)) - 1
            done += tl.sum(stays.to(tl.int32))
            worst = tl.minimum(worst, tl.min(tl.where(stays, part, high)))
            first += PART
            if LAST:
                tl.store(out + row * k + place, part, mask=stays)
            else:
                tl.store(lists + row * capacity + place, part, mask=stays)
        if LAST:
            first = kept
            while first < k:
                at = first + tl.arange(0, PART)
                tl.store(out + row * k + at, tl.full([PART], _INVALID, tl.int64), mask=at < k)
                first += PART
        else:
            tl.store(counts + row, kept)
            # Later keys of this score stand behind all that are kept.
            tl.store(thresholds + row, score_of(worst))


@triton.jit
def decode_kernel(keys, positions, scores, count, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    key = tl.load(keys + at, mask=at < count, other=_INVALID)
    valid = key != _INVALID
    position = 0xFFFFFFFF - (key & 0xFFFFFFFF)
    tl.store(positions + at, tl.where(valid, position, -1), mask=at < count)
    tl.store(scores + at, tl.where(valid, score_of(key), -float("inf")), mask=at < count)


def _launch(lists: Tensor, counts: Tensor, thresholds: Tensor, out: Tensor, k: int, above: int, last: bool) -> None:
    for block, more_than in ((SMALL, above), (LARGE, SMALL)):
        keep_kernel[(lists.shape[0],)](
            lists,
            counts,
            thresholds,
            out,
            k,
            more_than,
            lists.stride(0),
            0 if last else SLACK,
            BLOCK=block,
            PART=_PART,
            LAST=last,
            num_warps=_WARPS[block],
        )


@torch.library.custom_op("cptools::indexer_keep_triton", mutates_args=("lists", "counts", "thresholds"))
def keep(lists: Tensor, counts: Tensor, thresholds: Tensor, k: int, above: int) -> None:
    """Cuts lists [T, LARGE] whose counts [T] exceed ``above`` >= k + SLACK to the best k and at most SLACK more.

    A list that is cut moves its threshold [T] to the worst score that it keeps; only better scores can still matter.
    """
    if lists.shape[0]:
        _launch(lists, counts, thresholds, lists, k, above, False)


@keep.register_fake
def _(lists: Tensor, counts: Tensor, thresholds: Tensor, k: int, above: int) -> None:
    return None


@torch.library.custom_op("cptools::indexer_best_triton", mutates_args=())
def best(lists: Tensor, counts: Tensor, k: int) -> Tensor:
    """The k best keys of each list, in any order, then INVALID: int64 [T, k]."""
    out = torch.empty(lists.shape[0], k, dtype=torch.int64, device=lists.device)
    if lists.shape[0]:
        _launch(lists, counts, counts, out, k, -1, True)
    return out


@best.register_fake
def _(lists: Tensor, counts: Tensor, k: int) -> Tensor:
    return lists.new_empty(lists.shape[0], k)


@torch.library.custom_op("cptools::indexer_decode_triton", mutates_args=())
def decode(keys: Tensor) -> tuple[Tensor, Tensor]:
    """(positions int64, scores float32) of contiguous keys, -1 and -inf for INVALID."""
    positions, scores = torch.empty_like(keys), torch.empty_like(keys, dtype=torch.float32)
    if keys.numel():
        decode_kernel[(triton.cdiv(keys.numel(), _DECODE_BLOCK),)](
            keys, positions, scores, keys.numel(), BLOCK=_DECODE_BLOCK, num_warps=4
        )
    return positions, scores


@decode.register_fake
def _(keys: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(keys), torch.empty_like(keys, dtype=torch.float32)


def _keep_spec(block: int, last: bool) -> CompileSpec:
    return CompileSpec(
        name=f"indexer_keep_{block}{'_last' if last else ''}",
        fn=keep_kernel,
        signature={
            "lists": "*i64",
            "counts": "*i32",
            "thresholds": "*fp32",
            "out": "*i64",
            **dict.fromkeys(("k", "above", "capacity", "slack"), "i32"),
            **dict.fromkeys(("BLOCK", "PART", "LAST"), "constexpr"),
        },
        constexprs={"BLOCK": block, "PART": _PART, "LAST": last},
        num_warps=_WARPS[block],
        divisible_by_16=("lists", "out", "capacity", "k"),
    )


def compile_specs() -> list[CompileSpec]:
    return [
        *(_keep_spec(block, last) for block in (SMALL, LARGE) for last in (False, True)),
        CompileSpec(
            name="indexer_decode",
            fn=decode_kernel,
            signature={"keys": "*i64", "positions": "*i64", "scores": "*fp32", "count": "i32", "BLOCK": "constexpr"},
            constexprs={"BLOCK": _DECODE_BLOCK},
            divisible_by_16=("keys", "positions", "scores"),
        ),
    ]
