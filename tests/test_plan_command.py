"""The `cptools plan` command: figures, JSON, text, and what it refuses."""

import json
import re
from pathlib import Path

import pytest

from cptools import cli
from cptools.plan_command import row_bytes
from cptools.planner import MODEL_SHAPES
from models.glm53 import GLM53Config

MILLION = ["plan", "--model", "glm-5.3", "--gpus", "8", "--context", "1048576"]


def plan(capsys, *flags: str) -> dict:
    assert cli.main([*MILLION, *flags, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_json_has_the_published_figures(capsys):
    found = plan(capsys)
    assert found["kv_bytes_per_token"] == 54_728
    assert round(found["kv_gib"], 2) == 53.45
    layouts = found["layouts"]
    assert list(layouts) == ["DP8", "TP8", "PCP8", "PCP8xDCP8"]

    def column(key, digits=None):
        return [layout[key] if digits is None else round(layout[key], digits) for layout in layouts.values()]

    assert column("kv_gib_per_gpu", 2) == [53.45, 53.45, 53.45, 6.68]
    assert column("sparse_mla_flop_per_byte", 1) == [191.3, 26.0, 191.3, 191.3]
    assert column("indexer_crossover_tokens") == [258_633, 32_329, 258_633, 258_633]
    assert column("gather_buffer_gib", 2) == [0, 0, 0, 1.54]
    assert column("weight_gib_per_gpu", 1) == [106.4, 93.0, 106.4, 106.4]
    assert all(type(limit) is int and limit > 0 for limit in column("max_context_tokens"))


def test_fifteen_gib_a_gpu(capsys):
    layouts = plan(capsys, "--kv-gib-per-gpu", "15")["layouts"]
    assert {name: layout["holds_context"] for name, layout in layouts.items()} == {
        "DP8": False,
        "TP8": False,
        "PCP8": False,
        "PCP8xDCP8": True,
    }
    pages = int(15 * 2**30 / (64 * 54_728))
    assert {name: layout["max_context_tokens"] for name, layout in layouts.items()} == {
        "DP8": pages * 64,
        "TP8": pages * 64,
        "PCP8": pages * 64,
        "PCP8xDCP8": pages * 64 * 8,
    }
    one = plan(capsys, "--kv-gib-per-gpu", "15", "--page-size", "1")["layouts"]
    assert one["DP8"]["max_context_tokens"] == 15 * 2**30 // 54_728


def test_flags_reach_the_plan(capsys):
    found = plan(capsys, "--no-mtp", "--kv-rows", "bf16", "--weights", "bf16", "--layout", "pcp4xdcp4xdp2")
    assert found["kv_bytes_per_token"] == 78 * 1152 + 21 * 256
    assert found["layouts"]["PCP4xDCP4xDP2"]["sizes"] == {"dp": 2, "pcp": 4, "dcp": 4, "tp": 1, "ep": 8}
    assert found["layouts"]["DP8"]["weight_gib_per_gpu"] > 139
    assert found["layouts"]["PCP8xDCP8"]["kernel_copy_gib"] == 0
    assert plan(capsys, "--gather-buffers", "1")["layouts"]["PCP8xDCP8"]["gather_buffer_gib"] == 788 / 1024
    assert plan(capsys, "--host-gib-per-gpu", "48")["layouts"]["DP8"]["hisparse"]["max_context_tokens"] == 994_496


def test_rows_are_those_of_the_formats():
    shape = MODEL_SHAPES["glm-5.3"]
    sizes = {kind: row_bytes(shape, kind) for kind in ("fp8", "bf16", "fp32")}
    assert {kind: (rows.mla, rows.index, rows.kernel_copy) for kind, rows in sizes.items()} == {
        "fp8": (656, 132, 1152),
        "bf16": (1152, 256, 0),
        "fp32": (2304, 512, 0),
    }


def test_a_checkpoint_folder_plans_as_its_name(capsys, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(GLM53Config.glm53().to_dict()))
    assert cli.main(["plan", "--model", str(tmp_path), *MILLION[3:], "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert {**found, "model": "glm-5.3"} == plan(capsys)


def test_text_says_the_same(capsys):
    assert cli.main([*MILLION, "--kv-gib-per-gpu", "15"]) == 0
    text = capsys.readouterr().out
    for figure in ("54,728 B", "53.45 GiB", "6.68", " 26.0", "191.3", "32,329", "258,633", "2,354,176", "106.4"):
        assert figure in text
    assert "within the budget: PCP8xDCP8. Not: DP8, TP8, PCP8." in text
    assert re.search(r"^PCP8xDCP8 +106\.4 +6\.68 +1\.54 +1\.12 +15\.3 +yes$", text, re.MULTILINE)
    assert re.search(r"^TP8 +15\.0 +no +0 +294,272 +288,192$", text, re.MULTILINE)
    assert max(map(len, text.splitlines())) <= 110


def test_picture_of_the_page_is_the_text(capsys):
    page = (Path(__file__).parents[1] / "docs/planner.md").read_text()
    command, _, picture = page.split("```\n")[1].partition("\n\n")
    assert cli.main(command.split()[1:]) == 0
    assert picture in capsys.readouterr().out


def test_text_gives_the_reason_of_a_layout_that_can_not_be(capsys):
    assert cli.main(["plan", "--model", "glm-5.3", "--gpus", "12", "--context", "4096"]) == 0
    text = capsys.readouterr().out
    assert "TP12: the model can not be split so: tp=12 must divide num_attention_heads=64" in text
    assert "PCP12: 12 GPUs do not divide 256 experts" in text


def test_a_terminal_gets_tables(capsys, monkeypatch):
    pytest.importorskip("rich")
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "90")
    assert cli.main(MILLION) == 0
    text = capsys.readouterr().out
    assert "━" in text
    assert "32,329" in text


@pytest.mark.parametrize(
    "flags, reason",
    [
        (["--gpus", "0"], "gpus=0"),
        (["--context", "0"], "context=0"),
        (["--context", "2000000"], "context=2000000 is beyond the 1048576"),
        (["--model", "glm-9"], "model='glm-9' is neither one of glm-5, glm-5.1, glm-5.2, glm-5.3"),
        (["--model", "{folder}"], "config.json"),
        (["--layout", "PCP4"], "PCP4 has 4 ranks, gpus=8"),
        (["--layout", "TP4xPCP2xDCP4"], "dcp=4 does not go with pcp=2, tp=4"),
        (["--layout", "CP8"], "layout 'CP8'"),
        (["--kv-gib-per-gpu", "-3"], "kv_gib_per_gpu=-3"),
        (["--page-size", "10", "--interleave", "3"], "interleave=3 must divide page_size=10"),
        (["--gpu", "abacus"], "gpu='abacus' is neither one of h200"),
    ],
)
def test_bad_flags_end_with_2_and_the_numbers(capsys, tmp_path, flags, reason):
    assert cli.main([*MILLION, *(flag.format(folder=tmp_path) for flag in flags)]) == 2
    captured = capsys.readouterr()
    assert reason in captured.err
    assert not captured.out


@pytest.mark.parametrize("flags", [["--gpus", "x"], ["--kv-rows", "int4"], ["--context"]])
def test_flags_that_are_no_values_end_with_2(flags):
    with pytest.raises(SystemExit) as stop:
        cli.main([*MILLION, *flags])
    assert stop.value.code == 2
