"""Interface of the connector's extras, `foreword.integrations.vllm_extras`, a package of its own, and what the connector does
without it.

- Cache control and agents' sessions. Requests ask in `kv_transfer_params`, or with vLLM's `kv_hints`, and are answered in the
  `kv_transfer_params` of their responses; without the extras the answer is a refusal.
- Transfer: hands computed prompts off to other instances, reads their stores (`peer://`), and lets a scheduler that is in
  another process than its workers look into the workers' memory.
- The portable layout and the usage ledger.

Each is imported where a setting asks for it; without the extras the setting is an error. Settings of vLLM's own are none, and
the log says what is missing:

- KV events say nothing of the tiers.
- Of requests with LoRA adapters, media or prompt embeddings no KV is saved or loaded.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from foreword.blocks.keys import Scope, TokenChain
from foreword.blocks.layout import Layout
from foreword.errors import ConfigError
from foreword.plugins import of_product
from foreword.store.base import Store
from foreword.store.tiered import TieredStore
from foreword.store.types import Opener, StoreUrl

if TYPE_CHECKING:
    from foreword.blocks.layout import BlockUnits
    from foreword.blocks.salt import Salt
    from foreword.integrations.vllm.connector_config import KVCacheInfo
    from foreword.integrations.vllm.request_identity import Adapter
    from foreword.integrations.vllm.request_state import BlockIds, RequestState
    from foreword.integrations.vllm.step_messages import ForewordConnectorMetadata
    from foreword.integrations.vllm_extras.interfaces import (
        AdapterDigests,
        ChangeEvents,
        ChangeWatch,
        ControlExtra,
        InputDigests,
        PortableLayout,
        TransferExtra,
        UsageNotes,
    )
    from foreword.integrations.vllm_extras.step_parts import KVProducer, RetiredBlocks
    from foreword.offload.manager import OffloadManager
    from foreword.store.types import Reach

logger = logging.getLogger(__name__)

_PACKAGE: Final = "foreword.integrations.vllm_extras"
_MISSING: Final = "the package foreword-vllm-extras beside foreword-vllm"
_NO_CONTROL: Final = f"cache control and sessions need {_MISSING}"
_TRANSFER: Final = "transfer between instances, peer:// stores, and memory:// with a scheduler apart from its workers"
# Keys of `kv_transfer_params`: what a request asks to keep, and what it says of its session.
PARAMS_KEY: Final = "foreword_cache"
SESSION_KEY: Final = "foreword_session"


def part(place: str, what: str) -> Any:
    """`module:name` of the extras. Raises ConfigError, which says `what` needs them, where they are not installed."""
    found = of_product(f"{_PACKAGE}.{place}")
    if found is None:
        raise ConfigError(f"{what} {_MISSING}")
    return found


def portable_layout(layout: object, units: Mapping[str, object]) -> PortableLayout | None:
    """Read the settings `layout` and, those that are given, `unit_tokens` and `head_units`. None for the native layout. Raises
    ConfigError."""
    if layout == "native" and not units:
        return None
    read = part("portable:read", "layout, unit_tokens and head_units in kv_connector_extra_config need")
    found: PortableLayout | None = read(layout, units)
    return found


def tier_watch(store: TieredStore, units: Sequence[BlockUnits]) -> ChangeWatch | None:
    """Collect the changes in the tiers of one rank's store; None without the extras. `units`: how the rank's blocks divide, by
    KV group."""
    make = of_product(f"{_PACKAGE}.tier_events:TierWatch")
    return None if make is None else make(store, units)


def tier_events(
    tiers: Sequence[tuple[Reach, str]], parts: Sequence[int], block_sizes: Sequence[int]
) -> ChangeEvents | None:
    """KV events for these tiers; None and a warning without the extras.

    Args:
        tiers: reach and label of each tier.
        parts: of each KV group, how many layouts keep parts of a block: one per rank, or per head unit.
        block_sizes: tokens per block of each KV group.
    """
    make = of_product(f"{_PACKAGE}.tier_events:TierEvents")
    if make is None:
        logger.warning("Foreword: vLLM's KV events say nothing of the stores: that needs %s", _MISSING)
        return None
    found: ChangeEvents = make(tiers, parts, block_sizes)
    return found


def adapter_digests(vllm_config: Any) -> AdapterDigests | None:
    """Identifies adapters by their files; None without the extras, and where vLLM loads none."""
    make = _asked("adapters:AdapterFiles", vllm_config.lora_config is not None, "LoRA adapters")
    return None if make is None else make()


def loaded_adapters(vllm_config: Any) -> LoadedAdapters:
    """The adapters in this process's memory, recorded from the first call on."""
    found = of_product(f"{_PACKAGE}.adapters:loaded_adapters") if vllm_config.lora_config is not None else None
    return LoadedAdapters() if found is None else found()


def input_digests(vllm_config: Any, block_size: int, settings: bytes) -> InputDigests | None:
    """Identifies media and prompt embeddings, by blocks of `block_size` tokens; None without the extras, and where vLLM takes
    none. `settings`: of vLLM, which change what media become."""
    model = vllm_config.model_config
    takes = getattr(model, "multimodal_config", None) is not None or getattr(model, "enable_prompt_embeds", False)
    make = _asked("media:InputContents", takes, "media or prompt embeddings")
    return None if make is None else make(block_size, settings)


def _asked(place: str, asked: bool, what: str) -> Any:
    """`module:name` of the extras, if it is asked for; None and a warning where they are not installed."""
    found = of_product(f"{_PACKAGE}.{place}") if asked else None
    if asked and found is None:
        logger.warning("Foreword: KV of requests with %s is not saved: that needs %s", what, _MISSING)
    return found


class LoadedAdapters:
    """LoRA adapters that a worker's vLLM has in memory, here of one that loads none, or without the extra."""

    def may_save(self, adapter: Adapter | None) -> bool:
        """Whether what was just computed for this adapter was computed with it. True without an adapter."""
        return adapter is None

    def may_load(self, adapter: Adapter | None) -> bool:
        """Whether vLLM will go on computing with this adapter. True without one."""
        return adapter is None


def usage_notes(path: str, config: Any) -> UsageNotes | None:
    """The ledger in a file; None for "". `config`: vLLM's. Raises ConfigError."""
    found: UsageNotes | None = check_usage(path)(path, config) if path else None
    return found


def check_usage(path: str) -> Any:
    """The ledger's class, if a file is given. Raises ConfigError where the extras are not installed."""
    return part("usage_notes:LedgerNotes", "usage_ledger in kv_connector_extra_config needs") if path else None


class EngineControl:
    """Cache control and sessions of a vLLM engine, here of one without the extra. Called from the engine's thread only.

    Attributes:
        pool: vLLM's block pool, None until vLLM has given it.
    """

    def __init__(self) -> None:
        self.pool: Any = None

    def chain(self, scope: Scope, tokens: Iterable[int], extras: Sequence[bytes]) -> TokenChain:
        """The chain of a prompt. Without the extra no blocks are public, and a marked text is its tenant's."""
        return TokenChain(scope.root(), scope.block_size, tokens, extras)

    @property
    def retires(self) -> bool:
        """Whether something was left behind since the last call of `take_retired`."""
        return False

    def take_retired(self) -> list[RetiredBlocks]:
        """Blocks that nothing continues since the last call, for the workers."""
        return []

    def begins(self, state: RequestState) -> None:
        """A request is new: renew what it uses, and plan checkpoints for what it asks to keep."""

    def ended(self, state: RequestState, salt: Salt, ids: BlockIds) -> dict[str, Any]:
        """A request with this salt has ended well. Returns the answers to what it asks, for its `kv_transfer_params`."""
        params, found = state.request.kv_transfer_params or {}, dict[str, Any]()
        if params.get(PARAMS_KEY):
            found[PARAMS_KEY] = [{"status": "refused", "tokens": 0, "ttl": None, "reason": _NO_CONTROL}]
        if params.get(SESSION_KEY):
            found[SESSION_KEY] = {"error": _NO_CONTROL, "status": 501, "param": None}
        return found

    def close(self) -> None:
        """Write what is due to the stores."""


def engine_control(info: KVCacheInfo, store: TieredStore) -> EngineControl:
    """Cache control over these stores; one that refuses where the extra is not installed."""
    extra: ControlExtra | None = of_product(f"{_PACKAGE}.control:CONTROL")
    if extra is None:
        logger.info("Foreword: %s", _NO_CONTROL)
        return EngineControl()
    return extra.control(info, store)


def retire(offload: OffloadManager, info: KVCacheInfo, retired: Sequence[RetiredBlocks]) -> None:
    """Give a worker what `EngineControl.take_retired` of the scheduler has returned."""
    extra: ControlExtra | None = of_product(f"{_PACKAGE}.control:CONTROL")
    if extra is not None:
        extra.retire(offload, info, retired)


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
    extra: TransferExtra = part("transfer:TRANSFER", f"{_TRANSFER} need")
    return extra


def opened_by(choose: Callable[[TransferExtra], Opener]) -> Opener:
    """Opens stores with the extra, which is imported with the first of them."""

    def open_store(place: StoreUrl, layout: Layout | None) -> Store:
        return choose(transfer_extra())(place, layout)

    return open_store
