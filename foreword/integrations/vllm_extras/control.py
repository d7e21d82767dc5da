"""Implements the connector's interface for cache control and sessions (`foreword.integrations.vllm.connector_extras`)."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any, Final

from foreword.blocks.keys import Scope, TokenChain
from foreword.blocks.salt import PUBLIC, Salt, tenant_digest
from foreword.integrations.vllm.connector_config import KVCacheInfo
from foreword.integrations.vllm.connector_extras import PARAMS_KEY, SESSION_KEY, EngineControl
from foreword.integrations.vllm.request_identity import salt_of
from foreword.integrations.vllm.request_state import BlockIds, RequestState
from foreword.integrations.vllm_extras.agent_sessions import ConnectorSessions
from foreword.integrations.vllm_extras.interfaces import ControlExtra
from foreword.integrations.vllm_extras.retentions import ConnectorRetentions, actions_of
from foreword.integrations.vllm_extras.step_parts import RetiredBlocks
from foreword.offload.manager import OffloadManager
from foreword.prefixes.pins import StorePins
from foreword.prefixes.public_records import PublicRecords
from foreword.store.tiered import TieredStore


class ConnectorControl(EngineControl):
    """Retentions, sessions and public blocks of a vLLM engine."""

    def __init__(self, info: KVCacheInfo, store: TieredStore) -> None:
        per_key = sum(one.block_bytes * info.key_size // one.block_size for one in info.groups) * info.ranks
        self._info = info
        self._retentions = ConnectorRetentions(
            store, info.stored_groups(), info.model, info.key_size, info.step, per_key
        )
        self._sessions: ConnectorSessions | None = None  # until a request names one
        super().__init__()
        self._records = PublicRecords(store, info.model.hex())

    def chain(self, scope: Scope, tokens: Iterable[int], extras: Sequence[bytes]) -> TokenChain:
        chain = super().chain(scope, tokens, extras)
        if self._records.blocks.keys or scope.salt == PUBLIC:
            self._records.blocks.begin(chain, scope, extras)
        return chain

    @property
    def retires(self) -> bool:
        return self._sessions is not None and self._sessions.retires

    def take_retired(self) -> list[RetiredBlocks]:
        return [] if self._sessions is None else self._sessions.take_retired()

    def begins(self, state: RequestState) -> None:
        request, prompt = state.request, state.request.num_prompt_tokens
        if request.kv_transfer_params or getattr(request, "kv_hints", None) is not None:
            state.actions = actions_of(request)
            state.retained = self._retentions.positions(state.actions, prompt)
        if self._retentions.book.count:
            tenant = tenant_digest(self._info.current(salt_of(request)).tenant)
            self._retentions.book.on_path(tenant, state.chain.keys_to(prompt // self._info.key_size))
        if state.retained and hasattr(request, "shared_prefix_boundary"):
            request.shared_prefix_boundary = max(request.shared_prefix_boundary, state.retained[-1])

    def ended(self, state: RequestState, salt: Salt, ids: BlockIds) -> dict[str, Any]:
        request, prompt, found = state.request, state.request.num_prompt_tokens, dict[str, Any]()
        if state.actions and request.num_computed_tokens >= prompt:
            keys = state.chain.keys_to(prompt // self._info.key_size)[: prompt // self._info.key_size]
            answers = self._retentions.apply(state.actions, state.chain.root, keys, prompt, salt.tenant)
            found[PARAMS_KEY] = [dataclasses.asdict(one) for one in answers]
        if self._sessions is None and (request.kv_transfer_params or {}).get(SESSION_KEY):
            self._sessions = ConnectorSessions(self._info, self._retentions.book)
        if self._sessions is not None:
            self._sessions.pool = self.pool
            told = self._sessions.ended(state, salt, ids)
            found |= {} if told is None else {SESSION_KEY: told}
        return found

    def close(self) -> None:
        self._retentions.close()
        self._records.close()


class InstalledControl(ControlExtra):
    """The extra of this package."""

    def control(self, info: KVCacheInfo, store: TieredStore) -> EngineControl:
        return ConnectorControl(info, store)

    def retire(self, offload: OffloadManager, info: KVCacheInfo, retired: Sequence[RetiredBlocks]) -> None:
        for one in retired:
            pins = StorePins(offload.store, info.model.hex(), info.stored_groups())
            offload.retire(one.keys, partial(pins.unneeded, one.tenant, one.root, one.keys), drop=one.drop)


CONTROL: Final = InstalledControl()
