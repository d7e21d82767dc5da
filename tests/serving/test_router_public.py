"""Public prefixes behind a router: who may mark them there, and that every tenant's requests go where they are."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import http_client
import pytest
from router_parts import RouterProcess
from server_process import ControlledProcess, running
from shared_server import until, words

pytestmark = pytest.mark.timeout(300)
SECRETS = ["--tenant-secret", "the tenants of these tests", "--admin-key", "the key of an operator"]
KEY = "the key of the router"
OPERATOR = {"authorization": "Bearer the key of an operator"}
TENANTS = [{"authorization": f"Bearer {name}-has-this-key"} for name in ("ann", "bob", "cyd", "dee")]


@pytest.fixture(scope="module")
def servers() -> Iterator[list[ControlledProcess]]:
    flags = ["--kv-events", "tcp://127.0.0.1:0", "--dtype", "float32", "--router-key", KEY, *SECRETS]
    with running(*flags) as started:
        yield started


@pytest.fixture(scope="module")
def router(servers: list[ControlledProcess]) -> Iterator[RouterProcess]:
    replicas = [part for one in servers for part in ("--replica", one.url())]
    keys = [part for name in ("ann", "bob", "cyd", "dee") for part in ("--api-keys", f"{name}={name}-has-this-key")]
    process = RouterProcess(*replicas, *keys, *SECRETS, "--replica-key", KEY).wait_for(2)
    yield process
    process.kill()


def ask(router: RouterProcess, tenant: dict[str, str], prompt: str, **more: Any) -> tuple[str, int, dict[str, Any]]:
    """The replica that served a request, what the router expected there, and the cache report."""
    body = {"prompt": prompt, "max_tokens": 2, "temperature": 0, "cache_report": True, **more}
    answer = http_client.post(f"{router.url}/v1/completions", json=body, headers=tenant).raise_for_status()
    listed = http_client.get(f"{router.url}/v1/router/decisions?last=1", headers=OPERATOR).json()["data"]
    where = answer.headers["x-foreword-route"].partition(": ")[0]
    return where, listed[0]["expected_cached_tokens"], answer.json()["cache_report"]


def known(router: RouterProcess) -> int:
    listed = http_client.get(f"{router.url}/v1/router/replicas", headers=OPERATOR).json()["data"]
    return sum(one["known_blocks"] for one in listed)


def test_requests_of_every_tenant_go_where_it_is(router: RouterProcess, servers: list[ControlledProcess]) -> None:
    """Requests of all tenants that begin with a public text go to the one server that has it and find it cached; the router
    expects what they find, also of what a tenant's own turn has left behind it."""
    for number, process in enumerate(servers):
        content, path = words(f"law{number}", 80), f"{process.url()}/v1/public/prefixes/law{number}"
        before = known(router)
        made = http_client.put(path, json={"content": content}, headers=OPERATOR).raise_for_status().json()
        shared = made["num_tokens"] // 16 * 16
        until(lambda before=before, shared=shared: known(router) >= before + shared // 16)  # type: ignore[misc]
        for tenant in TENANTS:
            where, expected, report = ask(router, tenant, f"{content} {words('own', 60)}")
            assert where == process.url() and expected == shared
            assert report["cached_tokens"] == report["public_tokens"] == shared
        public = before + shared // 16
        until(lambda public=public: known(router) >= public + len(TENANTS))  # type: ignore[misc]
        where, expected, report = ask(router, TENANTS[0], f"{content} {words('own', 60)} and more")
        assert where == process.url() and expected > shared and report["cached_tokens"] > shared


def test_marks_at_the_router(router: RouterProcess, servers: list[ControlledProcess]) -> None:
    """The router's operator marks and unmarks a text on all servers, tenants do not. All tenants can use its name."""
    path, content = f"{router.url}/v1/public/prefixes", words("everywhere", 40)
    body = {"name": "all", "content": content}
    for tenant in TENANTS[:2]:
        assert http_client.post(path, json=body, headers=tenant).status_code == 403
        assert http_client.delete(f"{path}/all", headers=tenant).status_code == 403
    made = http_client.post(path, json=body, headers=OPERATOR).raise_for_status()
    assert made.headers["x-foreword-replicas"] == "2 of 2"
    for process in servers:
        listed = http_client.get(f"{process.url()}/v1/public/prefixes/all", headers={"authorization": f"Bearer {KEY}"})
        assert listed.json()["content"] == content
    for tenant in TENANTS:
        assert http_client.get(f"{path}/all", headers=tenant).json()["version"] == 1
        _, _, report = ask(router, tenant, " and then", prefix="all")
        assert report["public_tokens"] == made.json()["num_tokens"] // 16 * 16
    assert http_client.delete(f"{path}/all", headers=OPERATOR).raise_for_status().json()["deleted"]
    _, _, report = ask(router, TENANTS[1], f"{content} and then")
    assert report["public_tokens"] == 0
