"""Tokens of named prefixes, alone and in front of a prompt or a chat, as an engine's own tokenizer makes them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from foreword.prefixes.book import Content, Message
from foreword.prefixes.prefix_service import PrefixService

if TYPE_CHECKING:
    from foreword.engine.tokenizer import Tokenizer


def content_tokens(tokenizer: Tokenizer, content: Content) -> list[int]:
    """Tokens of a prefix. Raises BadRequest for messages that the chat template refuses."""
    if isinstance(content, str):
        return tokenizer.encode(content)
    return tokenizer.render_chat(content, add_generation_prompt=False)


def prefixed_prompt(
    service: PrefixService, tokenizer: Tokenizer, name: str, prompt: str | Sequence[int], salt: bytes
) -> list[int]:
    """Tokens of a named text followed by those of the prompt. Counts a use of the prefix."""
    prefix = service.book.use(name, "text", salt=salt)
    tokens = tokenizer.encode(prompt, add_special_tokens=False) if isinstance(prompt, str) else prompt
    return [*prefix.tokens, *tokens]


def prefixed_chat(
    service: PrefixService, tokenizer: Tokenizer, name: str, messages: Sequence[Message], salt: bytes, **options: Any
) -> list[int]:
    """Tokens of the named messages followed by the given ones, with the options of `Tokenizer.render_chat`. Counts a use of
    the prefix. Tools that a template writes before the messages leave only what precedes them in common with the prefix."""
    prefix = service.book.use(name, "messages", salt=salt)
    assert not isinstance(prefix.content, str)
    return tokenizer.render_chat([*prefix.content, *messages], **options)
