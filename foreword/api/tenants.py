"""Authentication: API key -> tenant -> cache salt. The server and the router share it.

The salt decides which cached blocks a request can hit. It depends on the API key; `cache_salt` in a request divides the
tenant's cache further (`blocks/salt.py`), and never reaches another tenant's. Only a router with the `router_key` authenticates
callers itself and names their tenant's salt in the header `x-foreword-salt`.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from foreword.blocks.salt import derive_salt, ungenerated
from foreword.config import read_text
from foreword.errors import BadRequest, ConfigError, did_you_mean
from foreword.request_errors import Unauthorized

if TYPE_CHECKING:
    from foreword.process_config import ServerConfig

# A bare key has no "=", so that a mistyped pair is an error.
_PAIR = re.compile(r"(?P<tenant>[A-Za-z0-9_.-]+)=(?P<key>[!-~]+)")
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
        """Raises ConfigError for an unreadable key file, a malformed entry, or a quota of a tenant that has no key."""
        secret = config.tenant_secret.encode() if config.tenant_secret else secrets.token_bytes(32)
        entries = [_parse(entry) for entry in (*config.api_keys, *_read(config.api_key_file))]
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


def _read(path: str | None) -> list[str]:
    if path is None:
        return []
    lines = read_text(path, "server.api_key_file").splitlines()
    if not (found := [bare for line in lines if (bare := line.partition("#")[0].strip())]):
        raise ConfigError(f"server.api_key_file {path} has no key, and without any every caller would be let in")
    return found


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
