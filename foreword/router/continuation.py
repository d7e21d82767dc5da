"""Continues a broken stream on another replica.

The next replica gets the token ids of the prompt and of the output so far as a prompt of `/v1/completions`, whatever interface
the client uses. Its chunks are converted to those of the client's interface. The router searches for stop strings itself,
because one may span the failover.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from foreword.api.dialects.answer_reader import AnswerChoice, Logprobs
from foreword.api.request import GenerateRequest
from foreword.api.token_entry import for_chat
from foreword.request_errors import ReplicaFailed
from foreword.router.replica_body import ROUTER_FIELDS, is_repeatable
from foreword.tokens.stops import StopFinder

# Fields that a continuation replaces, or, with those of the router, that concern the first replica only.
_REPLACED: Final = frozenset(
    name
    for names in (
        "messages prompt suffix echo stop include_stop_str_in_output max_completion_tokens max_tokens min_tokens",
        "logprobs top_logprobs n best_of tools tool_choice functions function_call parallel_tool_calls response_format",
        "modalities prefix cache_report add_generation_prompt continue_final_message chat_template chat_template_kwargs",
        "documents add_special_tokens truncate_prompt_tokens stream_options reasoning_effort include_reasoning",
    )
    for name in names.split()
)
_DROPPED: Final = ROUTER_FIELDS | _REPLACED


def why_not_continuable(request: GenerateRequest) -> str | None:
    """Why no other replica can continue the response to this request; None if one can."""
    if len(request.prompts) > 1:
        return "it has several prompts"
    if not request.single and not is_repeatable(request):
        return "it has several choices and no seed"
    if request.refusal is not None:
        return f"it is not understood here ({request.refusal.message})"
    used = {
        "tools": request.tools,
        "structured output": request.output_format is not None,
        "echo": request.echo,
        "prompt_logprobs": "prompt_logprobs" in request.sampling,
        **{name: request.sampling.get(name) for name in ("presence_penalty", "frequency_penalty")},
    }
    found = next((name for name, value in used.items() if value), None)
    return f"{found} cannot be continued in the middle of a response" if found is not None else None


@dataclass(frozen=True, slots=True)
class StreamPosition:
    """Where a stream broke.

    Attributes:
        tokens: ids of output tokens that form whole characters. They become part of the next prompt.
        text: their text; a prefix of `sent`, or longer.
        sent: text that the client has.
        repeated: tokens after `tokens` whose ids or log-probabilities the client has. They are generated again.
    """

    tokens: Sequence[int]
    text: str
    sent: str
    repeated: int


class ContinuedResponse:
    """Converts the next replica's chunks of one choice."""

    def __init__(self, request: GenerateRequest, position: StreamPosition, index: int = 0) -> None:
        given, self._index = request.sampling, index
        self._finder = StopFinder(given.get("stop", ()), include=given.get("include_stop", False))
        self._chat = request.dialect == "chat"
        # The number of alternatives per token; None without log-probabilities.
        self._top: int | None = given.get("logprobs")
        self._skip = position.repeated
        self._offset = len(position.text)
        # Characters from the start of the output: those that passed the stop finder, and those that the client has.
        self._produced, self._sent = 0, len(position.sent)
        # A stop string that the tokens before the failover already contain.
        self.stopped: str | None
        shown, self.stopped = self._finder.push(position.text)
        self._unsent = self._unseen(shown)

    def flush(self) -> str:
        """All text before the failover that the client does not have; nothing follows."""
        return self.take_unsent() + self._unseen(self._finder.close()[0])

    def take_unsent(self) -> str:
        """Text before the failover that the client does not have yet."""
        unsent, self._unsent = self._unsent, ""
        return unsent

    def convert(self, choice: AnswerChoice, wants_token_ids: bool) -> tuple[str, dict[str, Any] | None]:
        """The client's choice for one of the next replica, and its text; None if there is nothing to send. Raises
        ReplicaFailed for malformed log-probabilities."""
        finish = choice.finish_reason
        find = self._finder.push if finish is None else self._finder.close
        shown, stopped = find(choice.shown)
        shown = self.take_unsent() + self._unseen(shown)
        ids = choice.token_ids or []
        skipped = min(self._skip, len(ids))
        self._skip -= skipped
        found = choice.read_logprobs() if self._top is not None else None
        odds = None if found is None else self._logprobs(found, skipped)
        reason = "stop" if stopped is not None else finish
        match = stopped if stopped is not None else choice.stop_reason
        if not shown and reason is None and not odds and not (wants_token_ids and ids[skipped:]):
            return "", None
        made = self.make_choice(shown, odds, reason, match)
        if wants_token_ids:
            made["token_ids"] = ids[skipped:]
        return shown, made

    def make_choice(
        self, text: str, odds: dict[str, Any] | None, reason: str | None, match: object = None
    ) -> dict[str, Any]:
        """A choice in the format of the client's interface."""
        body: dict[str, Any] = {"delta": {"content": text} if text else {}} if self._chat else {"text": text}
        ended = {"finish_reason": reason, "stop_reason": match} if reason is not None else {"finish_reason": None}
        return {"index": self._index, **body, "logprobs": odds, **ended}

    def _unseen(self, text: str) -> str:
        """The part of this text that the client does not have."""
        seen = min(max(self._sent - self._produced, 0), len(text))
        self._produced += len(text)
        return text[seen:]

    def _logprobs(self, found: Logprobs, skipped: int) -> dict[str, Any] | None:
        entries = found.entries()[skipped:]
        if not entries:
            return None
        if self._chat:
            return for_chat([replace(entry, top=entry.top[: self._top]) for entry in entries])
        offsets = [offset + self._offset for offset in found.text_offset[skipped:]]
        tops = None if found.top_logprobs is None else found.top_logprobs[skipped:]
        columns = {"tokens": found.tokens[skipped:], "token_logprobs": found.token_logprobs[skipped:]}
        return {**columns, "top_logprobs": tops, "text_offset": offsets}


def repeating_body(request: GenerateRequest, prompt: Sequence[int], max_model_len: int | None) -> dict[str, Any]:
    """The body of a completion that computes all choices again, with the seed of each: vLLM gives choice `i` the seed of the
    request plus `i`. Raises ReplicaFailed if the length is needed and unknown."""
    body = continuation_body(request, prompt, StreamPosition((), "", "", 0), max_model_len)
    return body | {"n": request.sampling["n"]}


def continuation_body(
    request: GenerateRequest, prompt: Sequence[int], position: StreamPosition, max_model_len: int | None
) -> dict[str, Any]:
    """The body that continues after `position`. Its `max_tokens` is 0 if nothing is left to generate.

    Args:
        max_model_len: maximum length of the model; None if unknown.

    Raises ReplicaFailed if the length is needed and unknown.
    """
    body: dict[str, Any] = {name: value for name, value in request.body.fields.items() if name not in _DROPPED}
    ids, given = [*prompt, *position.tokens], request.sampling
    max_tokens = given.get("max_tokens")
    limits = [max_tokens - len(position.tokens)] if max_tokens is not None else []
    limits += [max_model_len - len(ids)] if max_model_len is not None else []
    if not limits:
        raise ReplicaFailed("the maximum length of the model is not known")
    body |= {
        "prompt": ids,
        "max_tokens": max(min(limits), 0),
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_token_ids": True,
    }
    if "min_tokens" in given:
        body["min_tokens"] = min(max(given["min_tokens"] - len(position.tokens), 0), body["max_tokens"])
    if "logprobs" in given:
        body["logprobs"] = given["logprobs"]
    return body
