"""What a step answers for each request, as one row of integers, so that one copy brings it to the host."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from cptools.kernels.sampling import token_logprobs


@dataclass(frozen=True)
class TokenLogprob:
    """How likely a token was, under the logits as they are: natural logarithms."""

    token: int
    logprob: float
    best: tuple[tuple[int, float], ...]
    """The most likely tokens, best first."""


@dataclass(frozen=True)
class AnswerRows:
    """Rows of up to ``tokens`` tokens, and with ``logprobs`` = n their log-probabilities and those of the n best.

    A token takes 1 integer, or 2 + 2 n: itself (-1 for none), and the bits of its log-probability, the n best, the bits
    of theirs.
    """

    tokens: int
    logprobs: int | None

    @property
    def width(self) -> int:
        """Integers a row."""
        return self.tokens * (1 if self.logprobs is None else 2 + 2 * self.logprobs)

    def encode(self, tokens: Tensor, logits: Tensor) -> Tensor:
        """tokens int64 [R, n <= tokens], -1 for none, chosen from logits float32 [R, n, vocab] -> int64 [R, width].

        Local, no sync.
        """
        requests, count = tokens.shape
        parts = [tokens.unsqueeze(2)]
        if self.logprobs is not None:
            made = token_logprobs(logits.flatten(0, 1), tokens.flatten().clamp(min=0), self.logprobs)
            rows = [_bits(made.chosen.unsqueeze(1)), made.ids, _bits(made.logprobs)]
            parts += [part.view(requests, count, -1) for part in rows]
        answer = torch.cat(parts, dim=2)
        return torch.nn.functional.pad(answer, (0, 0, 0, self.tokens - count), value=-1).flatten(1)

    def decode(self, rows: Tensor) -> tuple[list[list[int]], list[list[TokenLogprob]]]:
        """Rows on the host -> the tokens of each request, and their log-probabilities (none without ``logprobs``)."""
        each = rows.unflatten(1, (self.tokens, -1))
        tokens = [[token for token in row if token >= 0] for row in each[:, :, 0].tolist()]
        if self.logprobs is None:
            return tokens, [[] for _ in tokens]
        n = self.logprobs
        values = each[:, :, 1:].to(torch.int32).contiguous().view(torch.float32)
        chosen, best = values[:, :, 0].tolist(), values[:, :, 1 + n :].tolist()
        ids = each[:, :, 2 : 2 + n].tolist()
        return tokens, [
            [
                TokenLogprob(token, chosen[row][i], tuple(zip(ids[row][i], best[row][i], strict=True)))
                for i, token in enumerate(known)
            ]
            for row, known in enumerate(tokens)
        ]


def _bits(x: Tensor) -> Tensor:
    return x.float().contiguous().view(torch.int32).long()
