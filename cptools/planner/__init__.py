"""What a context costs before anything runs: memory, bytes, operations, crossovers and the largest context of a layout.

==================  =================================================================
`ModelShape`        sizes of a model, by name (`MODEL_SHAPES`) or from config.json (`shape_from_config`)
`RowBytes`          bytes of a cached row, and with it of a context over all layers
`sparse_mla_flop_per_byte`, `indexer_crossover_tokens`  what limits attention, and when the indexer overtakes it
`weight_bytes_per_gpu`  what a rank keeps of the weights
`GpuSpec`, `H200`   memory and rates of a GPU
`named_layout`      "PCP8xDCP8" -> `ParallelConfig`
`plan_memory`       all of it for a number of GPUs: a `MemoryPlan` of one `LayoutCost` a layout
==================  =================================================================

Integers and arithmetic: no torch.distributed, no GPU, no model.
"""

from cptools.planner.attention_cost import (
    indexer_crossover_decode_tokens,
    indexer_crossover_tokens,
    sparse_mla_flop_per_byte,
)
from cptools.planner.config_file import shape_from_config
from cptools.planner.gpu_spec import H200, GpuSpec, gpu_from_file
from cptools.planner.kv_cost import HotRows, RowBytes, largest_context
from cptools.planner.layout_names import named_layout, standard_layouts
from cptools.planner.memory_plan import LayoutCost, MemoryPlan, MemorySettings, plan_memory
from cptools.planner.model_shape import MODEL_SHAPES, ModelShape
from cptools.planner.weight_cost import WeightFormat, released_format, weight_bytes_per_gpu

__all__ = [
    "H200",
    "MODEL_SHAPES",
    "GpuSpec",
    "HotRows",
    "LayoutCost",
    "MemoryPlan",
    "MemorySettings",
    "ModelShape",
    "RowBytes",
    "WeightFormat",
    "gpu_from_file",
    "indexer_crossover_decode_tokens",
    "indexer_crossover_tokens",
    "largest_context",
    "named_layout",
    "plan_memory",
    "released_format",
    "shape_from_config",
    "sparse_mla_flop_per_byte",
    "standard_layouts",
    "weight_bytes_per_gpu",
]
