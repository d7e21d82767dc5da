"""API keys, and what tenants can and cannot learn of each other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest
from shared_server import SharedServers, words

from foreword.api.rights import Tenants
from foreword.blocks.salt import derive_salt
from foreword.config_layers import build
from foreword.errors import ConfigError
from foreword.process_config import ServerConfig
from foreword.request_errors import Unauthorized


def cached(shared: SharedServers, key: str, prompt: str, **more: Any) -> int:
    body = {"prompt": prompt, "max_tokens": 1, **more}
    with shared.keyed.http(key) as client:
        usage = client.post("/v1/completions", json=body).raise_for_status().json()["usage"]
    return int(usage["prompt_tokens_details"]["cached_tokens"])


def test_tenants_do_not_share_the_cache(shared: SharedServers) -> None:
    """A prompt that one tenant sent is cached for that tenant and never seen by another."""
    prompt = words("private", 60)
    assert cached(shared, "alice0-secret", prompt) == 0
    assert cached(shared, "alice0-secret", prompt) > 0
    assert cached(shared, "bob0-secret", prompt) == 0
    assert cached(shared, "lonely-secret", prompt) == 0
    assert cached(shared, "bob0-secret", prompt) > 0


def test_a_salt_from_the_client_stays_within_its_tenant(shared: SharedServers) -> None:
    """`cache_salt` separates requests of one tenant, and gives access to no other tenant's blocks."""
    prompt = words("salted", 60)
    assert cached(shared, "alice1-secret", prompt) == 0
    salt = derive_salt(b"a secret of the tests", "alice1")
    for value in ("x", salt.hex(), salt.decode("latin-1")):
        assert cached(shared, "alice1-secret", prompt, cache_salt=value) == 0
        assert cached(shared, "alice1-secret", prompt, cache_salt=value) > 0
        assert cached(shared, "bob1-secret", prompt, cache_salt=value) == 0
    assert cached(shared, "alice1-secret", prompt, cache_salt="", salt="x") > 0


def test_cache_report_hides_other_tenants(shared: SharedServers) -> None:
    """A cache report does not reveal that another tenant has the prefix."""
    prompt = words("secretive", 60)
    cached(shared, "alice2-secret", prompt)
    body = {"prompt": prompt, "max_tokens": 1, "cache_report": True}
    with shared.keyed.http("bob2-secret") as client:
        report = client.post("/v1/completions", json=body).json()["cache_report"]
    assert report["cached_tokens"] == 0 and report["reason"] != "other_tenant"


def test_tenants_have_their_own_prefixes(shared: SharedServers) -> None:
    """A named prefix of one tenant is neither listed for another nor usable, shown or removable by it."""
    with shared.keyed.http("alice3-secret") as alice, shared.keyed.http("bob3-secret") as bob:
        made = alice.post("/v1/prefixes", json={"name": "mine", "content": words("mine", 10)})
        assert made.status_code == 201
        assert [item["name"] for item in alice.get("/v1/prefixes").json()["data"]] == ["mine"]
        assert bob.get("/v1/prefixes").json()["data"] == []
        used = bob.post("/v1/completions", json={"prompt": "x", "prefix": "mine"})
        for answer in (bob.get("/v1/prefixes/mine"), bob.delete("/v1/prefixes/mine"), used):
            assert answer.status_code == 404 and "mine'. Did" not in answer.json()["error"]["message"]
        assert alice.delete("/v1/prefixes/mine").status_code == 200


@pytest.mark.parametrize("header", [None, "", "Bearer", "Basic alice3-secret", "Bearer alice3-secre", "Bearer é"])
def test_wrong_keys(shared: SharedServers, header: str | None) -> None:
    """A key that the server does not know is a 401, however it is written; test_fronts.py has all routes. Probes need none."""
    headers = [] if header is None else [(b"authorization", header.encode())]
    with httpx.Client(base_url=shared.keyed.url, headers=headers, timeout=60) as client:
        answer = client.get("/v1/models")
        assert answer.status_code == 401 and answer.headers["www-authenticate"] == "Bearer"
        assert answer.json()["error"]["code"] == "invalid_api_key"
        for path in ("/health", "/ready", "/version", "/metrics"):
            assert client.get(path).status_code == 200


def test_keys_from_configuration_and_file(tmp_path: Path) -> None:
    """Keys come from the configuration and from a file with comments; one tenant may have several keys."""
    path = tmp_path / "keys"
    path.write_text("# staff\nalice=second-key  # laptop\n\nbare-key\n", encoding="utf-8")
    given = {"api_keys": ["alice=first-key", f"file:{path}"], "tenant_secret": "a secret of the tests"}
    config = build(ServerConfig, "server", given)
    tenants = Tenants.from_config(config)
    first, second, bare = (tenants.authenticate(f"Bearer {key}") for key in ("first-key", "second-key", "bare-key"))
    assert first == second and first.name == "alice" and first.salt == derive_salt(b"a secret of the tests", "alice")
    assert bare.salt not in (first.salt, b"")
    with pytest.raises(Unauthorized):
        tenants.authenticate("Bearer staff")


def test_salts_depend_on_the_secret() -> None:
    """Servers with the same secret derive the same salts; without one each start derives new ones."""
    given = [
        Tenants.from_config(ServerConfig(api_keys=("a=key-of-a",), tenant_secret="a secret of the tests"))
        for _ in range(2)
    ]
    drawn = [Tenants.from_config(ServerConfig(api_keys=("a=key-of-a",))) for _ in range(2)]
    assert len({tenants.authenticate("Bearer key-of-a").salt for tenants in given}) == 1
    assert len({tenants.authenticate("Bearer key-of-a").salt for tenants in drawn}) == 2


def test_no_keys_one_tenant() -> None:
    """Without keys all callers are one tenant with an empty salt, whatever headers they send."""
    tenants = Tenants.from_config(ServerConfig())
    assert tenants.authenticate(None).salt == tenants.authenticate("Bearer x").salt == b""


@pytest.mark.parametrize("entry", ["", "a=", "=key", "two words", "c2VjcmV0==", "schlüssel"])
def test_malformed_keys(entry: str) -> None:
    """A malformed entry is a ConfigError that does not repeat the secret."""
    with pytest.raises(ConfigError) as caught:
        Tenants.from_config(ServerConfig(api_keys=(entry,)))
    assert not entry or entry not in caught.value.message


def test_key_mistakes_of_the_operator(tmp_path: Path) -> None:
    """A key that two tenants have, and a key file that cannot be read or has comments only, are ConfigErrors."""
    with pytest.raises(ConfigError, match="twice"):
        Tenants.from_config(ServerConfig(api_keys=("a=same-key", "b=same-key")))
    with pytest.raises(ConfigError, match=r"cannot read server\.api_keys from .*absent"):
        build(ServerConfig, "server", {"api_key_file": str(tmp_path / "absent")})
    (tmp_path / "comments").write_text("# alice=key\n\n  # bob=key\n")
    with pytest.raises(ConfigError, match=r"server\.api_keys has no key"):
        Tenants.from_config(build(ServerConfig, "server", {"api_key_file": str(tmp_path / "comments")}))
