"""Another instance as a read-only store: the blocks on its device and in its memory tier.

    peer://10.0.0.7:9100?secret_env=FOREWORD_TRANSFER_SECRET

Nothing is written, pinned or removed there, and its blocks cannot be listed. A background thread keeps the connection. A call
without a connection fails at once, or as soon as the current attempt to connect has failed.
"""

from __future__ import annotations

import logging
import os
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Final, TypeVar

from foreword.blocks.layout import Layout
from foreword.config_layers import read_secret
from foreword.errors import ConfigError, StoreConfigError, StoreTimeout, StoreUnavailable
from foreword.store.background import background_thread
from foreword.store.base import Name, StoreStatus, time_left
from foreword.store.read_only import ReadOnlyStore
from foreword.store.types import Opener, Options, StoreUrl, parse_flag, read_options
from foreword.transfer.connection import Connection
from foreword.transfer.errors import PeerRejected, TransferError, TransferTimeout
from foreword.transfer.sockets import parse_address
from foreword.transfer.transfer_endpoint import TransferEndpoint
from foreword.transfer.transfers import TransferService
from foreword.transfer_config import TransferConfig

log = logging.getLogger("foreword.transfer")
Result = TypeVar("Result")

_FIRST_PAUSE: Final = 0.25
_LONGEST_PAUSE: Final = 5.0
# Seconds between two checks whether the connection is still alive.
_CHECK_INTERVAL: Final = 0.5
_URL_OPTIONS: Final[Options] = {
    "secret_env": str, "secret_file": str, "progress_timeout": float, "ring": str, "tls": parse_flag,
}  # fmt: skip
# Taken from the instance's own settings where the URL does not say otherwise. A progress_timeout gives the others.
_OWN: Final = ("ring", "tls", "links")
_TIMES: Final = ("progress_timeout", "connect_timeout", "answer_timeout", "beat_seconds")


class PeerStore(ReadOnlyStore):
    """Implements `Store` over an instance that listens at `address`; it need not be running yet.

    `put`, `delete` and `pin` do nothing and return 0, `scan` is empty. Records stay in this process; the peer does not store
    them.

    Args:
        address: `host:port`, `[v6 host]:port` or `unix:/path`.
        layout: of this instance's blocks; a peer with another layout is refused. None: block names alone decide.
        config: secret, links and time limits of the connection. This store does not listen at `bind`.

    Raises StoreConfigError for an invalid address, or an address of another host without a secret.
    """

    def __init__(
        self, address: str, layout: Layout | None = None, *, config: TransferConfig | None = None, label: str = "peer"
    ) -> None:
        super().__init__(label)
        self.address = address
        config = config or TransferConfig()
        _check_address(address, config)
        self._endpoint = TransferEndpoint(config, TransferService(layout))
        self._counts: Counter[str] = Counter()
        self._connection: Connection | None = None
        self._last_failure = "no attempt has been made yet"
        self._dialing = True
        self._closed = False
        self._changed = threading.Condition()
        background_thread(self._keep_connected, label)

    def lookup(self, names: Sequence[Name], *, deadline: float) -> int:
        return self._call(lambda peer: peer.locate(names, deadline=deadline), deadline)

    def get(self, names: Sequence[Name], buffers: Sequence[memoryview], *, deadline: float) -> list[int]:
        return self._call(lambda peer: peer.get(names, buffers, deadline=deadline), deadline)

    def check_open(self, deadline: float) -> None:
        super().check_open(deadline)
        self._raise_if_closed()

    # Status and end

    def status(self) -> StoreStatus:
        """`notes`: connected (0 or 1), connections made, attempts that failed, and attempts that were rejected."""
        counts = {name: self._counts[name] for name in ("connections", "failed", "rejected")}
        return StoreStatus(notes={"connected": int(self._live() is not None), **counts})

    def close(self) -> None:
        with self._changed:
            if self._closed:
                return
            self._closed = True
            self._changed.notify_all()
        self._endpoint.close()

    # The connection

    def _raise_if_closed(self) -> None:
        if self._closed:
            raise StoreUnavailable(f"the store {self.label!r} is closed")

    def _live(self) -> Connection | None:
        connection = self._connection
        return connection if connection is not None and connection.alive else None

    def _call(self, read: Callable[[Connection], Result], deadline: float) -> Result:
        """Raises StoreTimeout, StoreUnavailable."""
        time_left(deadline)
        try:
            return read(self._connected(deadline))
        except TransferTimeout as error:
            raise StoreTimeout(f"{self.address}: {error.message}") from error
        except TransferError as error:
            self._raise_if_closed()  # it may have been closed meanwhile
            raise StoreUnavailable(f"{self.address}: {error.message}") from error

    def _connected(self, deadline: float) -> Connection:
        """The connection. Waits for it only while an attempt to connect is in progress."""
        with self._changed:
            if self._live() is None:
                self._changed.wait_for(lambda: not self._dialing or self._closed, time_left(deadline))
            self._raise_if_closed()
            connection = self._live()
            if connection is None:
                self._changed.notify_all()  # wake the thread: it may not have noticed that the connection broke
                time_left(deadline)
                raise StoreUnavailable(f"no connection to {self.address}: {self._last_failure}")
            return connection

    def _keep_connected(self) -> None:
        """The background thread: connect, check the connection, reconnect; the pauses grow while that fails."""
        pause = _FIRST_PAUSE
        while not self._closed:
            if self._live() is not None:
                pause = _FIRST_PAUSE
                self._sleep(_CHECK_INTERVAL, until=lambda: self._live() is None)
            elif not self._dial():
                self._sleep(pause)
                pause = min(2 * pause, _LONGEST_PAUSE)

    def _sleep(self, seconds: float, until: Callable[[], bool] = lambda: False) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._closed or until(), seconds)

    def _dial(self) -> bool:
        with self._changed:
            self._dialing = True
        connection: Connection | None = None
        try:
            connection = self._endpoint.connect(self.address)
        except (TransferError, ConfigError) as error:
            self._note_failure(error)
        with self._changed:
            self._dialing = False
            self._connection = connection
            self._counts["failed" if connection is None else "connections"] += 1
            self._changed.notify_all()
        if connection is not None:
            self._last_failure = "the connection broke"
            log.info("%s: connected to %s", self.label, self.address)
        return connection is not None

    def _note_failure(self, error: TransferError | ConfigError) -> None:
        if isinstance(error, PeerRejected):
            self._counts["rejected"] += 1
        if error.message != self._last_failure and not self._closed:
            level = logging.WARNING if error.fault == "operator" else logging.INFO
            log.log(level, "%s: cannot read from %s: %s", self.label, self.address, error.message)
        self._last_failure = error.message


def opener(config: TransferConfig) -> Opener:
    """The opener of `peer://` URLs for `foreword.store.urls.open_store`. A URL without a secret uses `config.secret`."""

    def open_peer(place: StoreUrl, layout: Layout | None) -> PeerStore:
        own = settings_of(place, config)
        return PeerStore(_address(place), layout, config=own, label=place.label)

    return open_peer


def settings_of(place: StoreUrl, config: TransferConfig) -> TransferConfig:
    """The settings of the connection that a `peer://` URL describes. Connects to nothing. Raises StoreConfigError."""
    if "secret" in place.options or "@" in place.shown:
        raise StoreConfigError(
            "do not write a secret into a URL; name a variable or a file that has it: secret_env=, secret_file="
        )
    given = read_options(place, _URL_OPTIONS)
    variable, secret_file = given.pop("secret_env", ""), given.pop("secret_file", "")
    if variable and secret_file:
        raise StoreConfigError(f"{place.url}: give secret_env or secret_file, not both")
    if variable and variable not in os.environ:
        raise StoreConfigError(f"{place.url}: there is no environment variable {variable}")
    if place.codec != "raw":
        raise StoreConfigError(f"{place.url}: blocks of a peer are read as they are; remove codec=")
    try:
        secret = os.environ[variable] if variable else config.secret
        if secret_file:
            secret = read_secret(f"file:{secret_file}", "the secret")
        kept = _OWN if "progress_timeout" in given else (*_OWN, *_TIMES)
        own = TransferConfig(secret=secret, **{key: getattr(config, key) for key in kept} | given)
    except ConfigError as error:
        raise StoreConfigError(f"{place.url}: {error.message}") from None
    _check_address(_address(place), own)
    return own


def _address(place: StoreUrl) -> str:
    """`peer://host:port`, or `peer:///path` for a Unix socket."""
    host = place.url.removeprefix("peer:")
    return host.strip("/") if host.startswith("//") else f"unix:{place.path}"


def _check_address(address: str, config: TransferConfig) -> None:
    try:
        where = parse_address(address)
    except ConfigError:
        raise StoreConfigError(
            f"{address!r} is not the address of an instance; write peer://host:port or peer:///path"
        ) from None
    if not where.path and not where.port:
        raise StoreConfigError(f"{address!r} has no port at which an instance could listen")
    if not config.secret and not where.is_local:
        raise StoreConfigError(
            f"peer://{address} is on another host: set transfer.secret, the same on all instances, or add secret_env=NAME or "
            "secret_file=PATH to the URL"
        )
