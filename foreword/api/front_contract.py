"""Promises of every front: the server, the router, the endpoint picker, the middleware for vLLM. See the package."""

from __future__ import annotations

import itertools
import json
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_origin
from urllib.parse import urlencode

import msgspec
import pytest

from foreword.api.routes import JsonBody, Meter, Right, Route, Routes

_JSON = {"content-type": "application/json"}
_REQUEST_ID = "asked-by-the-contract"
# Bodies of routes that compute nothing: first what shows a change, then one.
_KEPT: Mapping[str, Any] = {"/v1/sessions": {"action": "open", "session_id": "kept"}}
_CHANGES: Mapping[str, Any] = {
    "/v1/sessions": {"action": "end", "session_id": "kept"},
    "/v1/cache/release": {"all": True},
    "/v1/router/replicas": {"replica": "http://127.0.0.1:9"},
    "/v1/drain": {"to": []},
    "/v1/foreword/weights_version": {"version": "other"},
}
_PROMPT = {"prompt": "A prompt of several blocks, which no request of these removes. " * 20, "max_tokens": 1}
_LISTED = ("prefixes", "cache", "sessions", "weights")
_SHOWN = ("id", "version", "replica", "drained", "action")
_NO_PARAMETERS = ("", "dry_run", "cache-salt", "Cache_Salt", "é", "a" * 300)


class Asked(NamedTuple):
    """An answer of a front."""

    status: int
    headers: Mapping[str, str]
    body: bytes


@dataclass
class RunningFront:
    """A front that serves on real connections.

    Attributes:
        routes: all that it answers.
        send: sends a request: method, path, headers, body.
        bodies: by path, a body that is answered with success, for each route that is charged. unserved: paths of such routes
            that this front cannot serve.
        metrics: the text of its metrics; None if another program counts its requests.
        tenant: the key of a tenant without a quota; "" where there are no keys. operator: that of the operator.
        quotas: keys of tenants that may use one token per minute, each for one test of one route.
        counted_as: the label of a route in the metric of responses.
        ledger: its usage ledger; None if it has none.
    """

    routes: Routes[Any]
    send: Callable[[str, str, Mapping[str, str], bytes], Asked]
    bodies: Mapping[str, Any] = field(default_factory=dict)
    unserved: frozenset[str] = frozenset()
    metrics: Callable[[], str] | None = None
    tenant: str = ""
    operator: str = ""
    quotas: Iterator[str] = field(default_factory=lambda: iter(()))
    counted_as: Callable[[Route[Any]], str] = lambda route: route.shown_path
    ledger: Path | None = None

    def ask(
        self,
        route: Route[Any],
        key: str = "",
        body: Any = None,
        headers: Mapping[str, str] | None = None,
        query: Sequence[tuple[str, str]] = (),
    ) -> Asked:
        """Call a route, whose names stand for `x`."""
        data = body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()
        given = {**({"authorization": f"Bearer {key}"} if key else {}), "x-request-id": _REQUEST_ID}
        kind = _JSON if isinstance(route.body, JsonBody) else {}
        path = re.sub(r"\{\w+(:path)?\}", "x", route.path) + (f"?{urlencode(query)}" if query else "")
        return self.send(route.method, path, {**given, **kind, **(headers or {})}, data)

    def key_for(self, route: Route[Any]) -> str:
        """The key of a caller who may call a route."""
        return self.operator if self.operator and route.right in (Right.STATE, Right.OPERATOR) else self.tenant

    def state(self) -> dict[str, Any]:
        """State that a request could change: all that is listed, and the cached tokens of a prompt that was sent before."""
        found: dict[str, Any] = {}
        for route in self.routes:
            if route.method == "GET" and (route.tag in _LISTED or route.path == "/v1/router/replicas"):
                asked = self.ask(route, self.key_for(route))
                answer = json.loads(asked.body)
                listed = answer.get("data", [answer])
                found[route.name] = asked.status, sorted(str([one.get(name) for name in _SHOWN]) for one in listed)
            elif route.path == "/v1/completions" and route.path in self.bodies:
                asked = self.ask(route, self.tenant, _PROMPT)
                found[route.name] = json.loads(asked.body)["usage"]["prompt_tokens_details"]
        return found

    def counts(self, name: str) -> Counter[str]:
        """The series of a counter, by their labels."""
        found: Counter[str] = Counter()
        for line in self.metrics().splitlines() if self.metrics is not None else ():
            if match := re.match(rf"foreword:(?:router_)?{name}_total({{.*}}) (\S+)", line):
                found[match[1]] += round(float(match[2]))
        return found


def _error(asked: Asked) -> dict[str, Any]:
    """An answer with an error in a known format."""
    assert asked.headers["content-type"].partition(";")[0] == "application/json", asked
    assert asked.headers["x-request-id"] == _REQUEST_ID
    found = json.loads(asked.body)
    error: dict[str, Any] = found["error"]
    assert error["message"] and error["type"] and (found.get("type") == "error" or {"param", "code"} <= set(error))
    return error


def _lines(ledger: Path, name: str, count: int) -> list[Any]:
    """Ledger lines of requests whose ids begin with this name, once there are `count` of them."""
    deadline = time.monotonic() + 30
    while len(found := [line for line in ledger.read_bytes().split(b"\n")[:-1] if name.encode() in line]) < count:
        assert time.monotonic() < deadline, "a request is not in the usage ledger"
        time.sleep(0.01)
    return [json.loads(line) for line in found]


def _plain(name: str) -> str:
    return re.sub(r"\W|_", "", name).lower()


def _wrong_parameters(known: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Names and values that are no parameters of a route with these."""
    for name, kind in known.items():
        near = (name.upper(), name.replace("_", "-"), name.replace("-", "_"), name[:-1], name + name[-1], f"{name} ")
        yield from ((one, "") for one in near if one not in known)
        if kind in (bool, int) or get_origin(kind) in (Literal, list):
            yield name, ""
        if kind in (bool, int) or get_origin(kind) is Literal:
            yield name, "maybe"
    yield from ((one, "1") for one in _NO_PARAMETERS if one not in known)


class FrontContract:
    """Subclass it with a fixture `front`, a `RunningFront`."""

    @pytest.fixture
    def front(self) -> RunningFront:
        raise NotImplementedError

    def test_routes_are_complete(self, front: RunningFront) -> None:
        """Each route says who may call it, what it costs its tenant and what it reads; what generates or reads a body under /v1
        needs a right."""
        routes = list(front.routes)
        assert routes
        for route in routes:
            assert isinstance(route.right, Right) and isinstance(route.meter, Meter), route
            assert route.description or route.tag is None, f"{route.name} has no description"
            assert route.right is not Right.ANYONE or not route.path.startswith("/v1/")
            assert route.meter is Meter.FREE or route.right.names_tenant

    def test_callers_without_a_key(self, front: RunningFront) -> None:
        """Without a key and with a wrong one only what is for anyone is answered; elsewhere the error is a 401, and no body is
        read."""
        if not front.tenant:
            pytest.skip("the host of this front checks keys")
        for route in front.routes:
            for key in ("", "not a key", front.tenant[:-1]):
                asked = front.ask(route, key, b"{")
                if route.right is Right.ANYONE:
                    assert asked.status not in (401, 403), route.name
                else:
                    assert asked.status == 401, (route.name, asked)
                    assert asked.headers["www-authenticate"] == "Bearer"
                    _error(asked)

    def test_what_is_the_operators(self, front: RunningFront) -> None:
        """A tenant is refused what is the operator's; the operator is not."""
        if not front.operator:
            pytest.skip("this front has no operator")
        for route in front.routes:
            if route.right in (Right.STATE, Right.OPERATOR):
                refused = front.ask(route, front.tenant, b"{")
                assert refused.status == 403 and _error(refused)["code"] == "forbidden", route.name
                assert front.ask(route, front.operator, b"{").status not in (401, 403), route.name

    def test_every_charge_is_taken(self, front: RunningFront) -> None:
        """A tenant with one token per minute is served once by each route that is charged, and then refused by all that count
        against its quota, before they read anything; the answer says when to try again."""
        charged = [route for route in front.routes if route.meter is Meter.TOKENS and route.path not in front.unserved]
        metered = [route for route in front.routes if route.meter in (Meter.REQUEST, Meter.TOKENS)]
        assert charged
        if not front.tenant:
            pytest.skip("this front has no quotas")
        for route in charged:
            key = next(front.quotas)
            served = front.ask(route, key, front.bodies[route.path])
            assert served.status in (200, 201), (route.name, served)
            for other in metered:
                refused = front.ask(other, key, b"{")
                assert refused.status == 429, f"{route.name} was not charged, or {other.name} does not count: {refused}"
                assert int(refused.headers["retry-after"]) > 0
                _error(refused)

    def test_the_ledger_has_every_request(self, front: RunningFront) -> None:
        """Each request that counts against a quota is one line of the usage ledger, served or refused, with its tenant and
        status, and with the tokens that its answer names."""
        if front.ledger is None:
            pytest.skip("this front has no usage ledger")
        asked: list[tuple[Route[Any], str, Asked]] = []
        served = front.bodies.keys() - front.unserved
        for route in (one for one in front.routes if one.meter is not Meter.FREE and one.path in served):
            for body in (front.bodies[route.path], b"{"):
                name = f"in-the-ledger-{len(asked):03}"
                asked.append((route, name, front.ask(route, front.tenant, body, {"x-request-id": name})))
        lines = sorted(_lines(front.ledger, "in-the-ledger-", len(asked)), key=lambda line: line["id"])
        for (route, name, answer), line in zip(asked, lines, strict=True):
            assert (line["route"], line["status"], line["id"]) == (route.name, answer.status, name) and line["tenant"]
            usage = line.get("usage", {})
            if answer.status >= 400:
                assert not usage
            elif route.meter is Meter.TOKENS:
                assert usage["prompt"] > 0
                said = json.loads(answer.body).get("usage", {})
                named = said.get("prompt_tokens", said.get("input_tokens"))
                cached = said.get("cache_read_input_tokens", 0) + said.get("cache_creation_input_tokens", 0)
                assert named is None or named + cached == usage["prompt"]

    def test_bodies_within_limits(self, front: RunningFront) -> None:
        """A body that is not JSON, not declared as JSON or longer than any prompt is refused with its status."""
        for route in front.routes:
            if not isinstance(route.body, JsonBody):
                continue
            key = front.operator if not route.right.names_tenant and front.operator else front.tenant
            for body, headers, statuses in (
                (b"{", {}, (400,)),
                (b"{}", {"content-type": "text/plain"}, (415,)),
                (b"[" * 100_000, {}, (400, 413)),
                (b" " * (8 << 20), {}, (400, 413)),
            ):
                asked = front.ask(route, key, body, headers)
                assert asked.status in statuses, (route.name, body[:3], asked)
                _error(asked)

    def test_fields_without_effect(self, front: RunningFront) -> None:
        """A field of a body that does not exist has no effect, is named in the answer, and counted at most once; also through a
        router."""
        for route in front.routes:
            known = front.bodies.get(route.path)
            if not isinstance(route.body, JsonBody) or not isinstance(known, dict) or route.path in front.unserved:
                continue
            before = front.counts("ignored_fields")
            asked = front.ask(route, front.tenant, {**known, "temprature": 0, "a\r\nb: c": 1})
            assert asked.status in (200, 201, 404), (route.name, asked)
            if asked.status < 400:
                assert asked.headers.get("x-foreword-ignored") == "temprature, and 1 more", route.name
            assert (front.counts("ignored_fields") - before).total() <= 1, route.name

    def test_parameters_that_a_route_does_not_have(self, front: RunningFront) -> None:
        """A misspelt, unknown, repeated or malformed parameter of a query is refused by each route that is no GET; the error
        suggests the name that is close, and nothing is changed."""
        for route in front.routes:
            if route.method in ("POST", "PUT") and "{" not in route.path and route.path not in front.unserved:
                front.ask(route, front.key_for(route), _KEPT.get(route.path) or front.bodies.get(route.path))
        front.state()  # the prompt is cached now
        before = front.state()
        for route in (one for one in front.routes if one.method != "GET"):
            known = {field.encode_name: field.type for field in msgspec.structs.fields(route.query)}
            for name, value in _wrong_parameters(known):
                body = _CHANGES.get(route.path) or front.bodies.get(route.path, {})
                given = body if isinstance(route.body, JsonBody) else None
                refused = front.ask(route, front.key_for(route), given, query=((name, value),))
                assert refused.status == 400, (route.name, name, value, refused)
                message = _error(refused)["message"]
                close = [] if name in known else [one for one in known if _plain(one) == _plain(name)]
                assert not close or f"Did you mean {close[0]!r}" in message, (route.name, name, message)
            for name, kind in known.items():
                if get_origin(kind) is not list:
                    refused = front.ask(route, front.key_for(route), query=((name, "true"), (name, "true")))
                    assert refused.status == 400, (route.name, name, refused)
        assert front.state() == before

    def test_a_body_that_a_route_does_not_read(self, front: RunningFront) -> None:
        """A DELETE refuses a body that it does not read: what it says might have limited the deletion."""
        deletes = [one for one in front.routes if one.method == "DELETE" and not isinstance(one.body, JsonBody)]
        for route in deletes:
            for body in ({"cache_salt": "x"}, b"[]", b"x" * 100_000):
                refused = front.ask(route, front.key_for(route), body, _JSON)
                assert refused.status == 400 and "reads no body" in _error(refused)["message"], (route.name, refused)

    def test_unknown_paths_and_methods(self, front: RunningFront) -> None:
        """A path that is not in the table is a 404, a method that a path does not take a 405 that says which it takes."""
        path = next(route.path for route in front.routes if "{" not in route.path and route.path.startswith("/v1/"))
        key = {"authorization": f"Bearer {front.tenant}"} if front.tenant else {}
        asked = front.send("PATCH", path, {**key, "x-request-id": _REQUEST_ID}, b"")
        assert asked.status in (404, 405)
        assert asked.status == 404 or asked.headers["allow"]
        _error(asked)

    def test_one_response_and_one_outcome(self, front: RunningFront) -> None:
        """Each request is counted once under its route and status, and once by how it ended if it generates."""
        if front.metrics is None:
            pytest.skip("the host of this front counts its requests")
        after = [front.counts(name) for name in ("http_responses", "requests")]
        for route in front.routes:
            asked = front.ask(route, front.tenant, b"{")
            before, after = after, [front.counts(name) for name in ("http_responses", "requests")]
            new, outcomes = (later - earlier for earlier, later in zip(before, after, strict=True))
            mine = {labels for labels in new if f'"{front.counted_as(route)}"' in labels}
            assert len(mine) == 1 and f'"{asked.status}"' in next(iter(mine)), (route.name, asked, new)
            assert outcomes.total() == (1 if route.outcome else 0), (route.name, outcomes)
            assert not route.outcome or f'"{route.outcome}"' in next(iter(outcomes))


def keys(prefix: str, count: int) -> tuple[list[str], list[str], Iterator[str]]:
    """Tenants with one token per minute: their entries in `api_keys`, those in `quotas`, and their keys."""
    names = [f"{prefix}{number}" for number in range(count)]
    return (
        [f"{name}={name}-key" for name in names],
        [f"{name} tokens=1" for name in names],
        itertools.cycle(f"{name}-key" for name in names),
    )
