"""What a decode step reads that changes from step to step, in one buffer on the device."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class DecodeInputs:
    """Rows of so many requests (see `RequestRows`), padding where there are fewer, and new pages of their tables.

    Args:
        requests: rows. new_pages: of each of them, at most. padding: the row of padding.

    Attributes:
        rows: int64 [requests].
        table_rows, table_columns, table_pages: int64 [requests * new_pages], where a page id goes in the tables.
    """

    def __init__(self, requests: int, new_pages: int, padding: int, device: torch.device) -> None:
        self.requests, self.new_pages, self.padding = requests, requests * new_pages, padding
        self.buffer = torch.empty(requests + 3 * self.new_pages, dtype=torch.int64, device=device)
        self.rows = self.buffer[:requests]
        self.table_rows, self.table_columns, self.table_pages = self.buffer[requests:].view(3, -1)
        self.clear()

    def clear(self) -> None:
        """Nothing but padding."""
        self.rows.fill_(self.padding)
        self.table_rows.fill_(self.padding)
        self.table_columns.fill_(0)
        self.table_pages.fill_(-1)

    def fill(self, staging: Tensor, rows: Sequence[int], updates: Sequence[tuple[int, int, int]]) -> None:
        """One copy from pinned memory; nobody waits for it."""
        values = [*rows, *[self.padding] * (self.requests - len(rows))]
        updates = [*updates, *[(self.padding, 0, -1)] * (self.new_pages - len(updates))]
        for column in zip(*updates, strict=True):
            values.extend(column)
        staging = staging[: len(values)]
        staging.copy_(torch.tensor(values))
        self.buffer.copy_(staging, non_blocking=True)
