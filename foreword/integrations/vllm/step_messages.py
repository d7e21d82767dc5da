"""Messages between the connector's scheduler side and its worker side. vLLM carries them with each step, and back.

The scheduler side says what to load, save and keep for other instances; the worker side reports changes in the store tiers.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)


@dataclass(frozen=True, slots=True)
class WorkerHandshake(KVConnectorHandshakeMetadata):  # type: ignore[misc]
    """Where a worker listens: `memory` for its own scheduler, `peers` for other instances. "" where it does not listen."""

    memory: str
    peers: str


@dataclass(frozen=True, slots=True)
class KVProducer:
    """Another instance that keeps a request's blocks: the lease's id, and the address of each rank."""

    lease: bytes
    addresses: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class BlockLoad:
    """Blocks of one request to be loaded.

    Attributes:
        keys: block keys, without the rank's layout fingerprint.
        places: index of the tier that has each block; may be shorter than `keys`.
        blocks: vLLM's block id for each key.
        first: index of the first block in the request's chain.
        producer: who has what the stores do not have. Its lease ends with this load.
    """

    request_id: str
    keys: tuple[bytes, ...]
    places: tuple[int, ...]
    blocks: tuple[int, ...]
    first: int
    producer: KVProducer | None = None


@dataclass(frozen=True, slots=True)
class BlockSave:
    """Blocks that this step fills: their keys, the key before them, their depth in the chain, and vLLM's block ids."""

    keys: tuple[bytes, ...]
    parent: bytes
    depth: int
    blocks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class BlockLease(BlockSave):
    """Blocks that this step fills and that are to be kept for another instance. Several of a request make up one lease."""

    request_id: str
    lease: bytes


@dataclass(frozen=True, slots=True)
class LeaseRevocation:
    """Blocks of a lease that vLLM takes back before the next step: the first `blocks` of the chain, or all (None).

    `ends`: the lease ends; vLLM does not wait for its readers.
    """

    request_id: str
    blocks: int | None = None
    ends: bool = True


@dataclass(slots=True)
class ForewordConnectorMetadata(KVConnectorMetadata):  # type: ignore[misc]
    """The scheduler side's instructions for one step.

    Attributes:
        tokens: how many tokens the step computes.
        leases, revoked: blocks to keep for other instances, and blocks not to keep any longer.
        released: producers whose blocks are not needed.
    """

    loads: list[BlockLoad] = field(default_factory=list)
    saves: list[BlockSave] = field(default_factory=list)
    tokens: int = 0
    leases: list[BlockLease] = field(default_factory=list)
    revoked: list[LeaseRevocation] = field(default_factory=list)
    released: list[KVProducer] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class TierChange:
    """Blocks that a tier of one rank's store has got or lost."""

    rank: int
    tier: int
    stored: bool
    keys: tuple[bytes, ...]


@dataclass(slots=True)
class ForewordWorkerMetadata(KVConnectorWorkerMetadata):  # type: ignore[misc]
    """Changes in the store tiers since the last step, in order."""

    changes: list[TierChange] = field(default_factory=list)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> ForewordWorkerMetadata:
        """The changes of several ranks together."""
        assert isinstance(other, ForewordWorkerMetadata)
        return ForewordWorkerMetadata(self.changes + other.changes)
