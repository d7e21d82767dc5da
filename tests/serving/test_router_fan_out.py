"""The contract of all routes that ask several replicas: what a failure of one of them makes of the answer, and who is named."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import json
import socket
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import http_client
import httpx
import pytest
from aiohttp import web
from router_parts import Loop, RouterThread
from scripted_replica import ScriptedReplica
from shared_server import until

from foreword.api.routes import Route
from foreword.router_extras import fleet_erasures
from foreword.router_extras.fan_out import ASKED, FAILED, Fails, FanOutHandler, all_servers

ROUTES = {
    "POST /v1/sessions": Fails.IF_ANY_BREAKS,
    "GET /v1/sessions": Fails.IF_ALL,
    "GET /v1/cache/retained": Fails.IF_ALL,
    "POST /v1/cache/retain": Fails.IF_ALL,
    "POST /v1/cache/pin": Fails.IF_ALL,
    "POST /v1/cache/prefetch": Fails.IF_ALL,
    "POST /v1/cache/release": Fails.IF_ANY,
    "DELETE /v1/cache": Fails.LATER,
    "GET /v1/cache/erasures/{name}": Fails.IF_ALL,
    "POST /v1/prefixes": Fails.IF_ANY,
    "PUT /v1/prefixes/{name}": Fails.IF_ANY,
    "DELETE /v1/prefixes/{name}": Fails.IF_ANY,
    "POST /v1/public/prefixes": Fails.IF_ANY,
    "PUT /v1/public/prefixes/{name}": Fails.IF_ANY,
    "DELETE /v1/public/prefixes/{name}": Fails.IF_ANY,
}
LOCAL = {"POST /v1/prefixes": 201, "PUT /v1/prefixes/{name}": 200, "DELETE /v1/prefixes/{name}": 404}
FLAGS = ["--api-keys", "a=alice", "--replica-key", "r", "--tenant-secret", "a secret of the tests"]
FLAGS += ["--admin-key", "the key of an operator", "--failures", "1000"]
# Fits each of the routes.
GOOD: dict[str, Any] = {
    "id": "1",
    "status": "accepted",
    "tokens": 3,
    "prompt_tokens": 3,
    "num_tokens": 3,
    "data": [{"id": "x"}],
    "released": [{"id": "x"}],
    "freed_blocks": {"device": 2},
    "what": "tenant",
    "complete": True,
    "left": 0,
    "device_blocks": 3,
}
BROKEN = {"cut": b'{"id": ', "a list": b"[1]", "nested": b"[" * 100_000, "not text": b'{"id": "\xff"}', "empty": b""}
_names = itertools.count()


class Fanned(ScriptedReplica):
    """A server of Foreword that answers all such requests alike, as `mode` says. `asked`, `finished` and `cancelled` count
    them, and `most` those at a time over all replicas since it was set to 0."""

    now = most = 0

    def __init__(self, loop: Loop) -> None:
        self.mode, self.size = "", 0
        self.asked = self.finished = self.cancelled = 0
        super().__init__(loop, owner="foreword")

    def routes(self) -> list[web.RouteDef]:
        return []

    async def _models(self, request: web.Request) -> web.Response:
        card = {"id": "m", "object": "model", "owned_by": self.owner, "max_model_len": 8192}
        return web.json_response({"object": "list", "data": [card], "salt_from": "router"})

    async def _other(self, request: web.Request) -> web.Response:
        if not request.path.startswith(("/v1/cache", "/v1/sessions", "/v1/prefixes")):
            return await super()._other(request)
        self.asked += 1
        Fanned.now += 1
        Fanned.most = max(Fanned.most, Fanned.now)
        try:
            while self.mode == "slow":
                await asyncio.sleep(0.01)
            answer = self._answer(request)
            self.finished += 1
            return answer
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        finally:
            Fanned.now -= 1

    def _answer(self, request: web.Request) -> web.Response:
        if self.mode == "dead":
            assert request.transport is not None
            request.transport.abort()
        if self.mode == "500":
            return web.json_response({"error": {"message": "out of memory"}}, status=500)
        if self.mode == "400":
            return web.json_response({"error": {"message": "no"}}, status=400)
        if self.mode == "404":
            return web.json_response({"error": {"message": "no such thing"}}, status=404)
        body = BROKEN[self.mode] if self.mode in BROKEN else json.dumps(GOOD).encode()
        if self.mode == "other types":
            body = json.dumps({key: {"a": "b"} for key in GOOD}).encode()
        if self.mode == "large":
            body += b" " * (self.size + 1 - len(body))
        return web.Response(body=body, content_type="application/json", status=201 if request.method == "PUT" else 200)


@pytest.fixture(scope="module")
def replicas() -> list[Fanned]:
    loop = Loop()
    return [Fanned(loop), Fanned(loop)]


@pytest.fixture(scope="module")
def running(replicas: list[Fanned]) -> Iterator[RouterThread]:
    flags = [part for one in replicas for part in ("--replica", one.url)]
    with pytest.MonkeyPatch.context() as patch:
        # test_erasure_jobs.py has what is asked again; here it would come between.
        patch.setattr(fleet_erasures, "_PAUSE", 3600.0)
        process = RouterThread(*flags, *FLAGS).wait_for(2)
        yield process
        process.kill()
    assert "Traceback" not in process.text


@pytest.fixture
def router(running: RouterThread, replicas: list[Fanned]) -> Iterator[RouterThread]:
    yield running
    for one in replicas:
        one.mode = ""


def declared(router: RouterThread) -> dict[str, Route[Any]]:
    table = router.router.fronts[0].routes
    return {route.name: route for route in table if isinstance(route.handler, FanOutHandler)}


def given(name: str) -> tuple[str, str, dict[str, str], dict[str, Any] | None]:
    """Method, path, headers and body of a request."""
    method, path = name.split()
    new = f"n{next(_names)}"
    key = "the key of an operator" if "/public/" in path else "alice"
    body: dict[str, Any] | None = None
    if "prefixes" in path:
        body = {"content": "a text", **({"name": new} if method == "POST" else {})}
    elif "sessions" in path:
        body = {"action": "end", "session_id": "s"}
    else:
        body = {"prompt": [1, 2, 3]}
    headers = {"authorization": f"Bearer {key}"}
    return method, path.replace("{name}", new), headers, None if method in ("GET", "DELETE") else body


def ask(router: RouterThread, name: str) -> httpx.Response:
    method, path, headers, body = given(name)
    return http_client.request(method, router.url + path, headers=headers, json=body)


def check_failure(answer: httpx.Response, fails: Fails, bad: str, status: int) -> None:
    """The answer where one of two replicas failed, with this status of its own."""
    deciding = fails is Fails.IF_ANY or (fails is Fails.IF_ANY_BREAKS and status >= 500)
    if deciding:
        assert answer.status_code == status, answer.text
        assert answer.headers.get(FAILED) == bad or bad in answer.json()["error"]["message"]
    else:
        assert answer.status_code == (207 if fails is Fails.LATER else 200), answer.text
        assert (answer.headers[ASKED], answer.headers[FAILED]) == ("1 of 2", bad)


def test_the_declared_routes(router: RouterThread) -> None:
    """These routes are declared, each with its rule and limits."""
    found = declared(router)
    assert {name: route.handler.plan.fails for name, route in found.items()} == ROUTES
    for route in found.values():
        assert 0 < route.handler.plan.answer_bytes <= 4 << 20 and 0 < route.handler.plan.at_a_time <= 64
        assert route.description


@pytest.mark.parametrize("name", ROUTES)
def test_all_answer(router: RouterThread, name: str, replicas: list[Fanned]) -> None:
    """Every replica is asked once, and the answers become one: counts are added up, entries stand there once."""
    before = [one.asked for one in replicas]
    answer = ask(router, name)
    assert answer.status_code in (200, 201) and FAILED not in answer.headers
    assert answer.headers[ASKED] == "2 of 2" and [one.asked for one in replicas] == [count + 1 for count in before]
    body, urls = answer.json(), {one.url for one in replicas}
    if name == "POST /v1/sessions":
        assert body["freed_blocks"] == {"device": 4}
    if name in ("GET /v1/sessions", "GET /v1/cache/retained"):
        assert [(one["id"], set(one["replicas"])) for one in body["data"]] == [("x", urls)]
    if name == "POST /v1/cache/release":
        assert [(one["id"], set(one["replicas"])) for one in body["released"]] == [("x", urls)]
    if name == "DELETE /v1/cache":
        assert (body["device_blocks"], set(body["replicas"]), body["complete"]) == (6, urls, True)


@pytest.mark.parametrize("mode", ["dead", "500", "400", "large", *BROKEN])
@pytest.mark.parametrize("name", ROUTES)
def test_one_replica_fails(router: RouterThread, name: str, mode: str, replicas: list[Fanned]) -> None:
    """A replica breaks the connection, answers with an error, with too much, or with no JSON object: the status is what the
    route's rule says, and the replica is named."""
    fails, bad = ROUTES[name], replicas[0]
    bad.size = declared(router)[name].handler.plan.answer_bytes
    bad.mode = mode
    check_failure(ask(router, name), fails, bad.url, {"500": 500, "400": 400}.get(mode, 502))


@pytest.mark.parametrize("name", ["POST /v1/sessions", "GET /v1/sessions", "DELETE /v1/cache"])
def test_fields_of_other_types(router: RouterThread, name: str, replicas: list[Fanned]) -> None:
    """Merged fields have the declared types: an answer with others is a failure of its replica."""
    replicas[1].mode = "other types"
    check_failure(ask(router, name), ROUTES[name], replicas[1].url, 502)


@pytest.mark.parametrize("name", ROUTES)
def test_one_replica_is_slow(
    router: RouterThread, name: str, replicas: list[Fanned], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A replica that does not answer within the limit is a failure as any other; the others' answers are not lost."""
    handler, slow = declared(router)[name].handler, replicas[1]
    limited = dataclasses.replace(handler.plan, seconds=lambda one: 0.1 if one.url == slow.url else 60.0)
    monkeypatch.setattr(handler, "plan", limited)
    slow.mode = "slow"
    check_failure(ask(router, name), ROUTES[name], slow.url, 502)


@pytest.mark.extended
def test_a_replica_that_hangs_has_failed(
    router: RouterThread, replicas: list[Fanned], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A replica that does not answer within the router's limit of a request counts as failed, as with other requests; one that
    does not answer within a shorter limit of the route does not."""
    name, slow = "POST /v1/sessions", replicas[1]
    handler, problems = declared(router)[name].handler, router.router.upstreams[slow.url].recent.problems
    slow.mode = "slow"
    for seconds, counted in ((0.1, 0), (60.0, 1)):
        before = len(problems)
        monkeypatch.setattr(handler, "plan", dataclasses.replace(handler.plan, seconds=lambda one, most=seconds: most))
        with monkeypatch.context() as patch:
            if counted:
                # aiohttp rounds its own limit of more than 5 s up, so that the route's comes first.
                patch.setattr(router.router, "config", dataclasses.replace(router.router.config, request_timeout=5.1))
            assert ask(router, name).status_code == 502
        assert len(problems) - before == counted


@pytest.mark.parametrize("name", ROUTES)
def test_one_replica_does_not_know_it(router: RouterThread, name: str, replicas: list[Fanned]) -> None:
    """A replica without what the request names has not failed, and none is named. If none knows it, the answer is 404."""
    replicas[0].mode = "404"
    if name != "DELETE /v1/cache":  # there is always something to erase: a server without the path has not erased
        answer = ask(router, name)
        assert answer.status_code in (200, 201) and answer.headers[ASKED] == "1 of 2" and FAILED not in answer.headers
    replicas[1].mode = "404"
    assert ask(router, name).status_code == 404


@pytest.mark.parametrize("mode", ["dead", "500"])
@pytest.mark.parametrize("name", ROUTES)
def test_all_replicas_fail(router: RouterThread, name: str, mode: str, replicas: list[Fanned]) -> None:
    """The failure of the first is the answer, whatever the rule is, and all of them are named."""
    for one in replicas:
        one.mode = mode
    answer = ask(router, name)
    assert answer.status_code == (502 if mode == "dead" else 500)
    named = answer.headers.get(FAILED, "") + answer.text
    assert all(one.url in named for one in replicas)


def test_replicas_asked_at_a_time(
    router: RouterThread, replicas: list[Fanned], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No more replicas are asked side by side than declared; all of them are asked in the end."""
    handler = declared(router)["GET /v1/sessions"].handler
    monkeypatch.setattr(handler, "plan", dataclasses.replace(handler.plan, at_a_time=1))
    Fanned.most = 0
    assert ask(router, "GET /v1/sessions").headers[ASKED] == "2 of 2"
    assert Fanned.most == 1


@pytest.mark.parametrize("name", ROUTES)
def test_a_client_that_leaves(router: RouterThread, name: str, replicas: list[Fanned]) -> None:
    """A change is carried out on every replica although its client has left; a question, and what computes for its client
    alone, ends there too."""
    route = declared(router)[name]
    carried_out = route.handler.plan.to_its_end or not route.ends_with_client
    assert carried_out == (route.method != "GET" and name.split("/")[-1] not in ("retain", "pin", "prefetch"))
    for one in replicas:
        one.mode, one.asked, one.finished, one.cancelled = "slow", 0, 0, 0
    method, path, headers, body = given(name)
    data = b"" if body is None else json.dumps(body).encode()
    parts = urlsplit(router.url)
    with socket.create_connection((str(parts.hostname), parts.port or 80), 60) as client:
        head = [f"{method} {path} HTTP/1.1", "host: x", f"authorization: {headers['authorization']}"]
        head += [f"content-length: {len(data)}", "content-type: application/json"] if data else []
        client.sendall("\r\n".join([*head, "", ""]).encode() + data)
        until(lambda: all(one.asked == 1 for one in replicas))
    if not carried_out:
        until(lambda: all(one.cancelled == 1 for one in replicas))
        return
    for one in replicas:
        one.mode = ""
    until(lambda: all(one.finished == 1 for one in replicas))
    assert not any(one.cancelled for one in replicas)


def test_none_is_able(replicas: list[Fanned]) -> None:
    """While no replica takes requests, an erasure still goes to all, named prefixes are kept by the router, and the rest is a
    503."""
    process = RouterThread(*(part for one in replicas for part in ("--replica", one.url)), *FLAGS).wait_for(2)
    operator = {"authorization": "Bearer the key of an operator"}
    try:
        for one in replicas:
            drain = {"replica": one.url}
            http_client.post(f"{process.url}/v1/router/drain", json=drain, headers=operator).raise_for_status()
        for name, route in declared(process).items():
            answer = ask(process, name)
            expected = 200 if route.handler.plan.to is all_servers else LOCAL.get(name, 503)
            assert answer.status_code == expected or (name, answer.status_code) == ("PUT /v1/prefixes/{name}", 201), (
                name
            )
            assert expected != 503 or answer.json()["error"]["code"] == "no_replica"
    finally:
        process.kill()
