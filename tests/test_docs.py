"""What the documents say can be run, and names every file it should.

A Python block runs as it stands, in a folder that holds the demo checkpoint. One that begins with "# torchrun" runs
under torchrun, and one that begins with "# on every rank" on two ranks with the `groups` that it names.
"""

import contextlib
import functools
import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from cptools import ParallelConfig, ParallelGroups
from cptools.formats import FP8_INDEX, FP8_MLA
from cptools.residency.states import drawing, state_rows
from examples import demo_model, generate, verify_parallel
from models.glm53 import GLM53Config
from models.glm53.weight_split import WeightSplit
from models.glm53.weights import weight_bytes
from tests.ranks.harness import run_ranks

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def blocks(page: Path) -> list[str]:
    return re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)


def named(kind: str) -> list[tuple[str, str]]:
    """(page and number, source) of all blocks of one kind: how they begin, "" for those of one process."""
    found = [(f"{page.name}-{i}", block) for page in PAGES for i, block in enumerate(blocks(page))]
    kinds = ("# torchrun", "# on every rank")
    return [(name, b) for name, b in found if next((k for k in kinds if b.startswith(k)), "") == kind]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("docs")
    assert demo_model.main([str(path / "demo")]) == 0
    return path


@pytest.mark.parametrize("name, block", [pytest.param(n, b, id=n) for n, b in named("")])
def test_block_runs(name, block, folder, monkeypatch):
    monkeypatch.chdir(folder)
    exec(compile(block, name, "exec"), {})


def test_first_example_of_the_readme_prints_what_it_should(capsys):
    exec(compile(blocks(ROOT / "README.md")[0], "README.md", "exec"), {})
    assert capsys.readouterr().out == "(167167, 166833, 166500)\n"


def test_every_page_shows_code_and_every_primitive_its_ranks():
    assert all(blocks(page) for page in PAGES)
    assert [name.partition("-")[0] for name, _ in named("# on every rank")] == [
        "architecture.md",
        "kv_layout.md",
        "lse_merge.md",
    ]


def test_example_under_torchrun(tmp_path):
    ((_, block),) = named("# torchrun")
    (tmp_path / "ranks.py").write_text(block)
    command = block.splitlines()[0].removeprefix("# torchrun ").split()
    run = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", *command],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert run.returncode == 0, run.stderr
    assert sorted(run.stdout.splitlines()) == [
        "rank 0: positions [0, 1, 2, 8, 9, 10, 32, 36]",
        "rank 1: positions [3, 4, 5, 6, 7, 33, 34, 35]",
    ]


def run_blocks(rank: int, world_size: int, folder: str, sources: list[tuple[str, str]]) -> None:
    with contextlib.chdir(folder), ParallelGroups.from_world(ParallelConfig(pcp=2, dcp=2)) as groups:
        for name, source in sources:
            exec(compile(source, name, "exec"), {"groups": groups})


def test_blocks_on_every_rank_run(folder):
    sources = named("# on every rank")
    assert all("ParallelGroups.from_world(ParallelConfig(pcp=2, dcp=2))" in source for _, source in sources)
    run_ranks(run_blocks, 2, str(folder), sources)


def test_memory_of_the_released_checkpoint_is_computed():
    full = GLM53Config.glm53()
    kv = full.num_cache_layers * FP8_MLA.row_bytes + len(full.index_layers) * FP8_INDEX.row_bytes
    rows = re.findall(r"^\| `(--.*)` \| (.*) \|$", (ROOT / "docs/real-checkpoint.md").read_text(), re.MULTILINE)
    assert len(rows) >= 7

    @functools.cache
    def weights(tp: int, ep: int) -> tuple[int, ...]:
        options = {"dtype": torch.bfloat16, "split": WeightSplit(tp=tp, ep=ep)}
        return tuple(weight_bytes(full, keep_fp8=keep, **options) for keep in (True, False))

    for flags, cells in rows:
        sizes = ParallelConfig(**{name: int(size) for name, size in re.findall(r"--(\w+) (\d+)", flags)})
        kept, plain = weights(sizes.tp, sizes.ep)
        gib = [kept, 139 * 2**30 - kept, plain, kv * 2**20 / sizes.dcp]
        assert cells.split(" | ") == [str(sizes.world_size), *(f"{size / 2**30:.1f}" for size in gib)], flags


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_of_examples_are_legal(page):
    """Flags that parse, sizes that go together, and as many ranks as torchrun starts. A refusal exits."""
    examples = {"verify_parallel": verify_parallel, "generate": generate}
    for command in commands(page):
        launched, _, flags = command.partition("examples/")
        name, _, flags = flags.partition(".py")
        ranks = math.prod(map(int, re.findall(r"--(?:nnodes|nproc-per-node) (\d+)", launched)))
        args = examples[name].parse(flags.split())
        sizes = ParallelConfig(**{axis: getattr(args, axis) for axis in ("pcp", "dcp", "tp", "ep", "dp")})
        assert sizes.world_size == ranks, command
        if name == "verify_parallel":
            assert verify_parallel.notes(args) == [], command


def commands(page: Path) -> list[str]:
    """torchrun and an example, a line each."""
    shell = page.read_text().split("```")[1::2]
    lines = [line for block in shell for line in block.replace("\\\n", " ").splitlines()]
    return [line for line in lines if re.match(r"torchrun .*examples/\w+\.py", line)]


def test_commands_are_found():
    found = {page.name: len(commands(page)) for page in PAGES if commands(page)}
    assert found == {"README.md": 2, "real-checkpoint.md": 2}


def test_layers_are_the_measured_ones():
    page = (ROOT / "docs/layers.md").read_text()
    measured = json.loads((ROOT / "benchmarks/results/layers.json").read_text())
    assert measured[0]["rounding"] in page
    found = re.findall(r"^\| ([\d,]+), ([\d,]+) \| (full|shared|group) \| (.*) \|$", page, re.MULTILINE)
    assert len(found) == 3 * sum(row["phase"] == "decode" or row["context"] != 8192 for row in measured)

    def of(time: float, floor: float) -> str:
        return f"{time:,.0f} / {floor:,.{0 if floor >= 10 or not floor else 1}f}"

    for count, context, layer, cells in found:
        size = int(count.replace(",", "")), int(context.replace(",", ""))
        (row,) = (row for row in measured if (row["rows"], row["context"]) == size)
        floors = {kind: row[f"{kind}_floor_us"] for kind in ("full", "shared")}
        if layer == "group":
            floor = sum(floors["full"].values()) + (row["layers"] - 1) * sum(floors["shared"].values())
            assert cells.rstrip("| ") == of(row["group_us"], floor)
        else:
            times = row[f"{layer}_us"]
            parts = [of(times[p], floor) if times[p] or floor else "-" for p, floor in floors[layer].items()]
            assert cells.split(" | ") == parts, (layer, size)


def test_state_machine_is_drawn_from_the_table():
    page = (ROOT / "docs/hisparse.md").read_text()
    assert f"```mermaid\n{drawing()}\n```" in page
    assert f"\n\n{state_rows()}\n\n" in page


def test_floor_plan_names_every_file():
    plan = (ROOT / "docs/architecture.md").read_text().split("```")[1]
    named_files = set(re.findall(r"\w+\.py", plan)) - {"impl.py"}
    folders = ["cptools", "cptools/planner", "cptools/residency", "models/glm53", "models/glm53/weights"]
    folders += ["serving/core", "serving/events", "serving/engine", "examples"]
    there = {file.name for folder in folders for file in (ROOT / folder).glob("*.py")}
    assert named_files == there


def test_links_lead_somewhere():
    for page in [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")]:
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name} -> {target}"
