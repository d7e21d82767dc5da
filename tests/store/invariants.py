"""Checks of internal bookkeeping that must hold after any sequence of calls."""

from __future__ import annotations

from foreword.store.base import Name
from foreword.store.chain_lru import _DEPTH_BITS, _SLOT_BITS, _SLOT_MASK, ChainLru
from foreword.store.memory.memory_store import MemoryStore


def check_memory_store(store: MemoryStore) -> None:
    """Check the invariants of a memory store's bookkeeping."""
    with store._lock:
        check_chains(store._slots.chains)


def check_chains(chains: ChainLru) -> None:
    """Check the index, the counts of children, the free slots and the heap of an LRU over chains."""
    present = dict(chains.blocks(0, chains.slots))
    assert chains.index == {name: slot for slot, name in present.items()}, "the index knows exactly the blocks in slots"
    assert not set(chains._free) & present.keys(), "a free slot has no block"
    assert len(set(chains._free)) == len(chains._free), "a free slot is free once"
    counts: dict[Name, int] = {}
    for slot in present:
        parent = chains.parents[slot]
        if parent is not None:
            counts[parent] = counts.get(parent, 0) + 1
    for slot, name in present.items():
        assert chains._children[slot] == counts.get(name, 0), "a block counts its children"
    orphans = {name: count for name, count in counts.items() if name not in chains.index}
    assert chains._orphans == orphans, "children of absent blocks are counted"
    queued = [entry & _SLOT_MASK for entry in chains._heap]
    assert len(set(queued)) == len(queued), "a slot is in the heap once"
    assert set(queued) == {slot for slot in range(chains.slots) if chains._queued[slot]}, "slots in the heap are marked"
    leaves = {slot for slot in present if not chains._children[slot] and not chains.pinned[slot]}
    assert leaves <= set(queued), "every leaf that is not pinned is in the heap"
    for entry in chains._heap:
        assert chains._used[entry & _SLOT_MASK] >= entry >> (_SLOT_BITS + _DEPTH_BITS), "heap times are never too late"
