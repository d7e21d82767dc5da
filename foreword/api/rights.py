"""Who may do what: one rule for the server, the router, the endpoint picker and the middleware for vLLM.

An operator is a caller with the admin key. Where there is no key of any kind, programs on this host are operators; where there
are API keys and no admin key, there is no operator. What belongs to a tenant may be changed by its key; where no API keys are
required all callers are one tenant, so only operators may. A front without keys answers to its own names only.
"""

from __future__ import annotations

import hmac
import socket
from collections.abc import Iterable, Mapping
from typing import Final

from foreword.api.routes import Right
from foreword.api.tenants import SALT_HEADER, Tenant, Tenants
from foreword.host_addresses import ip_address
from foreword.request_errors import Forbidden, Unauthorized

# No public name ends like this (RFC 6761, RFC 6762, RFC 8375, ICANN's `internal`, and names in Kubernetes).
_PRIVATE: Final = (".localhost", ".local", ".internal", ".home.arpa", ".test", ".svc")
# What a proxy adds: the caller is somewhere else then. A web page sends `origin`.
_NOT_LOCAL: Final = ("forwarded", "x-forwarded-for", "x-real-ip", "via", "origin")


class HostNames:
    """Which values of the header `Host` are names of this server: against DNS rebinding.

    A web page can give its own name the address of a server on the visitor's host or network, and then read what the server
    answers, because the browser takes both for one place. The browser sends the page's name as `Host`. So a server that needs
    no key answers to what no such page can be called: addresses, names without a dot, names that cannot be registered, its
    own, and those that the operator lists.

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
            or ip_address(name)
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


def credentials(headers: Mapping[str, str]) -> str | None:
    """The caller's key as an `Authorization` header. Clients of Anthropic's API send it as `x-api-key`."""
    key = headers.get("x-api-key")
    return headers.get("authorization") or (f"Bearer {key}" if key else None)


def is_local(address: str | None, headers: Mapping[str, str]) -> bool:
    """Whether the caller is a program on this machine: not a web page, and not one behind a proxy."""
    if any(name in headers for name in _NOT_LOCAL):
        return False
    found = ip_address((address or "").partition("%")[0])
    return found is not None and found.is_loopback


NO_TENANT: Final = Tenant("unknown", b"", "none")


class Rights:
    """The rights of callers, who are known by the headers of their requests and their address.

    Args:
        hosts: the names to which a front without keys answers; None: any.
    """

    def __init__(self, tenants: Tenants, admin_key: str | None, hosts: HostNames | None = None) -> None:
        self.tenants = tenants
        self._hosts = hosts
        self._admin_key = None if admin_key is None else admin_key.encode()

    @property
    def _open(self) -> bool:
        """Whether no key of any kind is configured."""
        return self._admin_key is None and not self.tenants.require_keys

    def tenant(self, headers: Mapping[str, str]) -> Tenant:
        """The caller's tenant. Raises Unauthorized."""
        return self.tenants.authenticate(credentials(headers), headers.get(SALT_HEADER))

    def is_operator(self, headers: Mapping[str, str], address: str | None) -> bool:
        if self._admin_key is None:
            return self._open and is_local(address, headers)
        return self.is_admin_key(credentials(headers))

    def is_admin_key(self, authorization: str | None) -> bool:
        """Whether an `Authorization` header has the operator's key. It is for this front only."""
        if self._admin_key is None:
            return False
        scheme, _, key = (authorization or "").strip().partition(" ")
        return scheme.lower() == "bearer" and hmac.compare_digest(
            self._admin_key, key.strip().encode("latin-1", "replace")
        )

    def check(self, right: Right, headers: Mapping[str, str], address: str | None, what: str) -> Tenant:
        """The caller's tenant; `NO_TENANT` where the right is not that of a tenant. Raises Unauthorized or Forbidden.

        Args:
            what: what the caller wants, for the error's message.
        """
        if self._hosts is not None and self._open:
            self._hosts.check(headers)
        if right is Right.ANYONE or (right is Right.STATE and self._open):
            return NO_TENANT
        if right is Right.TENANT:
            return self.tenant(headers)
        operator = self.is_operator(headers, address)
        if right is Right.OWNER:
            tenant = self.tenant(headers)
            if operator or tenant.source != "none":
                return tenant
        elif operator:
            return NO_TENANT
        elif right in (Right.TENANT_OR_OPERATOR, Right.OWNER_OR_OPERATOR):
            tenant = self.tenant(headers)
            if right is Right.TENANT_OR_OPERATOR or tenant.source != "none":
                return tenant
        raise self._refusal(headers, what)

    def _refusal(self, headers: Mapping[str, str], what: str) -> Forbidden | Unauthorized:
        if self._open:
            return Forbidden(f"{what} is possible from this server's own host only, or with --admin-key")
        if self._admin_key is None:
            return Forbidden(f"{what} takes the key of the operator: start with --admin-key")
        if self.tenants.require_keys:
            self.tenant(headers)  # a caller without any key gets that error
            return Forbidden(f"{what} takes the key of the operator (--admin-key)")
        return Unauthorized(f"{what} takes the key of the operator (--admin-key), as Authorization: Bearer KEY")
