"""The contract of fronts: a server, a router in front of a server, and an endpoint picker, each on a port of its own."""

from __future__ import annotations

import json
import random
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import conversations
import http_client
import pytest
from otlp_receiver import otlp_receiver
from ports import free_port
from router_parts import RouterThread
from shared_server import ROUTER_KEY, SharedServers, another_server, until

from foreword.api.dialects.answer_reader import check_whole
from foreword.api.front_contract import Asked, FrontContract, RunningFront, keys
from foreword.api.routes import JsonBody
from foreword.ledger import UsageLedger
from foreword.process_config import ServerConfig
from foreword.router.replica_body import PASSED, PATHS

TENANTS = 10
ADMIN = "the key of the operator"
CHAT = {"messages": [{"role": "user", "content": "Say yes."}], "max_tokens": 2}
BODIES: dict[str, Any] = {
    "/v1/completions": {"prompt": "once", "max_tokens": 2},
    "/v1/chat/completions": CHAT,
    "/v1/messages": CHAT,
    "/v1/responses": {"input": "Say yes.", "max_output_tokens": 2},
    "/v1/prefixes": {"name": "rules", "content": "Be brief, be clear, be kind.", "replace": True},
    "/v1/prefixes/{name}": {"content": "Be brief, be clear, be kind."},
    "/v1/cache/retain": {"prompt": "once upon a time there was"},
    "/v1/cache/pin": {"prompt": "once upon a time there was"},
}


def http(url: str) -> Callable[[str, str, Mapping[str, str], bytes], Asked]:
    def send(method: str, path: str, headers: Mapping[str, str], body: bytes) -> Asked:
        answer = http_client.request(method, f"{url}{path}", headers=dict(headers), content=body)
        return Asked(answer.status_code, answer.headers, answer.content)

    return send


def flags(name: str, *more: str) -> tuple[list[str], Any]:
    """A router with tenants, and the keys of those with a quota."""
    entries, quotas, found = keys(name, TENANTS)
    given = [part for one in (f"{name}=tenant-key", *entries) for part in ("--api-keys", one)]
    given += [part for one in quotas for part in ("--quota", one)]
    return [
        *given,
        "--admin-key",
        ADMIN,
        "--replica-key",
        ROUTER_KEY,
        "--tenant-secret",
        "a secret of the tests",
        *more,
    ], found


@pytest.fixture(scope="module")
def server_front(shared: SharedServers, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningFront]:
    ledger = UsageLedger(tmp_path_factory.mktemp("server") / "usage.jsonl")
    entries, quotas, found = keys("served", TENANTS)
    config = ServerConfig(
        port=0,
        api_keys=("served=tenant-key", *entries),
        quotas=tuple(quotas),
        admin_key=ADMIN,
        tenant_secret="a secret of the tests",
    )
    with closing(ledger), another_server(shared, config, ledger) as (url, app):
        yield RunningFront(
            app.front.routes,
            http(url),
            BODIES,
            metrics=lambda: http_client.get(f"{url}/metrics").text,
            tenant="tenant-key",
            operator=ADMIN,
            quotas=found,
            ledger=ledger.path,
        )


class EncodedBodies(FrontContract):
    """Promises of this package's own fronts about the encoding of bodies, besides those of every front."""

    def test_encodings_of_bodies(self, front: RunningFront) -> None:
        """JSON with a byte order mark, in UTF-16 and in UTF-32 is read as JSON in UTF-8 is."""
        for route in front.routes:
            if isinstance(route.body, JsonBody) and route.path in front.bodies:
                text = json.dumps(front.bodies[route.path])
                for encoding in ("utf-8-sig", "utf-16", "utf-16-be", "utf-32-le"):
                    asked = front.ask(route, front.tenant, text.encode(encoding))
                    assert asked.status in (200, 201, 404), (route.name, encoding, asked)
                assert front.ask(route, front.tenant, text.encode("utf-16")[:-1]).status == 400, route.name


class TestServer(EncodedBodies):
    """A server over the embedded model."""

    @pytest.fixture
    def front(self, server_front: RunningFront) -> RunningFront:
        return server_front


@pytest.fixture(scope="module")
def router_front(replica: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningFront]:
    ledger = tmp_path_factory.mktemp("router") / "usage.jsonl"
    given, found = flags("routed", "--replica", replica, "--usage-ledger", str(ledger))
    router = RouterThread(*given)
    try:
        router.wait_for(1)
        yield RunningFront(
            router.router.routes,
            http(router.url),
            BODIES,
            frozenset(PASSED),
            lambda: http_client.get(f"{router.url}/metrics").text,
            "tenant-key",
            ADMIN,
            found,
            ledger=ledger,
        )
    finally:
        router.kill()


class TestRouter(EncodedBodies):
    """A router in front of that server."""

    @pytest.fixture
    def front(self, router_front: RunningFront) -> RunningFront:
        return router_front


class Gateway:
    """Does with requests what the picker says, as a gateway that sends bodies at once and shows the picker all answers."""

    def __init__(self, port: int, certificate: bytes | None = None) -> None:
        import grpc

        from foreword.router_extras.gateway import envoy_messages

        self.envoy = envoy_messages
        if certificate is None:
            self._channel = grpc.insecure_channel(f"127.0.0.1:{port}")
        else:
            self._channel = grpc.secure_channel(f"localhost:{port}", grpc.ssl_channel_credentials(certificate))
        self._process = self._channel.stream_stream(
            "/envoy.service.ext_proc.v3.ExternalProcessor/Process",
            request_serializer=envoy_messages.ProcessingRequest.SerializeToString,
            response_deserializer=envoy_messages.ProcessingResponse.FromString,
        )

    def close(self) -> None:
        self._channel.close()

    def send(self, method: str, path: str, headers: Mapping[str, str], body: bytes) -> Asked:
        messages: SimpleQueue[Any] = SimpleQueue()
        answers = self._process(iter(messages.get, None), timeout=60)
        try:
            return self._exchange(messages, answers, {":method": method, ":path": path, **headers}, body)
        finally:
            messages.put(None)
            for _ in answers:
                pass

    def _exchange(self, messages: Any, answers: Any, headers: Mapping[str, str], body: bytes) -> Asked:
        envoy = self.envoy
        first = envoy.ProcessingRequest()
        first.protocol_config.request_body_mode = first.protocol_config.response_body_mode = envoy.BUFFERED
        first.request_headers.end_of_stream = not body
        for name, value in headers.items():
            first.request_headers.headers.headers.add(key=name, raw_value=value.encode())
        messages.put(first)
        answer = next(answers)
        if answer.HasField("request_headers") and not answer.request_headers.response.header_mutation.set_headers:
            # The answer comes after the body.
            last = envoy.ProcessingRequest()
            last.request_body.body, last.request_body.end_of_stream = body, True
            messages.put(last)
            answer = next(one for one in answers if not one.HasField("override_message_timeout"))
        if answer.HasField("immediate_response"):
            given = answer.immediate_response
            mutations = given.headers.set_headers
            said = {one.header.key: one.header.raw_value.decode() for one in mutations}
            return Asked(given.status.code, said, given.body)
        return self._forward(messages, answers, answer, headers, body)

    def _forward(self, messages: Any, answers: Any, answer: Any, headers: Mapping[str, str], body: bytes) -> Asked:
        envoy, where = self.envoy, ""
        common = (answer.request_body if answer.HasField("request_body") else answer.request_headers).response
        sent = {name: value for name, value in headers.items() if not name.startswith(":")}
        for one in common.header_mutation.set_headers:
            sent[one.header.key] = one.header.raw_value.decode()
        where = sent["x-gateway-destination-endpoint"].partition(",")[0]
        sent.pop("content-length", None)
        found = http_client.request(
            headers[":method"],
            f"http://{where}{headers[':path']}",
            headers=sent,
            content=common.body_mutation.body or body,
        )
        head, last = envoy.ProcessingRequest(), envoy.ProcessingRequest()
        head.response_headers.headers.headers.add(key=":status", raw_value=str(found.status_code).encode())
        last.response_body.body, last.response_body.end_of_stream = found.content, True
        for message in (head, last):
            messages.put(message)
            next(answers)
        return Asked(found.status_code, found.headers, found.content)


@pytest.fixture(scope="module")
def picker_front(replica: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningFront]:
    pytest.importorskip("grpc")
    port, ledger = free_port(), tmp_path_factory.mktemp("picker") / "usage.jsonl"
    given, found = flags("picked", "--replica", replica, "--picker", f"127.0.0.1:{port}", "--usage-ledger", str(ledger))
    router = RouterThread(*given)
    try:
        router.wait_for(1)
        gateway = Gateway(port)
        yield RunningFront(
            router.router.fronts[-1].routes,
            gateway.send,
            BODIES,
            frozenset(PASSED),
            lambda: http_client.get(f"{router.url}/metrics").text,
            "tenant-key",
            "",
            found,
            lambda route: f"picker {route.shown_path}",
            ledger,
        )
        gateway.close()
    finally:
        router.kill()


class TestPicker(EncodedBodies):
    """The router as an endpoint picker, with the same promises; the gateway is this test."""

    @pytest.fixture
    def front(self, picker_front: RunningFront) -> RunningFront:
        return picker_front


STREAMED = {**CHAT, "stream": True, "stream_options": {"include_usage": True}}
# Method, path, body, and headers besides the key.
ACCOUNTED: list[tuple[str, str, Any, dict[str, str]]] = [
    ("POST", "/v1/chat/completions", CHAT, {}),
    ("POST", "/v1/chat/completions", CHAT, {}),
    ("POST", "/v1/chat/completions", STREAMED, {}),
    ("POST", "/v1/completions", BODIES["/v1/completions"], {}),
    ("POST", "/v1/responses", BODIES["/v1/responses"], {}),
    ("POST", "/v1/messages", CHAT, {}),
    ("POST", "/v1/messages", {**CHAT, "max_tokenz": 3}, {}),
    ("POST", "/v1/chat/completions", {**CHAT, "temperatur": 0}, {}),
    ("POST", "/v1/chat/completions", b"{", {}),
    ("POST", "/v1/chat/completions", b" " * (8 << 20), {}),
    ("POST", "/v1/chat/completions", CHAT, {"content-type": "text/plain"}),
    ("POST", "/v1/chat/completions?x=1", CHAT, {}),
    ("POST", "/v1/chat/completions", {**CHAT, "model": "none"}, {}),
    ("POST", "/v1/chat/completions", CHAT, {"authorization": "Bearer wrong"}),
    ("POST", "/v2/embed", {"texts": ["a"]}, {}),
    ("POST", "/v1/completions/", BODIES["/v1/completions"], {}),
    ("GET", "/v1/models", None, {}),
    ("GET", "/v1/models/none", None, {}),
    ("GET", "/v1/unknown", None, {}),
    ("PUT", "/v1/completions", BODIES["/v1/completions"], {}),
]


def account_of(
    router: RouterThread, way: str, send: Callable[[str, str, Mapping[str, str], bytes], Asked], given: Any
) -> dict[str, Any]:
    """Sends a request, and returns its account: what the front told the client, counted and charged."""
    method, path, body, more = given
    data = body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()
    headers = {"authorization": f"Bearer {way}-key", "content-type": "application/json", "x-request-id": "one", **more}
    before = counters(router)
    answer = send(method, path, headers, data)
    until(lambda: not router.router.active)
    counted = {
        (name, labels.replace(way, "WAY").replace("picker ", ""), number)
        for (name, labels), number in (counters(router) - before).items()
    }
    account = router.router.quotas._accounts.get(way)
    assert account is not None or answer.status in (401, 404, 405, 307)
    running = account.running if account is not None else 0
    said = json.loads(answer.body)["error"] if answer.status >= 400 else None
    return {"status": answer.status, "error": said, "counted": counted, "running": running}


def counters(router: RouterThread) -> Counter[tuple[str, str]]:
    """Counters of how requests ended, by name and labels."""
    found: Counter[tuple[str, str]] = Counter()
    for line in http_client.get(f"{router.url}/metrics").text.splitlines():
        match = re.match(r"foreword:router_(http_responses|requests|rejected\w*)_total({.*}) (\S+)", line)
        if match and "/metrics" not in match[2]:
            found[match[1], match[2]] = round(float(match[3]))
    return found


def test_equal_accounts_at_a_router_and_at_its_picker(replica: str, tmp_path: Path) -> None:
    """A request by HTTP and one through a gateway have the same account: status and error, counters, charge and ledger line,
    and a span with the same attributes; whether it is served, refused, or knows no path."""
    pytest.importorskip("grpc")
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http")
    port, ledger, ways = free_port(), tmp_path / "usage.jsonl", ("routed", "picked")
    given = [part for way in ways for part in ("--api-keys", f"{way}={way}-key", "--quota", f"{way} tokens=100000")]
    given += ["--replica", replica, "--replica-key", ROUTER_KEY, "--tenant-secret", "a secret of the tests"]
    with otlp_receiver() as receiver:
        more = ("--picker", f"127.0.0.1:{port}", "--usage-ledger", str(ledger), "--otlp-endpoint", receiver.url)
        router = RouterThread(*given, *more, "--unknown-fields", "refuse")
        router.wait_for(1)
        gateway = Gateway(port)
        try:
            for one in ACCOUNTED:
                routed, picked = (
                    account_of(router, way, send, one)
                    for way, send in zip(ways, (http(router.url), gateway.send), strict=True)
                )
                assert routed == picked, one[:3]
                assert routed["counted"] and not routed["running"]
        finally:
            gateway.close()
            router.kill()
    lines = [json.loads(line) for line in ledger.read_bytes().splitlines()]
    of = [[{**one, "tenant": "", "time": 0, "seconds": 0} for one in lines if one["tenant"] == way] for way in ways]
    assert of[0] == of[1] and {one["status"] for one in of[0]} >= {200, 400, 404, 415}
    assert sum(one["usage"]["output"] for one in of[0] if one["status"] == 200) > 0
    spans = [
        [one.attributes for one in sorted(receiver.spans, key=lambda one: one.start) if one.name == f"{name} request"]
        for name in ("router", "picker")
    ]
    assert spans[0] == spans[1] and len(spans[0]) == len(of[0])


SEEDS = 160


def seeded(seed: int) -> tuple[str, dict[str, Any]]:
    """A path and a body, valid or not."""
    draw = random.Random(seed)
    text = " ".join(draw.choices(conversations.WORDS, k=draw.randint(1, 40)))
    options: dict[str, Any] = {"temperature": draw.choice((0, 0.8)), "seed": draw.randrange(100)}
    options |= draw.choice(
        ({}, {"stop": ["e"]}, {"n": 2}, {"logprobs": True}, {"unknown_field": {"a": [1]}}, {"top_p": 2})
    )
    messages: list[dict[str, Any]] = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": text}]
    parts = [{"type": "text", "text": text}, {"type": "text", "text": "more"}]
    messages.append(
        draw.choice(({"role": "user", "content": parts}, {"role": "assistant", "content": "And"}, {"role": "x"}))
    )
    if seed % 2:
        dialect, body = conversations.request(seed)
        limit = "max_output_tokens" if dialect == "responses" else "max_tokens"
        sampled = {"temperature": options["temperature"], "seed": options["seed"], "model": draw.choice((None, "x"))}
        body = {**body, limit: draw.randint(1, 8), **(sampled if draw.random() < 0.9 else {"temperature": 3})}
        return PATHS[dialect], {**body, "model": None} if draw.random() < 0.9 else body
    path = draw.choice(("/v1/completions", "/v1/chat/completions", "/v1/tokenize", "/v1/messages/count_tokens"))
    if path == "/v1/completions":
        options["logprobs"] = draw.choice((None, 2))
        return path, {"prompt": draw.choice((text, [5, 6, 7], "", 3)), "max_tokens": draw.randint(1, 8), **options}
    if path == "/v1/chat/completions":
        return path, {"messages": messages, "max_tokens": draw.randint(1, 8), **options}
    return path, {"messages": messages[: draw.randint(0, 2)] if path == "/v1/tokenize" else messages[1:2]}


# Names and times.
_OWN = frozenset(("id", "created", "created_at", "completed_at", "system_fingerprint", "call_id"))


def told(answer: Asked) -> Any:
    """The parts of an account that must be equal: all but names, times and what the cache had already."""
    body = json.loads(answer.body)
    if answer.status >= 400:
        return answer.status, {name: body["error"].get(name) for name in ("type", "code", "param")}
    counts = check_whole(answer.body) if "usage" in body else None
    return answer.status, counts and (counts.prompt, counts.output, counts.reasoning), _plain(body)


def _plain(value: Any) -> Any:
    if isinstance(value, list):
        return [_plain(one) for one in value]
    if not isinstance(value, dict):
        return value
    return {name: _plain(one) for name, one in value.items() if name not in _OWN and name != "usage"}


@pytest.mark.parametrize(
    "seeds", [range(24), pytest.param(range(24, SEEDS), marks=pytest.mark.slow)], ids=["few", "many"]
)
def test_equal_answers_from_a_server_and_through_a_router(seeds: range, replica: str, shared: SharedServers) -> None:
    """Seeded bodies get equal tokens, usage, errors and statuses from a server and through a router."""
    router = RouterThread("--replica", shared.open.url)
    try:
        router.wait_for(1)
        ask, ask_router = http(shared.open.url), http(router.url)
        statuses = set()
        for seed in seeds:
            path, body = seeded(seed)
            given = ("POST", path, {"content-type": "application/json"}, json.dumps(body).encode())
            direct, routed = told(ask(*given)), told(ask_router(*given))
            assert direct == routed, (seed, path, body)
            statuses.add(direct[0])
        assert {200, 400} <= statuses
    finally:
        router.kill()


def test_equal_rights_at_a_server_and_at_a_router(shared: SharedServers, replica: str) -> None:
    """Routes that a server and a router share answer each caller alike: with and without keys, here and behind a proxy."""
    routes = {"DELETE /v1/cache": b"", "GET /v1/models": b"", "DELETE /v1/responses/x": b"", "POST /v1/cache/pin": b"{"}
    routes |= {"POST /v1/cache/release": b'{"all": true}', "GET /v1/cache/retained": b"", "POST /v1/completions": b"{"}
    callers = [{"authorization": f"Bearer {key}"} for key in ("alice-key", ADMIN, "wrong")]
    callers += [{}, {"x-forwarded-for": "10.1.2.3"}]
    for keyed, admin in ((False, False), (False, True), (True, False), (True, True)):
        secret = "a secret of the tests"
        config = ServerConfig(
            port=0,
            api_keys=("alice=alice-key",) if keyed else (),
            admin_key=ADMIN if admin else None,
            tenant_secret=secret,
        )
        given = [*(("--api-keys", "alice=alice-key") if keyed else ()), *(("--admin-key", ADMIN) if admin else ())]
        with another_server(shared, config) as (url, _):
            router = RouterThread("--replica", replica, "--replica-key", ROUTER_KEY, "--tenant-secret", secret, *given)
            try:
                router.wait_for(1)
                for caller in callers:
                    for route, body in routes.items():
                        method, path = route.split()
                        headers = {**caller, "content-type": "application/json"}
                        direct, routed = (http(one)(method, path, headers, body).status for one in (url, router.url))
                        forbidden = [status if status in (401, 403) else 0 for status in (direct, routed)]
                        assert forbidden[0] == forbidden[1], (keyed, admin, caller, route, direct, routed)
            finally:
                router.kill()
