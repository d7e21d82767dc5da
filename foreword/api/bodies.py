"""Bodies of the endpoints that generate no text."""

from __future__ import annotations

from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta, Struct

from foreword.api.chat_template import template_messages, template_tools
from foreword.api.dialects.conversation_body import MessageBody, ToolBody, messages_of, tools_of
from foreword.api.dialects.decode import UNSET_RAW, Limits, bounded_object, check_depth, check_length, decode, refuse


class Body(Struct, kw_only=True):
    """Base of these bodies."""

    def check(self, limits: Limits) -> None:
        """Raises BadRequest for what types cannot express."""


AnyBody = TypeVar("AnyBody", bound=Body)


def parse_body(kind: type[AnyBody], raw: bytes, limits: Limits) -> AnyBody:
    """Parse a JSON body. Raises BadRequest, which names the parameter, and BodyTooLarge."""
    body = decode(kind, raw, limits)
    body.check(limits)
    return body


class TokenizeBody(Body, kw_only=True):
    """`POST /v1/tokenize`: a prompt or messages."""

    model: str | None = None
    prompt: str | None = None
    messages: list[MessageBody] | None = None
    tools: list[ToolBody] | None = None
    chat_template_kwargs: msgspec.Raw = UNSET_RAW
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    return_token_strs: bool | None = None

    def check(self, limits: Limits) -> None:
        if (self.prompt is None) == (self.messages is None):
            raise refuse("prompt", "give either prompt or messages")

    def template(self, limits: Limits) -> dict[str, Any]:
        """Arguments of `Tokenizer.render_chat`. Raises BadRequest."""
        continues = bool(self.continue_final_message)
        return {
            "messages": template_messages(messages_of(self.messages or (), limits)),
            "tools": template_tools(tools_of(self.tools, limits)),
            "options": bounded_object(self.chat_template_kwargs, "chat_template_kwargs", limits) or {},
            "add_generation_prompt": self.add_generation_prompt is not False and not continues,
            "continue_final_message": continues,
        }


class DetokenizeBody(Body, kw_only=True):
    """`POST /v1/detokenize`."""

    tokens: list[int]
    model: str | None = None

    def check(self, limits: Limits) -> None:
        check_length(self.tokens, limits.token_ids, "tokens")


class MigrateBody(Body, kw_only=True):
    """`POST /v1/requests/{id}/migrate`."""

    to: Annotated[str, Meta(description="URL of the server that continues the request.")]


class DrainBody(Body, kw_only=True):
    """`POST /v1/drain`."""

    to: Annotated[list[str], Meta(description="URLs of servers to migrate to; --drain-to by default.")] = []


def _one_content(content: str | None, messages: list[Any] | None, limits: Limits) -> None:
    if (content is None) == (messages is None):
        raise refuse("content", "give either content (text, for completions) or messages (for chat)")
    if messages is not None:
        check_length(messages, limits.messages, "messages", least=1)


class PrefixBody(Body, kw_only=True):
    """`PUT /v1/prefixes/{name}`: text for completions, or messages for chat."""

    content: str | None = None
    messages: list[MessageBody] | None = None

    def check(self, limits: Limits) -> None:
        _one_content(self.content, self.messages, limits)

    def plain_messages(self, limits: Limits) -> list[dict[str, Any]] | None:
        """As chat templates expect them. Raises BadRequest."""
        return None if self.messages is None else template_messages(messages_of(self.messages, limits))


class NewPrefixBody(PrefixBody, kw_only=True):
    """`POST /v1/prefixes`."""

    name: str
    replace: bool = False


class OpenPrefixBody(Body, kw_only=True):
    """`PUT /v1/prefixes/{name}` of another engine, with messages in any form that it reads."""

    content: str | None = None
    messages: list[dict[str, Any]] | None = None

    def check(self, limits: Limits) -> None:
        _one_content(self.content, self.messages, limits)
        check_depth(self.messages, "messages", limits)

    def plain_messages(self, limits: Limits) -> list[dict[str, Any]] | None:
        return self.messages


class NewOpenPrefixBody(OpenPrefixBody, kw_only=True):
    """`POST /v1/prefixes`, likewise."""

    name: str
    replace: bool = False
