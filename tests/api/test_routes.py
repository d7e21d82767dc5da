"""Routes as values: what cannot be declared, and what a front does with a handler that forgets its charge."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from foreword.api.dialects.chat import ChatBody
from foreword.api.dialects.registry import DIALECTS
from foreword.api.front import Call, Handler
from foreword.api.rights import Rights, Tenant, Tenants
from foreword.api.routes import NO_BODY, JsonBody, Meter, Query, Right, Route, Routes
from foreword.request_errors import Forbidden, Unauthorized
from foreword.server.model_api import DetokenizeBody
from foreword.usage import TokenUsage

sys.path.append(str(Path(__file__).parents[1] / "serving"))
from small_front import Client, front, route


async def answer(call: Call) -> dict[str, Any]:
    """Answers."""
    return {}


WHOLE: dict[str, Any] = {
    "method": "POST",
    "path": "/v1/x",
    "right": Right.TENANT,
    "meter": Meter.TOKENS,
    "body": NO_BODY,
    "handler": answer,
    "tag": None,
}


@pytest.mark.parametrize("missing", sorted(WHOLE))
def test_nothing_of_a_route_can_be_left_out(missing: str) -> None:
    """A route without rights, without a quota, or without any other of its parts cannot be made, nor one with None there."""
    Route(**WHOLE)
    with pytest.raises(TypeError):
        Route(**{name: value for name, value in WHOLE.items() if name != missing})
    if missing in ("right", "meter", "body"):
        with pytest.raises(TypeError):
            Route(**{**WHOLE, missing: None})
        given = {name: value for name, value in WHOLE.items() if name not in (missing, "handler", "method", "path")}
        with pytest.raises(TypeError):
            Routes[Handler]().add("POST", "/v1/x", **given)


@pytest.mark.parametrize(
    "hole",
    [
        {"right": Right.ANYONE, "meter": Meter.FREE},
        {"path": "/x", "right": Right.ANYONE, "meter": Meter.FREE, "body": JsonBody.of(DetokenizeBody)},
        {"path": "/x", "right": Right.ANYONE},
        {"right": Right.OPERATOR},
        {"right": Right.TENANT_OR_OPERATOR, "meter": Meter.REQUEST},
        {"meter": Meter.REQUEST, "outcome": "chat"},
        {"meter": Meter.FREE, "outcome": "chat"},
    ],
)
def test_holes_cannot_be_declared(hole: dict[str, Any]) -> None:
    """A path of the API or a body for anyone, a quota without a tenant, and generated text without a charge are refused."""
    with pytest.raises(ValueError, match="/x: "):
        Route(**{**WHOLE, **hole})


class Named(Query, frozen=True, kw_only=True):
    """Parameters."""

    names: list[str] = msgspec.field(default_factory=list)
    most: int = 5


class Needed(Query, frozen=True, kw_only=True):
    """A parameter without a default."""

    name: str


@pytest.mark.parametrize(
    ("method", "query", "status", "read"),
    [
        ("POST", "names=a&names=b%2Bc+d&most=7", 200, [["a", "b+c d"], 7]),
        ("POST", "", 200, [[], 5]),
        ("POST", "&&", 200, [[], 5]),
        ("POST", "n%61mes=x", 200, [["x"], 5]),
        ("POST", "most=7&most=7", 400, []),
        ("POST", "most=seven", 400, []),
        ("POST", "names=%FF", 400, []),
        ("POST", "%FF=1", 400, []),
        ("POST", "Names=x", 400, []),
        ("POST", "=x", 400, []),
        ("POST", "names", 200, [[""], 5]),
        ("GET", "nmaes=x&%FF&most=7", 200, [[], 7]),
        ("GET", "most=seven", 400, []),
    ],
)
def test_queries(method: str, query: str, status: int, read: list[Any]) -> None:
    """A handler gets what its route declares, each parameter as its type says. What is not declared is refused, except for a
    GET, which ignores it."""

    async def handler(call: Call) -> dict[str, Any]:
        given: Named = call.query
        return {"read": [given.names, given.most]}

    client = Client()
    asyncio.run(client.ask(front(route(handler, method, query=Named))[0], method, query=query))
    assert client.messages[0]["status"] == status
    assert status == 400 or json.loads(client.messages[1]["body"]) == {"read": read}


def test_what_a_handler_may_read_of_a_query() -> None:
    """A parameter that the route does not declare cannot be read, and one without a default cannot be declared."""

    async def handler(call: Call) -> dict[str, Any]:
        return {"read": call.query.cache_salt}

    client = Client()
    asyncio.run(client.ask(front(route(handler))[0], query="cache_salt=x"))
    assert client.messages[0]["status"] == 500
    with pytest.raises(ValueError, match="default"):
        Route(**WHOLE, query=Needed)


def test_a_path_is_declared_once() -> None:
    """The second declaration of a method of a path is an error, whatever the names in the path are."""
    routes = Routes[Handler]()
    routes.put(Route(**WHOLE))
    with pytest.raises(ValueError, match="twice"):
        routes.put(Route(**WHOLE))


def test_matching() -> None:
    """Names stand for one part of a path, or at the end for all of the rest; what is escaped in a part is no slash."""
    routes = Routes[Handler]()
    for path in ("/v1/x", "/v1/x/{name}", "/v1/x/{name}/y", "/v1/m/{name:path}"):
        routes.put(Route(**{**WHOLE, "method": "GET", "path": path}))
    for path, found, name in (
        ("/v1/x/a%2Fb", "/v1/x/{name}", "a/b"),
        ("/v1/x/%C3%A9/y", "/v1/x/{name}/y", "é"),
        ("/v1/m/a/b", "/v1/m/{name:path}", "a/b"),
    ):
        match = routes.find("HEAD", path)
        assert match is not None and (match.route.path, match.names["name"]) == (found, name)
    for path in ("/v1/x/", "/v1/x/a/b", "/v1/X", "/v1/x/a/y/"):
        assert routes.find("GET", path) is None
    assert routes.find("POST", "/v1/x") is None


@pytest.mark.parametrize(("charges", "status"), [(False, 500), (True, 200)])
def test_a_forgotten_charge_is_an_error(charges: bool, status: int) -> None:
    """A handler whose route is charged cannot answer without a charge."""

    async def handler(call: Call) -> dict[str, Any]:
        if charges:
            call.charge(TokenUsage(3))
        return {}

    async def run() -> int:
        client = Client()
        await client.ask(front(route(handler, meter=Meter.TOKENS))[0])
        return int(client.messages[0]["status"])

    assert asyncio.run(run()) == status


ALICE = Tenant("alice", b"a")


def _who(rights: Rights, right: Right, key: str, address: str) -> str:
    try:
        rights.check(right, {"authorization": f"Bearer {key}"} if key else {}, address, "this")
    except Unauthorized:
        return "401"
    except Forbidden:
        return "403"
    return "ok"


HERE, AWAY = "127.0.0.1", "10.1.2.3"


@pytest.mark.parametrize(
    ("keys", "admin", "key", "address", "expected"),
    [
        # TENANT, OWNER, STATE, OPERATOR
        (False, False, "", HERE, "ok ok ok ok"),
        (False, False, "", AWAY, "ok 403 ok 403"),
        (False, True, "", HERE, "ok 401 401 401"),
        (False, True, "", AWAY, "ok 401 401 401"),
        (False, True, "boss", AWAY, "ok ok ok ok"),
        (True, False, "", HERE, "401 401 403 403"),
        (True, False, "alice-key", AWAY, "ok ok 403 403"),
        (True, True, "", HERE, "401 401 401 401"),
        (True, True, "alice-key", HERE, "ok ok 403 403"),
        (True, True, "boss", AWAY, "401 401 ok ok"),
    ],
)
def test_rights(keys: bool, admin: bool, key: str, address: str, expected: str) -> None:
    """Rights of each caller with and without API keys and an admin key: docs/operations/security.md has this table."""
    tenants = Tenants([(b"alice-key", ALICE)] if keys else [])
    rights = Rights(tenants, "boss" if admin else None)
    asked = (Right.TENANT, Right.OWNER, Right.STATE, Right.OPERATOR)
    assert " ".join(_who(rights, right, key, address) for right in asked) == expected


@pytest.mark.parametrize(("mode", "field", "status"), [
    ("report", "temprature", 200), ("ignore", "temprature", 200), ("refuse", "temprature", 400), ("refuse", "user", 200),
])  # fmt: skip
def test_fields_without_effect(mode: str, field: str, status: int) -> None:
    """Fields without effect are named, refused or not mentioned, as the operator says; what clients of OpenAI send is never
    refused."""
    served, counts = front(route(answer, "POST", body=JsonBody.of(DetokenizeBody)))
    served.unknown = mode
    client = Client()
    asyncio.run(client.ask(served, "POST", body=b'{"tokens": [1], "%s": 1}' % field.encode()))
    head = dict(client.messages[0]["headers"])
    assert client.messages[0]["status"] == status
    assert (head.get(b"x-foreword-ignored") == field.encode()) == (mode != "ignore")
    assert counts.ignoring == ([] if mode == "ignore" else ["/v1/x"])
    if status == 400:
        assert b"temprature: there is no such field" in client.messages[1]["body"]


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"include_usage": True, "continuous_usage_stats": True}, ["stream_options.continuous_usage_stats"]),
        ({"include_usage": True, "continuous_usage_stats": False}, []),
        ({"include_usage": True}, []),
        (None, []),
    ],
)
def test_usage_in_each_chunk(options: object, named: list[str]) -> None:
    """A server has no usage in each chunk. Clients of vLLM that ask for it are told so, beside other fields without effect."""
    said = {"messages": [{"role": "user", "content": "x"}], "stream": True, "stream_options": options, "temprature": 1}
    served, counts = front(route(answer, "POST", body=JsonBody(DIALECTS["chat"].read, ChatBody)))
    client = Client()
    asyncio.run(client.ask(served, "POST", body=json.dumps(said).encode()))
    head = dict(client.messages[0]["headers"])
    assert (client.messages[0]["status"], counts.ignoring) == (200, ["/v1/x"])
    assert head[b"x-foreword-ignored"].decode().split(", ") == ["temprature", *named]


def test_a_request_beyond_the_quota_is_not_in_the_ledger() -> None:
    """The usage ledger has the requests that count against a quota; one that is refused because it is used up does not."""
    noted: list[int] = []

    class Ledger:
        def note(self, name: str, tenant: str, route: str, status: int, seconds: float, usage: TokenUsage) -> None:
            noted.append(status)

    served, counts = front(route(answer, meter=Meter.REQUEST), quotas=["* requests=1"])
    served.ledger = Ledger()
    for _ in range(3):
        asyncio.run(Client().ask(served))
    assert [status for _, status in counts.responses] == [200, 429, 429] and noted == [200]
