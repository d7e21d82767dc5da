"""Descriptions of request bodies for `/openapi.json`. FastAPI cannot know them: routes read their bodies themselves."""

from __future__ import annotations

from typing import Any

from foreword.api.schemas import Body


def json_body(kind: type[Body]) -> dict[str, Any]:
    """What `openapi_extra` needs to say that a route takes `kind` as JSON."""
    schema = kind.model_json_schema()
    shared = schema.pop("$defs", {})
    return {
        "requestBody": {
            "required": True,
            "content": {"application/json": {"schema": _inline(schema, shared)}},
        }
    }


def _inline(node: Any, shared: dict[str, Any]) -> Any:
    """Replace references by what they stand for. The bodies are not recursive."""
    if isinstance(node, list):
        return [_inline(item, shared) for item in node]
    if not isinstance(node, dict):
        return node
    if "$ref" in node:
        return _inline(shared[node["$ref"].rpartition("/")[2]], shared)
    return {key: _inline(value, shared) for key, value in node.items()}
