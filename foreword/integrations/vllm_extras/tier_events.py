"""vLLM's KV events for the store tiers. They carry vLLM's own block hashes, so a subscriber can join tiers and device.

The worker side collects changes in the tiers; the scheduler side turns them into events. `medium` is CPU for `memory://` and
STORAGE for other tiers, `ownership` is the tier's label, `locality` is REMOTE for stores over a network. A block is stored once
every rank has stored its part.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from vllm.distributed.kv_events import MEDIUM_CPU, MEDIUM_STORAGE, BlockRemoved, BlockStored, KVCacheEvent
from vllm.v1.core.kv_cache_utils import (
    generate_block_hash_extra_keys,
    maybe_convert_block_hash,
    resolve_block_hashes,
    to_event_extra_keys,
)

from foreword.blocks.keys import FINGERPRINT_BYTES, is_public
from foreword.blocks.layout import BlockUnits, key_of
from foreword.blocks.salt import PUBLIC
from foreword.integrations.vllm.step_messages import TierChange
from foreword.newest import Newest
from foreword.store.base import Name
from foreword.store.tiered import TieredStore
from foreword.store.types import Reach

# They take about 60 MB and 70 MB of the scheduler's memory with blocks of 32 tokens.
_MAX_EXPECTED = 1 << 16
_MAX_STORED = 1 << 18


# Worker side


class TierWatch:
    """Collects the changes in the tiers of one rank's store. Changes come on any thread.

    Args:
        units: how this rank's blocks divide, by KV group.
    """

    def __init__(self, store: TieredStore, units: Sequence[BlockUnits]) -> None:
        self._parts = {
            layout.fingerprint: (layout.shard[0], group) for group, one in enumerate(units) for layout in one.layouts
        }
        self._changes: deque[TierChange] = deque()  # the tiers' threads append, the worker's takes: each call is atomic
        store.subscribe(self._note)

    def _note(self, tier: int, stored: bool, names: Sequence[Name]) -> None:
        for layout, some in itertools.groupby(names, key=lambda name: name[:FINGERPRINT_BYTES]):
            keys = tuple(key_of(name) for name in some)
            if layout in self._parts:
                part, group = self._parts[layout]
                self._changes.append(TierChange(part, tier, group, stored, keys))

    @property
    def pending(self) -> bool:
        return bool(self._changes)

    def take(self) -> list[TierChange]:
        return [self._changes.popleft() for _ in range(len(self._changes))]


# Scheduler side


def _public_hash(key: bytes) -> int:
    return int.from_bytes(key[-8:], "big")


_GroupKey = tuple[int, bytes]


@dataclass(frozen=True, slots=True)
class _BlockInfo:
    """A block as a BlockStored event describes it."""

    hash: Any
    parent: Any
    tokens: list[int]
    extra: Any


@dataclass(slots=True)
class _StoredIn:
    """A block that tiers have. `ranks`: by tier, a bit for each rank that has stored its part."""

    hash: Any
    ranks: dict[int, int] = field(default_factory=dict)


class TierEvents:
    """Turns changes in the tiers into vLLM's events.

    It remembers the last 65,536 blocks that were loaded or computed, and the tiers of the last 262,144 that it published.
    For older blocks it publishes no more events.

    Args:
        tiers: reach and label of each tier.
        parts: of each KV group, how many layouts keep parts of a block: one per rank, or per head unit.
        block_sizes: tokens per block of each KV group.

    Attributes:
        hash_size: tokens per block hash of vLLM, which may be a part of a block.
    """

    def __init__(self, tiers: Sequence[tuple[Reach, str]], parts: Sequence[int], block_sizes: Sequence[int]) -> None:
        self._tiers = tiers
        self._all = [(1 << count) - 1 for count in parts]
        self._block_sizes = block_sizes
        self.hash_size = min(block_sizes)
        self._expected: Newest[_GroupKey, _BlockInfo] = Newest(_MAX_EXPECTED)
        self._stored_in: Newest[_GroupKey, _StoredIn] = Newest(_MAX_STORED)
        self._events: list[KVCacheEvent] = []

    def expect(self, request: Any, group: int, numbers: Sequence[int], keys: Sequence[bytes], before: bytes) -> None:
        """Blocks of a request, by their index in it, that a tier may store soon. Without prefix caching vLLM has no hashes.
        Public blocks have hashes of our own, which no tenant's salt is in. `before`: the key before the first block."""
        size = self._block_sizes[group]
        hashes = resolve_block_hashes(request.block_hashes, self.hash_size, size)
        for index, key in zip(numbers, keys, strict=True):
            if index >= len(hashes):
                break
            tokens = list(request.all_token_ids[index * size : (index + 1) * size])
            if is_public(key):
                extra, parent = (
                    None if index else (("cache_salt", PUBLIC.text),),
                    _public_hash(before) if index else None,
                )
                block = _BlockInfo(_public_hash(key), parent, tokens, extra)
            else:
                extra, _ = generate_block_hash_extra_keys(request, index * size, (index + 1) * size, 0)
                parent = maybe_convert_block_hash(hashes[index - 1]) if index else None
                block = _BlockInfo(maybe_convert_block_hash(hashes[index]), parent, tokens, extra)
            before = key
            self._expected[group, key] = block

    def changed(self, changes: Iterable[TierChange]) -> None:
        """Publish the changes that complete a block in a tier, or make it incomplete."""
        for change in changes:
            note = self._note_stored if change.stored else self._note_removed
            keys = [(change.group, key) for key in change.keys]
            self._publish(change.tier, change.group, change.stored, [key for key in keys if note(change, key)])

    def missing(self, group: int, key: bytes) -> None:
        """A lookup found this block in no tier: publish its removal if another process has evicted it."""
        known = self._stored_in.pop((group, key), None)
        if known is not None:
            complete = [tier for tier, ranks in known.ranks.items() if ranks == self._all[group]]
            self._events += [self._removed_event(tier, group, [known.hash]) for tier in complete]

    def take(self) -> list[KVCacheEvent]:
        events, self._events = self._events, []
        return events

    def _note_stored(self, change: TierChange, key: _GroupKey) -> bool:
        """Whether all ranks have the block in this tier with this change."""
        known = self._stored_in.get(key)
        if known is None:
            block = self._expected.get(key)
            if block is None:
                return False
            known = self._stored_in[key] = _StoredIn(block.hash)
        before = known.ranks.get(change.tier, 0)
        known.ranks[change.tier] = before | 1 << change.rank
        return before != self._all[change.group] and known.ranks[change.tier] == self._all[change.group]

    def _note_removed(self, change: TierChange, key: _GroupKey) -> bool:
        """Whether all ranks had the block in this tier until this change."""
        known = self._stored_in.get(key)
        if known is None:
            return False
        before = known.ranks.get(change.tier, 0)
        known.ranks[change.tier] = before & ~(1 << change.rank)
        return before == self._all[change.group]

    def _publish(self, tier: int, group: int, stored: bool, keys: Sequence[_GroupKey]) -> None:
        if not keys:
            return
        if not stored:
            self._events.append(self._removed_event(tier, group, [self._stored_in[key].hash for key in keys]))
            return
        run: list[_BlockInfo] = []
        for key in keys:
            block = self._expected.get(key)
            if block is None:  # promoted to this tier after it was forgotten here
                continue
            if run and run[-1].hash != block.parent:
                self._events.append(self._stored_event(tier, group, run))
                run = []
            run.append(block)
        if run:
            self._events.append(self._stored_event(tier, group, run))

    def _stored_event(self, tier: int, group: int, run: Sequence[_BlockInfo]) -> KVCacheEvent:
        return BlockStored(
            block_hashes=[block.hash for block in run],
            parent_block_hash=run[0].parent,
            token_ids=[token for block in run for token in block.tokens],
            block_size=self._block_sizes[group],
            lora_id=None,
            lora_name=next((key[1] for key in run[0].extra or () if key[0] == "lora"), None),
            extra_keys=to_event_extra_keys([block.extra for block in run]),
            **self._tier_fields(tier, group),
        )

    def _removed_event(self, tier: int, group: int, hashes: list[Any]) -> KVCacheEvent:
        return BlockRemoved(block_hashes=hashes, **self._tier_fields(tier, group))

    def _tier_fields(self, tier: int, group: int) -> dict[str, Any]:
        reach, label = self._tiers[tier]
        return {
            "medium": MEDIUM_CPU if reach is Reach.PROCESS else MEDIUM_STORAGE,
            "group_idx": group,
            "locality": reach.locality,
            "ownership": label,
        }
