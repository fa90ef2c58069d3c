"""Small valid calls of the row ops, argument by argument, so that one of them can be made wrong."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from cptools.formats import FP8_MLA, IndexRows, MlaRows
from cptools.kernels.dense_mha import dense_mha
from cptools.kernels.index_query import fp8_query
from cptools.kernels.kv_gather import copy_rows, gather_rows, gather_sequences, unpack_rows
from cptools.kernels.kv_store import store_rows
from cptools.kernels.lse_merge import merge_states
from cptools.kernels.norm_rope_store import IndexInput, MlaInput, norm_rope_store
from cptools.kernels.rowwise import RopeAngles, layer_norm, rms_norm, rope_interleaved
from cptools.kernels.rowwise.norm_fp8 import rms_norm_quantise
from cptools.kernels.sampling import (
    SAMPLE,
    Sampling,
    SamplingRows,
    draw,
    sample,
    token_logprobs,
    uniforms,
    verify_drafts,
)
from cptools.kernels.selected_slots import selected_slots
from cptools.layout import KVLayout

MLA, INDEX = MlaRows(128, 16, torch.float32), IndexRows(128, torch.float32)
LAYOUT = KVLayout(2, 1, 4)
PLANES = {"planes": (16, 8), "page_size": 4}


@dataclass(frozen=True)
class Call:
    """An op with valid arguments: run(arguments, impl) gives its results, of those that it writes the new contents.

    free: sizes that nothing else fixes, "name.rows" (the first dim) and "name.columns" (the last).
    """

    run: Callable[..., list[Tensor]]
    arguments: dict[str, Tensor]
    free: tuple[str, ...] = ()
    has_kernel: bool = True
    rounds: bool = False
    """To FP8, where the interpreter truncates: not the reference's bits there."""


def calls() -> dict[str, Call]:
    generator = torch.Generator().manual_seed(0)
    normal = lambda *shape: torch.randn(*shape, generator=generator)
    some = lambda *shape: torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)
    slots = torch.tensor([5, -1, 11, 0])
    pages, rows = some(3, 96), some(4, 24)
    angles = RopeAngles.at(torch.tensor([3, 1, 1000, 77]), 16, 1e4)
    packed = FP8_MLA.pack(normal(12, 512), normal(12, 64)).view(3, 4 * 656)
    tables = torch.tensor([[2, 0, 7], [1, 3, -1]])
    settings = SamplingRows.of([Sampling(1.0, top_k=3, seed=i) for i in range(4)])
    counts = torch.tensor([2, 0, 1, 2])

    def written(x: Tensor, run: Callable[[Tensor], object]) -> list[Tensor]:
        target = x.clone(memory_format=torch.preserve_format)
        # A clone of what has gaps has none; the layout of the argument is what is asked for here.
        target = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device).copy_(target)
        run(target)
        return [target]

    def stores(impl, slots, c_kv, k_pe, norm_weight, pages, key, key_weight, key_bias, index_pages, cos, sin):
        mla = MlaInput(c_kv, k_pe, norm_weight, 1e-5, pages.clone(), MLA)
        index = IndexInput(key, key_weight, key_bias, 1e-6, index_pages.clone(), INDEX)
        norm_rope_store(slots, RopeAngles(cos, sin), mla=mla, index=index, page_size=4, impl=impl)
        return [part.pages.view(torch.float32) for part in (mla, index)]

    def stores_index(impl, slots, key, index_pages, cos, sin):
        index = IndexInput(key, None, None, 1e-6, index_pages.clone(), INDEX)
        norm_rope_store(slots, RopeAngles(cos, sin), index=index, page_size=4, impl=impl)
        return [index.pages.view(torch.float32)]

    quantised = lambda normed, rows: [normed, rows.values.float(), rows.scales]
    zeros = lambda width: torch.zeros(3, 4 * width, dtype=torch.uint8)
    key_arguments = {"key": normal(4, 128), "index_pages": zeros(512), "cos": angles.cos, "sin": angles.sin}
    return {
        "store_rows": Call(
            lambda impl, pages, slots, rows: written(pages, lambda x: store_rows(x, slots, rows, **PLANES, impl=impl)),
            {"pages": pages, "slots": slots, "rows": rows},
            ("pages.rows",),
        ),
        "gather_rows": Call(
            lambda impl, pages, slots: [gather_rows(pages, slots, **PLANES, impl=impl)],
            {"pages": pages, "slots": slots},
            ("pages.rows", "slots.rows"),
        ),
        "gather_sequences": Call(
            lambda impl, pages, tables: [gather_sequences(pages, tables, [7, 3], **PLANES, impl=impl)],
            {"pages": pages, "tables": tables.clamp(0, 2)},
            ("pages.rows", "tables.columns"),
        ),
        "unpack_rows": Call(
            lambda impl, pages, slots: [
                unpack_rows(pages, slots, row_format=FP8_MLA, page_size=4, dtype=torch.float32, impl=impl)
            ],
            {"pages": packed, "slots": slots},
            ("pages.rows", "slots.rows"),
        ),
        "copy_rows": Call(
            lambda impl, source, source_rows, target, target_rows: written(
                target, lambda x: copy_rows(source, source_rows, x, target_rows, impl=impl)
            ),
            {
                "source": some(6, 24),
                "source_rows": torch.tensor([5, 0, 3, 3]),
                "target": some(5, 24),
                "target_rows": torch.tensor([0, 4, 2, -1]),
            },
            ("source.rows", "target.rows"),
        ),
        "norm_rope_store": Call(
            stores,
            {"slots": slots, "c_kv": normal(4, 128), "k_pe": normal(4, 16), "norm_weight": normal(128)}
            | {"pages": zeros(576), "key_weight": normal(128), "key_bias": normal(128)}
            | key_arguments,
            ("pages.rows", "index_pages.rows"),
        ),
        "norm_rope_store of index rows": Call(stores_index, {"slots": slots} | key_arguments, ("index_pages.rows",)),
        "merge_states": Call(
            lambda impl, out0, out1, lse0, lse1: list(merge_states([out0, out1], [lse0, lse1], impl=impl)),
            {"out0": normal(4, 3, 8), "out1": normal(4, 3, 8), "lse0": normal(4, 3), "lse1": normal(4, 3)},
        ),
        "merge_states of one tensor": Call(
            lambda impl, outs, lses: list(merge_states(outs, lses, impl=impl)),
            {"outs": normal(3, 4, 3, 8), "lses": normal(3, 4, 3)},
            ("outs.columns",),
        ),
        "rms_norm": Call(
            lambda impl, x, weight: [rms_norm(x, weight, 1e-5, impl=impl)],
            {"x": normal(4, 24), "weight": normal(24)},
            ("x.rows",),
        ),
        "rms_norm_quantise": Call(
            lambda impl, x, weight: quantised(*rms_norm_quantise(x, weight, 1e-5, impl=impl)),
            {"x": normal(4, 256), "weight": normal(256)},
            ("x.rows",),
            rounds=True,
        ),
        "layer_norm": Call(
            lambda impl, x, weight, bias: [layer_norm(x, weight, bias, 1e-5)],
            {"x": normal(4, 24), "weight": normal(24), "bias": normal(24)},
            ("x.rows",),
            has_kernel=False,
        ),
        "rope_interleaved": Call(
            lambda impl, x, cos, sin: [rope_interleaved(x, RopeAngles(cos, sin), impl=impl)],
            {"x": normal(4, 3, 16), "cos": angles.cos, "sin": angles.sin},
        ),
        "fp8_query": Call(
            lambda impl, query, weights, cos, sin: [
                x.float() for x in fp8_query(query, weights, RopeAngles(cos, sin), impl=impl)
            ],
            # The interpreter truncates where it should round to FP8: powers of two, and a quarter turn.
            {
                "query": torch.exp2(torch.randint(-3, 4, (4, 3, 32), generator=generator).float()),
                "weights": normal(4, 3),
            }
            | {"cos": torch.zeros(4, 8), "sin": torch.ones(4, 8)},
            ("query.columns",),
        ),
        "selected_slots": Call(
            lambda impl, out, positions, request_ids, tables: written(
                out, lambda x: selected_slots(x, positions, request_ids, tables, layout=LAYOUT, rank=1, impl=impl)
            ),
            {
                "out": torch.full((4, 5), 99, dtype=torch.int32),
                "positions": torch.randint(-2, 30, (4, 5), generator=generator),
                "request_ids": torch.tensor([1, 0, -1, 2]),
                "tables": tables,
            },
            ("tables.rows", "tables.columns"),
        ),
        "dense_mha": Call(
            lambda impl, query, keys, values, kv_lens: list(dense_mha(query, keys, values, kv_lens, scale=0.3)),
            {"query": normal(4, 2, 8), "keys": normal(5, 2, 8), "values": normal(5, 2, 6)}
            | {"kv_lens": torch.tensor([1, 0, 5, 3])},
            ("values.columns",),
            has_kernel=False,
        ),
        "sample": Call(
            lambda impl, logits, positions: [sample(logits, settings, positions)],
            {"logits": normal(4, 9), "positions": torch.arange(4)},
            ("logits.columns",),
            has_kernel=False,
        ),
        "uniforms": Call(
            lambda impl, seed, request, positions: [uniforms(seed, request, positions, purpose=SAMPLE, count=5)],
            {"seed": torch.arange(4), "request": counts, "positions": torch.arange(4) + 7},
            has_kernel=False,
        ),
        "draw": Call(
            lambda impl, weights, positions: [draw(weights, settings, positions)],
            {"weights": normal(4, 9).exp(), "positions": torch.arange(4)},
            ("weights.columns",),
            has_kernel=False,
        ),
        "verify_drafts": Call(
            lambda impl, logits, drafts, positions, counts, draft_probs: list(
                verify_drafts(logits, drafts, settings, positions, counts=counts, draft_probs=draft_probs)
            ),
            {"logits": normal(4, 3, 9), "drafts": torch.randint(0, 9, (4, 2), generator=generator)}
            | {"positions": torch.arange(4), "counts": counts, "draft_probs": normal(4, 2, 9).softmax(2)},
            has_kernel=False,
        ),
        "token_logprobs": Call(
            lambda impl, logits, ids: list(token_logprobs(logits, ids, 1)),
            {"logits": normal(4, 9), "ids": counts},
            ("logits.columns",),
            has_kernel=False,
        ),
    }
