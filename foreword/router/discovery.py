"""Discovery of replicas: those of flags, and those of sources that extras watch (`router_extras/watched_replicas.py`)."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from foreword.errors import ConfigError
from foreword.process_config import RouterConfig
from foreword.router.extras import extras_for
from foreword.router.replicas import ReplicaSpec, parse_spec
from foreword.router.router import Router


def configured_replicas(config: RouterConfig) -> list[ReplicaSpec]:
    """The replicas given as flags. Raises ConfigError, also for an invalid file or DNS name."""
    # If there are prefill replicas, the others do not compute prompts for each other.
    default = "decode" if config.prefill else "both"
    specs = [parse_spec(text, default) for text in config.replicas]
    specs += [parse_spec(text, "prefill") for text in config.prefill]
    if any(spec.role == "prefill" for spec in specs):
        extras_for("--prefill")
    seen: set[str] = set()
    for spec in specs:
        if spec.url in seen:
            raise ConfigError(f"the replica {spec.url} is named twice")
        seen.add(spec.url)
    others = config.replica_dns or config.replica_services or config.replica_file
    if specs and not others and all(spec.role == "prefill" for spec in specs):
        raise ConfigError("the replicas only prefill prompts (--prefill): name one that answers, with --replica")
    if (source := _watched(config)) is not None:
        extras_for(source).check_sources(config)
    return specs


def _watched(config: RouterConfig) -> str | None:
    """An option that names replicas which change; None without."""
    given = {
        "--replica-service": config.replica_services,
        "--replica-dns": config.replica_dns,
        "--replica-file": config.replica_file,
    }
    return next((name for name, value in given.items() if value), None)


class Discovery:
    """Adds replicas to the router and removes them as the file, DNS names and Services change."""

    def __init__(self, router: Router) -> None:
        self._router = router

    def start(self, specs: Iterable[ReplicaSpec]) -> None:
        for spec in specs:
            self._router.add(spec, "flag")
        if (source := _watched(self._router.config)) is not None:
            for watch in extras_for(source).watch_sources(self._router, self._apply):
                self._router.background(watch)

    def _apply(self, wanted: list[ReplicaSpec], source: str, unready: Collection[str]) -> None:
        """Make the replicas from this source equal to `wanted`. Those in `unready` get no requests."""
        router, by_url = self._router, {spec.url: spec for spec in wanted}
        for url, upstream in list(router.upstreams.items()):
            if upstream.source == source and by_url.get(url) != upstream.spec:
                router.remove(url)
        for url, spec in by_url.items():
            if url not in router.upstreams:
                router.add(spec, source)
            upstream = router.upstreams[url]
            if upstream.source == source and upstream.unready != (url in unready):
                upstream.unready = url in unready
                router.refresh(upstream)
