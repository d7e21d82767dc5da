"""Sources of replicas that change: a file, a DNS name that is resolved periodically, and Kubernetes Services."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable, Coroutine, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from foreword.config import read_text
from foreword.errors import ConfigError
from foreword.process_config import RouterConfig
from foreword.router.extras import ApplyReplicas
from foreword.router.replicas import ReplicaSpec, parse_spec, url_parts
from foreword.router.router import Router

logger = logging.getLogger(__name__)

_FILE_SECONDS: Final = 1.0
_DNS_SECONDS: Final = 5.0


def check_sources(config: RouterConfig) -> None:
    """See `RouterExtras.check_sources`."""
    for url in config.replica_dns:
        _dns_parts(url)
    if config.replica_services:
        from foreword.router_extras.kubernetes import check_services

        check_services(config)
    if config.replica_file is not None:
        read_file(Path(config.replica_file))


def watch_sources(router: Router, apply: ApplyReplicas) -> Iterator[Coroutine[Any, Any, None]]:
    """See `RouterExtras.watch_sources`."""
    config = router.config
    if config.replica_file is not None:
        yield _watch_file(Path(config.replica_file), apply, router.metrics.watch_failed)
    for url in config.replica_dns:
        yield _watch_dns(url, apply, router.metrics.watch_failed)
    for text in config.replica_services:
        yield _watch_service(router, text, apply)


def read_file(path: Path) -> list[ReplicaSpec]:
    """Raises ConfigError."""
    lines = read_text(path, "the replica file").splitlines()
    without_comments = (line.partition("#")[0].strip() for line in lines)
    return [parse_spec(line) for line in without_comments if line]


async def _watch_file(path: Path, apply: ApplyReplicas, failed: Callable[[str], object]) -> None:
    applied: tuple[int, int, int] | None = None
    while True:
        try:
            status = path.stat()
            version = (status.st_mtime_ns, status.st_size, status.st_ino)
            if version != applied:
                apply(read_file(path), "file", ())
                applied = version
        except (OSError, ConfigError) as error:
            # A broken or half-written file changes nothing.
            logger.warning("the list of replicas is unchanged: %s", error)
            failed("replica file")
            await asyncio.sleep(_FILE_SECONDS * 4)
        await asyncio.sleep(_FILE_SECONDS)


async def _watch_dns(url: str, apply: ApplyReplicas, failed: Callable[[str], object]) -> None:
    host, port = _dns_parts(url)
    while True:
        try:
            found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
            addresses = sorted({str(entry[4][0]) for entry in found})
            hosts = (f"[{address}]" if ":" in address else address for address in addresses)
            apply([ReplicaSpec(f"http://{one}:{port}") for one in hosts], f"dns {url}", ())
        except OSError as error:
            # A failing name server says nothing about the replicas.
            logger.warning("cannot resolve %s; the list of replicas is unchanged: %s", host, error)
            failed(f"addresses of {host}")
        await asyncio.sleep(_DNS_SECONDS)


async def _watch_service(router: Router, text: str, apply: ApplyReplicas) -> None:
    def changed(service: str, found: Mapping[ReplicaSpec, bool]) -> None:
        unready = {spec.url for spec, ready in found.items() if not ready}
        apply(list(found), f"service {service}", unready)

    from foreword.router_extras.pod_costs import watch_service

    await watch_service(router, text, changed)


def _dns_parts(url: str) -> tuple[str, int]:
    if "@" in url:
        raise ConfigError("the URL of --replica-dns has no password; give the replicas' key with --replica-key")
    parts = url_parts(url)
    if parts is None or parts.scheme != "http" or parts.path not in ("", "/") or not parts.hostname:
        raise ConfigError(f"--replica-dns takes a URL such as http://name:8000, not {url!r}")
    return parts.hostname, parts.port or 80
