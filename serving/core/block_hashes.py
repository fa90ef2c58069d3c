"""The identity of cached blocks: a chain of hashes over virtual blocks, rooted in all that gives bytes their meaning.

A block's hash stands for its tokens, all tokens before it, and the root; so equal hashes mean rows that may be shared.
The unit is the virtual block, page_size * N tokens: one page on every rank.
"""

from __future__ import annotations

import hashlib
import json
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from cptools.integers import require_int
from cptools.layout import KVLayout

_SCHEME = "cptools.blocks.1"
_TOKEN_BYTES = 4

Tokens = Sequence[int] | npt.NDArray[np.integer] | torch.Tensor


@dataclass(frozen=True)
class CacheIdentity:
    """What two caches must have in common for a block of one to serve the other. Ranks of PCP and TP are not part of
    it: they hold the same bytes.

    Args:
        model, revision: of the weights; a change of numerics that readers should notice belongs into ``revision``.
        layout: the one that the rows are stored in, its effective interleave above all.
        row_formats: of the rows of a token, such as ``(str(model.mla), str(model.index))``.
        mtp: the blocks hold rows of an MTP layer too. A token's row there depends on the token that follows it, so a
            block's hash then covers that token as well: a block is found only where all of its rows are valid.

    Raises:
        ValueError: an empty name, or no row format.
    """

    model: str
    revision: str
    layout: KVLayout
    row_formats: tuple[str, ...]
    mtp: bool = False

    def __post_init__(self) -> None:
        if not (self.model and self.revision and self.row_formats and all(self.row_formats)):
            raise ValueError(f"{self}: model, revision and every row format need a name")

    def root(self, salt: str = "") -> bytes:
        """What the chains of one ``salt`` begin with; tenants with salts of their own share nothing. Local."""
        layout = self.layout
        sizes = (layout.world_size, layout.interleave, layout.page_size)
        fields = [_SCHEME, self.model, self.revision, self.row_formats, sizes, self.mtp, salt]
        return hashlib.sha256(json.dumps(fields).encode()).digest()


class TokenBlocks:
    """The tokens of one sequence, as far as known, and the hashes of their full virtual blocks. Local.

    A million tokens take tens of milliseconds; the tokens of a decode step, next to nothing.

    Args:
        tokens: token ids in [0, 2^32); a list, an array or a tensor.
        salt: see `CacheIdentity.root`.
    """

    def __init__(self, identity: CacheIdentity, tokens: Tokens = (), *, salt: str = "") -> None:
        self.identity = identity
        self.block = identity.layout.virtual_block
        """Tokens of a block."""
        self.hashes: list[bytes] = []
        """sha256 of each full block whose identity is known, in order: sha256(hash before it, tokens as 4 bytes each,
        least significant first), with MTP rows the token behind the block among them."""
        self._root = identity.root(salt)
        self._bytes = bytearray()
        self.extend(tokens)

    def __len__(self) -> int:
        """Tokens."""
        return len(self._bytes) // _TOKEN_BYTES

    @property
    def reusable(self) -> int:
        """Blocks that may come from a cache: one token at least is left to be computed."""
        return min(len(self.hashes), max(len(self) - 1, 0) // self.block)

    def extend(self, tokens: Tokens) -> None:
        """Append tokens. Raises ValueError, changing nothing, where one is no integer in [0, 2^32)."""
        self._bytes += _four_bytes_each(tokens)
        size, seen = self.block * _TOKEN_BYTES, _TOKEN_BYTES * self.identity.mtp
        parent = self.hashes[-1] if self.hashes else self._root
        for start in range(len(self.hashes) * size, len(self._bytes) - size - seen + 1, size):
            parent = hashlib.sha256(parent + self._bytes[start : start + size + seen]).digest()
            self.hashes.append(parent)

    def token_ids(self, start: int, stop: int) -> tuple[int, ...]:
        """Of the blocks [start, stop)."""
        size = self.block * _TOKEN_BYTES
        return tuple(np.frombuffer(bytes(self._bytes[start * size : stop * size]), dtype="<u4").tolist())


def _four_bytes_each(tokens: Tokens) -> bytes:
    if isinstance(tokens, torch.Tensor):
        tokens = tokens.cpu().numpy()
    if isinstance(tokens, np.ndarray):
        if tokens.ndim != 1 or tokens.dtype.kind not in "iu":
            raise ValueError(f"tokens must be integers [T], got {tokens.dtype} {tokens.shape}")
        tokens = tokens.tolist()
    if isinstance(tokens, (bytes, bytearray, str)):
        raise ValueError(f"tokens must be integers, got {type(tokens).__name__}")
    try:
        values = array("I", tokens)
    except (TypeError, OverflowError):
        for i, token in enumerate(tokens):
            if require_int(f"token {i}", token, minimum=0) >= 2**32:
                raise ValueError(f"token {i} = {token} does not fit in 32 bits") from None
        raise
    return np.frombuffer(values, dtype=np.uint32).astype("<u4").tobytes()
