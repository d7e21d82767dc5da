"""Writers of chat completions and completions, which differ in their choices only."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, Final

from foreword.api import logprobs, sse
from foreword.api.dialects.writer import BaseWriter, ChoiceOutput, ResponseHead, to_json
from foreword.api.errors import error_body
from foreword.api.output import CallArguments, CallStart, ChoiceDelta, Piece, PromptInfo, Text, Usage
from foreword.api.request import GenerateRequest
from foreword.api.token_entry import TokenEntry, for_chat
from foreword.errors import ForewordError

DONE: Final = b"data: " + sse.DONE + b"\n\n"
_NO_PROMPT: Final = PromptInfo()


def usage_of(usage: Usage) -> dict[str, Any]:
    """OpenAI's `usage`."""
    written = {"cache_write_tokens": sum(usage.written_tokens.values())} if usage.written_tokens else {}
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.output_tokens,
        "total_tokens": usage.prompt_tokens + usage.output_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens, **written},
        "completion_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
    }


class OpenAIWriter(BaseWriter, ABC):
    """Chunks with choices, and a usage at the end. The subclass writes the choices."""

    whole_object = ""
    chunk_object = ""

    def __init__(self, request: GenerateRequest, head: ResponseHead) -> None:
        super().__init__(request, head)
        self._opened: set[int] = set()
        self._head = self._make_head(self.chunk_object)
        self._chunk_head = {**self._head, "usage": None} if request.include_usage else self._head

    def _make_head(self, kind: str) -> dict[str, Any]:
        tier = self.request.extra.get("service_tier")
        return {
            "id": self.head.id,
            "object": kind,
            "created": self.head.created,
            "model": self.head.model,
            "system_fingerprint": self.head.system_fingerprint,
            **({"service_tier": tier} if tier else {}),
        }

    def resume(self, index: int, entries: Sequence[TokenEntry] = ()) -> None:
        self._opened.add(index)

    def events(self, delta: ChoiceDelta, report: Any = None) -> list[bytes]:
        events = [] if delta.index in self._opened else self._open(delta)
        pieces = self.shown(delta)
        wants_tokens = self.request.return_token_ids
        if not (pieces or delta.logprobs or delta.finish_reason or (wants_tokens and delta.tokens)):
            return events
        choice = {"index": delta.index, **self._chunk(pieces, delta), "finish_reason": delta.finish_reason}
        if delta.finish_reason is not None:
            choice["stop_reason"] = delta.stop_match
        if wants_tokens:
            choice["token_ids"] = delta.tokens
        shown = {"cache_report": report} if report is not None and delta.finish_reason is not None else {}
        events.append(self._event({**self._chunk_head, "choices": [choice], **shown}))
        return events

    def _open(self, delta: ChoiceDelta) -> list[bytes]:
        self._opened.add(delta.index)
        prompt = delta.prompt or _NO_PROMPT
        choice = self._opening(delta.index, prompt)
        if choice is None:
            return []
        chunk = {"index": delta.index, **choice, "finish_reason": None}
        return [self._event({**self._chunk_head, "choices": [chunk], **self._beside(prompt)})]

    def end(self, usage: Usage, report: Any = None) -> bytes:
        if not self.request.include_usage:
            return DONE
        shown = {} if report is None else {"cache_report": report}
        return self._event({**self._head, "choices": [], "usage": usage_of(usage), **shown}) + DONE

    def error(self, error: ForewordError) -> bytes:
        return sse.encode(error_body(error))

    def whole(self, usage: Usage, report: Any = None) -> dict[str, Any]:
        choices = [self._whole_choice(index, choice) for index, choice in self.in_order()]
        prompt = next((choice.prompt for choice in self.choices.values() if choice.prompt), _NO_PROMPT)
        return {
            **self._make_head(self.whole_object),
            "choices": choices,
            "usage": usage_of(usage),
            **({} if report is None else {"cache_report": report}),
            **self._beside(prompt),
        }

    def _whole_choice(self, index: int, choice: ChoiceOutput) -> dict[str, Any]:
        return {
            "index": index,
            **self._whole(choice),
            "finish_reason": choice.finish_reason,
            "stop_reason": choice.stop_match,
            **({"token_ids": choice.tokens} if self.request.return_token_ids else {}),
        }

    @staticmethod
    def _event(chunk: Mapping[str, Any]) -> bytes:
        return b"data: " + to_json(chunk) + b"\n\n"

    # The dialect's part

    @abstractmethod
    def _opening(self, index: int, prompt: PromptInfo) -> dict[str, Any] | None:
        """A choice's first chunk, before any output."""

    @abstractmethod
    def _chunk(self, pieces: Sequence[Piece], delta: ChoiceDelta) -> dict[str, Any]:
        """A choice's further chunk."""

    @abstractmethod
    def _whole(self, choice: ChoiceOutput) -> dict[str, Any]:
        """A choice of a response that is not streamed."""

    def _beside(self, prompt: PromptInfo) -> dict[str, Any]:
        """Fields beside the choices of a prompt."""
        return {}


def _prompt_fields(prompt: PromptInfo) -> dict[str, Any]:
    tokens = {"prompt_token_ids": prompt.tokens} if prompt.tokens is not None else {}
    return {**tokens, **({"prompt_logprobs": prompt.logprobs} if prompt.logprobs is not None else {})}


class ChatWriter(OpenAIWriter):
    """`chat.completion`."""

    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def _opening(self, index: int, prompt: PromptInfo) -> dict[str, Any]:
        return {"delta": {"role": "assistant", "content": "", "refusal": None}, "logprobs": None}

    def _chunk(self, pieces: Sequence[Piece], delta: ChoiceDelta) -> dict[str, Any]:
        shown = for_chat(delta.logprobs) if delta.logprobs is not None else None
        return {"delta": _delta(pieces), "logprobs": shown}

    def _whole(self, choice: ChoiceOutput) -> dict[str, Any]:
        calls = [
            {"id": one.id, "type": "function", "function": {"name": one.name, "arguments": one.text}}
            for one in choice.calls
        ]
        reasoning = choice.joined("reasoning")
        message = {
            "role": "assistant",
            "content": choice.joined("text") or (None if calls else ""),
            "refusal": None,
            "annotations": [],
            **({"reasoning_content": reasoning} if reasoning else {}),
            **({"tool_calls": calls} if calls else {}),
        }
        shown = None if choice.logprobs is None else for_chat(choice.logprobs)
        return {"message": message, "logprobs": shown}

    def _beside(self, prompt: PromptInfo) -> dict[str, Any]:
        """A chat has one prompt."""
        return _prompt_fields(prompt)


def _delta(pieces: Sequence[Piece]) -> dict[str, Any]:
    delta: dict[str, Any] = {}
    calls: dict[int, dict[str, Any]] = {}
    for piece in pieces:
        if isinstance(piece, CallStart):
            function = {"name": piece.name, "arguments": ""}
            calls[piece.index] = {"index": piece.index, "id": piece.id, "type": "function", "function": function}
        elif isinstance(piece, CallArguments):
            call = calls.setdefault(piece.index, {"index": piece.index, "function": {"arguments": ""}})
            call["function"]["arguments"] += piece.text
        else:
            name = "content" if isinstance(piece, Text) else "reasoning_content"
            delta[name] = delta.get(name, "") + piece.text
    return {**delta, "tool_calls": list(calls.values())} if calls else delta


class CompletionWriter(OpenAIWriter):
    """`text_completion`. With `echo` the prompt precedes the text."""

    whole_object = "text_completion"
    chunk_object = "text_completion"

    def __init__(self, request: GenerateRequest, head: ResponseHead) -> None:
        super().__init__(request, head)
        self._offsets: dict[int, logprobs.Offsets] = {}

    def resume(self, index: int, entries: Sequence[TokenEntry] = ()) -> None:
        super().resume(index)
        for entry in entries:
            self._offsets_of(index).next(entry)

    def _offsets_of(self, index: int) -> logprobs.Offsets:
        return self._offsets.setdefault(index, logprobs.Offsets())

    def _opening(self, index: int, prompt: PromptInfo) -> dict[str, Any] | None:
        if not prompt.text:  # then its fields stand in the first chunk with output
            return None
        shown = logprobs.for_completion(prompt.entries, self._offsets_of(index)) if prompt.entries else None
        return {"text": prompt.text, "logprobs": shown, **_prompt_fields(prompt)}

    def _chunk(self, pieces: Sequence[Piece], delta: ChoiceDelta) -> dict[str, Any]:
        shown = None
        if delta.logprobs is not None:
            shown = logprobs.for_completion(delta.logprobs, self._offsets_of(delta.index))
        prompt = {} if delta.prompt is None or delta.prompt.text else _prompt_fields(delta.prompt)
        return {"text": "".join(piece.text for piece in pieces if isinstance(piece, Text)), "logprobs": shown, **prompt}

    def _whole(self, choice: ChoiceOutput) -> dict[str, Any]:
        prompt = choice.prompt or _NO_PROMPT
        shown = None
        if choice.logprobs is not None:
            shown = logprobs.for_completion([*prompt.entries, *choice.logprobs], logprobs.Offsets())
        return {"text": prompt.text + choice.joined("text"), "logprobs": shown, **_prompt_fields(prompt)}
