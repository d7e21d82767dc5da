"""Replicas as placement policies see them, and requests to place."""

from __future__ import annotations

from hashlib import sha256

from foreword.routing.costs import LoadCost, ReplicaCosts
from foreword.routing.placement import Candidate, PlacementQuery

BLOCK = 16
# 1 ms for each token computed, 0.1 ms from host memory, 0.5 ms from disk, 2 ms from a shared store: slower than computing.
COSTS = ReplicaCosts(
    prefill=1e-3,
    first=0.0,
    decode_each=1e-3,
    step_tokens=512,
    loads=(LoadCost(1e-4), LoadCost(5e-4), LoadCost(2e-3)),
    transfer=LoadCost(1e-4, 0.01),
)


def keys_of(number: int, blocks: int) -> list[bytes]:
    return [sha256(f"{number}/{i}".encode()).digest() for i in range(blocks)]


def query(tokens: int, number: int = 0, session: str | None = None) -> PlacementQuery:
    return PlacementQuery(keys_of(number, tokens // BLOCK), tokens, BLOCK, session)


def candidate(name: str, device: int = 0, host: int = 0, disk: int = 0, shared: int = 0, **more: object) -> Candidate:
    reach = (device, device + host, device + host + disk, device + host + disk + shared)
    return Candidate(name, COSTS, reach)._replace(**more)  # type: ignore[arg-type]
