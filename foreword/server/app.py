"""The server's front: all endpoints over one engine. `foreword.server.process` runs it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from foreword.api import prefixes, probes
from foreword.api.asgi import AsgiFront
from foreword.api.dialects.conversation_body import MessageBody, messages_of
from foreword.api.dialects.decode import Body, Limits
from foreword.api.front import Answer, Call, Front, Handler
from foreword.api.prefixes import AnyPrefixBody
from foreword.api.quotas import Quotas
from foreword.api.request import template_messages
from foreword.api.request_bodies import RequestBodies
from foreword.api.rights import HostNames, Rights, Tenants
from foreword.api.routes import NO_BODY, Meter, Right, Routes
from foreword.api.stored_responses import StoredResponses
from foreword.api.tools.parser import formats_named
from foreword.api.work_queue import WorkQueue
from foreword.config import parse_bytes
from foreword.configuration import Config
from foreword.dashboard.metric_history import MetricsHistory
from foreword.errors import ForewordError
from foreword.ledger import UsageLedger
from foreword.prompt_order import PromptOrder
from foreword.server import cache_api, dashboard, generate_api, instance_api, migration, model_api, requests_api
from foreword.server.admission import Admission
from foreword.server.endpoint import ServerContext, check_length
from foreword.server.engine_metrics import PrometheusObserver
from foreword.server.engine_observers import EngineTraces
from foreword.server.peers import Peers
from foreword.server.prepare import parser_names
from foreword.store.store_keys import data_keys_of

if TYPE_CHECKING:
    from foreword.entrypoints.async_engine import AsyncEngine
    from foreword.server.kv_events import EventSource


class PrefixBody(Body, kw_only=True):
    """`PUT /v1/prefixes/{name}`: text for completions, or messages for chat."""

    content: str | None = None
    messages: list[MessageBody] | None = None

    def check(self, limits: Limits) -> None:
        prefixes.check_content(self.content, self.messages, limits)

    def plain_messages(self, limits: Limits) -> list[dict[str, Any]] | None:
        return None if self.messages is None else template_messages(messages_of(self.messages, limits))


class NewPrefixBody(PrefixBody, kw_only=True):
    """`POST /v1/prefixes`."""

    name: str
    replace: bool = False


class ServerApp(AsgiFront):
    """All endpoints over one engine. It is an ASGI application as well, for other servers than Foreword's.

    Args:
        engine: a loaded engine, or an admission control that gets its engine later.
        registry: the metrics of `/metrics`. It must be an observer of the engine.
        events: where the engine's KV events are published.
        traces: of the requests. It must be an observer of the engine.
        ledger: gets the tokens of each request.

    Attributes:
        migrate_all: migrates running requests to other servers, within so many `seconds`.

    Raises ConfigError for malformed API keys, peers or quotas, and for unknown parsers.
    """

    def __init__(
        self,
        engine: AsyncEngine | Admission,
        registry: PrometheusObserver,
        config: Config,
        events: EventSource | None = None,
        traces: EngineTraces | None = None,
        ledger: UsageLedger | None = None,
    ) -> None:
        given = config.server
        admission = engine
        if not isinstance(admission, Admission):
            admission = Admission(given.max_queue, admission, PromptOrder.of(given))
        keys = data_keys_of(config.encryption)
        tenants = Tenants.from_config(given, bytes if keys is None else keys.current)
        formats_named(*parser_names(given))
        responses = StoredResponses(parse_bytes(given.response_memory))
        peers = Peers.from_config(config)
        context = ServerContext(admission, tenants, given, WorkQueue(), responses, peers=peers, traces=traces)
        history = MetricsHistory(registry.families)
        super().__init__(
            Front(
                routes_of(context, registry, history, events),
                Rights(tenants, given.admin_key, HostNames((given.host, *given.allowed_hosts))),
                Quotas.parse(given.quotas),
                # Connections have a limit for the time of a body too, below the application.
                RequestBodies(given.body_timeout),
                context.work,
                registry,
                context.limits,
                frozenset(given.allowed_origins),
                given.unknown_fields,
                ready=admission.check_ready,
                on_serving=(history.keep_sampling,),
                ledger=ledger,
            )
        )
        self.migrate_all = partial(migration.drain, context, given.drain_to)


def routes_of(
    context: ServerContext, registry: PrometheusObserver, history: MetricsHistory, events: EventSource | None = None
) -> Routes[Handler]:
    """The server's table."""
    routes = Routes[Handler]()
    generate_api.add_routes(routes, context)
    model_api.add_routes(routes, context)
    prefixes.add_routes(
        routes,
        lambda: context.admission.engine().prefixes,
        partial(_admit_prefix, context),
        NewPrefixBody,
        PrefixBody,
    )
    cache_api.add_routes(routes, context)
    instance_api.add_routes(routes, context)
    requests_api.add_routes(routes, context, context.config)
    dashboard.add_routes(routes, context, history)
    _add_probes(routes, context.admission, events)
    probes.add_routes(routes, registry.render)
    return routes


@contextmanager
def _admit_prefix(context: ServerContext, body: AnyPrefixBody) -> Iterator[None]:
    with context.admission.admit(1) as engine:
        check_length(engine, len(body.content or ""), "content")
        check_length(
            engine, sum(len(one["content"]) for one in body.plain_messages(context.limits()) or ()), "messages"
        )
        yield


def _add_probes(routes: Routes[Handler], admission: Admission, events: EventSource | None) -> None:
    @routes.add("GET", "/ping", right=Right.ANYONE, meter=Meter.FREE, body=NO_BODY, tag="probes")
    @routes.add("POST", "/ping", right=Right.ANYONE, meter=Meter.FREE, body=NO_BODY, tag="probes")
    @routes.add("GET", "/health", right=Right.ANYONE, meter=Meter.FREE, body=NO_BODY, tag="probes")
    async def health(call: Call) -> Answer:
        """Liveness. 200 from the start, also while the model is loaded; 503 only if the server needs a restart. `quarantined`,
        if there are any, is the number of chains that are not reused because an audit found their KV to be wrong."""
        engine = admission.loaded
        failed = engine.failed if engine is not None else None
        if failed is not None:
            return Answer.json({"status": "failed", "reason": failed}, 503)
        chains = len(engine.quarantine.chains) if engine is not None else 0
        return Answer.json({"status": "alive", **({"quarantined": chains} if chains else {})})

    @routes.add("GET", "/ready", right=Right.ANYONE, meter=Meter.FREE, body=NO_BODY, tag="probes")
    async def ready(call: Call) -> Answer:
        """Readiness. 503 while the model is loaded and while the server shuts down."""
        try:
            engine = admission.engine()
        except ForewordError as error:
            body = {"status": error.code, "reason": error.message}
            return Answer.json(body, 503, {"retry-after": "1"})
        return Answer.json({"status": "ready", "model": engine.info.name})

    @routes.add("GET", "/kv_event_sources", right=Right.TENANT, meter=Meter.FREE, body=NO_BODY, tag="probes")
    async def kv_event_sources(call: Call) -> dict[str, Any]:
        """The ZeroMQ endpoints that publish KV events, by rank. Empty without `--kv-events`."""
        return {} if events is None else {"0": events.described()}
