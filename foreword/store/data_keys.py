"""Data keys: what encrypts a tenant's blocks and records. They lie in a key store, each encrypted by a master key.

A tenant is the part of a block's name that `fair_share.tenant_of` returns, 12 bytes. The key store has records below
`<first 6 bytes>/<last 6 bytes>/`, both in hexadecimal (dev/formats.md):

    <id>        a data key; several while one follows another, or if two servers made one at the same time
    destroyed   no key of this tenant is used any more, whatever else is there

Destroying a tenant writes `destroyed` and deletes its keys. What it had is unreadable from then on. It begins a new generation
with another salt (`blocks/salt.py`), so its names, and with them its keys, are others: what a server still has of it on its
device, in memory or in its write queue is found by no request, and is never written with a key that lives.

Servers look again after `check_seconds` whether a key exists. While the key store does not answer they use the keys that they
have for `outage_seconds`. No key is ever used longer than that after it was destroyed.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import logging
import math
import os
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any, Final, TypeVar

from foreword.blocks.salt import GENERATION_BYTES, GENERATION_MARK, TENANT_BYTES, Salt, ungenerated
from foreword.errors import ConfigError, StoreError, StoreTimeout, StoreUnavailable
from foreword.store.background import background_thread, renew_in_child
from foreword.store.base import Store, time_left
from foreword.store.frame import ENCRYPTED
from foreword.store.key_interfaces import TenantKeys
from foreword.store.master_keys import MasterKeys
from foreword.store.tier_threads import StoreGuard
from foreword.store.types import StoreUrl
from foreword.store.urls import parse
from foreword.store_config import EncryptionConfig

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

log = logging.getLogger("foreword.store")
Result = TypeVar("Result")

SHARED: Final = bytes(TENANT_BYTES)  # the tenant of records that belong to none
_FORMAT: Final = 1
_KEY_BYTES: Final = 32
_NONCE_BYTES: Final = 12
_CIPHERS: Final = 4096  # of a data key
_MAX_ENTRIES: Final = 65_536
_CALL_SECONDS: Final = 1.0
_LOOK_SECONDS: Final = 15.0
_DESTROYED: Final = "destroyed"


@dataclass(frozen=True, slots=True)
class DataKey:
    """A data key.

    Attributes:
        id: with `ENCRYPTED`, as frames name it.
        master: id of the master key that encrypts it in the key store.
        created, ends: Unix times; after `ends` it decrypts nothing. A key with an end encrypts nothing.
        cipher: the cipher for a context, such as a part of the names of blocks.
    """

    id: int
    material: bytes = field(repr=False)
    master: str
    created: float
    ends: float = math.inf
    cipher: Callable[[bytes], AESGCM] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM

        def derived(context: bytes) -> AESGCM:
            return AESGCM(hmac.digest(self.material, b"foreword/data\x00" + context, "sha256"))

        object.__setattr__(self, "cipher", lru_cache(_CIPHERS)(derived))

    @property
    def seals(self) -> bool:
        return math.isinf(self.ends)


@dataclass(slots=True)
class _Entry:
    """Knowledge of one key: itself if there is one, until when that counts, when the key store last said so, and whether it is
    one of this key store that has ended."""

    key: DataKey | None
    until: float
    checked: float
    ended: bool = False


@dataclass(slots=True)
class _Generation:
    salt: bytes
    until: float


class KeyStoreCalls:
    """Calls of a key store, each within `call_seconds` (by default one), or until the caller's deadline. After one that fails
    none is made until a probe has succeeded. A call that had less time says nothing of the key store."""

    def __init__(self, store: Store, seconds: float, call_seconds: float | None = None) -> None:
        self._guard, self._seconds, self.down = StoreGuard(store), seconds, False
        self._call_seconds = call_seconds or _CALL_SECONDS

    def _call(self, call: Callable[..., Result], deadline: float = math.inf) -> Result:
        if self.down:
            raise StoreUnavailable("the key store does not answer")
        time_left(deadline)
        hurried = deadline < time.monotonic() + self._call_seconds
        try:
            return self._try(call, deadline)
        except (StoreTimeout, StoreUnavailable) as error:
            if not (self.down or (hurried and isinstance(error, StoreTimeout))):
                self.down = True
                log.warning("the key store does not answer: %s", error.message)
                background_thread(self._probe, "keys")
            raise

    def _try(self, call: Callable[..., Result], deadline: float = math.inf) -> Result:
        deadline = min(deadline, time.monotonic() + self._call_seconds)
        return self._guard.call(partial(call, deadline=deadline), deadline)

    def _probe(self) -> None:
        while self.down:
            time.sleep(self._seconds)
            with contextlib.suppress(StoreError):
                self._try(partial(self._guard.store.get_record, _DESTROYED))
                self.down = False
        log.info("the key store answers again")

    def get(self, key: str, deadline: float = math.inf) -> bytes | None:
        return self._call(partial(self._guard.store.get_record, key), deadline)

    def put(self, key: str, data: bytes, deadline: float = math.inf) -> None:
        self._call(partial(self._guard.store.put_record, key, data), deadline)

    def delete(self, key: str) -> None:
        self._call(partial(self._guard.store.delete_record, key))

    def list(self, prefix: str, deadline: float = math.inf) -> list[str]:
        return self._call(partial(self._guard.store.records, prefix), deadline)

    def close(self) -> None:
        self.down = False
        self._guard.close()


class TenantLocks:
    """A lock per tenant: a key store that is slow for a tenant, or a master key that is not found, delays no other.

    Args:
        lock: of the table; nothing is waited for under it.
    """

    def __init__(self, lock: threading.Lock) -> None:
        self._lock = lock
        self._locks: dict[bytes, tuple[threading.Lock, int]] = {}  # and how many calls have or want each

    @contextlib.contextmanager
    def of(self, tenant: bytes, deadline: float = math.inf) -> Iterator[None]:
        """Exclude other calls for the tenant. Raises StoreTimeout at the deadline."""
        with self._lock:
            lock, count = self._locks.get(tenant, (threading.Lock(), 0))
            self._locks[tenant] = lock, count + 1
        try:
            if not lock.acquire(timeout=min(max(deadline - time.monotonic(), 0.0), threading.TIMEOUT_MAX)):
                raise StoreTimeout("another call has looked for the keys of this tenant until the deadline")
            try:
                yield
            finally:
                lock.release()
        finally:
            with self._lock:
                lock, count = self._locks.pop(tenant)
                if count > 1:
                    self._locks[tenant] = lock, count - 1


@dataclass(frozen=True, slots=True)
class ListedKey:
    """A record of the key store. `key`: None for one that cannot be decrypted; `destroyed`: none of its tenant is used."""

    tenant: bytes
    id: int
    key: DataKey | None
    destroyed: bool


class DataKeys(TenantKeys):
    """See `TenantKeys`.

    Args:
        store: the key store, if it is open already.
        call_seconds: how long a call of the key store may take, where no request waits for it; by default a second.

    Raises ConfigError, or StoreError if the key store cannot be opened.
    """

    def __init__(
        self, config: EncryptionConfig, store: Store | None = None, *, call_seconds: float | None = None
    ) -> None:
        self._config = config
        self._masters = MasterKeys(config)
        self._store = KeyStoreCalls(store or _opened(config), config.check_seconds, call_seconds)
        self._entries: dict[tuple[bytes, int], _Entry] = {}
        self._destructions = 0
        self._active: dict[bytes, tuple[int | None, float]] = {}
        self._generations: dict[bytes, _Generation] = {}
        self._closed = threading.Event()
        self.on_end: list[Callable[[bytes], object]] = []
        self.after_fork()
        renew_in_child(self)

    def after_fork(self) -> None:
        self._lock = threading.Lock()  # of the tables of locks, and of the start of the thread that looks
        self._sealing, self._looking_at = TenantLocks(self._lock), TenantLocks(self._lock)
        self._looking: threading.Thread | None = None

    @property
    def answers(self) -> bool:
        """Whether the key store has answered when it was asked last."""
        return not self._store.down

    # Keys

    def opening(self, tenant: bytes, number: int, deadline: float = math.inf) -> DataKey | None:
        """The tenant's key with this id; None if there is none (any more), or none that can be known now."""
        return self._entry(tenant, number, deadline).key

    def ended(self, tenant: bytes, number: int, deadline: float = math.inf) -> bool:
        """Whether the tenant's key with this id is known to have ended: what it encrypted is never read again. A key that
        this key store does not have may be one of another key store."""
        return self._entry(tenant, number, deadline).ended

    def _entry(self, tenant: bytes, number: int, deadline: float = math.inf) -> _Entry:
        entry = self._entries.get((tenant, number))
        if entry is None or time.monotonic() >= entry.until:
            entry = self._checked(tenant, number, entry, deadline)
        return entry

    def sealing(self, tenant: bytes, deadline: float = math.inf) -> DataKey | None:
        """The key that encrypts what the tenant stores now, a new one if it never had any; None for a tenant whose keys were
        destroyed, or if the key store does not answer."""
        number, until = self._active.get(tenant, (None, 0.0))
        if number is not None:
            key = self.opening(tenant, number, deadline)
            if key is not None and key.seals:
                return key
        elif time.monotonic() < until:
            return None
        key = None
        # Without the lock, calls for a new tenant would make a key each.
        with contextlib.suppress(StoreError), self._sealing.of(tenant, deadline):
            key = self._find_active(tenant, deadline)
        now = time.monotonic()
        if key is not None or now < deadline:  # a call that was out of time has found nothing out
            _bound(self._active)
            self._active[tenant] = (None if key is None else key.id, now + self._config.check_seconds)
        return key

    def _find_active(self, tenant: bytes, deadline: float) -> DataKey | None:
        names = [key.rpartition("/")[2] for key in self._store.list(_path(tenant, ""), deadline)]
        if _DESTROYED in names:
            return None
        known = [self.opening(tenant, _number(name), deadline) for name in names]
        usable = [key for key in known if key is not None and key.seals]
        return max(usable, key=lambda key: (key.created, key.id)) if usable else self._create(tenant, deadline)

    def _create(self, tenant: bytes, deadline: float = math.inf) -> DataKey | None:
        """A new key for a tenant; None if its keys were destroyed meanwhile."""
        number = ENCRYPTED | secrets.randbelow(ENCRYPTED - 1)
        key = DataKey(number, os.urandom(_KEY_BYTES), self.master, time.time())
        return key if self._write(tenant, key, deadline) else None

    def _write(self, tenant: bytes, key: DataKey, deadline: float = math.inf) -> bool:
        """Store a key, encrypted by the current master key. False if the tenant's keys were destroyed meanwhile: then it is
        deleted again."""
        self._store.put(_path(tenant, _name(key.id)), self._wrapped(tenant, key), deadline)
        if self._store.get(_path(tenant, _DESTROYED)) is not None:
            self._store.delete(_path(tenant, _name(key.id)))
            return False
        self._entries.pop((tenant, key.id), None)
        return True

    def _checked(self, tenant: bytes, number: int, entry: _Entry | None, deadline: float) -> _Entry:
        before, destructions = entry or _Entry(None, 0.0, -math.inf), self._destructions
        now = checked = time.monotonic()
        until = now + self._config.check_seconds
        try:
            data = self._store.get(_path(tenant, _name(number)), deadline)
            if data is not None and self._store.get(_path(tenant, _DESTROYED), deadline) is not None:
                data = None
            key = None if data is None else self._unwrapped(tenant, number, data, deadline)
            if before.key == key:
                key = before.key  # with the ciphers that are derived from it
        except StoreError:
            key, checked = before.key, before.checked
            if now < checked + self._config.outage_seconds:
                until = min(until, checked + self._config.outage_seconds)
            else:
                key = None
            if time.monotonic() >= deadline:  # this call was out of time, the next one may not be
                until = now
        ended = before.ended
        if key is not None:
            left = key.ends - time.time()
            ended = left <= 0
            key, until = (None, until) if ended else (key, min(until, now + left))
        _bound(self._entries)
        self._entries[tenant, number] = found = _Entry(key, until, checked, ended)
        if destructions != self._destructions:  # one may lie between reading the key store and this entry
            found.until = 0.0
        return found

    def _wrapped(self, tenant: bytes, key: DataKey) -> bytes:
        name, master = self._masters.current
        nonce = os.urandom(_NONCE_BYTES)
        plain = {
            "format": _FORMAT, "tenant": tenant.hex(), "id": _name(key.id), "master": name, "created": key.created,
            "ends": None if key.seals else key.ends,
        }  # fmt: skip
        sealed = master.encrypt(nonce, key.material, _canonical(plain))
        return _canonical({**plain, "nonce": nonce.hex(), "key": sealed.hex()})

    def _unwrapped(self, tenant: bytes, number: int, data: bytes, deadline: float = math.inf) -> DataKey | None:
        """Decrypt a record. None if it is damaged, or of another tenant. Raises StoreUnavailable if its master key is not known
        here."""
        from cryptography.exceptions import InvalidTag

        try:
            plain: dict[str, Any] = json.loads(data)
            nonce, sealed = bytes.fromhex(plain.pop("nonce")), bytes.fromhex(plain.pop("key"))
            named = plain["format"], plain["tenant"], plain["id"]
            if named != (_FORMAT, tenant.hex(), _name(number)):
                return None
            master = self._masters.get(str(plain["master"]), deadline)
            if master is None:
                raise StoreUnavailable(f"the master key {plain['master']!r} is not known here")
            material = master.decrypt(nonce, sealed, _canonical(plain))
            ends = math.inf if plain["ends"] is None else float(plain["ends"])
            return DataKey(number, material, plain["master"], float(plain["created"]), ends)
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError, InvalidTag):
            return None

    # Tenants

    def current(self, salt: bytes) -> bytes:
        base = ungenerated(salt)
        known = self._generations.get(base)
        if known is not None and time.monotonic() < known.until:
            return known.salt
        with self._looking_at.of(base):
            until, destructions = time.monotonic() + self._config.check_seconds, self._destructions
            try:
                found = self._generation(base, None if known is None else known.salt)
            except StoreError:
                found = salt if known is None else known.salt
            _bound(self._generations)
            self._generations[base] = now = _Generation(found, until)
            if destructions != self._destructions:
                now.until = 0.0
        with self._lock:
            if self._looking is None:
                self._looking = background_thread(self._look, "generations")
        if known is not None and known.salt != found:
            for call in self.on_end:
                call(known.salt)
        return found

    def _look(self) -> None:
        """Look at the generations of tenants without requests, too."""
        while not self._closed.wait(_LOOK_SECONDS):
            for base in list(self._generations):
                self.current(base)

    def _generation(self, base: bytes, known: bytes | None) -> bytes:
        """The tenant's salt in a generation whose keys live: `known` if they do. A new one if it has none."""
        if known is not None and self._store.get(_path(tenant_of_salt(known), _DESTROYED)) is None:
            return known
        first, dead = tenant_of_salt(base), set[bytes]()
        found = set[bytes]()
        for tenant, name in self._listed(_family(first)):
            (dead if name == _DESTROYED else found).add(tenant)
        if first not in dead:
            return base
        for tenant in sorted(found - dead):
            return with_generation(base, tenant[-GENERATION_BYTES:])
        fresh = with_generation(base, os.urandom(GENERATION_BYTES))
        return fresh if self._create(tenant_of_salt(fresh)) is not None else base

    def _listed(self, prefix: str) -> Iterator[tuple[bytes, str]]:
        """The tenants and last parts of record keys."""
        for key in self._store.list(prefix):
            folder, _, name = key.rpartition("/")
            with contextlib.suppress(ValueError):
                tenant = bytes.fromhex(folder.replace("/", ""))
                if len(tenant) == TENANT_BYTES:
                    yield tenant, name

    def generations(self, salt: bytes) -> list[bytes]:
        """The tenants, as in names, that a tenant with this salt has been, the first one first. Raises StoreError."""
        first = tenant_of_salt(ungenerated(salt))
        return list(dict.fromkeys([first, *sorted(tenant for tenant, _ in self._listed(_family(first)))]))

    def sessions(self, tenant: bytes, cache_salt: str) -> list[Salt]:
        later = (with_generation(tenant, one[-GENERATION_BYTES:]) for one in self.generations(tenant)[1:])
        known = [(one, Salt.of(root, cache_salt).client) for one in (tenant, *later) for root in (tenant, one)]
        return [Salt(*one) for one in dict.fromkeys(known)]

    def destroy(self, tenant: bytes) -> list[tuple[bytes, int]]:
        records = list(self._listed(_family(tenant)))
        dead = {one for one, name in records if name == _DESTROYED}
        tenants = {tenant, *(one for one, _ in records)}
        for one in tenants - dead:
            self._store.put(_path(one, _DESTROYED), _canonical({"format": _FORMAT, "destroyed": time.time()}))
        # One may have been made since the first listing; who makes another one now, deletes it.
        keys = [
            (one, _number(name)) for one, name in self._listed(_family(tenant)) if name != _DESTROYED and one in tenants
        ]
        for one, number in keys:
            self._store.delete(_path(one, _name(number)))
        self._destructions += 1
        for known in [known for known in list(self._entries) if known[0] in tenants]:
            self._entries.pop(known, None)
        for of in [of for of in list(self._generations.values()) if tenant_of_salt(of.salt) in tenants]:
            of.until = 0.0
        return sorted(keys)

    # Maintenance

    @property
    def master(self) -> str:
        return self._masters.current[0]

    def all(self) -> Iterator[ListedKey]:
        """All records of the key store. Raises StoreError."""
        records = list(self._listed(""))
        dead = {tenant for tenant, name in records if name == _DESTROYED}
        for tenant, name in records:
            if name != _DESTROYED:
                data, key = self._store.get(_path(tenant, name)), None
                with contextlib.suppress(StoreError):
                    key = None if data is None else self._unwrapped(tenant, _number(name), data)
                yield ListedKey(tenant, _number(name), key, tenant in dead)

    def count(self) -> tuple[int, int]:
        living = [one for one in self.all() if not one.destroyed]
        return len(living), sum(one.key is None for one in living)

    def destroyed(self) -> list[bytes]:
        """Tenants whose keys were destroyed. Raises StoreError."""
        return [tenant for tenant, name in self._listed("") if name == _DESTROYED]

    def wrap_again(self) -> tuple[int, int]:
        """Encrypt all data keys by the current master key, and delete those that were destroyed or have ended. Returns how many
        are encrypted by it now, and how many could not be decrypted. Raises StoreError."""
        done = failed = 0
        for one in self.all():
            if one.destroyed or (one.key is not None and one.key.ends <= time.time()):
                self._store.delete(_path(one.tenant, _name(one.id)))
            elif one.key is None:
                failed += 1
            else:
                done += one.key.master == self.master or self._write(one.tenant, one.key)
        return done, failed

    def rotate(self, tenant: bytes, seconds: float) -> DataKey | None:
        """Give a tenant a new data key; what it has stays readable for `seconds`. None if its keys were destroyed. Raises
        StoreError."""
        ends = time.time() + seconds
        before = [one.key for one in self.all() if one.tenant == tenant and one.key is not None and one.key.seals]
        fresh = self._create(tenant)
        for key in before if fresh is not None else ():
            self._write(tenant, replace(key, ends=ends))
        return fresh

    def close(self) -> None:
        self._closed.set()
        self._store.close()


@lru_cache(64)
def _shared(config: EncryptionConfig, process: int) -> DataKeys:
    return DataKeys(config)


def data_keys_of(config: EncryptionConfig) -> DataKeys | None:
    """The data keys of a configuration, one object in a process; None without encryption. Raises ConfigError, StoreError."""
    return _shared(config, os.getpid()) if config.key_store is not None else None


def _url(config: EncryptionConfig) -> StoreUrl:
    given = config.key_store or ""
    return parse(given if ":" in given else f"disk://{os.path.abspath(given)}?size=16MiB")


def check_apart(config: EncryptionConfig, urls: Iterable[str]) -> None:
    """Raises ConfigError if data keys would lie in a store of the blocks that they encrypt, and in each copy of it."""
    for url in map(parse, urls if config.key_store is not None else ()):
        own = _url(config)
        folders = [os.path.realpath(one.path) for one in (own, url) if one.scheme in ("disk", "file")]
        inside = len(folders) == 2 and os.path.commonpath(folders) in folders
        if inside or (url.url.rstrip("/"), url.options.get("prefix")) == (
            own.url.rstrip("/"),
            own.options.get("prefix"),
        ):
            raise ConfigError(f"encryption needs a key store of its own, outside of {url.shown}")


def check_exists(config: EncryptionConfig) -> None:
    """Raises StoreUnavailable if there is no key store where there should be one: a tool creates none, since what it says of
    the keys in an empty one would be about others."""
    if config.key_store is not None and not (url := _url(config)).type.exists(url):
        raise StoreUnavailable(f"no key store at {url.shown}")


def _opened(config: EncryptionConfig) -> Store:
    url = _url(config)
    if not (url.persistent and url.writable):
        raise ConfigError("encryption.key_store is a folder, or the URL of a store that outlives a process")
    url.type.check(url)
    if url.scheme == "disk":  # what was destroyed does not come back with a loss of power
        url = replace(url, options={**url.options, "sync_records": "1"})
    return url.type.open(url, None)


def tenant_of_salt(salt: bytes) -> bytes:
    """The tenant of blocks with this salt, as in their names."""
    return Salt(salt).digest[:TENANT_BYTES]


def _family(tenant: bytes) -> str:
    """The start of the record keys of all generations of a tenant."""
    return f"{tenant[:-GENERATION_BYTES].hex()}/"


def _path(tenant: bytes, name: str) -> str:
    return f"{_family(tenant)}{tenant[-GENERATION_BYTES:].hex()}/{name}"


def _name(number: int) -> str:
    return f"{number:08x}"


def _number(name: str) -> int:
    try:
        return int(name, 16)
    except ValueError:
        return 0


def _canonical(plain: dict[str, Any]) -> bytes:
    return json.dumps(plain, sort_keys=True, separators=(",", ":")).encode()


def _bound(known: dict[Any, Any]) -> None:
    """Forget what was learned first if there is too much."""
    while len(known) >= _MAX_ENTRIES:
        with contextlib.suppress(RuntimeError, StopIteration):  # another thread changes it
            known.pop(next(iter(known)), None)


def with_generation(tenant: bytes, generation: bytes) -> bytes:
    """A tenant's salt in a generation, 6 bytes; b"" for the first, which has none."""
    return ungenerated(tenant) + (GENERATION_MARK + generation if generation else b"")
