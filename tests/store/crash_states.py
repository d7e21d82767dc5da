"""Draws what a file system may have after a loss of power, from a record of all changes that a process has made (recorder.cpp).

Until some moment before the loss all changes are on the device: it writes back what is older. Of those since then it has what
was synced, and of the rest any part that POSIX allows:

- Of the names in a folder the first few changes, in their order. Either all folders have those until one moment, as in a
  journal, which then also has each change that came before a synced one; or each folder until a moment of its own.
- Of the bytes of a file everything, nothing, the first few writes, some of the pages; and its length may be there without its
  bytes, which are zeros then.

A file may so be there under its name and be empty, cut, or of zeros in part, and what was removed may be there again.
"""

from __future__ import annotations

import os
import random
import struct
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Final, NamedTuple

_HEAD: Final = struct.Struct("<cQqQII")
_PAGE: Final = 4096
_SINCE: Final = (40, 400, 4000, 1 << 40)  # how many changes may not have been written back
MADE, WRITTEN, CUT, HOLE, LONGER, SYNCED, RENAMED, UNLINKED, FOLDER, NO_FOLDER, MARK = (
    bytes([one]) for one in b"cwthasrukdm"
)


class Change(NamedTuple):
    """A change of the files in the recorded folder, or something that the process says it has done (MARK, in `path`). A folder
    that was synced is named by its path, a file by its inode."""

    kind: bytes
    inode: int
    at: int
    size: int
    path: str
    other: str
    data: bytes


def read_record(path: Path) -> list[Change]:
    """All changes, in their order."""
    data, at, found = path.read_bytes(), 0, list[Change]()
    while at < len(data):
        kind, inode, offset, size, first, second = _HEAD.unpack_from(data, at)
        at += _HEAD.size
        name, other = data[at : at + first].decode(), data[at + first : at + first + second].decode()
        at += first + second
        has = size if kind == WRITTEN else 0
        found.append(Change(kind, inode, offset, size, name, other, data[at : at + has]))
        at += has
    return found


@cache
def recorder(folder: Path) -> Path:
    """The library that records changes, compiled into a folder. Needs a C++ compiler."""
    made = folder / "recorder.so"
    source = Path(__file__).with_name("recorder.cpp")
    subprocess.run(["c++", "-std=c++17", "-O1", "-shared", "-fPIC", "-o", made, source, "-ldl"], check=True)
    return made


def record(folder: Path, program: Sequence[str], library: Path, log: Path) -> list[Change]:
    """Run a Python program that changes a folder, and record its changes there."""
    more = {"LD_PRELOAD": str(library), "FW_RECORDED": str(folder), "FW_RECORD": str(log)}
    subprocess.run([sys.executable, *program], env=os.environ | more, check=True)
    return read_record(log)


@dataclass(eq=False)
class _File:
    """A file. `changes`: of its bytes, each with its number."""

    changes: list[tuple[int, Change]] = field(default_factory=list)
    synced: list[int] = field(default_factory=list)


@dataclass(eq=False)
class _Folder:
    """A folder. `changes`: of its names, each with its number; None: the name is there no longer."""

    changes: list[tuple[int, dict[str, _File | _Folder | None]]] = field(default_factory=list)
    synced: list[int] = field(default_factory=list)
    now: dict[str, _File | _Folder] = field(default_factory=dict)

    def change(self, number: int, names: dict[str, _File | _Folder | None]) -> None:
        self.changes.append((number, names))
        for name, one in names.items():
            if one is None:
                self.now.pop(name, None)
            else:
                self.now[name] = one


class Recorded:
    """The files of a recorded folder, and all their changes.

    Args:
        before: the files that were on the device before, as `Recorded.files` has read them from the folder.

    Attributes:
        marks: what the process says it has done, each with the number of the change after it.
    """

    def __init__(self, root: str, changes: Sequence[Change], before: Sequence[Change] = ()) -> None:
        self.count = len(changes)
        self.marks = [(number, one.path) for number, one in enumerate(changes) if one.kind == MARK]
        self._base = root
        self._root = _Folder()
        self._open: dict[int, _File] = {}
        for one in before:
            self._apply(-1, one)
        for number, one in enumerate(changes):
            self._apply(number, one)

    @staticmethod
    def files(root: Path) -> list[Change]:
        """The folders and files of a folder, as changes that make them."""
        found = list[Change]()
        for folder, folders, names in os.walk(root):
            found += [Change(FOLDER, 0, 0, 0, f"{folder}/{name}", "", b"") for name in folders]
            for name in names:
                path, inode = Path(folder, name), os.stat(f"{folder}/{name}").st_ino
                data = path.read_bytes()
                found.append(Change(MADE, inode, 0, 0, str(path), "", b""))
                found.append(Change(WRITTEN, inode, 0, len(data), "", "", data))
        return found

    def _parent(self, path: str) -> tuple[_Folder, str]:
        *folders, name = os.path.relpath(path, self._base).split("/")
        at = self._root
        for one in folders:
            found = at.now[one]
            assert isinstance(found, _Folder)
            at = found
        return at, name

    def _apply(self, number: int, one: Change) -> None:
        if one.kind in (MADE, FOLDER):
            if one.path == self._base:
                return
            parent, name = self._parent(one.path)
            made: _File | _Folder = _Folder() if one.kind == FOLDER else _File()
            if isinstance(made, _File):
                self._open[one.inode] = made
            parent.change(number, {name: made})
        elif one.kind in (UNLINKED, NO_FOLDER):
            parent, name = self._parent(one.path)
            parent.change(number, {name: None})
        elif one.kind == RENAMED:
            (parent, name), (other, new) = self._parent(one.path), self._parent(one.other)
            assert parent is other, "a rename from folder to folder is no single change here"
            parent.change(number, {name: None, new: parent.now[name]})
        elif one.kind == SYNCED:
            synced = self._folder_of(one) if one.path else self._open.get(one.inode)
            if synced is not None:
                synced.synced.append(number)
        elif one.kind != MARK:
            self._open[one.inode].changes.append((number, one))

    def _folder_of(self, one: Change) -> _Folder:
        if one.path == self._base:
            return self._root
        parent, name = self._parent(one.path)
        found = parent.now[name]
        assert isinstance(found, _Folder)
        return found

    def write_state(self, at: int, folder: Path, draw: random.Random) -> str:
        """Write what may be there if the power is lost before the change with this number. Returns what was drawn, in words."""
        kept = max(at - draw.choice(_SINCE), 0)
        journal = draw.random() < 0.5
        syncs = [number for one in self._all(self._root) for number in one.synced if number < at]
        moment = draw.randint(max([kept, *syncs]), at) if journal else -1
        folder.mkdir()
        self._write_folder(self._root, folder, at, kept, moment, draw)
        return f"change {at} of {self.count}, {at - kept} not written back, {'journal' if journal else 'each folder'}"

    def _all(self, folder: _Folder) -> list[_File | _Folder]:
        """All that was ever in a folder."""
        found, left = dict[_File | _Folder, None](), list[_File | _Folder]([folder])
        while left:
            one = left.pop()
            if one not in found:
                found[one] = None
                if isinstance(one, _Folder):
                    left += [made for _, names in one.changes for made in names.values() if made is not None]
        return list(found)

    def _write_folder(self, one: _Folder, path: Path, at: int, kept: int, moment: int, draw: random.Random) -> None:
        if moment < 0:
            least = max([kept, *(number for number in one.synced if number < at)])
            own = draw.choice([least, at, draw.randint(least, at)])
        else:
            own = moment
        names: dict[str, _File | _Folder] = {}
        for number, changed in one.changes:
            if number < own:
                for name, made in changed.items():
                    if made is None:
                        names.pop(name, None)
                    else:
                        names[name] = made
        for name, made in names.items():
            if isinstance(made, _Folder):
                (path / name).mkdir()
                self._write_folder(made, path / name, at, kept, moment, draw)
            else:
                (path / name).write_bytes(_bytes_of(made, at, kept, draw))


def _bytes_of(one: _File, at: int, kept: int, draw: random.Random) -> bytes:
    least = max([kept, *(number for number in one.synced if number < at)])
    data = bytearray()
    for number, change in one.changes:
        if number < least:
            _change(data, change)
    unsure = [change for number, change in one.changes if least <= number < at]
    if not unsure:
        return bytes(data)
    how = draw.choice(["all", "nothing", "first", "pages", "length", "cut"])
    if how == "first":
        unsure = unsure[: draw.randint(0, len(unsure))]
    if how in ("all", "first", "cut"):
        for change in unsure:
            _change(data, change)
    if how == "cut":
        del data[draw.randint(0, len(data)) :]
    if how in ("pages", "length"):
        whole = bytearray(data)
        for change in unsure:
            _change(whole, change)
        data = data[: len(whole)] + bytes(max(len(whole) - len(data), 0))
        for low in range(0, len(whole) if how == "pages" else 0, _PAGE):
            if draw.random() < 0.5:
                data[low : low + _PAGE] = whole[low : low + _PAGE]
    return bytes(data)


def _change(data: bytearray, one: Change) -> None:
    if one.kind == CUT:
        del data[one.at :]
        data.extend(bytes(one.at - len(data)))
        return
    end = one.at + one.size
    if one.kind in (WRITTEN, LONGER) and len(data) < end:
        data.extend(bytes(end - len(data)))
    if one.kind == WRITTEN:
        data[one.at : end] = one.data
    elif one.kind == HOLE:
        end = min(end, len(data))
        data[one.at : end] = bytes(max(end - one.at, 0))
