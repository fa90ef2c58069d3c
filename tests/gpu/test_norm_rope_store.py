"""The fused store on the GPU: the bytes of row_format.pack, and of the reference where the norm's sums are exact."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from cptools.formats import BF16_MLA, FP8, FP8_INDEX, FP8_MLA, IndexRows, MlaRows
from cptools.kernels.kv_gather import gather_rows
from cptools.kernels.norm_rope_store import (
    IndexInput,
    MlaInput,
    choose_norm_rope_store,
    norm_rope_store,
    reference,
)
from cptools.kernels.rowwise import RopeAngles

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda")
FORMATS = [
    (FP8_MLA, FP8_INDEX),
    (MlaRows(512, 64, FP8, False), IndexRows(128, FP8, False)),
    (BF16_MLA, IndexRows(128, torch.bfloat16)),
    (MlaRows(256, 16, torch.float32), IndexRows(256, torch.float32)),
    (MlaRows(128, 32, FP8), IndexRows(256, FP8)),
]
formats = pytest.mark.parametrize("mla_format, index_format", FORMATS)


def adversarial(tokens: int, width: int, dtype: torch.dtype) -> Tensor:
    """Rows of all magnitudes: zeros, all equal, one dominating, huge, subnormal scales, exact block maxima."""
    x = torch.randn(tokens, width, device=CUDA) * torch.exp2(torch.randint(-30, 30, (tokens, 1), device=CUDA))
    for row, fill in enumerate((0.0, -0.0, 3.0, 1e30, -1e30, 448.0, 449.0, 1e-6, 448 * 2.0**-13, 1e-38)):
        if row < tokens:
            x[row] = fill
    if tokens > 12:
        x[10, 5], x[11, :64] = 1e4, -448.0
    return x.to(dtype)


def inputs(
    tokens: int, mla_format: MlaRows, index_format: IndexRows, dtype: torch.dtype, *, pages: int, page_size: int
):
    c_kv, k_pe = adversarial(tokens, mla_format.latent + mla_format.rope, dtype).split(
        [mla_format.latent, mla_format.rope], dim=1
    )
    fill = lambda width: torch.full((pages, page_size * width), 0xEE, dtype=torch.uint8, device=CUDA)
    mla = MlaInput(c_kv, k_pe, None, 1e-5, fill(mla_format.row_bytes), mla_format)
    key = adversarial(tokens, index_format.dim, dtype)
    index = IndexInput(key, None, None, 1e-6, fill(index_format.row_bytes), index_format)
    slots = torch.randperm(pages * page_size, device=CUDA)[:tokens]
    slots[4::5] = -1
    return slots, mla, index


def with_norms(mla: MlaInput, index: IndexInput, dtype: torch.dtype) -> tuple[MlaInput, IndexInput]:
    weight = lambda width: (1 + 0.1 * torch.randn(width, device=CUDA)).to(dtype)
    return replace(mla, norm_weight=weight(mla.row_format.latent)), replace(
        index, norm_weight=weight(index.row_format.dim), norm_bias=weight(index.row_format.dim)
    )


@formats
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("tokens", [1, 700, 5000])
def test_quantise_and_store_writes_the_bytes_of_pack(mla_format, index_format, dtype, tokens) -> None:
    slots, mla, index = inputs(tokens, mla_format, index_format, dtype, pages=100, page_size=64)
    assert choose_norm_rope_store(slots, None, mla=mla, index=index, page_size=64).impl == "triton"
    norm_rope_store(slots, None, mla=mla, index=index, page_size=64)
    # Packed on the CPU: a division by 448 there is a division, on the GPU a product.
    rows = [mla_format.pack(mla.c_kv.cpu(), mla.k_pe.cpu()), index_format.pack(index.key.cpu())]
    kept = slots >= 0
    for part, packed in ((mla, rows[0]), (index, rows[1])):
        planes = part.row_format.planes
        stored = gather_rows(part.pages, slots[kept], planes=planes, page_size=64)
        assert torch.equal(stored.cpu(), packed[kept.cpu()])
        others = torch.ones(6400, dtype=torch.bool, device=CUDA)
        others[slots[kept]] = False
        untouched = gather_rows(part.pages, others.nonzero()[:, 0], planes=planes, page_size=64)
        assert (untouched == 0xEE).all()


@formats
@pytest.mark.parametrize("tokens", [1, 700, 5000])
def test_norm_and_rotation_against_the_reference(mla_format, index_format, tokens) -> None:
    slots, mla, index = inputs(tokens, mla_format, index_format, torch.bfloat16, pages=100, page_size=64)
    # A layer norm of huge equal values is all rounding: those rows are for the store alone.
    for x in (mla.c_kv, mla.k_pe, index.key):
        x[3:5] = torch.randn_like(x[3:5])
    mla, index = with_norms(mla, index, torch.bfloat16)
    angles = RopeAngles.at(torch.randint(0, 1 << 20, (tokens,), device=CUDA), mla_format.rope, 8e6)
    theirs = replace(mla, pages=mla.pages.clone()), replace(index, pages=index.pages.clone())
    norm_rope_store(slots, angles, mla=mla, index=index, page_size=64, impl="triton")
    reference.norm_rope_store(slots, angles, mla=theirs[0], index=theirs[1], page_size=64)
    for ours, other in ((mla, theirs[0]), (index, theirs[1])):
        differ = (ours.pages != other.pages).sum().item()
        # The reference's division by 448 is a product on the GPU: scales that are no powers of two differ in a bit.
        share = 2e-3 if ours.row_format.power_of_two_scales else 1e-2
        assert differ <= share * tokens * ours.row_format.row_bytes + 8
        unpack = getattr(ours.row_format, "unpack_joint", ours.row_format.unpack)
        rows = [
            unpack(gather_rows(x.pages, slots, planes=x.row_format.planes, page_size=64)).double()
            for x in (ours, other)
        ]
        rounding = 2**-3 if ours.row_format.dtype == FP8 else 2**-7
        torch.testing.assert_close(*rows, rtol=rounding, atol=1e-3 * rows[1].abs().amax().item())


def test_norm_with_exact_sums_gives_the_bytes_of_the_reference() -> None:
    """Small integers: the sum of squares is exact in any order."""
    slots, mla, index = inputs(3000, FP8_MLA, FP8_INDEX, torch.bfloat16, pages=60, page_size=64)
    mla = replace(mla, c_kv=torch.randint(-3, 4, (3000, 512), device=CUDA).bfloat16())
    mla, _ = with_norms(mla, index, torch.bfloat16)
    angles = RopeAngles.at(torch.arange(3000, device=CUDA), 64, 8e6)
    other = replace(mla, pages=mla.pages.clone())
    norm_rope_store(slots, angles, mla=mla, page_size=64, impl="triton")
    reference.norm_rope_store(slots, angles, mla=other, index=None, page_size=64)
    assert torch.equal(mla.pages, other.pages)


def test_nan_and_infinity_stay_visible() -> None:
    slots, mla, index = inputs(20, FP8_MLA, FP8_INDEX, torch.float32, pages=1, page_size=64)
    slots = torch.arange(20, device=CUDA)
    mla.c_kv[3, 130], mla.c_kv[4, 511], index.key[5, 7], index.key[6, 0] = torch.nan, torch.inf, torch.nan, -torch.inf
    mla.k_pe[3, 1] = torch.nan
    norm_rope_store(slots, None, mla=mla, index=index, page_size=64, impl="triton")
    rows = FP8_MLA.unpack_joint(gather_rows(mla.pages, slots, planes=FP8_MLA.planes, page_size=64))
    expected = FP8_MLA.unpack_joint(FP8_MLA.pack(mla.c_kv, mla.k_pe))
    torch.testing.assert_close(rows, expected, rtol=0, atol=0, equal_nan=True)
    keys = FP8_INDEX.unpack(gather_rows(index.pages, slots, planes=FP8_INDEX.planes, page_size=64))
    torch.testing.assert_close(keys, FP8_INDEX.unpack(FP8_INDEX.pack(index.key)), rtol=0, atol=0, equal_nan=True)


def test_one_part_alone_and_slots_out_of_range() -> None:
    slots, mla, index = inputs(40, FP8_MLA, FP8_INDEX, torch.bfloat16, pages=2, page_size=64)
    slots[:4] = torch.tensor([-7, 2147480000, 128, 2**40], device=CUDA)
    both = replace(mla, pages=mla.pages.clone()), replace(index, pages=index.pages.clone())
    norm_rope_store(slots, None, mla=mla, page_size=64)
    norm_rope_store(slots, None, index=index, page_size=64)
    norm_rope_store(slots, None, mla=both[0], index=both[1], page_size=64)
    assert torch.equal(mla.pages, both[0].pages)
    assert torch.equal(index.pages, both[1].pages)
    slots = torch.where((slots < 0) | (slots >= 128), -1, slots)
    expected = replace(mla, pages=torch.full_like(mla.pages, 0xEE))
    reference.norm_rope_store(slots, None, mla=expected, index=None, page_size=64)
    assert torch.equal(mla.pages, expected.pages)
    norm_rope_store(slots[:0], None, mla=replace(mla, c_kv=mla.c_kv[:0], k_pe=mla.k_pe[:0]), page_size=64)


def test_row_beyond_2_31_bytes() -> None:
    slot = 3_728_271
    _, mla, _ = inputs(2, FP8_MLA, FP8_INDEX, torch.bfloat16, pages=1, page_size=64)
    mla = replace(mla, pages=torch.empty(slot // 64 + 1, 64 * 656, dtype=torch.uint8, device=CUDA))
    norm_rope_store(torch.tensor([slot, 5], device=CUDA), None, mla=mla, page_size=64)
    packed = FP8_MLA.pack(mla.c_kv, mla.k_pe)
    assert torch.equal(mla.pages.view(-1)[slot * 656 : (slot + 1) * 656], packed[0])
    assert torch.equal(mla.pages.view(-1)[5 * 656 : 6 * 656], packed[1])


def test_graph_replays_on_changed_contents() -> None:
    slots, mla, index = inputs(50, FP8_MLA, FP8_INDEX, torch.bfloat16, pages=4, page_size=64)
    mla, index = with_norms(mla, index, torch.bfloat16)
    angles = RopeAngles.at(torch.arange(50, device=CUDA), 64, 8e6)
    call = lambda: norm_rope_store(slots, angles, mla=mla, index=index, page_size=64)
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    for _ in range(2):
        mla.c_kv.normal_(), index.key.normal_()
        slots.copy_(torch.randperm(256, device=CUDA)[:50])
        graph.replay()
        replayed = mla.pages.clone(), index.pages.clone()
        call()
        assert torch.equal(replayed[0], mla.pages)
        assert torch.equal(replayed[1], index.pages)


def test_opcheck() -> None:
    from cptools.kernels.norm_rope_store import triton

    slots, mla, index = inputs(9, FP8_MLA, FP8_INDEX, torch.bfloat16, pages=1, page_size=64)
    tail = (FP8, FP8, 1e-5, 1e-6, True, True, 64)
    rows = (mla.c_kv, mla.k_pe, None, mla.pages)
    torch.library.opcheck(triton.norm_rope_store, (slots, None, None, *rows, index.key, None, None, index.pages, *tail))
    torch.library.opcheck(triton.norm_rope_store, (slots, None, None, *rows, None, None, None, None, *tail))
