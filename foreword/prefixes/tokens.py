"""Tokens of named prefixes, alone and in front of a prompt or a chat."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from foreword.engine.tokenizer import Tokenizer
from foreword.errors import BadRequest
from foreword.prefixes.book import Message, PrefixBook


def prefix_tokens(
    tokenizer: Tokenizer, content: str | None, messages: Sequence[Message] | None
) -> tuple[Literal["text", "messages"], str | tuple[Message, ...], tuple[int, ...]]:
    """Kind, content and tokens of a prefix to be registered. Raises BadRequest unless exactly one form is given."""
    if (content is None) == (messages is None):
        raise BadRequest("give either 'content' (text) or 'messages' (a chat's beginning)", param="content")
    if content is not None:
        return "text", content, tuple(tokenizer.encode(content))
    assert messages is not None
    return "messages", tuple(messages), tuple(tokenizer.render_chat(messages, add_generation_prompt=False))


def prefixed_prompt(
    book: PrefixBook, tokenizer: Tokenizer, name: str, text_or_tokens: str | Sequence[int], salt: bytes
) -> list[int]:
    prefix = book.use(name, "text", salt=salt)
    if isinstance(text_or_tokens, str):
        text_or_tokens = tokenizer.encode(text_or_tokens, add_special_tokens=False)
    return [*prefix.tokens, *text_or_tokens]


def prefixed_chat(
    book: PrefixBook, tokenizer: Tokenizer, name: str, messages: Sequence[Message], salt: bytes
) -> list[int]:
    prefix = book.use(name, "messages", salt=salt)
    assert not isinstance(prefix.content, str)
    return tokenizer.render_chat([*prefix.content, *messages], add_generation_prompt=True)
