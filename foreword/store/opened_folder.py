"""The folder in which a store was opened."""

from __future__ import annotations

import contextlib
import os

from foreword.errors import StoreUnavailable


class OpenedFolder:
    """Remembers which folder stands at a path. Where a disk is not mounted any more, another one does, or none."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._opened = self._found()

    def check(self) -> None:
        """Raises StoreUnavailable if another folder stands there now, or none."""
        if self._opened not in (None, self._found()):
            raise StoreUnavailable(f"{self._path} is not the folder that was opened; is its disk mounted?")

    def _found(self) -> tuple[int, int] | None:
        """Device and number of the folder."""
        with contextlib.suppress(OSError):
            found = os.stat(self._path)
            return found.st_dev, found.st_ino
        return None
