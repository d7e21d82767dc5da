"""Gains that another order of prompts would give each client of a recording of whole requests (`prompt_order`).

A recording has a line of JSON for each request, in the order in which they came:

    {"client": "Codex CLI", "session": "1", "path": "/v1/responses", "body": {...}}

The prompts are rendered and tokenized as a server does, for a cache that keeps everything, in blocks of 16 tokens. A client's
requests with tools are its conversations; others, such as for a title, fill the cache only.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any, Final

import msgspec

from foreword.api.dialects.decode import Limits
from foreword.api.dialects.dialect import Dialect
from foreword.api.dialects.registry import DIALECTS
from foreword.api.misses.causes import MissFinder
from foreword.api.request import GenerateRequest, template_messages, template_tools
from foreword.config import read_text
from foreword.decoders import decode_json
from foreword.errors import BadRequest, ConfigError
from foreword.prompt_order import PromptOrder
from foreword.tokens.tokenizer import Tokenizer

_BLOCK: Final = 16
_LIMITS: Final = Limits.for_model(1 << 20, 1 << 28, 0)


class RecordedBody(msgspec.Struct, forbid_unknown_fields=True):
    """A line of the recording."""

    client: str
    path: str
    body: dict[str, Any]
    session: str = ""


@dataclass(frozen=True, slots=True)
class ClientHits:
    """A client, and the mean share of its prompts that is cached, as they come and in the other order.

    Attributes:
        prompt_tokens: of the first request of its last session.
        next_turn, new_session: of later requests of a session, and of the first one of a session after another; None if the
            recording has none.
        where, advice: why a new session misses, as they come.
    """

    client: str
    sessions: int
    requests: int
    prompt_tokens: int
    next_turn: float | None
    new_session: float | None
    next_turn_ordered: float | None
    new_session_ordered: float | None
    where: str = ""
    advice: str = ""


class _Cache:
    """All blocks of all prompts of a client, and the shares of its requests that were cached."""

    def __init__(self) -> None:
        self._blocks = set[int]()
        self.next_turn = list[float]()
        self.new_session = list[float]()

    def add(self, tokens: Sequence[int]) -> int:
        """The tokens of a prompt that were cached."""
        cached, before, missed = 0, 0, False
        for start in range(0, len(tokens) - _BLOCK + 1, _BLOCK):
            before = hash((before, *tokens[start : start + _BLOCK]))
            missed = missed or before not in self._blocks
            cached += 0 if missed else _BLOCK
            self._blocks.add(before)
        return min(cached, len(tokens) - 1)


def client_report(paths: Iterable[Path], tokenizer: Tokenizer, order: PromptOrder) -> list[ClientHits]:
    """Each client, in the order of the recording. Raises ConfigError for an invalid recording, or for an order that the
    tokenizer's template cannot show."""
    order.check(tokenizer)
    requests: dict[str, list[tuple[str, GenerateRequest]]] = {}
    for path in paths:
        for recorded, request in _read(path):
            requests.setdefault(recorded.client, []).append((recorded.session, request))
    if not requests:
        raise ConfigError("the recording has no requests")
    return [_hits(client, found, tokenizer, order) for client, found in requests.items()]


def _read(path: Path) -> Iterable[tuple[RecordedBody, GenerateRequest]]:
    for number, line in enumerate(read_text(path, "the recording").split("\n"), start=1):
        if not line.strip():
            continue
        try:
            recorded = decode_json(line.encode(), RecordedBody)
            yield recorded, _dialect(recorded.path).read(json.dumps(recorded.body).encode(), _LIMITS)
        except (msgspec.MsgspecError, BadRequest) as error:
            raise ConfigError(f"{path}, line {number}: not a recorded request: {error}") from error


def _dialect(path: str) -> Dialect:
    found = next((one for one in DIALECTS.values() if path.partition("?")[0].endswith(one.path)), None)
    if found is None or found.name == "completions":
        raise BadRequest(f"path: {path} is not of a chat")
    return found


def _hits(
    client: str, requests: Sequence[tuple[str, GenerateRequest]], tokenizer: Tokenizer, order: PromptOrder
) -> ClientHits:
    as_is, ordered, finder = _Cache(), _Cache(), MissFinder()
    sessions, first_tokens, where, advice = set[str](), 0, "", ""
    offers_tools = any(request.tools for _, request in requests)
    for session, request in requests:
        is_first = session not in sessions
        counts = (bool(request.tools) or not offers_tools) and bool(sessions)
        cached, tokens = _add(as_is, _rendered(request, tokenizer, PromptOrder()), counts, is_first)
        _add(ordered, _rendered(request, tokenizer, order), counts, is_first)
        miss = finder.explain(finder.begin(msgspec.structs.replace(request, session=None)), tokens, cached)
        if is_first and (request.tools or not offers_tools):
            first_tokens = tokens
            if sessions:
                where, advice = miss.where, miss.advice
            sessions.add(session)
    return ClientHits(
        client,
        len(sessions),
        len(requests),
        first_tokens,
        _mean(as_is.next_turn),
        _mean(as_is.new_session),
        _mean(ordered.next_turn),
        _mean(ordered.new_session),
        where,
        advice,
    )


def _add(cache: _Cache, tokens: Sequence[int], counts: bool, is_first: bool) -> tuple[int, int]:
    """Cached tokens of a prompt, and all of them."""
    cached = cache.add(tokens)
    if counts:
        (cache.new_session if is_first else cache.next_turn).append(cached / len(tokens))
    return cached, len(tokens)


def _rendered(request: GenerateRequest, tokenizer: Tokenizer, order: PromptOrder) -> list[int]:
    said, offered = template_messages(request.messages), template_tools(request.tools)
    messages, tools = order.arranged(said, offered, request.model or "")
    return tokenizer.render_chat(
        messages,
        tools=tools,
        options=request.template_options,
        add_generation_prompt=request.add_generation_prompt,
        continue_final_message=request.continue_final_message,
    )


def _mean(shares: Sequence[float]) -> float | None:
    return fmean(shares) if shares else None
