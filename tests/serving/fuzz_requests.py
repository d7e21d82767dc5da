"""Requests that are almost right, from a seed: real bodies of every path with wrong values, fields that move, cut and changed
bytes, and odd HTTP around them."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from dataclasses import dataclass
from random import Random
from typing import Any

Heads = dict[str, str]

_SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"a": {"type": "integer", "maximum": 9}, "b": {"type": "string", "maxLength": 3}},
    "required": ["a"],
    "additionalProperties": False,
}
_FUNCTION = {"name": "f", "description": "d", "parameters": _SCHEMA, "strict": True}
_MESSAGES: list[Any] = [
    {"role": "system", "content": "Be brief. " * 5},
    {"role": "user", "content": [{"type": "text", "text": "hi", "cache_control": {"type": "ephemeral", "ttl": "5m"}}]},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a":1}'}}],
    },
    {"role": "tool", "tool_call_id": "c1", "content": "ok"},
]
_FORMAT = {"type": "json_schema", "json_schema": {"name": "p", "schema": _SCHEMA, "strict": True}}
_TEXT = {"prompt": "import os\n" * 9}
GENERATED = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages")
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {
        "messages": _MESSAGES,
        "tools": [{"type": "function", "function": _FUNCTION}],
        "tool_choice": "auto",
        "max_tokens": 3,
        "stream": False,
        "stream_options": {"include_usage": True},
        "temperature": 0.5,
        "top_k": 5,
        "top_p": 0.9,
        "min_p": 0.1,
        "stop": ["x"],
        "seed": 1,
        "logit_bias": {"5": 1},
        "logprobs": True,
        "n": 1,
        "top_logprobs": 2,
        "response_format": _FORMAT,
        "cache_report": True,
        "prompt_cache_key": "k",
        "user": "u",
        "prompt_cache_retention": "5m",
        "cache_salt": "s",
        "chat_template_kwargs": {"a": 1},
        "stop_token_ids": [3],
        "return_token_ids": True,
        "bad_words": ["the"],
        "metadata": {"a": "b"},
    },
    "/v1/completions": {
        "prompt": "import os",
        "max_tokens": 3,
        "stream": False,
        "echo": True,
        "logprobs": 2,
        "n": 1,
        "best_of": 1,
        "prompt_logprobs": 1,
        "structured_outputs": {"regex": "[a-c]+"},
        "guided_choice": ["a"],
        "prefix": None,
        "allowed_token_ids": [1, 2],
        "min_tokens": 1,
        "repetition_penalty": 1.1,
        "suffix": "",
        "continuation": None,
    },
    "/v1/responses": {
        "input": [
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "hi"}]},
            {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c", "output": "x"},
            {"type": "reasoning", "summary": [], "id": "rs_1"},
        ],
        "instructions": "x",
        "tools": [{"type": "function", **_FUNCTION}],
        "tool_choice": "auto",
        "stream": False,
        "max_output_tokens": 3,
        "store": True,
        "previous_response_id": None,
        "reasoning": {"effort": "low"},
        "text": {"format": {"type": "json_schema", "name": "p", "schema": _SCHEMA}},
        "top_logprobs": 1,
        "include": ["message.output_text.logprobs"],
        "prompt_cache_key": "k",
        "metadata": {"a": "b"},
    },
    "/v1/messages": {
        "messages": [
            {"role": "user", "content": "hi"},
            {"role": "assistant", "content": [{"type": "tool_use", "id": "t1", "name": "f", "input": {"a": 1}}]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t1", "content": "ok"}]},
        ],
        "system": [{"type": "text", "text": "Be brief", "cache_control": {"type": "ephemeral"}}],
        "max_tokens": 3,
        "tools": [{"name": "f", "input_schema": _SCHEMA}],
        "tool_choice": {"type": "auto"},
        "stream": False,
        "stop_sequences": ["x"],
        "thinking": {"type": "disabled"},
        "metadata": {"user_id": "u"},
    },
    "/v1/messages/count_tokens": {"messages": [{"role": "user", "content": "hi"}]},
    "/v1/tokenize": {"messages": [{"role": "user", "content": "hi"}], "return_token_strs": True},
    "/v1/detokenize": {"tokens": [1, 2, 3]},
    "/v1/prefixes": {"name": "fuzz", "content": "import os\n" * 9, "replace": True},
    "/v1/prefixes/fuzz": {"content": "import re\n" * 9},
    "/v1/cache/retain": {**_TEXT, "ttl": "5m", "priority": 1},
    "/v1/cache/pin": _TEXT,
    "/v1/cache/prefetch": {"messages": [{"role": "user", "content": "hi"}], "ttl": 9},
    "/v1/cache/release": {"all": True},
    "/v1/requests/x/migrate": {"to": "http://127.0.0.1:1"},
    "/v1/embeddings": {"input": "hi"},
}
_KEPT = ("messages", "prompt", "input", "max_tokens", "max_output_tokens", "name", "content", "tokens")
PATHS = (
    *("/v1/models", "/v1/models/x", "/v1/prefixes", "/v1/prefixes/fuzz", "/v1/cache/retained", "/v1/instance", "*"),
    *("/v1/requests", "/v1/responses/x", "/health", "/ready", "/metrics", "/version", "/ui", "/ui/data/now", "/%00"),
    *("/ui/data/kind", "/ui/data/history", "/ui/../../etc/passwd", "/ui/%2e%2e/%2e%2e/config.py", "/openapi.json"),
    *("/v1/router/state", "/v1/router/replicas", "/v1/router/decisions?last=-5", "/v1/prefixes/%ff%00", "//v1/models"),
    *("/v1/router/decisions?last=99999999999999999999", "/v1/requests/x/stream?from=-1", "/v1/models?" + "a=b&" * 300),
)
_JUNK: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1, 2**31, 2**63, 2**64, 10**400, 1e308, -0.0, 0.5, "", "x", "\x00", "\ud800", "\u202e"),
    *("\xe9" * 50, "a" * 3000, [], {}, [[]], [None], {"": None}, [{}], {"type": "x"}, {"type": "function"}, ["x"] * 70),
    *("NaN", "1", "true", "required", "none", {"type": "json_object"}, [1, 2, 3], [-1], [2**40], "../../etc"),
    *("http://127.0.0.1:1/", {"$ref": "#"}, {"$ref": "#/x", "type": ["object", 5]}, {"pattern": "(a+)+$"}),
    *(
        {"type": "array", "minItems": 10**9},
        {"enum": []},
        {"anyOf": []},
        {"type": "integer", "minimum": 5, "maximum": 1},
    ),
)
_NAMES = ("type", "x", "role", "content", "cache_control", "strict", "parameters", "n", "echo", "prefix", "temprature")
_ODD_HEADS: tuple[Heads, ...] = (
    *({"Content-Type": one} for one in ("text/plain", "", "application/json; charset=utf-16", "\x01")),
    *({"X-Request-Id": one} for one in ("\xe9", "a" * 200, "\x7f", "x y", "")),
    *({"X-Request-Timeout": one} for one in ("nan", "-1", "1e999", "x", "0")),
    *({"X-Session-Id": one} for one in ("a" * 5000, "\xff", "")),
    *({"traceparent": one} for one in ("00-x", "00-" + "0" * 32 + "-" + "0" * 16 + "-01", "\xe9")),
    *({"Authorization": one} for one in ("Bearer", "Basic eDp5", "Bearer \xff", "")),
    *({"Content-Encoding": one} for one in ("gzip", "br", "deflate", "zstd", "identity")),
    {"Expect": "100-continue"},
    {"Upgrade": "websocket", "Connection": "Upgrade", "Sec-WebSocket-Key": "dGhlIHNhbXBsZSBub25jZQ=="},
    {"x-foreword-follow": "1"},
)


@dataclass(frozen=True)
class FuzzRequest:
    """A request. `well_formed`: its HTTP is, so that it must be answered. `leaves`: its client does not wait."""

    method: str
    path: str
    heads: Heads
    body: bytes
    data: bytes
    well_formed: bool
    leaves: bool

    def __str__(self) -> str:
        return f"{self.method} {self.path} {self.heads} {self.body[:600]!r}"


def _places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    if path:
        yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield from _places(inner, (*path, key))


def _at(value: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        value = value[key]
    return value


def fuzz_body(draw: Random, path: str) -> bytes:
    """A body of a path, changed or not."""
    body = copy.deepcopy(BODIES[path])
    # Some of the optional fields, so that bodies are often valid.
    for name in [one for one in body if one not in _KEPT and draw.random() < 0.65]:
        del body[name]
    if path in GENERATED and draw.random() < 0.3:
        body["stream"] = draw.random() < 0.7
    for _ in range(draw.choice((0, 1, 1, 1, 2, 3))):
        if found := list(_places(body)):
            _change(draw, body, found)
    limit = "max_output_tokens" if path == "/v1/responses" else "max_tokens"
    if path in GENERATED and draw.random() < 0.95:
        body[limit] = 3
    data = json.dumps(body).encode()
    kind = draw.random()
    if kind < 0.04:
        return data[: draw.randrange(len(data) + 1)]
    if kind < 0.08:
        changed = bytearray(data)
        for _ in range(3):
            changed[draw.randrange(len(changed))] = draw.randrange(256)
        return bytes(changed)
    return b"[" * 2000 + data if kind < 0.09 else data.replace(b": 3", b": NaN") if kind < 0.10 else data


def _change(draw: Random, body: Any, places: list[tuple[Any, ...]]) -> None:
    path = draw.choice(places)
    parent, kind = _at(body, path[:-1]), draw.random()
    if kind < 0.55:
        parent[path[-1]] = copy.deepcopy(draw.choice(_JUNK))
    elif kind < 0.65:
        del parent[path[-1]]
    elif kind < 0.75:
        parent[path[-1]] = copy.deepcopy(_at(body, draw.choice(places)))
    elif isinstance(parent, list):
        parent.append(copy.deepcopy(parent[path[-1]]))
        draw.shuffle(parent)
    else:
        parent[draw.choice(_NAMES)] = copy.deepcopy(draw.choice(_JUNK))


def fuzz_request(draw: Random) -> FuzzRequest:
    """The next request."""
    if draw.random() < 0.15:
        path, methods = draw.choice(PATHS), ("HEAD", "OPTIONS", "DELETE", "PUT", "PATCH", "TRACE", "FOO", "CONNECT")
        method = "GET" if draw.random() < 0.6 else draw.choice(methods)
        heads = {"Host": "x"}
        return FuzzRequest(
            method, path, heads, b"", _encode(method, path, "1.1", heads, b""), method != "CONNECT", False
        )
    path = draw.choice((*BODIES, *GENERATED * 3))
    body, method = fuzz_body(draw, path), "PUT" if path.endswith("/fuzz") else "POST"
    heads = {"Host": "x", "Content-Type": "application/json"}
    if draw.random() < 0.12:
        heads |= draw.choice(_ODD_HEADS)
    version, sent, well_formed = "1.1", body, True
    kind = draw.random()
    if kind < 0.08:
        heads["Transfer-Encoding"], sent = "chunked", b""
        for at in range(0, len(body), size := draw.randrange(20, 400)):
            piece = body[at : at + size]
            sent += b"%x\r\n%b\r\n" % (len(piece), piece)
        sent += b"0\r\n\r\n"
        if draw.random() < 0.1:
            sent, well_formed = sent.replace(b"\r\n", b"\n", 1), False
        if draw.random() < 0.05:
            heads["Content-Length"], well_formed = "5", False
    else:
        heads["Content-Length"] = str(len(body))
        if kind < 0.09:
            heads["Content-Length"], well_formed = draw.choice(("-1", "x", "9" * 30, "+5", "5, 5")), False
    if draw.random() < 0.02:
        version = draw.choice(("1.0", "2.0", "9", "1.1 x"))
        well_formed = well_formed and version == "1.0"
    data = _encode(method, path, version, heads, sent)
    leaves = draw.random() < 0.06
    if leaves and draw.random() < 0.3:
        data = data[: len(data) // 2]
    return FuzzRequest(method, path, heads, body, data, well_formed, leaves)


def _encode(method: str, path: str, version: str, heads: Heads, body: bytes) -> bytes:
    lines = (f"{method} {path} HTTP/{version}", *(f"{name}: {value}" for name, value in heads.items()), "", "")
    return "\r\n".join(lines).encode("latin-1", "replace") + body
