"""A client's request as far as the router needs it, and the body that is sent to a replica."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, TypeVar

import msgspec

from foreword.api.dialects.limits import Limits
from foreword.errors import BadRequest

T = TypeVar("T")

Interface = Literal["chat", "completion", "embedding"]
PATHS: Final[Mapping[Interface, str]] = {
    "chat": "/v1/chat/completions",
    "completion": "/v1/completions",
    "embedding": "/v1/embeddings",
}
DIALECT_NAMES: Final[Mapping[Interface, str]] = {
    "chat": "chat",
    "completion": "completions",
    "embedding": "embeddings",
}
# Fields that only the router may set.
ROUTER_FIELDS: Final = frozenset(("salt", "cache_salt", "priority", "request_id", "kv_transfer_params", "continuation"))


@dataclass(frozen=True, slots=True)
class ClientRequest:
    """A completion request of a client.

    Attributes:
        raw: the body as received.
        body: the parsed body; never changed.
        single: one prompt and one choice, so that another replica can continue the response.
        cache_salt: separates this request's blocks from others of its tenant.
        priority: the request's own, as in vLLM: lower numbers are more urgent. None if it gave none.
        session_name: the session, where the body does not name it.
    """

    interface: Interface
    raw: bytes
    body: Mapping[str, Any]
    model: str | None
    streams: bool
    single: bool
    wants_usage: bool
    wants_token_ids: bool
    cache_salt: str | None = None
    priority: int | None = None
    session_name: str | None = None

    @property
    def path(self) -> str:
        return PATHS[self.interface]

    @property
    def max_tokens(self) -> int | None:
        """The client's limit of output tokens; None if it gave none."""
        for name in ("max_completion_tokens", "max_tokens") if self.interface == "chat" else ("max_tokens",):
            found = self.body.get(name)
            if isinstance(found, int) and not isinstance(found, bool):
                return found
        return None

    def session(self, header: str | None) -> str | None:
        """The session as named by the client: `prompt_cache_key`, `user` or the header."""
        for found in (self.session_name, self.body.get("prompt_cache_key"), self.body.get("user"), header):
            if isinstance(found, str) and found:
                return found
        return None


def decode_object(raw: bytes, limits: Limits | None = None) -> dict[str, Any]:
    """A body as a JSON object. Raises BadRequest."""
    if limits is not None:
        limits.check(raw)
    try:
        body = msgspec.json.decode(raw)
    except msgspec.DecodeError as error:
        raise BadRequest(f"The body is not valid JSON: {error}") from None
    except RecursionError:
        raise BadRequest("The body is nested too deeply") from None
    if not isinstance(body, dict):
        raise BadRequest("The body must be a JSON object")
    return body


def parse_request(interface: Interface, raw: bytes, limits: Limits) -> ClientRequest:
    """Parse a body. Checks only what the router needs; the replica validates the rest. Raises BadRequest."""
    body = decode_object(raw, limits)
    for name in ("kv_transfer_params", "continuation"):
        if body.get(name) is not None:
            raise BadRequest(f"{name}: only the router may set this", param=name)
    for name, most in (("messages", limits.messages), ("tools", limits.tools), ("stop", limits.stop_strings)):
        if isinstance(entries := body.get(name), list) and len(entries) > most:
            raise BadRequest(f"{name}: has {len(entries)} entries and may have {most}", param=name)
    if (count := _num_prompts(body.get("prompt"))) > limits.prompts:
        raise BadRequest(f"prompt: {count} prompts are more than {limits.prompts}", param="prompt")
    options = body.get("stream_options")
    return ClientRequest(
        interface,
        raw,
        body,
        _optional(body, "model", str, "a string"),
        streams=body.get("stream") is True and interface != "embedding",
        single=all((body.get(name) or 1) == 1 for name in ("n", "best_of")) and _num_prompts(body.get("prompt")) <= 1,
        wants_usage=isinstance(options, dict) and bool(options.get("include_usage")),
        wants_token_ids=bool(body.get("return_token_ids")),
        cache_salt=_optional(body, "cache_salt", str, "a string") or None,
        priority=_optional(body, "priority", int, "a whole number"),
    )


def _optional(body: Mapping[str, Any], name: str, kind: type[T], words: str) -> T | None:
    found = body.get(name)
    if found is None or type(found) is kind:
        return found
    raise BadRequest(f"{name}: must be {words}", param=name)


def _num_prompts(prompt: object) -> int:
    if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int):
        return len(prompt)
    return 1


def replica_body(
    request: ClientRequest, kind: str, own: dict[str, Any], transfer: Mapping[str, Any] | None = None
) -> bytes:
    """The body for a replica of this kind. Changes as little as possible: a plain OpenAI server refuses unknown fields.

    Args:
        own: the fields that the router sets.
        transfer: `kv_transfer_params` for disaggregated prefill.
    """
    if kind == "openai" and not own and ROUTER_FIELDS.isdisjoint(request.body):
        return request.raw
    body = {name: value for name, value in request.body.items() if name not in ROUTER_FIELDS} | own
    if kind == "openai":
        return msgspec.json.encode(body)
    if transfer is not None:
        body["kv_transfer_params"] = transfer
    if request.streams:
        body |= _stream_fields(request)
    return msgspec.json.encode(body)


def _stream_fields(request: ClientRequest) -> dict[str, Any]:
    """What the router needs to see in a stream."""
    given = request.body.get("stream_options")
    options = {**(given if isinstance(given, dict) else {}), "include_usage": True}
    return {"stream_options": options, **({"return_token_ids": True} if request.single else {})}


def resuming_body(request: ClientRequest, prompt: Sequence[int], output: Sequence[int]) -> dict[str, Any]:
    """The body with which a Foreword server continues a stream after `output`, as if it had sent it itself."""
    body = {name: value for name, value in request.body.items() if name not in ROUTER_FIELDS}
    continuation = {"prompt_token_ids": prompt, "token_ids": output}
    return {**body, **_stream_fields(request), "continuation": continuation}
