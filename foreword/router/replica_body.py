"""Readings of a client's body: a request, and the bodies for replicas, with as few changes as possible."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from typing import Any, Final

import msgspec
from msgspec.structs import replace

from foreword.api.dialects.decode import Limits, decode
from foreword.api.dialects.registry import DIALECTS
from foreword.api.dialects.sampling import Whole
from foreword.api.request import ClientBody, DialectName, GenerateRequest
from foreword.decoders import decode_json
from foreword.errors import BadRequest

PATHS: Final[Mapping[DialectName, str]] = {name: dialect.path for name, dialect in DIALECTS.items()}
# Paths of replicas whose requests are placed and passed on without a dialect here. Their bodies have vLLM's `cache_salt`, so
# that tenants share nothing (but those of `/v2/embed`), and their answers are whole. `/invocations` is also for the dialects of
# `_INVOKED`.
PASSED: Final[Mapping[str, DialectName]] = {
    "/v1/embeddings": "embeddings",
    "/v1/chat/completions/batch": "other",
    "/v1/systemone": "other",
    "/generative_scoring": "other",
    "/pooling": "other",
    "/classify": "other",
    "/score": "other",
    "/v1/score": "other",
    "/rerank": "other",
    "/v1/rerank": "other",
    "/v2/rerank": "other",
    "/invocations": "other",
    "/v2/embed": "other",
}
_INVOKED: Final[Mapping[str, DialectName]] = {"messages": "chat", "prompt": "completions"}
# Installed dialects that replicas need not know.
TRANSLATED: Final = tuple(name for name in DIALECTS if name not in _INVOKED.values())
# Replicas send the ids of the prompt again with each choice.
_MOST_WITH_IDS: Final = 16
# Fields that only the router may set.
ROUTER_FIELDS: Final = frozenset(("salt", "cache_salt", "priority", "request_id", "kv_transfer_params", "continuation"))


class _PassedBody(msgspec.Struct):
    model: str | None = None
    user: Any = None
    cache_salt: str | None = None
    priority: Whole | None = None


def read_body(raw: bytes, limits: Limits) -> ClientBody:
    """A body as a JSON object. Raises BadRequest and BodyTooLarge."""
    limits.check(raw)
    body = ClientBody(raw)
    assert body.fields is not None
    return body


def parse_request(dialect: DialectName, raw: bytes, limits: Limits, path: str = "") -> GenerateRequest:
    """Parse a body of any dialect, or of a path of `PASSED`; `/invocations` takes several. Raises BadRequest, BodyTooLarge."""
    if path == "/invocations":
        dialect = _INVOKED.get(min(_INVOKED.keys() & read_body(raw, limits).fields.keys(), default=""), dialect)
    if dialect in DIALECTS:
        request = DIALECTS[dialect].read(raw, limits)
        request = replace(request, path=path) if path in PASSED else request
    else:
        given = decode(_PassedBody, raw, limits)
        request = GenerateRequest(
            dialect,
            path,
            given.model or None,
            cache_salt=given.cache_salt or "",
            session=given.user if isinstance(given.user, str) and given.user else None,
            priority=given.priority or 0,
            body=ClientBody(raw),
        )
    for name in request.body.only("kv_transfer_params", "continuation"):
        raise BadRequest(f"{name}: only the router may set this", param=name)
    return request


def path_of(request: GenerateRequest) -> str:
    """Where replicas take it."""
    return request.path or PATHS[request.dialect]


def edited(body: ClientBody, drop: Container[str], changes: Mapping[str, Any]) -> bytes:
    """A body without these fields, and with others."""
    return msgspec.json.encode({**{name: one for name, one in body.fields.items() if name not in drop}, **changes})


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
        own = own | _stream_fields(request, ids=asks_ids(request, kind))
    return edited(request.body, ROUTER_FIELDS, own)


def asks_ids(request: GenerateRequest, kind: str) -> bool:
    """Whether the router wants token ids in a stream: with them vLLM leaves the prompt out of its echo. A plain OpenAI server
    does not know them."""
    can_go_on = choices_of(request) <= (_MOST_WITH_IDS if kind == "foreword" or is_repeatable(request) else 1)
    return kind != "openai" and len(request.prompts) <= 1 and can_go_on and not (request.echo and kind == "vllm")


def choices_of(request: GenerateRequest) -> int:
    """The number of choices that were asked for, of all prompts."""
    return max(int(request.sampling.get("n") or 1), 1) * max(len(request.prompts), 1)


def is_repeatable(request: GenerateRequest) -> bool:
    """Whether a server that is asked again draws the same tokens, also for several choices: each has a seed of its own."""
    return request.sampling.get("seed") is not None or request.sampling.get("temperature") == 0


def _stream_fields(request: GenerateRequest, *, ids: bool) -> dict[str, Any]:
    """Fields that make the router see all of a stream."""
    given = request.body.only("stream_options").get("stream_options")
    options = {**(decode_json(given, dict[str, Any]) if given is not None else {}), "include_usage": True}
    if not request.include_usage:  # without it there is none in the other chunks either
        options.pop("continuous_usage_stats", None)
    return {"stream_options": options, **({"return_token_ids": True} if ids else {})}


def resuming_fields(
    request: GenerateRequest, prompt: Sequence[int], outputs: Sequence[Sequence[int]], ended: Sequence[bool]
) -> dict[str, Any]:
    """The body with which a Foreword server continues a stream after the output of each choice that has not ended, as if it
    had sent it itself."""
    kept = {name: value for name, value in request.body.fields.items() if name not in ROUTER_FIELDS}
    continuation: dict[str, Any] = {"prompt_token_ids": prompt}
    if len(outputs) == 1:
        continuation["token_ids"] = outputs[0]
    else:
        choices = enumerate(zip(outputs, ended, strict=True))
        continuation["choices"] = [{"index": index, "token_ids": ids} for index, (ids, over) in choices if not over]
        continuation["ended_tokens"] = sum(len(ids) for ids, over in zip(outputs, ended, strict=True) if over)
    return {**kept, **_stream_fields(request, ids=True), "continuation": continuation}
