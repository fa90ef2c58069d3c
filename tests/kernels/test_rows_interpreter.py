"""Row kernels and the merge under Triton's interpreter: the arithmetic of addresses, without a GPU.

The interpreter must be chosen before triton is imported, so the checks run in processes of their own. It truncates
where it should round to bfloat16 and to subnormal FP8, so only values that need no rounding are stored here.
"""

import os
import subprocess
import sys
from collections.abc import Callable

import pytest

pytest.importorskip("triton", reason="interpreting kernels needs triton")


def check_merge() -> None:
    import torch

    from cptools.kernels.lse_merge import reference, triton

    triton.FEWEST_ROWS, triton.FEW_ROWS = 4, 12

    generator = torch.Generator().manual_seed(0)
    for p, t, h, d in [
        (1, 3, 2, 64),
        (2, 5, 3, 40),
        (8, 2, 2, 16),
        (9, 2, 3, 24),
        (20, 2, 2, 8),
        (2, 1, 1, 600),
        (2, 5, 4, 128),
        (2, 6, 3, 64),
        (2, 4, 4, 64),
    ]:
        outs = torch.randn(p, t, h, d, generator=generator)
        lses = 10 * torch.randn(p, t, h, generator=generator)
        lses[torch.rand(p, t, h, generator=generator) < 0.3] = -torch.inf
        lses[:, 0, 0] = -torch.inf
        outs[torch.isneginf(lses)] = torch.nan
        lses[p - 1, t - 1, h - 1] = torch.nan if t > 1 else torch.inf
        expected = reference.merge_states(list(outs), list(lses))
        for parts in ((outs, lses), (list(outs), list(lses))):
            torch.testing.assert_close(
                triton.merge(*parts, torch.float32), expected, rtol=2e-6, atol=1e-6, equal_nan=True
            )


def check_moves() -> None:
    import torch

    from cptools.kernels.kv_gather import reference as gather_reference
    from cptools.kernels.kv_gather import triton as gather
    from cptools.kernels.kv_store import reference as store_reference
    from cptools.kernels.kv_store import triton as store

    generator = torch.Generator().manual_seed(0)
    some = lambda *shape: torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)
    for planes in [(656,), (1152,), (128, 4), (129, 8), (24,), (7, 1)]:
        for page_size in (1, 5, 64):
            sizes = {"planes": planes, "page_size": page_size}
            pages, width = 40 if page_size == 1 else 6, sum(planes)
            ours = some(pages, page_size * width)
            theirs = ours.clone()
            slots = torch.randperm(pages * page_size, generator=generator)[:13]
            slots[::4] = -1
            rows = some(len(slots), width)
            store_reference.store_rows(theirs, slots, rows, **sizes)
            beyond = slots.clone()
            beyond[:9:4] = torch.tensor([pages * page_size, 2147480000, -7])
            store.store_rows(ours, beyond, rows, planes, page_size)
            assert torch.equal(ours, theirs), (planes, page_size)
            expected = gather_reference.gather_rows(ours, slots, **sizes)
            assert torch.equal(gather.gather_rows(ours, beyond, planes, page_size), expected)
            tables, lens = torch.randint(0, pages, (3, 4), generator=generator), [4 * page_size, 0, 2 * page_size - 1]
            expected = gather_reference.gather_sequences(ours, tables, lens, **sizes)
            assert torch.equal(gather.gather_sequences(ours, tables, lens, planes, page_size), expected)
    source, target = some(50, 656), some(30, 656)
    here, there = torch.tensor([3, 49, 50, -1, 7, 2147480000]), torch.tensor([0, 29, 1, 2, -1, 3])
    expected = target.clone()
    gather_reference.copy_rows(source, here, expected, there)
    gather.copy_rows(source, here, target, there)
    assert torch.equal(target, expected)


def check_store_and_unpack() -> None:
    from dataclasses import replace

    import torch

    from cptools.formats import FP8, IndexRows, MlaRows
    from cptools.kernels import norm_rope_store as op
    from cptools.kernels.kv_gather.triton import unpack_fp8_rows
    from cptools.kernels.norm_rope_store import IndexInput, MlaInput
    from cptools.kernels.rowwise import RopeAngles

    op.triton_obstacle = lambda device: None  # the interpreter serves the CPU
    generator = torch.Generator().manual_seed(0)

    def exact(tokens: int, width: int) -> torch.Tensor:
        """Values of e4m3, normal after scaling: largest 256, so that a block's scale is 1 and nothing is rounded."""
        x = torch.randint(8, 16, (tokens, width), generator=generator) * torch.exp2(
            torch.randint(-7, 4, (tokens, width), generator=generator).float()
        )
        x *= 1.0 - 2.0 * torch.randint(0, 2, (tokens, width), generator=generator)
        x[:, ::128] = 256.0
        return x * torch.exp2(torch.randint(-8, 20, (tokens, 1), generator=generator).float())

    tokens, pages, page_size = 9, 5, 4
    slots = torch.randperm(pages * page_size, generator=generator)[:tokens]
    slots[::4] = -1
    for dtype, exact_scales in ((FP8, True), (torch.float32, True), (torch.bfloat16, True)):
        mla_format = MlaRows(256, 16, dtype, exact_scales)
        index_format = IndexRows(128, dtype, exact_scales)
        c_kv, k_pe = exact(tokens, 272).split([256, 16], dim=1)
        fill = lambda width: torch.full((pages, page_size * width), 0xFF, dtype=torch.uint8)
        mla = MlaInput(c_kv, k_pe, None, 1e-5, fill(mla_format.row_bytes), mla_format)
        index = IndexInput(exact(tokens, 128), None, None, 1e-6, fill(index_format.row_bytes), index_format)
        angles = RopeAngles(torch.zeros(tokens, 8), torch.ones(tokens, 8))  # a quarter turn: no rounding
        if dtype == torch.float32:
            mla = replace(mla, norm_weight=torch.rand(256, generator=generator))
            index = replace(index, norm_weight=torch.rand(128, generator=generator), norm_bias=torch.ones(128))
            angles = RopeAngles.at(torch.arange(tokens), 16, 1e4)
        other = replace(mla, pages=mla.pages.clone()), replace(index, pages=index.pages.clone())
        op.norm_rope_store(slots, angles, mla=mla, index=index, page_size=page_size, impl="triton")
        op.norm_rope_store(slots, angles, mla=other[0], index=other[1], page_size=page_size, impl="reference")
        for ours, theirs in ((mla, other[0]), (index, other[1])):
            if dtype == torch.float32:
                a, b = (x.pages.view(torch.float32) for x in (ours, theirs))
                torch.testing.assert_close(
                    a, b, rtol=1e-5, atol=1e-6 * b.nan_to_num().abs().max().item(), equal_nan=True
                )
            else:
                assert torch.equal(ours.pages, theirs.pages), dtype
        if dtype == FP8:
            safe = torch.where(slots < 0, -1, slots)
            joint = unpack_fp8_rows(mla.pages, safe, 256, 16, page_size, torch.float32)
            rows = mla.pages.view(-1, mla_format.row_bytes)
            expected = torch.where((safe >= 0)[:, None], mla_format.unpack_joint(rows)[safe.clamp(min=0)], 0)
            assert torch.equal(joint, expected)


def check_slots() -> None:
    import torch

    from cptools.kernels.selected_slots import reference, triton
    from cptools.layout import KVLayout

    generator = torch.Generator().manual_seed(0)
    for world_size, interleave, page_size in [(1, 1, 64), (2, 1, 16), (3, 4, 8), (8, 16, 16)]:
        layout = KVLayout(world_size, interleave, page_size)
        tables = torch.randperm(32, generator=generator).view(4, 8)
        tables[3, 2:] = -1
        positions = torch.randint(-2, 9 * layout.virtual_block, (5, 1100), generator=generator)
        positions[0, :3] = torch.tensor([2**40, 2**31, 2**32])
        ids = torch.tensor([3, 0, -1, 4, 1])
        for dtype in (torch.int32, torch.int64):
            got, want = (torch.full((5, 1100), 99, dtype=dtype) for _ in range(2))
            rank = world_size - 1
            triton.selected_slots(got, positions, ids, tables, world_size, interleave, page_size, rank)
            reference.selected_slots(want, positions, ids, tables, layout=layout, rank=rank)
            assert torch.equal(got, want)


@pytest.mark.parametrize("check", [check_merge, check_moves, check_store_and_unpack, check_slots])
def test_under_the_interpreter(check: Callable[[], None]) -> None:
    code = f"import runpy; runpy.run_path({__file__!r})[{check.__name__!r}]()"
    child = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        env=os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert child.returncode == 0, child.stderr[-4000:]
