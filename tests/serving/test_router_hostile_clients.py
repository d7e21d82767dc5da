"""Clients that read slowly, send slowly, send too much, or ask for what is not theirs."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from urllib.parse import urlsplit

import http_client
import httpx
import pytest
from hostile_replica import FLOOD, TEXT, HostileReplica
from router_parts import Loop, RouterThread
from shared_server import until

BODY = {"prompt": "count", "max_tokens": 8}


@pytest.fixture(scope="module")
def loop() -> Loop:
    return Loop()


@contextmanager
def routed(*replicas: HostileReplica, flags: tuple[str, ...] = ()) -> Iterator[RouterThread]:
    named = [argument for one in replicas for argument in ("--replica", one.url)]
    process = RouterThread(*named, "--policy", "round-robin", *flags)
    try:
        yield process.wait_for(len(replicas))
        assert "Traceback" not in process.text
    finally:
        process.kill()


def connect(router: RouterThread) -> socket.socket:
    """A connection with a small receive buffer."""
    parts = urlsplit(router.url)
    made = socket.socket()
    made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    made.settimeout(60)
    made.connect((parts.hostname, parts.port))
    return made


def send(client: socket.socket, body: dict[str, Any]) -> None:
    data = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: {len(data)}\r\n"
    client.sendall(f"{head}content-type: application/json\r\n\r\n".encode() + data)


def rest(client: socket.socket) -> bytes:
    parts = []
    while piece := client.recv(1 << 20):
        parts.append(piece)
    return b"".join(parts)


def post(router: RouterThread, key: str = "", **more: Any) -> httpx.Response:
    headers = {"authorization": f"Bearer {key}"} if key else {}
    return http_client.post(f"{router.url}/v1/completions", json=BODY | more, headers=headers)


@pytest.mark.slow
def test_slow_readers_are_no_failures_of_replicas(loop: Loop) -> None:
    """A client that pauses for longer than the stall timeout gets its whole stream from the same replica."""
    replica = HostileReplica(loop)
    replica.mode = "flood"
    with routed(replica, flags=("--stall-timeout", "1")) as router, connect(router) as client:
        send(client, BODY | {"stream": True})
        begun = client.recv(1000)
        time.sleep(2.5)
        assert replica.open == 1
        text = begun + rest(client)
        assert text.count(b"x" * 10_000) == FLOOD and b"[DONE]" in text and b'"error"' not in text
        assert len(replica.seen) == 1
        assert router.metric("foreword:router_failures_total") == 0


@pytest.mark.extended
def test_clients_that_read_nothing_are_disconnected(loop: Loop) -> None:
    """A client that reads nothing for the write timeout loses its connection, and the replica its request. That is no
    failure of the replica, and other clients are served meanwhile."""
    replica = HostileReplica(loop)
    replica.mode = "flood"
    with routed(replica, flags=("server.write_timeout=1",)) as router, ExitStack() as stack:
        for _ in range(20):
            send(stack.enter_context(connect(router)), BODY | {"stream": True})
        # Under load the first may be gone before the last comes.
        until(lambda: len(replica.seen) == 20)
        replica.mode = ""
        assert post(router).json()["choices"][0]["text"] == TEXT
        until(lambda: replica.open == 0)
        assert router.metric("foreword:router_failures_total") == 0


def test_half_open_requests(loop: Loop) -> None:
    """Connections with half a head, and requests with half a body, are closed after a time. Others are served."""
    replica = HostileReplica(loop)
    limits = ("server.head_timeout=1", "server.body_timeout=1")
    with routed(replica, flags=limits) as router, ExitStack() as stack:
        heads = [stack.enter_context(connect(router)) for _ in range(200)]
        for one in heads:
            one.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\n")
        body = stack.enter_context(connect(router))
        head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        body.sendall(head + b"content-length: 100000\r\n\r\n{")
        assert post(router).status_code == 200
        assert body.recv(1000).startswith(b"HTTP/1.1 408 ")
        assert all(is_closed(one) for one in heads)
        assert post(router).status_code == 200


def is_closed(client: socket.socket) -> bool:
    try:
        return client.recv(1) == b""
    except ConnectionResetError:
        return True


def test_a_limit_of_connections(loop: Loop) -> None:
    """Idle connections make room for new ones."""
    with routed(HostileReplica(loop), flags=("--max-connections", "10")) as router, ExitStack() as stack:
        idle = [stack.enter_context(connect(router)) for _ in range(30)]
        assert all(post(router).status_code == 200 for _ in range(3))
        assert all(is_closed(one) for one in idle[:15])


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b'{"messages": [{"role": "user", "content": "a"}], "prompt": "' + b"x" * (2 << 20) + b'"}', 413),
        (b'{"prompt": [' + b",".join([b"1"] * 400_000) + b"]}", 400),
        (b'{"messages": [' + b",".join([b'{"role": "user", "content": "a"}'] * 25_000) + b"]}", 400),
        (b'{"prompt": ' + b"[" * 60_000, 400),
        (b'{"prompt": "\xff\xfe"}', 400),
        (b"{" + b",".join(b'"k%d": {}' % number for number in range(80_000)) + b"}", 400),
    ],
)
def test_hostile_bodies(router: RouterThread, replicas: list[HostileReplica], body: bytes, status: int) -> None:
    """Bodies that no prompt needs are refused by the router, and no replica sees them."""
    seen = sum(len(one.seen) for one in replicas)
    for path in ("/v1/completions", "/v1/chat/completions"):
        answer = http_client.post(f"{router.url}{path}", content=body, headers={"content-type": "application/json"})
        assert answer.status_code == status and answer.json()["error"]["message"]
    assert sum(len(one.seen) for one in replicas) == seen and post(router).status_code == 200


@pytest.fixture(scope="module")
def replicas(loop: Loop) -> list[HostileReplica]:
    return [HostileReplica(loop) for _ in range(2)]


@pytest.fixture(scope="module")
def router(replicas: list[HostileReplica]) -> Iterator[RouterThread]:
    with routed(*replicas) as process:
        yield process


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/v1/load_lora_adapter"),
        ("POST", "/v1/completions/../load_lora_adapter"),
        ("POST", "/v1/%6coad_lora_adapter"),
        ("POST", "//v1/completions"),
        ("POST", "/v1/drain"),
        ("POST", "/v1/migrate"),
        ("GET", "/v1/requests/mine/stream"),
        ("GET", "/v1/instance"),
        ("POST", "/v1/audio/speech"),
        ("POST", "/sleep"),
        ("POST", "/reset_prefix_cache"),
        ("GET", "/kv_event_sources"),
    ],
)
def test_paths_that_are_not_in_the_table(
    router: RouterThread, replicas: list[HostileReplica], method: str, path: str
) -> None:
    """A path that is not in the router's table is a 404, and no replica sees it."""
    parts = urlsplit(router.url)
    with socket.create_connection((parts.hostname, parts.port or 80), 60) as client:
        head = f"{method} {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-type: application/json\r\n"
        client.sendall(f"{head}content-length: 2\r\n\r\n{{}}".encode())
        assert rest(client).startswith(b"HTTP/1.1 404 ")
    probed = {"/ready", "/metrics", "/kv_event_sources", "/v1/responses", "/v1/messages"}
    assert not any(set(one.paths) - probed for one in replicas)


def test_priorities_are_limited(loop: Loop) -> None:
    """A tenant gets no more urgent priority than it may ask for; one below it is its own choice."""
    replica = HostileReplica(loop)
    keys = ("--api-keys", "a=alice", "--api-keys", "b=bob", "--api-keys", "c=carol", "--replica-key", "r")
    with routed(replica, flags=(*keys, "--tenant-priority", "b=-5", "--tenant-priority", "c=3")) as router:
        for key, wanted, got in (("alice", -7, 0), ("alice", 4, 4), ("bob", -7, -5), ("bob", -2, -2), ("carol", 1, 3)):
            assert post(router, key, priority=wanted).status_code == 200
            assert replica.seen[-1].get("priority", 0) == got
        assert post(router, "carol").status_code == 200 and replica.seen[-1]["priority"] == 3
        assert post(router, "alice").status_code == 200 and "priority" not in replica.seen[-1]
        assert post(router, "alice", priority="high").status_code == 400


def test_quotas(loop: Loop) -> None:
    """A tenant's quota of requests, of tokens and of requests at a time is its own; an error says when to retry."""
    replica = HostileReplica(loop)
    keys = ("--api-keys", "a=alice", "--api-keys", "b=bob", "--api-keys", "c=carol", "--replica-key", "r")
    quotas = ("--quota", "a requests=2", "--quota", "b tokens=10", "--quota", "c concurrent=1")
    with routed(replica, flags=(*keys, *quotas)) as router:
        assert [post(router, "alice").status_code for _ in range(3)] == [200, 200, 429]
        # Each has 8 tokens.
        assert [post(router, "bob", stream=True).status_code for _ in range(3)] == [200, 200, 429]
        replica.mode = "hang"
        with connect(router) as client:
            head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer carol\r\ncontent-length: 15\r\n"
            client.sendall(head + b'content-type: application/json\r\n\r\n{"prompt": "x"}')
            until(lambda: replica.open == 1)
            refused = post(router, "carol")
            assert refused.status_code == 429 and int(refused.headers["retry-after"]) >= 1
            assert refused.json()["error"]["code"] == "rate_limit_exceeded"
        replica.mode = ""
        until(lambda: post(router, "carol").status_code == 200)


def test_who_may_change_the_router(loop: Loop) -> None:
    """Without any key, programs on this machine may drain replicas and read decisions; clients behind a proxy and web
    pages may not. With API keys they need the admin key."""
    replica = HostileReplica(loop)
    with routed(replica) as router:
        drain = f"{router.url}/v1/router/drain"
        for headers in ({"x-forwarded-for": "1.2.3.4"}, {"origin": "http://evil"}):
            assert http_client.post(drain, json={"replica": replica.url}, headers=headers).status_code == 403
            for method, path in (("DELETE", "/v1/cache"), ("POST", "/v1/cache/pin"), ("DELETE", "/v1/responses/x")):
                found = http_client.request(method, f"{router.url}{path}", json={"prompt": "x"}, headers=headers)
                assert found.status_code == 403
        text = {"content-type": "text/plain"}
        assert http_client.post(drain, content=b'{"replica": "x"}', headers=text).status_code == 415
        assert http_client.get(f"{router.url}/v1/router/decisions").status_code == 200
        assert http_client.post(drain, json={"replica": replica.url}).status_code == 200
    keys = ("--api-keys", "a=alice", "--replica-key", "r")
    with routed(replica, flags=(*keys, "--admin-key", "boss")) as router:
        for key, status in (("alice", 403), ("r", 401), ("boss", 200)):
            headers = {"authorization": f"Bearer {key}"}
            found = http_client.get(f"{router.url}/v1/router/decisions", headers=headers)
            assert found.status_code == status
    with routed(replica, flags=keys) as router:
        for path in ("replicas", "decisions", "state"):
            assert http_client.get(f"{router.url}/v1/router/{path}").status_code == 403


@pytest.mark.slow
def test_a_request_that_silences_replicas(loop: Loop) -> None:
    """A request on which two replicas hang is not sent to a third one, nor again when the client retries it."""
    replicas = [HostileReplica(loop) for _ in range(3)]
    with routed(*replicas, flags=("--stall-timeout", "1")) as router:
        for one in replicas:
            one.mode = "hang"
        assert post(router, prompt="poison").status_code in (502, 503)
        asked = [sum(body["prompt"] == "poison" for body in one.seen) for one in replicas]
        assert sorted(asked) == [0, 1, 1]
        again = post(router, prompt="poison")
        assert again.status_code == 503 and again.json()["error"]["code"] == "suspicious_request"
        assert "retry-after" not in again.headers
        for one in replicas:
            one.mode = ""
        assert post(router, prompt="harmless").status_code == 200
