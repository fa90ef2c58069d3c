"""Row ops on the CPU: the reference of the newer ones, what is refused, and that every op says what would run."""

from dataclasses import replace

import pytest
import torch

from cptools.formats import BF16_MLA, FP8_INDEX, FP8_MLA, IndexRows, MlaRows
from cptools.kernels.impl import Choice
from cptools.kernels.kv_gather import (
    choose_copy_rows,
    choose_gather_rows,
    choose_gather_sequences,
    choose_unpack_rows,
    copy_rows,
    unpack_rows,
)
from cptools.kernels.kv_store import choose_store_rows
from cptools.kernels.lse_merge import choose_merge_states, merge_states
from cptools.kernels.norm_rope_store import IndexInput, MlaInput, choose_norm_rope_store, norm_rope_store
from cptools.kernels.rowwise import RopeAngles, layer_norm, rms_norm, rope_interleaved
from cptools.paged_rows import PagedRows

SLOTS = torch.tensor([9, -1, 0, 5])


def inputs(mla_format: MlaRows = FP8_MLA, index_format: IndexRows = FP8_INDEX) -> tuple[MlaInput, IndexInput]:
    generator = torch.Generator().manual_seed(0)
    normal = lambda *shape: torch.randn(*shape, generator=generator)
    fill = lambda width: torch.full((3, 4 * width), 0xEE, dtype=torch.uint8)
    mla = MlaInput(normal(4, 512), normal(4, 64), normal(512), 1e-5, fill(mla_format.row_bytes), mla_format)
    index = IndexInput(normal(4, 128), normal(128), normal(128), 1e-6, fill(index_format.row_bytes), index_format)
    return mla, index


@pytest.mark.parametrize("mla_format, index_format", [(FP8_MLA, FP8_INDEX), (BF16_MLA, IndexRows(128, torch.float32))])
def test_norm_rope_store_is_its_steps(mla_format, index_format) -> None:
    mla, index = inputs(mla_format, index_format)
    angles = RopeAngles.at(torch.tensor([3, 1, 1000, 77]), 64, 1e4)
    norm_rope_store(SLOTS, angles, mla=mla, index=index, page_size=4)
    key = layer_norm(index.key, index.norm_weight, index.norm_bias, 1e-6)
    rows = {
        mla_format: mla_format.pack(rms_norm(mla.c_kv, mla.norm_weight, 1e-5), rope_interleaved(mla.k_pe, angles)),
        index_format: index_format.pack(torch.cat([rope_interleaved(key[:, :64], angles), key[:, 64:]], dim=1)),
    }
    for part in (mla, index):
        paged = PagedRows(part.row_format, num_layers=1, num_pages=3, page_size=4)
        paged.pages.fill_(0xEE)
        paged.store(0, SLOTS, rows[part.row_format])
        assert torch.equal(part.pages, paged.pages[0])


def test_parts_of_norm_rope_store_may_be_missing() -> None:
    mla, index = inputs()
    norm_rope_store(SLOTS, None, page_size=4)
    norm_rope_store(SLOTS, None, mla=replace(mla, norm_weight=None), page_size=4)
    expected = PagedRows(FP8_MLA, num_layers=1, num_pages=3, page_size=4)
    expected.pages.fill_(0xEE)
    expected.store(0, SLOTS, FP8_MLA.pack(mla.c_kv, mla.k_pe))
    assert torch.equal(mla.pages, expected.pages[0])
    assert (index.pages == 0xEE).all()
    norm_rope_store(SLOTS, None, index=replace(index, norm_weight=None, norm_bias=None), page_size=4)
    assert (index.pages != 0xEE).any()


@pytest.mark.parametrize(
    "change, message",
    [
        ({"c_kv": torch.zeros(4, 511)}, r"c_kv must be .* \[4, 512\], got float32 \[4, 511\]"),
        ({"k_pe": torch.zeros(3, 64)}, r"k_pe must be .* \[4, 64\], got float32 \[3, 64\]"),
        ({"norm_weight": torch.zeros(64)}, r"norm_weight must be .* \[512\], got float32 \[64\]"),
        ({"pages": torch.zeros(3, 4 * 655, dtype=torch.uint8)}, r"uint8 \[any, 2624\], got uint8 \[3, 2620\]"),
        ({"pages": torch.zeros(3, 4 * 656)}, r"uint8 \[any, 2624\], got float32 \[3, 2624\]"),
    ],
)
def test_norm_rope_store_refuses(change, message) -> None:
    with pytest.raises(ValueError, match=message):
        norm_rope_store(SLOTS, None, mla=replace(inputs()[0], **change), page_size=4)


def test_norm_rope_store_refuses_half_a_norm_and_wrong_angles() -> None:
    mla, index = inputs()
    with pytest.raises(ValueError, match="both norm_weight and norm_bias"):
        norm_rope_store(SLOTS, None, index=replace(index, norm_bias=None), page_size=4)
    with pytest.raises(ValueError, match=r"cos must be .* \[4, 32\], got float32 \[4, 16\]"):
        norm_rope_store(SLOTS, RopeAngles.at(torch.arange(4), 32, 1e4), mla=mla, page_size=4)
    with pytest.raises(ValueError, match="65 pairs to rotate in a key of dim=128"):
        norm_rope_store(SLOTS, RopeAngles.at(torch.arange(4), 130, 1e4), index=index, page_size=4)
    with pytest.raises(ValueError, match=r"slots in \[-1, 12\] do not fit 12 slots"):
        norm_rope_store(torch.tensor([0, 12, -1, 1]), None, mla=mla, page_size=4)


def test_unpacked_rows() -> None:
    values, rope = torch.randn(6, 512), torch.randn(6, 64)
    rows = FP8_MLA.pack(values, rope)
    everything = FP8_MLA.unpack_joint(rows)
    assert torch.equal(unpack_rows(rows, None, row_format=FP8_MLA, page_size=1), everything.bfloat16())
    read = unpack_rows(
        rows.view(3, 2 * 656), torch.tensor([5, -1, 0]), row_format=FP8_MLA, page_size=2, dtype=torch.float32
    )
    assert torch.equal(read[[0, 2]], everything[[5, 0]])
    assert not read[1].any()


def test_copied_rows() -> None:
    source, target = torch.arange(50, dtype=torch.uint8).view(5, 10), torch.zeros(4, 10, dtype=torch.uint8)
    copy_rows(source, torch.tensor([4, -1, 0, 5, 2]), target, torch.tensor([0, 1, 3, 2, 4]))
    assert torch.equal(target[[0, 3]], source[[4, 0]])
    assert not target[[1, 2]].any()
    with pytest.raises(ValueError, match=r"source must be uint8 \[any, 9\], got uint8 \[5, 10\]"):
        copy_rows(source, SLOTS, target[:, :9], SLOTS)
    with pytest.raises(ValueError, match=r"source_rows must be int64 or int32 \[3\], got int64 \[4\]"):
        copy_rows(source, SLOTS, target, SLOTS[:3])


def test_merge_takes_one_tensor_and_a_dtype() -> None:
    outs, lses = torch.randn(3, 4, 2, 8), torch.randn(3, 4, 2)
    out, lse = merge_states(list(outs), list(lses))
    stacked, stacked_lse = merge_states(outs, lses)
    assert torch.equal(stacked, out)
    assert torch.equal(stacked_lse, lse)
    assert torch.equal(merge_states(outs, lses, out_dtype=torch.bfloat16)[0], out.bfloat16())


def on_cpu(impl: str) -> list[Choice]:
    pages, slots = torch.zeros(1, 656, dtype=torch.uint8), torch.zeros(1, dtype=torch.int64)
    rows = torch.zeros(1, 656, dtype=torch.uint8)
    mla, index = inputs()
    return [
        choose_merge_states([torch.zeros(1, 1, 1)], impl=impl),
        choose_store_rows(pages, slots, rows, planes=(656,), impl=impl),
        choose_gather_rows(pages, slots, planes=(656,), impl=impl),
        choose_gather_sequences(pages, slots[None], planes=(656,), impl=impl),
        choose_unpack_rows(pages, slots, row_format=FP8_MLA, impl=impl),
        choose_copy_rows(rows, slots, rows, slots, impl=impl),
        choose_norm_rope_store(SLOTS, None, mla=mla, index=index, page_size=4, impl=impl),
    ]


def test_the_cpu_takes_the_reference_and_says_why() -> None:
    for choice in on_cpu("auto"):
        assert choice == Choice("reference", "triton: tensors are on cpu")
    with pytest.raises(ValueError, match="impl='triton' does not serve these inputs: tensors are on cpu"):
        on_cpu("triton")


@pytest.mark.parametrize(
    "choice, reason",
    [
        (lambda: choose_merge_states([torch.zeros(1, 1, 1).double()]), "float64"),
        (lambda: choose_store_rows(*[torch.zeros(1, 9)] * 3, planes=(1, 2, 3)), "3 planes"),
        (lambda: choose_unpack_rows(torch.zeros(1, 9), None, row_format=BF16_MLA), "rows are torch.bfloat16"),
        (
            lambda: choose_norm_rope_store(
                SLOTS, None, mla=replace(inputs()[0], row_format=MlaRows(384, 64, torch.float32)), page_size=4
            ),
            "latent=384 is not",
        ),
    ],
)
def test_other_reasons_of_a_fallback(choice, reason) -> None:
    assert choice().impl == "reference"
    assert reason in choice().fallback_reason
