"""The keys of clients and replicas, and the headers exchanged between them.

A tenant's salt comes from the client's API key, never from what the client sent.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Final

from multidict import CIMultiDict

from foreword.api.rights import SALT_HEADER, HostNames, Rights, Tenant, Tenants
from foreword.errors import ConfigError

if TYPE_CHECKING:
    from foreword.configuration import Config

# Headers of one connection (RFC 9110, 7.6.1).
HOP_BY_HOP: Final = frozenset(
    (
        "connection",
        "keep-alive",
        "proxy-authenticate",
        "proxy-authorization",
        "proxy-connection",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
    )
)
# All that a replica sees of a client's headers. Any other might be one that the replica trusts.
_SENT_TO_REPLICAS: Final = frozenset(
    ("accept", "accept-language", "traceparent", "tracestate", "user-agent", "x-session-id")
)
# aiohttp decodes what is encoded.
_NOT_RETURNED: Final = HOP_BY_HOP | frozenset(
    (
        "content-encoding",
        "content-length",
        "date",
        "server",
        "x-request-id",
        "x-foreword-comments",
        "set-cookie",
        "location",
        "www-authenticate",
        "alt-svc",
    )
)


class RouterAuth:
    """API keys of clients, tenants, and keys for replicas.

    Args:
        current: as for `Tenants`.

    Raises ConfigError for malformed keys or weights.
    """

    def __init__(self, config: Config, current: Callable[[bytes], bytes] = bytes) -> None:
        self.tenants = Tenants.from_config(config.server, current)
        self.weights = _numbers(
            config.router.tenant_weights, "weight", "TENANT=WEIGHT", lambda weight: 0 < weight < math.inf
        )
        self._priorities = _numbers(config.router.tenant_priorities, "priority", "TENANT=NUMBER", math.isfinite)
        self.rights = Rights(
            self.tenants, config.server.admin_key, HostNames((config.server.host, *config.server.allowed_hosts))
        )
        self.replica_key = config.router.replica_key
        # Without a replica key, probes use the key of the first tenant.
        self._probe_key = self.replica_key or self.tenants.first_key

    @property
    def has_tenants(self) -> bool:
        """Whether there are tenants, whose blocks must not be shared."""
        return len(self.tenants) > 0

    @property
    def uses_own_key(self) -> bool:
        """Whether replicas get the router's own key, so that only what the router says separates tenants."""
        return self.replica_key is not None

    def priority(self, tenant: Tenant, wanted: int) -> int:
        """The `priority` that a request gets: what it asks for, or the most urgent one that its tenant may have."""
        return max(wanted, int(self._priorities.get(tenant.name, 0)))

    def headers(self, tenant: Tenant, authorization: str | None, kind: str) -> dict[str, str]:
        """Authentication at a replica: the router's key and the tenant's salt, or else the client's own key.

        The operator's key is not for replicas.
        """
        if self.replica_key is None:
            passed = authorization is not None and not self.rights.is_admin_key(authorization)
            return {"authorization": authorization} if authorization and passed else {}
        headers = {"authorization": f"Bearer {self.replica_key}"}
        if kind == "foreword" and tenant.salt:
            headers[SALT_HEADER] = tenant.salt.hex()
        return headers

    def headers_of(self, tenant: Tenant, kind: str) -> dict[str, str]:
        """Authentication of the router's own requests on behalf of a tenant."""
        if self.replica_key is None:
            return self.tenants.headers_for(tenant.salt)
        return self.headers(tenant, None, kind)

    def probe_headers(self) -> dict[str, str]:
        """Authentication of the router's own requests: probes and tokenization."""
        return {"authorization": f"Bearer {self._probe_key}"} if self._probe_key else {}


def request_headers(headers: Mapping[str, str]) -> CIMultiDict[str]:
    """Headers of a client that replicas get."""
    dropped = _connection_headers(headers)
    return CIMultiDict(
        [
            (name, value)
            for name, value in headers.items()
            if (low := name.lower()) in _SENT_TO_REPLICAS and low not in dropped
        ]
    )


def response_headers(headers: Mapping[str, str]) -> CIMultiDict[str]:
    """A replica's headers for a client, without connection headers, and those that are not printable: no HTTP has them."""
    dropped = _NOT_RETURNED | listed if (listed := _connection_headers(headers)) else _NOT_RETURNED
    return CIMultiDict(
        [(name, value) for name, value in headers.items() if name.lower() not in dropped and value.isprintable()]
    )


def _connection_headers(headers: Mapping[str, str]) -> frozenset[str]:
    """The headers that `Connection` lists."""
    found = headers.get("connection")
    return frozenset(name.strip().lower() for name in found.split(",")) if found else frozenset()


def _numbers(entries: tuple[str, ...], what: str, form: str, accepts: Callable[[float], bool]) -> dict[str, float]:
    found: dict[str, float] = {}
    for entry in entries:
        name, _, number = entry.partition("=")
        try:
            value = float(number)
        except ValueError:
            value = math.nan
        if not name or name in found or not accepts(value):
            raise ConfigError(f"a tenant's {what} is written {form}, such as team-a=2, once each, not {entry!r}")
        found[name] = value
    return found
