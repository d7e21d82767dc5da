"""`DELETE /v1/cache` while a store does not answer: 207 and an id. The rest is erased later, also after a restart."""

from __future__ import annotations

import asyncio
import os
import re
import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import http_client
import httpx
import msgspec
import pytest
from aiohttp import web
from ports import free_port
from router_parts import Loop, RouterProcess, RouterThread
from scripted_replica import ScriptedReplica
from server_process import ControlledProcess, ServerProcess, slow
from servers import RedisServer
from shared_server import until
from test_store import TEXT, Start, cached, metric, post

from foreword.router_extras import fleet_erasures

KEY, ROOT = {"authorization": "Bearer k1"}, {"authorization": "Bearer root"}


def blocks_in(redis: RedisServer) -> int:
    with redis.client() as client:
        return sum(1 for _ in client.scan_iter("*:b:*"))


def erase(url: str) -> tuple[int, dict[str, Any]]:
    answer = httpx.delete(f"{url}/v1/cache", headers=KEY, timeout=120)
    return answer.status_code, answer.json()


@pytest.mark.extended
@pytest.mark.parametrize("restarted", [pytest.param(False, marks=pytest.mark.slow), True])
def test_an_erasure_is_completed_later(start: Start, tmp_path: Path, restarted: bool) -> None:
    """An erasure with a Redis that hangs is answered with 207: the disk is erased, Redis is named. Once Redis answers, its
    blocks go too, without a request, and the receipt says so. If the server has ended in between, the next one continues."""
    redis = RedisServer(tmp_path)
    flags = [
        "--store",
        f"disk://{tmp_path}/kv?size=64MiB",
        "--store",
        redis.url,
        "--api-keys",
        "ann=k1",
        "--api-keys",
        "bob=k2",
    ]
    flags += ["--tenant-secret", "a long random text"]
    try:
        process: ServerProcess = start(*flags)
        url = process.wait_ready()
        post(url, "k1", prompt=TEXT, max_tokens=1)
        post(url, "k2", prompt=TEXT, max_tokens=1)
        until(lambda: metric(url, "foreword:store_queued_blocks") == 0)
        before = blocks_in(redis)
        with redis.stopped():
            status, receipt = erase(url)
            assert status == 207 and not receipt["complete"] and list(receipt["unreachable"]) == ["redis"]
            assert receipt["removed"]["disk"] > 0 and receipt["left"] == 0
            shown = http_client.get(f"{url}/v1/cache/erasures/{receipt['id']}", headers=KEY).json()
            assert not shown["complete"]
            hidden = httpx.get(
                f"{url}/v1/cache/erasures/{receipt['id']}", headers={"authorization": "Bearer k2"}, timeout=60
            )
            assert hidden.status_code == 404
            if restarted:
                process.popen.send_signal(signal.SIGKILL)
                process.popen.wait(60)
        if restarted:
            url = start(*flags).wait_ready()
        until(lambda: blocks_in(redis) == before // 2)
        if not restarted:
            done = f"{url}/v1/cache/erasures/{receipt['id']}"
            until(lambda: http_client.get(done, headers=KEY).json()["complete"])
            assert http_client.get(done, headers=KEY).json()["removed"]["redis"] == before // 2
        until(lambda: not list((tmp_path / "kv" / "records").glob("erasures=/*~")))
        assert cached(post(url, "k1", prompt=TEXT, max_tokens=1)) == 0
        assert cached(post(url, "k2", prompt=TEXT, max_tokens=1)) > 0
        status, receipt = erase(url)
        assert status == 200 and receipt["complete"] and not receipt["unreachable"]
    finally:
        redis.kill()


@pytest.mark.extended
def test_what_runs_during_an_erasure(start_controlled: Callable[..., ControlledProcess], tmp_path: Path) -> None:
    """A request and a named prefix of the tenant that are being computed leave nothing behind a complete receipt: no blocks on
    the device or in a store, no retention, no name."""
    flags = ["--store", f"disk://{tmp_path}/kv?size=64MiB", "--max-batch-tokens", "32", "--api-keys", "ann=k1"]
    process = start_controlled(*flags, "--tenant-secret", "a long random text", "--no-self-check")
    url = process.wait_ready()
    body = {"prompt": TEXT, "max_tokens": 200, "ignore_eos": True, "cache_control": {"type": "ephemeral", "ttl": "1h"}}
    prefix = {"name": "manual", "content": TEXT[:900][::-1]}

    def files() -> list[Path]:
        return [one for one in (tmp_path / "kv").rglob("*") if one.is_file() and len(one.name) == 64]

    with slow(process, step=1.0) as fast, ThreadPoolExecutor(2) as pool:
        running = pool.submit(post, url, "k1", **body)
        until(lambda: len(files()) > 8)
        naming = pool.submit(http_client.post, f"{url}/v1/prefixes", json=prefix, headers=KEY)
        until(lambda: metric(url, "vllm:num_requests_running") == 2)
        status, receipt = erase(url)
        assert status == 200 and receipt["complete"] and receipt["removed"]["disk"] > 0
        fast()
        assert naming.result().status_code == 404
        assert running.result()["usage"]["completion_tokens"] == 200
    until(lambda: metric(url, "foreword:store_queued_blocks") == 0)
    assert cached(post(url, "k1", prompt=TEXT[:600], max_tokens=1)) == 0
    assert http_client.get(f"{url}/v1/prefixes", headers=KEY).json()["data"] == []
    assert not list((tmp_path / "kv" / "records").glob("prefixes=/*/*/*~"))
    status, receipt = erase(url)
    assert receipt["complete"] and not receipt["records"]


def test_receipts_through_a_router(start: Start, tmp_path: Path) -> None:
    """A router answers with the replicas' receipts, and finds the replica that knows an erasure by its id."""
    url = start("--store", f"disk://{tmp_path}/kv?size=64MiB").wait_ready()
    router = RouterProcess("--replica", url).wait_for(1)
    try:
        receipt = http_client.delete(f"{router.url}/v1/cache").raise_for_status().json()
        name = receipt["replicas"][url]["id"]
        assert http_client.get(f"{router.url}/v1/cache/erasures/{name}").json()["complete"]
        assert http_client.get(f"{router.url}/v1/cache/erasures/unknown").status_code == 404
    finally:
        router.kill()


class Eraser(ScriptedReplica):
    """Answers a `DELETE /v1/cache` with a receipt, but not while it `hangs`. `asked`: how often it was."""

    def __init__(self, loop: Loop, *, hangs: bool) -> None:
        self.hangs, self.asked = hangs, 0
        super().__init__(loop, owner="foreword")

    def routes(self) -> list[web.RouteDef]:
        return [web.delete("/v1/cache", self._erase)]

    async def _erase(self, request: web.Request) -> web.Response:
        self.asked += 1
        while self.hangs:
            await asyncio.sleep(0.05)
        return web.json_response({"id": "1", "what": "tenant", "complete": True, "left": 0, "device_blocks": 3})


def test_receipts_at_any_worker() -> None:
    """The receipt of an erasure is found by its id at each worker of a router, whichever has erased."""
    eraser = Eraser(Loop(), hangs=False)
    router = RouterProcess("--replica", eraser.url, "--workers", "2").wait_for(2)
    try:
        until(lambda: router.metric("foreword:router_workers", state="answering") == 2)
        receipt = http_client.delete(f"{router.url}/v1/cache").raise_for_status().json()

        def both_have_answered() -> bool:
            # Each request has a connection of its own, which either worker may take.
            assert http_client.get(f"{router.url}/v1/cache/erasures/{receipt['id']}").json() == receipt
            return len(set(re.findall(r"worker \d: GET /v1/cache/erasures", router.text))) == 2

        until(both_have_answered)
    finally:
        router.kill()


def test_a_replica_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    """A replica that does not answer in time is named in the receipt, which has those of the others, and is asked again until
    it answers; one that has answered is not."""
    monkeypatch.setattr(fleet_erasures, "_PAUSE", 0.1)
    loop = Loop()
    slow_, quick = Eraser(loop, hangs=True), Eraser(loop, hangs=False)
    monkeypatch.setattr(fleet_erasures, "_seconds", lambda one: 1.0 if one.url == slow_.url else 60.0)
    router = RouterThread("--replica", slow_.url, "--replica", quick.url).wait_for(2)
    try:
        status, receipt = erase(router.url)
        assert status == 207 and list(receipt["replicas"]) == [quick.url] and not receipt["complete"]
        assert receipt["unreachable"] == {slow_.url: f"{slow_.url} did not answer within 1 s"}
        slow_.hangs = False
        path = f"{router.url}/v1/cache/erasures/{receipt['id']}"
        until(lambda: http_client.get(path).json()["complete"])
        assert http_client.get(path).json()["device_blocks"] == 6
        assert slow_.asked > 1 and quick.asked == 1
    finally:
        router.kill()


@pytest.mark.parametrize(
    ("asking", "migrates"),
    [(False, False), (True, True), *(pytest.param(one, not one, marks=pytest.mark.extended) for one in (True, False))],
)
def test_a_request_that_moves_after_an_erasure(
    start_controlled: Callable[..., ControlledProcess], tmp_path: Path, asking: bool, migrates: bool
) -> None:
    """A stream runs while its tenant erases. Then its server dies, or it migrates: it continues on the other one. The erasure
    is open again until what it has left there is erased, too: also if a third server was still being asked when the stream
    ended."""
    keys = ["--api-keys", "ann=k1", "--tenant-secret", "a long random text"]
    stores = {name: tmp_path / name for name in ("one", "other")}
    flags = ["--no-self-check", "--role", "both", "--admin-key", "root", *keys]
    servers = [start_controlled("--store", f"disk://{path}?size=64MiB", *flags) for path in stores.values()]
    urls = {one.wait_ready(): one for one in servers}
    third = Eraser(Loop(), hangs=asking)
    flags = [word for url in (*urls, third.url) for word in ("--replica", url)]
    router = RouterProcess(*flags, *keys).wait_for(3)
    body = {
        "prompt": TEXT,
        "max_tokens": 200,
        "ignore_eos": True,
        "temperature": 0,
        "stream": True,
        "model": "stdlib-nano",
    }

    def stored() -> list[str]:
        return [name for _, _, names in os.walk(tmp_path) for name in names if len(name) == 64]

    try:
        with (
            slow(*servers, step=0.05) as fast,
            httpx.stream("POST", f"{router.url}/v1/completions", json=body, headers=KEY, timeout=120) as answer,
            ThreadPoolExecutor(1) as pool,
        ):
            lines = (line for line in answer.iter_lines() if line.startswith("data: {"))
            first = next(lines)
            until(lambda: bool(stored()))
            erasing = pool.submit(erase, router.url)
            until(lambda: third.asked == 1 and not stored())
            if not asking:
                assert erasing.result()[0] == 200
            source = answer.headers["x-foreword-route"].partition(": ")[0]
            [left] = [url for url in urls if url != source]
            if migrates:
                request = f"{source}/v1/requests/{answer.headers['x-request-id']}/migrate"
                http_client.post(request, json={"to": left}, headers=ROOT).raise_for_status()
            else:
                urls[source].popen.send_signal(signal.SIGKILL)
                urls[source].popen.wait(60)
            fast()
            assert len([first, *lines]) >= 200
            third.hangs = False
            _, receipt = erasing.result()
        assert router.metric("foreword:router_moved_total") == migrates
        path = f"{router.url}/v1/cache/erasures/{receipt['id']}"
        until(lambda: left not in http_client.get(path, headers=KEY).json()["unreachable"] and not stored())
        assert cached(post(left, "k1", prompt=TEXT, max_tokens=1)) == 0
    finally:
        router.kill()


@pytest.mark.extended
def test_a_replica_that_is_down_is_asked_later(start: Start, tmp_path: Path) -> None:
    """The router's answer is 207 while a replica is down, and the others have erased. When it is back, with what it had
    stored before, the router asks it, without a request; the receipt under the router's id says so, to its tenant only."""
    port = free_port()
    keys = ["--api-keys", "ann=k1", "--api-keys", "bob=k2", "--tenant-secret", "a long random text"]

    def server(name: str, *more: str) -> ServerProcess:
        return start("--store", f"disk://{tmp_path}/{name}?size=64MiB", *keys, *more)

    def stored(name: str) -> int:
        return len([one for one in (tmp_path / name).rglob("*") if one.is_file() and len(one.name) == 64])

    down, up = server("down", "--port", str(port)), server("up")
    urls = [one.wait_ready() for one in (down, up)]
    for url in urls:
        post(url, "k1", prompt=TEXT, max_tokens=1)
        post(url, "k2", prompt=TEXT, max_tokens=1)
        until(lambda url=url: metric(url, "foreword:store_queued_blocks") == 0)
    before = {name: stored(name) for name in ("down", "up")}
    router = RouterProcess("--replica", urls[0], "--replica", urls[1], *keys).wait_for(2)
    try:
        down.popen.send_signal(signal.SIGKILL)
        down.popen.wait(60)
        status, receipt = erase(router.url)
        assert status == 207 and not receipt["complete"]
        assert list(receipt["unreachable"]) == urls[:1] and list(receipt["replicas"]) == urls[1:]
        assert (stored("down"), stored("up")) == (before["down"], before["up"] // 2)
        path = f"{router.url}/v1/cache/erasures/{receipt['id']}"
        assert not http_client.get(path, headers=KEY).json()["complete"]
        server("down", "--port", str(port)).wait_ready()
        until(lambda: http_client.get(path, headers=KEY).json()["complete"])
        assert http_client.get(path, headers={"authorization": "Bearer k2"}).status_code == 404
        assert stored("down") == before["down"] // 2
        assert cached(post(urls[0], "k1", prompt=TEXT, max_tokens=1)) == 0
        assert cached(post(urls[0], "k2", prompt=TEXT, max_tokens=1)) > 0
    finally:
        router.kill()


@pytest.mark.extended
def test_named_prefixes_of_a_router(start: Start, tmp_path: Path) -> None:
    """A tenant's named prefixes go from the router's memory and file, too: it does not bring them back, also not one that was
    being registered. Those of others stay. While the file cannot be written, the erasure, and a removal, are not complete."""
    keys = ["--api-keys", "ann=k1", "--api-keys", "bob=k2", "--tenant-secret", "a long random text"]
    url, file = start("--store", f"disk://{tmp_path}/kv?size=64MiB", *keys).wait_ready(), tmp_path / "prefixes"
    router = RouterProcess("--replica", url, "--prefix-file", str(file), *keys).wait_for(1)
    bob = {"authorization": "Bearer k2"}
    try:
        for headers, text in ((KEY, TEXT), (bob, TEXT[::-1])):
            new = {"name": "manual", "content": text}
            http_client.post(f"{router.url}/v1/prefixes", json=new, headers=headers).raise_for_status()
        broken = tmp_path / "prefixes.new"
        broken.mkdir()
        removed = http_client.delete(f"{router.url}/v1/prefixes/manual", headers=bob)
        assert (removed.status_code, removed.json()["error"]["code"]) == (503, "store_unavailable")
        status, receipt = erase(router.url)
        assert status == 207 and list(receipt["unreachable"]) == ["the router's named prefixes"]
        broken.rmdir()
        done = f"{router.url}/v1/cache/erasures/{receipt['id']}"
        until(lambda: http_client.get(done, headers=KEY).json()["complete"])
        assert [one["tenant"] for one in msgspec.json.decode(file.read_bytes())] == ["bob"]
        for headers, expected in ((KEY, 404), (bob, 200)):
            body = {"prefix": "manual", "prompt": "x", "max_tokens": 1}
            answer = http_client.post(f"{router.url}/v1/completions", json=body, headers=headers)
            assert answer.status_code == expected
        assert cached(post(url, "k1", prompt=TEXT, max_tokens=1)) == 0
    finally:
        router.kill()


def test_responses_that_run_during_an_erasure(start_controlled: Callable[..., ControlledProcess]) -> None:
    """The response of a request that ran while its tenant erased is not stored, neither by a server nor by a router; that of a
    later one is."""
    process = start_controlled("--no-self-check", "--api-keys", "ann=k1")
    url = process.wait_ready()
    router = RouterProcess("--replica", url, "--api-keys", "ann=k1").wait_for(1)
    body = {"input": TEXT, "stream": True, "temperature": 0, "max_output_tokens": 40}
    try:
        for target in (url, router.url):
            found = []
            for erased in (True, False):
                with (
                    slow(process, step=0.05) as fast,
                    httpx.stream("POST", f"{target}/v1/responses", json=body, headers=KEY, timeout=120) as answer,
                ):
                    lines = (line for line in answer.iter_lines() if line.startswith("data: {"))
                    name = msgspec.json.decode(next(lines)[6:])["response"]["id"]
                    if erased:
                        assert erase(target)[1]["complete"]
                    fast()
                    assert "response.incomplete" in list(lines)[-1]
                found.append(http_client.get(f"{target}/v1/responses/{name}", headers=KEY).status_code)
            assert found == [404, 200]
    finally:
        router.kill()
