"""Ports for servers that are told theirs, because they cannot say which one they have got."""

from __future__ import annotations

import fcntl
import os
import random
import socket
import tempfile
from pathlib import Path

_LOWEST = 10_000
_draw = random.SystemRandom()  # processes of tests share their seeds
# A lock on a byte of this file for each port that a process of tests has. It lasts as long as the process.
_taken = os.open(Path(tempfile.gettempdir()) / f"foreword-test-ports-{os.getuid()}", os.O_RDWR | os.O_CREAT)
_mine = set[int]()


def free_port() -> int:
    """A port that is not in use and stays free: no other process of tests gets it, and it is none of those that the system
    gives to whoever asks for any, such as outgoing connections, before a slow server has begun to listen or while it is killed
    and started again."""
    while True:
        port = _draw.randrange(_LOWEST, _first_of_systems())
        if port in _mine:
            continue
        try:
            fcntl.lockf(_taken, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, port)
            with socket.socket() as probe:
                probe.bind(("127.0.0.1", port))
        except OSError:
            continue
        _mine.add(port)
        return port


def _first_of_systems() -> int:
    try:
        first = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text(encoding="ascii").split()[0])
    except OSError:
        return 32_768
    return first if first > 2 * _LOWEST else 1 << 16
