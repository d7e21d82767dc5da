"""Interruptions of what a router knows of its replicas: only a proven loss of their KV costs a conversation its prefix."""

from __future__ import annotations

import asyncio
import json
import random
from array import array
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from hashlib import blake2b
from typing import Any, cast

import http_client
import pytest
from aiohttp import web
from router_parts import Loop, RouterThread
from scripted_replica import metrics_of
from shared_server import until
from test_router_late_tokens import EventReplica, ask, routed

from foreword.blocks.salt import NO_SALT
from foreword.process_config import RouterConfig
from foreword.router.prompts import TokenizedPrompt
from foreword.router.replica_pool import PlacementRequest, ReplicaPool, key_model
from foreword.router.replicas import ReplicaBreaker, ReplicaEvents, ReplicaInfo, ReplicaSpec, Upstream, clock
from foreword.routing.event_feed import KvEventFeed
from foreword.routing.known_prompts import PromptChain

BLOCK = 16
SMALL = 96


class BusyReplica(EventReplica):
    """Answers health checks while it is `healthy`. `started`: when its process started."""

    def __init__(self, loop: Loop) -> None:
        self.healthy, self.started = True, 1.0
        super().__init__(loop)

    def restart(self) -> None:
        self.started += 1
        self._cached.clear()

    async def _health(self, request: web.Request) -> web.Response:
        return web.Response(status=200 if self.healthy else 503)

    async def _metrics(self, request: web.Request) -> web.Response:
        config = f'vllm:cache_config_info{{engine="0",block_size="{BLOCK}",num_gpu_blocks="1000"}} 1.0\n'
        return web.Response(text=f"{metrics_of(self.weights)}{config}process_start_time_seconds {self.started}\n")


@pytest.fixture(scope="module")
def loop() -> Loop:
    return Loop()


def _states(router: RouterThread) -> dict[str, bool]:
    listed = http_client.get(f"{router.url}/v1/router/replicas").json()["data"]
    return {one["replica"]: one["takes_requests"] for one in listed}


@pytest.mark.parametrize("speaks", [False, True], ids=["late tokens", "tokens"])
def test_a_replica_that_was_away_has_what_it_had(loop: Loop, speaks: bool) -> None:
    """A conversation's next turn finds all of the turn before at a replica that was out of service meanwhile and is the same
    process, whether it was tokenized or not, and though no event told of its blocks. After a restart it is expected to have
    nothing."""
    with routed(
        loop,
        2,
        "router.tokenize_timeout=0.05" if not speaks else "router.tokenize_timeout=60",
        events=" events=tcp://127.0.0.1:1",
        kind=BusyReplica,
    ) as (router, made):
        replicas = cast(list[BusyReplica], made)
        for one in replicas:
            one.speaks(speaks)
        messages: list[dict[str, Any]] = [{"role": "system", "content": "You are a helpful agent. " * 400}]
        before = 0
        for turn in range(3):
            messages.append({"role": "user", "content": f"turn {turn}: " + "please go on. " * 20})
            prompt, cached = ask(router, messages)
            [decision] = http_client.get(f"{router.url}/v1/router/decisions?last=1").json()["data"]
            home = next(one for one in replicas if one.url == decision["replica"])
            if turn < 2:
                assert cached >= before - 2 * BLOCK
            else:
                assert decision["expected_cached_tokens"] == 0
            before = prompt
            messages.append({"role": "assistant", "content": "ok"})
            home.healthy = False
            until(lambda url=home.url: not _states(router)[url])  # type: ignore[misc]
            if turn == 1:
                home.restart()
            home.healthy = True
            until(lambda url=home.url: _states(router)[url])  # type: ignore[misc]


class StreamingReplica(BusyReplica):
    """Sends a token of each stream every 20 ms while it `sends`. While it is `late`, it answers no health check: it counts
    those that came in `unanswered`."""

    def __init__(self, loop: Loop) -> None:
        self.sends, self.late, self.unanswered = True, False, 0
        super().__init__(loop)

    async def _health(self, request: web.Request) -> web.Response:
        self.unanswered += self.late
        while self.late:
            await asyncio.sleep(0.02)
        return web.Response()

    async def _chat(self, request: web.Request) -> web.StreamResponse:  # type: ignore[override]
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        choice = {"index": 0, "delta": {"content": "a"}, "finish_reason": None}
        chunk = {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": "m", "choices": [choice]}
        while True:
            if self.sends:
                await response.write(f"data: {json.dumps(chunk)}\n\n".encode())
            await asyncio.sleep(0.02)


def test_a_replica_that_sends_tokens_is_alive_however_late_it_answers_health_checks(loop: Loop) -> None:
    """Health checks without an answer take no replica out of service while tokens of a stream come from it, and take it out
    once none come: it may hang."""
    with routed(loop, 1, "router.health_timeout=0.7", "--failures", "2", kind=StreamingReplica) as (router, made):
        [replica] = cast(list[StreamingReplica], made)
        body = {"model": "m", "messages": [{"role": "user", "content": "go"}], "stream": True}
        with router.http() as client, client.stream("POST", "/v1/chat/completions", json=body) as response:
            lines = response.iter_lines()  # without a reader they wait in the socket, and are few
            next(lines)
            replica.late = True
            until(lambda: replica.unanswered >= 4)
            assert router.metric("foreword:router_breaker_opened_total") == 0
            replica.sends = False
            until(lambda: router.metric("foreword:router_breaker_opened_total") == 1)
            replica.late = False


FIRST = ReplicaInfo("vllm", ("m",), weights="w", published=True, started=1000.0)


@pytest.mark.parametrize(
    ("now", "is_same", "has_lost"),
    [
        (replace(FIRST, cards=({"id": "m", "created": 2},)), True, False),
        (replace(FIRST, started=1010.0), False, True),
        (replace(FIRST, started=0.01), False, True),
        (replace(FIRST, started=None), False, False),
        (replace(FIRST, weights="v"), False, True),
        (replace(FIRST, weights=None), False, False),
        (replace(FIRST, weights="logprobs-1", published=False), False, False),
        (replace(FIRST, models=("m", "adapter")), False, False),
    ],
    ids=[
        "the same",
        "restarted",
        "a clock set back",
        "no start",
        "other weights",
        "no weights",
        "not published",
        "adapter",
    ],
)
def test_only_a_proof_takes_what_a_replica_has(now: ReplicaInfo, is_same: bool, has_lost: bool) -> None:
    """A replica that comes back has lost its KV if it says that its process started at another time, whatever its clock shows,
    or names other weights. What it does not say proves nothing: it joins anew, and is believed to have what it was sent."""
    assert (FIRST.is_process_of(now), FIRST.has_lost(now)) == (is_same, has_lost)


# The campaign: a pool and the feeds of its replicas, without processes.


@dataclass
class Replica:
    """The blocks that a replica has: `held`, by the tokens up to the end of each block. `late`: messages on their way."""

    upstream: Upstream
    feed: KvEventFeed
    held: set[bytes] = field(default_factory=set)
    log: list[list[dict[str, Any]]] = field(default_factory=list)
    late: list[int] = field(default_factory=list)

    def hit(self, tokens: array[int]) -> int:
        heads = _heads(tokens)
        return BLOCK * next((at for at, one in enumerate(heads) if one not in self.held), len(heads))

    def compute(self, tokens: array[int]) -> None:
        heads, events = _heads(tokens), []
        for at, head in enumerate(heads):
            if head not in self.held:
                self.held.add(head)
                events.append(
                    {
                        "type": "BlockStored",
                        "block_hashes": [_name(head)],
                        "parent_block_hash": _name(heads[at - 1]) if at else None,
                        "token_ids": tokens[at * BLOCK : (at + 1) * BLOCK].tolist(),
                        "block_size": BLOCK,
                    }
                )
        self.publish(events)

    def publish(self, events: list[dict[str, Any]]) -> None:
        self.late.append(len(self.log))
        self.log.append(events)

    def deliver(self, replays: bool) -> None:
        """Messages arrive, after those that were missed if the replica replays them."""
        for number in self.late:
            if self.feed.published(number) and replays:
                for missed in range(self.feed.next, number):
                    self.feed.receive(missed, self.log[missed], replayed=True)
            self.feed.receive(number, self.log[number])
        self.late.clear()


def _heads(tokens: array[int]) -> list[bytes]:
    return [tokens[:end].tobytes() for end in range(BLOCK, len(tokens) + 1, BLOCK)]


def _name(head: bytes) -> int:
    return int.from_bytes(blake2b(head, digest_size=8).digest(), "big")


def _chain(tokens: array[int]) -> PromptChain:
    ends = [*range(64, len(tokens), 64), len(tokens)]
    links = tuple(blake2b(tokens[:end].tobytes(), digest_size=16).digest() for end in ends)
    return PromptChain(b"", links, tuple(4 * end for end in ends))


class Campaign:
    """`excused`: conversations of which a replica may have lost something since their last turn."""

    def __init__(self, seed: int) -> None:
        self.chance, self.turns, self.number = random.Random(seed), 0, 0
        self.pool = ReplicaPool("m", RouterConfig(), {})
        self.replicas = dict[str, Replica]()
        self.talks = [array("I", self.some(400)) for _ in range(4)]
        self.excused = set[int]()
        self.missed, self.wrong = list[str](), 0
        for number in range(3):
            info = ReplicaInfo("vllm", ("m",), block_size=BLOCK, event_sources=(ReplicaEvents("tcp://x:1", None),))
            upstream = Upstream(ReplicaSpec(f"http://r{number}"), "flag", ReplicaBreaker())
            upstream.info = replace(info, weights="w", published=True, started=1.0, tokenize_path="/tokenize")
            self.join(upstream)

    def some(self, count: int) -> list[int]:
        return [self.chance.randrange(1 << 16) for _ in range(count)]

    def join(self, upstream: Upstream) -> Replica:
        assert upstream.info is not None
        before = self.replicas.get(upstream.url)
        known, model = self.pool.known, key_model("m", upstream.info.weights).encode()
        feed = KvEventFeed(self.pool.fleet.directory, upstream.url, model, BLOCK, on_doubt=known.interrupted)
        self.pool.add(upstream)
        self.replicas[upstream.url] = replica = Replica(upstream, feed)
        if before is not None:
            replica.held, replica.log = before.held, before.log
        return replica

    async def turn(self) -> None:
        self.number += 1
        talk = self.chance.randrange(len(self.talks))
        tokens, pool = self.talks[talk], self.pool
        chain = _chain(tokens)
        found = pool.known.find(chain, clock())
        held, home = (found.held, found.home) if found is not None else ({}, "")
        if self.chance.random() < 0.5:
            pool.known.learn(chain, tokens)
            prompt = TokenizedPrompt(tokens, "replica", chain, held=held, home=home)
        elif found is not None and found.tokens:
            prompt = TokenizedPrompt(found.tokens, "known", chain, found.total, held, home)
        else:
            text = array("I", [one + (1 << 20) for one in tokens])
            prompt = TokenizedPrompt(text, "text", chain, held=held, home=home)
        query = pool.query(prompt, None, NO_SALT, None, 16)
        attempt = await pool.place(PlacementRequest(f"a{self.number}", "t", query, prompt))
        pool.known.placed(chain, query.tokens, attempt.upstream.url, clock(), by_keys=prompt.exact)
        chosen = self.replicas[attempt.upstream.url]
        best, hit = max(one.hit(tokens) for one in self.replicas.values()), chosen.hit(tokens)
        self.turns += 1
        if hit < best - 2 * BLOCK:
            self.wrong += 1
            if talk not in self.excused:
                self.missed.append(f"turn {self.number}: {hit} of {best}; {attempt.decision.in_words()}")
        self.excused.discard(talk)
        chosen.compute(tokens)
        if self.chance.random() < 0.5:
            chosen.deliver(replays=True)
        pool.finished(attempt, hit, 16, len(tokens))
        self.talks[talk] = tokens + array("I", self.some(self.chance.randrange(20, 120)))

    def interrupt(self, losses: bool) -> None:
        replica = self.chance.choice(list(self.replicas.values()))
        lost: list[Callable[[], None]] = [
            partial(one, replica) for one in (self.restart, self.restart_in_secret, self.clear)
        ]
        kept: list[Callable[[], None]] = [
            lambda: replica.deliver(replays=True),
            partial(self.gap, replica),
            partial(self.rejoin, replica),
            partial(self.leave, replica),
        ]
        self.chance.choice(kept + lost * losses)()

    def gap(self, replica: Replica) -> None:
        """Messages are lost, and one that follows arrives."""
        replica.late.clear()
        replica.publish([])
        replica.deliver(replays=False)

    def rejoin(self, replica: Replica) -> None:
        """The replica is added anew, such as with a fingerprint that it publishes late, and replays nothing, or all."""
        again = self.join(replica.upstream)
        if self.chance.random() < 0.5:
            for number, events in enumerate(again.log):
                again.feed.receive(number, events, replayed=True)

    def leave(self, replica: Replica) -> None:
        self.pool.remove(replica.upstream)
        self.rejoin(replica)

    def restart(self, replica: Replica) -> None:
        info = replica.upstream.info
        assert info is not None and info.started is not None
        replica.upstream.info = replace(info, started=info.started + 1)
        self.pool.remove(replica.upstream)
        again = self.join(replica.upstream)
        again.held, again.log = set(), []
        self.excused = set(range(len(self.talks)))

    def restart_in_secret(self, replica: Replica) -> None:
        """Another process that claims to be the one before. Only its events tell: they are counted from the start."""
        replica.held.clear()
        replica.late.clear()
        replica.log.clear()
        replica.publish([])
        replica.deliver(replays=True)
        self.excused = set(range(len(self.talks)))

    def clear(self, replica: Replica) -> None:
        replica.held.clear()
        replica.publish([{"type": "AllBlocksCleared"}])
        if self.chance.random() < 0.7:
            replica.deliver(replays=True)
        else:  # nobody hears of it
            self.gap(replica)
        self.excused = set(range(len(self.talks)))


@pytest.mark.parametrize("losses", [False, True], ids=["interruptions", "losses"])
@pytest.mark.parametrize("seed", range(3))
def test_no_interruption_hides_what_a_replica_has(seed: int, losses: bool) -> None:
    """In any order of turns, late and lost events, replays, and replicas that leave and join again, no turn misses a prefix
    that a replica has. After a restart or a clear, heard of or not, each conversation misses once at most."""

    async def run() -> Campaign:
        campaign = Campaign(seed)
        for _ in range(SMALL):
            await campaign.turn()
            while campaign.chance.random() < 0.4:
                campaign.interrupt(losses)
        return campaign

    campaign = asyncio.run(run())
    assert campaign.missed == []
