"""The scheduler side of the vLLM connector: looks up blocks in the stores, and decides what to load and save in each step."""

from __future__ import annotations

import dataclasses
import logging
import time
from array import array
from collections.abc import Collection, Iterable, Mapping, Sequence
from hashlib import sha256
from typing import Any

from vllm.v1.request import RequestStatus

from foreword.blocks.checkpoints import ReplacedCheckpoints
from foreword.blocks.keys import TokenChain
from foreword.blocks.resume import GroupKind
from foreword.integrations.vllm.connector_config import NULL_BLOCK, ConnectorSettings, KVCacheInfo
from foreword.integrations.vllm.connector_counts import ConnectorCounts, FoundEnd
from foreword.integrations.vllm.connector_extras import (
    Handoffs,
    engine_control,
    tier_events,
    transfer_extra,
    usage_notes,
)
from foreword.integrations.vllm.connector_metrics import ForewordStats, StatsReader
from foreword.integrations.vllm.due_requests import DueRequests
from foreword.integrations.vllm.rank_stores import StoreLookup
from foreword.integrations.vllm.request_identity import RequestIdentity, framed, request_identities, salt_of
from foreword.integrations.vllm.request_state import BlockIds, RequestState
from foreword.integrations.vllm.step_messages import (
    BlockLoad,
    BlockSave,
    ForewordConnectorMetadata,
    ForewordWorkerMetadata,
    WorkerHandshake,
)
from foreword.integrations.vllm.weights import adapters_spoil_base, follow_engine
from foreword.integrations.vllm.worker_side import (
    MEASURED_TOKENS,
    PRODUCERS_LABEL,
    ForewordConnectorWorker,
    worker_of,
)
from foreword.newest import Newest
from foreword.offload.load import GroupBlocks
from foreword.offload.search import Found
from foreword.store.tier_counters import LookupOutcome
from foreword.store.types import Reach
from foreword.store.urls import parse

logger = logging.getLogger(__name__)
# Seconds that a load takes however small it is, before one was measured: it needs one more step of vLLM's engine at least.
_FIRST_FIXED_SECONDS = 0.005
# How long vLLM is kept stepping after a save, for KV events, where the write queue is in another process.
_EVENT_SECONDS = 1.0
_ENDED = (RequestStatus.FINISHED_STOPPED, RequestStatus.FINISHED_LENGTH_CAPPED)
_MAX_PROVEN = 1 << 16
# vLLM's names for where loaded tokens were; "p2p" for the others.
_SOURCES = {Reach.PROCESS: "host", Reach.HOST: "disk"}


class ForewordConnectorScheduler:
    """See the module. Called from the engine's thread only; methods are named after those of vLLM's connector interface."""

    def __init__(self, info: KVCacheInfo, settings: ConnectorSettings, engine: str) -> None:
        self._info = info
        self._groups = info.stored_groups()
        self._requests: dict[str, RequestState] = {}
        self._due = DueRequests(info.decoded_tokens)
        self._all_ended = False  # the last request has ended since the last statistics
        self.news = True  # statistics of this side may have changed since the last ones
        self.measures = False  # the last step's duration says how fast vLLM computes
        self._to_load: list[BlockLoad] = []
        self._loading: dict[str, BlockLoad] = {}
        self._load_began: dict[str, float] = {}
        # Last windows and ids of requests that have ended, where the worker is in another process. vLLM keeps
        # their blocks until a worker has copied them.
        self._last_saves: list[BlockSave] = []
        self._finished: list[str] = []
        self._ended: list[str] = []  # requests whose blocks vLLM has taken back
        self._late: dict[int, frozenset[str]] = {}  # by rank, requests whose blocks wait to be saved
        self.keeping: set[str] = set()  # ended requests whose blocks vLLM keeps for that
        self._pool: Any = None
        # Positions from which requests continued, whose windows and states were saved for that.
        self._proven: Newest[bytes, None] = Newest(_MAX_PROVEN)
        self._identities = request_identities(info.config, info.key_size)
        self._version = settings.version_of(info.config)
        follow_engine(info.config, "set_weight_version", self.set_weights_version)
        self._spoils_base = info.config.lora_config is not None and adapters_spoil_base()
        self._adapted: set[str] = set()  # requests with an adapter
        self._spoilt = False  # vLLM's own cache may have wrong KV of requests without an adapter
        self._replaced = ReplacedCheckpoints()
        self._to_delete: list[tuple[int, bytes, bytes]] = []
        self._events_until = 0.0
        if not info.loads:
            logger.warning(
                "vLLM cannot continue prompts of this model here, for the way it pools or for the processor's kernels: KV is "
                "saved, and none is loaded"
            )
        self._step = (0, 0.0)  # tokens of the last step, and when it was scheduled
        self._worker: ForewordConnectorWorker | None = worker_of(engine)
        self._lookup = None if self._worker is not None else StoreLookup(info, settings)
        if self._worker is not None:
            self._worker.tell_of_changes(self.weights_changed)
        stores = self._lookup if self._worker is None else self._worker.offload
        assert stores is not None
        self._stores = stores
        stores.costs.fixed.first = _FIRST_FIXED_SECONDS
        stores.costs.fixed.first_tokens = MEASURED_TOKENS
        self._counts = ConnectorCounts()  # since the last report
        self._published_salt: bytes | None = None  # of the version of the weights that was reported
        own = self._lookup
        self.stats = None if own is None else StatsReader("scheduler", own.store, own.lookups, own.costs)
        self._refused: set[str] = set()  # requests for which nothing was looked up, counted once
        reaches = [parse(url).reach for url in settings.store.urls]
        labels = [tier.label for tier in stores.store.tiers[: len(reaches)]]
        self._reaches = dict(zip(labels, reaches, strict=True))
        self._producers_tier = len(reaches)  # after the stores
        self._handoff = Handoffs() if settings.transfer is None else transfer_extra().handoffs(info, settings)
        self.control = engine_control(info, stores.store)
        self._usage = usage_notes(settings.usage_ledger, info.config)
        tiers = [(reach, label) for label, reach in self._reaches.items()]
        sizes = [one.block_size for one in info.groups]
        self.events = tier_events(tiers, [len(one.layouts) for one in self._groups], sizes) if info.events else None

    # Lookup

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """How many tokens after the computed ones to load, and whether asynchronously. None: ask again later."""
        if request.lora_request is not None:
            self._adapted.add(request.request_id)
        if self._usage is not None:
            self._usage.began(request)
        state = self._state_of(request)
        limit = self._info.limit(request.num_tokens) // self._info.step * self._info.step
        allowed = state is not None and self._info.loads and not getattr(request, "skip_reading_prefix_cache", False)
        if not allowed or not limit:
            self._refuse(request, LookupOutcome.TOO_SMALL if allowed else LookupOutcome.NOT_ALLOWED)
        if state is None:
            return 0, False
        state.start_over(self._info, num_computed_tokens)
        if self._version.stale and not self._settled():
            state.saves = False
            self._refuse(request, LookupOutcome.NOT_ALLOWED)
            return 0, False
        if self._spoilt and num_computed_tokens and request.lora_request is None:
            self._keep_unsaved(state)
        if num_computed_tokens >= limit or state.no_more_loads or not allowed:
            return 0, False
        if state.search is None or num_computed_tokens < state.searched_from:
            keys = state.chain.keys_to(limit // self._info.key_size)
            root = state.chain.root
            self._not_loaded(state, FoundEnd.REPEATED)
            state.search = self._stores.lookups.search(self._groups, root, keys, num_computed_tokens, limit)
            state.searched_from, state.found = num_computed_tokens, None
        if state.found is None:
            if not state.search.answered:
                return None, False
            self._note_miss(state, limit)
            state.found = self._with_producer(state, limit)
            state.awaited = max(state.found.position - num_computed_tokens, 0)
        state.awaited = min(state.awaited, max(state.found.position - num_computed_tokens, 0))
        state.reach = state.found.reach
        if state.reach > state.found.position and hasattr(request, "shared_prefix_boundary"):
            # vLLM ends a chunk there, so that a recurrent state exists which the next request can continue from.
            request.shared_prefix_boundary = max(request.shared_prefix_boundary, state.reach)
        state.load = self._stores.costs.best(state.found, num_computed_tokens)
        more = 0 if state.load is None else state.load.position - num_computed_tokens
        return more, more > 0

    def _refuse(self, request: Any, outcome: LookupOutcome) -> None:
        """Count, once, a request for which nothing is looked up."""
        if request.request_id not in self._refused:
            self._refused.add(request.request_id)
            self._stores.lookups.refuse(outcome, request.num_tokens)

    def _with_producer(self, state: RequestState, limit: int) -> Found:
        """The result of the search, or what the request's producer keeps if that is more."""
        assert state.search is not None
        found = state.search.found or Found(state.searched_from, state.searched_from)
        position = min(self._handoff.tokens(state.request, state.chain), limit)
        if position <= found.position:
            return found
        places = {}
        for number, one in enumerate(self._groups):
            for block in one.needed(position, state.searched_from):
                places[number, block] = found.places.get((number, block), self._producers_tier)
        return Found(position, max(position, found.reach), places, step=self._info.step if self._info.divisible else 0)

    def _note_miss(self, state: RequestState, limit: int) -> None:
        """The first block that no tier has: if an event said otherwise, publish that it was removed."""
        if self.events is None or state.search is None or state.search.found is None:
            return
        for number, one in enumerate(self._info.groups):
            end = state.search.found.reach // one.block_size * one.block_size
            if one.group.whole and end + one.block_size <= limit:
                self.events.missing(number, state.key_at(self._info, end + one.block_size))

    def _state_of(self, request: Any) -> RequestState | None:
        """None for a request whose KV cannot be identified. A session may become one when its next input brings media."""
        state = self._requests.get(request.request_id)
        tokens = request.all_token_ids
        identity = state.identity if state is not None else None
        if identity is None or not identity.describes(request):
            identity = self._identities.of(request)
            if identity is None:
                self._requests.pop(request.request_id, None)
                return None
        if state is None:
            state = RequestState(request, self._chain(request, identity, tokens), identity)
            self._requests[request.request_id] = state
            state.start_over(self._info, 0)
            self.control.begins(state)
            return state
        if state.identity is not identity:
            state.identity, state.chain = identity, self._chain(request, identity, state.chain.tokens)
        if getattr(request, "streaming_queue", None) is not None:
            self._follow_session(state, tokens)
        if len(state.chain) < len(tokens):
            state.chain.tokens.extend(tokens[len(state.chain) :])
        return state

    def _chain(self, request: Any, identity: RequestIdentity, tokens: Sequence[int]) -> TokenChain:
        scope = self._info.scope(self._info.current(salt_of(request)))
        return self.control.chain(scope, tokens, identity.extras(self._version.salt))

    def _follow_session(self, state: RequestState, tokens: Sequence[int]) -> None:
        """A session's next input replaces the last sampled token, which was never computed."""
        known, now = state.chain.tokens, array("I", tokens)
        if now[: len(known)] == known:
            return
        same = next((i for i, (old, new) in enumerate(zip(known, now, strict=False)) if old != new), len(now))
        state.chain = state.chain.fork(min(same, len(known)))
        state.cut_to(self._info, same)
        state.search = state.found = state.load = state.plan = None
        state.ends = {}

    # Scheduling of loads and saves

    def update_state_after_alloc(self, request: Any, ids: BlockIds, num_external_tokens: int) -> None:
        """vLLM has allocated blocks for what is to be loaded. It has none where a window does not reach."""
        state = self._requests.get(request.request_id)
        if state is None:
            return
        # vLLM calls this whenever it admits the request. While the request waits for its load, it is not scheduled.
        self._due.watch(request.request_id)
        plan, state.search, state.found, state.load = state.load, None, None, None
        self._not_loaded(state, FoundEnd.SLOWER, state.awaited - num_external_tokens)
        if not num_external_tokens or plan is None:
            self._handoff.release(request)
            return
        position = state.held + num_external_tokens
        chain = state.chain.keys_to(position // self._info.key_size)

        def device_block(group: int, block: int) -> int | None:
            table = ids[self._info.groups[group].index]
            return None if table[block] == NULL_BLOCK else table[block]

        parts = tuple(dataclasses.replace(plan, position=position).blocks(self._groups, chain, device_block))
        state.tiers = self._tokens_by_tier(state, parts, num_external_tokens)
        if not any(self._producers_tier in part.places for part in parts):
            self._handoff.release(request)
        producer = self._handoff.take(request.request_id)
        root, adapter = state.chain.root, state.identity.adapter
        load = BlockLoad(request.request_id, root, state.held, position, parts, producer, adapter)
        self._to_load.append(load)
        self._loading[request.request_id] = load
        self._load_began[request.request_id] = time.monotonic()
        state.skip_to(self._info, position)
        state.note_cached(position)
        if self.events is not None:
            for part in parts:
                keys = self._last_keys(part.group, part.keys)
                before = state.key_at(self._info, part.numbers[0] * self._info.groups[part.group].block_size)
                self.events.expect(request, part.group, part.numbers, keys, before)

    def _tokens_by_tier(self, state: RequestState, parts: Sequence[GroupBlocks], tokens: int) -> dict[str, int]:
        """Tokens by the label of the tier that has them: those of the group with the most blocks, as all are needed."""
        if not parts:
            return {}
        largest = max(parts, key=lambda part: len(part.places))
        size = self._info.groups[largest.group].block_size
        stored = [place for place in largest.places if place < self._producers_tier]
        counts = self._stores.store.tokens_by_tier(stored, size)
        if len(stored) < len(largest.places):
            counts[PRODUCERS_LABEL] = (len(largest.places) - len(stored)) * size
        label = max(counts, key=lambda label: counts[label])
        counts[label] += tokens - sum(counts.values())  # what a window does not need was not loaded
        return counts

    def build_connector_meta(self, output: Any) -> ForewordConnectorMetadata:
        """The workers' instructions for the step that vLLM has scheduled."""
        tokens, scheduled = output.total_num_scheduled_tokens, output.num_scheduled_tokens
        # A step that decodes many requests says nothing of prompts.
        prefills = tokens - len(scheduled) >= MEASURED_TOKENS - 1
        if tokens:
            self._version.computed = True
        if self._lookup is not None:
            self._step = (tokens, time.monotonic())
            self.measures = prefills
            self.news = self.news or not tokens
        if self._adapted and self._spoils_base:
            self._keep_spoilt(scheduled)
        block_state = output.kv_connector_block_state
        states = getattr(block_state, "boundary_state_offloads", ())
        due = self._due.take(scheduled, tokens, states)
        known = self._to_load or self._last_saves or self._finished or self._ended or self._to_delete
        if not (due or known or output.preempted_req_ids or self.control.retires or self._handoff.tells):
            return ForewordConnectorMetadata(tokens=tokens, idle=True, prefills=prefills)
        metadata = self._begin_step(tokens, output.preempted_req_ids or ())
        for request_id in due:
            metadata.saves += self._due_saves(request_id, scheduled, block_state, states or {})
        self._handoff.fill(metadata)
        metadata.idle, metadata.prefills = metadata.empty, prefills
        if self.events is not None and (metadata.saves or metadata.loads):
            self._events_until = time.monotonic() + _EVENT_SECONDS
        return metadata

    def _begin_step(self, tokens: int, preempted: Collection[str]) -> ForewordConnectorMetadata:
        """The instructions that are known before it is looked at what the step computes."""
        loads, self._to_load = self._to_load, []
        saves, finished = self.take_last()
        metadata = ForewordConnectorMetadata(loads, saves, tokens, finished=finished)
        metadata.ended, self._ended = [*self._ended, *preempted], []
        metadata.deletes, self._to_delete = self._to_delete, []
        metadata.retired = self.control.take_retired()
        self._handoff.revoke(preempted)
        return metadata

    def _due_saves(
        self, request_id: str, scheduled: Mapping[str, int], block_state: Any, states: Mapping[str, Any]
    ) -> list[BlockSave]:
        """Saves of what a step computes of a request that may fill a block in it, and when it may fill the next one."""
        state, count = self._requests.get(request_id), scheduled.get(request_id)
        if state is None or not state.saves or (count is None and state.request.status is not RequestStatus.RUNNING):
            self._due.forget(request_id)  # it is watched again when vLLM admits it
            return []
        if count is None:
            self._due.watch(request_id)
            return []
        saves: list[BlockSave] = []
        if request_id in states or self._may_save(state, count):
            ids = block_state.get_block_ids(request_id) if block_state is not None else None
            if ids is not None and self._state_of(state.request) is not None:
                saves = self._computed(state, count, ids, states.get(request_id, ()))
        self._due.watch(request_id, self._tokens_left(state, count))
        return saves

    def _tokens_left(self, state: RequestState, scheduled: int) -> int:
        """Tokens that a request needs behind this step until it may have something to save. Not a function of the tokens that
        are known: those of earlier steps may become known together."""
        if not self._has_begun(state) or self._handoff.wanted(state.request):
            return 0
        return state.next_full(self._info) - int(state.request.num_computed_tokens) - scheduled

    def _keep_spoilt(self, scheduled: Iterable[str]) -> None:
        """Nothing is saved that a request without an adapter computes beside adapters, nor what continues it."""
        base = [name for name in scheduled if name not in self._adapted]
        if not base or not any(name in self._adapted for name in scheduled):
            return
        self._spoilt = True
        for state in map(self._requests.get, base):
            if state is not None:
                self._keep_unsaved(state)

    def _keep_unsaved(self, state: RequestState) -> None:
        self._counts.unsafe_requests += state.saves
        self.news = True
        state.saves = False

    def _may_save(self, state: RequestState, scheduled: int) -> bool:
        """Whether a step fills a block of a request, or begins to compute it."""
        request = state.request
        known = min(request.num_computed_tokens + scheduled, request.num_tokens)
        filled = known >= state.next_full(self._info)
        return filled or not self._has_begun(state) or self._handoff.wanted(request)

    def _has_begun(self, state: RequestState) -> bool:
        """Whether what the request found was offered to the tiers, and it has a plan if it needs one."""
        return (self._info.whole and (state.offered or not self._info.selective)) or state.plan is not None

    def _computed(
        self, state: RequestState, scheduled: int, ids: BlockIds, boundaries: Sequence[tuple[int, int, int]]
    ) -> list[BlockSave]:
        """Saves of what this step computes. `boundaries`: the recurrent states that it computes, each with its group, block and
        position."""
        request, first = state.request, state.plan is None
        # A token that is not known yet (asynchronous scheduling, speculative decoding) fills no block.
        known = min(request.num_computed_tokens + scheduled, len(state.chain))
        states = {} if self._info.whole else self._states(state, known, scheduled, ids, boundaries)
        self._handoff.computed(state, known, ids, states)
        saves = self._proven_position(state, ids) if first and not self._info.whole else []
        saves += state.filled(self._info, known, ids)
        plan = state.plan
        for (number, block), block_id in states.items():
            if plan is not None and plan.wanted(number, block):
                save = state.save(self._info, number, [block], [block_id])
                saves.append(save)
                position = (block + 1) * self._info.groups[number].block_size
                if position >= request.num_prompt_tokens - self._info.step:
                    state.ends[position] = save.keys[0]
        self._expect(request, saves)
        return saves

    def _states(
        self,
        state: RequestState,
        known: int,
        scheduled: int,
        ids: BlockIds,
        boundaries: Sequence[tuple[int, int, int]],
    ) -> dict[tuple[int, int], int]:
        """Recurrent states that this step leaves at positions from which a request can continue: their block ids by group and
        index. vLLM hands over those that its own cache keeps. Where a step ends at a block boundary, the running state is one
        too: it is in the block of the last token."""
        step, request = self._info.step, state.request
        found: dict[tuple[int, int], int] = {}
        for number, one in enumerate(self._info.groups):
            if one.positional:
                continue
            places = {position: block_id for index, block_id, position in boundaries if index == one.index}
            last = known // one.block_size - 1
            ends_here = known % step == 0 and known == request.num_computed_tokens + scheduled
            if ends_here and not self._info.speculative and last < len(ids[one.index]):
                places.setdefault(known, ids[one.index][last])
            for position, block_id in places.items():
                if position % step == 0 and position <= len(state.chain) and block_id != NULL_BLOCK:
                    found[number, position // one.block_size - 1] = block_id
        for position in {(block + 1) * self._info.groups[number].block_size for number, block in found}:
            self._consider(state, position)
        return found

    def _consider(self, state: RequestState, position: int) -> None:
        """Let the plan decide about a state. A state behind the prompt may contain draft tokens that are rejected."""
        plan = state.planned(self._info)
        if position <= state.request.num_prompt_tokens:
            plan.offer(position, position + self._info.chunk)
        elif not self._info.speculative:
            plan.answered(position)  # it may be the last one of the turn

    def _proven_position(self, state: RequestState, ids: BlockIds) -> list[BlockSave]:
        """A request continues from vLLM's own cache: others will from the stores. Saves the windows and states for that, which
        the request that computed them may have left out."""
        key = state.key_at(self._info, state.held)
        if not state.held or state.request.num_computed_tokens != state.held or key in self._proven:
            return []
        self._proven[key] = None
        saves: list[BlockSave] = []
        for number, one in enumerate(self._info.groups):
            if not one.group.whole:
                saves += state.runs(self._info, number, sorted(one.group.needed(state.held)), ids[one.index])
        return saves

    def _expect(self, request: Any, saves: Sequence[BlockSave]) -> None:
        if self.events is not None:
            for save in saves:
                keys = self._last_keys(save.group, save.keys)
                first = save.depth // self._info.keys_before(save.group)
                self.events.expect(request, save.group, range(first, first + len(keys)), keys, save.parent)

    def _last_keys(self, group: int, keys: Sequence[bytes]) -> Sequence[bytes]:
        """Keys of blocks, from the keys of their frames."""
        size = self._info.keys_before(group)
        return keys[size - 1 :: size]

    # Results

    def update_connector_output(self, output: Any) -> None:
        """Take the workers' report after a step (a `KVConnectorOutput`): finished loads, blocks that were not loaded, changes
        in the tiers. vLLM recomputes what was not loaded, so it has to be saved, and the request does not load again."""
        if self._lookup is not None:
            tokens, started = self._step
            if self.measures:
                self._lookup.prefill_rate.note(tokens, time.monotonic() - started)
        invalid, failed = output.invalid_block_ids or (), getattr(output, "failed_recving", None) or ()
        for request_id, load in self._loading.items() if invalid or failed else ():
            state = self._requests.get(request_id)
            lost = [
                number * self._info.step
                for part in load.parts
                for number, block in zip(part.numbers, part.blocks, strict=True)
                if block in invalid
            ]
            if lost or request_id in failed:
                self._measure(load, self._load_began.pop(request_id, None), whole=False)
            if state is not None and (lost or request_id in failed):
                state.no_more_loads = True
                kept = 0 if request_id in failed else lost[0]
                state.cut_to(self._info, kept)
                self._due.watch(request_id)
                state.note_cached(kept)
                self._correct(state, load, kept)
        for request_id in output.finished_recving or ():
            if self._note_loaded(request_id) and request_id in self._requests:
                state = self._requests[request_id]
                self._note_found(state, FoundEnd.LOADED, state.awaited)
        if output.finished_sending:
            self._handoff.sent(output.finished_sending)
            self.keeping.difference_update(output.finished_sending)
        reported = getattr(output, "kv_connector_worker_meta", None)
        if isinstance(reported, ForewordWorkerMetadata):
            if self.events is not None:
                self.events.changed(reported.changes)
            self._late.update(reported.late)
            if self._lookup is not None:
                self._lookup.note_rates(reported.rates)

    def _note_loaded(self, request_id: str) -> bool:
        """A load has ended. False if there was none."""
        load, began = self._loading.pop(request_id, None), self._load_began.pop(request_id, None)
        if load is not None and request_id in self._requests:
            self._measure(load, began)
        return load is not None

    def _measure(self, load: BlockLoad, began: float | None, *, whole: bool = True) -> None:
        """Measure what a load took. Not `whole`: it has brought less than it should have."""
        if began is not None:
            blocks = ((part.group, place) for part in load.parts for place in part.places)
            self._stores.costs.note_load(blocks, time.monotonic() - began, whole=whole)

    def _correct(self, state: RequestState, load: BlockLoad, kept: int) -> None:
        """A load has brought the request only to position `kept`."""
        loaded = max(kept - load.held, 0)
        self._not_loaded(state, FoundEnd.CUT, state.awaited - loaded)
        # With several groups all or nothing is loaded, with one group whole blocks in order.
        count = loaded // self._info.step
        parts = [dataclasses.replace(part, places=part.places[:count]) for part in load.parts if count]
        state.tiers = self._tokens_by_tier(state, parts, loaded)

    def _not_loaded(self, state: RequestState, why: FoundEnd, tokens: int | None = None) -> None:
        """Count tokens that were found for a request and are not loaded: `tokens` of them, or all."""
        tokens = state.awaited if tokens is None else tokens
        if tokens > 0:
            self._note_found(state, why, tokens)

    def _note_found(self, state: RequestState, end: FoundEnd, tokens: int) -> None:
        self._counts.note_found(end, tokens)
        state.awaited -= tokens
        self.news = True

    @property
    def expects_events(self) -> bool:
        """Whether another step would bring KV events."""
        if self.events is None:
            return False
        if self._worker is not None:
            return self._worker.has_changes
        return time.monotonic() < self._events_until

    def request_finished(self, request: Any, ids: BlockIds) -> tuple[bool, dict[str, Any] | None]:
        """Whether vLLM keeps the blocks until they are reported as sent, and `kv_transfer_params` for a decode instance."""
        self._adapted.discard(request.request_id)
        self._due.forget(request.request_id)
        state = self._requests.pop(request.request_id, None)
        self._all_ended = not self._requests
        self.news = self.news or self._all_ended
        self._refused.discard(request.request_id)
        if state is not None and request.request_id in self._loading:
            state.tiers = {}  # vLLM cancels the load
        if self._usage is not None:
            self._usage.ended(request, {} if state is None else state.tiers, self._fingerprint)
        if state is not None:
            self._not_loaded(state, FoundEnd.ENDED)
        last = self._end_of_turn(state, ids) if state is not None else []
        if state is not None and state.ends:
            self._replace_checkpoints(state)
        params = self._handoff.finished(request, state, ids)
        waits = params is not None
        if last and self._worker is not None:
            self._worker.save_blocks(last)  # a step that may not come is not needed
        elif last:
            self._last_saves += last
            if params is None:
                self._finished.append(request.request_id)
                waits = True
        if not waits and self._is_late(request.request_id):
            self._finished.append(request.request_id)
            self.keeping.add(request.request_id)
            waits = True
        elif params is not None or not waits:
            self._drop_late(request.request_id)  # a lease ends when its reader does
        answers = {}
        if state is not None and request.status in _ENDED:
            answers = self.control.ended(state, self._info.current(salt_of(request)), ids)
        return waits, {**(params or {}), **answers} or None

    def _is_late(self, request_id: str) -> bool:
        """Whether the write queue had no room for blocks of a request yet."""
        if self._worker is not None:
            return self._worker.is_late(request_id)
        return any(request_id in late for late in self._late.values())

    def _drop_late(self, request_id: str) -> None:
        """vLLM takes back the blocks of a request, or may at any time. A step that was scheduled before and runs now may bring
        more of them: the next one drops these before it writes."""
        if self._worker is not None:
            self._worker.drop_late([request_id])
        self._ended.append(request_id)

    def take_last(self) -> tuple[list[BlockSave], list[str]]:
        """The last windows that no step has been told to save, and the requests whose blocks vLLM keeps for that."""
        saves, self._last_saves = self._last_saves, []
        finished, self._finished = self._finished, []
        return saves, finished

    def loading(self) -> list[str]:
        """Requests whose loads have begun, and whose end vLLM has not reported."""
        return list(self._loading)

    def _end_of_turn(self, state: RequestState, ids: BlockIds) -> list[BlockSave]:
        """The windows with which the next turn continues. (Recurrent states were saved when they were computed.)"""
        request, info = state.request, self._info
        if state.plan is None or not state.saves or request.status not in _ENDED:
            return []
        plan, computed = state.plan, request.num_computed_tokens - getattr(request, "num_in_flight_tokens", 0)
        tokens = min(computed, len(state.chain))
        missing = []
        for number, one in enumerate(info.groups):
            if one.positional and not one.group.whole:
                needed = sorted(one.group.needed(tokens // info.step * info.step))
                blocks = [block for block in needed if block < state.saved[number] and not plan.wanted(number, block)]
                missing.append((number, blocks, ids[one.index]))
        saves: list[BlockSave] = []
        if plan.end_turn(tokens):
            for number, blocks, table in missing:
                saves += state.runs(info, number, blocks, table)
        self._expect(request, saves)
        return saves

    def _replace_checkpoints(self, state: RequestState) -> None:
        """A session's next turn has new checkpoints of recurrent states: delete those that they replace."""
        assert state.plan is not None
        resumed = state.plan.resumed
        diverged = state.reach > resumed  # another request has gone on from there before
        key_before = b"" if diverged else state.key_at(self._info, resumed)
        for key in self._replaced.ended(state.ends, resumed, key_before):
            groups = (number for number, one in enumerate(self._info.groups) if one.group.kind is GroupKind.STATE)
            self._to_delete += [(number, state.chain.root, key) for number in groups]

    @property
    def _fingerprint(self) -> str:
        """The fingerprint of the weights, with everything else that the KV depends on."""
        return sha256(framed(self._info.model, self._version.salt)).hexdigest()

    def take_stats(self) -> ForewordStats | None:
        """Statistics of this side's own stores since the last call, and the weights; None if nothing has changed, or the worker
        reports it, or it is too early. All that there are when the last request has ended, as another step may not come."""
        ended, self._all_ended, self.news = self._all_ended, False, False
        found = None
        if self.stats is not None:
            found = self.stats.read([]) if ended or not self._step[0] or self.stats.due else None
        elif ended and self._worker is not None:
            found = self._worker.take_stats(at_once=True)
        if self._version.salt != self._published_salt:
            found = found or ForewordStats()
            found.data["fingerprint"], self._published_salt = self._fingerprint, self._version.salt
        counts, self._counts = ForewordStats().count(self._counts), ConnectorCounts()
        if not counts.is_empty():
            found = counts if found is None else found.aggregate(counts)
        return found

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
            source = _SOURCES.get(self._reaches.get(label, Reach.INSTANCE), "p2p")
            counts[source] = counts.get(source, 0) + tokens
        if sum(counts.values()) != num_external_tokens:
            return {"external_unspecified": num_external_tokens} if num_external_tokens else {}
        return counts

    # Versions of the weights

    def bind_pool(self, pool: Any) -> None:
        """vLLM's block pool; None if it shows none."""
        self._pool = self.control.pool = pool
        if self.events is not None:
            self.events.hash_size = pool.hash_block_size if pool is not None else 0

    @property
    def _empty(self) -> bool | None:
        """Whether vLLM's own cache holds nothing: no block is in use or cached. None where this vLLM does not show its pool."""
        if self._pool is None:
            return None
        if self._pool.num_gpu_blocks - self._pool.get_num_free_blocks() != 1:  # vLLM itself uses a block of zeros
            return False
        cached = getattr(self._pool, "cached_block_hash_to_block", None)
        return None if cached is None else not len(cached)

    def reset(self) -> None:
        """From now on nothing is found that was saved before, unless the weights get the name of a version."""
        self._version.reset(self._empty is not False)
        self._start_version()
        if self._version.stale:
            self._say_stale("vLLM has not reset its own cache")

    def set_weights_version(self, name: str) -> None:
        """The weights are those of version `name`: what was saved under it is found again."""
        if not self._version.set(name, self._empty):
            self._say_stale(f"weights version {name!r} is not trusted over vLLM's own cache")
        self._start_version()

    def weights_changed(self) -> None:
        """The weights have changed, or are about to, without a word about their version."""
        if self._version.changed(self._empty):
            self._start_version()
            logger.info("Foreword: the weights have changed: what was saved before is not used until they have a name")
            if self._version.stale:
                self._say_stale("the weights have changed under vLLM's own cache")

    def _say_stale(self, why: str) -> None:
        logger.warning(
            "Foreword: %s: its blocks may be of other weights. Until it is empty, nothing is saved or loaded under their name: "
            "reset it with reset_running_requests, pause vLLM with clear_cache, or POST /v1/foreword/weights_version",
            why,
        )

    def _settled(self) -> bool:
        """Whether vLLM's cache is empty by now, so that all KV will be of the present weights."""
        if not self._empty:
            return False
        name = self._version.settle()
        self._start_version()
        logger.info("Foreword: vLLM's cache is empty; KV is saved and loaded under weights %s", repr(name or "unnamed"))
        return True

    def _start_version(self) -> None:
        """Running requests were computed with other weights, so what they fill is not saved; a request that starts again is."""
        self.news = True
        self._handoff.reset()
        self._proven.clear()
        for state in self._requests.values():
            if state.search is not None:
                self._not_loaded(state, FoundEnd.RESET)
            state.search, state.found, state.load, state.saves = None, None, None, False
            state.chain = self._chain(state.request, state.identity, state.chain.tokens)

    def close(self) -> None:
        if self._usage is not None:
            self._usage.close()
        self.control.close()
        if self._lookup is not None:
            self._lookup.close()
