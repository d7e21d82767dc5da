"""Services for the tests: real blocks of a real pool on the destination, and KV whose content is unique per block."""

import queue
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from hashlib import sha256

from foreword.blocks.layout import LayerLayout, Layout
from foreword.blocks.pool import BlockPool
from foreword.transfer.errors import TransferError
from foreword.transfer.link import Payload
from foreword.transfer.parts import payload_bytes, split
from foreword.transfer.transfers import KVDestination, KVSource, TransferService, TransferSide
from foreword.transfer.wire_format import Buffer, KVPart, Reason, split_keys
from foreword.transfer_config import TransferConfig

PATIENCE = 60.0
LAYOUT = Layout(b"model", 16, (LayerLayout(2, 16, 16),) * 3, "bfloat16")
# No deadline is reached because a machine is busy; a peer is gone after 50 seconds without a sign of life.
PATIENT = {
    "answer_timeout": 60.0,
    "progress_timeout": 60.0,
    "lease_seconds": 60.0,
    "beat_seconds": 10.0,
    "connect_timeout": 60.0,
}
# For those that wait for such an end.
QUICK = {"answer_timeout": 2.0, "progress_timeout": 2.0, "lease_seconds": 2.0, "beat_seconds": 0.5}


def config(**other: object) -> TransferConfig:
    """Small buffers and long time limits, unless given."""
    return TransferConfig(**{"ring": "1MiB", **PATIENT, **other})  # type: ignore[arg-type]


def until(condition: Callable[[], bool]) -> None:
    """Wait until another thread has done something."""
    ends = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < ends, "the condition did not become true"
        time.sleep(0.005)


def keys_of(seed: int, tokens: int) -> list[bytes]:
    return [sha256(f"{seed}/{number}".encode()).digest() for number in range(tokens // LAYOUT.block_size)]


def content(seed: int, part: KVPart) -> bytes:
    """The KV of a part: the same for the same block and layer in any part."""
    pieces = []
    per_token = LAYOUT.item_bytes * LAYOUT.layers[0].elements
    for layer in range(part.first_layer, part.first_layer + part.layers):
        left = part.tokens
        for block in range(part.first_block, part.first_block + part.blocks):
            tokens = min(left, LAYOUT.block_size)
            left -= tokens
            pieces.append(random.Random(f"{seed}/{layer}/{block}").randbytes(tokens * per_token))
    data = b"".join(pieces)
    assert len(data) == payload_bytes(LAYOUT, part)
    return data


def parts_of(seed: int, tokens: int, first: int = 0, target: int = 20_000) -> Iterator[tuple[KVPart, bytes]]:
    for part in split(
        LAYOUT, tokens - first * LAYOUT.block_size, keys_of(seed, tokens)[first:], first_block=first, target=target
    ):
        yield part, content(seed, part)


class Recorder(TransferService):
    """Puts its notifications into a queue that tests can wait for."""

    def __init__(self, layout: Layout | None = LAYOUT) -> None:
        super().__init__(layout)
        self.heard: queue.Queue[tuple[str, TransferSide]] = queue.Queue()
        self.ends: dict[bytes, int] = {}
        self.lock = threading.Lock()

    def await_(self, what: str) -> TransferSide:
        """The transfer of the next notification of this kind; other notifications are skipped."""
        while True:
            said, transfer = self.heard.get(timeout=PATIENCE)
            if said == what:
                return transfer

    def accepted(self, transfer: TransferSide) -> None:
        self.heard.put(("accepted", transfer))

    def ended(self, transfer: TransferSide) -> None:
        with self.lock:
            self.ends[transfer.id] = self.ends.get(transfer.id, 0) + 1
        self.heard.put(("ended", transfer))


class Prefill(Recorder):
    """Computes pulled KV: `request` is `seed tokens`; sends the parts and `result seed`.

    Attributes:
        stop: `asked`, `refused` or `sending`: goes no further than that.
        cut_off: the sources whose transfers ended while they were being computed, as a real engine's may at any time.
    """

    def __init__(self, stop: str = "", tell: Callable[[str], None] = lambda what: None) -> None:
        super().__init__()
        self.stop = stop
        self.tell = tell
        self.cut_off: list[KVSource] = []

    def pull_requested(self, source: KVSource) -> None:
        self.heard.put(("wanted", source))
        threading.Thread(target=self.compute, args=(source,), daemon=True).start()

    def compute(self, source: KVSource) -> None:
        """Runs on its own thread. An error after the end of the transfer is expected; any other error is raised."""
        try:
            self._compute(source)
        except TransferError:
            if source.wait(PATIENCE) is None:
                raise
            with self.lock:
                self.cut_off.append(source)

    def _compute(self, source: KVSource) -> None:
        seed, tokens = map(int, source.request.split())
        if self.stop == "asked":
            return self.tell("asked")
        if self.stop == "refused":
            return source.refuse(Reason.FULL, "no room for it here")
        source.accept()
        return self.send(source, seed, tokens, source.have)

    def send(self, source: KVSource, seed: int, tokens: int, first: int) -> None:
        for number, (part, data) in enumerate(parts_of(seed, tokens, first)):
            if self.stop == "sending" and number == 2:
                return self.tell("sending")
            source.send(part, [data])
        source.finish(f"result {seed}".encode(), tokens)
        return self.tell("delivered")


class Decode(Recorder):
    """Receives KV into blocks of a pool and checks its content.

    Attributes:
        stop: `considered`, `receiving` or `complete`: goes no further than that.
        wrong: parts whose content is wrong.
        keys: the key of each full block that has arrived.
    """

    def __init__(self, blocks: int = 256, stop: str = "", tell: Callable[[str], None] = lambda what: None) -> None:
        super().__init__()
        self.pool = BlockPool(blocks)
        self.stop = stop
        self.tell = tell
        self.wrong: list[str] = []
        self.results: list[bytes] = []
        self.taken_bytes = 0
        self.keys: dict[int, bytes] = {}

    def hold(self, tokens: int) -> dict[str, list[int]] | None:
        """Blocks for so many tokens, as a transfer's context; None if there are too few."""
        count = -(-tokens // LAYOUT.block_size)
        with self.lock:
            blocks = self.pool.allocate(count)
        return None if blocks is None else {"blocks": blocks}

    def push_requested(self, destination: KVDestination) -> None:
        self.heard.put(("offered", destination))
        if self.stop == "considered":
            return self.tell("considered")
        _, tokens = map(int, destination.request.split())
        destination.context = self.hold(tokens)
        if destination.context is None:
            return destination.refuse(Reason.FULL, "no blocks are free")
        return destination.accept(0)

    def part(self, destination: KVDestination, part: KVPart, payload: Payload) -> None:
        seed = int(destination.request.split()[0])
        with payload as view:
            if view != content(seed, part):
                self.wrong.append(f"{part}")
            self.taken_bytes += len(view)
        self.keys.update(enumerate(split_keys(part.keys), start=part.first_block))
        self.heard.put(("part", destination))
        if self.stop == "receiving":
            self.tell("receiving")

    def finished(self, destination: KVDestination, result: bytes, tokens: int) -> None:
        self.results.append(result)
        self.heard.put(("finished", destination))
        if self.stop == "complete":
            self.tell("complete")
        else:
            destination.take()

    def ended(self, transfer: TransferSide) -> None:
        if transfer.context:
            with self.lock:
                self.pool.release(transfer.context["blocks"])
                transfer.context = None
        super().ended(transfer)

    def check(self) -> None:
        """Nothing leaked: every block is free again, the pool's check passes, and each end was notified once."""
        self.pool.check()
        assert self.pool.num_free == self.pool.num_blocks
        assert set(self.ends.values()) <= {1}
        assert not self.wrong


class FrameService(Recorder):
    """Serves the frames that it has."""

    def __init__(self, frames: dict[bytes, bytes], batch: int = 3) -> None:
        super().__init__()
        self.frames = frames
        self.batch = batch

    def locate(self, names: Sequence[bytes], deadline: float) -> int:
        return next((n for n, name in enumerate(names) if name not in self.frames), len(names))

    def get(self, names: Sequence[bytes], longest: int, deadline: float) -> Iterator[Sequence[Buffer | None]]:
        scratch = bytearray(1 << 20)
        for start in range(0, len(names), self.batch):
            batch: list[Buffer | None] = []
            at = 0
            for name in names[start : start + self.batch]:
                data = self.frames.get(name)
                if data is None:
                    batch.append(None)
                    continue
                scratch[at : at + len(data)] = data
                batch.append(memoryview(scratch)[at : at + len(data)])
                at += len(data)
            yield batch
            scratch[:] = bytes(len(scratch))
