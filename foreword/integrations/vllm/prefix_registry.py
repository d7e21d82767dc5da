"""Named prefixes of one vLLM server: registers them, has vLLM compute them ahead, keeps them in the stores (R15 to R18)."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import Coroutine, Sequence
from typing import Any, Final, Literal

from foreword.errors import BadRequest, ForewordError, NotReady, UnknownPrefix
from foreword.integrations.vllm.prefix_http import InnerServer
from foreword.integrations.vllm.prefix_store import Pinned, PrefixStores
from foreword.prefixes.book import Message, NamedPrefix, PrefixBook
from foreword.prefixes.records import PrefixRecord

logger = logging.getLogger(__name__)

# Seconds: how old what was read of the store may be, for a name that is not known and for all others.
_UNKNOWN_SECONDS: Final = 0.1
_REFRESH_SECONDS: Final = 2.0
# How long a request that names a known prefix waits for that: a store that hangs holds up nobody.
_REFRESH_WITHIN: Final = 0.25
# A prefix this young may not be in every tier's list yet.
_SETTLED_SECONDS: Final = 5.0
# How often a prefix in use is looked after.
_CHECK_SECONDS: Final = 30.0
# The engine writes behind: how long its blocks may take to come, altogether and one after the other.
_WRITTEN_WITHIN: Final = 60.0
_STILL_SECONDS: Final = 5.0
_POLL_SECONDS: Final = 0.05
_LEARN_WITHIN: Final = 10.0
_UNBOUNDED: Final = 1 << 62
_SALT: Final = b""


class PrefixRegistry:
    """All calls come from the server's event loop. Names belong to the server: vLLM's API keys are not tenants."""

    def __init__(self, stores: PrefixStores, server: InnerServer) -> None:
        self._stores = stores
        self._server = server
        self._book: PrefixBook | None = None
        self._opening = asyncio.Lock()
        self._changing = asyncio.Lock()
        self._refreshing = asyncio.Lock()
        self._looking_after = asyncio.Lock()
        self._patience = _LEARN_WITHIN
        self._looked = -math.inf
        self._checked: dict[str, float] = {}
        self._unsuited: dict[str, int] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    async def _opened(self) -> PrefixBook:
        """The book, made when the engine has said in the stores how it lays out blocks. Raises NotReady before."""
        async with self._opening:
            if self._book is None:
                within, self._patience = self._patience, 0.0
                if not await asyncio.to_thread(self._stores.learn, within) and self._stores.seen:
                    raise NotReady(
                        "the connector's stores do not say how its blocks are laid out; the log says whether they answer"
                    )
                # What is too much, the stores say: what is pinned in them is not this server's alone.
                stores = self._stores
                self._book = PrefixBook(_UNBOUNDED, stores.block_bytes, stores.block_size or 1, lambda blocks: None)
            return self._book

    @property
    def budget_bytes(self) -> int | None:
        """What the stores may pin; None without a bound."""
        return self._stores.budget

    def start(self) -> None:
        """Look what the stores know, and have computed again what they have lost."""
        self._later(self.refresh())

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.to_thread(self._stores.close)

    # For the routes

    async def add(
        self, name: str, *, content: str | None, messages: Sequence[Message] | None, replace: bool
    ) -> NamedPrefix:
        """Register a prefix, have it computed, and pin it. Raises BadRequest, PrefixBudgetExceeded, StoreError if no store
        takes the record, or what vLLM says."""
        book = await self._opened()
        async with self._changing:
            kind, held, tokens = await self._read(content, messages)
            await self.refresh(name)
            before = [prefix for prefix in book.list() if prefix.name == name]
            stored = book.version(name, salt=_SALT)
            promised = book.promise(name, tokens, salt=_SALT, replacing=replace)
            try:
                known = [prefix.tokens for prefix in book.list() if prefix.bytes]
                await asyncio.to_thread(self._stores.check_room, name, tokens, known)
                await self._compute(tokens)
                pinned = await self._pin(tokens)
            except BaseException:
                book.break_promise(promised)
                raise
            blocks = self._blocks(pinned)
            kept = book.keep(name, kind, held, tokens, blocks, salt=_SALT, stored_version=stored)
            self._checked[name] = time.monotonic()
            try:
                await asyncio.to_thread(self._stores.records().put, kept, self._stores.last_key(tokens), _SALT)
            except ForewordError:
                book.remove(name)
                await self._let_go(book, [kept, *before])
                raise
            await self._let_go(book, before)
            return kept

    async def remove(self, name: str) -> NamedPrefix:
        """Here and in the stores. Raises UnknownPrefix, or StoreError if a store cannot be told."""
        book = await self._opened()
        async with self._changing:
            await self.refresh(name)
            prefix = book.get(name)
            await asyncio.to_thread(self._stores.records().remove, name, _SALT)
            book.remove(name)
            await self._let_go(book, [prefix])
            return prefix

    async def all(self) -> list[NamedPrefix]:
        """By name."""
        book = await self._opened()
        await self.refresh()
        return book.list()

    async def get(self, name: str) -> NamedPrefix:
        """Raises UnknownPrefix with close names (R17)."""
        book = await self._opened()
        await self.refresh(name)
        return book.get(name)

    # For requests that name one

    async def use(self, name: str, kind: Literal["text", "messages"]) -> NamedPrefix:
        """Raises UnknownPrefix, or BadRequest for a prefix of another kind."""
        book = await self._opened()
        if self._stale(book, name):
            known = bool(book.version(name, salt=_SALT))
            await asyncio.wait({self._later(self.refresh(name))}, timeout=_REFRESH_WITHIN if known else None)
        return book.use(name, kind)

    async def encode(self, text: str) -> list[int]:
        """Tokens of what follows a prefix."""
        return await self._server.tokens({"prompt": text, "add_special_tokens": False}) if text else []

    def used(self, prefix: NamedPrefix, cached: int) -> None:
        """A request that named the prefix has ended, and found `cached` tokens of its prompt."""
        assert self._book is not None
        self._book.note_hit(prefix.name, cached)
        if time.monotonic() - self._checked.get(prefix.name, -math.inf) > _CHECK_SECONDS:
            self._later(self._look_after(prefix.name, prefix.version, computed=True))

    # What the stores know

    async def refresh(self, name: str | None = None) -> None:
        """Learn what the stores know, if that was not asked within the last seconds; at once for a name unknown here."""
        book = await self._opened()
        async with self._refreshing:
            if not self._stale(book, name):
                return
            unknown = name is not None and not book.version(name, salt=_SALT)
            records = self._stores.records()
            found = await asyncio.to_thread(records.all, _SALT)
            if found is None:  # the stores do not say what there is, but perhaps whether this one is there
                one = await asyncio.to_thread(records.get, name, _SALT) if name is not None and unknown else None
                if one is not None:
                    await self._adopt(book, one)
            else:
                await self._follow(book, found)
            self._looked = time.monotonic()

    def _stale(self, book: PrefixBook, name: str | None) -> bool:
        unknown = name is not None and not book.version(name, salt=_SALT)
        return time.monotonic() - self._looked >= (_UNKNOWN_SECONDS if unknown else _REFRESH_SECONDS)

    async def _follow(self, book: PrefixBook, found: Sequence[PrefixRecord]) -> None:
        for record in found:
            if record.version > book.version(record.name, salt=_SALT):
                await self._adopt(book, record)
        stored = {record.name for record in found}
        for prefix in book.list():
            if prefix.name not in stored and time.time() - prefix.created > _SETTLED_SECONDS:
                with contextlib.suppress(UnknownPrefix):  # removed here meanwhile
                    book.remove(prefix.name)

    async def _adopt(self, book: PrefixBook, record: PrefixRecord) -> None:
        content = record.content if isinstance(record.content, str) else None
        messages = None if isinstance(record.content, str) else record.content
        try:
            kind, held, tokens = await self._read(content, messages)
        except ForewordError as error:
            if self._unsuited.get(record.name) != record.version:  # said once
                logger.warning("Foreword: prefix %r does not suit this server: %s", record.name, error.message)
            self._unsuited[record.name] = record.version
            return
        prefix = NamedPrefix(record.name, record.version, kind, held, tokens, record.created)
        book.adopt(prefix, salt=_SALT)
        self._later(self._look_after(prefix.name, prefix.version, computed=False))

    async def _look_after(self, name: str, version: int, *, computed: bool) -> None:
        """Pin a prefix that is in use here. What the stores have lost, vLLM computes, if it has not just done so."""
        book = await self._opened()
        self._checked[name] = time.monotonic()
        async with self._looking_after:
            if book.version(name, salt=_SALT) != version:
                return
            tokens = book.get(name).tokens
            pinned = await asyncio.to_thread(self._stores.pin, tokens)
            if not pinned.whole:
                if not computed:
                    await self._compute(tokens)
                pinned = await self._pin(tokens)
            if book.version(name, salt=_SALT) == version:  # it may have been removed or replaced meanwhile
                prefix = book.get(name)
                book.promise(name, tokens, salt=_SALT, replacing=True)
                book.keep(name, prefix.kind, prefix.content, tokens, self._blocks(pinned), salt=_SALT, adopted=prefix)

    # What both need

    def _blocks(self, pinned: Pinned) -> list[int]:
        """As many as are pinned, for the book, which counts them."""
        return list(range(pinned.bytes // self._stores.block_bytes)) if pinned.bytes else []

    async def _read(
        self, content: str | None, messages: Sequence[Message] | None
    ) -> tuple[Literal["text", "messages"], str | tuple[Message, ...], tuple[int, ...]]:
        """Kind, content, and the tokens that every prompt with this prefix begins with. Raises BadRequest with vLLM's
        sentence."""
        if content is not None:
            return "text", content, tuple(await self._server.tokens({"prompt": content})) if content else ()
        assert messages is not None
        if any(not _is_text(message.get("content")) for message in messages):
            raise BadRequest(
                "a named prefix is text: the parts of its messages must be of type 'text'", param="messages"
            )
        try:
            # A template may write messages in another way when something follows them: so let something follow.
            one, other = [await self._render([*messages, {"role": "user", "content": text}]) for text in ("a", "b")]
        except BadRequest:
            return "messages", tuple(messages), tuple(await self._render(messages))
        shared = next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), len(one))
        return "messages", tuple(messages), tuple(one[:shared])

    async def _render(self, messages: Sequence[Message]) -> list[int]:
        return await self._server.tokens({"messages": list(messages), "add_generation_prompt": False})

    async def _compute(self, tokens: Sequence[int]) -> None:
        """Have vLLM compute (or load) a prefix; the connector writes it."""
        asked = {"prompt": list(tokens), "max_tokens": 1, "temperature": 0.0, "stream": False}
        await self._server.post("/v1/completions", asked)

    async def _pin(self, tokens: Sequence[int]) -> Pinned:
        """Pin a prefix's blocks as they come: another process writes them, and it says nothing when it has."""
        began = since = time.monotonic()
        best = Pinned(-1, False)
        while True:
            pinned = await asyncio.to_thread(self._stores.pin, tokens)
            now = time.monotonic()
            if pinned.bytes > best.bytes:
                best, since = pinned, now
            if pinned.whole or now - since > _STILL_SECONDS or now - began > _WRITTEN_WITHIN:
                return pinned
            await asyncio.sleep(_POLL_SECONDS)

    async def _let_go(self, book: PrefixBook, prefixes: Sequence[NamedPrefix]) -> None:
        """Unpin what no other prefix needs."""
        needed = [prefix.tokens for prefix in book.list()]
        for prefix in prefixes:
            self._checked.pop(prefix.name, None)
            await asyncio.to_thread(self._stores.unpin, prefix.tokens, needed)

    def _later(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        async def guarded() -> None:
            try:
                await work
            except ForewordError as error:
                logger.warning("Foreword: named prefixes: %s", error.message)

        task = asyncio.create_task(guarded())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


def _is_text(content: object) -> bool:
    parts = content if isinstance(content, list) else []
    return all(not isinstance(part, dict) or part.get("type", "text") == "text" for part in parts)
