"""Specifications of replicas and of Kubernetes Services."""

from __future__ import annotations

import msgspec
import pytest
from kubernetes_api import endpoint, endpoint_slice

from foreword.errors import ConfigError
from foreword.process_config import RouterConfig
from foreword.router.discovery import configured_replicas
from foreword.router.replicas import ReplicaSpec, parse_spec
from foreword.router_extras.kubernetes import EndpointSlice, ServiceSpec
from foreword.router_extras.kubernetes_watch import ApiServer


@pytest.mark.parametrize(
    ("text", "spec"),
    [
        ("http://a:8000", ReplicaSpec("http://a:8000")),
        ("https://a/v1", ReplicaSpec("https://a")),
        ("http://[::1]:8000/", ReplicaSpec("http://[::1]:8000")),
        ("http://a:1 role=prefill max_waiting=7", ReplicaSpec("http://a:1", role="prefill", max_waiting=7)),
        (
            "http://a:1 events=tcp://a:2 replay=tcp://a:3",
            ReplicaSpec("http://a:1", events="tcp://a:2", replay="tcp://a:3"),
        ),
    ],
)
def test_valid_specifications(text: str, spec: ReplicaSpec) -> None:
    """A URL with options is parsed."""
    assert parse_spec(text) == spec


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a:8000", "written as a URL"),
        ("http://", "written as a URL"),
        ("http://a:none", "written as a URL"),
        ("http://a:70000", "written as a URL"),
        ("http://[::1", "written as a URL"),
        ("http://a:1/v2", "written as a URL"),
        ("http://a:1?x=1", "no password and no query"),
        ("http://me:hunter2@a:1", "--replica-key"),
        ("http://me:hunter2@a:none", "--replica-key"),
        ("http://me:hunt]er2@[a", "--replica-key"),
        ("http://a:1 roll=both", "Did you mean 'role'"),
        ("http://a:1 role=both_of_them", "its role is both, prefill or decode"),
        ("http://a:1 max_waiting=0", "a number of at least 1"),
    ],
)
def test_invalid_specifications_are_explained_without_passwords(text: str, said: str) -> None:
    """An invalid specification raises an error that explains the mistake and never repeats a password."""
    with pytest.raises(ConfigError) as refused:
        parse_spec(text)
    assert said in str(refused.value) and "hunt" not in str(refused.value)


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("https://a:1", "such as http://name:8000"),
        ("http://a:none", "such as http://name:8000"),
        ("http://[::1", "such as http://name:8000"),
        ("http://a..b:8000", "such as http://name:8000"),
        ("http://me:hunter2@a:1", "key"),
    ],
)
def test_dns_names(url: str, said: str) -> None:
    """Replicas by DNS names are found as those of the other lists are."""
    with pytest.raises(ConfigError) as refused:
        configured_replicas(RouterConfig(replica_dns=(url,)))
    assert said in str(refused.value) and "hunt" not in str(refused.value)


def slices(*given: dict[str, object]) -> dict[str, EndpointSlice]:
    found = msgspec.json.decode(msgspec.json.encode(given), type=list[EndpointSlice])
    return {one.metadata.name: one for one in found}


@pytest.mark.parametrize(
    ("text", "port"), [("llm/vllm:http", 8000), ("llm/vllm:8001", 8001), ("llm/vllm", None), ("llm/vllm:other", None)]
)
def test_ports_of_a_service(text: str, port: int | None) -> None:
    """A port is named or numbered; without either the pods must have one port only."""
    found = ServiceSpec.parse(text).replicas(slices(endpoint_slice("a", 8000, endpoint("10.0.0.1"))))
    assert [spec.url for spec in found] == ([f"http://10.0.0.1:{port}"] if port else [])


def test_endpoints_of_a_service() -> None:
    """A pod counts once: in two slices while it moves, and with addresses of both families. Those that terminate do
    not count."""
    found = ServiceSpec.parse("llm/vllm:http role=prefill").replicas(
        slices(
            endpoint_slice("a", 8000, endpoint("10.0.0.1", ready=False), endpoint("10.0.0.2", terminating=True)),
            endpoint_slice("b", 8000, endpoint("10.0.0.1", ready=True), endpoint("10.0.0.3", ready=False)),
            endpoint_slice("c", 8000, endpoint("fd00::1"), family="IPv6"),
            endpoint_slice("d", 8000),
        )
    )
    assert {(spec.url, spec.role): ready for spec, ready in found.items()} == {
        ("http://10.0.0.1:8000", "prefill"): True,
        ("http://10.0.0.3:8000", "prefill"): False,
    }
    only = ServiceSpec.parse("llm/vllm:http").replicas(
        slices(endpoint_slice("c", 1, endpoint("fd00::1"), family="IPv6"))
    )
    assert [spec.url for spec in only] == ["http://[fd00::1]:1"]
    assert ServiceSpec.parse("llm/vllm events=tcp://*:5557").replica.events == "tcp://*:5557"


@pytest.mark.parametrize(
    "text", ["vllm", "llm/", "LLM/vllm", "llm/vllm:http:1", "llm/vllm:0", "llm/../x", "a/b events=tcp://c:1"]
)
def test_services(text: str) -> None:
    """A Service that cannot exist is an error before the router starts."""
    with pytest.raises(ConfigError):
        configured_replicas(RouterConfig(replica_services=(text,), kubernetes_api="http://127.0.0.1:1"))


def test_where_the_kubernetes_api_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Inside a cluster the environment names it, IPv6 too; outside the operator must."""
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    with pytest.raises(ConfigError, match="--kubernetes-api"):
        ApiServer(None, "/none")
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "fd00::1")
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", "6443")
    assert ApiServer(None, "/none").url == "https://[fd00::1]:6443"
