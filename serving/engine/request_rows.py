"""What decoding needs to know of each request, as rows of tensors that stay on the device."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from cptools.host_copy import to_device
from cptools.kernels.sampling import Sampling, SamplingRows


class RequestRows:
    """One row a request, ``capacity`` of them, and one more that padding reads and writes.

    Args:
        capacity: requests at once. blocks: most pages of a request. drafts: drafts of a request.

    Attributes:
        tokens: int64 [capacity + 1], the last token of a request, which its next step is fed.
        drafts: int64 [capacity + 1, drafts], what may follow it.
        lengths: int64 [capacity + 1], its cached tokens; -1 in the row of padding.
        tables: int64 [capacity + 1, blocks], its page ids; -1 behind the last, and all of the row of padding.
    """

    def __init__(self, capacity: int, blocks: int, device: torch.device, *, drafts: int = 0) -> None:
        self.capacity, self.device = capacity, device
        rows = capacity + 1
        self.tokens = torch.zeros(rows, dtype=torch.int64, device=device)
        self.drafts = torch.zeros(rows, drafts, dtype=torch.int64, device=device)
        self.lengths = torch.full((rows,), -1, dtype=torch.int64, device=device)
        self.tables = torch.full((rows, blocks), -1, dtype=torch.int64, device=device)
        self._sampling = SamplingRows.of([Sampling()] * rows, device)
        self.blocks_known = [0] * rows
        """How many pages of each row's table are on the device; on the host."""

    @property
    def padding(self) -> int:
        """The row of padding."""
        return self.capacity

    def start(self, row: int, sampling: Sampling) -> None:
        """Give a row to a request. No sync."""
        columns = self._sampling
        columns.temperature[row].fill_(sampling.temperature)
        columns.top_k[row].fill_(sampling.top_k)
        columns.top_p[row].fill_(sampling.top_p)
        columns.seed[row].fill_(sampling.seed)
        columns.request[row].fill_(sampling.request)
        self.blocks_known[row] = 0

    def write_tables(self, rows: Sequence[int], tables: Tensor) -> None:
        """Whole tables of some rows, int64 [n, <= blocks] on the host. No sync."""
        held = (tables >= 0).sum(1).tolist()
        padded = torch.nn.functional.pad(tables, (0, self.tables.shape[1] - tables.shape[1]), value=-1)
        self.tables[to_device(torch.tensor(rows), self.device)] = to_device(padded, self.device)
        for row, count in zip(rows, held, strict=True):
            self.blocks_known[row] = count

    def sampling(self, rows: Tensor, *, greedy: bool, truncated: bool) -> SamplingRows:
        """Settings of rows int64 [T]; the flags are what the host knows of all of them."""
        all_rows = self._sampling
        return SamplingRows(
            all_rows.temperature[rows],
            all_rows.top_k[rows],
            all_rows.top_p[rows],
            all_rows.seed[rows],
            all_rows.request[rows],
            greedy=greedy,
            truncated=truncated,
        )
