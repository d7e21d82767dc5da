"""Tables that keep something per request, filled with entries whose names none had before: full within 10,000, and flat.

Counted are the pieces of memory that Python has given out, after 20,000 entries and again after 30,000: bytes would count the
room that a dictionary takes in advance, and take minutes to count. `make memory` measures bytes. Not here: the blocks of ended
sessions (`SessionBook`), 65,536, which fill later."""

from __future__ import annotations

import gc
import sys
from array import array
from collections.abc import Callable
from random import Random

import pytest

from foreword.api.misses.causes import MissFinder
from foreword.api.quotas import Quotas
from foreword.api.request import CacheControl, GenerateRequest, Message
from foreword.api.stored_responses import StoredResponses
from foreword.blocks.salt import Salt
from foreword.engine.cache_report import MissHistory
from foreword.events import FirstToken
from foreword.newest import Newest
from foreword.router.prompts import TokenLru
from foreword.router.suspicious import Suspects
from foreword.routing.directory import EstimatedBlocks
from foreword.routing.placement import PrefixPopularity
from foreword.routing.sessions import SessionTable
from foreword.server.engine_observers import EngineRecorder

FULL = 10_000
TENANTS = 50


def _keys(draw: Random, count: int = 3) -> list[bytes]:
    return [draw.randbytes(32) for _ in range(count)]


def _conversations(draw: Random) -> Callable[[int], object]:
    finder = MissFinder()

    def one(number: int) -> None:
        words = " ".join(draw.randbytes(3).hex() for _ in range(draw.randint(1, 9)))
        request = GenerateRequest(
            dialect="chat", messages=(Message("user", words),), cache=CacheControl(key=f"session {number}")
        )
        conversation = finder.begin(request, f"tenant {number % 5_000}")
        finder.explain(conversation, 100, 0)

    return one


def _long_prompts(draw: Random) -> Callable[[int], object]:
    """Fills the tables of a router, which compares long prompts only."""
    finder = MissFinder(window=8192)

    def one(number: int) -> None:
        if number % 20:
            finder.passed(1)
            return
        request = GenerateRequest(dialect="chat", messages=(Message("user", draw.randbytes(9).hex()),))
        finder.explain(finder.begin(request, f"tenant {number % TENANTS}"), 100, 0)

    return one


def _served_asks(draw: Random) -> Callable[[int], object]:
    suspects = Suspects()
    return lambda number: suspects.clear(draw.randbytes(16))


def _texts(draw: Random) -> Callable[[int], object]:
    history = MissHistory(1 << 20)
    return lambda number: history.add(
        Salt.of(b"tenant", draw.randbytes(8).hex()), array("I", draw.choices(range(4000), k=20))
    )


def _homes(draw: Random) -> Callable[[int], object]:
    sessions = SessionTable()
    return lambda number: sessions.record(
        f"session {number}" if number % 2 else None, _keys(draw), f"replica {number % 9}", float(number), "weights"
    )


def _responses(draw: Random) -> Callable[[int], object]:
    kept = StoredResponses(4 << 20, 3600.0)
    return lambda number: kept.add(
        b"tenant %d" % (number % TENANTS), f"response {number}", [Message("user", "hello " * 9)], draw.randbytes(900)
    )


def _tokens(draw: Random) -> Callable[[int], object]:
    kept = TokenLru(8_000_000)
    return lambda number: kept.put(draw.randbytes(16), array("I", range(draw.randint(1, 40))))


def _popular(draw: Random) -> Callable[[int], object]:
    counts = PrefixPopularity()
    return lambda number: counts.record(draw.randbytes(32))


def _estimated(draw: Random) -> Callable[[int], object]:
    blocks = EstimatedBlocks(4096)

    def one(number: int) -> None:
        keys = _keys(draw)
        blocks.sent(keys)
        blocks.output(keys, 2)

    return one


def _accounts(draw: Random) -> Callable[[int], object]:
    quotas = Quotas.parse(["* requests=600 tokens=100000"])

    def one(number: int) -> None:
        with quotas.admit(f"tenant {number}", float(number)):
            pass

    return one


def _aborted(draw: Random) -> Callable[[int], object]:
    """First tokens of requests that never finish, as their clients have left."""
    recorder = EngineRecorder(None, 16, explained=True)  # type: ignore[arg-type]
    return lambda number: recorder.notify(FirstToken(f"request {number}", 0.1, 0.0))


def _newest(draw: Random) -> Callable[[int], object]:
    newest: Newest[bytes, float] = Newest(1024)
    return lambda number: newest.__setitem__(draw.randbytes(16), 0.0)


TABLES = {
    "conversations": _conversations,
    "long prompts": _long_prompts,
    "served asks": _served_asks,
    "texts": _texts,
    "homes": _homes,
    "responses": _responses,
    "tokens": _tokens,
    "popular": _popular,
    "estimated": _estimated,
    "accounts": _accounts,
    "aborted": _aborted,
    "newest": _newest,
}


@pytest.mark.extended
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name == "conversations" else ()) for name in TABLES]
)
def test_full_after_ten_thousand(name: str) -> None:
    """Memory after 30,000 entries is in as many pieces as after 20,000."""
    enter = TABLES[name](Random(1))
    gc.collect()
    before, found = sys.getallocatedblocks(), []
    for step in range(3):
        for number in range(step * FULL, (step + 1) * FULL):
            enter(number)
        gc.collect()
        found.append(sys.getallocatedblocks() - before)
    _, full, after = found
    assert after <= 1.02 * full + 500, f"{full:,} pieces of memory, then {after:,}"
