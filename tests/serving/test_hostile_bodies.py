"""Hostile requests do not delay others: what `benchmarks/hostile_bodies.py` measures, with a wide margin."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from server_process import ServerProcess

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
SIZE = 6 << 20
# Ten times the limit on an idle machine. Before bodies were limited and parsed on threads, these took up to 37 s.
LIMIT = 2.5


@pytest.fixture(scope="module")
def hostile() -> Iterator[ModuleType]:
    sys.path.append(str(BENCHMARKS))
    import hostile_bodies

    yield hostile_bodies
    sys.path.remove(str(BENCHMARKS))


@pytest.fixture(scope="module")
def attacked(hostile: ModuleType) -> Iterator[tuple[str, Any]]:
    """A server that takes bodies much larger than its model needs, and the clients that should not notice."""
    process = ServerProcess("--max-body", "8MiB", "--max-queue", "4096")
    others = hostile.Others(process.wait_ready())
    with others.running():
        yield others.url, others
    process.popen.kill()
    process.popen.wait()


def test_no_kind_of_body_delays_others(hostile: ModuleType, attacked: tuple[str, Any]) -> None:
    """Each kind of hostile body is refused, while `/health` and the stream of another client go on."""
    url, others = attacked
    for kind, (path, body) in hostile.bodies(SIZE).items():
        outcome = hostile.attack(url, others, kind, path, body)
        assert outcome.status in (400, 413), outcome
        assert max(outcome.health, outcome.gap) < LIMIT, outcome


def test_slow_bodies_delay_nobody(hostile: ModuleType, attacked: tuple[str, Any]) -> None:
    """Hundreds of clients that send single bytes, or half a head, disturb no others."""
    outcome = hostile.slow_bodies(*attacked, count=200, seconds=2.0)
    assert max(outcome.health, outcome.gap) < LIMIT, outcome
