"""Responses, events and errors of Anthropic's messages."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec

from foreword.api import sse
from foreword.api.dialects.writer import BaseWriter, Block, ChoiceOutput, ResponseHead, messages_diagnostics, to_json
from foreword.api.errors import ErrorResponse
from foreword.api.errors import error_response as openai_error_response
from foreword.api.output import CallArguments, ChoiceDelta, Piece, Text, Usage
from foreword.api.request import GenerateRequest
from foreword.api.sse import utf8
from foreword.api.token_entry import TokenEntry
from foreword.errors import ForewordError
from foreword.request_errors import ReplicaFailed

_STOP_REASONS: Final[Mapping[str | None, str | None]] = {
    None: None,
    "stop": "end_turn",
    "length": "max_tokens",
    "tool_calls": "tool_use",
    "content_filter": "refusal",
}
_ERROR_TYPES: Final[Mapping[int, str]] = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
_FIVE_MINUTES: Final = 300.0


def usage_of(usage: Usage) -> dict[str, Any]:
    """Anthropic's `usage`: input tokens are those that were neither read from the cache nor written to it on request."""
    short = sum(count for ttl, count in usage.written_tokens.items() if ttl <= _FIVE_MINUTES)
    written = sum(usage.written_tokens.values())
    return {
        "input_tokens": max(usage.prompt_tokens - usage.cached_tokens - written, 0),
        "cache_creation_input_tokens": written,
        "cache_read_input_tokens": usage.cached_tokens,
        "cache_creation": {"ephemeral_5m_input_tokens": short, "ephemeral_1h_input_tokens": written - short},
        "output_tokens": usage.output_tokens,
        "output_tokens_details": {"thinking_tokens": usage.reasoning_tokens},
    }


def error_body(error: ForewordError, request_id: str = "") -> dict[str, Any]:
    """The JSON that reports an error to Anthropic's clients."""
    fallback = "api_error" if error.status >= 500 else "invalid_request_error"
    named = {"request_id": request_id} if request_id else {}
    shown = {"type": _ERROR_TYPES.get(error.status, fallback), "message": error.message}
    return {"type": "error", "error": {**shown, "details": {"error_code": error.code}}, **named}


def error_response(error: ForewordError, retry_after: float | None = None, request_id: str = "") -> ErrorResponse:
    """The response to an error that is known before anything was sent."""
    status, _, headers = openai_error_response(error, retry_after)
    text = json.dumps(error_body(error, request_id), ensure_ascii=False, separators=(",", ":"))
    return ErrorResponse(status, utf8(text), headers)


class MessagesWriter(BaseWriter):
    """`message`. Blocks follow each other; each is closed before the next one."""

    def __init__(self, request: GenerateRequest, head: ResponseHead) -> None:
        super().__init__(request, head)
        self._started = False
        self._answer = self.choice(0)
        self._open: Block | None = None

    def start(self, usage: Usage) -> list[bytes]:
        if self._started:
            return []
        self._started = True
        message = {**self._message(self._answer, usage), "content": []}
        return [_event("message_start", message=message), _event("ping")]

    def resume(self, index: int, entries: Sequence[TokenEntry] = ()) -> None:
        self._started = True

    def events(self, delta: ChoiceDelta, report: Any = None) -> list[bytes]:
        events = self.start(Usage())
        for piece in self.shown(delta):
            events += self._piece(piece)
        self._answer.finish_reason = delta.finish_reason or self._answer.finish_reason
        if delta.finish_reason is not None:
            self._answer.stop_match = delta.stop_match
            events += self._close()
        return events

    def _piece(self, piece: Piece) -> list[bytes]:
        count = len(self._answer.blocks)
        block = self._answer.add_piece(piece)
        events: list[bytes] = []
        if len(self._answer.blocks) > count:
            events = self._close()
            self._open = block
            events.append(_event("content_block_start", index=count, content_block=_content(block, empty=True)))
        elif block is not self._open:
            raise ReplicaFailed("arguments of one call came after another call began")
        if block.parts:
            text = block.parts.pop()
            events.append(_event("content_block_delta", index=len(self._answer.blocks) - 1, delta=_delta(piece, text)))
        return events

    def _close(self) -> list[bytes]:
        if self._open is None:
            return []
        index, self._open = self._answer.blocks.index(self._open), None
        return [_event("content_block_stop", index=index)]

    def end(self, usage: Usage, report: Any = None) -> bytes:
        last = _event("message_delta", delta=_stop(self._answer), usage=usage_of(usage), **self._explained(report))
        return b"".join((*self.start(usage), *self._close(), last, _event("message_stop")))

    def error(self, error: ForewordError) -> bytes:
        return sse.encode(error_body(error), "error")

    def whole(self, usage: Usage, report: Any = None) -> dict[str, Any]:
        return {**self._message(self._answer, usage), **self._explained(report)}

    def _explained(self, report: Any) -> dict[str, Any]:
        found = {} if report is None else {"cache_report": report}
        return found | {"diagnostics": messages_diagnostics(report)} if "diagnostics" in self.request.extra else found

    def _message(self, answer: ChoiceOutput, usage: Usage) -> dict[str, Any]:
        return {
            "id": self.head.id,
            "type": "message",
            "role": "assistant",
            "model": self.head.model,
            "content": [_content(block) for block in answer.blocks],
            **_stop(answer),
            "usage": usage_of(usage),
            **self.request.extra,
        }


def _event(name: str, **fields: Any) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (name.encode(), to_json({"type": name, **fields}))


def _stop(answer: ChoiceOutput) -> dict[str, Any]:
    if answer.finish_reason == "stop" and isinstance(answer.stop_match, str):
        return {"stop_reason": "stop_sequence", "stop_sequence": answer.stop_match}
    return {"stop_reason": _STOP_REASONS[answer.finish_reason], "stop_sequence": None}


def _content(block: Block, *, empty: bool = False) -> dict[str, Any]:
    text = "" if empty else block.text
    if block.kind == "text":
        return {"type": "text", "text": text}
    if block.kind == "reasoning":
        return {"type": "thinking", "thinking": text, "signature": ""}
    return {"type": "tool_use", "id": block.id, "name": block.name, "input": _input(text)}


def _input(arguments: str) -> Any:
    """The arguments as an object. What the model wrote otherwise is not lost."""
    try:
        found = msgspec.json.decode(arguments or "{}")
    except (msgspec.DecodeError, RecursionError):
        return {"arguments": arguments}
    return found if isinstance(found, dict) else {"arguments": found}


def _delta(piece: Piece, text: str) -> dict[str, Any]:
    if isinstance(piece, CallArguments):
        return {"type": "input_json_delta", "partial_json": text}
    kind = "text" if isinstance(piece, Text) else "thinking"
    return {"type": f"{kind}_delta", kind: text}
