# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls
"""Candidate lists of the fused selection: started, offered scores, cut to the best, exactly, and decoded.

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
"""Keys that one program holds."""
CHUNK = 10240
"""Scores that a list is offered at once."""
SLACK = 512
"""How many more than k a cut may leave, unless it is the last."""
ROOMY = 4096
"""A list of more keys is cut before it is offered more."""
CAPACITY = ROOMY + CHUNK
"""Keys of a list: all that is offered may have to be taken."""
MAX_K = 2048
_WARPS = {SMALL: 8, LARGE: 16}
_REGISTERS = 128  # two programs of SMALL an SM
_PART = 2048
_TAKE_PART = 1024
_ROWS = 8  # lists of one program; most of them need nothing
_DECODE_BLOCK = 1024
_INVALID = tl.constexpr(INVALID)


@triton.jit
def score_of(keys):
    """float32 scores of keys: the inverse of `encode_order`."""
    ordered = (keys >> 32).to(tl.int32)
    return (ordered ^ ((ordered >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def order_keys(scores, positions):
    """int64 keys of scores and positions, as `encode_order` makes them."""
    bits = (scores + 0.0).to(tl.int32, bitcast=True)  # -0.0 + 0.0 is +0.0
    bits = tl.where(scores != scores, 0x7FC00000, bits)
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return (ordered.to(tl.int64) << 32) | (0xFFFFFFFF - positions.to(tl.int64))


@triton.jit
def take_kernel(scores, lens, lists, counts, thresholds, first, columns, scores_stride, capacity, PART: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    seen = tl.minimum(tl.load(lens + row).to(tl.int64) - first, columns).to(tl.int32)
    if seen > 0:
        count = tl.load(counts + row)
        threshold = tl.load(thresholds + row)
        scores_at = scores + row * scores_stride
        column = tl.arange(0, PART)
        score = tl.load(scores_at + column, mask=column < seen, other=0.0)
        done = 0
        while done < seen:
            following = tl.load(scores_at + column + PART, mask=column + PART < seen, other=0.0)
            refused = score <= threshold  # false for a NaN: it is taken, and as a threshold refuses nothing
            taken = tl.where(refused, 0, 1) * (column < seen).to(tl.int32)
            place = count + tl.cumsum(taken) - 1
            tl.store(lists + row * capacity + place, order_keys(score, first + column), mask=taken != 0)
            count += tl.sum(taken)
            score = following
            column += PART
            done += PART
        tl.store(counts + row, count)


@triton.jit
def start_kernel(positions, scores, lists, counts, thresholds, k, capacity, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    slot = tl.arange(0, BLOCK)
    position = tl.load(positions + row * k + slot, mask=slot < k, other=-1)
    score = tl.load(scores + row * k + slot, mask=slot < k, other=0.0)
    key = order_keys(score, position)
    valid = position >= 0
    count = tl.sum(valid.to(tl.int32))
    worst = tl.min(tl.where(valid, key, 0x7FFFFFFFFFFFFFFF))
    tl.store(lists + row * capacity + slot, key, mask=valid)
    tl.store(counts + row, count)
    tl.store(thresholds + row, tl.where(count == k, score_of(worst), float("nan")))


@triton.jit
def keep_row(
    row,
    count,
    lists,
    counts,
    thresholds,
    out,
    k,
    capacity,
    slack,
    BLOCK: tl.constexpr,
    PART: tl.constexpr,
    LAST: tl.constexpr,
):
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
def keep_kernel(
    lists,
    counts,
    thresholds,
    out,
    rows,
    k,
    above,
    capacity,
    slack,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    PART: tl.constexpr,
    LAST: tl.constexpr,
):
    row0 = tl.program_id(0) * ROWS
    mine = row0 + tl.arange(0, ROWS)
    sizes = tl.load(counts + mine, mask=mine < rows, other=-2)
    if tl.max(tl.where(sizes <= BLOCK, sizes, -2)) > above:
        for i in range(ROWS):
            count = tl.load(counts + row0 + i, mask=row0 + i < rows, other=-2)
            if (count > above) & (count <= BLOCK):
                keep_row(
                    (row0 + i).to(tl.int64), count, lists, counts, thresholds, out, k, capacity, slack,
                    BLOCK, PART, LAST,
                )  # fmt: skip


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
        keep_kernel[(triton.cdiv(lists.shape[0], _ROWS),)](
            lists,
            counts,
            thresholds,
            out,
            lists.shape[0],
            k,
            more_than,
            lists.stride(0),
            0 if last else SLACK,
            ROWS=_ROWS,
            BLOCK=block,
            PART=_PART,
            LAST=last,
            num_warps=_WARPS[block],
            maxnreg=_REGISTERS,
        )


def start(lists: Tensor, counts: Tensor, thresholds: Tensor, positions: Tensor, scores: Tensor) -> None:
    """Lists of the selected positions and scores [T, k], in any order, valid ones first (contiguous).

    The threshold of a full list is its worst score, that of another is NaN: it takes everything.
    """
    rows, k = positions.shape
    if rows:
        start_kernel[(rows,)](
            positions,
            scores,
            lists,
            counts,
            thresholds,
            k,
            lists.stride(0),
            BLOCK=triton.next_power_of_2(k),
            num_warps=4,
        )


def take(lists: Tensor, counts: Tensor, thresholds: Tensor, scores: Tensor, lens: Tensor, first: int) -> None:
    """Appends those of scores [T, columns], of positions from ``first`` on and before lens [T], above the threshold."""
    rows, columns = scores.shape
    if rows:
        take_kernel[(rows,)](
            scores,
            lens,
            lists,
            counts,
            thresholds,
            first,
            columns,
            scores.stride(0),
            lists.stride(0),
            PART=_TAKE_PART,
            num_warps=4,
        )


def keep(lists: Tensor, counts: Tensor, thresholds: Tensor, k: int, above: int) -> None:
    """Cuts lists [T, CAPACITY] whose counts [T] exceed ``above`` >= k + SLACK to the best k and at most SLACK more.

    A list that is cut moves its threshold [T] to the worst score that it keeps; only better scores can still matter.
    """
    if lists.shape[0]:
        _launch(lists, counts, thresholds, lists, k, above, False)


def best(lists: Tensor, counts: Tensor, out: Tensor) -> None:
    """The k best keys of each list, in any order, then INVALID, into out int64 [T, k] (contiguous)."""
    if lists.shape[0]:
        _launch(lists, counts, counts, out, out.shape[1], -1, True)


def decode(keys: Tensor) -> tuple[Tensor, Tensor]:
    """(positions int64, scores float32) of contiguous keys, -1 and -inf for INVALID."""
    positions, scores = torch.empty_like(keys), torch.empty_like(keys, dtype=torch.float32)
    if keys.numel():
        decode_kernel[(triton.cdiv(keys.numel(), _DECODE_BLOCK),)](
            keys, positions, scores, keys.numel(), BLOCK=_DECODE_BLOCK, num_warps=4
        )
    return positions, scores


def _keep_spec(block: int, last: bool) -> CompileSpec:
    return CompileSpec(
        name=f"indexer_keep_{block}{'_last' if last else ''}",
        fn=keep_kernel,
        signature={
            "lists": "*i64",
            "counts": "*i32",
            "thresholds": "*fp32",
            "out": "*i64",
            **dict.fromkeys(("rows", "k", "above", "capacity", "slack"), "i32"),
            **dict.fromkeys(("ROWS", "BLOCK", "PART", "LAST"), "constexpr"),
        },
        constexprs={"ROWS": _ROWS, "BLOCK": block, "PART": _PART, "LAST": last},
        num_warps=_WARPS[block],
        options={"maxnreg": _REGISTERS},
        max_spill_bytes=8,  # twice as many programs for it
        divisible_by_16=("lists", "out", "capacity", "k"),
    )


def compile_specs() -> list[CompileSpec]:
    return [
        *(_keep_spec(block, last) for block in (SMALL, LARGE) for last in (False, True)),
        CompileSpec(
            name="indexer_take",
            fn=take_kernel,
            signature={
                "scores": "*fp32",
                "lens": "*i64",
                "lists": "*i64",
                "counts": "*i32",
                "thresholds": "*fp32",
                **dict.fromkeys(("first", "columns", "scores_stride", "capacity"), "i32"),
                "PART": "constexpr",
            },
            constexprs={"PART": _TAKE_PART},
            divisible_by_16=("scores", "lists", "first", "columns", "scores_stride", "capacity"),
        ),
        CompileSpec(
            name="indexer_start",
            fn=start_kernel,
            signature={
                "positions": "*i32",
                "scores": "*fp32",
                "lists": "*i64",
                "counts": "*i32",
                "thresholds": "*fp32",
                "k": "i32",
                "capacity": "i32",
                "BLOCK": "constexpr",
            },
            constexprs={"BLOCK": 2048},
            divisible_by_16=("positions", "scores", "lists", "capacity", "k"),
        ),
        CompileSpec(
            name="indexer_decode",
            fn=decode_kernel,
            signature={"keys": "*i64", "positions": "*i64", "scores": "*fp32", "count": "i32", "BLOCK": "constexpr"},
            constexprs={"BLOCK": _DECODE_BLOCK},
            divisible_by_16=("keys", "positions", "scores"),
        ),
    ]
