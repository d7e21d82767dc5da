"""A seeded campaign of three servers on one store, one of which has a wall clock that is wrong.

    python tests/store/clock_campaign.py [--operations 2000] [--seed 1]

The servers store and read chains of several tenants in a store that is too small, retain and release them, take chains into
quarantine, and erase tenants, one operation at a time. The same operations are repeated with the clock of one server a day
behind, two hours ahead and a year ahead, set forward and back every fifty operations. The table counts what differs from the
run with right clocks: blocks that are there, shares of tenants, pins, retentions, quarantine, records, and what erasures have
left.
"""

from __future__ import annotations

import argparse
import os
import pickle
import random
import shutil
import sys
import tempfile
import time
from array import array
from collections import Counter
from collections.abc import Sequence
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path.append(str(Path(__file__).parent))

from processes import start, wait

from foreword.blocks.resume import GroupKind, KVGroup
from foreword.conformance import make_frames, names_of, put_all, read, soon
from foreword.conformance.frames import LAYOUT
from foreword.integrations.vllm_extras.retentions import CacheAction, ConnectorRetentions
from foreword.offload.search import StoredGroup
from foreword.prefixes import lease_follower, pins
from foreword.prefixes.erasure import erase_prefixes
from foreword.prefixes.mismatch import Mismatch
from foreword.prefixes.quarantine import ChainQuarantine
from foreword.store.disk.disk_store import DiskStore
from foreword.store.frame import Frame
from foreword.store.tiered import TieredStore

SKEWS = {"right": 0.0, "a day behind": -86_400.0, "2 h ahead": 7200.0, "a year ahead": 365 * 86_400.0}
SERVERS, TENANTS, CHAINS, LENGTH, BLOCK = 3, 6, 8, 6, 16
SIZE = 120 * 1200
MODEL = bytes(range(16, 32)) * 2
SET_BACK = 50  # operations after which the wrong clock is set right, and wrong again


def chain(tenant: int, number: int) -> list[Frame]:
    return make_frames(100 * tenant + number, LENGTH, 1000, root=bytes([tenant + 1]) * 32)


class Server:
    """The stores of a server, its retentions and its quarantine."""

    def __init__(self, folder: str) -> None:
        self.disk = DiskStore(folder, SIZE)
        self.store = TieredStore([self.disk], [0])
        self.quarantine = ChainQuarantine(self.store, MODEL.hex())
        group = StoredGroup(KVGroup(GroupKind.FULL, BLOCK), (LAYOUT,))
        self.retentions = ConnectorRetentions(self.store, [group], MODEL, BLOCK, BLOCK, 1)

    def do(self, verb: str, tenant: int, number: int) -> object:
        frames = chain(tenant, number)
        root, keys = bytes([tenant + 1]) * 32, [one.header.key for one in frames]
        if verb == "put":
            return put_all(self.disk, frames)
        if verb == "read":
            return [one is not None for one in read(self.disk, frames)]
        if verb in ("retain", "pin", "release"):
            action = CacheAction(verb, ttl=None if verb == "pin" else 5000.0)  # type: ignore[arg-type]
            self.retentions.apply([action], root, keys, LENGTH * BLOCK, bytes([tenant]))
            return self.retentions._stored.flush(60)
        if verb == "quarantine":
            self.quarantine.add(Mismatch(array("I"), root, keys, 0, "disk", (0,), [], [], 0.0, b""))
            return self.quarantine.flush(60)
        if verb == "erase":
            receipt = erase_prefixes(self.store, [root], f"tenant {tenant}")
            left = sum(len(batch) for batch in self.disk.list_names(root=root, deadline=soon()))
            return receipt.complete, left
        assert verb == "look"
        self.quarantine.scan()
        self.retentions._stored._records._written.clear()  # so long ago that listings have it
        self.retentions._stored.scan()
        self.retentions._stored.flush(60)
        return self.seen()

    def seen(self) -> object:
        """The state that this server sees, and the content of the store."""
        present = {
            (tenant, number): self.disk.present(names_of(chain(tenant, number)), deadline=soon())
            for tenant in range(TENANTS)
            for number in range(CHAINS)
        }
        return (
            present,
            sorted(self.quarantine.keys),
            [tier.suspended for tier in self.store.tiers],
            sorted((one.key, one.ttl, bool(one.expires > time.monotonic())) for one in self.retentions.book.all()),
            self.disk.status().pinned_bytes,
            sorted(self.disk.records("", deadline=soon())),
        )


def serve(folder: str, pipe: Connection, skew: float) -> None:
    """Do what the campaign says until it says None."""
    # Pins at once or not at all: no answer depends on how fast a server is.
    pins._MAX_PENDING = 0  # type: ignore[misc]
    lease_follower._COMING = None  # type: ignore[misc, assignment]
    server, real, done = Server(folder), time.time, 0
    while (operation := pipe.recv()) is not None:
        wrong = skew if done // SET_BACK % 2 == 0 else 0.0
        time.time = lambda: real() + wrong  # noqa: B023
        done += 1
        answer = server.do(*operation)
        server.disk._writer._settle(soon())  # uses are noted in the order of the operations
        pipe.send(pickle.dumps(answer))
    os._exit(0)


def operations(count: int, seed: int) -> list[tuple[int, str, int, int]]:
    """Server, verb, tenant and number of a chain. Each server looks at the end."""
    draw = random.Random(seed)
    verbs = ["put"] * 40 + ["read"] * 20 + ["retain"] * 10 + ["pin"] * 2 + ["release"] * 6 + ["look"] * 12
    drawn = [
        (draw.randrange(SERVERS), draw.choice(verbs), draw.randrange(TENANTS), draw.randrange(CHAINS))
        for _ in range(count)
    ]
    for at in range(count // 8, count, max(count // 8, 1)):
        drawn[at] = draw.randrange(SERVERS), "erase", draw.randrange(TENANTS), 0
    drawn[count // 3] = 0, "quarantine", TENANTS - 1, 0  # by a server whose clock is right, and by the other one
    drawn[count // 2] = 2, "quarantine", TENANTS - 2, 1
    return [*drawn, *((server, "look", 0, 0) for server in (*range(SERVERS), 0))]


def outcomes(folder: Path, given: Sequence[tuple[int, str, int, int]], skew: float) -> list[bytes]:
    """Runs the operations, and returns the answer of each. The last server has the wrong clock."""
    pipes, children = [], []
    for number in range(SERVERS):
        ours, theirs = Pipe()
        wrong = skew if number == SERVERS - 1 else 0.0
        children.append(start(lambda pipe=theirs, wrong=wrong: serve(str(folder), pipe, wrong)))
        pipes.append(ours)
    found = []
    for server, *operation in given:
        pipes[server].send(operation)
        found.append(pipes[server].recv())
    for pipe in pipes:
        pipe.send(None)
    assert [wait(child) for child in children] == [0] * SERVERS
    return found


def run(count: int, seed: int) -> dict[str, Counter[str]]:
    """By clock: how many operations answered otherwise than with right clocks, by verb, and what erasures have left."""
    given, found = operations(count, seed), dict[str, Counter[str]]()
    right: list[bytes] = []
    for label, skew in SKEWS.items():
        folder = Path(tempfile.mkdtemp(prefix="clocks-"))
        try:
            answers = outcomes(folder, given, skew)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        right = right or answers
        row = found[label] = Counter[str]()
        for (_, verb, _, _), answer, expected in zip(given, answers, right, strict=True):
            row[verb] += 1
            row[f"{verb} differs"] += answer != expected
            value: Any = pickle.loads(answer)
            row["left"] += value[1] if verb == "erase" else 0
            row["quarantine kept"] += verb == "look" and bool(value[1]) and all(value[2])
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--operations", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    rows = run(arguments.operations, arguments.seed)
    for label, row in rows.items():
        different = sum(count for verb, count in row.items() if verb.endswith("differs"))
        print(f"{label}: {different} answers differ; {dict(row)}")
    return int(
        any(count for row in rows.values() for verb, count in row.items() if verb.endswith("differs") or verb == "left")
    )


if __name__ == "__main__":
    raise SystemExit(main())
