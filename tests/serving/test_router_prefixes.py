"""Named prefixes that the router keeps, for servers that know nothing of them."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import http_client
import httpx
import pytest
from chat_replica import TEXT, ChatReplica
from router_parts import Loop, RouterThread
from shared_server import until

from foreword.blocks.salt import Salt

KEYS = [
    "--api-keys",
    "a=alice",
    "--api-keys",
    "b=bob",
    "--replica-key",
    "r",
    "--tenant-secret",
    "a secret of the tests",
]
MESSAGES = [{"role": "system", "content": "Be brief."}]


@pytest.fixture(scope="module")
def loop() -> Loop:
    return Loop()


@contextmanager
def routed(*replicas: ChatReplica, flags: tuple[str, ...] = ()) -> Iterator[RouterThread]:
    named = [argument for one in replicas for argument in ("--replica", one.url)]
    process = RouterThread(*named, *KEYS, *flags)
    try:
        yield process.wait_for(len(replicas))
        assert "Traceback" not in process.text
    finally:
        process.kill()


def call(router: RouterThread, method: str, path: str, key: str = "alice", body: Any = None) -> httpx.Response:
    headers = {"authorization": f"Bearer {key}"}
    return http_client.request(method, f"{router.url}{path}", json=body, headers=headers)


def test_prefixes_before_prompts_and_chats(loop: Loop) -> None:
    """The prefix itself reaches the replica, which has computed it before; other tenants do not know its name."""
    replica = ChatReplica(loop)
    with routed(replica) as router:
        made = call(router, "POST", "/v1/prefixes", body={"name": "rules", "content": "Once upon "})
        assert made.status_code == 201 and made.json()["version"] == 1
        until(lambda: any(body["max_tokens"] == 1 for body in replica.bodies("/v1/completions")))
        warmed = replica.bodies("/v1/completions")[-1]
        assert warmed["prompt"] == "Once upon " and Salt.parse(warmed["cache_salt"]).tenant
        asked = call(router, "POST", "/v1/completions", body={"prompt": "a time", "prefix": "rules", "max_tokens": 4})
        assert asked.json()["choices"][0]["text"] == TEXT
        seen = replica.bodies("/v1/completions")[-1]
        assert seen["prompt"] == "Once upon a time" and "prefix" not in seen
        assert seen["cache_salt"] == warmed["cache_salt"]

        made = call(router, "PUT", "/v1/prefixes/chat", body={"messages": MESSAGES})
        assert made.status_code == 201
        turn = {"role": "user", "content": "Hello"}
        for path, field in (
            ("/v1/chat/completions", "messages"),
            ("/v1/messages", "messages"),
            ("/v1/responses", "input"),
        ):
            body = {field: [turn], "prefix": "chat", "max_tokens": 4}
            assert call(router, "POST", path, body=body).status_code == 200
            assert replica.bodies("/v1/chat/completions")[-1]["messages"] == [*MESSAGES, turn]

        listed = call(router, "GET", "/v1/prefixes").json()["data"]
        assert [one["name"] for one in listed] == ["chat", "rules"]
        assert call(router, "GET", "/v1/prefixes/chat").json()["messages"] == MESSAGES
        assert call(router, "GET", "/v1/prefixes", "bob").json()["data"] == []
        body = {"prompt": "x", "prefix": "rules"}
        assert call(router, "POST", "/v1/completions", "bob", body).json()["error"]["code"] == "prefix_not_found"
        assert call(router, "DELETE", "/v1/prefixes/rules", "bob").status_code == 404
        assert call(router, "DELETE", "/v1/prefixes/rules").status_code == 200
        assert call(router, "POST", "/v1/completions", body=body).status_code == 404


def test_what_is_refused(loop: Loop) -> None:
    """A taken name, a wrong name, a wrong kind and a conversation that is none are refused."""
    with routed(ChatReplica(loop)) as router:
        assert call(router, "POST", "/v1/prefixes", body={"name": "a", "content": "x"}).status_code == 201
        for body in (
            {"name": "a", "content": "y"},
            {"name": "../a", "content": "y"},
            {"name": "b"},
            {"name": "b", "content": "x", "messages": MESSAGES},
            {"name": "b", "messages": [{"role": "nobody", "content": "x"}]},
            {"name": "b", "messages": [7]},
        ):
            assert call(router, "POST", "/v1/prefixes", body=body).status_code == 400
        chat = {"messages": MESSAGES, "prefix": "a"}
        assert call(router, "POST", "/v1/chat/completions", body=chat).status_code == 400
        assert call(router, "POST", "/v1/completions", body={"prompt": [1, 2], "prefix": "a"}).status_code == 400
        replaced = call(router, "POST", "/v1/prefixes", body={"name": "a", "content": "y", "replace": True})
        assert replaced.status_code == 200 and replaced.json()["version"] == 2


def test_prefixes_are_kept_in_a_file(loop: Loop, tmp_path: Path) -> None:
    """A router that starts again knows the prefixes, and computes them on the replicas that it finds."""
    replica, path = ChatReplica(loop), tmp_path / "prefixes"
    flags = ("--prefix-file", str(path))
    with routed(replica, flags=flags) as router:
        assert call(router, "PUT", "/v1/prefixes/rules", body={"content": "Once upon "}).status_code == 201
        assert path.stat().st_mode & 0o77 == 0
    seen = len(replica.seen)
    with routed(replica, flags=flags) as router:
        until(lambda: len(replica.seen) > seen)
        body = {"prompt": "a time", "prefix": "rules"}
        assert call(router, "POST", "/v1/completions", body=body).status_code == 200
        assert replica.bodies("/v1/completions")[-1]["prompt"] == "Once upon a time"


def test_prefixes_before_prompts_are_charged(loop: Loop) -> None:
    """Tokens that replicas compute for a named prefix count against its tenant's quota, when they have computed it."""
    with routed(ChatReplica(loop), flags=("--quota", "a tokens=1", "--quota", "b tokens=1000")) as router:
        assert call(router, "POST", "/v1/prefixes", body={"name": "rules", "content": "Be brief."}).status_code == 201
        until(lambda: call(router, "POST", "/v1/prefixes", body={"name": "x", "content": "y"}).status_code == 429)
        assert call(router, "POST", "/v1/prefixes", "bob", {"name": "rules", "content": "Be brief."}).status_code == 201


def test_a_client_that_leaves_has_paid(loop: Loop) -> None:
    """A client that gives up before its answer is charged for its prompt, which a replica computes meanwhile."""
    replica = ChatReplica(loop)
    chat = {"messages": [{"role": "user", "content": "What is the weather in Rome today?"}]}
    with routed(replica, flags=("--quota", "a tokens=1")) as router:
        replica.hold()
        parts, data = urlsplit(router.url), json.dumps(chat).encode()
        with socket.create_connection((str(parts.hostname), parts.port or 80), 60) as client:
            head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(data)}\r\n"
            client.sendall(
                f"{head}authorization: Bearer alice\r\ncontent-type: application/json\r\n\r\n".encode() + data
            )
            until(lambda: bool(replica.bodies("/v1/chat/completions")))
        replica.release()
        until(lambda: call(router, "POST", "/v1/messages/count_tokens", body=chat).status_code == 429)
