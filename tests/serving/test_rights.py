"""Rights of each caller to servers and to the cache of others."""

from __future__ import annotations

import pytest
from shared_server import SharedServers, words
from test_tenants import cached

from foreword.api.rights import is_local


def test_clearing_the_cache_leaves_other_tenants_alone(shared: SharedServers) -> None:
    """`DELETE /v1/cache` removes the caller's blocks from the device and those of no other tenant."""
    prompt = words("kept", 60)
    for key in ("alice4-secret", "bob4-secret"):
        cached(shared, key, prompt)
    with shared.keyed.http("bob4-secret") as bob:
        assert bob.delete("/v1/cache").raise_for_status().json()["device_blocks"] > 0
    assert cached(shared, "bob4-secret", prompt) == 0
    assert cached(shared, "alice4-secret", prompt) > 0


@pytest.mark.parametrize("header", ["x-forwarded-for", "forwarded", "via", "origin"])
def test_without_keys_only_local_programs_are_operators(shared: SharedServers, header: str) -> None:
    """Without keys, what an operator may do is refused behind a proxy and from web pages."""
    with shared.open.http() as client:
        for path in ("/v1/cache", "/v1/cache?scope=device"):
            assert client.delete(path, headers={header: "10.0.0.9"}).status_code == 403
        assert client.post("/v1/drain", json={}, headers={header: "10.0.0.9"}).status_code == 403
        assert client.delete("/v1/cache?scope=device").status_code == 200


def test_local_addresses() -> None:
    """Loopback addresses are local in every spelling, others are not."""
    assert all(is_local(host, {}) for host in ("127.0.0.1", "127.8.0.1", "::1", "::ffff:127.0.0.1"))
    assert not any(is_local(host, {}) for host in ("10.0.0.1", "::ffff:10.0.0.1", "", None, "localhost.evil"))


def test_keys_as_anthropic_clients_send_them(shared: SharedServers) -> None:
    """`x-api-key` is a key like that of the Authorization header; a wrong one is refused."""
    with shared.keyed.http() as client:
        assert client.get("/v1/models", headers={"x-api-key": "alice4-secret"}).status_code == 200
        assert client.get("/v1/models", headers={"x-api-key": "alice4"}).status_code == 401
