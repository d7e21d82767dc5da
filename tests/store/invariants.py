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
    counted: dict[bytes, int] = {}
    for name in present.values():
        counted[chains._tenant_of(name)] = counted.get(chains._tenant_of(name), 0) + 1
    assert counted == {tenant: one.slots for tenant, one in chains._tenants.items()}, "tenants are counted"
    leaves = {slot for slot in present if not chains._children[slot] and not chains.pinned[slot]}
    for slot in leaves:
        assert chains._queued[slot], "leaves are marked"
        heap = chains._tenants[chains._tenant_of(present[slot])].heap
        assert any(entry & _SLOT_MASK == slot for entry in heap), (
            "every leaf that is not pinned is in its tenant's heap"
        )
        found = min(entry for entry in heap if entry & _SLOT_MASK == slot)
        assert chains.last_used[slot] >= found >> (_SLOT_BITS + _DEPTH_BITS), "heap times are never too late"
