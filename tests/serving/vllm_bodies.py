"""Seeded bodies of every dialect for a real vLLM: almost right ones (`fuzz_requests`), and right ones with images, tools of
every kind, items of long conversations, unknown fields, streams and sampling."""

from __future__ import annotations

import base64
import json
import struct
import zlib
from collections.abc import Iterator
from random import Random
from typing import Any

from fuzz_requests import GENERATED, fuzz_body

COUNT_PATH = "/v1/messages/count_tokens"
# Foreword's own fields, or those that the router sets or needs.
OWN = (
    *("cache_report", "prefix", "cache_salt", "prompt_cache_retention", "continuation", "previous_response_id"),
    *("kv_transfer_params", "request_id", "priority", "salt"),
)
_SCHEMA = {"type": "object", "properties": {"a": {"type": "integer", "maximum": 9}}, "required": ["a"]}
_FUNCTION = {"name": "f", "description": "d", "parameters": _SCHEMA}
_UNKNOWN = (
    {"temprature": 1},
    {"documents": [{"text": "x"}]},
    {"x-y": None},
    {"verbosity": "low"},
    {"extra": {"a": [1]}},
)
_WRONG = (
    {"temperature": "hot"},
    {"stop": 5},
    {"stop_sequences": 5},
    {"tools": "all"},
    {"seed": 0.5},
    {"top_p": 7},
    {"n": 0},
)
_WRONG_LENGTHS = ({"max_tokens": 0}, {"max_tokens": 10**6}, {"max_output_tokens": -1}, {"max_completion_tokens": "x"})
_TOOLS: dict[str, tuple[dict[str, Any], ...]] = {
    "/v1/chat/completions": (
        {"type": "function", "function": _FUNCTION},
        {"type": "function", "function": {**_FUNCTION, "name": "g", "strict": True}},
        {"type": "custom", "custom": {"name": "c", "description": "free"}},
        {"type": "web_search"},
        {"type": "mcp", "server_label": "m", "server_url": "http://127.0.0.1:1/"},
    ),
    "/v1/responses": (
        {"type": "function", **_FUNCTION, "strict": False},
        {"type": "function", "name": "g", "parameters": None, "strict": True},
        {"type": "namespace", "name": "n", "description": "d", "tools": [{"type": "function", **_FUNCTION}]},
        {"type": "custom", "name": "apply_patch", "description": "free"},
        {
            "type": "custom",
            "name": "grammar",
            "format": {"type": "grammar", "syntax": "lark", "definition": "start: /a/"},
        },
        {"type": "web_search"},
        {"type": "web_search_preview"},
        {"type": "mcp", "server_label": "m", "server_url": "http://127.0.0.1:1/", "require_approval": "never"},
        {"type": "code_interpreter", "container": {"type": "auto"}},
        {"type": "file_search", "vector_store_ids": ["v"]},
        {"type": "image_generation"},
        {"type": "local_shell"},
        {"type": "nonsense"},
    ),
    "/v1/messages": (
        {"name": "f", "description": "d", "input_schema": _SCHEMA},
        {"type": "custom", "name": "g", "input_schema": {"properties": {}}, "strict": True, "defer_loading": True},
        {"type": "web_search_20250305", "name": "web_search", "max_uses": 5},
        {"type": "bash_20250124", "name": "bash"},
        {"type": "text_editor_20250728", "name": "str_replace_based_edit_tool"},
        {"type": "mcp_toolset", "mcp_server_name": "m"},
    ),
}
_CHOICES: dict[str, tuple[Any, ...]] = {
    "/v1/chat/completions": (
        *("auto", "none", "required", "sometimes", {"type": "function", "function": {"name": "f"}}),
        {"type": "function", "function": {"name": "unknown"}},
    ),
    "/v1/responses": (
        *("auto", "none", "required", {"type": "function", "name": "f"}, {"type": "custom", "name": "apply_patch"}),
        *({"type": "web_search"}, {"type": "function", "name": "unknown"}),
    ),
    "/v1/messages": (
        *({"type": "auto"}, {"type": "none"}, {"type": "any"}, {"type": "tool", "name": "f"}, {"type": "tool"}),
        {"type": "auto", "disable_parallel_tool_use": True},
    ),
}
_SAMPLING: dict[str, tuple[dict[str, Any], ...]] = {
    "/v1/chat/completions": (
        *({"logprobs": True}, {"logprobs": True, "top_logprobs": 2}, {"n": 2}, {"stop": ["e"]}, {"stop": "zzz"}),
        *({"prompt_logprobs": 1}, {"echo": True}, {"response_format": {"type": "json_object"}}, {"min_p": 0.1}),
        *({"stream_options": {"include_usage": True}}, {"max_completion_tokens": 5}, {"reasoning_effort": "low"}),
        *(
            {"return_token_ids": True},
            {"bad_words": ["the"]},
            {"chat_template_kwargs": {"a": 1}},
            {"use_beam_search": True},
        ),
    ),
    "/v1/completions": (
        *({"logprobs": 2}, {"echo": True}, {"echo": True, "logprobs": 1}, {"n": 2}, {"stop": ["e"]}, {"suffix": "x"}),
        *({"prompt_logprobs": 1}, {"best_of": 2}, {"prompt": ["a b", "c"]}, {"prompt": [5, 6, 7]}, {"prompt": []}),
        *(
            {"structured_outputs": {"regex": "[a-c]+"}},
            {"return_token_ids": True},
            {"stream_options": {"include_usage": True}},
        ),
    ),
    "/v1/responses": (
        *({"instructions": "Be brief."}, {"store": False}, {"reasoning": {"effort": "low"}}, {"stop": ["e"]}),
        *(
            {"include": ["message.output_text.logprobs"], "top_logprobs": 2},
            {"truncation": "auto"},
            {"background": True},
        ),
        *({"text": {"format": {"type": "json_schema", "name": "p", "schema": _SCHEMA}}}, {"metadata": {"a": "b"}}),
        *({"parallel_tool_calls": False}, {"max_tool_calls": 3}, {"service_tier": "flex"}, {"prompt": {"id": "p"}}),
    ),
    "/v1/messages": (
        *({"system": "Be brief."}, {"stop_sequences": ["e"]}, {"thinking": {"type": "enabled", "budget_tokens": 1024}}),
        *({"thinking": {"type": "disabled"}}, {"output_config": {"effort": "low"}}, {"metadata": {"user_id": "u"}}),
        {"system": [{"type": "text", "text": "x-anthropic-billing-header: a"}, {"type": "text", "text": "Be brief."}]},
        *({"top_k": 5}, {"mcp_servers": []}, {"context_management": {"edits": []}}, {"container": "c"}),
    ),
}


def png(size: int) -> str:
    """A picture as a `data:` URL."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    rows = b"".join(b"\x00" + bytes(range(size)) * 3 for _ in range(size))
    head = struct.pack(">IIBBBBB", size, size, 8, 2, 0, 0, 0)
    data = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")
    return "data:image/png;base64," + base64.b64encode(data).decode()


def _chat(draw: Random, image: str | None) -> list[Any]:
    said: list[Any] = [{"role": "user", "content": "t1 t2 hi"}]
    if draw.random() < 0.3:
        said.insert(0, {"role": draw.choice(("system", "developer")), "content": "Be brief."})
    if draw.random() < 0.3:
        call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
        said += [{"role": "assistant", "content": None, "tool_calls": [call]}]
        said += [
            {"role": "tool", "tool_call_id": "c1", "content": draw.choice(("ok", [{"type": "text", "text": "ok"}]))}
        ]
    if image is not None:
        shown = {"type": "image_url", "image_url": {"url": image}}
        said.append({"role": "user", "content": [{"type": "text", "text": "t5"}, shown]})
    return said


def _items(draw: Random, image: str | None) -> Any:
    if image is None and draw.random() < 0.2:
        return "t1 t2 hi"
    found: list[Any] = [{"role": "user", "content": [{"type": "input_text", "text": "t1 t2 hi"}]}]
    if draw.random() < 0.3:
        found.append(
            {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]}
        )
    if draw.random() < 0.3:
        found.append({"type": "function_call", "call_id": "1", "name": "f", "arguments": '{"a": 1}'})
        found.append({"type": "function_call_output", "call_id": "1", "output": "ok"})
    if draw.random() < 0.2:
        found.append({"type": "custom_tool_call", "call_id": "2", "name": "apply_patch", "input": "*** Begin"})
        found.append({"type": "custom_tool_call_output", "call_id": "2", "output": "Done."})
    if draw.random() < 0.3:
        found.append({"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "t3"}]})
    if draw.random() < 0.1:
        found.append(
            {"type": "web_search_call", "id": "w", "status": "completed", "action": {"type": "search", "query": "x"}}
        )
    if image is not None:
        shown = {"type": "input_image", "image_url": image}
        found.append({"role": "user", "content": [{"type": "input_text", "text": "t5"}, shown]})
    return [*found, {"role": "user", "content": "t4"}] if draw.random() < 0.7 else found


def _turns(draw: Random, image: str | None) -> list[Any]:
    found: list[Any] = [
        {"role": "user", "content": [{"type": "text", "text": "t1 t2"}, {"type": "text", "text": "hi"}]}
    ]
    if draw.random() < 0.3:
        said: list[Any] = [{"type": "thinking", "thinking": "hm", "signature": "s"}, {"type": "text", "text": "t3"}]
        found.append(
            {"role": "assistant", "content": [*said, {"type": "tool_use", "id": "u", "name": "f", "input": {"a": 1}}]}
        )
        seen = [{"type": "text", "text": "ok"}, {"type": "text", "text": "fine"}]
        result = {"type": "tool_result", "tool_use_id": "u", "content": draw.choice(("ok", seen))}
        found.append({"role": "user", "content": [result, {"type": "text", "text": "t6"}]})
    if draw.random() < 0.15:
        found.append({"role": "system", "content": "A reminder."})
    if draw.random() < 0.15:
        found.append({"role": "assistant", "content": "t3 t4"})
    if image is not None:
        source = {"type": "base64", "media_type": "image/png", "data": image.partition(",")[2]}
        found.append({"role": "user", "content": [{"type": "text", "text": "t5"}, {"type": "image", "source": source}]})
    return found


def _right(draw: Random, path: str) -> dict[str, Any]:
    """A body as a client might send it."""
    image = png(draw.choice((8, 28))) if draw.random() < 0.25 else None
    kind = "/v1/messages" if path == COUNT_PATH else path
    limit = "max_output_tokens" if path == "/v1/responses" else "max_tokens"
    body: dict[str, Any] = {} if path == COUNT_PATH else {limit: draw.choice((1, 3, 8))}
    match kind:
        case "/v1/chat/completions":
            body["messages"] = _chat(draw, image)
        case "/v1/completions":
            body["prompt"] = "t1 t2 import os"
        case "/v1/responses":
            body["input"] = _items(draw, image)
        case _:
            body["messages"] = _turns(draw, image)
    if kind in _TOOLS and draw.random() < 0.4:
        body["tools"] = draw.sample(_TOOLS[kind], draw.choice((1, 1, 2, 3)))
        if draw.random() < 0.5:
            body["tool_choice"] = draw.choice(_CHOICES[kind])
    if path != COUNT_PATH:
        for given in draw.sample(_SAMPLING[path], draw.choice((0, 0, 1, 1, 2))):
            body |= given
        body |= {"stream": True} if draw.random() < 0.4 else {}
        body |= {"seed": 5} if draw.random() < 0.2 else {}
    body |= draw.choice(_WRONG + _WRONG_LENGTHS) if draw.random() < 0.08 else {}
    return body


def bodies(seed: int, count: int) -> Iterator[tuple[str, bytes]]:
    """Paths and bodies for a model that is served as `tiny`. All are greedy, so that they have one answer."""
    draw = Random(seed)
    for _ in range(count):
        path = draw.choice((*GENERATED * 4, COUNT_PATH))
        if draw.random() < 0.65:
            body: Any = _right(draw, path)
        else:
            data = fuzz_body(draw, path)
            try:
                body = json.loads(data)
            except (ValueError, RecursionError):
                yield path, data
                continue
        if isinstance(body, dict):
            kept = {name: value for name, value in body.items() if name not in OWN}
            body = {
                "model": "tiny",
                **kept,
                **({} if path == COUNT_PATH else {"temperature": kept.get("temperature", 0)}),
            }
            if isinstance(body.get("temperature"), int | float):
                body["temperature"] = 0
            body |= draw.choice(_UNKNOWN) if draw.random() < 0.2 else {}
            if draw.random() < 0.02:
                del body["model"]
        yield path, json.dumps(body).encode()


_SAID = [{"role": "user", "content": "import os"}]
_GREEDY = {"temperature": 0, "top_k": 1}
_ASKED: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "import os", "max_tokens": 4},
    "/v1/chat/completions": {"messages": _SAID, "max_tokens": 4},
    "/v1/responses": {"input": "import os", "max_output_tokens": 4},
    "/v1/messages": {"messages": _SAID, "max_tokens": 4},
    "/v1/chat/completions/batch": {"messages": [_SAID, _SAID], "max_tokens": 4},
    "/generative_scoring": {"query": "import", "items": ["os", "sys"], "label_token_ids": [5, 6]},
}
_PROMPTS: tuple[Any, ...] = (
    [True, False],
    [5.0, 6],
    [[5.0], [6]],
    ["a", [5, 6]],
    [],
    [[]],
    [None],
    {},
    5,
    "",
    ["a", 5],
)
_NUMBERS = ("1e999", "9" * 400, "9" * 5000, "-0.0", "true", "null")


def odd_requests() -> Iterator[tuple[str, bytes]]:
    """Requests that clients rarely send: other encodings of JSON, numbers without bounds, keys that stand twice, ids of tokens
    in other spellings, and paths that only vLLM has."""
    for path, more in _ASKED.items():
        body = {"model": "tiny", **_GREEDY, **more}
        text = json.dumps(body)
        for encoding in ("utf-8", "utf-8-sig", "utf-16", "utf-16-be", "utf-32"):
            yield path, text.encode(encoding)
        others = {**body, "model": "x"}, {**_GREEDY, **more, "x": 1}, {"model": "tiny"}, {**body, "user": 5, "top_p": 7}
        yield from ((path, json.dumps(other).encode()) for other in others)
        for tail in ("", "}x", ",}", ', "x": {"a": [1e999, "\\u0000"]}, "x": 1}', ', "x": NaN'):
            yield path, f"{text[:-1]}{tail}".encode()
    for path in GENERATED:
        start = json.dumps({"model": "tiny", **_GREEDY, **_ASKED[path]})[:-1]
        names = ("temperature", "stop", "tools", "seed", "n", "messages", "input", "stream", "stream_options")
        yield from ((path, f'{start}, "{name}": {number}}}'.encode()) for name in names for number in _NUMBERS)
    for prompt in _PROMPTS:
        for stream in (False, True):
            asked = {"model": "tiny", "temperature": 0, "max_tokens": 2, "prompt": prompt, "stream": stream}
            yield "/v1/completions", json.dumps(asked).encode()
    for options in ({"include_usage": False, "continuous_usage_stats": True}, {"continuous_usage_stats": True}, {}):
        for path in ("/v1/completions", "/v1/chat/completions"):
            asked = {"model": "tiny", "temperature": 0, **_ASKED[path], "stream": True, "stream_options": options}
            yield path, json.dumps(asked).encode()
