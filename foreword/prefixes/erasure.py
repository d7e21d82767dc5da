"""Delete what a tenant, a named prefix or a model has stored, from every tier, with a receipt.

A name begins with the layout, which implies the model, and a digest of the tenant and of the client's salt. So a tenant, a
salt and a model are prefixes of names: their blocks are listed and deleted, whatever chains, index and records say, and then
listed again. The work grows with what is deleted, the memory does not. An erasure that was interrupted continues when it is
called again.
"""

from __future__ import annotations

import json
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from hashlib import blake2b, sha256
from typing import Any, TypeVar

from foreword.blocks.layout import FINGERPRINT_BYTES, PREFIX_BYTES, ROOT_BYTES, key_of
from foreword.blocks.resume import GroupKind, KVGroup
from foreword.blocks.salt import TENANT_BYTES, Salt, tenant_digest
from foreword.errors import NotFound, StoreError
from foreword.prefixes.records import PrefixRecord, read_record
from foreword.store.base import Name, StoredBlock
from foreword.store.tier import StoreTier
from foreword.store.tiered import TieredStore
from foreword.store.wrappers import ReadOnlyStore

Parsed = TypeVar("Parsed")

SCAN_WITHIN = 600.0  # seconds for a scan of all tiers
_CALL_TIMEOUT = 60.0
_KINDS = ("prefixes/", "retained/", "quarantine/")
_ROUNDS = 3  # how often a tier is swept while a sweep finds something
_CANONICAL: Any = {"sort_keys": True, "separators": (",", ":"), "ensure_ascii": True}


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
        blocks: number of copies found in all tiers.
        removed: number of blocks removed from each tier, by label.
        records: record keys of the named prefixes and retentions that were removed.
        left: number of copies that the last listing still found; 0 unless they were written again in the meantime.
        unreachable: tiers where the erasure is not complete, and why, by label.
        unknown_blocks: number of blocks whose layout is not described in the store, so their model is unknown. They are
            counted where a model is erased.
        widened: the chain of a prefix had gaps, so all blocks of its tenant and model were erased.
    """

    what: str
    blocks: int
    removed: dict[str, int]
    records: list[str]
    left: int
    unreachable: dict[str, str] = field(default_factory=dict)
    unknown_blocks: int = 0
    widened: bool = False
    finished: float = field(default_factory=time.time)

    @property
    def complete(self) -> bool:
        """Whether nothing is left that the receipt is about."""
        return not (self.left or self.unreachable or self.unknown_blocks)

    def plain(self, secret: str | None = None) -> dict[str, object]:
        """As a JSON object, with a signature if there is a secret: BLAKE2b of the canonical JSON without the signature."""
        plain = {**asdict(self), "complete": self.complete}
        return plain if secret is None else {**plain, "signature": sign(plain, secret)}


def sign(receipt: Mapping[str, object], secret: str) -> str:
    """The signature of a receipt: BLAKE2b (32 bytes) of its canonical JSON (sorted keys, no spaces, ASCII)."""
    text = json.dumps({name: value for name, value in receipt.items() if name != "signature"}, **_CANONICAL)
    key = sha256(b"foreword/receipt\x00" + secret.encode()).digest()
    return blake2b(text.encode(), digest_size=32, key=key).hexdigest()


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
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None


def named_prefixes(store: TieredStore) -> dict[str, PrefixRecord]:
    """The named prefixes of all tenants and models in a store, by record key. Unreadable records are skipped."""
    return _parse_records(store, "prefixes/", lambda key, data: read_record(data, key.rpartition("/")[2]))


def _parse_records(store: TieredStore, prefix: str, parse: Callable[[str, bytes], Parsed | None]) -> dict[str, Parsed]:
    found = {}
    for key in store.records(prefix, deadline=_deadline()):
        data = store.get_record(key, deadline=_deadline())
        record = parse(key, data) if data is not None else None
        if record is not None:
            found[key] = record
    return found


def forget_tenant(store: TieredStore, salt: Salt, *others: Salt) -> Receipt:
    """Erase all blocks, named prefixes and retentions of tenants; of a salt with a client's own the blocks of requests with it.
    Does not raise: the receipt says what failed."""
    salts = (salt, *others)
    prefixes = tuple(one.prefix.hex() for one in salts)
    erasure = _Erasure(store)
    erasure.sweep([(b"", one.prefix) for one in salts])
    erasure.remove_records(lambda key: key.split("/")[2].startswith(prefixes))
    return erasure.receipt(described(salts))


def described(salts: Iterable[Salt]) -> str:
    """What an erasure of salts is about, in a receipt."""
    return ", ".join(
        f"{f'cache_salt {one.digest.hex()} of ' if one.client else ''}tenant {tenant_digest(one.tenant)}"
        for one in salts
    )


def forget_model(store: TieredStore, model: str) -> Receipt:
    """Erase all blocks, named prefixes and retentions of a model.

    `model` is its name or at least 8 digits of its fingerprint. Raises NotFound, StoreError.
    """
    known = layouts(store)
    chosen = {
        f for f, r in known.items() if r.model_name == model or (len(model) >= 8 and r.model.hex().startswith(model))
    }
    if not chosen:
        names = sorted({record.model_name for record in known.values()})
        raise NotFound(f"the store has no model {model!r}; it has {', '.join(names) or 'none'}")
    models = {known[fingerprint].model.hex()[:32] for fingerprint in chosen}
    erasure = _Erasure(store)
    erasure.sweep([(layout, b"") for layout in sorted(chosen)])
    erasure.remove_records(lambda key: key.split("/")[1] in models)
    return erasure.receipt(f"model {model}", unknown=erasure.count(lambda name: name[:FINGERPRINT_BYTES] not in known))


def forget_prefix(store: TieredStore, name: str, salt: bytes | None = None) -> Receipt:
    """Erase a named prefix of one tenant, or of all if `salt` is None.

    Erases its record, its last block, all blocks that continue it, and those of its blocks that no other chain needs. Blocks
    behind a gap may continue it, so they are erased too. If the prefix's own chain has a gap, or its last block is gone, all
    blocks of its tenant are erased. Raises NotFound, StoreError.
    """
    tenant = None if salt is None else tenant_digest(salt)
    named = named_prefixes(store)
    chosen = {k: r for k, r in named.items() if r.name == name and (tenant is None or k.split("/")[2] == tenant)}
    if not chosen:
        raise NotFound(f"the store has no prefix named {name!r}")
    erasure = _Erasure(store)
    for key, record in chosen.items():
        erasure.prefix(bytes.fromhex(key.split("/")[2]), bytes.fromhex(record.last_key))
    erasure.remove_records(chosen.__contains__)
    return erasure.receipt(f"prefix {name}")


def forget_chain(store: TieredStore, root: bytes, key: bytes, depth: int) -> Receipt:
    """Erase the block `key` of the chain with the root key `root`, and all blocks that continue it or may do so. It is block
    number `depth` of the chain. Raises StoreError."""
    erasure = _Erasure(store)
    erasure.chain(root[:ROOT_BYTES], key, depth)
    return erasure.receipt(f"chain {key.hex()}")


class _Erasure:
    """One erasure: sweeps all tiers and counts. A tier that fails is noted, and the others are swept."""

    def __init__(self, store: TieredStore) -> None:
        self._store = store
        self._removed: dict[str, int] = dict.fromkeys((tier.label for tier in store.tiers), 0)
        self._records: list[str] = []
        self._left = 0
        self._unreachable: dict[str, str] = {}
        self._widened = False

    def sweep(self, places: Sequence[tuple[bytes, bytes]], chosen: Collection[Name] | None = None) -> None:
        """Delete the blocks with these layouts and roots, or those of them that are chosen, from every tier."""
        for tier in self._store.tiers:
            if isinstance(tier.store, ReadOnlyStore):
                self._unreachable[tier.label] = "another instance has its own blocks: erase there too"
                continue
            try:
                for place in places:
                    self._sweep_tier(tier, place, chosen)
            except StoreError as error:
                self._unreachable[tier.label] = error.message

    def _sweep_tier(self, tier: StoreTier, place: tuple[bytes, bytes], chosen: Collection[Name] | None) -> None:
        for _ in range(_ROUNDS):
            found = self._delete(tier, place, chosen)
            self._removed[tier.label] += found
            if not found:
                return
        self._left += sum(map(len, _listed(tier, place, chosen)))

    def _delete(self, tier: StoreTier, place: tuple[bytes, bytes], chosen: Collection[Name] | None) -> int:
        if chosen is None:
            return tier.erase(*place, time.monotonic() + SCAN_WITHIN)
        return sum(tier.delete(names, _deadline()) for names in _listed(tier, place, chosen))

    def prefix(self, root: bytes, last: bytes) -> None:
        """Delete a named prefix, given its tenant and the key of its last block."""
        chosen = self._chains(root).with_prefix(last)
        self._widened |= chosen is None
        self.sweep([(b"", root[:TENANT_BYTES] if chosen is None else root)], chosen)

    def chain(self, root: bytes, key: bytes, depth: int) -> None:
        """Delete a block and all that may continue it, given its tenant, its key and its position."""
        chains = self._chains(root)
        starts = {name for name, block in chains.blocks.items() if key in (key_of(name), block.parent)}
        chosen = chains.descendants(starts) | chains.behind_gaps(depth)
        self.sweep([(b"", root)], chains.of_all_groups(chosen))

    def _chains(self, root: bytes) -> StoredChains:
        return StoredChains(block for block in self._scan() if block.name.startswith(root, FINGERPRINT_BYTES))

    def _scan(self) -> Iterator[StoredBlock]:
        return self._store.scan(deadline=time.monotonic() + SCAN_WITHIN)

    def remove_records(self, wanted: Callable[[str], bool]) -> None:
        """Delete the named prefixes and retentions whose record keys are wanted."""
        try:
            keys = [key for kind in _KINDS for key in self._store.records(kind, deadline=_deadline()) if wanted(key)]
            self._records += [key for key in keys if self._store.delete_record(key, deadline=_deadline())]
        except StoreError as error:
            self._unreachable["records"] = error.message

    def count(self, wanted: Callable[[Name], bool]) -> int:
        """Count the copies of wanted blocks in all tiers that could be reached."""
        tiers = (tier for tier in self._store.tiers if tier.label not in self._unreachable)
        return sum(wanted(name) for tier in tiers for names in _listed(tier, (b"", b""), None) for name in names)

    def receipt(self, what: str, unknown: int = 0) -> Receipt:
        found = sum(self._removed.values()) + self._left
        unreachable, widened = self._unreachable, self._widened
        return Receipt(what, found, self._removed, self._records, self._left, unreachable, unknown, widened)


def _listed(tier: StoreTier, place: tuple[bytes, bytes], chosen: Collection[Name] | None) -> Iterator[list[Name]]:
    """The blocks of a tier with this layout and root, in batches."""
    for batch in tier.store.list_names(*place, deadline=time.monotonic() + SCAN_WITHIN):
        names = [name for name in dict.fromkeys(batch) if chosen is None or name in chosen]
        if names:
            yield names


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
        keys = {key_of(name) for name in chosen}
        near = {one.name for one in self.blocks.values() if key_of(one.name) in keys or one.parent in keys}
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

    def with_prefix(self, last: bytes) -> set[Name] | None:
        """The blocks of a prefix whose last block has the key `last`, and all that may continue it. None: it cannot be told,
        since the chain of the prefix is not complete."""
        ends = [name for name in self.blocks if key_of(name) == last]
        reached = self.reached()
        if not any(end in reached for end in ends):
            return None
        chosen = self.descendants(ends)
        for end in ends:
            chosen |= self.unshared_ancestors(end, chosen)
        depth = min(self.blocks[end].depth for end in ends)
        return self.of_all_groups(chosen | self.behind_gaps(depth))

    def reached(self) -> set[Name]:
        """The blocks whose chains have no gap before them."""
        return self.descendants(block.name for block in self.heads())

    def behind_gaps(self, depth: int) -> set[Name]:
        """The blocks deeper than `depth` whose chains have a gap before them: they may continue any block."""
        reached = self.reached()
        return {name for name, block in self.blocks.items() if name not in reached and block.depth > depth}

    def heads(self) -> Iterator[StoredBlock]:
        """The first blocks of chains."""
        return (block for block in self.blocks.values() if block.depth == 0)

    def leaves(self) -> int:
        """Number of blocks without children, which is the number of different texts."""
        return sum(1 for name in self.blocks if not self._children.get(name))

    def unreachable(self) -> int:
        """Number of blocks behind a gap in their chain, where no lookup finds them."""
        return len(self.blocks) - len(self.reached())


def _parent(block: StoredBlock) -> Name:
    return block.name[:PREFIX_BYTES] + block.parent


def _deadline() -> float:
    return time.monotonic() + _CALL_TIMEOUT
