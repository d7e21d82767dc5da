"""Slow, silent and numerous clients against a real server with short time limits."""

from __future__ import annotations

import socket
import time
from contextlib import closing, suppress
from urllib.parse import urlsplit

import http_client
import pytest
from shared_server import SharedServers, until

HEAD = (
    b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\nauthorization: Bearer dave-key\r\n"
)
KEY = {"authorization": "Bearer dave-key"}


@pytest.fixture
def url(shared: SharedServers) -> str:
    return shared.limited.url


def connect(url: str, data: bytes = b"") -> socket.socket:
    parts = urlsplit(url)
    client = socket.create_connection((str(parts.hostname), parts.port or 80), 60)
    client.sendall(data)
    return client


def is_closed(client: socket.socket) -> bool:
    """Whether the server has ended the connection; what it sent before is dropped."""
    try:
        while client.recv(1 << 16, socket.MSG_DONTWAIT):
            pass
    except BlockingIOError:
        return False
    except ConnectionError:
        pass
    return True


@pytest.mark.parametrize("data", [b"", b"GET /health HTT", HEAD, HEAD + b'content-length: 50\r\n\r\n{"prompt"'])
def test_incomplete_requests_are_ended(url: str, data: bytes) -> None:
    """A connection on which no complete head or body arrives in time is closed."""
    with closing(connect(url, data)) as client:
        until(lambda: is_closed(client))


def test_a_trickle_does_not_extend_the_time(url: str) -> None:
    """Single bytes now and then keep neither a head nor a body alive."""
    for start in (HEAD, HEAD + b"content-length: 1000000\r\n\r\n"):
        with closing(connect(url, start)) as client:
            deadline = time.monotonic() + 60
            while not is_closed(client):
                assert time.monotonic() < deadline
                time.sleep(0.1)
                try:
                    client.sendall(b"x")
                except ConnectionError:
                    break


def test_new_clients_replace_idle_ones(url: str) -> None:
    """Beyond the limit of connections those without a request are closed, and others are served at once."""
    clients = [connect(url, HEAD) for _ in range(100)]
    assert http_client.get(f"{url}/health").status_code == 200
    until(lambda: sum(map(is_closed, clients)) >= 60)
    for client in clients:
        client.close()


@pytest.mark.parametrize("line", [b"a: b\r\n" * 100_000, b"a: " + b"b" * 600_000 + b"\r\n"])
def test_long_heads_are_refused(url: str, line: bytes) -> None:
    """A head of more than 64 KiB is not served, although it is complete and came in time."""
    answer = b""
    with closing(connect(url)) as client, suppress(ConnectionError):
        client.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\n" + line + b"\r\n")
        while piece := client.recv(1 << 16):
            answer += piece
    assert b"alive" not in answer


@pytest.mark.slow
def test_a_client_that_reads_nothing_is_ended(url: str) -> None:
    """A client that does not read its response keeps neither its connection nor the request."""
    body = b'{"prompt":[1,2,3],"max_tokens":1000,"ignore_eos":true,"stream":true,"logprobs":20,"seed":1}'
    parts = urlsplit(url)
    with closing(socket.socket()) as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect((parts.hostname, parts.port))
        client.sendall(HEAD + b"content-length: %d\r\n\r\n" % len(body) + body)
        until(lambda: _running(url) == 1)
        until(lambda: _running(url) == 0)


def _running(url: str) -> int:
    return int(http_client.get(f"{url}/v1/instance", headers=KEY).json()["load"]["running"])


def test_a_long_prompt_does_not_delay_a_short_one(url: str) -> None:
    """Prompts of the largest size are parsed and tokenized beside short ones, which do not wait for them."""
    long = [connect(url) for _ in range(4)]
    body = b'{"prompt":"' + b"ab cd " * 170_000 + b'"}'
    for client in long:
        client.sendall(HEAD + b"content-length: %d\r\n\r\n" % len(body) + body)
    answer = http_client.post(f"{url}/v1/completions", json={"prompt": "a", "max_tokens": 1}, headers=KEY)
    assert answer.status_code == 200
    for client in long:
        received = b""
        while b"context_length_exceeded" not in received:
            piece = client.recv(1 << 16)
            assert piece, received
            received += piece
        client.close()


@pytest.mark.parametrize(
    "data", [b"\x16\x03\x01" * 50, b"GET / HTTP/1.1\r\nhost: x\x01y\r\n\r\n", b"GET http://[ HTTP/1.1\r\n\r\n"]
)
def test_what_is_no_http_does_not_fill_the_log(url: str, data: bytes, caplog: pytest.LogCaptureFixture) -> None:
    """A stranger's bytes that are no request get a 400, and no line in a log of level info, least of all a traceback."""
    with caplog.at_level("INFO"), closing(connect(url, data)) as client:
        assert b" 400 " in client.recv(100)
        until(lambda: is_closed(client))
    assert not [one for one in caplog.records if one.levelname != "INFO" or "Traceback" in str(one.exc_info)]
