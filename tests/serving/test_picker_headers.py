"""Headers of a gateway about a request: its objective, its fairness id, its model; and what the picker says of ranks."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
from hostile_replica import HostileReplica
from router_parts import ANY_PORT, Loop, RouterThread

from foreword.configuration import Config
from foreword.errors import ConfigError
from foreword.process_config import RouterConfig
from foreword.router.replica_pool import PlacementRequest, ReplicaPool
from foreword.router_extras.gateway.flows import FlowQueue, tenant_of
from foreword.router_extras.installed import InstalledExtras

grpc = pytest.importorskip("grpc")
DESTINATION = "x-gateway-destination-endpoint"
METHOD = "/envoy.service.ext_proc.v3.ExternalProcessor/Process"
OBJECTIVES = ("--picker-objectives", "premium=10", "--picker-objectives", "batch=-5")


class Picked:
    """An answer of the picker: the headers that it sets and removes, and the fields of the body for the replica."""

    def __init__(self, answer: Any, sent: bytes) -> None:
        assert answer.HasField("request_body"), answer
        common = answer.request_body.response
        set_headers = common.header_mutation.set_headers
        self.set = {one.header.key: one.header.raw_value.decode() for one in set_headers}
        self.removed = set(common.header_mutation.remove_headers)
        self.body = json.loads(common.body_mutation.body or sent)


@contextmanager
def picking(*flags: str, replicas: int = 1, hosts: Sequence[str] = ("127.0.0.1",)) -> Iterator[Any]:
    """A function that asks a picker about a completion with these headers and fields. The replicas have these host names in
    turn."""
    from foreword.router_extras.gateway import envoy_messages as envoy

    loop = Loop()
    urls = [HostileReplica(loop).url.replace("127.0.0.1", hosts[number % len(hosts)]) for number in range(replicas)]
    named = [part for url in urls for part in ("--replica", url)]
    router = RouterThread(*named, *ANY_PORT, *flags)
    channel = grpc.insecure_channel(f"127.0.0.1:{router.picker_port}", options=[("grpc.use_local_subchannel_pool", 1)])
    process = channel.stream_stream(
        METHOD,
        request_serializer=envoy.ProcessingRequest.SerializeToString,
        response_deserializer=envoy.ProcessingResponse.FromString,
    )

    def ask(headers: dict[str, str], **fields: Any) -> Picked:
        first, last = envoy.ProcessingRequest(), envoy.ProcessingRequest()
        first.protocol_config.request_body_mode = envoy.BUFFERED
        heads = {":method": "POST", ":path": "/v1/completions", "content-type": "application/json", **headers}
        for name, value in heads.items():
            first.request_headers.headers.headers.add(key=name, raw_value=value.encode())
        body = json.dumps({"prompt": "once", **fields}).encode()
        last.request_body.body, last.request_body.end_of_stream = body, True
        answers = list(process(iter([first, last]), timeout=60, wait_for_ready=True))
        return Picked(answers[-1], body)

    try:
        router.wait_for(replicas)
        yield ask
    finally:
        channel.close()
        router.kill()


@pytest.mark.parametrize("family", ["x-llm-d-", "x-gateway-"])
def test_headers_of_a_trusted_gateway(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """An objective gives the replica its priority, as replicas count, a fairness id its own flow of its tenant, and a model's
    name replaces that of the body, for the placement and for the replica. None of these headers goes on to it."""
    asked: list[tuple[str, str | None]] = []
    queues: set[type] = set()
    query, place = ReplicaPool.query, ReplicaPool.place

    def noted(self: ReplicaPool, prompt: Any, model: str | None, *rest: Any) -> Any:
        asked.append(("model", model))
        return query(self, prompt, model, *rest)

    async def placed(self: ReplicaPool, request: PlacementRequest) -> Any:
        asked.append(("flow", request.tenant))
        queues.add(type(self.queue))
        return await place(self, request)

    monkeypatch.setattr(ReplicaPool, "query", noted)
    monkeypatch.setattr(ReplicaPool, "place", placed)
    headers = {
        f"{family}inference-objective": "premium",
        f"{family}inference-fairness-id": "team",
        f"{family}model-name-rewrite": "m",
    }
    with picking("--picker-trusts-headers", *OBJECTIVES, "--tenant-weight", "heavy=2") as ask:
        picked = ask(headers, model="an alias", priority=3)
        assert (picked.body["priority"], picked.body["model"], picked.body["prompt"]) == (-10, "m", "once")
        assert set(headers) <= picked.removed
        for other in ("team", "another team", "heavy"):
            ask({f"{family}inference-fairness-id": other})
        assert ask({f"{family}inference-objective": "batch"}).body["priority"] == 5
        assert ask({f"{family}inference-objective": "unknown"}, priority=3).body["priority"] == 3
    assert ("model", "m") in asked and ("model", "an alias") not in asked
    flows = [flow for kind, flow in asked if kind == "flow"]
    # The same id is one flow of its tenant, as one is with a tenant's name.
    assert flows[0] == flows[1] != flows[2] and "heavy" not in flows
    assert len(set(flows[:4])) == 3 and len({tenant_of(flow or "") for flow in flows}) == 1
    assert queues == {FlowQueue}


def test_the_newer_name_counts() -> None:
    """Where both names of a header are set, it is the newer one that counts."""
    with picking("--picker-trusts-headers", *OBJECTIVES) as ask:
        both = {"x-gateway-inference-objective": "premium", "x-llm-d-inference-objective": "batch"}
        assert ask(both).body["priority"] == 5


def test_headers_that_a_client_may_have_set() -> None:
    """A gateway that is not trusted changes neither the model nor the flow, and an objective makes a request only less urgent.
    The headers, and those that only the picker may set, are removed all the same."""
    headers = {
        "x-llm-d-model-name-rewrite": "other",
        "x-llm-d-inference-fairness-id": "team",
        "x-encoder-hosts-ports": "evil:1",
        "x-kv-cache-source-host-port": "evil:1",
        "x-prefiller-host-port": "evil:1",
        "x-data-parallel-host-port": "evil:1",
    }
    with picking(*OBJECTIVES) as ask:
        picked = ask({**headers, "x-llm-d-inference-objective": "premium"}, model="m")
        assert picked.body["model"] == "m" and "priority" not in picked.body
        assert {*headers, "x-llm-d-inference-objective"} <= picked.removed
        assert ask({"x-llm-d-inference-objective": "batch"}).body["priority"] == 5
        assert ask({"x-llm-d-inference-objective": "batch"}, priority=9).body["priority"] == 9


def test_ranks_behind_one_address() -> None:
    """The header of llm-d's sidecar says which of several replicas with one address was chosen, whatever their host names. With
    endpoints for retries, of which it would not be true, there is none, and none for a replica alone."""
    own = "x-data-parallel-host-port"
    with picking("--max-attempts", "1", replicas=2, hosts=("127.0.0.1", "localhost")) as ask:
        picked = ask({own: "evil:1"})
        assert picked.set[own] == picked.set[DESTINATION] and picked.set[own].startswith("127.0.0.1:")
    with picking(replicas=2) as ask:
        picked = ask({own: "evil:1"})
        assert own in picked.removed and own not in picked.set
        assert len(picked.set[DESTINATION].split(",")) == 2
    with picking() as ask:
        assert own not in ask({}).set


@pytest.mark.parametrize("objective", ["batch", "batch=", "=1", "batch=1.5", "batch=4294967296"])
def test_objectives_that_are_none(objective: str) -> None:
    """A malformed objective is refused before anything starts, with how one is written."""
    given = Config(router=RouterConfig(picker="127.0.0.1:0", picker_objectives=(objective,)))
    with pytest.raises(ConfigError, match="NAME=NUMBER"):
        InstalledExtras().check(given)


def test_objectives_with_one_name() -> None:
    """An objective that has two priorities is refused before anything starts, by its name."""
    given = Config(router=RouterConfig(picker="127.0.0.1:0", picker_objectives=("batch=1", "a=2", "batch=-1")))
    with pytest.raises(ConfigError, match="'batch' twice"):
        InstalledExtras().check(given)


def test_settings_of_the_picker_need_it() -> None:
    """A setting of the picker without the picker is refused, by its name."""
    with pytest.raises(ConfigError, match="picker_trusts_headers needs"):
        RouterConfig(picker_trusts_headers=True)
