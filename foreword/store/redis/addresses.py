"""Redis URLs: one server, a cluster, or servers that Sentinel watches. redis-py parses the options."""

from __future__ import annotations

import re
from typing import Final
from urllib.parse import urlsplit

from redis.connection import AbstractConnection, Connection, SSLConnection, parse_url
from redis.exceptions import RedisError

from foreword.errors import StoreConfigError
from foreword.store.redact import ESCAPES, redacted, split_url
from foreword.store.redis.cluster import ClusterNodes
from foreword.store.redis.nodes import RedisNode
from foreword.store.redis.sentinel import SentinelNodes

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
