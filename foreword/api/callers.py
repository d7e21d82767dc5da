"""What the headers and the address of a caller say about it. The server and the router share it."""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from typing import Final

# What a proxy adds: the caller is somewhere else then. A web page sends `origin`.
_NOT_LOCAL: Final = ("forwarded", "x-forwarded-for", "x-real-ip", "via", "origin")


def credentials(headers: Mapping[str, str]) -> str | None:
    """The caller's key as an `Authorization` header. Clients of Anthropic's API send it as `x-api-key`."""
    key = headers.get("x-api-key")
    return headers.get("authorization") or (f"Bearer {key}" if key else None)


def is_local(address: str | None, headers: Mapping[str, str]) -> bool:
    """Whether the caller is a program on this machine: not a web page, and not one behind a proxy."""
    if any(name in headers for name in _NOT_LOCAL):
        return False
    try:
        found = ipaddress.ip_address((address or "").partition("%")[0])
    except ValueError:
        return False
    mapped = found.ipv4_mapped if isinstance(found, ipaddress.IPv6Address) else None
    return (mapped or found).is_loopback
