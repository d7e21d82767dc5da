"""Messages between the connector's scheduler side and its worker side. vLLM carries them with each step, and back.

The scheduler side says what to load, save and keep for other instances; the worker side reports changes in the store tiers.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from foreword.integrations.vllm.request_identity import Adapter
from foreword.offload.load import GroupBlocks

if TYPE_CHECKING:
    from foreword.integrations.vllm_extras.step_parts import BlockLease, KVProducer, RetiredBlocks


@dataclass(frozen=True, slots=True)
class WorkerHandshake(KVConnectorHandshakeMetadata):  # type: ignore[misc]
    """Where a worker listens: `memory` for its own scheduler, `peers` for other instances. "" where it does not listen.
    `namespace`: that of the blocks, the same for all ranks."""

    memory: str
    peers: str
    namespace: bytes = b""


@dataclass(frozen=True, slots=True)
class BlockLoad:
    """A load for one request, for the workers.

    Attributes:
        root: root key of the request's chain.
        held, position: tokens that the request has before the load, and after it.
        producer: who has what the stores do not have. Its lease ends with this load.
        adapter: the adapter that the blocks were computed with.
    """

    request_id: str
    root: bytes
    held: int
    position: int
    parts: tuple[GroupBlocks, ...]
    producer: KVProducer | None = None
    adapter: Adapter | None = None


@dataclass(frozen=True, slots=True)
class BlockSave:
    """Consecutive blocks of a KV group that are computed when this step ends: the root key of their chain, the keys of their
    frames, the key before them, the index of the first frame in the chain, vLLM's block ids, and the adapter with which they
    are computed. `prompt` is the length of the request's prompt. With `again` the blocks were computed before, and a request
    uses them again. `request_id`: vLLM keeps the blocks while this request has them; "" if they may change behind the step."""

    group: int
    root: bytes
    keys: tuple[bytes, ...]
    parent: bytes
    depth: int
    blocks: tuple[int, ...]
    adapter: Adapter | None = None
    prompt: int | None = None
    again: bool = False
    request_id: str = ""


@dataclass(frozen=True, slots=True)
class LeaseRevocation:
    """Blocks of a lease that vLLM takes back before the next step. `ends`: vLLM does not wait for the lease's readers."""

    request_id: str
    ends: bool = True


@dataclass(slots=True)
class ForewordConnectorMetadata(KVConnectorMetadata):  # type: ignore[misc]
    """The scheduler side's instructions for one step.

    Attributes:
        tokens: how many tokens the step computes.
        leases, revoked: blocks to keep for other instances, and blocks not to keep any longer.
        released: producers whose blocks are not needed.
        deletes: group, root key and key of blocks that are not needed any more.
        retired: what sessions of agents have left behind.
        refused: loads that are not to be made: the workers report that they have failed.
        finished: requests that have ended, whose blocks vLLM gets back when they are saved: the last ones are among `saves`, or
            the write queue had no room for earlier ones.
        ended: requests whose blocks vLLM has taken back.
        idle: the workers have nothing to do for this step: the scheduler's side says so, as many calls read it.
        prefills: so much of a prompt is computed that the step's duration says how fast that is.
    """

    loads: list[BlockLoad] = field(default_factory=list)
    saves: list[BlockSave] = field(default_factory=list)
    tokens: int = 0
    leases: list[BlockLease] = field(default_factory=list)
    revoked: list[LeaseRevocation] = field(default_factory=list)
    released: list[KVProducer] = field(default_factory=list)
    deletes: list[tuple[int, bytes, bytes]] = field(default_factory=list)
    retired: list[RetiredBlocks] = field(default_factory=list)
    refused: list[BlockLoad] = field(default_factory=list)
    finished: list[str] = field(default_factory=list)
    ended: list[str] = field(default_factory=list)
    idle: bool = False
    prefills: bool = False

    @property
    def empty(self) -> bool:
        """Whether the workers have nothing to do for this step."""
        if self.loads or self.saves or self.refused or self.finished or self.ended:
            return False
        return not (self.leases or self.revoked or self.released or self.deletes or self.retired)


@dataclass(frozen=True, slots=True)
class TierChange:
    """Blocks of a KV group that a tier of one rank's store has got or lost."""

    rank: int
    tier: int
    group: int
    stored: bool
    keys: tuple[bytes, ...]


@dataclass(slots=True)
class ForewordWorkerMetadata(KVConnectorWorkerMetadata):  # type: ignore[misc]
    """States of the store tiers, for the scheduler's side.

    Attributes:
        changes: since the last step, in order.
        rates: measured bytes per second of each tier, by rank; 0.0 for one without a recent measurement.
        degraded: why a worker saves and loads nothing any more.
        late: by rank, the requests whose blocks wait for room in the write queue, if that has changed.
    """

    changes: list[TierChange] = field(default_factory=list)
    rates: dict[int, tuple[float, ...]] = field(default_factory=dict)
    degraded: str = ""
    late: dict[int, frozenset[str]] = field(default_factory=dict)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> ForewordWorkerMetadata:
        """Join the reports of several ranks."""
        assert isinstance(other, ForewordWorkerMetadata)
        degraded = self.degraded or other.degraded
        return ForewordWorkerMetadata(
            self.changes + other.changes, self.rates | other.rates, degraded, self.late | other.late
        )
