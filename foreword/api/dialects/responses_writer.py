"""Responses and events of OpenAI's Responses API."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec

from foreword.api.dialects.writer import BaseWriter, Block, ResponseHead, responses_diagnostics, to_json
from foreword.api.output import ChoiceDelta, Piece, Usage
from foreword.api.request import GenerateRequest
from foreword.api.token_entry import TokenEntry, for_chat
from foreword.decoders import decode_json
from foreword.errors import ForewordError
from foreword.request_errors import ReplicaFailed

_ITEM_PREFIXES: Final = {"text": "msg", "reasoning": "rs", "call": "fc"}
_INCOMPLETE: Final[Mapping[str | None, str]] = {"length": "max_output_tokens", "content_filter": "content_filter"}


def usage_of(usage: Usage) -> dict[str, Any]:
    """The Responses API's `usage`."""
    written = sum(usage.written_tokens.values())
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": written},
        "output_tokens": usage.output_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        "total_tokens": usage.prompt_tokens + usage.output_tokens,
    }


class ResponsesWriter(BaseWriter):
    """`response`. Items follow each other; each is done before the next one."""

    def __init__(self, request: GenerateRequest, head: ResponseHead) -> None:
        super().__init__(request, head)
        self._answer = self.choice(0)
        self._tools = {tool.name: tool for tool in request.tools if tool.namespace or tool.free_text}
        self._number = 0
        self._open: Block | None = None
        self._started = False
        self._shown = 0

    def start(self, usage: Usage) -> list[bytes]:
        if self._started:
            return []
        self._started = True
        response = self._response("in_progress")
        return [self._event("created", response=response), self._event("in_progress", response=response)]

    def resume(self, index: int, entries: Sequence[TokenEntry] = ()) -> None:
        self._started = True

    def events(self, delta: ChoiceDelta, report: Any = None) -> list[bytes]:
        events = self.start(Usage())
        if delta.logprobs is not None:
            self._answer.logprobs = self._answer.logprobs or []
            self._answer.logprobs.extend(delta.logprobs)
        for piece in self.shown(delta):
            events += self._piece(piece)
        if delta.finish_reason is not None:
            self._answer.finish_reason = delta.finish_reason
            events += self._close()
        return events

    def _piece(self, piece: Piece) -> list[bytes]:
        count = len(self._answer.blocks)
        block = self._answer.add_piece(piece)
        events: list[bytes] = []
        if len(self._answer.blocks) > count:
            events = [*self._close(), *self._begin(block)]
        elif block is not self._open:
            raise ReplicaFailed("arguments of one call came after another call began")
        # A free text is known when its JSON is complete.
        text = "" if self._free_text(block) else getattr(piece, "text", "")
        return [*events, self._delta(block, text)] if text else events

    def _begin(self, block: Block) -> list[bytes]:
        self._open = block
        item = self._item(block, "in_progress", empty=True)
        events = [self._event("output_item.added", output_index=self._index(block), item=item)]
        if block.kind != "call":
            events.append(self._event("content_part.added", **self._place(block), part=self._part(block, empty=True)))
        return events

    def _delta(self, block: Block, text: str) -> bytes:
        if block.kind == "call":
            where = {"item_id": self._item_id(block), "output_index": self._index(block)}
            return self._event("function_call_arguments.delta", **where, delta=text)
        if block.kind == "reasoning":
            return self._event("reasoning_text.delta", **self._place(block), delta=text)
        entries = (self._answer.logprobs or [])[self._shown :]
        self._shown += len(entries)
        return self._event("output_text.delta", **self._place(block), delta=text, logprobs=_entries(entries))

    def _close(self) -> list[bytes]:
        block, self._open = self._open, None
        if block is None:
            return []
        events = self._call_done(block) if block.kind == "call" else self._part_done(block)
        item = self._item(block, "completed")
        return [*events, self._event("output_item.done", output_index=self._index(block), item=item)]

    def _call_done(self, block: Block) -> list[bytes]:
        where = {"item_id": self._item_id(block), "output_index": self._index(block)}
        if self._free_text(block):
            text, kind = _input(block.text), "custom_tool_call_input"
            return [self._event(f"{kind}.delta", **where, delta=text), self._event(f"{kind}.done", **where, input=text)]
        name = self._named(block)["name"]
        return [self._event("function_call_arguments.done", **where, name=name, arguments=block.text)]

    def _free_text(self, block: Block) -> bool:
        return block.kind == "call" and block.name in self._tools and self._tools[block.name].free_text

    def _named(self, block: Block) -> dict[str, str]:
        """The name of a call's tool as its client knows it."""
        tool = self._tools.get(block.name)
        if tool is None or not tool.namespace:
            return {"name": block.name}
        return {"name": tool.own_name, "namespace": tool.namespace}

    def _part_done(self, block: Block) -> list[bytes]:
        place, part = self._place(block), self._part(block)
        kind = "reasoning_text" if block.kind == "reasoning" else "output_text"
        odds = {"logprobs": part["logprobs"]} if block.kind == "text" else {}
        return [
            self._event(f"{kind}.done", **place, text=block.text, **odds),
            self._event("content_part.done", **place, part=part),
        ]

    def end(self, usage: Usage, report: Any = None) -> bytes:
        events = [*self.start(usage), *self._close()]
        response = self.whole(usage, report)
        events.append(self._event(response["status"], response=response))
        return b"".join(events)

    def error(self, error: ForewordError) -> bytes:
        code = "server_error" if error.status >= 500 else "invalid_prompt"
        found = {"code": "rate_limit_exceeded" if error.status == 429 else code, "message": error.message}
        events = self.start(Usage())
        return b"".join((*events, self._event("failed", response={**self._response("failed"), "error": found})))

    def whole(self, usage: Usage, report: Any = None) -> dict[str, Any]:
        reason = _INCOMPLETE.get(self._answer.finish_reason)
        diagnosed = "prompt_cache_diagnostics" in self.request.extra
        return {
            **self._response("incomplete" if reason else "completed"),
            "incomplete_details": {"reason": reason} if reason else None,
            "output": [self._item(block, "completed") for block in self._answer.blocks],
            "usage": usage_of(usage),
            **({} if report is None else {"cache_report": report}),
            **({"prompt_cache_diagnostics": responses_diagnostics(report)} if diagnosed else {}),
        }

    # JSON

    def _response(self, status: str) -> dict[str, Any]:
        request, sampling = self.request, self.request.sampling
        return {
            "id": self.head.id,
            "object": "response",
            "created_at": self.head.created,
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": None,
            "model": self.head.model,
            "output": [],
            "max_output_tokens": sampling.get("max_tokens"),
            "parallel_tool_calls": request.parallel_tool_calls,
            "previous_response_id": request.previous,
            "store": request.store,
            "temperature": sampling.get("temperature", 1.0),
            "top_p": sampling.get("top_p", 1.0),
            "top_logprobs": sampling.get("logprobs") or 0,
            "tools": [
                {"type": "custom", "name": tool.name, "description": tool.description}
                if tool.free_text
                else {
                    "type": "function",
                    "name": tool.name,
                    "description": tool.description,
                    "parameters": tool.parameters,
                    "strict": tool.strict,
                }
                for tool in request.tools
            ],
            "truncation": "disabled",
            "usage": None,
            **request.extra,
        }

    def _item(self, block: Block, status: str, *, empty: bool = False) -> dict[str, Any]:
        head = {"id": self._item_id(block), "status": status}
        if block.kind == "call":
            arguments, named = "" if empty else block.text, {"call_id": block.id, **self._named(block)}
            if self._free_text(block):
                return {**head, "type": "custom_tool_call", **named, "input": _input(arguments)}
            return {**head, "type": "function_call", **named, "arguments": arguments}
        content = [] if empty else [self._part(block)]
        if block.kind == "reasoning":
            return {**head, "type": "reasoning", "summary": [], "content": content}
        return {**head, "type": "message", "role": "assistant", "content": content}

    def _part(self, block: Block, *, empty: bool = False) -> dict[str, Any]:
        text = "" if empty else block.text
        if block.kind == "reasoning":
            return {"type": "reasoning_text", "text": text}
        last = next((one for one in reversed(self._answer.blocks) if one.kind == "text"), None)
        found = [] if empty or block is not last else self._answer.logprobs or []
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": _entries(found)}

    def _item_id(self, block: Block) -> str:
        return f"{_ITEM_PREFIXES[block.kind]}_{self.head.id.removeprefix('resp_')}_{self._index(block)}"

    def _index(self, block: Block) -> int:
        return self._answer.blocks.index(block)

    def _place(self, block: Block) -> dict[str, Any]:
        return {"item_id": self._item_id(block), "output_index": self._index(block), "content_index": 0}

    def _event(self, name: str, /, **fields: Any) -> bytes:
        kind = f"response.{name}"
        data = to_json({"type": kind, "sequence_number": self._number, **fields})
        self._number += 1
        return b"event: %b\ndata: %b\n\n" % (kind.encode(), data)


def _input(arguments: str) -> str:
    """The text that a custom tool is called with."""
    try:
        return decode_json(arguments, _Input).input
    except msgspec.DecodeError:
        return arguments


class _Input(msgspec.Struct):
    input: str


def _entries(found: Sequence[TokenEntry]) -> list[dict[str, Any]]:
    content: list[dict[str, Any]] = for_chat(found)["content"] if found else []
    return content
