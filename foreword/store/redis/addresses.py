"""Redis URLs: one server, a cluster, or servers that Sentinel watches. redis-py parses the options."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from typing import Any, Final
from urllib.parse import urlsplit

from redis.connection import AbstractConnection, Connection, SSLConnection, parse_url
from redis.exceptions import RedisError

from foreword.errors import StoreConfigError, StoreError, StoreTimeout, StoreUnavailable
from foreword.store.base import time_left
from foreword.store.redact import ESCAPES, redacted, split_url
from foreword.store.redis.cluster import Address, ClusterNodes
from foreword.store.redis.nodes import INFO, RedisNode
from foreword.store.redis.resp import Command, ErrorReply, Reply, make_command


class SentinelNodes:
    """The current primary. Sentinel is asked before the first call, and again when the primary fails or became a replica.

    Args:
        sentinels: addresses of Sentinel processes.
        sentinel_options: their connection options, such as a password.
        name: of the primary, as Sentinel's configuration has it.
    """

    def __init__(
        self,
        kind: type[AbstractConnection],
        options: dict[str, Any],
        sentinels: Sequence[Address],
        sentinel_options: dict[str, Any],
        name: str,
    ) -> None:
        self._kind = kind
        self._options = options
        self._name = name
        self._sentinels = [RedisNode(kind, sentinel_options | {"host": host, "port": port}) for host, port in sentinels]
        self._primary: tuple[Address, RedisNode] | None = None
        self._doubtful = True  # ask Sentinel before the next call

    def run(self, commands: Sequence[Command], deadline: float) -> list[Reply]:
        """The replies in the order of the commands. A StoreError stands for each one that did not come."""
        try:
            node = self._find(deadline)
        except StoreError as error:
            return [error] * len(commands)
        replies = node.run(commands, deadline)
        lost = [index for index, reply in enumerate(replies) if _is_lost(reply)]
        self._doubtful = bool(lost)
        if lost and time.monotonic() < deadline:
            self._run_again(node, commands, lost, replies, deadline)
        return replies

    places = 1

    def skips(self, key: bytes) -> bool:
        return False

    def primaries(self, deadline: float) -> list[RedisNode]:
        """All servers to scan: the primary."""
        return [self._find(deadline)]

    def info(self, deadline: float) -> list[Reply]:
        """The primary's reply to INFO."""
        return self.run([INFO], deadline)

    @property
    def usable(self) -> bool:
        """Whether other servers may reply when one has failed: False, only the primary has the data."""
        return False

    def close(self) -> None:
        for node in [*self._sentinels, *([self._primary[1]] if self._primary else [])]:
            node.close()

    def _run_again(
        self, node: RedisNode, commands: Sequence[Command], lost: list[int], replies: list[Reply], deadline: float
    ) -> None:
        """Send the commands that were lost to the new primary, if there is one already."""
        try:
            new = self._find(deadline)
        except StoreError:
            return
        if new is node:
            return
        for index, reply in zip(lost, new.run([commands[index] for index in lost], deadline), strict=True):
            replies[index] = reply

    def _find(self, deadline: float) -> RedisNode:
        if self._primary is None or self._doubtful:
            address = self._ask(deadline)
            if self._primary is None or self._primary[0] != address:
                if self._primary is not None:
                    self._primary[1].close()
                options = self._options | {"host": address[0], "port": address[1]}
                self._primary = (address, RedisNode(self._kind, options))
            self._doubtful = False
        return self._primary[1]

    def _ask(self, deadline: float) -> Address:
        """The primary's address from the first Sentinel that replies with one."""
        question = make_command(b"", b"SENTINEL", b"get-master-addr-by-name", self._name.encode())
        last: StoreError = StoreUnavailable("there is no Sentinel")
        for index, sentinel in enumerate(self._sentinels):
            share = time_left(deadline) / min(3, len(self._sentinels) - index)
            [reply] = sentinel.run([question], time.monotonic() + share)
            match reply:
                case [bytes() as host, bytes() as port] if port.isdigit():
                    return host.decode(), int(port)
                case StoreError():
                    last = reply
                case ErrorReply():
                    last = reply.error()
                case _:
                    last = StoreConfigError(f"Sentinel does not know a primary called {self._name!r}")
        raise last


def _is_lost(reply: Reply) -> bool:
    """Whether a reply shows that the server is not the primary any more."""
    return isinstance(reply, StoreUnavailable | StoreTimeout) or (
        isinstance(reply, ErrorReply) and reply.code == "READONLY"
    )


_UNKNOWN_OPTION = re.compile(r"unexpected keyword argument '(\w+)'")
_HOST = re.compile(r"(\[[^\]]*\]|[^:\[\]]*)(:\d*)?")

Nodes = RedisNode | ClusterNodes | SentinelNodes
_SENTINEL_PORT: Final = 26379


def open_nodes(url: str) -> Nodes:
    """Parse a Redis URL, without connecting. Raises StoreConfigError."""
    parts = split_url(url)
    user, at, hosts = parts.netloc.rpartition("@")
    scheme, _, kind = parts.scheme.partition("+")
    if (
        scheme not in {"redis", "rediss", "unix"}
        or kind not in {"", "cluster", "sentinel"}
        or (scheme == "unix" and kind)
    ):
        raise StoreConfigError(
            f"a Redis URL starts with redis://, rediss://, unix://, redis+cluster:// or redis+sentinel://, unlike {scheme}://"
        )
    several = [host for host in hosts.split(",") if host]
    if not all(map(_HOST.fullmatch, several)) or (scheme != "unix" and "@" in parts.path):
        raise StoreConfigError(f"the Redis URL's host and port cannot be read; {ESCAPES}")
    if scheme == "unix" and hosts:
        raise StoreConfigError(
            f"a Unix socket has no host: write unix:///path or unix://user:password@/path; {ESCAPES}"
        )
    name, _, db = parts.path.strip("/").partition("/") if kind == "sentinel" else ("", "", parts.path)
    if kind == "sentinel" and not name:
        raise StoreConfigError("a Sentinel URL names the primary: redis+sentinel://host1,host2/name")
    if kind and not (several and all(urlsplit(f"//{host}").hostname for host in several)):
        raise StoreConfigError(f"a {kind} URL names hosts: {scheme}+{kind}://host1,host2" + "/name" * bool(name))
    if scheme != "unix" and db.strip("/") and not db.strip("/").isdecimal():
        raise StoreConfigError(f"a Redis URL ends with the number of a database, not {db.strip('/')!r}")
    first = user + at + (several[0] if several else "")
    try:
        path = f"/{db}" if kind == "sentinel" else parts.path
        options = dict(parse_url(f"{scheme}://{first}{path}?{parts.query}"))
        login = {key: options.pop(f"sentinel_{key}", None) for key in ("username", "password")}
        default: type[AbstractConnection] = SSLConnection if scheme == "rediss" else Connection
        connection = options.pop("connection_class", default)
        for key in ("socket_timeout", "socket_connect_timeout"):
            options.pop(key, None)  # deadlines replace them
        connection(**options)
        if not kind and len(several) <= 1:
            return RedisNode(connection, options)
        if not kind:
            raise StoreConfigError("several hosts need the scheme redis+cluster://")
        port = _SENTINEL_PORT if kind == "sentinel" else 6379
        split = (urlsplit(f"//{host}") for host in several)
        seeds = [(one.hostname or "localhost", one.port or port) for one in split]
        if kind == "sentinel":
            own = {key: value for key, value in options.items() if key not in {"db", "username", "password"}}
            return SentinelNodes(connection, options, seeds, own | login, name)
        if options.pop("db", 0):
            raise StoreConfigError("a cluster has database 0 only")
        return ClusterNodes(connection, options, seeds)
    except (TypeError, ValueError, RedisError) as error:
        unknown = _UNKNOWN_OPTION.search(str(error))
        wrong = f"unknown option {unknown[1]!r}" if unknown else redacted(str(error))
        raise StoreConfigError(f"the Redis URL is wrong: {wrong}") from None
