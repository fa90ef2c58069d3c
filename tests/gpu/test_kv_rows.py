"""Rows into pages, out of pages and over the bus on the GPU: byte for byte what the reference does."""

import pytest
import torch
from torch import Tensor

from cptools.formats import BF16_MLA, FP8, FP8_MLA, MlaRows
from cptools.kernels.kv_gather import (
    choose_copy_rows,
    choose_gather_rows,
    copy_rows,
    gather_rows,
    gather_sequences,
    unpack_rows,
)
from cptools.kernels.kv_gather import reference as gather_reference
from cptools.kernels.kv_store import choose_store_rows, store_rows
from cptools.kernels.kv_store import reference as store_reference

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda")
PLANES = [(656,), (1152,), (2304,), (128, 4), (129, 8), (7, 1), (24,)]
FAR = [-1, -7, 2147480000, 2**40]


def random_bytes(*shape: int) -> Tensor:
    return torch.randint(0, 256, shape, dtype=torch.uint8, device=CUDA)


def some_slots(count: int, of: int) -> Tensor:
    """Unique slots in random order with holes."""
    slots = torch.randperm(of, device=CUDA)[:count]
    slots[3::4] = -1
    return slots


@pytest.mark.parametrize("planes", PLANES)
@pytest.mark.parametrize("page_size, pages, count", [(64, 50, 3000), (5, 40, 150), (1, 30, 30)])
def test_rows_by_slot(planes, page_size, pages, count) -> None:
    width = sum(planes)
    ours = random_bytes(pages, page_size * width)
    theirs = ours.clone()
    slots, rows = some_slots(count, pages * page_size), random_bytes(count, width)
    assert choose_store_rows(ours, slots, rows, planes=planes).impl == "triton"
    assert choose_gather_rows(ours, slots, planes=planes).impl == "triton"
    store_rows(ours, slots, rows, planes=planes, page_size=page_size)
    store_reference.store_rows(theirs, slots, rows, planes=planes, page_size=page_size)
    assert torch.equal(ours, theirs)
    expected = gather_reference.gather_rows(theirs, slots, planes=planes, page_size=page_size)
    assert torch.equal(gather_rows(ours, slots, planes=planes, page_size=page_size), expected)


@pytest.mark.parametrize("planes", [(656,), (128, 4)])
def test_slots_out_of_range_are_skipped_and_read_zeros(planes) -> None:
    width = sum(planes)
    pages = random_bytes(4, 64 * width)
    before = pages.clone()
    slots = torch.tensor([*FAR, 4 * 64, -(2**62)], device=CUDA)
    store_rows(pages, slots, random_bytes(6, width), planes=planes, page_size=64)
    assert torch.equal(pages, before)
    assert not gather_rows(pages, slots, planes=planes, page_size=64).any()
    store_rows(pages[:0], slots, random_bytes(6, width), planes=planes, page_size=64)
    assert not gather_rows(pages[:0], slots, planes=planes, page_size=64).any()
    assert gather_rows(pages, slots[:0], planes=planes, page_size=64).shape == (0, width)


def test_strided_rows_and_odd_addresses() -> None:
    memory = random_bytes(8 * 656 * 16 + 1)
    pages = memory[1:].view(8, 656 * 16)
    slots, rows = some_slots(100, 128), random_bytes(100, 700)[:, 3:659]
    expected = pages.clone()
    store_reference.store_rows(expected, slots, rows, planes=(656,), page_size=16)
    store_rows(pages, slots, rows, planes=(656,), page_size=16, impl="triton")
    assert torch.equal(pages, expected)


def test_rows_beyond_2_31_bytes() -> None:
    slot = 3_728_271
    pages = torch.empty(slot // 64 + 1, 64 * 656, dtype=torch.uint8, device=CUDA)
    slots = torch.tensor([slot, slot - 2**31 // 656, slot - 1, 0], device=CUDA)
    rows = random_bytes(4, 656)
    store_rows(pages, slots, rows, planes=(656,), page_size=64)
    for row, at in zip(rows, slots.tolist(), strict=True):
        assert torch.equal(pages.view(-1)[at * 656 : (at + 1) * 656], row)
    assert torch.equal(gather_rows(pages, slots, planes=(656,), page_size=64), rows)
    target = torch.zeros(4, 656, dtype=torch.uint8, device=CUDA)
    copy_rows(pages.view(-1, 656), slots, target, torch.arange(4, device=CUDA))
    assert torch.equal(target, rows)


@pytest.mark.parametrize("planes", [(656,), (1152,), (128, 4), (129, 8)])
@pytest.mark.parametrize("page_size", [64, 16, 5])
def test_sequences(planes, page_size) -> None:
    pages = random_bytes(30, page_size * sum(planes))
    tables = torch.randint(0, 30, (5, 9), device=CUDA)
    for lens in ([9 * page_size, 0, 1, page_size, 3 * page_size + 1], [0, 0, 1, 0, 0], [0] * 5):
        expected = gather_reference.gather_sequences(pages, tables, lens, planes=planes, page_size=page_size)
        got = gather_sequences(pages, tables, lens, planes=planes, page_size=page_size, impl="triton")
        assert torch.equal(got, expected)
    with pytest.raises(ValueError, match="do not fit tables"):
        gather_sequences(pages, tables, [9 * page_size + 1, 0, 0, 0, 0], planes=planes, page_size=page_size)


def test_pages_that_do_not_exist_read_zeros() -> None:
    pages = random_bytes(3, 4 * 656)
    tables = torch.tensor([[0, -1, 3, 2147480000, 2]], device=CUDA)
    got = gather_sequences(pages, tables, [20], planes=(656,), page_size=4)
    assert torch.equal(got[:4].flatten(), pages[0])
    assert torch.equal(got[16:].flatten(), pages[2])
    assert not got[4:16].any()


@pytest.mark.parametrize("row_format", [FP8_MLA, MlaRows(256, 16, FP8, False), BF16_MLA, MlaRows(128, 0, FP8)])
@pytest.mark.parametrize("count", [7, 5000])
def test_unpacked(row_format, count) -> None:
    values = torch.randn(count, row_format.latent, device=CUDA) * torch.exp(4 * torch.randn(count, 1, device=CUDA))
    rows = row_format.pack(values, torch.randn(count, row_format.rope, device=CUDA))
    slots = torch.randint(-1, count, (count + 3,), device=CUDA)
    for dtype in (torch.bfloat16, torch.float32):
        everything = row_format.unpack_joint(rows).to(dtype)
        assert torch.equal(unpack_rows(rows, None, row_format=row_format, page_size=1, dtype=dtype), everything)
        expected = torch.where((slots >= 0)[:, None], everything[slots.clamp(min=0)], 0)
        assert torch.equal(unpack_rows(rows, slots, row_format=row_format, page_size=1, dtype=dtype), expected)
    paged = torch.zeros(count // 4 + 1, 4 * row_format.row_bytes, dtype=torch.uint8, device=CUDA)
    paged.view(-1)[: rows.numel()] = rows.flatten()
    got = unpack_rows(paged, torch.arange(count, device=CUDA), row_format=row_format, page_size=4)
    assert torch.equal(got, row_format.unpack_joint(rows).bfloat16())


@pytest.mark.parametrize("width", [656, 1152, 132, 7])
@pytest.mark.parametrize("count", [1, 204, 5000])
def test_rows_from_the_host(width, count) -> None:
    source = torch.randint(0, 256, (6000, width), dtype=torch.uint8).pin_memory()
    target = random_bytes(5500, width)
    here, there = torch.randint(0, 6000, (count,), device=CUDA), torch.randperm(5500, device=CUDA)[:count]
    here[5::7] = -1
    here[6::7], there[2::11] = 2147480000, 5500
    expected = target.clone()
    gather_reference.copy_rows(source, here, expected, there)
    assert choose_copy_rows(source, here, target, there).impl == "triton"
    copy_rows(source, here, target, there)
    assert torch.equal(target, expected)
    unpinned = torch.empty(6000, width, dtype=torch.uint8)
    assert "not pinned" in str(choose_copy_rows(unpinned, here, target, there).fallback_reason)


def test_graph_replays_on_changed_contents() -> None:
    pages, rows, slots = random_bytes(20, 64 * 132), random_bytes(30, 132), some_slots(30, 20 * 64)
    source = torch.randint(0, 256, (100, 656), dtype=torch.uint8).pin_memory()
    target, ids = random_bytes(30, 656), torch.arange(30, device=CUDA)

    def step() -> Tensor:
        store_rows(pages, slots, rows, planes=(128, 4), page_size=64)
        copy_rows(source, ids, target, ids)
        return gather_rows(pages, slots, planes=(128, 4), page_size=64)

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        read = step()
    for _ in range(2):
        rows.copy_(random_bytes(30, 132))
        slots.copy_(some_slots(30, 20 * 64))
        source.copy_(torch.randint(0, 256, (100, 656), dtype=torch.uint8))
        graph.replay()
        assert torch.equal(read, torch.where((slots >= 0)[:, None], rows, 0))
        assert torch.equal(target.cpu(), source[:30])


def test_opcheck() -> None:
    from cptools.kernels.kv_gather import triton as gather
    from cptools.kernels.kv_store import triton as store

    pages, rows, slots = random_bytes(4, 64 * 132), random_bytes(9, 132), some_slots(9, 256)
    torch.library.opcheck(store.store_rows, (pages, slots, rows, [128, 4], 64))
    torch.library.opcheck(gather.gather_rows, (pages, slots, [128, 4], 64))
    tables = torch.tensor([[0, 1], [3, 2]], device=CUDA)
    torch.library.opcheck(gather.gather_sequences, (pages, tables, [100, 3], [128, 4], 64))
    packed = FP8_MLA.pack(torch.randn(9, 512, device=CUDA), torch.randn(9, 64, device=CUDA))
    torch.library.opcheck(gather.unpack_fp8_rows, (packed, None, 512, 64, 1, torch.bfloat16))
    torch.library.opcheck(gather.copy_rows, (rows, slots % 9, random_bytes(9, 132), torch.arange(9, device=CUDA)))
