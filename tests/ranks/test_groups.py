from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

import cptools.parallel
from cptools.collectives import all_gather_rows
from cptools.parallel import ParallelGroups, init_world
from cptools.parallel_config import ParallelConfig
from tests.ranks.harness import run_ranks

CONFIGS = {
    1: [ParallelConfig()],
    2: [
        ParallelConfig(pcp=2),
        ParallelConfig(pcp=2, dcp=2, ep=2),
        ParallelConfig(tp=2),
        ParallelConfig(tp=2, dcp=2),
        ParallelConfig(dcp=2),
        ParallelConfig(dp=2, ep=2),
    ],
    4: [
        ParallelConfig(pcp=4, dcp=2),
        ParallelConfig(pcp=4, dcp=4, ep=4),
        ParallelConfig(pcp=2, tp=2),
        ParallelConfig(pcp=2, tp=2, dcp=2),
        ParallelConfig(pcp=2, tp=2, dcp=4, ep=4),
        ParallelConfig(dp=2, pcp=2, dcp=2, ep=4),
        ParallelConfig(dp=2, dcp=2),
        ParallelConfig(dp=2, tp=2, dcp=2),
    ],
}
AXES = ["pcp", "dcp", "tp", "ep", "dp"]


def groups_match(rank: int, world_size: int) -> None:
    for config in CONFIGS[world_size]:
        with ParallelGroups.from_world(config, timeout=timedelta(seconds=30)) as groups:
            assert groups.config == config
            assert groups.coords == config.rank_coords(rank)
            assert groups.device_type == "cpu"
            for axis in AXES:
                group = getattr(groups, axis)
                (listed,) = (ranks for ranks in getattr(config, f"{axis}_groups")() if rank in ranks)
                assert tuple(dist.get_process_group_ranks(group)) == listed
                assert dist.get_rank(group) == getattr(groups.coords, f"{axis}_rank") == listed.index(rank)
                # What a collective hands out, not only what torch says of the group.
                gathered = all_gather_rows(torch.tensor([rank]), [1] * len(listed), group=group)
                assert tuple(gathered.tolist()) == listed
            if world_size == 1:
                assert groups.mesh is None
            else:
                assert sorted(groups.mesh.mesh.flatten().tolist()) == list(range(world_size))
                for axis in groups.mesh.mesh_dim_names:
                    assert groups.mesh.get_group(axis) is getattr(groups, axis)
                    assert groups.mesh.get_local_rank(axis) == getattr(groups.coords, f"{axis}_rank")
            owned = {getattr(groups, axis) for axis in AXES}
        for axis in AXES:
            with pytest.raises(ValueError, match=f"the {axis} group is closed"):
                getattr(groups, axis)
        for group in owned:
            with pytest.raises(ValueError):
                dist.destroy_process_group(group)
        groups.close()
        # The world is its owner's.
        total = torch.tensor(1)
        dist.all_reduce(total)
        assert int(total) == world_size


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_groups_are_those_of_the_config(world_size) -> None:
    run_ranks(groups_match, world_size)


def refusals(rank: int, world_size: int) -> None:
    with pytest.raises(ValueError, match=r"pcp=3.* needs 3 ranks, the world has 4"):
        ParallelGroups.from_world(ParallelConfig(pcp=3))
    cptools.parallel._can_order_ranks, original = (lambda: False), cptools.parallel._can_order_ranks
    try:
        with pytest.raises(ValueError, match=r"cannot make a dcp group of ranks \(0, 2, 1, 3\)"):
            ParallelGroups.from_world(ParallelConfig(pcp=2, tp=2, dcp=4))
        with ParallelGroups.from_world(ParallelConfig(pcp=2, tp=2, dcp=2)) as groups:
            assert dist.get_world_size(groups.dcp) == 2
    finally:
        cptools.parallel._can_order_ranks = original
    groups = ParallelGroups.from_world(ParallelConfig(pcp=4))
    dist.destroy_process_group()
    groups.close()
    with pytest.raises(ValueError, match="initialised"):
        ParallelGroups.from_world(ParallelConfig(pcp=4))
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


def test_refusals() -> None:
    run_ranks(refusals, 4)


def test_init_world_joins_and_leaves(monkeypatch, tmp_path) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}.items():
        monkeypatch.setenv(name, value)
    with init_world("cpu", timeout=timedelta(seconds=20)) as device:
        assert device == torch.device("cpu")
        with ParallelGroups.from_world(ParallelConfig()) as groups:
            assert all(dist.get_world_size(getattr(groups, axis)) == 1 for axis in AXES)
    assert not dist.is_initialized()
    with pytest.raises(ValueError, match="'tpu'"), init_world("tpu"):
        pass
