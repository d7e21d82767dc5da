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

A model's layers form KV groups (`resume.py`), each with its own blocks, all from one pool. A block holds the KV of `block_size`
tokens in the layers of one group. The first group's blocks have the keys of their chain; those of group `g` have the same
keys with the byte `g` behind them. All groups take and publish blocks at the same positions. A window group also releases
them (`trim`) when their tokens have left the window, and needs only the last ones for a hit: before them its table has HOLEs.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache

from foreword.blocks.common_prefixes import common_prefix_length
from foreword.blocks.keys import KEY_BYTES, Scope, TokenChain
from foreword.blocks.partial_blocks import PartialBlocks
from foreword.blocks.pool import BlockPool
from foreword.blocks.public_blocks import PublicBlocks, roots_behind
from foreword.blocks.resume import GroupKind, KVGroup, longest_resumable
from foreword.blocks.salt import NO_SALT, PUBLIC, Salt
from foreword.errors import ConfigError

MAX_GROUPS = 256
_SUFFIXES = [bytes([number]) for number in range(MAX_GROUPS)]
# In a window group's table: a block before the window, which the sequence does not hold.
HOLE = -1


@dataclass(frozen=True, slots=True)
class Match:
    """The longest cached prefix of a sequence.

    Attributes:
        blocks: cached full blocks, in order; of a window group those that it needs, and HOLEs before them.
        partial_block: a block whose first `partial_tokens` tokens come next; it can be copied, not shared. -1 if none.
        cached_tokens: `len(blocks) * block_size + partial_tokens`.
        others, partial_others: the same of each further group.
    """

    blocks: Sequence[int]
    partial_block: int
    partial_tokens: int
    cached_tokens: int
    others: tuple[Sequence[int], ...] = ()
    partial_others: tuple[int, ...] = ()


NO_MATCH = Match((), -1, 0, 0)


@dataclass(frozen=True, slots=True)
class Copy:
    """Copy the first `tokens` slots of block `source` to block `target` before the next step is computed.

    `others` are source and target of each further group. All sources are read before a target is written: the target of one
    group may be the source of another.
    """

    source: int
    target: int
    tokens: int
    others: tuple[tuple[int, int], ...] = ()

    @property
    def sources(self) -> tuple[int, ...]:
        return self.source, *(source for source, _ in self.others)


class BlockTable:
    """The tokens of one sequence and the blocks that hold their KV, in order. Append-only.

    Attributes:
        chain, salt: the tokens and their keys, and what separates these from those of others.
        blocks: block numbers; the KV of token `i` is in `blocks[i // block_size]`.
        others: the same of each further group. All groups have equally many blocks, HOLEs included.
        holes: number of leading HOLEs of each group.
        published: number of published blocks. They are full and have keys; their content never changes.
        hidden: no further block is published: its tenant was forgotten.
        next_block_at: token count at which the next block must be allocated or published; `advance` does nothing below it.
        trimmed: number of full blocks at the last `trim`, which does nothing until there is another one.
    """

    # Between two steps, in tokens of the sequence (`size` is the block size, `computed` is `SequenceState.computed`):
    #     0        published * size         computed              len(blocks) * size
    #     |  keyed, shared  |  KV, not published  |  taken, not written yet  |
    #     published * size <= computed <= len(blocks) * size
    # Blocks before `published` never change, and lookups share them. Blocks behind `computed` belong to what writes them: the
    # running step, or a load. Within a step `advance` publishes ahead of `computed`, to the end of the step's chunk, so that
    # requests of the step share it; then the scheduler's `settle` moves `computed` there, or `withdraw` moves `published` back.
    # A prompt that is cached to its end has `computed` a token before `published`: that is recomputed, and not written.
    __slots__ = ("blocks", "chain", "hidden", "holes", "next_block_at", "others", "published", "salt", "trimmed")

    def __init__(self, chain: TokenChain, num_groups: int = 1, salt: Salt = NO_SALT) -> None:
        self.chain, self.salt, self.hidden = chain, salt, False
        self.empty(num_groups)

    def empty(self, num_groups: int) -> None:
        """Forget the blocks."""
        self.blocks: list[int] = []
        self.others: tuple[list[int], ...] = tuple([] for _ in range(num_groups - 1))
        self.holes = [0] * num_groups
        self.published = self.next_block_at = self.trimmed = 0

    @property
    def groups(self) -> tuple[list[int], ...]:
        """The blocks of each group."""
        return self.blocks, *self.others

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
        groups: the model's KV groups, of full attention and of windows without sinks, with blocks of this size. One group of
            full attention if there are none.
        model: fingerprint of the weights, part of every key.
        enabled: False disables caching: no block is published and no lookup hits.
        partial_reuse: `lookup` also offers partly filled blocks, to be copied.
        lookahead_blocks: extra blocks to allocate with each allocation of a sequence while enough are free.
        on_published: called with `(table, start, end)` when blocks `[start, end)` of a table are published.
        on_removed: called with the keys that no block holds any more.

    Attributes:
        quarantined: keys of blocks that are neither published nor searched, nor any block that continues them.
        disabled: no lookup hits for now.
        public: the blocks that all tenants share.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        groups: Sequence[KVGroup] = (),
        model: bytes = b"",
        enabled: bool = True,
        partial_reuse: bool = True,
        lookahead_blocks: int = 0,
        on_published: Callable[[BlockTable, int, int], None] | None = None,
        on_removed: Callable[[list[bytes]], None] | None = None,
    ) -> None:
        self.groups = tuple(groups) or (KVGroup(GroupKind.FULL, block_size),)
        _check_groups(self.groups, block_size)
        if on_removed is not None and len(self.groups) > 1:
            on_removed = _of_first_group(on_removed)
        self.pool = BlockPool(num_blocks, on_removed=on_removed)
        self.block_size = block_size
        self.windows = tuple(number for number, group in enumerate(self.groups) if not group.whole)
        self._simple = not self.windows and len(self.groups) == 1
        self.enabled = enabled
        self.disabled = False
        self.quarantined: frozenset[bytes] = frozenset()
        self.public = PublicBlocks()
        self._model = model
        self._partial_reuse = partial_reuse and enabled
        self._lookahead = lookahead_blocks * len(self.groups)
        self._on_published = on_published
        self.root = lru_cache(1024)(lambda salt: self.scope(salt).root())  # of a salt's chains
        self._partials = PartialBlocks()

    def open(self, tokens: Iterable[int], *, salt: Salt = NO_SALT, extras: Sequence[bytes] = ()) -> BlockTable:
        """A table for a new sequence. It has no blocks yet."""
        chain = TokenChain(self.root(salt), self.block_size, tokens, extras)
        if self.public.keys or salt == PUBLIC:
            self.public.begin(chain, self.scope(salt), extras)
        return BlockTable(chain, len(self.groups), salt)

    def scope(self, salt: Salt) -> Scope:
        """The scope of a salt's keys. From any thread."""
        return Scope(self._model, self.block_size, salt)

    def lookup(self, table: BlockTable) -> Match:
        """The longest cached prefix of the table's tokens. Changes nothing: no references, no eviction order."""
        if not self.enabled or self.disabled:
            return NO_MATCH
        size = self.block_size
        keys = table.chain.keys_to(len(table) // size)
        groups = (self.pool.lookup(keys),) if self._simple else self._find_groups(keys)
        blocks, *others = groups
        sources, tokens = self._find_partial(table, len(blocks)) if self._partials else ((-1,), 0)
        return Match(blocks, sources[0], tokens, len(blocks) * size + tokens, tuple(others), sources[1:])

    def _find_groups(self, keys: Sequence[bytes]) -> tuple[list[int], ...]:
        """The blocks of each group with which the longest prefix can be continued."""
        find, size = self.pool.find, self.block_size
        most = len(self.pool.lookup(keys)) if self.groups[0].whole else len(keys)
        position = longest_resumable(
            self.groups, most * size, lambda number, block: find(group_key(number, keys[block])) is not None
        )
        depth = position // size
        found = []
        for number, group in enumerate(self.groups):
            first = _first_needed(group, depth)
            wanted = [group_key(number, key) for key in keys[first:depth]]
            found.append([HOLE] * first + self.pool.lookup(wanted))
        return tuple(found)

    def _find_partial(self, table: BlockTable, depth: int) -> tuple[tuple[int, ...], int]:
        """Partly filled blocks after the table's first `depth` blocks. The sequence's last token is always recomputed."""
        known = self._partials.find(table.chain.own_before(depth))
        if known is None:
            return (-1,), 0
        blocks, held = known
        start = depth * self.block_size
        wanted = table.chain.tokens[start : min(start + self.block_size, len(table) - 1)]
        same = common_prefix_length(wanted, held)
        return (blocks, same) if same else ((-1,), 0)

    def new_blocks(self, table: BlockTable, match: Match, num_tokens: int, step_tokens: int | None = None) -> int:
        """Free blocks needed to admit the table with this match and to advance it to `num_tokens`.

        With `step_tokens` it is advanced by at most that many tokens at a time, and trimmed in between.
        """
        more = -(-num_tokens // self.block_size) - len(match.blocks)
        if self._simple:
            return more + self.pool.count_free(match.blocks)
        count = 0
        for number, blocks in enumerate((match.blocks, *(match.others or [()] * (len(self.groups) - 1)))):
            needed = more + self.pool.count_free([block for block in blocks if block != HOLE])
            count += min(needed, self._most_held(number, step_tokens))
        return count

    def owed_blocks(self, table: BlockTable, num_tokens: int, step_tokens: int | None = None) -> int:
        """Free blocks that an admitted table needs to advance to `num_tokens`, by at most `step_tokens` at a time."""
        length = len(table.blocks)
        more = -(-num_tokens // self.block_size) - length
        if more <= 0 or self._simple:
            return max(more, 0)
        count = 0
        for number, holes in enumerate(table.holes):
            held = length - holes
            count += max(min(held + more, self._most_held(number, step_tokens)) - held, 0)
        return count

    def _most_held(self, number: int, step_tokens: int | None) -> int:
        """The most blocks that a table of any length holds in a group, if it is trimmed between steps of `step_tokens`."""
        group, size = self.groups[number], self.block_size
        if group.whole or step_tokens is None:
            return self.pool.num_blocks
        return -(-(group.span - 1) // size) - (-(step_tokens + size - 1) // size)

    def longest(self, num_tokens: int, step_tokens: int) -> int:
        """The longest sequence up to `num_tokens` that fits into the pool alone, in steps of at most `step_tokens` tokens."""
        pool, most = self.pool.num_blocks, [self._most_held(g, step_tokens) for g in range(len(self.groups))]

        def needed(length: int) -> int:
            return sum(min(length, limit) if g in self.windows else length for g, limit in enumerate(most))

        fitting = bisect.bisect_right(range(-(-num_tokens // self.block_size) + 1), pool, key=needed) - 1
        return min(num_tokens, fitting * self.block_size)

    def admit(self, table: BlockTable, match: Match) -> None:
        """Give the cached blocks of `match` to a table without blocks."""
        table.blocks = list(match.blocks)
        table.published = table.trimmed = len(match.blocks)
        if self._simple:
            self.pool.share(match.blocks)
        else:
            self._admit_groups(table, match)
        self._set_next_block_at(table)

    def _admit_groups(self, table: BlockTable, match: Match) -> None:
        if match.others:
            table.others = tuple(list(blocks) for blocks in match.others)
        for number, blocks in enumerate(table.groups):
            holes = table.holes[number] = blocks.count(HOLE)
            self.pool.share(blocks[holes:])

    def advance(self, table: BlockTable, num_tokens: int, *, publish: bool = True) -> bool:
        """Allocate blocks for the KV of the table's first `num_tokens` tokens, and publish the blocks that become full.

        They are published before they are computed, so that other requests of the same step can share them. Returns False,
        and changes nothing, if too few blocks are free.
        """
        if num_tokens < table.next_block_at:
            return True
        missing = -(-num_tokens // self.block_size) - len(table.blocks)
        if missing > 0:
            blocks = self._allocate(table, missing if self._simple else missing * len(self.groups))
            if blocks is None:
                return False
            length = len(table.blocks)
            if self._simple:
                table.blocks += blocks
            else:
                _deal(table, blocks)
            self._own_public(table, length)
        full = num_tokens // self.block_size
        if full > table.published and self.enabled and publish:
            self.publish(table, full)
        else:
            self._set_next_block_at(table)
        return True

    def trim(self, table: BlockTable, num_tokens: int) -> None:
        """Release the blocks of window groups that a sequence needs no more when its first `num_tokens` tokens have KV.

        The table can still be continued from its last full block. What it releases stays cached until it is evicted.
        """
        depth = num_tokens // self.block_size
        if depth == table.trimmed:
            return
        table.trimmed = depth
        for number in self.windows:
            blocks, low = table.groups[number], table.holes[number]
            first = _first_needed(self.groups[number], depth)
            if first > low:
                self.pool.release([block for block in blocks[low:first] if block != HOLE])
                blocks[low:first] = [HOLE] * (first - low)
                table.holes[number] = first

    def extend(self, table: BlockTable, num_blocks: int) -> list[int] | None:
        """Allocate blocks until the table has `num_blocks`, without publishing them: a load or a transfer will fill them. A
        window group gets those that it needs to continue behind them, and keeps what it has until `trim` or `truncate`.

        Returns the new blocks, group after group, or None, with nothing changed, if too few are free.
        """
        length = len(table.blocks)
        starts = [max(_first_needed(group, num_blocks), length) for group in self.groups]
        fresh = self._allocate(table, sum(max(num_blocks - start, 0) for start in starts), ahead=False)
        if fresh is not None:
            rest = iter(fresh)
            for blocks, start in zip(table.groups, starts, strict=True):
                blocks += [HOLE] * (start - length)
                blocks += itertools.islice(rest, max(num_blocks - start, 0))
            self._own_public(table, length)
            self._set_next_block_at(table)
        return fresh

    def truncate(self, table: BlockTable, num_blocks: int) -> None:
        """Release the table's blocks from number `num_blocks` on. They are not published."""
        if len(table.blocks) > num_blocks:
            for blocks in table.groups:
                self.pool.release([block for block in blocks[num_blocks:] if block != HOLE])
                del blocks[num_blocks:]
            self._set_next_block_at(table)

    def publish(self, table: BlockTable, num_blocks: int) -> None:
        """Publish those of the table's first `num_blocks` blocks that are not published yet. All of them are full."""
        start = table.published
        if self.quarantined:
            num_blocks = self.usable(table.chain.keys_to(num_blocks)[:num_blocks])
        if num_blocks <= start or not self.enabled or table.hidden:
            return
        keys = table.chain.keys_to(num_blocks)[start:num_blocks]
        if self._simple:
            self.pool.publish(table.blocks[start:num_blocks], keys)
        else:
            self._publish_groups(table, start, keys)
        if self._on_published is not None:
            self._on_published(table, start, num_blocks)
        table.published = num_blocks
        self._set_next_block_at(table)

    def usable(self, keys: Sequence[bytes]) -> int:
        """How many of the first keys of a chain come before a block in quarantine."""
        quarantined = self.quarantined
        if not quarantined:
            return len(keys)
        return next((number for number, key in enumerate(keys) if key in quarantined), len(keys))

    def _publish_groups(self, table: BlockTable, start: int, keys: Sequence[bytes]) -> None:
        for number, blocks in enumerate(table.groups):
            pairs = zip(blocks[start : start + len(keys)], keys, strict=True)
            held = [(block, group_key(number, key)) for block, key in pairs if block != HOLE]
            self.pool.publish([block for block, _ in held], [key for _, key in held])

    def whole_run(self, table: BlockTable) -> int:
        """Tokens up to which the groups of full attention have every block cached; 0 if there is no such group."""
        if not self.enabled or not self.groups[0].whole:
            return 0
        keys = table.chain.keys_to(len(table) // self.block_size)
        whole = [number for number, group in enumerate(self.groups) if group.whole]
        runs = (len(self.pool.lookup([group_key(number, key) for key in keys])) for number in whole)
        return min(runs) * self.block_size

    def _set_next_block_at(self, table: BlockTable) -> None:
        if self.enabled and len(table.blocks) > table.published:
            table.next_block_at = (table.published + 1) * self.block_size
        else:
            table.next_block_at = len(table.blocks) * self.block_size + 1

    def _allocate(self, table: BlockTable, count: int, *, ahead: bool = True) -> list[int] | None:
        """`count` blocks or, with `ahead`, more. None if too few are free."""
        owner = table.chain.root
        blocks = self.pool.allocate(count + self._lookahead, owner) if self._lookahead and ahead else None
        if blocks is None:
            blocks = self.pool.allocate(count, owner)
        if blocks is not None and self._partials:
            self._partials.taken(blocks)
        return blocks

    def _own_public(self, table: BlockTable, start: int) -> None:
        """The table's new blocks, from number `start` on, count for no tenant where they are public."""
        if start < table.chain.public:
            public = [block for blocks in table.groups for block in blocks[start : table.chain.public] if block != HOLE]
            self.pool.give(public, self.root(PUBLIC))

    def copy_partial(self, table: BlockTable, match: Match) -> Copy | None:
        """The copy that `match` needs, after `advance` has allocated its target. None if there is nothing to copy.

        Source and target can be the same block: a free partial block that was allocated again as the next block.
        """
        if not match.partial_tokens:
            return None
        depth = len(match.blocks)
        target = table.blocks[depth]
        if self._simple:
            return None if target == match.partial_block else Copy(match.partial_block, target, match.partial_tokens)
        targets = [blocks[depth] for blocks in table.others]
        others = tuple(zip(match.partial_others, targets, strict=True))
        return Copy(match.partial_block, target, match.partial_tokens, others)

    def note_partial(self, table: BlockTable, num_tokens: int) -> None:
        """Offer the table's partly filled last block for copying until the block is allocated again.

        The KV of the first `num_tokens` tokens must be computed.
        """
        depth, held = divmod(num_tokens, self.block_size)
        if not self._partial_reuse or not held or depth >= len(table.blocks) or table.hidden:
            return
        key, blocks = table.chain.own_before(depth), tuple(group[depth] for group in table.groups)
        if depth < table.published and any(self.pool.key(block) is None for block in blocks):
            return  # the block was shared from a sequence whose step failed: it was retracted and is empty
        start = depth * self.block_size
        self._partials.note(key, blocks, table.chain.tokens[start : start + held], table.chain.root)

    def retract(self, table: BlockTable, num_blocks: int) -> None:
        """Unpublish the table's blocks from number `num_blocks` on, because their KV was never computed."""
        if table.published > num_blocks:
            for blocks in table.groups:
                self.pool.retract(blocks[num_blocks : table.published])
            table.published = num_blocks
            self._set_next_block_at(table)

    def hide(self, table: BlockTable) -> None:
        """From now on what the table has, or gets, is not found, but for public blocks. Those of tables that end are empty."""
        table.hidden = True
        self.retract(table, table.chain.public)

    def release(self, table: BlockTable) -> None:
        """Free the table's blocks, last one first, when the sequence ends or is preempted. They stay cached until evicted."""
        # Those of all groups by position: the last blocks of each are evicted first.
        groups = () if self._simple else zip(*table.groups, strict=True)
        self.pool.release(table.blocks if self._simple else [one for each in groups for one in each if one != HOLE])
        table.empty(len(self.groups))

    def pin(self, table: BlockTable, num_blocks: int) -> list[int]:
        """Protect what continuing from the table's first `num_blocks` blocks, or as many as are published, needs from
        eviction until `unpin`. Blocks that the table has trimmed are pinned while they are cached."""
        depth = min(num_blocks, table.published)
        pinned = []
        keys = table.chain.keys_to(depth)
        for number, (group, blocks) in enumerate(zip(self.groups, table.groups, strict=True)):
            for i in range(_first_needed(group, depth), depth):
                block = blocks[i] if blocks[i] != HOLE else self.pool.find(group_key(number, keys[i]))
                if block is not None:
                    pinned.append(block)
        self.pool.share(pinned)
        return pinned

    def pinned_blocks(self, num_tokens: int) -> int:
        """How many blocks `pin` protects for `num_tokens` tokens."""
        depth = num_tokens // self.block_size
        return sum(depth - _first_needed(group, depth) for group in self.groups)

    def unpin(self, blocks: Sequence[int]) -> None:
        self.pool.release(blocks)

    def clear(self, salt: Salt | None = None) -> int:
        """Drop all cached blocks that are not in use, or those of a salt, without a client's salt those of the whole tenant.
        Returns their number."""
        owner = b"" if salt is None else salt.prefix
        self._partials.forget_chains(owner)
        return self.pool.clear(owner)

    def unused(self, keys: Sequence[bytes]) -> Sequence[bytes]:
        """Keys of one chain, in order, behind the last block that is in use."""
        finds = [[self.pool.find(group_key(number, key)) for number in range(len(self.groups))] for key in keys]
        used = (at for at in range(len(keys), 0, -1) if any(map(self._in_use, finds[at - 1])))
        return keys[next(used, 0) :]

    def _in_use(self, block: int | None) -> bool:
        return block is not None and self.pool.references(block) > 0

    def retire(self, keys: Sequence[bytes], *, drop: bool = False) -> int:
        """Blocks of one chain, in order, of which nothing is expected any more go before all others of their tenant, or at once
        (`BlockPool.retire`). Returns how many there are, in all groups."""
        if drop:
            self._partials.forget(keys)
        groups = range(len(self.groups))
        return sum(self.pool.retire([group_key(number, key) for key in keys], drop=drop) for number in groups)

    def drop(self, root: bytes) -> None:
        """Drop all cached blocks of the chains with this root key: no lookup finds them, those in use neither. If it is that of
        public blocks, drop everything, since any chain may continue them."""
        root = roots_behind(root)
        self._partials.forget_chains(root)
        self.pool.retract(self.pool.in_use(root))
        self.pool.clear(root)

    def check(self) -> None:
        """Verify the invariants of the pool and of the partial blocks. Raises IntegrityError."""
        self.pool.check()
        self._partials.check()


def _check_groups(groups: Sequence[KVGroup], block_size: int) -> None:
    for group in groups:
        if group.block_size != block_size:
            raise ConfigError(f"KV groups of one pool have blocks of {block_size} tokens, not {group.block_size}")
        if group.kind not in (GroupKind.FULL, GroupKind.WINDOW) or group.sinks:
            raise ConfigError(f"the prefix cache has groups of full attention and of windows, not {group}")
    if len(groups) > MAX_GROUPS:
        raise ConfigError(f"{len(groups)} KV groups are too many; {MAX_GROUPS} are possible")


def _of_first_group(on_removed: Callable[[list[bytes]], None]) -> Callable[[list[bytes]], None]:
    """Report the keys of the first group's blocks only."""

    def report(keys: list[bytes]) -> None:
        chain_keys = [key for key in keys if len(key) == KEY_BYTES]
        if chain_keys:
            on_removed(chain_keys)

    return report


def group_key(number: int, key: bytes) -> bytes:
    """The key of a group's block in the pool."""
    return key + _SUFFIXES[number] if number else key


def _first_needed(group: KVGroup, depth: int) -> int:
    """The first of the blocks that a group needs to continue after `depth` blocks; it needs all that follow."""
    return 0 if group.whole else min(group.needed(depth * group.block_size), default=depth)


def _deal(table: BlockTable, blocks: Sequence[int]) -> None:
    """Give each group of a table an equal part of the blocks: what is consecutive stays together."""
    groups = table.groups
    each = len(blocks) // len(groups)
    for number, held in enumerate(groups):
        held += blocks[number * each : (number + 1) * each]
