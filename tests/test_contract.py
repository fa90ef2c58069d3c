"""The names other programs call, and one plain value of each."""

import inspect

import pytest
import torch

import cptools
from cptools import (
    HostKVPool,
    KVLayout,
    LoadBalancedCPShard,
    LSEMerge,
    ParallelConfig,
    ParallelGroups,
    Partial,
    PoolExhausted,
    RoundRobinKVShard,
    formats,
    merge_partials,
    plan_reshard,
)


def parameters(callable_):
    return set(inspect.signature(callable_).parameters)


def test_every_public_name_is_there():
    names = """KVLayout LoadBalancedCPShard CPPlan RoundRobinKVShard Partial merge_partials LSEMerge HostKVPool
               PoolExhausted plan_reshard Run ParallelConfig ParallelGroups""".split()
    assert set(names) <= set(cptools.__all__)
    assert all(hasattr(cptools, name) for name in names)


@pytest.mark.parametrize(
    "callable_, names",
    [
        (KVLayout, "world_size interleave page_size"),
        (LoadBalancedCPShard, "group world_size rank strategy"),
        (LoadBalancedCPShard.plan, "query_lens context_lens"),
        (LoadBalancedCPShard.shard, "x plan dim"),
        (LoadBalancedCPShard.unshard, "x_local plan dim"),
        (RoundRobinKVShard, "group world_size rank interleave page_size"),
        (RoundRobinKVShard.localize, "topk seq_lens"),
        (RoundRobinKVShard.gather_context, "rows_local seq_lens out"),
        (LSEMerge, "group backend scatter"),
        (HostKVPool, "num_pages page_size row_bytes num_layers pin_memory"),
        (ParallelConfig, "pcp dcp tp ep dp"),
        (ParallelGroups.from_world, "config"),
        (formats.MlaRows, "latent rope dtype"),
        (formats.IndexRows, "dim dtype"),
    ],
)
def test_signature(callable_, names):
    assert set(names.split()) <= parameters(callable_)


def test_layout_alternates_owners():
    layout = KVLayout(2, 1, 4)
    assert [layout.owner(t) for t in range(4)] == [0, 1, 0, 1]
    assert [layout.local_index(t) for t in range(4)] == [0, 0, 1, 1]
    assert layout.position(1, 1) == 3
    assert layout.local_len(3, 0) == 2


def test_zigzag_plan_of_one_request_behind_a_context():
    plan = LoadBalancedCPShard(world_size=2, rank=0).plan([8], [3])
    assert plan.counts == (4, 4)
    assert plan.token_index.tolist() == [0, 1, 6, 7]
    assert plan.positions.tolist() == [3, 4, 9, 10]
    assert plan.kv_lens.tolist() == [4, 5, 10, 11]
    assert plan.request_ids.tolist() == [0, 0, 0, 0]
    assert plan.pairs == (30, 30)
    assert (plan.world_size, plan.rank) == (2, 0)
    assert plan.for_rank(1).token_index.tolist() == [2, 3, 4, 5]


def test_slots_and_localised_topk():
    shard = RoundRobinKVShard(world_size=2, rank=1, page_size=4)
    slots = shard.slot_mapping(torch.tensor([0, 1, 9]), torch.tensor([0, 0, 0]), torch.tensor([[5, 7]]))
    assert slots.tolist() == [-1, 20, 28]
    assert shard.localize(torch.tensor([[1, 2, 3, -1]])).tolist() == [[0, -1, 1, -1]]
    assert shard.local_lens(torch.tensor([3])).tolist() == [1]


def test_empty_partial_contributes_nothing():
    one = Partial(torch.ones(1, 1, 2), torch.zeros(1, 1))
    empty = Partial(torch.full((1, 1, 2), float("nan")), torch.full((1, 1), float("-inf")))
    merged = merge_partials([one, empty])
    assert merged.out.tolist() == [[[1.0, 1.0]]]
    assert merged.lse.item() == 0.0


def test_base_two_enters_at_one_place():
    assert Partial.from_base2(torch.ones(1, 1, 2), torch.ones(1, 1)).lse.item() == pytest.approx(0.6931472, abs=1e-6)


def test_host_pool_counts_references_and_skips_slot_minus_one():
    with HostKVPool(num_pages=2, page_size=2, row_bytes=8) as pool:
        pages = pool.allocate(2)
        assert (pool.num_pages, pool.num_free, sorted(pages)) == (2, 0, [0, 1])
        with pytest.raises(PoolExhausted):
            pool.allocate(1)
        slots = torch.tensor([3, -1])
        pool.write(0, slots, torch.arange(16, dtype=torch.uint8).reshape(2, 8))
        assert pool.read(0, slots).tolist() == [list(range(8)), [0] * 8]
        pool.retain(pages)
        pool.release(pages)
        assert pool.num_free == 0
        pool.release(pages)
        assert pool.num_free == 2


def test_reshard_to_one_rank_is_one_run_a_source():
    runs = plan_reshard(KVLayout(2), KVLayout(1), 0, 5)
    fields = "src_rank src_index src_stride dst_rank dst_index dst_stride count".split()
    assert [tuple(getattr(run, f) for f in fields) for run in runs] == [(0, 0, 1, 0, 0, 2, 3), (1, 0, 1, 0, 1, 2, 2)]


def test_row_sizes_of_glm():
    assert formats.BF16_MLA.row_bytes == 1152
    assert formats.FP8_MLA.row_bytes == 656
    assert formats.FP8_INDEX.row_bytes == 132


def test_model_signatures():
    from models.glm53 import GLM53, GLM53Config

    assert GLM53Config
    names = "path device dtype parallel kv_rows latent_norm_eps decode_parts"
    assert set(names.split()) <= parameters(GLM53.from_pretrained)
    assert {"token_ids", "last_only"} <= parameters(GLM53.prefill_logits)
    assert {"token_ids", "max_new_tokens", "draft_tokens"} <= parameters(GLM53.generate)
