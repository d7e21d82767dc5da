"""The types of stores that come with Foreword. Client libraries are imported only when a URL needs them."""

from __future__ import annotations

import os
import re
import shutil
from dataclasses import replace
from fractions import Fraction
from typing import Any, ClassVar, Final
from urllib.parse import urlencode

from foreword.blocks.layout import Layout
from foreword.config import check_folder, parse_bytes
from foreword.errors import StoreConfigError, StoreUnavailable
from foreword.store.base import Store
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
# What is in the folder of a store: of these names, or named after a layout.
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

        return MemoryStore(label=url.label, **self._settings(url))

    def _settings(self, url: StoreUrl) -> dict[str, Any]:
        _refuse_host(url, "memory://?size=4GiB")
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
        "owner": parse_owner,
    }

    def check(self, url: StoreUrl) -> None:
        from foreword.store.disk.disk_store import DiskStore

        DiskStore.check_options(**self._settings(url))
        _check_owner(url)
        if url.writable:
            check_folder(url.path)
        elif not os.path.isdir(url.path):
            raise StoreConfigError(f"{url.shown}: there is no folder {url.path} to read")

    def exists(self, url: StoreUrl) -> bool:
        return holds_store(url.path)

    def open(self, url: StoreUrl, layout: Layout | None) -> Store:
        from foreword.store.disk.disk_store import DiskStore

        store = DiskStore(url.path, label=url.label, **self._settings(url))
        if layout is not None:
            _check_owner(url, store)  # again: another user may have been faster in making the folder
        return store

    def empty_part(self, url: StoreUrl, name: str) -> StoreUrl:
        path = f"{url.path.rstrip('/')}/{name}"
        return replace(url, url=f"disk://{path}", path=path)

    def remove_part(self, part: StoreUrl) -> None:
        shutil.rmtree(part.path, ignore_errors=True)

    def _settings(self, url: StoreUrl) -> dict[str, Any]:
        _refuse_host(url, "disk:///var/cache/foreword?size=20GiB")
        if not url.path:
            raise StoreConfigError("a disk store needs a folder: disk:///var/cache/foreword?size=20GiB")
        if ",/" in url.path:
            raise StoreConfigError(
                f"{url.shown}: a disk store has one folder; make one file system of several disks with LVM, md or btrfs"
            )
        given = {"size": _DISK_SIZE, **read_options(url, self.options)}
        given.pop("owner", None)
        return given


class RedisType(StoreType):
    """`redis://host`, and the other forms of `store/redis/addresses.py`. Other options are those of redis-py."""

    label = "redis"
    options: ClassVar[Options] = {"prefix": str, "ttl": lambda text: parse_number(text) or None}

    def __init__(self, reach: Reach = Reach.NETWORK) -> None:
        self.reach = reach

    def check(self, url: StoreUrl) -> None:
        for name in ("ssl_ca_certs", "ssl_certfile", "ssl_keyfile"):
            if name in url.options and not os.path.isfile(url.options[name]):
                raise StoreConfigError(f"{url.shown}: there is no file {url.options[name]} ({name}=)")
        self.open(url, None).close()  # it connects at the first call

    def open(self, url: StoreUrl, layout: Layout | None) -> Store:
        try:
            from foreword.store.redis.redis_store import RedisStore
        except ModuleNotFoundError as error:
            raise _missing(error, "redis") from None
        query = urlencode({key: value for key, value in url.options.items() if key not in self.options})
        given = read_options(url, self.options, others=True)
        return RedisStore(url.url + (f"?{query}" if query else ""), label=url.label, **given)

    def empty_part(self, url: StoreUrl, name: str) -> StoreUrl:
        prefix = f"{url.options.get('prefix', 'foreword')}-{name}"
        return replace(url, options={**url.options, "prefix": prefix})


class ObjectsType(StoreType):
    """`s3://bucket/path`, `gs://`, `az://`, `file:///folder`. Other options are those of obstore."""

    label = "objects"
    options: ClassVar[Options] = {"prefix": str, "chunk": int, "parallel": int, "touch": parse_number}

    def check(self, url: StoreUrl) -> None:
        try:
            from foreword.store.object.client import open_client
            from foreword.store.object.object_store import ObjectStore
        except ModuleNotFoundError as error:
            raise _missing(error, "s3") from None
        settings = self._settings(url)
        others = {key: settings.pop(key) for key in list(settings) if key not in self.options}
        ObjectStore.check_options(**settings)
        if url.scheme != "file":
            for key, text in others.items():
                if key.endswith("endpoint") and not re.match("https?://[^/]", text):
                    raise StoreConfigError(f"{url.shown}: {key}= takes a URL such as https://host:9000, not {text!r}")
            open_client(url.url, others)
            return
        _refuse_host(url, "file:///srv/foreword")
        if not url.path:
            raise StoreConfigError("an object store in a folder needs the folder: file:///srv/foreword")
        owner = others.pop("owner", None)
        if others or owner not in (None, "me", "any"):
            wrong = next(iter(others), "owner")
            raise StoreConfigError(f"{url.shown}: unknown option {wrong!r}: a folder has no options but owner=any")
        _check_owner(url)
        check_folder(url.path)

    def exists(self, url: StoreUrl) -> bool:
        return url.scheme != "file" or holds_store(url.path)

    def open(self, url: StoreUrl, layout: Layout | None) -> Store:
        try:
            from foreword.store.object.object_store import ObjectStore
        except ModuleNotFoundError as error:
            raise _missing(error, "s3") from None
        settings = self._settings(url)
        if url.scheme == "file":
            settings.pop("owner", None)
        store = ObjectStore(url.url, label=url.label, **settings)
        if url.scheme == "file" and layout is not None:
            _check_owner(url, store)
        return store

    def empty_part(self, url: StoreUrl, name: str) -> StoreUrl:
        return replace(url, url=f"{url.url.rstrip('/')}/{name}", path=f"{url.path.rstrip('/')}/{name}")

    def remove_part(self, part: StoreUrl) -> None:
        if part.scheme == "file":
            shutil.rmtree(part.path, ignore_errors=True)
        else:
            super().remove_part(part)

    def _settings(self, url: StoreUrl) -> dict[str, Any]:
        return {**url.options, **read_options(url, self.options, others=True)}


class PeerType(StoreType):
    """`peer://host:port`: the device and memory of another instance. The package `foreword.transfer`, which lies above this
    one, opens such URLs: callers pass the function that opens them."""

    label = "peer"
    reach = Reach.INSTANCE

    def check(self, url: StoreUrl) -> None:
        """Nothing: `foreword.transfer.peer.settings_of` checks it."""

    def open(self, url: StoreUrl, layout: Layout | None) -> Store:
        raise StoreConfigError(f"{url.shown}: only an engine can read from another instance; omit this store here")


_REDIS: Final = RedisType()
_OBJECTS: Final = ObjectsType()
BUILTIN: Final[dict[str, StoreType]] = {
    "memory": MemoryType(),
    "disk": DiskType(),
    **dict.fromkeys(("redis", "rediss"), _REDIS),
    "unix": RedisType(Reach.HOST),
    **dict.fromkeys(("redis+cluster", "rediss+cluster", "redis+sentinel", "rediss+sentinel"), _REDIS),
    **dict.fromkeys(("s3", "gs", "az", "file"), _OBJECTS),
    "peer": PeerType(),
}


def _refuse_host(url: StoreUrl, example: str) -> None:
    if split_url(url.url).netloc:
        raise StoreConfigError(f"{url.shown!r} names a host; write for example {example}")


def _check_owner(url: StoreUrl, store: Store | None = None) -> None:
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


def _missing(error: ModuleNotFoundError, extra: str) -> StoreConfigError:
    package = str(error.name).partition(".")[0]
    return StoreConfigError(f"this store needs {package}: pip install 'foreword[{extra}]'")
