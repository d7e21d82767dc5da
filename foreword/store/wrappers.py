"""Base classes for stores that wrap another store."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Final

from foreword.errors import StoreError
from foreword.store.background import renew_in_child
from foreword.store.base import Erased, Name, Store, StoredBlock, StoreStatus
from foreword.store.frame import Frame

_MAX_REPLACEABLE: Final = 65_536


class StoreWrapper(Store):
    """Forwards every call to `inner`. Subclasses override the calls that they change, or `before_call`."""

    def __init__(self, inner: Store) -> None:
        self.inner = inner
        self.label = inner.label
        self.blocking = inner.blocking
        self.local = inner.local
        self.readers = inner.readers

    @property
    def on_evicted(self) -> Callable[[Name], None] | None:
        return self.inner.on_evicted

    @on_evicted.setter
    def on_evicted(self, call: Callable[[Name], None] | None) -> None:
        self.inner.on_evicted = call

    @property
    def refusal(self) -> StoreError | None:
        return self.inner.refusal

    @property
    def pin_epoch(self) -> int:
        return self.inner.pin_epoch

    def before_call(self, deadline: float) -> None:
        """Called first in every call that has a deadline. Does nothing here."""

    def note_chain(self, before: Sequence[Name], names: Sequence[Name]) -> None:
        self.inner.note_chain(before, names)

    def lookup(self, names: Sequence[Name], *, deadline: float) -> int:
        self.before_call(deadline)
        return self.inner.lookup(names, deadline=deadline)

    def present(self, names: Sequence[Name], *, deadline: float) -> list[bool]:
        self.before_call(deadline)
        return self.inner.present(names, deadline=deadline)

    def get(self, names: Sequence[Name], buffers: Sequence[memoryview], *, deadline: float) -> list[int]:
        self.before_call(deadline)
        return self.inner.get(names, buffers, deadline=deadline)

    def put(self, frames: Sequence[Frame], *, deadline: float) -> int:
        self.before_call(deadline)
        return self.inner.put(frames, deadline=deadline)

    def delete(self, names: Sequence[Name], *, deadline: float) -> int:
        self.before_call(deadline)
        return self.inner.delete(names, deadline=deadline)

    def pin(self, names: Sequence[Name], *, pinned: bool = True, deadline: float) -> int:
        self.before_call(deadline)
        return self.inner.pin(names, pinned=pinned, deadline=deadline)

    def scan(self, *, deadline: float) -> Iterator[StoredBlock]:
        self.before_call(deadline)
        return self.inner.scan(deadline=deadline)

    def list_names(self, layout: bytes = b"", root: bytes = b"", *, deadline: float) -> Iterator[Sequence[Name]]:
        self.before_call(deadline)
        return self.inner.list_names(layout, root, deadline=deadline)

    def erase_steps(
        self, layout: bytes = b"", root: bytes = b"", *, chosen: Collection[Name] | None = None, deadline: float
    ) -> Iterator[Erased]:
        try:
            self.before_call(deadline)
        except StoreError as error:
            return iter([Erased.failed(error)])
        return self.inner.erase_steps(layout, root, chosen=chosen, deadline=deadline)

    def sync_deletions(
        self, prefixes: Sequence[tuple[bytes, bytes]], *, records: bool = False, deadline: float
    ) -> Iterator[None]:
        self.before_call(deadline)
        return self.inner.sync_deletions(prefixes, records=records, deadline=deadline)

    def put_record(self, key: str, data: bytes, *, deadline: float) -> None:
        self.before_call(deadline)
        self.inner.put_record(key, data, deadline=deadline)

    def get_record(self, key: str, *, deadline: float) -> bytes | None:
        self.before_call(deadline)
        return self.inner.get_record(key, deadline=deadline)

    def delete_record(self, key: str, *, deadline: float) -> bool:
        self.before_call(deadline)
        return self.inner.delete_record(key, deadline=deadline)

    def records(self, prefix: str, *, deadline: float) -> list[str]:
        self.before_call(deadline)
        return self.inner.records(prefix, deadline=deadline)

    def status(self) -> StoreStatus:
        return self.inner.status()

    def close(self) -> None:
        self.inner.close()


class FormChanger(StoreWrapper):
    """A wrapper whose frames have a form of their own in `inner`: sealed, or encoded.

    A frame in another form is FOREIGN: other readers may use it, so it is not deleted. A subclass that would store the block in
    its own form notes the name in `replaceable`; the next `put` of the block replaces the frame.

    Args:
        notes: what is counted, as `status` names it.
    """

    def __init__(self, inner: Store, notes: Iterable[str]) -> None:
        super().__init__(inner)
        self._replaceable: set[Name] = set()
        self._notes = dict.fromkeys(notes, 0)
        self.after_fork()
        renew_in_child(self)

    def after_fork(self) -> None:
        self._lock = threading.Lock()  # of the counts

    def count(self, **more: int) -> None:
        with self._lock:
            for key, number in more.items():
                self._notes[key] += number

    def status(self) -> StoreStatus:
        """The inner store's status, with notes of what was counted here."""
        status = self.inner.status()
        with self._lock:
            return replace(status, notes={**status.notes, **self._notes})

    def known(self, names: Sequence[Name]) -> Sequence[bool | None]:
        return self.inner.known(names)

    def note_replaceable(self, name: Name) -> None:
        if len(self._replaceable) < _MAX_REPLACEABLE:
            self._replaceable.add(name)

    def put_changed(self, frames: Sequence[Frame], *, deadline: float) -> int:
        """Store frames that have this store's form, also in place of others."""
        names = [frame.name for frame in frames if frame.name in self._replaceable] if self._replaceable else []
        if names:
            self.inner.delete(names, deadline=deadline)
            self._replaceable.difference_update(names)
        return self.inner.put(frames, deadline=deadline)
