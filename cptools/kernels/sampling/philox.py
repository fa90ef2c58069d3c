"""Random numbers that are a function of what they are for: Philox4x32-10 of a counter under a key.

J. Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (SC 2011), the generator of cuRAND and of
triton.language. There is no state: a number does not depend on which others are drawn, nor where or in what
order.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..arguments import ANY, check_count, check_one_device, check_tensor

SAMPLE, ACCEPT, DRAFT = range(3)
"""What a number is drawn for: a token, the acceptance of a draft, a draft. Different numbers for each."""

_MASK = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)


def philox(counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
    """Four 32-bit words of a counter of four and a key of two, all int64 in [0, 2^32) and broadcastable."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        # The products wrap around in int64, which leaves their bits right.
        first, second = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = (
            ((second >> 32) & _MASK) ^ c1 ^ k0,
            second & _MASK,
            ((first >> 32) & _MASK) ^ c3 ^ k1,
            first & _MASK,
        )
        k0, k1 = (k0 + _WEYL[0]) & _MASK, (k1 + _WEYL[1]) & _MASK
    return c0, c1, c2, c3


def uniforms(seed: Tensor, request: Tensor, positions: Tensor, *, purpose: int, count: int) -> Tensor:
    """float32 [T, count] in (0, 1): column i of a row is number i of (seed, request, position, purpose), int64 [T].

    Exact to 32 bits near 0; the largest is 1 - 2^-24. Raises ValueError where the three do not fit together.
    """
    op = "uniforms"
    check_tensor(op, "seed", seed, (torch.int64,), (ANY,))
    check_tensor(op, "request", request, (torch.int64,), seed.shape)
    check_tensor(op, "positions", positions, (torch.int64,), seed.shape)
    check_one_device(op, seed=seed, request=request, positions=positions)
    check_count(op, "count", count)
    blocks = torch.arange(-(-count // 4), device=seed.device).unsqueeze(0)
    at, whose = (positions & _MASK).unsqueeze(1), (request & _MASK).unsqueeze(1)
    key = (seed & _MASK).unsqueeze(1), ((seed >> 32) & _MASK).unsqueeze(1)
    words = philox((blocks, at, whose, torch.full_like(at, purpose)), key)
    numbers = torch.stack(torch.broadcast_tensors(*words), dim=2).flatten(1)[:, :count]
    return ((numbers.float() + 0.5) * 2.0**-32).clamp(max=1 - 2.0**-24)
