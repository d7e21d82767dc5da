"""Replicas whose HTTP is right and unusual, or wrong in a place that does not matter: clients get what they say."""

from __future__ import annotations

import asyncio
import gzip
import json
import re
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import http_client
import pytest
from router_parts import Loop, RouterThread
from shared_server import until

from foreword.router.attempt import retry_after

_TOO_LONG: dict[str, dict[str, Any]] = {
    "vLLM": {"message": "too long", "type": "BadRequestError", "param": "input_tokens", "code": 400},
    "OpenAI": {"message": "too long", "type": "invalid_request_error", "code": "context_length_exceeded"},
}
_USAGE = {"prompt_tokens": 1, "completion_tokens": 2, "total_tokens": 3}


def whole(text: str) -> bytes:
    choice = {"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": "stop"}
    return json.dumps({"id": "c", "choices": [choice], "usage": _USAGE}).encode()


def stream(before: bytes = b"") -> bytes:
    """A stream of two words, with these lines before each event's data."""

    def chunk(text: str, reason: str | None = None) -> str:
        choice = {"index": 0, "delta": {"content": text}, "finish_reason": reason}
        return json.dumps({"id": "c", "object": "chat.completion.chunk", "choices": [choice]})

    parts = (chunk("one "), chunk("two", "stop"), "[DONE]")
    return b"".join(before + b"data: " + part.encode() + b"\n\n" for part in parts)


def http(body: bytes, kind: str = "application/json", status: str = "200 OK", head: bytes = b"") -> bytes:
    start = f"HTTP/1.1 {status}\r\ncontent-type: {kind}\r\ncontent-length: {len(body)}\r\n".encode()
    return start + head + b"\r\n" + body


class RawReplica:
    """Answers with bytes. `answer`: to chats and tokenizations; empty bytes close the connection. `asked`: their number."""

    def __init__(
        self, loop: Loop, length: int = 4096, answer: Callable[[int], bytes] = lambda _: http(whole("good"))
    ) -> None:
        self.answer, self.length, self.asked = answer, length, 0
        server = loop.call(lambda: asyncio.start_server(self._serve, "127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await self._answer(reader):
                writer.write(data)
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    async def _answer(self, reader: asyncio.StreamReader) -> bytes:
        head = await reader.readuntil(b"\r\n\r\n")
        length = re.search(rb"content-length: (\d+)", head, re.IGNORECASE)
        await reader.readexactly(int(length[1]) if length else 0)
        path = head.split()[1]
        if path == b"/v1/models":
            card = {"id": "m", "object": "model", "owned_by": "vllm", "max_model_len": self.length}
            return http(json.dumps({"object": "list", "data": [card]}).encode())
        if path == b"/v1/messages" and b"GET" in head:
            return http(b"{}", status="405 Method Not Allowed")
        if path in (b"/v1/chat/completions", b"/v1/messages", b"/tokenize") and b"POST" in head:
            self.asked += 1
            return self.answer(self.asked)
        return http(b"{}", status="200 OK" if path == b"/health" else "404 Not Found")


@pytest.fixture(scope="module")
def loop() -> Loop:
    return Loop()


@pytest.fixture(scope="module")
def replica(loop: Loop) -> RawReplica:
    return RawReplica(loop)


@pytest.fixture(scope="module")
def router(replica: RawReplica) -> Iterator[RouterThread]:
    started = RouterThread("--replica", replica.url).wait_for(1)
    yield started
    assert "Traceback" not in started.text
    started.kill()


def ask(router: RouterThread, **more: Any) -> Any:
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}], **more}
    return http_client.post(f"{router.url}/v1/chat/completions", json=body)


EVENTS = "text/event-stream"
STREAMS = {
    "events with names": http(stream(b"event: message\n"), EVENTS),
    "compressed": http(gzip.compress(stream()), EVENTS, head=b"content-encoding: gzip\r\n"),
    "deflated": http(zlib.compress(stream()), EVENTS, head=b"content-encoding: deflate\r\n"),
    "lines that end with carriage returns": http(stream(b"event: x\n").replace(b"\n", b"\r"), EVENTS),
    "lines that end with both": http(stream(b"event: x\n").replace(b"\n", b"\r\n"), EVENTS),
    "a control character": http(stream(), EVENTS, head=b"x-odd: a\x01b\r\nx-even: \xc3\xa9\r\n"),
}


@pytest.mark.parametrize("name", STREAMS)
def test_streams(router: RouterThread, replica: RawReplica, name: str) -> None:
    """Each word comes once, and the stream ends as it should."""
    replica.answer = lambda _: STREAMS[name]
    answer = ask(router, stream=True)
    assert re.findall('"content": ?"([^"]*)"', answer.text) == ["one ", "two"] and "[DONE]" in answer.text
    assert "content-encoding" not in answer.headers and "x-odd" not in answer.headers
    assert ("x-even" in answer.headers) == (name == "a control character")


@pytest.mark.parametrize(
    "data",
    [
        http(gzip.compress(whole("one two")), head=b"content-encoding: gzip\r\n"),
        http(whole("one two"), head=b"x-odd: a\x01b\x7f\r\n"),
    ],
    ids=["compressed", "a control character"],
)
def test_whole_answers(router: RouterThread, replica: RawReplica, data: bytes) -> None:
    """Whole answers of odd replicas arrive, without what the client was not promised."""
    replica.answer = lambda _: data
    answer = ask(router)
    assert answer.json()["choices"][0]["message"]["content"] == "one two"
    assert "content-encoding" not in answer.headers and "x-odd" not in answer.headers


@pytest.mark.parametrize("body", ['{"error": "why"}', '{"object": "error", "message": "why"}', '{"detail": "why"}'])
def test_errors_of_other_shapes(router: RouterThread, replica: RawReplica, body: str) -> None:
    """An error in another shape than OpenAI's comes in OpenAI's, with its message, compressed or not."""
    head = b"content-encoding: gzip\r\n"
    for data in (http(body.encode(), status="400 No"), http(gzip.compress(body.encode()), status="400 No", head=head)):
        replica.answer = lambda _, data=data: data  # type: ignore[misc]
        answer = ask(router)
        assert answer.status_code == 400 and "content-encoding" not in answer.headers
        error = answer.json()["error"]
        assert (error["message"], error["type"]) == ("why", "invalid_request_error")


def test_a_connection_that_closes_instead_of_tokenizing(router: RouterThread, replica: RawReplica) -> None:
    """A request that changes nothing is sent again if the only replica has closed its connection."""
    replica.asked, replica.answer = 0, lambda number: http(b'{"count": 1, "tokens": [1]}') if number > 1 else b""
    answer = http_client.post(f"{router.url}/tokenize", json={"model": "m", "prompt": "hi"})
    assert (answer.status_code, answer.json()["tokens"], replica.asked) == (200, [1], 2)


@pytest.mark.parametrize("error", _TOO_LONG.values(), ids=_TOO_LONG)
def test_a_prompt_that_is_too_long_for_some(loop: Loop, error: dict[str, Any]) -> None:
    """A prompt that one replica refuses as too long is sent to the one that takes the longest prompts, and to no other. No
    replica is blamed, and a refusal of the longest one is believed."""
    refusal = http(json.dumps({"error": error}).encode(), status="400 Bad Request")
    short = [RawReplica(loop, length, lambda _: refusal) for length in (1000, 2000, 3000)]
    longest = RawReplica(loop, 4000)
    named = [part for one in (*short, longest) for part in ("--replica", one.url)]
    router = RouterThread(*named, "--policy", "round-robin").wait_for(4)
    try:
        for _ in range(8):
            answer = ask(router)
            assert answer.json()["choices"][0]["message"]["content"] == "good", answer.text
        assert longest.asked == 8 >= sum(one.asked for one in short) > 0
        assert router.metric("foreword:router_breaker_opened_total") == 0
        longest.answer = lambda _: refusal
        assert ask(router).json()["error"]["message"] == "too long"
    finally:
        router.kill()


def _named(kind: str, **more: Any) -> bytes:
    return f"event: {kind}\ndata: {json.dumps({'type': kind, **more})}\n\n".encode()


def _choice(number: int, text: str) -> bytes:
    choice = {"index": number, "delta": {"role": "assistant", "content": text}, "finish_reason": None}
    return f"data: {json.dumps({'id': 'c', 'choices': [choice]})}\n\n".encode()


_BEGUN = {
    "/v1/chat/completions": [_choice(0, ""), _choice(1, ""), *(_choice(number % 2, "a ") for number in range(5))],
    "/v1/messages": [
        _named("message_start", message={"usage": {"input_tokens": 40, "output_tokens": 0}}),
        *(_named("content_block_delta", index=0, delta={"type": "text_delta", "text": "a "}) for _ in range(5)),
    ],
}


@pytest.mark.parametrize("path", _BEGUN)
def test_a_client_that_leaves(loop: Loop, tmp_path: Path, path: str) -> None:
    """Tokens that a client has seen of an answer count when it leaves, also where the router does not know them: of several
    choices, and of a format that it passes on."""
    whole, ledger = b"".join(_BEGUN[path]), tmp_path / "usage.jsonl"
    replica = RawReplica(loop, answer=lambda _: http(whole + b" " * 999, EVENTS)[:-999])
    router = RouterThread("--replica", replica.url, "--usage-ledger", str(ledger)).wait_for(1)
    try:
        body = {"model": "m", "messages": [{"role": "user", "content": "hi " * 40}], "max_tokens": 9, "stream": True}
        body |= {"n": 2} if "chat" in path else {}
        with http_client.stream("POST", f"{router.url}{path}", json=body) as answer:
            seen = b""
            for piece in answer.iter_raw():
                seen += piece
                if seen.count(b"a ") == 5:
                    break
        until(lambda: ledger.read_bytes().endswith(b"\n"))
        line = json.loads(ledger.read_text())
        assert line["status"] == 499 and line["usage"]["output"] == 5 and line["usage"]["prompt"] >= 40, line
    finally:
        router.kill()


@pytest.mark.parametrize(
    "more", [{"model": ""}, {"stream_options": {}}, {"stream": True, "stream_options": {"include_usage": "yes"}}]
)
def test_what_vllm_reads_laxly(router: RouterThread, replica: RawReplica, more: dict[str, Any]) -> None:
    """An empty name of a model is none, and options of streams may be empty, or texts that say yes or no."""
    replica.answer = lambda _: http(stream(), EVENTS) if "stream" in more else http(whole("fine"))
    assert ask(router, **more).status_code == 200


@pytest.mark.parametrize(("flags", "status"), [((), 200), (("--max-body", "2MiB"), 413)], ids=["default", "limited"])
def test_a_photo(replica: RawReplica, flags: tuple[str, ...], status: int) -> None:
    """In front of vLLM a picture may be larger than any text of the model's length, unless the operator says otherwise."""
    replica.answer = lambda _: http(whole("nice"))
    router = RouterThread("--replica", replica.url, *flags).wait_for(1)
    try:
        url = "data:image/png;base64," + "A" * (3 << 20)
        seen = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}]
        assert ask(router, messages=seen).status_code == status
    finally:
        router.kill()


@pytest.mark.parametrize("given", ["nan", "-1", "0", "inf", "1e999", "soon", "Wed, 21 Oct 2026 07:28:00 GMT", ""])
def test_pauses_of_overloaded_replicas(given: str) -> None:
    """Whatever a replica says, it gets a pause, and not a long one."""
    answer: Any = SimpleNamespace(headers={"retry-after": given})
    assert 0.1 <= retry_after(answer) <= 5
