"""The engine over a real Redis that is killed, comes back, is emptied, or never answers."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from patience import patient, unhurried
from servers import RedisServer, wait_until
from tiny import Reference, greedy, prompt

from foreword.entrypoints.llm import LLM
from foreword.store_config import StoreConfig

Make = Callable[..., LLM]
Find = Callable[[str], Reference]


@pytest.fixture
def redis(tmp_path: Path) -> Iterator[RedisServer]:
    server = RedisServer(tmp_path / "redis")
    yield server
    server.kill()


def test_instances_share_a_redis(engine: Make, reference: Find, redis: RedisServer) -> None:
    """Blocks that one engine computed are loaded by another from Redis, and the report says so."""
    tokens = prompt(90, 1)
    with engine("llama", store=redis.url) as llm:
        llm.generate(tokens, greedy(4))
    with engine("llama", store=redis.url) as llm:
        [output] = llm.generate(tokens, greedy(4), cache_report=True)
        assert output.cache_report is not None and output.cache_report.loaded_tokens == {"redis": 88}
        reference("llama").check(tokens, output.outputs[0], 4)


def test_killed_in_the_middle(engine: Make, reference: Find, redis: RedisServer) -> None:
    """A server that dies between search and load, stays away, and comes back empty: outputs are right, errors are
    counted, no block is lost, and hits return."""
    tokens = prompt(90, 2)
    with unhurried(engine("llama", store=patient(redis.url, flush_seconds=2.0))) as llm:
        llm.generate(tokens, greedy(4))
        assert llm.flush()
        [tier] = llm.offload.store.tiers
        locate = llm.offload.store.locate

        def locate_and_kill(*args: object, **named: object) -> list[int]:
            found = locate(*args, **named)  # type: ignore[arg-type]
            redis.kill()
            return found

        llm.offload.store.locate = locate_and_kill  # type: ignore[method-assign]
        for _ in range(4):
            llm.clear_cache()
            [output] = llm.generate(tokens, greedy(4))
            reference("llama").check(tokens, output.outputs[0], 4)
            assert output.cached_tokens == 0
        assert sum(tier.counters.errors.values()) >= 1
        llm.offload.store.locate = locate  # type: ignore[method-assign]
        redis.start()
        wait_until(lambda: not tier.breaker.is_open, "the tier is tried again")
        for _ in range(20):
            llm.clear_cache()
            [output] = llm.generate(tokens, greedy(4))
            llm.flush()
            if output.cached_tokens:
                break
            wait_until(lambda: not tier.breaker.is_open, "the tier is tried again")
        assert output.cached_tokens == 89 - 1
        reference("llama").check(tokens, output.outputs[0], 4)
        llm.check()


@pytest.mark.slow
def test_accepts_and_never_answers(engine: Make, reference: Find) -> None:
    """A server that accepts connections and never answers costs the lookup timeout a few times, then nothing."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"redis://127.0.0.1:{silent.getsockname()[1]}"
        with engine("llama", store=StoreConfig(urls=(url,), lookup_timeout=0.1, flush_seconds=0.2)) as llm:
            [tier] = llm.offload.store.tiers
            for seed in range(40):
                [output] = llm.generate(prompt(60, seed), greedy(4))
                reference("llama").check(prompt(60, seed), output.outputs[0], 4)
                if seed >= 4 and tier.counters.skipped:
                    break
            # On a busy machine a call may be late for longer, and count as hung.
            assert set(tier.counters.errors) <= {"store_timeout", "store_hung"} and tier.counters.skipped >= 1
            llm.check()


def test_emptied_while_it_is_used(engine: Make, reference: Find, redis: RedisServer) -> None:
    """A server that loses everything between search and load is a miss."""
    tokens = prompt(90, 3)
    with engine("llama", store=redis.url) as llm:
        llm.generate(tokens, greedy(4))
        assert llm.flush()
        llm.clear_cache()
        locate = llm.offload.store.locate

        def locate_and_flush(*args: object, **named: object) -> list[int]:
            found = locate(*args, **named)  # type: ignore[arg-type]
            if found:  # not where the asking thread could not tell
                redis.client().flushall()
            return found

        llm.offload.store.locate = locate_and_flush  # type: ignore[method-assign]
        [output] = llm.generate(tokens, greedy(4))
        assert output.cached_tokens == 0 and llm.offload.status().cut == 1
        reference("llama").check(tokens, output.outputs[0], 4)
        llm.check()
