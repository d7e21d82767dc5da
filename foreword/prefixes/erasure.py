"""Delete what a tenant, a named prefix or a model has stored, from every tier, with a receipt.

Blocks do not name their tenant. The first block of a chain has the root key as its parent, which is a digest of model,
block size and the tenant's salt. So the store is scanned, and chains are followed from their roots, or from the last
block of a prefix.
"""

from __future__ import annotations

import json
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TypeVar

from foreword.blocks.keys import Scope
from foreword.blocks.layout import FINGERPRINT_BYTES
from foreword.blocks.resume import GroupKind, KVGroup
from foreword.errors import NotFound
from foreword.prefixes.records import PrefixRecord, read_record, tenant_digest
from foreword.store.base import Name, StoredBlock
from foreword.store.tiered import TieredStore

Parsed = TypeVar("Parsed")

SCAN_WITHIN = 600.0  # seconds for a scan of all tiers
_CALL_TIMEOUT = 60.0
_BATCH = 512


@dataclass(frozen=True, slots=True)
class LayoutRecord:
    """The description of one layout in a store: the model and the form of its blocks.

    Attributes:
        group: the layers, and which blocks they need.
        key_size: tokens per block key.
    """

    fingerprint: bytes
    model: bytes
    model_name: str
    group: KVGroup
    key_size: int
    described: Mapping[str, object]


@dataclass(frozen=True, slots=True)
class Receipt:
    """The result of an erasure.

    Attributes:
        what: description of what was erased.
        blocks, bytes: number of distinct blocks found, and the bytes of all their copies.
        removed: number of blocks removed from each tier, by label.
        records: record keys of the named prefixes that were removed.
        left: number of blocks that a second lookup still found; 0 unless they were written again in the meantime.
        unknown_blocks: number of blocks whose layout is not described in the store, so their owner is unknown.
    """

    what: str
    blocks: int
    bytes: int
    removed: dict[str, int]
    records: list[str]
    left: int
    unknown_blocks: int = 0
    finished: float = field(default_factory=time.time)

    def plain(self) -> dict[str, object]:
        """As a JSON object."""
        return asdict(self)


def layouts(store: TieredStore) -> dict[bytes, LayoutRecord]:
    """The layouts described in a store, by fingerprint. Unreadable records are skipped."""
    return {record.fingerprint: record for record in _parse_records(store, "layouts/", _read_layout).values()}


def _read_layout(key: str, data: bytes) -> LayoutRecord | None:
    try:
        read = json.loads(data)
        described = read["layout"]
        fingerprint, model = bytes.fromhex(key.removeprefix("layouts/")), bytes.fromhex(described["model"])
        kind, size = GroupKind(read.get("kind", GroupKind.FULL)), int(described["block_size"])
        group = KVGroup(kind, size, int(read.get("span", 0)), int(read.get("sinks", 0)))
        return LayoutRecord(fingerprint, model, str(read["model"]), group, int(read.get("key_size", size)), described)
    except (ValueError, TypeError, KeyError):
        return None


def named_prefixes(store: TieredStore) -> dict[str, PrefixRecord]:
    """The named prefixes of all tenants and models in a store, by record key. Unreadable records are skipped."""
    return _parse_records(store, "prefixes/", lambda _, data: read_record(data))


def _parse_records(store: TieredStore, prefix: str, parse: Callable[[str, bytes], Parsed | None]) -> dict[str, Parsed]:
    found = {}
    for key in store.records(prefix, deadline=_deadline()):
        data = store.get_record(key, deadline=_deadline())
        record = parse(key, data) if data is not None else None
        if record is not None:
            found[key] = record
    return found


def forget_tenant(store: TieredStore, salt: bytes) -> Receipt:
    """Erase all blocks and named prefixes of one tenant. Raises StoreError if a tier fails."""
    known = layouts(store)
    roots = {Scope(record.model, record.key_size, salt).root() for record in known.values()}
    tenant = f"/{tenant_digest(salt)}/"
    keys = [key for key in store.records("prefixes/", deadline=_deadline()) if tenant in key]

    def select(chains: StoredChains) -> set[Name]:
        return chains.of_all_groups(chains.descendants(block.name for block in chains.heads() if block.parent in roots))

    return _forget(store, f"tenant {tenant_digest(salt)}", select, keys, known)


def forget_model(store: TieredStore, model: str) -> Receipt:
    """Erase all blocks and named prefixes of a model.

    `model` is its name or at least 8 digits of its fingerprint. Raises NotFound, StoreError.
    """
    known = layouts(store)
    chosen = {
        f for f, r in known.items() if r.model_name == model or (len(model) >= 8 and r.model.hex().startswith(model))
    }
    if not chosen:
        names = sorted({record.model_name for record in known.values()})
        raise NotFound(f"the store has no model {model!r}; it has {', '.join(names) or 'none'}")
    prefixes = {f"prefixes/{known[fingerprint].model.hex()[:32]}/" for fingerprint in chosen}
    keys = [key for prefix in prefixes for key in store.records(prefix, deadline=_deadline())]

    def select(chains: StoredChains) -> set[Name]:
        return {name for name in chains.blocks if name[:FINGERPRINT_BYTES] in chosen}

    return _forget(store, f"model {model}", select, keys, known)


def forget_prefix(store: TieredStore, name: str, salt: bytes | None = None) -> Receipt:
    """Erase a named prefix of one tenant, or of all if `salt` is None.

    Erases its record, its last block, all blocks that continue it, and those of its blocks that no other chain needs.
    Raises NotFound, StoreError.
    """
    tenant = None if salt is None else tenant_digest(salt)
    named = named_prefixes(store)
    keys = [k for k, r in named.items() if r.name == name and (tenant is None or k.split("/")[2] == tenant)]
    if not keys:
        raise NotFound(f"the store has no prefix named {name!r}")
    last = {bytes.fromhex(named[key].last_key) for key in keys}

    def select(chains: StoredChains) -> set[Name]:
        ends = [end for end in chains.blocks if end[FINGERPRINT_BYTES:] in last]
        chosen = chains.descendants(ends)
        for end in ends:
            chosen |= chains.unshared_ancestors(end, chosen)
        return chains.of_all_groups(chosen)

    return _forget(store, f"prefix {name}", select, keys, layouts(store))


class StoredChains:
    """The blocks of a store as trees."""

    def __init__(self, blocks: Iterable[StoredBlock]) -> None:
        self.blocks: dict[Name, StoredBlock] = {}
        self.sizes: dict[Name, int] = defaultdict(int)  # bytes of all copies
        self._children: dict[Name, list[Name]] = defaultdict(list)
        for block in blocks:
            self.sizes[block.name] += block.size
            if block.name not in self.blocks:
                self.blocks[block.name] = block
                self._children[_parent(block)].append(block.name)

    def descendants(self, starts: Iterable[Name]) -> set[Name]:
        """These blocks and all that continue them."""
        found: set[Name] = set()
        left = list(starts)
        while left:
            name = left.pop()
            if name not in found:
                found.add(name)
                left += self._children.get(name, ())
        return found

    def of_all_groups(self, chosen: set[Name]) -> set[Name]:
        """These blocks, and those of other KV groups at the same positions or right behind them. Groups with windows or
        recurrent states keep only some blocks of a chain, so their blocks have no path to its root."""
        keys = {name[FINGERPRINT_BYTES:] for name in chosen}
        near = {one.name for one in self.blocks.values() if one.name[FINGERPRINT_BYTES:] in keys or one.parent in keys}
        return chosen | near

    def unshared_ancestors(self, name: Name, chosen: set[Name]) -> set[Name]:
        """The blocks before `name`, up to the first that has other children than chosen ones."""
        found: set[Name] = set()
        block = self.blocks.get(name)
        while block is not None and (parent := self.blocks.get(_parent(block))) is not None:
            if any(child not in chosen and child not in found for child in self._children[parent.name]):
                break
            found.add(parent.name)
            block = parent
        return found

    def heads(self) -> Iterator[StoredBlock]:
        """The first blocks of chains."""
        return (block for block in self.blocks.values() if block.depth == 0)

    def leaves(self) -> int:
        """Number of blocks without children, which is the number of different texts."""
        return sum(1 for name in self.blocks if not self._children.get(name))

    def unreachable(self) -> int:
        """Number of blocks behind a gap in their chain, where no lookup finds them."""
        reached = self.descendants(block.name for block in self.heads())
        return len(self.blocks) - len(reached)


def _parent(block: StoredBlock) -> Name:
    return block.name[:FINGERPRINT_BYTES] + block.parent


def _forget(
    store: TieredStore,
    what: str,
    select: Callable[[StoredChains], set[Name]],
    record_keys: Sequence[str],
    known: Mapping[bytes, LayoutRecord],
) -> Receipt:
    """Delete the selected blocks and the records, and look for the blocks again."""
    chains = StoredChains(store.scan(deadline=time.monotonic() + SCAN_WITHIN))
    chosen = sorted(select(chains))
    removed: dict[str, int] = dict.fromkeys((tier.label for tier in store.tiers), 0)
    for low in range(0, len(chosen), _BATCH):
        for label, count in store.delete_by_tier(chosen[low : low + _BATCH], deadline=_deadline()).items():
            removed[label] += count
    records = [key for key in record_keys if store.delete_record(key, deadline=_deadline())]
    left = sum(store.lookup([name], deadline=_deadline()) for name in chosen)
    unknown = sum(1 for name in chains.blocks if name[:FINGERPRINT_BYTES] not in known)
    size = sum(chains.sizes[name] for name in chosen)
    return Receipt(what, len(chosen), size, removed, records, left, unknown)


def _deadline() -> float:
    return time.monotonic() + _CALL_TIMEOUT
