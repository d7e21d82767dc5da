"""The types of stores that come with the cache: the process's memory, and folders. Those of Foreword's other packages are named
here, too, and imported when a URL needs them."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import replace
from fractions import Fraction
from importlib import import_module
from typing import Any, ClassVar, Final

from foreword.blocks.layout import Layout
from foreword.config import check_folder, parse_bytes
from foreword.errors import StoreConfigError, StoreUnavailable
from foreword.store.base import Store
from foreword.store.frame import HEADER_BYTES
from foreword.store.redact import split_url
from foreword.store.types import (
    Options,
    Reach,
    StoreType,
    StoreUrl,
    check_owner,
    parse_flag,
    parse_owner,
    read_options,
)

_MEMORY_SIZE: Final = 4 << 30
_DISK_SIZE: Final = 64 << 30
_PIECES_OF_DEVICE: Final = "8MiB"
# Entries in the folder of a store: of these names, or named after a layout.
_STORE_ENTRIES: Final = ("index.sqlite", "lock", "records")
_LAYOUT: Final = re.compile(r"[0-9a-f]{32}")


def parse_number(text: str) -> float:
    """A finite number. Raises ValueError, ArithmeticError."""
    return float(Fraction(text))


def parse_quota(text: str) -> float:
    """A number of bytes, or the share that "25%" says."""
    return parse_number(text[:-1]) / 100 if text.endswith("%") else parse_bytes(text)


# Names of options are those of the constructors' arguments.
_BUDGET_OPTIONS: Final[Options] = {"size": parse_bytes, "pin_share": parse_number, "tenant_quota": parse_quota}


class MemoryType(StoreType):
    """`memory://?size=4GiB`: memory of this process."""

    label = "memory"
    reach = Reach.PROCESS
    pins = True
    options = _BUDGET_OPTIONS

    def check(self, url: StoreUrl) -> None:
        from foreword.store.memory.memory_store import MemoryStore

        MemoryStore.check_options(**self._settings(url))

    def open(self, url: StoreUrl, layout: Layout | None) -> Store:
        from foreword.store.memory.memory_store import MemoryStore

        longest = 0 if layout is None else layout.block_bytes + HEADER_BYTES
        return MemoryStore(label=url.label, longest=longest, **self._settings(url))

    def _settings(self, url: StoreUrl) -> dict[str, Any]:
        refuse_host(url, "memory://?size=4GiB")
        if url.path:
            raise StoreConfigError(f"{url.shown!r} names a path; write for example memory://?size=4GiB")
        if url.codec != "raw":
            raise StoreConfigError(
                f"{url.shown}: a memory store has no codec, since its slots have one length; remove codec={url.codec}"
            )
        return {"size": _MEMORY_SIZE, **read_options(url, self.options)}


class DiskType(StoreType):
    """`disk:///var/cache/foreword?size=200GiB`: a folder."""

    label = "disk"
    reach = Reach.HOST
    pins = True
    options: ClassVar[Options] = {
        **_BUDGET_OPTIONS,
        "read_only": parse_flag,
        "journal": str,
        "sync_records": parse_flag,
        "pieces": parse_bytes,
        "owner": parse_owner,
    }

    def check(self, url: StoreUrl) -> None:
        from foreword.store.disk.disk_store import DiskStore

        DiskStore.check_options(**self._settings(url))
        require_owner(url)
        if url.writable:
            check_folder(url.path)
        elif not os.path.isdir(url.path):
            raise StoreConfigError(f"{url.shown}: there is no folder {url.path} to read")

    def exists(self, url: StoreUrl) -> bool:
        return holds_store(url.path)

    def for_device(self, url: StoreUrl) -> StoreUrl:
        return replace(url, options={"pieces": _PIECES_OF_DEVICE, **url.options})

    def open(self, url: StoreUrl, layout: Layout | None) -> Store:
        from foreword.store.disk.disk_store import DiskStore

        store = DiskStore(url.path, label=url.label, **self._settings(url))
        if layout is not None:
            require_owner(url, store)  # again: another user may have been faster in making the folder
        return store

    def empty_part(self, url: StoreUrl, name: str) -> StoreUrl:
        path = f"{url.path.rstrip('/')}/{name}"
        return replace(url, url=f"disk://{path}", path=path)

    def remove_part(self, part: StoreUrl) -> None:
        shutil.rmtree(part.path, ignore_errors=True)

    def _settings(self, url: StoreUrl) -> dict[str, Any]:
        refuse_host(url, "disk:///var/cache/foreword?size=20GiB")
        if not url.path:
            raise StoreConfigError("a disk store needs a folder: disk:///var/cache/foreword?size=20GiB")
        if ",/" in url.path:
            raise StoreConfigError(
                f"{url.shown}: a disk store has one folder; make one file system of several disks with LVM, md or btrfs"
            )
        given = {"size": _DISK_SIZE, **read_options(url, self.options)}
        given.pop("owner", None)
        return given


class PeerType(StoreType):
    """`peer://host:port`: the device and memory of another instance. The package `foreword.transfer`, which lies above this
    one, opens such URLs: callers pass the function that opens them."""

    label = "peer"
    reach = Reach.INSTANCE

    def check(self, url: StoreUrl) -> None:
        """Nothing: `foreword.transfer.peer.settings_of` checks it."""

    def open(self, url: StoreUrl, layout: Layout | None) -> Store:
        raise StoreConfigError(f"{url.shown}: only an engine can read from another instance; omit this store here")


# Types of Foreword's own packages that may not be installed, and the extra that installs them. They are named here and not by
# entry points, so that they are found in a checkout, too, and so that an error says what is missing.
_REDIS: Final = ("foreword.store.redis.redis_type:REDIS", "redis")
_OBJECTS: Final = ("foreword.store.object.object_type:OBJECTS", "s3")
_ELSEWHERE: Final = {
    **dict.fromkeys(("redis", "rediss"), _REDIS),
    "unix": ("foreword.store.redis.redis_type:UNIX", "redis"),
    **dict.fromkeys(("redis+cluster", "rediss+cluster", "redis+sentinel", "rediss+sentinel"), _REDIS),
    **dict.fromkeys(("s3", "gs", "az", "file"), _OBJECTS),
}


class BuiltinTypes(Mapping[str, StoreType]):
    """The types of Foreword's own stores by scheme. Raises StoreConfigError for one whose package is not installed."""

    def __init__(self) -> None:
        self._found: dict[str, StoreType] = {"memory": MemoryType(), "disk": DiskType(), "peer": PeerType()}

    def __getitem__(self, scheme: str) -> StoreType:
        if scheme not in self._found:
            place, extra = _ELSEWHERE[scheme]
            module, _, name = place.partition(":")
            try:
                self._found[scheme] = getattr(import_module(module), name)
            except ModuleNotFoundError as error:
                raise missing_library(error, extra) from None
        return self._found[scheme]

    def __contains__(self, scheme: object) -> bool:
        return scheme in self._found or scheme in _ELSEWHERE

    def __iter__(self) -> Iterator[str]:
        return iter(dict.fromkeys(("memory", "disk", *_ELSEWHERE, *self._found)))

    def __len__(self) -> int:
        return len(_ELSEWHERE | self._found)


def refuse_host(url: StoreUrl, example: str) -> None:
    """Raises StoreConfigError for a URL that names a host."""
    if split_url(url.url).netloc:
        raise StoreConfigError(f"{url.shown!r} names a host; write for example {example}")


def require_owner(url: StoreUrl, store: Store | None = None) -> None:
    """Raises StoreConfigError, and closes the store, if other users could write into a folder without `owner=any`."""
    if url.options.get("owner") == "any":
        return
    try:
        check_owner(url.path)
    except StoreConfigError:
        if store is not None:
            store.close()
        raise


def holds_store(folder: str) -> bool:
    """Whether something has been stored in a folder, by a disk store or an object store. Raises StoreUnavailable."""
    try:
        names = os.listdir(folder)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as error:
        raise StoreUnavailable(f"the folder {folder} cannot be read: {error.strerror}") from None
    return any(name in _STORE_ENTRIES or _LAYOUT.fullmatch(name) for name in names)


def missing_library(error: ModuleNotFoundError, extra: str) -> StoreConfigError:
    """An error that says how to install what a store needs."""
    package = str(error.name).partition(".")[0]
    package = "foreword-stores" if package == "foreword" else package
    return StoreConfigError(f"this store needs {package}: pip install 'foreword[{extra}]'")
