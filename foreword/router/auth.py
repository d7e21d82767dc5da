"""Who calls, and how a replica is told: the salt comes from the caller's key and never from what the client sent."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from multidict import CIMultiDict

from foreword.api.tenants import SALT_HEADER, Tenant, Tenants
from foreword.config import Config
from foreword.errors import ConfigError, Forbidden

# Headers that concern one connection only (RFC 9110, 7.6.1), and those that the router sets itself.
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
_OWN: Final = frozenset(("host", "content-length", "authorization", "x-request-id", "accept-encoding", "expect"))
_NOT_RETURNED: Final = frozenset(("content-length", "date", "server", "x-request-id"))
_OUR_PREFIX: Final = "x-foreword-"


class Callers:
    """API keys, tenants and the keys of replicas.

    Raises ConfigError for malformed keys or weights.
    """

    def __init__(self, config: Config) -> None:
        self.tenants = Tenants.from_config(config.server)
        self.weights = _weights(config.router.tenant_weights)
        self._admin = config.server.admin_key
        self._replica_key = config.router.replica_key
        # Without a key of its own the router asks replicas in the name of the first tenant.
        self._own = self._replica_key or self.tenants.first_key

    @property
    def apart(self) -> bool:
        """Whether there are tenants that must be kept apart."""
        return len(self.tenants) > 0

    @property
    def speaks_for_others(self) -> bool:
        """Whether replicas get the router's own key, so that only the router's salt tells tenants apart."""
        return self._replica_key is not None

    def tenant(self, authorization: str | None) -> Tenant:
        """Raises Unauthorized."""
        return self.tenants.authenticate(authorization)

    def check_admin(self, authorization: str | None, *, changes: bool) -> None:
        """Raises Unauthorized or Forbidden where the state may not be read, or changed."""
        if self._admin is None:
            if changes or self.apart:
                raise Forbidden(
                    "The router was started without --admin-key, so its state cannot be reached from outside"
                )
            return
        Tenants([(self._admin.encode(), Tenant("admin", b""))]).authenticate(authorization)

    def headers(self, tenant: Tenant, authorization: str | None, kind: str) -> dict[str, str]:
        """What authenticates a request at a replica: the router's key and the tenant's salt, or the caller's own key."""
        if self._replica_key is None:
            return {"authorization": authorization} if authorization else {}
        headers = {"authorization": f"Bearer {self._replica_key}"}
        if kind == "foreword" and tenant.salt:
            headers[SALT_HEADER] = tenant.salt.hex()
        return headers

    def own_headers(self) -> dict[str, str]:
        """What authenticates the router itself, for probes and tokenizing."""
        return {"authorization": f"Bearer {self._own}"} if self._own else {}


def cache_salt(tenant: Tenant) -> str | None:
    """The tenant's salt as vLLM's `cache_salt`, and as Foreword's KV events have it."""
    return tenant.salt.hex() or None


def forwarded(headers: Mapping[str, str]) -> CIMultiDict[str]:
    """A client's headers for a replica: without those of the connection and those that only the router may set."""
    dropped = HOP_BY_HOP | _OWN | _named(headers)
    return CIMultiDict(
        (name, value)
        for name, value in headers.items()
        if (low := name.lower()) not in dropped and not low.startswith(_OUR_PREFIX)
    )


def returned(headers: Mapping[str, str]) -> CIMultiDict[str]:
    """A replica's headers for a client."""
    dropped = HOP_BY_HOP | _NOT_RETURNED | _named(headers)
    return CIMultiDict((name, value) for name, value in headers.items() if name.lower() not in dropped)


def _named(headers: Mapping[str, str]) -> frozenset[str]:
    """Headers that `Connection` names as its own."""
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
