"""Whether a context fits on a number of GPUs, in each way to split them, and the largest that does."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from fractions import Fraction

from cptools.integers import require_int
from cptools.layout import KVLayout
from cptools.parallel_config import ParallelConfig
from cptools.planner.attention_cost import (
    indexer_crossover_decode_tokens,
    indexer_crossover_tokens,
    sparse_mla_flop_per_byte,
)
from cptools.planner.gpu_spec import H200, GpuSpec
from cptools.planner.kv_cost import HotRows, RowBytes, largest_context, largest_context_where, paged_bytes
from cptools.planner.layout_names import named_layout, standard_layouts
from cptools.planner.model_shape import ModelShape
from cptools.planner.weight_cost import WeightFormat, released_format, weight_bytes_per_gpu

GIB = 2**30


@dataclass(frozen=True)
class MemorySettings:
    """What the memory of a GPU is used for, beside the model and the context.

    kv_gib_per_gpu: for the KV of requests; None: what weights and reserve leave of the GPU. host_gib_per_gpu: host
    memory for MLA rows with HiSparse; None: not known. reserve_gib: for everything not counted here, such as CUDA,
    NCCL, graphs and the activations of a chunk. gather_buffers: layers whose gathered context a rank holds at a time.
    draft_tokens: of speculative decoding, for the size of hot rows. page_size, interleave: of `KVLayout`.
    """

    kv_gib_per_gpu: float | None = None
    host_gib_per_gpu: float | None = None
    reserve_gib: float = 8.0
    gather_buffers: int = 2
    draft_tokens: int = 3
    page_size: int = 64
    interleave: int = 1

    def __post_init__(self) -> None:
        for name, minimum in (("gather_buffers", 1), ("draft_tokens", 0)):
            require_int(name, getattr(self, name), minimum=minimum)
        for name in ("kv_gib_per_gpu", "host_gib_per_gpu", "reserve_gib"):
            value = getattr(self, name)
            if value is not None and not 0 <= value < float("inf"):
                raise ValueError(f"{name}={value} must be a number >= 0")
        KVLayout(1, self.interleave, self.page_size)


@dataclass(frozen=True)
class HiSparseCost:
    """One GPU's share of the context where all its MLA rows are in host memory: bytes, and the largest such context."""

    gpu_bytes: int  # index keys, and hot rows
    host_bytes: int  # MLA rows
    max_context_tokens: int | None  # None where the host's memory is not known

    def as_json(self) -> dict[str, object]:
        return {
            "gpu_gib_per_gpu": self.gpu_bytes / GIB,
            "host_gib_per_gpu": self.host_bytes / GIB,
            "max_context_tokens": self.max_context_tokens,
        }


@dataclass(frozen=True)
class LayoutCost:
    """One way to split the GPUs. Bytes are of one GPU, with one request of the planned context in the engine.

    kv: rows cached for good, in whole pages. gather_buffer: temporary copies of gathered rows in prefill. kernel_copy:
    rows of one layer in the form that the kernels read. kv_budget, weights and all that follows from them are None
    where `refused` says why the model can not be split this way.
    """

    sizes: ParallelConfig
    refused: str | None
    kv_bytes: int
    gather_buffer_bytes: int
    gather_received_bytes_per_layer: int
    gather_ms_per_layer: float
    kernel_copy_bytes: int
    weight_bytes: int | None
    kv_budget_bytes: int | None
    left_bytes: int | None
    """Of the GPU, beside weights, KV, temporary copies and reserve; below 0 it does not fit."""
    max_context_tokens: int | None
    """Whose KV alone is within the budget."""
    max_context_tokens_with_copies: int | None
    """Whose KV and temporary copies are within the budget."""
    max_requests: int | None
    """Requests of the planned context that the KV budgets of all GPUs together hold."""
    sparse_mla_flop_per_byte: float | None
    indexer_crossover_tokens: int | None
    indexer_crossover_decode_tokens: int | None
    hisparse: HiSparseCost

    @property
    def holds_context(self) -> bool | None:
        """Whether the KV of the context is within the budget."""
        return None if self.kv_budget_bytes is None else self.kv_bytes <= self.kv_budget_bytes

    @property
    def fits(self) -> bool | None:
        """Whether all of it is within the memory of the GPU, whatever the budget."""
        return None if self.left_bytes is None else self.left_bytes >= 0

    def as_json(self) -> dict[str, object]:
        """Numbers under names that say their unit; bytes of the larger ones beside their GiB."""
        return {
            "sizes": asdict(self.sizes),
            "refused": self.refused,
            "kv_bytes_per_gpu": self.kv_bytes,
            "kv_gib_per_gpu": self.kv_bytes / GIB,
            "gather_buffer_gib": self.gather_buffer_bytes / GIB,
            "gather_received_bytes_per_layer": self.gather_received_bytes_per_layer,
            "gather_ms_per_layer": self.gather_ms_per_layer,
            "kernel_copy_gib": self.kernel_copy_bytes / GIB,
            "weight_bytes_per_gpu": self.weight_bytes,
            "weight_gib_per_gpu": _gib(self.weight_bytes),
            "kv_budget_gib_per_gpu": _gib(self.kv_budget_bytes),
            "left_gib_per_gpu": _gib(self.left_bytes),
            "holds_context": self.holds_context,
            "fits": self.fits,
            "max_context_tokens": self.max_context_tokens,
            "max_context_tokens_with_copies": self.max_context_tokens_with_copies,
            "max_requests": self.max_requests,
            "sparse_mla_flop_per_byte": self.sparse_mla_flop_per_byte,
            "indexer_crossover_tokens": self.indexer_crossover_tokens,
            "indexer_crossover_decode_tokens": self.indexer_crossover_decode_tokens,
            "hisparse": self.hisparse.as_json(),
        }


@dataclass(frozen=True)
class MemoryPlan:
    """The costs of one context of a model, and of each layout by its name."""

    shape: ModelShape
    rows: RowBytes
    gpus: int
    context: int
    gpu: GpuSpec
    weights: WeightFormat
    settings: MemorySettings
    layouts: dict[str, LayoutCost] = field(hash=False)

    @property
    def kv_bytes(self) -> int:
        """Of the context, each token once, no page rounded up."""
        return self.context * self.rows.per_token(self.shape)

    def as_json(self) -> dict[str, object]:
        """Plain values, `layouts` by name; GiB and tokens are not rounded."""
        return {
            "context": self.context,
            "gpus": self.gpus,
            "gpu": {**asdict(self.gpu), "ridge_flop_per_byte": self.gpu.ridge_flop_per_byte},
            "weights": self.weights,
            "settings": asdict(self.settings),
            "max_position_embeddings": self.shape.max_position_embeddings,
            "mtp_layers": self.shape.num_nextn_predict_layers,
            "mla_row_bytes": self.rows.mla,
            "index_row_bytes": self.rows.index,
            "kv_bytes_per_token": self.rows.per_token(self.shape),
            "kv_bytes": self.kv_bytes,
            "kv_gib": self.kv_bytes / GIB,
            "layouts": {name: cost.as_json() for name, cost in self.layouts.items()},
        }


def plan_memory(
    shape: ModelShape,
    rows: RowBytes,
    *,
    gpus: int,
    context: int,
    extra_layouts: Sequence[str] = (),
    gpu: GpuSpec = H200,
    weights: WeightFormat | None = None,
    settings: MemorySettings | None = None,
) -> MemoryPlan:
    """Count one request of ``context`` tokens on ``gpus`` GPUs: DP, TP, PCP and PCP x DCP of all of them, and others.

    extra_layouts: names of further splits of all GPUs, such as "PCP8xDCP8xDP2". weights: how a rank keeps them;
    None: as the checkpoint has them.

    Raises ValueError, with the numbers, for a size below 1, a context beyond the model's positions, weights in FP8 of a
    checkpoint that has none, and an extra layout that is none or has another number of ranks. A layout that the model
    can not be split into is in the plan, with the reason.
    """
    require_int("gpus", gpus, minimum=1)
    require_int("context", context, minimum=1)
    settings = MemorySettings() if settings is None else settings
    if context > shape.max_position_embeddings:
        raise ValueError(f"context={context} is beyond the {shape.max_position_embeddings} positions of the model")
    weights = released_format(shape) if weights is None else weights
    if weights == "fp8" and released_format(shape) != "fp8":
        raise ValueError(
            f"weights='fp8' need a checkpoint in FP8 blocks of 128 x 128, weight_block_size is "
            f"{shape.weight_block_size}: plan with weights='bf16'"
        )
    plan = MemoryPlan(shape, rows, gpus, context, gpu, weights, settings, {})
    costs = {}
    for name in (*standard_layouts(gpus), *(name.upper().replace("X", "x") for name in extra_layouts)):
        sizes = named_layout(name, num_experts=shape.n_routed_experts)
        if sizes.world_size != gpus:
            raise ValueError(f"layout {name} has {sizes.world_size} ranks, gpus={gpus}")
        costs[name] = _layout_cost(plan, sizes)
    return replace(plan, layouts=costs)


def _layout_cost(plan: MemoryPlan, sizes: ParallelConfig) -> LayoutCost:
    shape, rows, context, settings = plan.shape, plan.rows, plan.context, plan.settings
    layout = KVLayout(sizes.dcp, settings.interleave, settings.page_size)
    per_token = rows.per_token(shape)
    memory, reserve = _bytes(plan.gpu.memory_gib), _bytes(settings.reserve_gib)

    refused = weight_bytes = None
    try:
        weight_bytes = weight_bytes_per_gpu(shape, tp=sizes.tp, ep=sizes.ep, weights=plan.weights)
    except ValueError as error:
        refused = str(error)
    if settings.kv_gib_per_gpu is not None:
        budget: int | None = _bytes(settings.kv_gib_per_gpu)
    else:
        budget = None if weight_bytes is None else max(0, memory - reserve - weight_bytes)

    def copies(tokens: int) -> int:
        return rows.gather_buffers(tokens, layout, settings.gather_buffers) + tokens * rows.kernel_copy

    kv_bytes = paged_bytes(context, layout, per_token)
    most = with_copies = requests = None
    if budget is not None:
        limit = budget
        most = largest_context(limit, layout, per_token)
        with_copies = largest_context_where(
            most, lambda tokens: paged_bytes(tokens, layout, per_token) + copies(tokens) <= limit
        )
        requests = sizes.dp * (budget // (settings.page_size * per_token) // layout.pages(context))
    left = None if weight_bytes is None else memory - reserve - weight_bytes - kv_bytes - copies(context)
    heads = None if shape.num_attention_heads % sizes.tp else shape.num_attention_heads // sizes.tp
    received = rows.received_per_layer(context, layout)
    return LayoutCost(
        sizes=sizes,
        refused=refused,
        kv_bytes=kv_bytes,
        gather_buffer_bytes=rows.gather_buffers(context, layout, settings.gather_buffers),
        gather_received_bytes_per_layer=received,
        gather_ms_per_layer=received / plan.gpu.link_gb_per_s / 1e6,
        kernel_copy_bytes=context * rows.kernel_copy,
        weight_bytes=weight_bytes,
        kv_budget_bytes=budget,
        left_bytes=left,
        max_context_tokens=most,
        max_context_tokens_with_copies=with_copies,
        max_requests=requests,
        sparse_mla_flop_per_byte=None if heads is None else sparse_mla_flop_per_byte(shape, rows, heads),
        indexer_crossover_tokens=None if heads is None else indexer_crossover_tokens(shape, heads),
        indexer_crossover_decode_tokens=None if heads is None else indexer_crossover_decode_tokens(shape, heads),
        hisparse=_hisparse_cost(plan, layout, budget),
    )


def _hisparse_cost(plan: MemoryPlan, layout: KVLayout, budget: int | None) -> HiSparseCost:
    shape, rows = plan.shape, plan.rows
    hot = HotRows(1 + plan.settings.draft_tokens).hot_bytes(shape, rows)
    on_gpu, on_host = rows.index_per_token(shape), rows.mla_per_token(shape)
    most = None
    if budget is not None and plan.settings.host_gib_per_gpu is not None:
        host = _bytes(plan.settings.host_gib_per_gpu)
        most = min(largest_context(budget - hot, layout, on_gpu), largest_context(host, layout, on_host))
    return HiSparseCost(
        gpu_bytes=paged_bytes(plan.context, layout, on_gpu) + hot,
        host_bytes=paged_bytes(plan.context, layout, on_host),
        max_context_tokens=most,
    )


def _bytes(gib: float) -> int:
    return int(Fraction(gib) * GIB)


def _gib(size: int | None) -> float | None:
    return None if size is None else size / GIB
