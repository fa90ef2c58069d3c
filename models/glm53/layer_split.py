"""How the layers of the model are split over ranks, besides what the KV cache knows: heads, widths and experts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from cptools import ExpertExchange, Lockstep, ParallelGroups, SharedRows, TensorParallel
from cptools.step_plan import StepPlan


@dataclass(frozen=True, eq=False)
class LayerSplit:
    """The modules of one rank. ``ep > 1`` spreads experts over the whole world, replicas included."""

    tp: TensorParallel
    experts: ExpertExchange
    decode_all_heads: bool
    """The ranks of a TP group hold different keys (N = W * TP): in decode each attends with all heads over its own."""
    pcp_rows: SharedRows
    """Decode rows, which all PCP ranks hold alike."""
    peer_rows: SharedRows
    """All rows of a rank, which TP ranks, or the ranks of pure DCP, hold alike."""
    lockstep: Lockstep
    expert_sum: TensorParallel | None = None
    """The ranks of the experts, where steps of decode rows alone add up what each makes of all rows instead of
    exchanging them: no sync, but another order of the sum. So on a GPU, unless replicas bring rows of their own."""

    @classmethod
    def alone(cls, num_experts: int) -> LayerSplit:
        """Of a model on one rank."""
        one = SharedRows(world_size=1, rank=0)
        return cls(
            tp=TensorParallel(world_size=1, rank=0),
            experts=ExpertExchange(num_experts=num_experts, world_size=1, rank=0),
            decode_all_heads=False,
            pcp_rows=one,
            peer_rows=one,
            lockstep=Lockstep(),
        )

    @classmethod
    def over(cls, groups: ParallelGroups, num_experts: int) -> LayerSplit:
        """Of a rank of an engine, whose groups stay the caller's."""
        sizes = groups.config
        pure_dcp = sizes.block_size > sizes.pcp * sizes.tp
        return cls(
            tp=TensorParallel(group=groups.tp),
            experts=ExpertExchange(num_experts=num_experts, group=groups.ep),
            decode_all_heads=1 < sizes.tp and sizes.dcp == sizes.pcp * sizes.tp,
            pcp_rows=SharedRows(group=groups.pcp),
            peer_rows=SharedRows(group=groups.dcp if pure_dcp else groups.tp),
            lockstep=Lockstep(group=groups.dp if sizes.ep > 1 else None),
            expert_sum=TensorParallel(group=groups.ep) if groups.device_type == "cuda" and sizes.dp == 1 else None,
        )

    def begin(self, plan: StepPlan) -> StepSplit:
        """For one step. Collective over replicas that share experts: one small all-gather and a sync; else local."""
        return self._begin(plan.prompt.counts, plan.prompt_rows, plan.decode_rows)

    def begin_decode(self, rows: int) -> StepSplit:
        """For a step of that many decode rows alone, padding included. Collective as `begin`."""
        return self._begin((0,) * self.pcp_rows.world_size, 0, rows)

    def _begin(self, prompt_counts: Sequence[int], prompt_rows: int, decode_rows: int) -> StepSplit:
        shares = (
            self.peer_rows.counts(prompt + decode)[0]
            for prompt, decode in zip(prompt_counts, self.pcp_rows.counts(decode_rows), strict=True)
        )
        expert_sum = None if any(prompt_counts) else self.expert_sum
        return StepSplit(self, prompt_rows, decode_rows, self.lockstep.most(max(shares)), expert_sum)


@dataclass(frozen=True, eq=False)
class StepSplit:
    """A `LayerSplit` in one step, whose rows every layer shares out in the same way."""

    modules: LayerSplit
    prompt_rows: int
    """Of this rank."""
    decode_rows: int
    most_rows: int
    """The rows of the rank with most of them once they are shared, in all replicas that take this step."""
    expert_sum: TensorParallel | None
    """Where the experts' parts are added up in this step, if they are not exchanged."""

    @property
    def goes_on(self) -> bool:
        """Whether all replicas of a lockstep must take another step, since one of them had rows in this one."""
        return self.modules.lockstep.world_size > 1 and self.most_rows > 0

    def decode_pass(self, rows: int) -> StepSplit:
        """For a further pass within the step, over at most one decode row for each of its requests. Local."""
        # So many rows are no more on any rank than the step's own, by which all replicas count their exchanges.
        return replace(self, prompt_rows=0, decode_rows=rows, expert_sum=self.modules.expert_sum)

    def share(self, x: Tensor) -> Tensor:
        """The rows of x [local rows, ...] that no other rank takes. Local; collect(share(x)) == x."""
        return self.modules.peer_rows.share(self._of_one_peer(x))

    def collect(self, own: Tensor) -> Tensor:
        """The ranks' shares -> [local rows, ...]. Collective: an all-gather over TP or pure DCP, and one of decode
        rows over PCP."""
        rows = self.prompt_rows + self._decode_share
        x = self.modules.peer_rows.collect(own, rows)
        if self.modules.pcp_rows.world_size == 1:
            return x
        decode = self.modules.pcp_rows.collect(x[self.prompt_rows :], self.decode_rows)
        return torch.cat([x[: self.prompt_rows], decode])

    @property
    def _decode_share(self) -> int:
        shared = self.modules.pcp_rows
        return shared.counts(self.decode_rows)[shared.rank]

    def _of_one_peer(self, x: Tensor) -> Tensor:
        if self.modules.pcp_rows.world_size == 1:
            return x
        decode = self.modules.pcp_rows.share(x[self.prompt_rows :])
        return torch.cat([x[: self.prompt_rows], decode])
