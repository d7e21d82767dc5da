"""Discovery of replicas: from flags, a watched file, a DNS name that is resolved periodically, and Kubernetes Services, which
an extra watches (`extras.py`)."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Final

from foreword.config import read_text
from foreword.errors import ConfigError
from foreword.process_config import RouterConfig
from foreword.router.extras import extras_for
from foreword.router.replicas import ReplicaSpec, parse_spec, url_parts
from foreword.router.service import Router

logger = logging.getLogger(__name__)

_FILE_SECONDS: Final = 1.0
_DNS_SECONDS: Final = 5.0


def configured_replicas(config: RouterConfig) -> list[ReplicaSpec]:
    """The replicas given as flags. Raises ConfigError, also for an invalid file or DNS name."""
    # If there are prefill replicas, the others do not compute prompts for each other.
    default = "decode" if config.prefill else "both"
    specs = [parse_spec(text, default) for text in config.replicas]
    specs += [parse_spec(text, "prefill") for text in config.prefill]
    seen: set[str] = set()
    for spec in specs:
        if spec.url in seen:
            raise ConfigError(f"the replica {spec.url} is named twice")
        seen.add(spec.url)
    others = config.replica_dns or config.replica_services or config.replica_file
    if specs and not others and all(spec.role == "prefill" for spec in specs):
        raise ConfigError("the replicas only prefill prompts (--prefill): name one that answers, with --replica")
    for url in config.replica_dns:
        _dns_parts(url)
    if config.replica_services:
        extras_for("--replica-service").check_services(config)
    if config.replica_file is not None:
        read_file(Path(config.replica_file))
    return specs


def read_file(path: Path) -> list[ReplicaSpec]:
    """Raises ConfigError."""
    lines = read_text(path, "the replica file").splitlines()
    without_comments = (line.partition("#")[0].strip() for line in lines)
    return [parse_spec(line) for line in without_comments if line]


class Discovery:
    """Adds replicas to the router and removes them as the file, DNS names and Services change."""

    def __init__(self, router: Router, config: RouterConfig) -> None:
        self._router = router
        self._config = config
        self._tasks: list[asyncio.Task[None]] = []

    def start(self, specs: Iterable[ReplicaSpec]) -> None:
        for spec in specs:
            self._router.add(spec, "flag")
        if self._config.replica_file is not None:
            self._tasks.append(self._router.background(self._watch_file(Path(self._config.replica_file))))
        for url in self._config.replica_dns:
            self._tasks.append(self._router.background(self._watch_dns(url)))
        for text in self._config.replica_services:
            self._tasks.append(self._router.background(self._watch_service(text)))

    def stop(self) -> None:
        for task in self._tasks:
            task.cancel()

    async def _watch_file(self, path: Path) -> None:
        applied: tuple[int, int, int] | None = None
        while True:
            try:
                status = path.stat()
                version = (status.st_mtime_ns, status.st_size, status.st_ino)
                if version != applied:
                    self._apply(read_file(path), "file")
                    applied = version
            except (OSError, ConfigError) as error:
                # A broken or half-written file changes nothing.
                logger.warning("the list of replicas is unchanged: %s", error)
                await asyncio.sleep(_FILE_SECONDS * 4)
            await asyncio.sleep(_FILE_SECONDS)

    async def _watch_dns(self, url: str) -> None:
        host, port = _dns_parts(url)
        while True:
            try:
                found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
                addresses = sorted({str(entry[4][0]) for entry in found})
                hosts = (f"[{address}]" if ":" in address else address for address in addresses)
                self._apply([ReplicaSpec(f"http://{one}:{port}") for one in hosts], f"dns {url}")
            except OSError as error:
                # A failing name server says nothing about the replicas.
                logger.warning("cannot resolve %s; the list of replicas is unchanged: %s", host, error)
            await asyncio.sleep(_DNS_SECONDS)

    async def _watch_service(self, text: str) -> None:
        def changed(service: str, found: Mapping[ReplicaSpec, bool]) -> None:
            unready = {spec.url for spec, ready in found.items() if not ready}
            self._apply(list(found), f"service {service}", unready)

        await extras_for("--replica-service").watch_service(self._router, text, changed)

    def _apply(self, wanted: list[ReplicaSpec], source: str, unready: Collection[str] = ()) -> None:
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


def _dns_parts(url: str) -> tuple[str, int]:
    if "@" in url:
        raise ConfigError("the URL of --replica-dns has no password; give the replicas' key with --replica-key")
    parts = url_parts(url)
    if parts is None or parts.scheme != "http" or parts.path not in ("", "/") or not parts.hostname:
        raise ConfigError(f"--replica-dns takes a URL such as http://name:8000, not {url!r}")
    return parts.hostname, parts.port or 80
