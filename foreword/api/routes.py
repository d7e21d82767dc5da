"""Routes as values: what a path is, who may call it, what it costs its tenant, what it reads, and what answers it.

Every front has one table: the server, the router, the endpoint picker, and the middleware for vLLM. `foreword.api.front` does
with a request what its route says, so a handler cannot forget a key, a quota, a limit or a charge. A route without them cannot
be made: these fields have no defaults, and `Route` raises for combinations that would leave something open. A route that says
nothing of its query takes none.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from functools import cache, partial
from typing import Annotated, Any, Final, Generic, Literal, NamedTuple, TypeVar, get_args, get_origin
from urllib.parse import parse_qsl, unquote

import msgspec
from msgspec import Meta

from foreword import __version__
from foreword.api.dialects.decode import Body, Limits, from_texts, one_of, parse_body, refuse, unknown_fields
from foreword.api.errors import ErrorResponder, openai_error
from foreword.decoders import decode_json
from foreword.errors import BadRequest, did_you_mean

H = TypeVar("H", bound=Callable[..., Any])

_NAME: Final = re.compile(r"\{(\w+)(:path)?\}")
_SHOWN_CHARACTERS: Final = 64


class Right(Enum):
    """Who may call a route. The text is for the reference."""

    ANYONE = "any"
    TENANT = "tenant"
    """A caller with a key; anyone where none is required."""
    OWNER = "owner"
    """A tenant, about what belongs to it. Where no API keys are required, an operator."""
    TENANT_OR_OPERATOR = "tenant or operator"
    OWNER_OR_OPERATOR = "owner or operator"
    STATE = "state"
    """An operator. Where no key of any kind is configured, anyone."""
    OPERATOR = "operator"

    @property
    def names_tenant(self) -> bool:
        """Whether its callers are always tenants, to whom quotas apply."""
        return self in (Right.TENANT, Right.OWNER)


class Meter(Enum):
    """The charge against the quota of the caller's tenant. The text is for the reference."""

    FREE = "-"
    """Nothing: it computes no tokens."""
    REQUEST = "request"
    """A request, while it runs and per minute. It is refused to a tenant that has spent its tokens."""
    CONTINUED = "tokens"
    """The tokens that the handler charges, if any: of a request that another server admitted. It is never refused."""
    TOKENS = "request, tokens"
    """The same, and the tokens that the handler charges. An answer without a charge is an error of the handler."""


@dataclass(frozen=True, slots=True)
class JsonBody:
    """A body of JSON.

    Attributes:
        parse: what becomes of its bytes. Raises BadRequest and BodyTooLarge. It runs on a thread for large bodies.
        shown: its fields, for the reference. Others have no effect; None if others decide which have.
        optional: a request without a body is parsed as None.
        closed: a field without effect is refused, whatever the front does with those of others: it might have limited a change.
        passed_on: what has an effect depends on who gets it; the handler calls `Call.check_fields` if that is this program.
    """

    parse: Callable[[bytes, Limits], Any]
    shown: type[Any] | None = None
    optional: bool = False
    closed: bool = False
    passed_on: bool = False

    @classmethod
    def of(cls, kind: type[Body], *, optional: bool = False, closed: bool = False) -> JsonBody:
        """A body of these fields."""
        return cls(partial(parse_body, kind), kind, optional, closed)

    def read(self, raw: bytes, limits: Limits) -> tuple[Any, list[str]]:
        """A parsed body, and the fields that had no effect."""
        parsed = self.parse(raw, limits)
        if self.shown is None:
            return parsed, []
        return parsed, unknown_fields(self.shown, decode_json(raw, dict[str, msgspec.Raw]))


class Unread:
    """The mark of a route that reads no body."""


NO_BODY: Final = Unread()


class Query(msgspec.Struct, frozen=True, kw_only=True):
    """The parameters of a query; none. A subclass has a field with a default for each: text, numbers and switches are read as
    the type says, a list takes a parameter that is repeated."""


class SaltQuery(Query, frozen=True, kw_only=True):
    """`cache_salt`: the client's own, of the requests that are meant. It may be repeated. An empty one would mean all."""

    cache_salt: list[Annotated[str, Meta(min_length=1)]] = msgspec.field(default_factory=list)


class ClientQuery(Query, frozen=True, kw_only=True):
    """Query parameters of every client, without effect here: OpenAI's for Azure adds its version, Anthropic's `beta`."""

    api_version: str = msgspec.field(default="", name="api-version")
    beta: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Route(Generic[H]):
    """A method of one path.

    Attributes:
        path: `/v1/prefixes/{name}`; `{name:path}` at the end takes slashes too.
        right: who may call it.
        meter: what counts against the quota of the caller.
        body: what it reads.
        query: the parameters of its query.
        handler: answers a call. Its docstring describes the route.
        tag: its group in the reference; None leaves it out.
        status: of a successful answer, for the reference.
        errors: writes errors in the format of the route's clients.
        outcome: the name under which requests are counted by how they ended; empty for those that generate nothing.

    Raises TypeError for a route without one of them, and ValueError for one that leaves something open.
    """

    method: str
    path: str
    right: Right
    meter: Meter
    body: JsonBody | Unread
    handler: H
    tag: str | None
    query: type[Query] = Query
    status: int = 200
    errors: ErrorResponder = openai_error
    outcome: str = ""

    def __post_init__(self) -> None:
        kinds = ((self.right, Right), (self.meter, Meter), (self.body, JsonBody | Unread))
        wrong = next((kind for value, kind in kinds if not isinstance(value, kind)), None)
        if wrong is not None:
            raise TypeError(f"{self.name}: a route needs {wrong}")
        if self.right is Right.ANYONE and (self.path.startswith("/v1/") or isinstance(self.body, JsonBody)):
            raise ValueError(f"{self.name}: what is under /v1, or reads a body, is not for anyone")
        if self.meter is not Meter.FREE and not self.right.names_tenant:
            raise ValueError(f"{self.name}: only a tenant has a quota")
        if self.outcome and self.meter is not Meter.TOKENS:
            raise ValueError(f"{self.name}: what generates is charged for its tokens")
        if any(field.required for field in msgspec.structs.fields(self.query)):
            raise ValueError(f"{self.name}: a parameter of a query has a default")

    def read_query(self, text: str) -> Query:
        """The parameters of a query, as the client wrote it without the question mark. Raises BadRequest for what the route
        does not declare: to leave out a word might change more than was asked for. A GET changes nothing and ignores it."""
        if not text:
            return _without_parameters(self.query)
        known = _parameters(self.query)
        given: dict[str, list[str]] = {}
        for name, value in parse_qsl(text, keep_blank_values=True, errors="surrogateescape"):
            if name in known:
                given.setdefault(name, []).append(value)
            elif self.method != "GET":
                raise self._unknown(name[:_SHOWN_CHARACTERS], known)
        return from_texts(self.query, {name: _value(name, known[name], values) for name, values in given.items()})

    def _unknown(self, name: str, known: Mapping[str, Any]) -> BadRequest:
        if not known:
            instead = ". Its parameters are fields of the body" if isinstance(self.body, JsonBody) else ""
            return BadRequest(f"{name!r}: {self.name} has no parameters in its query{instead}", param=name)
        hint = did_you_mean(name.lower().replace("-", "_"), known)
        return BadRequest(f"{name!r}: {self.name} has no such parameter in its query{hint}", param=name)

    @property
    def name(self) -> str:
        return f"{self.method} {self.path}"

    @property
    def ends_with_client(self) -> bool:
        """Whether its work ends when its client leaves. A change that was begun is carried out."""
        return self.meter is not Meter.FREE or self.method == "GET"

    @property
    def shown_path(self) -> str:
        return self.path.replace(":path}", "}")

    @property
    def description(self) -> str:
        return inspect.getdoc(self.handler) or ""


@cache
def _parameters(query: type[Query]) -> Mapping[str, Any]:
    """The type of each parameter."""
    return {field.encode_name: field.type for field in msgspec.structs.fields(query)}


@cache
def _without_parameters(query: type[Query]) -> Query:
    return from_texts(query, {})


def _value(name: str, kind: Any, values: list[str]) -> str | list[str]:
    """The text of a parameter, or of all with this name. Raises BadRequest."""
    if any("\udc80" <= character <= "\udcff" for value in values for character in value):
        raise refuse(name, "is not UTF-8")
    if get_origin(kind) is list:
        return values
    if len(values) > 1:
        raise refuse(name, "may be given once")
    return one_of(values[0], get_args(kind), name) if get_origin(kind) is Literal else values[0]


class Match(NamedTuple, Generic[H]):
    """A route, and the parts of the path that its names stand for."""

    route: Route[H]
    names: Mapping[str, str]


@dataclass(slots=True)
class Routes(Generic[H]):
    """The table of one front."""

    _fixed: dict[str, dict[str, Route[H]]] = field(default_factory=dict)
    _patterns: list[tuple[re.Pattern[str], dict[str, Route[H]]]] = field(default_factory=list)

    def __iter__(self) -> Iterator[Route[H]]:
        for methods in (*self._fixed.values(), *(methods for _, methods in self._patterns)):
            yield from methods.values()

    def put(self, route: Route[H]) -> None:
        """Raises ValueError for a second route of the same name."""
        methods = self._methods(route.path)
        if route.method in methods:
            raise ValueError(f"{route.name} is declared twice")
        methods[route.method] = route

    def add(
        self,
        method: str,
        path: str,
        *,
        right: Right,
        meter: Meter,
        body: JsonBody | Unread,
        tag: str | None,
        **more: Any,
    ) -> Callable[[H], H]:
        """Put this above a handler. The arguments are the fields of `Route`."""

        def declare(handler: H) -> H:
            self.put(
                Route(method=method, path=path, right=right, meter=meter, body=body, handler=handler, tag=tag, **more)
            )
            return handler

        return declare

    def _methods(self, path: str) -> dict[str, Route[H]]:
        if "{" not in path:
            return self._fixed.setdefault(path, {})
        parts = _NAME.split(path)
        pattern = re.escape(parts[0])
        for name, takes_slashes, rest in zip(parts[1::3], parts[2::3], parts[3::3], strict=True):
            pattern += f"(?P<{name}>{'.*' if takes_slashes else '[^/]+'}){re.escape(rest)}"
        compiled = re.compile(pattern)
        found = next((methods for one, methods in self._patterns if one.pattern == pattern), None)
        if found is None:
            self._patterns.append((compiled, found := {}))
        return found

    def methods(self, path: str) -> tuple[Mapping[str, Route[H]], Mapping[str, str]]:
        """The routes of a path, as the client wrote it, by method; and what its names stand for."""
        found = self._fixed.get(path)
        if found is not None:
            return found, {}
        for pattern, methods in self._patterns:
            if (match := pattern.fullmatch(path)) is not None:
                return methods, {name: unquote(value) for name, value in match.groupdict().items()}
        return {}, {}

    def find(self, method: str, path: str) -> Match[H] | None:
        """The route of a request; that of GET for HEAD."""
        methods, names = self.methods(path)
        route = methods.get("GET" if method == "HEAD" else method)
        return None if route is None else Match(route, names)

    @property
    def shown(self) -> list[Route[H]]:
        """The routes of the reference."""
        return [route for route in self if route.tag is not None]

    def openapi(self) -> dict[str, Any]:
        """The document behind `/openapi.json`."""
        paths: dict[str, dict[str, Any]] = {}
        for route in self.shown:
            paths.setdefault(route.shown_path, {})[route.method.lower()] = _operation(route)
        return {"openapi": "3.1.0", "info": {"title": "Foreword", "version": __version__}, "paths": paths}


def _operation(route: Route[Any]) -> dict[str, Any]:
    name, shown = getattr(route.handler, "__name__", "route"), route.shown_path
    answer = {"description": "Successful Response", "content": {"application/json": {"schema": {}}}}
    operation: dict[str, Any] = {
        "tags": [route.tag],
        "summary": name.replace("_", " ").title(),
        "description": route.description,
        "operationId": f"{re.sub(r'[^0-9A-Za-z_]', '_', name + shown)}_{route.method.lower()}",
        "responses": {str(route.status): answer},
        "x-foreword-caller": route.right.value,
        "x-foreword-quota": route.meter.value,
    }
    parameters = [
        {"name": parameter, "in": "path", "required": True, "schema": {"type": "string"}}
        for parameter in re.findall(r"{(\w+)", route.path)
    ]
    parameters += [
        {"name": field.encode_name, "in": "query", "required": False, "schema": _field_schema(field.type)}
        for field in msgspec.structs.fields(route.query)
    ]
    if parameters:
        operation["parameters"] = parameters
    if isinstance(route.body, JsonBody) and route.body.shown is not None:
        schema = {"application/json": {"schema": _schema(route.body.shown)}}
        operation["requestBody"] = {"required": not route.body.optional, "content": schema}
    return operation


def _schema(body: type[Any]) -> Any:
    fields = msgspec.structs.fields(body)
    return {
        "title": body.__name__,
        "type": "object",
        "properties": {field.encode_name: _field_schema(field.type) for field in fields},
        "required": [field.encode_name for field in fields if field.required],
    }


def _field_schema(kind: Any) -> Any:
    (schema,), definitions = msgspec.json.schema_components([kind], ref_template="{name}")
    return _inline(schema, definitions)


def _inline(node: Any, definitions: dict[str, Any]) -> Any:
    """Replace references by the definitions that they name. A definition inside of itself is any value."""
    if isinstance(node, list):
        return [_inline(item, definitions) for item in node]
    if not isinstance(node, dict):
        return node
    if "$ref" in node:
        name = node["$ref"].rpartition("/")[2]
        return _inline(definitions[name], {**definitions, name: {}})
    return {key: _inline(value, definitions) for key, value in node.items()}
