"""The merge of partial attention across the ranks of a group, each of which saw its own part of the keys."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from cptools.collectives import (
    all_gather_rows,
    all_reduce_sum,
    all_to_all_rows,
    as_byte_rows,
    from_byte_rows,
    group_coordinates,
    reduce_scatter_sum,
)
from cptools.kernels.lse_merge import merge_states, merge_weights
from cptools.partial import Partial

BACKENDS = ("ag_rs", "a2a")
SCATTERS = ("heads", "tokens", "none")


class LSEMerge:
    """Attention over the union of all ranks' keys, from one `Partial` per rank.

    What a rank gets, by `scatter` (N ranks)::

        "heads"     [T, H/N, D]   head slice rank of N; N must divide H
        "tokens"    [T_r, H, D]   part `rank` of torch.tensor_split(tokens, N): any T, also T < N and 0
        "none"      [T, H, D]     everything

    How it gets it, by `backend`:

    - "ag_rs" all-gathers the lse, scales the own out in fp32 and reduce-scatters it ("none": all-reduces it). On the
      CPU it all-gathers the partials instead.
    - "a2a" sends each rank only its slice of the partial and merges what arrives in rank order ("none": merges token
      slices, then all-gathers them).

    On the CPU both add in rank order, with the same bits as `merge_partials` of all ranks' partials. On a GPU "a2a"
    does too, while the reduction of "ag_rs" may add in another order. With "none" all ranks get the same bits.
    The two ways are those of vLLM's decode context parallelism.

    Args:
        group: the ranks whose keys are disjoint. Not owned.
        backend: "ag_rs" or "a2a".
        scatter: "heads", "tokens" or "none".

    Raises:
        ValueError: no such backend or scatter, or no member of a group.
    """

    def __init__(self, *, group: ProcessGroup, backend: str = "ag_rs", scatter: str = "heads") -> None:
        if backend not in BACKENDS:
            raise ValueError(f"backend={backend!r} must be one of {BACKENDS}")
        if scatter not in SCATTERS:
            raise ValueError(f"scatter={scatter!r} must be one of {SCATTERS}")
        self.group = group
        self.world_size, self.rank = group_coordinates(group, None, None)
        self.backend = backend
        self.scatter = scatter

    def __call__(self, partial: Partial) -> Partial:
        """Merge. Collective on the caller's stream, no sync.

        "ag_rs" takes one collective on the CPU and two on a GPU, "a2a" one, and one more with scatter="none". With one
        rank nothing is moved, and the merge of its one partial is what comes back.

        Values never raise, so that no rank is left waiting: +inf in an lse gives NaN. Empty parts, all parts empty and
        NaN are as in `merge_partials`.

        Args:
            partial: [T, H, D], the same shape and dtype on all ranks.

        Returns:
            This rank's slice, out in the dtype of the partial's, lse fp32.

        Raises:
            ValueError: scatter="heads" and H % N != 0.
        """
        heads = partial.out.shape[1]
        if self.scatter == "heads" and heads % self.world_size:
            raise ValueError(f"scatter='heads' needs H % N == 0, got H={heads}, N={self.world_size}")
        if self.world_size == 1:
            return _merge([partial])
        if self.backend == "a2a":
            return self._exchange(partial)
        if partial.out.device.type == "cpu":
            return self._gather(partial)
        return self._reduce(partial)

    def _gather(self, partial: Partial) -> Partial:
        tokens = partial.out.shape[0]
        rows = all_gather_rows(_pack(partial), [tokens] * self.world_size, group=self.group)
        return _merge([self._slice(_unpack(part, partial)) for part in rows.chunk(self.world_size)])

    def _exchange(self, partial: Partial) -> Partial:
        tokens = partial.out.shape[0]
        if self.scatter == "heads":
            blocks = Partial(*(torch.cat(x.chunk(self.world_size, dim=1)) for x in (partial.out, partial.lse)))
            rows = all_to_all_rows(
                _pack(blocks), [tokens] * self.world_size, [tokens] * self.world_size, group=self.group
            )
            return _merge([_unpack(part, blocks) for part in rows.chunk(self.world_size)])
        counts = _split_counts(tokens, self.world_size)
        own = counts[self.rank]
        rows = all_to_all_rows(_pack(partial), counts, [own] * self.world_size, group=self.group)
        merged = _merge([_unpack(part, partial) for part in rows.chunk(self.world_size)])
        if self.scatter == "tokens":
            return merged
        return _unpack(all_gather_rows(_pack(merged), counts, group=self.group), partial)

    def _reduce(self, partial: Partial) -> Partial:
        tokens = partial.out.shape[0]
        lses = all_gather_rows(partial.lse, [tokens] * self.world_size, group=self.group)
        weights, lse = merge_weights(lses.chunk(self.world_size))
        empty = torch.isneginf(partial.lse).unsqueeze(-1)
        scaled = torch.where(empty, 0.0, partial.out.float() * weights[self.rank].unsqueeze(-1))
        if self.scatter == "none":
            out = all_reduce_sum(scaled, group=self.group)
        elif self.scatter == "heads":
            out = reduce_scatter_sum(torch.stack(scaled.chunk(self.world_size, dim=1)), group=self.group)
        else:
            counts = _split_counts(tokens, self.world_size)
            blocks = scaled.new_zeros(self.world_size, counts[0], *scaled.shape[1:])
            for block, part in zip(blocks, scaled.tensor_split(self.world_size), strict=True):
                block[: part.shape[0]] = part
            out = reduce_scatter_sum(blocks, group=self.group)[: counts[self.rank]]
        merged = Partial(partial.out, lse)
        return Partial(out.to(partial.out.dtype), self._slice(merged).lse)

    def _slice(self, partial: Partial) -> Partial:
        if self.scatter == "none":
            return partial
        dim = 1 if self.scatter == "heads" else 0
        out = partial.out.tensor_split(self.world_size, dim)[self.rank]
        return Partial(out, partial.lse.tensor_split(self.world_size, dim)[self.rank])


def _merge(parts: Sequence[Partial]) -> Partial:
    # Not merge_partials, which raises on +inf.
    return Partial(*merge_states([p.out for p in parts], [p.lse for p in parts], out_dtype=parts[0].out.dtype))


def _pack(partial: Partial) -> Tensor:
    """uint8 [T, bytes of out and lse], so that both travel in one collective."""
    return torch.cat([as_byte_rows(partial.out), as_byte_rows(partial.lse)], dim=1)


def _unpack(rows: Tensor, like: Partial) -> Partial:
    width = rows.shape[1] - like.lse.shape[1] * like.lse.element_size()
    return Partial(from_byte_rows(rows[:, :width], like.out), from_byte_rows(rows[:, width:], like.lse))


def _split_counts(tokens: int, parts: int) -> list[int]:
    """Lengths of torch.tensor_split: the first tokens % parts are longer by one."""
    return [tokens // parts + (i < tokens % parts) for i in range(parts)]
