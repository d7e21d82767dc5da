"""The listening socket and the logging of a server or a router."""

from __future__ import annotations

import logging
import os
import socket
import sys

from foreword.config import ServerConfig
from foreword.errors import ConfigError


def bind(config: ServerConfig) -> socket.socket:
    """A listening socket. Raises ConfigError with advice if that is not possible."""
    where = f"{config.host} port {config.port}"
    try:
        family, kind, proto, _, address = socket.getaddrinfo(
            config.host, config.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except (socket.gaierror, UnicodeError) as error:
        raise ConfigError(f"cannot listen on {config.host!r}: it is not an address of this machine (--host)") from error
    listener = socket.socket(family, kind, proto)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        # Listen before the loop starts: the second of two servers on one port fails here.
        listener.listen(2048)
    except OSError as error:
        listener.close()
        raise ConfigError(f"cannot listen on {where}: {_bind_advice(error)}") from error
    return listener


def url_of(listener: socket.socket) -> str:
    """The URL that the socket listens on."""
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def configure_logging(level: str) -> None:
    """Log to standard error from `level` on."""
    logging.basicConfig(
        level=level.upper(), format="%(asctime)s %(levelname)s %(message)s", stream=sys.stderr, force=True
    )


def _bind_advice(error: OSError) -> str:
    if isinstance(error, PermissionError):
        return "ports below 1024 need special rights; choose another with --port"
    reason = (os.strerror(error.errno) if error.errno else str(error)).lower()
    return f"{reason}; choose another with --port (0 takes a free one) or --host"
