"""Hostile requests do not keep the event loop busy: processor time of the thread that serves everyone.

`benchmarks/server/hostile_bodies.py` measures the delays of others.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import psutil
import pytest
from server_process import ServerProcess

ROOT = Path(__file__).parents[2]
SIZE = 6 << 20
# Processor time, which a busy machine makes longer too. These took up to 37 s before bodies were limited and parsed on threads.
LIMIT_SECONDS = 5.0


@pytest.fixture(scope="module")
def hostile() -> Iterator[ModuleType]:
    sys.path.append(str(ROOT))
    yield importlib.import_module("benchmarks.server.hostile_bodies")
    sys.path.remove(str(ROOT))


@pytest.fixture(scope="module")
def attacked(hostile: ModuleType) -> Iterator[tuple[ServerProcess, Any]]:
    """A server that takes bodies much larger than its model needs, and the clients that should not notice."""
    process = ServerProcess("--max-body", "8MiB", "--max-queue", "4096")
    others = hostile.Others(process.wait_ready())
    with others.running():
        yield process, others
    process.kill()


def test_no_kind_of_body_delays_others(hostile: ModuleType, attacked: tuple[ServerProcess, Any]) -> None:
    """Each kind of hostile body is refused with little work on the event loop, while other clients are served."""
    process, others = attacked
    for kind, (path, body) in hostile.bodies(SIZE).items():
        before = event_loop_seconds(process)
        outcome = hostile.attack(others.url, others, kind, path, body)
        assert outcome.status in (400, 413), outcome
        assert event_loop_seconds(process) - before < LIMIT_SECONDS, outcome
        assert outcome.health > 0, outcome


def test_slow_bodies_delay_nobody(hostile: ModuleType, attacked: tuple[ServerProcess, Any]) -> None:
    """Hundreds of clients that send single bytes, or half a head, cost the event loop little."""
    process, others = attacked
    before = event_loop_seconds(process)
    outcome = hostile.slow_bodies(others.url, others, count=200, seconds=2.0)
    assert event_loop_seconds(process) - before < LIMIT_SECONDS, outcome
    assert outcome.health > 0, outcome


def event_loop_seconds(process: ServerProcess) -> float:
    """Processor time of the server's main thread, which runs the event loop."""
    pid = process.popen.pid
    return next(one.user_time + one.system_time for one in psutil.Process(pid).threads() if one.id == pid)
