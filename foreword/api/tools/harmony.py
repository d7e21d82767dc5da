"""The format of gpt-oss: messages on channels, some of them to a tool.

`<|channel|>analysis<|message|>...<|end|><|start|>assistant<|channel|>commentary to=functions.f
<|constrain|>json<|message|>{...}<|call|>`. The prompt ends with the first `<|start|>assistant`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

from foreword.api.request import Tool
from foreword.api.tools.formats import (
    HARMONY_CALL,
    HARMONY_CHANNEL,
    HARMONY_CONSTRAIN,
    HARMONY_END,
    HARMONY_FUNCTIONS,
    HARMONY_MESSAGE,
    HARMONY_RETURN,
    HARMONY_START,
    Markers,
    ToolFormat,
    json_rule,
)
from foreword.api.tools.json_calls import NAME_CHARACTERS
from foreword.api.tools.reader import Malformed, PieceCollector, Reading, TextReader
from foreword.tokens.reasoning_stops import ReasoningSpan

_CHANNEL = re.compile(re.escape(HARMONY_CHANNEL) + r"\s*(\w+)")
_RECIPIENT = re.compile(r"\bto=([^\s<]+)")
_ENDS = (HARMONY_END, HARMONY_CALL, HARMONY_RETURN, HARMONY_START, HARMONY_CHANNEL)
_HEADS = (HARMONY_START, HARMONY_CHANNEL, HARMONY_MESSAGE)
_ANALYSIS = "analysis"


class Harmony(ToolFormat):
    """Analysis is reasoning, a message with a recipient is a call, every other message is text."""

    whole_answer = True
    # Channels before the final message: analysis, and calls.
    reasoning = ReasoningSpan(HARMONY_CHANNEL, (HARMONY_CHANNEL + "final", HARMONY_MESSAGE), is_open=True)
    special_tokens = True

    def detects(self, template: str, model_type: str) -> bool:
        return HARMONY_CHANNEL in template or model_type == "gpt_oss"

    def read(self, reader: TextReader, pieces: PieceCollector, tools: Sequence[Tool]) -> Reading[None]:
        head = yield from reader.literal(" to=", "to=", *_HEADS)
        while head or (head := (yield from reader.until((*_HEADS, *_ENDS), pieces.text))):
            if head in (HARMONY_END, HARMONY_CALL, HARMONY_RETURN):
                pieces.marker()
                head = ""
            else:
                head = yield from _message(reader, pieces, head)

    def grammar(self, tools: Sequence[Tool], marker: Markers, parallel: bool) -> str:
        """A call, which may follow an analysis. The token that ends a call ends the answer."""
        channel, message = marker(HARMONY_CHANNEL), marker(HARMONY_MESSAGE)
        again = f'{marker(HARMONY_END)} {marker(HARMONY_START)} "assistant"'
        lines = [
            f'calls: ({channel} "{_ANALYSIS}" {message} /(?s:.*)/ {again})? call',
            "call: " + " | ".join(f"call_{number}" for number in range(len(tools))),
        ]
        for number, tool in enumerate(tools):
            head = json.dumps(f"commentary to={HARMONY_FUNCTIONS}{tool.name} ")
            lines.append(
                f'call_{number}: {channel} {head} {marker(HARMONY_CONSTRAIN)} "json" {message} arguments_{number}'
            )
            lines.append(f"arguments_{number}: {json_rule(tool.parameters, strict=tool.strict)}")
        return "\n".join(lines)


def _message(reader: TextReader, pieces: PieceCollector, head: str) -> Reading[str]:
    """A message of which `head` was read already. Gives the start of the next one if its marker ended this one."""
    try:
        header = yield from _header(reader, head)
    except Malformed:
        pieces.text(head + reader.recorded())
        return ""
    end = yield from _body(reader, pieces, header)
    if end:
        pieces.marker()
    return end if end in (HARMONY_START, HARMONY_CHANNEL) else ""


def _header(reader: TextReader, head: str) -> Reading[str]:
    """Everything between `<|start|>` or `<|channel|>` and `<|message|>`."""
    reader.record()
    parts = [head]
    while head != HARMONY_MESSAGE:
        head = yield from reader.until((*_HEADS, *_ENDS), parts.append)
        if head not in (HARMONY_CHANNEL, HARMONY_MESSAGE):
            raise Malformed
        parts.append(head)
    reader.forget()
    return "".join(parts)


def _body(reader: TextReader, pieces: PieceCollector, header: str) -> Reading[str]:
    recipient = _RECIPIENT.search(header)
    channel = _CHANNEL.search(header)
    pieces.marker()
    if recipient:
        return (yield from _arguments(reader, pieces, recipient[1].removeprefix(HARMONY_FUNCTIONS)))
    thinking = channel is not None and channel[1] == _ANALYSIS
    return (yield from reader.until(_ENDS, pieces.reasoning if thinking else pieces.text))


def _arguments(reader: TextReader, pieces: PieceCollector, name: str) -> Reading[str]:
    pieces.call(name[:NAME_CHARACTERS])
    if (yield from reader.literal(*_ENDS)):
        pieces.arguments("{}")
        return HARMONY_CALL
    return (yield from reader.until(_ENDS, pieces.arguments))
