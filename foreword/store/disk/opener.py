"""Opens the index of a disk store on a thread, rebuilds it if it is lost or broken, and compares it with the files.

Blocks are read by the names of their files until the index is complete.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Final

from foreword.errors import StoreError
from foreword.store.disk.files import BlockFiles, DiskFull, make_folder, store_error
from foreword.store.disk.folder_scan import FolderScan
from foreword.store.disk.index import DiskIndex
from foreword.store.disk.index_rows import BrokenIndex
from foreword.store.disk.locks import folder_lock, scan_lock
from foreword.store.disk.recovery import open_index, quarantine_index, remove_oldest_files

log = logging.getLogger("foreword.store")

# Seconds in which a scan makes no pauses. If it takes longer and is not small, calls do not wait for it.
_PATIENCE: Final = 1.0
_FEW_STEPS: Final = 16
_LARGE_INDEX: Final = 16 << 20
_LONGEST_WAIT: Final = 30.0
_OPEN_TIMEOUT: Final = 60.0
_QUERY_TIMEOUT: Final = 0.02
_RETRY: Final = 5.0
_RETRY_SOON: Final = 0.05
_LONGEST_PAUSE: Final = 0.05
_FILES_FOR_ROOM: Final = 4


class IndexOpener:
    """Keeps the index of one folder open.

    Args:
        notes: counters `recovered`, `rebuilt`, `found` and `missing` to increment.
        opened: called each time the index was opened.
    """

    def __init__(self, index: DiskIndex, files: BlockFiles, notes: Counter[str], opened: Callable[[], None]) -> None:
        self._index = index
        self._files = files
        self._notes = notes
        self._opened = opened
        self._reported = False
        self.after_fork()

    def after_fork(self) -> None:
        """In the child: the thread belongs to the parent."""
        self._complete = False
        self._listed = False
        self._fresh = True
        self._began = 0.0
        self._steps = 0
        self._long = False
        self._changed = threading.Condition()
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None
        self.failure: StoreError | None = None  # why the index could not be opened last

    def complete(self) -> bool:
        """Whether the index is open and lists all blocks. If not, a thread works on that."""
        done = self._index.usable() and self._complete
        if not done:
            self._start()
        return done

    def writable(self) -> bool:
        """Whether blocks may be written: the index knows nearly all blocks or their bytes, so the budget can be kept."""
        return self.complete() or (self._index.usable() and (self._listed or self._listed_by_another()))

    def _listed_by_another(self) -> bool:
        """Whether another process has listed the files since it made the index."""
        with contextlib.suppress(StoreError):
            self._listed = self._index.listed(time.monotonic() + _QUERY_TIMEOUT)
        return self._listed

    def _note_listed(self) -> None:
        with self._changed:
            self._listed = True
            self._changed.notify_all()

    def wait(self, ready: Callable[[], bool], deadline: float) -> bool:
        """Wait for a state, unless there are many blocks: a rebuild may take minutes. Returns whether it is reached."""
        if ready():
            return True
        limit = min(deadline, self._began + _LONGEST_WAIT)
        with self._changed:
            self._changed.wait_for(
                lambda: self.failure is not None or self._long or ready(), max(0.0, limit - time.monotonic())
            )
        return ready()

    def _do_not_wait(self) -> None:
        """Let calls that wait continue without the index."""
        with self._changed:
            self._long = True
            self._changed.notify_all()

    def stop(self, seconds: float) -> None:
        self._stopped.set()
        thread = self._thread
        if thread is not None:
            thread.join(seconds)

    def _start(self) -> None:
        with self._changed:
            if self._thread is not None or self._stopped.is_set():
                return
            self._began = time.monotonic()
            self._steps = 0
            self._long = False
            self._thread = threading.Thread(target=self._run, name="foreword-index", daemon=True)
            self._thread.start()

    def _run(self) -> None:
        while not self._stopped.is_set():
            error = self._step()
            done = error is None
            with self._changed:
                self.failure = None if isinstance(error, BrokenIndex) else error
                if done:
                    self._thread = None
                self._changed.notify_all()
            if done:
                return
            self._stopped.wait(self._delay(error))
        with self._changed:
            self._thread = None

    def _step(self) -> StoreError | None:
        """Open the index and compare it with the files. Returns what failed."""
        try:
            if not self._index.usable():
                self._complete = self._listed = False
                self._open()
            if not self._complete:
                self._complete = self._scan()
        except OSError as error:
            return self._report(store_error(error))
        except StoreError as error:
            return self._report(error)
        self._reported = False
        return None

    def _delay(self, error: StoreError | None) -> float:
        """Seconds until the next attempt. Makes room on a full disk."""
        if isinstance(error, BrokenIndex) and self._notes["rebuilt"] < self._limit():
            return 0.0
        if isinstance(error, DiskFull) and remove_oldest_files(self._files, _FILES_FOR_ROOM):
            return _RETRY_SOON
        return _RETRY

    def _limit(self) -> float:
        """How many rebuilds there may have been by now without a pause."""
        return 3 + (time.monotonic() - self._began) / _RETRY

    def _report(self, error: StoreError) -> StoreError:
        if not self._reported:
            self._reported = True
            log.warning(
                "the index of %s cannot be used now; blocks are read by the names of their files: %s",
                self._files.folder,
                error.message,
            )
        return error

    def _open(self) -> None:
        make_folder(self._files.folder)
        deadline = time.monotonic() + _OPEN_TIMEOUT
        with folder_lock(self._files.folder, deadline):
            try:
                if self._index.known_broken():
                    raise BrokenIndex("the index was found to be broken")
                opened = open_index(self._index, self._files, deadline)
            except BrokenIndex:
                self._notes["rebuilt"] += 1
                quarantine_index(self._index.file)
                opened = open_index(self._index, self._files, deadline)
        self._notes["recovered"] += opened.recovered
        self._fresh = opened.fresh
        self._listed = not opened.fresh
        self._complete = opened.complete
        self._opened()
        with self._changed:
            self._changed.notify_all()

    def _scan(self) -> bool:
        """Compare the index with the files, unless another process does. False if the store was closed before the end."""
        if os.path.getsize(self._index.file) > _LARGE_INDEX:
            self._do_not_wait()
        with scan_lock(self._files.folder, self._stopped, self._do_not_wait) as locked:
            if not locked:
                return False
            scan = FolderScan(self._index, self._files, self._notes, self._stopped, self._pause, self._note_listed)
            return scan.run(self._fresh)

    def _pause(self, seconds: float) -> None:
        """After a step of a long scan: let others have the interpreter and the index for half as long as the step took.

        (With a lower priority instead, this thread would keep others from the interpreter while it waits for a core.)
        """
        self._steps += 1
        if self._steps > _FEW_STEPS and time.monotonic() - self._began > _PATIENCE:
            self._do_not_wait()
            self._stopped.wait(min(seconds / 2, _LONGEST_PAUSE))
