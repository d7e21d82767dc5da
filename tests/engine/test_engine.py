"""The engine for servers: requests side by side, cancelled, drained, closed and broken."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from tiny import Reference, prompt

from foreword.engine.request import Completion, Delta, Request, SamplingParams
from foreword.engine_config import EngineConfig, PrefixConfig
from foreword.entrypoints.async_engine import AsyncEngine
from foreword.errors import BadRequest
from foreword.request_errors import EngineFailed, PromptTooLong, ShuttingDown

Find = Callable[[str], Reference]
_ids = itertools.count()
FOREVER = SamplingParams(temperature=0.0, max_tokens=400, ignore_eos=True)


def request(tokens: Sequence[int], params: SamplingParams | int = FOREVER, **options: Any) -> Request:
    if isinstance(params, int):
        params = SamplingParams(temperature=0.0, max_tokens=params, ignore_eos=True, logprobs=0)
    return Request(options.pop("id", f"t{next(_ids)}"), tuple(tokens), params, **options)


@contextlib.contextmanager
def started(path: Path, **options: Any) -> Iterator[AsyncEngine]:
    settings: dict[str, Any] = {"dtype": "float32", "kv_memory": "2048 tokens", "block_size": 4, "threads": 1}
    engine = AsyncEngine.from_config(
        EngineConfig(model=str(path), **(settings | options)), prefixes=PrefixConfig("50%")
    )
    try:
        yield engine
    finally:
        engine.close()


@pytest.fixture
def engine(llama: Path) -> Iterator[AsyncEngine]:
    with started(llama) as made:
        yield made


async def collect(deltas: AsyncIterator[Delta]) -> Completion:
    """Puts the pieces of one sequence together."""
    found = [delta async for delta in deltas]
    last = found[-1]
    assert last.finish_reason is not None
    return Completion(
        last.index,
        tuple(token for delta in found for token in delta.tokens),
        "".join(delta.text for delta in found),
        tuple(one for delta in found for one in delta.logprobs),
        last.finish_reason,
    )


async def idle(engine: AsyncEngine) -> None:
    """Nothing runs, nothing waits, and all blocks are free."""
    await engine.check_integrity()
    status = engine.status()
    assert (status.running, status.waiting, status.free_blocks) == (0, 0, engine.info.num_blocks)
    assert status.kv_usage == 0.0


async def steps(engine: AsyncEngine, count: int) -> None:
    """Wait until the engine has made so many more steps."""
    until = engine.status().steps + count
    while engine.status().steps < until:
        await asyncio.sleep(0.001)


@contextlib.contextmanager
def slow(engine: AsyncEngine) -> Iterator[None]:
    """Every step takes a while, so what should be running still runs when the test looks."""
    runner = engine._core._runner
    run = runner.run

    def slowly(*args: Any) -> Any:
        time.sleep(0.05)
        return run(*args)

    runner.run = slowly  # type: ignore[method-assign]
    try:
        yield
    finally:
        runner.run = run  # type: ignore[method-assign]


def test_concurrent_requests_are_as_alone(engine: AsyncEngine, reference: Find) -> None:
    """Requests that come at different moments each get what they would get alone."""
    prompts = [prompt(length, length) for length in (3, 9, 17, 30, 44, 17)]

    async def late(number: int, tokens: list[int]) -> Completion:
        await steps(engine, 3 * number if number else 0)
        return await collect(engine.generate(request(tokens, 20)))

    async def main() -> list[Completion]:
        background = asyncio.create_task(collect(engine.generate(request(prompt(5, 99)))))
        found = await asyncio.gather(*(late(i, tokens) for i, tokens in enumerate(prompts)))
        background.cancel()
        return found

    for tokens, completion in zip(prompts, asyncio.run(main()), strict=True):
        reference("llama").check(tokens, completion, 20)


def test_n_sequences_stream_together(engine: AsyncEngine) -> None:
    """The deltas of `n` sequences come as they are produced, and each sequence has one end."""

    async def main() -> None:
        params = SamplingParams(temperature=1.5, seed=1, max_tokens=6, n=3, ignore_eos=True)
        found = [delta async for delta in engine.generate(request(prompt(9, 1), params))]
        assert sorted(delta.index for delta in found if delta.finish_reason) == [0, 1, 2]
        assert [sum(len(d.tokens) for d in found if d.index == i) for i in range(3)] == [6, 6, 6]
        assert {delta.prompt_tokens for delta in found} == {9}
        await idle(engine)

    asyncio.run(main())


def test_cancel_frees_blocks(engine: AsyncEngine) -> None:
    """A request whose iterator is closed, or whose task is cancelled, running or waiting, gives its blocks back at once."""

    async def main() -> None:
        generator = engine.generate(request(prompt(30, 1)))
        async for _ in generator:
            break
        assert engine.status().running == 1
        await generator.aclose()
        await idle(engine)

        tasks = [asyncio.create_task(collect(engine.generate(request(prompt(20, i))))) for i in range(5)]
        await steps(engine, 5)
        assert engine.status().running == 5
        for task in tasks:
            task.cancel()
        assert all(isinstance(one, BaseException) for one in await asyncio.gather(*tasks, return_exceptions=True))
        await idle(engine)

    with slow(engine):
        asyncio.run(main())


def test_cancel_at_any_moment(llama: Path) -> None:
    """A request that is cancelled in any state, even before the engine has seen it, leaves nothing behind."""

    async def main(engine: AsyncEngine) -> None:
        for turns in range(12):
            task = asyncio.create_task(collect(engine.generate(request(prompt(20, turns)))))
            other = asyncio.create_task(collect(engine.generate(request(prompt(20, turns), 5))))
            for _ in range(turns):
                await asyncio.sleep(0)
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
            assert len((await other).tokens) == 5
            await idle(engine)

    with started(llama, max_num_seqs=1) as engine:
        asyncio.run(main(engine))


@pytest.mark.extended
def test_status(llama: Path) -> None:
    """The status counts what runs, waits, is held and is cached."""

    async def main(engine: AsyncEngine) -> None:
        assert engine.status().steps == 0
        tasks = [asyncio.create_task(collect(engine.generate(request(prompt(20, i), 300)))) for i in range(3)]
        with slow(engine):
            await steps(engine, 3)
            status = engine.status()
        assert (status.running, status.waiting) == (2, 1)
        assert 0 < status.kv_usage < 1
        assert status.free_blocks == pytest.approx(engine.info.num_blocks * (1 - status.kv_usage), abs=5)
        await asyncio.gather(*tasks)
        assert engine.status().cached_blocks > 3 * 300 // 4
        assert await engine.clear_cache() > 0
        status = engine.status()
        assert (status.cached_blocks, status.failed, status.preemptions, status.pinned_blocks) == (0, None, 0, 0)
        await idle(engine)

    with started(llama, max_num_seqs=2) as engine:
        asyncio.run(main(engine))


def test_bad_requests(engine: AsyncEngine) -> None:
    """A bad request is refused at once, a second one with an id in use too, and neither disturbs the others."""

    async def main() -> None:
        with pytest.raises(PromptTooLong):
            await collect(engine.generate(request(prompt(600, 1), 1)))
        with pytest.raises(BadRequest):
            await collect(engine.generate(request([], 1)))
        first = engine.generate(request(prompt(5, 1), id="same"))
        await anext(first)
        with pytest.raises(BadRequest, match="already running"):
            await collect(engine.generate(request(prompt(5, 1), id="same")))
        assert (await anext(first)).tokens
        await first.aclose()
        assert len((await collect(engine.generate(request(prompt(5, 1), 3, id="same")))).tokens) == 3

    asyncio.run(main())


def test_drain(engine: AsyncEngine) -> None:
    """Draining waits for what runs; what is still there after the time is ended with reason `abort`."""

    async def main() -> None:
        short = asyncio.create_task(collect(engine.generate(request(prompt(5, 1), 5))))
        await asyncio.sleep(0)
        await engine.drain(60)
        assert (await short).finish_reason == "length"
        with slow(engine):
            long = asyncio.create_task(collect(engine.generate(request(prompt(5, 1)))))
            await steps(engine, 2)
            await engine.drain(0.0)
        assert (await long).finish_reason == "abort"
        await idle(engine)

    asyncio.run(main())


def test_close(llama: Path) -> None:
    """Closing ends what runs and waits with an error, refuses what comes later, and can be repeated."""

    async def main(engine: AsyncEngine) -> None:
        tasks = [asyncio.create_task(collect(engine.generate(request(prompt(5, i))))) for i in range(3)]
        await steps(engine, 2)
        engine.close()
        for found in await asyncio.gather(*tasks, return_exceptions=True):
            assert isinstance(found, EngineFailed)
            assert "closed" in str(found)
        with pytest.raises(ShuttingDown):
            await collect(engine.generate(request(prompt(5, 1))))
        with pytest.raises(ShuttingDown):
            await engine.clear_cache()
        engine.close()

    with started(llama, max_num_seqs=2) as engine, slow(engine):
        asyncio.run(main(engine))


def hold(engine: AsyncEngine) -> tuple[threading.Event, threading.Event]:
    """The engine's next step waits for the second event; the first says that it has begun."""
    begun, go = threading.Event(), threading.Event()
    runner = engine._core._runner
    run = runner.run

    def slow(*args: Any) -> Any:
        begun.set()
        go.wait(60)
        return run(*args)

    runner.run = slow  # type: ignore[method-assign]
    return begun, go


def test_close_while_a_request_arrives(engine: AsyncEngine) -> None:
    """A request that arrives during the last step gets an error; it does not wait forever."""
    begun, go = hold(engine)

    async def main() -> None:
        first = asyncio.create_task(collect(engine.generate(request(prompt(5, 1)))))
        await asyncio.to_thread(begun.wait, 60)
        second = asyncio.create_task(collect(engine.generate(request(prompt(5, 2)))))
        await asyncio.sleep(0.01)
        closing = asyncio.create_task(asyncio.to_thread(engine.close))
        while not engine._closing:
            await asyncio.sleep(0.001)
        go.set()
        found = await asyncio.wait_for(asyncio.gather(first, second, return_exceptions=True), 60)
        assert all(isinstance(one, EngineFailed) for one in found)
        await closing

    asyncio.run(main())


def test_a_caller_that_is_gone(engine: AsyncEngine) -> None:
    """A call whose event loop was closed before its result came does no harm."""
    begun, go = hold(engine)
    busy = threading.Thread(target=lambda: asyncio.run(collect(engine.generate(request(prompt(5, 1), 3)))))
    busy.start()
    begun.wait(60)

    async def impatient() -> None:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(engine.clear_cache(), 0.01)

    asyncio.run(impatient())
    go.set()
    busy.join(60)
    assert engine.status().failed is None
    asyncio.run(idle(engine))


def test_several_event_loops(engine: AsyncEngine, reference: Find) -> None:
    """Requests from threads with separate event loops all get their output."""
    found: dict[int, Completion] = {}

    def ask(seed: int) -> None:
        found[seed] = asyncio.run(collect(engine.generate(request(prompt(9 + seed, seed), 12))))

    threads = [threading.Thread(target=ask, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    for seed in range(4):
        reference("llama").check(prompt(9 + seed, seed), found[seed], 12)


def test_failed_step(engine: AsyncEngine, reference: Find) -> None:
    """A failed step ends its requests with an error; the engine continues and is right afterwards."""
    runner = engine._core._runner
    forward, calls = runner._forward, itertools.count()  # type: ignore[attr-defined]

    def breaks(*args: Any) -> Any:
        logits = forward(*args)  # KV is written before it breaks
        if next(calls) == 3:
            for layer in runner.layers.values():  # type: ignore[attr-defined]
                for chunk in args[0].chunks:
                    for block in chunk.sequence.table.blocks[chunk.start // 4 :]:
                        layer.k[block * 4 : block * 4 + 4] = float("nan")
            raise RuntimeError("out of memory")
        return logits

    runner._forward = breaks  # type: ignore[attr-defined]
    tokens = prompt(21, 1)

    async def main() -> None:
        tasks = [asyncio.create_task(collect(engine.generate(request(tokens, 20)))) for _ in range(2)]
        for found in await asyncio.gather(*tasks, return_exceptions=True):
            assert isinstance(found, EngineFailed)
            assert "out of memory" in str(found)
        await idle(engine)
        assert engine.status().failed is None
        reference("llama").check(tokens, await collect(engine.generate(request(tokens, 20))), 20)

    asyncio.run(main())


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_broken_engine(engine: AsyncEngine) -> None:
    """When the loop itself fails, all requests get an error, the status has the reason, and later requests are
    refused."""

    async def main() -> None:
        tasks = [asyncio.create_task(collect(engine.generate(request(prompt(5, i))))) for i in range(2)]
        await steps(engine, 2)

        def breaks() -> None:
            raise AssertionError("a defect")

        engine._core.scheduler.schedule = breaks  # type: ignore[assignment, method-assign]
        for found in await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 60):
            assert isinstance(found, EngineFailed)
            assert "a defect" in str(found)
        assert "a defect" in (engine.status().failed or "")
        with pytest.raises(EngineFailed, match="a defect"):
            await collect(engine.generate(request(prompt(5, 1))))

    with slow(engine):
        asyncio.run(main())
