"""Prefill on one engine, decode on another: the same output as on one engine, nothing computed twice, and failures
cost time only."""

from __future__ import annotations

import asyncio
import dataclasses
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from example_counts import represented
from networks import over_each_link
from pair import PATIENCE, Answer, Node, ask, node, request, until
from patience import patient
from tiny import prompt

from foreword.blocks.salt import Salt
from foreword.config_layers import build
from foreword.disaggregation import request_messages as wire
from foreword.engine.request import SamplingParams
from foreword.engine_config import EngineConfig
from foreword.entrypoints.async_engine import AsyncEngine
from foreword.tokens.structured_output import StructuredOutput
from foreword.transfer.connection import Connection
from foreword.transfer.transfer_endpoint import TransferEndpoint
from foreword.transfer.transfers import TransferService
from foreword.transfer.wire_format import Reason
from foreword.transfer_config import TransferConfig

GREEDY = SamplingParams(max_tokens=8, temperature=0.0, logprobs=3)
SEEDED = SamplingParams(max_tokens=8, seed=7, logprobs=1, top_p=0.9)
PARAMS = {
    "greedy": GREEDY,
    "seeded": SEEDED,
    "penalties": SamplingParams(max_tokens=12, seed=3, presence_penalty=1.5, repetition_penalty=1.3, min_tokens=4),
    "bias": SamplingParams(max_tokens=6, temperature=0.0, logit_bias={11: 50.0}),
    "structured": SamplingParams(
        max_tokens=12, seed=3, structured=StructuredOutput("json_schema", {"type": "integer"})
    ),
    "without a limit": SamplingParams(temperature=0.0, structured=StructuredOutput("regex", "[a-d]{0,9}")),
    "one": SamplingParams(max_tokens=1, temperature=0.0, logprobs=0),
}
BYTES_PER_TOKEN = 3 * 2 * 2 * 16 * 4  # layers, K and V, heads, dimensions, float32


@pytest.fixture(scope="module")
def nodes(folder: Callable[[str], Path]) -> Iterator[tuple[Node, Node]]:
    prefill, decode = node(folder("llama"), "prefill"), node(folder("llama"), "decode")
    yield prefill, decode
    decode.engine.close()
    prefill.engine.close()


async def alone(nodes: tuple[Node, Node], tokens: list[int], params: SamplingParams) -> Answer:
    """The output of one engine; both have forgotten everything afterwards."""
    answer = await ask(nodes[0].engine, tokens, params)
    for each in nodes:
        await each.fresh()
    return answer


@pytest.mark.parametrize("name", PARAMS)
@pytest.mark.parametrize("length", represented([1, 3, 4, 5, 7, 8, 9, 31, 32, 33, 100], 4, 33))
def test_same_as_alone(nodes: tuple[Node, Node], name: str, length: int) -> None:
    """For prompts that end anywhere in a block and in a chunk, and for all kinds of sampling, the output is that of
    one engine, and the decode side computes no token of the prompt."""
    prefill, decode = nodes

    async def main() -> None:
        tokens, params = prompt(length, length), PARAMS[name]
        expected = await alone(nodes, tokens, params)
        found = await ask(decode.engine, tokens, params, prefill.address)
        assert found.same(expected)
        assert decode.said.prefill_tokens == 0
        assert prefill.said.prefill_tokens == length
        assert found.last is not None and found.last.cache_report is not None
        assert found.last.cached_tokens == 0
        assert found.last.cache_report.transferred_tokens == {f"prefill {prefill.address}": length}
        for each in nodes:
            await each.whole()

    asyncio.run(main())


def test_stop_strings(nodes: tuple[Node, Node]) -> None:
    """A stop string, even one that the first token completes, ends the text at the same place as on one engine."""

    async def main() -> None:
        tokens, sampling = prompt(20, 99), dataclasses.replace(SEEDED, max_tokens=16, ignore_eos=True)
        text = (await alone(nodes, tokens, sampling)).text
        assert len(text) > 4
        for start in range(3):
            params = dataclasses.replace(sampling, stop=(text[start : start + 2],))
            expected = await alone(nodes, tokens, params)
            found = await ask(nodes[1].engine, tokens, params, nodes[0].address)
            assert found.same(expected)
            assert found.last is not None and found.last.finish_reason == "stop"

    asyncio.run(main())


def test_only_missing_blocks_travel(nodes: tuple[Node, Node]) -> None:
    """Blocks that the decode side caches are not sent, to the byte; blocks that the prefill side caches are not
    recomputed; and the report says what was cached where."""
    prefill, decode = nodes

    async def main() -> None:
        tokens = prompt(90, 1)
        expected = await alone(nodes, tokens, GREEDY)
        await ask(decode.engine, tokens[:42], GREEDY)
        await ask(prefill.engine, tokens[:62], GREEDY)
        for each in nodes:
            each.said.forget()
        before = decode.received
        found = await ask(decode.engine, tokens, GREEDY, prefill.address)
        assert found.same(expected)
        assert decode.received - before == (90 - 40) * BYTES_PER_TOKEN
        assert (decode.said.prefill_tokens, prefill.said.prefill_tokens) == (0, 90 - 62)
        assert found.last is not None and found.last.cache_report is not None
        report, name = found.last.cache_report, f"prefill {prefill.address}"
        assert (report.device_tokens, report.loaded_tokens, report.computed_tokens) == (40, {name: 22}, 28)
        assert report.transferred_tokens == {name: 50}
        assert found.last.cached_tokens == report.cached_tokens == 62
        # Afterwards it is cached here like anything else.
        again = await ask(decode.engine, [*tokens, 5], GREEDY)
        assert again.last is not None and again.last.cached_tokens >= 90
        for each in nodes:
            await each.whole()

    asyncio.run(main())


def test_short_prompts_are_computed_here(folder: Callable[[str], Path], nodes: tuple[Node, Node]) -> None:
    """A prompt with fewer missing tokens than the threshold is computed where it is decoded."""
    prefill = nodes[0]
    few = node(folder("llama"), "decode", transfer={"min_tokens": 20})

    async def main() -> None:
        await prefill.fresh()
        await ask(few.engine, prompt(19, 1), GREEDY, prefill.address)
        assert (few.said.prefill_tokens, prefill.said.prefill_tokens) == (19, 0)
        await ask(few.engine, prompt(20, 2), GREEDY, prefill.address)
        assert (few.said.prefill_tokens, prefill.said.prefill_tokens) == (19, 20)

    try:
        asyncio.run(main())
    finally:
        few.engine.close()


def test_several_sequences(nodes: tuple[Node, Node]) -> None:
    """A prompt is sent once with n=3; the other sequences share it and compute its last, partial block at most."""
    prefill, decode = nodes
    params = dataclasses.replace(SEEDED, n=3)

    async def collect(prefill_address: str) -> dict[int, list[int]]:
        found: dict[int, list[int]] = {}
        async for delta in decode.engine.generate(request(prompt(41, 5), params, prefill_address)):
            found.setdefault(delta.index, []).extend(delta.tokens)
        return found

    async def main() -> None:
        for each in nodes:
            await each.fresh()
        expected = await collect("")
        for each in nodes:
            await each.fresh()
        assert await collect(prefill.address) == expected
        assert decode.said.prefill_tokens <= 2 * 4
        assert prefill.said.prefill_tokens == 41
        for each in nodes:
            await each.whole()

    asyncio.run(main())


@pytest.mark.extended
def test_many_at_once(nodes: tuple[Node, Node]) -> None:
    """Twenty prompts at once, some with a common prefix, more than either pool holds: each gets its own output, and
    both pools are whole afterwards."""
    prefill, decode = nodes

    async def main() -> None:
        prompts = [prompt(40, 3)[: 8 * (i % 3)] + prompt(30 + 5 * i, 200 + i) for i in range(20)]
        expected = [await alone(nodes, tokens, SEEDED) for tokens in prompts]
        found = await asyncio.gather(*(ask(decode.engine, tokens, SEEDED, prefill.address) for tokens in prompts))
        assert all(one.same(other) for one, other in zip(found, expected, strict=True))
        for each in nodes:
            await each.whole()

    asyncio.run(main())


def test_others_continue(nodes: tuple[Node, Node]) -> None:
    """While three prompts wait for a prefill side that stands still, another request decodes to its end."""
    prefill, decode = nodes

    async def main() -> None:
        for each in nodes:
            await each.fresh()
        prefill.valve.shut()
        waiting = [
            asyncio.create_task(ask(decode.engine, prompt(60, 300 + i), GREEDY, prefill.address)) for i in range(3)
        ]
        await until(lambda: len(decode.engine._core.scheduler.waiting_for_kv) == 3)
        running = await ask(decode.engine, prompt(5, 400), dataclasses.replace(GREEDY, max_tokens=40, ignore_eos=True))
        assert len(running.tokens) == 40
        assert not any(task.done() for task in waiting)
        prefill.valve.open()
        await asyncio.gather(*waiting)
        assert decode.said.prefill_tokens == 5
        for each in nodes:
            await each.whole()

    asyncio.run(main())


def test_layers_are_sent_early(nodes: tuple[Node, Node]) -> None:
    """KV of the first chunks has arrived while the last ones are not computed yet."""
    prefill, decode = nodes

    async def main() -> None:
        for each in nodes:
            await each.fresh()
        before = decode.received
        prefill.valve.shut()
        task = asyncio.create_task(ask(decode.engine, prompt(128, 6), GREEDY, prefill.address))
        await until(lambda: prefill.valve.waiting > 0)
        prefill.valve.let(2)
        await until(lambda: decode.received - before == 64 * BYTES_PER_TOKEN)
        prefill.valve.open()
        await task
        await until(lambda: bool(prefill.said.transfers))
        ended = prefill.said.transfers[-1]
        assert ended.bytes == 128 * BYTES_PER_TOKEN
        assert ended.hidden_bytes >= 64 * BYTES_PER_TOKEN

    asyncio.run(main())


@pytest.mark.parametrize("steps", [0, 1, 3])
def test_client_leaves(nodes: tuple[Node, Node], steps: int) -> None:
    """A client that leaves while its prompt waits or is sent frees the blocks on both sides, the prompt is not
    computed to its end, and both sides count a cancelled transfer with the bytes so far."""
    prefill, decode = nodes

    async def main() -> None:
        for each in nodes:
            await each.fresh()
        before = decode.received
        prefill.valve.shut()
        task = asyncio.create_task(ask(decode.engine, prompt(200, 8), GREEDY, prefill.address))
        await until(lambda: prefill.valve.waiting > 0)
        prefill.valve.let(steps)
        await until(lambda: decode.received - before == 32 * steps * BYTES_PER_TOKEN)
        task.cancel()
        await until(lambda: not decode.engine._core.scheduler.waiting_for_kv)
        prefill.valve.open()
        for each in nodes:
            await each.whole()
        assert prefill.said.prefill_tokens < 200
        ended = [(one.side, one.outcome) for each in nodes for one in each.said.transfers]
        assert ended == [("source", "cancelled"), ("destination", "cancelled")]
        assert decode.said.transfers[0].bytes == 32 * steps * BYTES_PER_TOKEN

    asyncio.run(main())


def test_client_leaves_while_its_prompt_is_asked_for(nodes: tuple[Node, Node], monkeypatch: pytest.MonkeyPatch) -> None:
    """A client that leaves while the message to the prefill side is on its way holds up no step; the transfer that begins
    behind it is cancelled, so the other side computes nothing for it."""
    prefill, decode = nodes
    real, begun, go = Connection.pull, threading.Event(), threading.Event()

    def gated(*given: Any, **more: Any) -> Any:
        begun.set()
        assert go.wait(PATIENCE)
        return real(*given, **more)

    async def main() -> None:
        for each in nodes:
            await each.fresh()
        prefill.valve.shut()
        monkeypatch.setattr(Connection, "pull", gated)
        task = asyncio.create_task(ask(decode.engine, prompt(200, 21), GREEDY, prefill.address))
        await until(begun.is_set)
        task.cancel()
        await until(lambda: not decode.engine._core.scheduler.waiting_for_kv)
        assert (await ask(decode.engine, prompt(20, 22), GREEDY)).tokens
        go.set()
        await until(lambda: [one.outcome for one in prefill.said.transfers] == ["cancelled"])
        prefill.valve.open()
        for each in nodes:
            await each.whole()
        assert not prefill.said.prefill_tokens

    try:
        asyncio.run(main())
    finally:
        go.set()
        prefill.valve.open()


def test_source_dies(folder: Callable[[str], Path], nodes: tuple[Node, Node]) -> None:
    """If the prefill side dies in the middle, the decode side keeps the blocks that came whole and computes the rest;
    the client sees the same output, and the failure is counted."""
    decode = nodes[1]
    doomed = node(folder("llama"), "prefill")

    async def main() -> None:
        tokens = prompt(120, 9)
        expected = await alone(nodes, tokens, GREEDY)
        before = decode.received
        doomed.valve.shut()
        task = asyncio.create_task(ask(decode.engine, tokens, GREEDY, doomed.address))
        await until(lambda: doomed.valve.waiting > 0)
        doomed.valve.let(2)
        await until(lambda: decode.received - before == 64 * BYTES_PER_TOKEN)
        assert doomed.engine.instance is not None
        doomed.engine.instance.endpoint.close()
        found = await task
        assert found.same(expected)
        assert decode.said.prefill_tokens == 120 - 64
        assert [one.outcome for one in decode.said.transfers] == ["lost"]
        assert found.last is not None and found.last.cache_report is not None
        assert list(found.last.cache_report.transferred_tokens.values()) == [64]
        await decode.whole()

    try:
        asyncio.run(main())
    finally:
        doomed.valve.open()
        doomed.engine.close()


@pytest.mark.extended
def test_refusals(folder: Callable[[str], Path], nodes: tuple[Node, Node]) -> None:
    """A wrong address, an instance that only decodes, and one with other blocks: the prompt is computed where it is
    decoded, and the reason is counted."""
    decode = nodes[1]
    other = node(folder("llama"), "prefill", block_size=8)
    same = node(folder("llama"), "decode")

    async def main() -> None:
        tokens = prompt(30, 10)
        expected = await alone(nodes, tokens, GREEDY)
        cases = {"127.0.0.1:1": "lost", "nonsense": "failed", same.address: "role", other.address: "layout"}
        for address, reason in cases.items():
            await decode.fresh()
            found = await ask(decode.engine, tokens, GREEDY, address)
            assert found.same(expected)
            assert [one.outcome for one in decode.said.transfers] == [reason], address
            assert decode.said.prefill_tokens == 30
        # The instance itself is no other one: nothing travels.
        await decode.fresh()
        assert (await ask(decode.engine, tokens, GREEDY, decode.address)).same(expected)
        assert not decode.said.transfers
        await decode.whole()

    try:
        asyncio.run(main())
    finally:
        other.engine.close()
        same.engine.close()


@over_each_link
def test_secret_and_links(
    folder: Callable[[str], Path], nodes: tuple[Node, Node], links: tuple[str, ...], tmp_path: Path
) -> None:
    """KV is sent over each link between engines with the same secret, from a file or not; with another secret the prompt is
    computed where it is decoded."""
    word = "sixteen characters and more"
    (tmp_path / "secret").write_text(word + "\n")
    assert build(TransferConfig, "transfer", {"secret_file": str(tmp_path / "secret")}).secret == word
    source = node(folder("llama"), "prefill", transfer={"secret": word, "links": links})
    friend = node(folder("llama"), "decode", transfer={"secret": word, "links": links})
    stranger = node(folder("llama"), "decode", transfer={"secret": word[::-1]})

    async def main() -> None:
        tokens = prompt(70, 16)
        expected = await alone(nodes, tokens, GREEDY)
        assert (await ask(friend.engine, tokens, GREEDY, source.address)).same(expected)
        assert friend.said.prefill_tokens == 0
        assert friend.engine.instance is not None
        assert friend.engine.instance.endpoint.status().traffic[links[0]].bytes_received == 70 * BYTES_PER_TOKEN
        assert (await ask(stranger.engine, tokens, GREEDY, source.address)).same(expected)
        assert stranger.said.prefill_tokens == 70
        for each in (source, friend, stranger):
            await each.whole()

    try:
        asyncio.run(main())
    finally:
        for each in (source, friend, stranger):
            each.engine.close()


def test_invalid_messages_are_refused(nodes: tuple[Node, Node]) -> None:
    """Messages of a peer with the secret are checked: a malformed description, tokens outside the vocabulary, a seed
    out of range, too many blocks. Each ends its transfer only."""
    prefill = nodes[0]
    assert prefill.engine.instance is not None
    layout = prefill.engine.instance.layout
    params = SamplingParams(max_tokens=1)
    good = wire.PrefillTask("x", wire.pack(prompt(9, 1)), params, 1)
    bad = {
        b"nonsense": Reason.REQUEST,
        wire.encode(dataclasses.replace(good, tokens=b"123")): Reason.REQUEST,
        wire.encode(dataclasses.replace(good, tokens=b"")): Reason.REQUEST,
        wire.encode(dataclasses.replace(good, tokens=wire.pack([10**9]))): Reason.REQUEST,
        wire.encode(dataclasses.replace(good, version=99)): Reason.REQUEST,
        wire.encode({**dataclasses.asdict(good), "seed": 2**63}): Reason.REQUEST,
    }
    endpoint = TransferEndpoint(TransferConfig(), TransferService(layout))
    try:
        connection = endpoint.connect(prefill.address)
        for request_bytes, reason in bad.items():
            destination = connection.pull(request_bytes)
            assert destination.wait(PATIENCE) is not None
            assert destination.reason == reason
        # A claim to have more blocks than the prompt has: nothing is sent, and nothing breaks.
        assert connection.pull(wire.encode(good), have=1000).wait(PATIENCE) is not None
    finally:
        endpoint.close()

    async def main() -> None:
        await prefill.whole()
        assert len((await ask(prefill.engine, prompt(9, 1), GREEDY)).tokens) > 0

    asyncio.run(main())


@pytest.mark.extended
def test_stalled_source(folder: Callable[[str], Path], nodes: tuple[Node, Node]) -> None:
    """The decode side waits for a prefill side that stands still no longer than the progress timeout."""
    decode = nodes[1]
    stuck = node(folder("llama"), "prefill")
    hasty = node(folder("llama"), "decode", transfer={"progress_timeout": 0.5})

    async def main() -> None:
        tokens = prompt(100, 11)
        expected = await alone(nodes, tokens, GREEDY)
        stuck.valve.shut()
        found = await ask(hasty.engine, tokens, GREEDY, stuck.address)
        assert found.same(expected)
        assert [one.outcome for one in hasty.said.transfers] == ["deadline"]
        stuck.valve.open()
        await hasty.whole()
        await stuck.whole()

    try:
        asyncio.run(main())
    finally:
        hasty.engine.close()
        stuck.engine.close()
    assert decode.said is not None


def test_source_without_memory(folder: Callable[[str], Path], nodes: tuple[Node, Node]) -> None:
    """A prefill side too small for the prompt refuses it, and it is computed where it is decoded."""
    decode = nodes[1]
    small = node(folder("llama"), "prefill", kv_memory="64 tokens")

    async def main() -> None:
        tokens = prompt(100, 12)
        expected = await alone(nodes, tokens, GREEDY)
        found = await ask(decode.engine, tokens, GREEDY, small.address)
        assert found.same(expected)
        assert [one.outcome for one in decode.said.transfers] == ["request"]
        # Prompts that fit one by one wait for each other.
        texts = [prompt(40, 500 + i) for i in range(4)]
        answers = await asyncio.gather(*(ask(decode.engine, text, GREEDY, small.address) for text in texts))
        for text, answer in zip(texts, answers, strict=True):
            assert answer.same(await ask(nodes[0].engine, text, GREEDY))
        await small.whole()
        await decode.whole()

    try:
        asyncio.run(main())
    finally:
        small.engine.close()


@pytest.mark.extended
def test_destination_without_memory(folder: Callable[[str], Path], nodes: tuple[Node, Node]) -> None:
    """A decode side with room for one prompt at a time asks for one after the other, and preempts as usual."""
    prefill = nodes[0]
    small = node(folder("llama"), "decode", kv_memory="128 tokens")

    async def main() -> None:
        params = dataclasses.replace(GREEDY, max_tokens=24, ignore_eos=True)
        texts = [prompt(50, 600 + i) for i in range(5)]
        expected = [await alone(nodes, text, params) for text in texts]
        found = await asyncio.gather(*(ask(small.engine, text, params, prefill.address) for text in texts))
        assert all(one.tokens == other.tokens for one, other in zip(found, expected, strict=True))
        await small.whole()
        await prefill.whole()

    try:
        asyncio.run(main())
    finally:
        small.engine.close()


def test_salts_stay_apart(nodes: tuple[Node, Node]) -> None:
    """The salt is sent with the prompt: on both sides a tenant shares only with itself."""
    prefill, decode = nodes

    async def main() -> None:
        for each in nodes:
            await each.fresh()
        tokens = prompt(40, 13)
        await ask(decode.engine, tokens, GREEDY, prefill.address, salt=Salt(b"alice"))
        await decode.engine.clear_cache()
        for salt, cached in ((b"bob", 0), (b"alice", 39), (b"", 0)):
            prefill.said.forget()
            found = await ask(decode.engine, tokens, GREEDY, prefill.address, salt=Salt(salt))
            assert prefill.said.prefill_tokens == 40 - cached
            assert found.last is not None and found.last.cached_tokens == cached
            other = await ask(decode.engine, tokens, GREEDY, salt=Salt(b"carol" + salt))
            assert other.last is not None and other.last.cached_tokens == 0

    asyncio.run(main())


def test_over_a_store(folder: Callable[[str], Path], nodes: tuple[Node, Node], tmp_path: Path) -> None:
    """KV that was sent is written to the decode side's store too, and is loaded from there when the device has evicted
    it."""
    prefill = nodes[0]
    config = EngineConfig(
        model=str(folder("llama")),
        dtype="float32",
        kv_memory="1024 tokens",
        block_size=4,
        threads=1,
        max_batch_tokens=32,
    )
    store = patient("memory://?size=16MiB")
    engine = AsyncEngine.from_config(config, store=store, transfer=TransferConfig(min_tokens=8), role="decode")

    async def main() -> None:
        tokens = prompt(50, 14)
        expected = await alone(nodes, tokens, GREEDY)
        first = await ask(engine, tokens, GREEDY, prefill.address)
        assert first.same(expected)
        assert engine.offload is not None
        await asyncio.to_thread(engine.offload.flush)
        engine.offload.costs.prefill_rate = float
        await engine.clear_cache()
        again = await ask(engine, tokens, GREEDY, prefill.address)
        assert again.same(expected)
        assert again.last is not None and again.last.cache_report is not None
        assert again.last.cache_report.loaded_tokens == {"memory": 48}
        # Blocks that the store has not are asked for.
        await engine.clear_cache()
        longer = [*tokens, *prompt(40, 15)]
        third = await ask(engine, longer, GREEDY, prefill.address)
        assert third.same(await ask(nodes[0].engine, longer, GREEDY))
        assert third.last is not None and third.last.cache_report is not None
        assert third.last.cache_report.loaded_tokens.get("memory", 0) >= 48
        assert list(third.last.cache_report.transferred_tokens.values()) == [90 - 48]
        await engine.check_integrity()

    try:
        asyncio.run(main())
    finally:
        engine.close()
