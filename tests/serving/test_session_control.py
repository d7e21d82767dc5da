"""`/v1/sessions` on a server and through a router: open, fork, compact and end sessions of agents."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from server_process import ServerProcess
from shared_server import SharedServer, SharedServers, words


def tell(client: httpx.Client, action: str, name: str, **more: Any) -> dict[str, Any]:
    answer = client.post("/v1/sessions", json={"action": action, "session_id": name, **more})
    assert answer.status_code == 200, answer.text
    told: dict[str, Any] = answer.json()
    return told


def cached(client: httpx.Client, text: str, session: str = "", **more: Any) -> int:
    """Tokens of a prompt that were cached."""
    headers = {"x-session-id": session} if session else {}
    body = {"prompt": text, "max_tokens": 1, **more}
    usage = client.post("/v1/completions", json=body, headers=headers).raise_for_status().json()["usage"]
    return int(usage["prompt_tokens_details"]["cached_tokens"])


def test_the_end_of_a_session_frees_what_only_it_has_used(client: httpx.Client) -> None:
    """An ended session's text is computed again; what another request has used is still cached."""
    shared, own = words("read by two", 60), words("read by one", 60)
    tell(client, "open", "ending")
    assert cached(client, shared + own, "ending") < 16
    assert cached(client, shared) > 100
    before = cached(client, shared + own)  # from here on it is not the session's alone
    assert before > 250
    freed = tell(client, "end", "ending")["freed_blocks"]
    assert freed["device"] == 0
    tell(client, "open", "again")
    more = words("of the second", 60)
    assert cached(client, shared + own + more, "again") > 200
    freed = tell(client, "end", "again")["freed_blocks"]
    assert freed["device"] > 5
    assert before - 16 <= cached(client, shared + own + more) <= before + 32


def test_a_fork_goes_on_without_its_parent(client: httpx.Client) -> None:
    """A fork finds all that its parent has, keeps it when the parent ends, and its own end frees it."""
    text, more = words("parent of a fork", 80), words("child of a fork", 40)
    tell(client, "open", "parent")
    cached(client, text, "parent")
    tell(client, "fork", "child", parent_session_id="parent")
    assert cached(client, text + more, "child") > 100
    assert tell(client, "end", "parent")["freed_blocks"]["device"] <= 1
    again = cached(client, text + more, "child")
    assert again > 200
    tell(client, "fork", "silent", parent_session_id="child")
    assert tell(client, "end", "child")["freed_blocks"]["device"] == 0
    assert tell(client, "end", "silent")["freed_blocks"]["device"] >= again // 16 - 1
    assert cached(client, text + more) < 16


def test_compaction_frees_what_the_new_history_does_not_need(client: httpx.Client) -> None:
    """After `compact` only what is kept of the history, and what others use, is cached; the session continues."""
    head, tail = words("compacted head", 40), words("compacted tail", 60)
    tell(client, "open", "compacted")
    cached(client, head + tail, "compacted")
    [one] = [one for one in client.get("/v1/sessions").json()["data"] if one["id"] == "compacted"]
    assert (one["requests"], one["parent"]) == (1, None) and one["blocks"] > 8
    freed = tell(client, "compact", "compacted", keep_tokens=64)["freed_blocks"]["device"]
    assert freed == one["blocks"] - 4
    assert cached(client, head + words("summary", 20), "compacted") == 64
    tell(client, "end", "compacted")


def test_a_session_that_ends_while_a_request_runs(client: httpx.Client) -> None:
    """The request is answered, and what only it and its session have used is freed then."""
    start, rest = words("ends while it runs", 60), words("what still runs", 60)
    tell(client, "open", "running")
    cached(client, start, "running")
    body = {"prompt": start + rest, "max_tokens": 40, "stream": True, "ignore_eos": True}
    with client.stream("POST", "/v1/completions", json=body, headers={"x-session-id": "running"}) as answer:
        lines = (line for line in answer.iter_lines() if line)
        next(lines)
        tell(client, "end", "running")
        assert list(lines)[-1] == "data: [DONE]"
    assert cached(client, start + rest) < 16


def test_a_named_prefix_outlives_the_session(client: httpx.Client) -> None:
    """Blocks that a named prefix or a retention keeps stay when the session that used them ends."""
    text = words("kept beyond a session", 60)
    tell(client, "open", "kept")
    cached(client, text, "kept")
    kept = client.post("/v1/cache/retain", json={"prompt": text, "ttl": "1h"}).json()["tokens"]
    tell(client, "end", "kept")
    assert cached(client, text) >= kept > 64
    client.post("/v1/cache/release", json={"prompt": text})


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"action": "close", "session_id": "x"}, "action"),
        ({"action": "open", "session_id": ""}, "session_id"),
        ({"action": "open", "session_id": "x" * 300}, "session_id"),
        ({"action": "open", "session_id": "x", "timeout": 0}, "timeout"),
        ({"action": "open", "session_id": "x", "timeout": 1e12}, "timeout"),
        ({"action": "open", "session_id": "x", "parent_session_id": "y"}, "parent_session_id"),
        ({"action": "fork", "session_id": "x"}, "parent_session_id"),
        ({"action": "compact", "session_id": "x", "keep_tokens": -1}, "keep_tokens"),
    ],
)
def test_bad_bodies(client: httpx.Client, body: dict[str, Any], param: str) -> None:
    """A wrong body is a 400 that names the parameter."""
    answer = client.post("/v1/sessions", json=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


def test_names_that_are_not_open(client: httpx.Client) -> None:
    """Sessions that are not open are a 404, also as a parent; one that is open is opened once."""
    for body in (
        {"action": "end", "session_id": "nobody"},
        {"action": "compact", "session_id": "nobody"},
        {"action": "fork", "session_id": "child", "parent_session_id": "nobody"},
    ):
        assert client.post("/v1/sessions", json=body).status_code == 404
    tell(client, "open", "once")
    assert client.post("/v1/sessions", json={"action": "open", "session_id": "once"}).status_code == 400
    tell(client, "end", "once")


def test_tenants(shared: SharedServers) -> None:
    """A tenant neither sees nor ends another's session, though both use one name."""
    text = words("sessions of tenants", 60)
    with shared.keyed.http("alice4-secret") as alice, shared.keyed.http("bob4-secret") as bob:
        for caller in (alice, bob):
            tell(caller, "open", "mine")
            cached(caller, text, "mine", model="stdlib-nano")
        assert len(alice.get("/v1/sessions").json()["data"]) == 1
        assert tell(bob, "end", "mine")["freed_blocks"]["device"] > 8
        assert bob.get("/v1/sessions").json()["data"] == []
        assert bob.post("/v1/sessions", json={"action": "end", "session_id": "mine"}).status_code == 404
        assert cached(alice, text, "mine", model="stdlib-nano") > 100
        tell(alice, "end", "mine")


@pytest.mark.extended
def test_a_compaction_that_no_client_tells(client: httpx.Client, server: SharedServer) -> None:
    """Where a client has replaced its history by a summary, the server sees it: the blocks of the old history are evicted
    before all others, also before those that were not used for longer."""

    def chat(messages: list[dict[str, str]]) -> int:
        body = {"messages": messages, "max_tokens": 1}
        usage = client.post("/v1/chat/completions", json=body).raise_for_status().json()["usage"]
        return int(usage["prompt_tokens_details"]["cached_tokens"])

    def flood(count: int) -> None:
        for number in range(count):
            cached(client, words(f"flood {number} {server.engine.status().steps}", 30))

    def turns(about: str) -> list[dict[str, str]]:
        roles = ("user", "assistant")
        return [{"role": roles[i % 2], "content": words(f"{about} {i}", 25)} for i in range(7)]

    system, living, old = {"role": "system", "content": words("rules", 30)}, turns("living"), turns("old")
    chat([system, *living])
    for count in (1, 3, 5, 7):
        chat([system, *old[:count]])
    engine = server.engine
    full = False
    while not full:  # other tests may have filled it
        flood(1)
        whole, before = chat([system, *living]), chat([system, *old])
        full = engine.status().cached_blocks >= engine.info.num_blocks - 16
    chat([system, {"role": "user", "content": words("a summary of it", 25)}, *old[5:7]])
    flood(3)
    assert chat([system, *living]) >= whole
    assert chat([system, *old]) < before - 32


def stores(folder: Path, hold: str = "") -> list[str]:
    disk = f"disk://{folder}/kv?size=256MiB{hold}"
    flags = ["--store", "memory://?size=64MiB", "--store", disk, "--dtype", "float32"]
    return [*flags, "--store-lookup-timeout", "60", "--store-load-timeout", "60", "--store-flush-seconds", "60"]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_end_of_a_session_in_every_tier(start: Callable[..., ServerProcess], tmp_path: Path) -> None:
    """Blocks that only an ended session has used are gone from device, memory and disk when the answer comes. What a named
    prefix needs is still in all of them, and found after a restart."""
    server = start(*stores(tmp_path))
    kept, own = words("a prefix with a name", 80), words("of the session", 120)
    with httpx.Client(base_url=server.wait_ready(), timeout=120) as client:
        made = client.post("/v1/prefixes", json={"name": "kept", "content": kept}).raise_for_status().json()
        tell(client, "open", "stored")
        cached(client, kept + own, "stored")
        freed = tell(client, "end", "stored")["freed_blocks"]
        assert freed["device"] > 10 and freed["memory"] == freed["disk"] >= freed["device"] - 1
        found = cached(client, kept + own)
        assert made["num_tokens"] - 32 < found <= made["num_tokens"]
    server.kill()
    with httpx.Client(base_url=start(*stores(tmp_path)).wait_ready(), timeout=120) as client:
        assert client.get("/v1/sessions").json()["data"] == []
        assert cached(client, kept + words("another", 9)) >= found - 16


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_server_that_is_killed_while_writes_wait(start: Callable[..., ServerProcess], tmp_path: Path) -> None:
    """A killed server with `hold=` has lost what waited, and nothing else: the next one gives the same answers, computed again.
    One that is stopped writes it, but for what ended sessions had."""
    text, dead = words("held back", 120), words("ended", 120)
    server = start(*stores(tmp_path, "&hold=32MiB"))
    with httpx.Client(base_url=server.wait_ready(), timeout=120) as client:
        body = {"prompt": text, "max_tokens": 4, "temperature": 0}
        expected = client.post("/v1/completions", json=body).json()["choices"][0]["text"]
    server.kill()
    server = start(*stores(tmp_path, "&hold=32MiB"))
    with httpx.Client(base_url=server.wait_ready(), timeout=120) as client:
        assert cached(client, text) == 0
        assert client.post("/v1/completions", json=body).json()["choices"][0]["text"] == expected
        tell(client, "open", "ending")
        cached(client, dead, "ending")
        tell(client, "end", "ending")
    server.popen.send_signal(signal.SIGTERM)
    server.end()
    server = start(*stores(tmp_path, "&hold=32MiB"))
    with httpx.Client(base_url=server.wait_ready(), timeout=120) as client:
        assert cached(client, text) > 400
        assert cached(client, dead) == 0
