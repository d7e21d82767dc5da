"""The bytes of a request by which its prompt is recognized, and their chain of hashes (`routing.known_prompts`)."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from hashlib import blake2b
from itertools import takewhile
from typing import Any, Final

import msgspec

from foreword.api.request import GenerateRequest
from foreword.blocks.salt import Salt
from foreword.decoders import decode_json
from foreword.errors import BadRequest
from foreword.routing.known_prompts import PromptChain

_LINK_BYTES: Final = 16
# Bytes of a piece of a text, or of a system message: each piece is a link.
_PIECE: Final = 4096
# Fields beside messages and tools that change how a template renders all of a chat.
_SETTINGS: Final = ("documents", "chat_template", "chat_template_kwargs", "add_special_tokens")


def prompt_chain(request: GenerateRequest, model: str, salt: Salt) -> PromptChain | None:
    """The chain of a request's prompt, of the first one if it has several; None for token ids, and without a prompt."""
    given = [*map(bytes, request.body.only(*_SETTINGS).values())]
    state = _scope(request.dialect, model, salt).copy()
    if given or request.prefix is not None or request.template_options:
        prefix = (request.prefix or "").encode("utf-8", "surrogatepass")
        state.update(b"settings ")
        for part in (repr(request.template_options).encode("utf-8", "surrogatepass"), prefix, *given):
            state.update(b"%d:" % len(part) + part)
    links, sizes, size = list[bytes](), list[int](), 0
    for part in prompt_parts(request):
        state.update(b"%d:%b" % (len(part), part))
        size += len(part)
        links.append(state.digest())
        sizes.append(size)
    return PromptChain(salt.tenant, tuple(links), tuple(sizes)) if size else None


@lru_cache(maxsize=1024)
def _scope(dialect: str, model: str, salt: Salt) -> blake2b:
    state = blake2b(digest_size=_LINK_BYTES)
    for part in (dialect.encode(), model.encode(), salt.tenant, salt.client):
        state.update(b"%d:%b" % (len(part), part))
    return state


def prompt_parts(request: GenerateRequest) -> Iterator[bytes]:
    """The bytes of a prompt as the client sent them, in the order in which templates render them: system messages, tools,
    other messages. Nothing for token ids."""
    if request.prompts:
        prompt = request.prompts[0]
        text = prompt.encode("utf-8", "surrogatepass") if isinstance(prompt, str) else b""
        yield from _pieces(text)
        return
    messages = _messages(request)
    leading = sum(1 for _ in takewhile(lambda one: one.role == "system", request.messages))
    for one in messages[:leading]:  # of one client they often differ in a line only
        yield from _pieces(one)
    yield from map(bytes, request.body.only("tools").values())
    yield from messages[leading:]


def _pieces(text: bytes) -> Iterator[bytes]:
    return (text[at : at + _PIECE] for at in range(0, len(text), _PIECE))


def _messages(request: GenerateRequest) -> list[bytes]:
    """The messages as they came; of other dialects, as they were read."""
    raw = request.body.only("messages").get("messages") if request.dialect == "chat" else None
    if raw is not None:
        try:
            return [bytes(one) for one in decode_json(raw, list[msgspec.Raw])]
        except (msgspec.MsgspecError, BadRequest):
            return [bytes(raw)]
    read: tuple[Any, ...] = request.messages
    return [msgspec.json.encode(one) for one in read]
