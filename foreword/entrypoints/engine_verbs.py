"""The verbs of an engine's cache, each written once for `LLM` and `AsyncEngine`: keep, prefetch, release, forget, shorten a
session, name a prefix, and look.

An engine has one thread that runs its steps; for `LLM` it is the caller's. A verb is a request that the caller runs as it
runs all others, a function for that thread, or one for any other thread. Each method says which.
"""

from __future__ import annotations

import itertools
import time
from array import array
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeVar

from foreword.blocks.common_prefixes import CommonPrefix, common_prefixes
from foreword.blocks.keys import Scope
from foreword.blocks.leases import Lease
from foreword.blocks.prefix_cache import BlockTable
from foreword.blocks.retention import PREFETCH_PRIORITY, Retention, RetentionAnswer
from foreword.blocks.salt import GENERATION_BYTES, Salt, tenant_digest
from foreword.blocks.session_book import Alone
from foreword.engine.request import Request, SamplingParams
from foreword.errors import NotFound
from foreword.prefixes.erasure import described, erase_prefixes
from foreword.prefixes.prefix_service import Registration

if TYPE_CHECKING:
    from foreword.entrypoints.build_engine import EngineParts

PREFETCH_SECONDS: Final = 60.0

Result = TypeVar("Result")


class BetweenSteps(Protocol):
    """Runs a function on the engine's thread, between two steps, and returns what it returns. For other threads."""

    def __call__(self, function: Callable[[], Result], /) -> Result: ...


@dataclass(frozen=True, slots=True)
class RetentionInfo:
    """A retention. `on_device`: its blocks are kept on the device; `expires`: seconds since the epoch;
    None if it is kept until it is released."""

    id: str
    tokens: int
    ttl: float | None
    priority: int
    expires: float | None
    on_device: bool
    stored: bool


def _described(one: Lease[int]) -> RetentionInfo:
    expires = None if one.ttl is None else time.time() + one.expires - time.monotonic()
    return RetentionInfo(one.key.hex(), one.tokens, one.ttl, one.priority, expires, bool(one.blocks), one.stored)


class EngineVerbs:
    """The verbs of one engine.

    Attributes:
        prefixes: the service behind its named prefixes.
    """

    def __init__(self, parts: EngineParts, between_steps: BetweenSteps) -> None:
        self._parts, self._core, self._between_steps = parts, parts.core, between_steps
        self.prefixes = parts.prefix_service()
        self._ids = itertools.count()

    # Requests without output

    def retaining(self, tokens: Sequence[int], ttl: float | None, priority: int, salt: Salt) -> Request:
        """A request that computes or loads `tokens`, and keeps all of them."""
        wish, params = Retention(len(tokens), ttl, priority), SamplingParams(max_tokens=0)
        return Request(f"retain-{next(self._ids)}", tuple(tokens), params, salt=salt, retain=(wish,))

    def computing(self, prefix: Registration) -> Request:
        """A request that computes or loads a named prefix, and keeps it."""
        params, salt = SamplingParams(max_tokens=0), Salt(prefix.salt)
        return Request(f"prefix-{next(self._ids)}", prefix.tokens, params, salt=salt, named=prefix.lease)

    # On the engine's thread

    def prefetch(
        self, tokens: Sequence[int], salt: Salt, seconds: float, done: Callable[[RetentionAnswer], None]
    ) -> None:
        """Load what the stores have of `tokens` and keep it on the device for some seconds. Raises what
        `EngineCore.prefetch` raises."""
        core, size = self._core, self._core.cache.block_size
        full = len(tokens) // size * size

        def ended(table: BlockTable, reason: str) -> None:
            held = table.published * size
            if not held:
                done(RetentionAnswer("refused", 0, None, reason or "neither the device nor a store has it"))
                return
            answer = core.leases.keep(table, Retention(held, seconds, PREFETCH_PRIORITY, stored=False))
            why = reason or ("" if held == full else "the stores have no more of it")
            ttl = answer.ttl if answer.tokens == held else None
            done(RetentionAnswer("accepted" if held == full else "clipped", held, ttl, why or answer.reason))

        core.prefetch(tokens, salt, ended)

    def clear(self, salt: Salt | None = None) -> int:
        """Forget all blocks that are not in use, or those of a salt, without a client's salt those of the whole tenant. Returns
        their number."""
        return self._core.cache.clear(salt)

    def check(self) -> None:
        """Prove the pool's invariants. Raises IntegrityError."""
        self._core.cache.check()

    def recent_texts(self, salt: Salt, most: int) -> Sequence[array[int]]:
        """The newest texts of a tenant, for `common_prefixes`."""
        return self._core.recent_texts(salt, most)

    def retire(self, alone: Alone) -> tuple[Sequence[bytes], int]:
        """Free on the device what only an ended part of a session has used. Returns the keys that nothing uses, and the number
        of blocks."""
        keys = self._core.cache.unused(alone.keys)
        return keys, self._core.cache.retire(keys, drop=True)

    # On any thread; their blocks go back before the next step

    def release(self, tokens: Sequence[int] | None, salt: Salt) -> list[RetentionInfo]:
        """End the retentions along a prompt, or all of a salt, without a client's salt all of the tenant. Returns them."""
        core, book, tenant = self._core, self._core.leases.book, tenant_digest(salt.tenant)
        if tokens is None:
            keys: Sequence[bytes] = [one.key for one in book.of(tenant) if one.root.startswith(salt.prefix)]
        else:
            keys = core.cache.public.keys_of(core.cache.scope(salt), tokens)
        return [_described(one) for one in book.release(tenant, keys)]

    def retentions(self, tenant: bytes) -> list[RetentionInfo]:
        """Retentions of a tenant, given its salt."""
        return [_described(one) for one in self._core.leases.book.of(tenant_digest(tenant))]

    def shorten_session(self, tenant: bytes, name: str, keep: int | None) -> Alone:
        """End a session of a tenant, given its salt, or compact it to its first `keep` tokens. Returns what only it has used,
        for `retire` and then for `delete_unneeded`. Raises NotFound."""
        sessions, size = self._core.sessions, self._core.cache.block_size
        return sessions.end(tenant, name) if keep is None else sessions.compact(tenant, name, -(-keep // size))

    def delete_unneeded(self, tenant: bytes, alone: Alone, keys: Sequence[bytes]) -> Future[dict[str, int]] | None:
        """Begin to delete from all stores what `retire` says that nothing uses, for a tenant, given its salt. Gives the number
        of blocks by tier; None if there is nothing to delete."""
        offload, pins = self._parts.offload, self._parts.pins
        if offload is None or pins is None or not keys:
            return None
        return offload.delete(keys, partial(pins.unneeded, tenant_digest(tenant), alone.root, keys))

    def common_prefixes(self, texts: Sequence[array[int]], salt: Salt, limit: int) -> list[CommonPrefix]:
        """The prefixes that texts of a tenant have in common, the largest saving first. Takes a while."""
        size, cache = self._core.cache.block_size, self._core.cache
        scope = Scope(bytes.fromhex(self._parts.info.namespace), size, salt)
        found = common_prefixes(texts, size, limit)
        # A lookup only reads; outside the engine's thread its result may be a step old.
        keys = (cache.public.keys_of(scope, one.tokens) for one in found)
        return [replace(one, on_device=len(cache.pool.lookup(known))) for one, known in zip(found, keys, strict=True)]

    # On another thread than the engine's, which may wait

    def forget(self, salts: Sequence[Salt]) -> dict[str, Any]:
        """Remove what `AsyncEngine.forget` says, and return its receipt."""
        erasures, tenants = self._parts.erasures, [one.tenant for one in salts if not one.client]
        # First: nothing can be read from here on, whatever the rest takes.
        destroyed = erasures.destroy_keys(salts) if erasures is not None else None
        for tenant in tenants:
            self._core.sessions.forget(tenant)
        self._drop_prefixes(tenants)
        cleared = 0
        for salt in salts:
            self.release(None, salt)
            cleared += self._between_steps(partial(self._core.forget, salt))
        if erasures is None:
            return {"what": described(salts), "complete": True, "device_blocks": cleared, "left": 0}
        name, receipt = erasures.erase(salts, destroyed)
        self._drop_prefixes(tenants)  # those that were read from a store before it was swept
        return {"id": name, **receipt.plain(), "device_blocks": cleared}

    def _drop_prefixes(self, tenants: Sequence[bytes]) -> None:
        for tenant in tenants:
            self.prefixes.drop(tenant)

    def erasure(self, name: str, salt: Salt) -> dict[str, Any]:
        """The receipt of an erasure of this tenant, so far. Raises NotFound."""
        found = self._parts.erasures.get(name) if self._parts.erasures is not None else None
        # The tenant is in another generation than when it asked for the erasure.
        family = salt.prefix[:-GENERATION_BYTES]
        if found is None or not all(one.startswith(family) for one in found.prefixes):
            raise NotFound(f"there is no erasure {name!r}; those that are complete are remembered for a while")
        return {"id": name, **found.receipt.plain()}

    def drop_ended_generation(self, tenant: bytes) -> None:
        """Drop what this instance has of a tenant, given its salt, that was forgotten elsewhere. No request finds it, but it
        takes memory, and pins some of it."""
        salt, offload = Salt(tenant), self._parts.offload
        self.prefixes.drop(tenant)
        self.release(None, salt)
        self._core.post(partial(self._core.forget, salt))
        assert offload is not None
        memory = {tier.label for tier in offload.store.tiers if not tier.blocking}
        with offload.erasing([salt.prefix]) as queued:
            erase_prefixes(offload.store, [salt.prefix], described([salt]), queued=queued, only=memory)
