"""Comments of the router while a client waits for events."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import http_client
import httpx
import pytest
from chat_replica import TEXT, ChatReplica
from router_parts import Loop, RouterThread
from shared_server import until

ASKED = [{"role": "user", "content": "The weather in Rome?"}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": ASKED},
    "/v1/messages": {"messages": ASKED, "max_tokens": 9},
    "/v1/responses": {"input": "The weather in Rome?"},
}


@pytest.fixture(scope="module")
def replica() -> ChatReplica:
    return ChatReplica(Loop())


@pytest.fixture(scope="module")
def router(replica: ChatReplica) -> Iterator[RouterThread]:
    flags = ("--max-waiting", "1", "server.stream_keep_alive=0.05", "--policy", "round-robin")
    started = RouterThread("--replica", replica.url, *flags)
    try:
        yield started.wait_for(1)
    finally:
        started.kill()


@contextmanager
def held(replica: ChatReplica) -> Iterator[None]:
    """The replica is silent until the end of the block at the latest."""
    replica.hold()
    try:
        yield
    finally:
        replica.release()


@contextmanager
def waiting(router: RouterThread, path: str, **more: Any) -> Iterator[Iterator[str]]:
    """The lines of a stream that has begun with comments."""
    body = {"model": "m", "stream": True, **BODIES[path], **more}
    with http_client.stream("POST", router.url + path, json=body) as stream:
        assert stream.status_code == 200 and stream.headers["content-type"].startswith("text/event-stream")
        lines = (line for line in stream.iter_lines() if line)
        assert [next(lines) for _ in range(3)] == [": keep-alive"] * 3
        yield lines


def rest(lines: Iterator[str]) -> list[str]:
    return [line for line in lines if not line.startswith(":")]


@pytest.mark.parametrize("path", BODIES)
def test_while_a_replica_is_silent(router: RouterThread, replica: ChatReplica, path: str) -> None:
    """Comments are sent before the first event, and the whole response follows in the client's dialect."""
    with held(replica), waiting(router, path) as lines:
        replica.release()
        found = rest(lines)
    if path == "/v1/chat/completions":
        chunks = [json.loads(line.removeprefix("data: ")) for line in found[:-1]]
        text = "".join(choice["delta"].get("content") or "" for chunk in chunks for choice in chunk["choices"])
        assert text == TEXT and found[-1] == "data: [DONE]"
    else:
        first, last = ("message_start", "message_stop")
        if path == "/v1/responses":
            first, last = ("response.created", "response.completed")
        names = [line for line in found if line.startswith("event: ")]
        assert (names[0], names[-1]) == (f"event: {first}", f"event: {last}")
        assert names.count(names[0]) == 1 and "sunny" in "".join(found)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses"])
def test_an_error_after_comments(router: RouterThread, replica: ChatReplica, path: str) -> None:
    """The replica's error is an event of the client's dialect once the stream has begun."""
    with held(replica), waiting(router, path, temperature=2) as lines:
        replica.release()
        found = rest(lines)
    assert any("temperature is too high" in line for line in found) and "[DONE]" not in found[-1]
    assert router.metric("foreword:router_breaker_opened_total") == 0


def test_while_a_request_is_queued(router: RouterThread, replica: ChatReplica) -> None:
    """Comments are sent to a client whose request waits in the router's queue."""
    path = "/v1/chat/completions"
    with held(replica), waiting(router, path) as first:
        seen = len(replica.seen)
        with waiting(router, path) as second:
            until(lambda: router.metric("foreword:router_queue_length") == 1)
            assert len(replica.seen) == seen
            replica.release()
            assert rest(first)[-1] == rest(second)[-1] == "data: [DONE]"


def test_no_comments_without_a_stream(router: RouterThread, replica: ChatReplica) -> None:
    """A whole response has its own status, however long it takes."""
    with held(replica):
        body = {"model": "m", "messages": ASKED, "temperature": 2}
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(f"{router.url}/v1/chat/completions", json=body, timeout=0.5)
    assert http_client.post(f"{router.url}/v1/chat/completions", json=body).status_code == 400
