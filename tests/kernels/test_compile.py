"""Every kernel compiles for sm_90 at every shipped tile, within the shared memory of an H200 and without spills."""

from __future__ import annotations

import importlib
import pkgutil
import re
import subprocess
from pathlib import Path

import pytest

import cptools.kernels
from cptools.kernels.compile_spec import CompileSpec

MAX_SHARED_BYTES = 232_448  # what one block may have on sm_90

triton = pytest.importorskip("triton", reason="compiling kernels needs triton")


def specs() -> list[CompileSpec]:
    found = []
    for package in pkgutil.iter_modules(cptools.kernels.__path__, "cptools.kernels."):
        if not package.ispkg:
            continue
        folder = Path(package.module_finder.path) / package.name.rsplit(".", 1)[1]
        for file in sorted([*folder.glob("*triton.py"), *folder.glob("*gluon.py")]):
            if "def compile_specs(" in file.read_text():
                found += importlib.import_module(f"{package.name}.{file.stem}").compile_specs()
    return found


def compile_for_sm90(spec: CompileSpec):
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.experimental.gluon._runtime import GluonASTSource

    names = list(spec.signature)
    constexprs = {(names.index(name),): value for name, value in spec.constexprs.items()}
    attrs = {(names.index(name),): [["tt.divisibility", 16]] for name in spec.divisible_by_16}
    source = (GluonASTSource if spec.gluon else ASTSource)(spec.fn, dict(spec.signature), constexprs, attrs)
    options = {"num_warps": spec.num_warps, "num_stages": spec.num_stages, **spec.options}
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)


def resources(cubin: bytes, folder: Path) -> dict[str, int]:
    """REG, STACK, LOCAL of the kernel, as cuobjdump reads them off the binary."""
    file = folder / "kernel.cubin"
    file.write_bytes(cubin)
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    text = subprocess.run([tool, "-res-usage", file], capture_output=True, text=True, check=True).stdout
    return {name: int(value) for name, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", text)}


@pytest.mark.parametrize("spec", specs(), ids=lambda spec: spec.name)
def test_kernel_compiles_within_its_bounds(spec: CompileSpec, tmp_path: Path) -> None:
    compiled = compile_for_sm90(spec)
    used = resources(compiled.asm["cubin"], tmp_path)
    assert compiled.metadata.shared <= MAX_SHARED_BYTES
    assert max(used["STACK"], used["LOCAL"]) <= spec.max_spill_bytes, used
