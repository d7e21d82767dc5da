"""Interface of the connector's extra for other processes, `foreword.integrations.vllm_extras`.

The extra hands computed prompts off to other instances, reads their stores (`peer://`), and lets a scheduler that is in another
process than its workers look into the workers' memory. It is imported when a setting needs it, so the connector alone does not
depend on the transfer of KV between processes.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch

from foreword.blocks.keys import TokenChain
from foreword.blocks.layout import BlockUnits, Layout
from foreword.integrations.vllm.extra_parts import part
from foreword.integrations.vllm.step_messages import (
    BlockLease,
    ForewordConnectorMetadata,
    KVProducer,
    LeaseRevocation,
)
from foreword.store.base import Name, Store
from foreword.store.types import Opener, StoreUrl
from foreword.store_config import EncryptionConfig

if TYPE_CHECKING:
    from foreword.integrations.vllm.connector_config import ConnectorSettings, KVCacheInfo
    from foreword.integrations.vllm.request_state import BlockIds, RequestState
    from foreword.transfer_config import TransferConfig

logger = logging.getLogger(__name__)

_WHAT = "transfer between instances, peer:// stores, and memory:// with several ranks need"


class Handoffs:
    """The scheduler side of hand-offs, here of an instance without `transfer`: a request that asks for one is
    computed like any other, and the log says why. Called from the engine's thread only.

    Attributes:
        tells: whether there are instructions for the workers.
    """

    tells: bool = False

    def __init__(self) -> None:
        self._warned: set[str] = set()

    def set_workers(self, addresses: Mapping[int, str]) -> None:
        """Where each rank's worker listens for other instances."""

    def fill(self, metadata: ForewordConnectorMetadata) -> None:
        """Add the instructions for the workers."""

    def tokens(self, request: Any, chain: TokenChain | None) -> int:
        """The position up to which another instance keeps what this request needs."""
        if (request.kv_transfer_params or {}).get("do_remote_prefill"):
            self._warn(
                request,
                "a prompt is recomputed instead of loaded from its producer: this instance loads from no other: it needs "
                "transfer in kv_connector_extra_config, or the kv_role kv_consumer",
            )
        return 0

    def take(self, request_id: str) -> KVProducer | None:
        """The producer that keeps blocks for this request. Works once; the caller must end the lease."""
        return None

    def release(self, request: Any) -> None:
        """The request needs no block of its producer."""

    def wanted(self, request: Any) -> bool:
        """Whether another instance will decode the request."""
        return bool((request.kv_transfer_params or {}).get("do_remote_decode"))

    def computed(self, state: RequestState, tokens: int, ids: BlockIds, states: Mapping[tuple[int, int], int]) -> None:
        """This step brings a request to `tokens` tokens. `states`: block ids of the recurrent states that it computes."""
        if self.wanted(state.request) and tokens >= state.request.num_prompt_tokens:
            self._warn(
                state.request,
                "no blocks are kept for a decode instance: this one needs transfer in kv_connector_extra_config, or the "
                "kv_role kv_producer",
            )

    def _warn(self, request: Any, why: str) -> None:
        """Log, once for a request."""
        if request.request_id not in self._warned:
            self._warned.add(request.request_id)
            logger.warning("Foreword: %s", why)

    def revoke(self, request_ids: Iterable[str]) -> None:
        """Requests that lose their blocks, or whose blocks must not be read any more."""

    def finished(self, request: Any, state: RequestState | None, ids: BlockIds) -> dict[str, Any] | None:
        """A request has ended. Returns `kv_transfer_params` for the decode instance; vLLM then keeps the blocks until the
        workers report them as sent. None: vLLM frees them."""
        self._warned.discard(request.request_id)
        return None

    def sent(self, request_ids: Iterable[str]) -> None:
        """Requests whose blocks vLLM has taken back."""

    def reset(self) -> None:
        """No KV that was computed so far may be read any more."""


class Leases(Protocol):
    """The blocks that a worker keeps for other instances."""

    def counted(self) -> Mapping[str, float]:
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
    def leases(self) -> Leases | None:
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


def transfer_extra() -> TransferExtra:
    """The extra. Raises ConfigError where it is not installed."""
    extra: TransferExtra = part("transfer:TRANSFER", _WHAT)
    return extra


def opened_by(choose: Callable[[TransferExtra], Opener]) -> Opener:
    """Opens stores with the extra, which is imported with the first of them."""

    def open_store(place: StoreUrl, layout: Layout | None) -> Store:
        return choose(transfer_extra())(place, layout)

    return open_store
