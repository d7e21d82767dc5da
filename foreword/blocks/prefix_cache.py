"""Automatic prefix caching: find the longest cached prefix of a prompt, and publish full blocks for reuse.

`PrefixCache` does the bookkeeping for an engine's KV memory: it assigns block numbers and knows what each block holds. The
engine owns the tensors. All calls come from one thread.

The life of a sequence:

    table = cache.open(tokens)             no blocks yet
    match = cache.lookup(table)            changes nothing
    cache.admit(table, match)              shares the cached blocks
    cache.advance(table, n)                allocates blocks for tokens [0, n) and publishes those that become full
    table.append(token); cache.advance(...)
    cache.release(table)                   the blocks stay cached until they are evicted
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from foreword.blocks.common_prefixes import common_prefix_length
from foreword.blocks.keys import Scope, TokenChain
from foreword.blocks.pool import BlockPool
from foreword.errors import IntegrityError

MAX_PARTIAL_BLOCKS = 4096


@dataclass(frozen=True, slots=True)
class Match:
    """The longest cached prefix of a sequence.

    Attributes:
        blocks: cached full blocks, in order.
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
    """Copy the first `tokens` slots of block `source` to block `target` before the next step is computed."""

    source: int
    target: int
    tokens: int


class BlockTable:
    """The tokens of one sequence and the blocks that hold their KV, in order. Append-only.

    Attributes:
        chain: the tokens and their keys.
        blocks: block numbers; the KV of token `i` is in `blocks[i // block_size]`.
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
        num_blocks: blocks in the pool.
        block_size: tokens per block.
        model: fingerprint of the weights, part of every key.
        enabled: False disables caching: no block is published and no lookup hits.
        partial_reuse: `lookup` also offers partly filled blocks, to be copied.
        unfilled_first: see `BlockPool`.
        lookahead_blocks: extra blocks to allocate with each allocation of a sequence while enough are free.
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
        # Partly filled blocks: parent key -> (block, its tokens), least recently noted first.
        self._partials: OrderedDict[bytes, tuple[int, array[int]]] = OrderedDict()
        self._partial_parents: dict[int, bytes] = {}

    def open(self, tokens: Iterable[int], *, salt: bytes = b"", extras: Sequence[bytes] = ()) -> BlockTable:
        """A table for a new sequence. It has no blocks yet."""
        return BlockTable(TokenChain(self.root(salt), self.block_size, tokens, extras))

    def root(self, salt: bytes) -> bytes:
        """The root key of a tenant's chains."""
        root = self._roots.get(salt)
        if root is None:
            if len(self._roots) >= 1024:
                self._roots.clear()
            root = self._roots[salt] = Scope(self._model, self.block_size, salt).root()
        return root

    def salt_of(self, root: bytes) -> bytes | None:
        """The salt of a recently used root key."""
        return next((salt for salt, known in self._roots.items() if known == root), None)

    def lookup(self, table: BlockTable) -> Match:
        """The longest cached prefix of the table's tokens. Changes nothing: no references, no eviction order."""
        if not self.enabled:
            return NO_MATCH
        size = self.block_size
        full = len(table) // size
        blocks = self.pool.lookup(table.chain.keys_to(full))
        partial_block, partial_tokens = self._find_partial(table, len(blocks)) if self._partials else (-1, 0)
        return Match(blocks, partial_block, partial_tokens, len(blocks) * size + partial_tokens)

    def _find_partial(self, table: BlockTable, depth: int) -> tuple[int, int]:
        """A partly filled block after the table's first `depth` blocks. The sequence's last token is always recomputed."""
        known = self._partials.get(table.chain.key_before(depth))
        if known is None:
            return -1, 0
        block, held = known
        start = depth * self.block_size
        wanted = table.chain.tokens[start : min(start + self.block_size, len(table) - 1)]
        same = common_prefix_length(wanted, held)
        return (block, same) if same else (-1, 0)

    def new_blocks(self, table: BlockTable, match: Match, num_tokens: int) -> int:
        """Free blocks needed to admit the table with this match and to advance it to `num_tokens`."""
        return -(-num_tokens // self.block_size) - len(match.blocks) + self.pool.count_free(match.blocks)

    def admit(self, table: BlockTable, match: Match) -> None:
        """Give the cached blocks of `match` to a table without blocks."""
        self.pool.share(match.blocks)
        table.blocks = list(match.blocks)
        table.published = len(match.blocks)
        self._set_next_block_at(table)

    def advance(self, table: BlockTable, num_tokens: int) -> bool:
        """Allocate blocks for the KV of the table's first `num_tokens` tokens, and publish the blocks that become full.

        They are published before they are computed, so that other requests of the same step can share them. Returns False,
        and changes nothing, if too few blocks are free.
        """
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
        """Allocate blocks until the table has `num_blocks`, without publishing them: a load or a transfer will fill them.

        Returns the new blocks, or None, with nothing changed, if too few are free.
        """
        fresh = self._allocate(num_blocks - len(table.blocks), ahead=False)
        if fresh is not None:
            table.blocks += fresh
            self._set_next_block_at(table)
        return fresh

    def publish(self, table: BlockTable, num_blocks: int) -> None:
        """Publish those of the table's first `num_blocks` blocks that are not published yet. All of them are full."""
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
        if self.enabled and len(table.blocks) > table.published:
            table.next_block_at = (table.published + 1) * self.block_size
        else:
            table.next_block_at = len(table.blocks) * self.block_size + 1

    def _allocate(self, count: int, *, ahead: bool = True) -> list[int] | None:
        blocks = self.pool.allocate(count + self._lookahead) if self._lookahead and ahead else None
        if blocks is None:
            blocks = self.pool.allocate(count)
        if blocks is not None and self._partial_parents:
            for block in blocks:
                if block in self._partial_parents:
                    self._forget_partial(block)
        return blocks

    def copy_partial(self, table: BlockTable, match: Match) -> Copy | None:
        """The copy that `match` needs, after `advance` has allocated its target. None if there is nothing to copy.

        Source and target can be the same block: a free partial block that was allocated again as the next block.
        """
        if not match.partial_tokens:
            return None
        target = table.blocks[len(match.blocks)]
        return None if target == match.partial_block else Copy(match.partial_block, target, match.partial_tokens)

    def note_partial(self, table: BlockTable, num_tokens: int) -> None:
        """Offer the table's partly filled last block for copying until the block is allocated again.

        The KV of the first `num_tokens` tokens must be computed.
        """
        depth, held = divmod(num_tokens, self.block_size)
        if not self._partial_reuse or not held or depth >= len(table.blocks):
            return
        key, block = table.chain.key_before(depth), table.blocks[depth]
        if depth < table.published and self.pool.key(block) is None:
            return  # the block was shared from a sequence whose step failed: it was retracted and is empty
        if block in self._partial_parents:
            self._forget_partial(block)
        if key in self._partials:
            del self._partial_parents[self._partials.pop(key)[0]]
        elif len(self._partials) >= MAX_PARTIAL_BLOCKS:
            del self._partial_parents[self._partials.popitem(last=False)[1][0]]
        start = depth * self.block_size
        self._partials[key] = (block, table.chain.tokens[start : start + held])
        self._partial_parents[block] = key

    def _forget_partial(self, block: int) -> None:
        del self._partials[self._partial_parents.pop(block)]

    def retract(self, table: BlockTable, num_blocks: int) -> None:
        """Unpublish the table's blocks from number `num_blocks` on, because their KV was never computed."""
        if table.published > num_blocks:
            self.pool.retract(table.blocks[num_blocks : table.published])
            table.published = num_blocks
            self._set_next_block_at(table)

    def release(self, table: BlockTable) -> None:
        """Free the table's blocks, last one first, when the sequence ends or is preempted. They stay cached until evicted."""
        self.pool.release(table.blocks)
        table.blocks = []
        table.published = 0
        table.next_block_at = 0

    def pin(self, table: BlockTable, num_blocks: int) -> list[int]:
        """Protect the published ones of the table's first `num_blocks` blocks from eviction until `unpin`."""
        blocks = table.blocks[: min(num_blocks, table.published)]
        self.pool.share(blocks)
        return blocks

    def unpin(self, blocks: Sequence[int]) -> None:
        self.pool.release(blocks)

    def clear(self) -> int:
        """Drop all cached blocks that are not in use, and return their number."""
        self._partials.clear()
        self._partial_parents.clear()
        return self.pool.clear()

    def check(self) -> None:
        """Verify the invariants of the pool and of the partial blocks. Raises IntegrityError."""
        self.pool.check()
        blocks = {block: key for key, (block, _) in self._partials.items()}
        if blocks != self._partial_parents:
            raise IntegrityError("prefix cache: broken invariant: a noted partial block and its key know each other")
