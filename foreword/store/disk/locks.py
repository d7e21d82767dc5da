"""Locks among the processes that share the folder of a disk store."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Final

from foreword.errors import StoreTimeout
from foreword.store.base import time_left
from foreword.store.disk.files import WRITE, make_folder, store_error

_POLL_SECONDS: Final = 0.01
_SCAN_POLL_SECONDS: Final = 0.05
_MOMENT: Final = 0.5


class LivenessLock:
    """A file that this process keeps locked while it lives, so others can tell whether it will finish its writes.

    The system releases the lock when the process ends for any reason. (A process id would be reused.)

    Attributes:
        token: identifies the process as a writer: host, process id and a random part.
    """

    def __init__(self, folder: str) -> None:
        make_folder(f"{folder}/writers")
        host = re.sub(r"[^A-Za-z0-9-]", "-", socket.gethostname())[:64]
        try:
            while True:
                self.token = f"{host}-{os.getpid()}-{secrets.token_hex(6)}"
                self._path = f"{folder}/writers/{self.token}"
                self._handle = os.open(self._path, WRITE, 0o600)
                if _locks(self._handle) and self.exists():
                    break
                os.close(self._handle)  # removed as a dead writer's, between its creation and its lock
        except OSError as error:
            raise store_error(error) from error

    def exists(self) -> bool:
        """Whether the file still exists, so that other processes can see it."""
        return os.path.exists(self._path)

    def abandon(self) -> None:
        """Drop the lock without removing its file. For a forked child: the lock belongs to the parent."""
        os.close(self._handle)

    def release(self) -> None:
        with contextlib.suppress(OSError):
            os.unlink(self._path)
        os.close(self._handle)


def is_alive(folder: str, token: str) -> bool:
    """Whether the writer with this token lives. A writer on a system without file locks counts as alive."""
    try:
        handle = os.open(f"{folder}/writers/{token}", os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        return False
    except OSError:
        return True
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(handle)
    return False


def _locks(handle: int) -> bool:
    """Lock a file. False if another process has it locked. Raises OSError where files cannot be locked."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def remove_dead_locks(folder: str) -> None:
    """Remove the liveness locks of all dead writers. What else they have left must be removed before, or be listed in the
    index."""
    with contextlib.suppress(OSError):
        for token in os.listdir(f"{folder}/writers"):
            with contextlib.suppress(OSError):
                handle = os.open(f"{folder}/writers/{token}", os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
                try:
                    # Its creator looks for it again when it has the lock (`LivenessLock`).
                    if _locks(handle):
                        os.unlink(f"{folder}/writers/{token}")
                finally:
                    os.close(handle)


def remove_dead_lock(folder: str, token: str) -> None:
    """Remove the liveness lock of a dead writer."""
    with contextlib.suppress(OSError):
        os.unlink(f"{folder}/writers/{token}")


@contextlib.contextmanager
def folder_lock(folder: str, deadline: float, name: str = "lock") -> Iterator[None]:
    """Exclude other processes while the folder is opened, or, with another name of a file, while something else is done.
    Raises StoreTimeout, StoreError."""

    def wait() -> bool:
        if time_left(deadline) < _POLL_SECONDS:
            raise StoreTimeout("another process has the lock of the folder")
        time.sleep(_POLL_SECONDS)
        return True

    with _file_lock(f"{folder}/{name}", wait):
        yield


@contextlib.contextmanager
def scan_lock(folder: str, stopped: threading.Event, waiting: Callable[[], None]) -> Iterator[bool]:
    """Exclude other processes while the index is compared with the files. Yields False if `stopped` was set first.

    `waiting` is called if another process has the lock for more than a moment.
    """
    started = time.monotonic()

    def wait() -> bool:
        if time.monotonic() - started > _MOMENT:
            waiting()
        return not stopped.wait(_SCAN_POLL_SECONDS)

    with _file_lock(f"{folder}/scan", wait) as held:
        yield held and not stopped.is_set()


@contextlib.contextmanager
def _file_lock(path: str, wait: Callable[[], bool]) -> Iterator[bool]:
    """Hold the lock of a file. While another process has it, `wait` is called; when that returns False, it is given up, which
    False says. Raises StoreError."""
    try:
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        raise store_error(error) from error
    try:
        try:
            while not (held := _locks(handle)) and wait():
                pass
        except OSError as error:
            raise store_error(error) from error
        yield held
    finally:
        os.close(handle)
