"""The scheduler's side of the vLLM connector: searches the stores, plans loads and saves, and learns how they went."""

from __future__ import annotations

import math
import os
import time
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from foreword.blocks.keys import TokenChain
from foreword.integrations.vllm.config import NULL_BLOCK, Facts, Settings
from foreword.integrations.vllm.events import Announcer
from foreword.integrations.vllm.lookup import Search
from foreword.integrations.vllm.remote_prefill import Handover
from foreword.integrations.vllm.step_messages import Load, Save, StepPlan, WorkerAddress, WorkerNews
from foreword.integrations.vllm.worker import LENDERS, MEASURED_TOKENS, WorkerSide, worker_of
from foreword.offload.manager import StoreLoad
from foreword.store.urls import parse

_SALT = b"vllm\x00"
# Seconds for which vLLM is kept stepping after a save so that KV events are told, where the queue of the workers is not seen.
_NEWS_SECONDS = 1.0


@dataclass(slots=True)
class _Tracked:
    """One request as the scheduler's side knows it.

    Attributes:
        held: blocks that vLLM had itself when it last asked.
        saved: blocks from the first on that need not be saved; infinite for a request that must not be saved any more.
        searched_from: number of the first block that `store_load` looks for.
        places: what `store_load` found, and what another instance lends beyond it; None before that is known.
        no_more_loads: a load of this request failed, so that the next would too, over and over.
    """

    request: Any
    chain: TokenChain
    store_load: StoreLoad | None = None
    searched_from: int = 0
    places: list[int] | None = None
    held: int = 0
    saved: float = 0
    no_more_loads: bool = False
    tiers: dict[str, int] = field(default_factory=dict)


class SchedulerSide:
    """Searches, and plans. Called from the engine's thread only."""

    def __init__(self, facts: Facts, settings: Settings, engine: str) -> None:
        self._facts = facts
        self._requests: dict[str, _Tracked] = {}
        self._to_load: list[Load] = []
        self._loading: dict[str, Load] = {}
        self._epoch = b""
        self._news_until = 0.0
        self._step = (0, 0.0)  # tokens of the last one, and when it was planned
        self._worker: WorkerSide | None = worker_of(engine)
        self._own = None if self._worker is not None else Search(facts, settings)
        cache = self._worker.cache if self._worker is not None else None
        search = cache if cache is not None else self._own
        assert search is not None
        self._search = search
        schemes = [parse(url).scheme for url in settings.store.urls]
        labels = [tier.label for tier in search.store.tiers[: len(schemes)]]
        self._schemes = dict(zip(labels, schemes, strict=True))
        tiers = [(scheme, label) for label, scheme in self._schemes.items()]
        self._lenders = len(schemes)  # the tier after the stores
        self._handover = Handover(facts, settings)
        self.announcer = Announcer(tiers, facts.ranks, facts.block_size) if facts.events else None

    # Searching

    def match(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """How many tokens beyond the computed ones should be loaded; None to be asked again."""
        tracked = self._track(request)
        if tracked is None:
            return 0, False
        size = self._facts.block_size
        full, held = request.num_tokens // size, num_computed_tokens // size
        tracked.held = tracked.saved = held
        if held >= full or tracked.no_more_loads or getattr(request, "skip_reading_prefix_cache", False):
            return 0, False
        if tracked.store_load is None or held < tracked.searched_from:
            tracked.store_load = self._search.find(tracked.chain.keys_to(full)[held:full])
            tracked.searched_from, tracked.places = held, None
        if tracked.places is None:
            if not tracked.store_load.answered:
                return None, False
            self._note_gap(tracked, full)
            tracked.store_load, tracked.places = self._with_lender(tracked, full)
        count = self._search.worth_loading(tracked.store_load, held - tracked.searched_from, request.num_tokens)
        return count * size, count > 0

    def _with_lender(self, tracked: _Tracked, full: int) -> tuple[StoreLoad, list[int]]:
        """What was found, lengthened by what another instance keeps for this request."""
        assert tracked.store_load is not None
        places = list(tracked.store_load.places or ())
        lent = min(self._handover.blocks(tracked.request, tracked.chain), full) - tracked.searched_from
        found = StoreLoad(tracked.store_load.names, tracked.store_load.deadline)
        found.places = places + [self._lenders] * (lent - len(places))
        return found, found.places

    def _note_gap(self, tracked: _Tracked, full: int) -> None:
        """Where a chain ends in the stores, whatever was announced of the next block is over."""
        store_load = tracked.store_load
        if self.announcer is None or store_load is None or store_load.places is None:
            return
        end = tracked.searched_from + len(store_load.places)
        if end < full:
            self.announcer.missing(tracked.chain.keys_to(full)[end])

    def _track(self, request: Any) -> _Tracked | None:
        """None for requests whose KV depends on more than tokens and salt. A session that got images on its way is one from
        then on."""
        if (
            request.lora_request is not None
            or request.mm_features
            or getattr(request, "prompt_embeds", None) is not None
        ):
            self._requests.pop(request.request_id, None)
            return None
        tracked = self._requests.get(request.request_id)
        tokens = request.all_token_ids
        if tracked is None:
            chain = TokenChain(self._root(request), self._facts.block_size, tokens)
            tracked = self._requests[request.request_id] = _Tracked(request, chain)
            return tracked
        if getattr(request, "streaming_queue", None) is not None:
            self._follow_session(tracked, tokens)
        if len(tracked.chain) < len(tokens):
            tracked.chain.tokens.extend(tokens[len(tracked.chain) :])
        return tracked

    def _root(self, request: Any) -> bytes:
        salt = _SALT + request.cache_salt.encode() if request.cache_salt else b""
        return self._facts.root(salt + self._epoch)

    def _follow_session(self, tracked: _Tracked, tokens: Sequence[int]) -> None:
        """A session's next input takes the place of the last sampled token, which was never computed."""
        known, now = tracked.chain.tokens, array("I", tokens)
        if now[: len(known)] == known:
            return
        same = next((i for i, (old, new) in enumerate(zip(known, now, strict=False)) if old != new), len(now))
        tracked.chain = tracked.chain.fork(min(same, len(known)))
        tracked.saved = min(tracked.saved, same // self._facts.block_size)
        tracked.store_load = tracked.places = None

    # Planning

    def allocated(self, request: Any, blocks: Sequence[int], num_external_tokens: int) -> None:
        """vLLM has taken blocks for what is to be loaded; those that a sliding window has left behind need no bytes."""
        tracked = self._requests.get(request.request_id)
        if tracked is None:
            return
        found, tracked.store_load, tracked.places, tracked.tiers = tracked.places, None, None, {}
        if not num_external_tokens or found is None:
            self._handover.forsake(request)
            return
        size = self._facts.block_size
        first, high = tracked.held, tracked.held + num_external_tokens // size
        tracked.tiers = self._tokens_by_tier(found[first - tracked.searched_from : high - tracked.searched_from])
        while first < high - 1 and blocks[first] == NULL_BLOCK:
            first += 1
        places = tuple(found[first - tracked.searched_from : high - tracked.searched_from])
        keys = tuple(tracked.chain.keys_to(high)[first:high])
        if self._lenders not in places:
            self._handover.forsake(request)
        lender = self._handover.take(request.request_id)
        load = Load(request.request_id, keys, places, tuple(blocks[first:high]), first, lender)
        self._to_load.append(load)
        self._loading[request.request_id] = load
        tracked.saved = high
        if self.announcer is not None:
            self.announcer.expect(request, keys, first)

    def _tokens_by_tier(self, places: Sequence[int]) -> dict[str, int]:
        size = self._facts.block_size
        stored = [place for place in places if place < self._lenders]
        counts = self._search.tokens_by_tier(stored, size)
        if len(stored) < len(places):
            counts[LENDERS] = (len(places) - len(stored)) * size
        return counts

    def plan(self, output: Any) -> StepPlan:
        """What the workers are to do in this step."""
        loads, self._to_load = self._to_load, []
        plan = StepPlan(loads, [], output.total_num_scheduled_tokens)
        self._step = (plan.tokens, time.monotonic())
        state = output.kv_connector_block_state
        self._handover.withdraw(output.preempted_req_ids or ())
        for request_id, count in output.num_scheduled_tokens.items():
            tracked = self._requests.get(request_id)
            blocks = state.get_block_ids(request_id) if state is not None and tracked is not None else None
            if tracked is not None and blocks is not None:
                save = self._newly_full(tracked, count, blocks[0])
                if save is not None:
                    plan.saves.append(save)
        self._handover.fill(plan)
        if plan.saves or plan.loads:
            self._news_until = time.monotonic() + _NEWS_SECONDS
        return plan

    def _newly_full(self, tracked: _Tracked, scheduled: int, blocks: Sequence[int]) -> Save | None:
        request = tracked.request
        if self._track(request) is None or math.isinf(tracked.saved):
            return None
        # A token that is not known yet (asynchronous scheduling, speculation) fills no block.
        known = min(request.num_computed_tokens + scheduled, len(tracked.chain))
        self._handover.computed(request, tracked.chain, known, blocks)
        first, full = int(tracked.saved), known // self._facts.block_size
        while first < full and blocks[first] == NULL_BLOCK:
            first += 1
        if full <= first:
            return None
        tracked.saved = full
        keys = tuple(tracked.chain.keys_to(full)[first:full])
        if self.announcer is not None:
            self.announcer.expect(request, keys, first)
        return Save(keys, tracked.chain.key_before(first), first, tuple(blocks[first:full]))

    # Learning

    def learn(self, output: Any) -> None:
        """What the workers say of a step (a KVConnectorOutput): loads that ended, blocks that did not come, tiers that changed.

        vLLM computes what did not come, so it has to be saved; and it may ask again, for what will not come this time either.
        """
        tokens, began = self._step
        if self._own is not None and tokens >= MEASURED_TOKENS:
            self._own.prefill_rate.note(tokens, time.monotonic() - began)
        invalid, failed = output.invalid_block_ids or set(), getattr(output, "failed_recving", None) or set()
        for request_id, load in self._loading.items() if invalid or failed else ():
            lost = [i for i, block in enumerate(load.blocks) if block in invalid]
            tracked = self._requests.get(request_id)
            if tracked is not None and (lost or request_id in failed):
                tracked.no_more_loads = True
                if not math.isinf(tracked.saved):
                    tracked.saved = min(tracked.saved, 0 if request_id in failed else load.first + lost[0])
        for request_id in output.finished_recving or ():
            self._loading.pop(request_id, None)
        self._handover.sent(output.finished_sending or ())
        news = getattr(output, "kv_connector_worker_meta", None)
        if self.announcer is not None and isinstance(news, WorkerNews):
            self.announcer.changed(news.changes)

    @property
    def expects_news(self) -> bool:
        """Whether KV events are on their way that only another step brings."""
        if self.announcer is None:
            return False
        if self._worker is not None:
            return self._worker.has_news
        return time.monotonic() < self._news_until

    def finished(self, request: Any, blocks: Sequence[int]) -> dict[str, Any] | None:
        """What a decode instance is to be told; then the request's blocks stay until the workers name it as sent."""
        tracked = self._requests.pop(request.request_id, None)
        return self._handover.finished(request, tracked.chain if tracked is not None else None, blocks)

    def meet(self, workers: Mapping[int, WorkerAddress]) -> None:
        """Where the workers can be reached, by rank."""
        self._handover.meet({rank: worker.peers for rank, worker in workers.items()})
        if self._own is not None:
            self._own.meet({rank: worker.memory for rank, worker in workers.items()})

    def sources(self, request: Any, num_external_tokens: int) -> dict[str, int]:
        """Tokens by where they lie, in vLLM's words: host, disk, p2p."""
        tracked = self._requests.get(request.request_id)
        counts: dict[str, int] = {}
        for label, tokens in (tracked.tiers if tracked is not None else {}).items():
            source = {"memory": "host", "disk": "disk"}.get(self._schemes.get(label, ""), "p2p")
            counts[source] = counts.get(source, 0) + tokens
        if sum(counts.values()) != num_external_tokens:
            return {"external_unspecified": num_external_tokens} if num_external_tokens else {}
        return counts

    def reset(self) -> None:
        """From now on nothing is found that was saved before: keys get a new root, which only this server's run knows.

        Requests that go on computed their blocks before, so what they fill is not saved; a request that starts anew is.
        """
        self._epoch = b"\x00reset\x00" + os.urandom(16)
        self._handover.reset()
        for tracked in self._requests.values():
            tracked.store_load, tracked.places, tracked.saved = None, None, math.inf
            tracked.chain = TokenChain(self._root(tracked.request), self._facts.block_size, tracked.chain.tokens)

    def close(self) -> None:
        if self._own is not None:
            self._own.close()
