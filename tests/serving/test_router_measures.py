"""A router measures replicas before their first requests, and keeps what it has learned over its restarts."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path
from typing import Any

import http_client
import pytest
from aiohttp import web
from chat_replica import ChatReplica
from router_parts import Loop, RouterThread
from shared_server import until

from foreword.router_extras.cost_file import CostFile

MEASURED = ["--measure-seconds", "60"]


class MeasuredReplica(ChatReplica):
    """A server that computes long prompts once `release` was called, like vLLM without priorities. `ended` counts the requests
    that the router has given up. `busy` None: its metrics do not say."""

    def __init__(
        self, loop: Loop, owner: str = "vllm", *, model: str = "m", busy: bool | None = False, refuses: bool = False
    ) -> None:
        self.model = model
        self.busy, self.refuses = busy, refuses
        self.ended = 0
        super().__init__(loop, owner)

    async def _models(self, request: web.Request) -> web.Response:
        card = {"id": self.model, "object": "model", "owned_by": self.owner, "max_model_len": 8192}
        return web.json_response({"object": "list", "data": [card]})

    async def _metrics(self, request: web.Request) -> web.Response:
        if self.busy is None:
            return await super()._metrics(request)
        before = (await super()._metrics(request)).text or ""
        return web.Response(text=f'{before}vllm:num_requests_running{{engine="0"}} {int(self.busy)}.0\n')

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.seen.append(("/v1/completions", body))
        if body.get("priority"):
            return web.json_response({"error": {"message": "no priorities"}}, status=400)
        if len(body["prompt"]) > 1000:
            if self.refuses:
                return web.json_response({"error": {"message": "no"}}, status=403)
            try:
                await self._gate.wait()
            except asyncio.CancelledError:
                self.ended += 1
                raise
        choice = {"index": 0, "text": "x", "finish_reason": "stop"}
        usage = {"prompt_tokens": 2000, "completion_tokens": 1, "total_tokens": 2001}
        return web.json_response({"id": "c", "object": "text_completion", "choices": [choice], "usage": usage})

    @property
    def measured(self) -> list[dict[str, Any]]:
        """The bodies of measurements."""
        return [body for body in self.bodies("/v1/completions") if len(body["prompt"]) > 1000]


@pytest.fixture(scope="module")
def loop() -> Loop:
    return Loop()


def taking(router: RouterThread) -> set[str]:
    listed = http_client.get(f"{router.url}/v1/router/replicas").json()["data"]
    return {one["replica"] for one in listed if one["takes_requests"]}


def test_a_joining_replica_is_measured_before_its_first_request(loop: Loop) -> None:
    """Beside others that serve, it computes two prompts of its own, with salts of their own, before it gets requests. It is
    asked again without a priority if it takes none. A server of unknown kind, one that is busy, and one that does not say
    whether it is, join without."""
    old, new = ChatReplica(loop), MeasuredReplica(loop)
    others = [MeasuredReplica(loop, "openai"), MeasuredReplica(loop, busy=True), MeasuredReplica(loop, busy=None)]
    process = RouterThread("--replica", old.url, *MEASURED)
    try:
        router = process.wait_for(1)
        new.hold()
        for one in (new, *others):
            http_client.post(f"{router.url}/v1/router/replicas", json={"replica": one.url}).raise_for_status()
        until(lambda: len(new.measured) == 2 and {one.url for one in others} <= taking(router))
        assert new.url not in taking(router)
        assert not any(one.measured for one in others)
        new.release()
        until(lambda: new.url in taking(router))
        asked = new.measured
        assert ["priority" in body for body in asked] == [True, False, True, False]
        assert len({body["prompt"] for body in asked}) == 4 == len({body["cache_salt"] for body in asked})
        assert all(body["max_tokens"] == 1 and len(body["prompt"]) == 8000 for body in asked)
        assert process.text.count("computed a prompt of 2000 tokens") == 1 and "Traceback" not in process.text
    finally:
        process.kill()


def test_a_request_ends_a_measurement(loop: Loop) -> None:
    """A replica that is alone takes requests at once. While it is measured, a request that comes ends the measurement at the
    replica, and is answered although that would never have ended. The replica is measured once it is idle."""
    one = MeasuredReplica(loop)
    one.hold()
    process = RouterThread("--replica", one.url, *MEASURED)
    try:
        router = process.wait_for(1)
        until(lambda: len(one.measured) == 2)
        answer = http_client.post(f"{router.url}/v1/completions", json={"prompt": "short", "max_tokens": 1})
        assert answer.status_code == 200
        until(lambda: one.ended == 1)
        one.release()
        until(lambda: "computed a prompt of 2000 tokens" in process.text)
        assert "Traceback" not in process.text
    finally:
        process.kill()


def test_a_replica_that_refuses_is_asked_once(loop: Loop) -> None:
    """A replica that refuses the prompt joins without, and is not asked again, but once without a priority: the
    next one has been measured by then."""
    old, refusing, new = ChatReplica(loop), MeasuredReplica(loop, refuses=True), MeasuredReplica(loop)
    process = RouterThread("--replica", old.url, *MEASURED)
    try:
        router = process.wait_for(1)
        for one in (refusing, new):
            http_client.post(f"{router.url}/v1/router/replicas", json={"replica": one.url}).raise_for_status()
            until(lambda one=one: one.url in taking(router))  # type: ignore[misc]
        assert len(new.measured) == 4
        assert len(refusing.measured) == 2 and process.text.count("was not measured: /v1/completions says 403") == 1
    finally:
        process.kill()


def test_a_replica_does_not_wait_beside_those_of_other_models(loop: Loop) -> None:
    """The first replica of a model takes requests before it is measured, although others serve another model."""
    old, new = ChatReplica(loop), MeasuredReplica(loop, model="other")
    new.hold()
    process = RouterThread("--replica", old.url, *MEASURED)
    try:
        router = process.wait_for(1)
        http_client.post(f"{router.url}/v1/router/replicas", json={"replica": new.url}).raise_for_status()
        until(lambda: new.url in taking(router))
        assert "was not measured" not in process.text  # after it was waited for
    finally:
        new.release()
        process.kill()


def test_learned_costs_are_kept(loop: Loop, tmp_path: Path) -> None:
    """A router begins with the plausible records of its file, and writes them again when it stops; a file of another kind is
    ignored with a line in the log."""
    path, one = tmp_path / "costs.json", ChatReplica(loop)
    kind = {"role": "both", "prefill": 1e-3, "first": 0.1, "attention": 0.0, "decode_base": 0.1, "decode_each": 0.0}
    good = kind | {"machine": "vllm m 8192 None 2^0", "at": time.time() - 100}
    path.write_text(json.dumps({"format": 1, "kinds": [good, good | {"prefill": -1}, good | {"at": 0}]}))
    process = RouterThread("--replica", one.url, "--cost-file", str(path))
    process.wait_for(1)
    [pool] = process.router.pools.values()
    assert pool.fleet.replicas[one.url].cost_model.costs.prefill == 1e-3
    process.kill()
    assert json.loads(path.read_text())["kinds"] == [good]
    for text in ("{", '{"format": 2, "kinds": []}', '{"format": 1, "kinds": [{"role": 3}]}', "x" * (2 << 20)):
        path.write_text(text)
        assert CostFile(str(path)).read() == ()
    assert CostFile(str(tmp_path / "none")).read() == ()
