"""The records of a disk store: one small file per record."""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Callable
from pathlib import Path

from foreword.errors import StoreUnavailable
from foreword.store.base import PartialListing, check_record, check_record_key
from foreword.store.disk.files import remove_file, store_error, write_atomically


class RecordFiles:
    """Records below `folder`. A part of a key ends in `=` as a folder and in `~` as a file, so `a` and `a/b` can
    coexist.

    Args:
        sync: a record that was put or deleted is so after a loss of power, too.
    """

    def __init__(self, folder: str, *, sync: bool = False) -> None:
        self._folder = folder
        self._sync = sync

    def _path(self, key: str) -> str:
        *parts, last = check_record_key(key).split("/")
        return "/".join([self._folder, *(part + "=" for part in parts), last + "~"])

    def put(self, key: str, data: bytes, token: str) -> None:
        path = self._path(key)
        known = os.path.isdir(os.path.dirname(path))
        write_atomically(path, f"{path}{token}.{secrets.token_hex(4)}", check_record(data))
        self._write_back(path, os.path.dirname(path) if known else self._folder)

    def get(self, key: str) -> bytes | None:
        try:
            return Path(self._path(key)).read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            raise StoreUnavailable(f"a record cannot be read: {error}") from error

    def delete(self, key: str) -> bool:
        path = self._path(key)
        removed = remove_file(path)
        self._write_back(os.path.dirname(path), os.path.dirname(path))
        return removed

    def _write_back(self, path: str, last: str) -> None:
        """Write a file or folder to the device, and the folders that it is in up to the last one."""
        while self._sync and len(path) >= len(last):
            with contextlib.suppress(FileNotFoundError):
                handle = os.open(path, os.O_RDONLY)
                try:
                    os.fsync(handle)
                except OSError as error:
                    raise store_error(error) from error
                finally:
                    os.close(handle)
            path = os.path.dirname(path)

    def keys(self, prefix: str) -> list[str]:
        """All keys that start with `prefix`, sorted. Raises PartialListing if a folder cannot be read."""
        found, problems = list[str](), list[OSError]()
        start = "/".join([self._folder, *(part + "=" for part in prefix.split("/")[:-1])])
        for path, _, files in os.walk(start, onerror=problems.append):
            folder = os.path.relpath(path, self._folder)
            parts = [] if folder == "." else [part.removesuffix("=") for part in folder.split("/")]
            found += ["/".join([*parts, name.removesuffix("~")]) for name in files if name.endswith("~")]
        keys = sorted(key for key in found if key.startswith(prefix))
        problem = next((one for one in problems if not isinstance(one, FileNotFoundError)), None)
        if problem is not None:
            raise PartialListing(f"a folder of records cannot be read: {problem}", keys)
        return keys

    def remove_incomplete(self, is_dead: Callable[[str], bool]) -> None:
        """Remove the incomplete files of dead writers."""
        for path, _, files in os.walk(self._folder):
            for name in files:
                token = name.partition("~")[2].rpartition(".")[0]
                if token and is_dead(token):
                    remove_file(f"{path}/{name}")
