"""Remove what a tenant, a named prefix or a model left in a store, from every tier, and prove that it is gone.

Blocks do not say whose they are: a chain's first block names its root, and the root is a digest of model, block size and the
tenant's salt. So the store is scanned, and chains are followed from their roots, or from a prefix's last block.
"""

from __future__ import annotations

import json
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field

from foreword.blocks.keys import Scope
from foreword.blocks.layout import FINGERPRINT_BYTES
from foreword.errors import NotFound
from foreword.prefixes.records import PrefixRecord, read_record, tenant_digest
from foreword.store.base import Name, StoredBlock
from foreword.store.tiered import TieredStore

SCAN_WITHIN = 600.0
_CALL_WITHIN = 60.0
_BATCH = 512


@dataclass(frozen=True, slots=True)
class LayoutRecord:
    """What a store knows of one layout: whose blocks they are."""

    fingerprint: bytes
    model: bytes
    model_name: str
    block_size: int
    described: Mapping[str, object]


@dataclass(frozen=True, slots=True)
class Receipt:
    """What was removed.

    Attributes:
        what: in words.
        blocks, bytes: distinct blocks found, and the bytes of all their copies.
        removed: blocks removed from each tier, by its label.
        records: named prefixes that were removed.
        left: blocks that a second look still found; 0 unless somebody wrote meanwhile.
        unknown_blocks: blocks of layouts that the store does not describe, so that nobody can say whose they are.
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
    """All layouts that a store describes, by fingerprint. What cannot be read is left out."""
    found: dict[bytes, LayoutRecord] = {}
    for word in store.records("layouts/", deadline=_soon()):
        data = store.get_record(word, deadline=_soon())
        record = _layout(word, data) if data is not None else None
        if record is not None:
            found[record.fingerprint] = record
    return found


def _layout(word: str, data: bytes) -> LayoutRecord | None:
    try:
        read = json.loads(data)
        described = read["layout"]
        fingerprint, model = bytes.fromhex(word.removeprefix("layouts/")), bytes.fromhex(described["model"])
        return LayoutRecord(fingerprint, model, str(read["model"]), int(described["block_size"]), described)
    except (ValueError, TypeError, KeyError):
        return None


def named_prefixes(store: TieredStore) -> dict[str, PrefixRecord]:
    """All named prefixes of a store, of all tenants and models, by their record's word."""
    found = {}
    for word in store.records("prefixes/", deadline=_soon()):
        data = store.get_record(word, deadline=_soon())
        record = read_record(data) if data is not None else None
        if record is not None:
            found[word] = record
    return found


def forget_tenant(store: TieredStore, salt: bytes) -> Receipt:
    """All blocks and named prefixes of one tenant. Raises StoreError if a tier cannot be searched or does not delete."""
    known = layouts(store)
    roots = {Scope(record.model, record.block_size, salt).root() for record in known.values()}
    mine = f"/{tenant_digest(salt)}/"
    words = [word for word in store.records("prefixes/", deadline=_soon()) if mine in word]

    def select(chains: StoredChains) -> set[Name]:
        return chains.descendants(
            name for name, entry in chains.entries.items() if entry.depth == 0 and entry.parent in roots
        )

    return _forget(store, f"tenant {tenant_digest(salt)}", select, words, known)


def forget_model(store: TieredStore, model: str) -> Receipt:
    """All blocks and named prefixes of a model, given by name or by (the beginning of) its fingerprint. Raises NotFound."""
    known = layouts(store)
    mine = {
        f for f, r in known.items() if r.model_name == model or (len(model) >= 8 and r.model.hex().startswith(model))
    }
    if not mine:
        names = sorted({record.model_name for record in known.values()})
        raise NotFound(f"the store has no model {model!r}; it has {', '.join(names) or 'none'}")
    starts = {f"prefixes/{known[fingerprint].model.hex()[:32]}/" for fingerprint in mine}
    words = [word for start in starts for word in store.records(start, deadline=_soon())]

    def select(chains: StoredChains) -> set[Name]:
        return {name for name in chains.entries if name[:FINGERPRINT_BYTES] in mine}

    return _forget(store, f"model {model}", select, words, known)


def forget_prefix(store: TieredStore, name: str, salt: bytes | None = None) -> Receipt:
    """A named prefix: its record, its last block, everything that continues it, and the blocks before it as far as no other
    chain needs them. `salt` None: of every tenant. Raises NotFound."""
    tenant = None if salt is None else tenant_digest(salt)
    named = named_prefixes(store)
    words = [w for w, r in named.items() if r.name == name and (tenant is None or w.split("/")[2] == tenant)]
    if not words:
        raise NotFound(f"the store has no prefix named {name!r}")
    last = {bytes.fromhex(named[word].last_key) for word in words}

    def select(chains: StoredChains) -> set[Name]:
        ends = [end for end in chains.entries if end[FINGERPRINT_BYTES:] in last]
        chosen = chains.descendants(ends)
        for end in ends:
            chosen |= chains.ancestors(end, chosen)
        return chosen

    return _forget(store, f"prefix {name}", select, words, layouts(store))


class StoredChains:
    """The blocks of a store as trees."""

    def __init__(self, entries: Iterable[StoredBlock]) -> None:
        self.entries: dict[Name, StoredBlock] = {}
        self.sizes: dict[Name, int] = defaultdict(int)
        self._children: dict[Name, list[Name]] = defaultdict(list)
        for entry in entries:
            self.sizes[entry.name] += entry.size
            if entry.name not in self.entries:
                self.entries[entry.name] = entry
                self._children[_parent(entry)].append(entry.name)

    def descendants(self, starts: Iterable[Name]) -> set[Name]:
        """Blocks and all that continue them."""
        found: set[Name] = set()
        left = list(starts)
        while left:
            name = left.pop()
            if name not in found:
                found.add(name)
                left += self._children.get(name, ())
        return found

    def ancestors(self, name: Name, chosen: set[Name]) -> set[Name]:
        """The blocks before one, up to the first that has children besides the chosen ones."""
        found: set[Name] = set()
        entry = self.entries.get(name)
        while entry is not None and (parent := self.entries.get(_parent(entry))) is not None:
            if any(child not in chosen and child not in found for child in self._children[parent.name]):
                break
            found.add(parent.name)
            entry = parent
        return found

    def heads(self) -> Iterator[StoredBlock]:
        """First blocks of chains."""
        return (entry for entry in self.entries.values() if entry.depth == 0)

    def tails(self) -> int:
        """Blocks that nothing continues: so many different texts."""
        return sum(1 for name in self.entries if not self._children.get(name))

    def unreachable(self) -> int:
        """Blocks whose chain is broken above them: no lookup finds them."""
        reached = self.descendants(entry.name for entry in self.heads())
        return len(self.entries) - len(reached)


def _parent(entry: StoredBlock) -> Name:
    return entry.name[:FINGERPRINT_BYTES] + entry.parent


def _forget(
    store: TieredStore,
    what: str,
    select: Callable[[StoredChains], set[Name]],
    words: Sequence[str],
    known: Mapping[bytes, LayoutRecord],
) -> Receipt:
    chains = StoredChains(store.scan(deadline=time.monotonic() + SCAN_WITHIN))
    chosen = sorted(select(chains))
    removed: dict[str, int] = dict.fromkeys((tier.label for tier in store.tiers), 0)
    for low in range(0, len(chosen), _BATCH):
        for label, count in store.delete_by_tier(chosen[low : low + _BATCH], deadline=_soon()).items():
            removed[label] += count
    records = [word for word in words if store.delete_record(word, deadline=_soon())]
    left = sum(store.lookup([name], deadline=_soon()) for name in chosen)
    unknown = sum(1 for name in chains.entries if name[:FINGERPRINT_BYTES] not in known)
    size = sum(chains.sizes[name] for name in chosen)
    return Receipt(what, len(chosen), size, removed, records, left, unknown)


def _soon() -> float:
    return time.monotonic() + _CALL_WITHIN
