"""The names under which a server without keys answers: against DNS rebinding.

A web page can give its own name the address of a server on the visitor's host or network, and then read what the server
answers, because the browser takes both for one place. The browser sends the page's name as `Host`. So a server that needs no
key answers to what no such page can be called: addresses, names without a dot, names that cannot be registered, its own,
and those that the operator lists.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Iterable, Mapping
from typing import Final

from foreword.errors import Forbidden

# No public name ends like this (RFC 6761, RFC 6762, RFC 8375, ICANN's `internal`, and names in Kubernetes).
_PRIVATE: Final = (".localhost", ".local", ".internal", ".home.arpa", ".test", ".svc")


class HostNames:
    """Which values of the header `Host` are names of this server.

    Args:
        listed: the operator's names (`server.allowed_hosts`); `*` allows all.
    """

    def __init__(self, listed: Iterable[str] = ()) -> None:
        names = [name.lower().rstrip(".") for name in (*listed, socket.gethostname())]
        self._listed = frozenset(names)

    def check(self, headers: Mapping[str, str]) -> None:
        """Raises Forbidden for a name that is not this server's. A request without a name is not a browser's."""
        name = _name(headers.get("host", ""))
        if (
            "." not in name
            or "*" in self._listed
            or name in self._listed
            or name.endswith(_PRIVATE)
            or _is_address(name)
        ):
            return
        raise Forbidden(
            f"{name[:253]} is not a name of this server; the operator can add it with --allowed-hosts, or configure keys"
        )


def _name(host: str) -> str:
    """The name in a `Host` header, without its port."""
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0].lower().rstrip(".")


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
