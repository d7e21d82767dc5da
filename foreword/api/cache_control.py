"""`/v1/cache/*`: retain, pin, prefetch and release a prefix. Routes, bodies and answers."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final, Literal, Protocol

from msgspec import Raw, Struct

from foreword.api.dialects.conversation_body import MessageBody, ToolBody, messages_of, tools_of
from foreword.api.dialects.decode import UNSET_RAW, Limits, bounded_object, check_length, decode, refuse
from foreword.api.front import Handler
from foreword.api.request import Message, Tool, template_messages, template_tools
from foreword.api.routes import NO_BODY, JsonBody, Meter, Right, Routes, SaltQuery
from foreword.blocks.retention import MAX_PRIORITY, RetentionAnswer

DEFAULT_TTL: Final = 300.0
_UNITS: Final = {"s": 1, "m": 60, "h": 3600, "d": 86_400}
_DURATION: Final = re.compile(r"([0-9]{1,9})([smhd])")


_VERBS: Final = (
    (
        "retain",
        Right.TENANT,
        Meter.TOKENS,
        "Keep the KV of a prefix for a time after its last use, computed if necessary.",
    ),
    ("pin", Right.OWNER, Meter.TOKENS, "Keep the KV of a prefix until it is released. It is computed if necessary."),
    ("prefetch", Right.TENANT, Meter.REQUEST, "Load what the stores have of a coming prompt. Nothing is computed."),
    (
        "release",
        Right.TENANT,
        Meter.FREE,
        "End what is kept along a prompt, or with all: true all that the caller keeps.",
    ),
)


def add_routes(
    routes: Routes[Handler],
    parse: Callable[[str], Callable[[bytes, Limits], Any]],
    handler: Callable[[str, str], Handler],
    retained: Handler,
) -> None:
    """Add `/v1/cache/*`.

    Args:
        parse: parses the bodies of a verb.
        handler: makes the handler of a verb, named like it, with this text as its docstring.
        retained: answers what the caller keeps.
    """
    for name, right, meter, text in _VERBS:
        body = JsonBody(parse(name), CacheBody, closed=name == "release")
        routes.add("POST", f"/v1/cache/{name}", right=right, meter=meter, body=body, tag="cache")(handler(name, text))
    tenant, free = Right.TENANT, Meter.FREE
    routes.add("GET", "/v1/cache/retained", right=tenant, meter=free, body=NO_BODY, tag="cache")(retained)


class EraseQuery(SaltQuery, frozen=True, kw_only=True):
    """`DELETE /v1/cache`."""

    scope: Literal["tenant", "device"] = "tenant"


class CacheBody(Struct, kw_only=True):
    """The body of all verbs."""

    model: str | None = None
    prompt: str | list[int] | None = None
    messages: list[MessageBody] | None = None
    tools: list[ToolBody] | None = None
    chat_template_kwargs: Raw = UNSET_RAW
    ttl: str | float | None = None
    priority: int = 0
    all: bool = False
    cache_salt: str | None = None


@dataclass(frozen=True, slots=True)
class CacheRequest:
    """The prefix that a verb is about: text, token ids or a conversation; and for how long.

    Attributes:
        prompt: None for a conversation, and for everything of the tenant.
        all: everything that the tenant keeps.
        seconds: None if the body has no ttl.
        cache_salt: the client's own, which the requests have too.
    """

    model: str | None
    prompt: str | tuple[int, ...] | None
    messages: tuple[Message, ...]
    tools: tuple[Tool, ...]
    template_options: dict[str, Any]
    seconds: float | None
    priority: int
    all: bool
    cache_salt: str | None = None

    @property
    def size(self) -> int:
        """About the characters to be tokenized."""
        return len(self.prompt or ()) + sum(len(message.content) for message in self.messages)


class RenderingTokenizer(Protocol):
    """The part of `engine.tokenizer.Tokenizer` that cache control needs."""

    def encode(self, text: str) -> list[int]: ...
    def render_chat(
        self, messages: Any, *, tools: Any = ..., options: Any = ..., add_generation_prompt: bool = ...
    ) -> list[int]: ...


def parse(raw: bytes, limits: Limits, *, releases: bool = False) -> CacheRequest:
    """Raises BadRequest, which names the parameter, and BodyTooLarge. `releases`: the verb takes `all`."""
    body = decode(CacheBody, raw, limits)
    given = (body.prompt is not None) + (body.messages is not None) + body.all
    if given != 1 or (body.all and not releases):
        raise refuse("prompt", f"give either 'prompt' or 'messages'{', or all: true' if releases else ''}")
    if isinstance(body.prompt, list):
        check_length(body.prompt, limits.token_ids, "prompt", least=1)
    if not 0 <= body.priority <= MAX_PRIORITY:
        raise refuse("priority", f"must be between 0 and {MAX_PRIORITY}")
    prompt = tuple(body.prompt) if isinstance(body.prompt, list) else body.prompt
    messages = () if body.messages is None else messages_of(body.messages, limits)
    options = bounded_object(body.chat_template_kwargs, "chat_template_kwargs", limits) or {}
    tools = tools_of(body.tools, limits)
    ttl, salt = seconds(body.ttl), body.cache_salt
    return CacheRequest(body.model, prompt, messages, tools, options, ttl, body.priority, body.all, salt)


def seconds(ttl: str | float | None, param: str = "ttl") -> float | None:
    """`"5m"`, `"1h"` or a number of seconds. Raises BadRequest."""
    if ttl is None:
        return None
    if isinstance(ttl, str):
        match = _DURATION.fullmatch(ttl)
        ttl = int(match[1]) * _UNITS[match[2]] if match else -1
    if not 0 < ttl < math.inf:
        raise refuse(param, 'must be a number of seconds, or a duration such as "5m" or "1h", more than 0')
    return float(ttl)


def tokens_of(tokenizer: RenderingTokenizer, request: CacheRequest) -> Sequence[int]:
    """The prefix as tokens. A conversation ends with its last message. Raises BadRequest."""
    if request.prompt is not None:
        return tokenizer.encode(request.prompt) if isinstance(request.prompt, str) else request.prompt
    return tokenizer.render_chat(
        template_messages(request.messages),
        tools=template_tools(request.tools),
        options=request.template_options,
        add_generation_prompt=False,
    )


def answered(verb: str, num_tokens: int, answer: RetentionAnswer) -> dict[str, Any]:
    """The answer to retain, pin and prefetch. `ttl` is null if it is kept until it is released, or not at all."""
    return {"object": f"cache.{verb}", "prompt_tokens": num_tokens, **asdict(answer)}
