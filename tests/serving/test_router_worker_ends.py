"""Workers of a router that hang or end while something is asked of all."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from aiohttp import web
from router_parts import Loop, RouterProcess
from scripted_replica import ScriptedReplica
from shared_server import until
from test_router_workers import ADMIN, children

KEYS = ("--api-keys", "alice=a", "--replica-key", "r", "--admin-key", ADMIN)
ALICE, OPERATOR = {"authorization": "Bearer a"}, {"authorization": f"Bearer {ADMIN}"}


class Eraser(ScriptedReplica):
    """A server of Foreword that erases, or says that it cannot."""

    def __init__(self, loop: Loop, able: bool = True) -> None:
        self.able, self.asked = able, 0
        super().__init__(loop, owner="foreword")

    def routes(self) -> list[web.RouteDef]:
        return [web.delete("/v1/cache", self._erase)]

    async def _models(self, request: web.Request) -> web.Response:
        card = {"id": "m", "object": "model", "owned_by": self.owner, "max_model_len": 8192}
        return web.json_response({"object": "list", "data": [card], "salt_from": "router"})

    async def _erase(self, request: web.Request) -> web.Response:
        self.asked += 1
        if not self.able:
            return web.json_response({"error": {"message": "the disk does not answer"}}, status=500)
        return web.json_response({"id": "1", "what": "tenant", "complete": True, "left": 0, "device_blocks": 3})


@contextmanager
def routed(*replicas: Eraser) -> Iterator[RouterProcess]:
    named = [part for one in replicas for part in ("--replica", one.url)]
    router = RouterProcess(*named, "--workers", "2", *KEYS).wait_for(2 * len(replicas))
    try:
        until(lambda: router.metric("foreword:router_workers", state="answering") == 2)
        yield router
    finally:
        router.kill()


def test_an_open_erasure_whose_worker_ends() -> None:
    """Its receipt stays at the other worker, and at the one that is started: it says that a replica has not erased. Where the
    client repeats the erasure, it is completed."""
    loop = Loop()
    able, unable = Eraser(loop), Eraser(loop, able=False)
    with routed(able, unable) as router:

        def receipts() -> list[tuple[int, object]]:
            found = [httpx.get(f"{router.url}/v1/cache/erasures/{receipt['id']}", headers=ALICE) for _ in range(12)]
            return [(one.status_code, one.json()) for one in found]

        answer = httpx.delete(f"{router.url}/v1/cache", headers=ALICE)
        receipt = answer.json()
        assert answer.status_code == 207 and receipt["unreachable"] == {unable.url: "HTTP 500"}
        until(lambda: re.search(r"worker \d: DELETE /v1/cache", router.text) is not None)
        eraser = re.search(r"worker (\d): DELETE /v1/cache", router.text)
        assert eraser is not None
        os.kill(children(router)[int(eraser.group(1))], signal.SIGKILL)
        until(lambda: router.metric("foreword:router_worker_restarts_total", reason="signal") == 1)
        assert receipts() == [(207, receipt)] * 12
        until(lambda: router.metric("foreword:router_workers", state="answering") == 2)
        until(lambda: len(set(re.findall(r"worker \d: GET /v1/cache/erasures", router.text))) == 2 or not receipts())
        assert receipts() == [(207, receipt)] * 12
        unable.able = True
        assert httpx.delete(f"{router.url}/v1/cache", headers=ALICE).status_code == 200


@pytest.mark.slow
def test_what_a_hung_worker_has_not_done() -> None:
    """An erasure is open, and an operator's change is an error, while a worker does not answer; both reach it when it runs
    again, and the erasure is complete then."""
    eraser = Eraser(Loop())
    with routed(eraser) as router, ThreadPoolExecutor(2) as pool:
        hung = children(router)[1]
        os.kill(hung, signal.SIGSTOP)
        until(lambda: "State:\tT" in Path(f"/proc/{hung}/status").read_text())
        try:
            drain = pool.submit(
                httpx.post, f"{router.url}/v1/router/drain", json={"replica": eraser.url}, headers=OPERATOR, timeout=60
            )
            answer = httpx.delete(f"{router.url}/v1/cache", headers=ALICE, timeout=60)
            receipt = answer.json()
            assert answer.status_code == 207 and not receipt["complete"] and list(receipt["replicas"]) == [eraser.url]
            assert receipt["unreachable"] == {"the router's other processes": "workers 1 have not answered"}
            assert drain.result().status_code == 502 and "workers 1 have not said so" in drain.result().text
        finally:
            os.kill(hung, signal.SIGCONT)
        path = f"{router.url}/v1/cache/erasures/{receipt['id']}"
        until(lambda: httpx.get(path, headers=ALICE).status_code == 200)
        until(lambda: f"worker 1: replica {eraser.url} drained" in router.text)
        assert eraser.asked == 1
