"""Replicas of a Kubernetes Service: the router follows its EndpointSlices, against a server that speaks the API."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import http_client
import msgspec
import pytest
from kubernetes_api import PATH, KubernetesApi, endpoint, endpoint_slice
from router_parts import Loop, RouterThread
from shared_server import until
from test_router_faults import Scripted

from foreword.router_extras import kubernetes_watch
from foreword.router_extras.kubernetes import EndpointSlice, ServiceSpec
from foreword.router_extras.kubernetes_watch import ApiServer
from foreword.router_extras.pod_costs import ANNOTATION, PodCosts

READY = endpoint("127.0.0.1", ready=True, serving=True, terminating=False)


@pytest.fixture
def loop() -> Iterator[Loop]:
    one = Loop()
    yield one
    one.close()


@contextmanager
def following(api: KubernetesApi) -> Iterator[RouterThread]:
    given = ["--replica-service", "llm/vllm:http", "--kubernetes-api", api.url]
    router = RouterThread(*given, f"router.kubernetes_credentials={api.folder}")
    try:
        yield router
    finally:
        router.kill()


def listed(router: RouterThread) -> dict[str, str]:
    """Each replica, and why it takes no requests."""
    found = http_client.get(f"{router.url}/v1/router/replicas").json()["data"]
    return {one["replica"]: one["reason"] or "" for one in found}


def port(one: Scripted) -> int:
    return int(one.url.rpartition(":")[2])


def test_replicas_of_a_service(loop: Loop, tmp_path: Path) -> None:
    """Pods come, lose readiness and terminate; the API forgets its history, and refuses. The router always knows the replicas
    as of the last answer, and pods that are not ready get no requests."""
    api, one, two = KubernetesApi(loop, tmp_path), Scripted(loop), Scripted(loop)
    api.put(endpoint_slice("vllm-1", port(one), READY))
    with following(api) as router:
        router.wait_for(1)
        assert listed(router) == {one.url: ""}
        api.put(endpoint_slice("vllm-2", port(two), READY))
        until(lambda: listed(router) == {one.url: "", two.url: ""})
        api.put(endpoint_slice("vllm-2", port(two), endpoint("127.0.0.1", ready=False, serving=True)))
        until(lambda: "not ready" in listed(router)[two.url])
        for _ in range(4):
            answer = http_client.post(f"{router.url}/v1/completions", json={"model": "m", "prompt": "x"})
            assert answer.status_code == 200
        assert len(one.seen) == 4 and not two.seen
        api.put(endpoint_slice("vllm-2", port(two), READY))
        until(lambda: listed(router) == {one.url: "", two.url: ""})
        api.put(endpoint_slice("vllm-1", port(one), endpoint("127.0.0.1", ready=False, serving=True, terminating=True)))
        until(lambda: listed(router) == {two.url: ""})

        api.set_token("second")
        api.refusing = 403
        api.close_watches()
        until(lambda: "says 403" in router.text)
        assert listed(router) == {two.url: ""}, "a failing API server changes nothing"
        api.delete("vllm-2")
        api.put(endpoint_slice("vllm-3", port(one), READY))
        api.compact()
        api.refusing = 0
        until(lambda: listed(router) == {one.url: ""})


def test_failures_are_counted(loop: Loop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every list and every watch that fails is counted. A failure is logged once while it lasts, and again when it comes back
    after a watch had begun, also if nothing happened there."""
    monkeypatch.setattr(kubernetes_watch, "_MIN_PAUSE", 0.05)
    monkeypatch.setattr(kubernetes_watch, "_MAX_PAUSE", 0.05)
    api = KubernetesApi(loop, tmp_path)
    api.bookmarks = False
    with following(api) as router:
        for number in (1, 2):
            until(lambda count=number: api.watches == count)
            api.refusing = 500
            refused = api.refused[PATH]
            api.close_watches()
            until(lambda count=refused: api.refused[PATH] >= count + 3)
            assert router.text.count("says 500") == number
            api.refusing = 0
        until(lambda: api.watches == 3)
        counted = router.metric("foreword:router_watch_failures_total", watched="endpoints of llm/vllm")
        assert counted == api.refused[PATH]


def test_watches_that_fail_each_time(loop: Loop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where each list works and each watch begins and fails, that is one line in the log. It is counted each time, also where
    the version that a list has given is too old at once."""
    monkeypatch.setattr(kubernetes_watch, "_MIN_PAUSE", 0.05)
    monkeypatch.setattr(kubernetes_watch, "_MAX_PAUSE", 0.1)
    api = KubernetesApi(loop, tmp_path)
    api.bookmarks = False
    with following(api) as router:

        def fail(code: int) -> float:
            watches = api.watches
            api.send({"type": "ERROR", "object": {"kind": "Status", "code": code}})
            until(lambda: api.watches > watches)
            return router.metric("foreword:router_watch_failures_total", watched="endpoints of llm/vllm")

        until(lambda: api.watches == 1)
        assert [fail(500) for _ in range(4)] == [1, 2, 3, 4]
        assert router.text.count("the watch ended with 500") == 1 and "watched again" not in router.text
        api.put(endpoint_slice("vllm-1", 7001, READY))
        until(lambda: "watched again" in router.text)
        assert [fail(410) - 4 for _ in range(3)] == [1, 2, 3]


@pytest.mark.slow
def test_nothing_is_missed(loop: Loop, tmp_path: Path) -> None:
    """However changes, ended watches, forgotten versions, errors in the stream and new tokens follow each other, the router
    ends with the replicas of the last state."""
    rng = random.Random(5)
    api = KubernetesApi(loop, tmp_path)
    with following(api) as router:
        until(lambda: api.watches > 0)
        for _ in range(6):
            for _ in range(rng.randrange(1, 12)):
                name = f"vllm-{rng.randrange(6)}"
                if name in api.slices and rng.random() < 0.4:
                    api.delete(name)
                    continue
                hosts = rng.sample(range(2, 250), rng.randrange(4))
                pods = [endpoint(f"127.0.0.{host}", terminating=rng.random() < 0.3) for host in hosts]
                api.put(endpoint_slice(name, 7000 + int(name[-1]), *pods))
            watches, disturbance = api.watches, rng.randrange(4)
            if disturbance == 0:
                api.compact()
            elif disturbance == 1:
                api.set_token(f"token-{rng.random()}")
                api.close_watches()
            elif disturbance == 2:
                api.send({"type": "ERROR", "object": {"kind": "Status", "code": 410, "message": "too old"}})
                api.compact()
            if disturbance < 3:
                until(lambda count=watches: api.watches > count)
        expected = {
            f"http://{pod['addresses'][0]}:{one['ports'][1]['port']}"
            for one in api.slices.values()
            for pod in one["endpoints"] or ()
            if not pod["conditions"]["terminating"]
        }
        until(lambda: set(listed(router)) == expected)
        assert api.lists > 1 and api.watches > 1


def test_what_pods_hold(loop: Loop, tmp_path: Path) -> None:
    """A pod's annotation says how many blocks its replica holds. A small change is not written, a pod of another namespace is
    left alone, and what the API server refuses is tried again."""
    api = KubernetesApi(loop, tmp_path)
    pods = [
        {**endpoint(f"10.0.0.{number}"), "targetRef": {"kind": "Pod", "name": f"vllm-{number}", "namespace": namespace}}
        for number, namespace in ((1, "llm"), (2, "llm"), (3, "other"), (4, "llm"))
    ]
    pods[3]["conditions"] = {"terminating": True}
    one = endpoint_slice("vllm-1", 8000, *pods)
    api.put(one)
    service = ServiceSpec.parse("llm/vllm:http")
    found = service.pods({"vllm-1": msgspec.convert(one, EndpointSlice)})
    assert {url: pod.name for url, pod in found.items()} == {
        "http://10.0.0.1:8000": "vllm-1",
        "http://10.0.0.2:8000": "vllm-2",
    }
    held = {"http://10.0.0.1:8000": 100, "http://10.0.0.2:8000": 1 << 40}
    server = ApiServer(api.url, str(api.folder))
    costs = PodCosts(server, lambda: found, held.__getitem__)

    async def write() -> None:
        async with server.session() as session:
            await costs.write(session)

    asyncio.run(write())
    assert api.annotations == {"vllm-1": {ANNOTATION: "100"}, "vllm-2": {ANNOTATION: str((1 << 31) - 1)}}
    held["http://10.0.0.1:8000"] = 109
    asyncio.run(write())
    assert api.patches == ["vllm-1", "vllm-2"]
    held["http://10.0.0.1:8000"], api.refusing = 40, 403
    asyncio.run(write())
    api.refusing = 0
    asyncio.run(write())
    assert api.annotations["vllm-1"] == {ANNOTATION: "40"} and api.patches[2:] == ["vllm-1"]
