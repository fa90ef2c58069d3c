# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls
"""Exact top-k of rows whose scores stand in groups of 16 beside the maximum of each.

A score of the maxima that k of them reach is one that k scores reach: a sample of the maxima proposes it, one pass
over the maxima lists the groups that hold such scores, and only these are read. Where a row is short, or more groups
qualify than the list holds (many equal scores), the row is streamed instead.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..compile_spec import CompileSpec
from ..relaunch import Relaunched
from .narrowing import CAPACITY, cut, sampled_order
from .order_keys import encode
from .results import SORTED_BY, store_best
from .shared_atomics import WARPS, claim, read_counter, set_counter, shared_base, store_where
from .streaming import TILE, bounds, stream_scores
from .triton import PROGRAMS_PER_SM, REGISTERS

GROUP = 16
SPAN = 512
"""Scores that are in an order of their own: columns of a row are padded to a multiple, with -inf."""

_GROUP = tl.constexpr(GROUP)
_SPAN = tl.constexpr(SPAN)
_TILE = tl.constexpr(TILE)
_TILE_GROUPS = tl.constexpr(TILE // GROUP)
_CAPACITY = tl.constexpr(CAPACITY)
_INVALID = tl.constexpr(-(2**63))
_ORDER_OF_MINUS_INF = tl.constexpr(-0x7F800001)
_ALL = tl.constexpr(53)
_OCTAVES = tl.constexpr(46)
_FEWEST_MAXIMA = tl.constexpr(4096)  # of a sample


@triton.jit
def position_of(place):
    """The column of the score that stands at this place of a row."""
    near = ((place >> 4) & 7) | ((place & 4) << 1) | ((place >> 3) & 0x30)
    return (place & -512) | near | ((place & 3) << 6) | ((place & 8) << 5)


@triton.jit
def _copy_row(buffer, row, length, padded):
    for start in tl.range(0, padded, _TILE):
        places = start + tl.arange(0, _TILE)
        scores = tl.load(row + places, mask=places < padded, other=0.0)
        positions = position_of(places)
        store_where(buffer + positions, encode(scores, positions), positions < length)
    tl.debug_barrier()


@triton.jit
def _read_groups(shared, buffer, groups, found, row, order, length, k):
    """Append the keys of the scores of this order and above in the groups listed: (their number, low, shift)."""
    set_counter(shared, 0)
    low, shift = bounds(order)
    floor = low - 1
    bound = 0
    start = 0
    while start < found:
        if bound + _TILE > _CAPACITY:
            bound = read_counter(shared)
            if bound + _TILE > _CAPACITY:
                low, floor = cut(shared, buffer, bound, k, low, shift)
                shift = tl.full((), _OCTAVES, tl.int32)
                bound = k
        slots = start + tl.arange(0, _TILE_GROUPS)
        listed = slots < found
        group = ~tl.load(groups + slots, mask=listed, other=-1).to(tl.int32)
        places = group[:, None] * _GROUP + tl.arange(0, _GROUP)[None, :]
        scores = tl.load(row + places, mask=listed[:, None], other=float("-inf"))
        positions = position_of(places)
        keys = encode(scores, positions)
        chosen = (keys > floor) & (positions < length) & listed[:, None]
        store_where(buffer + claim(shared, chosen), keys, chosen)
        bound += _TILE
        start += _TILE_GROUPS
    return read_counter(shared), low, shift


@triton.jit(do_not_specialize=["rows", "columns", "k"])
def select_grouped(
    source,
    maxima,
    lengths,
    workspace,
    out_positions,
    out_scores,
    rows,
    columns,
    row_stride,
    maxima_stride,
    k,
    SORTED: tl.constexpr,
):
    shared = shared_base()
    buffer = workspace + tl.program_id(0).to(tl.int64) * (2 * _CAPACITY)
    groups = buffer + _CAPACITY
    for index in tl.range(tl.program_id(0), rows, tl.num_programs(0)):
        row = source + index.to(tl.int64) * row_stride
        tops = maxima + index.to(tl.int64) * maxima_stride
        length = tl.minimum(tl.maximum(tl.load(lengths + index), 0), columns).to(tl.int32)
        padded = (length + (_SPAN - 1)) // _SPAN * _SPAN
        count = length
        low = tl.full((), _INVALID + 1, tl.int64)
        shift = tl.full((), _ALL, tl.int32)
        if length <= _CAPACITY:
            _copy_row(buffer, row, length, padded)
        else:
            wanted = tl.minimum(k, length)
            found = 0
            order = _ORDER_OF_MINUS_INF
            total = padded // _GROUP
            if total >= _FEWEST_MAXIMA:
                order = sampled_order(shared, tops, total, k, 1.0)
                found, _low, _shift = stream_scores(shared, groups, tops, 0, total, order, k, CUT=False)
            if (found >= wanted) & (found <= _CAPACITY) & (order > _ORDER_OF_MINUS_INF):
                count, low, shift = _read_groups(shared, buffer, groups, found, row, order, length, k)
            else:
                count = -1  # invalid keys count where every score passes, and then enough others do
                margin = 1.0
                while count < wanted:
                    order = sampled_order(shared, row, padded, k, margin)
                    count, low, shift = stream_scores(
                        shared, buffer, row, 0, padded, order, k, CUT=True, length=length, GROUPED=True
                    )
                    margin *= 4.0
        positions, chosen_scores = out_positions + index.to(tl.int64) * k, out_scores + index.to(tl.int64) * k
        store_best(shared, buffer, count, low, shift, k, positions, chosen_scores, False, SORTED)
        tl.debug_barrier()


def _compile_spec(sorted_by: str) -> CompileSpec:
    signature = {
        "source": "*fp32",
        "maxima": "*fp32",
        "lengths": "*i64",
        "workspace": "*i64",
        "out_positions": "*i64",
        "out_scores": "*fp32",
        **dict.fromkeys(("rows", "columns", "row_stride", "maxima_stride", "k"), "i32"),
        "SORTED": "constexpr",
    }
    return CompileSpec(
        f"topk_select_grouped_{sorted_by}",
        select_grouped,
        signature,
        {"SORTED": SORTED_BY.index(sorted_by)},
        num_warps=WARPS,
        num_stages=1,
        divisible_by_16=("source", "maxima", "workspace", "row_stride", "maxima_stride"),
        options={"maxnreg": REGISTERS},
        # Sorting spills, once a row; the loop over its scores does not.
        max_spill_bytes=200 if sorted_by != "none" else 0,
    )


def compile_specs() -> list[CompileSpec]:
    return [_compile_spec(order) for order in SORTED_BY]


class GroupedSelection:
    """`RowSelection` of scores in groups, beside their maxima."""

    def __init__(self, rows: int, columns: int, k: int, sorted_by: str, device: torch.device) -> None:
        processors = torch.cuda.get_device_properties(device).multi_processor_count
        self._k, self._columns = k, columns
        self._programs = min(rows, PROGRAMS_PER_SM * processors)
        self._buffers = torch.empty(2 * self._programs * CAPACITY, dtype=torch.int64, device=device)
        constants = {"SORTED": SORTED_BY.index(sorted_by)}
        self._select = Relaunched(select_grouped, constants, num_warps=WARPS, num_stages=1, maxnreg=REGISTERS)

    def __call__(
        self,
        stream: torch.cuda.Stream,
        positions: Tensor,
        chosen: Tensor,
        scores: Tensor,
        maxima: Tensor,
        lengths: Tensor,
    ) -> None:
        """scores [T, padded columns], maxima [T, padded columns / 16] -> contiguous positions and chosen [T, k]."""
        rows = scores.shape[0]
        self._select(
            stream, (min(rows, self._programs), 1, 1),
            scores, maxima, lengths, self._buffers, positions, chosen,
            rows, self._columns, scores.stride(0), maxima.stride(0), self._k,
        )  # fmt: skip
