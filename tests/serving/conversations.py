"""Seeded requests of all dialects: tools, refusals, reasoning, images, parts, cache control, and unknown fields."""

from __future__ import annotations

import json
import random
from typing import Any

from foreword.api.request import DialectName

WORDS = (
    *[
        "import",
        "return",
        "class",
        "def",
        "for",
        "while",
        "if",
        "else",
        "print",
        "open",
        "read",
        "write",
        "close",
        "list",
    ],
    *("é", "漢字", "<|user|>", "\n\n", "```", "{}", "  "),
)
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}, "days": {"enum": [1, 3, 7]}}}
ARGUMENTS = ('{"city": "Rome", "days": 3}', "{}", "", "not JSON", "[1]", '{"b": 1.50, "a": null}')
IMAGE = "data:image/png;base64," + "iVBORw0KGgo" * 60


class Draw(random.Random):
    """A draw of one seed."""

    def text(self, most: int = 12) -> str:
        return " ".join(self.choices(WORDS, k=self.randint(1, most)))

    def maybe(self, **fields: Any) -> dict[str, Any]:
        """Each field in a third of the cases."""
        return {name: value for name, value in fields.items() if self.random() < 1 / 3}

    def odd(self) -> dict[str, Any]:
        """Fields that no server knows."""
        return self.maybe(annotations=[], x_trace={"type": "image", "n": [1, None]}) if self.random() < 0.3 else {}


def request(seed: int) -> tuple[DialectName, dict[str, Any]]:
    """A dialect, and a body. Some have images, which this server refuses."""
    draw = Draw(seed)
    made = draw.choice((_chat, _chat, _responses, _messages, _completions))(draw)
    return made[0], {**made[1], **draw.odd()}


def _parts(draw: Draw, kind: str = "text") -> list[dict[str, Any]]:
    mark = {"cache_control": {"type": "ephemeral"}}
    return [
        {"type": kind, "text": draw.text(), **draw.odd(), **(mark if number == 0 and draw.random() < 0.1 else {})}
        for number in range(draw.randint(1, 3))
    ]


def _chat(draw: Draw) -> tuple[DialectName, dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    if draw.random() < 0.6:
        messages.append({"role": draw.choice(("system", "developer")), "content": draw.text()})
    for _ in range(draw.randint(1, 5)):
        messages += draw.choice((_chat_user, _chat_user, _chat_answer, _chat_call))(draw)
    if draw.random() < 0.05:
        messages.append({"role": "user", "content": [{"type": "image_url", "image_url": {"url": IMAGE}}]})
    tool = {"name": "weather", **draw.maybe(description=draw.text(), parameters=SCHEMA, strict=True)}
    body = {"messages": messages, **draw.maybe(tools=[{"type": "function", "function": tool}])}
    body |= draw.maybe(chat_template_kwargs={"style": draw.text(2)}, reasoning_effort=draw.choice(("low", "none")))
    if messages[-1]["role"] == "assistant" and not messages[-1].get("tool_calls") and draw.random() < 0.5:
        body["continue_final_message"] = True
    else:
        body |= draw.maybe(add_generation_prompt=draw.random() < 0.5)
    return "chat", body


def _chat_user(draw: Draw) -> list[dict[str, Any]]:
    return [
        {"role": "user", "content": draw.choice((draw.text(), _parts(draw))), **draw.maybe(name="ada"), **draw.odd()}
    ]


def _chat_answer(draw: Draw) -> list[dict[str, Any]]:
    refused = [{"type": "text", "text": draw.text()}, {"type": "refusal", "refusal": draw.text()}]
    content = draw.choice((draw.text(), _parts(draw), refused))
    thought = draw.choice(({}, {"reasoning_content": draw.text()}, {"reasoning": draw.text()}))
    answer = {"role": "assistant", "content": content, **thought, **draw.odd()}
    return [draw.choice((answer, answer, {"role": "assistant", "content": None, "refusal": draw.text()}))]


def _chat_call(draw: Draw) -> list[dict[str, Any]]:
    calls = [
        {
            "id": f"call_{number}",
            "type": "function",
            "function": {"name": "weather", "arguments": draw.choice(ARGUMENTS)},
        }
        for number in range(draw.randint(1, 2))
    ]
    content = draw.choice((None, "", draw.text()))
    results = [
        {"role": "tool", "tool_call_id": call["id"], "content": draw.choice((draw.text(), _parts(draw), ""))}
        for call in calls
    ]
    return [{"role": "assistant", "content": content, "tool_calls": calls, **draw.odd()}, *results]


def _responses(draw: Draw) -> tuple[DialectName, dict[str, Any]]:
    items: list[dict[str, Any]] = []
    for _ in range(draw.randint(1, 4)):
        said = draw.choice((draw.text(), _parts(draw, "input_text")))
        items.append({"role": draw.choice(("user", "system", "developer")), "content": said, **draw.odd()})
        if draw.random() < 0.3:
            items.append({"type": "reasoning", "summary": [{"type": "summary_text", "text": draw.text()}]})
            items.append({"role": "assistant", "content": _parts(draw, "output_text")})
        if draw.random() < 0.3:
            call = {"call_id": "c", "name": "weather", "arguments": draw.choice(ARGUMENTS)}
            items.append({"type": "function_call", **call})
            items.append({"type": "function_call_output", "call_id": "c", "output": draw.text()})
    if draw.random() < 0.05:
        items.append({"role": "user", "content": [{"type": "input_image", "image_url": IMAGE}]})
    tool = {"type": "function", "name": "weather", "parameters": SCHEMA}
    body = draw.maybe(instructions=draw.text(), tools=[tool], reasoning={"effort": "low"})
    return "responses", {"input": draw.choice((items, items, draw.text())), **body}


def _messages(draw: Draw) -> tuple[DialectName, dict[str, Any]]:
    turns: list[dict[str, Any]] = []
    for _ in range(draw.randint(1, 4)):
        turns.append({"role": "user", "content": draw.choice((draw.text(), _parts(draw)))})
        if draw.random() < 0.4:
            used = {"type": "tool_use", "id": "t", "name": "weather", "input": json.loads(ARGUMENTS[0]), **draw.odd()}
            thought = {"type": "thinking", "thinking": draw.text(), "signature": "s"}
            turns.append({"role": "assistant", "content": [thought, *_parts(draw), used]})
            result = {"type": "tool_result", "tool_use_id": "t", "content": draw.choice((draw.text(), _parts(draw)))}
            turns.append({"role": "user", "content": [result, *_parts(draw)]})
    if draw.random() < 0.2:
        turns.append({"role": "assistant", "content": draw.text()})
    elif draw.random() < 0.05:
        image = {"type": "base64", "media_type": "image/png", "data": IMAGE}
        turns.append({"role": "user", "content": [{"type": "image", "source": image}]})
    tool = {"name": "weather", "description": "Now.", "input_schema": SCHEMA}
    body = draw.maybe(system=draw.choice((draw.text(), _parts(draw))), tools=[tool], thinking={"type": "disabled"})
    return "messages", {"max_tokens": 1, "messages": turns, **body}


def _completions(draw: Draw) -> tuple[DialectName, dict[str, Any]]:
    prompt = draw.choice((draw.text(40), [5, 6, 7, *draw.choices(range(300), k=9)], [draw.text()]))
    return "completions", {"prompt": prompt, **draw.maybe(add_special_tokens=False)}
