"""One disk store over several folders, usually on several disks: each block lies in one of them, chosen by its name."""

from __future__ import annotations

import contextlib
import logging
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from typing import Any, Final, TypeVar

import xxhash

from foreword.errors import StoreError, StoreUnavailable
from foreword.store.base import FAILED, Erased, Name, PartialListing, Store, StoredBlock, StoreStatus
from foreword.store.disk.disk_store import DiskStore
from foreword.store.frame import Frame

log = logging.getLogger("foreword.store")

_MOST_READERS: Final = 8
_NEXT_FOLDER: Final = re.compile(r",(?=/)")

Result = TypeVar("Result")


def folders_of(path: str) -> list[str]:
    """The folders in the path of a URL: `/a,/b` are two. A comma that no slash follows is part of a name."""
    return _NEXT_FOLDER.split(path)


def folder_of(key: bytes, paths: Sequence[str]) -> int:
    """The number of the folder of a name or record key.

    Rendezvous hashing: a further folder takes a share of each of the others, and a removed one gives its share to them.
    """
    return max(range(len(paths)), key=lambda number: xxhash.xxh3_64_intdigest(key + paths[number].encode()))


class StripedStore(Store):
    """Spreads blocks over folders, each with its own index, eviction and part of `size`.

    A folder whose disk fails loses its own blocks only: they are missing or FAILED, and the other folders are used. A call
    raises if all folders failed. What must be complete, such as a listing, raises if one of them failed.

    Args:
        paths: the folders. A block is found again if the path of its folder is the same.
        options: those of `DiskStore`.

    Raises:
        StoreUnavailable: no folder can be opened. One that cannot be opened counts as failing until the next start.
    """

    local = True

    def __init__(self, paths: Sequence[str], size: int, *, label: str = "disk", **options: Any) -> None:
        self.label = label
        self.readers = min(2 * len(paths), _MOST_READERS)
        self._paths = tuple(paths)
        self._stripes: list[DiskStore | None] = []
        error = None
        for path in paths:
            try:
                self._stripes.append(DiskStore(path, size // len(paths), label=label, **options))
            except StoreUnavailable as failed:
                log.warning("%s; its blocks are missing until the next start", failed.message)
                self._stripes.append(None)
                error = failed
        if error is not None and not any(self._stripes):
            raise error

    @property
    def on_evicted(self) -> Callable[[Name], None] | None:
        return next(stripe.on_evicted for stripe in self._stripes if stripe is not None)

    @on_evicted.setter
    def on_evicted(self, call: Callable[[Name], None] | None) -> None:
        for stripe in self._stripes:
            if stripe is not None:
                stripe.on_evicted = call

    @property
    def refusal(self) -> StoreError | None:
        """That of a folder, if one has one."""
        each = (stripe.refusal for stripe in self._stripes if stripe is not None)
        return next((one for one in each if one is not None), None)

    def _places(self, names: Sequence[Name]) -> dict[int, list[int]]:
        """By stripe: which of `names` belong to it."""
        places: dict[int, list[int]] = {}
        for number, name in enumerate(names):
            places.setdefault(folder_of(name, self._paths), []).append(number)
        return places

    def _stripe(self, number: int) -> DiskStore:
        stripe = self._stripes[number]
        if stripe is None:
            raise StoreUnavailable(f"a folder of the store {self.label!r} could not be opened")
        return stripe

    def _each(
        self, names: Sequence[Name], call: Callable[[DiskStore, list[int]], Result], *, strict: bool = False
    ) -> Iterator[tuple[list[int], Result | None]]:
        """Call each stripe that has some of `names`. Yields their numbers and the result, None after an error.

        At the end raises the error if no call succeeded, or with `strict` if one did not.
        """
        error: StoreError | None = None
        succeeded = False
        for number, which in self._places(names).items():
            result: Result | None = None
            try:
                result = call(self._stripe(number), which)
                succeeded = True
            except StoreError as raised:
                error = raised
            yield which, result
        if error is not None and (strict or not succeeded):
            raise error

    # Blocks

    def lookup(self, names: Sequence[Name], *, deadline: float) -> int:
        def first_missing(stripe: DiskStore, which: list[int]) -> int:
            found = stripe.lookup([names[i] for i in which], deadline=deadline)
            return which[found] if found < len(which) else len(names)

        calls = self._each(names, first_missing)
        return min((which[0] if at is None else at for which, at in calls), default=0)

    def present(self, names: Sequence[Name], *, deadline: float) -> list[bool]:
        def look(stripe: DiskStore, which: list[int]) -> list[bool]:
            return stripe.present([names[i] for i in which], deadline=deadline)

        present = [False] * len(names)
        for which, found in self._each(names, look):
            for i, one in zip(which, found or (), strict=False):
                present[i] = one
        return present

    def get(self, names: Sequence[Name], buffers: Sequence[memoryview], *, deadline: float) -> list[int]:
        def read(stripe: DiskStore, which: list[int]) -> list[int]:
            return stripe.get([names[i] for i in which], [buffers[i] for i in which], deadline=deadline)

        lengths = [FAILED] * len(names)
        for which, found in self._each(names, read):
            for i, length in zip(which, found or (), strict=False):
                lengths[i] = length
        return lengths

    def put(self, frames: Sequence[Frame], *, deadline: float) -> int:
        def write(stripe: DiskStore, which: list[int]) -> int:
            return stripe.put([frames[i] for i in which], deadline=deadline)

        return sum(kept or 0 for _, kept in self._each([one.name for one in frames], write))

    def delete(self, names: Sequence[Name], *, deadline: float) -> int:
        def remove(stripe: DiskStore, which: list[int]) -> int:
            return stripe.delete([names[i] for i in which], deadline=deadline)

        return sum(count or 0 for _, count in self._each(names, remove, strict=True))

    def pin(self, names: Sequence[Name], *, pinned: bool = True, deadline: float) -> int:
        def change(stripe: DiskStore, which: list[int]) -> int:
            return stripe.pin([names[i] for i in which], pinned=pinned, deadline=deadline)

        return sum(count or 0 for _, count in self._each(names, change))

    def _chained(self, call: Callable[[DiskStore], Iterator[Result]]) -> Iterator[Result]:
        """What the call yields for each folder. Raises at the end if one of them failed."""
        error: StoreError | None = None
        for number in range(len(self._stripes)):
            try:
                yield from call(self._stripe(number))
            except StoreError as raised:
                error = raised
        if error is not None:
            raise error

    def scan(self, *, deadline: float) -> Iterator[StoredBlock]:
        return self._chained(lambda stripe: stripe.scan(deadline=deadline))

    def list_names(self, layout: bytes = b"", root: bytes = b"", *, deadline: float) -> Iterator[Sequence[Name]]:
        return self._chained(lambda stripe: stripe.list_names(layout, root, deadline=deadline))

    def erase_steps(
        self, layout: bytes = b"", root: bytes = b"", *, chosen: Collection[Name] | None = None, deadline: float
    ) -> Iterator[Erased]:
        """As in the contract. Each folder is a place."""
        for number, path in enumerate(self._paths):
            try:
                stripe = self._stripe(number)
            except StoreError as error:
                yield Erased.failed(error, path)
                continue
            for step in stripe.erase_steps(layout, root, chosen=chosen, deadline=deadline):
                yield replace(step, place=path)

    # Records

    def _holder(self, key: str) -> DiskStore:
        return self._stripe(folder_of(key.encode(), self._paths))

    def put_record(self, key: str, data: bytes, *, deadline: float) -> None:
        self._holder(key).put_record(key, data, deadline=deadline)

    def get_record(self, key: str, *, deadline: float) -> bytes | None:
        return self._holder(key).get_record(key, deadline=deadline)

    def delete_record(self, key: str, *, deadline: float) -> bool:
        return self._holder(key).delete_record(key, deadline=deadline)

    def records(self, prefix: str, *, deadline: float) -> list[str]:
        keys, problem = set[str](), ""
        for number in range(len(self._stripes)):
            try:
                keys.update(self._stripe(number).records(prefix, deadline=deadline))
            except PartialListing as error:
                keys.update(error.keys)
                problem = error.message
            except StoreUnavailable as error:
                problem = error.message
        if problem:
            raise PartialListing(problem, list(keys))
        return sorted(keys)

    # Status

    def status(self) -> StoreStatus:
        """The sums over all folders. `notes` has `failed_folders`: those that could not be opened."""
        open_ = [stripe.status() for stripe in self._stripes if stripe is not None]
        notes: Counter[str] = Counter(failed_folders=len(self._stripes) - len(open_))
        for one in open_:
            notes.update(one.notes)
        return StoreStatus(
            -1 if any(one.blocks < 0 for one in open_) else sum(one.blocks for one in open_),
            sum(one.bytes for one in open_),
            sum(one.budget for one in open_),
            sum(one.pinned_bytes for one in open_),
            sum(one.evictions for one in open_),
            dict(notes),
            sum(one.pin_budget or 0 for one in open_),
        )

    def close(self) -> None:
        for stripe in self._stripes:
            if stripe is not None:
                with contextlib.suppress(StoreError):
                    stripe.close()
