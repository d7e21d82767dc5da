"""Checks a whole response of a replica before the client gets it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, NamedTuple

import msgspec

from foreword.errors import ReplicaFailed
from foreword.router.client_request import Interface


class _TokenDetails(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: _TokenDetails | None = None


class _Text(msgspec.Struct):
    text: str


class _Message(msgspec.Struct):
    role: str
    content: str | None = None
    tool_calls: list[dict[str, Any]] | None = None


class _Choice(msgspec.Struct):
    message: _Message


class _Completion(msgspec.Struct):
    choices: list[_Text]
    usage: _Usage | None = None


class _Chat(msgspec.Struct):
    choices: list[_Choice]
    usage: _Usage | None = None


class _Embeddings(msgspec.Struct):
    data: list[dict[str, Any]]
    usage: _Usage | None = None

    @property
    def choices(self) -> list[dict[str, Any]]:
        return self.data


_DECODERS: Final[Mapping[Interface, msgspec.json.Decoder[Any]]] = {
    "chat": msgspec.json.Decoder(_Chat),
    "completion": msgspec.json.Decoder(_Completion),
    "embedding": msgspec.json.Decoder(_Embeddings),
}


class UsageCounts(NamedTuple):
    """What a response says of its tokens; None where it does not."""

    cached: int | None = None
    output: int | None = None
    prompt: int | None = None

    @property
    def used(self) -> int:
        return (self.prompt or 0) + (self.output or 0)


def check_response(interface: Interface, data: bytes) -> UsageCounts:
    """The counts of a response. Raises ReplicaFailed if it is not one."""
    try:
        found = _DECODERS[interface].decode(data)
    except (msgspec.DecodeError, RecursionError) as error:
        raise ReplicaFailed(f"it sent a malformed response: {error}") from None
    if not found.choices:
        raise ReplicaFailed("it sent a response without content")
    usage = found.usage
    if usage is None:
        return UsageCounts()
    details = usage.prompt_tokens_details
    return UsageCounts(
        _count(details.cached_tokens if details else None), _count(usage.completion_tokens), _count(usage.prompt_tokens)
    )


def _count(found: int | None) -> int | None:
    return found if found is not None and 0 <= found < 2**32 else None
