"""The kernel for each shape, chosen from measured times; and the file that keeps the times. Pure: no torch.

Times are of one thread, per product or attention call, in seconds. They are kept per processor, library versions and
shapes in the user's cache folder, beside the compiled kernels. The files are safe to delete.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import os
import tempfile
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from foreword.compiled_code import CannotBuild, cache_folder

# Rows of x at which a product is measured. Other numbers of rows take the nearest of these, by ratio.
ROWS = (1, 4, 16, 64, 256)
_EDGES = [math.sqrt(low * high) for low, high in itertools.pairwise(ROWS)]
# Attention is measured at (rows, keys): decoding one and sixteen sequences, and a chunk of a prompt.
ATTENTION_SHAPES = ((1, 512), (1, 4096), (16, 256), (16, 1024), (256, 256), (256, 4096))
# Kinds of products, and of attention.
COMPILED, ONEDNN, WIDE, PLAIN = "compiled", "onednn", "wide", "plain"
TORCH = "torch"
# A set of kernels that is at most this much slower than the best, at every number of rows, is chosen for its size.
TOLERANCE = 1.08
# The first kind is used unless another is faster by this factor: measurements vary.
_MARGIN = 1.04
_MAX_FILES = 64
_MAX_BYTES = 1 << 20

# Kind to seconds for each of `ROWS` or `ATTENTION_SHAPES`; infinity where it was not measured because it is far slower.
Times = Mapping[str, Sequence[float]]


def row_bucket(rows: int) -> int:
    """Index of the entry of `ROWS` that stands for this number of rows."""
    return bisect_right(_EDGES, rows)


def attention_bucket(prefill: bool, rows: int, keys: float) -> int:
    """Index of the entry of `ATTENTION_SHAPES` that stands for this work."""
    pair = 4 if prefill else 2 if rows > 4 else 0
    low, high = (keys_of for _, keys_of in ATTENTION_SHAPES[pair : pair + 2])
    return pair + (keys > math.sqrt(low * high))


def fastest(times: Times, kinds: Sequence[str]) -> tuple[str, ...]:
    """The kind that serves each shape; the first of the kinds where there is little between them."""

    def at(place: int) -> str:
        return min(kinds, key=lambda kind: times[kind][place] * (_MARGIN if kind != kinds[0] else 1.0))

    return tuple(at(place) for place in range(len(times[kinds[0]])))


def choose(times: Times, sizes: Mapping[str, int], room: float = math.inf) -> tuple[str, ...]:
    """The kind of product that serves each of `ROWS`.

    Each kind keeps its own copy of the weight, of `sizes` bytes. Of all sets of kinds whose copies fit into `room`, the
    smallest is chosen that is nowhere slower than the best by more than `TOLERANCE`; if there is none, the one that is slower
    by the least. The plain weight is there anyway, so it needs no room, but it can be released where it is not used.
    """
    best = [min(column) for column in zip(*times.values(), strict=True)]
    ranked = []
    for count in range(1, len(times) + 1):
        for kinds in itertools.combinations(times, count):
            if sum(sizes[kind] for kind in kinds if kind != PLAIN) > room:
                continue
            served = fastest(times, kinds)
            worst = max(times[kind][place] / best[place] for place, kind in enumerate(served) if best[place] < math.inf)
            size = sum(sizes[kind] for kind in set(served))
            ranked.append((max(worst, TOLERANCE), size, count, served))
    return min(ranked, key=lambda entry: entry[:3])[3]


@dataclass(frozen=True, slots=True)
class AttentionChoice:
    """The attention kernel for each layer and kind of work. Layers that are not in `served` use the compiled kernels."""

    served: Mapping[int, tuple[str, ...]]

    def compiled(self, layer: int, bucket: int) -> bool:
        """Whether the compiled kernels serve this layer for work of this `attention_bucket`."""
        kinds = self.served.get(layer)
        return kinds is None or kinds[bucket] == COMPILED


class TimesFile:
    """Measured times by name of the shape, in one file for everything that they depend on (`conditions`).

    A file that cannot be read, or holds anything else than times, counts as absent. A folder that cannot be written keeps
    nothing.
    """

    def __init__(self, conditions: Sequence[str]) -> None:
        self._conditions = list(conditions)
        digest = hashlib.sha256(json.dumps(self._conditions).encode()).hexdigest()[:24]
        try:
            self._path: Path | None = cache_folder() / f"times-{digest}.json"
        except CannotBuild:
            self._path = None

    def load(self) -> dict[str, Times] | None:
        """The times, or None."""
        if self._path is None:
            return None
        try:
            with self._path.open("rb") as file:
                text = file.read(_MAX_BYTES + 1)
            found = json.loads(text) if len(text) <= _MAX_BYTES else None
            if not isinstance(found, dict) or found.get("conditions") != self._conditions:
                return None
            return {name: _checked(kinds) for name, kinds in found["times"].items()}
        except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
            return None

    def save(self, times: Mapping[str, Times]) -> None:
        """Replace the file; the oldest files beyond a number are deleted."""
        if self._path is None:
            return
        finite = {
            name: {kind: [t if math.isfinite(t) else None for t in seconds] for kind, seconds in kinds.items()}
            for name, kinds in times.items()
        }
        text = json.dumps({"conditions": self._conditions, "times": finite}, indent=1)
        folder = self._path.parent
        try:
            folder.mkdir(parents=True, exist_ok=True)
            handle, made = tempfile.mkstemp(dir=folder, prefix="times-", suffix=".tmp")
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                file.write(text)
            Path(made).replace(self._path)
            files = sorted(folder.glob("times-*"), key=lambda path: path.stat().st_mtime)
            for path in files[:-_MAX_FILES]:
                path.unlink(missing_ok=True)
        except OSError:
            return


def _checked(kinds: Any) -> dict[str, list[float]]:
    """Times as they were saved. Raises ValueError or TypeError for anything else."""
    found = {str(kind): [math.inf if t is None else float(t) for t in seconds] for kind, seconds in kinds.items()}
    lengths = {len(seconds) for seconds in found.values()}
    if lengths not in ({len(ROWS)}, {len(ATTENTION_SHAPES)}):
        raise ValueError("no times")
    for column in zip(*found.values(), strict=True):
        if not all(t > 0 for t in column) or not math.isfinite(min(column)):
            raise ValueError("not a time")
    return found
