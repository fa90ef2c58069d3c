"""Exact top-k on CUDA: a sampled threshold, one pass that keeps what may be chosen, exact selection among that.

A program draws a jittered sample of its row and finds, by histograms in shared memory, a score that a little more
than k of the row's scores should reach. It then streams the row once and appends the keys of those scores to a buffer
in L2. When the buffer is nearly full, it is cut to its exact k best and the threshold rises to their worst, so any
distribution fits; when the sample promised too much (about one row in 10^6), the row is streamed once more without a
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
from .narrowing import CAPACITY, MAX_K, keep_best, sampled_threshold
from .order_keys import encode, score_of
from .shared_atomics import (
    claim,
    read_counter,
    set_counter,
    shared_base,
    shared_load,
    shared_store,
    store_where,
)

WARPS = 16
TILE = 4096
"""Scores that a program reads at a time."""
MAX_CHUNKS = 1024
PROGRAMS_PER_SM = 2

_TILE = tl.constexpr(TILE)
_CAPACITY = tl.constexpr(CAPACITY)
_MAX_CHUNKS = tl.constexpr(MAX_CHUNKS)
_INVALID = tl.constexpr(-(2**63))


@triton.jit
def _append(shared, buffer, scores, positions, flag):
    slots = claim(shared, flag)
    store_where(buffer + slots, encode(scores, positions), flag)


@triton.jit
def _load_tile(source, start, stop, OTHER: tl.constexpr):
    offsets = start // _TILE * _TILE + tl.arange(0, _TILE)  # the same, said so that loads can be wide
    if start + _TILE <= stop:
        tile = tl.load(source + offsets)
    else:
        tile = tl.load(source + offsets, mask=offsets < stop, other=OTHER)
    return tile


@triton.jit
def _stream_scores(shared, buffer, row, start, stop, threshold, k, CUT: tl.constexpr):
    """Append the keys of scores above the threshold (or NaN; all if it is NaN) to the buffer; gives their number.

    Where the buffer fills up, it is cut to the k best (CUT), or the rest is skipped and the number exceeds CAPACITY.
    """
    set_counter(shared, 0)
    start = tl.zeros((), tl.int32) + start
    bound = 0
    tile = _load_tile(row, start, stop, 0.0)
    while start < stop:
        if bound + _TILE > _CAPACITY:
            bound = read_counter(shared)
            if bound + _TILE > _CAPACITY:
                if CUT:
                    worst = keep_best(shared, buffer, bound, k)
                    threshold = score_of((worst >> 32).to(tl.int32))  # equal scores further on lose
                    bound = k
                else:
                    bound = 2 * _CAPACITY
                    start = stop
        if start < stop:
            positions = start + tl.arange(0, _TILE)
            following = _load_tile(row, start + _TILE, stop, 0.0)
            _append(shared, buffer, tile, positions, ~(tile <= threshold) & (positions < stop))
            tile = following
            bound += _TILE
            start += _TILE
    count = read_counter(shared)
    return tl.where(bound > _CAPACITY, bound, count)


@triton.jit
def _stream_keys(shared, buffer, row, stop, k):
    """`_stream_scores` for keys, from no threshold on."""
    set_counter(shared, 0)
    bound = 0
    start = 0
    threshold = tl.full((), _INVALID, tl.int64)
    while start < stop:
        if bound + _TILE > _CAPACITY:
            bound = read_counter(shared)
            if bound + _TILE > _CAPACITY:
                threshold = keep_best(shared, buffer, bound, k)
                bound = k
        keys = _load_tile(row, start, stop, _INVALID)
        flag = keys > threshold
        slots = claim(shared, flag)
        store_where(buffer + slots, keys, flag)
        bound += _TILE
        start += _TILE
    return read_counter(shared)


@triton.jit
def _join(shared, buffer, segments, counts, chunks, segment_stride):
    """Copy a row's segments to the buffer; gives the number of keys, above CAPACITY if they are not all there."""
    chunk_ids = tl.arange(0, _MAX_CHUNKS)
    found = tl.load(counts + chunk_ids, mask=chunk_ids < chunks, other=0)
    total = tl.sum(found)
    if tl.max(found) <= _CAPACITY and total <= _CAPACITY:
        shared_store(shared + 4 * chunk_ids, tl.cumsum(found) - found)
        tl.debug_barrier()
        slots = tl.arange(0, _CAPACITY)
        chunk = tl.zeros_like(slots)
        step = _MAX_CHUNKS // 2
        while step > 0:  # the last chunk that starts at or before the slot
            chunk += tl.where(shared_load(shared + 4 * (chunk + step)) <= slots, step, 0)
            step //= 2
        places = slots - shared_load(shared + 4 * chunk)
        keys = tl.load(segments + chunk.to(tl.int64) * segment_stride + places, mask=slots < total)
        tl.store(buffer + slots, keys, mask=slots < total)
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
    part, index = tl.program_id(0), tl.program_id(1)
    shared = shared_base()
    row = scores + index.to(tl.int64) * row_stride
    length = _length(lengths, index, columns, HAS_LENGTHS)
    segment = index.to(tl.int64) * tl.num_programs(0) + part
    start = part * chunk
    stop = tl.minimum(start + chunk, length)
    count = 0
    if start < stop:
        threshold = float("nan")
        if length > _CAPACITY:
            threshold = sampled_threshold(shared, row, length, k)
        count = _stream_scores(shared, segments + segment * segment_stride, row, start, stop, threshold, k, CUT=False)
    tl.store(counts + segment, count)


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
    SPLIT: tl.constexpr,
    SORTED: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """KEYS: the source holds keys, and so does the output. WIDTH: power of two that holds k."""
    shared = shared_base()
    buffer = workspace + tl.program_id(0).to(tl.int64) * _CAPACITY
    for index in tl.range(tl.program_id(0), rows, tl.num_programs(0)):
        row = source + index.to(tl.int64) * row_stride
        length = _length(lengths, index, columns, HAS_LENGTHS)
        if KEYS:
            count = _stream_keys(shared, buffer, row, length, k)
        else:
            count = 2 * _CAPACITY
            if SPLIT:
                first = index.to(tl.int64) * chunks
                count = _join(shared, buffer, segments + first * segment_stride, counts + first, chunks, segment_stride)
            wanted = tl.minimum(k, length)
            if (count > _CAPACITY) | (count < wanted):
                threshold = float("nan")
                if length > _CAPACITY:
                    threshold = sampled_threshold(shared, row, length, k)
                count = -1
                while count < wanted:
                    count = _stream_scores(shared, buffer, row, 0, length, threshold, k, CUT=True)
                    threshold = float("nan")
        if count > k:
            keep_best(shared, buffer, count, k)
        slots = tl.arange(0, WIDTH)
        keys = tl.load(buffer + slots, mask=slots < tl.minimum(count, k), other=_INVALID)
        if SORTED:
            keys = tl.sort(keys, descending=True)
        places = index.to(tl.int64) * k + slots
        if KEYS:
            tl.store(out_positions + places, keys, mask=slots < k)
        else:
            valid = keys != _INVALID
            positions = tl.where(valid, (~keys) & 0xFFFFFFFF, -1)
            tl.store(out_positions + places, positions.to(out_positions.dtype.element_ty), mask=slots < k)
            scores = tl.where(valid, score_of((keys >> 32).to(tl.int32)), float("-inf"))
            tl.store(out_scores + places, scores, mask=slots < k)
        tl.debug_barrier()


def _compile_spec(name: str, *, keys: bool = False, split: bool, in_order: bool, width: int) -> CompileSpec:
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
        **dict.fromkeys(("HAS_LENGTHS", "KEYS", "SPLIT", "SORTED", "WIDTH"), "constexpr"),
    }
    constexprs = {"HAS_LENGTHS": not keys, "KEYS": keys, "SPLIT": split, "SORTED": in_order, "WIDTH": width}
    aligned = ("source", "segments", "workspace", "row_stride", "segment_stride")
    # The exact selection holds the whole buffer in registers; the loop over the row's scores does not spill.
    return CompileSpec(
        name, _select_rows, signature, constexprs, num_warps=WARPS, divisible_by_16=aligned, max_spill_bytes=32
    )


def compile_specs() -> list[CompileSpec]:
    split = CompileSpec(
        "topk_select_split",
        _split_rows,
        {
            "scores": "*fp32",
            "lengths": "*i64",
            "segments": "*i64",
            "counts": "*i32",
            **dict.fromkeys(("columns", "row_stride", "k", "chunk", "segment_stride"), "i32"),
            "HAS_LENGTHS": "constexpr",
        },
        {"HAS_LENGTHS": True},
        num_warps=WARPS,
        divisible_by_16=("scores", "segments", "row_stride", "segment_stride"),
    )
    return [
        split,
        _compile_spec("topk_select_join", split=True, in_order=False, width=2048),
        _compile_spec("topk_select_rows", split=False, in_order=False, width=2048),
        _compile_spec("topk_select_rows_sorted", split=False, in_order=True, width=2048),
        _compile_spec("merge_orders", keys=True, split=False, in_order=True, width=2048),
    ]


def width_of(k: int) -> int:
    return 512 if k <= 512 else MAX_K


def chunks_of(rows: int, columns: int, processors: int) -> int:
    """Programs a row is split over: enough to fill the GPU, none with less than a tile."""
    wanted = -(-PROGRAMS_PER_SM * processors // max(rows, 1))
    if wanted < 2 * PROGRAMS_PER_SM or columns <= CAPACITY:
        return 1
    return min(wanted, -(-columns // TILE), MAX_CHUNKS)


@torch.library.custom_op("cptools::topk_select", mutates_args=())
def topk_select(
    scores: Tensor, k: int, lengths: Tensor | None, in_order: bool, positions_dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """`topk_select` of the reference for CUDA tensors, k <= MAX_K and rows of adjacent scores."""
    rows, columns = scores.shape
    positions = torch.empty(rows, k, dtype=positions_dtype, device=scores.device)
    chosen = torch.empty(rows, k, dtype=torch.float32, device=scores.device)
    if rows == 0:
        return positions, chosen
    processors = torch.cuda.get_device_properties(scores.device).multi_processor_count
    chunks = chunks_of(rows, columns, processors)
    programs = min(rows, PROGRAMS_PER_SM * processors)
    workspace = torch.empty(programs * CAPACITY, dtype=torch.int64, device=scores.device)
    segments, counts, segment_stride = workspace, workspace, 0
    with torch.cuda.device(scores.device):
        if chunks > 1:
            chunk = triton.cdiv(triton.cdiv(columns, chunks), TILE) * TILE
            chunks = triton.cdiv(columns, chunk)
            segment_stride = min(chunk, CAPACITY)
            segments = torch.empty(rows * chunks * segment_stride, dtype=torch.int64, device=scores.device)
            counts = torch.empty(rows * chunks, dtype=torch.int32, device=scores.device)
            _split_rows[(chunks, rows)](
                scores, lengths, segments, counts, columns, scores.stride(0), k, chunk, segment_stride,
                HAS_LENGTHS=lengths is not None, num_warps=WARPS,
            )  # fmt: skip
        _select_rows[(programs,)](
            scores, lengths, segments, counts, workspace, positions, chosen,
            rows, columns, scores.stride(0), k, chunks, segment_stride,
            HAS_LENGTHS=lengths is not None, KEYS=False, SPLIT=chunks > 1, SORTED=in_order, WIDTH=width_of(k),
            num_warps=WARPS,
        )  # fmt: skip
    return positions, chosen


@topk_select.register_fake
def _(scores: Tensor, k: int, lengths: Tensor | None, in_order: bool, positions_dtype: torch.dtype):
    rows = scores.shape[0]
    return scores.new_empty((rows, k), dtype=positions_dtype), scores.new_empty((rows, k))


@torch.library.custom_op("cptools::merge_orders", mutates_args=())
def merge_orders(keys: Tensor, k: int) -> Tensor:
    """`merge_orders` of the reference for CUDA tensors, k <= MAX_K and rows of adjacent keys."""
    rows, columns = keys.shape
    merged = torch.empty(rows, k, dtype=torch.int64, device=keys.device)
    if rows == 0:
        return merged
    processors = torch.cuda.get_device_properties(keys.device).multi_processor_count
    programs = min(rows, PROGRAMS_PER_SM * processors)
    workspace = torch.empty(programs * CAPACITY, dtype=torch.int64, device=keys.device)
    with torch.cuda.device(keys.device):
        _select_rows[(programs,)](
            keys, None, workspace, workspace, workspace, merged, merged,
            rows, columns, keys.stride(0), k, 1, 0,
            HAS_LENGTHS=False, KEYS=True, SPLIT=False, SORTED=True, WIDTH=width_of(k), num_warps=WARPS,
        )  # fmt: skip
    return merged


@merge_orders.register_fake
def _(keys: Tensor, k: int) -> Tensor:
    return keys.new_empty((keys.shape[0], k))
