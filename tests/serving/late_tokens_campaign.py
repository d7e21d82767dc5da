"""Conversations whose `/tokenize` fails in every way, through a router with its own time limits, and what each turn lost.

    python tests/serving/late_tokens_campaign.py [--rounds 60] [--seed 1]

A round draws 2 to 8 replicas, a tokenizer and a template, and how their `/tokenize` fails: late by 0.1, 2 or 30 s, never an
answer, an error, a broken connection, or nonsense; at all replicas or at one; in turn 4 of six, in others, or from one on.
Conversations take turns one by one, so no queue is a reason to move: a turn behind the first has lost what another replica
had more of. Waiting is counted as the router decides it, and as it was, from the client to the replica.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import cycle
from typing import Any
from unittest import mock

import http_client
from aiohttp import web
from first_calls import MODEL
from router_parts import Loop, RouterThread
from scripted_replica import ScriptedReplica

from foreword.router.replica_pool import ReplicaPool
from foreword.tokens.tokenizer import Tokenizer

BLOCK = 16
TURNS = 6
SECONDS_PER_TOKEN = 2e-5
TROUBLES = ("late 0.1", "late 2", "late 30", "never", "500", "broken", "nonsense", "numbers as words")
Template = Callable[[Sequence[dict[str, Any]], Any], str]
Encode = Callable[[str], list[int]]


def appended(messages: Sequence[dict[str, Any]], tools: Any) -> str:
    return json.dumps(tools or "") + "".join(f"<{one['role']}>{one['content']}" for one in messages)


def tools_behind_the_system_prompt(messages: Sequence[dict[str, Any]], tools: Any) -> str:
    first, *others = (f"<{one['role']}>{one['content']}" for one in messages)
    return first + json.dumps(tools or "") + "".join(others) + "<assistant>"


def without_earlier_reasoning(messages: Sequence[dict[str, Any]], tools: Any) -> str:
    """Render as reasoning models do: an earlier answer is shown from its end of reasoning on."""
    last = len(messages) - 1
    said = [
        one["content"].split("</think>")[-1] if at < last - 1 else one["content"] for at, one in enumerate(messages)
    ]
    return "".join(f"<{one['role']}>{text}" for one, text in zip(messages, said, strict=True)) + json.dumps(tools or "")


TEMPLATES: Sequence[Template] = (appended, tools_behind_the_system_prompt, without_earlier_reasoning)


def pairs_of_bytes(text: str) -> list[int]:
    data = text.encode()
    return [int.from_bytes(data[at : at + 2], "big") for at in range(0, len(data), 2)]


def single_bytes(text: str) -> list[int]:
    return list(text.encode())


def words(text: str) -> list[int]:
    return [sum(ord(letter) << at % 20 for at, letter in enumerate(word)) % 2**31 for word in text.split(" ")]


@dataclass
class Trouble:
    """How `/tokenize` fails; empty while it does not. `ports`: of the replicas at which it does."""

    kind: str = ""
    ports: frozenset[str] = frozenset()


class Replica(ScriptedReplica):
    """Knows which leading tokens it has had, and takes time for the others."""

    def __init__(self, loop: Loop, render: Callable[[dict[str, Any]], list[int]], trouble: Trouble) -> None:
        self._render, self._trouble = render, trouble
        self._cached = set[int]()
        self.came = list[float]()
        super().__init__(loop)

    def routes(self) -> list[web.RouteDef]:
        return [web.post("/tokenize", self._tokenize), web.post("/v1/chat/completions", self._chat)]

    def hit(self, tokens: Sequence[int]) -> int:
        return min(
            BLOCK
            * next((at for at, one in enumerate(_heads(tokens)) if one not in self._cached), len(tokens) // BLOCK),
            len(tokens) - 1,
        )

    async def _tokenize(self, request: web.Request) -> web.Response:
        tokens = self._render(await request.json())
        kind = self._trouble.kind if self.url in self._trouble.ports else ""
        if kind.startswith("late"):
            await asyncio.sleep(float(kind.split()[1]))
        elif kind == "never":
            await asyncio.Event().wait()
        elif kind == "500":
            return web.json_response({"error": "no"}, status=500)
        elif kind == "broken":
            assert request.transport is not None
            request.transport.abort()
        elif kind == "nonsense":
            return web.Response(body=b'{"tokens": [1, 2', content_type="application/json")
        elif kind == "numbers as words":
            return web.json_response({"tokens": [str(one) for one in tokens], "count": len(tokens)})
        return web.json_response({"tokens": tokens, "count": len(tokens), "max_model_len": 1_000_000})

    async def _chat(self, request: web.Request) -> web.Response:
        self.came.append(time.monotonic())
        tokens = self._render(await request.json())
        hit = self.hit(tokens)
        await asyncio.sleep((len(tokens) - hit) * SECONDS_PER_TOKEN)
        self._cached.update(_heads(tokens))
        details = {"prompt_tokens_details": {"cached_tokens": hit}}
        usage = {"prompt_tokens": len(tokens), "completion_tokens": 2, "total_tokens": len(tokens) + 2, **details}
        message = {"role": "assistant", "content": "ok"}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        return web.json_response({"id": "c", "object": "chat.completion", "choices": [choice], "usage": usage})


def _heads(tokens: Sequence[int]) -> Iterator[int]:
    name = 0
    for at in range(0, len(tokens) - BLOCK + 1, BLOCK):
        name = hash((name, *tokens[at : at + BLOCK]))
        yield name


@dataclass
class Found:
    """Counts of the campaign. `limits`: seconds that the router would wait for tokens, by whether `/tokenize` failed then."""

    turns: Counter[bool] = field(default_factory=Counter)
    sources: Counter[str] = field(default_factory=Counter)
    lost: list[str] = field(default_factory=list)
    limits: dict[bool, list[float]] = field(default_factory=lambda: {True: [], False: []})
    waits: dict[bool, list[float]] = field(default_factory=lambda: {True: [], False: []})
    first_limits: list[float] = field(default_factory=list)


@contextmanager
def counted(into: list[float]) -> Iterator[None]:
    """Note the limits that a router decides."""
    decided = ReplicaPool.worth_waiting

    def worth_waiting(self: ReplicaPool, tokens: int, before: int) -> float:
        seconds = decided(self, tokens, before)
        into.append(seconds)
        return seconds

    with mock.patch.object(ReplicaPool, "worth_waiting", worth_waiting):
        yield


def run_round(seed: int, loop: Loop, tokenizer: Tokenizer, found: Found) -> str:
    """Send the conversations of a round; returns its parameters."""
    chance = random.Random(seed)
    count, template = chance.randint(2, 8), chance.choice(TEMPLATES)
    encode = chance.choice([pairs_of_bytes, single_bytes, words, tokenizer.encode])
    kind, everywhere = TROUBLES[seed % len(TROUBLES)], chance.random() < 0.7
    late = chance.choice([(4,), (4,), (4, 5, 6), (3, 4), (2, 4, 6), (2,), (5,)])
    tools = [{"type": "function", "function": {"name": "f", "description": "a tool " * chance.randint(1, 300)}}]
    offered = tools if chance.random() < 0.6 else None
    trouble = Trouble()
    replicas = [
        Replica(loop, lambda body: encode(template(body["messages"], body.get("tools"))), trouble) for _ in range(count)
    ]
    flags = [part for one in replicas for part in ("--replica", one.url)]
    router = RouterThread(*flags, "router.tokenize_patience=0.05", "router.tokenize_timeout=1").wait_for(count)
    drawn = f"{count} replicas, {template.__name__}, {getattr(encode, '__name__', '?')}, {kind}"
    drawn += f" at {'all' if everywhere else 'one'} in turns {late}"
    try:
        talks = [_talk(chance, number) for number in range(chance.randint(2, 4))]
        order = [number for number in range(len(talks)) for _ in range(TURNS)]
        if chance.random() < 0.5:
            order = [number for _ in range(TURNS) for number in range(len(talks))]
        for number in order:
            turn = talks[number].advance()
            ports = [one.url for one in replicas] if everywhere else [chance.choice(replicas).url]
            trouble.kind, trouble.ports = (kind if turn in late else ""), frozenset(ports)
            body: dict[str, Any] = {"model": "m", "messages": talks[number].messages}
            body |= {"tools": offered} if offered else {}
            tokens = encode(template(body["messages"], offered))
            best = max(one.hit(tokens) for one in replicas)
            limits, began = list[float](), time.monotonic()
            with counted(limits):
                answer = http_client.post(f"{router.url}/v1/chat/completions", json=body)
            assert answer.status_code == 200, answer.text
            usage = answer.json()["usage"]
            cached, failing = usage["prompt_tokens_details"]["cached_tokens"], bool(trouble.kind)
            came = max(one.came[-1] for one in replicas if one.came)
            [decision] = http_client.get(f"{router.url}/v1/router/decisions?last=1").json()["data"]
            found.turns[failing] += 1
            found.sources[decision["tokens_from"]] += failing
            (found.limits[failing] if turn > 1 else found.first_limits).extend(limits)
            found.waits[failing] += [came - began] if turn > 1 else []
            if turn > 1 and cached < best - 2 * BLOCK:  # a first turn may be sent elsewhere on purpose
                found.lost.append(f"{drawn}, turn {turn}: {cached} of {best}; {decision['in_words']}")
            talks[number].messages.append({"role": "assistant", "content": "<think>well</think>" + "ok " * 30})
        return drawn
    finally:
        trouble.kind = ""
        router.kill()


@dataclass
class Talk:
    """A conversation."""

    messages: list[dict[str, str]]
    asks: Iterator[str]
    turn: int = 0

    def advance(self) -> int:
        """Add the next question; returns its number, from 1."""
        self.messages.append({"role": "user", "content": next(self.asks)})
        self.turn += 1
        return self.turn


def _talk(chance: random.Random, number: int) -> Talk:
    system = f"talk {number} {chance.random()}: " + "You are a helpful agent. " * chance.randint(50, 800)
    asks = [f"question {at}: " + "please go on. " * chance.choice([2, 20, 200]) for at in range(TURNS)]
    return Talk([{"role": "system", "content": system}], cycle(asks))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    loop, tokenizer, found = Loop(), Tokenizer.load(str(MODEL)), Found()
    for seed in range(given.seed, given.seed + given.rounds):
        before = len(found.lost)
        drawn = run_round(seed, loop, tokenizer, found)
        print(f"{seed}: {drawn}: {len(found.lost) - before} lost", flush=True)
    print("\n".join(found.lost))
    print(f"{found.turns[True]} turns with a failing /tokenize, {found.turns[False]} others, {len(found.lost)} lost")
    print(f"placed by (failing turns): {dict(found.sources)}")
    limits = {name: found.limits[name] for name in (True, False)}
    longest = max(limits[True], default=0.0)
    over = sum(one > 0.0501 for one in limits[True])
    print(f"limit of waiting in failing turns: at most {longest:.3f} s; above 50 ms in {over} of {len(limits[True])}")
    print(f"first turns: at most {max(found.first_limits, default=0.0):.3f} s")
    medians = [1e3 * statistics.median(found.waits[name]) for name in (True, False)]
    print(f"from the client to the replica, median: {medians[0]:.0f} ms in failing turns, {medians[1]:.0f} in others")
    return bool(found.lost)


if __name__ == "__main__":
    sys.exit(main())
