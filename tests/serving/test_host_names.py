"""The `Host` of a request to a front without keys: against DNS rebinding."""

from __future__ import annotations

import http.client
from urllib.parse import urlsplit

import pytest
from router_parts import RouterThread
from shared_server import SharedServers, another_server

from foreword.process_config import ServerConfig

OWN = (
    "127.0.0.1",
    "localhost",
    "[::1]:8000",
    "10.0.0.7:8000",
    "server",
    "r.llm.svc",
    "a.svc.cluster.local",
    "kv.internal",
)
FOREIGN = (
    "evil.example",
    "127.0.0.1.evil.example",
    "localhost.evil.example:8000",
    "evil.example.",
    "x.svc.evil.example",
)


def status(url: str, host: str, path: str = "/v1/models", **headers: str) -> int:
    """The status of a request that names this host."""
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=60)
    try:
        connection.request("GET", path, headers={"host": host, **headers})
        answer = connection.getresponse()
        text = answer.read()
        assert answer.status != 403 or b"--allowed-hosts" in text
        return answer.status
    finally:
        connection.close()


@pytest.mark.parametrize("path", ["/v1/models", "/v1/requests", "/v1/prefixes", "/metrics", "/ui/data/kind"])
def test_a_server_without_keys_answers_to_its_own_names(shared: SharedServers, path: str) -> None:
    """A web page that has given its name this server's address reads nothing; addresses, short and private names go on."""
    with another_server(shared, ServerConfig(port=0, allowed_hosts=("kv.example.org",))) as (url, _):
        assert [status(url, host, path) for host in FOREIGN] == [403] * len(FOREIGN)
        assert 403 not in {status(url, host, path) for host in (*OWN, "KV.example.org.:8000")}


def test_a_router_without_keys_does_too() -> None:
    """A router without keys refuses foreign host names as a server does."""
    router = RouterThread("--replica", "http://127.0.0.1:1", "--max-body", "1MiB")
    try:
        assert [status(router.url, host, "/metrics") for host in FOREIGN] == [403] * len(FOREIGN)
        assert 403 not in {status(router.url, host, "/metrics") for host in OWN}
    finally:
        router.kill()


def test_keys_take_the_place_of_names(shared: SharedServers) -> None:
    """Where keys are required, a page has none, and the name does not matter."""
    given = ServerConfig(port=0, api_keys=("alice=alices-key",), tenant_secret="a secret of these tests")
    with another_server(shared, given) as (url, _):
        assert status(url, "kv.example.org", authorization="Bearer alices-key") == 200
        assert status(url, "evil.example") == 401
