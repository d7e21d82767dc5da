"""Write a disk store as the version of Foreword writes it whose checkout PYTHONPATH names, for `test_earlier_stores.py`.

    git worktree add --detach OLD COMMIT
    PYTHONPATH=OLD python -P tests/store/golden/write_store.py tests/store/golden/store-format-N.tar.xz

Ten blocks of a chain are pinned, ten of another chain are not, five of a third were and are not any more, and there is a
record. COMMIT was 92ee24a for format 3 of the index, and 366dbde2 for format 4.
"""

from __future__ import annotations

import sys
import tarfile
import tempfile
import time
from pathlib import Path
from typing import Any

try:
    from foreword.conformance import make_frames
except ImportError:  # before 0.2
    from foreword.testing import make_frames
from foreword.store.disk.disk_store import DiskStore


def fill(store: Any) -> None:
    until = time.monotonic() + 60
    chains = [make_frames(1, 10, 100), make_frames(2, 10, 100), make_frames(3, 5, 100)]
    for frames in chains:
        assert store.put(frames, deadline=until) == len(frames)
    assert store.pin([one.name for one in chains[0]], deadline=until) == 10
    assert store.pin([one.name for one in chains[2]], deadline=until) == 5
    assert store.pin([one.name for one in chains[2]], pinned=False, deadline=until) == 5
    store.put_record("prefixes/model/tenant/name", b"a record", deadline=until)


def main(archive: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        store = DiskStore(f"{folder}/store", 1 << 20)
        fill(store)
        store.close()
        with tarfile.open(archive, "w:xz") as packed:
            packed.add(Path(folder) / "store", "store")


if __name__ == "__main__":
    main(sys.argv[1])
