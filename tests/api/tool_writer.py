"""Write an answer as the model would: the inverse of the parsers, for models whose chat template has no tools."""

from __future__ import annotations

import json
from collections.abc import Sequence

from foreword.api.request import ToolCall
from foreword.api.tools import formats as f
from foreword.api.tools.parser import AnswerFormats


def write_answer(formats: AnswerFormats, content: str, calls: Sequence[ToolCall] = (), reasoning: str = "") -> str:
    """The text of an answer with reasoning, content and calls, in this order."""
    if formats.tools == "harmony":
        return _harmony(content, calls, reasoning)
    parts = [_thought(formats, reasoning), content, _calls(formats.tools, calls)]
    return "".join(part for part in parts if part)


def _thought(formats: AnswerFormats, reasoning: str) -> str:
    if not reasoning or formats.reasoning is None:
        return ""
    tags = f.REASONING_TAGS[formats.reasoning]
    return f"{tags.open}\n{reasoning}\n{tags.close}\n\n"


def _calls(tools: str | None, calls: Sequence[ToolCall]) -> str:
    if not calls:
        return ""
    if tools == "llama3_json":
        objects = (_object(call, f.LLAMA_ARGUMENTS) for call in calls)
        return f.LLAMA_TAG + f"{f.LLAMA_SEPARATOR} ".join(objects)
    if tools == "mistral":
        return f"{f.MISTRAL_CALLS}[{', '.join(_object(call, f.HERMES_ARGUMENTS) for call in calls)}]"
    write = _coder if tools == "qwen3_coder" else _hermes
    return "".join(f"\n{f.HERMES_OPEN}\n{write(call)}\n{f.HERMES_CLOSE}" for call in calls)


def _object(call: ToolCall, key: str) -> str:
    return f'{{"name": {json.dumps(call.name, ensure_ascii=False)}, "{key}": {call.arguments or "{}"}}}'


def _hermes(call: ToolCall) -> str:
    return _object(call, f.HERMES_ARGUMENTS)


def _coder(call: ToolCall) -> str:
    values = json.loads(call.arguments or "{}")
    parameters = "".join(
        f"{f.CODER_PARAMETER}{key}>\n{value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)}\n"
        f"{f.CODER_PARAMETER_CLOSE}\n"
        for key, value in values.items()
    )
    return f"{f.CODER_FUNCTION}{call.name}>\n{parameters}{f.CODER_FUNCTION_CLOSE}"


def _harmony(content: str, calls: Sequence[ToolCall], reasoning: str) -> str:
    """The prompt ends with the start of the first message."""
    start = f"{f.HARMONY_START}assistant"
    messages = [_message("analysis", reasoning)] if reasoning else []
    messages += [_message("final" if not calls else "commentary", content)] if content else []
    messages += [
        f"{f.HARMONY_CHANNEL}commentary to={f.HARMONY_FUNCTIONS}{call.name} {f.HARMONY_CONSTRAIN}json"
        f"{f.HARMONY_MESSAGE}{call.arguments or '{}'}{f.HARMONY_CALL}"
        for call in calls
    ]
    return start.join(messages)


def _message(channel: str, text: str) -> str:
    return f"{f.HARMONY_CHANNEL}{channel}{f.HARMONY_MESSAGE}{text}{f.HARMONY_END}"
