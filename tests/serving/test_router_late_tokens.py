"""Replicas whose `/tokenize` answers late or never: no conversation loses its prefix, and none waits longer than it pays."""

from __future__ import annotations

import asyncio
import itertools
import json
from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import aiohttp
import http_client
import pytest
import zmq
from aiohttp import web
from router_parts import Loop, RouterThread
from scripted_replica import ScriptedReplica, metrics_of
from shared_server import until

from foreword.api.dialects.decode import Limits
from foreword.api.request import GenerateRequest
from foreword.blocks.salt import Salt
from foreword.kv_event_wire import encode_batch, encode_number
from foreword.router.prompt_chain import prompt_chain
from foreword.router.prompts import PromptTokenizer, TokenizedPrompt
from foreword.router.replica_body import parse_request
from foreword.router.replicas import clock
from foreword.routing.known_prompts import KnownPrompts

BLOCK = 16
TURNS, CONVERSATIONS = 6, 4


def ids_of(body: dict[str, Any]) -> list[int]:
    """Tokens of two bytes, of what a template that renders one message after another would write."""
    text = "".join(f"<{one['role']}>{one['content']}" for one in body["messages"]) + str(body.get("tools", ""))
    data = text.encode()
    return [int.from_bytes(data[at : at + 2], "big") for at in range(0, len(data), 2)]


class CountingReplica(ScriptedReplica):
    """Reports which leading tokens of a prompt it has had before. It tokenizes while `speaks`; `asked` counts."""

    def __init__(self, loop: Loop) -> None:
        self._loop = loop
        self._speaks = asyncio.Event()
        self._speaks.set()
        self._cached: set[tuple[int, ...]] = set()
        self.asked = 0
        super().__init__(loop)

    def speaks(self, whether: bool) -> None:
        self._loop.call(self._speaks.set if whether else self._speaks.clear)

    def routes(self) -> list[web.RouteDef]:
        return [web.post("/tokenize", self._tokenize), web.post("/v1/chat/completions", self._chat)]

    def tokens_of(self, body: dict[str, Any]) -> list[int]:
        return ids_of(body)

    def heads(self, tokens: list[int], body: dict[str, Any]) -> list[tuple[int, ...]]:
        """The prefixes of a prompt that end with a block."""
        return [tuple(tokens[:end]) for end in range(BLOCK, len(tokens) + 1, BLOCK)]

    async def _tokenize(self, request: web.Request) -> web.Response:
        tokens = self.tokens_of(await request.json())
        self.asked += 1
        await self._speaks.wait()
        return web.json_response({"tokens": tokens, "count": len(tokens), "max_model_len": 100_000})

    async def _chat(self, request: web.Request) -> web.Response:
        body = await request.json()
        tokens = self.tokens_of(body)
        heads = self.heads(tokens, body)
        hit = BLOCK * next((at for at, one in enumerate(heads) if one not in self._cached), len(heads))
        self._cached.update(heads)
        usage = {
            "prompt_tokens": len(tokens),
            "completion_tokens": 2,
            "total_tokens": len(tokens) + 2,
            "prompt_tokens_details": {"cached_tokens": min(hit, len(tokens) - 1)},
        }
        message = {"role": "assistant", "content": "ok"}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        return web.json_response(
            {"id": "c", "object": "chat.completion", "created": 1, "model": "m", "choices": [choice], "usage": usage}
        )


@pytest.fixture(scope="module")
def loop() -> Loop:
    return Loop()


@contextmanager
def routed(
    loop: Loop, count: int, *more: str, events: str = "", kind: type[CountingReplica] = CountingReplica
) -> Iterator[tuple[RouterThread, list[CountingReplica]]]:
    """A router in front of replicas that waits for tokens only as long as a hit can save. `events`: where they send events."""
    replicas = [kind(loop) for _ in range(count)]
    urls = [part for one in replicas for part in ("--replica", one.url + events)]
    router = RouterThread(*urls, "router.tokenize_patience=0", *more)
    try:
        yield router.wait_for(count), replicas
    finally:
        for one in replicas:
            one.speaks(True)
        router.kill()


def ask(router: RouterThread, messages: Sequence[dict[str, Any]], **more: Any) -> tuple[int, int]:
    """Prompt tokens and cached ones of a turn."""
    body = {"model": "m", "messages": messages, **more}
    usage = http_client.post(f"{router.url}/v1/chat/completions", json=body).json()["usage"]
    return usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"]


def lost_turns(router: RouterThread, replicas: Sequence[CountingReplica], late: Sequence[int]) -> list[tuple[int, ...]]:
    """Conversation, turn, prompt tokens and cached ones of each turn that recomputed what the one before had. In the turns
    `late` nobody tokenizes."""
    lost = list[tuple[int, ...]]()
    for number in range(CONVERSATIONS):
        messages = [{"role": "system", "content": f"conversation {number}. " + "You are a helpful agent. " * 400}]
        before = 0
        for turn in range(1, TURNS + 1):
            messages.append({"role": "user", "content": f"turn {turn}: " + "please go on. " * 20})
            for one in replicas:
                one.speaks(turn not in late)
            prompt, cached = ask(router, messages)
            if cached < before - 2 * BLOCK:
                lost.append((number, turn, prompt, cached))
            before = prompt
            messages.append({"role": "assistant", "content": "ok"})
        for one in replicas:
            one.speaks(True)
    return lost


@pytest.mark.parametrize(
    ("count", "late"), [(2, (4,)), (8, (4,)), (2, (1,)), (2, (3, 4, 5)), (2, (1, 3, 5)), (3, tuple(range(1, 7)))]
)
def test_no_turn_loses_its_prefix(loop: Loop, count: int, late: tuple[int, ...]) -> None:
    """Conversations of six turns find all of the turn before, whichever turns are not tokenized before they are answered: these
    are placed without waiting for an answer."""
    with routed(loop, count, "router.tokenize_timeout=0.05" if 1 in late else "router.tokenize_timeout=60") as (
        router,
        replicas,
    ):
        assert lost_turns(router, replicas, late) == []
        assert router.metric("foreword:router_placed_prompts_total", source="known") >= (late == (4,)) * CONVERSATIONS


def test_a_short_first_turn_takes_no_tokens_from_the_next(loop: Loop) -> None:
    """A conversation whose first prompt has a few tokens only is placed by its tokens at each turn, as all others are."""
    with routed(loop, 2, "router.tokenize_timeout=60", "router.tokenize_patience=60") as (router, _):
        messages = [{"role": "user", "content": "hi"}]
        for turn in range(1, 4):
            prompt, _ = ask(router, messages)
            assert turn > 1 or prompt < 16
            assert router.metric("foreword:router_placed_prompts_total", source="replica") == turn
            messages += [{"role": "assistant", "content": "ok"}, {"role": "user", "content": "please go on " * 100}]


def test_prompts_that_are_never_tokenized_find_replicas_that_send_events(loop: Loop) -> None:
    """Conversations no prompt of which is tokenized in time, such as long ones at busy servers, find all of the turn before at
    replicas that tell their blocks by events, and its price counts that: no event names a block of text."""
    with routed(loop, 4, "router.tokenize_timeout=0.05", events=" events=tcp://127.0.0.1:1") as (router, replicas):
        assert lost_turns(router, replicas, range(1, TURNS + 1)) == []
        assert router.metric("foreword:router_placed_prompts_total", source="text") == TURNS * CONVERSATIONS
        decided = http_client.get(f"{router.url}/v1/router/decisions?last={TURNS * CONVERSATIONS}").json()["data"]
        found = sum(one["expected_cached_tokens"] > one["prompt_tokens"] // 2 for one in decided)
        assert found == (TURNS - 1) * CONVERSATIONS


class EventReplica(CountingReplica):
    """Publishes its block size, without which a router reads no KV events."""

    async def _metrics(self, request: web.Request) -> web.Response:
        config = f'vllm:cache_config_info{{engine="0",block_size="{BLOCK}",num_gpu_blocks="1000"}} 1.0\n'
        return web.Response(text=metrics_of(self.weights) + config)


def test_a_replica_that_clears_its_blocks_has_no_text_either(loop: Loop) -> None:
    """After `AllBlocksCleared`, such as by vLLM's `/reset_prefix_cache`, a conversation that was never tokenized is expected to
    have nothing at the replica to which it was sent, where it had the turn before."""
    with zmq.Context() as context, context.socket(zmq.PUB) as source:
        source.linger = 0
        port = source.bind_to_random_port("tcp://127.0.0.1")
        with routed(
            loop, 2, "router.tokenize_timeout=0.05", events=f" events=tcp://127.0.0.1:{port}", kind=EventReplica
        ) as (router, replicas):
            for one in replicas:
                one.speaks(False)
            messages = [{"role": "system", "content": "rules " * 2000}]

            def expected() -> int:
                """Cached tokens that the next turn is expected to have."""
                messages.append({"role": "user", "content": "go on"})
                ask(router, messages)
                messages.append({"role": "assistant", "content": "ok"})
                [decision] = http_client.get(f"{router.url}/v1/router/decisions?last=1").json()["data"]
                return int(decision["expected_cached_tokens"])

            assert expected() == 0 and expected() > 1000
            numbers = itertools.count()

            def cleared() -> bool:
                payload = encode_batch(0.0, [["AllBlocksCleared"]])
                source.send_multipart([b"", encode_number(next(numbers)), payload])
                return router.metric("foreword:router_kv_events_total", kind="clears") >= 2

            until(cleared)
            assert expected() == 0


def test_a_second_replica_is_asked_beside_a_silent_one(loop: Loop) -> None:
    """While one replica does not tokenize, another one is asked, and its answer counts at once: the first one's time limit is a
    minute."""
    with routed(loop, 2, "router.tokenize_patience=60") as (router, replicas):
        first = min(replicas, key=lambda one: one.url)
        first.speaks(False)
        ask(router, [{"role": "user", "content": "once " * 200}])
        assert [one.asked for one in replicas] == [1, 1]
        assert router.metric("foreword:router_placed_prompts_total", source="replica") == 1


def test_late_answers_are_used_for_the_next_turn(loop: Loop) -> None:
    """Tokens that come when their request has been placed are known for the next turn, which is not tokenized either."""
    with routed(loop, 2) as (router, replicas):
        messages = [{"role": "system", "content": "rules " * 100}, {"role": "user", "content": "one"}]
        for one in replicas:
            one.speaks(False)
        ask(router, messages)
        assert router.metric("foreword:router_placed_prompts_total", source="text") == 1
        for speaks in (True, False):
            for one in replicas:
                one.speaks(speaks)
        messages += [{"role": "assistant", "content": "ok"}, {"role": "user", "content": "two"}]

        def known() -> bool:
            ask(router, messages)
            return router.metric("foreword:router_placed_prompts_total", source="known") > 0

        until(known)


def test_prompts_with_the_same_bytes_have_one_price(loop: Loop) -> None:
    """The decision for a turn whose tokens are not known counts what is cached and what is new, and says so."""
    with routed(loop, 2) as (router, replicas):
        messages = [{"role": "system", "content": "rules " * 2000}, {"role": "user", "content": "one"}]
        before, _ = ask(router, messages)
        for one in replicas:
            one.speaks(False)
        messages += [{"role": "assistant", "content": "ok"}, {"role": "user", "content": "two " * 100}]
        prompt, _ = ask(router, messages)
        [decision] = http_client.get(f"{router.url}/v1/router/decisions?last=1").json()["data"]
        assert decision["tokens_from"] == "known" and f"behind {before} known tokens" in decision["in_words"]
        assert decision["expected_cached_tokens"] == before // BLOCK * BLOCK
        assert abs(decision["prompt_tokens"] - prompt) < 0.1 * prompt


def test_tenants_do_not_find_each_others_prompts(loop: Loop) -> None:
    """A prompt whose bytes another tenant has sent is compared as text: nothing is known of it."""
    keys = (
        "--api-keys",
        "a=alice",
        "--api-keys",
        "b=bob",
        "--tenant-secret",
        "a secret of the tests",
        "--replica-key",
        "r",
    )
    with routed(loop, 2, *keys) as (router, replicas):

        def ask_as(key: str, question: str) -> None:
            messages = [{"role": "system", "content": "the same " * 200}, {"role": "user", "content": question}]
            body, headers = {"model": "m", "messages": messages}, {"authorization": f"Bearer {key}"}
            http_client.request("POST", f"{router.url}/v1/chat/completions", json=body, headers=headers)

        ask_as("alice", "one")
        before = router.metric("foreword:router_placed_prompts_total", source="text")  # on a busy machine hers is, too
        for one in replicas:
            one.speaks(False)
        ask_as("bob", "two")
        assert router.metric("foreword:router_placed_prompts_total", source="known") == 0
        assert router.metric("foreword:router_placed_prompts_total", source="text") == before + 1


def test_an_erasure_forgets_known_prompts(loop: Loop) -> None:
    """After an erasure nothing is known of a prompt that the tenant has sent before: its next turn is compared as text."""
    with routed(loop, 2) as (router, replicas):
        messages = [{"role": "system", "content": "rules " * 2000}, {"role": "user", "content": "one"}]
        ask(router, messages)
        http_client.request("DELETE", f"{router.url}/v1/cache")
        for one in replicas:
            one.speaks(False)
        ask(router, [*messages, {"role": "assistant", "content": "ok"}, {"role": "user", "content": "two"}])
        [decision] = http_client.get(f"{router.url}/v1/router/decisions?last=1").json()["data"]
        assert decision["tokens_from"] == "text"


class PoolOfSilence:
    """A pool with a replica that refuses connections. `asked`: new tokens and those before them of each prompt that asks how
    long to wait; it may not wait at all."""

    kind: Any = "vllm"
    model = "m"

    def __init__(self) -> None:
        self.known = KnownPrompts()
        self.asked: list[tuple[int, int]] = []

    def worth_waiting(self, tokens: int, before: int) -> float:
        self.asked.append((tokens, before))
        return 0.0

    def tokenizing_replicas(self) -> Sequence[Any]:
        class Upstream:
            url, model = "http://127.0.0.1:1", "m"

            class info:
                tokenize_path = "/tokenize"

        return [Upstream]


def chat(*texts: str) -> GenerateRequest:
    """A chat of a system prompt and these texts, by turns."""
    said = [{"role": ("assistant", "user")[at % 2], "content": text} for at, text in enumerate(texts, 1)]
    body = {"model": "m", "messages": [{"role": "system", "content": "rules " * 500}, *said]}
    return parse_request("chat", json.dumps(body).encode(), Limits())


def tokenized(pool: PoolOfSilence, *requests: GenerateRequest) -> list[TokenizedPrompt]:
    """The prompts of these requests as far as they are known."""

    async def tokenize() -> list[TokenizedPrompt]:
        async with aiohttp.ClientSession() as session:
            tokenizer = PromptTokenizer(session, {}, 60.0)
            try:
                return [await tokenizer.tokenize(one, pool) for one in requests]
            finally:
                tokenizer.close()

    return asyncio.run(tokenize())


def test_the_next_turn_waits_for_no_hit() -> None:
    """A turn behind a prompt that is known as a whole waits for its tokens as if it added nothing, however long it is: its
    addition was computed nowhere. A prompt that only shares a beginning waits as long as its rest takes to compute."""
    first, tokens, pool = chat("one"), array("I", range(1000)), PoolOfSilence()
    chain = prompt_chain(first, "m", Salt())
    assert chain is not None
    pool.known.learn(chain, tokens)

    turn, other = tokenized(pool, chat("one", "ok", "two " * 5000), chat("another"))
    assert (turn.source, len(turn.tokens)) == ("known", 1000) and turn.count > 5000
    assert other.source == "known" and 0 < len(other.tokens) < 1000
    (added, before), (rest, shared) = pool.asked
    assert (added, before) == (0, 1000) and rest > 0 and shared == len(other.tokens)


def test_a_turn_waits_if_only_the_length_of_the_one_before_is_known() -> None:
    """A turn behind a prompt of which a replica told the length, and which was never tokenized, waits as long as that takes to
    compute, unless it is known where it was sent: any replica may have it."""
    chain, pool = prompt_chain(chat("one"), "m", Salt()), PoolOfSilence()
    assert chain is not None
    pool.known.placed(chain, 900, "r", clock(), by_keys=False)
    pool.known.computed(chain, 1000, named=False)
    turn = chat("one", "ok", "two " * 5000)
    [there] = tokenized(pool, turn)
    pool.known.interrupted("r", True)
    [gone] = tokenized(pool, turn)
    assert there.held and not gone.held
    assert pool.asked == [(0, 0), (1000, 0)]
