"""One engine's steps: prompts eagerly, decode as CUDA graphs over persistent buffers, tokens fed on the device.

The runner knows no model. It keeps what any model with paged rows needs, the last token, length and block table of each
request, on the device (`RequestRows`), and asks the model for two things (`PagedModel`): a step of prompt tokens, and
hidden states of decode rows that are described by tensors alone (`cptools.step_rows.DecodeRows`). To serve another
sparse-MLA model, give it these methods over a cache of `cptools.cp_kv.ContextParallelKV`, `BlockTables` and lengths:
attention and selection come with `KVStep`, and nothing here changes.

A step of decode rows is one copy of a few integers to the device, one graph and one copy of tokens back. The graph of a
batch size serves any requests of any lengths: the rows that a batch lacks are *padding*, which sees no key, has no slot
and writes into a row of its own. Greedy, drawn and truncated sampling have graphs of their own, and so have tables
of different widths, since scoring costs launches by the width.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from cptools.block_tables import BlockTables
from cptools.cp_kv import ContextParallelKV
from cptools.integers import require_int
from cptools.kernels.sampling import Sampling, SamplingRows, sample
from cptools.spans import Span, no_span
from cptools.step_rows import DecodeRows

from .request_rows import RequestRows
from .step_graphs import StepGraphs
from .tickets import HostRing, StepTicket


class PagedCache(Protocol):
    """The cache of one engine, on one rank."""

    @property
    def kv(self) -> ContextParallelKV: ...
    @property
    def tables(self) -> BlockTables: ...
    @property
    def lengths(self) -> MutableMapping[int, int]:
        """Cached tokens of each open request."""

    def open(self) -> int: ...
    def close(self, request: int) -> None: ...


Cache = TypeVar("Cache", bound=PagedCache, contravariant=True)
Result = TypeVar("Result")


class PagedModel(Protocol[Cache, Result]):
    """What the runner asks of a model. Every rank of an engine makes the same calls."""

    @property
    def device(self) -> torch.device: ...

    @property
    def max_positions(self) -> int:
        """Longest sequence."""

    @property
    def capturable(self) -> bool:
        """Whether `decode_hidden` and `logits` may be captured in a CUDA graph here."""

    def step(self, cache: Cache, *, prompts: Mapping[int, Sequence[int]]) -> Result:
        """Compute prompt tokens behind what is cached, and count them in the cache's lengths. All or nothing."""

    def last_logits(self, result: Result) -> Tensor:
        """float32 [R, vocab] of the last row of each prompt of a step, in their order."""

    def decode_hidden(self, cache: ContextParallelKV, rows: DecodeRows, ids: Tensor) -> Tensor:
        """Hidden states [T, D] of decode rows, ids int64 [T] on the device."""

    def logits(self, hidden: Tensor) -> Tensor:
        """[T, D] -> float32 [T, vocab]."""


@dataclass(frozen=True)
class _Shape:
    """What a graph is captured for."""

    requests: int
    blocks: int
    greedy: bool
    truncated: bool


class _Inputs:
    """What changes from step to step in a graph of so many requests: their rows, and new pages of their tables."""

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


class ModelRunner:
    """Steps of one engine on one rank. Not thread-safe.

        runner = ModelRunner(model, cache, max_requests=64, max_tokens=8192)
        request = runner.open(Sampling(temperature=0.7, seed=1))
        ticket = runner.step(prompts={request: ids}, ending=[request])
        while ...:
            following = runner.step(decodes=[request])     # fed on the device with the token of the step before
            ticket.tokens()                                # of the step before, while this one runs
            ticket = following

    Args:
        model, cache: of one rank; all ranks of an engine make the same calls.
        max_requests: open at once.
        max_tokens: most cached tokens of a request, at most the model's positions.
        batch_sizes: decoding requests that graphs are captured for; a batch takes the smallest that holds it.
        table_blocks: widths of block tables, in pages, that graphs are captured for.
        graphs: capture decode; None where the model allows. False calls the same functions on the same buffers.
        steps_ahead: steps that the host may launch before it must have read the first one's tokens.
        span: what the parts of a step run in, such as `cptools.spans.nvtx_span`.

    Raises:
        ValueError: sizes that do not fit, or graphs=True for a model that can not be captured.
    """

    def __init__(
        self,
        model: PagedModel[Cache, Result],
        cache: Cache,
        *,
        max_requests: int,
        max_tokens: int,
        batch_sizes: Iterable[int] | None = None,
        table_blocks: Iterable[int] | None = None,
        graphs: bool | None = None,
        steps_ahead: int = 4,
        span: Span = no_span,
    ) -> None:
        require_int("max_requests", max_requests, minimum=1)
        require_int("steps_ahead", steps_ahead, minimum=1)
        if not 1 <= require_int("max_tokens", max_tokens) <= model.max_positions:
            raise ValueError(f"max_tokens={max_tokens} is outside [1, {model.max_positions}], the model's positions")
        if graphs and not model.capturable:
            raise ValueError("graphs=True, but this model can not be captured in a CUDA graph here")
        self.model, self.cache = model, cache
        self.max_tokens = max_tokens
        device, layout = model.device, cache.kv.kv.layout
        most_blocks = layout.pages(max_tokens)
        self.batch_sizes = _steps("batch_sizes", batch_sizes, max_requests, [1, 2, 4, *range(8, max_requests, 8)])
        self.table_blocks = _steps("table_blocks", table_blocks, most_blocks, [64 * 4**i for i in range(12)])
        self.state = RequestRows(max_requests, most_blocks, device)
        self.graphs = StepGraphs(capture=model.capturable if graphs is None else graphs)
        self._inputs = {size: _Inputs(size, 1, self.state.padding, device) for size in self.batch_sizes}
        largest = self._inputs[self.batch_sizes[-1]].buffer.numel()
        self._ring = HostRing(steps_ahead, staging=largest, landing=2 * max_requests, device=device)
        self._free = list(reversed(range(max_requests)))
        self._rows: dict[int, int] = {}
        self._settings: dict[int, Sampling] = {}
        self._decoding: set[int] = set()
        self.span = span

    def open(self, sampling: Sampling | None = None) -> int:
        """A new request without tokens. Raises ValueError if ``max_requests`` are open."""
        if not self._free:
            raise ValueError(f"max_requests={self.state.capacity} requests are open")
        request = self.cache.open()
        self._rows[request] = self._free.pop()
        self._settings[request] = sampling or Sampling()
        self.state.start(self._rows[request], self._settings[request])
        return request

    def close(self, request: int) -> None:
        """Give a request's pages back, also while steps with it are on their way: later ones run behind them."""
        self._check_open([request])
        self.cache.close(request)
        self._free.append(self._rows.pop(request))
        del self._settings[request]
        self._decoding.discard(request)

    def step(
        self,
        *,
        prompts: Mapping[int, Sequence[int]] | None = None,
        ending: Collection[int] = (),
        decodes: Sequence[int] = (),
    ) -> StepTicket:
        """Launch one step; its tokens come with the ticket.

        prompts: next prompt tokens of requests. ending: those of them whose prompt is complete with these: each gets
        its first token. decodes: requests that have a token get the next one; the host need not know it yet. Collective
        as the model's steps, prompts first.

        No sync for decodes, except for the first step of a shape, which is captured (`warm_up`), and where more than
        ``steps_ahead`` tickets were not read.

        Raises ValueError and PoolExhausted, on all ranks alike, before any change but that of reserved pages.
        """
        prompts = prompts or {}
        self._check(prompts, ending, decodes)
        lengths = self.cache.lengths
        new = {request: len(ids) for request, ids in prompts.items()} | dict.fromkeys(decodes, 1)
        self.cache.tables.reserve({request: lengths[request] + count for request, count in new.items()})
        staging, landing = self._ring.take()
        first = []
        if prompts:
            with self.span("prompts"):
                result = self.model.step(self.cache, prompts=prompts)
                if first := [request for request in prompts if request in set(ending)]:
                    tokens = self._first_tokens(self.model.last_logits(result), list(prompts), first)
                    landing[: len(first)].copy_(tokens, non_blocking=True)
        if decodes:
            shape = self._shape(decodes)
            with self.span(f"decode {shape.requests}"):
                tokens = self._decode(shape, staging, decodes)
                landing[len(first) : len(first) + len(decodes)].copy_(tokens[: len(decodes)], non_blocking=True)
            for request in decodes:
                lengths[request] += 1
        self._decoding.update(first)
        return self._ring.launched([*first, *decodes])

    def warm_up(self, *, greedy: bool = True, truncated: bool = False, blocks: int | None = None) -> None:
        """Capture the graphs of all batch sizes, for tables of ``blocks`` pages (the widest by default). Waits.

        Graphs that are not warmed up are captured when a step first needs them.
        """
        width = self.table_blocks[-1] if blocks is None else self._width(blocks)
        for size in reversed(self.batch_sizes):  # the largest first: the others fit in its memory
            self._ensure(_Shape(size, width, greedy, truncated and not greedy))

    def _check(self, prompts: Mapping[int, Sequence[int]], ending: Collection[int], decodes: Sequence[int]) -> None:
        self._check_open([*prompts, *decodes])
        if len(set(decodes)) != len(decodes) or prompts.keys() & set(decodes):
            raise ValueError(f"a request stands twice in prompts {sorted(prompts)} and decodes {list(decodes)}")
        if len(decodes) > self.batch_sizes[-1]:
            raise ValueError(f"{len(decodes)} requests decode, batch_sizes end at {self.batch_sizes[-1]}")
        if others := set(ending) - prompts.keys():
            raise ValueError(f"requests {sorted(others)} are ending, but have no prompt in this step")
        if early := [request for request in decodes if request not in self._decoding]:
            raise ValueError(f"requests {early} have no token to decode from: their prompts did not end")
        if again := [request for request in prompts if request in self._decoding]:
            raise ValueError(f"requests {again} decode already, and were given prompt tokens")
        for request, count in ({r: len(ids) for r, ids in prompts.items()} | dict.fromkeys(decodes, 1)).items():
            if self.cache.lengths[request] + count > self.max_tokens:
                raise ValueError(
                    f"request {request} would have {self.cache.lengths[request] + count} cached tokens, "
                    f"max_tokens={self.max_tokens}"
                )

    def _check_open(self, requests: Sequence[int]) -> None:
        if closed := [request for request in requests if request not in self._rows]:
            raise ValueError(f"requests {closed} are not open; open: {sorted(self._rows)}")

    def _first_tokens(self, logits: Tensor, prompts: Sequence[int], ending: Sequence[int]) -> Tensor:
        """Sample the first token of prompts that end, and put their rows on the device. Copies to the device."""
        device, rows = self.model.device, [self._rows[request] for request in ending]
        lengths = torch.tensor([self.cache.lengths[request] for request in ending]).to(device)
        at = torch.tensor([prompts.index(request) for request in ending]).to(device)
        settings = [self._settings[request] for request in ending]
        tokens = sample(logits[at], SamplingRows.of(settings, device), lengths)
        where = torch.tensor(rows).to(device)
        self.state.tokens[where] = tokens
        self.state.lengths[where] = lengths
        self.state.write_tables(rows, self.cache.tables.table(ending))
        return tokens

    def _shape(self, decodes: Sequence[int]) -> _Shape:
        drawing = [s for request in decodes if (s := self._settings[request]).temperature > 0]
        size = self.batch_sizes[bisect_left(self.batch_sizes, len(decodes))]
        longest = max(self.cache.lengths[request] for request in decodes) + 1
        return _Shape(
            size,
            self._width(self.cache.kv.kv.layout.pages(longest)),
            greedy=not drawing,
            truncated=any(s.top_k > 0 or s.top_p < 1 for s in drawing),
        )

    def _width(self, blocks: int) -> int:
        if blocks > self.table_blocks[-1]:
            raise ValueError(f"{blocks} blocks, table_blocks end at {self.table_blocks[-1]}")
        return self.table_blocks[bisect_left(self.table_blocks, blocks)]

    def _decode(self, shape: _Shape, staging: Tensor, decodes: Sequence[int]) -> Tensor:
        self._ensure(shape)
        rows, updates, late = [], [], []
        for request in decodes:
            row = self._rows[request]
            rows.append(row)
            known = self.state.blocks_known[row]
            pages = self.cache.tables.pages(request, known)
            if len(pages) > 1:
                late.append(request)  # reserved ahead by somebody else
                continue
            updates += [(row, known, page) for page in pages]
            self.state.blocks_known[row] += len(pages)
        if late:
            self.state.write_tables([self._rows[request] for request in late], self.cache.tables.table(late))
        self._inputs[shape.requests].fill(staging, rows, updates)
        return self.graphs.run(shape, lambda: self._decode_rows(shape))

    def _ensure(self, shape: _Shape) -> None:
        if shape not in self.graphs:
            self._inputs[shape.requests].clear()
            self.graphs.record(shape, lambda: self._decode_rows(shape))

    def _decode_rows(self, shape: _Shape) -> Tensor:
        """The graph: everything between the integers of `_Inputs` and the new tokens, int64 [requests]."""
        inputs, state, model = self._inputs[shape.requests], self.state, self.model
        state.tables.index_put_((inputs.table_rows, inputs.table_columns), inputs.table_pages)
        contexts = state.lengths[inputs.rows]
        tables = state.tables[:, : shape.blocks][inputs.rows]
        rows = DecodeRows.of_buffers(self.cache.kv.kv, contexts, tables, per_request=1)
        hidden = model.decode_hidden(self.cache.kv, rows, state.tokens[inputs.rows])
        sampling = state.sampling(inputs.rows, greedy=shape.greedy, truncated=shape.truncated)
        tokens = sample(model.logits(hidden), sampling, rows.kv_lens)
        # Padding writes into its own row, several times the same length and any token.
        state.tokens.index_put_((inputs.rows,), tokens)
        state.lengths.index_put_((inputs.rows,), torch.where(contexts < 0, -1, contexts + 1))
        return tokens


def _steps(name: str, given: Iterable[int] | None, most: int, usual: Sequence[int]) -> list[int]:
    """Ascending sizes that end at ``most`` at the least."""
    sizes = sorted({n for n in usual if n < most} | {most} if given is None else set(given))
    if not sizes or require_int(name, sizes[0], minimum=1) < 1 or (sizes[-1] < most and name == "table_blocks"):
        raise ValueError(f"{name}={sizes} must be sizes >= 1 that reach {most}")
    return sizes
