"""The cost model: against the model's own sizes, against counts over small layouts, and to the published digit."""

import contextlib
import json
import math
from dataclasses import fields, replace

import pytest
import torch

from cptools import KVLayout, ParallelConfig
from cptools.formats import FP8_INDEX, FP8_MLA
from cptools.planner import (
    H200,
    MODEL_SHAPES,
    GpuSpec,
    HotRows,
    MemorySettings,
    ModelShape,
    RowBytes,
    gpu_from_file,
    indexer_crossover_decode_tokens,
    indexer_crossover_tokens,
    largest_context,
    named_layout,
    plan_memory,
    shape_from_config,
    sparse_mla_flop_per_byte,
    weight_bytes_per_gpu,
)
from models.glm53 import GLM53Config
from models.glm53.weight_split import WeightSplit, check_split
from models.glm53.weights import expected_tensors, is_released_as_fp8, weight_bytes
from models.glm53.weights.kept_fp8 import check_kept

GLM = MODEL_SHAPES["glm-5.3"]
ROWS = RowBytes(FP8_MLA.row_bytes, FP8_INDEX.row_bytes, 1152)
TOKENS = 2**20
# A model of few bytes, so that small contexts fill a small budget.
SMALL = replace(
    GLM,
    indexer_types=("full", "full", "shared"),
    mlp_layer_types=("dense", "sparse", "sparse"),
    max_position_embeddings=100_000,
)


def config_shape(tmp_path, source: dict) -> ModelShape:
    (tmp_path / "config.json").write_text(json.dumps(source))
    return shape_from_config(tmp_path)


def assert_same_sizes(shape: ModelShape, config: GLM53Config) -> None:
    for item in fields(ModelShape):
        assert getattr(shape, item.name) == getattr(config, item.name), item.name
    layers = range(config.num_cache_layers)
    assert shape.num_hidden_layers == config.num_hidden_layers
    assert shape.num_cache_layers == config.num_cache_layers
    assert shape.num_index_layers == len(config.index_layers)
    assert shape.num_sparse_layers == sum(map(config.is_sparse, layers))


def test_named_shape_is_the_models_own():
    assert_same_sizes(GLM, GLM53Config.glm53())


def test_shape_from_a_released_config(tmp_path):
    full = GLM53Config.glm53()
    assert config_shape(tmp_path, full.to_dict()) == GLM
    assert shape_from_config(tmp_path / "config.json") == GLM
    part = full.excerpt([1, 2, 3], experts=16)
    assert_same_sizes(config_shape(tmp_path, part.to_dict()), part)


@pytest.mark.parametrize(
    "changes",
    [
        {"indexer_types": None, "index_topk_freq": 4, "index_skip_topk_offset": 3},
        {"indexer_types": None},
        {"indexer_types": None, "index_topk_freq": 3},
        {"indexer_types": None, "index_topk_pattern": "FSSFFSFSFSFS"},
        {"mlp_layer_types": None, "first_k_dense_replace": 5},
        {"mlp_layer_types": None, "first_k_dense_replace": 2, "moe_layer_freq": 3},
        {"num_nextn_predict_layers": None, "quantization_config": None},
    ],
)
def test_config_without_lists_is_read_as_the_model_reads_it(tmp_path, changes):
    source = {**GLM53Config.glm53().excerpt(range(12)).to_dict(), **changes}
    assert_same_sizes(config_shape(tmp_path, source), GLM53Config.from_dict(source))


def test_earlier_models_index_on_every_layer(tmp_path):
    source = {**GLM53Config.glm53().to_dict(), "indexer_types": None, "max_position_embeddings": 202_752}
    assert config_shape(tmp_path, source) == MODEL_SHAPES["glm-5.1"] == MODEL_SHAPES["glm-5"]
    assert MODEL_SHAPES["glm-5.2"] == GLM


def test_config_errors_name_everything(tmp_path):
    source = GLM53Config.glm53().to_dict()
    wrong = {**source, "kv_lora_rank": "512", "index_topk": None, "num_attention_heads": True, "indexer_types": 4}
    with pytest.raises(ValueError, match=r"(?s)True is not.*kv_lora_rank='512'.*index_topk is missing.*=4 is not"):
        config_shape(tmp_path, wrong)
    with pytest.raises(ValueError, match=r"has 3 entries for num_hidden_layers=78"):
        config_shape(tmp_path, {**source, "mlp_layer_types": ["dense"] * 3})
    with pytest.raises(ValueError, match="model_type='glm5_next'"):
        config_shape(tmp_path, {**source, "model_type": "glm5_next"})
    with pytest.raises(ValueError, match="v_head_dim=0 must be >= 1"):
        config_shape(tmp_path, {**source, "v_head_dim": 0})
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ValueError, match="holds a list"):
        shape_from_config(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match="is not JSON"):
        shape_from_config(tmp_path)
    with pytest.raises(FileNotFoundError):
        shape_from_config(tmp_path / "nothing")


def test_published_bytes():
    assert ROWS.per_token(GLM) == 54_728
    assert ROWS.per_token(GLM.without_mtp()) == 51_168 + 2_772
    assert ROWS.per_token(MODEL_SHAPES["glm-5.1"]) == 61_464 + 788
    plan = plan_memory(GLM, ROWS, gpus=8, context=TOKENS)
    assert round(plan.kv_bytes / 2**30, 2) == 53.45
    per_gpu = {name: round(cost.kv_bytes / 2**30, 2) for name, cost in plan.layouts.items()}
    assert per_gpu == {"DP8": 53.45, "TP8": 53.45, "PCP8": 53.45, "PCP8xDCP8": 6.68}
    gathered = plan.layouts["PCP8xDCP8"]
    assert gathered.gather_received_bytes_per_layer == TOKENS * 656 * 7 // 8
    assert gathered.gather_buffer_bytes == 2 * TOKENS * (656 + 132)
    assert plan.layouts["PCP8"].gather_buffer_bytes == plan.layouts["DP8"].gather_received_bytes_per_layer == 0
    assert gathered.kernel_copy_bytes == TOKENS * 1152


def test_published_intensities_and_crossovers():
    assert round(sparse_mla_flop_per_byte(GLM, ROWS, 8), 1) == 26.0
    assert round(sparse_mla_flop_per_byte(GLM, ROWS, 64), 1) == 191.3
    for shape, prompt, decode in (
        (GLM, (32_329, 258_633), (16_165, 129_317)),
        (MODEL_SHAPES["glm-5.1"], (8_704, 69_632), (4_352, 34_816)),
    ):
        assert tuple(indexer_crossover_tokens(shape, heads) for heads in (8, 64)) == prompt
        assert tuple(indexer_crossover_decode_tokens(shape, heads) for heads in (8, 64)) == decode


@pytest.mark.parametrize("heads", [1, 8, 64])
def test_crossover_is_where_counted_operations_meet(heads):
    """Below it a prompt's attention takes more, from it on its indexers do; both counted query by query."""
    full = GLM53Config.glm53()
    attention = full.num_hidden_layers * 2 * full.index_topk * heads * (576 + 512)
    pair = sum(map(full.is_full, range(full.num_hidden_layers))) * 2 * full.index_n_heads * full.index_head_dim
    at = indexer_crossover_tokens(GLM, heads)
    queries = range(at + 2)
    for length, overtaken in ((at - 1, False), (at + 1, True)):
        scored = pair * sum(position + 0.5 for position in queries[:length])
        assert (scored > attention * length) == overtaken


@pytest.mark.parametrize("weights", ["fp8", "bf16"])
@pytest.mark.parametrize("tp, ep", [(1, 1), (8, 1), (1, 8), (2, 16), (16, 64)])
def test_weights_are_those_that_the_loader_keeps(tmp_path, tp, ep, weights):
    config = GLM53Config.glm53().excerpt([1, 2, 3, 6], experts=64, mtp=True)
    shape = config_shape(tmp_path, config.to_dict())
    kept = weight_bytes(config, dtype=torch.bfloat16, keep_fp8=weights == "fp8", split=WeightSplit(tp=tp, ep=ep))
    assert weight_bytes_per_gpu(shape, tp=tp, ep=ep, weights=weights) == kept


def test_weights_of_the_released_checkpoint():
    assert weight_bytes_per_gpu(GLM, ep=8) == 114_250_230_848  # as docs/real-checkpoint.md computes it
    assert round(weight_bytes_per_gpu(GLM, tp=8) / 2**30, 1) == 93.0


def loader_refuses(config: GLM53Config, split: WeightSplit, weights: str) -> bool:
    shapes = expected_tensors(config)
    kept = [name for name, shape in shapes.items() if is_released_as_fp8(name, shape)]
    try:
        check_split(config, split)
        if weights == "fp8":
            check_kept(config, split, kept, shapes)
    except ValueError:
        return True
    return False


@pytest.mark.parametrize("width", [256, 192])
@pytest.mark.parametrize("weights", ["fp8", "bf16"])
def test_splits_are_refused_where_the_loader_refuses_them(tmp_path, weights, width):
    config = replace(GLM53Config.glm53().excerpt([2, 3], experts=8), moe_intermediate_size=width, intermediate_size=768)
    shape = config_shape(tmp_path, config.to_dict())
    outcomes = set()
    for tp in (1, 2, 3, 4, 8, 16):
        for ep in (1, 2, 3, 8):
            refused = loader_refuses(config, WeightSplit(tp=tp, ep=ep), weights)
            outcome = pytest.raises(ValueError, match=rf"tp={tp}|ep={ep}") if refused else contextlib.nullcontext()
            with outcome:
                weight_bytes_per_gpu(shape, tp=tp, ep=ep, weights=weights)
            outcomes.add(refused)
    assert outcomes == ({True} if (weights, width) == ("fp8", 192) else {True, False})


def counted_pages(layout: KVLayout, seq_len: int) -> int:
    """Pages of the fullest rank, token by token."""
    own = [0] * layout.world_size
    for position in range(seq_len):
        own[layout.owner(position)] += 1
    assert own == [layout.local_len(seq_len, rank) for rank in range(layout.world_size)]
    return max(math.ceil(count / layout.page_size) for count in own)


@pytest.mark.parametrize("world_size", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("interleave, page_size", [(1, 1), (1, 4), (2, 4), (4, 4), (3, 6)])
def test_largest_context_against_a_count(world_size, interleave, page_size):
    layout = KVLayout(world_size, interleave, page_size)
    longest = 3 * layout.virtual_block
    pages = [counted_pages(layout, seq_len) for seq_len in range(longest + 1)]
    for budget in range(0, 3 * page_size * 7):  # of 7 B a token; less than fills `longest`
        fitting = [seq_len for seq_len, count in enumerate(pages) if count * page_size * 7 <= budget]
        assert largest_context(budget, layout, 7) == max(fitting)
    assert largest_context(-5, layout, 7) == 0


@pytest.mark.parametrize("name, page_size", [("DP6", 1), ("PCP6XDCP6", 4), ("PCP6XDCP3", 2), ("DCP3XDP2", 3)])
@pytest.mark.parametrize("tokens", [0, 5, 101.3])
def test_limits_of_a_plan_are_the_last_contexts_that_it_holds(name, page_size, tokens):
    """Held up to `max_context_tokens` and not one token more; likewise with the temporary copies."""
    gib = tokens * ROWS.per_token(SMALL) / 2**30
    settings = MemorySettings(kv_gib_per_gpu=gib, page_size=page_size, gather_buffers=1)

    def cost(context):
        plan = plan_memory(SMALL, ROWS, gpus=6, context=context, extra_layouts=[name], settings=settings)
        return plan.layouts[name.replace("X", "x")]

    def with_copies(context):
        here = cost(context)
        return here.kv_bytes + here.gather_buffer_bytes + here.kernel_copy_bytes <= here.kv_budget_bytes

    most = cost(1).max_context_tokens
    assert cost(most + 1).holds_context is False
    assert most == 0 or cost(most).holds_context
    copied = cost(1).max_context_tokens_with_copies
    assert copied <= most
    assert not with_copies(copied + 1)
    assert copied == 0 or with_copies(copied)
    if tokens > 100:
        assert 0 < copied < most


def test_requests_are_counted_in_pages_and_replicas():
    settings = MemorySettings(kv_gib_per_gpu=10 * 64 * ROWS.per_token(GLM) / 2**30)  # ten pages
    plan = plan_memory(GLM, ROWS, gpus=4, context=129, extra_layouts=["PCP2xDCP2xDP2"], settings=settings)
    requests = {name: cost.max_requests for name, cost in plan.layouts.items()}
    # 129 tokens are 3 pages on one rank, 2 on each of two, 1 on each of four; DP4 has four such pools.
    assert requests == {"DP4": 12, "TP4": 3, "PCP4": 3, "PCP4xDCP4": 10, "PCP2xDCP2xDP2": 10}


def test_budget_beyond_any_float_of_bytes():
    plan = plan_memory(GLM, ROWS, gpus=1, context=1, settings=MemorySettings(kv_gib_per_gpu=1e305))
    assert plan.layouts["DP1"].max_context_tokens == int(1e305) * 2**30 // (64 * 54_728) * 64


def test_fit_counts_everything():
    gpu = GpuSpec("big", memory_gib=500, hbm_tb_per_s=1, bf16_tflop_per_s=50, link_gb_per_s=100)
    plan = plan_memory(GLM, ROWS, gpus=8, context=TOKENS, gpu=gpu, settings=MemorySettings(reserve_gib=2))
    cost = plan.layouts["PCP8xDCP8"]
    used = cost.weight_bytes + cost.kv_bytes + cost.gather_buffer_bytes + cost.kernel_copy_bytes
    assert cost.left_bytes == 498 * 2**30 - used
    assert cost.kv_budget_bytes == 498 * 2**30 - cost.weight_bytes
    assert cost.gather_ms_per_layer == pytest.approx(6.0188, rel=1e-4)
    assert all(cost.fits for cost in plan.layouts.values())
    assert [cost.fits for cost in plan_memory(GLM, ROWS, gpus=8, context=TOKENS).layouts.values()] == [0, 0, 0, 1]
    one = plan_memory(GLM, ROWS, gpus=1, context=5)
    assert list(one.layouts) == ["DP1", "TP1", "PCP1", "PCP1xDCP1"]
    assert {cost.kv_budget_bytes for cost in one.layouts.values()} == {0}


@pytest.mark.parametrize("gpus", range(1, 20))
def test_any_number_of_gpus(gpus):
    plan = plan_memory(GLM, ROWS, gpus=gpus, context=TOKENS)
    for name, cost in plan.layouts.items():
        assert cost.sizes.world_size == gpus
        assert cost.kv_bytes == 64 * math.ceil(TOKENS / (cost.sizes.dcp * 64)) * 54_728
        assert (cost.refused is not None) == (name == f"TP{gpus}" and gpus not in (1, 2, 4, 8, 16))
        assert (cost.weight_bytes is None) == (cost.left_bytes is None) == (cost.refused is not None)


def test_hisparse_figures_of_the_mission():
    assert round(TOKENS * ROWS.mla_per_token(GLM.without_mtp()) / 2**30, 2) == 49.97
    cost = plan_memory(GLM, ROWS, gpus=8, context=TOKENS, settings=MemorySettings(host_gib_per_gpu=48)).layouts["DP8"]
    assert round(cost.hisparse.host_bytes / 2**30, 1) == 50.6
    hot = 5 * 2048 * 79 * 656
    assert HotRows(4).hot_bytes(GLM, ROWS) == hot
    assert cost.hisparse.gpu_bytes == TOKENS * 22 * 132 + hot
    assert cost.hisparse.gpu_bytes <= 3.6 * 2**30
    assert 64 * (48 * 2**30 // (64 * 79 * 656)) == cost.hisparse.max_context_tokens


def test_layout_names():
    assert named_layout("DP8", num_experts=256) == ParallelConfig(dp=8, ep=8)
    assert named_layout("TP8", num_experts=256) == ParallelConfig(tp=8)
    assert named_layout("dcp8xpcp8", num_experts=256) == ParallelConfig(pcp=8, dcp=8, ep=8)
    assert named_layout("TP4xDP2", num_experts=256) == ParallelConfig(tp=4, dp=2, ep=8)
    assert named_layout("TP4xDP2xEP1", num_experts=256) == ParallelConfig(tp=4, dp=2)
    assert named_layout("PCP6", num_experts=256) == ParallelConfig(pcp=6)
    for name in ("", "PCP", "PCP0", "PCP8x", "PCP8xPCP8", "CP8", "PCP8,DCP8", "PCP8xDCP3", "PCP8xEP4"):
        with pytest.raises(ValueError, match=r"layout|dcp=3|ep=4"):
            named_layout(name, num_experts=256)


def test_gpu_of_a_file(tmp_path):
    file = tmp_path / "gpu.json"
    spec = {"name": "x", "memory_gib": 80, "hbm_tb_per_s": 2.0, "bf16_tflop_per_s": 300, "link_gb_per_s": 50}
    file.write_text(json.dumps(spec))
    assert gpu_from_file(file).ridge_flop_per_byte == 150
    for broken, reason in (
        ({**spec, "memory_gib": 0}, "memory_gib=0"),
        ({**spec, "hbm_tb_per_s": "2"}, "hbm_tb_per_s='2'"),
        ({**spec, "more": 1}, "more"),
        ([1], "list"),
    ):
        file.write_text(json.dumps(broken))
        with pytest.raises(ValueError, match=reason):
            gpu_from_file(file)


@pytest.mark.parametrize(
    "changes, reason",
    [
        ({"gpus": 0}, "gpus=0"),
        ({"context": 0}, "context=0"),
        ({"context": 2**20 + 1}, "context=1048577 is beyond the 1048576"),
        ({"extra_layouts": ["PCP4"]}, "PCP4 has 4 ranks, gpus=8"),
    ],
)
def test_refusals_name_the_numbers(changes, reason):
    with pytest.raises(ValueError, match=reason):
        plan_memory(GLM, ROWS, **{"gpus": 8, "context": TOKENS, **changes})


def test_settings_and_weights_are_refused_at_construction():
    for settings, reason in (
        ({"kv_gib_per_gpu": -1.0}, "kv_gib_per_gpu=-1"),
        ({"reserve_gib": math.nan}, "reserve_gib=nan"),
        ({"host_gib_per_gpu": math.inf}, "host_gib_per_gpu=inf"),
        ({"gather_buffers": 0}, "gather_buffers=0"),
        ({"draft_tokens": -1}, "draft_tokens=-1"),
        ({"interleave": 3}, "interleave=3 must divide page_size=64"),
    ):
        with pytest.raises(ValueError, match=reason):
            MemorySettings(**settings)
    plain = replace(GLM, weight_block_size=None)
    assert plan_memory(plain, ROWS, gpus=8, context=1).weights == "bf16"
    with pytest.raises(ValueError, match="weight_block_size is None"):
        plan_memory(plain, ROWS, gpus=8, context=1, weights="fp8")
    assert H200.memory_gib == 139
