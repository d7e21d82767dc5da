"""A front of a few routes, and an ASGI client of it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from foreword.api.asgi import AsgiFront
from foreword.api.dialects.decode import Limits
from foreword.api.front import Front, Handler
from foreword.api.quotas import Quotas
from foreword.api.request_bodies import RequestBodies
from foreword.api.rights import Rights, Tenants
from foreword.api.routes import NO_BODY, JsonBody, Meter, Right, Route, Routes, Unread
from foreword.api.work_queue import WorkQueue


class Counts:
    """Counts of a front."""

    def __init__(self) -> None:
        self.responses: list[tuple[str, int]] = []
        self.outcomes: list[tuple[str, str]] = []
        self.rejections: list[tuple[str, str]] = []
        self.ignoring: list[str] = []
        self.unexpected_errors: list[str] = []

    def response(self, route: str, status: int) -> None:
        self.responses.append((route, status))

    def outcome(self, dialect: str, outcome: str) -> None:
        self.outcomes.append((dialect, outcome))

    def rejected(self, tenant: str, code: str) -> None:
        self.rejections.append((tenant, code))

    def ignored(self, route: str) -> None:
        self.ignoring.append(route)

    def unexpected(self, error: BaseException) -> None:
        self.unexpected_errors.append(type(error).__name__)


def route(handler: Handler, method: str = "GET", path: str = "/v1/x", **given: Any) -> Route[Handler]:
    body: JsonBody | Unread = given.pop("body", NO_BODY)
    fields = {"right": Right.TENANT, "meter": Meter.FREE, "tag": None, **given}
    return Route(method=method, path=path, body=body, handler=handler, **fields)


def front(*routes: Route[Handler], tenants: Tenants | None = None, quotas: Sequence[str] = ()) -> tuple[Front, Counts]:
    table, counts = Routes[Handler](), Counts()
    for one in routes:
        table.put(one)
    work = WorkQueue(inline=1 << 20)
    rights = Rights(tenants or Tenants(), None)
    made = Front(table, rights, Quotas.parse(quotas), RequestBodies(60), work, counts, Limits)
    return made, counts


class Client:
    """An ASGI client that disconnects when `gone` is set. `body`: what it has not sent yet."""

    def __init__(self) -> None:
        self.gone = asyncio.Event()
        self.body = b""
        self.messages: list[dict[str, Any]] = []

    async def receive(self) -> dict[str, Any]:
        if self.body:
            body, self.body = self.body, b""
            return {"type": "http.request", "body": body, "more_body": False}
        await self.gone.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Any) -> None:
        self.messages.append(message)

    async def ask(
        self, served: Front, method: str = "GET", path: str = "/v1/x", body: bytes = b"", query: str = ""
    ) -> None:
        self.body = body
        headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))] if body else []
        scope = {"type": "http", "method": method, "path": path, "headers": headers, "query_string": query.encode()}
        await AsgiFront(served)(scope, self.receive, self.send)
