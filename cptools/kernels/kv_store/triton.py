"""Rows between contiguous memory and pages by slot, in words as wide as both sides allow."""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..arguments import dense, dense_rows
from ..compile_spec import CompileSpec
from ..dependent_launch import overlapped, wait_for_inputs

MAX_PLANES = 2
WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}
FEW_ROWS = 1024  # which take a program each
TILE_BYTES, TILE_WORDS = 8192, 2048
"""What a program moves at most, padding of its tile included; 2048 words are 16 a thread."""


@triton.jit
def move_plane(
    pages,
    rows,
    row,
    slot,
    live,
    used,
    page_stride,
    row_stride,
    START: tl.constexpr,
    WIDTH: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    STORE: tl.constexpr,
):
    """Words [START, START + WIDTH) of the rows: in a page, they stand behind PAGE_SIZE * START words of others."""
    page = slot // PAGE_SIZE
    in_page = pages + page * page_stride + PAGE_SIZE * START + (slot % PAGE_SIZE) * WIDTH
    col = tl.arange(0, BLOCK)
    in_pages = in_page[:, None] + col[None, :]
    in_rows = (rows + row * row_stride + START)[:, None] + col[None, :]
    inside = (col < WIDTH)[None, :]
    if STORE:
        # Not masked by the slot, which is still on its way.
        tl.store(in_pages, tl.load(in_rows, mask=live[:, None] & inside), mask=used[:, None] & inside)
    else:
        tl.store(in_rows, tl.load(in_pages, mask=used[:, None] & inside, other=0), mask=live[:, None] & inside)


@triton.jit
def move_rows_kernel(
    pages,
    slots,
    rows,
    num_rows,
    num_slots,
    page_stride,
    row_stride,
    VECTOR: tl.constexpr,
    WIDTH0: tl.constexpr,
    WIDTH1: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK0: tl.constexpr,
    BLOCK1: tl.constexpr,
    STORE: tl.constexpr,
    OVERLAP: tl.constexpr,
    EARLY: tl.constexpr,
):
    wait_for_inputs(OVERLAP, EARLY)
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    live = row < num_rows
    slot = tl.load(slots + row, mask=live, other=-1).to(tl.int64)
    used = (slot >= 0) & (slot < num_slots)
    slot = tl.where(used, slot, 0)
    # Strides come in vectors, so that the compiler sees what they are multiples of.
    page_stride = page_stride * VECTOR
    row_stride = row_stride * VECTOR
    move_plane(pages, rows, row, slot, live, used, page_stride, row_stride, 0, WIDTH0, PAGE_SIZE, BLOCK0, STORE)
    if WIDTH1 > 0:
        move_plane(
            pages, rows, row, slot, live, used, page_stride, row_stride, WIDTH0, WIDTH1, PAGE_SIZE, BLOCK1, STORE
        )


def word_bytes(tensors: Sequence[Tensor], sizes: Sequence[int]) -> int:
    """Widest word that divides all sizes and strides (bytes) and the addresses and offsets of all uint8 tensors."""
    bounds = [*sizes, *(x.stride(0) for x in tensors if x.shape[0] > 1)]
    bounds += [place for x in tensors for place in (x.data_ptr(), int(x.storage_offset()))]
    return next(width for width in WORDS if all(bound % width == 0 for bound in bounds))


def vector_words(tensors: Sequence[Tensor], sizes: Sequence[int], word: int) -> int:
    """Words in 16 bytes where these divide all sizes and strides, else 1."""
    bounds = [*sizes, *(x.stride(0) for x in tensors if x.shape[0] > 1)]
    return 16 // word if all(bound % 16 == 0 for bound in bounds) else 1


def move_rows(
    pages: Tensor, slots: Tensor, rows: Tensor, planes: Sequence[int], page_size: int, *, store: bool
) -> None:
    if rows.numel() == 0:
        return
    word = word_bytes([pages, rows], planes)
    vector = vector_words([pages, rows], planes, word)
    widths = [width // word for width in planes] + [0] * (MAX_PLANES - len(planes))
    blocks = [triton.next_power_of_2(max(1, width)) for width in widths]
    per_program = rows_of_tile(blocks[0], word, len(slots))
    move_rows_kernel[(triton.cdiv(len(slots), per_program),)](
        as_words(pages, word),
        dense(slots),
        as_words(rows, word),
        len(slots),
        pages.shape[0] * page_size,
        pages.stride(0) // word // vector,
        rows.stride(0) // word // vector,
        VECTOR=vector,
        WIDTH0=widths[0],
        WIDTH1=widths[1],
        PAGE_SIZE=page_size,
        ROWS=per_program,
        BLOCK0=blocks[0],
        BLOCK1=blocks[1],
        STORE=store,
        num_warps=4 if per_program > 1 else 2,
        **overlapped(pages, early=len(slots) <= FEW_ROWS),
    )


def as_words(x: Tensor, word: int) -> Tensor:
    """uint8 [n, bytes] as [n, words], of the same memory; the strides of one row or none may be anything."""
    if x.shape[0] <= 1:
        x = x.as_strided(x.shape, (x.shape[1], 1))
    return x.view(WORDS[word])


def rows_of_tile(block: int, word: int, rows: int) -> int:
    """Rows of one program: single ones while they are too few to fill the chip."""
    return 1 if rows <= FEW_ROWS else max(1, min(TILE_BYTES // (block * word), TILE_WORDS // block))


@torch.library.custom_op("cptools::store_rows", mutates_args=("pages",))
def store_rows(pages: Tensor, slots: Tensor, rows: Tensor, planes: Sequence[int], page_size: int) -> None:
    """As ``cptools.kernels.kv_store.store_rows``."""
    move_rows(pages, slots, dense_rows(rows), planes, page_size, store=True)


@store_rows.register_fake
def fake_store_rows(pages: Tensor, slots: Tensor, rows: Tensor, planes: Sequence[int], page_size: int) -> None:
    pass


def compile_specs() -> list[CompileSpec]:
    return [*move_specs(store=True)]


def move_specs(*, store: bool) -> list[CompileSpec]:
    specs = []
    for name, planes in (("mla_fp8", (656,)), ("mla_bf16", (1152,)), ("index_fp8", (128, 4)), ("odd", (24, 1))):
        word = next(width for width in WORDS if all(plane % width == 0 for plane in planes))
        widths = [plane // word for plane in planes] + [0] * (MAX_PLANES - len(planes))
        blocks = [triton.next_power_of_2(max(1, width)) for width in widths]
        for rows in (1, 1 << 20):
            per_program = rows_of_tile(blocks[0], word, rows)
            constexprs = {
                "VECTOR": 16 // word if all(plane % 16 == 0 for plane in planes) else 1,
                "WIDTH0": widths[0],
                "WIDTH1": widths[1],
                "PAGE_SIZE": 64,
                "ROWS": per_program,
                "BLOCK0": blocks[0],
                "BLOCK1": blocks[1],
                "STORE": store,
                "OVERLAP": True,
                "EARLY": rows == 1,
            }
            element = {8: "*i64", 4: "*i32", 2: "*i16", 1: "*u8"}[word]
            sizes = ["num_rows", "num_slots", "page_stride", "row_stride"]
            pointers = {"pages": element, "slots": "*i64", "rows": element}
            specs.append(
                CompileSpec(
                    name=f"{'store' if store else 'gather'}_rows-{name}-{per_program}rows",
                    fn=move_rows_kernel,
                    signature=pointers | dict.fromkeys(sizes, "i32") | dict.fromkeys(constexprs, "constexpr"),
                    constexprs=constexprs,
                    num_warps=4 if per_program > 1 else 2,
                    options={"launch_pdl": True},
                    divisible_by_16=tuple(pointers),
                )
            )
    return specs
