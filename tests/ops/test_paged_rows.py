"""kv_store, kv_gather and PagedRows against a dictionary of rows."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from cptools.formats import BF16_MLA, FP8, FP8_INDEX, FP8_MLA, IndexRows, MlaRows
from cptools.kernels.kv_gather import gather_rows
from cptools.kernels.kv_store import page_planes, store_rows
from cptools.paged_rows import PagedRows

FORMATS = [
    BF16_MLA,
    FP8_MLA,
    FP8_INDEX,
    MlaRows(24, 8, torch.float32),
    MlaRows(24, 8, FP8),
    MlaRows(200, 0, FP8),
    IndexRows(16, torch.float32),
    IndexRows(128, torch.bfloat16),
    IndexRows(129, FP8),
]
NAMES = ["bf16_mla", "fp8_mla", "fp8_index", "fp32", "fp8_24", "fp8_200", "index_fp32", "index_bf16", "index_fp8_129"]
every_format = pytest.mark.parametrize("row_format", FORMATS, ids=NAMES)


def row_of(layer: int, slot: int, width: int) -> np.ndarray:
    """Bytes that no other (layer, slot) has, at any byte offset."""
    return np.random.default_rng([layer, slot]).integers(0, 256, width, dtype=np.uint8)


def rows_of(layer: int, slots: list[int], width: int) -> Tensor:
    rows = [row_of(layer, slot, width) for slot in slots]
    return torch.from_numpy(np.stack(rows) if rows else np.empty((0, width), dtype=np.uint8))


def ids(slots: list[int]) -> Tensor:
    return torch.tensor(slots, dtype=torch.int64)


@every_format
@pytest.mark.parametrize("page_size", [1, 5, 64])
def test_layers_do_not_alias(row_format, page_size) -> None:
    """Three layers in one slab, written interleaved in random order (field case E1)."""
    pages, width = 4, row_format.row_bytes
    paged = PagedRows(row_format, num_layers=3, num_pages=pages, page_size=page_size)
    assert paged.pages.shape == (3, pages, page_size * width)
    assert paged.pages.dtype == torch.uint8
    paged.pages.fill_(0xEE)
    rng = np.random.default_rng(page_size)
    slots = rng.permutation(pages * page_size).tolist()
    written, unwritten = slots[: len(slots) * 3 // 4], slots[len(slots) * 3 // 4 :]
    for part in np.array_split(written, 3):
        for layer in (2, 0, 1):
            paged.store(layer, ids(part.tolist()), rows_of(layer, part.tolist(), width))
    for layer in range(3):
        asked = rng.permutation(written).tolist()
        assert torch.equal(paged.gather(layer, ids(asked)), rows_of(layer, asked, width))
        assert (paged.gather(layer, ids(unwritten)) == 0xEE).all()


@every_format
def test_padding_slot_does_not_touch_page_0(row_format) -> None:
    """3 live and 5 padding rows: -1 is skipped, it is not slot 0 nor the last one (field case C10)."""
    width = row_format.row_bytes
    paged = PagedRows(row_format, num_layers=1, num_pages=3, page_size=4)
    paged.pages.fill_(0xEE)
    slots = [-1, 5, -1, 9, -1, -1, 6, -1]
    paged.store(0, ids(slots), torch.full((8, width), 0x11, dtype=torch.uint8))
    assert (paged.pages[0, 0] == 0xEE).all()
    everything = paged.gather(0, torch.arange(12))
    live = torch.zeros(12, dtype=torch.bool)
    live[[5, 9, 6]] = True
    assert (everything[live] == 0x11).all()
    assert (everything[~live] == 0xEE).all()


@every_format
def test_padding_slot_reads_zeros(row_format) -> None:
    width = row_format.row_bytes
    paged = PagedRows(row_format, num_layers=1, num_pages=2, page_size=4)
    paged.pages.fill_(0xEE)
    paged.store(0, ids([0, 7]), rows_of(0, [0, 7], width))
    read = paged.gather(0, ids([-1, 7, -1, 0, 7, -1]))
    assert not read[[0, 2, 5]].any()
    assert torch.equal(read[[1, 3, 4]], rows_of(0, [7, 0, 7], width))
    assert not paged.gather(0, ids([-1, -1])).any()


@every_format
def test_values_survive_the_pages(row_format) -> None:
    generator = torch.Generator().manual_seed(0)
    sizes = (row_format.latent, row_format.rope) if isinstance(row_format, MlaRows) else (row_format.dim,)
    rows = row_format.pack(*(torch.randn(11, size, generator=generator) for size in sizes))
    paged = PagedRows(row_format, num_layers=1, num_pages=2, page_size=8)
    slots = torch.randperm(16, generator=generator)[:11]
    paged.store(0, slots, rows)
    assert torch.equal(paged.gather(0, slots), rows)


def test_no_row_and_no_page() -> None:
    paged = PagedRows(FP8_MLA, num_layers=1, num_pages=2, page_size=4)
    paged.pages.fill_(0xEE)
    paged.store(0, ids([]), torch.empty(0, 656, dtype=torch.uint8))
    assert (paged.pages == 0xEE).all()
    assert paged.gather(0, ids([])).shape == (0, 656)
    none = PagedRows(FP8_MLA, num_layers=1, num_pages=0, page_size=4)
    none.store(0, ids([-1, -1]), torch.ones(2, 656, dtype=torch.uint8))
    read = none.gather(0, ids([-1, -1, -1]))
    assert read.shape == (3, 656)
    assert not read.any()
    with pytest.raises(ValueError, match=r"slots in \[0, 0\] do not fit 0 slots"):
        none.gather(0, ids([0]))


@pytest.mark.parametrize("bad", [-2, 12, 2**31, 2**62])
def test_slot_out_of_range_raises_and_changes_nothing(bad) -> None:
    paged = PagedRows(FP8_INDEX, num_layers=1, num_pages=3, page_size=4)
    paged.pages.fill_(0xEE)
    message = rf"slots in \[{min(bad, 3)}, {max(bad, 3)}\] do not fit 12 slots"
    with pytest.raises(ValueError, match=message):
        paged.store(0, ids([3, bad]), torch.zeros(2, 132, dtype=torch.uint8))
    with pytest.raises(ValueError, match=message):
        paged.gather(0, ids([3, bad]))
    assert (paged.pages == 0xEE).all()


def test_rows_that_do_not_fit_the_slots_raise() -> None:
    """Rows gathered from two ranks with the slot mapping of one must be rejected (field case A18)."""
    paged = PagedRows(FP8_MLA, num_layers=1, num_pages=3, page_size=4)
    paged.pages.fill_(0xEE)
    with pytest.raises(ValueError, match=r"uint8 \[3, 656\], got uint8 \[6, 656\]"):
        paged.store(0, ids([0, 1, 2]), torch.zeros(6, 656, dtype=torch.uint8))
    with pytest.raises(ValueError, match=r"uint8 \[3, 656\], got uint8 \[3, 655\]"):
        paged.store(0, ids([0, 1, 2]), torch.zeros(3, 655, dtype=torch.uint8))
    with pytest.raises(ValueError, match=r"uint8 \[3, 656\], got int8 \[3, 656\]"):
        paged.store(0, ids([0, 1, 2]), torch.zeros(3, 656, dtype=torch.int8))
    assert (paged.pages == 0xEE).all()


@pytest.mark.parametrize(
    "sizes", [{"num_layers": -1}, {"num_pages": -1}, {"page_size": 0}], ids=["layers", "pages", "page_size"]
)
def test_wrong_sizes_raise(sizes) -> None:
    name, value = next(iter(sizes.items()))
    with pytest.raises(ValueError, match=f"{name}={value}"):
        PagedRows(FP8_MLA, **({"num_layers": 1, "num_pages": 1, "page_size": 4} | sizes))


def test_planes_tile_a_page() -> None:
    """Every byte of a page belongs to exactly one (plane, row, column)."""
    pages = torch.zeros(2, 5 * 11, dtype=torch.uint8)
    widths = []
    for view, start, stop in page_planes(pages, (4, 1, 6), 5):
        assert view.shape == (2, 5, stop - start)
        view += 1
        widths.append((start, stop))
    assert widths == [(0, 4), (4, 5), (5, 11)]
    assert (pages == 1).all()


def test_slot_beyond_2_31_bytes(virtual_bytes: Callable[[int], Tensor]) -> None:
    """Slot 3,728,271 of 656-byte rows starts beyond 2^31 and must not wrap, in any layer (field case D9)."""
    slot, pages = 3_728_271, 3_728_271 // 64 + 1
    assert slot * 656 > 2**31
    paged = PagedRows(FP8_MLA, num_layers=2, num_pages=0, page_size=64)
    paged.pages = virtual_bytes(2 * pages * 64 * 656).view(2, pages, 64 * 656)
    wrapped = slot - 2**31 // 656  # where a 32-bit byte offset would read
    slots = [wrapped - 1, wrapped, slot - 1, slot]
    for layer in (0, 1):
        paged.store(layer, ids(slots), rows_of(layer, slots, 656))
    for layer in (0, 1):
        assert torch.equal(paged.gather(layer, ids(slots)), rows_of(layer, slots, 656))
        offset = layer * pages * 64 * 656 + slot * 656
        assert np.array_equal(paged.pages.view(-1)[offset : offset + 656].numpy(), row_of(layer, slot, 656))


@pytest.mark.parametrize(
    "planes, slot",
    [
        ((576,), 3_728_271),
        ((576 * 4,), 3_728_271),
        ((128, 4), 2**31 // 132 + 64),
        ((1024,), 2_097_153),
        ((1024 * 4,), 2_097_153),
    ],
)
def test_slot_times_row_beyond_2_31(planes, slot, virtual_bytes: Callable[[int], Tensor]) -> None:
    """Rows of 576 or 1024 bytes or floats, beyond 2^31 bytes or elements (field cases D9 and D12)."""
    width, page_size = sum(planes), 64
    assert slot * width > 2**31
    memory = virtual_bytes((slot // page_size + 1) * page_size * width)
    pages = memory.view(-1, page_size * width)
    slots = [slot, 0, 1, page_size, slot - 1]
    store_rows(pages, ids(slots), rows_of(0, slots, width), planes=planes, page_size=page_size)
    assert torch.equal(gather_rows(pages, ids(slots), planes=planes, page_size=page_size), rows_of(0, slots, width))
    page, offset = divmod(slot, page_size)
    at = page * page_size * width  # the byte address, in Python's integers
    for i, plane in enumerate(planes):
        start = at + page_size * sum(planes[:i]) + offset * plane
        column = sum(planes[:i])
        assert np.array_equal(memory[start : start + plane].numpy(), row_of(0, slot, width)[column : column + plane])
