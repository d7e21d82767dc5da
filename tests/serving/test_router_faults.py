"""Faulty replicas, overload, deadlines and tenants. The replicas are small scripted servers."""

from __future__ import annotations

import asyncio
import json
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from random import Random
from typing import Any

import http_client
import httpx
import pytest
from aiohttp import web
from example_counts import represented
from router_parts import Loop, Relay, RouterProcess, RouterThread, RunningRouter
from scripted_replica import WEIGHTS, metrics_of
from shared_server import SharedServers, abandoned_request, until, words

from foreword.blocks.salt import Salt
from foreword.router.replicas import Refusals, ReplicaBreaker

CHUNK = {"id": "cmpl-1", "object": "text_completion", "created": 1, "model": "m"}


class Scripted:
    """A scripted server: it streams three words, each after `gate` was released once."""

    def __init__(self, loop: Loop, owner: str = "vllm") -> None:
        self.owner = owner
        self.longest = 100
        self.seen: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.behaviour = "answer"
        self.migrate_to = ""
        self.gate = asyncio.Event()
        self.gate.set()
        self.open = 0
        self.probes = 0
        self.probe_gate = asyncio.Event()
        self.probe_gate.set()
        # While it is held: words that may pass.
        self.words: asyncio.Queue[None] = asyncio.Queue()
        self._loop = loop
        self.url = loop.call(self._start)

    async def _start(self) -> str:
        app = web.Application()
        app.router.add_get("/health", self._health)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/metrics", self._metrics)
        app.router.add_post("/v1/completions", self._completions)
        app.router.add_post("/v1/chat/completions", self._completions)
        app.router.add_get("/v1/requests/{name}/stream", self._migrated)
        runner = web.AppRunner(app, handler_cancellation=True)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        host, port = runner.addresses[0][:2]
        return f"http://{host}:{port}"

    def hold(self) -> None:
        self._loop.call(self.gate.clear)

    def release(self) -> None:
        self._loop.call(self.gate.set)

    async def _health(self, request: web.Request) -> web.Response:
        self.probes += 1
        await self.probe_gate.wait()
        if self.behaviour == "frozen":
            await asyncio.sleep(600)
        return web.Response(status=500 if self.behaviour == "ill" else 200)

    async def _metrics(self, request: web.Request) -> web.Response:
        return web.Response(text=metrics_of(WEIGHTS))

    async def _models(self, request: web.Request) -> web.Response:
        card = {"id": "m", "object": "model", "owned_by": self.owner, "max_model_len": self.longest}
        return web.json_response({"object": "list", "data": [card]})

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        self.seen.append(await request.json())
        self.headers.append(dict(request.headers))
        self.open += 1
        try:
            return await self._behave(request, self.seen[-1])
        finally:
            self.open -= 1

    async def _behave(self, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        if self.behaviour == "busy":
            error = {"message": "too much to do", "type": "rate_limit_error", "code": "queue_full"}
            return web.json_response({"error": error}, status=429, headers={"retry-after": "0.2"})
        if self.behaviour == "broken":
            return web.json_response({"error": {"message": "it broke", "type": "server_error"}}, status=500)
        if self.behaviour.startswith("picky"):
            status, _, code = self.behaviour.removeprefix("picky").strip().partition(" ")
            error = {"message": "no", "type": "invalid_request_error", "code": code or None}
            return web.json_response({"error": error}, status=int(status or 422))
        if self.behaviour == "frozen":
            await asyncio.sleep(600)
        if self.behaviour == "hang up":
            assert request.transport is not None
            request.transport.abort()
            return web.Response()
        if not body.get("stream"):
            await self.gate.wait()
            usage = {"prompt_tokens": 3, "completion_tokens": 3, "total_tokens": 6}
            choice = {"index": 0, "text": "one two three", "finish_reason": "stop"}
            return web.json_response({**CHUNK, "choices": [choice], "usage": usage})
        return await self._stream(request)

    async def _migrated(self, request: web.Request) -> web.StreamResponse:
        """The rest of a request that migrated here."""
        return await self._stream(request, int(request.query["from"]))

    async def _may_pass(self) -> None:
        waiting = [asyncio.ensure_future(self.gate.wait()), asyncio.ensure_future(self.words.get())]
        if self.gate.is_set():
            waiting.pop().cancel()
        await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        for one in waiting:
            one.cancel()

    async def _stream(self, request: web.Request, first: int = 0) -> web.StreamResponse:
        out = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await out.prepare(request)
        for number, word in list(enumerate(("one", " two", " three")))[first:]:
            await self._may_pass()
            if number == 1 and self.migrate_to:
                moved = json.dumps({"to": self.migrate_to, "request_id": "migrated", "tokens": 1})
                await out.write(f"event: foreword.moved\ndata: {moved}\n\n".encode())
                return out
            choice: dict[str, Any] = {"index": 0, "text": word, "finish_reason": "stop" if number == 2 else None}
            if self.owner == "vllm":
                choice["token_ids"] = [number + 1]
                if not number:
                    choice["prompt_token_ids"] = [7, 8, 9]
            await out.write(b"data: " + json.dumps({**CHUNK, "choices": [choice]}).encode() + b"\n\n")
            if self.behaviour == "garbage" and number == 1:
                await out.write(b"data: {no JSON\n\n")
            if self.behaviour == "stall" and number == 1:
                await asyncio.sleep(600)
            if self.behaviour == "error" and number == 1:
                error = {"error": {"message": "out of memory", "type": "InternalServerError", "code": 500}}
                await out.write(b"data: " + json.dumps(error).encode() + b"\n\n")
                return out
        await out.write(b"data: [DONE]\n\n")
        return out


@pytest.fixture(scope="module")
def loop() -> Loop:
    return Loop()


@contextmanager
def routed(*arguments: str, replicas: int) -> Iterator[RouterThread]:
    started = RouterThread(*arguments)
    try:
        yield started.wait_for(replicas)
    finally:
        started.kill()


def named(*scripted: Scripted | Relay) -> list[str]:
    return [argument for one in scripted for argument in ("--replica", one.url)]


def post(router: RunningRouter, headers: dict[str, str] | None = None, **more: Any) -> httpx.Response:
    body = {"model": "m", "prompt": "count", **more}
    return http_client.post(f"{router.url}/v1/completions", json=body, headers=headers)


def lines(answer: httpx.Response) -> list[str]:
    """The events of a stream, without the comments that keep it alive."""
    return [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: ")]


def said(answer: httpx.Response) -> str:
    """The text of a complete stream."""
    found = lines(answer)
    assert found[-1] == "[DONE]", found
    return "".join(choice["text"] for line in found[:-1] for choice in json.loads(line)["choices"])


@pytest.mark.parametrize(
    ("behaviour", "streams"),
    [
        ("broken", True),
        ("hang up", False),
        ("busy", True),
        *(
            pytest.param(*each, marks=pytest.mark.slow)
            for each in (("broken", False), ("hang up", True), ("busy", False))
        ),
    ],
)
def test_retry_before_the_first_byte(loop: Loop, behaviour: str, streams: bool) -> None:
    """Whatever a replica does instead of responding, another one serves the request, exactly once."""
    odd, good = Scripted(loop), Scripted(loop)
    with routed(*named(odd, good), "--policy", "round-robin", replicas=2) as router:
        odd.behaviour = behaviour
        for _ in range(6):
            answer = post(router, stream=streams)
            assert answer.status_code == 200
            text = said(answer) if streams else answer.json()["choices"][0]["text"]
            assert text == "one two three"
        assert len(good.seen) == 6 and len(odd.seen) >= 1


@pytest.mark.parametrize("behaviour", ["garbage", "error"])
def test_failover_in_the_middle(loop: Loop, behaviour: str) -> None:
    """After malformed data or an error in the middle of a stream, another replica continues after the known
    tokens."""
    odd, good = Scripted(loop), Scripted(loop)
    with routed(*named(odd, good), "--policy", "round-robin", replicas=2) as router:
        odd.behaviour = behaviour
        texts = {said(post(router, stream=True, max_tokens=9)) for _ in range(2)}
    # The scripted replica begins to count anew: what matters is what it was asked.
    assert "one twoone two three" in texts and texts <= {"one two three", "one twoone two three"}
    asked = next(body for body in good.seen if isinstance(body["prompt"], list))
    assert asked["prompt"] == [7, 8, 9, 1, 2] and asked["max_tokens"] == 7 and "stop" not in asked


@pytest.mark.slow
def test_a_replica_that_stalls(loop: Loop) -> None:
    """A replica that sends nothing for the stall timeout counts as lost."""
    odd, good = Scripted(loop), Scripted(loop)
    with routed(*named(odd, good), "--policy", "round-robin", "--stall-timeout", "1", replicas=2) as router:
        odd.behaviour = "stall"
        texts = {said(post(router, stream=True, max_tokens=9)) for _ in range(2)}
        assert "one twoone two three" in texts
        until(lambda: odd.open == 0)


@pytest.mark.slow
@pytest.mark.parametrize("streams", [True, False])
def test_a_replica_that_freezes(loop: Loop, streams: bool) -> None:
    """A replica that accepts connections but never responds is detected, and its requests are served by another
    one."""
    odd, good = Scripted(loop), Scripted(loop)
    flags = ["--policy", "round-robin", "router.health_timeout=5"]
    with routed(*named(odd, good), *flags, replicas=2) as router:
        odd.behaviour = "frozen"
        for _ in range(2):
            answer = post(router, stream=streams)
            assert (said(answer) if streams else answer.json()["choices"][0]["text"]) == "one two three"
        until(lambda: router.metric("foreword:router_replica_up", replica=odd.url) == 0)


def test_rare_health_checks_do_not_delay_a_retry(loop: Loop) -> None:
    """A client whose replica broke the connection waits until that replica is asked whether it is alive. It is asked for the
    shortest time of a health check, however rare these are: one that hangs does not keep the client for an interval."""
    odd, good = Scripted(loop), Scripted(loop)
    flags = ["--policy", "round-robin", "--health-interval", "600", "router.health_timeout=0.5"]
    with routed(*named(odd, good), *flags, replicas=2) as router:
        odd.behaviour = "hang up"
        loop.call(odd.probe_gate.clear)
        for _ in range(2):
            assert post(router).json()["choices"][0]["text"] == "one two three"
        assert odd.seen


@pytest.mark.slow
def test_a_stalled_router_does_not_blame_replicas(loop: Loop) -> None:
    """Timeouts that happened because the router itself did not run open no circuit, and streams continue."""
    scripted = Scripted(loop)
    router = RouterProcess(*named(scripted), "router.health_timeout=3", "--failures", "1").wait_for(1)
    try:
        for _ in range(3):
            loop.call(scripted.probe_gate.clear)
            probes = scripted.probes
            until(lambda probes=probes: scripted.probes > probes)  # type: ignore[misc]
            # The probe is answered, but the router does not run until its time is over.
            router.popen.send_signal(signal.SIGSTOP)
            loop.call(scripted.probe_gate.set)
            time.sleep(3.5)
            router.popen.send_signal(signal.SIGCONT)
            until(lambda probes=probes: scripted.probes > probes + 1)  # type: ignore[misc]
            assert said(post(router, stream=True)) == "one two three"
        assert router.metric("foreword:router_breaker_opened_total") == 0
    finally:
        router.kill()


def test_a_migrated_stream_is_followed(loop: Loop) -> None:
    """A stream that migrates to another replica continues from there, without a failover."""
    source, target = Scripted(loop), Scripted(loop)
    with routed(*named(source, target), "--policy", "round-robin", replicas=2) as router:
        source.migrate_to, target.migrate_to = target.url, ""
        assert [said(post(router, stream=True)) for _ in range(2)] == ["one two three"] * 2
        assert router.metric("foreword:router_moved_total") == 1
        assert router.metric("foreword:router_continuations_total") == 0


def test_a_request_that_fails_everywhere_opens_no_circuit(loop: Loop) -> None:
    """A request that fails on every replica opens no circuit."""
    odd, other = Scripted(loop), Scripted(loop)
    with routed(*named(odd, other), "--failures", "1", replicas=2) as router:
        odd.behaviour = other.behaviour = "broken"
        assert [post(router).status_code for _ in range(3)] == [500] * 3
        odd.behaviour = other.behaviour = "answer"
        assert post(router).status_code == 200
        assert router.metric("foreword:router_breaker_opened_total") == 0


def test_plain_openai_servers(loop: Loop) -> None:
    """A plain OpenAI server gets only the client's own fields. Its broken stream cannot be continued and ends with
    an error that says so."""
    plain = Scripted(loop, owner="another")
    with routed(*named(plain), replicas=1) as router:
        assert said(post(router, stream=True)) == "one two three"
        assert plain.seen[-1] == {"model": "m", "prompt": "count", "stream": True}
        plain.behaviour = "error"
        error = json.loads(lines(post(router, stream=True))[-1])["error"]
        assert error["code"] == "replica_failed" and "tokens are not known" in error["message"]


@pytest.mark.parametrize("most", represented(["2", "3"], "3"))
@pytest.mark.extended
def test_client_errors_are_checked_until_they_are_believed(
    loop: Loop, caplog: pytest.LogCaptureFixture, most: str
) -> None:
    """A client error of a replica that has not answered yet is checked with another one, and returned unchanged if that says
    the same. Then it is believed at once, but for a small share; no replica is called a failing one."""
    caplog.set_level("INFO")
    picky = [Scripted(loop) for _ in range(3)]
    for one in picky:
        one.behaviour = "picky"
    with routed(*named(*picky), "--failures", "1", "--max-attempts", most, replicas=3) as router:
        for number in range(200):
            answer = post(router)
            assert answer.status_code == 422 and answer.json()["error"]["message"] == "no"
            if number == 0:
                assert sum(len(one.seen) for one in picky) == 2
        assert 200 < sum(len(one.seen) for one in picky) <= 200 + 3 + 3
        assert router.metric("foreword:router_breaker_opened_total") == 0
    said = {record.message.partition(" ")[0] for record in caplog.records}
    assert "request" in said and not [record for record in caplog.records if "failed" in record.message]


def test_mistakes_of_clients(loop: Loop) -> None:
    """Mistakes of clients between served requests are checked: the first of each kind is asked twice, and each 401; no replica
    is at fault."""
    replicas = [Scripted(loop) for _ in range(2)]
    kinds = (
        *("picky 400", "picky 401", "picky 404", "picky 501"),
        *("picky 404 prefix_not_found", "picky 400 context_length_exceeded"),
    )
    with routed(*named(*replicas), "--policy", "round-robin", replicas=2) as router:
        for behaviour in (*kinds, "answer", "answer") * 10:
            for one in replicas:
                one.behaviour = behaviour
            assert post(router).status_code == (200 if behaviour == "answer" else int(behaviour.split()[1]))
        assert sum(len(one.seen) for one in replicas) == 80 + len(kinds) - 1 + 10
        assert router.metric("foreword:router_failures_total") == 0


def test_how_many_refusals_are_checked() -> None:
    """Fewer than 1 % of many mistakes of clients that replicas agree about are asked twice, however many kinds there are."""
    replicas, draw, checked = [Refusals() for _ in range(4)], Random(1), 0
    for _ in range(20_000):
        first, second = draw.sample(replicas, 2)
        if draw.random() < 0.4:
            first.served()
        elif first.checked(kind := draw.randrange(400, 410)):
            checked += 1
            first.compared(kind, True)
            second.compared(kind, True)
    assert 12_000 / 256 - 5 <= checked <= 12_000 * 0.01


def test_refusals_that_are_the_replicas(loop: Loop) -> None:
    """A request that one replica refuses and another one serves is served: always while its kind of refusal is new or was wrong
    lately. A prompt that is too long for one is asked of a longer one, as often as it comes."""
    odd, good = Scripted(loop), Scripted(loop)
    good.longest = 1000
    for behaviour in ("picky 401", "picky 404", "picky 404 prefix_not_found", "picky 400 context_length_exceeded"):
        odd.behaviour = "answer"
        with routed(*named(odd, good), "--policy", "round-robin", "--failures", "100", replicas=2) as router:
            assert [post(router).status_code for _ in range(4)] == [200] * 4
            if "context" not in behaviour:
                odd.behaviour = good.behaviour = "picky 400"  # both are believed in what only the request can cause
                assert {post(router).status_code for _ in range(4)} == {400}
            odd.behaviour, good.behaviour = behaviour, "answer"
            assert [post(router).status_code for _ in range(20)] == [200] * 20


@pytest.mark.parametrize("behaviour", represented(["picky 400", "picky 404"], "picky 400"))
def test_a_replica_that_begins_to_refuse_everything(loop: Loop, behaviour: str) -> None:
    """A replica that has served requests, and then refuses what others serve, gets none after a few of them, also if clients
    made such mistakes before."""
    odd, good = Scripted(loop), Scripted(loop)
    with routed(*named(odd, good), "--policy", "round-robin", replicas=2) as router:
        odd.behaviour = good.behaviour = behaviour
        refused = int(behaviour.split()[1])
        assert [post(router).status_code for _ in range(4)] == [refused] * 4
        odd.behaviour = good.behaviour = "answer"
        assert [post(router).status_code for _ in range(4)] == [200] * 4
        odd.behaviour = behaviour
        answers = [post(router).status_code for _ in range(60)]
        assert set(answers) == {200, refused} and answers.count(refused) <= 16 and answers[-20:] == [200] * 20
        assert router.metric("foreword:router_breaker_opened_total", replica=odd.url) >= 1


def test_an_error_of_all_replicas(loop: Loop) -> None:
    """If every replica fails a request, the client gets the last one's own error."""
    odd, other = Scripted(loop), Scripted(loop)
    with routed(*named(odd, other), replicas=2) as router:
        odd.behaviour = other.behaviour = "broken"
        answer = post(router)
        assert answer.status_code == 500 and answer.json()["error"]["message"] == "it broke"


def test_the_circuit_opens_and_closes(loop: Loop) -> None:
    """The circuit of an unreachable replica opens at once, and closes after it is reachable again and a trial
    request succeeded."""
    scripted, other = Scripted(loop), Scripted(loop)
    relay = Relay(loop, scripted.url)
    with routed(*named(relay, other), "--policy", "round-robin", replicas=2) as router:
        relay.close()
        up = "foreword:router_replica_up"
        until(lambda: router.metric(up, replica=relay.url) == 0)
        assert [post(router).status_code for _ in range(4)] == [200] * 4
        assert scripted.seen == []
        relay.open()
        until(lambda: router.metric(up, replica=relay.url) == 1)
        assert [post(router).status_code for _ in range(4)] == [200] * 4
        assert scripted.seen
        assert router.metric("foreword:router_breaker_opened_total", replica=relay.url) == 1


def test_half_open_allows_one_trial_request(loop: Loop) -> None:
    """A recovered replica gets one trial request; the others wait for its first token, but not for its end."""
    scripted = Scripted(loop)
    relay = Relay(loop, scripted.url)
    with routed(*named(relay), replicas=1) as router, ThreadPoolExecutor() as threads:
        up = "foreword:router_replica_up"
        relay.close()
        until(lambda: router.metric(up) == 0)
        relay.open()
        until(lambda: router.metric(up) == 1)
        scripted.hold()
        first = threads.submit(post, router, stream=True)
        until(lambda: len(scripted.seen) == 1)
        second = threads.submit(post, router, stream=True)
        until(lambda: router.metric("foreword:router_queue_length") == 1)
        loop.call(lambda: scripted.words.put_nowait(None))
        until(lambda: len(scripted.seen) == 2)
        assert not first.done()
        scripted.release()
        assert [said(one.result(60)) for one in (first, second)] == ["one two three"] * 2


def test_pauses_of_the_circuit_breaker() -> None:
    """A replica that is down is probed every second however long it is down. One that answers probes and fails
    requests gets longer and longer pauses."""
    away, odd = ReplicaBreaker(), ReplicaBreaker()
    away.failed(0.0, "gone", certain=True)
    for second in range(1, 600):
        assert away.due(float(second))
        away.probed(float(second), "gone")
    pauses, now = [], 0.0
    for _ in range(8):
        odd.failed(now, "odd", certain=True)
        began = now
        while not odd.due(now):
            now += 0.5
        pauses.append(now - began)
        odd.probed(now, None)
    assert pauses == [1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0, 30.0]


def test_no_healthy_replica(loop: Loop) -> None:
    """Without a healthy replica requests are refused at once, with 503, Retry-After and the reason. `/` leads to the page."""
    scripted = Scripted(loop)
    relay = Relay(loop, scripted.url)
    with routed(*named(relay), replicas=1) as router:
        relay.close()
        until(lambda: http_client.get(f"{router.url}/ready").status_code == 503)
        answer = post(router)
        assert answer.status_code == 503 and answer.headers["retry-after"]
        assert "cannot connect" in answer.json()["error"]["message"]
        assert http_client.get(f"{router.url}/health").status_code == 200
        root = http_client.get(f"{router.url}/")
        assert (root.status_code, root.headers["location"]) == (307, "ui")


def test_queue_then_429(loop: Loop) -> None:
    """When all replicas are busy, requests are queued; when the queue is full, they get 429 with Retry-After."""
    slow = Scripted(loop)
    with routed(*named(slow), "--max-waiting", "1", "--max-queue", "2", replicas=1) as router:
        slow.hold()
        with ThreadPoolExecutor(3) as pool:
            first = pool.submit(post, router, stream=True)
            until(lambda: slow.open == 1)
            waiting = [pool.submit(post, router, stream=True) for _ in range(2)]
            until(lambda: router.metric("foreword:router_queue_length") == 2)
            refused = post(router, stream=True)
            assert refused.status_code == 429 and int(refused.headers["retry-after"]) >= 1
            assert refused.json()["error"]["code"] == "queue_full"
            assert slow.open == 1
            slow.release()
            assert [said(one.result(60)) for one in (first, *waiting)] == ["one two three"] * 3
        assert "queued" in waiting[0].result().headers["x-foreword-route"]


def test_clients_leave_the_queue(loop: Loop) -> None:
    """A request leaves the queue when its client disconnects or its deadline passes, and is never sent."""
    slow = Scripted(loop)
    with routed(*named(slow), "--max-waiting", "1", replicas=1) as router:
        slow.hold()
        with ThreadPoolExecutor(1) as pool:
            first = pool.submit(post, router, stream=True)
            until(lambda: slow.open == 1)
            with abandoned_request(router.url, {"prompt": "x", "stream": True}):
                until(lambda: router.metric("foreword:router_queue_length") == 1)
            until(lambda: router.metric("foreword:router_queue_length") == 0)
            late = post(router, {"x-request-timeout": "0.2"}, stream=True)
            assert late.status_code == 504 and late.json()["error"]["code"] == "deadline_exceeded"
            assert router.metric("foreword:router_queue_length") == 0
            slow.release()
            assert said(first.result(60)) == "one two three"
        assert len(slow.seen) == 1


@pytest.mark.slow
def test_deadlines(loop: Loop) -> None:
    """A request past its deadline gets 504 before its first byte. The deadline does not end a stream that has begun,
    unless the client asked for it: then an error event does. The replica's request is cancelled."""
    slow = Scripted(loop)
    with routed(*named(slow), "--request-timeout", "5", replicas=1) as router:
        slow.hold()
        for headers in ({}, {"x-request-timeout": "0.2"}):
            late = post(router, headers)
            assert late.status_code == 504 and late.json()["error"]["code"] == "deadline_exceeded"
        until(lambda: slow.open == 0)
        slow.release()
        slow.behaviour = "stall"
        error = json.loads(lines(post(router, {"x-request-timeout": "5"}, stream=True))[-1])["error"]
        assert error["code"] == "deadline_exceeded"
        slow.behaviour = "answer"
        slow.hold()
        with ThreadPoolExecutor(1) as pool:
            late_stream = pool.submit(post, router, stream=True)
            loop.call(lambda: slow.words.put_nowait(None))
            time.sleep(5.5)
            slow.release()
            assert said(late_stream.result(60)) == "one two three"
        until(lambda: slow.open == 0)


def test_tenants_take_turns_in_the_queue(loop: Loop) -> None:
    """A tenant that floods the queue does not delay another one."""
    slow = Scripted(loop)
    keys = ["--api-keys", "greedy=greedy-key", "--api-keys", "modest=modest-key"]
    with routed(*named(slow), *keys, "--replica-key", "r", "--max-in-flight", "1", replicas=1) as router:
        slow.hold()
        with ThreadPoolExecutor(9) as pool:
            greedy = {"authorization": "Bearer greedy-key"}
            many = [pool.submit(post, router, greedy, user="greedy") for _ in range(7)]
            until(lambda: router.metric("foreword:router_queue_length") == 6)
            modest = [
                pool.submit(post, router, {"authorization": "Bearer modest-key"}, user="modest") for _ in range(2)
            ]
            until(lambda: router.metric("foreword:router_queue_length") == 8)
            slow.release()
            assert all(one.result(60).status_code == 200 for one in many + modest)
        order = [body["user"] for body in slow.seen]
        assert order.index("modest") <= 2 and len(order) - order[::-1].index("modest") <= 5


def test_what_is_sent_to_a_replica(loop: Loop) -> None:
    """A replica gets the router's key, the tenant's salt and the request id, and none of the client's headers that it
    might trust; the client gets its id back and no hop-by-hop header."""
    scripted = Scripted(loop)
    keys = ["--api-keys", "alice=alice-key", "--replica-key", "router-key", "--tenant-secret", "a secret of the tests"]
    with routed(*named(scripted), *keys, replicas=1) as router:
        sent = {
            "authorization": "Bearer alice-key",
            "x-foreword-salt": "00",
            "x-request-id": "mine",
            "connection": "keep-alive, x-private",
            "x-private": "1",
            "x-api-key": "3",
            "cookie": "4=5",
            "x-data-parallel-rank": "1",
            "traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
        }
        answer = post(router, sent, cache_salt="stolen", salt="stolen", request_id="stolen")
        assert answer.status_code == 200 and answer.headers["x-request-id"] == "mine"
        assert "connection" not in answer.headers or answer.headers["connection"] == "keep-alive"
        body, headers = scripted.seen[0], {name.lower(): value for name, value in scripted.headers[0].items()}
        assert "salt" not in body and "request_id" not in body
        salt = Salt.parse(body["cache_salt"])
        assert salt.tenant and salt == Salt.of(salt.tenant, "stolen")
        assert headers["authorization"] == "Bearer router-key" and headers["x-request-id"] == "mine"
        own = {"x-private", "x-foreword-salt", "x-api-key", "cookie", "x-data-parallel-rank"}
        assert headers["traceparent"] == sent["traceparent"] and not own & headers.keys()
        assert post(router, {"x-api-key": "alice-key"}).status_code == 200
        refused = post(router, sent, kv_transfer_params={"prefill": "evil:1"})
        assert refused.status_code == 400 and refused.json()["error"]["param"] == "kv_transfer_params"
        assert post(router, {"authorization": "Bearer wrong"}).status_code == 401
        assert post(router).status_code == 401


def test_tenants_share_no_blocks(replica: str) -> None:
    """Tenants of a router never hit each other's blocks on a real server, whatever salt they send; each hits its
    own, and a salt of its own separates a tenant's requests further. What they keep and erase is the tenant's."""
    keys = ["--api-keys", "alice=alice-key", "--api-keys", "bob=bob-key", "--replica-key", "router-key"]
    with routed("--replica", replica, *keys, replicas=1) as router:

        def cached(key: str, **more: Any) -> int:
            body = {"prompt": words("routed-tenants", 60), "max_tokens": 1, **more}
            with router.http(key) as client:
                usage = client.post("/v1/completions", json=body).raise_for_status().json()["usage"]
            return int(usage["prompt_tokens_details"]["cached_tokens"])

        assert cached("alice-key") == 0
        assert cached("alice-key") > 0
        assert cached("alice-key", cache_salt="other") == 0
        assert cached("alice-key", cache_salt="other") > 0
        assert cached("bob-key") == 0
        assert cached("bob-key", cache_salt="other") == 0
        with router.http("alice-key") as alice:
            retained = {"prompt": words("routed-tenants", 60)[:400], "cache_salt": "other"}
            assert alice.post("/v1/cache/retain", json=retained).json()["status"] == "accepted"
            assert len(alice.get("/v1/cache/retained").json()["data"]) == 1
            assert alice.delete("/v1/cache", params={"cache_salt": "other"}).json()["device_blocks"] > 0
            assert alice.get("/v1/cache/retained").json()["data"] == []
            assert cached("alice-key") > 0 and cached("alice-key", cache_salt="other") == 0
            assert alice.delete("/v1/cache").json()["device_blocks"] > 0
        assert cached("alice-key") == cached("alice-key", cache_salt="other") == 0
        assert cached("bob-key") > 0 and cached("bob-key", cache_salt="other") > 0
        with router.http("alice-key") as alice, router.http("bob-key") as bob:
            made = alice.post("/v1/prefixes", json={"name": "hers", "content": words("hers", 10)})
            assert made.status_code == 201
            assert bob.get("/v1/prefixes").json()["data"] == []
            assert alice.delete("/v1/prefixes/hers").status_code == 200


def test_servers_without_tenant_isolation_get_no_requests(shared: SharedServers) -> None:
    """A server that would not separate a router's tenants gets no requests, and the error says what to do."""
    keys = ["--api-keys", "alice=alice-key", "--replica-key", "some-key"]
    with routed_unready("--replica", shared.open.url, *keys) as router:
        until(lambda: "takes no requests" in router.text)
        answer = post(router, {"authorization": "Bearer alice-key"}, model=shared.open.model)
        assert answer.status_code == 503 and "--router-key" in answer.json()["error"]["message"]


@contextmanager
def routed_unready(*arguments: str) -> Iterator[RouterThread]:
    process = RouterThread(*arguments)
    try:
        yield process
    finally:
        process.kill()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "--replica"),
        (["--replica", "http://h:1", "--policy", "cheapest"], "policy"),
        *(
            pytest.param(*each, marks=pytest.mark.slow)
            for each in (
                (["--replica", "host:8000"], "http://"),
                (["--replica", "http://h:1", "--replica", "http://h:1"], "twice"),
                (["--replica", "http://h:1 rolle=prefill"], "role"),
                (["--replica-file", "/nonexistent"], "/nonexistent"),
                (["--replica", "http://h:1", "--tenant-weight", "a"], "TENANT=WEIGHT"),
            )
        ),
    ],
)
def test_configuration_errors_at_the_start(arguments: list[str], says: str) -> None:
    """A configuration error ends the process with status 2 and one sentence."""
    process = RouterProcess(*arguments)
    assert process.end(60) == 2
    assert process.text.startswith("foreword: ") and says in process.text and process.text.count("\n") == 1
