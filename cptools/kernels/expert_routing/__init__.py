"""Routing of tokens to experts: choose them, group pairs by expert for `grouped_swiglu`, and combine the results."""

from __future__ import annotations

from torch import Tensor

from cptools.kernels.impl import Choice, choose, triton_obstacle

from ..arguments import dense, dense_rows
from . import reference
from .reference import Groups

__all__ = ["Groups", "choose_expert_routing", "combine", "group_by_expert", "route"]


def route(
    logits: Tensor, bias: Tensor, *, k: int, normalise: bool = True, scaling: float = 1.0, impl: str = "auto"
) -> tuple[Tensor, Tensor]:
    """The k experts of each token with the largest sigmoid(logit) + bias, the lower one where these are equal.

    The bias only selects: gates are sigmoid(logit), divided by their sum over the k if ``normalise``, times
    ``scaling``. Local, no sync, capturable; on a GPU the Triton kernel chooses as the reference does there, bit by bit.

    Args:
        logits: float32 [T, E], T may be 0. bias: float32 [E].

    Returns:
        experts int64 [T, k] ascending, gates float32 [T, k].
    """
    if logits.dim() != 2 or list(bias.shape) != [logits.shape[1]] or not 0 < k <= logits.shape[1]:
        raise ValueError(f"route: logits {list(logits.shape)}, bias {list(bias.shape)}, k={k} do not fit together")
    if choose_expert_routing(logits, experts=logits.shape[1], k=k, impl=impl).impl == "triton":
        from . import triton

        experts, gates = triton.route(dense_rows(logits), dense(bias), k, normalise, scaling)
        return experts, gates
    return reference.route(logits, bias, k=k, normalise=normalise, scaling=scaling)


def group_by_expert(experts: Tensor, number: int, *, impl: str = "auto") -> Groups:
    """Order the pairs of experts [T, k], integers in [0, number), by expert, then pair. Local, no sync, capturable."""
    if choose_expert_routing(experts, experts=number, k=1, impl=impl).impl == "triton":
        from . import triton

        return Groups(*triton.group_by_expert(dense(experts), number))
    return reference.group_by_expert(experts, number)


def combine(outputs: Tensor, slots: Tensor, gates: Tensor, *, impl: str = "auto") -> Tensor:
    """The sum over a token's experts, in ascending order of these, of gate times output. Local, no sync, capturable.

    Args:
        outputs: [P, D], rows in grouped order, any float dtype. slots: integers [T, k], the row of each pair.
        gates: float32 [T, k].

    Returns:
        [T, D] in the outputs' dtype. The reference also adds in it; the kernel adds in fp32 and rounds once.
    """
    if slots.shape != gates.shape or slots.dim() != 2 or outputs.dim() != 2:
        shapes = [list(x.shape) for x in (outputs, slots, gates)]
        raise ValueError("combine: outputs {}, slots {}, gates {} do not fit together".format(*shapes))
    if choose_expert_routing(outputs, experts=1, k=slots.shape[1], impl=impl).impl == "triton":
        from . import triton

        combined: Tensor = triton.combine(dense_rows(outputs), dense(slots), dense(gates))
        return combined
    return reference.combine(outputs, slots, gates)


def choose_expert_routing(x: Tensor, *, experts: int, k: int, impl: str = "auto") -> Choice:
    """What routing of x's device to ``k`` of ``experts`` would run, and why nothing faster."""
    obstacle = triton_obstacle(x.device)
    if obstacle is None and (experts > 1024 or k > 16):
        obstacle = f"{k} of {experts} experts are more than 16 of 1024"
    return choose("expert_routing", impl, {"triton": obstacle})
