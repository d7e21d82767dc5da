"""What the router makes of a client's body: a request, and the bodies for replicas, with as few changes as possible."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

import msgspec

from foreword.api.dialects.decode import decode
from foreword.api.dialects.limits import Limits
from foreword.api.dialects.registry import DIALECTS
from foreword.api.dialects.sampling import Whole
from foreword.api.request import ClientBody, DialectName, GenerateRequest
from foreword.errors import BadRequest

PATHS: Final[Mapping[DialectName, str]] = {
    **{name: dialect.path for name, dialect in DIALECTS.items()},
    "embeddings": "/v1/embeddings",
}
# Dialects that replicas need not know.
TRANSLATED: Final[tuple[DialectName, ...]] = ("responses", "messages")
# Fields that only the router may set.
ROUTER_FIELDS: Final = frozenset(("salt", "cache_salt", "priority", "request_id", "kv_transfer_params", "continuation"))


class _EmbeddingsBody(msgspec.Struct):
    input: msgspec.Raw
    model: str | None = None
    user: str | None = None
    cache_salt: str | None = None
    priority: Whole | None = None


def read_body(raw: bytes, limits: Limits) -> ClientBody:
    """A body as a JSON object. Raises BadRequest and BodyTooLarge."""
    limits.check(raw)
    body = ClientBody(raw)
    assert body.fields is not None
    return body


def parse_request(dialect: DialectName, raw: bytes, limits: Limits) -> GenerateRequest:
    """Parse a body of any dialect. Raises BadRequest and BodyTooLarge."""
    if dialect in DIALECTS:
        request = DIALECTS[dialect].read(raw, limits)
    else:
        given = decode(_EmbeddingsBody, raw, limits)
        salt, session = given.cache_salt or "", given.user or None
        request = GenerateRequest(
            dialect, given.model, cache_salt=salt, session=session, priority=given.priority or 0, body=ClientBody(raw)
        )
    for name in request.body.only("kv_transfer_params", "continuation"):
        raise BadRequest(f"{name}: only the router may set this", param=name)
    return request


def edited(body: ClientBody, drop: Iterable[str], changes: Mapping[str, Any]) -> bytes:
    """A body without these fields, and with others."""
    kept: dict[str, Any] = dict(body.fields)
    for name in drop:
        kept.pop(name, None)
    return msgspec.json.encode({**kept, **changes})


def replica_body(
    request: GenerateRequest, kind: str, own: dict[str, Any], transfer: Mapping[str, Any] | None = None
) -> bytes:
    """The body for a replica of this kind. Changes as little as possible: a plain OpenAI server refuses unknown fields.

    Args:
        own: the fields that the router sets.
        transfer: `kv_transfer_params` for disaggregated prefill.
    """
    if kind == "openai" and not own and ROUTER_FIELDS.isdisjoint(request.body.fields):
        return request.body.raw
    if kind != "openai" and transfer is not None:
        own = {**own, "kv_transfer_params": transfer}
    if kind != "openai" and request.stream and request.dialect not in TRANSLATED:
        own = own | _stream_fields(request)
    return edited(request.body, ROUTER_FIELDS, own)


def _stream_fields(request: GenerateRequest) -> dict[str, Any]:
    """What the router needs to see in a stream."""
    given = request.body.only("stream_options").get("stream_options")
    options = {**(msgspec.json.decode(given, type=dict[str, Any]) if given is not None else {}), "include_usage": True}
    return {"stream_options": options, **({"return_token_ids": True} if request.single else {})}


def resuming_fields(request: GenerateRequest, prompt: Sequence[int], output: Sequence[int]) -> dict[str, Any]:
    """The body with which a Foreword server continues a stream after `output`, as if it had sent it itself."""
    kept = {name: value for name, value in request.body.fields.items() if name not in ROUTER_FIELDS}
    continuation = {"prompt_token_ids": prompt, "token_ids": output}
    return {**kept, **_stream_fields(request), "continuation": continuation}
