"""A command of `foreword` that counts what its process keeps, for a test that asks with a file.

    python counted_process.py FOLDER serve ...

While the process runs, a file `FOLDER/count` asks for a count, which comes as `FOLDER/counted.json`: the numbers of the
allocator, of Python's objects by type, and of entries of containers by the attribute that has them. A file `FOLDER/trace` at
the start also traces every allocation of Python, which takes half of the speed.
"""

from __future__ import annotations

import ctypes
import faulthandler
import gc
import json
import signal
import sys
import threading
import time
import traceback
import tracemalloc
from array import array
from collections import Counter, deque
from functools import _lru_cache_wrapper
from pathlib import Path
from types import ModuleType
from typing import Any

_CONTAINERS = (dict, list, set, frozenset, deque, bytearray, array)
_LIBRARY = ("builtins", "collections")
_POLL = 0.1


class _MallInfo(ctypes.Structure):
    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            "arena",
            "ordblks",
            "smblks",
            "hblks",
            "hblkhd",
            "usmblks",
            "fsmblks",
            "uordblks",
            "fordblks",
            "keep",
        )
    ]


def allocator() -> dict[str, float]:
    """MiB: what malloc has given out, what it has and nothing uses, and what is resident; and blocks of Python's allocator."""
    libc = ctypes.CDLL(None)
    libc.mallinfo2.restype = _MallInfo
    found, resident = libc.mallinfo2(), int(Path("/proc/self/statm").read_text().split()[1]) * 4096
    sizes = {"malloc used": found.uordblks + found.hblkhd, "malloc free": found.fordblks, "resident": resident}
    return {name: size / (1 << 20) for name, size in sizes.items()} | {"python blocks": sys.getallocatedblocks()}


def _attributes(owner: Any) -> list[tuple[str, Any]]:
    try:
        found = dict(object.__getattribute__(owner, "__dict__"))
    except AttributeError:
        found = {}
    kind = type(owner)
    if issubclass(kind, ModuleType):
        return [(f"{found.get('__name__')}.{name}", value) for name, value in found.items()]
    label = f"{kind.__module__}.{kind.__qualname__}"
    names = [name for base in kind.__mro__ for name in (base.__dict__.get("__slots__") or ()) if isinstance(name, str)]
    attributes = []
    for name in {*found, *names}:
        try:
            attributes.append((f"{label}.{name}", object.__getattribute__(owner, name)))
        except AttributeError:
            continue
    return attributes


def entries() -> tuple[dict[str, int], dict[str, int]]:
    """Entries of containers by what has them, with those of the containers within; and objects by type.

    No code of the objects runs: a table of a library that loads what it is asked for would load all of it.
    """
    gc.collect()
    objects = gc.get_objects()
    types: Counter[str] = Counter(f"{type(one).__module__}.{type(one).__qualname__}" for one in objects)
    found: Counter[str] = Counter()
    seen: set[int] = set()

    def add(label: str, value: Any, depth: int) -> None:
        if type(value) is _lru_cache_wrapper:
            found[f"{label}()"] += value.cache_info().currsize
        kind = next((one for one in _CONTAINERS if issubclass(type(value), one)), None)
        if kind is None or id(value) in seen:
            return
        seen.add(id(value))
        found[label] += kind.__len__(value)
        if depth and kind not in (bytearray, array):
            for inner in list(dict.values(value) if kind is dict else kind.__iter__(value)):
                add(f"{label}[]", inner, depth - 1)

    for owner in objects:
        if issubclass(type(owner), ModuleType) or str(type(owner).__module__).partition(".")[0] not in _LIBRARY:
            for label, value in _attributes(owner):
                add(label, value, 2)
    return dict(found), dict(types)


def _count() -> dict[str, Any]:
    # Garbage in cycles waits for the next collection: it says nothing of what grows.
    gc.collect()
    counted: dict[str, Any] = {"allocator": allocator()}
    counted["entries"], counted["types"] = entries()
    if tracemalloc.is_tracing():
        lines = tracemalloc.take_snapshot().statistics("lineno")
        counted["lines"] = {f"{one.traceback[0].filename}:{one.traceback[0].lineno}": one.size for one in lines}
    return counted


def _watch(folder: Path) -> None:
    while True:
        time.sleep(_POLL)
        if not (folder / "count").exists():
            continue
        (folder / "count").unlink()
        try:
            counted = _count()
        except Exception:  # noqa: BLE001 - the one who asked is told
            counted = {"error": traceback.format_exc()}
        (folder / "next").write_text(json.dumps(counted))
        (folder / "next").replace(folder / "counted.json")


def main() -> None:
    """Run the command beside a thread that counts."""
    folder = Path(sys.argv.pop(1))
    if (folder / "trace").exists():
        tracemalloc.start()
    faulthandler.register(signal.SIGUSR2)
    threading.Thread(target=_watch, args=(folder,), daemon=True).start()
    from foreword.cli import main as cli

    cli.main()


if __name__ == "__main__":
    main()
