"""Named prefixes for an engine that runs on an event loop: Foreword's `AsyncEngine`, and a vLLM server."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import weakref
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any, TypeVar

from foreword.blocks.salt import PUBLIC
from foreword.errors import ForewordError, NotFound
from foreword.prefixes.book import Message, NamedPrefix
from foreword.prefixes.prefix_service import PrefixService, Registration

logger = logging.getLogger(__name__)

# How long a request that names a known prefix waits for the store.
_KNOWN_NAME_WAIT = 0.25

Result = TypeVar("Result")
Compute = Callable[[Registration], Awaitable[None]]


class AsyncPrefixes:
    """The `PrefixService` of an engine on an event loop. What blocks runs on the loop's threads.

    A prefix that another instance has registered is computed (or loaded) and kept here in the background.

    Args:
        compute: computes the KV of a registration's tokens, which is kept from then on. Raises ForewordError.

    Attributes:
        budget_bytes: how much KV all prefixes may pin; None without a bound.
    """

    def __init__(self, service: PrefixService, compute: Compute, budget_bytes: int | None) -> None:
        self.service = service
        self.budget_bytes = budget_bytes
        self._compute = compute
        self._refreshing: weakref.WeakValueDictionary[bytes, asyncio.Lock] = weakref.WeakValueDictionary()
        self._tasks: set[asyncio.Task[None]] = set()
        self._following: asyncio.Task[None] | None = None

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
        within the last seconds. Called before each request."""
        if self.service.stale(PUBLIC.tenant) and (self._following is None or self._following.done()):
            self._following = self.later(self._refresh(PUBLIC.tenant, None))

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
    working = asyncio.ensure_future(asyncio.to_thread(work))
    try:
        return await asyncio.shield(working)
    except asyncio.CancelledError:
        await asyncio.wait({working})
        working.exception()  # the caller has gone
        raise
