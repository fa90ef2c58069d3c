"""One engine's steps: prompts eagerly, decode as CUDA graphs over persistent buffers, tokens fed on the device.

The runner knows no model. It keeps what any model with paged rows needs, the last token, drafts, length and block table
of each request, on the device (`RequestRows`), and asks the model for a step of prompt tokens and for hidden states of
decode rows that are described by tensors alone (`cptools.step_rows.DecodeRows`). To serve another sparse-MLA model,
give it the methods of `PagedModel` over a `cptools.cp_kv.ContextParallelKV`: attention and selection come with its
`KVStep`, and nothing here changes.

A step of decode rows is one copy of a few integers to the device, one graph and one copy of tokens back. The graph of a
batch size serves any requests of any lengths: the rows that a batch lacks are *padding*, which sees no key, has no slot
and writes into a row of its own. Greedy, drawn and truncated sampling have graphs of their own, and so have tables
of different widths, since scoring costs launches by the width.

With drafts a request gets 1 to k + 1 tokens a step, and how many stays on the device until a ticket is read. Until then
the cache's lengths count all of them, so pages suffice for whatever comes. Where such a count would refuse a step, the
tickets are read first.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic

import torch
from torch import Tensor

from cptools.host_copy import to_device
from cptools.integers import require_int
from cptools.kernels.sampling import Sampling, sample
from cptools.page_allocator import PoolExhausted
from cptools.spans import Span, no_span
from cptools.step_rows import DecodeRows

from .answers import AnswerRows
from .decode_inputs import DecodeInputs
from .paged_model import Cache, PagedModel, Result
from .request_rows import RequestRows
from .step_graphs import StepGraphs
from .tickets import HostRing, StepTicket


@dataclass(frozen=True)
class _Shape:
    """What a graph is captured for."""

    requests: int
    blocks: int
    greedy: bool
    truncated: bool


class ModelRunner(Generic[Cache, Result]):
    """Steps of one engine on one rank. Not thread-safe.

        runner = ModelRunner(model, cache, max_requests=64, max_tokens=8192)
        request = runner.open(Sampling(temperature=0.7, seed=1))
        ticket = runner.step(prompts={request: ids}, ending=[request])
        while ...:
            following = runner.step(decodes=[request])     # fed on the device with the token of the step before
            ticket.tokens()                                # of the step before, while this one runs
            ticket = following

    It knows no end of a text: who reads the tickets closes a request behind its last token, and drops what steps that
    were launched by then bring for it.

    Args:
        model, cache: of one rank; all ranks of an engine make the same calls.
        max_requests: open at once.
        max_tokens: most cached tokens of a request, at most the model's positions. A request takes at most
            ``pages(max_tokens + draft_tokens)`` pages of the cache's layout, since drafts may stand behind its last
            token, and its last step may bring more tokens than have room.
        draft_tokens: drafts k of the model that are verified with each token.
        logprobs: bring the log-probability of each token, and the n most likely ones; None for neither.
        batch_sizes: decoding requests that graphs are captured for; a batch takes the smallest that holds it, and none
            may be larger than the last.
        table_blocks: widths of block tables, in pages, that graphs are captured for.
        graphs: capture decode; None where the model allows. False calls the same functions on the same buffers.
        steps_ahead: steps that the host may launch before it must have read the first one's tokens.
        span: what the parts of a step run in, such as `cptools.spans.nvtx_span`.

    Raises:
        ValueError: sizes that do not fit, graphs=True for a model that can not be captured, drafts of a model that
            makes none, or another model's cache.
    """

    def __init__(
        self,
        model: PagedModel[Cache, Result],
        cache: Cache,
        *,
        max_requests: int,
        max_tokens: int,
        draft_tokens: int = 0,
        logprobs: int | None = None,
        batch_sizes: Iterable[int] | None = None,
        table_blocks: Iterable[int] | None = None,
        graphs: bool | None = None,
        steps_ahead: int = 4,
        span: Span = no_span,
    ) -> None:
        require_int("max_requests", max_requests, minimum=1)
        require_int("steps_ahead", steps_ahead, minimum=1)
        require_int("draft_tokens", draft_tokens, minimum=0)
        model.check_engine(cache, draft_tokens)
        if logprobs is not None and require_int("logprobs", logprobs, minimum=0) > model.vocab_size:
            raise ValueError(f"logprobs={logprobs} is more than the vocabulary, {model.vocab_size}")
        if not 1 <= require_int("max_tokens", max_tokens) <= model.max_positions:
            raise ValueError(f"max_tokens={max_tokens} is outside [1, {model.max_positions}], the model's positions")
        if graphs and not model.capturable:
            raise ValueError("graphs=True, but this model can not be captured in a CUDA graph here")
        self.model, self.cache = model, cache
        self.max_tokens, self.draft_tokens = max_tokens, draft_tokens
        device, layout = model.device, cache.kv.kv.layout
        most_blocks = layout.pages(max_tokens + draft_tokens)  # drafts may stand behind the last token
        self.batch_sizes = _steps("batch_sizes", batch_sizes, max_requests, [1, 2, 4, *range(8, max_requests, 8)])
        self.table_blocks = _steps("table_blocks", table_blocks, most_blocks, [64 * 4**i for i in range(12)])
        self.state = RequestRows(max_requests, self.table_blocks[-1], device, drafts=draft_tokens)
        self.graphs = StepGraphs(capture=model.capturable if graphs is None else graphs)
        self._new_pages = layout.pages(draft_tokens + 1)
        self._inputs = {
            size: DecodeInputs(size, self._new_pages, self.state.padding, device) for size in self.batch_sizes
        }
        self._answers = AnswerRows(draft_tokens + 1, logprobs)
        self._ring = HostRing(
            steps_ahead,
            staging=self._inputs[self.batch_sizes[-1]].buffer.numel(),
            rows=max_requests,
            answers=self._answers,
            device=device,
            arrived=self._arrived,
        )
        self._free = list(reversed(range(max_requests)))
        self._rows: dict[int, int] = {}
        self._settings: dict[int, Sampling] = {}
        self._decoding: set[int] = set()
        self.span = span

    def open(self, sampling: Sampling | None = None, *, prefix: Sequence[int] = (), own: Sequence[int] = ()) -> int:
        """A new request, without tokens or with those in the pages ``prefix``: its prompt goes on behind them.

        It takes over a user of each page (`BlockTables.open`). Requests of the same settings draw with the same random
        numbers: ``Sampling.request`` tells them apart. Raises ValueError, changing nothing, if ``max_requests`` are
        open.
        """
        if not isinstance(sampling, Sampling | None):
            raise ValueError(f"sampling={sampling!r} is no Sampling")
        if not self._free:
            raise ValueError(f"max_requests={self.state.capacity} requests are open")
        request = self.cache.open(prefix, own)
        self._rows[request] = self._free.pop()
        self._settings[request] = sampling or Sampling()
        self.state.start(self._rows[request], self._settings[request])
        return request

    def row(self, request: int) -> int:
        """Where a request's data stand in ``state``."""
        self._check_open([request])
        return self._rows[request]

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
        following: Mapping[int, int] | None = None,
        decodes: Sequence[int] = (),
    ) -> StepTicket:
        """Launch one step; its tokens come with the ticket.

        prompts: next prompt tokens of requests. ending: those of them whose prompt is complete with these: each gets
        its first token. following: with drafts, the next prompt token of each of the others. decodes: requests that
        have a token get what follows it; the host need not know it yet. Collective as the model's steps, prompts first.

        Does not wait for steps in flight, except for the first step of a shape, which is captured (`warm_up`), where
        more than ``steps_ahead`` tickets were not read, with drafts where `max_tokens` or the pages suffice only if
        fewer were accepted than may be, and in collectives of the model that say so. With drafts all ranks must read
        the tickets of the same steps.

        Replicas in lockstep (dp > 1 and ep > 1) all take a step, those without work with no prompts and no decodes.

        Raises ValueError and PoolExhausted, on all ranks alike, before any change but that of reserved pages, and with
        drafts that tickets are read; also ValueError if another replica refused.
        """
        prompts = prompts or {}
        lengths, each = self.cache.lengths, self.draft_tokens + 1
        with self.model.checks():
            self._check(prompts, ending, following or {}, decodes)
            new = {request: len(ids) for request, ids in prompts.items()} | dict.fromkeys(decodes, each)
            try:
                self._reserve(new)
            except PoolExhausted:
                if not self._catch_up():
                    raise
                self._reserve(new)
        staging, landing = self._ring.take()
        first: list[int] = []
        if prompts or self.model.lockstep:
            ends = set(ending)
            first = [request for request in prompts if request in ends]
            with self.span("prompts"):
                result = self.model.step(self.cache, prompts=prompts)
                answers = self._first_tokens(result, prompts, first, following or {})
                landing[: len(first)].copy_(answers, non_blocking=True)
        if decodes or self.model.lockstep:
            shape = self._shape(decodes)
            with self.span(f"decode {shape.requests}"):
                answers = self._decode(shape, staging, decodes)
                landing[len(first) : len(first) + len(decodes)].copy_(answers[: len(decodes)], non_blocking=True)
            for request in decodes:
                lengths[request] += each
        self._decoding.update(first)
        return self._ring.launched(first, decodes)

    def warm_up(
        self, *, greedy: bool = True, drawn: bool = False, truncated: bool = False, blocks: int | None = None
    ) -> None:
        """Capture the graphs of all batch sizes, for tables of ``blocks`` pages (the widest by default).

        greedy: for batches of greedy requests alone. drawn: for those with others, none of which has top_k or top_p.
        truncated: for those where one has. Graphs that are not warmed up are captured when a step first needs them.

        Waits. Collective as the decode steps that are captured, so that all ranks of an engine ask for the same ones.
        Does nothing where nothing is captured.
        """
        width = self.table_blocks[-1] if blocks is None else self._width(require_int("blocks", blocks, minimum=1))
        kinds = [(True, False)] * greedy + [(False, False)] * drawn + [(False, True)] * truncated
        for size in reversed(self.batch_sizes):  # the largest first: the others fit in its memory
            for is_greedy, is_truncated in kinds:
                self._ensure(_Shape(size, width, is_greedy, is_truncated))

    def _check(
        self,
        prompts: Mapping[int, Sequence[int]],
        ending: Collection[int],
        following: Mapping[int, int],
        decodes: Sequence[int],
    ) -> None:
        self._check_open([*prompts, *decodes])
        if odd := [request for request, ids in prompts.items() if not hasattr(ids, "__len__")]:
            raise ValueError(f"requests {odd} must be given sequences of token ids")
        if len(set(decodes)) != len(decodes) or prompts.keys() & set(decodes):
            raise ValueError(f"a request stands twice in prompts {sorted(prompts)} and decodes {list(decodes)}")
        if len(decodes) > self.batch_sizes[-1]:
            raise ValueError(f"{len(decodes)} requests decode, batch_sizes end at {self.batch_sizes[-1]}")
        if others := set(ending) - prompts.keys():
            raise ValueError(f"requests {sorted(others)} are ending, but have no prompt in this step")
        going_on = prompts.keys() - set(ending)
        if self.draft_tokens and (lacking := going_on - following.keys()):
            raise ValueError(f"draft_tokens={self.draft_tokens} needs the token following the chunks of {lacking}")
        if others := following.keys() - going_on:
            raise ValueError(f"requests {sorted(others)} are given a following token, but no chunk that it follows")
        for request, token in following.items():
            if not 0 <= require_int(f"request {request}: following", token) < self.model.vocab_size:
                raise ValueError(f"request {request}: following={token}, the vocabulary has {self.model.vocab_size}")
        if early := [request for request in decodes if request not in self._decoding]:
            raise ValueError(f"requests {early} have no token to decode from: their prompts did not end")
        if again := [request for request in prompts if request in self._decoding]:
            raise ValueError(f"requests {again} decode already, and were given prompt tokens")
        least = {request: len(ids) for request, ids in prompts.items()} | dict.fromkeys(decodes, 1)
        if (beyond := self._beyond(least)) and self._catch_up():
            beyond = self._beyond(least)
        if beyond:
            raise ValueError(f"requests would have {beyond} cached tokens, max_tokens={self.max_tokens}")

    def _beyond(self, new: Mapping[int, int]) -> dict[int, int]:
        """Lengths of the requests that so many new tokens would make too long."""
        after = {request: self.cache.lengths[request] + count for request, count in new.items()}
        return {request: length for request, length in after.items() if length > self.max_tokens}

    def _reserve(self, new: Mapping[int, int]) -> None:
        self.cache.tables.reserve({request: self.cache.lengths[request] + count for request, count in new.items()})

    def _catch_up(self) -> bool:
        """Wait until the lengths are those on the device; whether they changed."""
        return self.draft_tokens > 0 and self._ring.read()

    def _check_open(self, requests: Sequence[int]) -> None:
        if closed := [request for request in requests if request not in self._rows]:
            raise ValueError(f"requests {closed} are not open; open: {sorted(self._rows)}")

    def _first_tokens(
        self, result: Result, prompts: Mapping[int, Sequence[int]], ending: Sequence[int], following: Mapping[int, int]
    ) -> Tensor:
        """Sample the first tokens of prompts that end, and put their rows on the device: their answers. No sync."""
        device, rows = self.model.device, [self._rows[request] for request in ending]
        place_of = {request: place for place, request in enumerate(prompts)}
        places = [place_of[request] for request in ending]
        tokens = torch.empty(0, dtype=torch.int64, device=device)
        answers = tokens.view(0, self._answers.width)
        if ending:
            lengths = to_device(torch.tensor([self.cache.lengths[request] for request in ending]), device)
            where = to_device(torch.tensor(rows), device)
            greedy, truncated = self._kind(ending)
            logits = self.model.last_logits(result)[to_device(torch.tensor(places), device)]
            tokens = sample(logits, self.state.sampling(where, greedy=greedy, truncated=truncated), lengths)
            answers = self._answers.encode(tokens.unsqueeze(1), logits.unsqueeze(1))
            self.state.tokens[where] = tokens
            self.state.lengths[where] = lengths
            self.state.write_tables(rows, self.cache.tables.table(ending))
        if self.draft_tokens:
            # Also where none ends: the layer that drafts must see every token of a prompt.
            next_ids = [i for request, ids in prompts.items() for i in (*ids[1:], following.get(request, 0))]
            drafts = self.model.draft_prompts(result, next_ids, places, tokens, self.draft_tokens)
            if ending:
                self.state.drafts[where] = drafts
        return answers

    def _arrived(self, tokens: Mapping[int, Sequence[int]]) -> None:
        """Rejected drafts no longer count."""
        for request, new in tokens.items():
            if request in self._rows:
                self.cache.lengths[request] -= self.draft_tokens + 1 - len(new)

    def _shape(self, decodes: Sequence[int]) -> _Shape:
        greedy, truncated = self._kind(decodes)
        size = self.batch_sizes[bisect_left(self.batch_sizes, len(decodes))]
        longest = max((self.cache.lengths[request] for request in decodes), default=0) + self.draft_tokens + 1
        return _Shape(size, self._width(self.cache.kv.kv.layout.pages(longest)), greedy, truncated)

    def _kind(self, requests: Sequence[int]) -> tuple[bool, bool]:
        """Whether all requests are greedy, and whether one that is not is truncated."""
        drawing = [s for request in requests if (s := self._settings[request]).temperature > 0]
        return not drawing, any(s.top_k > 0 or s.top_p < 1 for s in drawing)

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
            if len(pages) > self._new_pages:
                late.append(request)  # reserved ahead by somebody else
                continue
            updates += [(row, known + i, page) for i, page in enumerate(pages)]
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
        """The graph: all between the integers of `DecodeInputs` and those of `AnswerRows`."""
        inputs, state, model, cache = self._inputs[shape.requests], self.state, self.model, self.cache.kv
        state.tables.index_put_((inputs.table_rows, inputs.table_columns), inputs.table_pages)
        contexts = state.lengths[inputs.rows]
        tables = state.tables[:, : shape.blocks][inputs.rows]
        rows = DecodeRows.of_buffers(cache.kv, contexts, tables, per_request=self.draft_tokens + 1)
        ids = torch.cat([state.tokens[inputs.rows].unsqueeze(1), state.drafts[inputs.rows]], dim=1)
        sampling = state.sampling(inputs.rows, greedy=shape.greedy, truncated=shape.truncated)
        # Padding writes into its own row, several times the same length and any tokens.
        if self.draft_tokens:
            verified, drafts, logits = model.decode_round(cache, rows, ids, sampling)
            tokens, last = verified.tokens, verified.accepted
            state.drafts.index_put_((inputs.rows,), drafts)
        else:
            logits = model.logits(model.decode_hidden(cache, rows, ids.flatten())).unsqueeze(1)
            tokens = sample(logits.squeeze(1), sampling, rows.kv_lens).unsqueeze(1)
            last = torch.zeros_like(contexts)
        state.tokens.index_put_((inputs.rows,), tokens.gather(1, last.unsqueeze(1)).squeeze(1))
        state.lengths.index_put_((inputs.rows,), torch.where(contexts < 0, -1, contexts + last + 1))
        return self._answers.encode(tokens, logits)


def _steps(name: str, given: Iterable[int] | None, most: int, usual: Sequence[int]) -> list[int]:
    """Sizes in ascending order, usual ones that end at ``most`` by default. Given ones of tables must reach it; of
    batches they need not, and no larger batch decodes then."""
    chosen = [*(n for n in usual if n < most), most] if given is None else given
    sizes = sorted({require_int(name, n, minimum=1) for n in chosen})
    if not sizes or (sizes[-1] < most and name == "table_blocks"):
        raise ValueError(f"{name}={sizes} must be sizes >= 1 that reach {most}")
    return sizes
