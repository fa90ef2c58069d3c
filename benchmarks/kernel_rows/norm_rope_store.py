"""Stores of new tokens into paged FP8 rows: quantisation alone, as the peers do it, and everything in one launch.

Slots are random in a cache of 524,288 rows; launches take turns on ten sets of inputs and slots.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from benchmarks.gpu_timing import Row, floor_us, graph_time_us
from cptools.formats import FP8_INDEX, FP8_MLA
from cptools.kernels.norm_rope_store import IndexInput, MlaInput, choose_norm_rope_store, norm_rope_store, reference
from cptools.kernels.rowwise import RopeAngles

PAGES, PAGE_SIZE, TURNS = 8192, 64, 10
# tokens, target (microseconds)
MLA_TARGETS = ((1, 2.2), (128, 2.3), (4096, 4.7))
INDEX_TARGETS = ((1, 1.65), (128, 1.76))


@dataclass(frozen=True)
class Call:
    """The arguments of one launch."""

    slots: Tensor
    angles: RopeAngles | None
    mla: MlaInput | None
    index: IndexInput | None

    def __call__(self, impl: str) -> None:
        norm_rope_store(self.slots, self.angles, mla=self.mla, index=self.index, page_size=PAGE_SIZE, impl=impl)

    def parts(self) -> list[MlaInput | IndexInput]:
        return [part for part in (self.mla, self.index) if part is not None]

    def bytes(self) -> int:
        """Read and written: BF16 inputs, slots, float32 angles, rows."""
        tokens = len(self.slots)
        total = 8 * tokens + (0 if self.angles is None else 8 * self.angles.cos.numel())
        total += 0 if self.mla is None else tokens * (2 * 576 + FP8_MLA.row_bytes)
        return total + (0 if self.index is None else tokens * (2 * 128 + FP8_INDEX.row_bytes))


def make(tokens: int, mla_pages: Tensor | None, index_pages: Tensor | None, *, norm: bool) -> Call:
    """Random inputs; c_kv and k_pe are views of one projection, as in the model."""
    slots = torch.randperm(PAGES * PAGE_SIZE, device="cuda")[:tokens]
    joint = torch.randn(tokens, 576, device="cuda").bfloat16()
    weight = lambda width: torch.rand(width, device="cuda").bfloat16() if norm else None
    mla = index = angles = None
    if mla_pages is not None:
        mla = MlaInput(joint[:, :512], joint[:, 512:], weight(512), 1e-5, mla_pages, FP8_MLA)
    if index_pages is not None:
        key = torch.randn(tokens, 128, device="cuda").bfloat16()
        index = IndexInput(key, weight(128), weight(128), 1e-6, index_pages, FP8_INDEX)
    if norm:
        angles = RopeAngles.at(torch.randint(0, 1 << 20, (tokens,), device="cuda"), 64, 8e6)
    return Call(slots, angles, mla, index)


def differing(call: Call, impl: str) -> float:
    """-1 if all bytes are the reference's, else the share of them that is not."""
    call(impl)
    wanted = [torch.full_like(part.pages, 0xEE) for part in call.parts()]
    others = iter(wanted)
    reference.norm_rope_store(
        call.slots,
        call.angles,
        mla=None if call.mla is None else replace(call.mla, pages=next(others)),
        index=None if call.index is None else replace(call.index, pages=next(others)),
        page_size=PAGE_SIZE,
    )
    written = sum(len(call.slots) * part.row_format.row_bytes for part in call.parts())
    wrong = sum(int((part.pages != other).sum()) for part, other in zip(call.parts(), wanted, strict=True))
    return wrong / written if wrong else -1.0


def rows(*, impl: str = "auto") -> Iterator[Row]:
    torch.manual_seed(0)
    cases = [("FP8 MLA row", True, False, False, MLA_TARGETS)]
    cases += [("FP8 index row", False, True, False, INDEX_TARGETS)]
    fused = tuple((tokens, None) for tokens in (1, 128, 4096))
    cases += [("norm, rope, MLA + index row", True, True, True, fused)]
    for name, has_mla, has_index, norm, targets in cases:
        pages = [
            torch.full((PAGES, PAGE_SIZE * width), 0xEE, dtype=torch.uint8, device="cuda") if there else None
            for there, width in ((has_mla, FP8_MLA.row_bytes), (has_index, FP8_INDEX.row_bytes))
        ]
        for tokens, target in targets:
            for page in pages:
                if page is not None:
                    page.fill_(0xEE)
            calls = [make(tokens, *pages, norm=norm) for _ in range(TURNS)]
            error = differing(calls[0], impl)
            turn = itertools.cycle(calls)
            medians = graph_time_us(lambda turn=turn: next(turn)(impl), launches=TURNS)
            first = calls[0]
            choice = choose_norm_rope_store(
                first.slots, first.angles, mla=first.mla, index=first.index, page_size=PAGE_SIZE, impl=impl
            )
            yield Row(
                kernel="norm_rope_store",
                impl=choice.impl,
                shape=f"{name}, {tokens} tokens",
                median_us=statistics.median(medians),
                spread_us=max(medians) - min(medians),
                floor_us=floor_us(moved_bytes=first.bytes()),
                target_us=target,
                beyond_us=None,
                error=error,
            )
