"""`/v1/prefixes`, and requests that name a prefix."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import httpx
import pytest
from shared_server import SharedServer, words


@pytest.fixture(autouse=True)
def forget(client: httpx.Client) -> Iterator[None]:
    """Find no prefix, and leave none behind."""

    def remove() -> None:
        for prefix in client.get("/v1/prefixes").json()["data"]:
            client.delete(f"/v1/prefixes/{prefix['name']}")

    remove()
    yield
    remove()


def test_add_show_list_remove(client: httpx.Client, server: SharedServer) -> None:
    """A prefix is registered, shown with its content, listed with its size, and removed."""
    content = words("life", 20)
    made = client.post("/v1/prefixes", json={"name": "life", "content": content})
    assert made.status_code == 201
    prefix = made.json()
    assert (prefix["name"], prefix["version"], prefix["kind"], prefix["ready"]) == ("life", 1, "text", True)
    assert prefix["num_tokens"] == len(server.engine.tokenizer.encode(content)) and prefix["bytes"] > 0
    assert client.get("/v1/prefixes/life").json()["content"] == content
    listed = client.get("/v1/prefixes").json()
    assert [item["name"] for item in listed["data"]] == ["life"]
    assert listed["pinned_bytes"] == prefix["bytes"] <= listed["budget_bytes"]
    gone = client.delete("/v1/prefixes/life")
    assert gone.status_code == 200 and gone.json()["deleted"] is True
    assert client.get("/v1/prefixes").json()["data"] == []
    assert client.get("/v1/prefixes/life").status_code == 404


def test_a_text_prefix_stands_before_the_prompt(client: httpx.Client, server: SharedServer) -> None:
    """A request that names a text prefix gives what the joined text gives, from the cache, and counts as a use."""
    content = words("front", 30)
    client.post("/v1/prefixes", json={"name": "front", "content": content})
    body = {"max_tokens": 8, "temperature": 0, "ignore_eos": True}
    named = client.post("/v1/completions", json={**body, "prompt": " and then", "prefix": "front"}).json()
    tokenizer = server.engine.tokenizer
    ids = tokenizer.encode(content) + tokenizer.encode(" and then", add_special_tokens=False)
    spelled = client.post("/v1/completions", json={**body, "prompt": ids}).json()
    assert named["choices"][0]["text"] == spelled["choices"][0]["text"]
    assert named["usage"]["prompt_tokens"] == len(ids)
    block = server.engine.info.block_size
    cached = named["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert cached >= len(tokenizer.encode(content)) // block * block > 0
    shown = client.get("/v1/prefixes/front").json()
    assert shown["uses"] == 1 and shown["hit_tokens"] > 0 and shown["last_used"] is not None


def test_a_messages_prefix_stands_before_the_chat(client: httpx.Client) -> None:
    """A chat that names a messages prefix gives what the whole conversation gives, with the prefix cached."""
    opening = [{"role": "system", "content": words("opening", 30)}]
    question = [{"role": "user", "content": "What now?"}]
    made = client.post("/v1/prefixes", json={"name": "opening", "messages": opening})
    assert made.status_code == 201 and made.json()["kind"] == "messages"
    assert client.get("/v1/prefixes/opening").json()["messages"] == opening
    body = {"max_tokens": 8, "temperature": 0}
    named = client.post("/v1/chat/completions", json={**body, "messages": question, "prefix": "opening"}).json()
    spelled = client.post("/v1/chat/completions", json={**body, "messages": opening + question}).json()
    assert named["choices"][0]["message"] == spelled["choices"][0]["message"]
    assert named["usage"]["prompt_tokens"] == spelled["usage"]["prompt_tokens"]
    assert named["usage"]["prompt_tokens_details"]["cached_tokens"] > 0


def test_the_wrong_kind_is_refused(client: httpx.Client) -> None:
    """A text prefix in a chat, and a messages prefix in a completion, are a 400 with a sentence."""
    client.post("/v1/prefixes", json={"name": "text", "content": words("kind", 10)})
    client.post("/v1/prefixes", json={"name": "talk", "messages": [{"role": "system", "content": words("kind", 10)}]})
    chat = {"messages": [{"role": "user", "content": "x"}], "prefix": "text"}
    for path, body in (("/v1/chat/completions", chat), ("/v1/completions", {"prompt": "x", "prefix": "talk"})):
        answer = client.post(path, json=body)
        assert answer.status_code == 400 and answer.json()["error"]["param"] == "prefix"


def test_replace_makes_a_new_version(client: httpx.Client) -> None:
    """PUT makes version 2 with the new content; POST on an existing name is a 400 unless it says replace."""
    assert client.put("/v1/prefixes/doc", json={"content": words("old", 20)}).status_code == 201
    again = client.post("/v1/prefixes", json={"name": "doc", "content": "x"})
    assert again.status_code == 400 and "doc" in again.json()["error"]["message"]
    replaced = client.put("/v1/prefixes/doc", json={"content": words("new", 20)})
    assert (replaced.status_code, replaced.json()["version"]) == (200, 2)
    assert client.get("/v1/prefixes/doc").json()["content"] == words("new", 20)
    third = client.post("/v1/prefixes", json={"name": "doc", "content": words("newer", 20), "replace": True})
    assert third.json()["version"] == 3
    assert len(client.get("/v1/prefixes").json()["data"]) == 1


def test_unknown_names_list_close_ones(client: httpx.Client) -> None:
    """A name that was never registered is a 404 that lists close names, in a request and in the interface."""
    client.post("/v1/prefixes", json={"name": "handbook", "content": words("hand", 10)})
    for answer in (
        client.get("/v1/prefixes/handbok"),
        client.delete("/v1/prefixes/handbok"),
        client.post("/v1/completions", json={"prompt": "x", "prefix": "handbok"}),
        client.post("/v1/completions", json={"prompt": "x", "prefix": "handbok", "stream": True}),
    ):
        error = answer.json()["error"]
        assert (answer.status_code, error["code"], error["param"]) == (404, "prefix_not_found", "prefix")
        assert "'handbook'" in error["message"]


def test_budget(client: httpx.Client, metric: Callable[..., float]) -> None:
    """A prefix beyond the budget is a 409 and leaves nothing behind. Removing another prefix frees its budget."""
    assert metric("foreword:prefix_pinned_bytes") == 0
    big = client.post("/v1/prefixes", json={"name": "big", "content": [1] * 3})
    assert big.status_code == 400
    for number in range(20):
        answer = client.post("/v1/prefixes", json={"name": f"part{number}", "content": words(f"part{number}x", 30)})
        if answer.status_code != 201:
            break
    assert number > 0 and answer.status_code == 409
    assert answer.json()["error"]["code"] == "prefix_budget_exceeded"
    listed = client.get("/v1/prefixes").json()
    assert len(listed["data"]) == number
    assert 0 < metric("foreword:prefix_pinned_bytes") == listed["pinned_bytes"] <= listed["budget_bytes"]
    client.delete("/v1/prefixes/part0")
    again = client.post("/v1/prefixes", json={"name": "again", "content": words(f"part{number}x", 30)})
    assert again.status_code == 201


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"name": "a"},
        {"content": "a"},
        {"name": "a", "content": "x", "messages": [{"role": "user", "content": "x"}]},
        {"name": 3, "content": "x"},
        {"name": "a", "messages": []},
        {"name": "a", "messages": [{"role": "user"}]},
        {"name": "", "content": "x"},
        {"name": "a/b", "content": "x"},
        {"name": "x" * 1000, "content": "x"},
        {"name": "a\nb", "content": "x"},
        {"name": "long", "content": "x " * 100_000},
    ],
)
def test_bad_prefixes(client: httpx.Client, body: dict[str, object]) -> None:
    """A prefix without a proper name, without content, with both kinds of it or with too much of it is refused."""
    answer = client.post("/v1/prefixes", json=body)
    assert answer.status_code in (400, 409) and answer.json()["error"]["message"]
    assert client.get("/v1/prefixes").json()["data"] == []
