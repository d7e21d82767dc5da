"""Specifications of replicas."""

from __future__ import annotations

import pytest

from foreword.config import RouterConfig
from foreword.errors import ConfigError
from foreword.router.discovery import configured_replicas
from foreword.router.replicas import ReplicaSpec, parse_spec


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
        ("http://me:hunter2@a:1", "key"),
    ],
)
def test_dns_names(url: str, said: str) -> None:
    """The same holds for DNS names."""
    with pytest.raises(ConfigError) as refused:
        configured_replicas(RouterConfig(replica_dns=(url,)))
    assert said in str(refused.value) and "hunt" not in str(refused.value)
