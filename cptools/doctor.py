"""What this machine has, and which parts of the library therefore run on it."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import subprocess
import sys
from dataclasses import asdict, dataclass

import torch
import torch.distributed as dist

import cptools
from cptools.kernels.impl import HOPPER


@dataclass(frozen=True)
class Finding:
    """One line of the report: a thing of the machine, or a part of the library."""

    name: str
    ok: bool
    detail: str


@dataclass(frozen=True)
class Report:
    """`machine`: what is there. `runs`: which parts of the library run with it, and otherwise what is missing."""

    version: str
    machine: tuple[Finding, ...]
    runs: tuple[Finding, ...]

    def as_json(self) -> dict[str, object]:
        """Plain dicts: name -> {"ok", "detail"} under `machine` and under `runs`."""

        def table(findings: tuple[Finding, ...]) -> dict[str, dict[str, object]]:
            return {f.name: {"ok": f.ok, "detail": f.detail} for f in findings}

        return {**asdict(self), "machine": table(self.machine), "runs": table(self.runs)}


def examine(*, timeout: float = 60.0) -> Report:
    """Look at this machine. Starts no process group; NIXL is imported in a child process that has `timeout` seconds."""
    gpus = _gpus()
    machine = (
        Finding("python", sys.version_info >= (3, 11), f"{platform.python_version()} on {platform.machine()}"),
        Finding("torch", True, torch.__version__),
        *gpus,
        _nccl(),
        Finding("gloo", dist.is_available() and dist.is_gloo_available(), "in this torch build"),
        _package("triton"),
        _package("safetensors"),
        _nixl(timeout),
        _pinned(),
        _host_memory(),
        _peers(),
    )
    ok = {f.name: f.ok for f in machine}
    gpu = any(f.ok for f in gpus)
    runs = (
        Finding("plans", True, "layouts, shard plans, block tables, resharding, cptools plan: integers"),
        Finding("CPU reference path", True, "one rank, float32, bit-reproducible"),
        _needs("CPU ranks", {"gloo": ok["gloo"]}, "torchrun with the gloo backend"),
        _needs("GPU", {"a CUDA GPU": gpu}, "the reference ops on CUDA tensors"),
        _needs("GPU ranks", {"a CUDA GPU": gpu, "NCCL": ok["nccl"]}, "torchrun with the NCCL backend"),
        _needs("Triton and Gluon kernels", _triton_needs(ok["triton"]), "chosen by impl='auto' where an op has them"),
        Finding("host pool", True, "rows in pinned memory" if ok["pinned memory"] else "rows in plain memory"),
        _needs(
            "models.glm53",
            {
                "a checkout on the path (it is not in the wheel)": _importable("models.glm53"),
                "safetensors": ok["safetensors"],
            },
            "GLM-5.3 from a checkpoint",
        ),
        _needs(
            "serving.engine",
            {
                "a checkout on the path (it is not in the wheel)": _importable("serving.engine"),
                "safetensors": ok["safetensors"],
            },
            "ModelRunner, decode as CUDA graphs" if gpu else "ModelRunner, without CUDA graphs",
        ),
    )
    return Report(cptools.__version__, machine, runs)


def _needs(name: str, parts: dict[str, bool], what: str) -> Finding:
    missing = [part for part, there in parts.items() if not there]
    return Finding(name, not missing, "needs " + " and ".join(missing) if missing else what)


def _triton_needs(installed: bool) -> dict[str, bool]:
    hopper = torch.cuda.is_available() and torch.cuda.get_device_capability() >= HOPPER
    return {f"a CUDA GPU of sm_{HOPPER[0]}{HOPPER[1]} or newer": hopper, "triton": installed}


def _importable(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ImportError:
        return False


def _gpus() -> tuple[Finding, ...]:
    if not torch.cuda.is_available():
        reason = "torch was built without CUDA" if torch.version.cuda is None else "CUDA finds no device"
        return (Finding("gpu", False, reason),)
    found = []
    for i in range(torch.cuda.device_count()):
        gpu = torch.cuda.get_device_properties(i)
        capability = f"sm_{gpu.major}{gpu.minor}"
        found.append(Finding(f"gpu {i}", True, f"{gpu.name}, {gpu.total_memory / 2**30:.1f} GiB, {capability}"))
    return tuple(found)


def _nccl() -> Finding:
    if not (dist.is_available() and dist.is_nccl_available()):
        return Finding("nccl", False, "not in this torch build")
    version = torch.cuda.nccl.version()
    return Finding("nccl", True, ".".join(map(str, version)))


def _package(name: str) -> Finding:
    """A package by its metadata only: importing triton may start a driver."""
    if importlib.util.find_spec(name) is None:
        return Finding(name, False, "not installed")
    try:
        return Finding(name, True, importlib.metadata.version(name))
    except importlib.metadata.PackageNotFoundError:
        return Finding(name, True, "version unknown")


def _nixl(timeout: float) -> Finding:
    """Imported in a child: the library loads UCX, and a broken set-up ends the process rather than raise."""
    names = [name for name in ("nixl", "nixl_cu13", "nixl_cu12") if importlib.util.find_spec(name) is not None]
    if not names:
        return Finding("nixl", False, "not installed")
    command = [sys.executable, "-c", f"import {names[0]}._api"]
    # Without RDMA hardware UCX's ib module can end the process at exit.
    env = {"UCX_MODULES": "^ib", "NIXL_LOG_LEVEL": "WARN", **os.environ}
    try:
        child = subprocess.run(command, env=env, capture_output=True, text=True, timeout=timeout, check=False)
    except subprocess.TimeoutExpired:
        return Finding("nixl", False, f"import of {names[0]} takes more than {timeout:g} s")
    if child.returncode != 0:
        lines = child.stderr.strip().splitlines() or [f"exit status {child.returncode}"]
        return Finding("nixl", False, f"import of {names[0]} fails: {lines[-1]}")
    return Finding("nixl", True, f"{names[0]} imports")


def _host_memory() -> Finding:
    """What a host pool can take from; in a container the limit may be lower."""
    try:
        size = os.sysconf("SC_PAGE_SIZE")
        total, free = (size * os.sysconf(name) / 2**30 for name in ("SC_PHYS_PAGES", "SC_AVPHYS_PAGES"))
    except (ValueError, OSError, AttributeError):
        return Finding("host memory", False, "this system does not say")
    return Finding("host memory", True, f"{total:.1f} GiB, {free:.1f} GiB of it unused")


def _peers() -> Finding:
    """Whether GPUs can read each other's memory without a copy through the host."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if count < 2:
        return Finding("GPU peers", False, f"needs two GPUs, there {'is 1' if count == 1 else 'are none'}")
    pairs = [(i, j) for i in range(count) for j in range(count) if i != j]
    apart = [f"{i} from {j}" for i, j in pairs if not torch.cuda.can_device_access_peer(i, j)]
    return Finding("GPU peers", not apart, f"no access: {', '.join(apart)}" if apart else "all GPUs read each other")


def _pinned() -> Finding:
    if not torch.cuda.is_available():
        return Finding("pinned memory", False, "needs a CUDA GPU; host pools use plain memory")
    try:
        torch.empty(4096, dtype=torch.uint8, pin_memory=True)
    except RuntimeError as error:
        return Finding("pinned memory", False, str(error).splitlines()[0])
    return Finding("pinned memory", True, "page-locked host memory can be allocated")
