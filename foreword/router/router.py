"""The router: adds, watches and removes replicas, and finds the pool of a model."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final, cast

import aiohttp
import zmq.asyncio

from foreword.api.dialects.answer_reader import UsageCounts
from foreword.api.dialects.decode import Limits
from foreword.api.errors import MAX_BODY_BYTES
from foreword.api.event_stream import COMMENTS
from foreword.api.front import Front, Handler
from foreword.api.quotas import Quotas
from foreword.api.request_bodies import RequestBodies
from foreword.api.routes import Routes
from foreword.api.work_queue import WorkQueue
from foreword.errors import ConfigError, NotFound, did_you_mean
from foreword.request_errors import NoReplica, ReplicaFailed, UnknownModel
from foreword.router.attempt import Attempt, DecisionLog
from foreword.router.auth import RouterAuth
from foreword.router.event_subscriber import KvEventSubscription
from foreword.router.extras import Audit, Misses, Prefixes, SpeedProbes, WarmUp, extras_for, extras_of, order_for
from foreword.router.prompts import PromptTokenizer
from foreword.router.replica_connection import ReplicaConnection, WholeRequest
from foreword.router.replica_metrics import UNKNOWN, ReplicaMetrics
from foreword.router.replica_pool import ReplicaPool, key_model, short
from foreword.router.replicas import (
    CONNECTION_ERRORS,
    AwaitedResponse,
    ProbeResult,
    ReplicaBreaker,
    ReplicaInfo,
    ReplicaProbe,
    ReplicaSpec,
    Upstream,
    clock,
    stamp_of,
)
from foreword.router.router_metrics import RouterMetrics
from foreword.router.silence import why_lost
from foreword.router.suspicious import Ask, Flight, Suspects, is_alive
from foreword.routing.cost_kinds import CostKinds
from foreword.routing.event_feed import KvEventFeed
from foreword.routing.fleet import Disaggregation, Fleet
from foreword.routing.placement import Decision, PlacementQuery
from foreword.tasks import background, shared

if TYPE_CHECKING:
    from foreword.configuration import Config
    from foreword.ledger import UsageLedger
    from foreword.observability.tracing import Tracer

logger = logging.getLogger(__name__)

# Seconds between reads of a replica's metrics.
_METRICS_SECONDS: Final = 5.0
# A stream of an unreachable replica is aborted after this time without data.
_SILENCE_SECONDS: Final = 2.0
# Shorter than the keep-alive of servers (uvicorn, and so vLLM: 5 s): the side that sends next must close idle connections.
_KEEP_ALIVE_SECONDS: Final = 4.0
_WATCHDOG_SECONDS: Final = 0.5
# Replicas are asked for a comment in a stream at least so often.
_COMMENT_SECONDS: Final = 15.0
# Between two questions for a request on which a replica is silent.
_ASK_SECONDS: Final = 2.0
# The first question comes this long before the stall timeout, so that its answer is there then; not before half of it.
_ASK_AHEAD_SECONDS: Final = 6.0
# When a replica is asked again whose weights could not be read: after this time, then twice as long each time.
_WEIGHTS_SECONDS: Final = 30.0
_MAX_WEIGHTS_SECONDS: Final = 600.0
# Larger bodies are parsed on a thread.
_INLINE_BYTES: Final = 128 << 10
# After these pauses a replica that failed a request and is alive is asked again: a process may answer until it has ended.
_INQUEST_PAUSES: Final = (0.0, 0.1, 0.3, 0.6)
# The router's event loop counts as stalled if the watchdog wakes this late.
_STALL_SECONDS: Final = 0.1
# Consecutive timeouts that are excused by a stalled event loop.
MAX_STALLS: Final = 5
_SCRUBBED_BUCKETS: Final = 256
_COST_FILE: Final = "--cost-file"
# For limits, where no replica says how long its prompts may be.
_UNKNOWN_MODEL_LEN: Final = 128 << 10


@dataclass(slots=True)
class _Watch:
    """State of the watch of one replica.

    Attributes:
        stalls: consecutive timeouts that were excused. metrics_read_at: when its metrics were read last.
        weights_due: when it is asked again for weights that could not be read, and after which `weights_pause` the next time.
    """

    stalls: int = 0
    metrics_read_at: float = 0.0
    weights_due: float = 0.0
    weights_pause: float = _WEIGHTS_SECONDS


class Router:
    """The router's state. Runs on one event loop; call `start` and `stop` there.

    Args:
        current: as for `Tenants`.

    Attributes:
        front: its HTTP front, once it serves.
        on_serving: functions that are called on the event loop when it begins to serve.
        ending: set, the process drains and ends. leave: what `http.serving` yields.
        fronts: this one, and that of the picker.
    """

    def __init__(self, config: Config, current: Callable[[bytes], bytes] = bytes) -> None:
        self.config = config.router
        self.auth = RouterAuth(config, current)
        self.upstreams: dict[str, Upstream] = {}
        self.pools: dict[str, ReplicaPool] = {}
        self.subscriptions: dict[str, list[KvEventSubscription]] = {}
        self.quotas = Quotas.parse(config.server.quotas)
        self.bodies = RequestBodies(config.server.body_timeout)
        self.work = WorkQueue(inline=_INLINE_BYTES)
        self.front: Front | None = None
        self.fronts: list[Front] = []
        self.suspects = Suspects(self._serve_waiting)
        given = config.router
        self._limits: Limits | None = None  # None: to be found anew
        self._serving = False  # `_serve_queues` is to be called
        self.origins = frozenset(config.server.allowed_origins)
        self.unknown_fields = config.server.unknown_fields
        self.order = order_for(config.server)
        self.stream_keep_alive = config.server.stream_keep_alive
        # Headers of each request to a replica, beside the client's.
        self.asked_headers = {
            "content-type": "application/json",
            "accept-encoding": "identity",
            "x-foreword-follow": "1",
            COMMENTS: f"{min(given.stall_timeout / 4, _COMMENT_SECONDS):g}",
        }
        self.server_config = config.server
        self.decisions = DecisionLog()
        self.metrics = RouterMetrics()
        self.cost_kinds = CostKinds()
        self._use_extras(config)
        self.ending, self.stopping = asyncio.Event(), asyncio.Event()
        self.leave: Callable[[], int] = lambda: 0
        # A request of a tenant that came at a time (`clock`) is, or was, on another replica than at first.
        self.on_failover: Callable[[str, float, Upstream], None] = lambda tenant, arrived, upstream: None
        self.on_placed: Callable[[str, str, str, str | None, PlacementQuery, Decision], None] = lambda *placed: None
        self.on_serving: list[Callable[[], None]] = []
        self.pool_type: Callable[..., ReplicaPool] = ReplicaPool
        self.render: Callable[[str], Any] = self.metrics.render
        self.audit = Audit()
        if given.audit_every or given.audit_reports is not None:
            self.audit = extras_for("--audit-every").audit(
                self.auth, lambda: not self.active and not self.draining, given
            )
        self._stalled_at = 0.0
        self._numbers = itertools.count()
        self._tasks: set[asyncio.Task[None]] = set()
        self._zmq: zmq.asyncio.Context | None = None

    def _use_extras(self, config: Config) -> None:
        """Raises ConfigError for a setting of extras that are not installed, or that cannot work."""
        given = config.router
        self.prefixes, self.warm_up, self.misses, self.speeds = Prefixes(), WarmUp(), Misses(), SpeedProbes()
        self._disaggregation: Disaggregation | None = None
        self.tracer: Tracer | None = None
        self.ledger: UsageLedger | None = None
        extras = extras_of(config)
        if extras is not None:
            self.prefixes = extras.prefixes(self, given.prefix_file)
            self.warm_up = extras.warm_up(self.auth, self.metrics, given.warm_seconds)
            self.misses = extras.misses(self, config.server)
            self.speeds = extras.speed_probes(given.measure_seconds)
            self._disaggregation = extras.disaggregation(given.min_prefill)
        if config.server.otlp_endpoint is not None:
            self.tracer = extras_for("--otlp-endpoint").tracer(config.server.otlp_endpoint)
        if config.server.usage_ledger is not None:
            self.ledger = extras_for("--usage-ledger").ledger(config.server.usage_ledger)

    async def start(self) -> None:
        """Raises ModelNotFound if the tokenizer cannot be loaded."""
        self.session = self._client_session(read_bufsize=1 << 18)
        self._probe_session = self._client_session()
        headers = self.auth.probe_headers()
        self.probe = ReplicaProbe(self.config, self._probe_session, headers)
        # A new connection is not judged by another one; nor is a retry, which would wait on it once more.
        self.fresh_session = self._client_session(read_bufsize=1 << 18, fresh=True)
        self._fresh_probe = ReplicaProbe(self.config, self.fresh_session, headers)
        self.prompts = PromptTokenizer(self._probe_session, headers, self.config.tokenize_timeout)
        if self.config.tokenizer is not None:
            await self.prompts.load(self.config.tokenizer, self.order)
        if self.config.cost_file is not None:  # it begins before a replica joins
            self.background(extras_for(_COST_FILE).keep_costs(self.cost_kinds, self.config.cost_file))
        self.background(self._watchdog())
        self.background(self.audit.run(self._probe_session))

    def _client_session(self, *, fresh: bool = False, **options: Any) -> aiohttp.ClientSession:
        """`fresh`: each request has a new connection."""
        reuse: dict[str, Any] = {"force_close": True} if fresh else {"keepalive_timeout": _KEEP_ALIVE_SECONDS}
        connector: Any = aiohttp.TCPConnector(limit=0, ttl_dns_cache=5, **reuse)
        connector._factory = partial(ReplicaConnection, asyncio.get_running_loop())
        return aiohttp.ClientSession(
            connector=connector,
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=self.config.connect_timeout),
            cookie_jar=aiohttp.DummyCookieJar(),
            request_class=cast(Any, partial(WholeRequest, {})),
            **options,
        )

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.session.close()
        await self._probe_session.close()
        await self.fresh_session.close()
        self.prompts.close()
        if self._zmq is not None:
            self._zmq.destroy(linger=0)
        self.misses.close()
        self.work.close()
        if self.ledger is not None:
            self.ledger.close()
        if self.tracer is not None:
            await asyncio.to_thread(self.tracer.close)

    @property
    def active(self) -> int:
        """Requests that are being answered, here or through a gateway."""
        return sum(front.active for front in self.fronts)

    @property
    def routes(self) -> Routes[Handler]:
        """The table of its front, once it serves."""
        assert self.front is not None
        return self.front.routes

    def attempt_name(self, request_id: str) -> str:
        """A unique name for an attempt: a client may use a request id twice."""
        return f"{request_id}#{next(self._numbers)}"

    # Replicas

    def add(self, spec: ReplicaSpec, source: str) -> Upstream:
        """Add a replica. Raises ConfigError for a duplicate, and for one that only prefills without the extras."""
        if spec.role == "prefill":
            extras_for(f"replica {spec.url}: role=prefill")
        if spec.url in self.upstreams:
            raise ConfigError(f"there is a replica {spec.url} already")
        breaker = ReplicaBreaker(self.config.failures)
        upstream = Upstream(spec, source, breaker, max_in_flight=self.config.max_in_flight)
        self.upstreams[spec.url] = upstream
        upstream.tasks.append(self.background(self._watch(upstream)))
        logger.info("replica %s added (from %s)", spec.url, "the configuration" if source == "flag" else source)
        return upstream

    def remove(self, url: str) -> Upstream:
        """Remove a replica. Streams from it continue to their end. Raises NotFound."""
        upstream = self.find(url)
        del self.upstreams[upstream.url]
        self._limits = None
        self._forget(upstream)
        upstream.tasks.pop().cancel()
        self.metrics.remove_replica(upstream.url)
        logger.info("replica %s removed", upstream.url)
        return upstream

    def find(self, url: str) -> Upstream:
        """Raises NotFound."""
        found = self.upstreams.get(url.rstrip("/").removesuffix("/v1"))
        if found is None:
            raise NotFound(f"There is no replica {url!r}{did_you_mean(url, self.upstreams)}")
        return found

    def drain(self, url: str, drained: bool) -> Upstream:
        """Stop sending new requests to a replica, or resume. Raises NotFound."""
        upstream = self.find(url)
        upstream.drained = drained
        self.refresh(upstream)
        logger.info("replica %s %s", upstream.url, "drained" if drained else "undrained")
        return upstream

    async def joined(self) -> None:
        """Called with the replicas, before the router listens."""

    async def changed(self, change: str, upstream: Upstream) -> Upstream:
        """An operator has changed this replica here: a router of several processes changes it in all."""
        return upstream

    def refresh(self, upstream: Upstream) -> None:
        """Apply a change of a replica's state to its pool."""
        pool = self.pool_of(upstream)
        if pool is not None:
            pool.refresh(upstream)

    def pool_of(self, upstream: Upstream) -> ReplicaPool | None:
        return self.pools.get(upstream.model or "")

    def pool(self, model: str | None) -> ReplicaPool:
        """The pool that serves a model. Raises UnknownModel, or NoReplica while no replica is ready."""
        if model and (named := self.pools.get(model)) is not None and named.upstreams:
            return named
        pools = [pool for pool in self.pools.values() if pool.upstreams]
        if not model and len(pools) == 1:
            return pools[0]
        for pool in pools:
            if model in pool.model_names():
                return pool
        if not pools:
            reasons = self._exclusions()
            raise NoReplica(f"No replica takes requests: {reasons}" if reasons else "There is no replica")
        known = sorted(name for pool in pools for name in pool.model_names())
        if not model:
            raise UnknownModel(f"Several models are served here; name one{did_you_mean('', known)}", param="model")
        raise UnknownModel(f"No model named {model!r} is served here{did_you_mean(model, known)}", param="model")

    def not_serving(self, pool: ReplicaPool, model: str | None) -> list[str]:
        """Replicas of a pool that do not serve this model or adapter."""
        if model is None or model == pool.model:
            return []
        return [url for url, one in pool.upstreams.items() if one.info and model not in one.info.models]

    def limits(self) -> Limits:
        """The limits of a body: what the longest prompt of any replica could need, and images for others than Foreword's."""
        if self._limits is None:
            found = [one.info for one in self.upstreams.values() if one.info]
            longest = max((one.max_model_len for one in found if one.max_model_len), default=_UNKNOWN_MODEL_LEN)
            images = self.server_config.max_body == "auto" and any(one.kind != "foreword" for one in found)
            text, most = self.server_config.body_limit(longest), MAX_BODY_BYTES if images else 0
            self._limits = Limits.for_model(longest, text, most)
        return self._limits

    # Results of requests

    def succeeded(self, upstream: Upstream) -> None:
        if upstream.breaker.state != "closed":
            logger.info("replica %s recovered: circuit closed", upstream.url)
        upstream.breaker.succeeded()
        upstream.recent.problems.append("")
        upstream.pause_until = 0.0

    def failed(self, upstream: Upstream, reason: str, *, certain: bool = False) -> None:
        """A request failed on the replica; `certain` failures open the circuit at once."""
        self.metrics.failure(upstream.url)
        upstream.recent.problems.append(reason)
        if upstream.breaker.failed(clock(), reason, certain=certain):
            self._log_opened(upstream, reason)
        self.refresh(upstream)

    def first_token(self, upstream: Upstream, seconds: float) -> None:
        """A stream of the replica began this long after the request came."""
        self.metrics.first_token(upstream.url, seconds)
        upstream.recent.ttft.append(seconds)

    def ended(self, attempt: Attempt, counts: UsageCounts) -> None:
        """A response of a replica is complete."""
        if counts.output is not None and counts.output > 1 and attempt.first_token_at is not None:
            seconds = (clock() - attempt.first_token_at) / (counts.output - 1)
            self.metrics.token_time(seconds)
            attempt.upstream.recent.itl.append(seconds)
        # Where another replica computed the prompt, what came from there counts as cached.
        if counts.prompt and counts.cached is not None and attempt.prefill is None:
            self.metrics.usage(attempt.upstream.url, counts.prompt, counts.cached)

    # Deaths

    def judge(self, ask: Ask, flight: Flight, replicas: Sequence[Upstream], tokens: int = 0) -> asyncio.Future[None]:
        """Find out whether replicas have died at an attempt that failed, after the client had these tokens of it. The result is
        there once each was asked, which is at once; those that are alive are asked again a few times in the background."""
        flight.judged = True
        asked: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.background(self._judge(ask, flight, replicas, tokens, asked))
        return asked

    async def _judge(
        self, ask: Ask, flight: Flight, replicas: Sequence[Upstream], tokens: int, asked: asyncio.Future[None]
    ) -> None:
        try:
            for pause in _INQUEST_PAUSES:
                await asyncio.sleep(pause)
                dead = [one for one in replicas if await self.is_dead(one)]
                for one in dead:
                    ask.died(one, tokens)
                if dead:
                    return
                if not asked.done():
                    asked.set_result(None)
            for one in replicas:
                if await self._fresh_probe.has_restarted(one):
                    self.died(one, "its process is another one")
                    ask.died(one, tokens)
        finally:
            flight.release()
            if not asked.done():
                asked.set_result(None)

    async def is_dead(self, upstream: Upstream) -> bool:
        """Whether a replica is dead by now: it is asked over a new connection, once for all that want to know."""
        if not upstream.dead:
            if upstream.inquest is None:
                upstream.inquest = shared(self._examine(upstream))
            problem = await asyncio.shield(upstream.inquest)
            if problem:
                self.died(upstream, problem)
        return upstream.dead

    async def _examine(self, upstream: Upstream) -> str:
        try:
            for _ in range(MAX_STALLS):
                began = clock()
                problem = await self._fresh_probe.death(upstream)
                in_time = clock() - began < self.config.health_timeout
                if not problem or in_time or not await self.stalled_since(began):
                    break
            return problem
        finally:
            upstream.inquest = None

    def died(self, upstream: Upstream, reason: str) -> None:
        """A replica's process has ended, or says that its engine has."""
        if upstream.dead:
            return
        upstream.dead, upstream.died_at = True, clock()
        upstream.deaths += 1
        upstream.crowd = self.suspects.crowd(upstream.url)
        self.metrics.died(upstream.url)
        logger.warning("replica %s died: %s", upstream.url, reason)
        self.failed(upstream, reason, certain=True)

    def _serve_waiting(self) -> None:
        """Requests may be free to be placed. What begins to wait later finds that itself."""
        if not self._serving and any(pool.waiting for pool in self.pools.values()):
            self._serving = True
            # Not from within a change of a pool, which is not complete yet; once for all that ends in one turn of the loop.
            asyncio.get_running_loop().call_soon(self._serve_queues)

    def _serve_queues(self) -> None:
        self._serving = False
        for pool in self.pools.values():
            if pool.waiting:
                pool.serve_queue()

    def paused(self, upstream: Upstream, seconds: float) -> None:
        """The replica replied that it is overloaded."""
        upstream.pause_until = clock() + seconds
        self.refresh(upstream)

    def _log_opened(self, upstream: Upstream, reason: str) -> None:
        logger.warning("replica %s: circuit opened: %s", upstream.url, reason)

    # Health

    async def _watch(self, upstream: Upstream) -> None:
        watch = _Watch()
        while True:
            upstream.wake.clear()
            if upstream.breaker.due(clock()):
                try:
                    again = await self._look(upstream, watch)
                except Exception as error:  # what one replica answers ends neither its watch nor that of others
                    logger.exception("watching %s failed", upstream.url)
                    self.metrics.unexpected(error)
                    again = False
                if again:
                    continue
            learned = upstream.info is not None and not upstream.unconfirmed
            interval = self.config.health_interval
            with suppress(TimeoutError):
                await asyncio.wait_for(upstream.wake.wait(), interval if learned else min(interval, 0.5))

    async def _look(self, upstream: Upstream, watch: _Watch) -> bool:
        """Probe a replica, and ask it what it serves if that is not known. Whether to do it again at once, because the router's
        event loop stalled."""
        now, was_open = clock(), upstream.breaker.state == "open"
        # A replica that has died must answer new connections.
        result = await (self._fresh_probe if upstream.dead else self.probe).health(upstream)
        # A busy server that sends tokens meanwhile is alive.
        if result.timed_out and (upstream.sends_since(now) or await self.stalled_since(now)):
            watch.stalls += 1
            if watch.stalls <= MAX_STALLS:
                return True
        watch.stalls = 0
        # It may have other weights than before it was away.
        upstream.unconfirmed |= was_open and result.problem is None
        if result.problem is None and now > upstream.died_at:
            upstream.dead = False
        self._probed(upstream, result)
        if result.problem is not None:
            return False
        retries = upstream.kind == "vllm" and upstream.weights is None and now >= watch.weights_due
        # It has published its fingerprint since it was asked for it.
        news = upstream.info is not None and not upstream.info.published and upstream.metrics.fingerprint is not None
        if upstream.info is None or upstream.unconfirmed or retries or news:
            await self._learn(upstream)
            watch.weights_pause = min(watch.weights_pause * 2, _MAX_WEIGHTS_SECONDS) if retries else _WEIGHTS_SECONDS
            watch.weights_due = clock() + watch.weights_pause
        if now - watch.metrics_read_at >= _METRICS_SECONDS:
            watch.metrics_read_at = now
            await self._read_metrics(upstream)
        return False

    async def stalled_since(self, since: float) -> bool:
        """Whether the router's event loop stalled. Then a timeout says nothing about the replica."""
        await asyncio.sleep(_STALL_SECONDS)  # lets a due run of the watchdog happen first
        return self._stalled_at >= since

    def _probed(self, upstream: Upstream, result: ProbeResult) -> None:
        problem, breaker = result.problem, upstream.breaker
        upstream.problem, upstream.unreachable = problem or upstream.problem, result.unreachable
        if breaker.probed(clock(), problem, certain=result.certain):
            self._log_opened(upstream, problem or "")
        if result.unreachable:
            upstream.metrics = UNKNOWN
        self.refresh(upstream)

    async def _learn(self, upstream: Upstream) -> None:
        """Ask a replica that answers, for the first time or again, what it serves, and add it to the pool of its model."""
        try:
            info = await self.probe.info(upstream)
        except ReplicaFailed as error:
            upstream.problem = error.message
            return
        if upstream.url not in self.upstreams:
            return
        if upstream.unconfirmed and upstream.info is not None and upstream.info.is_process_of(info):
            upstream.info, upstream.unconfirmed = info, False
            self.refresh(upstream)
            logger.info("replica %s is back, and has what it had: its process is the same", upstream.url)
            return
        model, joins = info.models[0], upstream.info is None or upstream.unconfirmed
        unmeasured = joins and self.speeds.measures(info)
        if joins or model != upstream.model:
            self._forget(upstream)
            upstream.measured = None
            # It gets requests after this: they may name prefixes that it has lost.
            await self.prefixes.prepare(upstream.url, info)
            # Otherwise requests wait for it.
            if any(one is not upstream and one.model == model for one in self.healthy()):
                upstream.problem = "it loads the prefixes that are used most"
                await self.warm_up.warm(self.session, upstream.url, info)
                if self.speeds.measures(info):
                    unmeasured = await self.speeds.measure_before(self.probe, upstream, info)
        elif info.weights is None:
            return  # it was asked again for them
        self._unsubscribe(upstream)
        upstream.info, upstream.unconfirmed, self._limits = info, False, None
        upstream.isolation_problem = self._isolation_problem(info)
        pool = self.pools.get(model)
        if pool is None:
            pool = self.pools[model] = self.pool_type(
                model, self.config, self.auth.weights, self.cost_kinds, self._disaggregation
            )
            self.misses.follow(pool.fleet)
        self._subscribe(upstream, pool)
        pool.add(upstream)
        if unmeasured:
            self.background(self.speeds.measure_idle(self.probe, upstream, lambda: self._fleet_of(upstream, info)))
        events = ", sends KV events" if upstream.url in self.subscriptions else ""
        weights = f", weights {short(info.weights)}" if info.weights is not None else ""
        logger.info("replica %s serves %s (%s%s)%s", upstream.url, model, info.kind, weights, events)
        if info.weights is None and info.kind != "openai":
            logger.warning(
                "replica %s: which weights it has is not known, so no other replica can continue its responses: %s",
                upstream.url, info.unknown_because,
            )  # fmt: skip
        if upstream.isolation_problem:
            logger.error("replica %s takes no requests: %s", upstream.url, upstream.isolation_problem)

    def _fleet_of(self, upstream: Upstream, info: ReplicaInfo) -> Fleet | None:
        """The fleet of a replica that has not left or joined again since it said this about itself."""
        pool = self.pool_of(upstream)
        same = upstream.info is info and pool is not None and pool.upstreams.get(upstream.url) is upstream
        return pool.fleet if same and pool is not None else None

    def _isolation_problem(self, info: ReplicaInfo) -> str:
        """Why a replica would let tenants share blocks; empty if it would not."""
        if not self.auth.has_tenants or info.kind != "foreword":
            return ""
        expected = "router" if self.auth.uses_own_key else "key"
        if info.salt_from == expected:
            return ""
        if expected == "router":
            return "it does not accept tenants' salts from this router: start it with --router-key, the router's --replica-key"
        return "it does not separate tenants: give it the same API keys, or a --router-key"

    def _subscribe(self, upstream: Upstream, pool: ReplicaPool) -> None:
        info = upstream.info
        if info is None or not info.event_sources:
            return
        if info.block_size is None:
            logger.warning("KV events of %s are ignored: its /metrics do not contain its block size", upstream.url)
            return
        if self._zmq is None:
            self._zmq = zmq.asyncio.Context()
        counts = info.kind == "vllm"
        for endpoint, replay, curve in info.event_sources:
            key = self.auth.replica_key if curve else None
            if curve and key is None:
                logger.warning(
                    "KV events of %s take its --router-key, which this router does not have (--replica-key)",
                    upstream.url,
                )
                return
            feed = KvEventFeed(
                pool.fleet.directory,
                upstream.url,
                key_model(pool.model, info.weights).encode(),
                info.block_size,
                counts_copies=counts,
                on_doubt=pool.known.interrupted,
            )
            subscription = KvEventSubscription(self._zmq, feed, endpoint, replay, key)
            self.subscriptions.setdefault(upstream.url, []).append(subscription)
            upstream.tasks.append(self.background(subscription.run()))

    def _forget(self, upstream: Upstream) -> None:
        """Remove a replica from its pool, with its subscriptions and all that is known of its blocks."""
        pool = self.pool_of(upstream)
        if pool is not None:
            pool.remove(upstream)
        self._unsubscribe(upstream)

    def _unsubscribe(self, upstream: Upstream) -> None:
        self.subscriptions.pop(upstream.url, None)
        while len(upstream.tasks) > 1:
            upstream.tasks.pop().cancel()

    async def _read_metrics(self, upstream: Upstream) -> None:
        """Read how much memory the replica uses, how many requests of other routers and clients it has, and whether its weights
        are those that are known."""
        if upstream.kind == "openai":
            return
        try:
            upstream.metrics = await self.probe.metrics(upstream)
        except CONNECTION_ERRORS:
            upstream.metrics = UNKNOWN
        self._compare(upstream, upstream.metrics)
        found = upstream.metrics.requests
        pool = self.pool_of(upstream)
        replica = pool.fleet.replicas.get(upstream.url) if pool else None
        if found is not None and replica is not None:
            replica.reported_running = max(found - upstream.in_flight, 0)

    # Weights

    def _compare(self, upstream: Upstream, found: ReplicaMetrics) -> None:
        """Ask the replica again what it serves if its metrics are those of another process, or of other weights."""
        info = upstream.info
        if info is None or upstream.unconfirmed:
            return
        if None not in (found.started, info.started) and found.started != info.started:
            self._unconfirm(upstream, "its process is another one")
        elif found.fingerprint not in (None, info.weights) and info.published:
            self._unconfirm(upstream, "it publishes another fingerprint")

    def _unconfirm(self, upstream: Upstream, why: str) -> None:
        """Send nothing to a replica before it was asked again what it serves."""
        logger.warning("replica %s is asked again what it serves: %s", upstream.url, why)
        upstream.unconfirmed = True
        upstream.wake.set()
        self.refresh(upstream)

    def stamped(self, upstream: Upstream, stamp: str | None) -> None:
        """A response of the replica began with this `system_fingerprint`."""
        if (
            upstream.kind == "foreword"
            and upstream.weights is not None
            and stamp not in (None, stamp_of(upstream.weights))
        ):
            self._unconfirm(upstream, "a response of it names other weights")

    async def confirm(self, upstream: Upstream, weights: str) -> None:
        """Read a replica's weights again, once it has begun to continue a response that these weights began. Raises
        ReplicaFailed if it has others, or if that cannot be read.

        Responses of Foreword's servers name their weights themselves.
        """
        if upstream.kind != "foreword":
            if upstream.next_reading is None:
                upstream.next_reading = shared(self._read_weights(upstream))
            try:
                await asyncio.shield(upstream.next_reading)
            except CONNECTION_ERRORS as error:
                raise ReplicaFailed(f"its weights could not be read again ({type(error).__name__})") from None
        if upstream.weights != weights:
            raise ReplicaFailed("it has other weights than those that began the response")

    async def _read_weights(self, upstream: Upstream) -> None:
        """Read the weights once for all that asked before it began. Raises what aiohttp raises, and ReplicaFailed."""
        async with upstream.reading:
            upstream.next_reading = None
            info = upstream.info
            if info is None or info.weights is None or upstream.unconfirmed:
                return
            found = await self.probe.metrics(upstream)
            self._compare(upstream, found)
            if found.fingerprint is None and None in (found.started, info.started):
                name = await self.probe.name_by_logprobs(upstream, info.models[0], info.max_model_len)
                if name != info.weights:
                    self._unconfirm(upstream, "it computes other log-probabilities")

    async def _watchdog(self) -> None:
        """Aborts stalled streams, notices a stalled event loop, and scrubs the directories."""
        while True:
            due = clock() + _WATCHDOG_SECONDS
            await asyncio.sleep(_WATCHDOG_SECONDS)
            now = clock()
            if now > due + _STALL_SECONDS:
                self._stalled_at = now
            for upstream in list(self.upstreams.values()):
                self._abort_stalled(upstream, now)
            for pool in self.pools.values():
                pool.fleet.directory.scrub(_SCRUBBED_BUCKETS)
                pool.report_weights()
            self.suspects.forget_old(now)

    def _abort_stalled(self, upstream: Upstream, now: float) -> None:
        down, limit = upstream.unreachable and upstream.breaker.state == "open", self.config.stall_timeout
        for response in list(upstream.awaited):
            silent = now - response.last
            if down and silent > _SILENCE_SECONDS:
                response.abort(f"{upstream.url} is down: {upstream.breaker.reason}")
            elif response.begun:
                if silent > limit:
                    response.abort(f"{upstream.url} sent nothing for {silent:.0f} s")
            elif silent > limit and response.is_lost:
                response.abort(f"{upstream.url} sent nothing for {silent:.0f} s: {response.why_lost}", lost=True)
            elif silent > max(limit - _ASK_AHEAD_SECONDS, limit / 2):
                if not response.asked and now - response.asked_at > _ASK_SECONDS:
                    response.asked = True
                    self.background(self._ask_for(upstream, response))
                if now - max(response.last, upstream.alive_at) > limit and not upstream.checked:
                    upstream.checked = True
                    self.background(self._check_alive(upstream))

    async def _ask_for(self, upstream: Upstream, response: AwaitedResponse) -> None:
        """Find out whether a replica that is silent on a request has it, whatever it answers to others. Its answer is used once
        the stall timeout has passed."""
        last = response.last
        try:
            response.why_lost = await why_lost(self.fresh_session, upstream, response)
            response.judged_at = last
        finally:
            response.asked, response.asked_at = False, clock()
        self._abort_stalled(upstream, clock())

    async def _check_alive(self, upstream: Upstream) -> None:
        """Find out whether a replica hangs that has long been silent on a request without a first token."""
        sent, seconds = clock(), self.config.stall_timeout
        try:
            alive = await is_alive(self._fresh_probe, upstream, seconds)
        finally:
            upstream.checked = False
        if alive or upstream.sends_since(sent):
            upstream.alive_at = clock()
            return
        reason = f"{upstream.url} answers neither requests nor a test request within {seconds:g} s"
        self.died(upstream, reason)
        for response in list(upstream.awaited):
            if not response.begun and response.last <= sent:
                response.abort(reason)

    # State

    @property
    def draining(self) -> bool:
        """No new requests are taken."""
        return self.stopping.is_set()

    def ready(self) -> str | None:
        """Why no request would be taken now; None if one would."""
        if self.draining:
            return "the router is shutting down"
        if any(not one.excluded(clock()) for one in self.upstreams.values() if one.spec.role != "prefill"):
            return None
        reasons = self._exclusions()
        return f"no replica takes requests: {reasons}" if reasons else "there is no replica"

    def _exclusions(self) -> str:
        return "; ".join(f"{one.url}: {one.excluded(clock())}" for one in self.upstreams.values())

    def retry_after(self) -> float:
        """A value for Retry-After in seconds."""
        return max((pool.queue.retry_after(clock()) for pool in self.pools.values() if len(pool.queue)), default=1.0)

    def healthy(self) -> list[Upstream]:
        """Replicas that take requests, the least loaded first."""
        able = [one for one in self.upstreams.values() if not one.excluded(clock())]
        return sorted(able, key=lambda one: (one.spec.role == "prefill", one.in_flight, one.url))

    def background(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """A background task, kept until it ends."""
        task = background(work, "a background task of the router")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task
