"""What the two sides of the vLLM connector tell each other: the scheduler's plans a step, the workers' say what became of it.

vLLM carries both, to and from the processes of its workers.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)


@dataclass(frozen=True, slots=True)
class WorkerAddress(KVConnectorHandshakeMetadata):  # type: ignore[misc]
    """Where a worker answers: `memory` for its own scheduler, `peers` for other instances; empty where it does not."""

    memory: str
    peers: str


@dataclass(frozen=True, slots=True)
class Lender:
    """Another instance that keeps a request's blocks: under which name, and where each of its ranks gives them."""

    lease: bytes
    addresses: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Load:
    """Blocks of one request to be loaded.

    Attributes:
        keys: of the blocks, without the rank's layout fingerprint.
        places: number of the tier that has each of them; may be shorter than `keys`.
        blocks: vLLM's block for each.
        first: number of the first of them in the request's chain.
        lender: who has what the stores do not have; is told when the load has ended.
    """

    request_id: str
    keys: tuple[bytes, ...]
    places: tuple[int, ...]
    blocks: tuple[int, ...]
    first: int
    lender: Lender | None = None


@dataclass(frozen=True, slots=True)
class Save:
    """Blocks that this step fills: keys, the key before them, their depth in the chain, and where they are."""

    keys: tuple[bytes, ...]
    parent: bytes
    depth: int
    blocks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Lend:
    """Blocks that are computed once this step is, to be kept for another instance. More calls add to a request's lease."""

    request_id: str
    lease: bytes
    keys: tuple[bytes, ...]
    parent: bytes
    depth: int
    blocks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Withdraw:
    """Blocks of a lease that vLLM takes back before the next step runs: the first `blocks` of its chain; None: all.

    `ends`: the lease is over; vLLM does not wait for it.
    """

    request_id: str
    blocks: int | None = None
    ends: bool = True


@dataclass(slots=True)
class StepPlan(KVConnectorMetadata):  # type: ignore[misc]
    """What the scheduler's side asks of the workers' in one step.

    Attributes:
        tokens: how many the step computes.
        lends, withdrawn: what is kept for other instances, and what is not any more.
        forsaken: lenders whose blocks are not needed.
    """

    loads: list[Load] = field(default_factory=list)
    saves: list[Save] = field(default_factory=list)
    tokens: int = 0
    lends: list[Lend] = field(default_factory=list)
    withdrawn: list[Withdraw] = field(default_factory=list)
    forsaken: list[Lender] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class TierChange:
    """A tier of one rank's stores got blocks, or lost them."""

    rank: int
    tier: int
    stored: bool
    keys: tuple[bytes, ...]


@dataclass(slots=True)
class WorkerNews(KVConnectorWorkerMetadata):  # type: ignore[misc]
    """What changed in the stores since the step before, in order."""

    changes: list[TierChange] = field(default_factory=list)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> WorkerNews:
        """This rank's and another's."""
        assert isinstance(other, WorkerNews)
        return WorkerNews(self.changes + other.changes)
