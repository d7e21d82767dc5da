"""Live migration between engines: no token is missing or doubled, and a request whose migration fails continues where
it was."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from example_counts import represented
from pair import Answer, Node, ask, node, request, stepwise, until
from tiny import prompt

from foreword.blocks.retention import Retention
from foreword.blocks.salt import NO_SALT, Salt
from foreword.disaggregation.kv_transfer import KVRange, KVSend
from foreword.disaggregation.live_migration import GROWTH
from foreword.engine.request import Delta, SamplingParams
from foreword.entrypoints.async_engine import AsyncEngine
from foreword.errors import NotFound
from foreword.tokens.structured_output import StructuredOutput
from foreword.transfer.connection import Connection
from foreword.transfer.errors import CannotMigrate, TransferError
from foreword.transfer.transfers import KVSource

GREEDY = SamplingParams(max_tokens=120, temperature=0.0, logprobs=2, ignore_eos=True)
PARAMS = {
    "greedy": GREEDY,
    "seeded": SamplingParams(max_tokens=120, seed=11, logprobs=1, ignore_eos=True),
    "structured": SamplingParams(max_tokens=120, seed=5, structured=StructuredOutput("regex", "([a-f]{3},)+end")),
    "penalties": SamplingParams(max_tokens=120, seed=4, frequency_penalty=0.7, repetition_penalty=1.2, min_tokens=70),
}
BYTES_PER_TOKEN = 3 * 2 * 2 * 16 * 4  # layers, K and V, heads, dimensions, float32


@pytest.fixture(scope="module")
def nodes(folder: Callable[[str], Path]) -> Iterator[tuple[Node, Node]]:
    here, there = node(folder("llama"), "both"), node(folder("llama"), "both")
    yield here, there
    there.engine.close()
    here.engine.close()


async def alone(nodes: Sequence[Node], tokens: list[int], params: SamplingParams) -> Answer:
    """The output without a migration; all engines have forgotten everything afterwards."""
    for each in nodes:
        await each.fresh()
    answer = await ask(nodes[0].engine, tokens, params)
    for each in nodes:
        await each.fresh()
    return answer


class Follower:
    """A client that follows its request from engine to engine."""

    def __init__(
        self,
        where: Node,
        tokens: list[int],
        params: SamplingParams,
        salt: Salt = NO_SALT,
        retain: tuple[Retention, ...] = (),
    ) -> None:
        self.asked = dataclasses.replace(request(tokens, params, salt=salt), retain=retain)
        self.name = self.asked.id
        self.where = where
        self.answer = Answer()
        self.stream: AsyncGenerator[Delta, None] = where.engine.generate(self.asked)
        self._turn_seconds, self._longer = 0.005, 1.0

    @property
    def engine(self) -> AsyncEngine:
        return self.where.engine

    async def read(self, tokens: int) -> bool:
        """Read until there are so many tokens; False at the end of the stream or at a migration."""
        while len(self.answer.tokens) < tokens:
            delta = await self._next()
            if delta is None:
                return False
            self.answer.add(delta)
            if delta.moved is not None:
                return False
        return True

    async def _next(self) -> Delta | None:
        turning = asyncio.create_task(self._take_turns())
        try:
            return await anext(self.stream, None)
        finally:
            turning.cancel()

    async def _take_turns(self) -> None:
        """Let a stepwise engine make its steps: ever later ones during a migration, so that on a machine of any speed a
        destination accepts within a few tokens. (A migration needs steps too: refusals and small blocks are seen in one.)"""
        while True:
            self.where.valve.turn()
            await asyncio.sleep(self._turn_seconds)
            self._turn_seconds *= self._longer

    async def move(self, to: Node) -> int:
        """Migrate it, and follow it. Returns how many tokens came in the meantime."""
        before = len(self.answer.tokens)
        self._longer = 1.2
        moving = asyncio.create_task(self.engine.migrate(self.name, to.address))
        assert not await self.read(10**6), "it ended before it moved"
        moved = await moving
        self._turn_seconds, self._longer = 0.005, 1.0
        assert self.answer.last is not None and self.answer.last.moved is not None
        assert self.answer.last.moved.tokens == moved.tokens == len(self.answer.tokens)
        self.name, self.where = moved.request_id, to
        await self.stream.aclose()
        self.stream = self.engine.follow(self.name)
        return moved.tokens - before

    async def end(self) -> Answer:
        await self.read(10**6)
        await self.stream.aclose()
        return self.answer


@contextmanager
def at_a_walk(*nodes: Node, step: float = 0.05) -> Iterator[None]:
    """Slow down every step of these engines, so that a hundred tokens outlast the test's actions."""
    for each in nodes:
        each.valve.pace = step
    try:
        yield
    finally:
        for each in nodes:
            each.valve.pace = 0.0


FAST = {("seeded", 37), ("structured", 37)}


@pytest.mark.parametrize(
    ("name", "length"),
    [
        pytest.param(name, length, marks=[] if (name, length) in FAST else pytest.mark.extended)
        for name in PARAMS
        for length in (3, 37, 96)
    ],
)
def test_back_and_forth(nodes: tuple[Node, Node], name: str, length: int) -> None:
    """A request that migrates four times has the same tokens and log-probabilities as one that stays."""

    async def main() -> None:
        tokens, params = prompt(length, length), PARAMS[name]
        expected = await alone(nodes, tokens, params)
        follower = Follower(nodes[0], tokens, params)
        grown = []
        with stepwise(*nodes):
            for hop in range(4):
                assert await follower.read(5 + 10 * hop)
                grown.append(await follower.move(nodes[(hop + 1) % 2]))
        found = await follower.end()
        assert found.same(expected)
        assert found.last is not None and found.last.prompt_tokens == length
        assert found.last.cache_report is not None and found.last.cache_report.computed_tokens == length
        # Tokens that a request generates beyond GROWTH before its offer is accepted are computed again.
        assert nodes[1].said.prefill_tokens == 0 or max(grown) >= GROWTH
        for each in nodes:
            await each.whole()
        outcomes = {(one.kind, one.side, one.outcome) for each in nodes for one in each.said.transfers}
        assert outcomes == {("move", "source", "taken"), ("move", "destination", "taken")}

    asyncio.run(main())


def test_only_missing_blocks_travel(nodes: tuple[Node, Node]) -> None:
    """A request that comes back is sent without the blocks that its former instance still caches."""
    here, there = nodes

    async def main() -> None:
        await alone(nodes, prompt(8, 1), GREEDY)
        follower = Follower(here, prompt(100, 2), GREEDY)
        with stepwise(*nodes):
            await follower.read(5)
            await follower.move(there)
            before = here.received
            await follower.read(30)
            await follower.move(here)
        kv = 100 + len(follower.answer.tokens) - 1
        assert here.received - before <= (kv - 100) * BYTES_PER_TOKEN
        await follower.end()
        for each in nodes:
            await each.whole()

    asyncio.run(main())


@pytest.mark.parametrize("early", represented([False, True], True))
def test_retentions_migrate(nodes: tuple[Node, Node], early: bool) -> None:
    """Retentions of a request are kept by the engine to which it migrates, for the same tenant, also if its prompt was not
    computed yet. The answers come with its last token."""
    here, there = nodes
    wishes = (Retention(40, 600.0), Retention(76, 300.0, 7))

    async def main() -> None:
        await alone(nodes, prompt(8, 1), GREEDY)
        follower = Follower(here, prompt(80, 5), GREEDY, Salt(b"tenant", b"session"), wishes)
        if early:
            here.valve.shut()
            moving = asyncio.create_task(follower.move(there))
            # It may have left again before it is seen here.
            await until(lambda: here.engine._core.has_work() or moving.done())
            with at_a_walk(here):
                here.valve.open()
                await moving
        else:
            with stepwise(*nodes):
                await follower.read(3)
                await follower.move(there)
        found = await follower.end()
        assert found.last is not None
        assert [(one.status, one.tokens, one.ttl) for one in found.last.retained] == [
            ("accepted", 40, 600.0),
            ("accepted", 76, 300.0),
        ]
        kept = there.engine.retentions(b"tenant")
        assert {(one.tokens, one.ttl, one.priority) for one in kept} == {(40, 600.0, 0), (76, 300.0, 7)}
        for each in nodes:
            each.engine.release(salt=Salt(b"tenant", b"session"))
            await each.whole()

    asyncio.run(main())


def test_a_forgotten_request_leaves_nothing_where_it_migrates(nodes: tuple[Node, Node]) -> None:
    """A request whose tenant was forgotten on both engines migrates and is completed, and the destination keeps nothing."""
    here, there = nodes

    async def main() -> None:
        salt = Salt(b"tenant")
        await alone(nodes, prompt(8, 1), GREEDY)
        follower = Follower(here, prompt(80, 6), GREEDY, salt, (Retention(76, 300.0),))
        with stepwise(*nodes):
            await follower.read(3)
            for each in nodes:
                forgetting = asyncio.create_task(each.engine.forget(salt))
                while not forgetting.done():
                    each.valve.turn()
                    await asyncio.sleep(0.002)
            await follower.move(there)
        found = await follower.end()
        assert len(found.tokens) == 120
        for each in nodes:
            await each.whole()
            assert each.engine.retentions(b"tenant") == []
            again = await ask(each.engine, prompt(80, 6), GREEDY, salt=salt)
            assert again.tokens == found.tokens
            assert again.last is not None and again.last.cached_tokens == 0
            await each.fresh()

    asyncio.run(main())


@pytest.mark.parametrize("phase", represented(["waiting", "prefilling"], "prefilling"))
def test_before_the_first_token(nodes: tuple[Node, Node], phase: str) -> None:
    """A waiting request migrates without KV; one whose prompt is half computed migrates with the KV so far."""
    here, there = nodes

    async def main() -> None:
        tokens = prompt(120, 3)
        expected = await alone(nodes, tokens, GREEDY)
        here.valve.shut()
        blocker = asyncio.create_task(ask(here.engine, prompt(64, 4), GREEDY))
        await until(lambda: here.valve.waiting > 0)
        follower = Follower(here, tokens, GREEDY)
        reading = asyncio.create_task(follower.move(there))
        scheduler = here.engine._core.scheduler
        if phase == "prefilling":
            here.valve.let(4)
            await until(lambda: here.valve.waiting > 0 and any(32 <= s.computed < 120 for s in scheduler.running))
        with_kv = phase == "prefilling"
        with at_a_walk(here):
            here.valve.open()
            await reading
        found = await follower.end()
        assert found.same(expected)
        if with_kv:
            assert there.received > 0
        await blocker
        for each in nodes:
            await each.whole()

    asyncio.run(main())


def test_stop_string_across_a_migration(nodes: tuple[Node, Node]) -> None:
    """A stop string that starts before the migration and is completed after it ends the text at the same place."""

    async def main() -> None:
        tokens, sampling = prompt(20, 5), PARAMS["seeded"]
        text = (await alone(nodes, tokens, sampling)).text
        # It starts before the migration: the text that may be part of it is held back.
        params = dataclasses.replace(sampling, stop=(text[2 : len(text) // 2],))
        expected = await alone(nodes, tokens, params)
        assert expected.last is not None and expected.last.finish_reason == "stop"
        follower = Follower(nodes[0], tokens, params)
        with stepwise(*nodes):
            await follower.read(3)
            await follower.move(nodes[1])
        assert (await follower.end()).same(expected)

    asyncio.run(main())


@pytest.mark.slow
def test_refused(folder: Callable[[str], Path], nodes: tuple[Node, Node]) -> None:
    """A destination that only computes prompts, is full, allows only shorter texts, has other blocks, or is not there
    refuses with a reason, and the request continues at the source."""
    here = nodes[0]
    others = {
        "role": node(folder("llama"), "prefill"),
        "full": node(folder("llama"), "both", max_num_seqs=1),
        "request": node(folder("llama"), "both", max_model_len=100),
        "layout": node(folder("llama"), "both", block_size=8),
    }

    async def main() -> None:
        tokens = prompt(60, 6)
        expected = await alone(nodes, tokens, GREEDY)
        others["full"].valve.pace = 0.1
        busy = others["full"].engine.generate(request(prompt(5, 7), dataclasses.replace(GREEDY, max_tokens=400)))
        await anext(busy)
        for reason, other in others.items():
            await here.fresh()
            follower = Follower(here, tokens, GREEDY)
            with at_a_walk(here):
                await follower.read(5)
                with pytest.raises(TransferError) as caught:
                    await here.engine.migrate(follower.name, other.address)
            assert caught.value.reason == reason
            assert (await follower.end()).same(expected)
        follower = Follower(here, tokens, GREEDY)
        with at_a_walk(here):
            await follower.read(5)
            with pytest.raises(TransferError):
                await here.engine.migrate(follower.name, "127.0.0.1:1")
        assert (await follower.end()).same(expected)
        await busy.aclose()
        await here.whole()
        for other in others.values():
            await other.whole()

    try:
        asyncio.run(main())
    finally:
        for other in others.values():
            other.engine.close()


@pytest.mark.slow
def test_target_without_memory(folder: Callable[[str], Path], nodes: tuple[Node, Node]) -> None:
    """A destination without free blocks refuses a request, which continues at the source; the destination's own
    requests continue; and once it has room the request can migrate."""
    here = nodes[0]
    small = node(folder("llama"), "both", kv_memory="256 tokens")

    async def main() -> None:
        tokens, long = prompt(60, 14), dataclasses.replace(GREEDY, max_tokens=190)
        expected = await alone(nodes, tokens, long)
        small.valve.pace = here.valve.pace = 0.1
        other = request(prompt(150, 15), dataclasses.replace(GREEDY, max_tokens=100))
        busy = small.engine.generate(other)
        await anext(busy)
        follower = Follower(here, tokens, long)
        await follower.read(5)
        with pytest.raises(CannotMigrate) as caught:
            await here.engine.migrate(follower.name, small.address)
        assert caught.value.reason == "full"
        assert (await anext(busy)).tokens
        await busy.aclose()
        await small.whole()
        await follower.move(small)
        small.valve.pace = here.valve.pace = 0.0
        assert (await follower.end()).same(expected)
        await here.whole()
        await small.whole()

    try:
        asyncio.run(main())
    finally:
        small.engine.close()


def test_what_cannot_move(nodes: tuple[Node, Node]) -> None:
    """An unknown request, one with several sequences, and one that is migrating already are refused with a message."""
    here, there = nodes

    async def main() -> None:
        await alone(nodes, prompt(5, 1), GREEDY)
        with pytest.raises(CannotMigrate, match="ended"):
            await here.engine.migrate("unknown", there.address)
        several = request(prompt(9, 8), dataclasses.replace(GREEDY, n=2))
        stream = here.engine.generate(several)
        with at_a_walk(here):
            await anext(stream)
            with pytest.raises(CannotMigrate, match="more than one"):
                await here.engine.migrate(several.id, there.address)
        await stream.aclose()
        with pytest.raises(NotFound):
            await anext(here.engine.follow("unknown"))
        await here.whole()

    asyncio.run(main())


def test_a_request_that_ends_first(nodes: tuple[Node, Node]) -> None:
    """A request that ends before the destination has taken it cannot migrate, and nothing is left of it there."""
    here, there = nodes

    async def main() -> None:
        there.valve.shut()
        busy = asyncio.create_task(ask(there.engine, prompt(5, 2), GREEDY))
        await until(lambda: there.valve.waiting > 0)
        follower = Follower(here, prompt(60, 3), GREEDY)
        with at_a_walk(here):
            await follower.read(5)
            moving = asyncio.create_task(here.engine.migrate(follower.name, there.address))
            await asyncio.sleep(0)
            await follower.stream.aclose()
        there.valve.open()
        with pytest.raises(CannotMigrate, match="ended"):
            await moving
        await busy
        for each in nodes:
            await each.whole()

    asyncio.run(main())


@pytest.mark.extended
def test_target_dies(folder: Callable[[str], Path], nodes: tuple[Node, Node]) -> None:
    """If the destination dies while KV is sent, the request continues at the source."""
    here = nodes[0]
    doomed = node(folder("llama"), "both")

    async def main() -> None:
        tokens = prompt(100, 9)
        expected = await alone(nodes, tokens, GREEDY)
        follower = Follower(here, tokens, GREEDY)
        here.valve.pace = 0.05
        await follower.read(5)
        # The destination accepts and then does nothing more: its engine stands still in a step.
        other = asyncio.create_task(ask(doomed.engine, prompt(5, 10), GREEDY))
        instance = doomed.engine.instance
        assert instance is not None
        take = instance.migrations.take
        instance.migrations.take = lambda *_: instance.endpoint.close()  # type: ignore[method-assign]
        with pytest.raises(TransferError):
            await here.engine.migrate(follower.name, doomed.address)
        instance.migrations.take = take  # type: ignore[method-assign]
        here.valve.pace = 0.0
        assert (await follower.end()).same(expected)
        await other
        await here.whole()

    try:
        asyncio.run(main())
    finally:
        doomed.engine.close()


@pytest.mark.extended
def test_draining_target(nodes: tuple[Node, Node]) -> None:
    """A destination that starts to drain during a migration does not take the request, which continues at the source."""
    here, there = nodes
    instance = there.engine.instance
    assert instance is not None
    take = instance.migrations.take

    def too_late(*arguments: Any) -> None:
        instance.draining = True
        take(*arguments)

    async def main() -> None:
        tokens = prompt(100, 9)
        expected = await alone(nodes, tokens, GREEDY)
        follower = Follower(here, tokens, GREEDY)
        here.valve.pace = 0.05
        await follower.read(5)
        instance.migrations.take = too_late  # type: ignore[method-assign]
        with pytest.raises(CannotMigrate) as caught:
            await here.engine.migrate(follower.name, there.address)
        assert caught.value.reason == "draining"
        here.valve.pace = 0.0
        assert (await follower.end()).same(expected)
        assert await there.engine.unclaimed_requests() == []
        for each in nodes:
            await each.whole()

    try:
        asyncio.run(main())
    finally:
        instance.migrations.take = take  # type: ignore[method-assign]
        instance.draining = False


def test_client_leaves(nodes: tuple[Node, Node]) -> None:
    """A client that leaves during or after the migration frees the blocks on both sides."""
    here, there = nodes

    async def main() -> None:
        await alone(nodes, prompt(5, 1), GREEDY)
        follower = Follower(here, prompt(100, 11), GREEDY)
        with at_a_walk(here):
            await follower.read(5)
            moving = asyncio.create_task(here.engine.migrate(follower.name, there.address))
            await asyncio.sleep(0)
            await follower.stream.aclose()
            with pytest.raises(TransferError):
                await moving
        for each in nodes:
            await each.whole()
        follower = Follower(here, prompt(100, 12), dataclasses.replace(GREEDY, max_tokens=300))
        with at_a_walk(*nodes):
            await follower.read(5)
            await follower.move(there)
            await follower.read(len(follower.answer.tokens) + 3)
            await follower.stream.aclose()
        for each in nodes:
            await each.whole()

    asyncio.run(main())


@pytest.mark.extended
def test_unclaimed_request_expires(nodes: tuple[Node, Node], monkeypatch: pytest.MonkeyPatch) -> None:
    """A migrated request that is not claimed in time is ended."""
    here, there = nodes
    monkeypatch.setattr("foreword.disaggregation.unclaimed.CLAIM_WITHIN", 0.1)

    async def main() -> None:
        await alone(nodes, prompt(5, 1), GREEDY)
        follower = Follower(here, prompt(50, 13), dataclasses.replace(GREEDY, max_tokens=400))
        with at_a_walk(here):
            await follower.read(5)
            await follower.move(there)
        await until(lambda: there.engine.unclaimed.find(follower.name) is None)
        for each in nodes:
            await each.whole()
        with pytest.raises(NotFound):
            await anext(follower.stream)

    asyncio.run(main())


@pytest.mark.slow
def test_many_migrate_at_once(nodes: tuple[Node, Node]) -> None:
    """Four requests migrate back and forth while others decode; their outputs are those without a migration."""

    async def main() -> None:
        texts = [prompt(10 + 3 * i, 700 + i) for i in range(4)]
        params = dataclasses.replace(PARAMS["seeded"], max_tokens=200)
        expected = [await alone(nodes, text, params) for text in texts]

        async def travel(start: int, text: list[int]) -> Follower:
            follower = Follower(nodes[start % 2], text, params)
            for hop in (1, 2, 3):
                await follower.read(12 * hop + start)
                await follower.move(nodes[(start + hop) % 2])
            return follower

        with at_a_walk(*nodes):
            followers = await asyncio.gather(*(travel(i, text) for i, text in enumerate(texts)))
        found = await asyncio.gather(*(follower.end() for follower in followers))
        assert all(one.same(other) for one, other in zip(found, expected, strict=True))
        for each in nodes:
            await each.whole()

    asyncio.run(main())


@pytest.mark.parametrize("where", represented(["offer", "later block"], "offer"))
def test_keys_that_are_not_those_of_the_tokens(
    nodes: tuple[Node, Node], where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A source that names a block otherwise than its tokens do cannot publish KV under that name: the destination refuses
    the request and counts it, and the request continues at the source."""
    here, there = nodes

    def wrong_push(self: Connection, request: bytes, keys: Sequence[bytes], tokens: int, **rest: Any) -> KVSource:
        named = [*keys[:-1], bytes(32)] if where == "offer" else keys[:10]
        return push(self, request, named, tokens, **rest)

    def wrong_reserve(self: KVSend, tokens: int) -> KVRange | None:
        kv = reserve(self, tokens)
        if kv is None or where == "offer":
            return kv
        return dataclasses.replace(kv, keys=[bytes(32) if kv.first + i > 10 else k for i, k in enumerate(kv.keys)])

    push, reserve = Connection.push, KVSend.reserve
    monkeypatch.setattr(Connection, "push", wrong_push)
    monkeypatch.setattr(KVSend, "reserve", wrong_reserve)

    async def main() -> None:
        tokens = prompt(76, 16)
        expected = await alone(nodes, tokens, GREEDY)
        follower = Follower(here, tokens, GREEDY)
        with stepwise(*nodes):
            await follower.read(5)
            moving = asyncio.create_task(here.engine.migrate(follower.name, there.address))
            while not moving.done() and await follower.read(len(follower.answer.tokens) + 1):
                pass
            with pytest.raises(TransferError):
                await moving
        assert (await follower.end()).same(expected)
        await until(lambda: [one.outcome for one in there.said.transfers] == ["content"])
        assert there.engine.status().free_blocks == there.engine.info.num_blocks
        for each in nodes:
            await each.whole()

    asyncio.run(main())
