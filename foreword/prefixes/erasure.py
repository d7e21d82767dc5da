"""Delete what a tenant, a named prefix or a model has stored, from every tier, with a receipt.

A name begins with the layout, which implies the model, and a digest of the tenant and of the client's salt. So a tenant, a
salt and a model are prefixes of names: their blocks are listed and deleted, whatever chains, index and records say, and then
listed again. The work grows with what is deleted, the memory does not. An erasure that was interrupted continues when it is
called again.
"""

from __future__ import annotations

import json
import math
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from functools import partial
from hashlib import blake2b, sha256
from typing import TYPE_CHECKING, Any

from foreword.blocks.keys import FINGERPRINT_BYTES, PUBLIC_ROOT, is_public
from foreword.blocks.layout import ROOT_BYTES, Layout, block_names, key_of
from foreword.blocks.public_blocks import roots_behind
from foreword.blocks.salt import GENERATION_BYTES, TENANT_BYTES, Salt, tenant_digest
from foreword.errors import NotFound, StoreError, StoreOpenedReadOnly, StoreTimeout, StoreUnreadable
from foreword.prefixes.lease_records import PREFIXES, PrefixRecord
from foreword.prefixes.tier_erasure import erase_tier, stream
from foreword.store.background import at_once
from foreword.store.base import Erased, Name, PartialListing, StoredBlock, record_tenant, step_deadline
from foreword.store.layout_records import layouts
from foreword.store.read_only import ReadOnlyStore
from foreword.store.shared_records import SharedRecords
from foreword.store.tier import StoreTier
from foreword.store.tiered import OnFailure, TieredStore, raise_failure

if TYPE_CHECKING:
    from foreword.store.key_interfaces import TenantKeys

SCAN_WITHIN = 600.0  # seconds for a scan of all tiers, and until a busy device has what was deleted
SYNC_WITHIN = 60.0  # the latter where a client waits for the receipt, and the erasure is repeated behind it
KEY_STORE = "key store"  # the place of data keys in receipts
_ROUNDS = 3  # how often a tier is swept while a sweep finds something
_CANONICAL: Any = {"sort_keys": True, "separators": (",", ":"), "ensure_ascii": True}


class PlaceOutcome(StrEnum):
    """The outcome of an erasure in one place.

    Attributes:
        ERASED: it had some, and has none now.
        NOTHING: it had none.
        QUEUED: blocks are still being written there.
        UNREADABLE: it was reached, and a part of it cannot be read.
        UNREACHABLE: it did not answer, or refused.
        READ_ONLY: this process has opened it to read only.
        LEFT: it had some again when it was listed once more.
        ELSEWHERE: what is read there belongs to another instance, which erases for itself.
    """

    ERASED = "erased"
    NOTHING = "nothing"
    QUEUED = "queued"
    UNREADABLE = "unreadable"
    UNREACHABLE = "unreachable"
    READ_ONLY = "read_only"
    LEFT = "left"
    ELSEWHERE = "elsewhere"

    @property
    def done(self) -> bool:
        return self in (PlaceOutcome.ERASED, PlaceOutcome.NOTHING)


_REFUSED: Any = (PlaceOutcome.UNREACHABLE, PlaceOutcome.READ_ONLY)


def outcome_of(error: StoreError) -> PlaceOutcome:
    if isinstance(error, StoreUnreadable):
        return PlaceOutcome.UNREADABLE
    return PlaceOutcome.READ_ONLY if isinstance(error, StoreOpenedReadOnly) else PlaceOutcome.UNREACHABLE


@dataclass(slots=True)
class Place:
    """A place of an erasure: a tier, a folder or a node of it.

    Attributes:
        place: as in `store.base.Erased`.
        removed: copies of blocks.
        left: copies that are there all the same, where that is known.
    """

    tier: str
    place: str = ""
    outcome: PlaceOutcome = PlaceOutcome.NOTHING
    removed: int = 0
    left: int = 0
    reason: str = ""

    @property
    def name(self) -> str:
        return f"{self.tier} {self.place}".strip()

    def add(self, step: Erased) -> None:
        self.removed += step.removed
        if step.problem is not None:
            self.fail(step.problem.message, outcome_of(step.problem))
        elif step.removed and self.outcome is PlaceOutcome.NOTHING:
            self.outcome = PlaceOutcome.ERASED

    def fail(self, reason: str, outcome: PlaceOutcome = PlaceOutcome.UNREACHABLE) -> None:
        self.outcome, self.reason = outcome, reason


@dataclass(frozen=True, slots=True)
class Receipt:
    """The result of an erasure.

    Attributes:
        what: description of what was erased.
        open: places where the erasure is not complete.
        places: all places.
        records: record keys of the named prefixes and retentions that were removed.
        unknown_blocks: number of blocks whose layout is not described in the store, so their model is unknown. They are
            counted where a model is erased.
        widened: more than a prefix was erased: all blocks of its tenant, since its chain had gaps, or those of its tenant that
            another build of the server has stored for its model.
        keys: data keys that were destroyed, each as `<tenant>/<id>` in hexadecimal.
    """

    what: str
    places: list[Place]
    records: list[str] = field(default_factory=list)
    unknown_blocks: int = 0
    widened: bool = False
    keys: list[str] = field(default_factory=list)
    finished: float = field(default_factory=time.time)

    @property
    def open(self) -> list[Place]:
        return [one for one in self.places if not one.outcome.done]

    @property
    def complete(self) -> bool:
        """Whether nothing is left that the receipt is about."""
        return not (self.open or self.unknown_blocks)

    @property
    def removed(self) -> dict[str, int]:
        """Number of blocks removed from each tier, by label."""
        found: dict[str, int] = {}
        for one in (place for place in self.places if place.tier != KEY_STORE):
            found[one.tier] = found.get(one.tier, 0) + one.removed
        return found

    @property
    def blocks(self) -> int:
        """Number of copies found in all tiers."""
        return sum(self.removed.values()) + self.left

    @property
    def left(self) -> int:
        """Number of copies that the last listing still found."""
        return sum(one.left for one in self.places)

    @property
    def unreachable(self) -> dict[str, str]:
        """Why the erasure is not complete, by place."""
        return {one.name: one.reason or f"{one.left} blocks are left" for one in self.open}

    def followed_by(self, later: Receipt) -> Receipt:
        """The receipt of all erasures so far, after a repetition where this one was open."""
        again = {one.tier for one in later.places}
        # Blocks that were being written are in the tiers since, or is in the later receipt.
        kept = [one for one in self.places if one.tier not in again and one.outcome is not PlaceOutcome.QUEUED]
        before = {(one.tier, one.place): one.removed for one in self.places}
        places = [replace(one, removed=one.removed + before.get((one.tier, one.place), 0)) for one in later.places]
        records = sorted({*self.records, *later.records})
        keys = sorted({*self.keys, *later.keys})
        return replace(later, places=[*kept, *places], records=records, keys=keys)

    def plain(self, secret: str | None = None) -> dict[str, object]:
        """The receipt as a JSON object, open erasures first, with a signature if there is a secret: BLAKE2b of the canonical
        JSON without the signature."""
        plain: dict[str, object] = {
            "what": self.what,
            "complete": self.complete,
            "unreachable": self.unreachable,
            "left": self.left,
            "keys": self.keys,
            "unknown_blocks": self.unknown_blocks,
            "blocks": self.blocks,
            "removed": self.removed,
            "records": self.records,
            "places": [asdict(one) for one in self.places],
            "widened": self.widened,
            "finished": self.finished,
        }
        return plain if secret is None else {**plain, "signature": sign(plain, secret)}


def sign(receipt: Mapping[str, object], secret: str) -> str:
    """The signature of a receipt: BLAKE2b (32 bytes) of its canonical JSON (sorted keys, no spaces, ASCII)."""
    text = json.dumps({name: value for name, value in receipt.items() if name != "signature"}, **_CANONICAL)
    key = sha256(b"foreword/receipt\x00" + secret.encode()).digest()
    return blake2b(text.encode(), digest_size=32, key=key).hexdigest()


def named_prefixes(store: TieredStore, failed: OnFailure = raise_failure) -> dict[str, PrefixRecord]:
    """The named prefixes of all tenants and models in a store, by record key, without damaged records. `failed` is called for
    each tier, and each record, that cannot be read."""
    return SharedRecords(store, PREFIXES).scan(failed=failed, unread=failed).values


@dataclass(frozen=True, slots=True)
class KeysDestroyed:
    """The first step of an erasure: what is encrypted is unreadable after it.

    Attributes:
        prefixes: first bytes of the roots of what is to be deleted.
        place: of the receipt; None without encryption, or if no tenant is erased as a whole.
    """

    prefixes: tuple[bytes, ...]
    keys: tuple[str, ...] = ()
    place: Place | None = None

    def noted(self, receipt: Receipt) -> Receipt:
        """The receipt with these keys."""
        places = receipt.places if self.place is None else [self.place, *receipt.places]
        return replace(receipt, places=places, keys=sorted({*self.keys, *receipt.keys}))


def destroy_keys(keys: TenantKeys | None, prefixes: Iterable[bytes]) -> KeysDestroyed:
    """Destroy the data keys of the tenants among these first bytes of roots. What has keys besides, because of another
    generation, is to be deleted too. Does not raise."""
    wanted = tuple(dict.fromkeys(prefixes))
    # One of a tenant's generations stands for all of them.
    tenants = {one[:-GENERATION_BYTES]: one for one in wanted if len(one) == TENANT_BYTES}.values()
    if keys is None or not tenants:
        return KeysDestroyed(wanted)
    place, dead = Place(KEY_STORE), list[tuple[bytes, int]]()
    for tenant in tenants:
        try:
            dead += keys.destroy(tenant)
        except StoreError as error:
            place.fail(error.message, outcome_of(error))
    if dead and place.outcome.done:
        place.outcome = PlaceOutcome.ERASED
    others = dict.fromkeys([*wanted, *(tenant for tenant, _ in dead)])
    return KeysDestroyed(tuple(others), tuple(f"{tenant.hex()}/{number:08x}" for tenant, number in dead), place)


def forget_tenant(store: TieredStore, salt: Salt, *others: Salt, keys: TenantKeys | None = None) -> Receipt:
    """Erase all blocks, named prefixes and retentions of tenants; of a salt with a client's own the blocks of requests with it.
    Does not raise: the receipt says what failed.

    Args:
        keys: data keys, those of the tenants are destroyed first.
    """
    salts = (salt, *others)
    first = destroy_keys(keys, (one.prefix for one in salts))
    # The bytes that all generations of a tenant begin with: this process may not know the key store that has them.
    prefixes = dict.fromkeys(one[: len(one) - GENERATION_BYTES * (len(one) == TENANT_BYTES)] for one in first.prefixes)
    return first.noted(erase_prefixes(store, [*prefixes], described(salts)))


def erase_prefixes(
    store: TieredStore,
    prefixes: Sequence[bytes],
    what: str,
    *,
    queued: int = 0,
    only: Collection[str] | None = None,
    sync_within: float = SCAN_WITHIN,
) -> Receipt:
    """Erase as `forget_tenant` does, given the first bytes of the chains' roots.

    Args:
        queued: blocks that an engine is still writing to its tiers.
        only: labels of the tiers to erase; None: all.
        sync_within: seconds until the device of a tier has what was deleted; else it is not complete there.
    """
    digits = tuple(one.hex() for one in prefixes)
    erasure = _Erasure(store, queued, only, sync_within)
    erasure.sweep([(b"", one) for one in prefixes], lambda key: key.split("/")[2].startswith(digits))
    return erasure.receipt(what)


def described(salts: Iterable[Salt]) -> str:
    """The subject of an erasure of salts, in a receipt."""
    return ", ".join(
        f"{f'cache_salt {one.digest.hex()} of ' if one.client else ''}tenant {tenant_digest(one.tenant)}"
        for one in salts
    )


def forget_model(store: TieredStore, model: str) -> Receipt:
    """Erase all blocks, named prefixes and retentions of a model.

    `model` is its name or at least 8 digits of its fingerprint. Raises NotFound, StoreError.
    """
    erasure = _Erasure(store)
    known = layouts(store, erasure.fail)
    chosen = {f for f, r in known.items() if r.model == model or (len(model) >= 8 and r.digest.hex().startswith(model))}
    if not chosen:
        names = sorted({record.model for record in known.values()})
        raise NotFound(f"the store has no model {model!r}; it has {', '.join(names) or 'none'}{erasure.in_words()}")
    models = {one.hex()[:32] for f in chosen for one in (known[f].digest, bytes.fromhex(known[f].fingerprint))}
    erasure.sweep([(layout, b"") for layout in sorted(chosen)], lambda key: key.split("/")[1] in models)
    return erasure.receipt(f"model {model}", unknown=erasure.count(lambda name: name[:FINGERPRINT_BYTES] not in known))


def forget_prefix(store: TieredStore, name: str, salt: bytes | None = None) -> Receipt:
    """Erase a named prefix of one tenant, or of all if `salt` is None.

    Erases its record, its last block, all blocks that continue it, and those of its blocks that no other chain needs. Blocks
    behind a gap may continue it, so they are erased too. If the prefix's own chain has a gap, or its last block is gone, all
    blocks of its tenant are erased. Raises NotFound, StoreError.
    """
    tenant, erasure = None if salt is None else tenant_digest(salt), _Erasure(store)
    named, known = named_prefixes(store, erasure.fail), layouts(store, erasure.fail)
    chosen = {k: r for k, r in named.items() if r.name == name and (tenant is None or k.split("/")[2] == tenant)}
    if not chosen:
        raise NotFound(f"the store has no prefix named {name!r}{erasure.in_words()}")
    for key, record in chosen.items():
        weights = key.split("/")[1]
        builds = {
            at: one.digest for at, one in known.items() if weights in (one.fingerprint[:32], one.digest.hex()[:32])
        }
        erasure.prefix(bytes.fromhex(key.split("/")[2]), bytes.fromhex(record.last_key), chosen.__contains__, builds)
    return erasure.receipt(f"prefix {name}")


def forget_chain(store: TieredStore, root: bytes, key: bytes, depth: int) -> Receipt:
    """Erase the block `key` of the chain with the root key `root`, and all blocks that continue it or may do so. It is block
    number `depth` of the chain. Raises StoreError."""
    erasure = _Erasure(store)
    erasure.chain(root[:ROOT_BYTES], key, depth)
    return erasure.receipt(f"chain {key.hex()}")


def forget_chains(store: TieredStore, layout: Layout, root: bytes, keys: Sequence[bytes] = ()) -> Receipt:
    """Erase blocks of one layout with the root key `root`: given the keys of a prefix's blocks, those that no other chain in
    the stores needs, with all that continues the prefix or may do so; else all. The receipt says what failed."""
    erasure, fingerprint, start = _Erasure(store), layout.fingerprint, root[:ROOT_BYTES]
    chosen = None
    if keys:
        chosen = erasure.stored_chains(start, fingerprint).of_prefix(block_names(fingerprint, start, keys))
    erasure.sweep([(fingerprint, start)], None, chosen)
    what = f"{len(keys)} blocks of a prefix" if keys else "all blocks"
    return erasure.receipt(f"{what} of the layout {fingerprint.hex()}")


class _Erasure:
    """An erasure: sweeps all tiers at once and counts. A place that fails is noted, and the others are swept.

    Threads add places and records by one call of a dictionary or a set, whose keys are text: no lock is needed. A place is
    changed by the thread of its tier.
    """

    def __init__(
        self,
        store: TieredStore,
        queued: int = 0,
        only: Collection[str] | None = None,
        sync_within: float = SCAN_WITHIN,
    ) -> None:
        self._store, self._widened, self._sync_within = store, False, sync_within
        self._tiers = [tier for tier in store.tiers if only is None or tier.label in only]
        self._places: dict[tuple[str, str], Place] = {}
        if queued:
            reason = f"{queued} blocks are still being written"
            self._places["write queue", ""] = Place("write queue", "", PlaceOutcome.QUEUED, 0, queued, reason)
        self._records: set[str] = set()
        for tier in self._tiers:
            self._place(tier)

    def _place(self, tier: StoreTier, place: str = "") -> Place:
        return self._places.setdefault((tier.label, place), Place(tier.label, place))

    def fail(self, tier: StoreTier, error: StoreError) -> None:
        self._place(tier).fail(error.message, outcome_of(error))

    def in_words(self) -> str:
        """The places that a listing could not see, for a message; "" if nothing."""
        failed = [f"{one.name}: {one.reason}" for one in self._places.values() if not one.outcome.done]
        return f" (not asked: {'; '.join(failed)})" if failed else ""

    def _each(self, tiers: Sequence[StoreTier], work: Callable[[StoreTier], None]) -> None:
        """Do this for all tiers at once. One that fails is noted."""

        def guarded(tier: StoreTier) -> None:
            try:
                work(tier)
            except StoreError as error:
                self.fail(tier, error)

        at_once([partial(guarded, tier) for tier in tiers])

    def sweep(
        self,
        prefixes: Sequence[tuple[bytes, bytes]],
        wanted: Callable[[str], bool] | None,
        chosen: Collection[Name] | None = None,
    ) -> None:
        """Delete the blocks with these layouts and roots, or those of them that are chosen, and the records of tenants whose
        keys are wanted, from every tier."""

        def work(tier: StoreTier) -> None:
            if isinstance(tier.store, ReadOnlyStore):
                reason = "another instance has its own blocks: erase there too"
                self._place(tier).fail(reason, PlaceOutcome.ELSEWHERE)
                return
            for prefix in prefixes:
                self._sweep_tier(tier, prefix, chosen)
            # One that does not answer is not asked twice.
            records = wanted is not None and tier in self._store.record_tiers
            if wanted is not None and records and self._place(tier).outcome not in _REFUSED:
                self._remove_records(tier, wanted)
            if self._done(tier):
                self._sync(tier, prefixes, records=records)

        self._each(self._tiers, work)

    def _sync(self, tier: StoreTier, prefixes: Sequence[tuple[bytes, bytes]], *, records: bool) -> None:
        """Wait until a loss of power does not undo the deletions: until then nothing counts as erased. Raises StoreError."""
        limit = self._sync_within
        sync = partial(tier.store.sync_deletions, prefixes, records=records, deadline=time.monotonic() + SCAN_WITHIN)
        try:
            # One step may take as long as all: a busy device writes a whole file system in it.
            any(stream(tier, sync, within=limit))
        except StoreTimeout:
            what = (
                f"its device has not written what was deleted within {limit:.0f} s, as an erasure that is complete must"
            )
            raise StoreTimeout(
                f"{what}; a server repeats it. If this stays, something is wrong with the device"
            ) from None

    def _sweep_tier(self, tier: StoreTier, prefix: tuple[bytes, bytes], chosen: Collection[Name] | None) -> None:
        """Erase until a sweep finds nothing more. Places that fail are not tried again, since that takes its time."""
        found = 0
        for _ in range(_ROUNDS):
            found = 0
            for step in erase_tier(tier, *prefix, chosen, time.monotonic() + SCAN_WITHIN):
                self._place(tier, step.place).add(step)
                found += step.removed
            if not found or not self._done(tier):
                return
        left = sum(map(len, _listed(tier, prefix, chosen)))
        if left:
            place = self._place(tier)
            place.left += left
            place.fail("blocks were written meanwhile", PlaceOutcome.LEFT)

    def _done(self, tier: StoreTier) -> bool:
        """Whether no place of the tier has failed."""
        return all(one.outcome.done for one in self._places.copy().values() if one.tier == tier.label)

    def prefix(self, root: bytes, last: bytes, wanted: Callable[[str], bool], builds: Mapping[bytes, bytes]) -> None:
        """Delete a named prefix, given its tenant, the key of its last block, which record keys it has, and what names the KV
        in its model's layouts. Where that is not as in the layouts of the last block, any block may be one of its text."""
        chains = self.stored_chains(root)
        # A tenant may have a name for public blocks, which are not its own.
        lent = is_public(last) and not root.startswith(PUBLIC_ROOT)
        chosen = chains.behind(last) if lent else chains.with_prefix(last)
        here = {builds.get(name[:FINGERPRINT_BYTES]) for name in chains.blocks if key_of(name) == last}
        others = {name for name in chains.blocks if builds.get(name[:FINGERPRINT_BYTES]) not in {None, *here}}
        if chosen is not None:
            chosen |= others
        self._widened |= chosen is None or bool(others)
        self.sweep([(b"", root[:TENANT_BYTES] if chosen is None else root)], wanted, chosen)

    def chain(self, root: bytes, key: bytes, depth: int) -> None:
        """Delete a block and all that may continue it, given its tenant, its key and its position."""
        root = roots_behind(root)
        chains = self.stored_chains(root)
        starts = {name for name in chains.blocks if key_of(name) == key}
        chosen = chains.descendants(starts) | chains.behind(key) | chains.behind_gaps(depth)
        self.sweep([(b"", root)], None, chains.of_all_groups(chosen))

    def stored_chains(self, root: bytes, layout: bytes = b"") -> StoredChains:
        """The blocks of a root, and of one layout if it is given, in all tiers that can be scanned."""
        found: list[StoredBlock] = []

        def work(tier: StoreTier) -> None:
            for block in stream(tier, lambda: tier.store.scan(deadline=time.monotonic() + SCAN_WITHIN)):
                if block.name.startswith(layout) and block.name.startswith(root, FINGERPRINT_BYTES):
                    found.append(block)

        self._each(self._store.tiers, work)
        return StoredChains(found)

    def _remove_records(self, tier: StoreTier, wanted: Callable[[str], bool]) -> None:
        def deleted() -> Iterator[str]:
            problem: StoreError | None = None
            try:
                keys = tier.store.records("", deadline=step_deadline(math.inf))
            except PartialListing as error:
                keys, problem = error.keys, error
            for key in keys:
                if record_tenant(key) and wanted(key):
                    tier.store.delete_record(key, deadline=step_deadline(math.inf))
                    yield key
            if problem is not None:
                raise StoreUnreadable(problem.message)

        for key in stream(tier, deleted):
            self._records.add(key)

    def count(self, wanted: Callable[[Name], bool]) -> int:
        """Count the copies of wanted blocks in all tiers that could be reached."""
        failed = {one.tier for one in self._places.values() if not one.outcome.done}
        tiers = (tier for tier in self._store.tiers if tier.label not in failed)
        return sum(wanted(name) for tier in tiers for names in _listed(tier, (b"", b""), None) for name in names)

    def receipt(self, what: str, unknown: int = 0) -> Receipt:
        return Receipt(what, list(self._places.values()), sorted(self._records), unknown, self._widened)


def _listed(tier: StoreTier, prefix: tuple[bytes, bytes], chosen: Collection[Name] | None) -> Iterator[list[Name]]:
    """The blocks of a tier with this layout and root, in batches."""
    for batch in stream(tier, lambda: tier.store.list_names(*prefix, deadline=time.monotonic() + SCAN_WITHIN)):
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

    def behind(self, key: bytes) -> set[Name]:
        """The blocks that continue the one with this key."""
        return self.descendants(name for name, block in self.blocks.items() if block.parent == key)

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

    def of_prefix(self, names: Sequence[Name]) -> set[Name]:
        """The blocks of a prefix, given in the order of their chain, that no other chain needs, and all that may continue the
        last one. Blocks that are not stored are passed over."""
        chosen = self.descendants([names[-1]]) | self.behind_gaps(len(names) - 1)
        for name in reversed(names[:-1]):
            if any(child not in chosen for child in self._children.get(name, ())):
                break
            chosen.add(name)
        return chosen & self.blocks.keys()

    def reached(self) -> set[Name]:
        """The blocks whose chains have no gap before them."""
        return self.descendants(block.name for block in self.heads())

    def behind_gaps(self, depth: int) -> set[Name]:
        """The blocks deeper than `depth` whose chains have a gap before them: they may continue any block."""
        reached = self.reached()
        return {name for name, block in self.blocks.items() if name not in reached and block.depth > depth}

    def heads(self) -> Iterator[StoredBlock]:
        """The first blocks of chains, or behind their public blocks."""
        return (
            block
            for block in self.blocks.values()
            if block.depth == 0 or is_public(block.parent) > is_public(key_of(block.name))
        )

    def leaves(self) -> int:
        """Number of blocks without children, which is the number of different texts."""
        return sum(1 for name in self.blocks if not self._children.get(name))

    def unreachable(self) -> int:
        """Number of blocks behind a gap in their chain, where no lookup finds them."""
        return len(self.blocks) - len(self.reached())


def _parent(block: StoredBlock) -> Name:
    return block_names(block.name[:FINGERPRINT_BYTES], block.name[FINGERPRINT_BYTES:], [block.parent])[0]
