"""The service behind named prefixes, for every engine: registers them, shares them through a store, looks them up.

`LLM` calls it directly, event loops (`AsyncEngine`, a vLLM server) through `AsyncPrefixes`. The service computes nothing: the
caller computes the KV of a `Registration`, which the engine keeps as it keeps retentions.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import math
import threading
import time
import weakref
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import replace
from typing import Any, Self, TypeVar

from foreword.blocks.leases import Lease
from foreword.blocks.salt import PUBLIC
from foreword.errors import ForewordError, NotFound, StoreError
from foreword.newest import Newest
from foreword.prefixes.book import Content, Message, NamedPrefix, PrefixBook, content_of
from foreword.prefixes.errors import PrefixBudgetExceeded, UnknownPrefix
from foreword.prefixes.lease_records import PrefixRecord
from foreword.prefixes.stored_names import PrefixStorage
from foreword.tasks import shared

logger = logging.getLogger(__name__)

# Seconds between two reads of the store's records: in general, and for a name that is not known here.
_REFRESH_SECONDS = 2.0
_UNKNOWN_SECONDS = 0.1
_MAX_TENANTS = 4096
# How long a request that names a known prefix waits for the store, and the first requests until it has told what is public.
_KNOWN_NAME_WAIT = 0.25
_FIRST_PUBLIC_WAIT = 2.0
# Names whose records are looked for when the budget is spent, and seconds after which no further one is.
_MOST_ASKED = 64
_ASK_SECONDS = 5.0

Result = TypeVar("Result")


class Registration:
    """A prefix whose KV is being computed. Use it as a context manager, which gives up what was not finished.

    Attributes:
        tokens: whose KV to compute.
        lease: of that KV on a device; it has its blocks when they have been computed, before `finish`. None without a device.
        pinned: bytes of that KV that stores pin, where no device has a lease.
        adopted: another instance has registered this version, whose KV is to be kept here.
    """

    def __init__(
        self,
        service: PrefixService,
        prefix: NamedPrefix,
        lease: Lease[int] | None,
        *,
        salt: bytes,
        replace: bool,
        adopted: bool = False,
    ) -> None:
        self.prefix, self.tokens = prefix, prefix.tokens
        self.salt, self.lease, self.replace, self.adopted, self._service = salt, lease, replace, adopted, service
        self.pinned = 0
        service.registering.add(self)

    @property
    def size(self) -> int:
        """Bytes of the KV that is there."""
        return self.pinned if self.lease is None else self.lease.size

    def finish(self) -> NamedPrefix | None:
        """Register the prefix. None if its tenant was forgotten meanwhile, or an adopted version removed or replaced. Raises
        StoreError if no store takes the record, BadRequest or PrefixBudgetExceeded if name or room were taken meanwhile."""
        if not self._end():
            return None
        try:
            found = self._service.commit(self)
        except BaseException:
            self._service.give_up(self)
            raise
        if found is None:
            self._service.give_up(self)
        return found

    def _end(self) -> bool:
        """Whether it was open until now: of several threads, one takes it out of the set."""
        try:
            self._service.registering.remove(self)
        except KeyError:
            return False
        return True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._end():
            self._service.give_up(self)


class PrefixService:
    """Named prefixes of one engine, per tenant (`salt`). All methods may be called from any thread; those that say so block.

    Args:
        tokenize: tokens of a text, or of messages. Raises BadRequest. May block.
        reserve: a lease for the KV of a name and its tokens; None without a device. Raises PrefixBudgetExceeded.
        storage: where prefixes outlive the process and are shared with other instances; None: nowhere.
        mark: called with the tokens of all public prefixes, those of the salt PUBLIC, when they have changed.
    """

    def __init__(
        self,
        tokenize: Callable[[Content], Sequence[int]],
        reserve: Callable[[str, Sequence[int]], Lease[int] | None],
        storage: PrefixStorage | None = None,
        mark: Callable[[list[Sequence[int]]], None] = lambda texts: None,
    ) -> None:
        self.book, self._changing = PrefixBook(), threading.Lock()
        self.registering: set[Registration] = set()
        self._reserve, self._tokenize, self._storage, self._mark = reserve, tokenize, storage, mark
        if storage is not None:
            storage.pins.needed.append(lambda tenant: self._chains(storage, tenant))
        self._looked: Newest[bytes, float] = Newest(_MAX_TENANTS)
        self._unsuited: Newest[tuple[bytes, str], int] = Newest(_MAX_TENANTS)

    # Registering

    def register(
        self,
        name: str,
        content: str | None = None,
        messages: Sequence[Message] | None = None,
        *,
        salt: bytes = b"",
        replace: bool = False,
    ) -> Registration:
        """Reserve a name and budget; the caller computes the KV. Blocks. Raises BadRequest, PrefixBudgetExceeded."""
        held = content_of(content, messages)
        self.book.check(name, held, None, salt=salt, replace=replace)
        tokens = tuple(self._tokenize(held))
        version = self.book.version(name, salt=salt)
        self.book.check(name, held, tokens, salt=salt, replace=replace)
        if self._storage is not None:
            self._storage.check_room(name, tokens, salt)
        prefix = NamedPrefix(name, version, held, tokens, time.time())
        try:
            lease = self._reserve(name, tokens)
        except PrefixBudgetExceeded:
            if not self._drop_removed():
                raise
            lease = self._reserve(name, tokens)
        return Registration(self, prefix, lease, salt=salt, replace=replace)

    def _drop_removed(self) -> bool:
        """Drop names that other instances have removed. Their KV counts here until a listing shows it, for other tenants until
        they ask, for what was registered here just now some seconds. Returns whether there were any."""
        if self._storage is None:
            return False
        dropped, until = False, time.monotonic() + _ASK_SECONDS
        with contextlib.suppress(StoreError):  # a store that fails is not asked again
            largest = sorted(self.book.all(), key=lambda one: one[1].bytes, reverse=True)
            for salt, prefix in largest[:_MOST_ASKED]:
                if time.monotonic() >= until:
                    break
                # Without the lock: a slow store would keep others from all names.
                if not self._storage.exists(prefix.name, salt):
                    dropped |= self._dropped(prefix, salt)
        return dropped

    def _dropped(self, prefix: NamedPrefix, salt: bytes) -> bool:
        """Drop a version whose record has gone, unless it was removed or replaced since."""
        with self._changing:
            known = (one for one in self.book.list(salt=salt) if one.name == prefix.name)
            if all((one.version, one.created) != (prefix.version, prefix.created) for one in known):
                return False
            self.book.remove(prefix.name, salt=salt)
            self._marked(salt)
            self._unpin_stored([prefix.tokens], salt)
        return True

    def repin(self, prefix: NamedPrefix, *, salt: bytes = b"") -> Registration:
        """Reserve budget for a version that is registered already and whose KV is not kept (any more). Raises
        PrefixBudgetExceeded."""
        lease = self._reserve(prefix.name, prefix.tokens)
        return Registration(self, prefix, lease, salt=salt, replace=True, adopted=True)

    def commit(self, one: Registration) -> NamedPrefix | None:
        """Called by `Registration.finish`. Blocks."""
        name, salt, made = one.prefix.name, one.salt, one.prefix
        with self._changing:
            known = [prefix for prefix in self.book.list(salt=salt) if prefix.name == name]
            version = self.book.version(name, salt=salt)
            if one.adopted:
                if version != made.version:
                    return None
            else:
                self.book.check(name, made.content, made.tokens, salt=salt, replace=one.replace)
                version = max(version, made.version) + 1
            prefix = replace(made, version=version)
            if self._storage is not None and one.adopted:
                self._storage.pin_adopted(prefix.tokens, salt)
            elif self._storage is not None:
                self._storage.put(prefix, salt)
            prefix = self.book.commit(replace(prefix, bytes=one.size), one.lease, salt=salt)
            self._marked(salt)
            if not one.adopted:
                self._unpin_stored([old.tokens for old in known], salt)
        return prefix

    def give_up(self, one: Registration) -> None:
        """Called by `Registration` when nothing came of it."""
        if one.size:
            self._unpin_stored([one.tokens], one.salt)
        if one.lease is not None:
            one.lease.end()

    def remove(self, name: str, *, salt: bytes = b"") -> NamedPrefix:
        """Remove a prefix here and in the store, and unpin it. Blocks. Raises UnknownPrefix, StoreError."""
        with self._changing:
            prefix = self.book.get(name, salt=salt)
            if self._storage is not None:
                self._storage.remove(name, salt)
            self.book.remove(name, salt=salt)
            self._marked(salt)
            self._unpin_stored([prefix.tokens], salt)
        return prefix

    def drop(self, salt: bytes) -> None:
        """Remove a tenant's prefixes here, also those that are being computed. An erasure empties the stores."""
        for one in {one for one in set(self.registering) if one.salt == salt}:
            one.__exit__()
        with self._changing:
            for prefix in self.book.list(salt=salt):
                self.book.remove(prefix.name, salt=salt)
            self._marked(salt)

    def _marked(self, salt: bytes) -> None:
        """The prefixes of a tenant have changed."""
        if salt == PUBLIC.tenant:
            self._mark([prefix.tokens for prefix in self.book.list(salt=salt)])

    def _unpin_stored(self, removed: Sequence[Sequence[int]], salt: bytes) -> None:
        if self._storage is not None:
            for tokens in removed:
                with contextlib.suppress(ForewordError):  # counted by the tier
                    self._storage.unpin(tokens, salt)

    def _chains(self, storage: PrefixStorage, tenant: str) -> list[Sequence[bytes]]:
        """The blocks of a tenant's prefixes, given its digest."""
        known = self.book.all()
        return [storage.chain(one.tokens, salt)[1] for salt, one in known if storage.tenant(salt) == tenant]

    # Sharing

    @property
    def shared(self) -> bool:
        """Whether other instances see the prefixes."""
        return self._storage is not None

    def stale(self, salt: bytes = b"", name: str | None = None) -> bool:
        """Whether `refresh` should be called: at most every two seconds, or at once for a name that is not known here."""
        if self._storage is None:
            return False
        unknown = name is not None and not self.book.knows(name, salt=salt)
        age = time.monotonic() - self._looked.get(salt, -math.inf)
        return age >= (_UNKNOWN_SECONDS if unknown else _REFRESH_SECONDS)

    def refresh(self, salt: bytes = b"", name: str | None = None) -> list[NamedPrefix]:
        """Read what other instances have registered or removed. Blocks. Returns the new versions, whose KV is not pinned yet.

        `name`: a name that is looked up by itself where the store's records cannot be listed.
        """
        if self._storage is None:
            return []
        with self._changing:
            self._looked[salt] = time.monotonic()
            records = list[PrefixRecord]()
            try:
                found = self._storage.all(salt)
            except StoreError:
                if name is not None and not self.book.version(name, salt=salt):
                    with contextlib.suppress(StoreError):
                        records += filter(None, [self._storage.get(name, salt)])
            else:
                records += found.values.values()
                stored = {key.rpartition("/")[2] for key in found.keys}
                for prefix in self.book.list(salt=salt):
                    if prefix.name not in stored:
                        with contextlib.suppress(UnknownPrefix):
                            self.book.remove(prefix.name, salt=salt)
                            # The instance that removed it may have unpinned it before it was pinned here.
                            self._unpin_stored([prefix.tokens], salt)
            newer = [record for record in records if record.version > self.book.version(record.name, salt=salt)]
            adopted = self._adopt(newer, salt)
            self._marked(salt)
            return adopted

    def _adopt(self, records: Sequence[PrefixRecord], salt: bytes) -> list[NamedPrefix]:
        adopted = []
        for record in records:
            try:
                tokens = tuple(self._tokenize(record.content))
            except ForewordError as error:  # written for another chat template
                if self._unsuited.get((salt, record.name)) != record.version:
                    logger.warning("prefix %r does not suit this server: %s", record.name, error.message)
                self._unsuited[salt, record.name] = record.version
                continue
            prefix = NamedPrefix(record.name, record.version, record.content, tokens, record.created)
            self.book.adopt(prefix, salt=salt)
            adopted.append(prefix)
        return adopted


Compute = Callable[[Registration], Awaitable[None]]


class AsyncPrefixes:
    """The `PrefixService` of an engine on an event loop. What blocks runs on the loop's threads.

    A prefix that another instance has registered is computed (or loaded) and kept here in the background.

    Args:
        compute: computes the KV of a registration's tokens, which is kept from then on. Raises ForewordError.

    Attributes:
        budget_bytes: how much KV all prefixes may pin; None without a bound.
        look_at: when `follow_public` has something to do again, by `time.monotonic`; never without shared prefixes.
    """

    def __init__(self, service: PrefixService, compute: Compute, budget_bytes: int | None) -> None:
        self.service, self.budget_bytes, self._compute = service, budget_bytes, compute
        self.look_at = 0.0 if service.shared else math.inf
        self._refreshing: weakref.WeakValueDictionary[bytes, asyncio.Lock] = weakref.WeakValueDictionary()
        self._tasks: set[asyncio.Task[None]] = set()
        self._following: asyncio.Task[None] | None = None
        self._known_by = math.inf  # until when requests wait for what is public

    async def add(
        self,
        name: str,
        *,
        content: str | None = None,
        messages: Sequence[Message] | None = None,
        salt: bytes = b"",
        replace: bool = False,
        charge: Callable[[int], None] = lambda tokens: None,
    ) -> NamedPrefix:
        """Register a prefix, compute its KV and pin it. `charge` gets the number of tokens before they are computed.

        Raises BadRequest, PromptTooLong, PrefixBudgetExceeded, or StoreError if no store takes its record.
        """
        await self._refresh(salt, name)
        register = functools.partial(self.service.register, name, content, messages, salt=salt, replace=replace)
        with contextlib.ExitStack() as stack:
            registration = await _to_the_end(lambda: stack.enter_context(register()))
            charge(len(registration.tokens))
            await self._compute(registration)
            made = await _to_the_end(registration.finish)
        if made is None:
            raise NotFound(f"the prefix {name!r} was not registered: its tenant was forgotten meanwhile")
        return made

    def follow_public(self) -> None:
        """Learn of public prefixes that other instances have registered or removed, in the background, unless that was done
        within the last seconds. Called before requests, from `look_at` on."""
        if self.service.shared:
            self.look_at = time.monotonic() + _REFRESH_SECONDS
        if self.service.stale(PUBLIC.tenant) and (self._following is None or self._following.done()):
            self._following = self.later(self._refresh(PUBLIC.tenant, None))

    async def know_public(self) -> None:
        """Like `follow_public`, and requests that come before it has ended for the first time wait for it, until two seconds
        after the first of them at most: they would find nothing of what is public, and keep it as their tenant's own."""
        self.follow_public()
        self._known_by = min(self._known_by, time.monotonic() + _FIRST_PUBLIC_WAIT)
        left = self._known_by - time.monotonic()
        if left <= 0 or self._following is None:
            return
        if not self._following.done():
            self.look_at = 0.0  # those that come meanwhile wait too
            await asyncio.wait({self._following}, timeout=left)
        if self._following.done():
            self._known_by = 0.0

    async def repin(self, prefix: NamedPrefix, salt: bytes = b"", compute: Compute | None = None) -> None:
        """Keep the KV of a registered prefix, if the budget lasts; otherwise it is cached like any other text."""
        with self.service.repin(prefix, salt=salt) as registration:
            await (compute or self._compute)(registration)
            await _to_the_end(registration.finish)

    async def refresh(self, salt: bytes = b"", name: str | None = None) -> None:
        """Read what other instances have registered or removed, unless that was done within the last seconds.

        For a `name` that is not known here it is done at once; for a known name a store that hangs is not waited for.
        """
        if not self.service.stale(salt, name):
            return
        known = name is not None and self.service.book.knows(name, salt=salt)
        reading = self.later(self._refresh(salt, name))
        done, _ = await asyncio.wait({reading}, timeout=_KNOWN_NAME_WAIT if known else None)
        if done:
            reading.result()

    async def _refresh(self, salt: bytes, name: str | None) -> None:
        lock = self._refreshing.setdefault(salt, asyncio.Lock())
        async with lock:
            if self.service.stale(salt, name):
                for prefix in await asyncio.to_thread(self.service.refresh, salt, name):
                    self.later(self.repin(prefix, salt))

    def later(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run in the background. Errors are logged."""

        def ended(task: asyncio.Task[None]) -> None:
            self._tasks.discard(task)
            error = None if task.cancelled() else task.exception()
            if isinstance(error, ForewordError):
                logger.warning("named prefixes: %s", error.message)
            elif error is not None:
                logger.error("named prefixes", exc_info=error)

        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(ended)
        return task

    async def close(self) -> None:
        """End what runs in the background."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def get(self, name: str, *, salt: bytes = b"") -> NamedPrefix:
        """Raises UnknownPrefix, which lists similar names."""
        return self.service.book.get(name, salt=salt)

    def list(self, *, salt: bytes = b"") -> list[NamedPrefix]:
        """The prefixes of a tenant, by name."""
        return self.service.book.list(salt=salt)

    async def remove(self, name: str, *, salt: bytes = b"") -> NamedPrefix:
        """Remove a prefix here and in the store. Raises UnknownPrefix, StoreError."""
        await self._refresh(salt, name)
        return await asyncio.to_thread(self.service.remove, name, salt=salt)


async def _to_the_end(work: Callable[[], Result]) -> Result:
    """Run on a thread. A caller that is cancelled waits for the end."""
    working = shared(asyncio.to_thread(work))
    try:
        return await asyncio.shield(working)
    except asyncio.CancelledError:
        await asyncio.wait({working})
        raise
