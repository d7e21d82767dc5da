"""Requests that this server would refuse, in front of replicas that understand them: the router passes them on."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import http_client
import httpx
import pytest
from aiohttp import web
from chat_replica import ChatReplica
from router_parts import Loop, RouterThread
from scripted_replica import ScriptedReplica
from shared_server import SharedServers

from foreword.api.dialects.decode import Limits
from foreword.api.dialects.registry import DIALECTS
from foreword.api.request import DialectName
from foreword.errors import BadRequest
from foreword.router.replica_body import PASSED

IMAGE = "data:image/png;base64," + "iVBORw0KGgo" * 200
SHOWN = {"type": "image_url", "image_url": {"url": IMAGE}}
USAGE = {"input_tokens": 20, "output_tokens": 3, "input_tokens_details": {"cached_tokens": 16}}
SAID = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "A cat."}]}
ANSWER = {"id": "resp_1", "object": "response", "status": "completed", "output": [SAID], "usage": USAGE}
MESSAGE = {"id": "msg_1", "type": "message", "role": "assistant", "content": [], "usage": {"input_tokens": 4}}
TEXT = "Look. " * 300
# About the body that Codex sends.
CODEX = {
    "model": "m",
    "input": [
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": TEXT}]},
        {"type": "custom_tool_call", "call_id": "1", "name": "apply_patch", "input": "*** Begin Patch"},
        {"type": "custom_tool_call_output", "call_id": "1", "output": "Done."},
        {"role": "user", "content": [{"type": "input_image", "image_url": IMAGE}]},
    ],
    "tools": [
        {"type": "namespace", "name": "n", "tools": [{"type": "function", "name": "f", "parameters": {}}]},
        {"type": "web_search"},
        {"type": "custom", "name": "apply_patch"},
    ],
    "tool_choice": "auto",
    "prompt_cache_key": "k",
    "stream": True,
}
EVENTS = (
    (b"response.created", {"type": "response.created", "response": {"id": "resp_1"}}),
    (b"response.output_text.delta", {"type": "response.output_text.delta", "delta": "A cat."}),
    (b"response.completed", {"type": "response.completed", "response": ANSWER}),
)
STREAM = b"".join(b"event: %b\ndata: %b\n\n" % (name, json.dumps(data).encode()) for name, data in EVENTS)


class Speaker(ScriptedReplica):
    """Speaks all dialects. `seen` has the bodies, `cut` ends a stream after that number of bytes."""

    def __init__(self, loop: Loop) -> None:
        self.seen: list[bytes] = []
        self.cut: int | None = None
        super().__init__(loop)

    def routes(self) -> list[web.RouteDef]:
        paths = ("/v1/responses", "/v1/messages", "/v1/chat/completions")
        return [web.post(path, self._answer) for path in paths]

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        self.seen.append(await request.read())
        if request.path == "/v1/chat/completions":
            choice = {"index": 0, "message": {"role": "assistant", "content": "A cat."}, "finish_reason": "stop"}
            return web.json_response({"choices": [choice], "usage": {"prompt_tokens": 20, "completion_tokens": 3}})
        if not json.loads(self.seen[-1]).get("stream"):
            return web.json_response(ANSWER if request.path == "/v1/responses" else MESSAGE)
        out = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await out.prepare(request)
        await out.write(STREAM[: self.cut])
        return out


_SCORES = {"id": "1", "results": [], "data": [{"score": 0.5}], "usage": {"prompt_tokens": 7, "total_tokens": 7}}


class Scorer(ScriptedReplica):
    """Answers the paths that are passed on. `seen` has the bodies."""

    def __init__(self, loop: Loop) -> None:
        self.seen: list[dict[str, Any]] = []
        super().__init__(loop)

    def routes(self) -> list[web.RouteDef]:
        return [web.post(path, self._answer) for path in PASSED]

    async def _answer(self, request: web.Request) -> web.Response:
        self.seen.append(await request.json())
        kind = self.seen[-1].get("encoding_format")
        if kind is None:
            return web.json_response(_SCORES)
        heads = {"metadata": json.dumps(_SCORES)} if kind == "bytes" else {}
        return web.Response(body=b"\xff\x00", content_type="application/octet-stream", headers=heads)


class Native(Speaker):
    """A replica whose paths show that it speaks all dialects, as vLLM's do: another method is refused."""

    def routes(self) -> list[web.RouteDef]:
        paths = ("/v1/responses", "/v1/messages")
        return [*super().routes(), *(web.get(path, self._not_allowed) for path in paths)]

    async def _not_allowed(self, request: web.Request) -> web.Response:
        return web.Response(status=405)


class Streamer(ScriptedReplica):
    """Streams as vLLM does: ids that were not asked for are null, and the last chunk has the fingerprint of its settings. It
    fails at a prompt `bad`, as vLLM does: with an answer, after which it closes the connection. `seen` has the bodies."""

    def __init__(self, loop: Loop) -> None:
        self.seen: list[dict[str, Any]] = []
        super().__init__(loop)

    def routes(self) -> list[web.RouteDef]:
        paths = ("/v1/chat/completions", "/v1/completions", "/invocations")
        return [web.post(path, self._answer) for path in paths]

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.seen.append(body)
        if body.get("prompt") == "bad" and body.get("stream"):
            error = b'data: {"error": {"message": "no", "code": 500}}\n\ndata: [DONE]\n\n'
            return web.Response(body=error, content_type="text/event-stream")
        if body.get("prompt") == "bad":
            transport = request.transport
            assert transport is not None
            asyncio.get_running_loop().call_later(0.01, transport.close)
            return web.json_response({"error": {"message": "no", "code": 500}}, status=500)
        if not body.get("stream"):
            choice = {"index": 0, "text": "x", "finish_reason": "stop"}
            return web.json_response({"choices": [choice], "usage": {"prompt_tokens": 1, "completion_tokens": 1}})
        out = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await out.prepare(request)
        for chunk in self._chunks(body):
            await out.write(b"data: " + json.dumps(chunk, separators=(",", ":")).encode() + b"\n\n")
        await out.write(b"data: [DONE]\n\n")
        return out

    def _chunks(self, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        head, shows = {"id": "c", "object": "chat.completion.chunk"}, body.get("return_token_ids")
        usage = bool(body.get("stream_options", {}).get("include_usage"))
        empty, stamp = {"usage": None} if usage else {}, {"system_fingerprint": "vllm-1"}
        first = {"index": 0, "delta": {"role": "assistant", "content": ""}}
        yield {**head, "choices": [first], "prompt_token_ids": [7, 8] if shows else None, "prompt_text": None, **empty}
        for number in range(body.get("n", 1) * 3):
            choice = {"index": number // 3, "delta": {"content": f"é{number}"}, "logprobs": {"x": 1e-05}}
            if number % 3 == 1:  # its text is not complete yet
                choice |= {"delta": {"content": ""}, "logprobs": None}
            ends = number % 3 == 2
            choice |= {"finish_reason": "length" if ends else None, "token_ids": [number, 9] if shows else None}
            yield {**head, "choices": [choice], **(stamp if ends and not usage else empty)}
        if usage:
            yield {**head, "choices": [], "usage": {"prompt_tokens": 2, "completion_tokens": 6}, **stamp}


@pytest.fixture(scope="module")
def loop() -> Loop:
    return Loop()


@pytest.fixture(scope="module")
def replica(loop: Loop) -> Speaker:
    return Speaker(loop)


@pytest.fixture(scope="module")
def router(replica: Speaker) -> Iterator[RouterThread]:
    process = RouterThread("--replica", replica.url)
    try:
        yield process.wait_for(1)
        assert "Traceback" not in process.text
    finally:
        process.kill()


def post(router: RouterThread, path: str, body: Any) -> http_client.Response:
    return http_client.request(
        "POST", f"{router.url}{path}", headers={"content-type": "application/json"}, content=json.dumps(body).encode()
    )


def test_a_dialect_is_passed_on(router: RouterThread, replica: Speaker) -> None:
    """Tools and items of kinds that only the replica knows: it gets the client's body, the client its events."""
    answer = post(router, "/v1/responses", CODEX)
    assert answer.status_code == 200 and answer.content == STREAM
    assert (
        replica.seen[-1] == json.dumps(CODEX, separators=(",", ":")).encode() or json.loads(replica.seen[-1]) == CODEX
    )
    whole = post(router, "/v1/responses", {**CODEX, "stream": False})
    assert whole.json() == ANSWER
    body = {"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}
    assert post(router, "/v1/messages", body).json() == MESSAGE and json.loads(replica.seen[-1]) == body
    [decision, *_] = http_client.get(f"{router.url}/v1/router/decisions").json()["data"]
    assert decision["dialect"] == "messages"


def test_replicas_that_speak_a_dialect_get_it(loop: Loop) -> None:
    """A replica that speaks a dialect gets also what the router could translate, as it came, and the client its answer. A
    stored response can be continued: that only the router can do."""
    native = Native(loop)
    router = RouterThread("--replica", native.url).wait_for(1)
    try:
        body = {"model": "m", "input": "Look.", "tools": [{"type": "web_search"}], "temprature": 1}
        assert post(router, "/v1/responses", body).json() == ANSWER
        assert json.loads(native.seen[-1]) == body
        streamed = {**body, "stream": True}
        assert post(router, "/v1/responses", streamed).content == STREAM and json.loads(native.seen[-1]) == streamed
        assert http_client.get(f"{router.url}/v1/responses/resp_1").json() == ANSWER
        body = {"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": "Look."}]}
        assert post(router, "/v1/messages", body).json() == MESSAGE and json.loads(native.seen[-1]) == body
        later = post(router, "/v1/responses", {"model": "m", "input": "Again.", "previous_response_id": "resp_1"})
        assert later.status_code == 200
        said = [(one["role"], one["content"]) for one in json.loads(native.seen[-1])["messages"]]
        assert said == [("user", "Look."), ("assistant", "A cat."), ("user", "Again.")]
    finally:
        router.kill()


def test_fields_that_a_router_refuses(loop: Loop, shared: SharedServers) -> None:
    """A router with `--unknown-fields refuse` refuses a field that has no effect in front of Foreword's servers, whatever these
    are told. What another engine may understand is passed on to it."""
    chat = {"messages": [{"role": "user", "content": "Look."}], "max_tokens": 2}
    bodies = {"/v1/chat/completions": chat, "/v1/messages": chat, "/v1/responses": {"input": "Look."}}
    known = {"/v1/messages/count_tokens": chat, "/v1/completions": {"prompt": "x", "max_tokens": 2}}
    known |= {"/v1/cache/retain": {"prompt": "x"}, "/v1/prefixes": {"name": "x", "content": "x"}}
    for url, status, asked in ((shared.open.url, 400, bodies | known), (Native(loop).url, 200, bodies)):
        router = RouterThread("--replica", url, "--unknown-fields", "refuse").wait_for(1)
        try:
            for path, body in asked.items():
                refused = post(router, path, {**body, "temprature": 1})
                assert refused.status_code == status, (path, refused.content)
                assert status == 200 or "temprature" in refused.json()["error"]["message"], path
                assert post(router, path, {**body, "user": "me"}).status_code in (200, 201), path
        finally:
            router.kill()


def test_a_passed_stream_that_breaks_before_its_output(loop: Loop) -> None:
    """Another replica answers instead, and the client does not notice."""
    replicas = [Native(loop), Native(loop)]
    for one in replicas:
        one.cut = STREAM.index(b"event: response.output_text.delta")
    named = [argument for one in replicas for argument in ("--replica", one.url)]
    router = RouterThread(*named, "--policy", "round-robin").wait_for(2)
    try:
        replicas[1].cut = None
        for _ in range(2):
            assert post(router, "/v1/responses", {"model": "m", "input": "x", "stream": True}).content == STREAM
        assert router.metric("foreword:router_retries_total") >= 1
    finally:
        router.kill()


@pytest.mark.parametrize(
    "more", [{}, {"n": 2}, {"stream_options": {"include_usage": True}}, {"return_token_ids": True}, {"stream": 1}]
)
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/invocations"])
def test_streams_of_vllm_are_unchanged(loop: Loop, path: str, more: dict[str, Any]) -> None:
    """The client gets the bytes that vLLM writes for its body, though the router asks for more. Choices are in order each. A
    chat may come to `/invocations`, too."""
    streamer = Streamer(loop)
    router = RouterThread("--replica", streamer.url).wait_for(1)
    try:
        body = {"model": "m", "messages": [{"role": "user", "content": "x"}], "stream": True, **more}
        straight, through = (http_client.post(f"{url}{path}", json=body).content for url in (streamer.url, router.url))
        if "n" in more:
            assert sorted(straight.split(b"\n")) == sorted(through.split(b"\n"))
        else:
            assert straight == through
    finally:
        router.kill()


@pytest.mark.parametrize("path", ["/v1/responses", "/v1/chat/completions"])
def test_tokens_without_text_are_charged(loop: Loop, tmp_path: Path, path: str) -> None:
    """A stream whose tokens make no text is in the ledger, with the tokens that it names."""

    class Mute(Native):
        async def _answer(self, request: web.Request) -> web.StreamResponse:
            usage = {"prompt_tokens": 20, "completion_tokens": 3}
            last = {"choices": [{"index": 0, "delta": {}, "finish_reason": "length"}], "usage": usage}
            chat = b"data: %b\n\ndata: [DONE]\n\n" % json.dumps({"id": "c", **last}).encode()
            first, _, end = EVENTS
            events = b"".join(
                b"event: %b\ndata: %b\n\n" % (name, json.dumps(one).encode()) for name, one in (first, end)
            )
            body = events if request.path == "/v1/responses" else chat
            return web.Response(body=body, content_type="text/event-stream")

    ledger = tmp_path / "usage"
    router = RouterThread("--replica", Mute(loop).url, "--usage-ledger", str(ledger)).wait_for(1)
    try:
        said = {"input": "x", "messages": [{"role": "user", "content": "x"}], "stream_options": {"include_usage": True}}
        assert post(router, path, {"model": "m", "stream": True, **said}).status_code == 200
    finally:
        router.kill()
    [usage] = [json.loads(line)["usage"] for line in ledger.read_text().splitlines()]
    assert (usage["prompt"], usage["output"]) == (20, 3)


def test_a_request_at_which_a_replica_fails(loop: Loop) -> None:
    """A failure that one request causes at a replica counts once: the replica serves others as before, and the client gets its
    error."""
    streamer = Streamer(loop)
    router = RouterThread("--replica", streamer.url).wait_for(1)
    try:
        for _ in range(3):
            failed = http_client.post(f"{router.url}/v1/completions", json={"model": "m", "prompt": "bad"})
            assert failed.status_code == 500, failed.text
            assert failed.json()["error"]["message"] == "no"
            streamed = {"model": "m", "prompt": "bad", "stream": True}
            assert http_client.post(f"{router.url}/v1/completions", json=streamed).status_code == 502
        good = http_client.post(f"{router.url}/v1/completions", json={"model": "m", "prompt": "good"})
        assert good.status_code == 200
        assert router.metric("foreword:router_breaker_opened_total") == 0
    finally:
        router.kill()


def test_a_connection_that_closes_after_an_error(loop: Loop) -> None:
    """A replica closes the connection on which it answered an error just as the next request comes on it: that one is served on
    a new connection, and the replica has not failed."""

    class Closing(Streamer):
        def __init__(self, loop: Loop) -> None:
            self.failed, self.closed = set[asyncio.BaseTransport | None](), 0
            super().__init__(loop)

        async def _answer(self, request: web.Request) -> web.StreamResponse:
            if request.transport in self.failed:
                assert request.transport is not None
                self.closed += 1
                request.transport.close()
            elif (await request.json()).get("prompt") == "bad":
                self.failed.add(request.transport)
                return web.json_response({"error": {"message": "no", "code": 500}}, status=500)
            return await super()._answer(request)

    replica = Closing(loop)
    router = RouterThread("--replica", replica.url).wait_for(1)
    try:
        for _ in range(5):
            for prompt, status in (("bad", 500), ("good", 200)):
                asked = http_client.post(f"{router.url}/v1/completions", json={"model": "m", "prompt": prompt})
                assert asked.status_code == status, asked.text
        assert replica.closed >= 5
        assert router.metric("foreword:router_failures_total") == 0
    finally:
        router.kill()


def test_no_more_than_a_little_is_held_back(loop: Loop) -> None:
    """A replica that sends events without an output for ever fills no memory of the router: the client gets them."""
    client_reads = asyncio.Event()

    class Talker(Native):
        async def _answer(self, request: web.Request) -> web.StreamResponse:
            out = web.StreamResponse(headers={"content-type": "text/event-stream"})
            await out.prepare(request)
            for _ in range(40):
                data = json.dumps({"type": "response.in_progress", "padding": "x" * 10_000}).encode()
                await out.write(b"event: response.in_progress\ndata: %b\n\n" % data)
            await client_reads.wait()
            await out.write(STREAM)
            return out

    router = RouterThread("--replica", Talker(loop).url).wait_for(1)
    try:
        body = {"model": "m", "input": TEXT, "stream": True}
        with httpx.stream("POST", f"{router.url}/v1/responses", json=body, timeout=60) as answer:
            pieces = answer.iter_bytes()
            read = next(pieces)  # without that, a comment after some time
            assert b'"padding"' in read
            loop.loop.call_soon_threadsafe(client_reads.set)
            read += b"".join(pieces)
        assert read.count(b'"padding"') == 40 and read.endswith(STREAM)
    finally:
        router.kill()


@pytest.mark.parametrize(
    ("prompt", "count"), [([True, False], 1), ([5.0, 6], 1), ([[5.0], [6]], 2), (["a", [5.5]], 2), ([None], 1)]
)
def test_odd_prompts(prompt: Any, count: int) -> None:
    """Another server may read numbers in other spellings as token ids. The router counts the prompts by the lists."""
    read = DIALECTS["completions"].read(json.dumps({"prompt": prompt}).encode(), Limits())
    assert read.refusal is not None and len(read.prompts) == count and read.single == (count == 1)
    other = DIALECTS["completions"].read(json.dumps({"prompt": [*prompt, 7]}).encode(), Limits())
    assert other.prompts != read.prompts


@pytest.mark.parametrize("asked", [True, False])
def test_usage_in_every_chunk(loop: Loop, asked: bool) -> None:
    """The router asks for the usage at the end; vLLM sends it in every chunk only to a client that asks for both."""
    replica = Streamer(loop)
    router = RouterThread("--replica", replica.url).wait_for(1)
    options = {"include_usage": asked, "continuous_usage_stats": True}
    try:
        post(router, "/v1/completions", {"model": "m", "prompt": "x", "stream": True, "stream_options": options})
    finally:
        router.kill()
    given = replica.seen[-1]["stream_options"]
    assert given == {"include_usage": True} | ({"continuous_usage_stats": True} if asked else {})


@pytest.mark.parametrize("name", ["temperature", "stop", "tools", "input", "min_p", "x"])
@pytest.mark.parametrize("number", ["1e999", "9" * 400, "-1e999"])
def test_numbers_without_bounds(router: RouterThread, replica: Speaker, name: str, number: str) -> None:
    """A number that does not fit into a float is the replica's to judge, and never an error within the router."""
    said = json.dumps({"role": "user", "content": TEXT})
    body = f'{{"model": "m", "messages": [{said}], "{name}": {number}}}'
    answer = httpx.post(
        f"{router.url}/v1/chat/completions", content=body, headers={"content-type": "application/json"}, timeout=60
    )
    assert answer.status_code == 200, answer.content
    assert replica.seen[-1].decode().count(number) == 1


def test_images_in_a_chat(router: RouterThread, replica: Speaker) -> None:
    """A chat with images reaches the replica unchanged. Images count for placement by their digests."""
    said = {"role": "user", "content": [{"type": "text", "text": TEXT}, SHOWN]}
    body = {"model": "m", "messages": [said], "max_tokens": "16", "modalities": ["text", "image"]}
    assert post(router, "/v1/chat/completions", body).status_code == 200
    assert json.loads(replica.seen[-1]) == body


def test_a_stream_that_breaks(router: RouterThread, replica: Speaker) -> None:
    """A stream that ends too early ends with an error in the client's dialect."""
    replica.cut = len(STREAM) // 2
    try:
        answer = post(router, "/v1/responses", CODEX)
    finally:
        replica.cut = None
    assert answer.status_code == 200 and answer.content.startswith(STREAM[:40])
    last = json.loads(answer.content.rpartition(b"data: ")[2])
    assert last["type"] == "error" or last["type"] == "response.failed"


def test_what_a_router_needs_is_checked(router: RouterThread, replica: Speaker) -> None:
    """Fields that the router acts on are refused if they are wrong, and so are those that only it may set."""
    seen = len(replica.seen)
    for wrong in ({"cache_salt": 5}, {"priority": "high"}, {"model": 7}, {"kv_transfer_params": {"prefill": "x"}}):
        for path, body in (("/v1/responses", CODEX), ("/v1/chat/completions", {"messages": [SHOWN]})):
            answer = post(router, path, {**body, **wrong})
            assert answer.status_code == 400 and answer.json()["error"]["param"] == next(iter(wrong))
    assert len(replica.seen) == seen


def test_threads_are_not_kept(router: RouterThread, replica: Speaker) -> None:
    """A conversation that the client would leave on the server is refused with the code at which it sends all of it: vLLM
    ignores the field, so the model would see the newest message only."""
    seen = len(replica.seen)
    image = {"role": "user", "content": [{"type": "image", "source": {}}]}
    body = {"model": "m", "max_tokens": 9, "messages": [image], "thread": {"type": "create"}}
    answer = post(router, "/v1/messages", body)
    assert answer.status_code == 400 and len(replica.seen) == seen
    assert answer.json()["error"]["details"] == {"error_code": "thread_unsupported_request"}


def test_replicas_that_do_not_speak_it(loop: Loop) -> None:
    """If the replicas do not know the dialect either, the client learns what this server would say."""
    other = ChatReplica(loop)
    router = RouterThread("--replica", other.url).wait_for(1)
    try:
        answer = post(router, "/v1/responses", CODEX)
        assert answer.status_code == 400 and "error" in answer.json()
        assert router.metric("foreword:router_breaker_opened_total") == 0
    finally:
        router.kill()


@pytest.mark.parametrize("path", sorted(PASSED.keys() - {"/v2/embed"}))
def test_paths_that_are_passed_on(loop: Loop, tmp_path: Path, path: str) -> None:
    """vLLM's other paths get the body as it came, whatever is in it, with the tenant's salt and without what only the router
    may set; the client gets the answer as it came, also one of bytes, and its tenant is charged for its tokens, or for the
    length of its body where they are not named."""
    replica, ledger = Scorer(loop), tmp_path / "usage"
    keys = [part for name in ("ann", "bob") for part in ("--api-keys", f"{name}={name}-key")]
    secret = ("--tenant-secret", "a secret of this test", "--replica-key", "x" * 16)
    router = RouterThread("--replica", replica.url, *keys, *secret, "--usage-ledger", str(ledger)).wait_for(1)
    body = {"model": "m", "messages": [["a"]], "input": {"b": [1]}, "query": None, "x": "\xe9", "cache_salt": "mine"}
    try:
        with router.http("ann-key") as ann, router.http("bob-key") as bob:
            assert [one.post(path, json=body).json() for one in (ann, bob)] == [_SCORES] * 2
            first, second = replica.seen
            salts = {one.pop("cache_salt") for one in (first, second)}
            assert len(salts) == 2 and "mine" not in salts
            assert first == second == {name: value for name, value in body.items() if name != "cache_salt"}
            for kind in ("bytes", "bytes_only"):
                answer = ann.post(path, json={"encoding_format": kind, "input": "x" * 400})
                assert (answer.content, answer.headers["content-type"]) == (b"\xff\x00", "application/octet-stream")
            refused = ann.post(path, json={"kv_transfer_params": {"x": 1}})
            assert refused.status_code == 400 and len(replica.seen) == 4
    finally:
        router.kill()
    prompts = [json.loads(line).get("usage", {}).get("prompt", 0) for line in ledger.read_text().splitlines()]
    assert prompts[:3] == [7, 7, 7] and 100 <= prompts[3] < 120 and prompts[4:] == [0]


def test_a_path_without_a_salt(loop: Loop) -> None:
    """vLLM's `/v2/embed` knows no cache salt. It is passed on where there are no tenants, and refused where their prompts would
    share a replica's cache."""
    replica, body = Scorer(loop), {"model": "m", "texts": ["a", "\xe9"], "input_type": "query"}
    for keys, status in (((), 200), (("--api-keys", "ann=ann-key", "--tenant-secret", "a secret of this test"), 400)):
        router = RouterThread("--replica", replica.url, "--replica-key", "x" * 16, *keys).wait_for(1)
        try:
            with router.http("ann-key" if keys else None) as caller:
                answer = caller.post("/v2/embed", json=body)
        finally:
            router.kill()
        assert answer.status_code == status, answer.text
        assert answer.json() == _SCORES if status == 200 else "cache_salt" in answer.text
    assert replica.seen == [body]


def test_what_only_forewords_servers_have(loop: Loop) -> None:
    """In front of vLLM alone, calls for sessions and retentions are answered with an error in OpenAI's form, not with vLLM's
    own."""
    router = RouterThread("--replica", Scorer(loop).url).wait_for(1)
    calls = (
        ("POST", "/v1/sessions", {"action": "open", "session_id": "s"}),
        ("GET", "/v1/sessions", None),
        ("POST", "/v1/cache/retain", {"model": "m", "prompt": "x", "ttl": 60}),
        ("POST", "/v1/cache/release", {"all": True}),
        ("GET", "/v1/cache/retained", None),
    )
    try:
        with router.http() as caller:
            for method, path, body in calls:
                answer = caller.request(method, path, json=body)
                assert answer.status_code == 404 and answer.json()["error"]["message"], (path, answer.text)
                assert answer.headers["x-request-id"]
    finally:
        router.kill()


@pytest.mark.parametrize("dialect", DIALECTS)
def test_odd_bodies(dialect: DialectName) -> None:
    """A fault in one field is left out, also numbers without bounds. What no server can read is refused."""
    said = {"role": "user", "content": [{"type": "text", "text": "x"}, SHOWN]}
    body: dict[str, Any] = {"max_tokens": 9, "prompt": "x", "input": [said], "messages": [said]}
    odd = {"tools": 5, "tool_choice": [], "temperature": "hot", "stop": {}, "stop_sequences": 1, "logit_bias": "x"}
    read = DIALECTS[dialect].read(json.dumps({**body, **odd, "user": "me"}).encode(), Limits())
    assert read.refusal is not None and read.session == ("me" if dialect != "messages" else None)
    shown = "".join(message.content for message in read.messages)
    assert read.prompts == (("x",) if dialect == "completions" else ()) and ("[image_url " in shown) != bool(
        read.prompts
    )
    other = json.dumps({**body, **odd, "user": "me"}).replace("iVBOR", "jWCPS").encode()
    assert (DIALECTS[dialect].read(other, Limits()).messages == read.messages) == (dialect == "completions")
    large = json.dumps({**body, "temperature": "LARGE", "tools": "LARGE", "stop": ["LARGE"]}).encode()
    for number in (b"1e999", b"9" * 5000):
        assert DIALECTS[dialect].read(large.replace(b'"LARGE"', number), Limits()).refusal is not None
        with pytest.raises(BadRequest):
            DIALECTS[dialect].read(b'{"stream": %b}' % number, Limits())
    deep = b'{"max_tokens": 9, "prompt": "x", "input": "x", "messages": ' + b"[" * 900 + b"]" * 900 + b"}"
    for wrong in (b"[]", b"{", b"{}", deep if dialect in ("chat", "messages") else b'{"prompt": 5, "input": 5}'):
        with pytest.raises(BadRequest):
            DIALECTS[dialect].read(wrong, Limits())
