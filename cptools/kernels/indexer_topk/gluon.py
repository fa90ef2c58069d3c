"""Indexer scores on Hopper's matrix units: FP8 queries and keys of width 128, contiguous or in pages.

One warpgroup takes 128 // heads queries (all heads of them are the columns of one product) and walks over its keys,
64 at a time, copied a few tiles ahead. Products of different programs on an SM overlap each other's epilogue, so small
programs matter more than large tiles. Columns are ordered such that one thread holds all heads of its query: the head
sum then needs no other thread.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from ..arguments import aligned
from ..compile_spec import CompileSpec
from ..relaunch import Relaunched
from .contiguous_gluon import contiguous_kernel
from .paged_gluon import paged_kernel

TILE = 64
"""Keys of one product; pages hold a multiple of it."""
DEPTH = 128
"""Width of queries and keys, bytes."""
WIDTH = 128
"""Columns of one product."""
_STAGES = 4
LAUNCH: dict[str, int] = {"num_warps": 4, "maxnreg": 128}
"""Four programs an SM."""
_RESIDENT = 528  # four programs on each of 132 SMs
_OVERLAP_FROM = _RESIDENT
_CONTIGUOUS_TILES = 64
_PAGED_TILES = 8  # memory rules, and many short programs keep it busy to the end


def queries_a_program(queries: int, heads: int) -> int:
    """How many of the queries that share their keys one program scores."""
    most = WIDTH // heads
    return min(most, 1 << (queries - 1).bit_length())


def tiles_a_program(groups: int, columns: int, most: int) -> int:
    """Key tiles of one program: many, to pay once for its queries, yet enough programs to fill the GPU evenly."""
    tiles = -(-columns // TILE)
    return max(1, min(most, tiles, -(-groups * tiles // _RESIDENT)))


@torch.library.custom_op("cptools::indexer_scores_gluon", mutates_args=("out",))
def scores_into(
    out: Tensor,
    query: Tensor,
    weights: Tensor,
    keys: Tensor,
    scales: Tensor,
    tables: Tensor | None,
    starts: Tensor | None,
    lens: Tensor,
    first: int,
    page_size: int,
) -> None:
    """Scores of positions [first, first + columns) into out [T, columns]; nothing beyond a row's length.

    keys [S, 128], or with tables [R, blocks] pages [P, >= page_size * 128] that begin with their keys; scales [S], or
    [P, page_size]. Rows t of equal ``t // (T // R)`` share a table. ``first`` is a multiple of 64.
    """
    rows, heads, depth = query.shape
    columns = out.shape[1]
    if not rows or not columns:
        return
    keys = aligned(keys, 16)
    if tables is None:
        score = ContiguousScores(
            keys, scales, heads=heads, rows=rows, columns=columns, starts=starts is not None, first=first
        )
        score(torch.cuda.current_stream(out.device), out, query, weights, starts, lens)
        return
    queries = rows // tables.shape[0]
    together = queries_a_program(queries, heads)
    groups = tables.shape[0] * triton.cdiv(queries, together)
    tiles = tiles_a_program(groups, columns, _PAGED_TILES)
    programs = groups, triton.cdiv(columns, tiles * TILE)
    # One even wave of programs is better placed all at once.
    overlap = programs[0] * programs[1] > _OVERLAP_FROM
    paged_kernel[programs](
        query,
        weights,
        keys,
        scales,
        tables,
        lens,
        out,
        queries,
        keys.shape[0],
        first,
        columns,
        tiles,
        tables.stride(0),
        keys.stride(0),
        scales.stride(0),
        out.stride(0),
        QUERIES=together,
        HEADS=heads,
        DEPTH=depth,
        PAGE=page_size,
        STAGES=_STAGES,
        OVERLAP=overlap,
        launch_pdl=overlap,
        **LAUNCH,
    )


@scores_into.register_fake
def _(
    out: Tensor,
    query: Tensor,
    weights: Tensor,
    keys: Tensor,
    scales: Tensor,
    tables: Tensor | None,
    starts: Tensor | None,
    lens: Tensor,
    first: int,
    page_size: int,
) -> None:
    return None


class ContiguousScores:
    """Scores of one block of rows after another against keys without tables, from position ``first`` on.

    rows: of most blocks. Arguments otherwise as in `scores_into`.
    """

    def __init__(
        self, keys: Tensor, scales: Tensor, *, heads: int, rows: int, columns: int, starts: bool, first: int = 0
    ) -> None:
        # Whatever the rows: a score's bits depend on its query and its key alone.
        self._together = WIDTH // heads
        self._tiles = tiles_a_program(triton.cdiv(rows, self._together), columns, _CONTIGUOUS_TILES)
        self._keys = TensorDescriptor.from_tensor(keys, [TILE, DEPTH], gl.NVMMASharedLayout(128, 8, 2))
        self._scales = scales
        self._numbers = keys.shape[0], first, columns, self._tiles
        self._programs = triton.cdiv(columns, self._tiles * TILE)
        constants = {
            "QUERIES": self._together,
            "HEADS": heads,
            "DEPTH": DEPTH,
            "HAS_STARTS": starts,
            "STAGES": _STAGES,
        }
        self._launch = Relaunched(contiguous_kernel, constants, **LAUNCH)

    def __call__(
        self,
        stream: torch.cuda.Stream,
        out: Tensor,
        query: Tensor,
        weights: Tensor,
        starts: Tensor | None,
        lens: Tensor,
    ) -> None:
        """Into out [T, columns], on a stream of the current device."""
        rows = out.shape[0]
        some = lens if starts is None else starts  # stands in, is not read
        grid = triton.cdiv(rows, self._together), self._programs, 1
        self._launch(
            stream, grid,
            query, weights, self._keys, self._scales, some, lens, out, rows, *self._numbers, out.stride(0),
        )  # fmt: skip


def _contiguous_spec(heads: int, queries: int, *, starts: bool = False) -> CompileSpec:
    constexprs: dict[str, Any] = {
        "QUERIES": queries,
        "HEADS": heads,
        "DEPTH": DEPTH,
        "HAS_STARTS": starts,
        "STAGES": _STAGES,
    }
    return CompileSpec(
        name=f"indexer_scores_{heads}_heads_{queries}_queries{'_starts' if starts else ''}",
        fn=contiguous_kernel,
        signature={
            "query": "*fp8e4nv",
            "weights": "*fp32",
            "keys": f"tensordesc<fp8e4nv[{TILE},{DEPTH}],NVMMASharedLayout(128,8,2)>",
            "scales": "*fp32",
            "starts": "*i64",
            "lens": "*i64",
            "out": "*fp32",
            **dict.fromkeys(("queries", "num_keys", "first", "columns", "tiles", "out_stride"), "i32"),
            **dict.fromkeys(constexprs, "constexpr"),
        },
        constexprs=constexprs,
        gluon=True,
        options={"maxnreg": LAUNCH["maxnreg"]},
        divisible_by_16=("query", "weights", "scales", "lens", "out"),
    )


def _paged_spec(heads: int, queries: int, page: int) -> CompileSpec:
    constexprs = {"QUERIES": queries, "HEADS": heads, "DEPTH": DEPTH, "PAGE": page, "STAGES": _STAGES, "OVERLAP": True}
    return CompileSpec(
        name=f"indexer_scores_{heads}_heads_{queries}_queries_pages_of_{page}",
        fn=paged_kernel,
        signature={
            "query": "*fp8e4nv",
            "weights": "*fp32",
            "keys": "*fp8e4nv",
            "scales": "*fp32",
            "tables": "*i64",
            "lens": "*i64",
            "out": "*fp32",
            **dict.fromkeys(("queries", "num_pages", "first", "columns", "tiles"), "i32"),
            **dict.fromkeys(("table_stride", "key_page_stride", "scale_page_stride", "out_stride"), "i32"),
            **dict.fromkeys(constexprs, "constexpr"),
        },
        constexprs=constexprs,
        gluon=True,
        options={"maxnreg": LAUNCH["maxnreg"]},
        divisible_by_16=("query", "weights", "keys", "scales", "tables", "lens", "out", "key_page_stride"),
    )


def compile_specs() -> list[CompileSpec]:
    return [
        _contiguous_spec(32, 4),
        _contiguous_spec(32, 4, starts=True),
        _contiguous_spec(64, 2, starts=True),
        *(_paged_spec(32, queries, 64) for queries in (1, 2, 4)),
        *(_paged_spec(64, queries, 64) for queries in (1, 2)),
        _paged_spec(32, 1, 256),
    ]
