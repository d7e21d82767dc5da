"""The connector's extra for other processes, in `foreword.integrations.vllm_extras`, and what the connector does without it.

The extra hands computed prompts off to other instances, reads their stores (`peer://`), and lets a scheduler that is in another
process than its workers look into the workers' memory. It is imported when a setting needs it, so the connector alone does not
depend on the transfer of KV between processes.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from foreword.blocks.keys import TokenChain
from foreword.blocks.layout import Layout
from foreword.integrations.vllm.extra_parts import part
from foreword.integrations.vllm.step_messages import ForewordConnectorMetadata
from foreword.store.base import Store
from foreword.store.types import Opener, StoreUrl

if TYPE_CHECKING:
    from foreword.integrations.vllm.request_state import BlockIds, RequestState
    from foreword.integrations.vllm_extras.interfaces import TransferExtra
    from foreword.integrations.vllm_extras.step_parts import KVProducer

logger = logging.getLogger(__name__)

_WHAT = "transfer between instances, peer:// stores, and memory:// with a scheduler apart from its workers need"


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


def transfer_extra() -> TransferExtra:
    """The extra. Raises ConfigError where it is not installed."""
    extra: TransferExtra = part("transfer:TRANSFER", _WHAT)
    return extra


def opened_by(choose: Callable[[TransferExtra], Opener]) -> Opener:
    """Opens stores with the extra, which is imported with the first of them."""

    def open_store(place: StoreUrl, layout: Layout | None) -> Store:
        return choose(transfer_extra())(place, layout)

    return open_store
