"""Parts that every endpoint needs: the engine, limits of a request, and threads for tokenizing."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from foreword.api.dialects.decode import Limits
from foreword.api.stored_responses import StoredResponses
from foreword.api.tenants import Tenants
from foreword.api.work_queue import WorkQueue
from foreword.errors import BadRequest, did_you_mean
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

    @property
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
