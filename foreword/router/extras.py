"""Interface of the router's extras, `foreword.router_extras`, a package of its own.

Some are imported when a setting needs them: the endpoint picker for gateways, watches of replicas in files, DNS or Kubernetes,
the audit of hits, traces, recordings of the traffic, the usage ledger, a file of learned costs, the order of prompts, a
tokenizer. The rest is used where the package is installed: Responses and Messages, named prefixes, cache control, erasures, the
dashboard, causes of misses, disaggregated prefill, the warm-up and the measurement of replicas that join. The classes here are
what a router does without them.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Coroutine, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import fields
from typing import TYPE_CHECKING, Any, Final

import aiohttp
from msgspec import Struct

from foreword.api.dialects.answer_reader import UsageCounts
from foreword.api.dialects.dialect import Dialect
from foreword.api.errors import ErrorResponse
from foreword.api.front import Call, Handler
from foreword.api.request import GenerateRequest
from foreword.api.rights import Tenant
from foreword.api.routes import NO_BODY, Meter, Right, Routes
from foreword.errors import BadRequest, ConfigError, ForewordError, NotFound
from foreword.plugins import of_product
from foreword.process_config import RouterConfig, ServerConfig
from foreword.router.auth import RouterAuth
from foreword.router.replicas import ReplicaInfo, ReplicaProbe, ReplicaSpec, Upstream
from foreword.router.router_metrics import RouterMetrics

if TYPE_CHECKING:
    from foreword.api.misses.causes import Miss
    from foreword.configuration import Config
    from foreword.ledger import UsageLedger
    from foreword.observability.tracing import Tracer
    from foreword.router.attempt import Attempt
    from foreword.router.proxied_request import ProxiedRequest
    from foreword.router.replica_pool import ReplicaPool
    from foreword.router.router import Router
    from foreword.routing.cost_kinds import CostKinds
    from foreword.routing.fleet import Disaggregation, Fleet
    from foreword.tokens.tokenizer import Tokenizer

# Makes the replicas from a source, named second, equal to those given first. The URLs given last get no requests.
ApplyReplicas = Callable[[list[ReplicaSpec], str, Collection[str]], None]

_EXTRAS: Final = "foreword.router_extras:EXTRAS"
_MISSING: Final = "needs the package foreword-route-extras beside foreword-route"
# Paths that the extras serve.
_ROOTS: Final = (
    "/ui", "/v1/cache", "/v1/messages", "/v1/prefixes", "/v1/public/prefixes", "/v1/responses", "/v1/sessions",
)  # fmt: skip
# Settings of the extras. A number of 0 turns off what a router without them does not have.
_SETTINGS: Final = {
    "audit_every", "audit_reports", "cost_file", "measure_seconds", "min_prefill", "otlp_endpoint", "picker", "prefix_file",
    "record", "response_memory", "usage_ledger", "warm_seconds", "workers",
}  # fmt: skip
_PATHS: Final = ("/", *_ROOTS, *(f"{root}/{{name:path}}" for root in _ROOTS))


class Audit:
    """The audit of hits, here of a router without one: no request is repeated, and no salt is changed. Runs on the event loop.

    Attributes:
        results: audits by result: `equal`, `different`, `skipped` (no hit any more, or the replica did not answer) or `failed`
            (an error of the audit).
    """

    def __init__(self) -> None:
        self.results = {"equal": 0, "different": 0, "skipped": 0, "failed": 0}

    @property
    def quarantined(self) -> int:
        """The number of tenants whose cached KV was found to be wrong."""
        return 0

    def salts_of(self, tenant: bytes, cache_salt: str | None) -> Sequence[str | None]:
        """Salts that requests of a tenant (its salt) with this `cache_salt` have had in its place: first itself, and from now
        on the last."""
        return (cache_salt,)

    def finished(
        self, request: GenerateRequest, tenant: Tenant, cache_salt: str | None, upstream: Upstream, counts: UsageCounts
    ) -> None:
        """A request has ended; it had this `cache_salt`."""

    async def run(self, session: aiohttp.ClientSession) -> None:
        """Audit until cancelled."""


class Prefixes:
    """Named prefixes, here of a router without them: Foreword's servers know their own, and other servers get no names. Runs on
    the event loop."""

    async def prepare(self, url: str, info: ReplicaInfo) -> None:
        """Bring a replica that joins or has restarted up to date."""

    def expanded(self, pool: ReplicaPool, tenant: Tenant, request: GenerateRequest) -> GenerateRequest:
        """The request with the prefix itself in place of its name, if a replica of the pool does not know names.

        Raises UnknownPrefix and BadRequest.
        """
        if request.prefix is None or pool.kind == "foreword":
            return request
        raise BadRequest(f"prefix: a name in front of other servers than Foreword's {_MISSING}", param="prefix")

    def check(self, tenant: Tenant, request: GenerateRequest) -> None:
        """Raises UnknownPrefix for a name that the tenant has not registered, and BadRequest for text before messages, where
        that is known here."""

    async def repair(self, upstream: Upstream, tenant: Tenant, name: str) -> bool:
        """Register a prefix at a Foreword server that does not know it. Whether it knows it now."""
        return False


class Order:
    """The order of prompts, here of a router that leaves them as they are. Runs on any thread."""

    def __bool__(self) -> bool:
        """Whether it changes any."""
        return False

    def check(self, tokenizer: Tokenizer) -> None:
        """Raises ConfigError if the model's template cannot show a prompt in this order."""

    def arranged(self, request: GenerateRequest, model: str) -> GenerateRequest:
        """A chat with its messages and tools in this order, in its body too: what replicas render and the router tokenizes.
        `model`: that of a request which names none."""
        return request


class WarmUp:
    """Recent prompts, and the prefetches of replicas that join; here of a router without them. Runs on the event loop."""

    def record(self, tenant: Tenant, model: str | None, cache_salt: str | None, tokens: Sequence[int]) -> None:
        """Note a prompt: of a session only the first."""

    def forget(self, tenant: str, cache_salts: Collection[str]) -> None:
        """Forget a tenant's prompts: those with one of these salts, all if there are none."""

    async def warm(self, session: aiohttp.ClientSession, url: str, info: ReplicaInfo) -> None:
        """Let a replica that is about to join prefetch common prefixes, within the time limit."""


class SpeedProbes:
    """Measurements of how fast replicas are before their first requests; here of a router without them, which learns it from
    requests. Runs on the event loop."""

    def measures(self, info: ReplicaInfo) -> bool:
        """Whether such a replica is measured."""
        return False

    async def measure_before(self, probe: ReplicaProbe, upstream: Upstream, info: ReplicaInfo) -> bool:
        """Measure a replica that is about to join, while others serve requests. Whether to measure it later: it was busy."""
        return False

    async def measure_idle(self, probe: ReplicaProbe, upstream: Upstream, joined: Callable[[], Fleet | None]) -> None:
        """Measure a replica that takes requests already, as soon as it has none. A request that is sent there cancels that.

        `joined`: the replica's fleet; None once it has left or joined again.
        """


class Translation(ABC):
    """A request of a dialect that its replicas need not know: they get it as a chat completion.

    Attributes:
        dialect, request: the client's.
    """

    dialect: Dialect
    request: GenerateRequest

    @abstractmethod
    def begin(self, prompt_tokens: int) -> bytes:
        """The events before any output."""

    @abstractmethod
    def events(self, data: bytes) -> bytes:
        """The client's events for events of a chat completion. Raises ReplicaFailed."""

    @abstractmethod
    def whole(self, data: bytes) -> bytes:
        """The client's response for a whole chat completion. Raises ReplicaFailed."""

    @abstractmethod
    def error_event(self, error: ForewordError) -> bytes:
        """The end of a stream that failed."""

    @abstractmethod
    def error_response(self, status: int, data: bytes) -> ErrorResponse:
        """The client's response for an error response of a replica."""


class ServedRequest(Struct, frozen=True):
    """A request that a replica has served, `began` and `computed_at` (its first token) on the router's clock."""

    id: str
    tenant: str
    request: GenerateRequest
    model: str
    session: str | None
    replica: str
    prompt_tokens: int | None
    cached_tokens: int | None
    began: float
    computed_at: float
    block_size: int


class Misses:
    """The causes of cache misses, and the records of a trace; here of a router without them. Runs on the event loop."""

    def follow(self, fleet: Fleet) -> None:
        """Record what a fleet has served, if there is a trace."""

    def finished(self, served: ServedRequest) -> asyncio.Future[Miss] | None:
        """A request succeeded. None if it is not explained."""
        return None

    def close(self) -> None:
        """Record what is waiting, without causes."""


class RouterExtras(ABC):
    """Calls of the router to its extras. It has no state."""

    @abstractmethod
    def check(self, config: Config) -> None:
        """Raises ConfigError for settings of the picker and of workers that cannot work."""

    @abstractmethod
    def picking(self, router: Router, limits: ServerConfig) -> AbstractAsyncContextManager[None]:
        """Answers gateways on `config.picker` in this block. Raises ConfigError."""

    @abstractmethod
    def check_sources(self, config: RouterConfig) -> None:
        """Raises ConfigError for a file, DNS names or Services of replicas that cannot be watched."""

    @abstractmethod
    def watch_sources(self, router: Router, apply: ApplyReplicas) -> Iterable[Coroutine[Any, Any, None]]:
        """Watch the file, DNS names and Services of replicas, until cancelled."""

    @abstractmethod
    def audit(self, auth: RouterAuth, is_idle: Callable[[], bool], config: RouterConfig) -> Audit:
        """An audit with these settings. `is_idle`: whether no client waits for a response. Raises ConfigError."""

    @abstractmethod
    def prefixes(self, router: Router, path: str | None) -> Prefixes:
        """Named prefixes, which a file keeps over restarts. Raises ConfigError for one that cannot be read."""

    @abstractmethod
    def warm_up(self, auth: RouterAuth, metrics: RouterMetrics, seconds: float) -> WarmUp:
        """Warm-up with this time limit for one replica; 0 turns it off."""

    @abstractmethod
    def speed_probes(self, seconds: float) -> SpeedProbes:
        """Measurements, with so many seconds for a prompt; 0 turns them off."""

    @abstractmethod
    def disaggregation(self, min_tokens: int) -> Disaggregation:
        """When a prompt with so many tokens to compute, or more, is computed on a prefill replica."""

    @abstractmethod
    async def prefilled(self, proxied: ProxiedRequest, attempt: Attempt, prefill: Upstream) -> Mapping[str, Any] | None:
        """Compute a prompt on the prefill replica, as far as the decode replica needs that: its `kv_transfer_params`. None if
        that one has to compute the prompt."""

    @abstractmethod
    def misses(self, router: Router, config: ServerConfig) -> Misses:
        """The causes of cache misses, and the trace that `config.record` names. Raises ConfigError."""

    @abstractmethod
    async def keep_costs(self, kinds: CostKinds, path: str) -> None:
        """Keep learned costs in a file until cancelled. Restores them before it first waits."""

    @abstractmethod
    def order(self, config: ServerConfig) -> Order:
        """The order of prompts. Raises ConfigError."""

    @abstractmethod
    def tracer(self, endpoint: str) -> Tracer:
        """Traces of requests, for the collector at this URL. Raises ConfigError."""

    @abstractmethod
    def ledger(self, path: str) -> UsageLedger:
        """The usage ledger in this file. Raises ConfigError."""

    @abstractmethod
    def run_workers(self, config: Config, current: Callable[[bytes], bytes], serve: Callable[[Router], Any]) -> int:
        """Run processes until a signal; returns the exit status. Each runs `serve`, a coroutine, with its router."""

    @abstractmethod
    def load_tokenizer(self, source: str) -> Tokenizer:
        """The router's own tokenizer. Slow. Raises ModelNotFound."""

    @abstractmethod
    def add_routes(self, routes: Routes[Handler], router: Router) -> None:
        """Add the paths of named prefixes, cache control, erasures, other dialects and the dashboard."""


def installed_extras() -> RouterExtras | None:
    """The extras; None where they are not installed."""
    extras: RouterExtras | None = of_product(_EXTRAS)
    return extras


def extras_for(setting: str) -> RouterExtras:
    """The extras. Raises ConfigError, which names the setting that needs them, where they are not installed."""
    extras = installed_extras()
    if extras is None:
        raise ConfigError(f"{setting} {_MISSING}")
    return extras


def extras_of(config: Config) -> RouterExtras | None:
    """Return the extras. Raises ConfigError for a setting that is not its default and needs them where they are missing."""
    for section in (config.router, config.server):
        for one in fields(section):
            if one.name in _SETTINGS and getattr(section, one.name) not in (one.default, 0):
                extras_for(f"--{one.name.replace('_', '-')}")
    return installed_extras()


def order_for(config: ServerConfig) -> Order:
    """The configured order of prompts. Raises ConfigError."""
    if not config.template_order and not config.volatile_lines:
        return Order()
    return extras_for("--template-order" if config.template_order else "--volatile-lines").order(config)


def add_routes(routes: Routes[Handler], router: Router) -> None:
    """Add the paths of the extras; where these are not installed, an answer that says so."""
    extras = installed_extras()
    if extras is not None:
        extras.add_routes(routes, router)
        return

    async def missing(call: Call) -> None:
        raise NotFound(f"{call.path} {_MISSING}")

    for path in _PATHS:
        for method in ("GET", "POST", "PUT", "DELETE"):
            routes.add(method, path, right=Right.TENANT, meter=Meter.FREE, body=NO_BODY, tag=None)(missing)
