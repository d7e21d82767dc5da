"""Replicas as a gateway names them: `IP:PORT`."""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from typing import Final
from urllib.parse import urlsplit

from foreword.errors import ReplicaFailed
from foreword.router.replicas import clock

_FRESH_SECONDS: Final = 5.0
_RESOLVE_SECONDS: Final = 2.0


class Addresses:
    """The addresses of replicas. Host names are resolved every few seconds, when they are used."""

    def __init__(self) -> None:
        self._found: dict[str, tuple[str, float]] = {}

    async def of(self, url: str) -> str:
        """`IP:PORT`, with an IPv6 address in brackets. Raises ReplicaFailed if the name cannot be resolved."""
        found, until = self._found.get(url, ("", 0.0))
        if found and clock() < until:
            return found
        parts = urlsplit(url)
        host, port = parts.hostname or "", parts.port or (443 if parts.scheme == "https" else 80)
        address = host if _is_ip(host) else await _resolved(host, port)
        found = f"[{address}]:{port}" if ":" in address else f"{address}:{port}"
        self._found[url] = found, clock() + _FRESH_SECONDS
        return found

    def forget(self, urls: set[str]) -> None:
        """Forget all replicas but these."""
        self._found = {url: found for url, found in self._found.items() if url in urls}


async def _resolved(host: str, port: int) -> str:
    try:
        async with asyncio.timeout(_RESOLVE_SECONDS):
            entries = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, TimeoutError) as error:
        raise ReplicaFailed(f"cannot resolve {host}: {error}") from None
    return str(sorted(entry[4][0] for entry in entries)[0])


def _is_ip(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True
