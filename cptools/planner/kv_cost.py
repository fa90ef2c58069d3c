"""Bytes of a context: what is cached of it for good, and what is copied for as long as a layer runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from cptools.integers import require_int
from cptools.layout import KVLayout
from cptools.planner.model_shape import ModelShape


@dataclass(frozen=True)
class RowBytes:
    """Bytes of one token in one layer's cache: `MlaRows.row_bytes`, `IndexRows.row_bytes` of `cptools.formats`.

    mla: of an MLA row. index: of an index key, in a layer that indexes. kernel_copy: of the row in the form that the
    attention kernels read, where that is another than the cached one (FP8 rows are up-converted), else 0.
    """

    mla: int
    index: int
    kernel_copy: int = 0

    def __post_init__(self) -> None:
        for name, minimum in (("mla", 1), ("index", 1), ("kernel_copy", 0)):
            require_int(name, getattr(self, name), minimum=minimum)

    def mla_per_token(self, shape: ModelShape) -> int:
        """Bytes of a token's MLA rows over all layers."""
        return shape.num_cache_layers * self.mla

    def index_per_token(self, shape: ModelShape) -> int:
        """Bytes of a token's index keys over all layers that have one."""
        return shape.num_index_layers * self.index

    def per_token(self, shape: ModelShape) -> int:
        """Bytes of a token over all layers."""
        return self.mla_per_token(shape) + self.index_per_token(shape)

    def gather_buffers(self, context: int, layout: KVLayout, buffers: int) -> int:
        """Bytes of the temporary full-context copies, as cached, that a rank holds in prefill; 0 with one DCP rank.

        buffers: layers whose context is there at a time, each with room for its index keys.
        """
        return buffers * context * (self.mla + self.index) if layout.world_size > 1 else 0

    def received_per_layer(self, context: int, layout: KVLayout) -> int:
        """Bytes of MLA rows that the rank with the fewest of its own receives to copy one layer's context."""
        return (context - layout.local_len(context, layout.world_size - 1)) * self.mla


@dataclass(frozen=True)
class HotRows:
    """The GPU's part of a request whose MLA rows are in host memory (HiSparse): index keys, and rows in use.

    query_rows: rows that a request decodes in one step, 1 + draft tokens. Per layer it has room for the top-k of each
    and for one top-k more, so that a step finds what the one before it selected.
    """

    query_rows: int

    def __post_init__(self) -> None:
        require_int("query_rows", self.query_rows, minimum=1)

    def per_layer(self, shape: ModelShape) -> int:
        """Hot rows of one request in one layer."""
        return (self.query_rows + 1) * shape.index_topk

    def hot_bytes(self, shape: ModelShape, rows: RowBytes) -> int:
        """Bytes of one request's hot rows over all layers. Every DCP rank may need all of them: selection is free."""
        return self.per_layer(shape) * rows.mla_per_token(shape)


def paged_bytes(context: int, layout: KVLayout, bytes_per_token: int) -> int:
    """Bytes of a context of ``context`` tokens on each rank of ``layout``, in whole pages."""
    return layout.pages(context) * layout.page_size * bytes_per_token


def largest_context(budget: int, layout: KVLayout, bytes_per_token: int) -> int:
    """Tokens of the longest context whose pages take at most ``budget`` bytes on each rank; 0 where not one page fits.

    Every page that fits is full, so `interleave` does not matter.
    """
    return max(budget, 0) // (layout.page_size * bytes_per_token) * layout.virtual_block


def largest_context_where(most: int, fits: Callable[[int], bool]) -> int:
    """The largest context <= ``most`` for which ``fits``, which holds up to some context and not beyond."""
    low, high = 0, most
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low
