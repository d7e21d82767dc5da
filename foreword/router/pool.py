"""The replicas of one model: placement, and a fair queue for requests when all replicas are overloaded."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

from foreword.api.dialects.chat_request import ReplicaKind
from foreword.blocks.keys import Scope, chain_keys
from foreword.blocks.salt import Salt
from foreword.config import RouterConfig
from foreword.errors import BadRequest, NoReplica, QueueFull
from foreword.router.attempt import Attempt
from foreword.router.prompts import TokenizedPrompt
from foreword.router.replicas import Upstream, clock
from foreword.routing.directory import CacheTier, Directory
from foreword.routing.disaggregation import DisaggregationPolicy
from foreword.routing.fleet import Fleet
from foreword.routing.placement import PlacementQuery
from foreword.routing.policies import policy_named
from foreword.routing.queue import FairQueue, QueueEntry
from foreword.routing.sessions import SessionTable

_DEFAULT_BLOCK_SIZE: Final = 16
# Reasons with this prefix are temporary: requests wait for the replica.
_OVERLOADED: Final = "overloaded"


@dataclass(frozen=True, slots=True)
class PlacementRequest:
    """A request to place.

    Attributes:
        name: unique name of the attempt.
        avoid: URLs of replicas that failed the request.
    """

    name: str
    tenant: str
    query: PlacementQuery
    prompt: TokenizedPrompt
    avoid: Sequence[str] = ()


_Queued = tuple[PlacementRequest, asyncio.Future[Attempt]]


class ReplicaPool:
    """The replicas of one model. Runs on one event loop."""

    def __init__(self, model: str, config: RouterConfig, weights: Mapping[str, float]) -> None:
        self.model = model
        self.fleet = Fleet(
            policy_named(config.policy),
            directory=Directory(config.directory_blocks),
            sessions=SessionTable(ttl=config.session_ttl),
            disaggregation=DisaggregationPolicy(min_tokens=config.min_prefill),
        )
        self.upstreams: dict[str, Upstream] = {}
        self.queue: FairQueue[_Queued] = FairQueue(config.max_queue, dict(weights))
        self._max_waiting = config.max_waiting
        self._timer: asyncio.TimerHandle | None = None

    # Replicas

    def add(self, upstream: Upstream) -> None:
        info = upstream.info
        assert info is not None
        self.upstreams[upstream.url] = upstream
        self.fleet.add(
            upstream.url,
            role=upstream.spec.role,  # type: ignore[arg-type]  # checked by parse_spec
            sends_events=bool(info.event_sources),
            block_size=info.block_size,
            capacity_tokens=info.capacity_tokens,
            max_queued=self._waiting_limit(upstream),
        )
        self.refresh(upstream)

    def remove(self, upstream: Upstream) -> None:
        """Streams from the replica continue to their end."""
        if self.upstreams.pop(upstream.url, None) is not None:
            self.fleet.remove(upstream.url)
            self.serve_queue()

    def refresh(self, upstream: Upstream) -> None:
        """Apply a change of a replica's state."""
        if upstream.url in self.upstreams:
            self.fleet.exclude(upstream.url, upstream.excluded(clock()))
            self.serve_queue()

    def model_names(self) -> set[str]:
        """The names of all models and adapters that its replicas serve."""
        found = {name for upstream in self.upstreams.values() if upstream.info for name in upstream.info.models}
        return found | {self.model}

    @property
    def kind(self) -> ReplicaKind:
        """What all of its replicas understand."""
        kinds = {upstream.kind for upstream in self.upstreams.values()}
        return "foreword" if kinds <= {"foreword"} else "vllm" if kinds <= {"foreword", "vllm"} else "openai"

    def tokenizing_replicas(self, avoid: Sequence[str] = ()) -> list[Upstream]:
        """Replicas that can tokenize: the least loaded first, those to avoid last."""
        now = clock()
        found = [one for one in self.upstreams.values() if one.info and one.info.tokenize_path]
        return sorted(found, key=lambda one: (one.url in avoid, bool(one.excluded(now)), one.in_flight, one.url))

    def _waiting_limit(self, upstream: Upstream) -> int:
        return upstream.spec.max_waiting or self._max_waiting

    # Placement

    @property
    def needs_prompts(self) -> bool:
        """Whether prompts must be tokenized: placement depends on them, or they are recorded."""
        return (self.fleet.policy.needs_prompts and len(self.upstreams) > 1) or self.fleet.on_finished is not None

    def query(
        self, prompt: TokenizedPrompt, model: str | None, salt: Salt, session: str | None, max_output: int | None
    ) -> PlacementQuery:
        sizes = Counter(one.info.block_size for one in self.upstreams.values() if one.info and one.info.block_size)
        main, *others = [size for size, _ in sizes.most_common()] or [_DEFAULT_BLOCK_SIZE]
        name = model or self.model
        keys = self._keys(prompt, name, main, salt)
        other_keys = {size: self._keys(prompt, name, size, salt) for size in others}
        return PlacementQuery(keys, max(len(prompt.tokens), 1), main, session, max_output, other_keys)

    def _keys(self, prompt: TokenizedPrompt, model: str, size: int, salt: Salt) -> list[bytes]:
        try:
            return chain_keys(_root(model, size, salt), prompt.tokens, size)
        except BadRequest:  # invalid token ids; the replica reports the error
            return []

    def likely_replicas(self, query: PlacementQuery) -> dict[str, int]:
        """Replicas that have more than half of a prompt in tiers of their own, or serve its session; with the tokens that they
        have of it."""
        now = clock()
        home = self.fleet.sessions.home(query.session, query.keys, now)
        held = {
            one.name: min(one.reach[CacheTier.DISK] * (one.block_size or query.block_size), query.tokens)
            for one in self.fleet.candidates(query, now)
        }
        return {url: tokens for url, tokens in held.items() if 2 * tokens > query.tokens or url == home}

    def repeats(self, query: PlacementQuery) -> bool:
        """Whether it is a single prompt that ends with the same full block as an earlier one: not a conversation that grows."""
        return query.session is None and self.fleet.sessions.home(None, query.keys[-1:], clock()) is not None

    async def place(self, request: PlacementRequest) -> Attempt:
        """Place a request, after waiting in the queue if necessary. Raises QueueFull or NoReplica."""
        attempt = self._try_place(request) if not len(self.queue) else None
        return attempt if attempt is not None else await self._wait(request)

    def _try_place(self, request: PlacementRequest) -> Attempt | None:
        """None if all suitable replicas are overloaded. Raises NoReplica if there are none."""
        now = clock()
        for upstream in self.upstreams.values():
            if upstream.pause_until:
                self.fleet.exclude(upstream.url, upstream.excluded(now))
        query = request.query
        decision = self.fleet.place(query, now, avoid=request.avoid)
        if decision.replica is None and request.avoid:
            decision = self.fleet.place(query, now)
        if decision.replica is None:
            if any(estimate.excluded.startswith(_OVERLOADED) for estimate in decision.estimates):
                return None
            raise NoReplica(decision.in_words())
        self.fleet.sent(request.name, query, decision, now)
        upstream = self.upstreams[decision.replica]
        upstream.in_flight += 1
        if upstream.breaker.half_open:
            upstream.trial = True
        if upstream.trial or upstream.in_flight >= upstream.max_in_flight:
            self.fleet.exclude(upstream.url, upstream.excluded(now))
        prefill = self.upstreams.get(decision.prefill) if decision.prefill else None
        return Attempt(request.name, upstream, decision, query, request.prompt, 0.0, now, prefill)

    # The queue

    async def _wait(self, request: PlacementRequest) -> Attempt:
        began = clock()
        future: asyncio.Future[Attempt] = asyncio.get_running_loop().create_future()
        entry, displaced = self.queue.push((request, future), request.tenant, request.query.tokens, began)
        if displaced is not None:
            _fail(displaced, QueueFull("The queue is full, and this tenant has the largest share of it; retry later"))
        self._set_timer()
        try:
            attempt = await future
        except asyncio.CancelledError:
            self.queue.remove(entry)
            if future.done() and not future.cancelled() and future.exception() is None:
                self.failed(future.result())
            raise
        attempt.queued = clock() - began
        return attempt

    def serve_queue(self) -> None:
        """Place queued requests while a replica has room."""
        while len(self.queue) and self._has_room():
            entry = self.queue.pop(clock())
            if entry is None:
                break
            request, placed = entry.item
            if placed.done():  # its client disconnected
                continue
            try:
                attempt = self._try_place(request)
            except NoReplica as error:
                _fail(entry, error)
                continue
            if attempt is None:
                _fail(entry, NoReplica("No replica could take the request when its turn in the queue came"))
            else:
                placed.set_result(attempt)
        if len(self.queue) and not self._has_hope():
            while (entry := self.queue.pop(clock())) is not None:
                _fail(entry, NoReplica("No replica takes requests any more"))
        self._set_timer()

    def _has_room(self) -> bool:
        now = clock()
        return any(
            not one.excluded(now) and len(self.fleet.replicas[url].load.waiting) < self._waiting_limit(one)
            for url, one in self.upstreams.items()
            if one.spec.role != "prefill"
        )

    def _has_hope(self) -> bool:
        """Whether a replica takes requests now or when it is not overloaded any more."""
        now = clock()
        reasons = ((one.excluded(now), one.trial) for one in self.upstreams.values())
        return any(not reason or reason.startswith(_OVERLOADED) or trial for reason, trial in reasons)

    def _set_timer(self) -> None:
        """Wake up when the pause of an overloaded replica ends."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if not len(self.queue):
            return
        now = clock()
        pauses = [one.pause_until - now for one in self.upstreams.values() if one.pause_until > now]
        if pauses:
            self._timer = asyncio.get_running_loop().call_later(max(min(pauses), 0.005), self.serve_queue)

    # Results of attempts

    def first_token(self, attempt: Attempt) -> None:
        self.fleet.first_token(attempt.id, clock())
        if len(self.queue):
            self.serve_queue()

    def expect_first_token(self, attempt: Attempt) -> None:
        """For a response that is not streamed: its prompt counts as computed at the expected time."""
        estimate = attempt.decision.estimate
        seconds = estimate.total if estimate is not None else 0.0
        attempt.first_token_timer = asyncio.get_running_loop().call_later(seconds, self.first_token, attempt)

    def finished(
        self, attempt: Attempt, cached: int | None, output: int | None, prompt_tokens: int | None = None
    ) -> None:
        """The attempt succeeded. `cached` and `prompt_tokens` are as reported by the replica."""
        if cached is not None and not attempt.prompt.exact:
            # The prompt was compared as text: convert to its units.
            cached = round(cached * attempt.query.tokens / prompt_tokens) if prompt_tokens else None
        if not attempt.prompt.tokens or attempt.prefill is not None:
            # Nothing was expected, or the number includes what came from the prefill replica.
            cached = None
        guessed = attempt.first_token_timer is not None
        if guessed:
            self.fleet.first_token(attempt.id, clock())
        self.fleet.finished(attempt.id, clock(), cached_tokens=cached, output_tokens=output, guessed=guessed)
        self._release(attempt)

    def failed(self, attempt: Attempt) -> None:
        """The attempt failed, or the client disconnected."""
        self.fleet.failed(attempt.id, clock())
        self._release(attempt)

    def _release(self, attempt: Attempt) -> None:
        upstream = attempt.upstream
        attempt.end_span()
        if attempt.first_token_timer is not None:
            attempt.first_token_timer.cancel()
        upstream.in_flight -= 1
        upstream.trial = False
        self.refresh(upstream)


def _fail(entry: QueueEntry[_Queued], error: Exception) -> None:
    _, placed = entry.item
    if not placed.done():
        placed.set_exception(error)


@lru_cache(maxsize=1024)
def _root(model: str, block_size: int, salt: Salt) -> bytes:
    return Scope(model.encode(), block_size, salt).root()
