"""Engines that read each other's blocks (`peer://`): hits load them, and the reader's output is right whatever happens
to the other engine."""

from __future__ import annotations

import asyncio
import logging
import random
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from config_constants import constants
from example_counts import represented
from peer_process import PATIENCE, Process
from tiny import Reference, greedy, prompt

from foreword.blocks.keys import Scope, chain_keys
from foreword.blocks.layout import chain_prefix
from foreword.blocks.salt import NO_SALT, Salt
from foreword.disaggregation.block_server import BlockServer, ChainIndex
from foreword.engine.request import Request, SamplingParams
from foreword.engine_config import EngineConfig
from foreword.entrypoints.async_engine import AsyncEngine
from foreword.entrypoints.llm import LLM
from foreword.events import BlocksRemoved, BlocksStored
from foreword.server.engine_metrics import PrometheusObserver
from foreword.store.frame import HEADER_BYTES, check, read_header
from foreword.store_config import StoreConfig
from foreword.transfer.transfer_endpoint import TransferEndpoint
from foreword.transfer_config import TransferConfig

Make = Callable[..., LLM]
Find = Callable[[str], Reference]
Find_folder = Callable[[str], Path]

MEMORY = "memory://?size=16MiB"
SECRET = "a shared secret of the tests"
QUICK: dict[str, Any] = {"beat_seconds": 1.0, "connect_timeout": 60.0, "progress_timeout": 60.0, "ring": "4MiB"}
# On a busy machine computing must not look faster than loading.
PATIENT: dict[str, Any] = {"lookup_timeout": 20.0, "load_timeout": 60.0}


def until(condition: Callable[[], bool]) -> None:
    ends = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < ends, "it never happened"
        time.sleep(0.01)


def stores(*urls: str, **times: float) -> StoreConfig:
    return StoreConfig(urls=urls, **(PATIENT | times))


class Giver:
    """An engine in this process that others read from."""

    def __init__(self, folder: Path, *urls: str, blocks: int = 256, **transfer: Any) -> None:
        config = EngineConfig(
            model=str(folder), dtype="float32", kv_memory=f"{4 * blocks} tokens", block_size=4, threads=1
        )
        settings = TransferConfig(**(QUICK | {"beat_seconds": 5.0} | transfer))
        self.engine = AsyncEngine.from_config(config, store=StoreConfig(urls=urls), transfer=settings, role="both")
        assert self.engine.served is not None and self.engine.instance is not None
        self.served: BlockServer = self.engine.served
        self.endpoint: TransferEndpoint = self.engine.instance.endpoint
        self.url = f"peer://{self.endpoint.address}?progress_timeout=75"

    def generate(self, tokens: Sequence[int], count: int = 8, salt: Salt = NO_SALT) -> tuple[int, ...]:
        return asyncio.run(collect(self.engine, tokens, count, salt))

    def clear(self) -> None:
        if self.engine.offload is not None:
            assert self.engine.offload.flush()
        asyncio.run(self.engine.clear_cache())

    def names(self, tokens: Sequence[int], salt: Salt = NO_SALT) -> list[bytes]:
        info = self.engine.info
        root = Scope(bytes.fromhex(info.namespace), info.block_size, salt).root()
        prefix = chain_prefix(self.served.layout.fingerprint, root)
        return [prefix + key for key in chain_keys(root, tokens, info.block_size)]

    def check(self) -> None:
        """Nothing is held for readers, and the pool passes its check."""
        until(lambda: self.engine.status().kv_usage == 0.0)
        asyncio.run(self.engine.check_integrity())

    def close(self) -> None:
        self.endpoint.close()
        self.engine.close()


async def collect(engine: AsyncEngine, tokens: Sequence[int], count: int, salt: Salt = NO_SALT) -> tuple[int, ...]:
    params = SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True)
    request = Request(f"{random.random()}", tuple(tokens), params, salt=salt)
    return tuple([token async for delta in engine.generate(request) for token in delta.tokens])


@pytest.fixture
def giver(llama: Path) -> Iterator[Callable[..., Giver]]:
    with ExitStack() as stack:

        def start(folder: Path | None = None, *urls: str, **settings: Any) -> Giver:
            return stack.enter_context(closing(Giver(folder or llama, *urls, **settings)))

        yield start


def unhurried(llm: LLM) -> None:
    """Make the engine load what it finds, even if the machine is so slow that computing looks faster."""
    assert llm.offload is not None
    llm.offload.costs.prefill_rate = float


def connected(llm: LLM, number: int = -1) -> None:
    unhurried(llm)
    assert llm.offload is not None
    tier = llm.offload.store.tiers[number]
    until(lambda: tier.store.status().notes["connected"] == 1)


def serve(served: BlockServer, names: Sequence[bytes], longest: int = 1 << 20) -> list[bytes | None]:
    """The frames that `get` gives, copied, because the next batch reuses their memory."""
    found = [
        bytes(one) if one is not None else None
        for batch in served.get(names, longest, time.monotonic() + PATIENCE)
        for one in batch
    ]
    return found + [None] * (len(names) - len(found))


# Reads


@pytest.mark.parametrize("family", represented(["llama", "gemma2", "mixtral", "deepseek_v2"], "gemma2"))
def test_from_the_device_of_another(
    family: str, folder: Find_folder, engine: Make, reference: Find, giver: Any
) -> None:
    """Blocks on one engine's device are loaded by another one, for every kind of layer, with the same output; the
    report names the peer, and the next time they come from the reader's own memory tier."""
    tokens = prompt(101, 1)
    one = giver(folder(family))
    one.generate(tokens)
    with engine(family, store=stores(MEMORY, one.url)) as llm:
        connected(llm)
        [output] = llm.generate(tokens, greedy(8), cache_report=True)
        reference(family).check(tokens, output.outputs[0], 8)
        assert output.cache_report is not None and output.cache_report.loaded_tokens == {"peer": 100}
        assert one.served.status().device == 25
        registry = PrometheusObserver()
        registry.watch(one.engine)
        assert b'served_blocks_total{model_name="%s",source="device"} 25' % family.encode() in registry.render("")[0]
        llm.flush()
        llm.clear_cache()
        [again] = llm.generate(tokens, greedy(8), cache_report=True)
        assert again.outputs[0].tokens == output.outputs[0].tokens
        assert again.cache_report is not None and again.cache_report.loaded_tokens == {"memory": 100}
    one.check()


def test_from_the_memory_of_another(engine: Make, reference: Find, giver: Any) -> None:
    """Blocks that left an engine's device but are in its memory tier are loaded by another one, also when the memory
    tier has only the first part and the device the rest."""
    tokens = prompt(120, 2)
    one = giver(None, MEMORY)
    one.generate(tokens[:60])
    one.clear()
    one.engine.offload.store.tiers[0].store.delete(one.names(tokens)[10:], deadline=time.monotonic() + PATIENCE)
    memory = one.engine.offload.store.tiers[0].store
    with engine("llama", store=stores(one.url)) as llm:
        connected(llm)
        [output] = llm.generate(tokens, greedy(8), cache_report=True)
        reference("llama").check(tokens, output.outputs[0], 8)
        assert output.cache_report.loaded_tokens == {"peer": 40}
        status = one.served.status()
        assert (status.device, status.memory) == (0, 10)
        one.generate(tokens)
        assert one.engine.offload.flush()
        memory.delete(one.names(tokens)[5:], deadline=time.monotonic() + PATIENCE)
        llm.clear_cache()
        [output] = llm.generate(tokens, greedy(8), cache_report=True)
        reference("llama").check(tokens, output.outputs[0], 8)
        assert output.cache_report.loaded_tokens == {"peer": 119}
        assert (one.served.status().device, one.served.status().memory) == (25, 15)
        assert llm.offload.status().saved == llm.offload.status().queued == 0, "a peer is only read"


def test_frames_are_those_that_a_store_would_have(giver: Any) -> None:
    """A frame from the device equals the one written into the memory tier bit for bit, parent and depth included."""
    one = giver(None, MEMORY)
    texts = [prompt(60, 3), prompt(60, 3)[:24] + prompt(40, 4), prompt(90, 5)]
    for tokens in texts:
        one.generate(tokens, 12)
    assert one.engine.offload.flush()
    memory = one.engine.offload.store.tiers[0].store
    names = list(dict.fromkeys(name for tokens in texts for name in one.names(tokens)))
    buffers = [memoryview(bytearray(1 << 16)) for _ in names]
    lengths = memory.get(names, buffers, deadline=time.monotonic() + PATIENCE)
    one.served._memory = ()
    found = serve(one.served, names)
    assert found == [bytes(buffer[:length]) for buffer, length in zip(buffers, lengths, strict=True)]
    assert {read_header(data).depth for data in found if data} == set(range(22))
    one.check()


def test_a_continued_request_over_two_tiers(llama: Path, tmp_path: Path, engine: Make) -> None:
    """Tokens of a request that comes with generated tokens, loaded beyond its prompt, are not counted as cached, however many
    tiers they come from."""
    tokens, urls = prompt(81, 11), [f"disk://{tmp_path}/{name}" for name in "ab"]
    for url, length in zip(urls, (41, 81), strict=True):
        with engine("llama", store=url) as llm:
            llm.generate(tokens[:length], greedy(1))
    config = EngineConfig(model=str(llama), dtype="float32", kv_memory="1024 tokens", block_size=4, threads=1)
    registry = PrometheusObserver()
    with closing(AsyncEngine.from_config(config, store=stores(*urls), observers=[registry])) as made:
        registry.watch(made)
        assert made.offload is not None
        made.offload.costs.prefill_rate = float
        request = Request(
            "continued", tuple(tokens[:12]), greedy(80), output=tuple(tokens[12:]), want_cache_report=True
        )

        async def last() -> Any:
            return [delta async for delta in made.generate(request)][-1]

        report = asyncio.run(last()).cache_report
        assert report is not None
        assert (report.cached_tokens, report.device_tokens, report.loaded_tokens) == (11, 0, {"disk": 11})
        assert all(tier.counters.hit_blocks for tier in made.offload.store.tiers)


@pytest.mark.extended
def test_two_peers(engine: Make, reference: Find, giver: Any) -> None:
    """Each prompt is loaded from the peer that has it; a prompt that is spread over two peers is loaded from both."""
    first, second = giver(), giver()
    both = prompt(80, 6)
    first.generate(prompt(61, 7))
    second.generate(prompt(61, 8))
    first.generate(both[:40])
    second.generate(both)
    asyncio.run(second.engine.check_integrity())
    with engine("llama", store=stores(first.url, second.url)) as llm:
        connected(llm, 0)
        connected(llm, 1)
        for tokens, loaded in (
            (prompt(61, 7), {"peer": 60}),
            (prompt(61, 8), {"peer-2": 60}),
            (both, {"peer": 40, "peer-2": 39}),
        ):
            [output] = llm.generate(tokens, greedy(4), cache_report=True)
            reference("llama").check(tokens, output.outputs[0], 4)
            assert output.cache_report.loaded_tokens == loaded


def test_tenants(giver: Any, engine: Make) -> None:
    """A tenant's blocks can be read only with the tenant's salt."""
    one = giver()
    tokens = prompt(80, 9)
    one.generate(tokens, salt=Salt(b"ann"))
    assert one.served.locate(one.names(tokens), time.monotonic() + PATIENCE) == 0
    assert one.served.locate(one.names(tokens, Salt(b"bob")), time.monotonic() + PATIENCE) == 0
    assert one.served.locate(one.names(tokens, Salt(b"ann")), time.monotonic() + PATIENCE) == 20
    with engine("llama", store=stores(one.url)) as llm:
        connected(llm)
        assert llm.generate(tokens, greedy(2))[0].cached_tokens == 0


# Who is refused


def test_another_model(folder: Find_folder, engine: Make, reference: Find, giver: Any, caplog: Any) -> None:
    """An engine with another model or block size is not read: the log says what differs, the call is counted, the
    output is right."""
    tokens = prompt(80, 10)
    other = giver(folder("qwen2"))
    other.generate(tokens)
    for options in ({}, {"block_size": 8}):
        with caplog.at_level(logging.WARNING), engine("llama", store=stores(other.url), **options) as llm:
            tier = llm.offload.store.tiers[0]
            until(lambda tier=tier: tier.store.status().notes["rejected"] >= 1)
            [output] = llm.generate(tokens, greedy(4))
            reference("llama").check(tokens, output.outputs[0], 4)
            assert output.cached_tokens == 0 and tier.counters.errors["store_unavailable"] == 1
    assert "different weights of the model" in caplog.text and "block size" in caplog.text


@pytest.mark.extended
def test_a_wrong_secret(engine: Make, reference: Find, giver: Any, monkeypatch: Any) -> None:
    """Without the secret, or with another one, nothing is read and the output is right; with it, blocks are."""
    tokens = prompt(80, 11)
    one = giver(secret=SECRET)
    one.generate(tokens)
    monkeypatch.setenv("RIGHT", SECRET)
    monkeypatch.setenv("WRONG", SECRET.upper())
    for more, cached in (("", 0), ("&secret_env=WRONG", 0), ("&secret_env=RIGHT", 79)):
        with engine("llama", store=stores(one.url + more)) as llm:
            notes = llm.offload.store.tiers[0].store.status
            until(lambda notes=notes: max(notes().notes["rejected"], notes().notes["connected"]) >= 1)
            unhurried(llm)
            [output] = llm.generate(tokens, greedy(4))
            assert output.cached_tokens == cached
            reference("llama").check(tokens, output.outputs[0], 4)


# Failures


class Wire:
    """Passes bytes between readers and a peer; what the peer sends can be altered or held."""

    def __init__(self, target: str) -> None:
        host, _, port = target.rpartition(":")
        self.target = (host, int(port))
        self.flip = False
        self.hold_after = -1
        self.holding = threading.Event()
        self.passed = 0
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self.listener.getsockname()[1]}"
        self.open: list[socket.socket] = [self.listener]
        threading.Thread(target=self.run, daemon=True).start()

    def run(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self.listener.accept()
                try:
                    server = socket.create_connection(self.target)
                except OSError:
                    client.close()
                    continue
                self.open += [client, server]
                threading.Thread(target=self.pump, args=(client, server, False), daemon=True).start()
                threading.Thread(target=self.pump, args=(server, client, True), daemon=True).start()

    def pump(self, source: socket.socket, target: socket.socket, watched: bool) -> None:
        with suppress(OSError):
            while data := bytearray(source.recv(16384)):
                if watched and self.flip and len(data) > 4000:
                    data[len(data) // 2] ^= 1
                if watched:
                    self.passed += len(data)
                    if 0 <= self.hold_after < self.passed:
                        self.holding.set()
                        continue
                target.sendall(data)
        with suppress(OSError):
            target.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        for one in self.open:
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()


@pytest.fixture
def wire() -> Iterator[Callable[[str], Wire]]:
    with ExitStack() as stack:
        yield lambda target: stack.enter_context(closing(Wire(target)))


def test_bytes_that_change_on_the_way(engine: Make, reference: Find, giver: Any, wire: Any) -> None:
    """A block that was altered on the way is a counted miss; the output is right, and the block is not kept."""
    tokens = prompt(400, 12)
    one = giver()
    one.generate(tokens)
    between = wire(one.endpoint.address)
    with (
        constants(TransferConfig, links=("tcp",)),
        engine("llama", store=stores(MEMORY, f"peer://{between.address}?progress_timeout=75")) as llm,
    ):
        connected(llm)
        between.flip = True
        [output] = llm.generate(tokens, greedy(8))
        reference("llama").check(tokens, output.outputs[0], 8)
        counters = llm.offload.store.tiers[1].counters
        assert output.cached_tokens < 399 and (counters.bad or counters.errors)
        between.flip = False
        llm.flush()
        llm.clear_cache()
        [output] = llm.generate(tokens, greedy(8), cache_report=True)
        reference("llama").check(tokens, output.outputs[0], 8)
        assert set(output.cache_report.loaded_tokens) <= {"memory", "peer"} and output.cached_tokens == 399


@pytest.mark.slow
def test_a_process_that_is_killed_and_comes_back(
    llama: Path, engine: Make, reference: Find, wire: Any, tmp_path: Path
) -> None:
    """B loads what A has on its device and in memory. B's output stays right while A is stopped, when A is killed in
    the middle of a load, and after A has restarted at its address and is found again."""
    settings = {"model": str(llama), "dtype": "float32", "kv_memory": "2048 tokens", "block_size": 4, "threads": 1}
    with socket.create_server(("127.0.0.1", 0)) as held:
        port = held.getsockname()[1]
    transfer = {**QUICK, "bind": f"127.0.0.1:{port}", "secret": SECRET}
    truth = reference("llama")
    (tmp_path / "secret").write_text(SECRET)
    between = wire(f"127.0.0.1:{port}")
    url = f"peer://{between.address}?progress_timeout=30&secret_file={tmp_path}/secret"

    def ask(llm: LLM, tokens: list[int]) -> dict[str, int]:
        [output] = llm.generate(tokens, greedy(8), cache_report=True)
        truth.check(tokens, output.outputs[0], 8)
        assert output.cache_report is not None
        return output.cache_report.loaded_tokens

    a = Process(settings, [MEMORY], transfer)
    try:
        texts = [prompt(401, 20 + number) for number in range(4)]
        for tokens in texts[:3]:
            assert tuple(a.ask("generate", tokens=tokens, count=8)) == truth.greedy(tokens, 8)
        with constants(TransferConfig, links=("tcp",)), engine("llama", store=stores(url)) as llm:
            connected(llm)
            assert ask(llm, texts[0]) == {"peer": 400}
            a.ask("clear")
            assert ask(llm, texts[1]) == {"peer": 400}
            assert a.ask("status")["memory"] >= 100

            a.signal(signal.SIGSTOP)
            with ThreadPoolExecutor(1) as pool:
                assert pool.submit(ask, llm, texts[3]).result(PATIENCE) == {}
            a.signal(signal.SIGCONT)

            peer = llm.offload.store.tiers[0]  # type: ignore[union-attr]
            until(lambda: peer.store.status().notes["connected"] == 1 and not peer.breaker.is_open)
            between.hold_after = between.passed + 40_000
            with ThreadPoolExecutor(1) as pool:
                asked = pool.submit(ask, llm, texts[2])
                assert between.holding.wait(PATIENCE)
                a.kill()
                loaded = asked.result(PATIENCE)
            assert loaded.get("peer", 0) < 400
            between.hold_after = -1

            a = Process(settings, [MEMORY], transfer)
            a.ask("generate", tokens=texts[3], count=8)
            connected(llm)

            def found() -> bool:
                llm.clear_cache()
                return ask(llm, texts[3]) == {"peer": 400}

            until(found)
            llm.check()
        assert a.ask("status")["kv_usage"] == 0.0
    finally:
        a.kill()


# The costs for the engine that is read


@pytest.mark.extended
def test_engine_decodes_while_it_is_read(giver: Any, reference: Find) -> None:
    """While four readers take all they can, the engine decodes to the end; they hold a share of the pool at most, and
    nothing in the end."""
    one = giver(blocks=128)
    read = prompt(160, 30)
    one.generate(read)
    names, held = one.names(read), []
    stop = threading.Event()
    take = one.served._take

    def watched(wanted: Any) -> Any:
        found = take(wanted)
        held.append(len(found))
        return found

    one.served._take = watched

    def reading() -> int:
        count = 0
        while not stop.is_set():
            count += sum(data is not None for data in serve(one.served, names))
        return count

    with ThreadPoolExecutor(4) as pool:
        readers = [pool.submit(reading) for _ in range(4)]
        text = prompt(9, 31)
        assert one.generate(text, 60) == reference("llama").greedy(text, 60)
        until(lambda: bool(held))
        stop.set()
        assert sum(reader.result(PATIENCE) for reader in readers) > 0
    assert 0 < max(held) <= 128 // 8
    one.check()


def test_blocks_come_and_go_while_they_are_read(giver: Any) -> None:
    """While blocks are evicted and recomputed under the readers, each frame holds the block that it names."""
    one = giver(blocks=96)
    texts = [prompt(100, 40 + number) for number in range(6)]
    truth: dict[bytes, np.ndarray] = {}
    for tokens in texts:
        one.generate(tokens, 1)
        for name, data in zip(one.names(tokens), serve(one.served, one.names(tokens)), strict=True):
            if data is not None:
                truth[name] = payload(data)
    assert len(truth) > 60
    stop = threading.Event()

    def reading(seed: int) -> int:
        draw, count, ends = random.Random(seed), 0, time.monotonic() + PATIENCE
        while not stop.is_set() or (not count and time.monotonic() < ends):
            names = one.names(draw.choice(texts))[: draw.randint(1, 25)]
            for name, data in zip(names, serve(one.served, names), strict=True):
                if data is not None and name in truth:
                    assert check(memoryview(data), name)
                    assert np.allclose(payload(data), truth[name], atol=1e-3)
                    count += 1
        return count

    with ThreadPoolExecutor(3) as pool:
        readers = [pool.submit(reading, seed) for seed in range(3)]
        for number in range(40):
            one.generate(texts[number * 5 % 6], 2)
        stop.set()
        assert all(reader.result(PATIENCE) > 0 for reader in readers)
    one.check()


def payload(data: bytes) -> np.ndarray:
    return np.frombuffer(data[:-HEADER_BYTES], np.float32)


def test_reading_keeps_a_chain_in_order(giver: Any) -> None:
    """Reading only the last blocks of a chain counts as use of all of it: no parent is evicted before its child."""
    one = giver(blocks=64)
    first, second = prompt(64, 50), prompt(64, 51)
    one.generate(first, 1)
    one.generate(second, 1)
    names = one.names(first)
    assert all(serve(one.served, names[8:12])) and all(serve(one.served, names[12:]))
    one.check()
    until(lambda: one.served.settled)
    one.generate(prompt(120, 52), 1)
    device = [one.served.locate([name], time.monotonic() + PATIENCE) for name in names]
    assert device == sorted(device, reverse=True) and any(device)


def test_an_engine_that_has_ended(giver: Any) -> None:
    """A closed engine gives nothing, and its readers do not wait."""
    one = giver(None, MEMORY)
    tokens = prompt(60, 60)
    one.generate(tokens)
    names = one.names(tokens)
    assert all(serve(one.served, names))
    one.engine.close()
    assert serve(one.served, names) == [None] * len(names)


def test_an_engine_that_is_busy(giver: Any) -> None:
    """A reader gets nothing if the engine's step takes longer than the deadline, and nothing stays held."""
    one = giver()
    tokens = prompt(60, 61)
    one.generate(tokens)
    go_on, begun = threading.Event(), threading.Event()

    def step() -> None:
        begun.set()
        assert go_on.wait(PATIENCE)

    one.engine.post(step)
    assert begun.wait(PATIENCE)
    names = one.names(tokens)
    assert one.served.locate(names, time.monotonic() + PATIENCE) == 15
    found = [one for batch in one.served.get(names, 1 << 20, time.monotonic() + 0.05) for one in batch]
    assert found in ([], [None] * 15)
    go_on.set()
    one.check()
    assert all(serve(one.served, names))


def test_what_does_not_fit_is_not_given(giver: Any) -> None:
    """Frames longer than the reader allows, and blocks of another layout, are missing."""
    one = giver()
    tokens = prompt(60, 62)
    one.generate(tokens)
    names = one.names(tokens)
    assert serve(one.served, names, 100) == [None] * 15
    foreign = [b"x" * 16 + name[16:] for name in names]
    assert serve(one.served, foreign) == [None] * 15
    assert one.served.locate(foreign, time.monotonic() + PATIENCE) == 0
    assert one.served.locate([*names[:3], foreign[3], *names[4:]], time.monotonic() + PATIENCE) == 3
    one.check()


def test_places_in_chains() -> None:
    """`ChainIndex` knows each block's parent and depth, through branches, repetitions and evictions, and forgets
    evicted blocks."""
    chains = ChainIndex()
    chains.notify(BlocksStored(b"root", (b"a", b"b")))
    chains.notify(BlocksStored(b"b", (b"c", b"d")))
    chains.notify(BlocksStored(b"b", (b"e",)))
    chains.notify(BlocksStored(b"root", (b"a",)))
    assert [chains.place(key) for key in (b"a", b"d", b"e")] == [(b"root", 0), (b"c", 3), (b"b", 2)]
    assert chains.before(b"d") == [b"a", b"b", b"c"] and chains.before(b"a") == chains.before(b"x") == []
    chains.notify(BlocksRemoved((b"d", b"e", b"x")))
    assert chains.place(b"d") is None and len(chains) == 3
