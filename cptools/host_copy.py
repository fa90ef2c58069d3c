"""Copies of what the host knows to the device, behind the device's work and not in wait for it."""

from __future__ import annotations

import torch
from torch import Tensor


def to_device(x: Tensor, device: torch.device | str) -> Tensor:
    """x on ``device``. Local, no sync: a copy from pageable memory would first wait for all work of the stream.

    From host memory to a GPU it goes through pinned memory, which PyTorch keeps until the copy is done; pinning memory
    of a size that was not pinned before may wait. Elsewhere this is ``x.to(device)``, x itself where it is there.
    """
    device = torch.device(device)
    if device.type != "cuda" or x.device.type != "cpu":
        return x.to(device)
    return x.pin_memory().to(device, non_blocking=True)
