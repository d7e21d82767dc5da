"""Requests of every kind, from a seed, each with names that none had before: a table that keeps something per request, name,
salt, session, tool, grammar, model or path grows with them."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from random import Random
from typing import Any

TENANTS = tuple(f"tenant{number}" for number in range(8))
MODEL = "nano"


def key_of(tenant: str) -> str:
    return f"key-of-{tenant}-0123456789abcdef"


@dataclass(frozen=True)
class MixedRequest:
    """`leaves`: the client closes its connection after the first bytes of the answer."""

    kind: str
    method: str
    path: str
    heads: dict[str, str]
    body: bytes
    leaves: bool = False


def _name(draw: Random) -> str:
    return f"{draw.getrandbits(48):x}"


def _words(draw: Random, most: int = 10) -> str:
    return " ".join(_name(draw)[:6] for _ in range(draw.randint(2, most)))


def _schema(draw: Random) -> dict[str, Any]:
    kinds: tuple[dict[str, Any], ...] = (
        {"type": "integer", "maximum": draw.randint(1, 999)},
        {"type": "string", "maxLength": draw.randint(1, 9)},
        {"enum": [_name(draw), _name(draw)]},
        {"type": "array", "items": {"type": "boolean"}, "maxItems": draw.randint(1, 5)},
        {"type": "string", "pattern": f"^[a-z]{{{draw.randint(1, 40)}}}$"},
    )
    names = [_name(draw) for _ in range(draw.randint(1, 4))]
    return {
        "type": "object",
        "properties": {name: draw.choice(kinds) for name in names},
        "required": names,
        "additionalProperties": False,
    }


def _messages(draw: Random) -> list[dict[str, Any]]:
    return [{"role": "system", "content": _words(draw)}, {"role": "user", "content": _words(draw)}]


def _common(draw: Random) -> dict[str, Any]:
    """Fields that requests of all dialects of OpenAI may have."""
    fields: dict[str, Any] = {
        "cache_salt": _name(draw),
        "session_id": _name(draw),
        "prompt_cache_key": _name(draw),
        "user": _name(draw),
        "metadata": {_name(draw): _name(draw)},
        "stop": [_name(draw), _name(draw)],
        "logit_bias": {str(draw.randrange(4000)): 1},
        "seed": draw.getrandbits(31),
        "cache_report": True,
        "bad_words": [_name(draw)],
        "safety_identifier": _name(draw),
    }
    return {name: value for name, value in fields.items() if draw.random() < 0.25}


def _completion(draw: Random) -> MixedRequest:
    body = {"model": MODEL, "prompt": _words(draw), "max_tokens": draw.randint(1, 3), **_common(draw)}
    return _post("completion", "/v1/completions", body)


def _chat(draw: Random) -> MixedRequest:
    body = {"model": MODEL, "messages": _messages(draw), "max_tokens": 2, **_common(draw)}
    return _post("chat", "/v1/chat/completions", body | ({"stream": True} if draw.random() < 0.5 else {}))


def _tools(draw: Random) -> MixedRequest:
    functions = [
        {"name": f"f{_name(draw)}", "description": _words(draw), "parameters": _schema(draw)}
        for _ in range(draw.randint(1, 3))
    ]
    body = {
        "model": MODEL,
        "messages": _messages(draw),
        "max_tokens": 2,
        "tools": [{"type": "function", "function": one} for one in functions],
        "tool_choice": draw.choice(("auto", "required", "none")),
    }
    return _post("tools", "/v1/chat/completions", body)


def _grammar(draw: Random) -> MixedRequest:
    """A grammar that no other request has; a few of them are large."""
    large = draw.random() < 0.02
    lark = f'start: "{_name(draw)}" | "{_name(draw)}" tail\ntail: /[a-z]{{1,{draw.randint(2, 9)}}}/'
    output = draw.choice(
        (
            {"regex": f"[a-z]{{1,{draw.randint(20_000, 200_000) if large else draw.randint(1, 200)}}}{_name(draw)}"},
            {"choice": [_name(draw) for _ in range(draw.randint(1, 5))]},
            {"json": _schema(draw)},
            {"grammar": lark},
        )
    )
    body = {"model": MODEL, "prompt": _words(draw, 4), "max_tokens": draw.randint(1, 4), "structured_outputs": output}
    return _post("grammar", "/v1/completions", body)


def _format(draw: Random) -> MixedRequest:
    given = {"type": "json_schema", "json_schema": {"name": _name(draw), "schema": _schema(draw), "strict": True}}
    body = {"model": MODEL, "messages": _messages(draw), "max_tokens": 3, "response_format": given}
    return _post("format", "/v1/chat/completions", body)


def _response(draw: Random) -> MixedRequest:
    body = {"model": MODEL, "input": _words(draw), "max_output_tokens": 2, "store": draw.random() < 0.8}
    return _post("response", "/v1/responses", body | {"prompt_cache_key": _name(draw), "instructions": _words(draw, 5)})


def _message(draw: Random) -> MixedRequest:
    system = [{"type": "text", "text": _words(draw), "cache_control": {"type": "ephemeral"}}]
    body = {"model": MODEL, "max_tokens": 2, "system": system, "metadata": {"user_id": _name(draw)}}
    return _post("message", "/v1/messages", body | {"messages": [{"role": "user", "content": _words(draw)}]})


def _prefix(draw: Random) -> MixedRequest:
    """Names that come and go; some are never deleted, so that a tenant is full in the end."""
    path = f"/v1/prefixes/p{draw.randrange(60) if draw.random() < 0.9 else _name(draw)}"
    if draw.random() < 0.4:
        return MixedRequest("prefix", "DELETE", path, {}, b"")
    return _post("prefix", path, {"content": _words(draw)}, "PUT")


def _retain(draw: Random) -> MixedRequest:
    verb = draw.choice(("retain", "prefetch", "release"))
    body: dict[str, Any] = {"prompt": _words(draw)}
    return _post("retain", f"/v1/cache/{verb}", body if verb == "release" else {**body, "ttl": draw.randint(1, 60)})


def _session(draw: Random) -> MixedRequest:
    if draw.random() < 0.3:
        return MixedRequest("session", "GET", "/v1/sessions", {}, b"")
    body: dict[str, Any] = {"action": draw.choice(("open", "compact", "end", "fork")), "session_id": _name(draw)}
    if body["action"] == "fork":
        body["parent_session_id"] = _name(draw)
    return _post("session", "/v1/sessions", body)


def _tokens(draw: Random) -> MixedRequest:
    return _post("tokens", "/v1/tokenize", {"model": MODEL, "prompt": _words(draw, 40)})


def _unknown(draw: Random) -> MixedRequest:
    """Models, paths, ids and fields that nothing has."""
    name = _name(draw)
    return draw.choice(
        (
            _post("unknown", "/v1/completions", {"model": f"m{name}", "prompt": "a", "max_tokens": 1}),
            _post("unknown", "/v1/chat/completions", {"model": f"m{name}", "messages": _messages(draw)}),
            MixedRequest("unknown", "GET", f"/x/{name}", {}, b""),
            MixedRequest("unknown", "GET", f"/v1/responses/resp_{name}", {}, b""),
            MixedRequest("unknown", "GET", f"/v1/models/{name}", {}, b""),
            MixedRequest("unknown", "GET", f"/v1/requests/{name}/stream", {}, b""),
            MixedRequest("unknown", "DELETE", f"/v1/prefixes/{name}", {}, b""),
            MixedRequest("unknown", f"M{name.upper()}", "/v1/completions", {}, b""),
            _post("unknown", f"/v1/{name}", {name: name}),
        )
    )


def _wrong(draw: Random) -> MixedRequest:
    wrong: tuple[dict[str, Any], ...] = (
        {"prompt": 3},
        {f"f{_name(draw)}": 1},
        {"max_tokens": -draw.randint(1, 999)},
        {"temperature": _name(draw)},
        {"structured_outputs": {"regex": f"({_name(draw)}"}},
        {"structured_outputs": {"regex": f"b{{{100_000 + draw.randrange(100_000)}}}"}},
        {"prefix": _name(draw)},
    )
    return _post("wrong", "/v1/completions", {"model": MODEL, "prompt": "a", "max_tokens": 1, **draw.choice(wrong)})


def _strange(draw: Random) -> MixedRequest:
    """A key that no tenant has."""
    request = _completion(draw)
    return MixedRequest("strange", "POST", request.path, {"authorization": f"Bearer {_name(draw)}"}, request.body)


def _left(draw: Random) -> MixedRequest:
    body = {"model": MODEL, "prompt": _words(draw), "max_tokens": 32, "stream": True, "ignore_eos": True}
    request = _post("left", "/v1/completions", {**body, **_common(draw)})
    return MixedRequest("left", "POST", request.path, {}, request.body, leaves=True)


def _read(draw: Random) -> MixedRequest:
    paths = ("/metrics", "/v1/models", "/v1/prefixes", "/v1/cache/retained", "/v1/sessions", "/health", "/ready")
    return MixedRequest("read", "GET", draw.choice(paths), {}, b"")


def _post(kind: str, path: str, body: dict[str, Any], method: str = "POST") -> MixedRequest:
    return MixedRequest(kind, method, path, {}, json.dumps(body).encode())


_KINDS: tuple[tuple[float, Callable[[Random], MixedRequest]], ...] = (
    (0.20, _completion),
    (0.12, _chat),
    (0.06, _tools),
    (0.10, _grammar),
    (0.05, _format),
    (0.08, _response),
    (0.06, _message),
    (0.05, _prefix),
    (0.03, _retain),
    (0.03, _session),
    (0.04, _tokens),
    (0.07, _unknown),
    (0.04, _wrong),
    (0.02, _strange),
    (0.03, _left),
    (0.02, _read),
)


def unstored(request: MixedRequest) -> MixedRequest:
    """Makes the same request one whose response a server or router does not keep."""
    if request.kind != "response":
        return request
    return replace(request, body=json.dumps({**json.loads(request.body), "store": False}).encode())


def mixed_request(draw: Random) -> MixedRequest:
    """The next request, of a drawn kind and tenant."""
    shares = [share for share, _ in _KINDS]
    found = draw.choices([make for _, make in _KINDS], shares)[0](draw)
    heads = {"authorization": f"Bearer {key_of(draw.choice(TENANTS))}", "content-type": "application/json"}
    given = {
        "x-request-id": _name(draw),
        "x-session-id": _name(draw),
        "traceparent": f"00-{draw.getrandbits(128):032x}-{draw.getrandbits(64):016x}-01",
        "user-agent": _name(draw),
        "x-" + _name(draw): _name(draw),
    }
    heads |= {name: value for name, value in given.items() if draw.random() < 0.1}
    return MixedRequest(found.kind, found.method, found.path, heads | found.heads, found.body, found.leaves)
