"""Requests of a fault run: drawn from a seed, sent, and compared token by token with a server that caches nothing."""

from __future__ import annotations

import asyncio
import json
import random
import time
from dataclasses import dataclass, field
from typing import Any

import aiohttp

WORDS = ["import", "return", "self", "lambda", "yield", "class", "async", "None", "def", "while", "key", "node", "list"]
PREFIXES = 5
PROMPTS = 30
ANSWERS = (12, 48, 150, 300)
SECONDS = 150.0  # after which a request counts as hanging
DEAD = (aiohttp.ClientError, asyncio.TimeoutError, ConnectionError)


@dataclass
class Ask:
    """A request of the traffic.

    Attributes:
        direct: index of the replica that gets it, past the router; -1 for the router.
        leave_after: events after which the client disconnects; None if it stays.
        alone: its salt is new, so nothing may be found in a cache.
        prefix: the named prefix that it names.
    """

    path: str
    body: dict[str, Any]
    stream: bool
    direct: int = -1
    leave_after: int | None = None
    alone: bool = False
    prefix: str = ""
    session: str = ""


@dataclass
class Answer:
    """The answer as the client saw it. `error` is empty for an answer that came whole."""

    began: float
    ended: float = 0.0
    status: int = 0
    error: str = ""
    code: str = ""
    route: str = ""
    left: bool = False
    ids: dict[int, list[int]] = field(default_factory=dict)
    texts: dict[int, str] = field(default_factory=dict)
    finishes: dict[int, str] = field(default_factory=dict)
    names: set[str] = field(default_factory=set)
    usage: dict[str, Any] = field(default_factory=dict)
    done: int = 0

    @property
    def cached(self) -> int:
        return int((self.usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0)

    def take(self, event: dict[str, Any], whole: bool = False) -> None:
        """Add an event of a stream, or a whole response."""
        if "error" in event:
            self.error, self.code = event["error"]["message"], str(event["error"].get("code"))
            return
        self.names.add(event["id"])
        self.usage = event.get("usage") or self.usage
        for choice in event.get("choices", ()):
            index = choice["index"]
            part = choice if "text" in choice else {"text": choice["message" if whole else "delta"].get("content")}
            self.texts[index] = self.texts.get(index, "") + (part["text"] or "")
            self.ids.setdefault(index, []).extend(choice.get("token_ids") or [])
            if choice.get("finish_reason"):
                self.finishes[index] = choice["finish_reason"]


class Library:
    """The prompts of an epoch, a few rounds: shared prefixes with different ends, conversations, named prefixes."""

    def __init__(self, seed: str) -> None:
        draw = random.Random(seed)
        self._starts = [_text(draw, draw.randrange(60, 320)) for _ in range(PREFIXES)]
        self.prompts = [self._prompt(draw) for _ in range(PROMPTS)]
        self.chats = [
            [_text(draw, draw.randrange(20, 160)), *(_text(draw, draw.randrange(3, 40)) for _ in range(3))]
            for _ in range(6)
        ]
        self.named = {
            f"p{number}-{draw.randrange(1 << 32):08x}": [
                {"role": "system", "content": _text(draw, draw.randrange(60, 200))}
            ]
            for number in range(3)
        }
        self.questions = [_text(draw, draw.randrange(3, 30)) for _ in range(4)]

    def _prompt(self, draw: random.Random) -> dict[str, Any]:
        body: dict[str, Any] = {
            "prompt": draw.choice(self._starts) + _text(draw, draw.randrange(0, 60)),
            "max_tokens": draw.choice(ANSWERS),
            **_sampling(draw),
        }
        if draw.random() < 0.12:
            body["n"] = draw.choice([2, 3])
            body["max_tokens"] = min(body["max_tokens"], 48)
        return body


def _text(draw: random.Random, words: int) -> str:
    return "".join(f"{draw.choice(WORDS)}{draw.choice([' ', '_', '(', ') ', ': ', ', '])}" for _ in range(words))


def _sampling(draw: random.Random) -> dict[str, Any]:
    """Greedy, or sampled with a seed, which repeats itself less."""
    if draw.random() < 0.5:
        return {"temperature": 0}
    return {"temperature": 0.9, "top_p": 0.95, "seed": draw.randrange(1 << 30)}


def drawn(draw: random.Random, library: Library, kept: str) -> Ask:
    """A request that is no conversation."""
    salt = {"cache_salt": draw.choice(["red", "blue"])} if draw.random() < 0.2 else {}
    stream = draw.random() < 0.7
    if draw.random() < 0.2:
        name = draw.choice([*library.named, kept])
        question = [{"role": "user", "content": draw.choice(library.questions)}]
        body = {"messages": question, "prefix": name, "max_tokens": 64, "temperature": 0}
        return Ask("/v1/chat/completions", body, stream, prefix=name)
    body = dict(draw.choice(library.prompts))
    ask = Ask("/v1/completions", body | salt, stream)
    if draw.random() < 0.3:
        ask.session = f"s{draw.randrange(4)}"
    how = draw.random()
    if how < 0.1:
        ask.direct, ask.alone = draw.randrange(3), True
        ask.body |= {"n": 1, "cache_salt": f"alone-{draw.randrange(1 << 60):x}"}
    elif how < 0.2:
        ask.direct = draw.randrange(3)
        ask.body["kv_transfer_params"] = {}
    elif how < 0.35:
        ask.stream, ask.leave_after = True, draw.choice([0, 1, 5, 40])
    return ask


class Client:
    """Sends requests and waits for their answers."""

    async def __aenter__(self) -> Client:
        timeout = aiohttp.ClientTimeout(total=SECONDS)
        self._session = aiohttp.ClientSession(
            timeout=timeout, connector=aiohttp.TCPConnector(limit=0), read_bufsize=1 << 20
        )
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._session.close()

    async def send(self, url: str, ask: Ask) -> Answer:
        """Never raises for what the other side does: that is in the answer."""
        answer = Answer(time.monotonic())
        body = ask.body | {"return_token_ids": True, "ignore_eos": True}
        if ask.stream:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        headers = {"x-session-id": ask.session} if ask.session else {}
        try:
            async with self._session.post(url + ask.path, json=body, headers=headers) as response:
                await self._read(response, ask, answer)
        except DEAD as error:
            answer.error = answer.error or f"{type(error).__name__}: {error}"
        answer.ended = time.monotonic()
        return answer

    async def _read(self, response: aiohttp.ClientResponse, ask: Ask, answer: Answer) -> None:
        answer.status = response.status
        answer.route = response.headers.get("x-foreword-route", "")
        if response.status != 200 or not ask.stream:
            answer.take(await response.json(), whole=True)
            answer.done = 1
            return
        events = 0
        async for line in response.content:
            if ask.leave_after is not None and events >= ask.leave_after:
                answer.left = True
                return
            if line.startswith(b"data: [DONE]"):
                answer.done += 1
            elif line.startswith(b"data: "):
                answer.take(json.loads(line[6:]))
                events += 1


class Reference:
    """Answers of a server without a cache, each computed once."""

    def __init__(self, client: Client, url: str) -> None:
        self._client = client
        self._url = url
        self._known: dict[str, asyncio.Task[Answer]] = {}
        self._places = asyncio.Semaphore(4)
        self.contents: dict[str, list[dict[str, str]]] = {}

    async def of(self, ask: Ask) -> Answer:
        body = {
            name: value
            for name, value in ask.body.items()
            if name not in ("cache_salt", "kv_transfer_params", "prefix")
        }
        if ask.prefix:
            body["messages"] = [*self.contents[ask.prefix], *body["messages"]]
        key = json.dumps([ask.path, body], sort_keys=True)
        if key not in self._known:
            self._known[key] = asyncio.create_task(self._compute(Ask(ask.path, body, stream=False)))
        return await self._known[key]

    async def _compute(self, ask: Ask) -> Answer:
        async with self._places:
            answer = await self._client.send(self._url, ask)
        if answer.error:
            raise RuntimeError(f"the reference failed: {answer.error}")
        return answer


def difference(answer: Answer, right: Answer) -> str:
    """Describes what differs from the reference in the part of the answer that came; empty if nothing does."""
    complete = not answer.error and not answer.left
    if complete and (answer.done != 1 or len(answer.names) != 1):
        return f"{answer.done} ends and the ids {answer.names}"
    for index, ids in answer.ids.items():
        if ids != right.ids[index][: len(ids)]:
            at = next(
                place for place, (one, two) in enumerate(zip(ids, right.ids[index] + [-1], strict=False)) if one != two
            )
            return f"choice {index} differs at token {at} of {len(ids)}: {ids[at : at + 5]} {right.ids[index][at : at + 5]}"
        text = answer.texts.get(index, "")
        if not right.texts[index].startswith(text.rstrip("\N{REPLACEMENT CHARACTER}")):
            return f"the text of choice {index} differs"
    if complete:
        for name in ("ids", "texts", "finishes"):
            if getattr(answer, name) != getattr(right, name):
                return f"{name} differ: {getattr(answer, name)} {getattr(right, name)}"[:400]
        for name in ("prompt_tokens", "completion_tokens"):
            if answer.usage.get(name) != right.usage.get(name):
                return f"usage differs: {answer.usage} {right.usage}"
    return ""
