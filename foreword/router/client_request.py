"""What a client asked for, as far as the router must know it, and the body that a replica gets in its place."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

import msgspec

from foreword.errors import BadRequest

Interface = Literal["chat", "completion"]
PATHS: Final[Mapping[Interface, str]] = {"chat": "/v1/chat/completions", "completion": "/v1/completions"}
# What only the router may say.
_OURS: Final = ("salt", "cache_salt", "kv_transfer_params")


@dataclass(frozen=True, slots=True)
class Asked:
    """One request of a client.

    Attributes:
        raw: the body as it came.
        body: the same, parsed; never changed.
        single: one prompt and one answer, so that it can be continued elsewhere.
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
        """Tokens that may be generated, None if the client did not say."""
        for name in ("max_completion_tokens", "max_tokens") if self.interface == "chat" else ("max_tokens",):
            found = self.body.get(name)
            if isinstance(found, int) and not isinstance(found, bool):
                return found
        return None

    def session(self, header: str | None) -> str | None:
        """What the client says belongs together."""
        for found in (self.body.get("prompt_cache_key"), self.body.get("user"), header):
            if isinstance(found, str) and found:
                return found
        return None


def read(interface: Interface, raw: bytes) -> Asked:
    """Raises BadRequest for a body that is no JSON object. Everything else is for the replica to judge."""
    try:
        body = msgspec.json.decode(raw)
    except msgspec.DecodeError as error:
        raise BadRequest(f"The body is not valid JSON: {error}") from None
    if not isinstance(body, dict):
        raise BadRequest("The body must be a JSON object")
    model = body.get("model")
    if model is not None and not isinstance(model, str):
        raise BadRequest("model: must be a string", param="model")
    options = body.get("stream_options")
    usage = isinstance(options, dict) and bool(options.get("include_usage"))
    many = (body.get("n") or 1) != 1 or (body.get("best_of") or 1) != 1 or _prompts(body.get("prompt")) > 1
    return Asked(
        interface,
        raw,
        body,
        model,
        body.get("stream") is True,
        not many,
        usage,
        bool(body.get("return_token_ids")),
    )


def _prompts(prompt: object) -> int:
    if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int):
        return len(prompt)
    return 1


def for_replica(asked: Asked, kind: str, cache_salt: str | None, transfer: Mapping[str, Any] | None = None) -> bytes:
    """The body for a replica of this kind. Only what must be is changed: a plain OpenAI server refuses fields that it does
    not know.

    Args:
        cache_salt: the tenant's salt, for servers that take it from the body.
        transfer: `kv_transfer_params`, if the prompt is computed elsewhere.
    """
    body = {name: value for name, value in asked.body.items() if name not in _OURS}
    if kind == "openai":
        return asked.raw if len(body) == len(asked.body) else msgspec.json.encode(body)
    if kind == "vllm" and cache_salt:
        body["cache_salt"] = cache_salt
    if transfer is not None:
        body["kv_transfer_params"] = transfer
    if asked.streams:
        given = body.get("stream_options")
        body["stream_options"] = {**(given if isinstance(given, dict) else {}), "include_usage": True}
        if asked.single:
            body["return_token_ids"] = True
    return msgspec.json.encode(body)
