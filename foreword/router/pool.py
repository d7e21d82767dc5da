"""The replicas of one model: placement, and a fair queue for when all have too much to do."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from foreword.blocks.keys import Scope, chain_keys
from foreword.config import RouterConfig
from foreword.errors import BadRequest, DeadlineExceeded, NoReplica, QueueFull
from foreword.router.prompts import Prompt
from foreword.router.replicas import Upstream, clock
from foreword.routing.baselines import policy_named
from foreword.routing.directory import Directory
from foreword.routing.disaggregation import DisaggregationPolicy
from foreword.routing.fleet import Fleet
from foreword.routing.placement import Decision, PlacementQuery
from foreword.routing.queue import FairQueue, QueueEntry
from foreword.routing.sessions import SessionTable

_BLOCK: Final = 16
_OVERLOADED: Final = "overloaded"
# Policies that look at the prompt.
_READS: Final = frozenset(("cost", "consistent-hashing", "longest-prefix", "two-choices"))


@dataclass(eq=False, slots=True)
class Ticket:
    """A request that was placed. Whoever has it must end it with `Pool.finished` or `Pool.failed`."""

    id: str
    upstream: Upstream
    decision: Decision
    query: PlacementQuery
    prompt: Prompt
    queued: float
    prefill: Upstream | None = None
    begun: bool = False
    guess: asyncio.TimerHandle | None = None


@dataclass(eq=False, slots=True)
class _Waiter:
    id: str
    query: PlacementQuery
    prompt: Prompt
    avoid: Sequence[str]
    placed: asyncio.Future[Ticket]


class Pool:
    """All on the event loop's thread."""

    def __init__(self, model: str, config: RouterConfig, weights: Mapping[str, float]) -> None:
        self.model = model
        self.fleet = Fleet(
            policy_named(config.policy),
            directory=Directory(config.directory_blocks),
            sessions=SessionTable(ttl=config.session_ttl),
            disaggregation=DisaggregationPolicy(min_tokens=config.min_prefill),
        )
        self.upstreams: dict[str, Upstream] = {}
        self.queue: FairQueue[_Waiter] = FairQueue(config.max_queue, dict(weights))
        self.reads_prompts = config.policy in _READS
        self._max_waiting = config.max_waiting
        self._roots: dict[tuple[str, int, str], bytes] = {}
        self._alarm: asyncio.TimerHandle | None = None

    # Replicas

    def add(self, upstream: Upstream) -> None:
        facts = upstream.facts
        assert facts is not None
        self.upstreams[upstream.url] = upstream
        self.fleet.add(
            upstream.url,
            role=upstream.spec.role,  # type: ignore[arg-type]  # checked when it was read
            sends_events=bool(facts.sources),
            block_size=facts.block_size,
            capacity_tokens=facts.capacity_tokens,
            max_queued=upstream.spec.max_waiting or self._max_waiting,
        )
        self.refresh(upstream)

    def remove(self, upstream: Upstream) -> None:
        """Streams that come from there go on to their end."""
        if self.upstreams.pop(upstream.url, None) is not None:
            self.fleet.remove(upstream.url)
            self.pump()

    def refresh(self, upstream: Upstream) -> None:
        """What is known of a replica's health has changed."""
        if upstream.url in self.upstreams:
            self.fleet.exclude(upstream.url, upstream.excluded(clock()))
            self.pump()

    def names(self) -> set[str]:
        """Names under which its models can be asked for."""
        found = {name for upstream in self.upstreams.values() if upstream.facts for name in upstream.facts.models}
        return found | {self.model}

    def able(self, avoid: Sequence[str] = ()) -> list[Upstream]:
        """Replicas that can tokenize, the one with least to do first, those to avoid last."""
        now = clock()
        found = [one for one in self.upstreams.values() if one.facts and one.facts.tokenize]
        return sorted(found, key=lambda one: (one.url in avoid, bool(one.excluded(now)), one.in_flight, one.url))

    # Requests

    @property
    def compares(self) -> bool:
        """Whether it matters what the prompt is: there is a choice and the policy looks at it, or somebody keeps a record."""
        return (self.reads_prompts and len(self.upstreams) > 1) or self.fleet.on_finished is not None

    def query(
        self, prompt: Prompt, model: str | None, salt: str | None, session: str | None, most: int | None
    ) -> PlacementQuery:
        """What placement wants to know of a prompt."""
        sizes = Counter(one.facts.block_size for one in self.upstreams.values() if one.facts and one.facts.block_size)
        main, *others = [size for size, _ in sizes.most_common()] or [_BLOCK]
        named = model or self.model
        keys = self._keys(prompt, named, main, salt)
        further = {size: self._keys(prompt, named, size, salt) for size in others}
        return PlacementQuery(keys, max(len(prompt.tokens), 1), main, session, most, further)

    def _keys(self, prompt: Prompt, model: str, size: int, salt: str | None) -> list[bytes]:
        name = (model, size, salt or "")
        root = self._roots.get(name)
        if root is None:
            if len(self._roots) >= 1024:
                self._roots.clear()
            root = self._roots[name] = Scope(model.encode(), size, (salt or "").encode()).root()
        try:
            return chain_keys(root, prompt.tokens, size)
        except BadRequest:  # not token ids: the replica will say so
            return []

    async def place(
        self, name: str, tenant: str, query: PlacementQuery, prompt: Prompt, deadline: float, avoid: Sequence[str] = ()
    ) -> Ticket:
        """Find a replica, or wait for one. Raises QueueFull, NoReplica, or DeadlineExceeded."""
        if not len(self.queue):
            ticket = self._try(name, query, prompt, avoid)
            if ticket is not None:
                return ticket
        return await self._wait(name, tenant, query, prompt, deadline, avoid)

    def _try(self, name: str, query: PlacementQuery, prompt: Prompt, avoid: Sequence[str]) -> Ticket | None:
        """None if all that could take it have too much to do. Raises NoReplica if there is none."""
        now = clock()
        for upstream in self.upstreams.values():
            if upstream.pause_until:
                self.fleet.exclude(upstream.url, upstream.excluded(now))
        decision = self.fleet.place(query, now, avoid=avoid)
        if decision.replica is None and avoid:
            decision = self.fleet.place(query, now)
        if decision.replica is None:
            if any(price.excluded.startswith(_OVERLOADED) for price in decision.estimates):
                return None
            raise NoReplica(decision.in_words())
        self.fleet.sent(name, query, decision, now)
        upstream = self.upstreams[decision.replica]
        upstream.in_flight += 1
        if upstream.breaker.half_open:
            upstream.trying = True
        if upstream.trying or upstream.in_flight >= upstream.most:
            self.fleet.exclude(upstream.url, upstream.excluded(now))
        prefill = self.upstreams.get(decision.prefill) if decision.prefill else None
        return Ticket(name, upstream, decision, query, prompt, 0.0, prefill)

    async def _wait(
        self, name: str, tenant: str, query: PlacementQuery, prompt: Prompt, deadline: float, avoid: Sequence[str]
    ) -> Ticket:
        began = clock()
        future: asyncio.Future[Ticket] = asyncio.get_running_loop().create_future()
        entry, displaced = self.queue.push(
            _Waiter(name, query, prompt, avoid, future), tenant, float(query.tokens), deadline, began
        )
        if displaced is not None:
            _fail(displaced, QueueFull("The queue is full, and this request's tenant has most in it; try again later"))
        self._set_alarm()
        try:
            ticket = await future
        except asyncio.CancelledError:
            self.queue.remove(entry)
            if future.done() and not future.cancelled() and future.exception() is None:
                self.failed(future.result())
            raise
        ticket.queued = clock() - began
        return ticket

    def pump(self) -> None:
        """Place those who wait, as far as there is room."""
        while len(self.queue) and self._room():
            entry = self.queue.pop(clock())
            if entry is None:
                break
            waiter = entry.item
            if waiter.placed.done():
                continue
            try:
                ticket = self._try(waiter.id, waiter.query, waiter.prompt, waiter.avoid)
            except NoReplica as error:
                _fail(entry, error)
                continue
            if ticket is None:
                _fail(entry, NoReplica("No replica could take the request after it had waited"))
            else:
                waiter.placed.set_result(ticket)
        if len(self.queue) and not self._hope():
            self._give_up()
        self._set_alarm()

    def _hope(self) -> bool:
        """Whether any replica takes requests, now or as soon as it has room."""
        now = clock()
        reasons = [one.excluded(now) for one in self.upstreams.values()]
        return any(
            not reason or reason.startswith(_OVERLOADED) or one.trying
            for reason, one in zip(reasons, self.upstreams.values(), strict=True)
        )

    def _give_up(self) -> None:
        """Nobody is left to wait for."""
        while (entry := self.queue.pop(clock())) is not None:
            _fail(entry, NoReplica("No replica takes requests any more"))

    def _room(self) -> bool:
        now = clock()
        return any(
            not one.excluded(now) and len(self.fleet.replicas[url].load.waiting) < self._limit(one)
            for url, one in self.upstreams.items()
            if one.spec.role != "prefill"
        )

    def _limit(self, upstream: Upstream) -> int:
        return upstream.spec.max_waiting or self._max_waiting

    def _set_alarm(self) -> None:
        """Wake up when the first deadline passes, or a replica that asked to wait may be asked again."""
        if self._alarm is not None:
            self._alarm.cancel()
            self._alarm = None
        if not len(self.queue) and self.queue.next_deadline == float("inf"):
            return
        now = clock()
        pauses = [one.pause_until for one in self.upstreams.values() if one.pause_until > now]
        wake = min([self.queue.next_deadline, *pauses])
        self._alarm = asyncio.get_running_loop().call_later(max(wake - now, 0.005), self._on_alarm)

    def _on_alarm(self) -> None:
        self._alarm = None
        for entry in self.queue.expired(clock()):
            _fail(entry, DeadlineExceeded("The request's time was over before a replica had room for it"))
        self.pump()

    # What became of them

    def first_token(self, ticket: Ticket) -> None:
        self.fleet.first_token(ticket.id, clock())
        if len(self.queue):
            self.pump()

    def guess_first_token(self, ticket: Ticket) -> None:
        """An answer that is not streamed does not show when its prompt was computed: it counts as computed when that was
        expected."""
        price = ticket.decision.estimate
        seconds = price.total if price is not None else 0.0
        ticket.guess = asyncio.get_running_loop().call_later(seconds, self.first_token, ticket)

    def finished(
        self, ticket: Ticket, cached: int | None, output: int | None, prompt_tokens: int | None = None
    ) -> None:
        """It ended well. `cached` counts the replica's tokens, `prompt_tokens` of them in all."""
        if cached is not None and not ticket.prompt.exact:
            # What was compared as text is counted in other units.
            cached = round(cached * ticket.query.tokens / prompt_tokens) if prompt_tokens else None
        if not ticket.prompt.tokens or ticket.prefill is not None:
            # It was not looked at, so nothing was expected; or the answer tells of what came from the prefill replica.
            cached = None
        guessed = ticket.guess is not None
        if guessed:
            self.fleet.first_token(ticket.id, clock())  # at the latest now
        self.fleet.finished(ticket.id, clock(), cached_tokens=cached, output_tokens=output, guessed=guessed)
        self._left(ticket)

    def failed(self, ticket: Ticket) -> None:
        """It ended without an answer, or its client went away."""
        self.fleet.failed(ticket.id, clock())
        self._left(ticket)

    def _left(self, ticket: Ticket) -> None:
        upstream = ticket.upstream
        if ticket.guess is not None:
            ticket.guess.cancel()
        upstream.in_flight -= 1
        if upstream.trying:
            upstream.trying = False
        self.refresh(upstream)


def _fail(entry: QueueEntry[_Waiter], error: Exception) -> None:
    if not entry.item.placed.done():
        entry.item.placed.set_exception(error)
