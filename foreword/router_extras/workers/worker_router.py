"""A router that is one of several workers. They share placements and what became of them, deaths of replicas and the requests
at which they died, stored responses, named prefixes, erasures, an operator's changes, quotas and the page of metrics. KV
events come to each from the replicas themselves.
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import logging
import secrets
import shutil
import signal
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, Final, cast

from foreword.api import http
from foreword.api.outcomes import LOG_FIELDS
from foreword.config import parse_bytes
from foreword.errors import ConfigError, NotFound
from foreword.request_errors import ReplicaFailed
from foreword.router.attempt import Attempt
from foreword.router.replica_pool import PlacementRequest, ReplicaPool
from foreword.router.replicas import ReplicaSpec, Upstream, clock, parse_spec
from foreword.router.router import Router
from foreword.router.suspicious import Ask, Death, Flight, Suspects
from foreword.router_extras.worker_links import Answers, Workers
from foreword.router_extras.workers.bus import (
    First,
    Known,
    Message,
    Sent,
    SharedEnd,
    SharedFailure,
    Told,
    WorkerBus,
)
from foreword.router_extras.workers.metrics import summed
from foreword.router_extras.workers.shared_quotas import SharedQuotas
from foreword.router_extras.workers.supervisor import Seat, Supervisor
from foreword.routing.fleet import Fleet
from foreword.routing.known_prompts import KnownPrefix, KnownPrompts, PromptChain
from foreword.routing.placement import CostEstimate, Decision, PlacementQuery
from foreword.tasks import shared

if TYPE_CHECKING:
    from foreword.configuration import Config

logger = logging.getLogger(__name__)

# Changes of an operator of which a worker hears that joins: the last one of each replica.
_MOST_CHANGES: Final = 4096
_JOIN_SECONDS: Final = 5.0
_POLL_SECONDS: Final = 0.02
# Two workers see one death within this time: no replica starts so fast.
_SAME_DEATH_SECONDS: Final = 0.5
_MOST_EARLY: Final = 10_000
# Replicas that take fewer requests at a time may be full of what has come and was not handled yet.
_MANY: Final = 16
_BEAT_SECONDS: Final = 0.5
# How long a page of metrics is that of all who ask.
_PAGE_SECONDS: Final = 1.0
# How long a worker that ends alone serves connections that it had accepted.
_LEAVE_SECONDS: Final = 1.0
# A worker that has observed a replica's costs itself within this time learns nothing from what others served there: its own
# requests are a sample of them, and learning is the most expensive part of what a worker does for another one's request.
_OWN_SECONDS: Final = 1.0


def run(config: Config, current: Callable[[bytes], bytes], serve: Callable[[Router], Any]) -> int:
    """Run the workers until a signal; returns the exit status."""
    if (
        not config.server.tenant_secret
    ):  # each would have salts of its own, and tenants would share nothing between them
        config = dataclasses.replace(
            config, server=dataclasses.replace(config.server, tenant_secret=secrets.token_hex(32))
        )

    def worker(seat: Seat) -> int:
        given, number = config.router, seat.number
        router = dataclasses.replace(given, max_queue=-(-given.max_queue // seat.count))
        if number:  # one measures replicas, warms them up, and keeps the file; all learn from the requests of all
            router = dataclasses.replace(router, measure_seconds=0.0, cost_file=None, warm_seconds=0.0)
        limits = config.server
        server = dataclasses.replace(
            limits,
            max_connections=-(-limits.max_connections // seat.count),
            response_memory=str(parse_bytes(limits.response_memory) // seat.count),
        )
        _name_in_log(number)
        with http.event_loop() as runner:
            status: int = runner.run(
                serve(WorkerRouter(dataclasses.replace(config, router=router, server=server), current, seat))
            )
            return status

    return Supervisor(config.router.workers, worker).run()


def _name_in_log(number: int) -> None:
    """Lines of the log, and its objects, say which worker they are of."""

    def named(record: logging.LogRecord) -> bool:
        fields = getattr(record, LOG_FIELDS, dict)
        record.msg, record.args = f"worker {number}: {record.getMessage()}", ()
        setattr(record, LOG_FIELDS, lambda: {**fields(), "worker": number})
        return True

    for handler in logging.getLogger().handlers:
        handler.addFilter(named)


class WorkerRouter(Router):
    """A router that knows what the other workers do.

    Attributes:
        workers: the others.
    """

    def __init__(self, config: Config, current: Callable[[bytes], bytes], seat: Seat) -> None:
        super().__init__(config, current)
        self._seat = seat
        self.workers = SharedWorkers(self, seat, self._end)
        self._leaving = False
        self._page: tuple[float, asyncio.Task[tuple[bytes, str]]] | None = None
        self.quotas = SharedQuotas.shared(config.server.quotas, seat.memory)
        self.pool_type = partial(SharedPool, self.workers)
        self.suspects = SharedSuspects(self._serve_waiting, self.workers)
        self.render = self._render_all
        self._changes: dict[str, tuple[str, str, str]] = {}
        self.workers.on("change", lambda told: self._change(*told), self._changes.values)
        self.workers.on("died", lambda told: self._has_died(*told))

    async def start(self) -> None:
        loop = asyncio.get_running_loop()
        # A second signal is as the first: a process group has got it, and the supervisor hands it on. It kills, if need be.
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._end)
        await super().start()
        await self.workers.bus.start()
        loop.add_reader(self._seat.parent, self._orphaned)
        self.background(self._beat())

    async def _beat(self) -> None:
        while True:
            self._seat.memory.beat()
            await asyncio.sleep(_BEAT_SECONDS)

    def _orphaned(self) -> None:
        """A worker ends with its supervisor, which would start it again."""
        asyncio.get_running_loop().remove_reader(self._seat.parent)
        self._seat.memory.end_all()
        shutil.rmtree(self._seat.folder, ignore_errors=True)
        self._end()

    def _end(self) -> None:
        """End after the requests that run, once. If the others stay, they get what comes from now on."""
        if not self._leaving:
            self._leaving = True
            self.background(self._leave())

    async def _leave(self) -> None:
        until = clock() + _LEAVE_SECONDS
        while not self._seat.memory.ending:
            # A client that has just connected has its answer here: it would find a connection that is closed without one.
            if not self.leave() or clock() >= until:
                self.ending.set()
            await asyncio.sleep(_POLL_SECONDS)
        self.ending.set()

    async def joined(self) -> None:
        """A worker takes connections only when it and the others hear each other, and it has what they know, such as an
        operator's changes: what one places before is not known to the others. One that is started again also waits until a
        replica serves: the others take connections until then."""
        others, again = self._seat.count - 1, any(self._seat.memory.restarts().values())
        with suppress(TimeoutError):
            async with asyncio.timeout(_JOIN_SECONDS):
                while not (
                    len(self.workers.bus.known) == len(self.workers.bus.connected) == others
                    and (self.healthy() or not again)
                ):
                    await asyncio.sleep(_POLL_SECONDS)
        self.workers.find_places()

    async def stop(self) -> None:
        asyncio.get_running_loop().remove_reader(self._seat.parent)
        await self.workers.bus.stop()
        await super().stop()

    async def _render_all(self, accept: str) -> tuple[bytes, str]:
        """The metrics of all workers, in Prometheus' text format."""
        if self._page is None or clock() - self._page[0] > _PAGE_SECONDS:
            self._page = clock(), shared(self._pages())
        return await asyncio.shield(self._page[1])

    async def _pages(self) -> tuple[bytes, str]:
        own, media_type = self.metrics.render("")
        pages = await self.workers.bus.ask("metrics")
        workers = {"answering": len(pages) + 1, "configured": self._seat.count}
        return summed([own, *pages], self._seat.memory.restarts(), workers), media_type

    # An operator's changes

    async def changed(self, change: str, upstream: Upstream) -> Upstream:
        told = change, upstream.url, upstream.spec.role
        self._note(*told)
        answers = await self.workers.repeat("change", told)
        # One that is not connected yet hears of it when it is.
        if late := [number for number in answers.silent if number in self.workers.bus.connected]:
            named = ", ".join(map(str, late))
            logger.error("%s %s: no answer of workers %s", change, upstream.url, named)
            raise ReplicaFailed(f"this process has made the change, but workers {named} have not said so: repeat it")
        return upstream

    def remove(self, url: str) -> Upstream:
        removed = super().remove(url)
        # It is not drained if it comes back.
        if self._changes.get(removed.url, ("", "", ""))[0] in ("drain", "undrain"):
            del self._changes[removed.url]
        return removed

    def _note(self, change: str, url: str, role: str) -> None:
        self._changes.pop(url, None)
        self._changes[url] = change, url, role
        if len(self._changes) > _MOST_CHANGES:
            del self._changes[next(iter(self._changes))]

    def _change(self, change: str, url: str, role: str) -> None:
        """A change whose operator has the answer of another worker."""
        self._note(change, url, role)
        try:
            if change == "add":
                self.add(parse_spec(url, role), "api")
            elif change == "remove":
                self.remove(url)
            else:
                self.drain(url, change == "drain")
        except (ConfigError, NotFound) as error:
            logger.info("a change from another worker had no effect: %s", error.message)

    def add(self, spec: ReplicaSpec, source: str) -> Upstream:
        upstream = super().add(spec, source)
        change = self._changes.get(spec.url, ("", "", ""))[0]
        # This worker was started after the change.
        if change == "drain":
            upstream.drained = True
        elif change == "remove" and source == "flag":
            self.background(self._remove_again(upstream))
        return upstream

    async def _remove_again(self, upstream: Upstream) -> None:
        if self.upstreams.get(upstream.url) is upstream:
            self.remove(upstream.url)

    # Deaths

    def died(self, upstream: Upstream, reason: str) -> None:
        known = upstream.dead
        super().died(upstream, reason)
        if not known:
            self.workers.tell("died", (upstream.url, upstream.died_at, reason))

    def _has_died(self, url: str, at: float, reason: str) -> None:
        """Another worker has seen a death, at a time by `clock`. This one may have seen the same before."""
        upstream = self.upstreams.get(url)
        if upstream is not None and at > upstream.died_at + _SAME_DEATH_SECONDS:
            super().died(upstream, reason)


class SharedWorkers(Workers):
    """The other workers, as one of them sees them. `end` ends this one after its requests."""

    def __init__(self, router: Router, seat: Seat, end: Callable[[], None]) -> None:
        self._router = router
        self._end = end
        self.number = seat.number
        self.on_gone: Callable[[int], object] = lambda number: None
        self.bus = WorkerBus(
            seat, self._told, self._asked, self._joined, self._gone, self._missed, defers=self._nothing_waits
        )
        # Requests of other workers that run, by worker and name.
        self._running: dict[tuple[int, int], tuple[SharedPool, str, Upstream]] = {}
        # Those at replicas that this worker does not know yet.
        self._early: dict[tuple[int, int], Sent] = {}
        self._handlers: dict[str, tuple[Callable[[Any], object], Callable[[], Iterable[Any]]]] = {}
        self.on("computed", lambda told: self._computed(*told))

    def on(self, kind: str, handler: Callable[[Any], object], known: Callable[[], Iterable[Any]] = tuple) -> None:
        self._handlers[kind] = handler, known

    def tell(self, kind: str, content: Any, **how: Any) -> None:
        """`how`: see `WorkerBus.tell`."""
        self.bus.tell(Told(kind, content), **how)

    def _nothing_waits(self) -> bool:
        """Whether no request here waits for what becomes of others, and no replica is soon full of them."""
        router = self._router
        suspected = isinstance(router.suspects, SharedSuspects) and router.suspects.awaited
        few = min(router.config.max_in_flight, router.config.max_waiting) < _MANY
        return not (few or suspected or any(pool.waiting for pool in router.pools.values()))

    def hear(self, names: Iterable[bytes | str] | None) -> None:
        """See `WorkerBus.hear`."""
        self.bus.hear(names)

    async def repeat(self, kind: str, content: Any) -> Answers:
        return await self.bus.ask(kind, content)

    async def settle(self) -> None:
        await self.bus.ask("settle")  # an answer comes behind all earlier messages

    def _joined(self) -> list[Message]:
        known = [Told(kind, one) for kind, (_, known) in self._handlers.items() for one in known()]
        fleets = [pool.fleet for pool in self._router.pools.values() if isinstance(pool.fleet, SharedFleet)]
        return [*known, *(sent for fleet in fleets for sent in fleet.running())]

    async def _asked(self, kind: str, content: Any) -> Any:
        if kind == "metrics":
            return self._router.metrics.render("")[0]
        found = self._handle(kind, content)
        return await found if isinstance(found, Awaitable) else found

    def _handle(self, kind: str, content: Any) -> Any:
        found = self._handlers.get(kind)
        return found[0](content) if found is not None else None

    def _told(self, other: int, message: Message) -> None:
        match message:
            case Sent():
                self._sent(other, message)
            case First():
                found = self._running.get((other, message.name))
                if found is not None:
                    found[0].fleet_heard.first_token(found[1], message.now)
            case SharedEnd() | SharedFailure():
                self._ended(other, message)
            case Known():
                pool = self._pool(message.model)
                if pool is not None:
                    pool.known_heard(message)
            case Told():
                self._handle(message.kind, message.content)

    def _pool(self, model: str) -> SharedPool | None:
        pool = self._router.pools.get(model)
        return pool if isinstance(pool, SharedPool) else None

    def _sent(self, other: int, one: Sent) -> None:
        pool = self._pool(one.model)
        upstream = pool.upstreams.get(one.replica) if pool is not None else None
        if pool is None or upstream is None or one.replica not in pool.fleet.replicas:
            if len(self._early) < _MOST_EARLY:
                self._early[other, one.name] = one
            return
        query = PlacementQuery(
            one.keys,
            one.tokens,
            one.block_size,
            one.session,
            one.max_output,
            dict(one.other_keys),
            one.weights,
            public_keys=dict(one.public_keys),
        )
        prefill = one.prefill if one.prefill in pool.fleet.replicas else None
        estimate = CostEstimate(one.replica, reused=one.reused, computed=one.computed)
        name = f"{other}:{one.name}"
        pool.fleet_heard.sent(name, query, Decision(one.replica, (estimate,), "worker", prefill), one.now)
        self._running[other, one.name] = pool, name, upstream
        self._count(pool, upstream, 1)

    def _computed(self, model: str, owner: bytes, links: list[bytes], sizes: list[int], tokens: int | None) -> None:
        """A prompt of another worker is in no table of blocks."""
        if (pool := self._pool(model)) is not None:
            chain = PromptChain(owner, tuple(links), tuple(sizes))
            KnownPrompts.computed(pool.known, chain, tokens, named=False)

    def find_places(self) -> None:
        """Count requests whose replicas this worker did not know when it heard of them."""
        early, self._early = self._early, {}
        for (other, _), one in early.items():
            self._sent(other, one)

    def _ended(self, other: int, one: SharedEnd | SharedFailure) -> None:
        self._early.pop((other, one.name), None)
        found = self._running.pop((other, one.name), None)
        if found is None:
            return
        pool, name, upstream = found
        if isinstance(one, SharedFailure):
            pool.fleet_heard.failed(name, one.now)
        else:
            replica = pool.fleet.replicas.get(upstream.url)
            known = replica is not None and one.now - replica.learned_at < _OWN_SECONDS
            pool.fleet_heard.finished(
                name, one.now, cached_tokens=one.cached, output_tokens=one.output, guessed=one.guessed or known
            )
        self._count(pool, upstream, -1)

    def _gone(self, other: int) -> None:
        """A worker has ended: so have its requests."""
        for number, name in [key for key in (*self._running, *self._early) if key[0] == other]:
            self._ended(number, SharedFailure(name, clock()))
        self.on_gone(other)

    def _missed(self, other: int) -> None:
        """Messages of another worker are lost. What this one knows is incomplete now: one that is started anew hears it."""
        logger.error("messages of worker %d are lost: this worker ends, and another one is started", other)
        self._end()

    @staticmethod
    def _count(pool: ReplicaPool, upstream: Upstream, change: int) -> None:
        """Its requests in flight are those of all workers."""
        full = upstream.in_flight >= upstream.max_in_flight
        upstream.in_flight += change
        if full or pool.waiting or upstream.in_flight >= upstream.max_in_flight:
            pool.refresh(upstream)


class _Heard:
    """A fleet's methods for what another worker tells, which is not told again."""

    def __init__(self, fleet: Fleet) -> None:
        self.sent = partial(Fleet.sent, fleet)
        self.first_token = partial(Fleet.first_token, fleet)
        self.finished = partial(Fleet.finished, fleet)
        self.failed = partial(Fleet.failed, fleet)


class SharedFleet(Fleet):
    """Tells the other workers what this one does with the replicas of a model."""

    bus: WorkerBus
    model: str
    _numbers = itertools.count()

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._told: dict[str, Sent] = {}

    def running(self) -> Iterable[Sent]:
        """This worker's requests that run, as it has told them."""
        return self._told.values()

    def sent(self, name: str, query: PlacementQuery, decision: Decision, now: float) -> None:
        super().sent(name, query, decision, now)
        estimate = decision.estimate
        assert decision.replica is not None and estimate is not None
        self._told[name] = sent = Sent(
            next(self._numbers),
            self.model,
            decision.replica,
            decision.prefill,
            query.tokens,
            estimate.reused,
            estimate.computed,
            query.session,
            query.max_output,
            query.weights,
            query.block_size,
            list(query.keys),
            [(space, list(keys)) for space, keys in query.other_keys.items()],
            [(space, list(keys)) for space, keys in query.public_keys.items()],
            now,
        )
        self.bus.tell(sent, later=True, names=_names(sent))

    def first_token(self, name: str, now: float) -> None:
        super().first_token(name, now)
        if name in self._told:
            sent = self._told[name]
            self.bus.tell(First(sent.name, now), urgent=False, later=True, names=_names(sent))

    def finished(
        self,
        name: str,
        now: float,
        *,
        cached_tokens: int | None = None,
        output_tokens: int | None = None,
        guessed: bool = False,
    ) -> None:
        super().finished(name, now, cached_tokens=cached_tokens, output_tokens=output_tokens, guessed=guessed)
        sent = self._told.pop(name, None)
        if sent is not None:
            ended = SharedEnd(sent.name, now, cached_tokens, output_tokens, guessed)
            self.bus.tell(ended, urgent=False, later=True, names=_names(sent))

    def failed(self, name: str, now: float) -> None:
        super().failed(name, now)
        sent = self._told.pop(name, None)
        if sent is not None:
            self.bus.tell(SharedFailure(sent.name, now), urgent=False, later=True)


def _names(sent: Sent) -> list[bytes | str]:
    """The names of requests that go on where this one ends, or are of its session."""
    ends: list[bytes | str] = [keys[-1] for keys in (sent.keys, *(keys for _, keys in sent.other_keys)) if keys]
    return ends if sent.session is None else [*ends, sent.session]


class SharedPrompts(KnownPrompts):
    """Tells the other workers which prompts were placed, and which of them no table of blocks has."""

    bus: WorkerBus
    model: str

    def find(self, chain: PromptChain, now: float) -> KnownPrefix | None:
        self.bus.hear(chain.links)
        return super().find(chain, now)

    def placed(self, chain: PromptChain, tokens: int, replica: str, now: float, *, by_keys: bool) -> None:
        super().placed(chain, tokens, replica, now, by_keys=by_keys)
        known = Known(self.model, chain.owner, chain.links, chain.sizes, tokens, replica, now, by_keys)
        self.bus.tell(known, later=True, names=chain.links[-1:])

    def computed(self, chain: PromptChain, tokens: int | None, *, named: bool) -> bool:
        news = super().computed(chain, tokens, named=named)
        if news:  # the others believe it is named: a message for each prompt would cost them as much as its placement
            self.bus.tell(Told("computed", (self.model, chain.owner, chain.links, chain.sizes, tokens)))
        return news


class SharedPool(ReplicaPool):
    """The replicas of one model, as all workers use them."""

    fleet_type = SharedFleet

    def __init__(self, workers: SharedWorkers, model: str, *args: Any) -> None:
        super().__init__(model, *args)
        self._workers = workers
        fleet, self.known = self.fleet, SharedPrompts(ttl=self.known.ttl)
        assert isinstance(fleet, SharedFleet)
        fleet.bus = self.known.bus = workers.bus
        fleet.model = self.known.model = model
        self.fleet_heard = _Heard(fleet)

    def place(self, request: PlacementRequest) -> Coroutine[Any, Any, Attempt]:
        query = request.query
        for names in (query.keys, *query.other_keys.values(), () if query.session is None else (query.session,)):
            self._workers.bus.hear(names)
        return super().place(request)

    def known_heard(self, one: Known) -> None:
        """Another worker has placed a prompt."""
        chain = PromptChain(one.owner, one.links, one.sizes)
        KnownPrompts.placed(self.known, chain, one.tokens, one.replica, one.now, by_keys=one.by_keys)


class SharedSuspects(Suspects):
    """Requests at which replicas have died, at whichever worker, and attempts that run.

    What two workers place before they have heard of each other counts too late: each may have sent it to two replicas.
    """

    def __init__(self, on_change: Callable[[], None], workers: SharedWorkers) -> None:
        super().__init__(on_change)
        self._workers = workers
        # The deaths of each digest that all know.
        self._shared: dict[bytes, list[Death]] = {}
        # This worker's attempts, by what the others call them, and those of each of the others.
        self._own: dict[Flight, tuple[int, bytes]] = {}
        self._numbers = itertools.count()
        self._others: dict[int, dict[int, tuple[bytes, Flight]]] = {}
        workers.on("deaths", lambda told: self._heard(*told), self._known)
        workers.on("innocent", self._innocent)
        workers.on("attempt", lambda told: self._began(*told), self._attempts)
        workers.on("attempt ended", lambda told: self._over(*told))
        workers.on_gone = self._forget_worker

    @property
    def awaited(self) -> bool:
        """Whether requests wait for what becomes of others, or may have to."""
        return self.accused or bool(self._waiting)

    def __contains__(self, key: bytes) -> bool:
        self._workers.hear((key,))
        return super().__contains__(key)

    def accuse(self, key: bytes) -> None:
        self._workers.hear(None)  # where else the same is asked; from now on nothing waits
        super().accuse(key)

    def add(self, key: bytes, flight: Flight, *, whole: bool) -> None:
        super().add(key, flight, whole=whole)
        if whole:  # it counts alone until a replica has died, and a death goes out with all digests
            number = next(self._numbers)
            self._own[flight] = number, key
            told = self._workers.number, number, key, list(flight.urls)
            self._workers.tell("attempt", told, later=True, names=[key])

    def release(self, key: bytes, flight: Flight) -> None:
        super().release(key, flight)
        if (known := self._own.pop(flight, None)) is not None:
            self._workers.tell("attempt ended", (self._workers.number, known[0]), urgent=False, later=True)

    def _attempts(self) -> list[Any]:
        return [(self._workers.number, number, key, list(one.urls)) for one, (number, key) in self._own.items()]

    def _began(self, worker: int, number: int, key: bytes, urls: list[str]) -> None:
        flight = Flight(cast(Ask, None), urls)  # messages end it
        self._others.setdefault(worker, {})[number] = key, flight
        super().add(key, flight, whole=True)

    def _over(self, worker: int, number: int) -> None:
        found = self._others.get(worker, {}).pop(number, None)
        if found is not None:
            super().release(*found)
            self.notify()

    def _forget_worker(self, worker: int) -> None:
        for number in list(self._others.get(worker, ())):
            self._over(worker, number)

    def keep_newest(self) -> None:
        super().keep_newest()
        known, self._shared = (
            self._shared,
            {key: list(one.deaths) for key, one in self._suspicions.items() if one.deaths},
        )
        for key, deaths in self._shared.items():
            before = known.get(key, [])
            if deaths != before:
                gone = [one for one in before if one not in deaths]
                self._workers.tell(
                    "deaths", (key, self._suspicions[key].whole, deaths, gone, self._suspicions[key].until)
                )

    def clear(self, key: bytes) -> None:
        one = self.find(key)
        if one is not None and one.deaths:
            self._workers.tell("innocent", key)
        super().clear(key)

    def _innocent(self, key: bytes) -> None:
        super().clear(key)
        self.notify()

    def _heard(self, key: bytes, whole: bool, deaths: list[list[Any]], gone: list[list[Any]], until: float) -> None:
        if whole:
            self.accuse(key)
        if self.was_served(key):
            return
        one = self.get(key, whole=whole)
        found = {death[:2]: death for death in (*one.deaths, *(Death(*told) for told in deaths))}
        for told in gone:
            found.pop(Death(*told)[:2], None)
        one.deaths, one.until = list(found.values()), max(one.until, until)
        self._shared[key] = list(one.deaths)
        self.keep_newest()
        self.notify()

    def _known(self) -> list[Any]:
        return [(key, one.whole, one.deaths, [], one.until) for key, one in self._suspicions.items() if one.deaths]
