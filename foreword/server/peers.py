"""The allow-list of other servers that a request may name.

A request can name an address: `kv_transfer_params.prefill`, or `to` for a migration. Without a limit, any client could make
this server connect to any address that it can reach, and send a caller's key there. Allowed are the servers that the
configuration names, at their ports (`--drain-to`, `peer://` stores), and those of `--peer`; Unix sockets in the folders of
those that it names. Where no keys are required, so that there are no tenants to keep apart, every port of this host is allowed
too. A caller with the operator's or a router's key may name any address.

Names are compared as written and never resolved, because a name's address can change between the check and the call.
"""

from __future__ import annotations

import ipaddress
import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from urllib.parse import urlsplit

from foreword.configuration import Config
from foreword.errors import BadRequest, ConfigError
from foreword.host_addresses import ip_address
from foreword.request_errors import Forbidden
from foreword.transfer.sockets import parse_address

_Network = ipaddress.IPv4Network | ipaddress.IPv6Network
_PORTS = {"http": 80, "https": 443}
_NAME = re.compile(r"[a-z0-9_*-]+(\.[a-z0-9_*-]+)*")
_HOST = re.compile(rb"[A-Za-z0-9._:-]+")
_LOOPBACK = ("127.0.0.0/8", "::1", "localhost")


@dataclass(frozen=True, slots=True)
class PeerRule:
    """An entry of the allow-list: a network or a pattern of names, at one port or at any; or a folder of Unix sockets."""

    network: _Network | None = None
    names: re.Pattern[str] | None = None
    port: int | None = None
    folder: str | None = None

    def matches(self, host: str, port: int) -> bool:
        if self.port not in (None, port):
            return False
        number = ip_address(host)
        if number is None:
            return self.names is not None and self.names.fullmatch(host) is not None
        return self.network is not None and number in self.network


class Peers:
    """The allow-list.

    Args:
        rules: `HOST`, `HOST:PORT`, `http://HOST:PORT`, `*.DOMAIN`, a network such as `10.0.0.0/8`, `*` for any of these, or
            `unix:/FOLDER`.

    Raises ConfigError for an entry that is none of these.
    """

    def __init__(self, rules: Iterable[str] = ()) -> None:
        self._rules = tuple(rule for text in rules for rule in _parse(text))

    @classmethod
    def from_config(cls, config: Config) -> Peers:
        """Raises ConfigError, also for a malformed URL in `--drain-to`."""
        given = config.server
        keyed = given.api_keys or given.router_key
        return cls((*(() if keyed else _this_host(config)), *_named(config), *given.peers))

    def check_address(self, address: str, param: str) -> None:
        """Check a transfer address. Raises BadRequest for a malformed one, Forbidden for one that is not allowed."""
        try:
            where = parse_address(address)
        except ConfigError as error:
            raise BadRequest(f"{param}: {error.message}", param=param) from error
        if not where.path:
            self._check(where.host, where.port, address, param)
        elif os.path.dirname(os.path.realpath(where.path)) not in {rule.folder for rule in self._rules}:
            raise self._refused(address, f"unix:{os.path.dirname(where.path)}", param)

    def check_url(self, url: str, param: str) -> None:
        """Check a server's URL. Raises BadRequest for a malformed one, Forbidden for one that is not allowed."""
        import httpx

        # Parsed by the HTTP client that calls it later: a second parser could understand the URL differently.
        parts = httpx.URL(server_url(url, param))
        self._check(parts.raw_host.decode("ascii"), parts.port or _PORTS[parts.scheme], url, param)

    def _check(self, host: str, port: int, given: str, param: str) -> None:
        bare = _bare(host)
        if not any(rule.matches(bare, port) for rule in self._rules):
            raise self._refused(given, bare, param)

    @staticmethod
    def _refused(given: str, rule: str, param: str) -> Forbidden:
        return Forbidden(
            f"{param}: {given} is not an allowed server; the operator of this server can allow it with "
            f"--peer {rule} (server.peers; names and addresses are compared as written)",
            param=param,
        )


def server_url(text: str, param: str) -> str:
    """A server's URL without a trailing slash. Raises BadRequest."""
    import httpx

    try:
        parts = httpx.URL(text.strip())
        plain = not (parts.query or parts.fragment or parts.userinfo) and (parts.port or 0) <= 65535
        valid = parts.scheme in _PORTS and plain and _HOST.fullmatch(parts.raw_host) is not None
    except (httpx.InvalidURL, ValueError):
        valid = False
    if not valid:
        raise BadRequest(f"{param!r} must be a server's URL, such as http://10.0.0.7:8000, not {text!r}", param=param)
    return text.strip().rstrip("/")


def _named(config: Config) -> Iterator[str]:
    """Rules for the servers that other keys of the configuration name."""
    for url in config.server.drain_to:
        import httpx

        try:
            parts = httpx.URL(server_url(url, "drain_to"))
            yield _as_rule(parts.raw_host.decode("ascii"), parts.port or _PORTS[parts.scheme])
        except BadRequest as error:
            raise ConfigError(f"--drain-to: {error.message}") from error
    for url in config.store.urls:
        if url.startswith("peer://"):
            place = urlsplit(url)
            yield _as_rule(place.hostname, place.port) if place.hostname and place.port else _folder_of(place.path)
    for text in (config.transfer.bind, config.transfer.advertise):
        if text is not None and (path := parse_address(text).path):
            yield _folder_of(path)


def _this_host(config: Config) -> Iterator[str]:
    """Rules for this host at any port: the loopback interface, and its own addresses for transfers."""
    yield from _LOOPBACK
    for text in (config.transfer.bind, config.transfer.advertise):
        host = parse_address(text).host if text is not None else ""
        number = ip_address(host)
        if host and not (number is not None and number.is_unspecified):
            yield f"[{host}]" if ":" in host else host


def _as_rule(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _folder_of(path: str) -> str:
    return f"unix:{os.path.dirname(os.path.abspath(path))}"


def _parse(text: str) -> Iterator[PeerRule]:
    """The rules of one entry. Raises ConfigError."""
    entry = text.strip().lower()
    if entry == "*":
        yield PeerRule(ipaddress.ip_network("0.0.0.0/0"))
        yield PeerRule(ipaddress.ip_network("::/0"), re.compile(".*"))
        return
    if entry.startswith("unix:"):
        folder = text.strip()[len("unix:") :]
        if not os.path.isabs(folder):
            raise _wrong(text)
        yield PeerRule(folder=os.path.realpath(folder))
        return
    host, port = _split(entry, text)
    try:
        yield PeerRule(ipaddress.ip_network(host, strict=False), port=port)
    except ValueError:
        if not _NAME.fullmatch(host) or not re.search(r"[a-z]", host):
            raise _wrong(text) from None
        yield PeerRule(names=_pattern(host), port=port)


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
    if port is not None and not 0 < port <= 65535:
        raise _wrong(text)
    return _bare(host), port


def _wrong(text: str) -> ConfigError:
    return ConfigError(
        f"server.peers: {text!r} is not a peer; write a host, host:port, http://host:port, *.domain, a network such as "
        "10.0.0.0/8, * for any, or unix:/FOLDER for the sockets in a folder"
    )


def _pattern(host: str) -> re.Pattern[str]:
    """A leading `*.` matches one or more labels, any other `*` a part of one label: `web-*` does not match `web-1.a.org`."""
    head, rest = (r"(?:[^.]+\.)+", host[2:]) if host.startswith("*.") else ("", host)
    return re.compile(head + "[^.]*".join(map(re.escape, rest.split("*"))))


def _bare(host: str) -> str:
    """A host in canonical form."""
    return host.lower().removeprefix("[").removesuffix("]").removesuffix(".")
