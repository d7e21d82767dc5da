"""A Redis server and a pool of connections to it.

redis-py opens the sockets (TLS, Unix, keep-alive); `resp.py` speaks the protocol on them. Nothing is connected before
the first command.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Sequence
from functools import partial
from typing import Any, Final

from redis.backoff import NoBackoff
from redis.connection import AbstractConnection
from redis.exceptions import RedisError
from redis.exceptions import TimeoutError as RedisTimeout
from redis.retry import Retry

from foreword.errors import StoreConfigError, StoreError, StoreTimeout, StoreUnavailable
from foreword.store.background import at_once, divide
from foreword.store.base import time_left
from foreword.store.redact import redacted
from foreword.store.redis.resp import Command, ConnectionLost, ErrorReply, Reply, RespConnection, make_command

_MAX_IDLE: Final = 32  # connections kept per node
_SENDERS: Final = 2  # connections over which much data is sent: one waits while the server reads from the other
_PERMANENT: Final = {"ERR", "NOAUTH", "NOPERM", "WRONGPASS"}  # login errors that will not go away
PLACES: Final = 4  # keys of a block in a cluster; a later one is used while the nodes of those before it are down
INFO: Final = make_command(b"", b"INFO")


class RedisNode:
    """A server and a pool of idle connections to it.

    A connection is used by one thread at a time, and returns to the pool only after every command had its reply. All
    commands of a store can be repeated, so they are sent again if the server had closed a pooled connection.
    """

    def __init__(self, kind: type[AbstractConnection], options: dict[str, Any]) -> None:
        self.kind = kind
        self.options = options
        self._idle: deque[RespConnection] = deque()
        self._process = os.getpid()
        self._closed = False

    def run(self, commands: Sequence[Command], deadline: float) -> list[Reply]:
        """The replies in the order of the commands. A StoreError stands for each one that did not come."""
        parts = divide([sum(map(len, command.parts)) for command in commands], _SENDERS)
        replies = at_once([partial(self.run_in_order, commands[part], deadline) for part in parts])
        return [reply for part in replies for reply in part]

    def run_in_order(self, commands: Sequence[Command], deadline: float) -> list[Reply]:
        """Run commands as `run` does, on one connection."""
        replies: list[Reply] = []
        try:
            self._run(commands, replies, deadline)
        except StoreError as error:
            replies += [error] * (len(commands) - len(replies))
        return replies

    @property
    def name(self) -> str:
        """Host and port, or the path of a socket."""
        options = self.options
        return str(options.get("path") or f"{options.get('host')}:{options.get('port')}")

    def info(self, deadline: float) -> list[Reply]:
        """The reply of each server to INFO."""
        return self.run([INFO], deadline)

    @property
    def usable(self) -> bool:
        """Whether other servers may reply when one has failed: False, there is only one."""
        return False

    places = 1  # keys that a block may have

    def skips(self, key: bytes) -> bool:
        """Whether commands for this key are not sent, since its node is down."""
        return False

    def primaries(self, deadline: float) -> list[RedisNode]:
        """All servers to scan: this one."""
        return [self]

    def close_idle(self) -> None:
        """Close the idle connections."""
        while self._idle:
            try:
                self._idle.pop().close()
            except IndexError:  # another thread took the last one
                return

    def close(self) -> None:
        self._closed = True
        self.close_idle()

    def _run(self, commands: Sequence[Command], replies: list[Reply], deadline: float) -> None:
        connection = self._take()
        if connection is not None:
            try:
                return self._exchange(connection, commands, replies, deadline)
            except ConnectionLost:
                self.close_idle()  # the other pooled connections are probably lost too
        return self._exchange(self._connect(deadline), commands, replies, deadline)

    def _exchange(
        self, connection: RespConnection, commands: Sequence[Command], replies: list[Reply], deadline: float
    ) -> None:
        try:
            connection.exchange(commands, replies, deadline)
        except BaseException:
            connection.close()
            raise
        if len(self._idle) < _MAX_IDLE:
            self._idle.append(connection)
        else:
            connection.close()
        if self._closed:
            self.close_idle()

    def _take(self) -> RespConnection | None:
        if self._process != os.getpid():  # after a fork these sockets belong to the parent
            self._idle, self._process = deque(), os.getpid()
        while self._idle:
            try:
                connection = self._idle.pop()
            except IndexError:
                return None
            if connection.idle:
                return connection
            connection.close()
        return None

    def _connect(self, deadline: float) -> RespConnection:
        """Open a connection and log in."""
        half = time_left(deadline) / 2  # half for the connection, half for TLS
        times: dict[str, Any] = {"socket_connect_timeout": half, "socket_timeout": half, "retry": Retry(NoBackoff(), 0)}
        times["redis_connect_func"] = _no_greeting
        opened = self.kind(**self.options, **times)
        try:
            opened.connect()
        except RedisTimeout as error:
            raise StoreTimeout(f"Redis cannot be reached in time: {error}") from None
        except (RedisError, OSError) as error:
            raise StoreUnavailable(f"Redis cannot be reached: {error}") from None
        sock: Any = opened._sock
        connection = RespConnection(sock, opened.disconnect)
        try:
            self._log_in(connection, deadline)
        except BaseException:
            connection.close()
            raise
        return connection

    def _log_in(self, connection: RespConnection, deadline: float) -> None:
        replies: list[Reply] = []
        connection.exchange(_greeting(self.options), replies, deadline)
        for reply in replies:
            if isinstance(reply, ErrorReply):
                later = reply.code not in _PERMANENT or "max number of clients" in reply.text
                # A server may repeat the command with its password.
                text = redacted(reply.text, str(self.options.get("password") or ""))
                raise (StoreUnavailable if later else StoreConfigError)(f"Redis refuses the login: {text}")


def _no_greeting(connection: AbstractConnection) -> None:
    """Replaces the greeting of redis-py, where each step may take the full timeout. `_greeting` takes one round trip."""


def _greeting(options: dict[str, Any]) -> list[Command]:
    commands = []
    if options.get("password") or options.get("username"):
        user = (options["username"].encode(),) if options.get("username") else ()
        commands.append(make_command(b"", b"AUTH", *user, (options.get("password") or "").encode()))
    if options.get("db"):
        commands.append(make_command(b"", b"SELECT", b"%d" % options["db"]))
    return commands
