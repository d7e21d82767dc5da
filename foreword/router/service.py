"""The router's parts together: replicas come, are watched, and go; requests are placed in the pool of their model."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
from collections.abc import Coroutine, Sequence
from typing import Any, Final

import aiohttp
import zmq.asyncio

from foreword.config import Config
from foreword.errors import ConfigError, NoReplica, NotFound, ReplicaFailed, UnknownModel, did_you_mean
from foreword.router.auth import Callers
from foreword.router.breaker import ReplicaBreaker
from foreword.router.decisions import Decisions
from foreword.router.events import Subscription
from foreword.router.metrics import RouterMetrics
from foreword.router.pool import Pool
from foreword.router.prompts import Prompts
from foreword.router.recording import open_recorder, record_finished
from foreword.router.replicas import LOST, Health, Probe, Spec, Upstream, clock
from foreword.routing.event_feed import KvEventFeed

logger = logging.getLogger(__name__)

# Seconds between looks at a replica's own count of requests.
_LOAD_SECONDS: Final = 5.0
# A stream of a replica that is found dead is ended once nothing came for so long.
_QUIET_SECONDS: Final = 2.0
# Less than servers keep an idle connection (uvicorn, and so vLLM: 5 s): who sends next must be the one who closes.
_IDLE_SECONDS: Final = 4.0
_TICK_SECONDS: Final = 0.5
# The loop itself was held up if it came so much later to something than it should have.
_HELD_UP_SECONDS: Final = 0.1
# In a row; after that it counts anyway.
HELD_UP_TIMES: Final = 5
_SCRUBBED: Final = 256


class Router:
    """Everything runs on one event loop. `start` and `stop` it there."""

    def __init__(self, config: Config) -> None:
        self.config = config.router
        self.callers = Callers(config)
        self.upstreams: dict[str, Upstream] = {}
        self.pools: dict[str, Pool] = {}
        self.feeds: dict[str, list[Subscription]] = {}
        self.decisions = Decisions(config.router.decisions)
        self.metrics = RouterMetrics(self)
        self.recorder = open_recorder(config.server)
        self.draining = False
        self.inside = 0
        self._held_up = 0.0
        self._numbers = itertools.count()
        self._tasks: list[asyncio.Task[None]] = []
        self._going: set[asyncio.Task[None]] = set()
        self._zmq: zmq.asyncio.Context | None = None

    async def start(self) -> None:
        """Raises ModelNotFound if the tokenizer cannot be loaded."""
        connect = aiohttp.ClientTimeout(total=None, sock_connect=self.config.connect_timeout)
        self.session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_IDLE_SECONDS, ttl_dns_cache=5),
            timeout=connect,
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,
            read_bufsize=1 << 18,
        )
        self._asking = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_IDLE_SECONDS, ttl_dns_cache=5),
            timeout=connect,
            cookie_jar=aiohttp.DummyCookieJar(),
        )
        headers = self.callers.own_headers()
        self.probe = Probe(self.config, self._asking, headers)
        self.prompts = Prompts(self._asking, headers, self.config.tokenize_timeout)
        if self.config.tokenizer is not None:
            await self.prompts.load(self.config.tokenizer)
        self._tasks.append(_task(self._tick()))

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        for upstream in list(self.upstreams.values()):
            self._stop_watching(upstream)
        await asyncio.gather(*self._tasks, *self._going, return_exceptions=True)
        await self.session.close()
        await self._asking.close()
        self.prompts.close()
        if self._zmq is not None:
            self._zmq.destroy(linger=0)
        if self.recorder is not None:
            self.recorder.close()

    def request_name(self, request_id: str) -> str:
        """A name of its own for each attempt: a client may send one id twice."""
        return f"{request_id}#{next(self._numbers)}"

    # Replicas

    def add(self, spec: Spec, source: str) -> Upstream:
        """A replica comes. Raises ConfigError if it is there already."""
        if spec.url in self.upstreams:
            raise ConfigError(f"there is a replica {spec.url} already")
        upstream = Upstream(spec, source, ReplicaBreaker(self.config.failures), most=self.config.max_in_flight)
        self.upstreams[spec.url] = upstream
        upstream.tasks.append(_task(self._watch(upstream)))
        logger.info("replica %s comes (%s)", spec.url, source)
        return upstream

    def remove(self, url: str) -> Upstream:
        """A replica goes; streams that come from there go on to their end. Raises NotFound."""
        upstream = self.find(url)
        del self.upstreams[upstream.url]
        self._leave(upstream)
        self._stop_watching(upstream)
        self.metrics.forget(upstream.url)
        logger.info("replica %s goes", upstream.url)
        return upstream

    def find(self, url: str) -> Upstream:
        """Raises NotFound."""
        found = self.upstreams.get(url.rstrip("/").removesuffix("/v1"))
        if found is None:
            raise NotFound(f"There is no replica {url!r}{did_you_mean(url, self.upstreams)}")
        return found

    def drain(self, url: str, drained: bool) -> Upstream:
        """A replica takes no new requests, or takes them again. Raises NotFound."""
        upstream = self.find(url)
        upstream.drained = drained
        self.refresh(upstream)
        logger.info("replica %s %s", upstream.url, "is drained" if drained else "takes requests again")
        return upstream

    def refresh(self, upstream: Upstream) -> None:
        pool = self.pools.get(upstream.model or "")
        if pool is not None:
            pool.refresh(upstream)

    def pool(self, model: str | None) -> Pool:
        """The pool that serves a model. Raises UnknownModel, or NoReplica while no replica has answered."""
        pools = [pool for pool in self.pools.values() if pool.upstreams]
        if model is None and len(pools) == 1:
            return pools[0]
        if model is not None and model in self.pools and self.pools[model].upstreams:
            return self.pools[model]
        for pool in pools:
            if model in pool.names():
                return pool
        if not pools:
            reasons = "; ".join(f"{one.url}: {one.excluded(clock())}" for one in self.upstreams.values())
            raise NoReplica(f"No replica is ready: {reasons}" if reasons else "There is no replica")
        known = sorted(name for pool in pools for name in pool.names())
        if model is None:
            raise UnknownModel(f"Several models are served here; name one{did_you_mean('', known)}", param="model")
        raise UnknownModel(f"No model named {model!r} is served here{did_you_mean(model, known)}", param="model")

    def elsewhere(self, pool: Pool, model: str | None) -> list[str]:
        """Replicas of a pool that do not serve this model, an adapter perhaps."""
        if model is None or model == pool.model:
            return []
        return [url for url, one in pool.upstreams.items() if one.facts and model not in one.facts.models]

    # What requests tell of replicas

    def succeeded(self, upstream: Upstream) -> None:
        if upstream.breaker.state != "closed":
            logger.info("replica %s is well again", upstream.url)
        upstream.breaker.succeeded()
        upstream.pause_until = 0.0

    def failed(self, upstream: Upstream, reason: str, *, certain: bool = False) -> None:
        """A request failed there."""
        self.metrics.failure(upstream)
        if upstream.breaker.failed(clock(), reason, certain=certain):
            self._opened(upstream, reason)
        self.refresh(upstream)

    def paused(self, upstream: Upstream, seconds: float) -> None:
        """A replica said that it has too much to do."""
        upstream.pause_until = clock() + seconds
        self.refresh(upstream)

    def _opened(self, upstream: Upstream, reason: str) -> None:
        logger.warning("replica %s is left alone: %s", upstream.url, reason)
        self.refresh(upstream)

    # Watching

    async def _watch(self, upstream: Upstream) -> None:
        looked, excused = 0.0, 0
        while True:
            now = clock()
            if upstream.breaker.due(now):
                was_open = upstream.breaker.state == "open"
                health = await self.probe.health(upstream)
                if health.late and await self.was_held_up(now) and (excused := excused + 1) <= HELD_UP_TIMES:
                    continue
                excused = 0
                self._note_health(upstream, health)
                if health.problem is None and (upstream.facts is None or was_open):
                    await self._learn(upstream)
                if health.problem is None and now - looked >= _LOAD_SECONDS:
                    looked = now
                    await self._note_load(upstream)
            await asyncio.sleep(self._pause(upstream))

    async def was_held_up(self, since: float) -> bool:
        """Whether this process had too much to do, or too little of a core: then an answer that did not come in time says
        nothing of the replica."""
        await asyncio.sleep(_HELD_UP_SECONDS)  # a tick that was due by now has come
        return self._held_up >= since

    def _pause(self, upstream: Upstream) -> float:
        return min(self.config.health_interval, 0.5) if upstream.facts is None else self.config.health_interval

    def _note_health(self, upstream: Upstream, health: Health) -> None:
        problem, breaker = health.problem, upstream.breaker
        upstream.problem, upstream.dead = problem or upstream.problem, health.dead
        if problem is not None and health.certain and breaker.state != "open":
            if breaker.failed(clock(), problem, certain=True):
                self._opened(upstream, problem)
        elif breaker.probed(clock(), problem):
            self._opened(upstream, problem or "")
        self.refresh(upstream)

    async def _learn(self, upstream: Upstream) -> None:
        """A replica answers, for the first time or again: what is it now?"""
        try:
            facts = await self.probe.facts(upstream)
        except ReplicaFailed as error:
            upstream.problem = error.message
            return
        if upstream.url not in self.upstreams:
            return
        self._leave(upstream)
        upstream.facts = facts
        upstream.apart = self._apart(upstream)
        model = facts.models[0]
        pool = self.pools.get(model)
        if pool is None:
            pool = self.pools[model] = Pool(model, self.config, self.callers.weights)
            if self.recorder is not None:
                pool.fleet.on_finished = record_finished(self.recorder)
        self._subscribe(upstream, pool)
        pool.add(upstream)
        events = ", sends KV events" if upstream.url in self.feeds else ""
        logger.info("replica %s serves %s (%s)%s", upstream.url, model, facts.kind, events)
        if upstream.apart:
            logger.error("replica %s takes no requests: %s", upstream.url, upstream.apart)

    def _apart(self, upstream: Upstream) -> str:
        """Why a replica would let tenants share what they must not; empty if it would not."""
        if not self.callers.apart or upstream.kind != "foreword":
            return ""
        said = upstream.facts.salt_from if upstream.facts else None
        wanted = "router" if self.callers.speaks_for_others else "key"
        if said == wanted:
            return ""
        if wanted == "router":
            return "it does not take tenants' salts from this router: start it with --router-key, the router's --replica-key"
        return "it does not tell tenants apart: give it the same API keys, or a --router-key"

    def _subscribe(self, upstream: Upstream, pool: Pool) -> None:
        facts = upstream.facts
        if facts is None or not facts.sources:
            return
        if facts.block_size is None:
            logger.warning("KV events of %s are not read: its /metrics do not say its block size", upstream.url)
            return
        if self._zmq is None:
            self._zmq = zmq.asyncio.Context()
        counts = facts.kind == "vllm"
        for endpoint, replay in facts.sources:
            feed = KvEventFeed(
                pool.fleet.directory, upstream.url, pool.model.encode(), facts.block_size, counts_copies=counts
            )
            subscription = Subscription(self._zmq, feed, endpoint, replay)
            self.feeds.setdefault(upstream.url, []).append(subscription)
            upstream.tasks.append(_task(subscription.run()))

    def _leave(self, upstream: Upstream) -> None:
        """Out of its pool, and all that was known of what it holds."""
        pool = self.pools.get(upstream.model or "")
        if pool is not None:
            pool.remove(upstream)
        self.feeds.pop(upstream.url, None)
        for task in upstream.tasks[1:]:
            task.cancel()
            self._going.add(task)
            task.add_done_callback(self._going.discard)
        del upstream.tasks[1:]

    def _stop_watching(self, upstream: Upstream) -> None:
        for task in upstream.tasks:
            task.cancel()
            self._going.add(task)
            task.add_done_callback(self._going.discard)
        upstream.tasks.clear()

    async def _note_load(self, upstream: Upstream) -> None:
        """What runs there beyond what was sent from here: of other routers, or of those who call it directly."""
        if upstream.kind == "openai":
            return
        with contextlib.suppress(*LOST):
            found = await self.probe.load(upstream)
            pool = self.pools.get(upstream.model or "")
            replica = pool.fleet.replicas.get(upstream.url) if pool else None
            if found is not None and replica is not None:
                replica.reported_running = max(sum(found) - upstream.in_flight, 0)

    async def _tick(self) -> None:
        """Streams that stand still, and what is left of replicas that are gone."""
        while True:
            due = clock() + _TICK_SECONDS
            await asyncio.sleep(_TICK_SECONDS)
            now = clock()
            if now > due + _HELD_UP_SECONDS:
                self._held_up = now
            for upstream in list(self.upstreams.values()):
                limit = self.config.stall_timeout
                dead = upstream.dead and upstream.breaker.state == "open"
                for live in list(upstream.lives):
                    quiet = now - live.last
                    if dead and quiet > _QUIET_SECONDS:
                        live.abort(f"{upstream.url} does not live any more: {upstream.breaker.reason}")
                    elif live.begun and quiet > limit:
                        live.abort(f"{upstream.url} sent nothing for {quiet:.0f} s")
            for pool in self.pools.values():
                pool.fleet.directory.scrub(_SCRUBBED)

    # State

    def ready(self) -> str | None:
        """Why no request would be taken now, if so."""
        if self.draining:
            return "the router is shutting down"
        if any(not one.excluded(clock()) for one in self.upstreams.values() if one.spec.role != "prefill"):
            return None
        reasons = "; ".join(f"{one.url}: {one.excluded(clock())}" for one in self.upstreams.values())
        return f"no replica takes requests: {reasons}" if reasons else "there is no replica"

    def retry_after(self) -> float:
        """Seconds after which trying again makes sense."""
        return max((pool.queue.retry_after(clock()) for pool in self.pools.values() if len(pool.queue)), default=1.0)

    def healthy(self) -> Sequence[Upstream]:
        """Replicas that take requests, the one with least to do first."""
        able = [one for one in self.upstreams.values() if not one.excluded(clock())]
        return sorted(able, key=lambda one: (one.spec.role == "prefill", one.in_flight, one.url))


def _task(work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
    """A task whose failure is seen: a defect, but the other replicas go on."""
    task = asyncio.create_task(work)
    task.add_done_callback(_complain)
    return task


def _complain(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        logger.error("a task of the router failed", exc_info=error)
