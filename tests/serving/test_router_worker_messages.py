"""Messages about requests at other workers of a router: handled together, and in time for the requests that they decide."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from foreword.blocks.salt import Salt
from foreword.configuration import Config
from foreword.process_config import RouterConfig
from foreword.router.prompts import TokenizedPrompt
from foreword.router.replica_pool import PlacementRequest
from foreword.router.replicas import ReplicaBreaker, ReplicaInfo, ReplicaSpec, Upstream
from foreword.router.suspicious import Ask, AskDigests
from foreword.router_extras.workers import bus as bus_module
from foreword.router_extras.workers.bus import First, Message, Told, WorkerBus
from foreword.router_extras.workers.shared_quotas import SharedMemory
from foreword.router_extras.workers.supervisor import Seat
from foreword.router_extras.workers.worker_router import SharedPool, WorkerRouter
from foreword.routing.known_prompts import PromptChain

BLOCK = 16
URLS = ("http://a", "http://b", "http://c")


async def until(done: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not done():
            await asyncio.sleep(0)


class Heard:
    """Two buses in one process. `told`: what the second has handled, in order."""

    def __init__(self, folder: Path) -> None:
        self.told: list[Message] = []
        self.defers = True
        self.gone: list[tuple[int, int]] = []

        async def asked(kind: str, content: Any) -> int:
            return len(self.told)

        def bus(number: int) -> WorkerBus:
            return WorkerBus(
                Seat(number, 2, folder, SharedMemory(), -1),
                lambda _, message: self.told.append(message),
                asked,
                list,
                lambda other: self.gone.append((other, len(self.told))),
                lambda _: None,
                defers=lambda: self.defers,
            )

        self.first, self.second = bus(0), bus(1)

    async def tell(self, *messages: Message, **how: Any) -> None:
        """Tell the second in a frame of their own, and wait until they have arrived."""
        before = len(self.second.deferred), self.second.handled
        for message in messages:
            self.first.tell(message, **how)
        await until(lambda: (len(self.second.deferred), self.second.handled) != before)


@pytest.fixture(autouse=True)
def never(monkeypatch: pytest.MonkeyPatch) -> None:
    """Set the time far off after which messages are handled that wait: a test names what ends their waiting."""
    monkeypatch.setattr(bus_module, "_HANDLE_SECONDS", 3600.0)


def run(folder: Path, work: Callable[[Heard], Awaitable[None]]) -> None:
    async def connected() -> None:
        heard = Heard(folder)
        buses = heard.first, heard.second
        for one in buses:
            await one.start()
        await until(lambda: all(len(one.connected) == len(one.known) == 1 for one in buses))
        heard.second.handled = 0
        try:
            await work(heard)
        finally:
            for one in buses:
                await one.stop()

    asyncio.run(connected())


def firsts(*names: int) -> list[Message]:
    return [First(name, 1.0) for name in names]


def test_messages_that_may_wait_are_handled_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Messages of many turns of the event loop are handled at once, in their order, after a time that begins with the first."""
    monkeypatch.setattr(bus_module, "_HANDLE_SECONDS", 0.0)

    async def work(heard: Heard) -> None:
        loop = asyncio.get_running_loop()
        timers: list[Callable[[], object]] = []

        def later(seconds: float, call: Callable[[], object], *more: Any) -> Mock:
            timers.append(call)
            return Mock()

        monkeypatch.setattr(loop, "call_later", later)
        for name in range(40):
            await heard.tell(*firsts(name), later=True)
        assert not heard.told and len(heard.second.deferred) == 40 and len(timers) == 1
        monkeypatch.undo()
        timers[0]()
        assert heard.told == firsts(*range(40)) and heard.second.handled == 1
        assert not heard.second.deferred

    run(tmp_path, work)


def test_they_are_handled_in_time_for_the_requests_that_they_decide(tmp_path: Path) -> None:
    """A request with a name that a message has is decided after it was handled; one with others does not end the waiting."""

    async def work(heard: Heard) -> None:
        await heard.tell(*firsts(1), later=True, names=[b"end", "session"])
        await heard.tell(*firsts(2), later=True, names=[b"another"])
        heard.second.hear([b"none", "sessions"])
        assert not heard.told
        heard.second.hear([b"none", b"another"])
        assert heard.told == firsts(1, 2)
        await heard.tell(*firsts(3), later=True)
        heard.second.hear([b"end", "session"])  # that is past
        assert heard.told == firsts(1, 2)

    run(tmp_path, work)


@pytest.mark.parametrize("how", ["at once", "a question", "nothing may wait", "too many bytes"])
def test_what_cannot_wait_takes_all_before_it_along(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    """Messages that must be handled at once, a question, a worker here for which requests wait, and too many bytes end the
    waiting of what came before, which is handled first."""
    if how == "too many bytes":
        monkeypatch.setattr(bus_module, "_MOST_DEFERRED", 1000)

    async def work(heard: Heard) -> None:
        await heard.tell(*firsts(1), later=True)
        assert not heard.told
        if how == "a question":
            assert list(await heard.first.ask("how many")) == [1]
            assert heard.told == firsts(1)
            return
        heard.defers = how != "nothing may wait"
        last = Told("news", bytes(1000)) if how == "too many bytes" else First(2, 1.0)
        await heard.tell(*firsts(7), last, later=how != "at once")
        assert heard.told == [*firsts(1, 7), last]

    run(tmp_path, work)


def test_what_a_worker_told_before_it_ended_is_handled_before_its_end(tmp_path: Path) -> None:
    """Messages of a worker that has ended are handled before its requests are: else these would count for ever."""

    async def work(heard: Heard) -> None:
        await heard.tell(*firsts(1), later=True)
        await heard.first.stop()
        await until(lambda: bool(heard.gone))
        assert heard.told == firsts(1) and heard.gone == [(0, 1)]

    run(tmp_path, work)


def test_messages_that_cannot_be_read_end_their_connection_and_harm_no_request(tmp_path: Path) -> None:
    """A request that hears messages which no worker of this version sends is placed all the same, what came with them in other
    frames is handled, and the connection that they came on ends, as after any loss of messages."""

    async def work(heard: Heard) -> None:
        await heard.tell(First("no number", 1.0), later=True, names=[b"end"])  # type: ignore[arg-type]
        await heard.tell(*firsts(2), later=True)
        heard.second.hear([b"end"])
        assert heard.told == firsts(2) and heard.second.failures == 1
        await until(lambda: bool(heard.gone))

    run(tmp_path, work)


# Workers


class Worker:
    """A worker of a router, in this process, with the replicas `URLS`."""

    def __init__(self, number: int, folder: Path, config: RouterConfig) -> None:
        self.router = WorkerRouter(Config(router=config), bytes, Seat(number, 2, folder, SharedMemory(), -1))
        self.bus = self.router.workers.bus
        self.pool = SharedPool(self.router.workers, "m", self.router.config, {})
        self.router.pools["m"] = self.pool
        for url in URLS:
            self.pool.add(
                Upstream(ReplicaSpec(url), "flag", ReplicaBreaker(), ReplicaInfo("vllm", ("m",), block_size=BLOCK))
            )
        self._asks = 0

    async def place(
        self, tokens: Sequence[int], *, session: str | None = None, asked: bytes | None = None, chain: Any = None
    ) -> Any:
        """Place a prompt, and return the attempt."""
        self._asks += 1
        name = f"{self.bus._seat.number}-{self._asks}"
        prompt = TokenizedPrompt(tokens, "tokenizer", chain)
        ask = Ask(self.router.suspects, AskDigests(asked or name.encode(), None), name)
        query = self.pool.query(prompt, "m", Salt(), session, 16)
        attempt = await self.pool.place(PlacementRequest(name, "tenant", query, prompt, (), ask))
        if chain is not None:
            self.pool.known.placed(chain, len(tokens), attempt.upstream.url, 1.0, by_keys=True)
        return attempt


@asynccontextmanager
async def workers(folder: Path, **options: Any) -> AsyncIterator[tuple[Worker, Worker]]:
    first, second = (Worker(number, folder, RouterConfig(**options)) for number in range(2))
    for one in (first, second):
        await one.bus.start()
    await until(lambda: all(len(one.bus.connected) == len(one.bus.known) == 1 for one in (first, second)))
    first.bus.handled = second.bus.handled = 0
    try:
        yield first, second
    finally:
        for one in (first, second):
            await one.bus.stop()


def prompt_of(number: int, length: int = 40 * BLOCK) -> list[int]:
    return [number, *range(1, length)]


@pytest.mark.parametrize("by", ["its prompt", "its session", "its bytes", "what it asks"])
def test_a_worker_knows_what_another_has_just_placed(tmp_path: Path, by: str) -> None:
    """A request that goes on where one of another worker has ended, is of its session, or asks the same is placed by what the
    other has told, however shortly before; a request that has nothing to do with it is placed without that."""

    async def work() -> None:
        async with workers(tmp_path) as (first, second):
            chain = PromptChain(b"tenant", (b"1" * 16,), (100,))
            attempt = await first.place(
                prompt_of(1), session="a/s" if by == "its session" else None, asked=b"same", chain=chain
            )
            where = attempt.upstream
            await until(lambda: len(second.bus.deferred) == 1)
            if by in ("its prompt", "its session"):  # whose answer is not there yet has no next turn
                await first.bus.ask("settle")
                second.bus.handled = 0
                first.pool.first_token(attempt)
                first.pool.finished(attempt, 0, 16, 640)
                await until(lambda: len(second.bus.deferred) == 1)
            await second.place(prompt_of(2), asked=b"other")
            before = second.bus.handled
            if by == "its prompt":
                assert (await second.place([*prompt_of(1), *range(BLOCK)], asked=b"next")).decision.home == where.url
            elif by == "its session":
                assert (await second.place(prompt_of(3), session="a/s", asked=b"next")).decision.home == where.url
            elif by == "its bytes":
                longer = PromptChain(b"tenant", (b"1" * 16, b"2" * 16), (100, 200))
                found = second.pool.known.find(longer, 2.0)
                assert found is not None and found.sent == {where.url: found.length}
            else:
                ask = Ask(second.router.suspects, AskDigests(b"same", None), "again")
                assert not ask.quiet and ask.spare == 1
            assert (before, second.bus.handled) == (0, 1)

    asyncio.run(work())


def test_requests_at_others_are_handled_in_few_passes(tmp_path: Path) -> None:
    """Messages about 60 requests of a worker, of which 50 end, come in as many frames at the other one, which handles them in
    one pass while it decides nothing that they are about, and then counts the same as if it had handled each."""

    async def work() -> None:
        async with workers(tmp_path) as (first, second):
            attempts = []
            for number in range(60):
                attempts.append(await first.place(prompt_of(number)))
                await until(lambda: len(second.bus.deferred) > number)  # noqa: B023
            for attempt in attempts[:50]:
                first.pool.first_token(attempt)
                first.pool.finished(attempt, 0, 16, 640)
            assert second.bus.handled == 0
            await first.bus.ask("settle")
            assert second.bus.handled == 1
            for url in URLS:
                one, other = (worker.pool.upstreams[url] for worker in (first, second))
                assert one.in_flight == other.in_flight > 0
                loads = [worker.pool.fleet.replicas[url].load for worker in (first, second)]
                assert len({(len(load.waiting), len(load.running), load.resident) for load in loads}) == 1

    asyncio.run(work())


@pytest.mark.parametrize("why", ["few requests at a time", "a request waits", "a replica has died"])
def test_what_requests_wait_for_is_handled_at_once(tmp_path: Path, why: str) -> None:
    """Messages do not wait where replicas take few requests, where a request waits for a place, and where requests may be
    refused because replicas died."""

    async def work() -> None:
        async with workers(tmp_path, max_in_flight=4 if why == "few requests at a time" else 512) as (first, second):
            if why == "a replica has died":
                second.router.suspects.accuse(b"poison")
            elif why == "a request waits":
                second.pool.upstreams["http://a"].drained = True
                for url in URLS:
                    second.pool.upstreams[url].pause_until = float("inf")
                waiting = asyncio.ensure_future(second.place(prompt_of(0)))
                await until(lambda: second.pool.waiting == 1)
            await first.place(prompt_of(1))
            await until(lambda: second.bus.handled == 1)
            assert not second.bus.deferred and sum(one.in_flight for one in second.pool.upstreams.values()) == 1
            if why == "a request waits":
                waiting.cancel()

    asyncio.run(work())


def test_the_first_death_ends_the_waiting(tmp_path: Path) -> None:
    """Where a replica has died of a request, the worker knows at once where else the same is asked: attempts that it had not
    handled yet count."""

    async def work() -> None:
        async with workers(tmp_path) as (first, second):
            await first.place(prompt_of(1), asked=b"same")
            await until(lambda: bool(second.bus.deferred))
            assert second.bus.handled == 0
            second.router.suspects.accuse(b"same")
            assert not second.bus.deferred
            assert Ask(second.router.suspects, AskDigests(b"same", None), "again").spare == 1

    asyncio.run(work())
