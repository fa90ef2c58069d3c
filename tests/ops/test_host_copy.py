"""What the host knows of a step goes to the device without waiting for the step in flight."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
import torch

from cptools.host_copy import to_device

ROOT = Path(__file__).resolve().parents[2]
STEP = [
    *(ROOT / "serving" / "engine").glob("*.py"),
    *(ROOT / "models" / "glm53").glob("*.py"),
    *(ROOT / "cptools" / f"{name}.py" for name in ("step_rows", "layer_context", "cp_kv", "cp_shard", "kv_shard")),
    *(ROOT / "cptools" / f"{name}.py" for name in ("paged_rows", "shared_rows", "tensor_parallel", "lse_merge")),
    ROOT / "cptools" / "expert_exchange.py",
    *(ROOT / "cptools" / "kernels" / "sampling").glob("*.py"),
]
MAKERS = {"tensor", "as_tensor", "from_numpy"}


def waiting_copies(source: str) -> list[str]:
    """Calls that copy pageable memory to a device: `x.to(device)`, `x.cuda()`, `torch.tensor(..., device=device)`, and
    indices that are lists."""
    found = []
    for call in ast.walk(ast.parse(source)):
        if isinstance(call, ast.Subscript) and ast.unparse(call.slice).startswith("list("):
            found.append(ast.unparse(call))
        if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Attribute):
            continue
        places = [ast.unparse(arg) for arg in call.args[:1]] if call.func.attr == "to" else []
        if call.func.attr in MAKERS | {"to"}:
            places += [ast.unparse(keyword.value) for keyword in call.keywords if keyword.arg == "device"]
        if call.func.attr == "cuda" or any("device" in place for place in places):
            found.append(ast.unparse(call))
    return found


@pytest.mark.parametrize("file", STEP, ids=lambda file: str(file.relative_to(ROOT)))
def test_no_step_copies_from_memory_that_it_must_wait_for(file: Path) -> None:
    assert waiting_copies(file.read_text()) == []


def test_the_search_finds_what_it_should() -> None:
    source = """
a.to(x.device)
a.to(device, non_blocking=True)
torch.tensor(ids, dtype=torch.int64, device=self.device)
torch.as_tensor(ids, device=device)
a.cuda()
a.to(torch.int64)
torch.as_tensor(a, device="cpu")
to_device(a, device)
torch.empty(3, device=device)
tables[list(places)]
"""
    assert len(waiting_copies(source)) == 6


def test_a_copy_to_a_gpu_is_pinned_and_nobody_waits_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[object, ...]] = []

    class Pinned:
        def to(self, device: torch.device, *, non_blocking: bool) -> str:
            calls.append((device, non_blocking))
            return "there"

    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda x: Pinned())
    for device in ("cuda:1", torch.device("cuda:1")):
        assert to_device(torch.arange(3), device) == "there"
    assert calls == [(torch.device("cuda:1"), True)] * 2


def test_elsewhere_nothing_is_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda x: pytest.fail("pinned"))
    x = torch.arange(6).view(2, 3)
    assert to_device(x, "cpu") is x
    assert to_device(x.T, "meta").shape == (3, 2)
