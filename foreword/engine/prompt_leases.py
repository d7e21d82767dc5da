"""Leases of a device: takes references to the blocks of prompts while these are computed, for cache control and for named
prefixes. On the engine's thread, except for what says otherwise."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from foreword.blocks.leases import Lease, Leases
from foreword.blocks.prefix_cache import BlockTable, PrefixCache
from foreword.blocks.retention import Retention, RetentionAnswer
from foreword.blocks.salt import tenant_digest
from foreword.engine.request import Request
from foreword.prefixes.errors import PrefixBudgetExceeded


@dataclass(slots=True)
class PromptLeases:
    """The retentions of one prompt.

    Attributes:
        wishes: those that the request asked for and whose KV is not computed yet, in order of their ends.
        named: the lease of the whole prompt, if it is a named prefix and not computed yet.
        again: those known before, whose blocks are not kept on the device.
        answers: to the request's wishes so far.
    """

    wishes: deque[Retention]
    named: Lease[int] | None = None
    again: deque[Retention] = field(default_factory=deque)
    answers: list[RetentionAnswer] = field(default_factory=list)


class EngineLeases:
    """The leases of an engine, which have references to blocks of its pool.

    Args:
        budget, tenant_budget, retain_budget, most, longest, block_bytes: see `Leases`.

    Attributes:
        on_release: is called, on any thread, when there are blocks for `settle` to release: an idle engine takes no step.
    """

    def __init__(
        self,
        cache: PrefixCache,
        budget: int,
        tenant_budget: int,
        *,
        retain_budget: int | None = None,
        most: int = 128,
        longest: float = 86_400.0,
        block_bytes: int = 1,
    ) -> None:
        self._dropped: deque[Sequence[int]] = deque()
        self._cache = cache
        self.on_release: Callable[[], object] = lambda: None
        self.book = Leases[int](
            budget,
            tenant_budget,
            block_bytes=block_bytes,
            retain_budget=retain_budget,
            most=most,
            longest=longest,
            drop=self._drop,
        )

    def reserve(self, name: str, tokens: Sequence[int]) -> Lease[int]:
        """Room for a named prefix. From any thread. Raises PrefixBudgetExceeded."""
        count, book = self._cache.pinned_blocks(len(tokens)), self.book
        lease = book.reserve(name, count)
        if lease is None:
            raise PrefixBudgetExceeded(
                f"prefix {name!r} needs {count * book.block_bytes:,} bytes, but of the {book.budget:,} bytes that named "
                f"prefixes may pin {book.free:,} are left; remove one, or raise prefixes.budget",
                param="content",
            )
        return lease

    def open(self, request: Request) -> PromptLeases | None:
        """The retentions of a prompt that is queued; None for further sequences of it."""
        if request.index:
            return None
        return PromptLeases(deque(sorted(request.retain, key=lambda wish: wish.end)), request.named)

    def admitted(self, kept: PromptLeases, table: BlockTable, num_prompt: int) -> None:
        """Renew the retentions that a prompt passes."""
        size = self._cache.block_size
        full = num_prompt // size
        wished = {wish.end // size for wish in kept.wishes}
        for one in self.book.on_path(tenant_digest(table.salt.tenant), table.chain.keys_to(full)[:full]):
            if not one.blocks and one.tokens // size not in wished:
                kept.again.append(Retention(one.tokens, one.ttl, one.priority, one.stored))

    def computed(self, kept: PromptLeases, table: BlockTable, tokens: int) -> None:
        """The KV of the first `tokens` tokens is computed: keep what ends there."""
        size = self._cache.block_size
        while kept.again and kept.again[0].end <= tokens:
            self.keep(table, kept.again.popleft())
        while kept.wishes and kept.wishes[0].end // size * size <= tokens:
            kept.answers.append(self.keep(table, kept.wishes.popleft()))
        full = len(table.chain.tokens) // size
        if kept.named is not None and full * size <= tokens:
            self.book.fill(kept.named, self._cache.pin(table, full))
            kept.named = None

    def ended(self, kept: PromptLeases) -> tuple[RetentionAnswer, ...]:
        """The answers to all wishes of a request that has ended."""
        refused = RetentionAnswer("refused", 0, None, "the request ended before this part was computed")
        return (*kept.answers, *(refused for _ in kept.wishes))

    def keep(self, table: BlockTable, wish: Retention) -> RetentionAnswer:
        """Keep the table's first blocks, whose KV is computed, for its tenant."""
        cache, size = self._cache, self._cache.block_size
        depth = wish.end // size
        if not cache.enabled:
            return RetentionAnswer("refused", 0, None, "prefix caching is switched off")
        if not depth:
            return RetentionAnswer("refused", 0, None, f"shorter than a block of {size} tokens")
        needed, keys = cache.pinned_blocks(depth * size), table.chain.keys_to(depth)[:depth]
        whole = len(cache.groups) > 1 or bool(cache.windows)
        tenant, root = tenant_digest(table.salt.tenant), table.chain.root
        blocks = cache.pin(table, depth) if depth <= table.published else []
        if len(blocks) < needed:
            cache.unpin(blocks)
            return RetentionAnswer("refused", 0, None, "not all of its blocks are cached any more")
        # Nothing between the pin and this call: from here on the blocks are the book's.
        answer = self.book.retain(tenant, root, keys, blocks, wish, block_size=size, whole=whole)
        self.settle()
        return answer

    def yield_one(self) -> bool:
        """Give the blocks of one retention back to the pool. False if there is none."""
        yielded = self.book.yield_blocks()
        self.settle()
        return yielded

    def _drop(self, blocks: Sequence[int]) -> None:
        self._dropped.append(blocks)
        self.on_release()

    def settle(self) -> None:
        """Release the blocks of leases that have ended."""
        while self._dropped:
            self._cache.unpin(self._dropped.popleft())
