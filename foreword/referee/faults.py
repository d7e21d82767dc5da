"""Claims about faults: a damaged, lost or half-written block costs a computation, never a wrong answer."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from foreword.referee.damage import cut_files, empty_files, flip_bytes, swap_files
from foreword.referee.session import Check, Evidence, RandomPrompts, Session

_SMALL_DISK = 1 << 20
_WITHIN = 60.0
_POOL_SECONDS = 0.5


def damaged(damage: Callable[[Path], int], what: str) -> Check:
    """The claim that what `damage` does to the files gives no wrong answer, while vLLM runs and after a restart."""

    def check(session: Session, draw: RandomPrompts, evidence: Evidence) -> None:
        asked = draw.prompts()
        if session.target.files is None:
            evidence.missing.append("its files are not known (--folder)")
            return
        reference = session.reference(asked)
        worker = session.connected()
        session.store(worker, asked)
        evidence.must_hit(session.store(worker, asked), "before the damage")
        done = session.damage(damage)
        evidence.notes.append(f"{done:,} {what}")
        if not done:
            evidence.missing.append("nothing in its files could be damaged")
            return
        for _ in range(2):  # what was damaged may have been replaced, or may still be there
            evidence.same(session.store(worker, asked), reference)
        session.end(connected=True)
        session.damage(damage)
        evidence.same(session.connected().ask_all(asked), reference)

    check.__doc__ = f"{what[0].upper()}{what[1:]}: while vLLM runs, then again before a restart."
    return check


flipped = damaged(flip_bytes, "bytes changed in the files")
truncated = damaged(cut_files, "files cut to half")
emptied = damaged(empty_files, "files emptied")
swapped = damaged(swap_files, "files exchanged with another valid one")


def killed(session: Session, draw: RandomPrompts, evidence: Evidence) -> None:
    """kill -9 while blocks are written, twice, each time with new prompts; then a restart."""
    if session.target.files is None:
        evidence.missing.append("its files are not known (--folder)")
        return
    for trial in range(2):
        asked = [draw.tokens(f"{trial}/{i}", 700) for i in range(12)]
        worker, before = session.connected(), session.data_bytes()
        worker.send({"ask": asked, "new_tokens": 2, "how": "together"})
        # A pool in one file does not grow; what it holds by then is not known.
        pool = session.target.files.is_file()
        deadline = time.monotonic() + (_POOL_SECONDS if pool else _WITHIN)
        while session.data_bytes() == before and time.monotonic() < deadline:
            time.sleep(0.002)
        time.sleep(0.02 * trial)
        session.end(connected=True, kill=True)
        written = session.data_bytes() - before
        evidence.notes.append(f"{written:,} bytes written when it was killed")
        if written <= 0 and not pool:
            evidence.missing.append("nothing was written when it was killed")
        few = asked[:6]
        evidence.same(session.connected().ask_all(few), session.reference(few))


def full_disk(session: Session, draw: RandomPrompts, evidence: Evidence) -> None:
    """A full disk: requests end with right answers."""
    asked = draw.prompts()
    asked += draw.prompts("more")
    reference = session.reference(asked)
    session.end(connected=True)
    with session.small_disk(_SMALL_DISK) as mounted:
        if not mounted:
            evidence.missing.append("needs --folder and the right to mount a small file system")
            return
        worker = session.connected()
        for _ in range(2):
            evidence.same(session.store(worker, asked), reference)
        used = session.data_bytes()
    evidence.notes.append(f"{used:,} of {_SMALL_DISK:,} bytes used")
