"""The section `transfer` of the configuration: KV transfer between instances."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from foreword.config import at_least, between, check_secret, check_section, constant, parse_bytes
from foreword.errors import ConfigError

ALL_RIGHTS = frozenset({"pull", "push", "get"})
_LIMITED = re.compile(r"[a-z]+(\+[a-z]+)*=[^=]")  # a secret that was meant for a peer with fewer rights
_SHARES = {"connect_timeout": 6, "answer_timeout": 3, "beat_seconds": 15}  # of progress_timeout


@dataclass(frozen=True, slots=True)
class SharedSecret:
    """A secret that peers may prove, and what a peer that proves it may begin."""

    text: str = field(repr=False)
    rights: frozenset[str] = ALL_RIGHTS

    @classmethod
    def parse(cls, entry: str) -> SharedSecret:
        """`SECRET` or `RIGHTS=SECRET`; RIGHTS are `pull`, `push` and `get`, joined by `+`."""
        rights, equals, text = entry.partition("=")
        names = frozenset(rights.split("+"))
        return cls(text, names) if equals and names < ALL_RIGHTS else cls(entry)


@dataclass(frozen=True, slots=True)
class TransferConfig:
    """KV transfer between instances.

    Attributes:
        bind: address to listen on: `host:port` (port 0 takes a free one) or `unix:/path`. Other addresses than loopback
            require a secret.
        advertise: address under which other instances reach this one; by default the one in bind.
        secret: secret shared by all instances, at least 16 characters; without one, only peers on this host are accepted.
            Further lines are secrets that are accepted besides, while it is being changed on all instances, and, written
            `RIGHTS=SECRET`, those of peers that may do less: they may begin a remote prefill (`pull`), a migration to this
            instance (`push`) or a read of its blocks (`get`), for example `get=...` or `pull+get=...`.
        tls: encrypt connections over TCP with TLS 1.3; all instances or none. It needs a secret, and where this instance
            listens a certificate.
        tls_certificate_file: certificate with its private key, in PEM, or a folder with `tls.crt` and `tls.key`, as a Secret of
            Kubernetes. It may be self-signed, because the secret authenticates it.
        ring: receive buffer per connection and direction, and the bytes that may wait to be sent; also the limit for the size
            of a part (half of it with shared memory).
        progress_timeout: seconds without progress after which a transfer or a stalled link ends. A peer has a sixth of it to
            connect, and a third to accept a transfer or to give a sign of life.
        lease_seconds: seconds that blocks are kept for a peer that gives no sign of life.
        max_connections: maximum number of connections at a time, and of four times as many transfers; more are refused.
    """

    GONE = (
        ("tls_key_file", "tls_certificate_file names the file of both, or their folder"),
        ("previous_secrets", "write them into secret, one a line, behind the first"),
        ("limited_secrets", "write them into secret, one a line, behind the first"),
        ("queue", "ring is its limit"),
        ("max_transfers", "it is four times max_connections"),
    )
    bind: str = "127.0.0.1:0"
    advertise: str | None = None
    secret: str | None = field(default=None, repr=False)
    tls: bool = False
    tls_certificate_file: str | None = None
    ring: str = "32MiB"
    progress_timeout: float = between(0.05, 3600, 30.0)
    lease_seconds: float = between(0.05, 3600, 60.0)
    max_connections: int = at_least(1, 64)
    # Shared memory where both sides have it, which the handshake tries. The first that both name is used, in the order of the
    # side that connects; tcp ends the list.
    links: tuple[str, ...] = constant(("shm", "tcp"), "shared memory on one host, and TCP")
    # How long a peer is waited for: shares of progress_timeout.
    connect_timeout: float = constant(0.0, "a sixth of progress_timeout")
    answer_timeout: float = constant(0.0, "a third of progress_timeout")
    beat_seconds: float = constant(0.0, "a fifteenth of progress_timeout; five missed heartbeats end a connection")
    # Fewer tokens take less time to compute than to move. A router does not ask for fewer than its min_prefill.
    min_tokens: int = constant(64, "64 tokens")

    def __post_init__(self) -> None:
        for key, share in _SHARES.items():
            if not getattr(self, key):
                object.__setattr__(self, key, self.progress_timeout / share)
        known = self.shared_secrets()
        # A text without a secret would let everybody in.
        for text in [one.text for one in known] or ([] if self.secret is None else [""]):
            check_secret("transfer.secret", text)
        if any(_LIMITED.match(one.text) for one in known[1:] if one.rights == ALL_RIGHTS):
            raise ConfigError(
                "a line RIGHTS=SECRET of transfer.secret has some of the rights pull, push and get, not all"
            )
        if known and known[0].rights != ALL_RIGHTS:
            raise ConfigError("transfer.secret has only lines RIGHTS=SECRET; one must be the secret of all instances")
        if self.tls and not known:
            raise ConfigError("transfer.tls needs transfer.secret")
        if not self.tls and self.tls_certificate_file:
            raise ConfigError("transfer.tls_certificate_file needs transfer.tls")
        unknown = [link for link in self.links if link not in ("shm", "tcp")]
        if unknown:
            raise ConfigError(f"transfer.links: unknown link {', '.join(unknown)}; the known links are shm and tcp")
        if "tcp" not in self.links:
            raise ConfigError(f"transfer.links must contain tcp; it is {', '.join(self.links) or 'empty'}")
        if parse_bytes(self.ring, "transfer.ring (--transfer-ring)") < 1 << 16:
            raise ConfigError("transfer.ring must be at least 64KiB")
        check_section("transfer", self)

    @property
    def max_transfers(self) -> int:
        """How many transfers there may be at a time."""
        return 4 * self.max_connections

    def shared_secrets(self) -> tuple[SharedSecret, ...]:
        """All secrets that peers may prove, this instance's own first."""
        lines = (line.strip() for line in (self.secret or "").splitlines())
        parsed = [SharedSecret.parse(line) for line in lines if line]
        return tuple(sorted(parsed, key=lambda one: one.rights != ALL_RIGHTS))
