"""Who calls, and who may do what: one rule for the server, the router, the endpoint picker and the middleware for vLLM.

Authentication: API key -> tenant -> cache salt. The salt decides which cached blocks a request can hit. It depends on the API
key; `cache_salt` in a request divides the tenant's cache further (`blocks/salt.py`), and never reaches another tenant's. Only a
router with the `router_key` authenticates callers itself and names their tenant's salt in the header `x-foreword-salt`.

An operator is a caller with the admin key. Where there is no key of any kind, programs on this host are operators; where there
are API keys and no admin key, there is no operator. What belongs to a tenant may be changed by its key; where no API keys are
required all callers are one tenant, so only operators may. A front without keys answers to its own names only.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
import socket
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final, Literal

from foreword.api.routes import Right
from foreword.blocks.salt import derive_salt, ungenerated
from foreword.errors import BadRequest, ConfigError, did_you_mean
from foreword.host_addresses import ip_address
from foreword.request_errors import Forbidden, Unauthorized

if TYPE_CHECKING:
    from foreword.process_config import ServerConfig


# No public name ends like this (RFC 6761, RFC 6762, RFC 8375, ICANN's `internal`, and names in Kubernetes).
_PRIVATE: Final = (".localhost", ".local", ".internal", ".home.arpa", ".test", ".svc")
# Headers that a proxy adds: the caller is somewhere else then. A web page sends `origin`.
_NOT_LOCAL: Final = ("forwarded", "x-forwarded-for", "x-real-ip", "via", "origin")
# A bare key has no "=", so that a mistyped pair is an error.
_PAIR = re.compile(r"(?P<tenant>[A-Za-z0-9_.-]+)=(?P<key>[!-~]+)")
_COMMENT = re.compile(r"(^|\s)#.*")
_BARE = re.compile(r"(?P<key>[!-<>-~]+)")
SALT_HEADER = "x-foreword-salt"
_MAX_SALT = 128


@dataclass(frozen=True, slots=True)
class Tenant:
    """A group of callers. Tenants with equal salts share cached blocks and named prefixes.

    Attributes:
        source: what determined the tenant: the caller's `key`, a `router`, or `none` where no keys are required.
    """

    name: str
    salt: bytes
    source: Literal["key", "router", "none"] = "key"


class Tenants:
    """All tenants. Without any key there is one tenant, with an empty salt.

    Args:
        keys: key and tenant.
        router_key: a caller with this key names the tenant's salt itself.
        current: the salt of a tenant in its generation now, which changes when its data keys are destroyed
            (`store.data_keys.DataKeys.current`).
    """

    def __init__(
        self,
        keys: Iterable[tuple[bytes, Tenant]] = (),
        router_key: bytes | None = None,
        current: Callable[[bytes], bytes] = bytes,
    ) -> None:
        self._keys = tuple(keys)
        self._router_key = router_key
        self._current = current
        self._only = Tenant("default", b"", "none")

    def __len__(self) -> int:
        """The number of tenants that have keys; 0 if no key is required."""
        return len({tenant.name for _, tenant in self._keys})

    @property
    def require_keys(self) -> bool:
        return bool(self._keys) or self._router_key is not None

    def named(self, name: str) -> Tenant | None:
        """The tenant with this name."""
        if not self._keys:
            return self._now(self._only) if name == self._only.name else None
        return next((self._now(tenant) for _, tenant in self._keys if tenant.name == name), None)

    def _now(self, tenant: Tenant) -> Tenant:
        salt = self._current(tenant.salt)
        return tenant if salt == tenant.salt else replace(tenant, salt=salt)

    @property
    def first_key(self) -> str | None:
        """The first API key."""
        return self._keys[0][0].decode() if self._keys else None

    @classmethod
    def from_config(cls, config: ServerConfig, current: Callable[[bytes], bytes] = bytes) -> Tenants:
        """Raises ConfigError for a malformed entry, or a quota of a tenant that has no key."""
        secret = config.tenant_secret.encode() if config.tenant_secret else secrets.token_bytes(32)
        entries = [_parse(entry) for entry in _without_comments(config.api_keys)]
        if config.api_keys and not entries:
            raise ConfigError("server.api_keys has no key, and without any every caller would be let in")
        for _, key in entries:
            config.check_key("each API key", key.decode())
        if len({key for _, key in entries}) < len(entries):
            raise ConfigError("an API key is configured twice; each key belongs to one tenant")
        router_key = config.router_key.encode() if config.router_key else None
        # Behind a router with a key, tenants have other names. A tenant whose quota has a typing error would have no limit.
        names = {name for name, _ in entries} if router_key is None else set()
        if names and (others := {quota.split()[0] for quota in config.quotas} - names - {"*"}):
            raise ConfigError(f"--quota {min(others)}: no API key is of this tenant{did_you_mean(min(others), names)}")
        return cls(((key, Tenant(name, derive_salt(secret, name))) for name, key in entries), router_key, current)

    def authenticate(self, authorization: str | None, salt: str | None = None) -> Tenant:
        """The tenant of an `Authorization` header. Raises Unauthorized, or BadRequest for a malformed salt.

        `salt` is the header `x-foreword-salt`, in hexadecimal; it has an effect only with the router's key.

        Every key is compared in constant time, so the time of an answer reveals nothing about a key.
        """
        if not self.require_keys:
            return self._now(self._only)
        scheme, _, given = (authorization or "").strip().partition(" ")
        if scheme.lower() != "bearer" or not given.strip():
            raise Unauthorized(
                "This server requires an API key; send the header Authorization: Bearer KEY, or x-api-key"
            )
        candidate = given.strip().encode("latin-1", "replace")
        found = [tenant for key, tenant in self._keys if hmac.compare_digest(key, candidate)]
        if self._router_key is not None and hmac.compare_digest(self._router_key, candidate):
            return self._now(_tenant_of_salt(salt))
        if not found:
            raise Unauthorized("The API key is not one that this server knows")
        return self._now(found[0])

    def headers_for(self, salt: bytes) -> dict[str, str]:
        """Headers that authenticate a call on behalf of this salt's tenant at another server with the same keys."""
        base = ungenerated(salt)
        key = next((key for key, tenant in self._keys if hmac.compare_digest(tenant.salt, base)), None)
        if key is not None or self._router_key is None:
            return {} if key is None else {"authorization": f"Bearer {key.decode()}"}
        return {"authorization": f"Bearer {self._router_key.decode()}", SALT_HEADER: salt.hex()}


def _tenant_of_salt(salt: str | None) -> Tenant:
    try:
        found = bytes.fromhex(salt or "")
    except ValueError:
        raise BadRequest(f"The header {SALT_HEADER} must be hexadecimal") from None
    if len(found) > _MAX_SALT:
        raise BadRequest(f"The header {SALT_HEADER} may stand for {_MAX_SALT} bytes at most")
    return Tenant("default" if not found else f"salt-{hashlib.sha256(found).hexdigest()[:12]}", found, "router")


def _without_comments(entries: Iterable[str]) -> Iterator[str]:
    for entry in entries:
        bare = _COMMENT.sub("", entry).strip()
        if bare or not entry.strip():  # an empty one is a mistake
            yield bare


def _parse(entry: str) -> tuple[str, bytes]:
    """Parse `KEY` or `TENANT=KEY`. Each bare key is a separate tenant."""
    match = _PAIR.fullmatch(entry) or _BARE.fullmatch(entry)
    if match is None or not match["key"].strip("="):
        # The entry is a secret: it is not repeated here.
        raise ConfigError(
            "an API key must be written KEY or TENANT=KEY, in printable ASCII without spaces; "
            "a key that contains '=' needs its tenant before it"
        )
    key = match["key"].encode()
    return match.groupdict().get("tenant") or f"key-{hashlib.sha256(key).hexdigest()[:12]}", key


class HostNames:
    """The values of the header `Host` that name this server: against DNS rebinding.

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
