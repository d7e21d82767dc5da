"""Forms of HTTP/1.1 in which a replica may answer a router, rare ones and wrong ones. A client gets the whole answer in both,
from another replica where it must, and never a part of another request's."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import aiohttp
import http_client
import pytest
from hostile_replica import TEXT, HostileReplica
from raw_replica import BODY, CHUNKED, CHUNKS, EVENTS, HEAD, LAST_CHUNK, RawReplica, chunk, events
from router_parts import Loop, RouterThread
from shared_server import until

# No circuit opens, so that every kind of answer is given.
FLAGS = ["--policy", "round-robin", "--stall-timeout", "3", "--failures", "1000", "--warm-seconds", "0"]
_OTHER = b"".join(events(["another", " request's", " answer"])) + b"data: [DONE]\n\n"
SMUGGLED = HEAD + b"content-length: %d\r\n\r\n" % len(_OTHER) + _OTHER

RIGHT = {
    "chunks": [CHUNKED + CHUNKS + LAST_CHUNK],
    "chunks one by one": [CHUNKED, *map(chunk, EVENTS), LAST_CHUNK],
    "byte by byte": [bytes([one]) for one in CHUNKED + CHUNKS + LAST_CHUNK],
    "chunks of a byte": [CHUNKED + b"".join(chunk(bytes([one])) for one in BODY) + LAST_CHUNK],
    "one chunk": [CHUNKED, chunk(BODY), LAST_CHUNK],
    "chunks with extensions": [CHUNKED, b"%x;name=value;x\r\n%b\r\n" % (len(BODY), BODY), b"0;last\r\n\r\n"],
    "sizes in capitals with zeros": [CHUNKED, b"000%X\r\n%b\r\n" % (len(BODY), BODY), b"000\r\n\r\n"],
    "trailers": [CHUNKED, CHUNKS, b"0\r\nx-sum: 1\r\nx-more: 7\r\n\r\n"],
    "a length": [HEAD + b"content-length: %d\r\n\r\n" % len(BODY), BODY[:100], BODY[100:]],
    "until it closes": [HEAD + b"connection: close\r\n\r\n", BODY, b""],
    "HTTP/1.0": [b"HTTP/1.0 200 OK\r\ncontent-type: text/event-stream\r\n\r\n", BODY, b""],
    "interim answers": [b"HTTP/1.1 103 Early Hints\r\nlink: x\r\n\r\nHTTP/1.1 102 P\r\n\r\n" + CHUNKED, CHUNKS, LAST_CHUNK],
    "other capitals": [CHUNKED.replace(b"content-t", b"CONTENT-T").replace(b"chunked", b"Chunked"), CHUNKS, LAST_CHUNK],
    "closed behind its end": [CHUNKED, CHUNKS, LAST_CHUNK, b""],
    "closed before its last chunk": [CHUNKED, CHUNKS, b""],
}  # fmt: skip
PART = b"".join(map(chunk, EVENTS[:3]))
WRONG = {
    "no HTTP": [b"\x16\x03\x01\x02\x00\x01 what?\r\n\r\n", b""],
    "a size that is no number": [CHUNKED, PART, b"zz\r\nabc\r\n"],
    "a negative size": [CHUNKED, PART, b"-5\r\nabcde\r\n"],
    "a size without digits": [CHUNKED, PART, b"\r\n\r\n"],
    "a size beyond 64 bits": [CHUNKED, PART, b"1" + b"0" * 16 + b"\r\nabc"],
    "a size without end": [CHUNKED, PART, b"0" * 100_000, b""],
    "a chunk longer than its size": [CHUNKED, PART, b"%x\r\n%b\r\n" % (len(EVENTS[3]) - 2, EVENTS[3])],
    "cut in a chunk": [CHUNKED, PART, chunk(EVENTS[3])[:40], b""],
    "cut between chunks": [CHUNKED, PART, b""],
    "shorter than its length": [HEAD + b"content-length: %d\r\n\r\n" % len(BODY), b"".join(EVENTS[:3]), b""],
    "both lengths": [HEAD + b"content-length: 5\r\ntransfer-encoding: chunked\r\n\r\n", CHUNKS, LAST_CHUNK, b""],
    "two lengths": [HEAD + b"content-length: 5\r\ncontent-length: 6\r\n\r\n", BODY, b""],
    "a length that is no number": [HEAD + b"content-length: many\r\n\r\n", BODY, b""],
    "a head without end": [HEAD + b"x-long: " + b"x" * (1 << 20), b""],
    "a thousand fields": [HEAD + b"".join(b"x-%d: 1\r\n" % number for number in range(1000)) + b"\r\n", b""],
    "a field without a name": [HEAD + b": nothing\r\n\r\n", b""],
    "no body": [b"HTTP/1.1 204 No Content\r\n\r\n"],
    "an empty body": [HEAD + b"content-length: 0\r\n\r\n"],
    "another protocol": [b"HTTP/1.1 101 Switching Protocols\r\nupgrade: x\r\nconnection: upgrade\r\n\r\n", BODY, b""],
    "nothing": [b""],
}


@pytest.fixture(scope="module")
def loop() -> Loop:
    return Loop()


@pytest.fixture(scope="module")
def raw(loop: Loop) -> RawReplica:
    return RawReplica(loop)


@pytest.fixture(scope="module")
def router(loop: Loop, raw: RawReplica) -> Iterator[RouterThread]:
    """In front of one replica whose bytes a test chooses, and a good one of the same weights."""
    process = RouterThread("--replica", raw.url, "--replica", HostileReplica(loop).url, *FLAGS)
    try:
        yield process.wait_for(2)
    finally:
        process.kill()


def ask(router: RouterThread) -> str:
    """The text of a whole stream."""
    answer = http_client.post(f"{router.url}/v1/completions", json={"prompt": "count", "max_tokens": 8, "stream": True})
    assert answer.status_code == 200, answer.text
    lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if line]
    assert lines[-1] == "[DONE]", lines
    return "".join(choice["text"] for line in lines[:-1] for choice in json.loads(line)["choices"])


def ask_all(router: RouterThread, raw: RawReplica, times: int) -> None:
    """Ask until the replica was asked so often; each answer is whole and right."""
    until_asked = len(raw.asked) + times
    for _ in range(20 * times):
        assert ask(router) == TEXT
        if len(raw.asked) >= until_asked:
            return
    raise AssertionError("the replica was not asked")


@pytest.mark.parametrize("form", RIGHT)
def test_rare_forms_that_are_right(router: RouterThread, raw: RawReplica, form: str) -> None:
    """However a right answer is written, and wherever it is cut, the client gets it, and no other replica is asked for it."""
    raw.answer = RIGHT[form]
    continued = router.metric("foreword:router_continuations_total")
    ask_all(router, raw, 3)
    assert router.metric("foreword:router_continuations_total") == continued


@pytest.mark.parametrize("form", WRONG)
def test_wrong_forms(router: RouterThread, raw: RawReplica, form: str) -> None:
    """An answer that is no HTTP, or that breaks, reaches no client: another replica answers, or continues what was right. The
    connection is not used again."""
    raw.answer = WRONG[form]
    connections = raw.connections
    ask_all(router, raw, 3)
    assert raw.connections >= connections + 3 or form in ("no body", "an empty body", "another protocol")
    assert "Traceback" not in router.text


@pytest.mark.parametrize("end", ["with it", "later"])
@pytest.mark.parametrize("body", ["chunks", "a length"])
def test_what_follows_an_answer_is_no_answer(router: RouterThread, raw: RawReplica, body: str, end: str) -> None:
    """Bytes behind the end of an answer, another whole answer among them, are not taken for that of the next request: the
    connection is closed."""
    whole = b"".join(RIGHT[body])
    raw.answer = [whole + SMUGGLED] if end == "with it" else [whole, SMUGGLED]
    ask_all(router, raw, 5)
    assert "Traceback" not in router.text


def test_connections_are_kept(router: RouterThread, raw: RawReplica) -> None:
    """Requests one after the other, whose answers end, share a connection."""
    raw.answer = RIGHT["chunks one by one"]
    ask_all(router, raw, 1)
    connections = raw.connections
    ask_all(router, raw, 4)
    assert raw.connections == connections


def test_the_replica_wakes_up_again(router: RouterThread, raw: RawReplica) -> None:
    """After all that, a right answer of the replica is passed on."""
    raw.answer = RIGHT["chunks"]
    ask_all(router, raw, 1)
    until(lambda: router.metric("foreword:router_replica_up", replica=raw.url) == 1)


def test_an_answer_before_the_request_is_none(
    router: RouterThread, raw: RawReplica, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bytes of a replica that have come before it was asked are not taken for the answer to the first request of their
    connection: another replica answers, and the failure counts."""
    connect = aiohttp.TCPConnector._create_connection

    async def greeted(connector: Any, asked: Any, *more: Any, **named: Any) -> Any:
        connection = await connect(connector, asked, *more, **named)
        while str(asked.url).startswith(raw.url) and not connection._tail and connection.is_connected():
            await asyncio.sleep(0)
        return connection

    def failures() -> float:
        return router.metric("foreword:router_failures_total", replica=raw.url)

    raw.answer = RIGHT["closed behind its end"]  # so no connection is kept
    ask_all(router, raw, 1)
    raw.greeting = SMUGGLED
    monkeypatch.setattr(aiohttp.TCPConnector, "_create_connection", greeted)
    failed, asked = failures(), len(raw.asked)
    until(lambda: ask(router) == TEXT and failures() > failed)
    assert len(raw.asked) == asked
    raw.greeting = b""
    assert "Traceback" not in router.text
