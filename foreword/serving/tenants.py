"""Who calls: API key -> tenant -> salt.

The salt decides which cached blocks a request can hit, so it comes from the authenticated caller alone; a salt in a
request body is an unknown field like any other and has no effect.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from foreword.config import ServerConfig
from foreword.errors import ConfigError, Unauthorized

# A bare key has no "=", so that a mistyped pair is not taken for one.
_PAIR = re.compile(r"(?P<tenant>[A-Za-z0-9_.-]+)=(?P<key>[!-~]+)")
_BARE = re.compile(r"(?P<key>[!-<>-~]+)")


@dataclass(frozen=True, slots=True)
class Tenant:
    """A caller. Tenants with equal salts share cached blocks and named prefixes."""

    name: str
    salt: bytes


class Tenants:
    """All callers that the server knows. Without any key there is one tenant, with an empty salt."""

    def __init__(self, keys: Iterable[tuple[bytes, Tenant]] = ()) -> None:
        self._keys = tuple(keys)
        self._only = Tenant("default", b"")

    @classmethod
    def from_config(cls, config: ServerConfig) -> Tenants:
        """Raises ConfigError for an unreadable key file or a malformed entry."""
        secret = config.tenant_secret.encode() if config.tenant_secret else secrets.token_bytes(32)
        entries = [_parse(entry) for entry in (*config.api_keys, *_read(config.api_key_file))]
        if len({key for _, key in entries}) < len(entries):
            raise ConfigError("an API key is configured twice; each key belongs to one tenant")
        return cls((key, Tenant(name, derive_salt(secret, name))) for name, key in entries)

    def authenticate(self, authorization: str | None) -> Tenant:
        """The tenant of an `Authorization` header. Raises Unauthorized.

        Every key is compared in constant time, so the time of an answer tells nothing about a key.
        """
        if not self._keys:
            return self._only
        scheme, _, given = (authorization or "").strip().partition(" ")
        if scheme.lower() != "bearer" or not given.strip():
            raise Unauthorized("This server asks for an API key; send the header Authorization: Bearer KEY")
        candidate = given.strip().encode("latin-1", "replace")
        found = [tenant for key, tenant in self._keys if hmac.compare_digest(key, candidate)]
        if not found:
            raise Unauthorized("The API key is not one that this server knows")
        return found[0]


def derive_salt(secret: bytes, tenant: str) -> bytes:
    """HMAC-SHA256 of the tenant's name: equal on every server that has the same secret."""
    return hmac.digest(secret, tenant.encode(), hashlib.sha256)


def _read(path: str | None) -> list[str]:
    if path is None:
        return []
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise ConfigError(f"cannot read server.api_key_file {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"server.api_key_file {path} is not text in UTF-8") from error
    bare = (line.partition("#")[0].strip() for line in lines)
    return [line for line in bare if line]


def _parse(entry: str) -> tuple[str, bytes]:
    """`KEY` or `TENANT=KEY`. A bare key is a tenant of its own, so that strangers never share by accident."""
    match = _PAIR.fullmatch(entry) or _BARE.fullmatch(entry)
    if match is None or not match["key"].strip("="):
        # The entry is a secret: it is not repeated here.
        raise ConfigError(
            "an API key must be written KEY or TENANT=KEY, in printable ASCII without spaces; "
            "a key that contains '=' needs its tenant before it"
        )
    key = match["key"].encode()
    return match.groupdict().get("tenant") or f"key-{hashlib.sha256(key).hexdigest()[:12]}", key
