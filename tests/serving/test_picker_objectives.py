"""Objectives of a gateway's requests that the cluster has: InferenceObjectives of a pool, from a server that speaks the API."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from kubernetes_api import KubernetesApi, objective, objectives_path
from router_parts import Loop
from shared_server import until
from test_picker_headers import picking

from foreword.configuration import Config
from foreword.errors import ConfigError
from foreword.process_config import RouterConfig
from foreword.router_extras import kubernetes_watch
from foreword.router_extras.installed import InstalledExtras

OLDER = objectives_path("inference.networking.x-k8s.io/v1alpha2")
NEWER = objectives_path("llm-d.ai/v1alpha2")
UNKNOWN = 3  # the priority that the body of each request asks for


@contextmanager
def priorities(api: KubernetesApi, *flags: str) -> Iterator[Any]:
    """A function that asks a picker about a request with this objective, and returns the priority that its replica gets."""
    pool = ("--picker-objectives", "llm/llama", "--kubernetes-api", api.url)
    with picking(*pool, *flags, f"router.kubernetes_credentials={api.folder}") as ask:
        yield lambda name: ask({"x-gateway-inference-objective": name}, priority=UNKNOWN).body.get("priority")


@pytest.fixture
def loop() -> Iterator[Loop]:
    one = Loop()
    yield one
    one.loop.call_soon_threadsafe(one.loop.stop)


def test_objectives_follow_the_cluster(loop: Loop, tmp_path: Path) -> None:
    """An objective has the priority that its object has now: one that is there at the start, one that comes, changes and goes,
    and one without a priority, which has 0, as a body without the field. That of another pool, and a name that no object has,
    change nothing. A failing API server changes nothing, and neither does a cluster that has one of the two kinds only."""
    api = KubernetesApi(loop, tmp_path, OLDER)
    for name, spec in (("premium", {"priority": 10}), ("batch", {"priority": -5}), ("plain", {})):
        api.put(objective(name, **spec), OLDER)
    api.put(objective("theirs", pool="qwen", priority=7), OLDER)
    with priorities(api, "--picker-trusts-headers") as asked:
        until(lambda: asked("premium") == -10)
        assert [asked(name) for name in ("batch", "plain", "theirs", "none")] == [5, None, UNKNOWN, UNKNOWN]
        api.put(objective("new", priority=1 << 40), OLDER)
        until(lambda: asked("new") == -((1 << 31) - 1))
        api.put(objective("premium", priority=20), OLDER)
        until(lambda: asked("premium") == -20)
        watches = api.watches
        api.refusing = 500
        api.close_watches()
        assert (asked("premium"), asked("batch")) == (-20, 5)
        api.delete("batch", OLDER)
        api.compact()
        api.refusing = 0
        until(lambda: asked("batch") == UNKNOWN)
        assert asked("premium") == -20 and api.watches > watches


def test_whose_objective_counts(loop: Loop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The option's objective counts before the cluster's of this name, and the newer kind's before the older one's. A kind
    that the cluster gets later is found, and is no more known once it is gone."""
    monkeypatch.setattr(kubernetes_watch, "_MAX_PAUSE", 0.2)
    api = KubernetesApi(loop, tmp_path, OLDER)
    for name in ("own", "both", "old"):
        api.put(objective(name, priority=1), OLDER)
    with priorities(api, "--picker-trusts-headers", "--picker-objectives", "own=9") as asked:
        until(lambda: asked("old") == -1)
        assert (asked("own"), asked("both")) == (-9, -1)
        api.objects[NEWER] = {}
        api.put(objective("both", priority=2), NEWER)
        api.put(objective("own", priority=2), NEWER)
        until(lambda: asked("both") == -2)
        assert (asked("own"), asked("old")) == (-9, -1)
        del api.objects[NEWER]
        api.close_watches()
        until(lambda: asked("both") == -1)


def test_a_client_cannot_be_more_urgent(loop: Loop, tmp_path: Path) -> None:
    """Without a trusted gateway the cluster's objectives make a request only less urgent, as those of the option do."""
    api = KubernetesApi(loop, tmp_path, OLDER)
    api.put(objective("premium", priority=10), OLDER)
    api.put(objective("batch", priority=-5), OLDER)
    with priorities(api) as asked:
        until(lambda: asked("batch") == 5)
        assert asked("premium") == UNKNOWN


@pytest.mark.parametrize("entry", ["llm/", "/llama", "llm/Llama", "llm/llama/x", "a b/c"])
def test_pools_that_are_none(entry: str) -> None:
    """A malformed pool is refused before anything starts, with how one is written."""
    given = RouterConfig(picker="127.0.0.1:0", picker_objectives=(entry,), kubernetes_api="http://127.0.0.1:1")
    with pytest.raises(ConfigError, match="NAMESPACE/POOL"):
        InstalledExtras().check(Config(router=given))


def test_objectives_outside_of_a_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    """Objectives of a pool are refused before anything starts, where it is not known which cluster has it."""
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    with pytest.raises(ConfigError, match="--kubernetes-api"):
        InstalledExtras().check(Config(router=RouterConfig(picker="127.0.0.1:0", picker_objectives=("llm/llama",))))
