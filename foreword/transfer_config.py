"""The section `transfer` of the configuration: KV transfer between instances."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from foreword.config import at_least, between, check_secret, check_section, parse_bytes, read_text
from foreword.errors import ConfigError

ALL_RIGHTS = frozenset({"pull", "push", "get"})


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
        return cls(text, names) if equals and names <= ALL_RIGHTS else cls(entry)


@dataclass(frozen=True, slots=True)
class TransferConfig:
    """KV transfer between instances.

    Attributes:
        bind: address to listen on: `host:port` (port 0 takes a free one) or `unix:/path`. Other addresses than loopback
            require a secret.
        advertise: address under which other instances reach this one; by default the one in bind.
        secret: secret shared by all instances, at least 16 characters; without one, only peers on this host are accepted.
        secret_file: file with the secret, one per line: the first is `secret`, further ones are `previous_secrets`, and
            those written `RIGHTS=SECRET` are `limited_secrets`.
        previous_secrets: secrets that are accepted besides `secret`, while it is being changed on all instances.
        limited_secrets: secrets of peers that may do less, each as `RIGHTS=SECRET`: they may begin a remote prefill (`pull`),
            a migration to this instance (`push`) or a read of its blocks (`get`), for example `get=...` or `pull+get=...`.
        tls: encrypt connections over TCP with TLS 1.3; all instances or none. It needs a secret, and where this instance
            listens a certificate.
        tls_certificate_file: certificate with its private key, in PEM, or a folder with `tls.crt` and `tls.key`, as a Secret of
            Kubernetes. It may be self-signed, because the secret authenticates it.
        links: links to use for payloads, of shm and tcp: the first one that both sides support, in the order of the side
            that connects. tcp is required and ends the list.
        ring: receive buffer per connection and direction; also the limit for the size of a part (half of it with shared
            memory).
        queue: bytes per connection that may wait to be sent.
        connect_timeout: seconds to establish a connection.
        answer_timeout: seconds for a peer to accept or refuse a transfer.
        progress_timeout: seconds without progress after which a transfer or a stalled link ends.
        lease_seconds: seconds that blocks are kept for a peer that gives no sign of life.
        beat_seconds: seconds between heartbeats on idle connections; a connection ends after five missed ones.
        max_transfers: maximum number of transfers at a time; further ones are refused.
        max_connections: maximum number of connections at a time; further ones are refused.
        min_tokens: prompts with fewer tokens to compute are prefilled locally, even if a router asks for remote prefill.
    """

    GONE = (("tls_key_file", "tls_certificate_file names the file of both, or their folder"),)
    bind: str = "127.0.0.1:0"
    advertise: str | None = None
    secret: str | None = field(default=None, repr=False)
    secret_file: str | None = None
    previous_secrets: tuple[str, ...] = field(default=(), repr=False)
    limited_secrets: tuple[str, ...] = field(default=(), repr=False)
    tls: bool = False
    tls_certificate_file: str | None = None
    links: tuple[str, ...] = ("shm", "tcp")
    ring: str = "32MiB"
    queue: str = "32MiB"
    connect_timeout: float = between(0.05, 3600, 5.0)
    answer_timeout: float = between(0.05, 3600, 10.0)
    progress_timeout: float = between(0.05, 3600, 30.0)
    lease_seconds: float = between(0.05, 3600, 60.0)
    beat_seconds: float = between(0.05, 3600, 2.0)
    max_transfers: int = at_least(1, 256)
    max_connections: int = at_least(1, 64)
    min_tokens: int = at_least(1, 64)

    def __post_init__(self) -> None:
        if self.secret is not None and self.secret_file is not None:
            raise ConfigError("give transfer.secret or transfer.secret_file, not both")
        for secret in self.shared_secrets():
            check_secret("transfer.secret", secret.text)
        if any(SharedSecret.parse(entry).rights == ALL_RIGHTS for entry in self.limited_secrets):
            raise ConfigError(
                "transfer.limited_secrets are written RIGHTS=SECRET, with fewer rights than pull+push+get"
            )
        if self.secret is None and self.secret_file is None and (self.tls or self.shared_secrets()):
            raise ConfigError("transfer.tls, previous_secrets and limited_secrets need transfer.secret")
        if not self.tls and self.tls_certificate_file:
            raise ConfigError("transfer.tls_certificate_file needs transfer.tls")
        unknown = [link for link in self.links if link not in ("shm", "tcp")]
        if unknown:
            raise ConfigError(f"transfer.links: unknown link {', '.join(unknown)}; the known links are shm and tcp")
        if "tcp" not in self.links:
            raise ConfigError(f"transfer.links must contain tcp; it is {', '.join(self.links) or 'empty'}")
        ring = parse_bytes(self.ring, "transfer.ring (--transfer-ring)")
        if ring < 1 << 16 or parse_bytes(self.queue, "transfer.queue (--transfer-queue)") < 1:
            raise ConfigError("transfer.ring must be at least 64KiB and transfer.queue at least one byte")
        check_section("transfer", self)

    def with_secret(self) -> TransferConfig:
        """The configuration with the secret read from its file. Raises ConfigError."""
        if self.secret_file is None:
            return self
        text = read_text(self.secret_file, "transfer.secret_file")
        lines = [line.strip() for line in text.splitlines() if line.strip()]
        limited = tuple(line for line in lines if SharedSecret.parse(line).rights != ALL_RIGHTS)
        full = [line for line in lines if line not in limited]
        if not full:
            raise ConfigError(f"transfer.secret_file {self.secret_file} contains no secret")
        return replace(
            self,
            secret=full[0],
            secret_file=None,
            previous_secrets=(*full[1:], *self.previous_secrets),
            limited_secrets=(*limited, *self.limited_secrets),
        )

    def shared_secrets(self) -> tuple[SharedSecret, ...]:
        """All secrets that peers may prove, this instance's own first."""
        full = (SharedSecret(text) for text in (self.secret, *self.previous_secrets) if text is not None)
        return (*full, *map(SharedSecret.parse, self.limited_secrets))
