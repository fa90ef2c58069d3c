"""`cptools plan`: the flags, and the plan as text."""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from cptools.formats import FP8, IndexRows, MlaRows
from cptools.planner import (
    H200,
    MODEL_SHAPES,
    GpuSpec,
    LayoutCost,
    MemoryPlan,
    MemorySettings,
    ModelShape,
    RowBytes,
    gpu_from_file,
    plan_memory,
    shape_from_config,
)

_ROW_DTYPES = {"fp8": FP8, "bf16": torch.bfloat16, "fp32": torch.float32}
_GPUS = {H200.name: H200}


def row_bytes(shape: ModelShape, kv_rows: str) -> RowBytes:
    """Bytes of the rows of a model. kv_rows: "fp8", "bf16" or "fp32", of MLA rows and index keys alike.

    The kernels read FP8 rows of a prompt's context from a BF16 copy, other rows as they are.
    """
    dtype = _ROW_DTYPES[kv_rows]
    latent, rope = shape.kv_lora_rank, shape.qk_rope_head_dim
    return RowBytes(
        mla=MlaRows(latent, rope, dtype).row_bytes,
        index=IndexRows(shape.index_head_dim, dtype).row_bytes,
        kernel_copy=MlaRows(latent, rope, torch.bfloat16).row_bytes if dtype == FP8 else 0,
    )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `cptools plan`."""
    defaults = MemorySettings()
    names = ", ".join(MODEL_SHAPES)
    parser.add_argument("--model", required=True, help=f"{names}; or a config.json, or the folder of a checkpoint")
    parser.add_argument("--gpus", type=int, required=True, help="number of GPUs that each layout uses")
    parser.add_argument("--context", type=int, required=True, help="tokens of one request")
    parser.add_argument(
        "--kv-gib-per-gpu", type=float, help="GiB a GPU for KV (default: what weights and reserve leave)"
    )
    parser.add_argument("--host-gib-per-gpu", type=float, help="GiB of host memory a GPU, for the HiSparse limits")
    parser.add_argument("--layout", action="append", default=[], metavar="NAME", help="one more, such as PCP8xDCP8xDP2")
    parser.add_argument("--kv-rows", choices=_ROW_DTYPES, default="fp8", help="format of cached rows (default: fp8)")
    parser.add_argument("--weights", choices=("fp8", "bf16"), help="matrices as kept (default: as released)")
    parser.add_argument("--no-mtp", action="store_true", help="without the MTP layer")
    parser.add_argument("--gpu", default=H200.name, help=f"{', '.join(_GPUS)}, or a JSON file, see docs/planner.md")
    parser.add_argument("--reserve-gib", type=float, default=defaults.reserve_gib, help="GiB a GPU for all not counted")
    parser.add_argument("--page-size", type=int, default=defaults.page_size, help="rows of a page")
    parser.add_argument("--interleave", type=int, default=defaults.interleave, help="positions that stay together")
    parser.add_argument("--gather-buffers", type=int, default=defaults.gather_buffers, help="gathered layers at a time")
    parser.add_argument(
        "--draft-tokens", type=int, default=defaults.draft_tokens, help="a step, for HiSparse's hot rows"
    )
    parser.add_argument("--json", action="store_true", help="one JSON object instead of text")


def run(args: argparse.Namespace) -> int:
    """Print the plan of these flags; returns 0, or 2 with the reason on stderr where they make no plan."""
    try:
        plan = _plan(args)
    except (ValueError, OSError) as error:
        print(f"cptools plan: {error}", file=sys.stderr)
        return 2
    if args.json:
        print(json.dumps({"model": args.model, "kv_rows": args.kv_rows, **plan.as_json()}))
    else:
        _show(f"{args.model}, one request of {plan.context:,} tokens, {plan.gpus} x {plan.gpu.name}", plan)
    return 0


def _plan(args: argparse.Namespace) -> MemoryPlan:
    shape = _shape(args.model)
    shape = shape.without_mtp() if args.no_mtp else shape
    return plan_memory(
        shape,
        row_bytes(shape, args.kv_rows),
        gpus=args.gpus,
        context=args.context,
        extra_layouts=args.layout,
        gpu=_gpu(args.gpu),
        weights=args.weights,
        settings=MemorySettings(
            kv_gib_per_gpu=args.kv_gib_per_gpu,
            host_gib_per_gpu=args.host_gib_per_gpu,
            reserve_gib=args.reserve_gib,
            gather_buffers=args.gather_buffers,
            draft_tokens=args.draft_tokens,
            page_size=args.page_size,
            interleave=args.interleave,
        ),
    )


def _shape(model: str) -> ModelShape:
    known = MODEL_SHAPES.get(model.lower())
    if known is not None:
        return known
    if not Path(model).exists():
        raise ValueError(f"model={model!r} is neither one of {', '.join(MODEL_SHAPES)} nor a file or folder")
    return shape_from_config(model)


def _gpu(name: str) -> GpuSpec:
    known = _GPUS.get(name.lower())
    if known is not None:
        return known
    if not Path(name).exists():
        raise ValueError(f"gpu={name!r} is neither one of {', '.join(_GPUS)} nor a file")
    return gpu_from_file(name)


@dataclass(frozen=True)
class _Table:
    header: tuple[str, ...]
    rows: list[tuple[str, ...]]


def _show(title: str, plan: MemoryPlan) -> None:
    facts, tables, notes = _facts(plan), [_memory(plan), _limits(plan), _attention(plan), _hisparse(plan)], _notes(plan)
    if sys.stdout.isatty() and importlib.util.find_spec("rich") is not None:
        _show_rich(title, facts, tables, notes)
        return
    print(title)
    for name, fact in facts:
        print(f"  {name:10}  {fact}")
    for table in tables:
        print()
        columns = list(zip(table.header, *table.rows, strict=True))
        widths = [max(map(len, column)) for column in columns]
        for row in (table.header, *table.rows):
            cells = [
                row[0].ljust(widths[0]),
                *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)),
            ]
            print("  ".join(cells).rstrip())
    print()
    for note in notes:
        print(note)


def _show_rich(title: str, facts: Sequence[tuple[str, str]], tables: Sequence[_Table], notes: Sequence[str]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console()
    console.print(Text(title, style="bold"))
    for name, fact in facts:
        console.print(Text(f"  {name:10}  {fact}"))
    styles = {"yes": "green", "no": "red"}
    for table in tables:
        shown = Table()
        for i, name in enumerate(table.header):
            shown.add_column(Text(name), justify="right" if i else "left")
        for row in table.rows:
            shown.add_row(*(Text(cell, style=styles.get(cell, "")) for cell in row))
        console.print(shown)
    for note in notes:
        console.print(Text(note))


def _facts(plan: MemoryPlan) -> list[tuple[str, str]]:
    shape, rows, gpu, settings = plan.shape, plan.rows, plan.gpu, plan.settings
    layers = f"{shape.num_cache_layers} x {rows.mla} B of MLA, {shape.num_index_layers} x {rows.index} B of index keys"
    mtp = "MTP layer included" if shape.num_nextn_predict_layers else "no MTP layer"
    budget = settings.kv_gib_per_gpu
    left = "what weights and reserve leave" if budget is None else f"{budget:g} GiB"
    return [
        ("KV", f"{rows.per_token(shape):,} B a token ({layers}), {_gib(plan.kv_bytes)} GiB in all"),
        ("weights", f"matrices in {plan.weights.upper()}, {mtp}"),
        ("GPU", f"{gpu.memory_gib:g} GiB, of them {settings.reserve_gib:g} GiB in reserve; for KV: {left}"),
        ("ridge", f"{gpu.ridge_flop_per_byte:.0f} FLOP/B: below it memory is the limit, above it matrix products"),
    ]


def _memory(plan: MemoryPlan) -> _Table:
    return _Table(
        ("GiB a GPU", "weights", "KV", "gathered", "kernel copy", "left", "fits"),
        [
            (
                name,
                _gib(cost.weight_bytes, 1),
                _gib(cost.kv_bytes),
                _gib(cost.gather_buffer_bytes),
                _gib(cost.kernel_copy_bytes),
                _gib(cost.left_bytes, 1),
                _yes(cost.fits),
            )
            for name, cost in plan.layouts.items()
        ],
    )


def _limits(plan: MemoryPlan) -> _Table:
    return _Table(
        ("limits", "GiB for KV", "held", "requests", "largest context", "with copies"),
        [
            (
                name,
                _gib(cost.kv_budget_bytes, 1),
                _yes(cost.holds_context),
                _count(cost.max_requests),
                _count(cost.max_context_tokens),
                _count(cost.max_context_tokens_with_copies),
            )
            for name, cost in plan.layouts.items()
        ],
    )


def _attention(plan: MemoryPlan) -> _Table:
    def row(name: str, cost: LayoutCost) -> tuple[str, ...]:
        intensity = cost.sparse_mla_flop_per_byte
        received = cost.gather_received_bytes_per_layer
        return (
            name,
            "-" if intensity is None else str(plan.shape.num_attention_heads // cost.sizes.tp),
            "-" if intensity is None else f"{intensity:.1f}",
            _count(cost.indexer_crossover_tokens),
            _count(cost.indexer_crossover_decode_tokens),
            f"{received / 1e6:,.0f} MB" if received else "-",
            f"{cost.gather_ms_per_layer:.2f} ms" if received else "-",
        )

    header = ("attention", "heads", "FLOP/B", "indexer over at", "in decode", "gathered a layer", "in")
    return _Table(header, [row(name, cost) for name, cost in plan.layouts.items()])


def _hisparse(plan: MemoryPlan) -> _Table:
    return _Table(
        ("HiSparse, GiB a GPU", "on the GPU", "on the host", "largest context"),
        [
            (
                name,
                _gib(cost.hisparse.gpu_bytes),
                _gib(cost.hisparse.host_bytes),
                _count(cost.hisparse.max_context_tokens),
            )
            for name, cost in plan.layouts.items()
        ],
    )


def _notes(plan: MemoryPlan) -> list[str]:
    possible = {name: cost for name, cost in plan.layouts.items() if not cost.refused}
    held = [name for name, cost in possible.items() if cost.holds_context]
    fit = [name for name, cost in possible.items() if cost.fits]
    others = [name for name in plan.layouts if name not in held]
    notes = [
        f"KV of {plan.context:,} tokens within the budget: {_list(held)}. Not: {_list(others)}.",
        f"Beside weights, temporary copies and reserve in {plan.gpu.memory_gib:g} GiB: {_list(fit)}.",
    ]
    for name, cost in plan.layouts.items():
        if cost.refused:
            notes.append(f"{name}: the model can not be split so: {cost.refused}")
        elif cost.sizes.ep == 1 and cost.sizes.tp < plan.gpus:
            experts = plan.shape.n_routed_experts
            notes.append(f"{name}: {plan.gpus} GPUs do not divide {experts} experts; weights count all of them on each")
        if cost.holds_context and cost.fits is False:
            notes.append(
                f"{name}: the KV is within the budget, but not beside the rest: {_gib(cost.left_bytes, 1)} GiB"
            )
    if any((cost.max_context_tokens or 0) > plan.shape.max_position_embeddings for cost in plan.layouts.values()):
        limit = plan.shape.max_position_embeddings
        notes.append(
            f"Largest contexts are of memory alone; one request of this model has at most {limit:,} positions."
        )
    return notes


def _list(names: Sequence[str]) -> str:
    return ", ".join(names) or "none"


def _gib(size: int | None, digits: int = 2) -> str:
    return "-" if size is None else f"{size / 2**30:.{digits}f}"


def _count(number: int | None) -> str:
    return "-" if number is None else f"{number:,}"


def _yes(answer: bool | None) -> str:
    return "-" if answer is None else "yes" if answer else "no"
