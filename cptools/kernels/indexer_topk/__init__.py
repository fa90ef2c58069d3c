"""Lightning-indexer scores and their fused top-k."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from ...formats import FP8
from .. import impl as implementations
from ..arguments import FLOATS, check_count, check_integers, check_one_device, dense, dense_rows, is_aligned
from ..topk_select import MAX_K
from . import fp8_reference, reference
from .chunks import by_position, topk_of_chunks
from .keys import IndexKeys
from .reference import KEY_TILE, QUERY_TILE

__all__ = [
    "KEY_TILE",
    "QUERY_TILE",
    "IndexKeys",
    "choose_indexer_scores",
    "indexer_scores",
    "indexer_scores_fp8",
    "indexer_topk",
    "indexer_topk_fp8",
]

WORKSPACE_BYTES = 320 << 20
"""What the fused top-k may use beside its results, by default."""

_GLUON_HEADS = (32, 64)
_GLUON_DIM = 128
_GLUON_TILE = 64
_TRITON_DIM = 256  # the widest query that a program holds at once


def choose_indexer_scores(query: Tensor, keys: Tensor | IndexKeys, *, impl: str = "auto") -> implementations.Choice:
    """What scores these queries and keys, alone or fused with the selection, and why nothing faster does."""
    return implementations.choose(
        "indexer_scores", impl, {"gluon": _gluon_obstacle(query, keys), "triton": _triton_obstacle(query, keys)}
    )


def _triton_obstacle(query: Tensor, keys: Tensor | IndexKeys) -> str | None:
    if query.shape[-1] > _TRITON_DIM:
        return f"queries are {query.shape[-1]} wide, more than {_TRITON_DIM}"
    return implementations.triton_obstacle(query.device)


def _gluon_obstacle(query: Tensor, keys: Tensor | IndexKeys) -> str | None:
    if not isinstance(keys, IndexKeys):
        return f"keys are {keys.dtype}, not FP8"
    if query.shape[-2] not in _GLUON_HEADS or query.shape[-1] != _GLUON_DIM:
        return f"built for 32 or 64 heads of {_GLUON_DIM}, got {query.shape[-2]} of {query.shape[-1]}"
    if keys.page_size % _GLUON_TILE:
        return f"pages of {keys.page_size} keys are not a multiple of {_GLUON_TILE}"
    if not is_aligned(keys.values, 16) or keys.values.stride(0) % 16 or keys.scales.stride(-1) != 1:
        return "keys are not aligned to 16 bytes or scales not back to back"
    if not keys.page_size and keys.values.stride(0) != _GLUON_DIM:
        return "keys are not back to back"
    return implementations.triton_obstacle(query.device)


def indexer_scores(query: Tensor, weights: Tensor, keys: Tensor, *, impl: str = "auto") -> Tensor:
    """All scores of one sequence: query [T, H, D], weights [T, H], keys [S, D], floats -> float32 [T, S].

    For inspection. impl: "auto" | "reference" | "triton"; `choose_indexer_scores` says what would run. Local.
    """
    _check_floats(query, weights, keys)
    check_one_device("indexer", query=query, weights=weights, keys=keys)
    if choose_indexer_scores(query, keys, impl=impl).impl == "reference":
        return reference.indexer_scores(query, weights, keys)
    from .triton import scores_into

    out = torch.empty(query.shape[0], keys.shape[0], dtype=torch.float32, device=query.device)
    lens = torch.full(query.shape[:1], keys.shape[0], dtype=torch.int64, device=query.device)
    scores_into(out, query.contiguous(), _weights(weights), dense_rows(keys), None, None, None, lens, 0, 0)
    return out


def indexer_topk(
    query: Tensor,
    weights: Tensor,
    keys: Tensor,
    *,
    key_starts: Tensor,
    kv_lens: Tensor,
    k: int,
    impl: str = "auto",
    columns: int | None = None,
    workspace_bytes: int = WORKSPACE_BYTES,
) -> tuple[Tensor, Tensor]:
    """The k best keys of each query, without storing the scores.

    query [T, H, D], weights [T, H] and keys [S, D], floats, any scales already applied. Row t may see
    ``keys[key_starts[t] : key_starts[t] + kv_lens[t]]`` (int32 or int64 [T]; rows of one sequence next to each other);
    a padded row has kv_lens 0 and any key_starts.
    Returns (positions [T, k] int64 relative to key_starts, scores [T, k] float32) ordered by (score descending,
    position ascending), then -1 and -inf. Local.

    impl: "auto" | "reference" | "triton"; `choose_indexer_scores` says what would run. The kernels never wait for the
    GPU: a row that reaches beyond S is cut there, and ``columns`` bounds kv_lens (by default S). They use at most
    ``workspace_bytes`` beside the results, or what k candidates and k scores a row need. The reference raises
    ValueError if a row reaches beyond S, and ignores both arguments.
    """
    _check_floats(query, weights, keys)
    _check_rows(query, weights, keys, kv_lens, key_starts)
    _check_selection(k, columns)
    if choose_indexer_scores(query, keys, impl=impl).impl == "reference":
        return reference.indexer_topk(query, weights, keys, key_starts=key_starts, kv_lens=kv_lens, k=k)
    from .triton import scores_into

    query, weights, keys = query.contiguous(), _weights(weights), dense_rows(keys)
    key_starts, kv_lens = dense(key_starts), dense(kv_lens)

    def score(out: Tensor, part: slice, first: int) -> None:
        starts, lens = key_starts[part], kv_lens[part]
        scores_into(out, query[part], weights[part], keys, None, None, starts, lens, first, 0)

    return topk_of_chunks(
        score,
        _within(keys.shape[0], key_starts, kv_lens),
        columns=keys.shape[0] if columns is None else min(columns, keys.shape[0]),
        k=k,
        workspace_bytes=workspace_bytes,
    )


def indexer_scores_fp8(
    query: Tensor,
    weights: Tensor,
    keys: IndexKeys,
    *,
    kv_lens: Tensor,
    key_starts: Tensor | None = None,
    columns: int | None = None,
    fill: bool = True,
    impl: str = "auto",
) -> Tensor:
    """Scores of FP8 queries and keys -> float32 [T, columns], column = position in the row's sequence.

    query [T, H, D] e4m3, its scale folded into weights [T, H] float32 (ReLU commutes with it). Row t sees the first
    ``kv_lens[t]`` keys of its sequence (int32 or int64 [T]), -inf beyond. Its sequence starts at key ``key_starts[t]``,
    by default 0, and has no key if that is negative; in pages it is request ``t // (T // R)``. columns: by default what
    keys can hold; more of them are -inf. fill=False leaves what is beyond a row's length undefined, for readers that
    take lengths, and saves a launch.

    Local, on the current stream; the kernels make no host sync and may be captured in a CUDA graph. impl: "auto" |
    "reference" | "triton" | "gluon"; `choose_indexer_scores` says what would run.
    """
    _check_fp8(query, weights, keys, kv_lens, key_starts)
    _check_selection(None, columns)
    columns = keys.capacity if columns is None else columns
    chosen = choose_indexer_scores(query, keys, impl=impl).impl
    if chosen == "reference":
        return fp8_reference.indexer_scores_fp8(
            query, weights, keys, kv_lens=kv_lens, key_starts=key_starts, columns=columns
        )
    out = torch.empty(query.shape[0], columns, dtype=torch.float32, device=query.device)
    keys, kv_lens, key_starts = keys.dense(), dense(kv_lens), None if key_starts is None else dense(key_starts)
    inside = out[:, : keys.capacity]  # the kernels look no further in a block table
    tables = keys.block_tables
    _score_fp8(chosen, inside, query.contiguous(), _weights(weights), keys, tables, key_starts, kv_lens, 0)
    if fill:
        from .triton import fill_beyond

        fill_beyond(out, kv_lens, key_starts, keys.capacity)
    return out


def indexer_topk_fp8(
    query: Tensor,
    weights: Tensor,
    keys: IndexKeys,
    *,
    kv_lens: Tensor,
    key_starts: Tensor | None = None,
    k: int,
    columns: int | None = None,
    sorted_by: Literal["score", "position", "none"] = "score",
    workspace_bytes: int = WORKSPACE_BYTES,
    impl: str = "auto",
) -> tuple[Tensor, Tensor]:
    """The k best of `indexer_scores_fp8`, exactly, without storing them: (positions [T, k] int64, scores [T, k]).

    Arguments as there; order and padding as in `indexer_topk`, and so are ``columns`` and ``workspace_bytes``.
    sorted_by: "position" by ascending position; "none" lets valid entries stand in any order, which is faster and may
    differ from run to run.
    """
    if sorted_by not in ("score", "position", "none"):
        raise ValueError(f"indexer_topk_fp8: sorted_by must be 'score', 'position' or 'none', got {sorted_by!r}")
    _check_fp8(query, weights, keys, kv_lens, key_starts)
    _check_selection(k, columns)
    chosen = choose_indexer_scores(query, keys, impl=impl).impl
    if chosen == "reference":
        best = fp8_reference.indexer_topk_fp8(query, weights, keys, kv_lens=kv_lens, key_starts=key_starts, k=k)
        return by_position(*best) if sorted_by == "position" else best
    query, weights, keys = query.contiguous(), _weights(weights), keys.dense()
    lens = _within(keys.capacity, key_starts, kv_lens)
    key_starts = None if key_starts is None else dense(key_starts)
    columns = keys.capacity if columns is None else min(columns, keys.capacity)
    if _takes_ring(chosen, query, keys, k, columns, workspace_bytes):
        from .blocks_gluon import topk

        selected: tuple[Tensor, Tensor] = topk(
            query, weights, keys.values, keys.scales, key_starts, lens, columns, k, workspace_bytes, sorted_by
        )
        return selected
    requests = 1 if keys.block_tables is None else keys.block_tables.shape[0]
    queries = 1 if keys.block_tables is None else query.shape[0] // max(requests, 1)

    def score(out: Tensor, part: slice, first: int) -> None:
        tables = keys.block_tables
        tables = None if tables is None else tables[part.start // queries : part.stop // queries]
        starts = None if key_starts is None else key_starts[part]
        _score_fp8(chosen, out, query[part], weights[part], keys, tables, starts, lens[part], first)

    return topk_of_chunks(
        score,
        lens,
        columns=columns,
        k=k,
        workspace_bytes=workspace_bytes,
        together=max(queries, 1),
        sorted_by=sorted_by,
    )


def _takes_ring(chosen: str, query: Tensor, keys: IndexKeys, k: int, columns: int, workspace_bytes: int) -> bool:
    """Whether there are scores enough for several blocks, and room for two."""
    if chosen != "gluon" or keys.page_size or k > MAX_K or not columns:
        return False
    from .blocks_gluon import ring_of

    slots, block = ring_of(query.shape[0], columns, workspace_bytes)
    return slots > 1 and block < query.shape[0]


def _score_fp8(
    chosen: str,
    out: Tensor,
    query: Tensor,
    weights: Tensor,
    keys: IndexKeys,
    tables: Tensor | None,
    starts: Tensor | None,
    lens: Tensor,
    first: int,
) -> None:
    """tables: the rows' part of those of the keys."""
    if chosen == "gluon":
        from .gluon import scores_into
    else:
        from .triton import scores_into
    scores_into(out, query, weights, keys.values, keys.scales, tables, starts, lens, first, keys.page_size)


def _within(capacity: int, starts: Tensor | None, lens: Tensor) -> Tensor:
    """Lengths that the kernels see, cut where the keys end; without starts, ``columns`` cut them."""
    if starts is None:
        return dense(lens)
    return torch.minimum(lens, capacity - starts).masked_fill(starts < 0, 0)


def _weights(weights: Tensor) -> Tensor:
    return weights.float().contiguous()


def _check_floats(query: Tensor, weights: Tensor, keys: Tensor) -> None:
    if (
        query.dim() != 3
        or query.shape[1] < 1
        or weights.shape != query.shape[:2]
        or keys.dim() != 2
        or keys.shape[1] != query.shape[2]
    ):
        raise ValueError(
            f"indexer: want query [T, H, D], weights [T, H], keys [S, D], "
            f"got {tuple(query.shape)}, {tuple(weights.shape)}, {tuple(keys.shape)}"
        )
    if query.dtype not in FLOATS or keys.dtype not in FLOATS or not weights.is_floating_point():
        raise ValueError(
            f"indexer: want float queries, weights and keys, got {query.dtype}, {weights.dtype} and {keys.dtype}"
        )


def _check_fp8(query: Tensor, weights: Tensor, keys: IndexKeys, kv_lens: Tensor, key_starts: Tensor | None) -> None:
    if (
        query.dim() != 3
        or query.dtype != FP8
        or query.shape[1] < 1
        or query.shape[2] != keys.dim
        or weights.shape != query.shape[:2]
        or not weights.is_floating_point()
    ):
        raise ValueError(
            f"indexer: want query e4m3 [T, H, {keys.dim}] and float weights [T, H], "
            f"got {query.dtype} {tuple(query.shape)} and {weights.dtype} {tuple(weights.shape)}"
        )
    _check_rows(query, weights, keys.values, kv_lens, key_starts)
    if keys.block_tables is None:
        return
    if key_starts is not None:
        raise ValueError("indexer: key_starts have no meaning for keys in pages")
    requests = keys.block_tables.shape[0]
    if query.shape[0] % max(requests, 1) or (query.shape[0] and not requests):
        raise ValueError(f"indexer: {query.shape[0]} rows can not be shared evenly by {requests} block tables")


def _check_rows(query: Tensor, weights: Tensor, keys: Tensor, kv_lens: Tensor, key_starts: Tensor | None) -> None:
    check_integers("indexer", "kv_lens", kv_lens, (query.shape[0],))
    if key_starts is not None:
        check_integers("indexer", "key_starts", key_starts, (query.shape[0],))
    check_one_device("indexer", query=query, weights=weights, keys=keys, kv_lens=kv_lens, key_starts=key_starts)


def _check_selection(k: int | None, columns: int | None) -> None:
    if k is not None:
        check_count("indexer", "k", k, minimum=1)
    if columns is not None:
        check_count("indexer", "columns", columns)
