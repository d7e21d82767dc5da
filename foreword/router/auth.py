"""Authentication of clients, and the headers exchanged between clients and replicas.

A tenant's salt comes from the client's API key, never from what the client sent.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from multidict import CIMultiDict

from foreword.api.tenants import SALT_HEADER, Tenant, Tenants
from foreword.config import Config
from foreword.errors import ConfigError, Forbidden

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
# Headers that the router sets.
_ROUTER_HEADERS: Final = frozenset(
    ("host", "content-length", "authorization", "x-request-id", "accept-encoding", "expect")
)
_NOT_RETURNED: Final = frozenset(("content-length", "date", "server", "x-request-id"))
_FOREWORD_PREFIX: Final = "x-foreword-"


class RouterAuth:
    """API keys of clients, tenants, and keys for replicas.

    Raises ConfigError for malformed keys or weights.
    """

    def __init__(self, config: Config) -> None:
        self.tenants = Tenants.from_config(config.server)
        self.weights = _weights(config.router.tenant_weights)
        self._admin = config.server.admin_key
        self._replica_key = config.router.replica_key
        # Without a replica key, probes use the key of the first tenant.
        self._probe_key = self._replica_key or self.tenants.first_key

    @property
    def has_tenants(self) -> bool:
        """Whether there are tenants, whose blocks must not be shared."""
        return len(self.tenants) > 0

    @property
    def uses_own_key(self) -> bool:
        """Whether replicas get the router's own key, so that only the salt in the request separates tenants."""
        return self._replica_key is not None

    def tenant(self, authorization: str | None) -> Tenant:
        """Raises Unauthorized."""
        return self.tenants.authenticate(authorization)

    def check_admin(self, authorization: str | None, *, changes: bool) -> None:
        """Raises Unauthorized or Forbidden if the client may not read the router's state, or change it."""
        if self._admin is None:
            if changes or self.has_tenants:
                purpose = "change replicas" if changes else "read the router's state"
                raise Forbidden(f"Start the router with --admin-key to {purpose}")
            return
        Tenants([(self._admin.encode(), Tenant("admin", b""))]).authenticate(authorization)

    def headers(self, tenant: Tenant, authorization: str | None, kind: str) -> dict[str, str]:
        """Authentication at a replica: the router's key and the tenant's salt, or else the client's own key."""
        if self._replica_key is None:
            return {"authorization": authorization} if authorization else {}
        headers = {"authorization": f"Bearer {self._replica_key}"}
        if kind == "foreword" and tenant.salt:
            headers[SALT_HEADER] = tenant.salt.hex()
        return headers

    def probe_headers(self) -> dict[str, str]:
        """Authentication of the router's own requests: probes and tokenization."""
        return {"authorization": f"Bearer {self._probe_key}"} if self._probe_key else {}


def cache_salt(tenant: Tenant) -> str | None:
    """The tenant's salt as vLLM's `cache_salt` and as Foreword's KV events contain it."""
    return tenant.salt.hex() or None


def request_headers(headers: Mapping[str, str]) -> CIMultiDict[str]:
    """A client's headers for a replica, without connection headers and those that only the router may set."""
    dropped = HOP_BY_HOP | _ROUTER_HEADERS | _connection_headers(headers)
    return CIMultiDict(
        (name, value)
        for name, value in headers.items()
        if (low := name.lower()) not in dropped and not low.startswith(_FOREWORD_PREFIX)
    )


def response_headers(headers: Mapping[str, str]) -> CIMultiDict[str]:
    """A replica's headers for a client, without connection headers."""
    dropped = HOP_BY_HOP | _NOT_RETURNED | _connection_headers(headers)
    return CIMultiDict((name, value) for name, value in headers.items() if name.lower() not in dropped)


def _connection_headers(headers: Mapping[str, str]) -> frozenset[str]:
    """The headers that `Connection` lists."""
    found = headers.get("connection")
    return frozenset(name.strip().lower() for name in found.split(",")) if found else frozenset()


def _weights(entries: tuple[str, ...]) -> dict[str, float]:
    weights: dict[str, float] = {}
    for entry in entries:
        name, _, weight = entry.partition("=")
        try:
            weights[name] = float(weight)
        except ValueError:
            raise ConfigError(f"a tenant's weight is written TENANT=WEIGHT, such as team-a=2, not {entry!r}") from None
    return weights
