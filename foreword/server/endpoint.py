"""What every endpoint needs: the caller's tenant, the engine, the request's body, and a thread for tokenizing."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ParamSpec, TypeVar

from starlette.requests import Request

from foreword.api.errors import MAX_BODY_BYTES, BodyTooLarge, UnsupportedMediaType
from foreword.api.schemas import AnyBody, parse
from foreword.api.tenants import SALT_HEADER, Tenant, Tenants
from foreword.errors import BadRequest, PromptTooLong, UnknownModel, did_you_mean
from foreword.server.active_requests import ActiveRequests
from foreword.server.admission import Admission
from foreword.server.peers import Peers
from foreword.server.recent_requests import RecentRequests

if TYPE_CHECKING:
    from foreword.entrypoints.async_engine import AsyncEngine

# No tokenizer has tokens anywhere near this long: a longer text is refused without tokenizing it.
MAX_CHARACTERS_PER_TOKEN = 256

P = ParamSpec("P")
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class ServerContext:
    """Shared by all endpoints.

    Attributes:
        tokenizing: one thread, so that a long prompt does not block the event loop.
        recent: the newest requests, for the dashboard.
        active: the requests that run now.
        peers: other servers that requests may name.
    """

    admission: Admission
    tenants: Tenants
    tokenizing: Executor
    recent: RecentRequests = field(default_factory=RecentRequests)
    active: ActiveRequests = field(default_factory=ActiveRequests)
    peers: Peers = field(default_factory=Peers)

    def tenant(self, request: Request) -> Tenant:
        """The caller's tenant. Raises Unauthorized."""
        return self.tenants.authenticate(request.headers.get("authorization"), request.headers.get(SALT_HEADER))

    async def body(self, request: Request, kind: type[AnyBody]) -> AnyBody:
        """The JSON body. Raises BadRequest."""
        return parse(kind, await _read(request))

    async def tokenize(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run `work` on the thread for tokenizing."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self.tokenizing, lambda: work(*args, **kwargs))


def check_model(engine: AsyncEngine, name: str | None) -> None:
    """Raises UnknownModel if `name` is given and `engine` serves another model."""
    if name is not None and name != engine.info.name:
        raise UnknownModel(
            f"No model named {name!r} is served here{did_you_mean(name, [engine.info.name])}", param="model"
        )


def check_length(engine: AsyncEngine, text: str, param: str) -> None:
    """Raises PromptTooLong for a text that cannot possibly fit."""
    if len(text) > engine.info.max_model_len * MAX_CHARACTERS_PER_TOKEN:
        raise PromptTooLong(
            f"{param} has {len(text)} characters, far more than the {engine.info.max_model_len} tokens that fit",
            param=param,
        )


def check_token_ids(engine: AsyncEngine, tokens: tuple[int, ...], param: str) -> None:
    """Raises BadRequest for a token id outside the vocabulary."""
    size = engine.info.vocab_size
    if tokens and not 0 <= min(tokens) <= max(tokens) < size:
        wrong = next(token for token in tokens if not 0 <= token < size)
        shown = str(wrong) if abs(wrong) < 10**20 else f"of {wrong.bit_length()} bits"
        raise BadRequest(f"{param}: token id {shown} is not between 0 and {size - 1}", param=param)


async def _read(request: Request) -> bytes:
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media_type != "application/json" and not media_type.endswith("+json"):
        raise UnsupportedMediaType("Send the body as JSON, with the header Content-Type: application/json")
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > MAX_BODY_BYTES:
            raise BodyTooLarge
    return bytes(body)
