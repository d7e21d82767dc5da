"""Replicas that serve one name with different weights: no response is spliced from two models, and the operator
learns of it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import http_client
import httpx
import pytest
from example_counts import represented
from router_parts import Loop, RouterThread
from shared_server import until
from speaker import NUM_WORDS, Speaker

A, B = "a1" * 32, "b2" * 32
KINDS = pytest.mark.parametrize("owner", represented(["vllm", "foreword"], "vllm"))


@pytest.fixture(scope="module")
def loop() -> Loop:
    return Loop()


@contextmanager
def routed(*replicas: Speaker, flags: tuple[str, ...] = ()) -> Iterator[RouterThread]:
    """A router that sends requests to the replicas by turns, the first one to the first replica."""
    urls = [argument for one in replicas for argument in ("--replica", one.url)]
    router = RouterThread(*urls, "--policy", "round-robin", "--failures", "1000", *flags)
    try:
        until(lambda: router.text.count(" serves ") >= len(replicas) or router.ended(), 120)
        until(lambda: sum(one["takes_requests"] for one in state(router).values()) == len(replicas))
        yield router
    finally:
        router.kill()


def state(router: RouterThread) -> dict[str, Any]:
    listed = http_client.get(f"{router.url}/v1/router/replicas").json()["data"]
    return {one["replica"]: one for one in listed}


def ask(router: RouterThread, **more: Any) -> httpx.Response:
    body = {"model": "m", "prompt": "count", "stream": True, "temperature": 0, "max_tokens": NUM_WORDS, **more}
    return http_client.post(f"{router.url}/v1/completions", json=body)


def heard(answer: httpx.Response) -> tuple[str, str]:
    """Reads what a client got: the text, and the message of the error that ended it."""
    assert answer.status_code == 200, answer.text
    events = [line.removeprefix("data: ") for line in answer.text.splitlines() if line]
    chunks = [json.loads(one) for one in events if one.startswith("{")]
    errors = [one["error"] for one in chunks if "error" in one]
    assert (events[-1] == "[DONE]") != bool(errors) and all(one["code"] == "replica_failed" for one in errors)
    text = "".join(choice["text"] for one in chunks for choice in one.get("choices", ()))
    return text, errors[0]["message"] if errors else ""


def said_by(weights: str, words: int = NUM_WORDS) -> str:
    return "".join(f"{weights[0]}{number} " for number in range(words))


def broken(router: RouterThread, replica: Speaker, after: int = 3) -> tuple[str, str]:
    """Breaks the first stream that this replica begins after some words, and returns what the client hears."""
    replica.cut_after = after
    while True:
        found = heard(ask(router))
        if replica.cut_after is None:
            return found


@KINDS
def test_a_stream_continues_on_its_own_weights_only(loop: Loop, owner: str) -> None:
    """Wherever the stream of a replica breaks, it is continued by the one with the same weights, never by the others."""
    first, other, same = (Speaker(loop, weights, owner) for weights in (A, B, A))
    with routed(first, other, same) as router:
        for words in range(1, NUM_WORDS):
            assert broken(router, first, words) == (said_by(A), "")
        assert router.metric("foreword:router_continuations_total", outcome="continued") == NUM_WORDS - 1
        assert not any("continuation" in body or isinstance(body["prompt"], list) for body in other.asked)
        # Before its first word any replica may begin again.
        assert broken(router, first, 0)[0] in (said_by(A), said_by(B))


@KINDS
def test_no_replica_has_the_same_weights(loop: Loop, owner: str) -> None:
    """The stream then ends with an error that says so, after a true prefix of the first replica's answer."""
    first, other = Speaker(loop, A, owner), Speaker(loop, B, owner)
    with routed(first, other) as router:
        first.at_cut = lambda: setattr(first, "weights", B)  # nothing may be asked of it again either
        text, error = broken(router, first)
        assert text == said_by(A, 3)
        assert "no other replica can continue it exactly" in error and "weights" in error
        assert router.metric("foreword:router_continuations_total", outcome="continued") <= 1
        assert router.metric("foreword:router_continuations_total", outcome="impossible") == 1


@KINDS
@pytest.mark.parametrize("publishes", [True, False])
def test_the_next_replica_restarts_with_other_weights(loop: Loop, owner: str, publishes: bool) -> None:
    """Between the first and the second part of a stream another process takes the address of the replica that is to continue
    it. That is noticed before the client gets a word of it, and the router then knows the replica's new weights."""
    if owner == "foreword" and not publishes:
        pytest.skip("Foreword's servers always publish their fingerprint")
    first, second = (Speaker(loop, A, owner, publishes=publishes) for _ in range(2))
    with routed(first, second) as router:
        weights = state(router)[second.url]["weights"]
        first.at_cut = lambda: second.restart(B)
        text, error = broken(router, first)
        # The first replica has the weights still: it may go on itself.
        assert (text, error) == (said_by(A), "") or (text == said_by(A, 3) and "weights" in error)
        assert "b" not in text
        until(lambda: state(router)[second.url]["weights"] not in (weights, None))
        assert f"{second.url} is asked again what it serves" in router.text


def test_the_replica_had_been_replaced_before_the_stream_began(loop: Loop) -> None:
    """A Foreword server says in each response which weights it has. So a stream continues with the weights that began it, also
    if the router knew others of that address."""
    first, same, other = (Speaker(loop, weights, "foreword") for weights in (A, B, A))
    with routed(first, same, other) as router:
        first.weights = B
        assert broken(router, first) == (said_by(B), "")
        until(lambda: state(router)[first.url]["weights"] == B)


def test_weights_that_are_told_apart_by_logprobs(loop: Loop) -> None:
    """vLLM servers without the connector: those that compute the same log-probabilities, but for noise, continue each other's
    streams, and no others do."""
    first, other, same = (
        Speaker(loop, weights, publishes=False, noise=noise) for weights, noise in ((A, 0.0), (B, 0.0), (A, 0.005))
    )
    with routed(first, other, same) as router:
        names = {url: one["weights"] for url, one in state(router).items()}
        assert names[first.url] == names[same.url] != names[other.url] and None not in names.values()
        for words in range(1, 5):
            assert broken(router, first, words) == (said_by(A), "")
        assert not any(isinstance(body["prompt"], list) for body in other.asked)


def test_unknown_weights_are_nobodys(loop: Loop) -> None:
    """Replicas of which nothing tells the weights serve requests. None of them continues a stream, its own neither."""
    speakers = [Speaker(loop, A, publishes=False, noise=None) for _ in range(2)]
    with routed(*speakers) as router:
        assert {one["weights"] for one in state(router).values()} == {None}
        assert router.text.count("which weights it has is not known") == 2 and "says 400" in router.text
        assert heard(ask(router)) == (said_by(A), "")
        text, error = broken(router, speakers[0])
        assert text == said_by(A, 3) and "which weights began it is not known" in error
        assert broken(router, speakers[0], 0) == (said_by(A), "")
        assert router.metric("foreword:router_model_fingerprints", model_name="m") == 0


@pytest.mark.extended
def test_a_server_that_publishes_its_fingerprint_late(loop: Loop) -> None:
    """vLLM's metrics have the fingerprint after its first step. The router then takes it instead of what it measured."""
    speaker = Speaker(loop, A, publishes=False)
    with routed(speaker, flags=("--health-interval", "0.1")) as router:
        assert state(router)[speaker.url]["weights"].startswith("logprobs-")
        speaker.publishes = True
        until(lambda: state(router)[speaker.url]["weights"] == A)
        assert "is asked again what it serves" not in router.text


@pytest.mark.extended
def test_a_replica_that_comes_back_with_other_weights(loop: Loop) -> None:
    """Facts of a replica are read again when it was away, and when its metrics are those of another process."""
    first, second = Speaker(loop, A), Speaker(loop, A)
    with routed(first, second) as router:
        second.restart(B)
        until(lambda: state(router)[second.url]["weights"] == B)
        assert broken(router, first) in ((said_by(A), ""), (said_by(A, 3), ""))
        assert not any(isinstance(body["prompt"], list) for body in second.asked)


def test_the_alarm_begins_and_ends(loop: Loop) -> None:
    """Different weights under one name are a line in the log, a metric and a part of the state, and so is their end. New
    requests go to all replicas meanwhile."""
    old, new = Speaker(loop, A), Speaker(loop, B)
    with routed(old, new) as router:
        until(lambda: "its replicas have different weights" in router.text)
        assert router.metric("foreword:router_model_fingerprints", model_name="m") == 2
        assert router.metric("foreword:router_replica_weights", replica=old.url, weights=A) == 1
        [model] = http_client.get(f"{router.url}/v1/router/state").json()["models"]
        assert model["weights"] == {A: [old.url], B: [new.url]}
        assert {heard(ask(router))[0] for _ in range(4)} == {said_by(A), said_by(B)}
        http_client.post(f"{router.url}/v1/router/drain", json={"replica": old.url}).raise_for_status()
        until(lambda: "have the same again" in router.text)
        assert router.metric("foreword:router_model_fingerprints", model_name="m") == 1
        assert router.text.count("its replicas have different weights") == 1


@KINDS
def test_a_rolling_update(loop: Loop, owner: str) -> None:
    """Replicas with new weights join one by one, old ones are drained and leave: each stream is of one model to its end, also
    those that break meanwhile; no request fails; at the end only the new weights answer, and the alarm is over."""
    old = [Speaker(loop, A, owner) for _ in range(3)]
    new = [Speaker(loop, B, owner) for _ in range(3)]
    heard_texts: list[tuple[str, str]] = []
    with routed(*old) as router, ThreadPoolExecutor(8) as pool:
        for leaves, joins in zip(old, new, strict=True):
            for one in (*old, *new):
                one.hold()
            if leaves is not old[-1]:
                leaves.cut_after = 2  # one of its streams breaks
            streams = [pool.submit(ask, router) for _ in range(6)]
            until(lambda: router.metric("foreword:router_in_flight") >= 6)
            http_client.post(f"{router.url}/v1/router/replicas", json={"replica": joins.url}).raise_for_status()
            until(lambda url=joins.url: state(router).get(url, {}).get("takes_requests"))  # type: ignore[misc]
            # The alarm has begun, or it could not end.
            until(lambda: "its replicas have different weights" in router.text)
            http_client.post(f"{router.url}/v1/router/drain", json={"replica": leaves.url}).raise_for_status()
            for one in (*old, *new):
                one.release()
            heard_texts += [heard(one.result(60)) for one in streams]
            until(lambda url=leaves.url: state(router)[url]["in_flight"] == 0)  # type: ignore[misc]
            http_client.delete(f"{router.url}/v1/router/replicas?replica={leaves.url}").raise_for_status()
        assert {heard(ask(router)) for _ in range(4)} == {(said_by(B), "")}
        assert set(heard_texts) <= {(said_by(A), ""), (said_by(B), "")}
        until(lambda: "have the same again" in router.text)


def test_a_broken_stream_waits_for_room_on_its_own_weights(loop: Loop) -> None:
    """While the only replica with the same weights is full, a broken stream waits for it, although another one has room. New
    requests do not wait behind it."""
    first, same, other = (Speaker(loop, weights) for weights in (A, A, B))
    flags = ("--max-in-flight", "1", "--policy", "least-loaded")
    with routed(first, same, other, flags=flags) as router, ThreadPoolExecutor(8) as pool:
        for one in (first, same, other):
            one.hold()
        first.cut_after = 3
        # Different ones: before it was served, one and the same would go to two replicas at most.
        streams = [pool.submit(ask, router, prompt=f"count {name}") for name in ("one", "two", "three")]
        until(lambda: router.metric("foreword:router_in_flight") == 3)
        http_client.post(f"{router.url}/v1/router/drain", json={"replica": first.url}).raise_for_status()
        first.release()
        until(lambda: router.metric("foreword:router_queue_length") == 1)
        other.release()
        assert heard(ask(router)) == (said_by(B), "")
        assert router.metric("foreword:router_queue_length") == 1
        assert not any(isinstance(body["prompt"], list) for body in other.asked)
        same.release()
        assert sorted(heard(one.result(60)) for one in streams) == [(said_by(A), "")] * 2 + [(said_by(B), "")]


def test_a_session_keeps_its_weights(loop: Loop) -> None:
    """The requests of a session go to replicas with the weights of its first one, as long as one of these takes requests, and
    then to the others."""
    first, same, other = (Speaker(loop, weights) for weights in (A, A, B))
    replicas = (first, same, other)
    with routed(*replicas, flags=("--policy", "cost")) as router:
        texts: dict[str, str] = {}
        for name in map(str, range(12)):
            texts[name] = heard(ask(router, user=name))[0]
        assert set(texts.values()) == {said_by(A), said_by(B)}
        http_client.post(f"{router.url}/v1/router/drain", json={"replica": first.url}).raise_for_status()
        assert {name: heard(ask(router, user=name))[0] for name in texts} == texts
        http_client.post(f"{router.url}/v1/router/drain", json={"replica": same.url}).raise_for_status()
        assert {heard(ask(router, user=name))[0] for name in texts} == {said_by(B)}
