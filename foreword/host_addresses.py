"""Addresses of hosts."""

from __future__ import annotations

import ipaddress


def ip_address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """An IP address; an IPv4-mapped IPv6 address as the IPv4 address. None for a name."""
    try:
        found = ipaddress.ip_address(host)
    except ValueError:
        return None
    mapped = found.ipv4_mapped if isinstance(found, ipaddress.IPv6Address) else None
    return mapped or found


def is_loopback(host: str) -> bool:
    """Whether it is a name or address of the loopback interface."""
    found = ip_address(host)
    return host == "localhost" or (found is not None and found.is_loopback)
