import math
from itertools import product

import pytest
import torch
import torch.distributed as dist

from cptools.collectives import as_byte_rows
from cptools.kernels.lse_merge import merge_states
from cptools.lse_merge import LSEMerge
from cptools.partial import Partial, merge_partials
from tests.ranks.collective_counter import CollectiveCounter
from tests.ranks.harness import run_ranks

SCATTERS = ["heads", "tokens", "none"]
BACKENDS = ["ag_rs", "a2a"]
HEADS, DIM = 12, 5


def part_of(rank: int, tokens: int, dtype: torch.dtype, *, seed: int = 0) -> Partial:
    """Random, with a third of the (token, head) pairs empty and NaN in their out; token 0 is empty on every rank."""
    generator = torch.Generator().manual_seed(100 * seed + rank)
    out = torch.randn(tokens, HEADS, DIM, generator=generator).to(dtype)
    lse = 20 * torch.randn(tokens, HEADS, generator=generator)
    empty = torch.rand(tokens, HEADS, generator=generator) < 1 / 3
    empty[:1] = tokens > 1
    return Partial(out.masked_fill(empty.unsqueeze(-1), math.nan), lse.masked_fill(empty, -math.inf))


def slice_of(whole: Partial, scatter: str, rank: int, world_size: int) -> Partial:
    if scatter == "none":
        return whole
    dim = 1 if scatter == "heads" else 0
    return Partial(*(x.tensor_split(world_size, dim)[rank] for x in (whole.out, whole.lse)))


def assert_same_bits(a: Partial, b: Partial) -> None:
    for x, y in ((a.out, b.out), (a.lse, b.lse)):
        assert x.dtype == y.dtype
        assert x.shape == y.shape
        assert torch.equal(as_byte_rows(x), as_byte_rows(y))


def merges(rank: int, world_size: int) -> list[int]:
    issued = []
    for backend, scatter in product(BACKENDS, SCATTERS):
        merge = LSEMerge(group=dist.group.WORLD, backend=backend, scatter=scatter)
        for tokens, dtype in product((0, 1, 2, 3, 5, 17), (torch.float32, torch.bfloat16)):
            parts = [part_of(r, tokens, dtype) for r in range(world_size)]
            with CollectiveCounter() as counter:
                got = merge(parts[rank])
            assert_same_bits(got, slice_of(merge_partials(parts), scatter, rank, world_size))
            assert not got.out.isnan().any()
            issued.append(sum(counter.counts.values()))
            most = 2 if (backend, scatter) == ("a2a", "none") else 1
            assert issued[-1] == (most if world_size > 1 and tokens > 0 else issued[-1])
            assert issued[-1] <= most * (world_size > 1)
    return issued


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_bits_of_merge_partials_on_every_rank(world_size) -> None:
    issued = run_ranks(merges, world_size)
    assert all(numbers == issued[0] for numbers in issued)


def moved_bytes(rank: int, world_size: int) -> None:
    """a2a sends and receives one share of the partial, not all of it."""
    partial = part_of(rank, 8, torch.float32)
    whole = partial.out.nbytes + partial.lse.nbytes
    sizes: list[tuple[int, int]] = []
    original = dist.all_to_all_single

    def recorded(output, input, *args, **kwargs):  # type: ignore[no-untyped-def]
        sizes.append((input.nbytes, output.nbytes))
        return original(output, input, *args, **kwargs)

    dist.all_to_all_single = recorded
    try:
        for scatter in ("heads", "tokens"):
            LSEMerge(group=dist.group.WORLD, backend="a2a", scatter=scatter)(partial)
    finally:
        dist.all_to_all_single = original
    assert sizes == [(whole, whole)] * 2


def test_a2a_moves_only_slices() -> None:
    run_ranks(moved_bytes, 4)


def values_never_raise(rank: int, world_size: int) -> None:
    """+inf or NaN on one rank: NaN in that token and head on all ranks, nothing elsewhere, and nobody waits."""
    for bad in (math.inf, math.nan):
        parts = [part_of(r, 4, torch.float32, seed=1) for r in range(world_size)]
        parts[1].lse[2, 3] = bad
        out, lse = merge_states([p.out for p in parts], [p.lse for p in parts])
        assert out[2, 3].isnan().all()
        assert int(out.isnan().sum()) == DIM
        for backend, scatter in product(BACKENDS, SCATTERS):
            got = LSEMerge(group=dist.group.WORLD, backend=backend, scatter=scatter)(parts[rank])
            wanted = slice_of(Partial(out, lse), scatter, rank, world_size)
            torch.testing.assert_close(got.out, wanted.out, rtol=0, atol=0, equal_nan=True)
            torch.testing.assert_close(got.lse, wanted.lse, rtol=0, atol=0, equal_nan=True)


def test_values_never_raise() -> None:
    run_ranks(values_never_raise, 3)


def all_empty(rank: int, world_size: int) -> None:
    poisoned = Partial(torch.full((3, HEADS, DIM), math.nan), torch.full((3, HEADS), -math.inf))
    for backend, scatter in product(BACKENDS, SCATTERS):
        got = LSEMerge(group=dist.group.WORLD, backend=backend, scatter=scatter)(poisoned)
        wanted = slice_of(Partial.empty(3, HEADS, DIM), scatter, rank, world_size)
        assert_same_bits(got, wanted)


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_merge_all_ranks_empty(world_size) -> None:
    """Whatever the kernels left behind; also with one rank, so that it does not depend on the number of ranks."""
    run_ranks(all_empty, world_size)


def short_prompt(rank: int, world_size: int) -> None:
    """Three cached tokens over four ranks, I=1: rank 3 is empty and the result is dense attention (case B1)."""
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(2, HEADS, 3, generator=generator)
    values = torch.randn(3, HEADS, DIM, generator=generator)
    mine, seen = scores[..., rank::world_size], values[rank::world_size]
    partial = Partial(torch.full((2, HEADS, DIM), math.nan), torch.full((2, HEADS), -math.inf))
    if len(seen):
        partial = Partial(torch.einsum("ths,shd->thd", mine.softmax(-1), seen), mine.logsumexp(-1))
    dense = torch.einsum("ths,shd->thd", scores.softmax(-1), values)
    for backend in BACKENDS:
        got = LSEMerge(group=dist.group.WORLD, backend=backend, scatter="none")(partial)
        torch.testing.assert_close(got.out, dense)
        torch.testing.assert_close(got.lse, scores.logsumexp(-1))


def test_short_prompt_leaves_ranks_without_keys() -> None:
    run_ranks(short_prompt, 4)


def reductions(rank: int, world_size: int) -> None:
    """What "ag_rs" does on a GPU, here over gloo."""
    for scatter, tokens in product(SCATTERS, (0, 1, 3, 17)):
        parts = [part_of(r, tokens, torch.float32) for r in range(world_size)]
        for shift in (0.0, 1e4):
            moved = [Partial(p.out, p.lse + shift) for p in parts]
            got = LSEMerge(group=dist.group.WORLD, scatter=scatter)._reduce(moved[rank])
            wanted = slice_of(merge_partials(moved), scatter, rank, world_size)
            torch.testing.assert_close(got.out, wanted.out, rtol=1e-6, atol=1e-6)
            assert torch.equal(got.lse, wanted.lse)
    parts[1].lse[2, 3] = math.inf
    got = LSEMerge(group=dist.group.WORLD, scatter="none")._reduce(parts[rank])
    assert int(got.out.isnan().sum()) == DIM
    assert got.out[2, 3].isnan().all()


@pytest.mark.parametrize("world_size", [2, 3])
def test_reduction_path(world_size) -> None:
    run_ranks(reductions, world_size)


def misfits(rank: int, world_size: int) -> None:
    merge = LSEMerge(group=dist.group.WORLD)
    assert (merge.backend, merge.scatter) == ("ag_rs", "heads")
    with pytest.raises(ValueError, match="H=4, N=3"):
        merge(Partial.empty(2, 4, 5))
    for arguments in ({"backend": "ring"}, {"scatter": "rows"}):
        with pytest.raises(ValueError, match=next(iter(arguments.values()))):
            LSEMerge(group=dist.group.WORLD, **arguments)
    with pytest.raises(ValueError, match="give group"):
        LSEMerge(group=None)


def test_misfits_are_refused_on_every_rank() -> None:
    run_ranks(misfits, 3)
