"""The scheduler side of the vLLM connector: looks up blocks in the stores, and decides what to load and save in each step."""

from __future__ import annotations

import math
import os
import time
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from foreword.blocks.keys import TokenChain
from foreword.integrations.vllm.config import NULL_BLOCK, ConnectorSettings, KVCacheInfo
from foreword.integrations.vllm.events import TierEvents
from foreword.integrations.vllm.handoff import HandoffScheduler
from foreword.integrations.vllm.lookup import StoreLookup
from foreword.integrations.vllm.step_messages import (
    BlockLoad,
    BlockSave,
    ForewordConnectorMetadata,
    ForewordWorkerMetadata,
    WorkerHandshake,
)
from foreword.integrations.vllm.worker import (
    MEASURED_TOKENS,
    PRODUCERS_LABEL,
    ForewordConnectorWorker,
    worker_of,
)
from foreword.offload.manager import StoreLoad
from foreword.store.urls import parse

_SALT = b"vllm\x00"
# How long vLLM is kept stepping after a save, for KV events, where the write queue is in another process.
_EVENT_SECONDS = 1.0


@dataclass(slots=True)
class _RequestState:
    """One request, as the scheduler side knows it.

    Attributes:
        held: blocks that vLLM had itself when it last asked.
        saved: leading blocks that need not be saved; infinite for a request of which nothing more must be saved.
        lookup_from: index of the first block that `lookup` is about.
        places: tiers of the blocks that were found, and of those that a producer keeps beyond them; None before that.
        no_more_loads: a load of this request has failed, and another would fail again.
        tiers: tokens loaded, by the label of the tier.
    """

    request: Any
    chain: TokenChain
    lookup: StoreLoad | None = None
    lookup_from: int = 0
    places: list[int] | None = None
    held: int = 0
    saved: float = 0
    no_more_loads: bool = False
    tiers: dict[str, int] = field(default_factory=dict)


class ForewordConnectorScheduler:
    """See the module. Called from the engine's thread only; methods are named after those of vLLM's connector interface."""

    def __init__(self, info: KVCacheInfo, settings: ConnectorSettings, engine: str) -> None:
        self._info = info
        self._requests: dict[str, _RequestState] = {}
        self._to_load: list[BlockLoad] = []
        self._loading: dict[str, BlockLoad] = {}
        self._epoch = b""
        self._events_until = 0.0
        self._step = (0, 0.0)  # tokens of the last step, and when it was scheduled
        self._worker: ForewordConnectorWorker | None = worker_of(engine)
        self._lookup = None if self._worker is not None else StoreLookup(info, settings)
        stores = self._lookup if self._worker is None else self._worker.offload
        assert stores is not None
        self._stores = stores
        schemes = [parse(url).scheme for url in settings.store.urls]
        labels = [tier.label for tier in stores.store.tiers[: len(schemes)]]
        self._schemes = dict(zip(labels, schemes, strict=True))
        self._producers_tier = len(schemes)  # after the stores
        self._handoff = HandoffScheduler(info, settings)
        tiers = [(scheme, label) for label, scheme in self._schemes.items()]
        self.events = TierEvents(tiers, info.ranks, info.block_size) if info.events else None

    # Lookup

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """How many tokens after the computed ones to load, and whether asynchronously. None: ask again later."""
        state = self._state_of(request)
        if state is None:
            return 0, False
        size = self._info.block_size
        full, held = request.num_tokens // size, num_computed_tokens // size
        state.held = state.saved = held
        if held >= full or state.no_more_loads or getattr(request, "skip_reading_prefix_cache", False):
            return 0, False
        if state.lookup is None or held < state.lookup_from:
            state.lookup = self._stores.find(state.chain.keys_to(full)[held:full])
            state.lookup_from, state.places = held, None
        if state.places is None:
            if not state.lookup.answered:
                return None, False
            self._note_miss(state, full)
            state.lookup, state.places = self._with_producer(state, full)
        count = self._stores.worth_loading(state.lookup, held - state.lookup_from, request.num_tokens)
        return count * size, count > 0

    def _with_producer(self, state: _RequestState, full: int) -> tuple[StoreLoad, list[int]]:
        """The result of the lookup, extended by the blocks that the request's producer keeps."""
        assert state.lookup is not None
        places = list(state.lookup.places or ())
        produced = min(self._handoff.blocks(state.request, state.chain), full) - state.lookup_from
        found = StoreLoad(state.lookup.names, state.lookup.deadline)
        found.places = places + [self._producers_tier] * (produced - len(places))
        return found, found.places

    def _note_miss(self, state: _RequestState, full: int) -> None:
        """The first block that no tier has: if an event said otherwise, publish that it was removed."""
        if self.events is None or state.lookup is None or state.lookup.places is None:
            return
        end = state.lookup_from + len(state.lookup.places)
        if end < full:
            self.events.missing(state.chain.keys_to(full)[end])

    def _state_of(self, request: Any) -> _RequestState | None:
        """None for a request whose KV depends on more than tokens and salt. A session stays one once it has got images."""
        if (
            request.lora_request is not None
            or request.mm_features
            or getattr(request, "prompt_embeds", None) is not None
        ):
            self._requests.pop(request.request_id, None)
            return None
        state = self._requests.get(request.request_id)
        tokens = request.all_token_ids
        if state is None:
            chain = TokenChain(self._root(request), self._info.block_size, tokens)
            state = self._requests[request.request_id] = _RequestState(request, chain)
            return state
        if getattr(request, "streaming_queue", None) is not None:
            self._follow_session(state, tokens)
        if len(state.chain) < len(tokens):
            state.chain.tokens.extend(tokens[len(state.chain) :])
        return state

    def _root(self, request: Any) -> bytes:
        salt = _SALT + request.cache_salt.encode() if request.cache_salt else b""
        return self._info.root(salt + self._epoch)

    def _follow_session(self, state: _RequestState, tokens: Sequence[int]) -> None:
        """A session's next input replaces the last sampled token, which was never computed."""
        known, now = state.chain.tokens, array("I", tokens)
        if now[: len(known)] == known:
            return
        same = next((i for i, (old, new) in enumerate(zip(known, now, strict=False)) if old != new), len(now))
        state.chain = state.chain.fork(min(same, len(known)))
        state.saved = min(state.saved, same // self._info.block_size)
        state.lookup = state.places = None

    # Scheduling of loads and saves

    def update_state_after_alloc(self, request: Any, blocks: Sequence[int], num_external_tokens: int) -> None:
        """vLLM has allocated blocks for what is to be loaded. Blocks behind a sliding window are not loaded."""
        state = self._requests.get(request.request_id)
        if state is None:
            return
        found, state.lookup, state.places, state.tiers = state.places, None, None, {}
        if not num_external_tokens or found is None:
            self._handoff.release(request)
            return
        first, end = state.held, state.held + num_external_tokens // self._info.block_size
        state.tiers = self._tokens_by_tier(found[first - state.lookup_from : end - state.lookup_from])
        while first < end - 1 and blocks[first] == NULL_BLOCK:
            first += 1
        places = tuple(found[first - state.lookup_from : end - state.lookup_from])
        keys = tuple(state.chain.keys_to(end)[first:end])
        if self._producers_tier not in places:
            self._handoff.release(request)
        producer = self._handoff.take(request.request_id)
        load = BlockLoad(request.request_id, keys, places, tuple(blocks[first:end]), first, producer)
        self._to_load.append(load)
        self._loading[request.request_id] = load
        state.saved = end
        if self.events is not None:
            self.events.expect(request, keys, first)

    def _tokens_by_tier(self, places: Sequence[int]) -> dict[str, int]:
        size = self._info.block_size
        stored = [place for place in places if place < self._producers_tier]
        counts = self._stores.tokens_by_tier(stored, size)
        if len(stored) < len(places):
            counts[PRODUCERS_LABEL] = (len(places) - len(stored)) * size
        return counts

    def build_connector_meta(self, output: Any) -> ForewordConnectorMetadata:
        """The workers' instructions for the step that vLLM has scheduled."""
        loads, self._to_load = self._to_load, []
        metadata = ForewordConnectorMetadata(loads, [], output.total_num_scheduled_tokens)
        self._step = (metadata.tokens, time.monotonic())
        block_state = output.kv_connector_block_state
        self._handoff.revoke(output.preempted_req_ids or ())
        for request_id, count in output.num_scheduled_tokens.items():
            state = self._requests.get(request_id)
            blocks = block_state.get_block_ids(request_id) if block_state is not None and state is not None else None
            save = self._filled_blocks(state, count, blocks[0]) if state is not None and blocks is not None else None
            if save is not None:
                metadata.saves.append(save)
        self._handoff.fill(metadata)
        if metadata.saves or metadata.loads:
            self._events_until = time.monotonic() + _EVENT_SECONDS
        return metadata

    def _filled_blocks(self, state: _RequestState, scheduled: int, blocks: Sequence[int]) -> BlockSave | None:
        request = state.request
        if self._state_of(request) is None or math.isinf(state.saved):
            return None
        # A token that is not known yet (asynchronous scheduling, speculative decoding) fills no block.
        known = min(request.num_computed_tokens + scheduled, len(state.chain))
        self._handoff.computed(request, state.chain, known, blocks)
        first, full = int(state.saved), known // self._info.block_size
        while first < full and blocks[first] == NULL_BLOCK:
            first += 1
        if full <= first:
            return None
        state.saved = full
        keys = tuple(state.chain.keys_to(full)[first:full])
        if self.events is not None:
            self.events.expect(request, keys, first)
        return BlockSave(keys, state.chain.key_before(first), first, tuple(blocks[first:full]))

    # Results

    def update_connector_output(self, output: Any) -> None:
        """What the workers report after a step (a `KVConnectorOutput`): finished loads, blocks that were not loaded, changes in
        the tiers. vLLM recomputes what was not loaded, so it has to be saved, and the request does not load again."""
        tokens, started = self._step
        if self._lookup is not None and tokens >= MEASURED_TOKENS:
            self._lookup.prefill_rate.note(tokens, time.monotonic() - started)
        invalid, failed = output.invalid_block_ids or set(), getattr(output, "failed_recving", None) or set()
        for request_id, load in self._loading.items() if invalid or failed else ():
            lost = [i for i, block in enumerate(load.blocks) if block in invalid]
            state = self._requests.get(request_id)
            if state is not None and (lost or request_id in failed):
                state.no_more_loads = True
                if not math.isinf(state.saved):
                    state.saved = min(state.saved, 0 if request_id in failed else load.first + lost[0])
        for request_id in output.finished_recving or ():
            self._loading.pop(request_id, None)
        self._handoff.sent(output.finished_sending or ())
        reported = getattr(output, "kv_connector_worker_meta", None)
        if self.events is not None and isinstance(reported, ForewordWorkerMetadata):
            self.events.changed(reported.changes)

    @property
    def expects_events(self) -> bool:
        """Whether another step would bring KV events."""
        if self.events is None:
            return False
        if self._worker is not None:
            return self._worker.has_changes
        return time.monotonic() < self._events_until

    def request_finished(self, request: Any, blocks: Sequence[int]) -> dict[str, Any] | None:
        """`kv_transfer_params` for a decode instance; vLLM then keeps the blocks until they are reported as sent."""
        state = self._requests.pop(request.request_id, None)
        return self._handoff.finished(request, state.chain if state is not None else None, blocks)

    def set_workers(self, workers: Mapping[int, WorkerHandshake]) -> None:
        """Where the workers listen, by rank."""
        self._handoff.set_workers({rank: worker.peers for rank, worker in workers.items()})
        if self._lookup is not None:
            self._lookup.set_workers({rank: worker.memory for rank, worker in workers.items()})

    def hit_sources(self, request: Any, num_external_tokens: int) -> dict[str, int]:
        """Loaded tokens by vLLM's name for where they were: host, disk, p2p."""
        state = self._requests.get(request.request_id)
        counts: dict[str, int] = {}
        for label, tokens in (state.tiers if state is not None else {}).items():
            source = {"memory": "host", "disk": "disk"}.get(self._schemes.get(label, ""), "p2p")
            counts[source] = counts.get(source, 0) + tokens
        if sum(counts.values()) != num_external_tokens:
            return {"external_unspecified": num_external_tokens} if num_external_tokens else {}
        return counts

    def reset(self) -> None:
        """From now on nothing is found that was saved before: keys get a new root, which only this process knows.

        Running requests were computed before, so what they fill is not saved; a request that starts again is.
        """
        self._epoch = b"\x00reset\x00" + os.urandom(16)
        self._handoff.reset()
        for state in self._requests.values():
            state.lookup, state.places, state.saved = None, None, math.inf
            state.chain = TokenChain(self._root(state.request), self._info.block_size, state.chain.tokens)

    def close(self) -> None:
        if self._lookup is not None:
            self._lookup.close()
