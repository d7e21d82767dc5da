"""A network that misbehaves between two engines, and a hundred transfers at once: outputs are those of one engine, and
no block stays held."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import random
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

import pytest
from pair import PATIENCE, QUICK, Answer, Node, ask, node, request, until
from tiny import prompt

from foreword.engine.request import SamplingParams
from foreword.transfer.errors import TransferError

PARAMS = SamplingParams(max_tokens=8, seed=7, logprobs=1)
MOVING = SamplingParams(max_tokens=200, seed=7, logprobs=1, ignore_eos=True)
TOKENS = 120
# Of a pull of so many tokens more bytes than this come from the source.
LONG = 85_000
SWAPPED = 256


@pytest.fixture(scope="module")
def nodes(folder: Callable[[str], Path]) -> Iterator[tuple[Node, Node]]:
    yield from two(folder, {"links": ("tcp",), **QUICK})


@pytest.fixture(scope="module")
def patient(folder: Callable[[str], Path]) -> Iterator[tuple[Node, Node]]:
    yield from two(folder, {"links": ("tcp",)})


def two(folder: Callable[[str], Path], transfer: dict[str, Any]) -> Iterator[tuple[Node, Node]]:
    prefill, decode = (node(folder("llama"), "both", transfer=transfer) for _ in range(2))
    yield prefill, decode
    decode.engine.close()
    prefill.engine.close()


class Wire:
    """Passes bytes between a client and `target`, and misbehaves once, at byte `at` of those that come back (with
    `up`: that go there). `flip` changes a bit, `drop` leaves bytes out, `swap` exchanges two stretches, `cut`
    breaks the connection, `stall` passes nothing more."""

    def __init__(self, target: str, fault: str, at: int, *, up: bool = False) -> None:
        self._up = up
        host, _, port = target.rpartition(":")
        self._target = (host, int(port))
        self._fault, self._at = fault, at
        self._passed = 0
        self._over = threading.Event()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._sockets: list[socket.socket] = [self._listener]
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self.done = False

    def __enter__(self) -> Wire:
        threading.Thread(target=self._run, daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        for one in self._sockets:
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()

    def _run(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                server = socket.create_connection(self._target)
                self._sockets += [client, server]
                threading.Thread(target=self._pump, args=(client, server, self._up), daemon=True).start()
                threading.Thread(target=self._pump, args=(server, client, not self._up), daemon=True).start()

    def _pump(self, source: socket.socket, target: socket.socket, spoiled: bool) -> None:
        with contextlib.suppress(OSError):
            while data := bytearray(source.recv(65536)):
                while spoiled and not self.done and 0 <= self._at - self._passed < len(data) < self._needed():
                    data += source.recv(65536)
                target.sendall(self._spoil(data) if spoiled and not self.done else data)
        for one in (source, target):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)

    def _needed(self) -> int:
        return self._at - self._passed + 2 * SWAPPED

    def _spoil(self, data: bytearray) -> bytearray:
        at = self._at - self._passed
        self._passed += len(data)
        if not 0 <= at < len(data):
            return data
        self.done = True
        middle, end = at + SWAPPED, at + 2 * SWAPPED
        if self._fault == "flip":
            data[at] ^= 1 << self._at % 8
        elif self._fault == "drop":
            del data[at:middle]
        elif self._fault == "swap":
            data[at:end] = data[middle:end] + data[at:middle]
        elif self._fault == "cut":
            raise OSError("cut")
        else:
            self._over.wait(PATIENCE)
        return data


FAULTS = ["flip", "drop", "swap", "cut", "stall"]


@pytest.mark.parametrize(
    "fault", [pytest.param(fault, marks=[] if fault == "flip" else pytest.mark.slow) for fault in FAULTS]
)
def test_a_prompt_over_a_wire_that_misbehaves(nodes: tuple[Node, Node], fault: str) -> None:
    """A remote prefill over a network that misbehaves at a random byte gives the right output, the failure is counted,
    and both pools are whole."""
    here, there = nodes
    draw = random.Random(fault)

    async def main() -> None:
        tokens = prompt(TOKENS, 1)
        alone = await ask(here.engine, tokens, PARAMS)
        for _ in range(1 if fault == "stall" else 6):
            for each in nodes:
                await each.fresh()
            with Wire(here.address, fault, draw.randrange(600, LONG)) as wire:
                found = await ask(there.engine, tokens, PARAMS, wire.address)
                assert wire.done, "the fault never came"
                assert found.same(alone)
                [ended] = there.said.transfers
                assert ended.outcome in ("lost", "content", "gaps", "deadline")
            for each in nodes:
                await each.whole()

    asyncio.run(main())


async def moved(here: Node, there: Node, tokens: list[int], address: str) -> Answer:
    """The output of a request that is to migrate to `there` at this address, wherever it continues."""
    answer, asked = Answer(), request(tokens, MOVING)
    stream = here.engine.generate(asked)
    here.valve.pace = 0.05
    while len(answer.tokens) < 5:
        answer.add(await anext(stream))
    moving = asyncio.create_task(here.engine.migrate(asked.id, address))
    async for delta in stream:
        answer.add(delta)
        if moving.done():
            here.valve.pace = 0.0
    with contextlib.suppress(TransferError):
        name = (await moving).request_id
        async for delta in there.engine.follow(name):
            answer.add(delta)
    return answer


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_a_request_over_a_wire_that_misbehaves(nodes: tuple[Node, Node], fault: str) -> None:
    """A migration over a network that misbehaves at a random byte changes no output: the request continues at the
    source, or at the destination if all of it had come, and never at both; both pools are whole."""
    here, there = nodes
    draw = random.Random(fault)

    async def main() -> None:
        tokens = prompt(TOKENS, 2)
        alone = await ask(here.engine, tokens, MOVING)
        for number in range(2 if fault == "stall" else 6):
            for each in nodes:
                await each.fresh()
            at = draw.randrange(600, LONG if number % 2 else LONG + 15_000)
            with Wire(there.address, fault, at, up=True) as wire:
                found = await moved(here, there, tokens, wire.address)
                assert wire.done or at > LONG, "the fault never came"
                assert found.same(alone)
                assert at > LONG or not any(one.outcome == "taken" for one in there.said.transfers)
            for each in nodes:
                await each.whole()

    asyncio.run(main())


@pytest.mark.slow
def test_a_hundred_at_once(patient: tuple[Node, Node]) -> None:
    """A hundred remote prefills at once, more than both pools hold, a tenth of them cancelled: the others get the
    right output, every transfer is counted on both sides, and both pools pass their check."""
    prefill, decode = patient

    async def main() -> None:
        texts = [prompt(40, 3)[: 8 * (i % 3)] + prompt(8 + i % 30, 900 + i) for i in range(100)]
        params = dataclasses.replace(PARAMS, max_tokens=4)
        expected = await asyncio.gather(*(ask(decode.engine, text, params) for text in texts))
        for each in patient:
            await each.fresh()
        tasks = [asyncio.create_task(ask(decode.engine, text, params, prefill.address)) for text in texts]
        await until(lambda: len(decode.said.transfers) >= 5)
        for task in tasks[9::10]:
            task.cancel()
        found = await asyncio.gather(*tasks, return_exceptions=True)
        stayed = [number for number in range(100) if not tasks[number].cancelled()]
        assert len(stayed) >= 90
        for number in stayed:
            answer = found[number]
            assert isinstance(answer, Answer) and answer.same(expected[number])
        for each in patient:
            await each.whole()
        outcomes = [(one.side, one.outcome) for one in decode.said.transfers]
        assert outcomes.count(("destination", "taken")) >= 90
        assert set(outcomes) <= {("destination", "taken"), ("destination", "cancelled")}

    asyncio.run(main())
