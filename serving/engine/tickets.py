"""Host memory that steps are fed from and answer into, so that the host never waits for the step it just launched."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from .answers import AnswerRows, TokenLogprob


class StepTicket:
    """The tokens of one step, on their way to the host."""

    def __init__(
        self,
        requests: Sequence[int],
        decoded: Sequence[int],
        answers: AnswerRows,
        landing: Tensor,
        event: torch.cuda.Event | None,
        arrived: Callable[[dict[int, list[int]]], None],
    ) -> None:
        self.requests = tuple(requests)
        """Requests that get tokens from the step."""
        self._decoded, self._answers, self._landing = tuple(decoded), answers, landing
        self._event, self._arrived = event, arrived
        self._tokens: dict[int, list[int]] | None = None
        self._logprobs: dict[int, list[TokenLogprob]] = {}

    @property
    def was_read(self) -> bool:
        """Whether the tokens were asked for before."""
        return self._tokens is not None

    def ready(self) -> bool:
        """Whether `tokens` would not wait."""
        return self.was_read or self._event is None or self._event.query()

    def tokens(self) -> dict[int, list[int]]:
        """New tokens of each request. Waits for the step; a caller that launches the next one first loses no time."""
        if self._tokens is None:
            if self._event is not None:
                self._event.synchronize()
            tokens, logprobs = self._answers.decode(self._landing[: len(self.requests)])
            self._tokens = dict(zip(self.requests, tokens, strict=True))
            self._logprobs = dict(zip(self.requests, logprobs, strict=True))
            self._arrived({request: self._tokens[request] for request in self._decoded})
        return {request: list(tokens) for request, tokens in self._tokens.items()}

    def logprobs(self) -> dict[int, list[TokenLogprob]]:
        """Of the new tokens of each request; empty lists unless the runner was asked for them. Waits as `tokens`."""
        self.tokens()
        return {request: list(entries) for request, entries in self._logprobs.items()}


class HostRing:
    """``depth`` pairs of host buffers, int64, pinned where the device is a GPU: one is reused once its step is done.

    Asking for more steps ahead than the depth waits for the oldest of them.

    Args:
        staging: integers that a step is fed. rows: requests that it answers, at most. answers: what it answers to each.
        arrived: told the tokens of the requests that decoded in a step when they are first read.
    """

    def __init__(
        self,
        depth: int,
        *,
        staging: int,
        rows: int,
        answers: AnswerRows,
        device: torch.device,
        arrived: Callable[[dict[int, list[int]]], None],
    ) -> None:
        self._on_gpu, self._answers, self._arrived = device.type == "cuda", answers, arrived

        def buffers(*shape: int) -> list[Tensor]:
            return [torch.empty(shape, dtype=torch.int64, pin_memory=self._on_gpu) for _ in range(depth)]

        self._staging, self._landing = buffers(staging), buffers(rows, answers.width)
        self._tickets: list[StepTicket | None] = [None] * depth
        self._next = 0

    def take(self) -> tuple[Tensor, Tensor]:
        """Buffers for the next step: what it is fed, where its tokens land."""
        ticket = self._tickets[self._next]
        if ticket is not None:
            ticket.tokens()
        return self._staging[self._next], self._landing[self._next]

    def read(self) -> bool:
        """Read the tickets of all steps launched so far; whether there were any to be read. Waits for them."""
        unread = [ticket for ticket in self._tickets if ticket is not None and not ticket.was_read]
        for ticket in unread:
            ticket.tokens()
        return bool(unread)

    def launched(self, first: Sequence[int], decoded: Sequence[int]) -> StepTicket:
        """The ticket of the step that the buffers were taken for, once all its work is on the current stream.

        Its tokens land in the order of ``first``, requests that get their first token, and then of ``decoded``."""
        event = None
        if self._on_gpu:
            event = torch.cuda.Event()
            event.record()
        ticket = StepTicket([*first, *decoded], decoded, self._answers, self._landing[self._next], event, self._arrived)
        self._tickets[self._next] = ticket
        self._next = (self._next + 1) % len(self._tickets)
        return ticket
