"""Parts that every endpoint needs: the engine, limits of a request, threads for tokenizing, and answers as events."""

from __future__ import annotations

import functools
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from foreword.api import sse
from foreword.api.dialects.decode import Limits
from foreword.api.errors import error_body
from foreword.api.event_stream import COMMENTS, HEADERS, EventStream, comments_of
from foreword.api.front import Call
from foreword.api.rights import Tenants
from foreword.api.stored_responses import StoredResponses
from foreword.api.work_queue import WorkQueue
from foreword.errors import BadRequest, ForewordError, did_you_mean
from foreword.process_config import ServerConfig
from foreword.request_errors import PromptTooLong, UnknownModel
from foreword.server.admission import Admission
from foreword.server.engine_observers import EngineTraces
from foreword.server.peers import Peers
from foreword.server.request_notes import ActiveRequests, RecentRequests, ServerMisses

if TYPE_CHECKING:
    from foreword.entrypoints.async_engine import AsyncEngine

# No tokenizer has tokens anywhere near this long: a longer text is refused without tokenizing it.
MAX_CHARACTERS_PER_TOKEN = 256
# Most texts have fewer characters per token.
_MOST_CHARACTERS_PER_TOKEN = 8
# A cut in a text may add some tokens around it.
_CUT_TOKENS = 256
# Seconds without an event after which a stream between servers sends a comment, so that the reader knows it is alive.
KEEP_ALIVE: Final = 5.0
# A reader that asks for comments gets them no more often, in seconds.
_LEAST_KEEP_ALIVE: Final = 0.25


@dataclass(frozen=True, slots=True)
class ServerContext:
    """Shared by all endpoints.

    Attributes:
        work: threads for parsing and tokenizing, so that neither blocks the event loop.
        responses: what clients of the Responses API may continue.
        recent: the newest requests, for the dashboard.
        active: the requests that run now.
        peers: other servers that requests may name.
        misses: finds the causes of cache misses.
        traces: of the requests; None without.
    """

    admission: Admission
    tenants: Tenants
    config: ServerConfig
    work: WorkQueue
    responses: StoredResponses
    recent: RecentRequests = field(default_factory=RecentRequests)
    active: ActiveRequests = field(default_factory=ActiveRequests)
    peers: Peers = field(default_factory=Peers)
    misses: ServerMisses = field(default_factory=ServerMisses)
    traces: EngineTraces | None = None

    def limits(self) -> Limits:
        """Limits of a body and its content."""
        engine = self.admission.loaded
        return _limits(self.config, engine.info.max_model_len if engine is not None else 1)


@functools.lru_cache(maxsize=16)
def _limits(config: ServerConfig, max_model_len: int) -> Limits:
    return Limits.for_model(max_model_len, config.body_limit(max_model_len))


def check_model(engine: AsyncEngine, name: str | None) -> None:
    """Raises UnknownModel if `name` is given and `engine` serves another model."""
    if name is not None and name != engine.info.name:
        raise UnknownModel(
            f"No model named {name!r} is served here{did_you_mean(name, [engine.info.name])}", param="model"
        )


def check_length(engine: AsyncEngine, characters: int, param: str) -> None:
    """Raises PromptTooLong for a text that cannot possibly fit."""
    if characters > engine.info.max_model_len * MAX_CHARACTERS_PER_TOKEN:
        raise PromptTooLong(
            f"{param} has {characters} characters, far more than the {engine.info.max_model_len} tokens that fit",
            param=param,
        )


def encode_bounded(engine: AsyncEngine, text: str, param: str, *, add_special_tokens: bool = True) -> list[int]:
    """The tokens of a text. Raises PromptTooLong; then only the start of the text was tokenized."""
    longest = engine.info.max_model_len
    start = text[: longest * _MOST_CHARACTERS_PER_TOKEN]
    if len(start) < len(text):
        count = len(engine.tokenizer.encode(start, add_special_tokens=False)) - _CUT_TOKENS
        if count > longest:
            raise PromptTooLong(
                f"This model's maximum context length is {longest} tokens, but {param} has more than {count}",
                param=param,
            )
    return engine.tokenizer.encode(text, add_special_tokens=add_special_tokens)


def check_token_ids(engine: AsyncEngine, tokens: tuple[int, ...], param: str) -> None:
    """Raises BadRequest for a token id outside the vocabulary."""
    size = engine.info.vocab_size
    if tokens and not 0 <= min(tokens) <= max(tokens) < size:
        wrong = next(token for token in tokens if not 0 <= token < size)
        shown = str(wrong) if abs(wrong) < 10**20 else f"of {wrong.bit_length()} bits"
        raise BadRequest(f"{param}: token id {shown} is not between 0 and {size - 1}", param=param)


async def send_events(
    call: Call,
    events: AsyncGenerator[bytes, None],
    error_event: Callable[[ForewordError], bytes] = lambda error: sse.encode(error_body(error)),
    keep_alive: float = KEEP_ALIVE,
) -> None:
    """Answer a call with events. The head is sent with the first one, which may be empty.

    An error before it is raised, to be answered with its own HTTP status; one after it is sent as an event and ends the stream.
    When the client disconnects the generator is closed at once.
    """
    wanted = max(comments_of(call.headers), _LEAST_KEEP_ALIVE)
    own = dict(HEADERS)
    if COMMENTS in call.headers:
        keep_alive = min(keep_alive, wanted)
        own[COMMENTS] = f"{keep_alive:g}"
    stream = EventStream(call, lambda _: own, keep_alive)
    try:
        async with aclosing(events):
            async for event in events:
                if not stream.begun:
                    stream.send_comments()
                if not event or not stream.write_now(event):
                    await stream.write(event)
    except ForewordError as error:
        if not stream.begun:
            raise
        call.failure = error
        await stream.write(error_event(error))
    finally:
        stream.stop()
    await stream.close()
