"""Named prefixes of a running engine (R15 to R18)."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import math
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from foreword.engine.request import Request, SamplingParams
from foreword.engine.scheduler import SequenceState
from foreword.errors import ForewordError, ShuttingDown, UnknownPrefix
from foreword.offload.manager import OffloadManager
from foreword.prefixes.book import Message, NamedPrefix, PrefixBook
from foreword.prefixes.records import PrefixRecord
from foreword.prefixes.stored import StoredPrefixes
from foreword.prefixes.tokens import prefix_tokens, prefixed_chat, prefixed_prompt

if TYPE_CHECKING:
    from foreword.entrypoints.async_engine import AsyncEngine

# Seconds between two looks at the named prefixes in the store: in general, and for a name that is not known here.
_REFRESH_SECONDS = 2.0
_UNKNOWN_SECONDS = 0.2
# A prefix that was registered so recently may not be in the store's listing yet.
_SETTLED_SECONDS = 10.0
_MAX_TENANTS = 4096


class PrefixRegistry:
    """Named prefixes of a running engine: registers, computes ahead, pins, and builds prompts with them (R15 to R18).

    With a store they are written there too. What other instances, or this one before it was restarted, have registered is
    seen when `refresh` looks; it is computed (or loaded) and pinned ahead, in the background, while the budget lasts.
    """

    def __init__(self, engine: AsyncEngine, book: PrefixBook, offload: OffloadManager | None = None) -> None:
        self._engine = engine
        self._book = book
        self._counter = 0
        self._looked: dict[bytes, float] = {}
        self._warming: set[asyncio.Task[None]] = set()
        self._stored = StoredPrefixes(offload, engine.info, engine.tokenizer) if offload is not None else None

    @property
    def budget_bytes(self) -> int:
        return self._book.budget_bytes

    @property
    def pinned_bytes(self) -> int:
        return self._book.pinned_bytes

    async def add(
        self,
        name: str,
        *,
        content: str | None = None,
        messages: Sequence[Message] | None = None,
        salt: bytes = b"",
        replace: bool = False,
    ) -> NamedPrefix:
        """Register a prefix, compute its KV and pin it. Raises BadRequest, PromptTooLong, PrefixBudgetExceeded, or StoreError
        if no store took it."""
        kind, held, tokens = prefix_tokens(self._engine.tokenizer, content, messages)
        await self.refresh(salt, name)
        wanted = NamedPrefix(name, self._book.version(name, salt=salt), kind, held, tokens, time.time())
        kept = await self._compute(wanted, salt, replace=replace)
        if self._stored is not None:
            await asyncio.to_thread(self._stored.put, kept, salt)
        return kept

    async def _compute(self, wanted: NamedPrefix, salt: bytes, *, replace: bool, adopted: bool = False) -> NamedPrefix:
        """Compute a prefix and pin it: the version after the one that is `wanted`, or, if it was `adopted`, that one."""
        engine, book, name, tokens = self._engine, self._book, wanted.name, wanted.tokens
        promised: list[int] = []
        kept: list[NamedPrefix] = []

        def promise() -> None:
            promised.append(book.promise(name, tokens, salt=salt, replacing=replace))

        def keep(sequence: SequenceState) -> None:
            if adopted and book.version(name, salt=salt) != wanted.version:
                return  # removed or replaced while it was loaded
            blocks = engine._core.cache.pin(sequence.table, len(tokens) // engine.info.block_size)
            before, same = (0, wanted) if adopted else (wanted.version, None)
            kept.append(
                book.keep(
                    name, wanted.kind, wanted.content, tokens, blocks, salt=salt, stored_version=before, adopted=same
                )
            )

        def settle() -> None:
            if promised and not kept:
                book.break_promise(promised[0])

        self._counter += 1
        request = Request(f"prefix-{self._counter}-{name}", tokens, SamplingParams(max_tokens=0), salt=salt)
        try:
            # All three run on the engine's thread, in this order, wherever the caller is cancelled.
            await engine._call(promise)
            engine.validate(request)
            async for _ in engine._listen(request, keep):
                pass
        finally:
            engine._post(settle)
        if not kept:
            raise ShuttingDown(f"the engine ended before the prefix {name!r} was computed")
        return kept[0]

    async def refresh(self, salt: bytes = b"", name: str | None = None) -> None:
        """Learn what the store knows, if that was not asked within the last seconds; at once for a name unknown here."""
        if self._stored is None:
            return
        records = self._stored.records
        unknown = name is not None and not self._book.version(name, salt=salt)
        age = time.monotonic() - self._looked.get(salt, -math.inf)
        if age < (_UNKNOWN_SECONDS if unknown else _REFRESH_SECONDS):
            return
        if len(self._looked) >= _MAX_TENANTS:
            self._looked.clear()
        self._looked[salt] = time.monotonic()
        found = await asyncio.to_thread(records.all, salt)
        if found is None:  # the store does not say what there is, but perhaps whether this one is there
            one = await asyncio.to_thread(records.get, name, salt) if name is not None and unknown else None
            if one is not None:
                await self._adopt(one, salt)
            return
        for record in found:
            if record.version > self._book.version(record.name, salt=salt):
                await self._adopt(record, salt)
        there = {record.name for record in found}
        for prefix in self._book.list(salt=salt):
            if prefix.name not in there and time.time() - prefix.created > _SETTLED_SECONDS:
                with contextlib.suppress(UnknownPrefix):
                    await self._engine._call(functools.partial(self._book.remove, prefix.name, salt=salt))

    async def _adopt(self, record: PrefixRecord, salt: bytes) -> None:
        assert self._stored is not None
        prefix = self._stored.adopted(record)
        if prefix is None:
            return
        await self._engine._call(lambda: self._book.adopt(prefix, salt=salt))
        task = asyncio.create_task(self._warm(prefix, salt))
        self._warming.add(task)
        task.add_done_callback(self._warming.discard)

    async def _warm(self, prefix: NamedPrefix, salt: bytes) -> None:
        """Bring an adopted prefix to the device and pin it; without room it is used like any other text."""
        with contextlib.suppress(ForewordError):
            await self._compute(prefix, salt, replace=True, adopted=True)

    def get(self, name: str, *, salt: bytes = b"") -> NamedPrefix:
        return self._book.get(name, salt=salt)

    async def remove(self, name: str, *, salt: bytes = b"") -> NamedPrefix:
        """Here and in the store. Raises UnknownPrefix, or StoreError if a store cannot be told."""
        await self.refresh(salt, name)
        prefix = self._book.get(name, salt=salt)
        if self._stored is not None:
            await asyncio.to_thread(self._stored.remove, prefix, salt)
        return await self._engine._call(lambda: self._book.remove(name, salt=salt))

    def prompt(self, name: str, text_or_tokens: str | Sequence[int], *, salt: bytes = b"") -> list[int]:
        """Tokens of the named text followed by those of the prompt; counts a use."""
        return prefixed_prompt(self._book, self._engine.tokenizer, name, text_or_tokens, salt)

    def chat(self, name: str, messages: Sequence[Message], *, salt: bytes = b"") -> list[int]:
        """Tokens of the named messages followed by the given ones, ready for the answer; counts a use."""
        return prefixed_chat(self._book, self._engine.tokenizer, name, messages, salt)

    def note_hit(self, name: str, tokens: int, *, salt: bytes = b"") -> None:
        self._book.note_hit(name, tokens, salt=salt)

    def list(self, *, salt: bytes = b"") -> list[NamedPrefix]:
        """By name."""
        return self._book.list(salt=salt)
