"""Rows out of pages by slot or by block table, as they are or as BF16, and rows out of pinned host memory."""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...formats import SCALE_BLOCK
from ..arguments import aligned, dense, dense_rows
from ..compile_spec import CompileSpec
from ..dependent_launch import let_next_start, overlapped, wait_for_inputs
from ..kv_store.triton import (
    FEW_ROWS,
    MAX_PLANES,
    WORDS,
    as_words,
    move_plane,
    move_rows,
    move_specs,
    rows_of_tile,
    vector_words,
    word_bytes,
)

COPY_PROGRAMS = 4224
"""Programs of a row copy, as many as an H200 holds at once. 264 saturate PCIe too, but then a short copy waits for its
latency several times in a row."""


@triton.jit
def gather_sequences_kernel(
    pages,
    tables,
    spans,
    rows,
    num_pages,
    page_stride,
    table_stride,
    row_stride,
    VECTOR: tl.constexpr,
    WIDTH0: tl.constexpr,
    WIDTH1: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK0: tl.constexpr,
    BLOCK1: tl.constexpr,
    OVERLAP: tl.constexpr,
    EARLY: tl.constexpr,
):
    """spans int64 [R, 2]: first row of the sequence in the output, its length. Programs (pages * parts, R)."""
    PARTS: tl.constexpr = (PAGE_SIZE + ROWS - 1) // ROWS
    wait_for_inputs(OVERLAP, EARLY)
    sequence = tl.program_id(1).to(tl.int64)
    block = tl.program_id(0) // PARTS
    start = tl.load(spans + 2 * sequence)
    length = tl.load(spans + 2 * sequence + 1)
    offset = (tl.program_id(0) % PARTS) * ROWS + tl.arange(0, ROWS)
    position = block.to(tl.int64) * PAGE_SIZE + offset
    live = (offset < PAGE_SIZE) & (position < length)
    page = tl.load(tables + sequence * table_stride + block, mask=block.to(tl.int64) * PAGE_SIZE < length, other=-1)
    page = page.to(tl.int64)
    # A page that does not exist reads zeros: raising would need a sync.
    used = live & (page >= 0) & (page < num_pages)
    slot = tl.where(used, page * PAGE_SIZE + offset, 0)
    page_stride = page_stride * VECTOR
    row_stride = row_stride * VECTOR
    row = start + position
    move_plane(pages, rows, row, slot, live, used, page_stride, row_stride, 0, WIDTH0, PAGE_SIZE, BLOCK0, False)
    if WIDTH1 > 0:
        move_plane(
            pages, rows, row, slot, live, used, page_stride, row_stride, WIDTH0, WIDTH1, PAGE_SIZE, BLOCK1, False
        )


@triton.jit
def unpack_fp8_kernel(
    pages,
    slots,
    joint,
    num_rows,
    num_slots,
    page_stride,
    BLOCKS: tl.constexpr,
    SCALE_BLOCK: tl.constexpr,
    ROPE: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    BY_SLOT: tl.constexpr,
    OVERLAP: tl.constexpr,
    EARLY: tl.constexpr,
):
    """FP8 MLA rows -> latent and rotary part joined in the dtype of ``joint``."""
    LATENT: tl.constexpr = BLOCKS * SCALE_BLOCK
    ROW_BYTES: tl.constexpr = LATENT + 4 * BLOCKS + 2 * ROPE
    # Rows stand in the middle, so that warps are spread over rows.
    at = tl.arange(0, BLOCKS)[:, None, None] * SCALE_BLOCK + tl.arange(0, SCALE_BLOCK)[None, None, :]
    pair = tl.arange(0, ROPE)[None, :] if ROPE > 0 else 0
    wait_for_inputs(OVERLAP, EARLY)
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    live = row < num_rows
    slot = row
    if BY_SLOT:
        slot = tl.load(slots + row, mask=live, other=-1).to(tl.int64)
    used = live & (slot >= 0) & (slot < num_slots)
    slot = tl.where(used, slot, 0)
    packed = pages + (slot // PAGE_SIZE) * page_stride + (slot % PAGE_SIZE) * ROW_BYTES
    out = joint + row * (LATENT + ROPE)

    values = packed.to(tl.pointer_type(tl.float8e4nv))[None, :, None] + at
    values = tl.load(values, mask=used[None, :, None], other=0.0).to(tl.float32)
    scales = (packed + LATENT).to(tl.pointer_type(tl.float32))[None, :] + tl.arange(0, BLOCKS)[:, None]
    values = values * tl.load(scales, mask=used[None, :], other=0.0)[:, :, None]
    let_next_start(OVERLAP, EARLY)
    tl.store(out[None, :, None] + at, values.to(joint.dtype.element_ty), mask=live[None, :, None])
    if ROPE > 0:
        rope = (packed + LATENT + 4 * BLOCKS).to(tl.pointer_type(tl.bfloat16))[:, None] + pair
        rope = tl.load(rope, mask=used[:, None], other=0.0)
        tl.store(out[:, None] + LATENT + pair, rope.to(joint.dtype.element_ty), mask=live[:, None])


@triton.jit
def copy_rows_kernel(
    source,
    source_rows,
    target,
    target_rows,
    count,
    source_height,
    target_height,
    source_stride,
    target_stride,
    VECTOR: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
    EARLY: tl.constexpr,
):
    wait_for_inputs(OVERLAP, EARLY)
    col = tl.arange(0, BLOCK)[None, :]
    first = tl.program_id(0) * ROWS
    while first < count:
        at = first + tl.arange(0, ROWS)
        here = tl.load(source_rows + at, mask=at < count, other=-1).to(tl.int64)
        there = tl.load(target_rows + at, mask=at < count, other=-1).to(tl.int64)
        used = (here >= 0) & (here < source_height) & (there >= 0) & (there < target_height)
        mask = used[:, None] & (col < WIDTH)
        words = tl.load(source + (here * source_stride * VECTOR)[:, None] + col, mask=mask)
        tl.store(target + (there * target_stride * VECTOR)[:, None] + col, words, mask=mask)
        first += tl.num_programs(0) * ROWS


def empty_rows(pages: Tensor, slots: Tensor, planes: Sequence[int], page_size: int) -> Tensor:
    return pages.new_empty(slots.shape[0], sum(planes))


@torch.library.custom_op("cptools::gather_rows", mutates_args=())
def gather_rows(pages: Tensor, slots: Tensor, planes: Sequence[int], page_size: int) -> Tensor:
    """As ``cptools.kernels.kv_gather.gather_rows``."""
    rows = empty_rows(pages, slots, planes, page_size)
    move_rows(pages, slots, rows, planes, page_size, store=False)
    return rows


gather_rows.register_fake(empty_rows)


def empty_sequences(
    pages: Tensor, tables: Tensor, lens: Sequence[int], planes: Sequence[int], page_size: int
) -> Tensor:
    return pages.new_empty(sum(lens), sum(planes))


@torch.library.custom_op("cptools::gather_sequences", mutates_args=())
def gather_sequences(
    pages: Tensor, tables: Tensor, lens: Sequence[int], planes: Sequence[int], page_size: int
) -> Tensor:
    """As ``cptools.kernels.kv_gather.gather_sequences``."""
    rows = empty_sequences(pages, tables, lens, planes, page_size)
    if rows.numel() == 0:
        return rows
    ends = torch.tensor(lens).cumsum(0)
    tables = dense_rows(tables)
    spans = torch.stack([ends - torch.tensor(lens), torch.tensor(lens)], dim=1)
    if pages.device.type == "cuda":
        spans = spans.pin_memory().to(pages.device, non_blocking=True)
    word = word_bytes([pages, rows], planes)
    vector = vector_words([pages, rows], planes, word)
    widths = [width // word for width in planes] + [0] * (MAX_PLANES - len(planes))
    blocks = [triton.next_power_of_2(max(1, width)) for width in widths]
    per_program = rows_of_page(blocks[0], word, page_size)
    grid = (triton.cdiv(max(lens), page_size) * triton.cdiv(page_size, per_program), len(lens))
    gather_sequences_kernel[grid](
        as_words(pages, word),
        tables,
        spans,
        as_words(rows, word),
        pages.shape[0],
        pages.stride(0) // word // vector,
        tables.stride(0),
        rows.stride(0) // word // vector,
        VECTOR=vector,
        WIDTH0=widths[0],
        WIDTH1=widths[1],
        PAGE_SIZE=page_size,
        ROWS=per_program,
        BLOCK0=blocks[0],
        BLOCK1=blocks[1],
        num_warps=4,
        **overlapped(pages, early=False),
    )
    return rows


gather_sequences.register_fake(empty_sequences)


def empty_joint(
    pages: Tensor, slots: Tensor | None, latent: int, rope: int, page_size: int, dtype: torch.dtype
) -> Tensor:
    rows = pages.shape[0] * page_size if slots is None else slots.shape[0]
    return torch.empty(rows, latent + rope, dtype=dtype, device=pages.device)


@torch.library.custom_op("cptools::unpack_fp8_rows", mutates_args=())
def unpack_fp8_rows(
    pages: Tensor, slots: Tensor | None, latent: int, rope: int, page_size: int, dtype: torch.dtype
) -> Tensor:
    """FP8 MLA rows at slots, or all rows of the pages in order, -> [n, latent + rope] in dtype; slot -1 gives zeros."""
    joint = empty_joint(pages, slots, latent, rope, page_size, dtype)
    if joint.numel() == 0:
        return joint
    rows = joint.shape[0]
    pages = aligned(pages, 4)
    per_program = unpack_tile(rows)
    unpack_fp8_kernel[(triton.cdiv(rows, per_program),)](
        pages,
        pages if slots is None else dense(slots),
        joint,
        rows,
        pages.shape[0] * page_size,
        pages.stride(0),
        BLOCKS=latent // SCALE_BLOCK,
        SCALE_BLOCK=SCALE_BLOCK,
        ROPE=rope,
        PAGE_SIZE=page_size,
        ROWS=per_program,
        BY_SLOT=slots is not None,
        num_warps=1,
        **overlapped(pages, early=rows <= FEW_ROWS),
    )
    return joint


unpack_fp8_rows.register_fake(empty_joint)


@torch.library.custom_op("cptools::copy_rows", mutates_args=("target",))
def copy_rows(source: Tensor, source_rows: Tensor, target: Tensor, target_rows: Tensor) -> None:
    """As ``cptools.kernels.kv_gather.copy_rows``; the source may be a pinned tensor of the host."""
    count, width = source_rows.shape[0], target.shape[1]
    if count == 0 or width == 0:
        return
    word = word_bytes([source, target], [width])
    vector = vector_words([source, target], [width], word)
    block = triton.next_power_of_2(width // word)
    copy_rows_kernel[(min(count, COPY_PROGRAMS),)](
        as_words(source, word),
        dense(source_rows),
        as_words(target, word),
        dense(target_rows),
        count,
        source.shape[0],
        target.shape[0],
        source.stride(0) // word // vector,
        target.stride(0) // word // vector,
        VECTOR=vector,
        WIDTH=width // word,
        ROWS=1,
        BLOCK=block,
        num_warps=1,
        **overlapped(target, early=count <= COPY_PROGRAMS),
    )


@copy_rows.register_fake
def fake_copy_rows(source: Tensor, source_rows: Tensor, target: Tensor, target_rows: Tensor) -> None:
    pass


def rows_of_page(block: int, word: int, page_size: int) -> int:
    rows: int = min(triton.next_power_of_2(page_size), rows_of_tile(block, word, 1 << 20))
    return rows


def unpack_tile(rows: int) -> int:
    """Rows that a program, of one warp, unpacks at a time."""
    return 1 if rows <= FEW_ROWS else 4


def compile_specs() -> list[CompileSpec]:
    specs = [*move_specs(store=False)]
    for name, planes in (("mla_fp8", (656,)), ("mla_bf16", (1152,)), ("index_fp8", (128, 4))):
        word = next(width for width in WORDS if all(plane % width == 0 for plane in planes))
        element = {8: "*i64", 4: "*i32"}[word]
        widths = [plane // word for plane in planes] + [0] * (MAX_PLANES - len(planes))
        blocks = [triton.next_power_of_2(max(1, width)) for width in widths]
        pointers = {"pages": element, "tables": "*i64", "spans": "*i64", "rows": element}
        sizes = dict.fromkeys(["num_pages", "page_stride", "table_stride", "row_stride"], "i32")
        constexprs = {
            "VECTOR": 16 // word if all(plane % 16 == 0 for plane in planes) else 1,
            "WIDTH0": widths[0],
            "WIDTH1": widths[1],
            "PAGE_SIZE": 64,
            "ROWS": rows_of_page(blocks[0], word, 64),
            "BLOCK0": blocks[0],
            "BLOCK1": blocks[1],
            "OVERLAP": True,
            "EARLY": False,
        }
        specs.append(
            CompileSpec(
                name=f"gather_sequences-{name}",
                fn=gather_sequences_kernel,
                signature=pointers | sizes | dict.fromkeys(constexprs, "constexpr"),
                constexprs=constexprs,
                divisible_by_16=tuple(pointers),
            )
        )
    for rows in (1, 1 << 20):
        for by_slot in (False, True):
            per_program = unpack_tile(rows)
            unpack = {
                "BLOCKS": 4,
                "SCALE_BLOCK": SCALE_BLOCK,
                "ROPE": 64,
                "PAGE_SIZE": 64,
                "ROWS": per_program,
                "BY_SLOT": by_slot,
                "OVERLAP": True,
                "EARLY": rows == 1,
            }
            pointers = {"pages": "*u8", "slots": "*i64", "joint": "*bf16"}
            sizes = dict.fromkeys(["num_rows", "num_slots", "page_stride"], "i32")
            specs.append(
                CompileSpec(
                    name=f"unpack_fp8_rows-{per_program}rows-{'slots' if by_slot else 'all'}",
                    fn=unpack_fp8_kernel,
                    signature=pointers | sizes | dict.fromkeys(unpack, "constexpr"),
                    constexprs=unpack,
                    num_warps=1,
                    divisible_by_16=(*pointers, "page_stride"),
                )
            )
    for width in (656, 1152):
        pointers = {"source": "*i64", "source_rows": "*i64", "target": "*i64", "target_rows": "*i64"}
        sizes = dict.fromkeys(["count", "source_height", "target_height", "source_stride", "target_stride"], "i32")
        copy = {"VECTOR": 2, "WIDTH": width // 8, "ROWS": 1, "BLOCK": triton.next_power_of_2(width // 8)}
        copy |= {"OVERLAP": True, "EARLY": True}
        specs.append(
            CompileSpec(
                name=f"copy_rows-{width}",
                fn=copy_rows_kernel,
                signature=pointers | sizes | dict.fromkeys(copy, "constexpr"),
                constexprs=copy,
                num_warps=1,
                divisible_by_16=tuple(pointers),
            )
        )
    return specs
