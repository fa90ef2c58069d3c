"""What a rank reads of a checkpoint: the right part, each value once, in the order of the files, in little memory."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from cptools.kernels.block_fp8 import BlockFP8
from models.glm53 import GLM53, GLM53Config
from models.glm53.weight_split import WeightSplit
from models.glm53.weights import (
    ModelWeights,
    RandomSource,
    expected_tensors,
    load_weights,
    progress_bar,
    random_weights,
    save_checkpoint,
    save_sharded_checkpoint,
    weight_bytes,
)
from models.glm53.weights.checkpoint_files import ShardReader, StoredTensor, checkpoint_files
from tests.checkpoints import TINY
from tests.model.weight_cases import BLOCKY, RAGGED, SPLITS, beyond_the_weights, ranks
from tests.model.weight_trees import assert_same, leaves, nbytes, part_of

FULL = GLM53Config.glm53()
LM_HEAD = {"lm_head.weight": torch.zeros(1)}


def load(path: Path, split: WeightSplit | None = None, **options: object) -> ModelWeights:
    config = GLM53Config.from_pretrained(path)
    return load_weights(path, config, device="cpu", dtype=torch.float32, split=split, **options)


def saved(path: Path, config: GLM53Config, *, shard_bytes: int = 2**17) -> Path:
    save_sharded_checkpoint(path, config, RandomSource(config, seed=0, device="cpu").tensors(), shard_bytes=shard_bytes)
    return path


@pytest.fixture(scope="module")
def blocky(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(tmp_path_factory.mktemp("blocky"), BLOCKY)


@pytest.fixture(scope="module")
def ragged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(tmp_path_factory.mktemp("ragged"), RAGGED)


# ---- parts ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("tp", "ep"), [*SPLITS, (4, 1), (8, 16)])
def test_dequantised_part_may_be_cut_anywhere(ragged: Path, tp: int, ep: int) -> None:
    whole = load(ragged)
    for split in ranks(tp, ep):
        assert_same(load(ragged, split), part_of(whole, RAGGED, split))


@pytest.mark.parametrize(("tp", "ep"), SPLITS)
def test_part_kept_in_fp8(blocky: Path, tp: int, ep: int) -> None:
    whole = load(blocky)
    for split in ranks(tp, ep):
        part = load(blocky, split, keep_fp8=True)
        assert_same(part, part_of(whole, BLOCKY, split))
        kept = {name.rpartition(".")[2] for name, weight in leaves(part) if isinstance(weight, BlockFP8)}
        assert kept == {"q_a", "q_b", "kv_a", "o", "wq_b", "gate_up", "down"}
        assert nbytes(part) == weight_bytes(BLOCKY, dtype=torch.float32, keep_fp8=True, split=split)


def test_fp8_bytes_are_the_stored_ones(blocky: Path) -> None:
    stored: dict[str, Tensor] = {}
    for file in blocky.glob("*.safetensors"):
        stored |= load_file(file)
    layer = load(blocky, keep_fp8=True).layers[0]
    prefix = "model.layers.0."
    kv_a, gate_up = layer.attention.kv_a, layer.ffn.gate_up
    assert isinstance(kv_a, BlockFP8)
    assert isinstance(gate_up, BlockFP8)
    name = prefix + "self_attn.kv_a_proj_with_mqa.weight"
    assert torch.equal(kv_a.values.view(torch.uint8), stored[name].view(torch.uint8))
    assert torch.equal(kv_a.scales, stored[name + "_scale_inv"])
    halves = [prefix + f"mlp.{half}_proj.weight" for half in ("gate", "up")]
    assert torch.equal(gate_up.values.view(torch.uint8), torch.cat([stored[h].view(torch.uint8) for h in halves]))
    assert torch.equal(gate_up.scales, torch.cat([stored[h + "_scale_inv"] for h in halves]))


def test_last_scale_block_of_kv_a_may_be_partial(blocky: Path) -> None:
    kv_a = load(blocky, keep_fp8=True).layers[0].attention.kv_a
    assert isinstance(kv_a, BlockFP8)
    assert (list(kv_a.shape), list(kv_a.scales.shape)) == ([80, 256], [1, 2])


def test_plain_weights_ignore_keep_fp8_read_or_drawn(tmp_path: Path) -> None:
    saved(tmp_path, TINY)
    read = load(tmp_path, keep_fp8=True)
    assert not any(isinstance(weight, BlockFP8) for _, weight in leaves(read))
    assert_same(random_weights(TINY, device="cpu", dtype=torch.float32, keep_fp8=True), dict(leaves(read)))


# ---- reading -------------------------------------------------------------------------------------------------------


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, tuple[int, ...], tuple[int, ...]]]:
    """(name, start, shape) of everything that is read."""
    seen = []
    read = ShardReader.read

    def spy(self: ShardReader, name: str, start: tuple[int, ...], shape: tuple[int, ...]) -> Tensor:
        seen.append((name, start, shape))
        return read(self, name, start, shape)

    monkeypatch.setattr(ShardReader, "read", spy)
    return seen


@pytest.mark.parametrize("keep_fp8", [True, False])
def test_each_value_is_read_once_in_file_order(
    blocky: Path, reads: list[tuple[str, tuple[int, ...], tuple[int, ...]]], keep_fp8: bool
) -> None:
    split = WeightSplit(tp=2, tp_rank=1, ep=4, ep_rank=2)
    load(blocky, split, keep_fp8=keep_fp8)
    values = [part for part in reads if not part[0].endswith("_scale_inv")]
    seen: dict[str, Tensor] = {}
    config = GLM53Config.from_pretrained(blocky)
    for name, start, shape in values:
        rows = torch.zeros(4096, dtype=torch.int32) if name not in seen else seen[name]
        rows[start[0] : start[0] + shape[0]] += 1
        seen[name] = rows
    assert all(rows.max() == 1 for rows in seen.values())
    experts = {name.split(".")[5] for name in seen if ".experts." in name}
    assert experts == {"2"}, "nothing of other ranks' experts"
    order = list(json.loads((blocky / "model.safetensors.index.json").read_text())["weight_map"].items())
    file_of = dict(order)
    files = [file_of[name] for name, _, _ in values]
    assert files == sorted(files)
    assert len(set(files)) > 5, "a checkpoint of many shards"
    heads = config.num_attention_heads // 2
    o = next(part for part in values if part[0].endswith("layers.0.self_attn.o_proj.weight"))
    assert o[1:] == ((0, heads * config.v_head_dim), (config.hidden_size, heads * config.v_head_dim))


def test_big_tensors_come_in_pieces(blocky: Path, monkeypatch: pytest.MonkeyPatch, reads: list[object]) -> None:
    whole = load(blocky)
    few = len(reads)
    monkeypatch.setattr("models.glm53.weights.fill.MOST_VALUES", 1000)
    assert_same(load(blocky), dict(leaves(whole)))  # type: ignore[arg-type]
    assert len(reads) > 20 * few


def test_windows_do_not_change_what_is_read(blocky: Path) -> None:
    files = sorted(blocky.glob("*.safetensors"))
    stored = load_file(files[3])
    name, value = next((name, value) for name, value in stored.items() if value.dim() == 2)
    dtype = {torch.float8_e4m3fn: "F8_E4M3", torch.bfloat16: "BF16", torch.float32: "F32"}[value.dtype]
    with ShardReader(files, {name: StoredTensor(3, 0, tuple(value.shape), dtype)}, window=1) as reader:
        rows = [reader.read(name, (row, 0), (1, value.shape[1])).clone() for row in range(value.shape[0])]
    assert torch.equal(torch.cat(rows).view(torch.uint8), value.view(torch.uint8))


def test_progress_counts_every_byte(blocky: Path) -> None:
    reports: list[tuple[int, int]] = []
    split = WeightSplit(ep=2, ep_rank=1)
    load(blocky, split, keep_fp8=True, progress=lambda done, total: reports.append((done, total)))
    done, total = zip(*reports, strict=True)
    assert list(done) == sorted(set(done))
    assert set(total) == {done[-1]}
    stored = [load_file(file) for file in blocky.glob("*.safetensors")]
    sizes = {name: t.nbytes for file in stored for name, t in file.items() if not name.endswith("_scale_inv")}
    other = [f".experts.{expert}." for expert in (0, 1)]
    assert done[-1] == sum(size for name, size in sizes.items() if not any(o in name for o in other))


def test_bar_is_for_terminals_with_rich(monkeypatch: pytest.MonkeyPatch) -> None:
    with progress_bar("reading") as report:
        assert report is None
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    pytest.importorskip("rich")
    with progress_bar("reading") as report:
        assert report is not None
        report(1, 2)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with progress_bar("reading") as report:
        assert report is None


# ---- refusals ------------------------------------------------------------------------------------------------------


def refused(path: Path, monkeypatch: pytest.MonkeyPatch, call: Callable[[], object]) -> str:
    """The message; no tensor has been read by then."""
    monkeypatch.setattr(ShardReader, "read", None)
    with pytest.raises(ValueError) as caught:
        call()
    return str(caught.value)


def test_cut_through_a_block_is_refused(blocky: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    message = refused(blocky, monkeypatch, lambda: load(blocky, WeightSplit(tp=4, tp_rank=1), keep_fp8=True))
    assert "layers.0.self_attn.q_b_proj.weight: rows 0..64 of 256 cut a block of 128" in message
    assert "layers.0.self_attn.o_proj.weight: columns 0..64 of 256 cut a block of 128" in message
    assert "experts.0.gate_proj.weight: rows 0..64 of 256 cut a block of 128" in message
    assert "more like these" in message


def test_every_rank_refuses_alike(tmp_path: Path) -> None:
    """The last of three parts of 64 rows begins and ends with a block."""
    sizes = {"num_attention_heads": 3, "intermediate_size": 3 * 128, "moe_intermediate_size": 3 * 128}
    saved(tmp_path, replace(BLOCKY, n_routed_experts=3, **sizes))
    messages = set()
    for rank in range(3):
        with pytest.raises(ValueError, match=r"rows 0\.\.64 of 192 cut a block of 128") as caught:
            load(tmp_path, WeightSplit(tp=3, tp_rank=rank), keep_fp8=True)
        messages.add(str(caught.value))
    assert len(messages) == 1


def test_gate_and_up_must_meet_between_blocks(ragged: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    message = refused(ragged, monkeypatch, lambda: load(ragged, keep_fp8=True))
    assert "experts.0.up_proj.weight: 64 rows would begin at row 64, inside a block of 128" in message
    assert "kv_a" not in message


def test_other_blocks_can_not_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved(tmp_path, replace(BLOCKY, weight_block_size=(128, 64)))
    message = refused(tmp_path, monkeypatch, lambda: load(tmp_path, keep_fp8=True))
    assert message == "keep_fp8 needs blocks of 128 x 128, weight_block_size is (128, 64)"


def test_experts_of_mixed_dtypes_can_not_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved(tmp_path, BLOCKY, shard_bytes=2**30)
    (file,) = tmp_path.glob("*.safetensors")
    tensors = load_file(file)
    name = "model.layers.1.mlp.experts.2.up_proj.weight"
    del tensors[name + "_scale_inv"]
    tensors[name] = tensors[name].bfloat16()
    save_file(tensors, file)
    load(tmp_path)
    for split in ranks(1, 4):  # also those that keep other experts
        message = refused(tmp_path, monkeypatch, lambda split=split: load(tmp_path, split, keep_fp8=True))
        assert f"{name} is not FP8, but others that belong in one tensor with it are" in message


@pytest.mark.parametrize(
    ("split", "what"),
    [
        (WeightSplit(tp=3), "tp=3 must divide num_attention_heads=8"),
        (WeightSplit(ep=3), "ep=3 must divide n_routed_experts=16"),
    ],
)
def test_uneven_split_is_refused(ragged: Path, monkeypatch: pytest.MonkeyPatch, split: WeightSplit, what: str) -> None:
    assert what in refused(ragged, monkeypatch, lambda: load(ragged, split))


def test_faults_of_a_checkpoint_of_another_model_fit_on_a_screen(tmp_path: Path) -> None:
    config = replace(TINY, num_nextn_predict_layers=0)
    names = list(expected_tensors(config))
    save_checkpoint(tmp_path, config, {f"transformer.{n}": torch.zeros(1) for n in names} | LM_HEAD)
    with pytest.raises(ValueError, match=r"does not fit its config\.json") as caught:
        load(tmp_path)
    lines = str(caught.value).splitlines()
    assert len(lines) == 1 + 21 + 1 + 21
    assert lines[1] == f"- {names[0]} is missing"
    assert lines[21] == f"- and {len(names) - 1 - 20:,} more like these"
    assert lines[22] == "- lm_head.weight has shape [1], not [512, 128]"
    assert lines[23].startswith("- transformer.")
    assert lines[43] == f"- and {len(names) - 20:,} more like these"


def test_absent_shards_fit_on_a_screen(tmp_path: Path) -> None:
    names = [f"model-{number:05}-of-00141.safetensors" for number in range(1, 142)]
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {name: name for name in names}}))
    (tmp_path / names[0]).write_bytes(b"")
    with pytest.raises(ValueError, match=r"lacks 140 of 141 files") as caught:
        checkpoint_files(tmp_path)
    lines = str(caught.value).splitlines()
    assert (lines[1], lines[-1], len(lines)) == (f"- {names[1]}", "- and 120 more like these", 22)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"dtype": torch.int8}, "dtype=torch.int8 is not one of float32, bfloat16, float16, float64"),
        ({"dtype": "bfloat16"}, "dtype=bfloat16 is not one of"),
        ({"keep_fp8": "yes"}, "keep_fp8='yes' must be True or False"),
    ],
)
def test_types_that_no_weight_has_are_refused_by_every_maker(
    blocky: Path, options: dict[str, object], reason: str
) -> None:
    options = {"dtype": torch.bfloat16} | options
    for make in (
        lambda: load_weights(blocky, BLOCKY, device="cpu", **options),
        lambda: random_weights(BLOCKY, device="cpu", **options),
        lambda: weight_bytes(BLOCKY, **options),
        lambda: GLM53.from_pretrained(blocky, **options),
    ):
        with pytest.raises(ValueError, match=reason):
            make()


def test_faults_come_before_reading(blocky: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = replace(BLOCKY, n_routed_experts=5)
    message = refused(
        blocky, monkeypatch, lambda: load_weights(blocky, config, device="cpu", dtype=torch.float32, keep_fp8=True)
    )
    assert "model.layers.2.mlp.experts.4.down_proj.weight is missing" in message
    assert "model.layers.2.mlp.gate.weight has shape [4, 256], not [5, 256]" in message


# ---- memory --------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux's peak memory of a process")
@pytest.mark.parametrize(("shard_bytes", "ep"), [(2**24, 4), (2**40, 1)], ids=["many files", "one file"])
def test_host_memory_is_bounded(tmp_path: Path, shard_bytes: int, ep: int) -> None:
    """The files have 0.6 GB, the windows 0.25: what is mapped at once stays within them."""
    config = replace(
        FULL.excerpt(FULL.indexer_group(6), experts=16),
        vocab_size=512,
        eos_token_ids=(),
        hidden_size=2048,
        num_attention_heads=32,
        moe_intermediate_size=1024,
    )
    saved(tmp_path, config, shard_bytes=shard_bytes)
    size = sum(file.stat().st_size for file in tmp_path.glob("*.safetensors"))
    assert size > 550e6
    kept, beyond = beyond_the_weights(tmp_path, ep=ep, kind="fp8")
    assert kept < 0.6 * size if ep == 4 else kept > 0.9 * size
    assert beyond < 400e6
