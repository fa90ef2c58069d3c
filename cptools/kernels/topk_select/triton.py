"""Exact top-k on CUDA: a sampled threshold, one pass that keeps what may be chosen, exact selection among that.

A program draws a jittered sample of its row and finds, by histograms in shared memory, a score that a little more
than k of the row's scores should reach. It then streams the row once and appends the keys of those scores to a buffer
in L2. When the buffer is nearly full, it is cut to its exact k best and the threshold rises to their worst, so any
distribution fits; when the sample promised too much (about one row in 10^5), the row is streamed again with a lower
threshold. The exact selection narrows an interval of keys by histograms until the rest of it is wanted whole. All
keys differ, so ties need no case of their own.

Few rows are split over programs that keep survivors in segments; a second kernel joins and selects.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..compile_spec import CompileSpec
from ..relaunch import Relaunched
from .narrowing import CAPACITY, sampled_order
from .results import SORTED_BY, store_best
from .shared_atomics import WARPS, shared_base
from .streaming import TILE, bounds, copy_scores, stream_keys, stream_scores

JOIN_SIZES = (8, 32, 128)
MAX_CHUNKS = JOIN_SIZES[-1]
PROGRAMS_PER_SM = 2
REGISTERS = 64
"""A thread, so that so many programs fit; where one a processor will do, it has twice as many."""

_TILE = tl.constexpr(TILE)
_CAPACITY = tl.constexpr(CAPACITY)
_INVALID = tl.constexpr(-(2**63))
_NO_ORDER = tl.constexpr(-(2**31))
_ALL = tl.constexpr(53)


@triton.jit
def _join(buffer, segments, counts, chunks, segment_stride, PARTS: tl.constexpr):
    """Copy a row's segments to the buffer; gives the number of keys, above CAPACITY if they are not all there."""
    parts = tl.arange(0, PARTS)
    found = tl.load(counts + parts, mask=parts < chunks, other=0)
    total = tl.sum(found)
    most = tl.max(found)
    if (most <= _CAPACITY) & (total <= _CAPACITY):
        offsets = (tl.cumsum(found) - found)[:, None]
        for start in tl.range(0, most, _TILE // PARTS):
            columns = start + tl.arange(0, _TILE // PARTS)[None, :]
            there = columns < found[:, None]
            keys = tl.load(segments + parts.to(tl.int64)[:, None] * segment_stride + columns, mask=there)
            tl.store(buffer + offsets + columns, keys, mask=there)
        tl.debug_barrier()
    else:
        total = 2 * _CAPACITY
    return total


@triton.jit
def _length(lengths, row, columns, HAS_LENGTHS: tl.constexpr):
    length = columns
    if HAS_LENGTHS:
        length = tl.minimum(tl.maximum(tl.load(lengths + row), 0), columns).to(tl.int32)
    return length


@triton.jit(do_not_specialize=["columns", "k", "chunk"])
def _split_rows(
    scores, lengths, segments, counts, columns, row_stride, k, chunk, segment_stride, HAS_LENGTHS: tl.constexpr
):
    """Keep what one of a row's chunks may give; counts [rows, chunks + 1], the last the order that all kept."""
    part, index = tl.program_id(0), tl.program_id(1)
    chunks = tl.num_programs(0)
    shared = shared_base()
    row = scores + index.to(tl.int64) * row_stride
    length = _length(lengths, index, columns, HAS_LENGTHS)
    segment = index.to(tl.int64) * chunks + part
    start = part * chunk
    stop = tl.minimum(start + chunk, length)
    count = 0
    if (start < stop) & (length > _CAPACITY):
        order = sampled_order(shared, row, length, k, 1.0)
        kept = segments + segment * segment_stride
        count, _low, _shift = stream_scores(shared, kept, row, start, stop, order, k, CUT=False)
        if part == 0:
            tl.store(counts + segment + index + chunks, order)
    tl.store(counts + segment + index, count)


@triton.jit(do_not_specialize=["rows", "columns", "k", "chunks"])
def _select_rows(
    source,
    lengths,
    segments,
    counts,
    workspace,
    out_positions,
    out_scores,
    rows,
    columns,
    row_stride,
    k,
    chunks,
    segment_stride,
    HAS_LENGTHS: tl.constexpr,
    KEYS: tl.constexpr,
    PARTS: tl.constexpr,
    SORTED: tl.constexpr,
):
    """KEYS: the source holds keys, and so does the output. PARTS: power of two of at least `chunks`."""
    shared = shared_base()
    buffer = workspace + tl.program_id(0).to(tl.int64) * _CAPACITY
    for index in tl.range(tl.program_id(0), rows, tl.num_programs(0)):
        row = source + index.to(tl.int64) * row_stride
        length = _length(lengths, index, columns, HAS_LENGTHS)
        if KEYS:
            count, low, shift = stream_keys(shared, buffer, row, length, k)
        else:
            count = tl.full((), 2 * _CAPACITY, tl.int32)
            low = tl.full((), _INVALID + 1, tl.int64)
            shift = tl.full((), _ALL, tl.int32)
            if PARTS > 1 and length > _CAPACITY:
                row_counts = counts + index.to(tl.int64) * (chunks + 1)
                row_segments = segments + index.to(tl.int64) * chunks * segment_stride
                count = _join(buffer, row_segments, row_counts, chunks, segment_stride, PARTS)
                low, shift = bounds(tl.load(row_counts + chunks))
            wanted = tl.minimum(k, length)
            if length <= _CAPACITY:
                count, low, shift = copy_scores(buffer, row, length)
            elif (count > _CAPACITY) | (count < wanted):
                count = -1
                margin = 1.0
                while count < wanted:
                    order = sampled_order(shared, row, length, k, margin)
                    count, low, shift = stream_scores(shared, buffer, row, 0, length, order, k, CUT=True)
                    margin *= 4.0
        positions, chosen_scores = out_positions + index.to(tl.int64) * k, out_scores + index.to(tl.int64) * k
        store_best(shared, buffer, count, low, shift, k, positions, chosen_scores, KEYS, SORTED)
        tl.debug_barrier()


def _compile_spec(name: str, *, keys: bool = False, parts: int = 1, sorted_by: str, registers: int) -> CompileSpec:
    source = "*i64" if keys else "*fp32"
    signature = {
        "source": source,
        "lengths": "*i64",
        "segments": "*i64",
        "counts": "*i32",
        "workspace": "*i64",
        "out_positions": "*i64",
        "out_scores": "*fp32",
        **dict.fromkeys(("rows", "columns", "row_stride", "k", "chunks", "segment_stride"), "i32"),
        **dict.fromkeys(("HAS_LENGTHS", "KEYS", "PARTS", "SORTED"), "constexpr"),
    }
    return CompileSpec(
        name,
        _select_rows,
        signature,
        {"HAS_LENGTHS": not keys, "KEYS": keys, "PARTS": parts, "SORTED": SORTED_BY.index(sorted_by)},
        num_warps=WARPS,
        num_stages=1,
        divisible_by_16=("source", "segments", "workspace", "row_stride", "segment_stride"),
        options={"maxnreg": registers},
        # Sorting spills, once a row; the loop over its scores does not.
        max_spill_bytes=200 if sorted_by != "none" else 0,
    )


def compile_specs() -> list[CompileSpec]:
    signature = {
        "scores": "*fp32",
        "lengths": "*i64",
        "segments": "*i64",
        "counts": "*i32",
        **dict.fromkeys(("columns", "row_stride", "k", "chunk", "segment_stride"), "i32"),
        "HAS_LENGTHS": "constexpr",
    }
    split = CompileSpec(
        "topk_select_split",
        _split_rows,
        signature,
        {"HAS_LENGTHS": True},
        num_warps=WARPS,
        num_stages=1,
        divisible_by_16=("scores", "segments", "row_stride", "segment_stride"),
        options={"maxnreg": REGISTERS},
    )
    few = 2 * REGISTERS
    return [
        split,
        *(_compile_spec(f"topk_select_join_{p}", parts=p, sorted_by="none", registers=few) for p in JOIN_SIZES),
        _compile_spec("topk_select_join_sorted", parts=32, sorted_by="score", registers=few),
        _compile_spec("topk_select_rows", sorted_by="none", registers=REGISTERS),
        _compile_spec("topk_select_rows_by_position", sorted_by="position", registers=REGISTERS),
        _compile_spec("topk_select_rows_sorted", sorted_by="score", registers=REGISTERS),
        _compile_spec("merge_orders", keys=True, sorted_by="score", registers=few),
        _compile_spec("merge_orders_of_many", keys=True, sorted_by="score", registers=REGISTERS),
    ]


def chunks_of(rows: int, columns: int, processors: int) -> int:
    """Programs that a row is split over: as many as there are processors for, none with less than a tile.

    Joining costs a second kernel, so rows stay whole where that gains little.
    """
    wanted = min(processors // max(rows, 1), MAX_CHUNKS)
    tiles = -(-columns // TILE)
    if tiles < 16 or wanted < (4 if tiles < 64 else 2):
        return 1
    return min(wanted, tiles)


def registers_of(programs: int, processors: int) -> int:
    return REGISTERS if programs > processors else 2 * REGISTERS


def parts_of(chunks: int) -> int:
    """Pieces that the joining kernel reads side by side."""
    return 1 if chunks == 1 else next(parts for parts in JOIN_SIZES if chunks <= parts)


class RowSelection:
    """`topk_select` of up to so many rows at a time, on a stream of the current device and into results given.

    What it needs beside them it keeps, so that its launches must follow one another.
    """

    def __init__(
        self,
        rows: int,
        columns: int,
        k: int,
        sorted_by: str,
        device: torch.device,
        *,
        lengths: bool,
    ) -> None:
        processors = torch.cuda.get_device_properties(device).multi_processor_count
        self._k, self._columns = k, columns
        self._chunk = triton.cdiv(triton.cdiv(columns, chunks_of(rows, columns, processors)), TILE) * TILE
        self._chunks = triton.cdiv(columns, self._chunk)
        self._programs = min(rows, PROGRAMS_PER_SM * processors)
        self._buffers = torch.empty(self._programs * CAPACITY, dtype=torch.int64, device=device)
        self._segments, self._counts, self._segment_stride = self._buffers, self._buffers, 0
        if self._chunks > 1:
            self._segment_stride = min(self._chunk, CAPACITY)
            kept = rows * self._chunks * self._segment_stride
            self._segments = torch.empty(kept, dtype=torch.int64, device=device)
            self._counts = torch.empty(rows * (self._chunks + 1), dtype=torch.int32, device=device)
        self._split = Relaunched(
            _split_rows, {"HAS_LENGTHS": lengths}, num_warps=WARPS, num_stages=1, maxnreg=REGISTERS
        )
        constants = {
            "HAS_LENGTHS": lengths,
            "KEYS": False,
            "PARTS": parts_of(self._chunks),
            "SORTED": SORTED_BY.index(sorted_by),
        }
        maxnreg = registers_of(self._programs, processors)
        self._select = Relaunched(_select_rows, constants, num_warps=WARPS, num_stages=1, maxnreg=maxnreg)

    def __call__(
        self, stream: torch.cuda.Stream, positions: Tensor, chosen: Tensor, scores: Tensor, lengths: Tensor | None
    ) -> None:
        """scores [T, columns] -> contiguous positions and chosen [T, k]."""
        rows, row_stride, kept = scores.shape[0], scores.stride(0), (self._segments, self._counts)
        if self._chunks > 1:
            self._split(
                stream, (self._chunks, rows, 1),
                scores, lengths, *kept, self._columns, row_stride, self._k, self._chunk, self._segment_stride,
            )  # fmt: skip
        self._select(
            stream, (min(rows, self._programs), 1, 1),
            scores, lengths, *kept, self._buffers, positions, chosen,
            rows, self._columns, row_stride, self._k, self._chunks, self._segment_stride,
        )  # fmt: skip


@torch.library.custom_op("cptools::topk_select", mutates_args=())
def topk_select(
    scores: Tensor, k: int, lengths: Tensor | None, sorted_by: str, positions_dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """`topk_select` of the reference for CUDA tensors, k <= MAX_K and rows of adjacent scores."""
    rows, columns = scores.shape
    positions = torch.empty(rows, k, dtype=positions_dtype, device=scores.device)
    chosen = torch.empty(rows, k, dtype=torch.float32, device=scores.device)
    if 0 in scores.shape:
        return positions.fill_(-1), chosen.fill_(-torch.inf)
    with torch.cuda.device(scores.device):
        select = RowSelection(rows, columns, k, sorted_by, scores.device, lengths=lengths is not None)
        select(torch.cuda.current_stream(), positions, chosen, scores, lengths)
    return positions, chosen


@topk_select.register_fake
def _(scores: Tensor, k: int, lengths: Tensor | None, sorted_by: str, positions_dtype: torch.dtype):
    rows = scores.shape[0]
    return scores.new_empty((rows, k), dtype=positions_dtype), scores.new_empty((rows, k))


@torch.library.custom_op("cptools::merge_orders", mutates_args=())
def merge_orders(keys: Tensor, k: int) -> Tensor:
    """`merge_orders` of the reference for CUDA tensors, k <= MAX_K and rows of adjacent keys."""
    rows, columns = keys.shape
    merged = torch.empty(rows, k, dtype=torch.int64, device=keys.device)
    if 0 in keys.shape:
        return merged.fill_(_INVALID.value)
    processors = torch.cuda.get_device_properties(keys.device).multi_processor_count
    programs = min(rows, PROGRAMS_PER_SM * processors)
    workspace = torch.empty(programs * CAPACITY, dtype=torch.int64, device=keys.device)
    with torch.cuda.device(keys.device):
        _select_rows[(programs,)](
            keys, None, workspace, workspace, workspace, merged, merged,
            rows, columns, keys.stride(0), k, 1, 0,
            HAS_LENGTHS=False, KEYS=True, PARTS=1, SORTED=1,
            num_warps=WARPS, num_stages=1, maxnreg=registers_of(programs, processors),
        )  # fmt: skip
    return merged


@merge_orders.register_fake
def _(keys: Tensor, k: int) -> Tensor:
    return keys.new_empty((keys.shape[0], k))
