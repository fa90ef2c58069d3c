"""Recorded agent sessions as chains of block hashes, and the least that any cache must compute of them."""

import gzip
import json
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).parent / "traces"
BLOCK_TOKENS = 64


@dataclass(frozen=True)
class TraceRequest:
    time: float
    session: str
    tokens: int
    output_tokens: int
    hashes: tuple[int, ...]


def sessions() -> list[list[TraceRequest]]:
    """Each session's requests, in order. Hashes are chained, so that an id means its prefix too; 64 tokens each."""
    chain: dict[tuple[object, int], int] = {}
    found = []
    for file in sorted(FOLDER.glob("*.json.gz")):
        recorded = json.loads(gzip.decompress(file.read_bytes()))
        assert recorded["block_size"] == BLOCK_TOKENS
        requests = []
        for request in recorded["requests"]:
            parent: object = recorded["id"]
            hashes = []
            for block in request["hash_ids"][: request["in"] // BLOCK_TOKENS]:
                parent = chain.setdefault((parent, block), len(chain))
                hashes.append(parent)
            requests.append(TraceRequest(request["t"], recorded["id"], request["in"], request["out"], tuple(hashes)))
        found.append(sorted(requests, key=lambda r: r.time))
    return found


def interleaved(apart: float, speed: float) -> list[TraceRequest]:
    """All sessions at once, the next one beginning ``apart`` seconds later, at so many times their recorded speed."""
    requests = [
        TraceRequest(i * apart + r.time / speed, r.session, r.tokens, r.output_tokens, r.hashes)
        for i, session in enumerate(sessions())
        for r in session
    ]
    return sorted(requests, key=lambda r: (r.time, r.session))


def least_new_tokens(requests: list[TraceRequest]) -> int:
    """Tokens that one cache without bounds computes: no engine and no choice of engines can do with fewer."""
    held: set[int] = set()
    new = 0
    for request in requests:
        known = next((i for i, block in enumerate(request.hashes) if block not in held), len(request.hashes))
        new += request.tokens - min(known, (request.tokens - 1) // BLOCK_TOKENS) * BLOCK_TOKENS
        held.update(request.hashes)
    return new
