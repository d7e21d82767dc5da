"""Races between an engine's work on a device and transfers of KV: planted ones are found, and there is none in transfers as
they are. The device's streams run as late, and in as odd an order, as CUDA allows (lazy_queues.py). Threads take turns at
random, also while one of them waits for the device."""

from __future__ import annotations

import random
import threading
from collections import Counter, deque
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from example_counts import represented
from lazy_queues import LazyQueues
from torch import Tensor

from foreword.blocks.keys import KEY_BYTES
from foreword.disaggregation import kv_transfer, kv_view
from foreword.disaggregation.kv_transfer import KVRange, KVReceive, KVSend, KVSender
from foreword.disaggregation.kv_view import DeviceRows, KVView
from foreword.engine.paged_layers import layout_of
from foreword.offload.device import Stream
from foreword.transfer.errors import TransferError
from foreword.transfer.parts import split
from foreword.transfer.wire_format import Buffer, KVPart

COMPUTE, SAVE, LOAD = Stream.COMPUTE, Stream.SAVE, Stream.LOAD
BLOCKS, SIZE, LAYERS, WIDTHS = 7, 2, 2, (8, 6)
SEEDS, TURNS = 30, 150


class Paged(NamedTuple):
    """Keys and values of a layer, with rows of `WIDTHS` bytes."""

    k_blocks: Tensor
    v_blocks: Tensor


class Threads:
    """Stand-in for the parts of `threading` that kv_transfer has, and the threads that it starts: they run when it is their
    turn, and end when they would wait."""

    def __init__(self) -> None:
        self.ready: list[Callable[[], object]] = []

    def start(self, run: Callable[[], object], _name: str) -> None:
        self.ready.append(run)

    def Condition(self) -> Any:
        return Condition()

    def Lock(self) -> Any:
        return nullcontext()


class Condition(nullcontext[None]):
    def notify_all(self) -> None: ...

    def wait_for(self, predicate: Callable[[], object], _: float) -> object:
        return predicate()


@dataclass(eq=False)
class Channel:
    largest: int


@dataclass(eq=False)
class Prompt:
    """A prompt whose KV is sent while it is computed, and the sending side of its transfer."""

    blocks: list[int]
    tokens: int
    channel: Channel
    engine: Engine
    computed: int = 0
    ended: bool = False
    have, reason = 0, None
    values: list[list[int]] = field(default_factory=lambda: [[] for _ in range(LAYERS)])

    def send(self, part: KVPart, buffers: Sequence[Buffer], *, sent: Callable[[], None], wait: float) -> bool:
        """The link sends it later."""
        self.check(part, buffers)
        if self.ended:
            sent()
            raise TransferError("it has ended")
        self.engine.link.append((partial(self.check, part, buffers), sent))
        return True

    def check(self, part: KVPart, buffers: Sequence[Buffer]) -> None:
        self.engine.wrong.append(joined(buffers) != payload(part, self.values))

    def finish(self, result: bytes, tokens: int) -> None: ...

    def cancel(self, *_: object) -> None: ...


@dataclass(eq=False)
class Arrival:
    """KV that comes from another instance: its parts that did not come yet, and what they have, by layer and token."""

    receive: KVReceive
    blocks: list[int]
    parts: list[KVPart]
    values: list[list[int]]


class CheckedView(KVView):
    """Compares what is read from a device, also if it is not sent then, with what the blocks had at the mark."""

    engine: Engine
    marks: dict[int, tuple[Any, list[list[int]]]]

    def mark(self) -> Any:
        mark = super().mark()
        self.marks[id(mark)] = mark, [[*layer] for layer in self.engine.content]
        return mark

    def read(self, part: KVPart, blocks: Sequence[int], mark: Any = None) -> list[Buffer]:
        buffers = super().read(part, blocks, mark)
        if mark is not None:
            slots = slots_of(blocks, range(part.tokens))
            values = [[layer[slot] for slot in slots] for layer in self.marks[id(mark)][1]]
            self.engine.wrong.append(joined(buffers) != payload(replace(part, first_block=0), values))
        return buffers


def joined(buffers: Sequence[Buffer]) -> bytes:
    return b"".join(map(bytes, buffers))


def payload(part: KVPart, values: Sequence[Sequence[int]]) -> bytes:
    first = part.first_block * SIZE
    of_layers = values[part.first_layer : part.first_layer + part.layers]
    rows = [(width, one[first : first + part.tokens]) for one in of_layers for width in WIDTHS]
    return b"".join(bytes([value]) * width for width, found in rows for value in found)


def slots_of(blocks: Sequence[int], tokens: range) -> list[int]:
    return [blocks[token // SIZE] * SIZE + token % SIZE for token in tokens]


class Engine:
    """An engine that computes prompts for others, other requests, and takes KV from others; and the threads of its transfers.

    Attributes:
        wrong: of each comparison, whether it has found other bytes than the order of the engine's calls gives.
    """

    def __init__(self, seed: int, threads: Threads, on_device: bool) -> None:
        self.chance, self.threads, self.on_device = random.Random(seed), threads, on_device
        self.queues = LazyQueues(seed, self.meanwhile)
        shapes = [(BLOCKS, SIZE, 1, width // 2) for width in WIDTHS]
        layers = {one: Paged(*(torch.zeros(shape, dtype=torch.float16) for shape in shapes)) for one in range(LAYERS)}
        self.rows = [[one.flatten(0, 1).flatten(1).view(torch.uint8) for one in layer] for layer in layers.values()]
        self.view = CheckedView(layers, layout_of(layers, b"model"), (lambda: self.queues) if on_device else None)
        self.view.engine, self.view.marks = self, {}
        self.content = [[0] * (BLOCKS * SIZE) for _ in range(LAYERS)]
        self.users: Counter[int] = Counter()
        self.inbox: list[Callable[[], object]] = []
        cache = SimpleNamespace(pool=self, unpin=self.unpin)
        core: Any = SimpleNamespace(cache=cache, notify=lambda event: None)
        self.sender = kv_transfer.KVSender(core, self.view, self.post)
        self.channels = [Channel(40), Channel(4096)]
        self.prompts: list[tuple[Prompt, KVSend]] = []
        self.sends: list[tuple[Prompt, KVSend]] = []
        self.link: deque[tuple[Callable[[], None], Callable[[], None]]] = deque()
        self.expected: list[KVReceive] = []
        self.arrivals: list[Arrival] = []
        self.wrong: list[bool] = []
        self._values, self._closing = 0, False

    # Blocks

    def take(self) -> list[int]:
        free = [block for block in range(BLOCKS) if self.users[block] <= 0]
        blocks = self.chance.sample(free, min(len(free), self.chance.randint(1, 3)))
        self.share(blocks)
        return blocks

    def share(self, blocks: Sequence[int]) -> None:
        self.users.update(blocks)

    def unpin(self, blocks: Sequence[int]) -> None:
        self.users.subtract(blocks)

    # The model

    def compute(self, work: Callable[[], object]) -> None:
        if self.on_device:
            self.queues.submit(COMPUTE, work)
        else:
            work()

    def value(self) -> int:
        self._values = self._values % 255 + 1
        return self._values

    def fill(self, layer: int, slots: Sequence[int], value: int) -> None:
        for slot in slots:
            self.content[layer][slot] = value
            self.compute(lambda slot=slot: [rows[slot].fill_(value) for rows in self.rows[layer]])  # type: ignore[misc]

    def show(self, slots: Sequence[int]) -> None:
        """A step reads what the slots have by now."""
        for layer in range(LAYERS):
            for slot in slots:
                self.compute(partial(self._compare, layer, slot, self.content[layer][slot]))

    def _compare(self, layer: int, slot: int, value: int) -> None:
        self.wrong += [rows[slot].tolist() != [value] * rows.shape[1] for rows in self.rows[layer]]

    # Turns of the engine's thread

    def post(self, work: Callable[[], object]) -> bool:
        self.inbox.append(work)
        return True

    def collect(self) -> None:
        posted, self.inbox = self.inbox, []
        for work in posted:
            work()

    def begin(self) -> None:
        blocks = self.take()
        if blocks:
            tokens = len(blocks) * SIZE - self.chance.randrange(SIZE)
            prompt = Prompt(blocks, tokens, self.chance.choice(self.channels), self)
            chain = SimpleNamespace(keys_to=lambda count: [bytes(KEY_BYTES)] * count)
            sequence: Any = SimpleNamespace(table=SimpleNamespace(blocks=blocks, chain=chain))
            source: Any = prompt
            self.prompts.append((prompt, kv_transfer.KVSend(self.sender, source, "prefill", sequence)))
            self.sends.append(self.prompts[-1])

    def step(self) -> None:
        """Compute a chunk of a prompt. After its last one, or when it is aborted, its blocks are given back."""
        if not self.prompts:
            return
        prompt, send = self.chance.choice(self.prompts)
        if self.chance.random() < 0.9:
            start, end = prompt.computed, self.chance.randint(prompt.computed + 1, prompt.tokens)
            last, prompt.computed = end == prompt.tokens, end
            kv = None if send.over else send.reserve(end if last else end // SIZE * SIZE)
            for layer in range(LAYERS):
                value = self.value()
                self.fill(layer, slots_of(prompt.blocks, range(start, end)), value)
                prompt.values[layer] += [value] * (end - start)
                if kv is not None:
                    send.put(kv, layer, layer + 1)
            if not last:
                return
            send.finish(b"", prompt.tokens)
        self.prompts.remove((prompt, send))
        self.unpin(prompt.blocks)

    def other(self) -> None:
        """Another request uses blocks, and gives them back."""
        blocks = self.take()
        slots = slots_of(blocks, range(len(blocks) * SIZE))
        for layer in range(LAYERS):
            self.fill(layer, slots, self.value())
        if self.chance.random() < 0.5:
            self.show(slots)
        self.unpin(blocks)

    def expect(self) -> None:
        if len(self.expected) < 3:
            self.expected.append(kv_transfer.KVReceive(self.view))

    def receive(self) -> None:
        blocks = self.take() if self.expected else []
        if blocks:
            receive, tokens = self.expected.pop(0), len(blocks) * SIZE - self.chance.randrange(SIZE)
            keys = [bytes(KEY_BYTES)] * (tokens // SIZE)
            parts = [*split(self.view.layout, tokens, keys, target=self.chance.choice((40, 4096)))]
            receive.begin(keys, 0, blocks)
            values = [[self.value() for _ in range(tokens)] for _ in range(LAYERS)]
            self.arrivals.append(Arrival(receive, blocks, parts, values))

    def take_over(self) -> None:
        """A step reads KV that has come whole."""
        for one in [one for one in self.arrivals if not one.parts]:
            self.arrivals.remove(one)
            self.show(slots_of(one.blocks, range(len(one.values[0]))))
            self.unpin(one.blocks)

    # Turns of other threads

    def send(self) -> None:
        if self.threads.ready:
            self.threads.ready.pop(self.chance.randrange(len(self.threads.ready)))()

    def sent(self) -> None:
        if self.link:
            check, sent = self.link.popleft()
            check()
            sent()

    def end(self) -> None:
        """The peer has everything, or cancels."""
        if self.sends:
            prompt, send = self.sends.pop(self.chance.randrange(len(self.sends)))
            prompt.ended = True
            send.end()

    def arrive(self) -> None:
        coming = [one for one in self.arrivals if one.parts]
        if coming:
            one = self.chance.choice(coming)
            self.arrivals.remove(one)  # not closed while a part is written
            part = one.parts.pop(0)
            came: Any = nullcontext(memoryview(payload(part, one.values)))
            one.receive.part(part, came)
            first = part.first_block * SIZE
            for layer in range(part.first_layer, part.first_layer + part.layers):
                for token, slot in enumerate(slots_of(one.blocks, range(first, first + part.tokens)), first):
                    self.content[layer][slot] = one.values[layer][token]
            self.arrivals.append(one)

    # All threads

    def turn(self) -> None:
        own = [self.begin, *[self.step] * 3, *[self.other] * 2, self.expect, self.receive, self.take_over]
        others = [*[self.send] * 2, *[self.sent] * 2, *[self.arrive] * 2, self.end]
        action = self.chance.choice(own + others)
        if action in own:
            self.collect()
        action()

    def meanwhile(self) -> None:
        while not self._closing and self.chance.random() < 0.5:
            self.turn()

    def close(self) -> None:
        """Let all transfers come to their ends, and compare what blocks have then."""
        self._closing = True
        while self.prompts or self.sends or self.link or self.arrivals or self.threads.ready:
            for action in (self.step, self.send, self.sent, self.arrive, self.take_over, self.end):
                action()
        self.collect()
        self.show(range(BLOCKS * SIZE))
        if self.on_device:
            self.queues.record(COMPUTE).synchronize()
        self.wrong.append(any(self.users.values()))


@torch.inference_mode()
def wrong_bytes(seed: int, monkeypatch: pytest.MonkeyPatch, on_device: bool = True) -> bool:
    """Whether a random run of an engine and its transfers finds other bytes than the order of the engine's calls gives, or
    blocks that are not given back once."""
    threads = Threads()
    monkeypatch.setattr(kv_transfer, "threading", threads)
    monkeypatch.setattr(kv_transfer, "background_thread", threads.start)
    engine = Engine(seed, threads, on_device)
    for _ in range(TURNS):
        engine.turn()
    engine.close()
    return any(engine.wrong)


class Copies(DeviceRows):
    """The copies step by step, so that a race can be planted in each."""

    def _run(self, stream: Stream, copy: Callable[[], object], mark: Any) -> None:
        self.after(stream, mark)
        self._queues().submit(stream, copy)
        self.end(stream)

    def after(self, stream: Stream, mark: Any) -> None:
        self._queues().wait(stream, mark)

    def end(self, stream: Stream) -> None:
        self._queues().record(stream).synchronize()


class ReadBesideTheModel(Copies):
    def after(self, stream: Stream, mark: Any) -> None:
        if stream is LOAD:
            super().after(stream, mark)


class WriteBesideTheModel(Copies):
    def after(self, stream: Stream, mark: Any) -> None:
        if stream is SAVE:
            super().after(stream, mark)


class MarkAfterTheCopy(Copies):
    def _run(self, stream: Stream, copy: Callable[[], object], mark: Any) -> None:
        self._queues().submit(stream, copy)
        self.after(stream, mark)
        self.end(stream)


class ReadReturnsEarly(Copies):
    def end(self, stream: Stream) -> None:
        if stream is LOAD:
            super().end(stream)


class WriteReturnsEarly(Copies):
    def end(self, stream: Stream) -> None:
        if stream is SAVE:
            super().end(stream)


class EndBeforeTheCopy(Copies):
    def _run(self, stream: Stream, copy: Callable[[], object], mark: Any) -> None:
        self.after(stream, mark)
        end = self._queues().record(stream)
        self._queues().submit(stream, copy)
        end.synchronize()


class EndOfTheModel(Copies):
    def end(self, stream: Stream) -> None:
        super().end(COMPUTE)


class MarkOfTheCopies(Copies):
    def mark(self) -> Any:
        return self._queues().record(SAVE)


class FirstMarkForAll(Copies):
    def mark(self) -> Any:
        self.first = getattr(self, "first", None) or super().mark()
        return self.first


class MarkBeforeTheStep(KVSend):
    def reserve(self, tokens: int) -> KVRange | None:
        kv = super().reserve(tokens)
        return kv and replace(kv, mark=self._sender.view.mark())

    def put(self, kv: KVRange, low: int, high: int) -> None:
        self._sender.put(self, replace(kv, low=low, high=high))


class GivenBackWhileRead(KVSend):
    def end(self) -> None:
        if not self.over:
            self.over = True
            self._sender.released(self)

    def end_job(self) -> None: ...


class GivenBackWhenRead(KVSend):
    """A mutant that gives blocks back without waiting for the link. On a device that is no race: what is sent was copied."""

    def _send_part(self, part: KVPart, buffers: list[Buffer]) -> None:
        if not self.over:
            self.source.send(part, buffers, sent=lambda: None, wait=0.0)


class NotHeld(KVSender):
    def hold(self, send: KVSend, blocks: Sequence[int]) -> None: ...


class MarkWhenExpected(KVReceive):
    def __init__(self, view: KVView) -> None:
        super().__init__(view)
        self.early = view.mark()

    def begin(self, keys: Sequence[bytes], held: int, blocks: Sequence[int]) -> None:
        super().begin(keys, held, blocks)
        self._mark = self.early


class MarkOfTheFirstLayer(KVRange):
    def is_followed_by(self, other: KVRange) -> bool:
        if found := super().is_followed_by(other):
            object.__setattr__(other, "mark", self.mark)
        return found


def planted(*races: type) -> list[tuple[object, str, type]]:
    """The arguments that `monkeypatch.setattr` takes."""
    return [(kv_transfer, race.__mro__[1].__name__, race) for race in races]


IN_COPIES = [(kv_view, "DeviceRows", race) for race in Copies.__subclasses__()]
IN_TRANSFERS = planted(MarkBeforeTheStep, MarkOfTheFirstLayer, GivenBackWhileRead, NotHeld, MarkWhenExpected)
ON_A_CPU = planted(GivenBackWhileRead, GivenBackWhenRead, NotHeld)


@pytest.mark.parametrize("race", IN_COPIES + IN_TRANSFERS, ids=lambda race: race[2].__name__)
def test_a_planted_race_is_found(race: tuple[Any, str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Transfers that lack one order between a device's streams, or give blocks back early, read or leave wrong bytes."""
    monkeypatch.setattr(*race)
    assert any(wrong_bytes(seed, monkeypatch) for seed in range(SEEDS))


@pytest.mark.parametrize("race", ON_A_CPU, ids=lambda race: race[2].__name__)
def test_a_planted_race_is_found_on_a_cpu(race: tuple[Any, str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU parts are views: blocks that are given back before their parts were sent have wrong bytes."""
    monkeypatch.setattr(*race)
    assert any(wrong_bytes(seed, monkeypatch, on_device=False) for seed in range(SEEDS))


@pytest.mark.parametrize("seed", represented(range(SEEDS), *range(5)))
@pytest.mark.parametrize("on_device", [True, False])
def test_transfers_keep_their_order(seed: int, on_device: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the order in which a device's streams and threads run: a part that is sent has what the engine had written,
    though its request ends and other work wants the blocks; KV that comes is written after the work on the blocks' former
    content, and before the step that reads it; every block is given back once."""
    assert not wrong_bytes(seed, monkeypatch, on_device)


@pytest.mark.extended
def test_the_steps_without_a_race(monkeypatch: pytest.MonkeyPatch) -> None:
    """The steps that the planted races change are right without the races."""
    monkeypatch.setattr(kv_view, "DeviceRows", Copies)
    assert not any(wrong_bytes(seed, monkeypatch) for seed in range(SEEDS))


class CountedWakes(threading.Condition):
    """A condition that counts its wakes. `waits`: a thread is about to wait."""

    def __init__(self) -> None:
        super().__init__()
        self.wakes, self.waits = 0, threading.Event()

    def wait(self, timeout: float | None = None) -> bool:
        self.waits.set()
        return super().wait(timeout)

    def notify_all(self) -> None:
        self.wakes += 1
        super().notify_all()


@pytest.mark.parametrize("ending", ["end_job", "end"])
def test_a_sent_part_wakes_only_the_thread_that_waits_for_it(ending: str) -> None:
    """The queues of all peers share a condition. A part that was sent does not wake those that are idle, but the thread that
    waits for the last part, which the end of the transfer wakes, too."""
    sender = KVSender(SimpleNamespace(), SimpleNamespace(), lambda work: True)  # type: ignore[arg-type]
    sender.changed = changed = CountedWakes()
    send = KVSend(sender, SimpleNamespace(have=0), "move", SimpleNamespace())  # type: ignore[arg-type]
    for _ in range(4):
        assert send.start_job()
    send.end_job()
    assert changed.wakes == 0
    waits = threading.Thread(target=send.wait_sent, daemon=True)
    waits.start()
    assert changed.waits.wait(60)
    send.end_job()
    getattr(send, ending)()
    waits.join(60)
    assert not waits.is_alive() and changed.wakes == 2
    send.end_job()
    assert changed.wakes == 2
