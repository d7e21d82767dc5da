"""Tokenizes prompts as the replicas do, so that they can be compared with what replicas hold.

The router uses its own tokenizer (`--tokenizer`) on threads, or else a replica's endpoint, with a cache. A request waits for a
replica's answer no longer than a hit in what is not known yet could save. Without an answer it is placed by the tokens of its
known part, which its bytes tell (`routing.known_prompts`). If there is none, it is compared as text, four bytes per token: such
prompts match each other, but not the replicas' KV events.

Successive turns of a conversation repeat earlier messages, and many conversations share a system prompt. A chat text may be
split before special tokens without changing its tokens (`Tokenizer.cuts`), so each message is tokenized once.
"""

from __future__ import annotations

import asyncio
import logging
import re
import threading
from array import array
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from functools import partial
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, Final, Literal, Protocol

import aiohttp
import msgspec
from msgspec import Struct

from foreword.api.request import GenerateRequest, ReplicaKind, chat_text
from foreword.api.work_queue import WorkQueue
from foreword.blocks.bounded import Bounded
from foreword.blocks.salt import Salt
from foreword.decoders import decode_json
from foreword.errors import BadRequest
from foreword.request_errors import ReplicaFailed
from foreword.router.extras import Order, extras_for
from foreword.router.prompt_chain import prompt_chain, prompt_parts
from foreword.router.replica_body import TRANSLATED
from foreword.router.replicas import CONNECTION_ERRORS, Upstream, clock
from foreword.routing.known_prompts import KnownPrefix, KnownPrompts, PromptChain
from foreword.tasks import background, shared

if TYPE_CHECKING:
    from foreword.tokens.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

_MAX_TOKENS: Final = 4_000_000
# The size of an entry beyond its tokens.
_ENTRY_TOKENS: Final = 64
_TOKEN_BYTES: Final = 4
_MOST_ENTRIES: Final = 8192
# The first conversations are also tokenized as a whole, to detect a tokenizer for which splitting is wrong.
_CHECKED: Final = 16
_CACHED_TOKENS: Final = 8_000_000
# Shorter prompts are tokenized on the event loop: it takes less than a millisecond, and a thread would cost as much again.
_INLINE_BYTES: Final = 2048
# Fields of a chat that a replica needs to render it.
_CHAT_FIELDS: Final = (
    "messages", "tools", "documents", "chat_template", "chat_template_kwargs", "add_special_tokens", "continue_final_message",
)  # fmt: skip
# Tokens before the output on which the text of its first tokens may depend.
_CONTEXT: Final = 8
# Maximum number of tokens whose text a server holds back; more than a few only if a model writes no characters.
_MAX_HELD_BACK: Final = 64
# Replicas asked to tokenize one prompt: the second if the first has not answered after this time.
_MAX_ASKED: Final = 2
_HEDGE_SECONDS: Final = 0.02
# Tokens at the start of a prompt, or of its first half, that no template changes when messages follow.
_START: Final = 16
# Tokens per byte of an unknown text.
_BYTES_PER_TOKEN: Final = 4
_NO_SALT: Final = Salt()
_AS_IS: Final = Order()
# Factors of the time limit when replicas are asked repeatedly to detokenize. A prompt without tokens is compared as text, but a
# broken stream cannot be continued without the text of its tokens.
_TIMEOUT_FACTORS: Final = (1, 5, 25)


class TokenLru:
    """A thread-safe LRU cache of token arrays with a budget in tokens, and of at most 8,192 arrays."""

    def __init__(self, max_tokens: int) -> None:
        self._entries: Bounded[bytes, array[int]] = Bounded(
            _TOKEN_BYTES * max_tokens,
            size=lambda _, tokens: _TOKEN_BYTES * (len(tokens) + _ENTRY_TOKENS),
            most=_MOST_ENTRIES,
        )
        self._lock = threading.Lock()

    @property
    def held(self) -> int:
        """The size of all entries in tokens."""
        return self._entries.bytes // _TOKEN_BYTES

    def get(self, name: bytes) -> array[int] | None:
        with self._lock:
            return self._entries.use(name)

    def put(self, name: bytes, tokens: array[int]) -> None:
        with self._lock:
            if name not in self._entries:
                self._entries[name] = tokens

    def clear(self) -> None:
        with self._lock:
            self._entries.clear()


def digest(text: bytes) -> bytes:
    """The name of a text in a cache."""
    return blake2b(text, digest_size=16).digest()


class MessageTokenizer:
    """Tokenizes conversations and caches the tokens of their messages. Thread-safe."""

    def __init__(self, tokenizer: Tokenizer, max_tokens: int = _MAX_TOKENS) -> None:
        self._tokenizer = tokenizer
        cuts = sorted(tokenizer.cuts(), key=len, reverse=True)
        # Matches before each of them.
        self._cut = re.compile(f"(?={'|'.join(map(re.escape, cuts))})") if cuts else None
        self._cache = TokenLru(max_tokens)
        self._to_check = _CHECKED

    @property
    def held(self) -> int:
        """Cached tokens."""
        return self._cache.held

    def tokens(self, text: str) -> array[int]:
        """Tokens of a rendered conversation."""
        cut = self._cut
        if cut is None:
            return self._encode(text)
        found = array("I")
        for part in cut.split(text):
            found += self._part(part)
        return self._checked(text, found) if self._to_check else found

    def _part(self, text: str) -> array[int]:
        name = digest(text.encode("utf-8", "surrogatepass"))
        tokens = self._cache.get(name)
        if tokens is None:
            tokens = self._encode(text)
            self._cache.put(name, tokens)
        return tokens

    def _checked(self, text: str, found: array[int]) -> array[int]:
        self._to_check -= 1
        whole = self._encode(text)
        if whole != found:
            logger.warning("with this tokenizer a text and its parts have different tokens: messages are not cached")
            self._cut, self._to_check = None, 0
            self._cache.clear()
        return whole

    def _encode(self, text: str) -> array[int]:
        return array("I", self._tokenizer.encode(text, add_special_tokens=False))


class TokenizingPool(Protocol):
    """The part of `replica_pool.ReplicaPool` that tokenizing needs."""

    model: str
    known: KnownPrompts

    @property
    def kind(self) -> ReplicaKind: ...
    def tokenizing_replicas(self) -> Sequence[Upstream]:
        """The least loaded first."""
        ...

    def worth_waiting(self, tokens: int, before: int) -> float:
        """Seconds that a request may wait to learn the last `tokens` tokens of its prompt, which has `before` others."""
        ...


class _PlainMessage(msgspec.Struct, forbid_unknown_fields=True):
    """A message that every server gives to the template in the same way."""

    role: Literal["system", "user", "assistant"]
    content: str


class TokenizedPrompt(Struct, frozen=True):
    """A prompt as tokens.

    Attributes:
        source: `client`, `tokenizer`, `replica`, `unread` (not tokenized), `known` if these are the tokens of its known part
            only, or `text` if they are not the replica's tokens.
        chain: by which its bytes are recognized; None if they are not.
        length: estimated number of all tokens, if only some are known.
        held, home: see `KnownPrefix`.
    """

    tokens: Sequence[int]
    source: str
    chain: PromptChain | None = None
    length: int = 0
    held: Mapping[str, int] = {}
    home: str = ""

    @property
    def exact(self) -> bool:
        return self.source not in ("text", "known")

    @property
    def count(self) -> int:
        """Its tokens, as far as is known."""
        return self.length or len(self.tokens)


class PromptTokenizer:
    """Tokenizes prompts and caches up to 8 million tokens.

    Args:
        timeout: time limit in seconds for a replica to tokenize a prompt.
    """

    def __init__(self, session: aiohttp.ClientSession, headers: Mapping[str, str], timeout: float) -> None:
        self._session = session
        self._headers = headers
        self._timeout = timeout
        self._work = WorkQueue("tokenizing")
        self._tokenizer: Tokenizer | None = None
        self._messages: MessageTokenizer | None = None
        self._cache = TokenLru(_CACHED_TOKENS)
        self._pending: dict[bytes, asyncio.Future[array[int] | None]] = {}

    async def load(self, source: str, order: Order = _AS_IS) -> None:
        """Load the router's own tokenizer. Raises ModelNotFound, and ConfigError if its template cannot show this order."""
        self._tokenizer = await self._work.run(0, extras_for("--tokenizer").load_tokenizer, source)
        order.check(self._tokenizer)
        self._messages = MessageTokenizer(self._tokenizer)

    def close(self) -> None:
        self._work.close()

    async def tokenize(
        self, request: GenerateRequest, pool: TokenizingPool, salt: Salt = _NO_SALT, *, needed: bool = False
    ) -> TokenizedPrompt:
        """The tokens of the request's prompt, of the first one if it has several.

        Args:
            salt: of its blocks; only prompts with an equal one are compared.
            needed: wait for the tokens as long as a replica may take.
        """
        prompt = request.prompts[0] if request.prompts else None
        if isinstance(prompt, tuple):
            are_ids = bool(prompt) and 0 <= min(prompt) <= max(prompt) < 2**32
            return TokenizedPrompt(prompt, "client") if are_ids else TokenizedPrompt((), "text")
        chain = prompt_chain(request, request.model or pool.model, salt)
        found = pool.known.find(chain, clock()) if chain is not None else None
        if found is not None and (request.refusal is not None or request.model not in (None, pool.model)):
            found = found._replace(held=found.sent)  # events do not name blocks with images or adapters
        body = _tokenize_body(request, prompt)
        if body is None or (request.refusal is not None and pool.kind == "foreword"):
            return _without_tokens(request, chain, found)
        local = self._is_local(request, pool.kind)
        replicas = () if local else pool.tokenizing_replicas()
        if not (local or replicas):
            return _without_tokens(request, chain, found)
        data = msgspec.json.encode(body)
        name = digest(data)
        tokens = self._cache.get(name)
        if tokens is None and local and len(data) <= _INLINE_BYTES:
            tokens = self._tokenize_locally(request, prompt)
            if tokens is not None:
                self._cache.put(name, tokens)
        elif tokens is None:
            pending = self._tokenize_once(name, partial(self._tokenize, request, prompt, data, replicas))
            # The first request may be cancelled while others still wait.
            await _ended(pending, None if local or needed else _worth(pool, len(data), found))
            if not pending.done():
                if chain is not None:
                    pending.add_done_callback(partial(_learn_late, pool.known, chain))
                return _without_tokens(request, chain, found)
            tokens = pending.result()
        if tokens is None:
            return _without_tokens(request, chain, found)
        if chain is not None:
            pool.known.learn(chain, tokens)
        if found is not None and not (local or _agree(tokens, found)):
            return _without_tokens(request, chain, found._replace(held=found.sent))
        held, home = (found.held, found.home) if found is not None else ({}, "")
        return TokenizedPrompt(tokens, "tokenizer" if local else "replica", chain, held=held, home=home)

    async def text_of(
        self, before: Sequence[int], tokens: Sequence[int], sent: str, replicas: Sequence[Upstream]
    ) -> tuple[int, str]:
        """`(count, text)`: the text of as many of the tokens as form whole characters, after the tokens `before`.

        `sent` is the text that a server made of them. Raises ReplicaFailed if no replica can tell, or if the texts differ:
        in other parts, tokens that form no characters can give other text.
        """
        context = list(before[-_CONTEXT:])
        if self._tokenizer is not None:
            count, text = await self._work.run(len(tokens), whole_characters, self._tokenizer, context, list(tokens))
            return count, _checked(text, sent)
        problem = ReplicaFailed("no replica can detokenize its tokens")
        candidates = list(replicas)
        for factor in _TIMEOUT_FACTORS:
            for upstream in list(candidates):
                ask = partial(self._detokenize, upstream, self._timeout * factor)
                try:
                    return await _text_by_replica(ask, context, list(tokens), sent)
                except CONNECTION_ERRORS as error:
                    what = "no answer in time" if isinstance(error, TimeoutError) else type(error).__name__
                    problem = ReplicaFailed(f"{upstream.url} did not detokenize: {what}")
                except ReplicaFailed as error:
                    problem = error
                    candidates.remove(upstream)
        raise problem

    # Internals

    def _tokenize_once(
        self, name: bytes, tokenize: Callable[[], asyncio.Future[array[int] | None]]
    ) -> asyncio.Future[array[int] | None]:
        """Concurrent requests with the same prompt share one call, which goes on when they do not wait any more."""
        pending = self._pending.get(name)
        if pending is None:
            pending = self._pending[name] = tokenize()
            pending.add_done_callback(partial(self._tokenized, name))
        return pending

    def _tokenized(self, name: bytes, pending: asyncio.Future[array[int] | None]) -> None:
        del self._pending[name]
        if not pending.cancelled() and pending.exception() is None and (tokens := pending.result()) is not None:
            self._cache.put(name, tokens)

    def _tokenize(
        self, request: GenerateRequest, prompt: str | None, data: bytes, replicas: Sequence[Upstream]
    ) -> asyncio.Future[array[int] | None]:
        if not replicas:
            return shared(self._work.run(len(data), self._tokenize_locally, request, prompt))
        asks = [partial(self._ask, upstream, data) for upstream in replicas[:_MAX_ASKED]]
        return FirstAnswer(asks, _HEDGE_SECONDS, self._timeout).answer

    async def _ask(self, upstream: Upstream, data: bytes) -> array[int] | None:
        """The tokens that a replica makes of a prompt; None if it does not say."""
        assert upstream.info is not None and upstream.info.tokenize_path is not None
        try:
            found = await self._post(upstream, upstream.info.tokenize_path, data, None)
            return array("I", found["tokens"]) or None
        except (*CONNECTION_ERRORS, ReplicaFailed, KeyError, TypeError, ValueError, OverflowError):
            return None

    def _is_local(self, request: GenerateRequest, kind: ReplicaKind) -> bool:
        """Whether the router's own tokenizer gives the tokens of the replicas. Foreword's servers render as the router does;
        others only what leaves nothing to choose."""
        if self._tokenizer is None or request.refusal is not None:
            return False
        if kind == "foreword" or request.prompts:
            return True
        if request.tools or request.template_options or request.continue_final_message:
            return False
        given = request.body.only("messages", "documents")
        try:
            decode_json(given.pop("messages"), list[_PlainMessage])
        except msgspec.ValidationError:
            return False
        return not given

    def _tokenize_locally(self, request: GenerateRequest, prompt: str | None) -> array[int] | None:
        """Runs on any thread. None for an invalid prompt: the replica will report the error."""
        assert self._tokenizer is not None and self._messages is not None
        if prompt is not None:
            return array("I", self._tokenizer.encode(prompt, add_special_tokens=request.add_special_tokens))
        try:
            return self._messages.tokens(chat_text(self._tokenizer, request))
        except BadRequest:
            return None

    async def _detokenize(self, upstream: Upstream, seconds: float, tokens: Sequence[int]) -> str:
        assert upstream.info is not None and upstream.info.tokenize_path is not None
        path = upstream.info.tokenize_path.replace("tokenize", "detokenize")
        data = msgspec.json.encode({"tokens": list(tokens), "model": upstream.model})
        found = await self._post(upstream, path, data, seconds)
        if not isinstance(text := found.get("prompt"), str):
            raise ReplicaFailed(f"{upstream.url}{path} returned an unexpected body")
        return text

    async def _post(self, upstream: Upstream, path: str, data: bytes, seconds: float | None) -> dict[str, Any]:
        headers = {**self._headers, "content-type": "application/json"}
        limit = aiohttp.ClientTimeout(total=seconds)
        async with self._session.post(upstream.url + path, data=data, headers=headers, timeout=limit) as response:
            found = await response.read()
            if response.status != 200:
                raise ReplicaFailed(f"{upstream.url}{path} says {response.status}")
        try:
            decoded = msgspec.json.decode(found)
        except msgspec.DecodeError:
            decoded = None
        if not isinstance(decoded, dict):
            raise ReplicaFailed(f"{upstream.url}{path} returned an unexpected body")
        return decoded


async def _text_by_replica(
    detokenize: Callable[[Sequence[int]], Awaitable[str]], context: list[int], tokens: list[int], sent: str
) -> tuple[int, str]:
    """`PromptTokenizer.text_of` by a replica's endpoint. Raises ReplicaFailed, and what aiohttp raises."""
    ahead = await detokenize(context) if context else ""
    for count in range(len(tokens), max(len(tokens) - _MAX_HELD_BACK, 0), -1):
        text = await detokenize([*context, *tokens[:count]])
        if not text.startswith(ahead):
            break
        text = text[len(ahead) :]
        if text == sent or not text.endswith("\ufffd"):
            return count, _checked(text, sent)
    if not sent:
        return 0, ""
    raise ReplicaFailed("its tokens do not form whole characters")


def _checked(text: str, sent: str) -> str:
    """The text. Raises ReplicaFailed if it is not a prefix of what was sent, or longer."""
    if not sent.startswith(text) and not text.startswith(sent):
        raise ReplicaFailed("the text that was sent does not match its tokens")
    return text


class FirstAnswer:
    """Asks in order: each `after` seconds after the one before, or once those before have failed. What is not needed is
    cancelled.

    Attributes:
        answer: the first that there is; None if all have failed, or after `limit` seconds.
    """

    def __init__(
        self, asks: Sequence[Callable[[], Coroutine[Any, Any, array[int] | None]]], after: float, limit: float
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self.answer: asyncio.Future[array[int] | None] = self._loop.create_future()
        self._left, self._after = list(asks), after
        self._running: set[asyncio.Task[array[int] | None]] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._limit = self._loop.call_later(limit, self._end, None)
        self._ask()

    def _ask(self) -> None:
        task = background(self._left.pop(0)(), "tokenizing")
        self._running.add(task)
        task.add_done_callback(self._asked)
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_later(self._after, self._ask) if self._left else None

    def _asked(self, task: asyncio.Task[array[int] | None]) -> None:
        self._running.discard(task)
        if self.answer.done():
            return
        found = None if task.cancelled() or task.exception() is not None else task.result()
        if found is None and self._left:
            self._ask()
        elif found is not None or not self._running:
            self._end(found)

    def _end(self, found: array[int] | None) -> None:
        self.answer.set_result(found)
        self._limit.cancel()
        if self._timer is not None:
            self._timer.cancel()
        for one in self._running:
            one.cancel()


async def _ended(pending: asyncio.Future[Any], seconds: float | None) -> None:
    """Wait for a future of several, at most so long. `asyncio.wait` does the same for any number of them, in far more steps."""
    loop = asyncio.get_running_loop()
    waiter = loop.create_future()

    def wake(_: object = None) -> None:
        if not waiter.done():
            waiter.set_result(None)

    timer = None if seconds is None else loop.call_later(seconds, wake)
    pending.add_done_callback(wake)
    try:
        await waiter
    finally:
        pending.remove_done_callback(wake)
        if timer is not None:
            timer.cancel()


def _worth(pool: TokenizingPool, size: int, found: KnownPrefix | None) -> float:
    """Seconds that it is worth to wait for tokens: the time to compute what is not known yet, of a body of `size` bytes. What
    follows a whole known prompt is new everywhere, so a conversation's next turn waits for no hit if the tokens of the turn
    before are known, or where it was sent."""
    if found is None:
        return pool.worth_waiting(size // _BYTES_PER_TOKEN, 0)
    known = min(len(found.tokens), found.total)
    located = max(known, sum(found.held.values()))
    return pool.worth_waiting(found.length - located if found.exact else found.total - known, known)


def _agree(tokens: array[int], found: KnownPrefix) -> bool:
    """Whether a replica's tokens begin as those of the turn before. Otherwise some of them are wrong."""
    start = found.tokens[: min(_START, (len(found.tokens) + 1) // 2)]
    return not found.exact or (bool(start) and tokens[: len(start)] == start and len(tokens) >= found.length // 2)


def _learn_late(known: KnownPrompts, chain: PromptChain, pending: asyncio.Future[array[int] | None]) -> None:
    """The tokens of a prompt that was placed without them."""
    if not pending.cancelled() and pending.exception() is None and (tokens := pending.result()) is not None:
        known.learn(chain, tokens)


def _without_tokens(request: GenerateRequest, chain: PromptChain | None, found: KnownPrefix | None) -> TokenizedPrompt:
    """A prompt by its known part, or else as text. Replicas' events do not tell where text was sent; its bytes do."""
    if found is not None and found.tokens:
        return TokenizedPrompt(found.tokens, "known", chain, found.total, found.held, found.home)
    text = text_as_tokens(request)
    held = {one: len(text) * known // found.total for one, known in found.held.items()} if found is not None else {}
    return TokenizedPrompt(text, "text", chain, held=held, home=found.home if found is not None else "")


def text_as_tokens(request: GenerateRequest) -> array[int]:
    """A prompt as numbers that are equal where its text is equal: four bytes per number, of 4 MiB."""
    text = b"".join(prompt_parts(request))
    if request.prefix is not None:
        text = request.prefix.encode("utf-8", "replace") + b"\x00" + text
    words = array("I")
    words.frombytes(text[: min(len(text), 4 << 20) // 4 * 4])
    return words


def _tokenize_body(request: GenerateRequest, prompt: str | None) -> dict[str, Any] | None:
    """The body of a tokenization request; None if the prompt cannot be tokenized separately."""
    # A named prefix is known to the replica only.
    if request.prefix is not None or request.path or request.dialect in TRANSLATED:
        return None
    body: dict[str, Any] = {"model": request.model} if request.model else {}
    if prompt is not None:
        return body | {"prompt": prompt} | ({} if request.add_special_tokens else {"add_special_tokens": False})
    body |= request.body.only(*_CHAT_FIELDS)
    if "messages" not in body:
        return None
    if request.template_options:
        body["chat_template_kwargs"] = request.template_options
    return body if request.add_generation_prompt else {**body, "add_generation_prompt": False}


def whole_characters(tokenizer: Tokenizer, before: Sequence[int], tokens: Sequence[int]) -> tuple[int, str]:
    """`PromptTokenizer.text_of` by the router's own tokenizer."""
    stream, text, whole = tokenizer.stream(before), "", (0, "")
    for count, token in enumerate(tokens, 1):
        piece = stream.push(token)
        text += piece
        # vLLM repeats a prompt that ends in a broken character at the start of the answer.
        if piece and not text.endswith("\ufffd"):
            whole = (count, text)
    return whole
