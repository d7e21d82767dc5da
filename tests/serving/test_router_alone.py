"""A router without the package of its extras: it routes, and says of what it does not have which package has it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import http_client
import pytest
from hostile_replica import TEXT, HostileReplica
from router_parts import Loop, RouterThread, _config

from foreword.errors import ConfigError
from foreword.process_config import RouterConfig, ServerConfig
from foreword.router.discovery import configured_replicas
from foreword.router.extras import extras_for, installed_extras, order_for
from foreword.router.process import check
from foreword.router.router import Router

_OTHER = (
    ("POST", "/v1/messages"),
    ("POST", "/v1/messages/count_tokens"),
    ("POST", "/v1/responses"),
    ("GET", "/v1/responses/resp_1"),
)


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of the extras can be imported."""
    for name in [name for name in sys.modules if f"{name}.".startswith("foreword.router_extras.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "foreword.router_extras", None)


@pytest.fixture
def router(alone: None) -> Iterator[RouterThread]:
    started = RouterThread("--replica", HostileReplica(Loop()).url)
    try:
        yield started.wait_for(1)
    finally:
        started.kill()


def test_it_routes(router: RouterThread) -> None:
    """A request is answered, the state and metrics are shown, and a path of the extras names their package."""
    answer = http_client.post(f"{router.url}/v1/completions", json={"prompt": "a", "max_tokens": 8})
    assert answer.json()["choices"][0]["text"] == TEXT
    assert http_client.get(f"{router.url}/v1/router/state").json()["ready"]
    assert router.metric("foreword:router_audits_total") == 0
    for method, path in (
        ("GET", "/ui/"),
        ("POST", "/v1/prefixes"),
        ("DELETE", "/v1/cache"),
        ("POST", "/v1/cache/pin"),
        *_OTHER,
    ):
        refused = http_client.request(method, router.url + path, json={})
        assert refused.status_code == 404 and "foreword-route-extras" in refused.text, path
    named = http_client.post(
        f"{router.url}/v1/completions", json={"prompt": "a", "max_tokens": 8, "prefix": "greeting"}
    )
    assert named.status_code == 400 and "foreword-route-extras" in named.text


@pytest.mark.usefixtures("alone")
def test_settings_name_the_package() -> None:
    """A setting of the extras is a configuration error that names the setting and the package."""
    with pytest.raises(ConfigError, match="--picker needs the package foreword-route-extras"):
        extras_for("--picker")
    with pytest.raises(ConfigError, match="--replica-service needs the package foreword-route-extras"):
        configured_replicas(RouterConfig(replica_services=("default/vllm",)))
    with pytest.raises(ConfigError, match="--volatile-lines needs the package foreword-route-extras"):
        order_for(ServerConfig(volatile_lines=("profiles",)))


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(
    ("setting", "value"),
    [
        *[("--audit-every", "5"), ("--audit-reports", "reports"), ("--cost-file", "costs"), ("--measure-seconds", "3")],
        *[("--min-prefill", "10"), ("--otlp-endpoint", "http://127.0.0.1:3"), ("--prefix-file", "prefixes")],
        *[("--record", "trace"), ("--response-memory", "1MiB"), ("--usage-ledger", "ledger"), ("--warm-seconds", "5")],
    ],
)
def test_no_setting_is_ignored(setting: str, value: str, tmp_path: Path) -> None:
    """A setting that only the extras follow is refused by its name, by the check of a configuration and by a router, and
    nothing is written; its default is not, nor 0 seconds, which is what a router without them does."""
    given = str(tmp_path / value) if value.isalpha() else value
    config = _config("--replica", "http://127.0.0.1:1", setting, given)
    for start in (check, Router):
        with pytest.raises(ConfigError, match=f"{setting} needs the package foreword-route-extras"):
            start(config)
    assert not list(tmp_path.iterdir())
    for seconds in ("0", "10"):
        check(_config("--replica", "http://127.0.0.1:1", "--warm-seconds", seconds, "--measure-seconds", seconds))


@pytest.mark.usefixtures("alone")
def test_extras_that_lack_a_module_are_not_absent(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the package is installed and a module that it imports is missing, the error says so: nothing is turned off."""
    assert installed_extras() is None
    monkeypatch.delitem(sys.modules, "foreword.router_extras")
    monkeypatch.setitem(sys.modules, "foreword.router_extras.installed", None)
    with pytest.raises(ModuleNotFoundError, match=r"router_extras\.installed"):
        installed_extras()
