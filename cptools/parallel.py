"""The process groups of an engine: made once from a torchrun world, passed down, closed by whoever made them."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from cptools.parallel_config import Groups, ParallelConfig, RankCoords

_MESH_AXES = ("dp", "dcp", "pcp", "tp")


class ParallelGroups:
    """This rank's groups of a `ParallelConfig`. Made by `from_world`; a context manager that closes them.

    Attributes:
        config: the sizes. coords: this rank's place in each group.
        pcp, dcp, tp, ep, dp: the groups, their ranks in the order in which the config lists them. Each has a
            communicator of its own, so that exchanges along different axes can overlap; axes of size 1 share one.
        mesh: the axes of the world larger than 1, outermost first, named "dp", "pcp", "tp" (and "dcp" where it makes
            the ranks), as a DeviceMesh over the same groups; None for one rank.
        device_type: "cuda" if the world communicates by NCCL, else "cpu".
    """

    def __init__(
        self, config: ParallelConfig, coords: RankCoords, groups: dict[str, ProcessGroup], device_type: str
    ) -> None:
        """Takes over `groups`, by axis; use `from_world`."""
        self.config = config
        self.coords = coords
        self.device_type = device_type
        self._owned = list({id(group): group for group in groups.values()}.values())
        self._groups = dict(groups)
        self.mesh = _mesh(config, groups, device_type)

    @classmethod
    def from_world(cls, config: ParallelConfig, *, timeout: timedelta = timedelta(minutes=5)) -> ParallelGroups:
        """Make the groups of this rank. Collective over the default group, which stays the caller's.

        The groups are made by new_group and then given to a DeviceMesh: a mesh that makes its own takes neither a
        timeout nor an order of ranks.

        Args:
            config: sizes whose product is the world.
            timeout: of every collective in the groups.

        Raises:
            ValueError: no initialised world, a world of another size, or a torch whose new_group cannot order the ranks
                as the config needs. On all ranks alike, before any group is made.
        """
        if not dist.is_initialized():
            raise ValueError("from_world needs an initialised process group: see init_world, or init_process_group")
        if dist.get_world_size() != config.world_size:
            raise ValueError(f"{config} needs {config.world_size} ranks, the world has {dist.get_world_size()}")
        axes: dict[str, Groups] = {
            "dp": config.dp_groups(),
            "pcp": config.pcp_groups(),
            "tp": config.tp_groups(),
            "dcp": config.dcp_groups(),
            "ep": config.ep_groups(),
        }
        if not _can_order_ranks():
            for axis, listing in axes.items():
                for ranks in listing:
                    if list(ranks) != sorted(ranks):
                        raise ValueError(f"torch {torch.__version__} cannot make a {axis} group of ranks {ranks}")
        rank = dist.get_rank()
        alone = [_new_group((each,), timeout, "alone") for each in range(config.world_size)][rank]
        groups = dict.fromkeys(axes, alone)
        for axis, listing in axes.items():
            if len(listing[0]) == 1:
                continue
            for ranks in listing:
                made = _new_group(ranks, timeout, axis)
                if rank in ranks:
                    groups[axis] = made
        device_type = "cuda" if "nccl" in dist.get_backend_config() else "cpu"
        _wait_for_connections(device_type)
        return cls(config, config.rank_coords(rank), groups, device_type)

    def close(self) -> None:
        """Destroy the groups; a second call does nothing. Local on the CPU; on a GPU call it on all ranks."""
        while self._owned:
            group = self._owned.pop()
            # Destroying the default group has destroyed all others.
            if dist.is_initialized():
                dist.destroy_process_group(group)
        self._groups = {}
        self.mesh = None

    def __enter__(self) -> ParallelGroups:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    @property
    def pcp(self) -> ProcessGroup:
        return self._group("pcp")

    @property
    def dcp(self) -> ProcessGroup:
        return self._group("dcp")

    @property
    def tp(self) -> ProcessGroup:
        return self._group("tp")

    @property
    def ep(self) -> ProcessGroup:
        return self._group("ep")

    @property
    def dp(self) -> ProcessGroup:
        return self._group("dp")

    def _group(self, axis: str) -> ProcessGroup:
        if axis not in self._groups:
            raise ValueError(f"the {axis} group is closed")
        return self._groups[axis]


@contextmanager
def init_world(device_type: str, *, timeout: timedelta = timedelta(minutes=5)) -> Iterator[torch.device]:
    """Join the world that torchrun describes and leave it at the end of the block. Collective over the world.

    Args:
        device_type: "cpu" for gloo; "cuda" for NCCL, with this process on the GPU of its local rank.
        timeout: of every collective in the default group, and of the meeting itself.

    Yields:
        The device of this rank.
    """
    device = torch.device("cpu")
    if device_type == "cuda":
        device = torch.device("cuda", dist.get_node_local_rank())
        torch.cuda.set_device(device)
    elif device_type != "cpu":
        raise ValueError(f"device_type={device_type!r} must be 'cpu' or 'cuda'")
    dist.init_process_group("nccl" if device_type == "cuda" else "gloo", timeout=timeout)
    try:
        _wait_for_connections(device_type)
        yield device
    finally:
        dist.destroy_process_group()


def _can_order_ranks() -> bool:
    return "sort_ranks" in inspect.signature(dist.new_group).parameters


def _new_group(ranks: tuple[int, ...], timeout: timedelta, axis: str) -> ProcessGroup:
    # Named only where it is needed: torch before 2.13 may lack it.
    order: dict[str, Any] = {} if list(ranks) == sorted(ranks) else {"sort_ranks": False}
    group: ProcessGroup = dist.new_group(list(ranks), timeout=timeout, group_desc=axis, **order)
    return group


def _wait_for_connections(device_type: str) -> None:
    # Gloo connects when a group is made (NCCL at the first use): without this, a rank that soon closes its groups, be
    # it for an error, breaks the connecting of slower ones, and hides its own message behind theirs.
    if device_type == "cpu":
        dist.barrier()


def _mesh(config: ParallelConfig, groups: dict[str, ProcessGroup], device_type: str) -> DeviceMesh | None:
    pure_dcp = config.block_size > config.pcp * config.tp
    sizes = {"dp": config.dp, "dcp": config.dcp if pure_dcp else 1, "pcp": config.pcp, "tp": config.tp}
    axes = [axis for axis in _MESH_AXES if sizes[axis] > 1]
    if not axes:
        return None
    ranks = torch.arange(config.world_size).view([sizes[axis] for axis in axes])
    members = [groups[axis] for axis in axes]
    return DeviceMesh.from_group(
        members[0] if len(axes) == 1 else members, device_type, mesh=ranks, mesh_dim_names=tuple(axes)
    )
