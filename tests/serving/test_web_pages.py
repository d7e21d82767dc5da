"""Requests of web pages at another address (CORS): browsers let a page read an answer only if its headers say so."""

from __future__ import annotations

import http_client
import pytest
from chat_replica import ChatReplica
from router_parts import Loop, RouterThread
from shared_server import SharedServers, another_server

from foreword.process_config import ServerConfig

PAGE = "https://chat.example.org"
ASKED = {"access-control-request-method": "POST", "access-control-request-headers": "authorization,content-type"}
ALLOW = "access-control-allow-origin"
KEYS = ("alice=alices-key",)


def asked(url: str, method: str, origin: str, path: str = "/v1/chat/completions", **headers: str) -> dict[str, str]:
    """The answer's status and headers."""
    answer = http_client.request(method, f"{url}{path}", headers={"origin": origin, **headers})
    return {"status": str(answer.status_code), **{name.lower(): value for name, value in answer.headers.items()}}


def check(url: str) -> None:
    """A page of `PAGE` is let in, and no other one."""
    ahead = asked(url, "OPTIONS", PAGE, **ASKED)
    assert (ahead["status"], ahead[ALLOW], ahead["access-control-allow-methods"]) == ("204", PAGE, "POST")
    assert (
        "authorization" in ahead["access-control-allow-headers"].lower()
        and "*" in ahead["access-control-allow-headers"]
    )
    for path, status in (("/v1/models", "401"), ("/nowhere", "404")):  # a page reads errors too
        answer = asked(url, "GET", PAGE, path)
        assert (answer["status"], answer[ALLOW], answer["vary"]) == (status, PAGE, "Origin")
    assert asked(url, "GET", PAGE, "/v1/models", authorization="Bearer alices-key")["status"] == "200"
    assert ALLOW not in asked(url, "OPTIONS", "https://evil.example", **ASKED)
    assert asked(url, "OPTIONS", PAGE)["status"] == "405"


def test_pages_that_the_operator_lists(shared: SharedServers) -> None:
    """A server asks no key of the browser's question before a request, and its answers can be read."""
    secret = "a secret of these tests"
    with another_server(shared, ServerConfig(port=0, api_keys=KEYS, tenant_secret=secret, allowed_origins=(PAGE,))) as (
        url,
        _,
    ):
        check(url)


def test_pages_at_a_router() -> None:
    """A router does the same, whatever its replicas say."""
    loop = Loop()
    replica = ChatReplica(loop)
    router = RouterThread("--replica", replica.url, "--api-keys", KEYS[0], "--allowed-origins", PAGE)
    try:
        check(router.wait_for(1).url)
    finally:
        router.kill()


@pytest.mark.parametrize("origins", [(), ("*",)])
def test_all_pages_or_none(shared: SharedServers, origins: tuple[str, ...]) -> None:
    """By default there is nothing that a browser could take for leave. `*` lets all pages in, but makes none an operator."""
    with another_server(shared, ServerConfig(port=0, allowed_origins=origins)) as (url, _):
        answers = [asked(url, "OPTIONS", PAGE, **ASKED), asked(url, "GET", PAGE, "/v1/models")]
        assert [answer.get(ALLOW) for answer in answers] == [*origins * 2] or [None, None]
        assert [answer["status"] for answer in answers] == ["204" if origins else "405", "200"]
        assert asked(url, "GET", PAGE, "/v1/router/state")["status"] == "404"
        assert asked(url, "DELETE", PAGE, "/v1/cache")["status"] == "403"
