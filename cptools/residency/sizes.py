"""How much memory residency divides, and what it promises never to give away."""

from __future__ import annotations

from dataclasses import dataclass

from cptools.integers import require_int
from cptools.layout import KVLayout


@dataclass(frozen=True)
class ResidencySizes:
    """Pages of an engine and the limits of its requests. A page id means one page on every rank of the KV group.

    Args:
        layout: where a position's row lies; a block is `layout.virtual_block` positions.
        gpu_pages: pages for attention rows, of which the hot regions are taken too.
        index_pages: pages for index keys, which stay on the GPU for all blocks of a running request.
        host_pages: pages of the host pool: the attention rows and the index keys of a block.
        max_tokens: most rows of a request, drafts behind its last token included.
        max_step_tokens: most rows that a request may have asked for and not committed yet: a chunk of a prompt, or
            1 + drafts times the steps ahead.
        query_rows, top_k: what selects at once (1 + drafts) and how many rows each; a hot region must hold all of them,
            on each rank, since they may all fall into one rank's shard.
        hot_rows: rows of a hot region on each rank, rounded up to whole pages; query_rows * top_k unless given.
        tail_pages: the last pages of a running request, which never leave the GPU.
        watermark: GPU pages that are free or can be freed at once, below which pages begin to be mirrored.
        copy_pages: pages that one copy moves at most.

    Raises:
        ValueError: a size out of range, or the longest request alone would not fit.
    """

    layout: KVLayout
    gpu_pages: int
    index_pages: int
    host_pages: int
    max_tokens: int
    max_step_tokens: int
    query_rows: int = 1
    top_k: int = 2048
    hot_rows: int | None = None
    tail_pages: int = 2
    watermark: int = 0
    copy_pages: int = 256

    def __post_init__(self) -> None:
        ones = "gpu_pages index_pages max_tokens max_step_tokens query_rows top_k tail_pages copy_pages"
        for name in ones.split():
            require_int(name, getattr(self, name), minimum=1)
        for name in ("host_pages", "watermark"):
            require_int(name, getattr(self, name), minimum=0)
        needed = self.query_rows * self.top_k
        if self.hot_rows is None:
            object.__setattr__(self, "hot_rows", needed)
        elif require_int("hot_rows", self.hot_rows) < needed:
            raise ValueError(f"hot_rows={self.hot_rows} must hold query_rows={self.query_rows} * top_k={self.top_k}")
        if self.max_step_tokens > self.max_tokens:
            raise ValueError(f"max_step_tokens={self.max_step_tokens} exceeds max_tokens={self.max_tokens}")
        most = self.blocks(self.max_tokens)
        if self.index_pages < most:
            raise ValueError(f"index_pages={self.index_pages}, but max_tokens={self.max_tokens} are {most} blocks")
        if self.gpu_pages < most and not self.spills:
            raise ValueError(
                f"max_tokens={self.max_tokens} are {most} blocks: neither gpu_pages={self.gpu_pages} hold them, nor "
                f"with host_pages={self.host_pages} beside a hot region of {self.hot_pages} pages and "
                f"{self.active_blocks} pages being written"
            )

    def blocks(self, tokens: int) -> int:
        """Virtual blocks of so many positions."""
        return -(-tokens // self.layout.virtual_block)

    @property
    def hot_pages(self) -> int:
        """Pages of one hot region."""
        return -(-(self.hot_rows or 0) // self.layout.page_size)

    @property
    def active_blocks(self) -> int:
        """Most blocks of a running request that may not leave the GPU: the tail, and what steps write behind it."""
        return self.tail_pages + self.blocks(self.max_step_tokens) + 1

    @property
    def spills(self) -> bool:
        """Whether hot regions are used at all: only where the longest request fits beside one, so that no request that
        got one can be stuck with it."""
        slack = self.active_blocks + self.tail_pages
        fits = self.blocks(self.max_tokens) + slack <= self.gpu_pages + self.host_pages - self.hot_pages
        return fits and self.gpu_pages > self.hot_pages + 2 * self.active_blocks
