"""Requests that have ended are freed without a garbage collection."""

from __future__ import annotations

import gc
import itertools
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any, ClassVar

import httpx
import pytest
from aiohttp import web
from hostile_replica import HostileReplica
from router_parts import ANY_PORT, Loop, RouterThread
from shared_server import until

pytest.importorskip("grpc")

METHOD = "/envoy.service.ext_proc.v3.ExternalProcessor/Process"
OF_A_REQUEST = frozenset(
    {
        *("Call", "Ending", "HeldBody", "ClientBody", "GenerateRequest", "BadRequest", "UnknownModel"),
        *("ProxiedRequest", "_ResponseProxy", "StreamMachine", "EventStream", "ReplicaFailed"),
        *("_GatewayExchange", "Accounting", "Pick", "RoutedRequest", "Attempt", "ResponseStream", "ObservedResponse"),
    }
)
# Method, path and body: answered, and refused at each step of a request.
REQUESTS = {
    "answered": ("POST", "/v1/completions", b'{"prompt": "once", "max_tokens": 2}'),
    "no JSON": ("POST", "/v1/completions", b'{"prompt": 3'),
    "only another server understands it": ("POST", "/v1/completions", b'{"prompt": "x", "max_tokens": "none"}'),
    "unknown model": ("POST", "/v1/completions", b'{"prompt": "x", "model": "none"}'),
    "no body": ("POST", "/v1/completions", b""),
    "no route": ("POST", "/v1/x", b"{}"),
    "from the router": ("GET", "/v1/models", b""),
    "anywhere": ("POST", "/tokenize", b'{"prompt": "x"}'),
}


class Fronts:
    """A router with a picker, in this process."""

    def __init__(self) -> None:
        import grpc

        self.router = RouterThread("--replica", HostileReplica(Loop()).url, *ANY_PORT)
        self.router.wait_for(1)
        port = self.router.picker_port
        self.client = httpx.Client(base_url=self.router.url, timeout=60)
        self.channel = grpc.insecure_channel(f"127.0.0.1:{port}", options=[("grpc.use_local_subchannel_pool", 1)])

    def close(self) -> None:
        self.client.close()
        self.channel.close()
        self.router.kill()

    def http(self, method: str, path: str, body: bytes) -> None:
        self.client.request(method, path, content=body, headers={"content-type": "application/json"})

    def picker(self, method: str, path: str, body: bytes, *, leaves: bool = False) -> None:
        from foreword.router_extras.gateway import envoy_messages as envoy

        first, last = envoy.ProcessingRequest(), envoy.ProcessingRequest()
        # The response is observed too: a request ends with its stream.
        first.protocol_config.request_body_mode = first.protocol_config.response_body_mode = envoy.BUFFERED
        for name, value in ((":method", method), (":path", path), ("content-type", "application/json")):
            first.request_headers.headers.headers.add(key=name, raw_value=value.encode())
        first.request_headers.end_of_stream = not body
        last.request_body.body, last.request_body.end_of_stream = body, True
        left = threading.Event()

        def messages() -> Iterator[object]:
            yield first
            if leaves:
                left.wait(60)
            elif body:
                yield last

        process = self.channel.stream_stream(
            METHOD,
            request_serializer=envoy.ProcessingRequest.SerializeToString,
            response_deserializer=envoy.ProcessingResponse.FromString,
        )
        call = process(messages(), timeout=60, wait_for_ready=True)
        if leaves:
            next(call)
            call.cancel()
            left.set()
        else:
            assert list(call)


@pytest.fixture(scope="module")
def fronts() -> Iterator[Fronts]:
    made = Fronts()
    yield made
    made.close()


def alive() -> Counter[str]:
    """Objects of requests, by the names of their classes. httpx has some of the same names."""
    kinds = (type(one) for one in gc.get_objects())
    return Counter(
        one.__name__ for one in kinds if one.__name__ in OF_A_REQUEST and one.__module__.startswith("foreword.")
    )


def nothing_is_left(ask: Callable[[], None]) -> None:
    """After ten requests, without a garbage collection."""
    ask()  # what is made once
    gc.collect()
    gc.disable()
    try:
        before = alive()
        for _ in range(10):
            ask()
        until(
            lambda: (alive() - before).total() < 10
        )  # the last one may be ending, and a connection has its last request
    finally:
        gc.enable()


@pytest.mark.parametrize("kind", REQUESTS)
def test_nothing_is_left_of_a_pickers_request(fronts: Fronts, kind: str) -> None:
    """A picker's request that has ended is freed at once, however it ended: it is in no reference cycle."""
    nothing_is_left(lambda: fronts.picker(*REQUESTS[kind]))


def test_nothing_is_left_of_a_request_whose_client_left(fronts: Fronts) -> None:
    """A picker's request whose client leaves before its body is freed at once."""
    nothing_is_left(lambda: fronts.picker(*REQUESTS["answered"], leaves=True))


@pytest.mark.parametrize("kind", ["no JSON", "unknown model", "no body", "no route", "from the router"])
def test_nothing_is_left_of_a_routers_request(fronts: Fronts, kind: str) -> None:
    """A router's request that no replica gets is freed at once."""
    nothing_is_left(lambda: fronts.http(*REQUESTS[kind]))


class Flaky(HostileReplica):
    """Answers each prompt as `first` says when it comes for the first time, to any of them, and then well."""

    known: ClassVar[set[str]] = set()
    first: ClassVar[str] = ""
    always: ClassVar[bool] = False

    async def _behave(self, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        prompt = body["prompt"]
        new = isinstance(prompt, str) and prompt not in self.known
        self.known.add(str(prompt))
        self.mode = self.first if new or self.always else ""
        return await super()._behave(request, body)


@pytest.fixture(scope="module")
def proxy() -> Iterator[RouterThread]:
    """A router in front of two such replicas, in this process."""
    loop = Loop()
    router = RouterThread(*(word for _ in range(2) for word in ("--replica", Flaky(loop).url)))
    yield router.wait_for(2)
    router.kill()


@pytest.mark.parametrize("ends", ["answered", "left", pytest.param("failed", marks=pytest.mark.extended)])
@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("first", ["", "400", "500", "cut JSON", "half an event", "choices are numbers"])
def test_nothing_is_left_of_a_proxied_request(proxy: RouterThread, first: str, streams: bool, ends: str) -> None:
    """A request that a replica got is freed at once, however that one answered, whether another one answered it then, continued
    its stream, or failed too, and whether its client has waited for the end."""
    leaves, Flaky.first, Flaky.always = ends == "left", first, ends == "failed"
    numbers = itertools.count()
    with closing(httpx.Client(base_url=proxy.url, timeout=60)) as client:

        def ask() -> None:
            prompt = f"{first} {streams} {ends} {next(numbers)}"
            body = {"model": "m", "prompt": prompt, "max_tokens": 5, "stream": streams, "temperature": 0}
            with client.stream("POST", "/v1/completions", json=body) as answer:
                if not leaves:
                    answer.read()

        before = len(Flaky.known)
        nothing_is_left(ask)
        assert len(Flaky.known) >= before + (1 if Flaky.always else 11)
