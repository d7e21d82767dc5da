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
from foreword.router_extras.gateway import objectives
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


def quick_watches(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Watches that try again at once. `caplog` has what they log."""
    caplog.set_level("INFO")
    monkeypatch.setattr(kubernetes_watch, "_MIN_PAUSE", 0.05)
    monkeypatch.setattr(kubernetes_watch, "_MAX_PAUSE", 0.05)


@contextmanager
def failing(loop: Loop, folder: Path) -> Iterator[Any]:
    """An API that a test lets fail, with the objectives premium (10) and batch (-5), and `priorities` once they are known."""
    api = KubernetesApi(loop, folder, OLDER)
    api.put(objective("premium", priority=10), OLDER)
    api.put(objective("batch", priority=-5), OLDER)
    with priorities(api, "--picker-trusts-headers") as asked:
        until(lambda: (asked("premium"), asked("batch")) == (-10, 5) and api.watches > 0)
        yield api, asked


@pytest.fixture
def loop() -> Iterator[Loop]:
    one = Loop()
    yield one
    one.close()


def test_objectives_follow_the_cluster(loop: Loop, tmp_path: Path) -> None:
    """An objective has the priority that its object has now: one that is there at the start, one that comes, changes and goes,
    and one without a priority, which has 0, as a body without the field. That of another pool, and a name that no object has,
    change nothing. Neither does a cluster that has one of the two kinds only."""
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
        api.delete("batch", OLDER)
        api.compact()
        until(lambda: asked("batch") == UNKNOWN)
        until(lambda: api.watches > watches)
        assert asked("premium") == -20


@pytest.mark.parametrize(("status", "said"), [(500, "says 500"), (403, "list and watch of inferenceobjectives")])
def test_a_failing_api_server_changes_nothing(
    loop: Loop,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    status: int,
    said: str,
) -> None:
    """Objectives stay as they are while the API server fails or refuses, which is logged once by watch however often it does,
    and follow it afterwards."""
    quick_watches(monkeypatch, caplog)
    with failing(loop, tmp_path) as (api, asked):
        api.refusing = status
        api.close_watches()
        # The second one comes after the first has had its effect.
        until(lambda: api.refused[OLDER] > 2 and api.refused[NEWER] > 2)
        assert (asked("premium"), asked("batch")) == (-10, 5)
        assert caplog.text.count(said) == 2
        api.refusing = 0
        api.delete("batch", OLDER)
        until(lambda: asked("batch") == UNKNOWN)
        until(lambda: "are watched again" in caplog.text)
        assert asked("premium") == -10


def test_kinds_that_are_absent(
    loop: Loop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A kind of objectives that a cluster does not have is logged once, and how many there are of one that it has, also if
    there are none."""
    monkeypatch.setattr(kubernetes_watch, "_MAX_PAUSE", 0.05)
    caplog.set_level("INFO")
    api = KubernetesApi(loop, tmp_path, OLDER)
    with priorities(api):
        until(lambda: api.absent[NEWER] > 2)
        until(lambda: "0 objectives (inference.networking.x-k8s.io/v1alpha2) of llm/llama, of 0" in caplog.text)
        assert caplog.text.count("has no inferenceobjectives of llm-d.ai/v1alpha2 (asked in the namespace llm)") == 1
        api.put(objective("theirs", pool="qwen", priority=7), OLDER)
        until(lambda: "0 objectives (inference.networking.x-k8s.io/v1alpha2) of llm/llama, of 1" in caplog.text)


DEEP = b'{"metadata": ' + b'{"x": ' * 100_000
HOSTILE = {"too deep": DEEP + b"\n", "no text": b'{"type": "\xff"}\n', "no JSON": b"<html>\n"}


@pytest.mark.parametrize("answer", HOSTILE.values(), ids=HOSTILE.keys())
def test_hostile_answers(
    loop: Loop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, answer: bytes
) -> None:
    """A watch outlasts answers, to a watch and to a list, that are nested too deeply, no text or no JSON. They change
    nothing."""
    quick_watches(monkeypatch, caplog)
    with failing(loop, tmp_path) as (api, asked):
        api.hostile = [answer, answer]
        api.close_watches()
        until(lambda: not api.hostile)
        api.delete("batch", OLDER)
        until(lambda: asked("batch") == UNKNOWN)
        assert asked("premium") == -10


def test_a_token_that_is_no_text(
    loop: Loop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A watch outlasts a token that cannot be read as text, and goes on with the next one."""
    quick_watches(monkeypatch, caplog)
    with failing(loop, tmp_path) as (api, asked):
        (api.folder / "token").write_bytes(b"\xff\xfe")
        api.close_watches()
        until(lambda: caplog.text.count("UnicodeDecodeError") == 2)
        assert asked("batch") == 5
        api.set_token("second")
        api.delete("batch", OLDER)
        until(lambda: asked("batch") == UNKNOWN)


def test_lists_without_an_end(
    loop: Loop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A list whose pages name each other, or that has ever new pages, is given up, and changes nothing."""
    monkeypatch.setattr(kubernetes_watch, "_MAX_PAGES", 20)
    quick_watches(monkeypatch, caplog)
    with failing(loop, tmp_path) as (api, asked):
        api.refusing = 500
        api.close_watches()
        until(lambda: api.refused[OLDER] > 0)
        api.next_page, api.refusing = "0", 0
        until(lambda: "a page of the list is followed by itself" in caplog.text)
        api.next_page = "new"
        until(lambda: "the list has more than 20 pages" in caplog.text)
        assert asked("batch") == 5
        api.next_page = ""
        api.delete("batch", OLDER)
        until(lambda: asked("batch") == UNKNOWN)


def test_an_event_looks_at_no_other_object(loop: Loop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The cost of an event does not grow with the number of objectives: once they are known, it reads the pool of none."""
    reads: list[str] = []

    class Counted(objectives.InferenceObjective):
        def __getattribute__(self, name: str) -> Any:
            if name == "spec":
                reads.append(name)
            return super().__getattribute__(name)

    monkeypatch.setattr(objectives, "InferenceObjective", Counted)
    api = KubernetesApi(loop, tmp_path, OLDER)
    for number in range(50):
        api.put(objective(f"one-{number}", priority=1), OLDER)
    with priorities(api, "--picker-trusts-headers") as asked:
        until(lambda: asked("one-49") == -1)
        reads.clear()
        for number in range(50):
            api.put(objective(f"one-{number}", priority=2), OLDER)
        asks = 0
        while asked("one-49") != -2:
            asks += 1
        assert 0 < len(reads) <= 2 * (asks + 1)


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
