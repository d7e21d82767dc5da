"""Whose KV a chain is: the tenant's, and below the tenant that of a salt which the client chose itself.

The tenant is the caller, as authentication or a router says. Quotas, fair shares, listings and erasures count by tenant. A
client's own `cache_salt` divides the cache of its tenant further. It makes no tenant, however many of them a client sends.

The first 16 bytes of a chain's root key are in the names of all its blocks (dev/formats.md):

    without a client's salt   SHA-256("foreword/tenant\\0" + tenant)[:16]
    with one                  the first 12 of these bytes || SHA-256("foreword/salt\\0" + client)[:4]

So the blocks of a tenant are those whose names have the same 12 bytes there, and those of one client's salt 16.

A tenant whose key was destroyed begins a new *generation* (`store/data_keys.py`): 6 random bytes, which are a part of its salt
from then on, so that what it had is unreachable at once. In names they take the place of the last 6 of the 12 bytes.
"""

from __future__ import annotations

import hmac
import re
from hashlib import sha256
from typing import Final, NamedTuple

DIGEST_BYTES: Final = 16
TENANT_BYTES: Final = 12
_CLIENT_BYTES: Final = 16
GENERATION_BYTES: Final = 6
GENERATION_MARK: Final = b"\x00gen"
_SHARED_BYTES: Final = TENANT_BYTES - GENERATION_BYTES  # what the generations of a tenant have in common
# A router or gateway marks so the `cache_salt` of a request to an engine without tenants of its own. vLLM takes up to 128
# characters there, without slashes.
_MARK: Final = "foreword:"
_TEXT: Final = re.compile(rf"{_MARK}((?:[0-9a-f]{{2}}){{0,128}})(?:\.([0-9a-f]{{{2 * _CLIENT_BYTES}}}))?")


class Salt(NamedTuple):
    """The separation of callers' KV: equal salts share blocks, others never do.

    Attributes:
        tenant: the tenant's secret salt, b"" without tenants.
        client: derived from the client's own `cache_salt`, b"" without one.
    """

    tenant: bytes = b""
    client: bytes = b""

    def __bool__(self) -> bool:
        return any(map(bool, self))

    @classmethod
    def of(cls, tenant: bytes, cache_salt: str | None) -> Salt:
        """The salt of a tenant's request with this `cache_salt`."""
        if not cache_salt:
            return cls(tenant)
        given = b"cache_salt\x00" + cache_salt.encode("utf-8", "surrogatepass")
        return cls(tenant, hmac.digest(tenant, given, sha256)[:_CLIENT_BYTES])

    @classmethod
    def parse(cls, cache_salt: str | None) -> Salt:
        """The salt of a request to an engine without tenants of its own: `text` of a salt, or else a client's own."""
        known = _TEXT.fullmatch(cache_salt or "")
        if known is None or cache_salt == _MARK:
            return cls.of(b"", cache_salt)
        return cls(bytes.fromhex(known[1]), bytes.fromhex(known[2] or ""))

    @property
    def text(self) -> str:
        """The salt for `parse`; "" for none. It is as secret as the tenant's."""
        client = f".{self.client.hex()}" if self.client else ""
        return f"{_MARK}{self.tenant.hex()}{client}" if self.tenant or client else ""

    @property
    def digest(self) -> bytes:
        """The first bytes of the root key of a chain with this salt, 16 of them."""
        base = ungenerated(self.tenant)
        tenant = _digest(b"foreword/tenant\x00", base)
        if base != self.tenant:
            tenant = tenant[:_SHARED_BYTES] + self.tenant[-GENERATION_BYTES:] + tenant[TENANT_BYTES:]
        client = _digest(b"foreword/salt\x00", self.client)
        return tenant[:TENANT_BYTES] + client[: DIGEST_BYTES - TENANT_BYTES] if self.client else tenant

    @property
    def prefix(self) -> bytes:
        """The first bytes of the root keys of all chains that are meant: those of the whole tenant without a client's salt."""
        return self.digest if self.client else self.digest[:TENANT_BYTES]


NO_SALT: Final = Salt()
# The salt of blocks that all tenants share (`public_blocks.py`). No tenant has it: a tenant's salt is a digest, or empty.
PUBLIC: Final = Salt(b"foreword/public")


def tenant_digest(tenant: bytes) -> str:
    """Identifies a tenant without revealing its salt."""
    return Salt(tenant).digest.hex()


def derive_salt(secret: bytes, tenant: str) -> bytes:
    """HMAC-SHA256 of the tenant's name: equal on all servers with the same secret."""
    return hmac.digest(secret, tenant.encode(), sha256)


def ungenerated(tenant: bytes) -> bytes:
    """A tenant's salt in its first generation."""
    end = len(tenant) - GENERATION_BYTES
    marked = tenant[max(end - len(GENERATION_MARK), 0) : max(end, 0)] == GENERATION_MARK
    return tenant[: end - len(GENERATION_MARK)] if marked else tenant


def _digest(kind: bytes, data: bytes) -> bytes:
    return sha256(kind + data).digest()[:DIGEST_BYTES]
