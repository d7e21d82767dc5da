"""What the workers of a router share: placements and what became of them, stored responses, named prefixes, erasures, an
operator's changes, and the metrics of all of them. KV events come to each worker from the replicas themselves.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import os
import secrets
import signal
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import msgspec
from msgspec import Struct

from foreword.errors import ConfigError, NotFound
from foreword.router.extras import WorkerParts, Workers
from foreword.router.replica_pool import ReplicaPool
from foreword.router.replicas import clock, parse_spec
from foreword.router.service import Router
from foreword.router_extras.workers.bus import WorkerBus
from foreword.router_extras.workers.metrics import summed
from foreword.router_extras.workers.supervisor import Seat, Supervisor
from foreword.routing.fleet import FleetListener
from foreword.routing.known_prompts import PromptChain
from foreword.routing.placement import CostEstimate, Decision, KeySpace, PlacementQuery

if TYPE_CHECKING:
    from foreword.configuration import Config

logger = logging.getLogger(__name__)

_decode: Final = msgspec.msgpack.decode


class Sent(Struct, frozen=True, array_like=True):
    """A request that another worker has placed."""

    model: str
    name: str
    replica: str
    prefill: str | None
    tokens: int
    reused: int
    computed: int
    session: str | None
    max_output: int | None
    weights: str
    block_size: int
    keys: list[bytes]
    other_keys: list[tuple[KeySpace, list[bytes]]]
    public_keys: list[tuple[KeySpace, list[bytes]]]
    now: float


class Ended(Struct, frozen=True, array_like=True):
    """What became of it: its first token came, it was served, or it failed."""

    model: str
    name: str
    what: str
    now: float
    cached: int | None = None
    output: int | None = None
    guessed: bool = False


class Known(Struct, frozen=True, array_like=True):
    """A prompt that was sent to a replica, by its bytes."""

    model: str
    owner: bytes
    links: list[bytes]
    sizes: list[int]
    tokens: int
    replica: str
    now: float
    by_keys: bool


def run(config: Config, serve: Callable[[WorkerParts], int]) -> int:
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
        if number:  # one measures replicas, and keeps the file; all learn from the requests of all
            router = dataclasses.replace(router, measure_seconds=0.0, cost_file=None)
        own = dataclasses.replace(config, router=router)
        return serve(WorkerParts(number, own, seat.accounts, partial(_connected, seat)))

    return Supervisor(config.router.workers, worker).run()


@asynccontextmanager
async def _connected(seat: Seat, router: Router) -> AsyncIterator[None]:
    router.workers = shared = SharedWorkers(router, seat)
    await shared.start()
    loop = asyncio.get_running_loop()
    # Without its supervisor nobody would start it again, or end it.
    loop.add_reader(seat.parent, os.kill, os.getpid(), signal.SIGTERM)
    try:
        yield
    finally:
        loop.remove_reader(seat.parent)
        await shared.stop()


class SharedWorkers(Workers):
    """One worker's view of the others."""

    def __init__(self, router: Router, seat: Seat) -> None:
        self.number = seat.number
        self._router, self._seat = router, seat
        self._bus = WorkerBus(seat, self._told, self._asked, self._gone)
        # Requests of other workers that run, by worker and name: their model and replica.
        self._running: dict[tuple[int, str], tuple[str, str]] = {}
        self._handlers: dict[str, Callable[[Any], object]] = {}

    async def start(self) -> None:
        await self._bus.start()

    async def stop(self) -> None:
        await self._bus.stop()

    # To the others

    def joined(self, pool: ReplicaPool) -> None:
        pool.fleet.listener = _Teller(self._bus, pool.model)

    def placed(self, pool: ReplicaPool, chain: PromptChain, tokens: int, replica: str, *, by_keys: bool) -> None:
        links, sizes = list(chain.links), list(chain.sizes)
        self._bus.tell("known", Known(pool.model, chain.owner, links, sizes, tokens, replica, clock(), by_keys))

    def tell(self, kind: str, content: Any) -> None:
        self._bus.tell(kind, content)

    def on(self, kind: str, handler: Callable[[Any], object]) -> None:
        self._handlers[kind] = handler

    async def repeat(self, kind: str, content: Any) -> None:
        await self._bus.ask(kind, content)

    async def settle(self) -> None:
        await self._bus.ask("settle")

    async def render(self, own: tuple[bytes, str]) -> tuple[bytes, str]:
        pages = [_decode(one, type=bytes) for one in await self._bus.ask("metrics")]
        restarts = self._seat.accounts.restarts()
        workers = {"answering": len(pages) + 1, "configured": self._seat.count}
        return summed([own[0], *pages], restarts, workers), own[1]

    # From the others

    def _told(self, other: int, kind: str, content: msgspec.Raw) -> None:
        if kind == "sent":
            self._sent(other, _decode(content, type=Sent))
        elif kind == "ended":
            self._ended(other, _decode(content, type=Ended))
        elif kind == "known":
            one = _decode(content, type=Known)
            pool = self._router.pools.get(one.model)
            if pool is not None:
                chain = PromptChain(one.owner, tuple(one.links), tuple(one.sizes))
                pool.known.placed(chain, one.tokens, one.replica, one.now, by_keys=one.by_keys)
        else:
            self._handle(kind, content)

    def _handle(self, kind: str, content: msgspec.Raw) -> None:
        handler = self._handlers.get(kind)
        if handler is not None:
            handler(_decode(content))

    async def _asked(self, kind: str, content: msgspec.Raw) -> Any:
        if kind == "metrics":
            return self._router.metrics.render("")[0]
        if kind == "settle":
            # What this worker has told the others has arrived once they answer.
            await self._bus.ask("nothing")
        elif kind == "change":
            self._change(*_decode(content, type=tuple[str, str, str]))
        else:
            self._handle(kind, content)
        return None

    def _change(self, what: str, url: str, role: str) -> None:
        """A change of an operator, who has had the answer of another worker."""
        try:
            if what == "add":
                self._router.add(parse_spec(url, role), "api")
            elif what == "remove":
                self._router.remove(url)
            else:
                self._router.drain(url, what == "drain")
        except (ConfigError, NotFound) as error:
            logger.info("a change from another worker had no effect: %s", error.message)

    def _sent(self, other: int, one: Sent) -> None:
        pool = self._router.pools.get(one.model)
        if pool is None or one.replica not in pool.fleet.replicas:
            return
        prefill = one.prefill if one.prefill in pool.fleet.replicas else None
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
        estimate = CostEstimate(one.replica, reused=one.reused, computed=one.computed)
        with _quietly(pool):
            pool.fleet.sent(
                _name(other, one.name), query, Decision(one.replica, (estimate,), "worker", prefill), one.now
            )
        self._running[other, one.name] = one.model, one.replica
        self._count(one.model, one.replica, 1)

    def _ended(self, other: int, one: Ended) -> None:
        pool = self._router.pools.get(one.model)
        if (other, one.name) not in self._running or pool is None:
            return
        name = _name(other, one.name)
        with _quietly(pool):
            if one.what == "first":
                pool.fleet.first_token(name, one.now)
                return
            if one.what == "failed":
                pool.fleet.failed(name, one.now)
            else:
                pool.fleet.finished(
                    name,
                    one.now,
                    cached_tokens=one.cached,
                    output_tokens=one.output,
                    guessed=one.guessed,
                    counted=False,
                )
        self._count(*self._running.pop((other, one.name)), -1)

    def _gone(self, other: int) -> None:
        """A worker has ended: so have its requests."""
        for number, name in [key for key in self._running if key[0] == other]:
            self._ended(number, Ended(self._running[number, name][0], name, "failed", clock()))

    def _count(self, model: str, url: str, change: int) -> None:
        upstream = self._router.upstreams.get(url)
        if upstream is not None and upstream.model == model:
            upstream.elsewhere = max(upstream.elsewhere + change, 0)
            self._router.refresh(upstream)


class _Teller(FleetListener):
    """Tells the other workers what this one does with the replicas of a model."""

    def __init__(self, bus: WorkerBus, model: str) -> None:
        self._bus, self._model = bus, model

    def sent(self, name: str, query: PlacementQuery, decision: Decision, now: float) -> None:
        estimate = decision.estimate
        assert decision.replica is not None and estimate is not None
        self._bus.tell(
            "sent",
            Sent(
                self._model,
                name,
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
            ),
        )

    def first_token(self, name: str, now: float) -> None:
        self._bus.tell("ended", Ended(self._model, name, "first", now))

    def failed(self, name: str, now: float) -> None:
        self._bus.tell("ended", Ended(self._model, name, "failed", now))

    def finished(self, name: str, now: float, cached: int | None, output: int | None, guessed: bool) -> None:
        self._bus.tell("ended", Ended(self._model, name, "finished", now, cached, output, guessed))


def _name(worker: int, name: str) -> str:
    return f"{worker}:{name}"


@contextmanager
def _quietly(pool: ReplicaPool) -> Iterator[None]:
    """What another worker has told is not told again."""
    listener, pool.fleet.listener = pool.fleet.listener, None
    try:
        yield
    finally:
        pool.fleet.listener = listener
