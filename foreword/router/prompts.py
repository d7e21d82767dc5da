"""Prompts as the tokens that a replica makes of them, so that they can be compared with what replicas hold.

By the router's own tokenizer (`--tokenizer`), on a thread; else by a replica's endpoint, each text once; else as text, four
bytes for a token: then prompts are compared with each other, but not with what events tell.
"""

from __future__ import annotations

import asyncio
from array import array
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, Final

import aiohttp
import msgspec

from foreword.errors import BadRequest, ReplicaFailed
from foreword.router.client_request import Asked
from foreword.router.replicas import LOST, Upstream
from foreword.router.token_cache import Turns

if TYPE_CHECKING:
    from foreword.engine.tokenizer import Tokenizer

_CACHED_TOKENS: Final = 8_000_000
# Bytes of a prompt that is tokenized on the loop: about a tenth of a millisecond, and a thread would cost as much.
_AT_ONCE: Final = 500
_TEMPLATE_FIELDS: Final = (
    "add_generation_prompt",
    "continue_final_message",
    "add_special_tokens",
    "chat_template",
    "chat_template_kwargs",
    "tools",
    "documents",
)
_TEMPLATES_OWN: Final = ("continue_final_message", "chat_template", "chat_template_kwargs", "tools", "documents")
_PROMPT_FIELDS: Final = ("add_special_tokens",)
# Tokens before the answer on which the text of its first ones may depend.
_CONTEXT: Final = 8
# Tokens whose text a server holds back at most: more than a few only where a model writes no characters.
_MOST_HELD: Final = 64
# A prompt whose tokens nobody tells is compared as text, but a lost answer cannot go on without its tokens' text: replicas that
# say nothing are asked again, with so many times the patience.
_PATIENCE: Final = (1, 5, 25)


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt as tokens.

    Attributes:
        source: `client`, `tokenizer`, `replica`, or `text` if these are not the replica's tokens.
    """

    tokens: Sequence[int]
    source: str

    @property
    def exact(self) -> bool:
        return self.source != "text"


Able = Callable[[], Sequence[Upstream]]
"""Replicas that can tokenize, the best first."""
_ASKED: Final = 2


class Prompts:
    """Tokenizes, and remembers what was tokenized: at most 8 million tokens, the least recently used forgotten first.

    Args:
        timeout: seconds that a replica has to tokenize a prompt.
    """

    def __init__(self, session: aiohttp.ClientSession, headers: Mapping[str, str], timeout: float) -> None:
        self._session = session
        self._headers = headers
        self._timeout = timeout
        self._thread = ThreadPoolExecutor(1, "tokenizing")
        self._tokenizer: Tokenizer | None = None
        self._turns: Turns | None = None
        self._known: OrderedDict[bytes, array[int]] = OrderedDict()
        self._known_tokens = 0
        self._asking: dict[bytes, asyncio.Future[array[int] | None]] = {}

    async def load(self, source: str) -> None:
        """Use this tokenizer from now on. Raises ModelNotFound."""
        from foreword.engine.tokenizer import Tokenizer  # takes its time

        self._tokenizer = await asyncio.get_running_loop().run_in_executor(self._thread, Tokenizer.load, source)
        self._turns = Turns(self._tokenizer)

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def read(self, asked: Asked, able: Able) -> Prompt:
        """The tokens of the request's (first) prompt."""
        prompt = _first(asked.body.get("prompt")) if asked.interface == "completion" else None
        if isinstance(prompt, list):
            return Prompt(prompt, "client") if _are_ids(prompt) else Prompt((), "text")
        if asked.body.get("prefix") is not None:
            return Prompt(as_text(asked), "text")
        question = _question(asked, prompt)
        if question is None:
            return Prompt(as_text(asked), "text")
        data = msgspec.json.encode(question)
        name = blake2b(data, digest_size=16).digest()
        tokens = self._look(name)
        own = self._can(question)
        source = "tokenizer" if own else "replica"
        if tokens is None and own and len(data) <= _AT_ONCE:
            tokens = self._tokenize(question)
            self._keep(name, tokens)
        elif tokens is None:
            tokens = await self._ask(name, question, able)
        return Prompt(tokens, source) if tokens is not None else Prompt(as_text(asked), "text")

    async def text_of(
        self, before: Sequence[int], tokens: Sequence[int], sent: str, able: Sequence[Upstream]
    ) -> tuple[int, str]:
        """`(count, text)`: the text of as many of the tokens as make whole characters, after those `before`. `sent` is what a
        server made of them.

        Raises ReplicaFailed if nobody can say.
        """
        if self._tokenizer is not None:
            work = _text_by(self._tokenizer, list(before[-_CONTEXT:]), list(tokens))
            return await asyncio.get_running_loop().run_in_executor(self._thread, work)
        problem = ReplicaFailed("nobody can say what text its tokens stand for")
        asked = list(able)
        for patience in _PATIENCE:
            for upstream in list(asked):
                ask = partial(self._detokenize, upstream, self._timeout * patience)
                try:
                    return await _text_from(ask, list(before[-_CONTEXT:]), list(tokens), sent)
                except LOST as error:
                    what = "no answer in time" if isinstance(error, TimeoutError) else type(error).__name__
                    problem = ReplicaFailed(f"{upstream.url} does not say what tokens stand for: {what}")
                except ReplicaFailed as error:
                    problem = error
                    asked.remove(upstream)
        raise problem

    # Inside

    async def _ask(self, name: bytes, question: Mapping[str, Any], able: Able) -> array[int] | None:
        waiting = self._asking.get(name)
        if waiting is None:
            waiting = self._asking[name] = asyncio.ensure_future(self._tokens(question, able))
            waiting.add_done_callback(partial(self._asked, name))
        # Whoever asked first may go away: the others still wait.
        return await asyncio.shield(waiting)

    def _asked(self, name: bytes, waiting: asyncio.Future[array[int] | None]) -> None:
        del self._asking[name]
        if not waiting.cancelled() and waiting.exception() is None:
            self._keep(name, waiting.result())

    async def _tokens(self, question: Mapping[str, Any], able: Able) -> array[int] | None:
        if self._can(question):
            return await asyncio.get_running_loop().run_in_executor(self._thread, self._tokenize, question)
        for upstream in able()[:_ASKED]:
            assert upstream.facts is not None and upstream.facts.tokenize is not None
            try:
                found = await self._post(upstream, upstream.facts.tokenize, question, self._timeout)
                return array("I", found["tokens"])
            except (*LOST, ReplicaFailed, KeyError, TypeError, ValueError, OverflowError):
                continue
        return None

    def _can(self, question: Mapping[str, Any]) -> bool:
        """Whether the router's own tokenizer makes the replica's tokens of it. What changes the template is the replica's."""
        return self._tokenizer is not None and not any(name in question for name in _TEMPLATES_OWN)

    def _tokenize(self, question: Mapping[str, Any]) -> array[int] | None:
        """By the router's own tokenizer, on any thread. None if it cannot: the replica will say so in its own words."""
        assert self._tokenizer is not None and self._turns is not None
        if "prompt" in question:
            special = question.get("add_special_tokens", True) is not False
            return array("I", self._tokenizer.encode(question["prompt"], add_special_tokens=special))
        messages = [_plain(message) for message in question["messages"]]
        opened = question.get("add_generation_prompt", True) is not False
        try:
            return self._turns.tokens(messages, add_generation_prompt=opened)
        except BadRequest:
            return None

    async def _detokenize(self, upstream: Upstream, seconds: float, tokens: Sequence[int]) -> str:
        assert upstream.facts is not None and upstream.facts.tokenize is not None
        path = upstream.facts.tokenize.replace("tokenize", "detokenize")
        found = await self._post(upstream, path, {"tokens": list(tokens), "model": upstream.model}, seconds)
        if not isinstance(text := found.get("prompt"), str):
            raise ReplicaFailed(f"{upstream.url}{path} does not answer as it should")
        return text

    async def _post(self, upstream: Upstream, path: str, body: Mapping[str, Any], seconds: float) -> dict[str, Any]:
        headers = {**self._headers, "content-type": "application/json"}
        data = msgspec.json.encode(body)
        limit = aiohttp.ClientTimeout(total=seconds)
        async with self._session.post(upstream.url + path, data=data, headers=headers, timeout=limit) as answer:
            found = await answer.read()
            if answer.status != 200:
                raise ReplicaFailed(f"{upstream.url}{path} says {answer.status}")
        try:
            decoded = msgspec.json.decode(found)
        except msgspec.DecodeError:
            decoded = None
        if not isinstance(decoded, dict):
            raise ReplicaFailed(f"{upstream.url}{path} does not answer as it should")
        return decoded

    def _look(self, name: bytes) -> array[int] | None:
        found = self._known.get(name)
        if found is not None:
            self._known.move_to_end(name)
        return found

    def _keep(self, name: bytes, tokens: array[int] | None) -> None:
        if tokens is None or name in self._known or len(tokens) > _CACHED_TOKENS:
            return
        self._known[name] = tokens
        self._known_tokens += len(tokens)
        while self._known_tokens > _CACHED_TOKENS:
            self._known_tokens -= len(self._known.popitem(last=False)[1])


async def _text_from(
    ask: Callable[[Sequence[int]], Awaitable[str]], context: list[int], tokens: list[int], sent: str
) -> tuple[int, str]:
    """`Prompts.text_of` by one replica's endpoint. Raises ReplicaFailed, and what aiohttp raises."""
    ahead = await ask(context) if context else ""
    for count in range(len(tokens), max(len(tokens) - _MOST_HELD, 0), -1):
        text = await ask([*context, *tokens[:count]])
        if not text.startswith(ahead):
            break
        text = text[len(ahead) :]
        if text == sent or not text.endswith("\ufffd"):
            return count, text
    if not sent:
        return 0, ""
    raise ReplicaFailed("its tokens do not stand for whole characters")


def as_text(asked: Asked) -> array[int]:
    """A prompt as numbers that are equal where its text is: four bytes each."""
    if asked.interface == "chat":
        messages = asked.body.get("messages")
        parts = [msgspec.json.encode(one) for one in messages] if isinstance(messages, list) else []
        text = b"".join(parts)
    else:
        prompt = _first(asked.body.get("prompt"))
        text = prompt.encode("utf-8", "replace") if isinstance(prompt, str) else b""
    prefix = asked.body.get("prefix")
    if isinstance(prefix, str):
        text = prefix.encode("utf-8", "replace") + b"\x00" + text
    return _words(text)


def _first(prompt: object) -> object:
    """The first of several prompts; a list of numbers is one prompt."""
    if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int):
        return prompt[0]
    return prompt


def _are_ids(prompt: list[Any]) -> bool:
    return all(type(one) is int and 0 <= one < 2**32 for one in prompt)


def _question(asked: Asked, prompt: object) -> dict[str, Any] | None:
    """The body of a tokenizing request; None if the prompt is not one that can be tokenized apart."""
    if asked.interface == "completion":
        if not isinstance(prompt, str):
            return None
        return _given(asked, _PROMPT_FIELDS) | {"prompt": prompt}
    messages = asked.body.get("messages")
    if not isinstance(messages, list) or not messages or not all(isinstance(one, dict) for one in messages):
        return None
    return _given(asked, _TEMPLATE_FIELDS) | {"messages": messages}


def _given(asked: Asked, names: Sequence[str]) -> dict[str, Any]:
    found = {name: asked.body[name] for name in names if asked.body.get(name) is not None}
    return found | ({"model": asked.model} if asked.model else {})


def _plain(message: Mapping[str, Any]) -> dict[str, Any]:
    """As Foreword's server gives messages to the template: text parts joined, `developer` as `system`."""
    plain = dict(message)
    content = plain.get("content")
    if isinstance(content, list):
        plain["content"] = "".join(str(part.get("text", "")) for part in content if isinstance(part, dict))
    if plain.get("role") == "developer":
        plain["role"] = "system"
    return plain


def _text_by(tokenizer: Tokenizer, before: list[int], tokens: list[int]) -> Callable[[], tuple[int, str]]:
    def work() -> tuple[int, str]:
        stream, text, count = tokenizer.stream(before), "", 0
        for number, token in enumerate(tokens):
            piece = stream.push(token)
            if piece:
                text, count = text + piece, number + 1
        return count, text

    return work


def _words(text: bytes) -> array[int]:
    words = array("I")
    words.frombytes(text[: len(text) // 4 * 4])
    return words
