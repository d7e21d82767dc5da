"""The connector's extra for cache control and agents' sessions, in `foreword.integrations.vllm_extras`, and what the connector
does without it.

Requests ask in `kv_transfer_params`, or with vLLM's `kv_hints`, and are answered in the `kv_transfer_params` of their
responses. Without the extra the answer is a refusal.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Final

from foreword.blocks.keys import Scope, TokenChain
from foreword.plugins import of_product
from foreword.store.tiered import TieredStore

if TYPE_CHECKING:
    from foreword.blocks.salt import Salt
    from foreword.integrations.vllm.connector_config import KVCacheInfo
    from foreword.integrations.vllm.request_state import BlockIds, RequestState
    from foreword.integrations.vllm_extras.interfaces import ControlExtra
    from foreword.integrations.vllm_extras.step_parts import RetiredBlocks
    from foreword.offload.manager import OffloadManager

logger = logging.getLogger(__name__)

# Keys of `kv_transfer_params`: what a request asks to keep, and what it says of its session.
PARAMS_KEY: Final = "foreword_cache"
SESSION_KEY: Final = "foreword_session"
_MISSING: Final = "cache control and sessions need the package foreword-vllm-extras beside foreword-vllm"
_EXTRA: Final = "foreword.integrations.vllm_extras.control:CONTROL"


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
            found[PARAMS_KEY] = [{"status": "refused", "tokens": 0, "ttl": None, "reason": _MISSING}]
        if params.get(SESSION_KEY):
            found[SESSION_KEY] = {"error": _MISSING, "status": 501, "param": None}
        return found

    def close(self) -> None:
        """Write what is due to the stores."""


def engine_control(info: KVCacheInfo, store: TieredStore) -> EngineControl:
    """Cache control over these stores; one that refuses where the extra is not installed."""
    extra: ControlExtra | None = of_product(_EXTRA)
    if extra is None:
        logger.info("Foreword: %s", _MISSING)
        return EngineControl()
    return extra.control(info, store)


def retire(offload: OffloadManager, info: KVCacheInfo, retired: Sequence[RetiredBlocks]) -> None:
    """Give a worker what `EngineControl.take_retired` of the scheduler has returned."""
    extra: ControlExtra | None = of_product(_EXTRA)
    if extra is not None:
        extra.retire(offload, info, retired)
