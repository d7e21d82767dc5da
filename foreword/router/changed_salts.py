"""Salts whose cached KV was wrong: the `cache_salt` that their requests have instead, shared by routers through a folder.

A change is a file of its own, which is created once and never written again. So routers need no lock, and none of them can
undo what another one has changed.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import secrets
from hashlib import sha256
from pathlib import Path
from typing import Final

from foreword.blocks.salt import Salt, tenant_digest
from foreword.errors import ConfigError, reason_of

logger = logging.getLogger(__name__)

_SUFFIX: Final = ".salt"
_CHANGE: Final = re.compile(r"[0-9a-f]{32}")


class ChangedSalts:
    """Changes, by a digest of the salt. A changed salt is of the same tenant.

    Args:
        folder: where the changes are kept, and where those of other routers are found; None keeps them in memory only.

    Raises ConfigError if a change cannot be read: without it the router would use what was found to be wrong.
    """

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        self._changes: dict[str, str] = {}
        self._saved: set[str] = set()
        self._failure = ""
        try:
            self._read()
        except (OSError, ValueError) as error:
            raise ConfigError(f"cannot read the changed salts in {folder}: {reason_of(error)}") from error

    def __len__(self) -> int:
        return len(self._changes)

    def all_of(self, tenant: bytes, cache_salt: str | None) -> list[str | None]:
        """What requests of a tenant with this `cache_salt` have had in its place: first itself, and from now on the last."""
        found = [cache_salt]
        while self._changes and (change := self._changes.get(_digest(Salt.of(tenant, found[-1])))) is not None:
            found.append(change)
        return found

    def change(self, salt: Salt) -> None:
        """Never again use this salt; `sync` tells the other routers."""
        self._changes.setdefault(_digest(salt), secrets.token_hex(16))

    def sync(self) -> None:
        """Write new changes and read those of other routers; the first change of a salt holds. On any thread, one at a time. A
        failure is logged, and the next call tries again."""
        try:
            for digest in self._changes.keys() - self._saved:
                self._write(digest)
            self._read()
            self._failure = ""
        except (OSError, ValueError) as error:
            if str(error) != self._failure:
                logger.error("the changed salts in %s cannot be read or written: %s", self._folder, error)
            self._failure = str(error)

    def _read(self) -> None:
        if self._folder is None or not self._folder.exists():
            return
        damaged = ""
        for path in self._folder.glob(f"*{_SUFFIX}"):
            if path.stem not in self._saved:
                with path.open(encoding="ascii") as file:
                    change = file.read(33)
                if not _CHANGE.fullmatch(change):
                    damaged = path.name
                    continue
                self._changes[path.stem] = change
                self._saved.add(path.stem)
        if damaged:
            raise ValueError(f"{damaged} is damaged")

    def _write(self, digest: str) -> None:
        if self._folder is None:
            return
        path, new = self._folder / f"{digest}{_SUFFIX}", self._folder / f"{digest}.{secrets.token_hex(4)}.new"
        self._folder.mkdir(parents=True, exist_ok=True)
        try:
            with os.fdopen(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="ascii") as file:
                file.write(self._changes[digest])
                file.flush()
                os.fsync(file.fileno())
            with contextlib.suppress(FileExistsError):  # another router has changed it
                os.link(new, path)
        finally:
            new.unlink(missing_ok=True)


def _digest(salt: Salt) -> str:
    """32 hexadecimal digits, which reveal nothing of the salt."""
    return sha256(salt.text.encode()).hexdigest()[:32] if salt.client else tenant_digest(salt.tenant)
