"""The order of prompts at a router, which rewrites the bodies of chats."""

from __future__ import annotations

from itertools import takewhile
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec.structs import replace

from foreword.api.request import ClientBody, GenerateRequest, Message
from foreword.decoders import decode_json
from foreword.process_config import ServerConfig
from foreword.prompt_order import PromptOrder, texts_of
from foreword.router.extras import Order
from foreword.router.replica_body import edited

if TYPE_CHECKING:
    from foreword.tokens.tokenizer import Tokenizer


class OrderedPrompts(Order):
    """The order that is configured. Raises ConfigError."""

    def __init__(self, config: ServerConfig) -> None:
        self._order = PromptOrder.of(config)

    def __bool__(self) -> bool:
        return bool(self._order)

    def check(self, tokenizer: Tokenizer) -> None:
        self._order.check(tokenizer)

    def arranged(self, request: GenerateRequest, model: str) -> GenerateRequest:
        if request.dialect != "chat" or request.path or request.prefix is not None or request.refusal is not None:
            return request
        given = request.body.only("messages", "tools")
        raw = decode_json(given["messages"], list[msgspec.Raw])
        count = sum(1 for _ in takewhile(lambda one: one.role == "system", request.messages))
        leading = [decode_json(one, dict[str, Any]) for one in raw[:count]]
        tools = decode_json(given["tools"], list[dict[str, Any]]) if "tools" in given else []
        messages, described = self._order.arranged(leading, tools, request.model or model)
        if messages is leading:
            return request
        changes: dict[str, Any] = {"messages": [*messages, *raw[count:]]} | ({"tools": described} if tools else {})
        body = ClientBody(edited(request.body, (), changes))
        said = [Message("system", "".join(texts_of(one))) for one in messages]
        shown = [one.get("function", {}).get("description", "") for one in described]
        own = request.tools
        if len(shown) == len(own):
            own = tuple(replace(tool, description=text) for tool, text in zip(own, shown, strict=True))
        return replace(request, messages=(*said, *request.messages[count:]), tools=own, body=body)
