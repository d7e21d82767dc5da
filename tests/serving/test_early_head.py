"""The head of an answer before its first token, and limits of tenants."""

from __future__ import annotations

import json
import time
from typing import Any

import http_client
import httpx
import pytest
from shared_server import SharedServer, SharedServers, slow, words


def ask(**fields: Any) -> dict[str, Any]:
    return {"prompt": "x", "max_tokens": 4, "stream": True, **fields}


def test_the_head_of_a_stream_does_not_wait_for_the_first_token(server: SharedServer) -> None:
    """The status and the headers of a stream are there before its first token; the engine works on it afterwards."""
    with (
        slow(server, 0.5),
        server.http() as client,
        client.stream("POST", "/v1/completions", json=ask(prompt=words("head", 300), max_tokens=1)) as stream,
    ):
        assert stream.status_code == 200 and stream.headers["content-type"].startswith("text/event-stream")
        deadline = time.monotonic() + 60
        while server.engine.status().running + server.engine.status().waiting == 0:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert stream.read().endswith(b"data: [DONE]\n\n")


@pytest.fixture
def limited(shared: SharedServers) -> str:
    return shared.limited.url


def post(url: str, name: str, **fields: Any) -> httpx.Response:
    headers = {"authorization": f"Bearer {name}-key"}
    return http_client.post(f"{url}/v1/completions", json=ask(**{"stream": False, **fields}), headers=headers)


def test_comments_keep_a_stream_alive(limited: str, server: SharedServer) -> None:
    """While nothing is generated, comments are sent; clients that parse events do not see them."""
    headers = {"authorization": "Bearer dave-key"}
    body = ask(prompt=words("long", 100), max_tokens=1)
    with (
        slow(server, 0.5),
        http_client.stream("POST", f"{limited}/v1/completions", json=body, headers=headers) as stream,
    ):
        lines = [line for line in stream.iter_lines() if line]
    assert any(line.startswith(": ") for line in lines[:-2])
    assert all(line.startswith((": ", "data: ")) for line in lines)


def test_requests_per_minute(limited: str) -> None:
    """A tenant beyond its quota gets the time after which to retry; other tenants are not affected."""
    assert [post(limited, "alice").status_code for _ in range(2)] == [200, 200]
    refused = post(limited, "alice")
    assert refused.status_code == 429 and refused.json()["error"]["code"] == "rate_limit_exceeded"
    assert 0 < int(refused.headers["retry-after"]) <= 60
    assert post(limited, "bob").status_code == 200


def test_concurrent_requests(limited: str, server: SharedServer) -> None:
    """A running stream counts until it has ended, however it ends."""
    headers = {"authorization": "Bearer bob-key"}
    body = ask(max_tokens=1000, ignore_eos=True)
    with (
        slow(server, 0.02),
        http_client.stream("POST", f"{limited}/v1/completions", json=body, headers=headers) as stream,
    ):
        assert stream.status_code == 200
        assert post(limited, "bob").status_code == 429
    deadline = time.monotonic() + 60
    while post(limited, "bob").status_code == 429:
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_tokens_per_minute(limited: str) -> None:
    """Tokens are charged when they are known: one long answer, then a pause."""
    first = post(limited, "carol", max_tokens=40, ignore_eos=True)
    assert first.status_code == 200 and json.loads(first.text)["usage"]["completion_tokens"] == 40
    assert post(limited, "carol").status_code == 429
