"""The files of a disk store: blocks, records, and who is writing.

    <folder>/index.sqlite                                  what is there (disk_index.py)
    <folder>/<layout, 32 hex>/<first 2 hex>/<key, 64 hex>  a block's frame, and nothing else
    <folder>/<...>/<key>.<writer>                          the same while it is being written
    <folder>/records/a=/b~                                 the record a/b
    <folder>/writers/<writer>                              locked as long as that process lives
    <folder>/lock                                          locked while somebody opens the folder

A file gets its name when it is whole. Files are 0600, folders 0700. Errors of the system become Foreword's here.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import secrets
import socket
import stat
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from foreword.blocks.keys import KEY_BYTES
from foreword.blocks.layout import FINGERPRINT_BYTES, NAME_BYTES
from foreword.errors import BadFrame, StoreError, StoreFull, StoreReadOnly, StoreTimeout, StoreUnavailable
from foreword.store.base import Name, check_record, check_record_key, time_left
from foreword.store.frame import HEADER_BYTES, Header, read_header

_LAYOUT: Final = re.compile(rf"[0-9a-f]{{{2 * FINGERPRINT_BYTES}}}")
_BLOCK: Final = re.compile(rf"([0-9a-f]{{{2 * KEY_BYTES}}})(?:\.(.+))?")
_READ: Final = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK  # a pipe in a block's place must not stop us
_WRITE: Final = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW
_FULL: Final = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_FORBIDDEN: Final = {errno.EROFS, errno.EACCES, errno.EPERM}
_POLL_SECONDS: Final = 0.01


@dataclass(frozen=True, slots=True)
class Found:
    """A file under a block's name. `token` is the writer's while it is not whole."""

    name: Name
    path: str
    token: str | None
    size: int
    modified: float


def store_error(error: OSError) -> StoreError:
    """The error of a store that an error of the system is."""
    if error.errno in _FULL:
        return StoreFull(f"there is no room: {error}")
    if error.errno in _FORBIDDEN:
        return StoreReadOnly(f"the folder cannot be written: {error}")
    return StoreUnavailable(f"the folder cannot be used: {error}")


class Files:
    """Blocks as files below `folder`."""

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self._layouts: dict[bytes, str] = {}

    def path(self, name: Name) -> str:
        layout = name[:FINGERPRINT_BYTES]
        above = self._layouts.get(layout)
        if above is None:
            above = self._layouts[layout] = f"{self.folder}/{layout.hex()}/"
        key = name[FINGERPRINT_BYTES:].hex()
        return f"{above}{key[:2]}/{key}"

    def read(self, name: Name, buffer: memoryview) -> int | None:
        """Bytes of the file, read to the beginning of `buffer`; 0 if they do not fit or are none of a block's, None if there
        is no file. Raises StoreError."""
        try:
            handle = os.open(self.path(name), _READ)
        except FileNotFoundError:
            return None
        except OSError as error:
            if error.errno in (errno.ELOOP, errno.ENXIO):
                return 0
            raise StoreUnavailable(f"a block cannot be read: {error}") from error
        try:
            found = os.fstat(handle)
            if not stat.S_ISREG(found.st_mode) or found.st_size > buffer.nbytes:
                return 0
            return _read_all(handle, buffer, found.st_size)
        except OSError as error:
            raise StoreUnavailable(f"a block cannot be read: {error}") from error
        finally:
            os.close(handle)

    def write(self, name: Name, data: memoryview, token: str) -> None:
        """Make the file whole, or not at all. Raises StoreError."""
        path = self.path(name)
        _write_whole(path, f"{path}.{token}", data)

    def size(self, name: Name) -> int:
        """Length of a block's file, -1 if there is none."""
        try:
            return os.stat(self.path(name), follow_symlinks=False).st_size
        except OSError:
            return -1

    def remove(self, name: Name, token: str = "") -> bool:
        """Remove a block's file, or what that writer left of it; False if there was none. Raises StoreError."""
        return remove_file(f"{self.path(name)}.{token}" if token else self.path(name))

    def walk(self) -> Iterator[Found]:
        """Every file of a block, whole or not, in no order."""
        for layout in _folders(self.folder):
            if not _LAYOUT.fullmatch(layout.name):
                continue
            prefix = bytes.fromhex(layout.name)
            for part in _folders(layout.path):
                yield from _blocks(part.path, prefix)


def _entries(path: str) -> list[os.DirEntry[str]]:
    """What is in a folder, nothing if it is gone. Raises StoreError."""
    try:
        with os.scandir(path) as entries:
            return list(entries)
    except FileNotFoundError:
        return []
    except OSError as error:
        raise StoreUnavailable(f"a folder cannot be read: {error}") from error


def _folders(path: str) -> Iterator[os.DirEntry[str]]:
    return (entry for entry in _entries(path) if entry.is_dir(follow_symlinks=False))


def _blocks(path: str, layout: bytes) -> Iterator[Found]:
    for entry in _entries(path):
        matched = _BLOCK.fullmatch(entry.name)
        if matched is None or not entry.is_file(follow_symlinks=False):
            continue
        key, token = matched.groups()
        with contextlib.suppress(FileNotFoundError):
            found = entry.stat(follow_symlinks=False)
            yield Found(layout + bytes.fromhex(key), entry.path, token, found.st_size, found.st_mtime)


def remove_file(path: str) -> bool:
    """False if there was none. Raises StoreError."""
    try:
        os.unlink(path)
    except FileNotFoundError:
        return False
    except OSError as error:
        raise store_error(error) from error
    return True


def header_of(found: Found) -> Header | None:
    """What a whole file says of itself, if it is the block it is called and as long as it says."""
    data = bytearray(HEADER_BYTES)
    try:
        handle = os.open(found.path, _READ)
        try:
            length = os.readv(handle, [data])
        finally:
            os.close(handle)
        header = read_header(memoryview(data)[:length])
    except (OSError, BadFrame):
        return None
    return header if header.name == found.name and HEADER_BYTES + header.length == found.size else None


def make_or_leave(path: str) -> None:
    """Make the folder; one that is there already may be one that cannot be written. Raises StoreUnavailable."""
    try:
        os.makedirs(path, mode=0o700, exist_ok=True)
    except OSError as error:
        raise StoreUnavailable(f"the folder {path} cannot be made: {error}") from error


def make_folder(path: str) -> None:
    """With its parents. Raises StoreError."""
    try:
        os.makedirs(path, mode=0o700, exist_ok=True)
    except OSError as error:
        raise store_error(error) from error


def _create(path: str) -> int:
    """A new file; folders that are missing are made, each of them 0700 (os.makedirs gives its mode to the last one only)."""
    try:
        return os.open(path, _WRITE, 0o600)
    except FileNotFoundError:
        missing = []
        above = os.path.dirname(path)
        while not os.path.isdir(above):
            missing.append(above)
            above = os.path.dirname(above)
        for folder in reversed(missing):
            with contextlib.suppress(FileExistsError):
                os.mkdir(folder, 0o700)
        return os.open(path, _WRITE, 0o600)


def _write_whole(path: str, unfinished: str, data: memoryview) -> None:
    """A file of these bytes, or none: it is written as `unfinished` and renamed. Raises StoreError."""
    try:
        handle = _create(unfinished)
        try:
            written = os.write(handle, data)
            while written < len(data):
                written += os.write(handle, data[written:])
        finally:
            os.close(handle)
        os.rename(unfinished, path)
    except OSError as error:
        with contextlib.suppress(OSError):
            os.unlink(unfinished)
        raise store_error(error) from error


def _read_all(handle: int, buffer: memoryview, size: int) -> int:
    """The file may be shorter by now than it was; it is never read further than `size`."""
    done = os.readv(handle, [buffer[:size]])
    while 0 < done < size:
        more = os.readv(handle, [buffer[done:size]])
        if not more:
            break
        done += more
    return done


class Records:
    """Small files under words. A part of a word ends in `=` as a folder and in `~` as a file, so `a` and `a/b` both go."""

    def __init__(self, folder: str) -> None:
        self._folder = folder

    def _path(self, word: str) -> str:
        *parts, last = check_record_key(word).split("/")
        return "/".join([self._folder, *(part + "=" for part in parts), last + "~"])

    def put(self, word: str, data: bytes, token: str) -> None:
        path = self._path(word)
        check_record(data)
        _write_whole(path, f"{path}{token}.{secrets.token_hex(4)}", memoryview(data))

    def get(self, word: str) -> bytes | None:
        try:
            return Path(self._path(word)).read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            raise StoreUnavailable(f"a record cannot be read: {error}") from error

    def delete(self, word: str) -> bool:
        return remove_file(self._path(word))

    def words(self, start: str) -> list[str]:
        """All that begin with `start`, sorted."""
        found = []
        for path, _, files in os.walk(self._folder):
            above = os.path.relpath(path, self._folder)
            parts = [] if above == "." else [part.removesuffix("=") for part in above.split("/")]
            found += ["/".join([*parts, name.removesuffix("~")]) for name in files if name.endswith("~")]
        return sorted(word for word in found if word.startswith(start))

    def sweep(self, is_dead: Callable[[str], bool]) -> None:
        """Remove what dead processes left half written."""
        for path, _, files in os.walk(self._folder):
            for name in files:
                token = name.partition("~")[2].rpartition(".")[0]
                if token and is_dead(token):
                    remove_file(f"{path}/{name}")


class Presence:
    """A file that is locked as long as this process lives, so that others can tell whether what it began will be finished.

    The lock goes with the process, however it ends; a process number would be given to the next one.
    """

    def __init__(self, folder: str) -> None:
        self._folder = f"{folder}/writers"
        make_folder(self._folder)
        host = re.sub(r"[^A-Za-z0-9-]", "-", socket.gethostname())[:64]
        self.token = f"{host}-{os.getpid()}-{secrets.token_hex(6)}"
        try:
            self._handle = os.open(f"{self._folder}/{self.token}", _WRITE, 0o600)
            fcntl.flock(self._handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise store_error(error) from error

    def is_there(self) -> bool:
        """Whether others can see it."""
        return os.path.exists(f"{self._folder}/{self.token}")

    def forget(self) -> None:
        """After a fork: the lock is the parent's."""
        os.close(self._handle)

    def leave(self) -> None:
        with contextlib.suppress(OSError):
            os.unlink(f"{self._folder}/{self.token}")
        os.close(self._handle)


def is_alive(folder: str, token: str) -> bool:
    """Whether the process of a Presence still lives. One that does not lock files here is taken to be alive."""
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


def remove_presence(folder: str, token: str) -> None:
    """Of a process that is dead."""
    with contextlib.suppress(OSError):
        os.unlink(f"{folder}/writers/{token}")


@contextlib.contextmanager
def folder_lock(folder: str, deadline: float) -> Iterator[None]:
    """One at a time. Raises StoreTimeout, StoreError."""
    try:
        handle = os.open(f"{folder}/lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        raise store_error(error) from error
    try:
        _lock(handle, deadline)
        yield
    finally:
        os.close(handle)


def _lock(handle: int, deadline: float) -> None:
    while True:
        try:
            return fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time_left(deadline) < _POLL_SECONDS:
                raise StoreTimeout("another process is opening the folder") from None
            time.sleep(_POLL_SECONDS)
        except OSError as error:
            raise store_error(error) from error


def boot_of_host() -> tuple[str, str]:
    """The host's name, and a word that is another one after each start of it ("" where there is none)."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        boot = ""
    return socket.gethostname(), boot


def is_name(name: Name) -> bool:
    return len(name) == NAME_BYTES
