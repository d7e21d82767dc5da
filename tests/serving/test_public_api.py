"""`/v1/public/prefixes`: who may mark a text as public, and what tenants get."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from shared_server import ENGINE, PREFIXES, SharedServer, served, words

from foreword.api.http import bind
from foreword.configuration import Config
from foreword.process_config import ServerConfig
from foreword.server.app import ServerApp
from foreword.server.engine_metrics import PrometheusObserver

PATH = "/v1/public/prefixes"
CONFIG = ServerConfig(
    port=0,
    api_keys=("ann=anns-secret", "bob=bobs-secret"),
    admin_key="operators",
    tenant_secret="another secret of the tests",
)


@pytest.fixture(scope="module")
def guarded(shared: Any) -> Iterator[SharedServer]:
    """A server with tenants and an operator, on the engine of the other tests."""
    engine, listener = shared.open.engine, bind(CONFIG)
    app = ServerApp(engine, PrometheusObserver(), Config(ENGINE, CONFIG, PREFIXES))
    with served((app.front, listener, CONFIG)):
        yield SharedServer("http://{}:{}".format(*listener.getsockname()[:2]), engine)


@pytest.fixture
def admin(guarded: SharedServer) -> Iterator[httpx.Client]:
    with guarded.http("operators") as client:
        yield client


@pytest.fixture
def ann(guarded: SharedServer) -> Iterator[httpx.Client]:
    with guarded.http("anns-secret") as client:
        yield client


@pytest.fixture
def bob(guarded: SharedServer) -> Iterator[httpx.Client]:
    with guarded.http("bobs-secret") as client:
        yield client


def report(client: httpx.Client, path: str = "/v1/completions", **body: Any) -> dict[str, Any]:
    given = {"max_tokens": 4, "temperature": 0, "ignore_eos": True, "cache_report": True, **body}
    return dict(client.post(path, json=given).raise_for_status().json())


@pytest.mark.extended
def test_only_an_operator_marks(guarded: SharedServer, admin: httpx.Client, ann: httpx.Client) -> None:
    """A tenant's key neither marks nor unmarks; without a key nothing is shown. Tenants may read what is public."""
    body = {"name": "rules", "content": words("rules", 20)}
    calls = [("POST", PATH, body), ("PUT", f"{PATH}/rules", {"content": "x"}), ("DELETE", f"{PATH}/rules", None)]
    for method, path, given in calls:
        assert ann.request(method, path, json=given).status_code == 403
        assert (
            ann.request(method, path, json=given, headers={"x-foreword-salt": b"foreword/public".hex()}).status_code
            == 403
        )
        with guarded.http() as stranger:
            assert stranger.request(method, path, json=given).status_code == 401
    assert ann.get(PATH).json()["data"] == []
    assert admin.post(PATH, json=body).status_code == 201
    assert ann.get(f"{PATH}/rules").json()["content"] == body["content"]
    assert [one["name"] for one in ann.get(PATH).json()["data"]] == ["rules"]
    assert ann.get("/v1/prefixes").json()["data"] == [], "it is not the tenant's"
    assert ann.delete("/v1/prefixes/rules").status_code == 404
    assert admin.delete(f"{PATH}/rules").json()["deleted"]
    assert ann.get(f"{PATH}/rules").status_code == 404


def test_tenants_share_it(guarded: SharedServer, admin: httpx.Client, ann: httpx.Client, bob: httpx.Client) -> None:
    """A marked text is cached for every tenant, by its text and by its name, up to its last full block, and the cache report
    says so. What follows is cached for its own tenant. Erasing that tenant leaves the public blocks."""
    content = words("house", 25)
    made = admin.post(PATH, json={"name": "house", "content": content}).json()
    size = guarded.engine.info.block_size
    shared = made["num_tokens"] // size * size
    tail = words("tail", 30)
    first, second = (report(one, prompt=f" {tail}", prefix="house") for one in (ann, bob))
    assert first["choices"][0]["text"] == second["choices"][0]["text"]
    for found in (first, second):
        assert found["cache_report"]["cached_tokens"] == found["cache_report"]["public_tokens"] == shared
    assert report(ann, prompt=f"{content} {tail}")["cache_report"]["cached_tokens"] >= shared
    assert report(bob, prompt=f" {tail}", prefix="house")["cache_report"]["cached_tokens"] > shared
    assert admin.get(PATH, headers={"authorization": "Bearer anns-secret"}).json()["data"][0]["uses"] == 3
    assert bob.delete("/v1/cache").json()["complete"]
    again = report(bob, prompt=f" {tail}", prefix="house")["cache_report"]
    assert again["cached_tokens"] == again["public_tokens"] == shared
    admin.delete(f"{PATH}/house")
    assert report(ann, prompt=f"{content} {words('more', 9)}")["cache_report"]["public_tokens"] == 0


def test_messages(admin: httpx.Client, ann: httpx.Client, bob: httpx.Client) -> None:
    """Messages that are marked are public in chats."""
    opening = [{"role": "system", "content": words("desk", 30)}]
    made = admin.post(PATH, json={"name": "desk", "messages": opening}).json()
    for number, client in enumerate((ann, bob)):
        chat = [*opening, {"role": "user", "content": f"I am number {number}."}]
        found = report(client, "/v1/chat/completions", messages=chat)["cache_report"]
        assert 0 < found["public_tokens"] == found["cached_tokens"] <= made["num_tokens"]
    admin.delete(f"{PATH}/desk")
