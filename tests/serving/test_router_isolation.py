"""Failures that cost one request at the router: what raises for one of two requests ends that one, and the other never
notices."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import http_client
import httpx
import pytest
from hostile_replica import TEXT, HostileReplica
from router_parts import Loop, RouterThread
from shared_server import until

from foreword.router.attempt import DecisionLog
from foreword.router.extras import Audit
from foreword.router.proxied_request import ProxiedRequest
from foreword.router.replica_pool import ReplicaPool
from foreword.router.response_stream import ResponseStream
from foreword.router.router import Router
from foreword.router.suspicious import Ask
from foreword.router_extras.router_misses import RouterMisses
from foreword.routing.fleet import Fleet

CALLEES: list[tuple[type, str]] = [
    (ReplicaPool, "query"),
    (ReplicaPool, "_try_place"),
    (ReplicaPool, "finished"),
    (Fleet, "place"),
    (Fleet, "sent"),
    (Fleet, "finished"),
    (DecisionLog, "record"),
    (RouterMisses, "finished"),
    (Audit, "finished"),
    (ProxiedRequest, "headers"),
    (ResponseStream, "take"),
    (Router, "first_token"),
    (Router, "ended"),
    (Ask, "allowed"),
]


class Planted(Exception):
    """An error of a kind that no code expects."""


@pytest.fixture(scope="module")
def loop() -> Loop:
    return Loop()


@pytest.fixture(scope="module")
def router(loop: Loop) -> Iterator[RouterThread]:
    named = [part for _ in range(2) for part in ("--replica", HostileReplica(loop).url)]
    started = RouterThread(*named, "--policy", "round-robin")
    try:
        yield started.wait_for(2)
    finally:
        started.kill()


def post(router: RouterThread, name: str, *, streams: bool) -> httpx.Response:
    body = {"prompt": name, "max_tokens": 8, "stream": streams}
    return http_client.post(f"{router.url}/v1/completions", json=body, headers={"x-request-id": name})


def idle(router: RouterThread) -> bool:
    state = http_client.get(f"{router.url}/v1/router/state").json()
    return not any(one["in_flight"] for one in state["replicas"])


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize(("owner", "callee"), CALLEES, ids=lambda one: one if isinstance(one, str) else one.__name__)
def test_each_callee_raises_for_one_of_two(
    router: RouterThread, owner: type, callee: str, streams: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The victim gets an error, the log has its id, it is counted, and nothing of it is left; the others are served."""
    victim, raised = f"victim-{callee}-{streams}", list[str]()
    real, current = getattr(owner, callee), ProxiedRequest.place
    running = list[str]()

    async def place(self: ProxiedRequest, *given: Any) -> Any:
        running[:] = [self.request_id]
        return await current(self, *given)

    def planted(self: Any, *given: Any, **named: Any) -> Any:
        if running == [victim]:
            raised.append(callee)
            raise Planted(callee)
        return real(self, *given, **named)

    monkeypatch.setattr(ProxiedRequest, "place", place)
    monkeypatch.setattr(owner, callee, planted)
    before = router.metric("foreword:router_unexpected_errors_total")
    answer = post(router, victim, streams=streams)
    if not raised:
        pytest.skip("requests of this kind do not call it")
    failed = answer.status_code >= 500 or '"error"' in answer.text
    assert failed or answer.text.rstrip().endswith("[DONE]")  # it raised behind the end
    assert router.metric("foreword:router_unexpected_errors_total") > before
    assert f"request {victim}" in router.text
    with ThreadPoolExecutor(4) as pool:
        others = list(pool.map(lambda number: post(router, f"{victim}-{number}", streams=False), range(4)))
    assert [one.json()["choices"][0]["text"] for one in others] == [TEXT] * 4
    until(lambda: idle(router))
