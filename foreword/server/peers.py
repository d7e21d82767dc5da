"""Which other servers this one may be sent to.

A request can name an address: `kv_transfer_params.prefill`, or `to` of a request that shall move. Without a bound whoever may
send requests could make this server connect to anything that it can reach, and show a caller's key there. Allowed are this
host, the hosts that the configuration names anyway (`--drain-to`, stores at `peer://`, the own transfer address), and what
`--peer` says. Whoever has the operator's key, or a router's, is not asked.

Names are compared as they are written and never resolved: what a name stands for can change between the check and the call.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from urllib.parse import urlsplit

import httpx

from foreword.config import Config
from foreword.errors import BadRequest, ConfigError, Forbidden
from foreword.transfer.sockets import parse_address

_Network = ipaddress.IPv4Network | ipaddress.IPv6Network
_PORTS = {"http": 80, "https": 443}
_NAME = re.compile(r"[a-z0-9_*-]+(\.[a-z0-9_*-]+)*")
_HOST = re.compile(rb"[A-Za-z0-9._:-]+")
_LOCAL = ("127.0.0.0/8", "::1", "localhost")


@dataclass(frozen=True, slots=True)
class Rule:
    """One entry of the list: addresses of a network, or names that fit a pattern; at one port, or any."""

    network: _Network | None = None
    names: re.Pattern[str] | None = None
    port: int | None = None

    def fits(self, host: str, port: int) -> bool:
        if self.port not in (None, port):
            return False
        number = _number(host)
        if number is None:
            return self.names is not None and self.names.fullmatch(host) is not None
        return self.network is not None and number in self.network


class Peers:
    """This host, and whom `rules` add.

    Args:
        rules: `HOST`, `HOST:PORT`, `http://HOST:PORT`, `*.DOMAIN`, a network such as `10.0.0.0/8`, or `*` for everybody.

    Raises ConfigError for an entry that is none of these.
    """

    def __init__(self, rules: Iterable[str] = ()) -> None:
        self._rules = tuple(rule for text in (*_LOCAL, *rules) for rule in _parse(text))

    @classmethod
    def from_config(cls, config: Config) -> Peers:
        """Raises ConfigError, also for a URL in `--drain-to` that is none."""
        return cls((*_named(config), *config.server.peers))

    def check_address(self, address: str, param: str) -> None:
        """An instance's address for transfers. Raises BadRequest for what is none, Forbidden."""
        try:
            where = parse_address(address)
        except ConfigError as error:
            raise BadRequest(f"{param}: {error.message}", param=param) from error
        if not where.path:
            self._check(where.host, where.port, address, param)

    def check_url(self, url: str, param: str) -> None:
        """A server's URL. Raises BadRequest for what is none, Forbidden."""
        # As the client that calls it reads it: two readings of one text would be a way around this check.
        parts = httpx.URL(server_url(url, param))
        self._check(parts.raw_host.decode("ascii"), parts.port or _PORTS[parts.scheme], url, param)

    def _check(self, host: str, port: int, given: str, param: str) -> None:
        bare = _bare(host)
        if not any(rule.fits(bare, port) for rule in self._rules):
            raise Forbidden(
                f"{param}: {given} is none of the servers that this one may be sent to; its operator can allow it with "
                f"--peer {bare} (server.peers; names and addresses are compared as written)",
                param=param,
            )


def server_url(text: str, param: str) -> str:
    """A server's URL without a slash at its end. Raises BadRequest."""
    try:
        parts = httpx.URL(text.strip())
        plain = not (parts.query or parts.fragment or parts.userinfo) and (parts.port or 0) <= 65535
        fine = parts.scheme in _PORTS and plain and _HOST.fullmatch(parts.raw_host) is not None
    except (httpx.InvalidURL, ValueError):
        fine = False
    if not fine:
        raise BadRequest(f"{param!r} is a server's URL, such as http://10.0.0.7:8000, not {text!r}", param=param)
    return text.strip().rstrip("/")


def _named(config: Config) -> Iterator[str]:
    """Hosts that the configuration names for other reasons, in the form of rules."""
    for url in config.server.drain_to:
        try:
            yield _as_rule(httpx.URL(server_url(url, "drain_to")).raw_host.decode("ascii"))
        except BadRequest as error:
            raise ConfigError(f"--drain-to: {error.message}") from error
    for url in config.store.urls:
        if url.startswith("peer://"):
            yield _as_rule(urlsplit(url).hostname or "localhost")
    own = (config.transfer.bind, config.transfer.advertise)
    hosts = [parse_address(text).host for text in own if text is not None]
    yield from (_as_rule(host) for host in hosts if host and not _is_any(host))


def _as_rule(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def _is_any(host: str) -> bool:
    number = _number(host)
    return number is not None and number.is_unspecified


def _parse(text: str) -> Iterator[Rule]:
    """The rules of one entry. Raises ConfigError."""
    entry = text.strip().lower()
    if entry == "*":
        yield Rule(ipaddress.ip_network("0.0.0.0/0"))
        yield Rule(ipaddress.ip_network("::/0"), re.compile(".*"))
        return
    host, port = _split(entry, text)
    try:
        yield Rule(ipaddress.ip_network(host, strict=False), port=port)
    except ValueError:
        if not _NAME.fullmatch(host) or not re.search(r"[a-z]", host):
            raise _wrong(text) from None
        yield Rule(names=_pattern(host), port=port)


def _split(entry: str, text: str) -> tuple[str, int | None]:
    """Host (or network) and port of an entry. Raises ConfigError."""
    scheme, url, rest = entry.partition("://")
    if url and (scheme not in _PORTS or rest.rstrip("/").count("/")):
        raise _wrong(text)
    host = rest.rstrip("/") if url else entry
    port = _PORTS[scheme] if url else None
    found = re.fullmatch(r"\[(.+)\](?::(\d{1,5}))?|([^:]+):(\d{1,5})", host)
    if found is not None:
        host, given = found[1] or found[3], found[2] or found[4]
        port = int(given) if given else port
    return _bare(host), port


def _wrong(text: str) -> ConfigError:
    return ConfigError(
        f"server.peers: {text!r} is not a peer; write a host, host:port, http://host:port, *.domain, a network such as "
        "10.0.0.0/8, or * for everybody"
    )


def _pattern(host: str) -> re.Pattern[str]:
    """`*.` in front stands for any names before it, any other `*` for a part of one: `web-*` is not `web-1.example.org`."""
    head, rest = (r"(?:[^.]+\.)+", host[2:]) if host.startswith("*.") else ("", host)
    return re.compile(head + "[^.]*".join(map(re.escape, rest.split("*"))))


def _bare(host: str) -> str:
    """One way to write a host."""
    return host.lower().removeprefix("[").removesuffix("]").removesuffix(".")


def _number(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """An address written in numbers; an IPv4 address within an IPv6 one is itself."""
    try:
        found = ipaddress.ip_address(host)
    except ValueError:
        return None
    mapped = found.ipv4_mapped if isinstance(found, ipaddress.IPv6Address) else None
    return mapped or found
