"""Calls of the connector to its extras (`foreword.integrations.vllm_extras`), as types.

The extras implement these interfaces, and type checkers read them. A connector without extras does not import them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from foreword.store.base import Name, Store

if TYPE_CHECKING:
    import torch

    from foreword.blocks.layout import BlockUnits, Layout
    from foreword.integrations.vllm.connector_config import ConnectorSettings, KVCacheInfo
    from foreword.integrations.vllm.connector_counts import HandoffCounts
    from foreword.integrations.vllm.connector_extras import EngineControl, Handoffs
    from foreword.integrations.vllm.groups import ConnectorGroup
    from foreword.integrations.vllm.step_messages import LeaseRevocation, TierChange
    from foreword.integrations.vllm_extras.step_parts import BlockLease, KVProducer, RetiredBlocks
    from foreword.offload.frame_copies import PlaneGroup
    from foreword.offload.manager import OffloadManager
    from foreword.store.tiered import TieredStore
    from foreword.store.types import Opener
    from foreword.store_config import EncryptionConfig
    from foreword.transfer_config import TransferConfig


class InstanceLeases(Protocol):
    """The blocks that a worker keeps for other instances."""

    def counted(self) -> HandoffCounts:
        """Leases so far, and blocks that others have read."""

    def add(self, new: BlockLease) -> None:
        """Keep blocks that were just computed."""

    def revoke(self, revoked: LeaseRevocation) -> None:
        """vLLM is about to reuse blocks. Once this returns, no reader reads them."""

    def drop_held(self) -> None:
        """The device is about to lose its contents. Once this returns, no reader reads them."""

    def finished(self, request_ids: Iterable[str]) -> None:
        """Requests that vLLM has finished. It keeps their blocks until `take_ended` names them."""

    def take_ended(self) -> set[str]:
        """Requests whose blocks vLLM gets back now."""


class Producers(Store, Protocol):
    """Reads of this worker from other instances: a store while requests load from it."""

    def open(self, producer: KVProducer, names: Sequence[Name], then: Callable[[], None]) -> Any:
        """Open a lease, and return its reader. `then` is called on another thread once its blocks can be read, or cannot."""

    def close_reader(self, reader: Any) -> None:
        """Nothing more is read; the lease ends."""

    def release(self, producer: KVProducer) -> None:
        """End a lease without reading."""


class Endpoint(Protocol):
    """A worker's address for its own scheduler."""

    address: str

    def close(self) -> None:
        """Listen no longer."""


class WorkersMemory(Store, Protocol):
    """The memory of a scheduler's own workers: a store for lookups."""

    def set_workers(self, addresses: Mapping[int, str], units: Sequence[Sequence[BlockUnits]]) -> None:
        """Where the workers listen, by rank ("" for one that does not), and how each rank's blocks divide. Before this call
        every lookup misses."""


class InstanceEndpoint(Endpoint, Protocol):
    """A worker's connections with other instances. `leases` is None if it does not listen."""

    @property
    def leases(self) -> InstanceLeases | None:
        """Blocks that others may read."""

    @property
    def producers(self) -> Producers:
        """Reads from others."""


class TransferExtra(ABC):
    """Calls of the connector to the extra. It has no state."""

    @abstractmethod
    def config(self, given: object) -> TransferConfig:
        """`transfer` of the settings: the keys of `TransferConfig`, with `secret_env` in place of the secret, because vLLM logs
        its configuration. Raises ConfigError."""

    @abstractmethod
    def check(
        self, urls: Sequence[str], transfer: TransferConfig | None, encryption: EncryptionConfig, *, listens: bool
    ) -> None:
        """Raises ConfigError for settings of transfers, or of stores of other instances, that cannot work."""

    @abstractmethod
    def handoffs(self, info: KVCacheInfo, settings: ConnectorSettings) -> Handoffs:
        """The scheduler side of hand-offs."""

    @abstractmethod
    def instances(
        self,
        settings: ConnectorSettings,
        layouts: Sequence[Layout],
        tensors: Sequence[Sequence[torch.Tensor]],
        memory: Sequence[Store],
        *,
        producers: str,
        num_blocks: int,
    ) -> InstanceEndpoint:
        """A worker's connections with other instances. Raises ConfigError, TransferError.

        Args:
            layouts, tensors: of each KV group: the layout of its blocks, and vLLM's KV cache by block.
            memory: stores whose blocks others may read.
            producers: label of the tier that reads from producers.
        """

    @abstractmethod
    def workers_memory(self, layouts: Sequence[Layout], memory: Sequence[Store], engine: str, rank: int) -> Endpoint:
        """A socket on which the scheduler asks what is in a worker's memory."""

    @abstractmethod
    def workers_stores(self, label: str) -> WorkersMemory:
        """The memory tiers of all workers, for the scheduler on the same host."""

    @abstractmethod
    def peers_of_rank(self, settings: ConnectorSettings, layouts: Sequence[Layout], longest: int) -> Opener:
        """Opens `peer://` for one rank: the same rank of the other instance. `longest`: bytes of the longest block."""

    @abstractmethod
    def lookup_peers(self, settings: ConnectorSettings, layouts: Sequence[Sequence[Layout]]) -> Opener:
        """Opens `peer://` for a scheduler that is in another process than its workers. It looks up the blocks of every rank."""


class ControlExtra(ABC):
    """Calls of the connector to the extra. It has no state."""

    @abstractmethod
    def control(self, info: KVCacheInfo, store: TieredStore) -> EngineControl:
        """Cache control over these stores. It adopts what other instances keep there."""

    @abstractmethod
    def retire(self, offload: OffloadManager, info: KVCacheInfo, retired: Sequence[RetiredBlocks]) -> None:
        """The worker's side: nothing continues these blocks. Those that no lease needs are not written any more, or are
        deleted."""


class PortableLayout(Protocol):
    """The portable layout of blocks, as the settings choose it. Calls raise ConfigError and ModelUnsupported.

    Attributes:
        tokens: of a unit.
    """

    tokens: int

    def divided(self, config: Any, group: ConnectorGroup, layout: Layout) -> BlockUnits:
        """The units of a group's blocks. `config`: vLLM's; `layout`: of one rank's blocks."""

    def staged(self, kv_caches: Mapping[str, Any], config: Any, group: ConnectorGroup, units: BlockUnits) -> PlaneGroup:
        """A group's layers for a staging arena of units."""


class ChangeWatch(Protocol):
    """Changes in the tiers of one rank's store."""

    @property
    def pending(self) -> bool:
        """Whether there are some."""

    def take(self) -> list[TierChange]:
        """Take the changes since the last call."""


class ChangeEvents(Protocol):
    """vLLM's KV events for the tiers.

    Attributes:
        hash_size: tokens per block hash of vLLM, which may be a part of a block.
    """

    hash_size: int

    def expect(self, request: Any, group: int, numbers: Sequence[int], keys: Sequence[bytes], before: bytes) -> None:
        """Blocks of a request, by their index in it, that a tier may store soon. `before`: the key before the first block."""

    def changed(self, changes: Iterable[TierChange]) -> None:
        """Publish the changes that complete a block in a tier, or make it incomplete."""

    def missing(self, group: int, key: bytes) -> None:
        """A lookup found this block in no tier: publish its removal if another process has evicted it."""

    def take(self) -> list[Any]:
        """Take the events since the last call."""


class AdapterDigests(Protocol):
    """Identifies LoRA adapters by their files."""

    def digest(self, path: str) -> bytes | None:
        """32 bytes for a folder, or a name on the Hugging Face hub as vLLM accepts it; None if files are missing or change."""


class InputDigests(Protocol):
    """Identifies the media and the prompt embeddings of requests."""

    def of(self, request: Any) -> list[bytes] | None:
        """By block, the media and embeddings in it; None for a request with some that cannot be identified. The last blocks may
        be missing: they have none."""


class UsageNotes(Protocol):
    """The usage ledger: a line for each request that has ended."""

    def began(self, request: Any) -> None:
        """vLLM may admit a request."""

    def ended(self, request: Any, tiers: Mapping[str, int], weights: str) -> None:
        """A request has ended. `tiers`: loaded tokens by the label of their tier; `weights`: their fingerprint."""

    def close(self) -> None:
        """Write what is waiting."""
