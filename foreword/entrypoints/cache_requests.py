"""Cache control, as both engines offer it: requests that keep a prefix, and answers about prefetches."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from foreword.blocks.leases import Lease
from foreword.blocks.prefix_cache import BlockTable
from foreword.blocks.retention import PREFETCH_PRIORITY, Retention, RetentionAnswer
from foreword.blocks.salt import NO_SALT, Salt, tenant_digest
from foreword.engine.request import Request, SamplingParams
from foreword.prefixes.prefix_service import Registration

if TYPE_CHECKING:
    from foreword.engine.loop import EngineCore

PREFETCH_SECONDS: Final = 60.0


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


def describe(one: Lease[int]) -> RetentionInfo:
    expires = None if one.ttl is None else time.time() + one.expires - time.monotonic()
    return RetentionInfo(one.key.hex(), one.tokens, one.ttl, one.priority, expires, bool(one.blocks), one.stored)


def retaining(
    request_id: str, tokens: Sequence[int], ttl: float | None, priority: int, salt: Salt = NO_SALT
) -> Request:
    """A request without output that keeps the whole of `tokens`."""
    wish = Retention(len(tokens), ttl, priority)
    return Request(request_id, tuple(tokens), SamplingParams(max_tokens=0), salt=salt, retain=(wish,))


def computing(request_id: str, prefix: Registration) -> Request:
    """A request without output that computes a named prefix and keeps it."""
    params, salt = SamplingParams(max_tokens=0), Salt(prefix.salt)
    return Request(request_id, prefix.tokens, params, salt=salt, named=prefix.lease)


def prefetch(
    core: EngineCore,
    tokens: Sequence[int],
    salt: Salt,
    seconds: float,
    done: Callable[[RetentionAnswer], None],
) -> None:
    """Load what the stores have of `tokens` and keep it on the device for some seconds. On the engine's thread. Raises what
    `EngineCore.prefetch` raises."""
    size = core.cache.block_size
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


def release(core: EngineCore, tokens: Sequence[int] | None, salt: Salt) -> list[Lease[int]]:
    """End the retentions along a prompt, or all of a salt, without a client's salt all of the tenant. From any thread; their
    blocks go back before the next step."""
    book, tenant = core.leases.book, tenant_digest(salt.tenant)
    if tokens is None:
        return book.release(tenant, [one.key for one in book.of(tenant) if one.root.startswith(salt.prefix)])
    return book.release(tenant, core.cache.public.keys_of(core.cache.scope(salt), tokens))
