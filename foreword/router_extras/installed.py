"""Implements the router's interface for its extras (`foreword.router.extras`). What a setting needs is imported with it."""

from __future__ import annotations

import os
from collections.abc import Callable, Coroutine, Iterable, Mapping
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from foreword.api.front import Handler
from foreword.api.routes import Routes
from foreword.api.stored_responses import StoredResponses
from foreword.config import check_folder, parse_bytes
from foreword.errors import ConfigError
from foreword.observability.recording import TraceRecorder
from foreword.process_config import RouterConfig, ServerConfig
from foreword.router.attempt import Attempt
from foreword.router.auth import RouterAuth
from foreword.router.extras import ApplyReplicas, Audit, Order, RouterExtras
from foreword.router.proxied_request import ProxiedRequest
from foreword.router.replicas import Upstream
from foreword.router.router import Router
from foreword.router.router_metrics import RouterMetrics
from foreword.router_extras import cache_api, dashboard, disaggregated, fleet_erasures, prefixes_api, translated_api
from foreword.router_extras.router_misses import RouterMisses
from foreword.router_extras.router_prefixes import RouterPrefixes
from foreword.router_extras.speed_probe import ReplicaSpeedProbes
from foreword.router_extras.warm_up import PrefixWarmUp
from foreword.router_extras.worker_links import workers_of
from foreword.routing.disaggregation import DisaggregationPolicy
from foreword.tokens.model_source import check_source

if TYPE_CHECKING:
    from foreword.configuration import Config
    from foreword.ledger import UsageLedger
    from foreword.observability.tracing import Tracer
    from foreword.routing.cost_kinds import CostKinds
    from foreword.routing.fleet import Disaggregation
    from foreword.tokens.tokenizer import Tokenizer


_TOKENIZER_FILES: Final = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")


class InstalledExtras(RouterExtras):
    """The extras of this package."""

    def check(self, config: Config) -> None:
        if config.router.tokenizer is not None:
            _check_tokenizer(config.router.tokenizer)
        if config.router.audit_reports is not None:
            check_folder(config.router.audit_reports)
        if config.router.prefix_file is not None:
            check_folder(os.path.dirname(os.path.abspath(config.router.prefix_file)))
        if config.router.picker is not None:
            from foreword.router_extras.gateway.server import check_config

            check_config(config.router)
        if config.router.workers > 1:
            from foreword.router_extras.workers.supervisor import check

            check(config)

    def picking(self, router: Router, limits: ServerConfig) -> AbstractAsyncContextManager[None]:
        from foreword.router_extras.gateway.server import picking

        return picking(router, limits)

    def check_sources(self, config: RouterConfig) -> None:
        from foreword.router_extras.watched_replicas import check_sources

        check_sources(config)

    def watch_sources(self, router: Router, apply: ApplyReplicas) -> Iterable[Coroutine[Any, Any, None]]:
        from foreword.router_extras.watched_replicas import watch_sources

        return watch_sources(router, apply)

    def audit(self, auth: RouterAuth, is_idle: Callable[[], bool], config: RouterConfig) -> Audit:
        from foreword.router_extras.replica_audit import ReplicaAudit

        return ReplicaAudit(auth, is_idle, config.audit_every, config.audit_budget, config.audit_reports)

    def prefixes(self, router: Router, path: str | None) -> RouterPrefixes:
        return RouterPrefixes(router, path)

    def warm_up(self, auth: RouterAuth, metrics: RouterMetrics, seconds: float) -> PrefixWarmUp:
        return PrefixWarmUp(auth, metrics, seconds)

    def disaggregation(self, min_tokens: int) -> Disaggregation:
        return DisaggregationPolicy(min_tokens=min_tokens).choose

    async def prefilled(self, proxied: ProxiedRequest, attempt: Attempt, prefill: Upstream) -> Mapping[str, Any] | None:
        return await disaggregated.prefilled(proxied, attempt, prefill)

    def speed_probes(self, seconds: float) -> ReplicaSpeedProbes:
        return ReplicaSpeedProbes(seconds)

    def misses(self, router: Router, config: ServerConfig) -> RouterMisses:
        recorder = None if config.record is None else TraceRecorder(Path(config.record), salt=config.tenant_secret)
        return RouterMisses(router.metrics, router.decisions, recorder)

    async def keep_costs(self, kinds: CostKinds, path: str) -> None:
        from foreword.router_extras.cost_file import keep_costs

        await keep_costs(kinds, path)

    def order(self, config: ServerConfig) -> Order:
        from foreword.router_extras.ordered_prompts import OrderedPrompts

        return OrderedPrompts(config)

    def tracer(self, endpoint: str) -> Tracer:
        from foreword.observability.tracing import Tracer

        return Tracer(endpoint, "foreword-router")

    def ledger(self, path: str) -> UsageLedger:
        from foreword.ledger import UsageLedger

        return UsageLedger(Path(path))

    def run_workers(self, config: Config, current: Callable[[bytes], bytes], serve: Callable[[Router], Any]) -> int:
        from foreword.router_extras.workers.worker_router import run

        return run(config, current, serve)

    def load_tokenizer(self, source: str) -> Tokenizer:
        from foreword.tokens.tokenizer import Tokenizer

        return Tokenizer.load(source)

    def add_routes(self, routes: Routes[Handler], router: Router) -> None:
        prefixes = router.prefixes
        assert isinstance(prefixes, RouterPrefixes), "the router has those of this package"
        server = router.server_config
        responses = StoredResponses(parse_bytes(server.response_memory))
        workers = workers_of(router)
        responses.added = lambda *kept: workers.tell("response", kept)
        responses.removed = lambda *removed: workers.tell("response removed", removed)
        workers.on("response", lambda told: responses.keep(*told))
        workers.on("response removed", lambda told: responses.discard(*told))
        prefixes.follow_workers()
        translated_api.add_routes(routes, router, responses)
        fleet_erasures.add_routes(routes, router, prefixes, responses)
        prefixes_api.add_routes(routes, router, prefixes)
        cache_api.add_routes(routes, router)
        dashboard.add_routes(routes, router)


def _check_tokenizer(source: str) -> None:
    """Raises ConfigError or ModelNotFound for what has no tokenizer."""
    if check_source(source, "a tokenizer"):
        folder = Path(source).expanduser()
        if not any((folder / name).is_file() for name in _TOKENIZER_FILES):
            raise ConfigError(f"--tokenizer {source}: the folder has no {_TOKENIZER_FILES[0]}")
