"""All that a server and a router write with `--log-format json`, read line by line as a collector of logs reads it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import failing_command
import http_client
import pytest
from aiohttp import web
from failing_command import HOSTILE
from router_parts import Loop, RouterProcess
from scripted_replica import ScriptedReplica
from server_process import ServerProcess
from shared_server import until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
# Container runtimes divide lines that are longer.
LONGEST = 16 << 10
PROGRAM = (str(Path(failing_command.__file__)),)
PROMPT = "the keys and values of a prompt " * 40


class Server(ServerProcess):
    program = PROGRAM


class FailingRouter(RouterProcess):
    program = PROGRAM


class HostileReplica(ScriptedReplica):
    """A server of another model that fails each request with a hostile text."""

    def routes(self) -> list[web.RouteDef]:
        return [web.post("/v1/completions", self._fail)]

    async def _models(self, request: web.Request) -> web.Response:
        return web.json_response(
            {"object": "list", "data": [{"id": "hostile", "owned_by": "vllm", "max_model_len": 64}]}
        )

    async def _fail(self, request: web.Request) -> web.Response:
        return web.json_response({"error": {"message": HOSTILE, "code": HOSTILE, "type": HOSTILE}}, status=500)


class Logs:
    """A server behind a router, and the objects in their lines."""

    def __init__(self, server: Server, router: FailingRouter) -> None:
        self.processes = {"server": server, "router": router}
        self.urls = {"server": server.url(), "router": router.url}
        self.keys = {"server": "gateway-key", "router": "team-key"}

    def post(self, where: str, name: str, body: Any, **headers: str) -> Any:
        given = {"authorization": f"Bearer {self.keys[where]}", "x-request-id": name, **headers}
        answer = http_client.post(f"{self.urls[where]}/v1/completions", json=body, headers=given)
        return answer

    def objects(self, where: str) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.processes[where].text.split("\n") if line]

    def request(self, where: str, name: str) -> dict[str, Any]:
        """The object of the request of this id, once it is written."""

        def found() -> list[dict[str, Any]]:
            return [one for one in self.objects(where) if one.get("request_id") == name]

        until(lambda: bool(found()))
        [one] = found()
        return one


@pytest.fixture(scope="module")
def logs() -> Iterator[Logs]:
    own = ["--log-format", "json", "--log-level", "debug"]
    secret = ["--tenant-secret", "a secret of the tests"]
    server = Server(*own, *secret, "--api-keys", "team=gateway-key", "--router-key", "router-key")
    loop = Loop()
    router = None
    try:
        hostile = HostileReplica(loop)
        replicas = ["--replica", server.wait_ready(), "--replica", hostile.url, "--replica-key", "router-key"]
        router = FailingRouter(*own, *replicas, *secret, "--api-keys", "team=team-key").wait_for(2)
        yield Logs(server, router)
    finally:
        if router is not None:
            router.kill()
        server.kill()


def test_a_request_at_both(logs: Logs) -> None:
    """A request has its tenant, model, status, tokens, cached tokens and time to first token in the server's log and in the
    router's, under the id that the client gave it; the router's line names the server, which knows a tenant of a router by its
    salt only. A second one hits the cache in both."""
    whose = {"authorization": "Bearer gateway-key"}
    [model] = [one["id"] for one in http_client.get(f"{logs.urls['server']}/v1/models", headers=whose).json()["data"]]
    body = {"model": model, "prompt": PROMPT, "max_tokens": 5, "ignore_eos": True, "stream": True}
    cached = []
    for name in ("first", "second"):
        answer = logs.post("router", name, {**body, "stream_options": {"include_usage": True}})
        assert answer.status_code == 200, answer.text
        *_, last, done = filter(None, answer.text.split("\n"))
        assert done == "data: [DONE]"
        usage = json.loads(last.removeprefix("data: "))["usage"]
        for where in ("router", "server"):
            found = logs.request(where, name)
            assert found["level"] == "INFO" and found["message"].endswith(f" s [{name}]")
            assert (found["model"], found["status"]) == (model, 200)
            assert re.fullmatch("team" if where == "router" else "salt-[0-9a-f]{12}", found["tenant"])
            assert (found["method"], found["path"]) == ("POST", "/v1/completions")
            tokens = found["prompt_tokens"], found["cached_tokens"], found["output_tokens"]
            shown = usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"], usage["completion_tokens"]
            assert tokens == shown and 0 < found["ttft"] <= found["seconds"]
            assert found.get("replica") == (logs.urls["server"] if where == "router" else None)
        cached.append(found["cached_tokens"])
    assert cached[0] == 0 < cached[1]
    assert logs.post("server", "direct", {"prompt": "x", "max_tokens": 1}).status_code == 200
    assert logs.request("server", "direct")["tenant"] == "team"


@pytest.mark.parametrize("where", ["server", "router"])
def test_a_traceback_is_one_line(where: str, logs: Logs) -> None:
    """An error that no code expects is one object with the traceback in it, and the request's own line says 500."""
    assert logs.post(where, "broken", {"prompt": "x"}, **{"x-fail": "1"}).status_code == 500
    assert logs.request(where, "broken")["status"] == 500
    [one] = [found for found in logs.objects(where) if "exception" in found]
    assert one["level"] == "ERROR" and "broken" in one["message"]
    assert one["exception"].startswith("Traceback (most recent call last):\n") and one["exception"].endswith(" end")
    assert 'RuntimeError: a "quoted" \\ error\n' in one["exception"]


@pytest.mark.parametrize("where", ["server", "router"])
def test_strangers_cannot_write_lines(where: str, logs: Logs) -> None:
    """Values of clients and of replicas that end lines, close the object or are a million characters long stay in one line, and
    no line has bytes outside of ASCII, or more than a container runtime takes."""
    long = "x" * 1_000_000
    for name, body in (
        ("model", {"model": HOSTILE.replace("\udc80", ""), "prompt": "x"}),
        ("long", {"model": long, "prompt": "x"}),
        ("field", {'a"\n{"level": "INFO"}': long, "prompt": "x", "max_tokens": 1}),
        ("user", {"user": f'"\n{long}', "prompt": "x", "max_tokens": 1}),
    ):
        logs.post(where, f"{where}-{name}", body)
        assert logs.request(where, f"{where}-{name}")["status"] in (200, 400, 404, 413)
    if where == "router":
        assert logs.post(where, "hostile", {"model": "hostile", "prompt": [1, 2, 3]}).status_code >= 500
        logs.request(where, "hostile")
    for path in ('/v1/%0a{"level":"INFO"}', "/%22%7d%0d%0a", "/" + "%e2%80%a8" * 500, '/"' * 3900):
        http_client.get(logs.urls[where] + path, headers={"x-request-id": 'a"}\t{"b'})
    logs.post(where, '"' * 128, {"model": "\u6a21" * 4000, "prompt": "x"})
    http_client.get(
        f"{logs.urls[where]}/v1/models", headers={"authorization": f'Bearer "{"k" * 4000}', "x-request-id": "end"}
    )
    assert logs.request(where, "end")["status"] == 401
    lines = [line for line in logs.processes[where].text.split("\n") if line]
    assert len(lines) > 12 and all(line.isascii() and len(line) < LONGEST for line in lines)
    assert all({"time", "level", "message"} <= json.loads(line).keys() for line in lines)
