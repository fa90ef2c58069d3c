"""Decode rows over a cache of random rows, without a model: one layer with an indexer and one that shares it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from cptools import LoadBalancedCPShard, RoundRobinKVShard
from cptools.cp_kv import ContextParallelKV, NewKeys, NewLatents
from cptools.formats import IndexRows, MlaRows
from cptools.kernels.rowwise import RopeAngles
from cptools.layer_context import Selection
from cptools.step_rows import DecodeRows


@dataclass(frozen=True)
class Dims:
    heads: int
    latent: int
    rope: int
    index_heads: int
    index_dim: int
    k: int


SMALL = Dims(heads=3, latent=24, rope=8, index_heads=8, index_dim=16, k=16)
GLM = Dims(heads=64, latent=512, rope=64, index_heads=32, index_dim=128, k=2048)


class DecodeProblem:
    """A cache whose pages hold random rows, and new rows with random projections for a step of decode rows."""

    def __init__(
        self,
        dims: Dims,
        kv_rows: torch.dtype,
        *,
        num_pages: int,
        page_size: int = 64,
        dtype: torch.dtype = torch.float32,
        device: str = "cpu",
        seed: int = 0,
    ) -> None:
        self.dims, self.dtype, self.device = dims, dtype, torch.device(device)
        self.generator = torch.Generator().manual_seed(seed)
        self.cache = ContextParallelKV(
            cp=LoadBalancedCPShard(world_size=1, rank=0),
            kv=RoundRobinKVShard(world_size=1, rank=0, page_size=page_size),
            merge=None,
            mla=MlaRows(dims.latent, dims.rope, kv_rows),
            index=IndexRows(dims.index_dim, kv_rows),
            num_layers=2,
            index_layers=(0,),
            num_pages=num_pages,
            device=device,
        )
        slots = torch.arange(num_pages * page_size, device=self.device)
        for layer in range(2):
            rows = self.cache.mla.pack(self.floats(len(slots), dims.latent), self.floats(len(slots), dims.rope))
            self.cache.mla_rows.store(layer, slots, rows)
        self.cache.index_rows.store(0, slots, self.cache.index.pack(self.floats(len(slots), dims.index_dim)))
        self.latent_norm = 1 + 0.1 * self.floats(dims.latent)
        self.key_norm = 1 + 0.1 * self.floats(dims.index_dim), 0.1 * self.floats(dims.index_dim)

    def floats(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.generator).to(self.device, self.dtype)

    def tables(self, contexts: list[int], new: int, *, width: int) -> Tensor:
        """int64 [R, width] on the CPU: pages of its own for each request that is not padding, then -1."""
        page_size, num_pages = self.cache.mla_rows.page_size, self.cache.mla_rows.pages.shape[1]
        free = iter(torch.randperm(num_pages, generator=self.generator).tolist())
        out = torch.full((len(contexts), width), -1)
        for request, context in enumerate(contexts):
            if context >= 0:
                for block in range(-(-(context + new) // page_size)):
                    out[request, block] = next(free)
        return out

    def new_rows(self, rows: int) -> dict[str, Tensor]:
        """What the model's projections would give for the rows of a step."""
        d = self.dims
        return {
            "c_kv": self.floats(rows, d.latent),
            "k_pe": self.floats(rows, d.rope),
            "key": self.floats(rows, d.index_dim),
            "index_query": self.floats(rows, d.index_heads, d.index_dim),
            "index_weights": self.floats(rows, d.index_heads).float(),
            "query": self.floats(rows, d.heads, d.latent + d.rope) * 0.3,
        }

    def run(self, rows: DecodeRows, given: dict[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """(attention of layer 0, of layer 1, positions selected): capturable where the kernels serve."""
        step = self.cache.begin_decode(rows)
        angles = RopeAngles.at(step.positions, self.dims.rope, 10000.0)
        selected = Selection.empty(len(rows), self.dims.k, self.device)
        outs = []
        for layer in range(2):
            keys = NewKeys(given["key"], *self.key_norm, 1e-6) if layer == 0 else None
            step.append(layer, angles, NewLatents(given["c_kv"], given["k_pe"], self.latent_norm, 1e-5), keys)
            with step.context(layer, with_index=layer == 0) as context:
                for block in step.blocks:
                    part = selected[block.rows]
                    if layer == 0:
                        query, weights = given["index_query"][block.rows], given["index_weights"][block.rows]
                        context.select(block, query, weights, angles[block.rows], part)
                    outs.append(context.attend(block, given["query"][block.rows], part, scale=0.1))
        half = len(outs) // 2
        empty = torch.empty(0, self.dims.heads, self.dims.latent, device=self.device)
        return torch.cat([empty, *outs[:half]]), torch.cat([empty, *outs[half:]]), selected.positions
