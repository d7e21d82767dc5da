"""A client's request as far as the router needs it, and the body that is sent to a replica."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

import msgspec

from foreword.errors import BadRequest

Interface = Literal["chat", "completion"]
PATHS: Final[Mapping[Interface, str]] = {"chat": "/v1/chat/completions", "completion": "/v1/completions"}
# Fields that only the router may set.
_ROUTER_FIELDS: Final = ("salt", "cache_salt", "kv_transfer_params")


@dataclass(frozen=True, slots=True)
class ClientRequest:
    """A completion request of a client.

    Attributes:
        raw: the body as received.
        body: the parsed body; never changed.
        single: one prompt and one choice, so that another replica can continue the response.
    """

    interface: Interface
    raw: bytes
    body: Mapping[str, Any]
    model: str | None
    streams: bool
    single: bool
    wants_usage: bool
    wants_token_ids: bool

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
        for found in (self.body.get("prompt_cache_key"), self.body.get("user"), header):
            if isinstance(found, str) and found:
                return found
        return None


def decode_object(raw: bytes) -> dict[str, Any]:
    """A body as a JSON object. Raises BadRequest."""
    try:
        body = msgspec.json.decode(raw)
    except msgspec.DecodeError as error:
        raise BadRequest(f"The body is not valid JSON: {error}") from None
    if not isinstance(body, dict):
        raise BadRequest("The body must be a JSON object")
    return body


def parse_request(interface: Interface, raw: bytes) -> ClientRequest:
    """Parse a body. Checks only what the router needs; the replica validates the rest. Raises BadRequest."""
    body = decode_object(raw)
    model = body.get("model")
    if model is not None and not isinstance(model, str):
        raise BadRequest("model: must be a string", param="model")
    options = body.get("stream_options")
    return ClientRequest(
        interface,
        raw,
        body,
        model,
        streams=body.get("stream") is True,
        single=all((body.get(name) or 1) == 1 for name in ("n", "best_of")) and _num_prompts(body.get("prompt")) <= 1,
        wants_usage=isinstance(options, dict) and bool(options.get("include_usage")),
        wants_token_ids=bool(body.get("return_token_ids")),
    )


def _num_prompts(prompt: object) -> int:
    if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int):
        return len(prompt)
    return 1


def replica_body(
    request: ClientRequest, kind: str, cache_salt: str | None, transfer: Mapping[str, Any] | None = None
) -> bytes:
    """The body for a replica of this kind. Changes as little as possible: a plain OpenAI server refuses unknown fields.

    Args:
        cache_salt: the tenant's salt, for servers that read it from the body.
        transfer: `kv_transfer_params` for disaggregated prefill.
    """
    body = {name: value for name, value in request.body.items() if name not in _ROUTER_FIELDS}
    if kind == "openai":
        return request.raw if len(body) == len(request.body) else msgspec.json.encode(body)
    if kind == "vllm" and cache_salt:
        body["cache_salt"] = cache_salt
    if transfer is not None:
        body["kv_transfer_params"] = transfer
    if request.streams:
        given = body.get("stream_options")
        body["stream_options"] = {**(given if isinstance(given, dict) else {}), "include_usage": True}
        if request.single:
            body["return_token_ids"] = True
    return msgspec.json.encode(body)
