"""Bugs that others met where prompts, decode rows, formats and ranks come together, as small inputs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from cptools import KVLayout, ParallelConfig, ParallelGroups, Partial, RoundRobinKVShard
from cptools.formats import FP8_INDEX, FP8_MLA
from cptools.kernels.sparse_mla import sparse_mla
from models.glm53 import GLM53
from tests.checkpoints import TINY, random_prompts, save_random
from tests.ranks.harness import run_ranks


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_random(tmp_path_factory.mktemp("tiny"), TINY)


def _mixed_step(model: GLM53) -> tuple[torch.Tensor, torch.Tensor, int]:
    """A request of 4 tokens decodes one more beside a prompt of 5: all cached bytes then, and the rows it wrote."""
    first, second = random_prompts((5, 5), TINY.vocab_size)
    cache = model.new_cache(2)
    for pages in (cache.kv.mla_rows.pages, cache.kv.index_rows.pages):
        pages.fill_(0xAB)
    decoding, prefilling = cache.open(), cache.open()
    model.step(cache, prompts={decoding: first[:4]})
    before = cache.kv.traffic.rows_stored
    model.step(cache, prompts={prefilling: second}, decodes={decoding: first[4:]})
    return cache.kv.mla_rows.pages, cache.kv.index_rows.pages, cache.kv.traffic.rows_stored - before


def _mixed_on_ranks(rank: int, world_size: int, path: str, dcp: int) -> tuple[torch.Tensor, torch.Tensor, int]:
    with ParallelGroups.from_world(ParallelConfig(pcp=world_size, dcp=dcp)) as groups:
        return _mixed_step(GLM53.from_pretrained(path, parallel=groups, page_size=8))


def test_decode_row_beside_a_prompt_is_written_once_and_equals_one_rank(tiny: Path) -> None:
    """Field case A16: every PCP rank computes the decode row, none drops or doubles it."""
    mla, index, rows = _mixed_step(GLM53.from_pretrained(tiny, page_size=8))
    assert rows == 6
    for got_mla, got_index, got_rows in run_ranks(_mixed_on_ranks, 2, str(tiny), 1):
        assert got_rows == 6
        assert torch.equal(got_mla, mla)
        assert torch.equal(got_index, index)
    assert sum(got_rows for _, _, got_rows in run_ranks(_mixed_on_ranks, 2, str(tiny), 2)) == 6


def _around_two_chunks_a_rank(rank: int, world_size: int, path: str, lengths: list[int]) -> list[torch.Tensor]:
    with ParallelGroups.from_world(ParallelConfig(pcp=world_size)) as groups:
        model = GLM53.from_pretrained(path, parallel=groups)
        return [model.prefill_logits([t % 512 for t in range(n)], last_only=True) for n in lengths]


@pytest.mark.parametrize("world_size", [2, 4])
def test_prompts_around_the_number_of_chunks_need_no_switch(tiny: Path, world_size: int) -> None:
    """Field case A20: shorter than, as long as and longer than 2W, and long: the same output with and without PCP."""
    lengths = [2 * world_size - 1, 2 * world_size, 2 * world_size + 1, 1024]
    alone = GLM53.from_pretrained(tiny)
    want = [alone.prefill_logits([t % 512 for t in range(n)], last_only=True) for n in lengths]
    for got in run_ranks(_around_two_chunks_a_rank, world_size, str(tiny), lengths):
        assert all(torch.equal(x, y) for x, y in zip(got, want, strict=True))


def _gather_fp8(rank: int, world_size: int, latent: torch.Tensor, rope: torch.Tensor, lens: list[int]) -> Any:
    shard = RoundRobinKVShard(group=dist.group.WORLD)
    rows, start = FP8_MLA.pack(latent, rope), 0
    own = []
    for length in lens:
        positions = torch.arange(length)
        own.append(rows[start : start + length][shard.layout.owner(positions) == rank])
        start += length
    return [len(part) for part in own], FP8_MLA.unpack_joint(shard.gather_context(torch.cat(own), lens))


def test_fp8_context_is_dequantised_by_position_also_where_a_rank_holds_nothing_of_a_request() -> None:
    """Field case C12: rank 1 holds 3 rows of the first request and none of the second."""
    latent, rope = torch.randn(8, 512), torch.randn(8, 64)
    want = FP8_MLA.unpack_joint(FP8_MLA.pack(latent, rope))
    results = run_ranks(_gather_fp8, 2, latent, rope, [7, 1])
    assert results[1][0] == [3, 0]
    assert all(torch.equal(rows, want) for _, rows in results)


def test_index_rows_and_mla_rows_share_one_table(tiny: Path) -> None:
    """Field case C13: one page id serves both kinds of rows on all ranks, so none of them wastes its pool."""
    kv = RoundRobinKVShard(world_size=8, rank=3, page_size=64)
    assert kv.layout.pages(1_000_000) == KVLayout(8).pages(1_000_000) == -(-1_000_000 // 512)
    cache = GLM53.from_pretrained(tiny).new_cache(5)
    assert cache.kv.mla_rows.pages.shape[1] == cache.kv.index_rows.pages.shape[1] == 5
    assert (FP8_MLA.row_bytes, FP8_INDEX.row_bytes) == (656, 132)


def test_padding_row_without_keys_leaves_no_nan_for_an_amax_over_the_batch() -> None:
    """Field case B5: 0/0 in one padded row would spread through a per-tensor scale to every request."""
    ids = torch.tensor([[0, 1], [2, -1], [1, 2], [-1, -1]])
    out, lse = sparse_mla(torch.randn(4, 2, 8), torch.randn(3, 8), ids, scale=0.3, v_dim=8)
    assert torch.isfinite(out.abs().amax())
    assert (out[3] == 0).all()
    assert torch.isneginf(lse[3]).all()


def test_lse_of_one_sequence_keeps_its_two_dims() -> None:
    """Field case A10: an lse with heads first, or with the batch squeezed away, is refused rather than broadcast."""
    out = torch.randn(5, 3, 8)
    assert Partial(out, torch.zeros(5, 3)).lse.shape == (5, 3)
    for lse in (torch.zeros(3, 5), torch.zeros(1, 5, 3), torch.zeros(5)):
        with pytest.raises(ValueError, match=r"lse must be float32 \(5, 3\)"):
            Partial(out, lse)
