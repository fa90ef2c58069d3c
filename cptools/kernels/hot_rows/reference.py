"""Least recently used rows, exactly: who is a hit, who is a victim, and what order is left behind.

The arithmetic is numpy's, since torch has no unique that tells where a value came first.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

_Int64 = npt.NDArray[np.int64]


def resolve_hot_rows(
    selected: Tensor,
    regions: Tensor,
    held: Tensor,
    order: Tensor,
    gpu_tables: Tensor,
    host_tables: Tensor,
    hot_tables: Tensor,
    *,
    page_size: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """See `cptools.kernels.hot_rows`; held and order are written. Waits for the device of its inputs."""
    requests, rows, columns = selected.shape
    slots = np.full((requests, rows * columns), -1, np.int64)
    sources, targets = slots.copy(), slots.copy()
    counts = np.zeros((requests, 2), np.int64)
    where = regions.tolist()
    for r, region in enumerate(where):
        ids = _numpy(selected[r]).ravel()
        gpu, on_gpu = _slots(ids, _numpy(gpu_tables[r]), page_size)
        host, on_host = _slots(ids, _numpy(host_tables[r]), page_size)
        slots[r, on_gpu] = gpu[on_gpu]
        wanted = ~on_gpu & on_host
        if region < 0 or not wanted.any():
            continue
        distinct, first, inverse = np.unique(ids[wanted], return_index=True, return_inverse=True)
        by_reference = np.argsort(first)  # distinct rows in the order in which rows and columns first name them
        distinct, first = distinct[by_reference], first[by_reference]
        row_held, row_order = _numpy(held[region]).copy(), _numpy(order[region])
        hot_slots, hit = _find(distinct, row_held)
        is_hit = np.zeros(len(row_held), bool)
        is_hit[hot_slots[hit]] = True
        oldest = row_order[~is_hit[row_order]]
        misses = int((~hit).sum())
        victims = oldest[:misses]
        hot_slots[~hit] = victims
        row_held[victims] = distinct[~hit]
        held[region] = torch.from_numpy(row_held)
        left = np.concatenate([oldest[misses:], victims, row_order[is_hit[row_order]]])
        order[region] = torch.from_numpy(left).to(order.dtype)
        cache = _numpy(hot_tables[r])[hot_slots // page_size] * page_size + hot_slots % page_size
        position = np.empty_like(by_reference)
        position[by_reference] = np.arange(len(by_reference))
        slots[r, wanted] = cache[position[inverse.ravel()]]
        sources[r, :misses] = host[wanted][first][~hit]
        targets[r, :misses] = cache[~hit]
        counts[r] = len(distinct) - misses, misses
    made = (slots.reshape(requests, rows, columns), sources, targets, counts)
    out = [torch.from_numpy(x).to(selected.device) for x in made]
    return out[0], out[1], out[2], out[3]


def _numpy(x: Tensor) -> _Int64:
    return x.to("cpu", torch.int64).numpy()


def _slots(ids: _Int64, table: _Int64, page_size: int) -> tuple[_Int64, npt.NDArray[np.bool_]]:
    """Slot of each id by a table of pages, and whether it has one."""
    page = ids // page_size
    inside = (ids >= 0) & (page < len(table))
    pages = np.full(ids.shape, -1, np.int64)
    pages[inside] = table[page[inside]]
    return pages * page_size + ids % page_size, pages >= 0


def _find(values: _Int64, held: _Int64) -> tuple[_Int64, npt.NDArray[np.bool_]]:
    """Index in ``held`` of each value, and whether it is there."""
    by_value = np.argsort(held)
    at = np.searchsorted(held, values, sorter=by_value).clip(max=len(held) - 1)
    found = by_value[at]
    return found, held[found] == values
