"""Clients that close their side of a connection: one that waits for its answer gets it, one that has gone frees what it had."""

from __future__ import annotations

import http.client
import io
import json
import socket
import threading
from collections.abc import Iterator, Mapping
from contextlib import closing
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import pytest
from router_parts import RouterThread
from shared_server import SharedServer, slow, until, words

SHORT = {"prompt": "once upon a time", "max_tokens": 3, "seed": 5, "ignore_eos": True}


@pytest.fixture(scope="module")
def router(shared: Any) -> Iterator[str]:
    made = RouterThread("--replica", shared.open.url)
    try:
        yield made.wait_for(1).url
    finally:
        made.kill()


@pytest.fixture(params=["server", "router"])
def url(request: pytest.FixtureRequest, server: SharedServer) -> str:
    """A server on asyncio's loop, or a router on uvloop."""
    return server.url if request.param == "server" else str(request.getfixturevalue("router"))


def request(body: Mapping[str, Any], version: str = "1.1", more: str = "") -> bytes:
    data = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/{version}\r\nhost: x\r\ncontent-type: application/json\r\n{more}"
    return f"{head}content-length: {len(data)}\r\n\r\n".encode() + data


def connect(url: str, data: bytes, *, ends: bool) -> socket.socket:
    """A client that has sent this. `ends`: and closed its side."""
    parts = urlsplit(url)
    client = socket.create_connection((str(parts.hostname), parts.port or 80), 60)
    client.sendall(data)
    if ends:
        client.shutdown(socket.SHUT_WR)
    return client


def received(client: socket.socket) -> bytes:
    """All until the server closes the connection."""
    found = b""
    while piece := client.recv(1 << 16):
        found += piece
    return found


class Answered(NamedTuple):
    """An answer as the client of Python's library reads it; `rest` is what came behind it."""

    status: int
    version: int
    body: bytes
    rest: bytes


class _Received:
    def __init__(self, data: bytes) -> None:
        self.file = io.BytesIO(data)

    def makefile(self, mode: str) -> io.BytesIO:
        self.file.close = lambda: None  # type: ignore[method-assign]
        return self.file


def read(data: bytes) -> Answered:
    source = _Received(data)
    answer = http.client.HTTPResponse(source, method="POST")  # type: ignore[arg-type]
    answer.begin()
    body = answer.read()
    return Answered(answer.status, answer.version, body, source.file.read())


def said(answer: Answered) -> tuple[int, int, list[str | None]]:
    """Status, version, and the text of the answer in its pieces."""
    lines = [line.removeprefix(b"data: ") for line in answer.body.splitlines() if line and not line.startswith(b":")]
    chunks = [json.loads(line) for line in lines if line != b"[DONE]"]
    return answer.status, answer.version, ["".join(one["choices"][0]["text"] for one in chunks if one["choices"])]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("version", ["1.0", "1.1"])
def test_a_client_that_only_reads_is_answered(url: str, version: str, stream: bool) -> None:
    """A client that closes its side behind its request gets what another one gets, and the server ends the connection."""
    data = request({**SHORT, "stream": stream}, version, "connection: keep-alive\r\n")
    with closing(connect(url, data, ends=True)) as client:
        answered = read(received(client))
    with closing(
        connect(url, request({**SHORT, "stream": stream}, version, "connection: close\r\n"), ends=False)
    ) as one:
        whole = read(received(one))
    assert said(answered) == said(whole) and not answered.rest
    assert answered.status == 200 and (not stream or answered.body.endswith(b"data: [DONE]\n\n"))


@pytest.mark.parametrize("crossed", [False, pytest.param(True, marks=pytest.mark.extended)])
def test_answers_that_take_long(server: SharedServer, router: str, crossed: bool) -> None:
    """Nor does an answer change that begins seconds later, or pauses, while the server looks whether the client is there."""
    bodies = [{**SHORT, "max_tokens": 4, "stream": stream} for stream in (False, True)]
    urls = (router, server.url) if crossed else (server.url, router)
    asked = [(url, version, body) for url, body in zip(urls, bodies, strict=True) for version in ("1.0", "1.1")]
    answers: dict[int, bytes] = {}

    def ask(number: int) -> None:
        url, version, body = asked[number]
        with closing(connect(url, request(body, version), ends=True)) as client:
            answers[number] = received(client)

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(len(asked))]
    with slow(server, 0.4):
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    texts = {tuple(said(read(answers[number]))[2]) for number in range(len(asked))}
    assert len(texts) == 1 and "" not in texts
    assert all(read(answers[number]).status == 200 for number in range(len(asked)))


def test_several_requests_before_the_end(url: str) -> None:
    """Each of several requests that a client sends at once, before it closes its side, is answered in order."""
    bodies = [{**SHORT, "prompt": words("several", number + 1), "stream": number == 1} for number in range(3)]
    with closing(connect(url, b"".join(map(request, bodies)), ends=True)) as client:
        rest = received(client)
    texts = []
    for body in bodies:
        answered = read(rest)
        rest = answered.rest
        assert answered.status == 200
        texts.append(said(answered)[2])
        with closing(connect(url, request(body, more="connection: close\r\n"), ends=False)) as one:
            assert said(read(received(one)))[2] == texts[-1]
    assert not rest


def test_a_body_that_waits_to_be_asked_for(url: str) -> None:
    """The interim response to `Expect: 100-continue` comes before the answer, also where the body came with the head."""
    data = request({**SHORT, "prompt": "x" * 200_000, "truncate_prompt_tokens": 8}, more="expect: 100-continue\r\n")
    with closing(connect(url, data, ends=True)) as client:
        first, _, rest = received(client).partition(b"\r\n\r\n")
    if first.startswith(b"HTTP/1.1 100"):
        first = rest
    assert first.startswith((b"HTTP/1.1 400", b"HTTP/1.1 200"))


@pytest.mark.parametrize(
    "data", [b"", b"GET /health HT", request(SHORT)[:-5], request(SHORT, more="expect: 100-continue\r\n")[:-5]]
)
def test_what_will_never_be_complete(url: str, data: bytes) -> None:
    """A client that closes its side before its request is complete gets the end of the connection."""
    with closing(connect(url, data, ends=True)) as client:
        assert received(client) in (b"", b"HTTP/1.1 100 Continue\r\n\r\n")


def test_the_end_behind_an_answer(url: str) -> None:
    """A client that closes its side behind its answer ends the connection."""
    with closing(connect(url, b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n", ends=False)) as client:
        assert client.recv(1 << 16).startswith(b"HTTP/1.1 200")
        client.shutdown(socket.SHUT_WR)
        assert client.recv(1) == b""


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("version", ["1.0", "1.1"])
@pytest.mark.parametrize("half", [False, True])
def test_a_client_that_has_gone(url: str, server: SharedServer, version: str, stream: bool, half: bool) -> None:
    """The request of a client that closes its connection ends, also if it had closed its side before; before its answer, and in
    the middle of a stream that pauses."""

    def running() -> int:
        status = server.engine.status()
        return status.running + status.waiting

    until(lambda: running() == 0)
    body = {"prompt": words("gone", 40), "max_tokens": 800, "ignore_eos": True, "stream": stream}
    with slow(server, 0.1):
        with closing(connect(url, request(body, version), ends=half)):
            until(lambda: running() == 1)
        until(lambda: running() == 0)


@pytest.mark.parametrize("more", ["", "connection: keep-alive\r\n", "connection: close\r\n"])
def test_a_stream_in_http_1_0_ends_with_its_connection(url: str, more: str) -> None:
    """In HTTP/1.0 nothing but the end of the connection ends a stream, also where the client would keep the connection."""
    with closing(connect(url, request({**SHORT, "stream": True}, "1.0", more), ends=False)) as client:
        data = received(client)
    head, _, body = data.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.0 200") and body.endswith(b"data: [DONE]\n\n")
    assert (
        b"chunked" not in head.lower() and b"keep-alive" not in head.lower() and b"content-length" not in head.lower()
    )
