"""Automatic prefix caching: the longest cached prefix is found, and a full block becomes visible (R2 to R13).

`PrefixCache` is the whole bookkeeping of an engine's KV memory: it hands out block numbers and says what they hold. The
tensors behind the numbers are the engine's business. One thread calls it.

A sequence's life:

    table = cache.open(tokens)             nothing is taken yet
    match = cache.lookup(table)            changes nothing
    cache.admit(table, match)              shares the cached blocks
    cache.advance(table, n)                room for the KV of tokens [0, n), and the blocks that this fills become visible
    table.append(token); cache.advance(...)
    cache.release(table)                   the blocks stay cached while they can
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from foreword.blocks.keys import Scope, TokenChain
from foreword.blocks.pool import BlockPool
from foreword.errors import IntegrityError

MAX_PARTIALS = 4096


@dataclass(frozen=True, slots=True)
class Match:
    """What a lookup found for a chain of tokens.

    Attributes:
        blocks: full blocks, in order.
        partial_block: a block whose first `partial_tokens` tokens come next; it can be copied, not shared. -1 if none.
        cached_tokens: `len(blocks) * block_size + partial_tokens`.
    """

    blocks: Sequence[int]
    partial_block: int
    partial_tokens: int
    cached_tokens: int


NO_MATCH = Match((), -1, 0, 0)


@dataclass(frozen=True, slots=True)
class Copy:
    """The first `tokens` slots of block `source` must be copied to block `target` before the next computation."""

    source: int
    target: int
    tokens: int


class BlockTable:
    """One sequence's tokens and the blocks that hold their KV, in order. Append-only (R7).

    Attributes:
        chain: the tokens and their keys.
        blocks: block numbers; token `i` lies in `blocks[i // block_size]`.
        published: number of published blocks. They are full and have keys; their content never changes.
        next_block_at: token count at which the next block must be allocated or published; `advance` does nothing below it.
    """

    __slots__ = ("blocks", "chain", "next_block_at", "published")

    def __init__(self, chain: TokenChain) -> None:
        self.chain = chain
        self.blocks: list[int] = []
        self.published = 0
        self.next_block_at = 0

    def __len__(self) -> int:
        """Number of tokens."""
        return len(self.chain.tokens)

    def append(self, token: int) -> None:
        self.chain.tokens.append(token)


class PrefixCache:
    """A pool of blocks with automatic prefix caching.

    Args:
        num_blocks, block_size: the pool (R1); tokens per block.
        model: fingerprint of the weights, part of every key.
        enabled: without it nothing is named and nothing is found.
        partial_reuse: `lookup` also offers partly filled blocks, to be copied (R8).
        unfilled_first: see `BlockPool`.
        lookahead_blocks: blocks taken ahead of need per sequence, if there are any (R10).
        on_published: called with `(table, start, end)` when blocks `[start, end)` of a table are published.
        on_removed: called with the keys that no block holds any more.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        model: bytes = b"",
        enabled: bool = True,
        partial_reuse: bool = True,
        unfilled_first: bool = True,
        lookahead_blocks: int = 0,
        on_published: Callable[[BlockTable, int, int], None] | None = None,
        on_removed: Callable[[list[bytes]], None] | None = None,
    ) -> None:
        self.pool = BlockPool(num_blocks, unfilled_first=unfilled_first, on_removed=on_removed)
        self.block_size = block_size
        self.enabled = enabled
        self._model = model
        self._partial_reuse = partial_reuse and enabled
        self._lookahead = lookahead_blocks
        self._on_published = on_published
        self._roots: dict[bytes, bytes] = {}
        # Partly filled blocks: key before the block -> (block, its tokens), least recently noted first.
        self._partials: OrderedDict[bytes, tuple[int, Sequence[int]]] = OrderedDict()
        self._partial_of: dict[int, bytes] = {}

    def open(self, tokens: Iterable[int], *, salt: bytes = b"", extras: Sequence[bytes] = ()) -> BlockTable:
        """A table for a new sequence, without blocks."""
        return BlockTable(TokenChain(self.root(salt), self.block_size, tokens, extras))

    def root(self, salt: bytes) -> bytes:
        """The key that a tenant's chains begin with."""
        root = self._roots.get(salt)
        if root is None:
            if len(self._roots) >= 1024:
                self._roots.clear()
            root = self._roots[salt] = Scope(self._model, self.block_size, salt).root()
        return root

    def salt_of(self, root: bytes) -> bytes | None:
        """The salt of a root that was asked for lately."""
        return next((salt for salt, known in self._roots.items() if known == root), None)

    def lookup(self, table: BlockTable) -> Match:
        """The longest cached prefix of the table's tokens. Changes nothing: no reference, no order, no allocation (R3)."""
        if not self.enabled:
            return NO_MATCH
        size = self.block_size
        full = len(table) // size
        blocks = self.pool.lookup(table.chain.keys_to(full))
        partial_block, partial_tokens = self._find_partial(table, len(blocks)) if self._partials else (-1, 0)
        return Match(blocks, partial_block, partial_tokens, len(blocks) * size + partial_tokens)

    def _find_partial(self, table: BlockTable, depth: int) -> tuple[int, int]:
        """A block that continues the table's first `depth` blocks; the sequence's last token is left to be computed."""
        known = self._partials.get(table.chain.key_before(depth))
        if known is None:
            return -1, 0
        block, held = known
        start = depth * self.block_size
        wanted = table.chain.tokens[start : min(start + self.block_size, len(table) - 1)]
        same = 0
        for ours, theirs in zip(wanted, held, strict=False):
            if ours != theirs:
                break
            same += 1
        return (block, same) if same else (-1, 0)

    def new_blocks(self, table: BlockTable, match: Match, num_tokens: int) -> int:
        """Free blocks that admitting the table with this match and advancing to `num_tokens` takes from the pool."""
        return -(-num_tokens // self.block_size) - len(match.blocks) + self.pool.count_free(match.blocks)

    def admit(self, table: BlockTable, match: Match) -> None:
        """Give the cached blocks of `match` to a table without blocks."""
        self.pool.share(match.blocks)
        table.blocks = list(match.blocks)
        table.published = len(match.blocks)
        self._set_next_block_at(table)

    def advance(self, table: BlockTable, num_tokens: int) -> bool:
        """Make room for the KV of the table's first `num_tokens` tokens; the blocks that they fill become visible at once,
        so that the next request of the same step can share them (R9). False, and nothing changed, if memory is short."""
        if num_tokens < table.next_block_at:
            return True
        missing = -(-num_tokens // self.block_size) - len(table.blocks)
        if missing > 0:
            blocks = self._allocate(missing)
            if blocks is None:
                return False
            table.blocks += blocks
        full = num_tokens // self.block_size
        if full > table.published and self.enabled:
            self.publish(table, full)
        else:
            self._set_next_block_at(table)
        return True

    def extend(self, table: BlockTable, num_blocks: int) -> list[int] | None:
        """Take blocks for a table until it has `num_blocks`, without naming them: somebody else will fill them. Returns the
        new ones; None, and nothing changed, if memory is short."""
        fresh = self._allocate(num_blocks - len(table.blocks), ahead=False)
        if fresh is not None:
            table.blocks += fresh
            self._set_next_block_at(table)
        return fresh

    def publish(self, table: BlockTable, num_blocks: int) -> None:
        """The table's first `num_blocks` blocks hold their KV by now: those that are not visible yet become so."""
        start = table.published
        if num_blocks <= start or not self.enabled:
            return
        keys = table.chain.keys_to(num_blocks)[start:num_blocks]
        self.pool.publish(table.blocks[start:num_blocks], keys)
        if self._on_published is not None:
            self._on_published(table, start, num_blocks)
        table.published = num_blocks
        self._set_next_block_at(table)

    def _set_next_block_at(self, table: BlockTable) -> None:
        held = len(table.blocks)
        if not self.enabled:
            table.next_block_at = held * self.block_size + 1
        elif held > table.published:
            table.next_block_at = (table.published + 1) * self.block_size
        else:
            table.next_block_at = held * self.block_size + 1

    def _allocate(self, count: int, *, ahead: bool = True) -> list[int] | None:
        blocks = self.pool.allocate(count + self._lookahead) if self._lookahead and ahead else None
        if blocks is None:
            blocks = self.pool.allocate(count)
        if blocks is not None and self._partial_of:
            for block in blocks:
                if block in self._partial_of:
                    self._forget_partial(block)
        return blocks

    def copy_partial(self, table: BlockTable, match: Match) -> Copy | None:
        """The copy that `match` needs, once `advance` has taken the block it goes to. None if there is nothing to copy.

        The source may be the target: the block had been freed and was the next one to take.
        """
        if not match.partial_tokens:
            return None
        target = table.blocks[len(match.blocks)]
        return None if target == match.partial_block else Copy(match.partial_block, target, match.partial_tokens)

    def note_partial(self, table: BlockTable, num_tokens: int) -> None:
        """The KV of the first `num_tokens` tokens is computed: what lies in a partly filled last block may be copied from
        now on, until the block is taken for something else."""
        depth, held = divmod(num_tokens, self.block_size)
        if not self._partial_reuse or not held or depth >= len(table.blocks):
            return
        key, block = table.chain.key_before(depth), table.blocks[depth]
        if depth < table.published and self.pool.key(block) is None:
            return  # shared from a sequence whose step failed: it was withdrawn, so nothing is in it
        if block in self._partial_of:
            self._forget_partial(block)
        if key in self._partials:
            del self._partial_of[self._partials.pop(key)[0]]
        elif len(self._partials) >= MAX_PARTIALS:
            del self._partial_of[self._partials.popitem(last=False)[1][0]]
        start = depth * self.block_size
        self._partials[key] = (block, table.chain.tokens[start : start + held])
        self._partial_of[block] = key

    def _forget_partial(self, block: int) -> None:
        del self._partials[self._partial_of.pop(block)]

    def retract(self, table: BlockTable, num_blocks: int) -> None:
        """Blocks of the table from number `num_blocks` on were named too early: their KV was never computed."""
        if table.published > num_blocks:
            self.pool.retract(table.blocks[num_blocks : table.published])
            table.published = num_blocks
            self._set_next_block_at(table)

    def release(self, table: BlockTable) -> None:
        """The sequence ends or is preempted: its blocks go back, tail first, and stay cached while they can (R6)."""
        self.pool.release(table.blocks)
        table.blocks = []
        table.published = 0
        table.next_block_at = 0

    def pin(self, table: BlockTable, num_blocks: int) -> list[int]:
        """Hold the first `num_blocks` blocks of a table (all of them visible) until `unpin`."""
        blocks = table.blocks[: min(num_blocks, table.published)]
        self.pool.share(blocks)
        return blocks

    def unpin(self, blocks: Sequence[int]) -> None:
        self.pool.release(blocks)

    def clear(self) -> int:
        """Forget everything that is not in use; returns the number of blocks forgotten."""
        self._partials.clear()
        self._partial_of.clear()
        return self.pool.clear()

    def check(self) -> None:
        """Prove the invariants of pool and tails. Raises IntegrityError."""
        self.pool.check()
        if {key: block for block, key in self._partial_of.items()} != {
            k: held[0] for k, held in self._partials.items()
        }:
            raise IntegrityError("prefix cache: broken invariant: a noted partial block and its key know each other")
