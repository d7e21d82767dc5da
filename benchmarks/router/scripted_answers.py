"""Answers of a model that calls tools, in three dialects: a random model behind a router computes prompts as any other, but
writes no calls, so a relay answers its clients with these."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import PurePath
from typing import Any, Final, NamedTuple

# Tools that run a command, of the agents that are known; others are recognized by their name.
_RUNS: Final = re.compile(r"bash|shell|exec|command|terminal", re.IGNORECASE)
_READS: Final = re.compile(r"read|view|list|weather", re.IGNORECASE)
_MOST_SECONDS: Final = 10_000
_TEXT: Final = "All of them were read."


class Call(NamedTuple):
    """A call of a tool."""

    name: str
    arguments: dict[str, Any]


Tool = tuple[str, Mapping[str, Any]]


def next_call(body: Mapping[str, Any], number: int, folder: str) -> Call | None:
    """A call of one of the tools that a body offers, about file `number` of a folder; None if it offers none."""
    tools = list(_tools(body))
    if not tools:
        return None
    name, schema = next((one for test in (_RUNS, _READS) for one in tools if test.search(one[0])), tools[0])
    found = _value(schema, "", number, folder)
    return Call(name, found if isinstance(found, dict) else {})


def _tools(body: Mapping[str, Any]) -> Iterator[Tool]:
    for tool in body.get("tools") or ():
        given = tool.get("function") or tool
        if tool.get("type") in (None, "function") and given.get("name"):
            yield given["name"], given.get("parameters") or given.get("input_schema") or {}


def _value(schema: Any, name: str, number: int, folder: str) -> Any:
    """A harmless value for a schema: commands and paths are about one file."""
    if not isinstance(schema, dict):
        return "x"
    options = schema.get("anyOf") or schema.get("oneOf")
    if options:
        return _value(next((one for one in options if one.get("type") != "null"), options[0]), name, number, folder)
    if "const" in schema or schema.get("enum"):
        return schema.get("const", (schema.get("enum") or [None])[0])
    kinds = schema.get("type")
    kind = kinds[0] if isinstance(kinds, list) else kinds
    if kind == "object" or "properties" in schema:
        required = {*schema.get("required", ()), *(() if name else ("command", "cmd"))}
        parts = schema.get("properties", {}).items()
        return {key: _value(one, key, number, folder) for key, one in parts if key in required}
    command = f"cat file{number}.txt"
    lower = name.lower()
    if kind == "array":
        if "command" in lower and not name.endswith("s"):
            return ["bash", "-lc", command]
        return [_value(schema.get("items", {}), name, number, folder)]
    if kind in ("integer", "number"):
        return _MOST_SECONDS if "time" in lower else 1
    if kind == "boolean":
        return False
    return command if "command" in lower or lower == "cmd" else _words(lower, number, folder)


def _words(name: str, number: int, folder: str) -> str:
    if "path" in name or "file" in name:
        return f"{folder}/file{number}.txt"
    return folder if "dir" in name else f"number {number} of {PurePath(folder).name}"


def calls_before(body: Mapping[str, Any]) -> int:
    """Calls in the conversation so far."""
    entries = body.get("messages") or body.get("input")
    return sum(map(_calls, entries)) if isinstance(entries, list) else 0


def _calls(entry: Mapping[str, Any]) -> int:
    content = entry.get("content")
    parts = content if isinstance(content, list) else []
    used = sum(1 for part in parts if isinstance(part, dict) and part.get("type") == "tool_use")
    return used + len(entry.get("tool_calls") or ()) + str(entry.get("type", "")).endswith("_call")


def answer(path: str, body: Mapping[str, Any], call: Call | None, number: int) -> bytes:
    """The body of an answer: the call, or a text. `number` makes ids differ."""
    kind = path.rpartition("/")[2]
    write = {"completions": _chat, "responses": _response, "messages": _message}[kind]
    events = write(str(body.get("model")), call, number)
    if not body.get("stream"):
        return json.dumps(events[0][1]).encode()
    return b"".join(
        (f"event: {name}\n" if name else "").encode() + b"data: " + _data(data) + b"\n\n" for name, data in events[1:]
    )


# Events by name; the first one is the answer that is not streamed. A text is what it is.
_Events = Sequence[tuple[str, Any]]


def _data(data: Any) -> bytes:
    return data.encode() if isinstance(data, str) else json.dumps(data).encode()


def _chat(model: str, call: Call | None, number: int) -> _Events:
    head = {"id": f"chatcmpl-{number}", "created": 1, "model": model}
    usage = {"prompt_tokens": 100, "completion_tokens": 5, "total_tokens": 105}
    finish = "stop" if call is None else "tool_calls"
    said: dict[str, Any] = {"role": "assistant", "content": _TEXT if call is None else None}
    calls = []
    if call is not None:
        function = {"name": call.name, "arguments": json.dumps(call.arguments)}
        calls = [{"id": f"call_{number}", "type": "function", "function": function}]
        said["tool_calls"] = calls
    whole = {"index": 0, "message": said, "finish_reason": finish}
    events: list[tuple[str, Any]] = [("", {**head, "object": "chat.completion", "choices": [whole], "usage": usage})]

    def chunk(delta: Mapping[str, Any], end: str | None = None) -> None:
        choice = {"index": 0, "delta": delta, "finish_reason": end}
        events.append(("", {**head, "object": "chat.completion.chunk", "choices": [choice]}))

    chunk({"role": "assistant", "content": said["content"] or ""})
    for one in calls:
        chunk({"tool_calls": [{"index": 0, **one}]})
    chunk({}, finish)
    last = {**head, "object": "chat.completion.chunk", "choices": [], "usage": usage}
    return [*events, ("", last), ("", "[DONE]")]


def _response(model: str, call: Call | None, number: int) -> _Events:
    text = {"type": "output_text", "text": _TEXT, "annotations": []}
    item: dict[str, Any]
    if call is None:
        item = {"type": "message", "id": f"msg_{number}", "role": "assistant", "content": [text]}
    else:
        item = {"type": "function_call", "id": f"fc_{number}", "call_id": f"call_{number}", "name": call.name}
        item["arguments"] = json.dumps(call.arguments)
    item["status"] = "completed"
    details = {"input_tokens_details": {"cached_tokens": 0}, "output_tokens_details": {"reasoning_tokens": 0}}
    usage = {"input_tokens": 100, "output_tokens": 5, "total_tokens": 105, **details}

    def response(status: str, output: Sequence[Any]) -> dict[str, Any]:
        fixed = {"object": "response", "created_at": 1, "model": model, "parallel_tool_calls": True, "tools": []}
        more: dict[str, Any] = {
            "tool_choice": "auto",
            "error": None,
            "incomplete_details": None,
            "instructions": None,
            "metadata": {},
        }
        ended = usage if status == "completed" else None
        return {"id": f"resp_{number}", "status": status, "output": output, "usage": ended, **fixed, **more}

    events: list[tuple[str, Any]] = [("", response("completed", [item]))]

    def add(kind: str, **fields: Any) -> None:
        events.append((kind, {"type": kind, "sequence_number": len(events) - 1, **fields}))

    where = {"output_index": 0, "item_id": item["id"]}
    add("response.created", response=response("in_progress", []))
    if call is None:
        add("response.output_item.added", output_index=0, item={**item, "content": [], "status": "in_progress"})
        place = {**where, "content_index": 0}
        add("response.content_part.added", **place, part={**text, "text": ""})
        add("response.output_text.delta", **place, delta=_TEXT, logprobs=[])
        add("response.output_text.done", **place, text=_TEXT, logprobs=[])
        add("response.content_part.done", **place, part=text)
    else:
        add("response.output_item.added", output_index=0, item={**item, "arguments": "", "status": "in_progress"})
        add("response.function_call_arguments.delta", **where, delta=item["arguments"])
        add("response.function_call_arguments.done", **where, name=call.name, arguments=item["arguments"])
    add("response.output_item.done", output_index=0, item=item)
    add("response.completed", response=response("completed", [item]))
    return events


def _message(model: str, call: Call | None, number: int) -> _Events:
    usage = {"input_tokens": 100, "output_tokens": 5, "cache_read_input_tokens": 0, "cache_creation_input_tokens": 0}
    if call is None:
        block: dict[str, Any] = {"type": "text", "text": _TEXT}
        start, delta = {**block, "text": ""}, {"type": "text_delta", "text": _TEXT}
    else:
        block = {"type": "tool_use", "id": f"toolu_{number}", "name": call.name, "input": call.arguments}
        delta = {"type": "input_json_delta", "partial_json": json.dumps(call.arguments)}
        start = {**block, "input": {}}
    reason = "end_turn" if call is None else "tool_use"
    head = {"id": f"msg_{number}", "type": "message", "role": "assistant", "model": model, "stop_sequence": None}
    whole = {**head, "content": [block], "stop_reason": reason, "usage": usage}
    events: list[tuple[str, dict[str, Any]]] = [
        ("message_start", {"message": {**whole, "content": [], "stop_reason": None}}),
        ("content_block_start", {"index": 0, "content_block": start}),
        ("content_block_delta", {"index": 0, "delta": delta}),
        ("content_block_stop", {"index": 0}),
        ("message_delta", {"delta": {"stop_reason": reason, "stop_sequence": None}, "usage": usage}),
        ("message_stop", {}),
    ]
    return [("", whole), *((name, {"type": name, **data}) for name, data in events)]


def usage_of(data: bytes, streamed: bool) -> dict[str, int]:
    """`prompt` and `cached` tokens that an answer of a server reports, and whether it `ended` as its dialect says."""
    found: dict[str, Any] = {}
    ended = not streamed
    for event in _events_of(data, streamed):
        ended = ended or event.get("type") in ("response.completed", "response.incomplete", "message_stop", "[DONE]")
        for holder in (event, event.get("response"), event.get("message")):
            given = holder.get("usage") if isinstance(holder, dict) else None
            found |= {key: value for key, value in (given or {}).items() if value is not None}
    details = found.get("prompt_tokens_details") or found.get("input_tokens_details") or {}
    prompt, cached = found.get("prompt_tokens", found.get("input_tokens", 0)), details.get("cached_tokens") or 0
    if "cache_read_input_tokens" in found:  # input_tokens are those behind it
        cached = found["cache_read_input_tokens"]
        prompt += cached + found.get("cache_creation_input_tokens", 0)
    return {"prompt": prompt, "cached": cached, "ended": ended}


def _events_of(data: bytes, streamed: bool) -> Iterator[dict[str, Any]]:
    texts = [data.decode("utf-8", "replace")]
    if streamed:
        texts = [line[6:].strip() for line in texts[0].split("\n") if line.startswith("data: ")]
    for text in texts:
        if text == "[DONE]":
            yield {"type": text}
            continue
        try:
            event = json.loads(text)
        except ValueError:
            continue
        if isinstance(event, dict):
            yield event
