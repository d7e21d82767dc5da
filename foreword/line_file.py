"""A file to which a thread writes lines, so that what reports them never waits for a disk."""

from __future__ import annotations

import errno
import logging
import os
import threading
from collections import deque
from contextlib import suppress
from pathlib import Path
from typing import IO, Final, Generic, Literal, TypeVar

from foreword.errors import ConfigError

logger = logging.getLogger(__name__)

T = TypeVar("T")

_QUEUE_LENGTH: Final = 4096
# Between writes: to wake the thread costs many times what a line does.
_FLUSH_SECONDS: Final = 0.5
_CLOSE_SECONDS: Final = 5.0


def open_for_group(path: str, flags: int) -> int:
    """Opens a file that not every user of the machine can read, if it is new: it names tenants, or has what they asked."""
    return os.open(path, flags, 0o640)


class LineFile(Generic[T]):
    """Writes items on its own thread, until `close`. Lines are in the file within a second.

    Args:
        mode: `x` for a new file, `a` to append.
        what: the file in messages.
        max_bytes: size at which the file ends.

    Attributes:
        dropped: items that were not written: the queue was full, or the file could not be written.

    Raises ConfigError if the file cannot be opened.
    """

    def __init__(self, path: Path, mode: Literal["x", "a"], what: str, max_bytes: int | None = None) -> None:
        self.path, self.written, self.dropped = path, 0, 0
        self._what, self._bytes_left, self._reported = what, max_bytes, False
        try:
            file = open(path, f"{mode}+b", buffering=0, opener=open_for_group)  # noqa: SIM115 - the thread closes it
            self._torn = (size := os.fstat(file.fileno()).st_size) > 0 and os.pread(file.fileno(), 1, size - 1) != b"\n"
        except FileExistsError:
            raise ConfigError(f"the {what} {path} exists already; name a new file") from None
        except OSError as error:
            raise ConfigError(f"cannot write the {what} {path}: {error.strerror}") from error
        self._queue: deque[T] = deque()
        self._filled, self._hurry, self._closed = threading.Event(), threading.Event(), False
        self._thread = threading.Thread(target=self._write_all, args=[file], name=f"foreword-{what}", daemon=True)
        self._thread.start()

    def encode(self, item: T) -> bytes:
        """The line of an item, with its end. On the file's thread."""
        raise NotImplementedError

    def reopened(self, file: IO[bytes]) -> IO[bytes]:
        """The file to go on with: called before each write, and at least about once a second. Raises OSError."""
        return file

    def add(self, item: T) -> None:
        """Add an item to the queue. Never blocks."""
        if len(self._queue) >= _QUEUE_LENGTH:
            self._lose("it is written too slowly")
        else:
            self._queue.append(item)
            self._filled.set()
            if len(self._queue) > _QUEUE_LENGTH // 2:
                self._hurry.set()

    def close(self) -> None:
        """Write what is queued and close the file. A disk that hangs is not waited for long."""
        self._closed = True
        self._hurry.set()
        self._filled.set()
        self._thread.join(_CLOSE_SECONDS)
        if self._thread.is_alive():
            logger.error("the %s %s was not written to its end: its disk does not answer", self._what, self.path)
        if self.dropped:
            logger.warning("%d requests are missing in the %s %s", self.dropped, self._what, self.path)

    def _write_all(self, file: IO[bytes]) -> None:
        last = False
        while not last:
            self._filled.wait(_FLUSH_SECONDS)
            self._filled.clear()
            last = self._closed
            lines = self._fitting([self.encode(self._queue.popleft()) for _ in range(len(self._queue))])
            try:
                file = self.reopened(file)
                if lines:
                    self._write(file, lines)
            except OSError as error:
                self._torn = True
                self._lose(str(error), len(lines))
            if lines and not last:
                self._hurry.wait(_FLUSH_SECONDS)
                self._hurry.clear()
        with suppress(OSError):
            file.close()

    def _fitting(self, lines: list[bytes]) -> list[bytes]:
        """The first lines, up to the file's maximum size."""
        for number, line in enumerate(lines):
            if self._bytes_left is not None:
                if self._bytes_left <= 0:
                    self._lose("it has reached its maximum size", len(lines) - number)
                    return lines[:number]
                self._bytes_left -= len(line)
        return lines

    def _write(self, file: IO[bytes], lines: list[bytes]) -> None:
        # After an error, of this process or of one before it, the file may end within a line.
        data = b"".join([b"\n", *lines] if self._torn else lines)
        if file.write(data) != len(data):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self.written += len(lines)
        self._torn = False

    def _lose(self, reason: str, count: int = 1) -> None:
        self.dropped += count
        if count and not self._reported:
            self._reported = True
            logger.error("requests are missing in the %s %s from now on: %s", self._what, self.path, reason)
