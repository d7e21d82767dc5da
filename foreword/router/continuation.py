"""Where one replica's answer ends and another's goes on: as if there were one.

The continuing replica gets the prompt's and the answer's token ids as a prompt of `/v1/completions`, whatever the client had
asked for, and its chunks are turned into those of the client's interface. Stop strings are looked for here, because one may
lie across the seam.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from foreword.engine.stops import StopFinder
from foreword.errors import ReplicaFailed
from foreword.router.client_request import Asked

# What would have to begin in the middle, or concerns the first replica only.
_DROPPED: Final = frozenset(
    name
    for names in (
        "messages prompt suffix echo stop include_stop_str_in_output max_completion_tokens max_tokens min_tokens",
        "logprobs top_logprobs n best_of tools tool_choice functions function_call parallel_tool_calls response_format",
        "modalities prefix cache_report add_generation_prompt continue_final_message chat_template chat_template_kwargs",
        "documents add_special_tokens truncate_prompt_tokens stream_options reasoning_effort include_reasoning",
        "kv_transfer_params salt cache_salt",
    )
    for name in names.split()
)
# Name, what it means if it is set, and the values that mean "not set".
_INEXACT: Final[Mapping[str, tuple[object, ...]]] = {
    "tools": (None, []),
    "functions": (None, []),
    "response_format": (None, {"type": "text"}),
    "structured_outputs": (None,),
    "guided_json": (None,),
    "guided_regex": (None,),
    "guided_choice": (None,),
    "guided_grammar": (None,),
    "presence_penalty": (None, 0, 0.0),
    "frequency_penalty": (None, 0, 0.0),
    "prompt_logprobs": (None,),
    "suffix": (None, ""),
    "echo": (None, False),
    "prompt_embeds": (None,),
    "use_beam_search": (None, False),
    "logits_processors": (None, []),
}


def why_not(asked: Asked) -> str | None:
    """Why an answer to this request cannot be continued by another replica, if it cannot."""
    if not asked.single:
        return "it has several prompts or choices"
    for name, neutral in _INEXACT.items():
        if asked.body.get(name) not in neutral:
            return f"{name} cannot begin in the middle of an answer"
    messages = asked.body.get("messages")
    if isinstance(messages, list) and not all(_is_text(message) for message in messages):
        return "its prompt is not only text"
    if asked.body.get("tool_choice") not in (None, "none", "auto"):
        return "tool_choice cannot begin in the middle of an answer"
    return None


def _is_text(message: Any) -> bool:
    content = message.get("content") if isinstance(message, dict) else None
    if not isinstance(content, list):
        return True
    return all(isinstance(part, str) or (isinstance(part, dict) and part.get("type") == "text") for part in content)


@dataclass(frozen=True, slots=True)
class Known:
    """Where the answer is.

    Attributes:
        tokens: ids of the answer, as many as whole characters were made of; they become part of the prompt.
        text: what they stand for.
        sent: text that the client has; it begins `text` or is longer.
        repeated: tokens behind `tokens` that the client was told of (ids, log-probabilities) and that come again.
    """

    tokens: Sequence[int]
    text: str
    sent: str
    repeated: int


class Seam:
    """What happens to chunks after the seam. Raises ReplicaFailed if the client's text and the tokens do not fit."""

    def __init__(self, asked: Asked, known: Known) -> None:
        stops = asked.body.get("stop")
        self.stops: tuple[str, ...] = (stops,) if isinstance(stops, str) else tuple(stops or ())
        self._finder = StopFinder(self.stops, include=bool(asked.body.get("include_stop_str_in_output")))
        self._chat = asked.interface == "chat"
        self._top = int(asked.body.get("top_logprobs") or 0)
        self._wants_logprobs = logprobs_wanted(asked) is not None
        self._repeated = known.repeated
        self._offset = len(known.text)
        # Characters from the answer's beginning: those that left the finder, and those that the client has.
        self._made, self._sent = 0, len(known.sent)
        if not known.sent.startswith(known.text) and not known.text.startswith(known.sent):
            raise ReplicaFailed("the text that was sent is not what its tokens stand for")
        shown, self._stopped = self._finder.push(known.text)
        self._waiting = self._beyond(shown)

    @property
    def stopped(self) -> str | None:
        """The stop string that the tokens before the seam already contain."""
        return self._stopped

    def flush(self) -> str:
        """All text before the seam that the client does not have, where nothing follows."""
        return self.opening() + self._beyond(self._finder.flush())

    def opening(self) -> str:
        """Text before the seam that the client does not have yet."""
        waiting, self._waiting = self._waiting, ""
        return waiting

    def chunk(self, choice: Mapping[str, Any], wants_token_ids: bool) -> dict[str, Any] | None:
        """The client's chunk for one of the continuing replica; None if there is nothing to tell."""
        text, finish = choice.get("text") or "", choice.get("finish_reason")
        shown, stopped = self._finder.push(text)
        if finish is not None and stopped is None:
            shown += self._finder.flush()
        shown = self.opening() + self._beyond(shown)
        ids = list(choice.get("token_ids") or ())
        skipped = min(self._repeated, len(ids))
        self._repeated -= skipped
        logprobs = self._logprobs(choice.get("logprobs"), skipped)
        reason = "stop" if stopped is not None else finish
        match = stopped if stopped is not None else choice.get("stop_reason")
        if not shown and reason is None and not logprobs and not (wants_token_ids and ids[skipped:]):
            return None
        made = self.piece(shown, logprobs, reason, match)
        if wants_token_ids:
            made["token_ids"] = ids[skipped:]
        return made

    def piece(
        self, text: str, logprobs: dict[str, Any] | None, reason: str | None, match: object = None
    ) -> dict[str, Any]:
        """A choice of the client's interface."""
        body: dict[str, Any] = {"delta": {"content": text} if text else {}} if self._chat else {"text": text}
        ended = {"finish_reason": reason, "stop_reason": match} if reason is not None else {"finish_reason": None}
        return {"index": 0, **body, "logprobs": logprobs, **ended}

    def _beyond(self, text: str) -> str:
        """What of this text the client does not have."""
        known = min(max(self._sent - self._made, 0), len(text))
        self._made += len(text)
        return text[known:]

    def _logprobs(self, found: Any, skipped: int) -> dict[str, Any] | None:
        if not self._wants_logprobs or not isinstance(found, dict) or not found.get("tokens"):
            return None
        columns = {name: (found.get(name) or [])[skipped:] for name in _COLUMNS}
        if self._chat:
            return _chat_logprobs(columns, self._top) if columns["tokens"] else None
        columns["text_offset"] = [offset + self._offset for offset in columns["text_offset"]]
        return columns if columns["tokens"] else None


_COLUMNS: Final = ("tokens", "token_logprobs", "top_logprobs", "text_offset")


def _chat_logprobs(columns: Mapping[str, list[Any]], top: int) -> dict[str, Any]:
    rows = zip(columns["tokens"], columns["token_logprobs"], columns["top_logprobs"], strict=False)
    content = []
    for token, logprob, likeliest in rows:
        best = sorted((likeliest or {}).items(), key=lambda pair: -pair[1])[:top]
        content.append({**_entry(token, logprob), "top_logprobs": [_entry(*pair) for pair in best]})
    return {"content": content, "refusal": None}


def _entry(token: str, logprob: float) -> dict[str, Any]:
    return {"token": token, "logprob": logprob, "bytes": list(_bytes(token))}


def _bytes(token: str) -> bytes:
    if token.startswith("bytes:\\x"):
        return bytes.fromhex(token.removeprefix("bytes:").replace("\\x", ""))
    return token.encode()


def logprobs_wanted(asked: Asked) -> int | None:
    """Alternatives per token, as `/v1/completions` has it."""
    found = asked.body.get("logprobs")
    if asked.interface == "completion":
        return found if isinstance(found, int) and not isinstance(found, bool) else None
    return int(asked.body.get("top_logprobs") or 0) if found else None


def continuation(
    asked: Asked, prompt: Sequence[int], known: Known, longest: int | None, default_tokens: int | None
) -> dict[str, Any]:
    """The body that goes on after `known`. `max_tokens` in it is 0 if nothing is left to generate.

    Args:
        longest: the model's length.
        default_tokens: what a completion without `max_tokens` may have.

    Raises ReplicaFailed where the length is unknown and needed.
    """
    body = {name: value for name, value in asked.body.items() if name not in _DROPPED}
    ids = [*prompt, *known.tokens]
    most = asked.max_tokens if asked.max_tokens is not None else default_tokens
    room = longest - len(ids) if longest is not None else None
    if most is None and room is None:
        raise ReplicaFailed("the model's length is not known, so it is not known how far to go on")
    left = [max(most - len(known.tokens), 0)] if most is not None else []
    left += [max(room, 0)] if room is not None else []
    body |= {
        "prompt": ids,
        "max_tokens": min(left),
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_token_ids": True,
    }
    if isinstance(fewest := asked.body.get("min_tokens"), int):
        body["min_tokens"] = min(max(fewest - len(known.tokens), 0), body["max_tokens"])
    if (alternatives := logprobs_wanted(asked)) is not None:
        body["logprobs"] = alternatives
    return body
