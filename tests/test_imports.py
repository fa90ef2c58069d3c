"""What may import what: nothing beyond torch and numpy, and each layer only from those before it."""

import ast
import functools
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

# Every file of cptools stands in one of these layers; `front` sees all of them, and none of them sees `front`.
# A name ending in / is a folder.
LAYERS = {
    "plans": """integers layout cp_plan reshard parallel_config page_allocator block_tables step_plan planner/
                residency/""".split(),
    "kernels": "kernels/ formats partial host_copy".split(),
    "modules": """collectives cp_shard kv_shard lse_merge parallel host_pool paged_rows step_rows layer_context cp_kv
                  shared_rows tensor_parallel expert_exchange lockstep spans""".split(),
    "front": "__init__ cli doctor plan_command".split(),
}
# models.glm53 and serving read cptools by its public names, so for them it is one layer.
ORDER = ["plans", "kernels", "modules", "front", "models", "serving"]
HALLS = {"utils", "util", "common", "misc", "helpers", "helper"}
MAX_LINES = 400

PACKAGES = ["cptools", "models", "serving"]
FILES = sorted(p.relative_to(ROOT) for package in PACKAGES for p in (ROOT / package).rglob("*.py"))
OUTSIDE = sorted(p.relative_to(ROOT) for folder in ["examples", "benchmarks"] for p in (ROOT / folder).rglob("*.py"))


@functools.cache
def parsed(file: Path) -> ast.Module:
    return ast.parse((ROOT / file).read_text())


def layer_of(file: Path) -> str | None:
    """The layer of a source file, relative to the checkout; None where no table names it."""
    package, *rest = file.with_suffix("").parts
    if package != "cptools":
        return package
    inside = "/".join(rest)
    for layer, entries in LAYERS.items():
        if any(inside == e or (e.endswith("/") and inside.startswith(e)) for e in entries):
            return layer
    return None


def file_of(module: str) -> Path | None:
    """The file of a dotted module name of this checkout, None for other packages and for names inside a module."""
    path = Path(*module.split("."))
    for candidate in (path.with_suffix(".py"), path / "__init__.py"):
        if (ROOT / candidate).is_file():
            return candidate
    return None


def imports(file: Path) -> Iterator[tuple[str, str | None]]:
    """(module, name) of each import statement anywhere in a file; name is None for `import module`."""
    for node in ast.walk(parsed(file)):
        if isinstance(node, ast.Import):
            yield from ((alias.name, None) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                package = file.parts[: len(file.parts) - node.level]
                base = ".".join([*package, *([base] if base else [])])
            yield from ((base, alias.name) for alias in node.names)


def imported_modules(file: Path) -> Iterator[str]:
    """Dotted modules that a file imports, `from package import module` resolved to the module."""
    for module, name in imports(file):
        yield f"{module}.{name}" if name and file_of(f"{module}.{name}") else module


def within(module: str, package: str) -> bool:
    return module == package or module.startswith(package + ".")


WITHOUT_EXTRAS = """
import importlib.metadata, re, sys

def closure(names):
    todo, done = list(names), set()
    while todo:
        name = re.sub("[-_.]+", "-", todo.pop()).lower()
        if name in done:
            continue
        done.add(name)
        try:
            requires = importlib.metadata.requires(name) or []
        except importlib.metadata.PackageNotFoundError:
            continue
        todo += [re.match("[A-Za-z0-9._-]+", r).group() for r in requires if "extra ==" not in r]
    return done

ALLOWED = closure(["torch", "numpy"])
BLOCKED = {"triton", "safetensors", "transformers", "rich", "einops"}
OWNERS = {top: {re.sub("[-_.]+", "-", d).lower() for d in ds}
          for top, ds in importlib.metadata.packages_distributions().items()}

class OnlyTorchAndNumpy:
    def __init__(self, finder):
        self.finder = finder

    def find_spec(self, fullname, path=None, target=None):
        top = fullname.partition(".")[0]
        if top in BLOCKED or top in OWNERS and top != "cptools" and not OWNERS[top] & ALLOWED:
            return None
        return self.finder.find_spec(fullname, path, target)

    def __getattr__(self, name):
        return getattr(self.finder, name)

sys.meta_path[:] = [OnlyTorchAndNumpy(finder) for finder in sys.meta_path]
import cptools, cptools.cli
from cptools import *
import torch.distributed as dist
assert all(hasattr(cptools, name) for name in cptools.__all__)
assert not dist.is_initialized()
plan = LoadBalancedCPShard(world_size=3, rank=1).plan([5, 0, 17], [2, 9, 0])
assert sum(plan.counts) == 22, plan.counts
assert not BLOCKED & set(sys.modules), BLOCKED & set(sys.modules)
assert cptools.cli.main(["doctor"]) == 0
assert cptools.cli.main("plan --model glm-5.3 --gpus 8 --context 1048576".split()) == 0
"""


def test_import_and_plan_with_only_torch_and_numpy():
    child = subprocess.run(
        [sys.executable, "-c", WITHOUT_EXTRAS], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert child.returncode == 0, child.stderr


def test_declared_dependencies_are_torch_and_numpy():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert sorted(d.split(">")[0] for d in project["dependencies"]) == ["numpy", "torch"]


@pytest.mark.parametrize("file", FILES, ids=str)
def test_file_stands_in_a_layer_and_imports_only_from_earlier_ones(file):
    layer = layer_of(file)
    assert layer is not None, f"{file}: give it a layer in {Path(__file__).name}"
    for module in imported_modules(file):
        target = file_of(module)
        if target is not None and target.parts[0] in PACKAGES:
            other = layer_of(target)
            assert other is not None, f"{file} imports {target}, which has no layer"
            assert ORDER.index(other) <= ORDER.index(layer), f"{file} ({layer}) imports {module} ({other})"


@pytest.mark.parametrize("file", FILES, ids=str)
def test_plans_and_kernels_know_no_groups_and_only_kernels_know_triton(file):
    for module in imported_modules(file):
        if layer_of(file) in ("plans", "kernels"):
            assert not within(module, "torch.distributed"), f"{file} imports {module}"
        if within(module, "triton"):
            assert file.parts[:2] == ("cptools", "kernels"), f"{file} imports {module}"


IO = "zmq msgspec socket asyncio threading time datetime random os pathlib fastapi torch.distributed".split()


@pytest.mark.parametrize("file", [f for f in FILES if f.parts[:2] == ("serving", "core")], ids=str)
def test_core_of_serving_knows_no_io_no_time_and_no_chance(file):
    for module in imported_modules(file):
        assert not any(within(module, package) for package in IO), f"{file} imports {module}"
        assert not within(module, "serving") or within(module, "serving.core"), f"{file} imports {module}"


@pytest.mark.parametrize("file", FILES + OUTSIDE, ids=str)
def test_no_private_name_of_another_file(file):
    modules = set()
    for module, name in imports(file):
        if module.partition(".")[0] in PACKAGES:
            parts = [*module.split("."), *([name] if name else [])]
            private = [p for p in parts if p.startswith("_") and not p.endswith("__")]
            assert not private, f"{file} imports {module}.{name}"
            modules.add(parts[-1])
    outside = file.parts[0] != "cptools"  # models and serving touch no private attribute of any object
    for node in ast.walk(parsed(file)):
        if isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.endswith("__"):
            owner = node.value.id if isinstance(node.value, ast.Name) else ""
            reaches = owner not in ("self", "cls") if outside else owner in modules
            assert not reaches, f"{file}:{node.lineno} reaches for {ast.unparse(node)}"


@pytest.mark.parametrize("file", FILES + OUTSIDE, ids=str)
def test_one_concept_a_file(file):
    assert not HALLS & {*file.parts, file.stem}, f"{file}: a name that says nothing"
    lines = len((ROOT / file).read_text().splitlines())
    assert lines < MAX_LINES, f"{file}: {lines} lines; what is the second concept in it?"
