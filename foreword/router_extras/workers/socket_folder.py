"""The folder of the sockets over which the workers of a router talk.

The supervisor locks a file in it, and its workers inherit that lock: it is held for as long as any of them lives. A supervisor
that is killed cannot remove its folder; the next one that starts removes those whose lock is free.
"""

from __future__ import annotations

import fcntl
import logging
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

logger = logging.getLogger(__name__)

_PREFIX: Final = "foreword-workers-"
_LOCK: Final = "lock"


@contextmanager
def socket_folder() -> Iterator[Path]:
    """A folder of this process and those that it forks, in this block. Removes those of routers that have ended. Raises
    OSError."""
    _remove_left()
    folder, lock = _make()
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def _make() -> tuple[Path, int]:
    """A new folder and its lock."""
    while True:
        folder = Path(tempfile.mkdtemp(prefix=_PREFIX))
        lock = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT, 0o600)
        fcntl.flock(lock, fcntl.LOCK_EX)
        # Between these calls another router may have taken the lock, and removed the folder.
        if os.fstat(lock).st_nlink:
            return folder, lock
        os.close(lock)


def _remove_left() -> None:
    """Remove folders of this user whose lock is free. One without a lock stays: it is that of an earlier version, or of a
    router that is starting."""
    for folder in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        with suppress(OSError):
            found = folder.lstat()
            if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
                continue
            lock = os.open(folder / _LOCK, os.O_RDWR | os.O_NOFOLLOW)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder)
                logger.info("removed %s, of a router that was killed", folder)
            finally:
                os.close(lock)
