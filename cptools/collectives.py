"""Moving rows between ranks: the one room of the library where bytes travel.

Every function is a collective over the ranks of `group`, issues the same number of operations on each of them and runs
on the caller's current stream. Rows move as bytes, so any dtype does (bool, fp8, int64). Ranks are group ranks.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from cptools.integers import require_int

# torch 2.13 renamed both and warns about the old names, older ones have only these.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def group_coordinates(group: ProcessGroup | None, world_size: int | None, rank: int | None) -> tuple[int, int]:
    """World size and this process's rank, read from `group` or given as two numbers. Local.

    Raises:
        ValueError: neither or only one of the numbers given, a number that contradicts the group, a process outside
            the group, or a rank outside the world size.
    """
    if group is not None:
        size, own = dist.get_world_size(group), dist.get_rank(group)
        if own < 0:
            raise ValueError("this process is not a member of group")
        if world_size not in (None, size) or rank not in (None, own):
            raise ValueError(
                f"world_size={world_size}, rank={rank} contradict the group: world_size={size}, rank={own}"
            )
        return size, own
    if world_size is None or rank is None:
        raise ValueError(f"give group, or both numbers: world_size={world_size}, rank={rank}")
    world_size, rank = require_int("world_size", world_size), require_int("rank", rank)
    if world_size < 1 or not 0 <= rank < world_size:
        raise ValueError(f"rank={rank} is not a rank of world_size={world_size}")
    return world_size, rank


def as_byte_rows(x: Tensor) -> Tensor:
    """[n, ...] of any dtype as uint8 [n, bytes of a row]; shares memory where x is contiguous. Local."""
    width = math.prod(x.shape[1:]) * x.element_size()
    return _flat(x.detach()).view(torch.uint8).view(x.shape[0], width)


def from_byte_rows(rows: Tensor, like: Tensor) -> Tensor:
    """Inverse of `as_byte_rows`: uint8 [m, bytes of a row] as [m, ...] with row shape and dtype of `like`. Local."""
    flat = _flat(rows)
    if flat.storage_offset() % like.element_size():
        # A single row cut out of wider ones is contiguous, at any byte.
        flat = flat.clone()
    return flat.view(like.dtype).view(rows.shape[0], *like.shape[1:])


def all_gather_rows(x: Tensor, counts: Sequence[int], *, group: ProcessGroup) -> Tensor:
    """Collect the rows of all ranks on every rank. Collective: one all-gather; none if the group has one rank or all
    counts are 0.

    Args:
        x: [counts[rank], ...] of any dtype; row shape and dtype are the same on all ranks.
        counts: rows of each rank, the same list on all ranks; 0 is legal. Uneven counts are padded for the transfer.

    Returns:
        [sum(counts), ...] rank-major. With one rank it is x itself.

    Raises:
        ValueError: counts do not fit the group, or x does not have counts[rank] rows.
    """
    world_size, rank = group_coordinates(group, None, None)
    if len(counts) != world_size or min(counts) < 0:
        raise ValueError(f"counts={tuple(counts)} must be {world_size} numbers >= 0")
    if x.dim() < 1 or x.shape[0] != counts[rank]:
        raise ValueError(f"x has shape {tuple(x.shape)}, but rank {rank} has counts[{rank}]={counts[rank]} rows")
    if world_size == 1:
        return x
    rows, longest = as_byte_rows(x), max(counts)
    if longest * rows.shape[1] == 0:
        return x.new_empty((sum(counts), *x.shape[1:]))
    gathered = rows.new_empty(world_size * longest, rows.shape[1])
    padded = torch.nn.functional.pad(rows, (0, 0, 0, longest - counts[rank]))
    _all_gather(gathered, padded, group=group)
    if min(counts) < longest:
        blocks = gathered.view(world_size, longest, -1)
        gathered = torch.cat([block[:count] for block, count in zip(blocks, counts, strict=True)])
    return from_byte_rows(gathered, x)


def all_to_all_rows(x: Tensor, in_counts: Sequence[int], out_counts: Sequence[int], *, group: ProcessGroup) -> Tensor:
    """Send each rank its own slice of rows. Collective: one all-to-all; none if the group has one rank or rows have
    no bytes.

    Args:
        x: [sum(in_counts), ...] of any dtype, rows for rank 0 first; row shape and dtype are the same on all ranks.
        in_counts: rows for each rank. out_counts: rows from each rank. 0 is legal.

    Returns:
        [sum(out_counts), ...], rows of rank 0 first. With one rank it is x itself.

    Raises:
        ValueError: counts do not fit the group or x, or what this rank sends itself differs from what it awaits.
    """
    world_size, rank = group_coordinates(group, None, None)
    for name, counts in (("in_counts", in_counts), ("out_counts", out_counts)):
        if len(counts) != world_size or min(counts) < 0:
            raise ValueError(f"{name}={tuple(counts)} must be {world_size} numbers >= 0")
    if in_counts[rank] != out_counts[rank]:
        raise ValueError(f"rank {rank} sends itself {in_counts[rank]} rows and awaits {out_counts[rank]}")
    if x.dim() < 1 or x.shape[0] != sum(in_counts):
        raise ValueError(f"x has shape {tuple(x.shape)}, but in_counts={tuple(in_counts)}")
    if world_size == 1:
        return x
    rows = as_byte_rows(x)
    received = rows.new_empty(sum(out_counts), rows.shape[1])
    if rows.shape[1] > 0:
        dist.all_to_all_single(received, rows, list(out_counts), list(in_counts), group=group)
    return from_byte_rows(received, x)


def reduce_scatter_sum(x: Tensor, *, group: ProcessGroup) -> Tensor:
    """Sum of block `rank` over the ranks. Collective: one reduce-scatter; none if the group has one rank or x is empty.

    Args:
        x: [N, ...], N = ranks of the group; block r is this rank's addend for rank r.

    Returns:
        [...], in the dtype of x; the order of the addition is the backend's.
    """
    world_size, _ = group_coordinates(group, None, None)
    if x.dim() < 1 or x.shape[0] != world_size:
        raise ValueError(f"x has shape {tuple(x.shape)}, but the group has {world_size} ranks")
    if world_size == 1 or x.numel() == 0:
        return x[0]
    # Flat, since gloo divides the first dimension only.
    out = x.new_empty(x.numel() // world_size)
    _reduce_scatter(out, x.reshape(-1), group=group)
    return out.view(x.shape[1:])


def all_reduce_sum(x: Tensor, *, group: ProcessGroup) -> Tensor:
    """Sum of x over the ranks, as a new tensor on each. Collective: one all-reduce; none if the group has one rank or
    x is empty.

    The order of the addition is the backend's.
    """
    world_size, _ = group_coordinates(group, None, None)
    total = x.clone(memory_format=torch.contiguous_format)
    if world_size > 1 and x.numel() > 0:
        dist.all_reduce(total, group=group)
    return total


def _flat(x: Tensor) -> Tensor:
    # Not view(-1): a contiguous tensor of at most one element may have any stride, which view(dtype) then refuses.
    return x.contiguous().as_strided((x.numel(),), (1,))


def all_gather_ints(value: int, *, group: ProcessGroup) -> list[int]:
    """`value` of every rank, on every rank. Collective: one all-gather of 8 bytes a rank, none if there is one; a sync.

    Raises:
        ValueError: no integer that fits int64.
    """
    value = require_int("value", value)
    mine = torch.tensor([value], dtype=torch.int64, device=_device(group))
    gathered: list[int] = all_gather_rows(mine, [1] * dist.get_world_size(group), group=group).tolist()
    return gathered


def require_agreement(what: str, value: object, *, group: ProcessGroup) -> None:
    """Check that `value` (by its repr) is the same on all ranks. Collective: one all-gather of a hash; a sync.

    Raises:
        ValueError: on all ranks alike, with the ranks that differ from rank 0.
    """
    digest = hashlib.sha256(repr(value).encode()).digest()
    mine = torch.frombuffer(bytearray(digest), dtype=torch.uint8).unsqueeze(0)
    world_size = dist.get_world_size(group)
    every = all_gather_rows(mine.to(_device(group)), [1] * world_size, group=group).tolist()
    if others := [rank for rank in range(world_size) if every[rank] != every[0]]:
        raise ValueError(
            f"{what} differs between ranks: ranks {others} do not have that of rank 0; here it is {value!r}"
        )


def _device(group: ProcessGroup) -> torch.device:
    """Where a tensor must be to travel in this group."""
    if "nccl" in dist.get_backend(group):
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")
