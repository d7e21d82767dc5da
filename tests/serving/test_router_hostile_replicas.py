"""Replicas that misbehave beside a good one: clients get right answers, and the bad replica gets no more requests."""

from __future__ import annotations

import json
from collections.abc import Iterator

import http_client
import pytest
from hostile_replica import MODES, TEXT, HostileReplica
from router_parts import Loop, RouterThread
from shared_server import until

# The good replica must not be taken for silent on a busy machine.
FLAGS = ["--policy", "round-robin", "--stall-timeout", "3", "--request-timeout", "60"]


@pytest.fixture(scope="module")
def loop() -> Loop:
    return Loop()


@pytest.fixture(scope="module")
def replicas(loop: Loop) -> tuple[HostileReplica, HostileReplica]:
    return HostileReplica(loop), HostileReplica(loop)


@pytest.fixture(scope="module")
def router(replicas: tuple[HostileReplica, HostileReplica]) -> Iterator[RouterThread]:
    named = [argument for one in replicas for argument in ("--replica", one.url)]
    process = RouterThread(*named, *FLAGS)
    try:
        yield process.wait_for(2)
    finally:
        process.kill()


def ask(router: RouterThread, streams: bool) -> str:
    """The text of a complete response."""
    body = {"prompt": "count", "max_tokens": 8, "stream": streams}
    answer = http_client.post(f"{router.url}/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    if not streams:
        return str(answer.json()["choices"][0]["text"])
    lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if line]
    assert lines[-1] == "[DONE]", lines
    return "".join(choice["text"] for line in lines[:-1] for choice in json.loads(line)["choices"])


def is_right(router: RouterThread, streams: bool) -> bool:
    assert ask(router, streams) == TEXT
    return True


# The others are as important, but each takes seconds.
QUICK = {
    ("HTML", False),
    ("choices are numbers", True),
    ("hang", False),
    ("reset", True),
    ("401", False),
}


@pytest.mark.parametrize(
    ("mode", "streams"),
    [
        pytest.param(mode, streams, marks=() if (mode, streams) in QUICK else pytest.mark.slow)
        for mode in MODES
        if mode != "400"
        for streams in (True, False)
    ],
)
def test_clients_get_right_answers(
    router: RouterThread, replicas: tuple[HostileReplica, HostileReplica], mode: str, streams: bool
) -> None:
    """Whatever a bad replica does, every client gets the whole right answer, and the circuit of the bad one opens. Only one
    that begins to call all requests wrong is believed at first (test_router_faults.py)."""
    bad = replicas[0]
    opened = router.metric("foreword:router_breaker_opened_total")
    bad.mode = mode
    asked = len(bad.seen)
    try:
        until(lambda: is_right(router, streams) and router.metric("foreword:router_breaker_opened_total") > opened)
        for _ in range(3):
            assert is_right(router, streams)
    finally:
        bad.mode = ""
    assert len(bad.seen) > asked and "Traceback" not in router.text
    # The good one was never blamed.
    assert router.metric("foreword:router_breaker_opened_total", replica=replicas[1].url) == 0
    asked = len(bad.seen)
    until(lambda: is_right(router, streams) and len(bad.seen) > asked)
    until(lambda: router.metric("foreword:router_replica_up", replica=bad.url) == 1)
