"""Replicas that come and go: by flags, by a file that is watched, by a name that is resolved again and again."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from foreword.config import RouterConfig
from foreword.errors import ConfigError
from foreword.router.replicas import Spec, parse, url_parts
from foreword.router.service import Router

logger = logging.getLogger(__name__)

_FILE_SECONDS: Final = 1.0
_DNS_SECONDS: Final = 5.0


def named(config: RouterConfig) -> list[Spec]:
    """The replicas that flags name. Raises ConfigError, also if there is no way to learn of any."""
    # Where there is a pool for prompts, the others do not compute prompts for each other.
    usual = "decode" if config.prefill else "both"
    specs = [parse(text, usual) for text in config.replicas] + [parse(text, "prefill") for text in config.prefill]
    seen: set[str] = set()
    for spec in specs:
        if spec.url in seen:
            raise ConfigError(f"the replica {spec.url} is named twice")
        seen.add(spec.url)
    for url in config.replica_dns:
        _dns_parts(url)
    if config.replica_file is not None:
        read_file(Path(config.replica_file))
    return specs


def read_file(path: Path) -> list[Spec]:
    """Raises ConfigError."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the file of replicas {path}: {error}") from error
    bare = (line.partition("#")[0].strip() for line in lines)
    return [parse(line) for line in bare if line]


class Membership:
    """Keeps the router's replicas as file and names say."""

    def __init__(self, router: Router, config: RouterConfig) -> None:
        self._router = router
        self._config = config
        self._tasks: list[asyncio.Task[None]] = []

    def start(self, specs: Iterable[Spec]) -> None:
        for spec in specs:
            self._router.add(spec, "flag")
        if self._config.replica_file is not None:
            self._tasks.append(asyncio.create_task(self._watch_file(Path(self._config.replica_file))))
        for url in self._config.replica_dns:
            self._tasks.append(asyncio.create_task(self._resolve(url)))

    def stop(self) -> None:
        for task in self._tasks:
            task.cancel()

    async def _watch_file(self, path: Path) -> None:
        seen: tuple[int, int, int] | None = None
        while True:
            try:
                found = path.stat()
                mark = (found.st_mtime_ns, found.st_size, found.st_ino)
                if mark != seen:
                    self._apply(read_file(path), "file")
                    seen = mark
            except (OSError, ConfigError) as error:
                # A file that is being written, or is broken, changes nothing.
                logger.warning("the replicas stay as they are: %s", error)
                await asyncio.sleep(_FILE_SECONDS * 4)
            await asyncio.sleep(_FILE_SECONDS)

    async def _resolve(self, url: str) -> None:
        host, port = _dns_parts(url)
        source = f"dns {url}"
        while True:
            try:
                loop = asyncio.get_running_loop()
                found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
                addresses = sorted({str(entry[4][0]) for entry in found})
                self._apply([Spec(f"http://{_shown(address)}:{port}") for address in addresses], source)
            except OSError as error:
                # A name server that fails says nothing about the replicas.
                logger.warning("cannot resolve %s, the replicas stay as they are: %s", host, error)
            await asyncio.sleep(_DNS_SECONDS)

    def _apply(self, wanted: list[Spec], source: str) -> None:
        router, urls = self._router, {spec.url: spec for spec in wanted}
        for url, upstream in list(router.upstreams.items()):
            if upstream.source == source and urls.get(url) != upstream.spec:
                router.remove(url)
        for url, spec in urls.items():
            if url not in router.upstreams:
                router.add(spec, source)


def _dns_parts(url: str) -> tuple[str, int]:
    if "@" in url:
        raise ConfigError("the URL of --replica-dns has no password; give the replicas' key with --replica-key")
    parts = url_parts(url)
    if parts is None or parts.scheme != "http" or parts.path not in ("", "/") or not parts.hostname:
        raise ConfigError(f"--replica-dns takes a URL such as http://name:8000, not {url!r}")
    return parts.hostname, parts.port or 80


def _shown(address: str) -> str:
    return f"[{address}]" if ":" in address else address
