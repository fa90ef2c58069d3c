"""Which implementation of an op runs: chosen explicitly, or the first one that serves the inputs, and always said."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass

import torch

HOPPER = (9, 0)


@dataclass(frozen=True)
class Choice:
    """What runs, and why nothing faster does."""

    impl: str
    fallback_reason: str | None = None


def choose(op: str, impl: str, obstacles: Mapping[str, str | None]) -> Choice:
    """Choose an implementation of ``op``. Local.

    obstacles: for each implementation but the reference, fastest first, None where it serves these inputs, else the
    reason why not. impl: "auto" takes the first that serves and else the reference; a name takes that one.

    Raises ValueError if the named implementation does not exist or does not serve the inputs, with the reason.
    """
    if impl == "auto":
        for name, obstacle in obstacles.items():
            if obstacle is None:
                return Choice(name)
        return Choice("reference", "; ".join(f"{name}: {obstacle}" for name, obstacle in obstacles.items()) or None)
    if impl == "reference":
        return Choice(impl)
    if impl not in obstacles:
        raise ValueError(f"{op}: impl={impl!r} is not one of {', '.join(('auto', 'reference', *obstacles))}")
    if obstacles[impl] is not None:
        raise ValueError(f"{op}: impl={impl!r} does not serve these inputs: {obstacles[impl]}")
    return Choice(impl)


def triton_obstacle(device: torch.device) -> str | None:
    """Why kernels written in Triton or Gluon can not run on a device; None if they can. Imports nothing."""
    if device.type != "cuda":
        return f"tensors are on {device.type}"
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    capability = torch.cuda.get_device_capability(device)
    if capability < HOPPER:
        return f"the GPU has compute capability {capability[0]}.{capability[1]}, kernels are built for 9.0"
    return None
