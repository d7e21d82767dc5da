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

from foreword.errors import ConfigError

logger = logging.getLogger(__name__)

_PREFIX: Final = "foreword-workers-"
_LOCK: Final = "lock"


@contextmanager
def socket_folder() -> Iterator[Path]:
    """A folder of this process and those that it forks, in this block. Removes those of routers that have ended. Raises
    ConfigError if none can be made."""
    _remove_left()
    folder, lock = _make()
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        if lock is not None:
            os.close(lock)


def _make() -> tuple[Path, int | None]:
    """A new folder and its lock; None where the file system has no locks. Raises ConfigError."""
    while True:
        folder, lock = _unlocked()
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
        except OSError as error:
            os.close(lock)
            # Without the file no other router removes the folder.
            (folder / _LOCK).unlink(missing_ok=True)
            logger.warning("cannot lock a file in %s, so this folder stays if the router is killed: %s", folder, error)
            return folder, None
        # Between these calls another router may have taken the lock, and removed the folder.
        if os.fstat(lock).st_nlink:
            return folder, lock
        os.close(lock)


def _unlocked() -> tuple[Path, int]:
    """A new folder, and the file in it that is to be locked. Raises ConfigError."""
    folder = None
    try:
        folder = Path(tempfile.mkdtemp(prefix=_PREFIX))
        return folder, os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT, 0o600)
    except OSError as error:
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)
        raise ConfigError(
            f"the workers of a router need a folder for their sockets, which cannot be made: {error}. Set TMPDIR to a folder "
            "in which this user may write"
        ) from None


def _remove_left() -> None:
    """Remove folders of this user whose lock is free. One without a lock stays: it is that of an earlier version, or of a
    router that is starting."""
    try:
        folders = list(Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"))
    except OSError:
        return  # there is no folder for temporary files, as `_make` says
    for folder in folders:
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
