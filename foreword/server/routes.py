"""The server's route table. Each route also describes its path for `/openapi.json`."""

from __future__ import annotations

import inspect
import re
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from foreword import __version__

Handler = Callable[[Request], Awaitable[Response | dict[str, Any]]]


class Routes:
    """Collects routes: put `@routes.add("GET", "/v1/models", "openai")` above a handler.

    A handler returns a response, or a dictionary that is sent as JSON. Its docstring is the description in `/openapi.json`.

    Attributes:
        table: the routes for Starlette.
        paths: the documented paths, as OpenAPI describes them.
    """

    def __init__(self) -> None:
        self.table: list[Route] = []
        self.paths: dict[str, dict[str, Any]] = {}

    def add(
        self, method: str, path: str, tag: str | None, body: type[Any] | None = None, status: int = 200
    ) -> Callable[[Handler], Handler]:
        """Register a handler.

        Args:
            path: in Starlette's syntax.
            tag: the path's group in `/openapi.json`; None leaves it out.
            body: what the handler reads as JSON.
            status: of a successful answer, for the description only.
        """

        def register(handler: Handler) -> Handler:
            async def endpoint(request: Request) -> Response:
                answer = await handler(request)
                return answer if isinstance(answer, Response) else JSONResponse(answer)

            self.table.append(Route(path, endpoint, methods=[method]))
            if tag is not None:
                shown = path.replace(":path}", "}")
                self.paths.setdefault(shown, {})[method.lower()] = _operation(handler, method, path, tag, body, status)
            return handler

        return register

    def openapi(self) -> dict[str, Any]:
        """The document behind `/openapi.json`."""
        return {"openapi": "3.1.0", "info": {"title": "Foreword", "version": __version__}, "paths": self.paths}


def _operation(
    handler: Handler, method: str, path: str, tag: str, body: type[Any] | None, status: int
) -> dict[str, Any]:
    name = getattr(handler, "__name__", "route")
    shown = path.replace(":path}", "}")
    answer = {"description": "Successful Response", "content": {"application/json": {"schema": {}}}}
    operation: dict[str, Any] = {
        "tags": [tag],
        "summary": name.replace("_", " ").title(),
        "description": inspect.getdoc(handler) or "",
        "operationId": f"{re.sub(r'[^0-9A-Za-z_]', '_', name + shown)}_{method.lower()}",
        "responses": {str(status): answer},
    }
    if parameters := re.findall(r"{(\w+)", path):
        operation["parameters"] = [
            {"name": parameter, "in": "path", "required": True, "schema": {"type": "string"}}
            for parameter in parameters
        ]
    if body is not None:
        operation["requestBody"] = {"required": True, "content": {"application/json": {"schema": _schema(body)}}}
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
