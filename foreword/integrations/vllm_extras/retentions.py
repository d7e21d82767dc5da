"""Cache control under vLLM: requests ask the connector to keep their prefixes in the stores.

A request says so with vLLM's `kv_hints`, or with `kv_transfer_params`:

    {"foreword_cache": [{"action": "retain", "tokens": 2048, "ttl": 300, "priority": 10}]}

An action of `kv_hints` has the `action_type` `retain`, `pin` or `release`, and the other fields as its payload. Without
`tokens` it is about the whole prompt. What vLLM's own cache keeps, the connector cannot change.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

from foreword.blocks.leases import Leases
from foreword.blocks.retention import MAX_PRIORITY, Retention, RetentionAnswer
from foreword.blocks.salt import tenant_digest
from foreword.integrations.vllm.connector_extras import PARAMS_KEY
from foreword.offload.search import StoredGroup
from foreword.prefixes.lease_follower import LeaseFollower
from foreword.prefixes.pins import StorePins
from foreword.store.tiered import TieredStore

MAX_ACTIONS: Final = 16
_DEFAULT_TTL: Final = 300.0
_PIN_SHARE: Final = 0.5
_UNBOUNDED: Final = 1 << 62  # bytes
_PIN_TIMEOUT: Final = 5.0
# Blocks are written after they were asked for: they are pinned when they are there, within this many tries.
_TRIES: Final = 60


@dataclass(frozen=True, slots=True)
class CacheAction:
    """An action on the cache that a request asks for. `tokens`: None for the whole prompt; `ttl`: None for a pin."""

    verb: Literal["retain", "pin", "release"]
    tokens: int | None = None
    ttl: float | None = _DEFAULT_TTL
    priority: int = 0


def actions_of(request: Any) -> list[CacheAction]:
    """Actions on the cache that a request asks for. Actions that are malformed or of another kind are skipped."""
    hints = getattr(getattr(request, "kv_hints", None), "actions", None) or ()
    given = [(one.action_type, one.payload) for one in hints[:MAX_ACTIONS]]
    listed = (request.kv_transfer_params or {}).get(PARAMS_KEY) or ()
    if isinstance(listed, list):
        given += [(one.get("action"), one) for one in listed[:MAX_ACTIONS] if isinstance(one, dict)]
    found = (_action(verb, fields) for verb, fields in given)
    return [action for action in found if action is not None][:MAX_ACTIONS]


def _action(verb: object, fields: Any) -> CacheAction | None:
    if verb not in ("retain", "pin", "release") or not isinstance(fields, dict):
        return None
    tokens, ttl, priority = fields.get("tokens"), fields.get("ttl", _DEFAULT_TTL), fields.get("priority", 0)
    numbers = [0 if tokens is None else tokens, ttl, priority]
    if not all(type(one) in (int, float) and abs(one) <= sys.float_info.max for one in numbers):
        return None
    if ttl <= 0 or not 0 <= priority <= MAX_PRIORITY or (tokens is not None and tokens < 1):
        return None
    return CacheAction(
        verb,
        None if tokens is None else int(tokens),
        None if verb == "pin" else float(ttl),
        MAX_PRIORITY if verb == "pin" else int(priority),
    )


class ConnectorRetentions:
    """The retentions of a vLLM engine: leases whose blocks the stores pin, by their keys.

    Args:
        step: positions from which requests can continue are multiples of this.
        key_bytes: bytes that the stores have per block key, about.
    """

    def __init__(
        self, store: TieredStore, groups: Sequence[StoredGroup], model: bytes, key_size: int, step: int, key_bytes: int
    ) -> None:
        size = store.status().budget
        budget = int(size * _PIN_SHARE) if size > 0 else _UNBOUNDED
        self.book = Leases[bytes](budget, budget, block_bytes=max(key_bytes, 1))
        self._step = step
        self._key_size = key_size
        self._whole = any(not group.group.whole for group in groups)
        pins = StorePins(store, model.hex(), groups, tries=_TRIES)
        self._stored = LeaseFollower(self.book, store, pins, key_size)

    def positions(self, actions: Sequence[CacheAction], num_prompt: int) -> list[int]:
        """Where the KV that actions keep ends."""
        ends = (min(one.tokens or num_prompt, num_prompt) for one in actions if one.verb != "release")
        return sorted({end - end % self._step for end in ends} - {0})

    def apply(
        self, actions: Sequence[CacheAction], root: bytes, keys: Sequence[bytes], num_prompt: int, tenant: bytes
    ) -> list[RetentionAnswer]:
        """Follow the actions of a request whose prompt was computed. `keys`: of the prompt's blocks. `tenant`: its salt."""
        return [self._apply(one, root, keys, num_prompt, tenant_digest(tenant)) for one in actions]

    def _apply(
        self, action: CacheAction, root: bytes, keys: Sequence[bytes], num_prompt: int, tenant: str
    ) -> RetentionAnswer:
        end = min(action.tokens or num_prompt, num_prompt)
        if action.verb == "release":
            released = self.book.release(tenant, keys[: end // self._key_size])
            return RetentionAnswer("accepted", max((one.tokens for one in released), default=0))
        chain = list(keys[: end // self._step * self._step // self._key_size])
        if not chain:
            return RetentionAnswer("refused", 0, None, f"shorter than {self._step} tokens")
        wish = Retention(end, action.ttl, action.priority)
        return self.book.retain(tenant, root, chain, chain, wish, block_size=self._key_size, whole=self._whole)

    def close(self) -> None:
        self._stored.close(_PIN_TIMEOUT)
