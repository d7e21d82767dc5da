"""`/v1/cache/*`: tenants retain, pin, prefetch and release prefixes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
from shared_server import SharedServer, SharedServers, words


@pytest.fixture(autouse=True)
def forget(client: httpx.Client) -> Iterator[None]:
    """Leave nothing behind."""
    yield
    assert client.post("/v1/cache/release", json={"all": True}).status_code == 200


def retained(client: httpx.Client) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = client.get("/v1/cache/retained").json()["data"]
    return found


def test_retain_list_release(client: httpx.Client, server: SharedServer) -> None:
    """A text is kept for its ttl, computed if necessary, listed, and released by naming it again."""
    text = words("keep", 40)
    count = len(server.engine.tokenizer.encode(text))
    whole = count // server.engine.info.block_size * server.engine.info.block_size
    others = retained(client)  # other tests of this process may keep prefixes
    answer = client.post("/v1/cache/retain", json={"prompt": text, "ttl": "1h", "priority": 7})
    assert answer.status_code == 200
    assert answer.json() == {
        "object": "cache.retain", "prompt_tokens": count, "status": "accepted", "tokens": whole, "ttl": 3600.0,
        "reason": "",
    }  # fmt: skip
    known = {item["id"] for item in others}
    [one] = [item for item in retained(client) if item["id"] not in known]
    assert (one["tokens"], one["ttl"], one["priority"], one["on_device"]) == (whole, 3600.0, 7, True)
    completion = client.post("/v1/completions", json={"prompt": text, "max_tokens": 1}).json()
    assert completion["usage"]["prompt_tokens_details"]["cached_tokens"] >= whole - 1
    released = client.post("/v1/cache/release", json={"prompt": text}).json()["released"]
    assert [item["id"] for item in released] == [one["id"]]
    assert one["id"] not in {item["id"] for item in retained(client)}


def test_a_conversation(client: httpx.Client) -> None:
    """A conversation is kept up to the end of its last message; the next turn hits it."""
    messages = [{"role": "system", "content": words("system", 40)}, {"role": "user", "content": words("ask", 10)}]
    kept = client.post("/v1/cache/pin", json={"messages": messages}).json()
    assert (kept["status"], kept["ttl"]) == ("accepted", None)
    more = [*messages, {"role": "assistant", "content": "Yes."}, {"role": "user", "content": "And now?"}]
    answer = client.post("/v1/chat/completions", json={"messages": more, "max_tokens": 1}).json()
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] >= kept["tokens"]


@pytest.mark.extended
def test_clipped_and_refused(client: httpx.Client, server: SharedServer) -> None:
    """More than the budget is clipped; what is shorter than a block is refused, and so is a prefetch without a store."""
    budget = server.engine.info.num_blocks // 4
    for number in range(3):
        tokens = [100 + number] * 1000
        assert client.post("/v1/cache/retain", json={"prompt": tokens, "priority": 9}).json()["status"] in (
            "accepted",
            "clipped",
        )
    low = client.post("/v1/cache/retain", json={"prompt": [99] * 1000, "priority": 1}).json()
    assert low["status"] in ("clipped", "refused") and "budget" in low["reason"]
    assert sum(one["tokens"] for one in retained(client)) <= budget * server.engine.info.block_size
    assert client.post("/v1/cache/retain", json={"prompt": "x"}).json()["status"] == "refused"
    nothing = client.post("/v1/cache/prefetch", json={"prompt": [7] * 100}).json()
    assert (nothing["status"], nothing["tokens"]) == ("refused", 0)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "prompt"),
        ({"prompt": "x", "messages": [{"role": "user", "content": "x"}]}, "prompt"),
        ({"all": True}, "prompt"),
        ({"prompt": "x" * 40, "ttl": "soon"}, "ttl"),
        ({"prompt": "x" * 40, "ttl": 0}, "ttl"),
        ({"prompt": "x" * 40, "ttl": -5}, "ttl"),
        ({"prompt": "x" * 40, "priority": 101}, "priority"),
        ({"prompt": "x" * 40, "priority": -1}, "priority"),
        ({"prompt": [10**9] * 40}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"messages": []}, "messages"),
        ({"prompt": [1] * 5000}, "prompt"),
    ],
)
def test_bad_bodies(client: httpx.Client, body: dict[str, Any], param: str) -> None:
    """A wrong body is a 400 that names the parameter."""
    answer = client.post("/v1/cache/retain", json=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


def test_tenants(shared: SharedServers) -> None:
    """A tenant neither sees nor releases what another one keeps."""
    text = words("tenant", 20)  # both retentions of it fit into half of the budget
    with shared.keyed.http("alice4-secret") as alice, shared.keyed.http("bob4-secret") as bob:
        assert alice.post("/v1/cache/retain", json={"prompt": text}).json()["status"] == "accepted"
        assert retained(bob) == []
        assert bob.post("/v1/cache/release", json={"prompt": text}).json()["released"] == []
        assert bob.post("/v1/cache/release", json={"all": True}).json()["released"] == []
        assert len(retained(alice)) == 1
        own = {"prompt": text, "cache_salt": "mine"}
        assert alice.post("/v1/cache/retain", json=own).json()["status"] == "accepted"
        assert len(alice.post("/v1/cache/release", json=own).json()["released"]) == 1
        assert len(alice.post("/v1/cache/release", json={"all": True}).json()["released"]) == 1


def test_a_salt_leaves_the_device(shared: SharedServers) -> None:
    """`scope=device` with a salt drops the caller's blocks with this salt, and neither those with another one nor those that
    another tenant has with it. Without a salt it is for operators."""
    prompt = [100 + number % 90 for number in range(64)]

    def cached(caller: httpx.Client, salt: str) -> int:
        body = {"prompt": prompt, "max_tokens": 1, "cache_salt": salt, "model": "stdlib-nano"}
        usage = caller.post("/v1/completions", json=body).raise_for_status().json()["usage"]
        return int(usage["prompt_tokens_details"]["cached_tokens"])

    with shared.keyed.http("alice4-secret") as alice, shared.keyed.http("bob4-secret") as bob:
        places = [(alice, "one"), (alice, "two"), (bob, "one")]
        for place in places:
            cached(*place)
        assert alice.delete("/v1/cache?scope=device").status_code == 403
        assert alice.delete("/v1/cache?scope=everything").status_code == 400
        answer = alice.delete("/v1/cache?scope=device&cache_salt=one").raise_for_status().json()
        assert answer["device_blocks"] > 0
        assert [cached(*place) > 0 for place in places] == [False, True, True]


def test_an_erased_prompt_is_not_remembered(shared: SharedServers) -> None:
    """After a tenant has erased what it had, no report of a miss compares a prompt with what was erased."""
    body = {"prompt": words("remembered", 60), "max_tokens": 1, "cache_report": True, "model": "stdlib-nano"}
    with shared.keyed.http("alice4-secret") as alice:

        def reason() -> str:
            answer = alice.post("/v1/completions", json=body).raise_for_status().json()
            return str(answer["cache_report"]["reason"])

        reason()
        assert reason() == "all_cached"
        alice.delete("/v1/cache").raise_for_status()
        assert reason() == "never_seen"


def test_metrics(client: httpx.Client, metric: Callable[..., float], server: SharedServer) -> None:
    """The memory that cache control keeps is a metric."""
    assert metric("foreword:prefix_retained_bytes") == 0
    kept = client.post("/v1/cache/retain", json={"prompt": words("metric", 40)}).json()
    blocks = kept["tokens"] // server.engine.info.block_size
    assert metric("foreword:prefix_retained_bytes") == blocks * server.engine.info.kv_bytes_per_block


@pytest.mark.extended
def test_breakpoints_of_messages(server: SharedServer) -> None:
    """Anthropic's `cache_control`: the first request writes up to the breakpoint, by ttl; the second one reads it, also after a
    flood of other prompts."""
    system = [{"type": "text", "text": words("breakpoint", 60), "cache_control": {"type": "ephemeral", "ttl": "1h"}}]
    body = {"model": server.model, "max_tokens": 1, "system": system}
    with server.http() as client:

        def ask(question: str) -> dict[str, Any]:
            asked = {**body, "messages": [{"role": "user", "content": question}]}
            usage: dict[str, Any] = client.post("/v1/messages", json=asked).json()["usage"]
            return usage

        first = ask("One?")
        written = first["cache_creation_input_tokens"]
        assert written > 100 and first["cache_read_input_tokens"] < 20
        assert first["cache_creation"] == {"ephemeral_5m_input_tokens": 0, "ephemeral_1h_input_tokens": written}
        assert [one["tokens"] for one in retained(client)] == [written + first["cache_read_input_tokens"]]
        for number in range(12):
            client.post("/v1/completions", json={"prompt": [200 + number] * 900, "max_tokens": 1})
        second = ask("Two?")
        assert second["cache_read_input_tokens"] >= written and second["cache_creation_input_tokens"] == 0


def test_cache_report_answers(client: httpx.Client) -> None:
    """A chat's `cache_control` and `prompt_cache_retention` are answered in the cache report."""
    mark = {"type": "ephemeral"}
    message = {"role": "user", "content": [{"type": "text", "text": words("report", 40), "cache_control": mark}]}
    body = {"messages": [message], "max_tokens": 1, "cache_report": True, "prompt_cache_retention": "24h"}
    answer = client.post("/v1/chat/completions", json=body).json()
    answers = answer["cache_report"]["retained"]
    assert [(one["status"], one["ttl"]) for one in answers] == [("accepted", 300.0), ("accepted", 86_400.0)]
    assert 0 < answers[0]["tokens"] <= answers[1]["tokens"] <= answer["usage"]["prompt_tokens"]
