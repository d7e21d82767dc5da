"""The timed steps of the GPU plan: what a tier of KV is worth on this GPU. Each yields rows as it finds them.

Same engine, same prompts, by turns: the load policy is the default, and nothing is loaded that a server would not load.
A row that is yielded again under the same words replaces the first.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gc
import mmap
import os
import platform
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast
from unittest import mock

from benchmarks.gpu.bench import (
    LARGE,
    TINY,
    Bench,
    Others,
    Row,
    Shapes,
    milliseconds,
    percentile,
    random_model,
    random_tokens,
    row,
    seconds_of,
    wait,
)
from benchmarks.harness import machine, median, version_of

GIB = 1 << 30
SLOT_PADDING = 4096  # a frame's header, in a slot that direct I/O can read


class Context:
    """Shared parts of one process's steps: the engine, which is made when a step first asks for it, and the time that is left.

    Args:
        disk: folder for the disk tiers.
    """

    def __init__(self, device: Any, tiny: bool, disk: Path) -> None:
        self.device, self.tiny, self.disk = device, tiny, disk
        self.shapes: Shapes = TINY if tiny else LARGE
        self._until = time.monotonic()
        self._bench: Bench | None = None
        self._arena: Any = None
        self._failed: str | None = None
        self.arena_bytes = 0

    def begin(self, seconds: float) -> None:
        """A step begins that may take so long."""
        self._until = time.monotonic() + seconds

    def left(self) -> float:
        """Seconds until the step should have its rows; not below 0."""
        return max(self._until - time.monotonic(), 0.0)

    def engine(self) -> Bench:
        """The engine. Raises RuntimeError if it could not be made before."""
        if self._failed is not None:
            raise RuntimeError(f"the engine did not start: {self._failed}")
        if self._bench is None:
            try:
                self._bench = self._make()
            except BaseException as error:
                self._failed = f"{type(error).__name__}: {error}"
                raise
        return self._bench

    def _make(self) -> Bench:
        import torch

        from foreword.engine.attention.backend import NAME

        shapes = self.shapes
        model, settings = random_model(shapes, self.device, torch.bfloat16, NAME)
        longest = max(shapes.lengths) + 64
        most = max(shapes.concurrent)
        together = max(most * (shapes.context + shapes.decode + 16), shapes.others * (shapes.context + 2000))
        options = {
            "max_num_seqs": most + 8, "max_batch_tokens": shapes.prefill, "max_model_len": longest,
            "kv_memory": f"{together + 2 * longest + 4096} tokens",
        }  # fmt: skip
        return Bench(model, settings, self.device, options, triton=self.device.type == "cuda")

    def arena(self) -> Any:
        """The staging arena of managers that copy through it; they work one after the other."""
        if self._arena is None:
            self.engine()
            before = taken(self.device)
            self._arena = self._new_arena(direct=False)
            self._arena.allocate()
            self.arena_bytes = taken(self.device) - before
        return self._arena

    def _new_arena(self, *, direct: bool) -> Any:
        from foreword.engine.paged_layers import tensors_of
        from foreword.offload.staging import StagingArena
        from foreword.store_config import StoreConfig

        tensors = tensors_of(self.engine().runner.layers)
        size = sum(tensor[0].numel() * tensor.element_size() for tensor in tensors)
        slots = max(StoreConfig(direct=direct).staging_bytes(self.device.type) // size, 8)
        slots = 48 if self.tiny else slots
        return StagingArena([tensors], slots, queues=inline_queues(self.device))

    def layout(self) -> Any:
        """The stored layout of the engine's blocks."""
        from foreword.engine.paged_layers import layout_of

        bench = self.engine()
        return layout_of(bench.runner.layers, bench.loaded.fingerprint)

    def manager(self, *stores: Any, direct: bool = False) -> Any:
        """An offload manager over stores, or URLs of stores, fastest first. `direct`: as the setting says."""
        from foreword.engine.external_kv import EngineStores
        from foreword.store.tiered import TieredStore
        from foreword.store.urls import open_store

        layout = self.layout()
        opened = (
            open_store(list(stores), layout) if all(isinstance(one, str) for one in stores) else TieredStore(stores)
        )
        arena = self._new_arena(direct=True) if direct else self.arena()
        return EngineStores(opened, arena, [layout], direct=direct)

    @contextlib.contextmanager
    def folder(self) -> Iterator[Path]:
        """A new folder for a disk tier."""
        self.disk.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=folder_prefix(os.getppid()), dir=self.disk) as folder:
            yield Path(folder)


def folder_prefix(plan: int) -> str:
    """Of the names of folders that the steps of a plan make, by its process: what a killed step leaves is removed by it."""
    return f"foreword-gpu-{plan}-"


def inline_queues(device: Any) -> Any:
    """Streams of the device: None is CUDA's, and the copies of a CPU. Where Triton's interpreter runs, the kernels of the
    device's path run in it, each at once."""
    if device.type == "cuda" or os.environ.get("TRITON_INTERPRET") != "1":
        return None

    class Done:
        def synchronize(self) -> None:
            """All that was queued has run."""

        def query(self) -> bool:
            return True

    running = threading.Lock()  # the interpreter changes Triton's own functions while a kernel runs in it

    class Inline:
        def submit(self, stream: Any, work: Callable[[], object]) -> None:
            with running:
                work()

        def record(self, stream: Any) -> Any:
            return Done()

        def wait(self, stream: Any, event: Any) -> None:
            """All that was queued has run."""

    return Inline()


def taken(device: Any) -> int:
    """Bytes of GPU memory that this process's tensors take."""
    if device.type != "cuda":
        return 0
    import torch

    return int(torch.cuda.memory_allocated())


def part(what: str, work: Callable[[], Row]) -> Row:
    """A row; if it cannot be had, a row that says why. The other rows of the step are worth having."""
    try:
        return work()
    except Exception as error:  # noqa: BLE001 - one row of a benchmark, which says so
        return row(what, "failed", f"{type(error).__name__}: {error}"[:300])


# Set-up


def facts_of(device: Any, tiny: bool) -> dict[str, str]:
    """The machine and the versions."""
    import torch

    here = machine()
    if device.type == "cuda":
        found = torch.cuda.get_device_properties(device)
        card, memory = torch.cuda.get_device_name(device), f"{found.total_memory / GIB:.0f} GiB"
    else:
        card, memory = "none: a CPU with tiny shapes" if tiny else "none: a CPU", "none"
    versions = {name: version_of(name) for name in ("torch", "triton", "transformers", "vllm", "xxhash")}
    return {
        "card": card, "GPU memory": memory, "driver": _nvidia("driver_version"), "CUDA": str(torch.version.cuda),
        "link": _nvidia("pcie.link.gen.current,pcie.link.width.current"), **versions, "Python": platform.python_version(),
        "cpu": here["cpu"], "cores": here["cores"], "memory": here["memory"], "kernel": platform.release(),
        "date": time.strftime("%Y-%m-%d"),
    }  # fmt: skip


def _nvidia(query: str) -> str:
    command = ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return done.stdout.strip().partition("\n")[0] or "unknown"


def step_setup(context: Context) -> Iterator[Row]:
    """Speeds of the host and the bus: the names of most costs below."""
    import torch
    import xxhash

    device, size = context.device, 1 << 16 if context.tiny else 256 << 20
    source, target = torch.zeros(size, dtype=torch.uint8), torch.zeros(size, dtype=torch.uint8)
    view = memoryview(cast(Any, source.numpy())).cast("B")
    cpu = torch.device("cpu")
    copied = seconds_of(lambda: ctypes.memmove(target.data_ptr(), source.data_ptr(), size), cpu, 3)
    hashed = seconds_of(lambda: xxhash.xxh3_128(view).digest(), cpu, 3)
    yield row("one core of the host: memcpy", f"{size / copied / 1e9:.1f} GB/s", memcpy=size / copied)
    yield row("one core of the host: XXH3-128", f"{size / hashed / 1e9:.1f} GB/s", hash=size / hashed)
    if device.type == "cuda":
        there = torch.empty(size, dtype=torch.uint8, device=device)
        pinned = torch.empty(size, dtype=torch.uint8, pin_memory=True)
        up = seconds_of(lambda: there.copy_(pinned, non_blocking=True), device)
        down = seconds_of(lambda: pinned.copy_(there, non_blocking=True), device)
        yield row(
            "the bus: to the device / to the host",
            f"{size / up / 1e9:.1f} / {size / down / 1e9:.1f} GB/s",
            bus=size / up,
        )
        other = torch.empty_like(there)
        moved = seconds_of(lambda: other.copy_(there), device)
        yield row("the device's memory, read and written", f"{2 * size / moved / 1e9:.0f} GB/s")


def step_engine(context: Context) -> Iterator[Row]:
    """The engine that all others use, and the memory that the tier takes."""
    shapes, begin = context.shapes, time.perf_counter()
    bench = context.engine()
    yield row(
        "start: weights, kernels, CUDA graphs",
        f"{time.perf_counter() - begin:.1f} s",
        f"{len(bench.runner.graph_sizes)} graphs",
    )
    tokens = bench.blocks * bench.config.block_size
    yield row("KV pool", f"{tokens:,} tokens", f"{bench.blocks * bench.runner.bytes_per_block / GIB:.1f} GiB")
    bench.generate([random_tokens(shapes.prefill, shapes.vocabulary, 1)], 2)
    times = []
    for seed in (2, 3):
        times.append(bench.first_token(random_tokens(shapes.prefill, shapes.vocabulary, seed))[0])
        bench.cache.clear()
    yield row(f"prefill of {shapes.prefill:,}", f"{shapes.prefill / min(times):,.0f} tok/s")
    seconds = bench.decode_seconds(shapes.others, shapes.context, shapes.steps, shapes.vocabulary)
    yield row(f"a step in which {shapes.others} decode", f"{seconds * 1e3:.1f} ms", step=seconds)
    bench.cache.clear()
    arena = context.arena()
    pinned = arena.slots * arena.frame_bytes
    yield row(
        "GPU memory that saving and loading take",
        f"{context.arena_bytes / (1 << 20):,.0f} MiB",
        f"and {pinned / (1 << 20):,.0f} MiB of the host's",
        bytes=context.arena_bytes,
    )


# Time to the first token


@dataclass
class Cell:
    """The TTFT of prompts of one length, from one place, idle or while others decode."""

    what: str
    seconds: list[float] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    equal: int = 0
    compared: int = 0
    steps: list[int] = field(default_factory=list)
    loaded: int = 0
    blocks: int = 0
    cpu: float = 0.0
    bytes: int = 0

    def row(self, computed: Cell | None, **keys: float) -> Row:
        """As a row, beside computing the same."""
        notes = [f"{len(self.seconds)} samples"]
        p50 = median(self.seconds)
        if computed is not None and computed.seconds:
            other = median(computed.seconds)
            notes.insert(0, f"computing {milliseconds(computed.seconds)}, {p50 / other:.0%} of it")
            keys["computed"] = other
        if self.blocks:
            notes.append(f"{self.loaded / self.blocks:.0%} of its blocks loaded")
        if self.bytes and self.cpu:
            notes.append(f"{self.cpu / (self.bytes / GIB):.2f} processor s per GiB")
        if self.compared:
            notes.append(f"first tokens as after an own hit {self.equal} of {self.compared}")
        if self.steps:
            notes.append(f"{median(self.steps):.0f} steps, {max(self.steps)} at most")
        if self.gaps:
            notes.append(f"ITL of the others {milliseconds(self.gaps)}")
        keys |= {"p50": p50, "p99": percentile(self.seconds, 0.99), "loaded": self.loaded / max(self.blocks, 1)}
        return row(self.what, milliseconds(self.seconds), "; ".join(notes), **keys)


class TtftRun:
    """Measures the cells of one place: prompts are computed, saved, and, when the device has forgotten them, asked again."""

    def __init__(self, context: Context, place: str, prompts: Sequence[int]) -> None:
        self.context, self.place = context, place
        self.shapes, self.bench = context.shapes, context.engine()
        self.others = Others(self.bench, self.shapes.others, self.shapes.context, self.shapes.vocabulary)
        self._cells = 4 * len(self.shapes.lengths)
        self._prompts = dict(zip(self.shapes.lengths, prompts, strict=True))
        self._seed = 0

    def prompt(self, length: int) -> list[int]:
        """A new one."""
        self._seed += 1
        return random_tokens(length, self.shapes.vocabulary, 10_000_000 + 1000 * length + self._seed)

    def limit(self) -> float:
        """When the next cell should end, by `time.monotonic`: the time that is left, in equal parts."""
        until = time.monotonic() + self.context.left() / max(self._cells, 1)
        self._cells -= 1
        return until

    def note(self, cell: Cell, prompt: list[int], expected: int | None, busy: bool) -> int:
        """One sample; the first token."""
        bench = self.bench
        if busy:
            self.others.ready(64 if not self.context.tiny else 4)
        wait(self.context.device)
        steps, bench.gaps = bench.core.steps, []
        cpu = time.process_time() - time.thread_time()
        seconds, token = bench.first_token(prompt)
        cell.seconds.append(seconds)
        cell.cpu += time.process_time() - time.thread_time() - cpu
        if busy:
            cell.gaps += bench.gaps
            cell.steps.append(bench.core.steps - steps)
        bench.gaps = None
        if expected is not None:
            cell.compared += 1
            cell.equal += token == expected
        return token

    def warm_up(self) -> None:
        """The speeds of computing and loading are known afterwards, as in a server that runs."""
        bench = self.bench
        for length in sorted(self.shapes.lengths)[:2]:
            prompt = self.prompt(length)
            bench.first_token(prompt)
            bench.offload.flush(20.0)
            bench.cache.clear()
            bench.first_token(prompt)
        bench.cache.clear()

    def rows(self, forget: Callable[[], None]) -> Iterator[Row]:
        """All cells. `forget` makes the tier cold, where it can be."""
        shapes, bench = self.shapes, self.bench
        for length, samples in zip(shapes.lengths, shapes.samples, strict=True):
            name = f"{length:,} tokens"
            tokens: list[tuple[list[int], int]] = []
            idle = Cell(f"{name}, computed, idle")
            until = self.limit()
            own = Cell(f"{name}, own hit on the device, idle")
            for _ in range(self._prompts[length]):
                prompt = self.prompt(length)
                self.note(idle, prompt, None, False)
                tokens.append((prompt, self.note(own, prompt, None, False)))
                bench.offload.flush(30.0)
                if time.monotonic() > until:
                    break
            bench.cache.clear()
            forget()
            yield idle.row(None)
            yield own.row(None)
            stored = Cell(f"{name}, from {self.place}, idle")
            self._sample(stored, tokens, samples, forget, busy=False)
            yield stored.row(idle, length=length)
            busy = Cell(f"{name}, computed, {shapes.others} decode")
            until = self.limit()
            for _ in tokens:
                self.note(busy, self.prompt(length), None, True)
                if time.monotonic() > until:
                    break
            yield busy.row(None)
            bench.cache.clear()
            stored = Cell(f"{name}, from {self.place}, {shapes.others} decode")
            self._sample(stored, tokens, samples, forget, busy=True)
            yield stored.row(busy, length=length)
            self.others.end()
            bench.finish()
            bench.cache.clear()

    def _sample(
        self, cell: Cell, tokens: list[tuple[list[int], int]], samples: int, forget: Callable[[], None], *, busy: bool
    ) -> None:
        bench, until = self.bench, self.limit()
        loaded = bench.offload.status().loaded
        for number in range(samples):
            prompt, token = tokens[number % len(tokens)]
            self.note(cell, prompt, token, busy)
            cell.blocks += len(prompt) // bench.config.block_size
            bench.cache.clear()
            forget()
            if time.monotonic() > until:
                break
        time.sleep(0.01)  # a load is counted after it has ended
        cell.loaded = bench.offload.status().loaded - loaded
        cell.bytes = cell.loaded * bench.runner.bytes_per_block


def step_ttft_memory(context: Context) -> Iterator[Row]:
    """TTFT from the memory tier."""
    shapes, bench = context.shapes, context.engine()
    tokens = sum(a * b for a, b in zip(shapes.lengths, shapes.prompts, strict=True)) + 2 * max(shapes.lengths)
    size = _room(tokens * shapes.kv_bytes * 13 // 10)
    bench.attach(manager := context.manager(f"memory://?size={size}"))
    run = TtftRun(context, "memory", shapes.prompts)
    try:
        run.warm_up()
        yield from run.rows(lambda: None)
        yield _counts("memory", manager)
    finally:
        _detach(bench, manager, run)


def step_ttft_disk(context: Context) -> Iterator[Row]:
    """TTFT from the disk tier, without the page cache where the system lets go of it."""
    shapes, bench = context.shapes, context.engine()
    prompts = [max(count * 3 // 5, 1) for count in shapes.prompts]
    with context.folder() as folder:
        # Written whole: a disk that is opened without one has no blocks to lose.
        bench.attach(manager := context.manager(f"disk://{folder}/kv?size=48GiB"))
        run = TtftRun(context, "disk", prompts)
        try:
            yield row("the disk tier's file system", file_system(folder), str(folder.parent))
            run.warm_up()
            shares: list[float] = []

            def forget() -> None:
                shares.append(forget_pages(folder))

            yield from run.rows(forget)
            known = [share for share in shares if share >= 0]
            cached = f"{max(known):.0%} of some files' pages at most" if known else "unknown"
            yield row("left in the page cache before a load", cached, f"dropped {len(shares)} times by posix_fadvise")
            yield _counts("disk", manager)
        finally:
            _detach(bench, manager, run)


def _room(size: int) -> int:
    """At most half of the memory that is available."""
    import psutil

    return int(min(max(size, 64 << 20), psutil.virtual_memory().available // 2))


def _counts(tier: str, manager: Any) -> Row:
    status = manager.status()
    offered = status.saved + status.dropped + status.failed
    return row(
        f"{tier}: blocks saved, loaded; loads cut, declined",
        f"{status.saved:,}, {status.loaded:,}; {status.cut}, {status.declined}",
        f"{status.dropped / max(offered, 1):.1%} of what was to be saved was dropped",
        dropped=status.dropped / max(offered, 1),
    )


def _detach(bench: Bench, manager: Any, run: TtftRun | None = None) -> None:
    """Serve without stores. A request that is left over ends."""
    bench.gaps = None
    if run is not None:
        run.others.end()
    bench.attach(None)
    manager.close(20.0)
    gc.collect()


def file_system(folder: Path) -> str:
    """Its type and the device, as the system names them."""
    try:
        lines = [line.split()[:3] for line in Path("/proc/mounts").read_text().splitlines()]
    except OSError:
        return "unknown"
    inside = [one for one in lines if len(one) == 3 and folder.resolve().is_relative_to(one[1].replace("\\040", " "))]
    if not inside:
        return "unknown"
    device, _, kind = max(inside, key=lambda one: len(one[1]))
    return f"{kind} on {device}" + (": this is memory, not a disk" if kind in ("tmpfs", "ramfs") else "")


def forget_pages(folder: Path) -> float:
    """Write files to the disk and drop their pages from the cache. Returns the share of some files' pages that are still there;
    -1 where that is unknown."""
    os.sync()
    # The index of a disk tier is mapped into memory: its pages stay, and are few.
    files = [path for path in folder.rglob("*") if path.is_file() and "index" not in path.name]
    for path in files:
        with contextlib.suppress(OSError), path.open("rb") as handle:
            os.posix_fadvise(handle.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    shares = [resident_share(path) for path in random.Random(0).sample(files, min(len(files), 64))]
    known = [share for share in shares if share >= 0]
    return sum(known) / len(known) if known else -1.0


def resident_share(path: Path) -> float:
    """The share of a file's pages that the page cache has; -1 where that is unknown."""
    size, page = path.stat().st_size, mmap.PAGESIZE
    pages = -(-size // page)
    if not pages or sys.platform != "linux":
        return -1.0
    library = ctypes.CDLL(None, use_errno=True)
    library.mmap.restype = ctypes.c_void_p
    library.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    library.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]
    library.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    with path.open("rb") as handle:
        address = library.mmap(None, size, mmap.PROT_READ, mmap.MAP_SHARED, handle.fileno(), 0)
    if address in (None, ctypes.c_void_p(-1).value):
        return -1.0
    there = (ctypes.c_ubyte * pages)()
    failed = library.mincore(address, size, there)
    library.munmap(address, size)
    return -1.0 if failed else sum(one & 1 for one in there) / pages


def _memory(copies: Any) -> str:
    return "registered memory" if copies.registered else "memory that CUDA allocated, if there is CUDA"


def step_ttft_copies(context: Context) -> Iterator[Row]:
    """TTFT where blocks come back as vLLM's SimpleCPUOffloadConnector brings them: a rival in the same engine."""
    from benchmarks.gpu.batch_copies import BatchCopies
    from foreword.engine.paged_layers import tensors_of

    shapes, bench = context.shapes, context.engine()
    bench.attach(None)
    size = bench.config.block_size
    copies = BatchCopies(tensors_of(bench.runner.layers), max(shapes.lengths) // size)
    run = TtftRun(context, "vLLM's way", [1] * len(shapes.lengths))
    run._cells = 2 * len(shapes.lengths)
    try:
        for length, samples in zip(shapes.lengths, shapes.samples, strict=True):
            prompt = run.prompt(length)
            bench.first_token(prompt)
            _, expected = bench.first_token(prompt)
            blocks = bench.blocks_of(prompt)
            places = list(range(len(blocks)))
            copies.save(blocks, places).wait()
            for busy in (False, True):
                cell = Cell(
                    f"{length:,} tokens, vLLM's way of copying, {f'{shapes.others} decode' if busy else 'idle'}"
                )
                until = run.limit()
                for _ in range(samples):
                    if busy:
                        run.others.ready(64 if not context.tiny else 4)
                    # The others may take blocks that nothing uses: these are the prompt's as long as they are found.
                    if bench.blocks_of(prompt) != blocks:
                        raise RuntimeError("the prompt's blocks were evicted")
                    wait(context.device)
                    steps, bench.gaps, begin = bench.core.steps, [], time.perf_counter()
                    transfer = copies.load(blocks, places)
                    while not transfer.done():
                        if busy:
                            bench.step()  # an engine asks once in a step
                    _, token = bench.first_token(prompt)
                    cell.seconds.append(time.perf_counter() - begin)
                    if busy:
                        cell.gaps += bench.gaps
                        cell.steps.append(bench.core.steps - steps)
                    cell.compared, cell.equal = cell.compared + 1, cell.equal + (token == expected)
                    if time.monotonic() > until:
                        break
                yield cell.row(None, length=length)
            run.others.end()
            bench.finish()
            bench.cache.clear()
        yield row(
            "its call, and the bytes of a copy",
            f"{copies.call.name}, {copies.block_bytes // copies.copies:,} bytes",
            _memory(copies),
        )
    finally:
        bench.gaps = None
        run.others.end()
        copies.close()
        bench.attach(None)


# Saving


@dataclass
class SavingRun:
    """One batch of requests."""

    seconds: float
    rate: float
    gaps: list[float]
    cpu: float
    saved: int
    dropped: int
    behind: float


@dataclass
class Part:
    """A way to save, and what it has cost so far."""

    name: str
    attach: Callable[[], Any]
    runs: list[SavingRun] = field(default_factory=list)
    manager: Any = None
    failed: str = ""


def step_saving(which: int, context: Context) -> Iterator[Row]:
    """Throughput and ITL of some requests at once (`Shapes.concurrent`), with what saving does switched on part after part, by
    turns."""
    shapes, bench = context.shapes, context.engine()
    count = shapes.concurrent[which]
    bench.attach(None)
    with contextlib.ExitStack() as ends:
        parts = _parts(context, ends, whole=not which)
        if not which:
            run_batch(bench, shapes, count, 0)  # compiles
        turns = 0
        took = 0.0
        while not turns or context.left() > took:
            begin = time.monotonic()
            for number, one in enumerate(parts):
                _measure(one, bench, shapes, count, 1 + turns * len(parts) + number)
                yield _part_row(one, parts, count, shapes.context + shapes.decode, bench)
            turns, took = turns + 1, time.monotonic() - begin
            if context.tiny:
                break


def _measure(one: Part, bench: Bench, shapes: Shapes, count: int, seed: int) -> None:
    """One run of a part. What fails once is not tried again."""
    if one.failed:
        return
    try:
        if one.manager is None:
            one.manager = one.attach()
        bench.attach(one.manager)
        one.runs.append(run_batch(bench, shapes, count, seed))
    except Exception as error:  # noqa: BLE001 - one row of a benchmark, which says so
        one.failed = f"{type(error).__name__}: {error}"[:300]
        bench.stop([sequence.request.id for sequence in bench.core.scheduler.running])
    finally:
        bench.attach(None)


def run_batch(bench: Bench, shapes: Shapes, count: int, seed: int) -> SavingRun:
    """New prompts at once, until the last has all of its tokens."""
    prompts = [random_tokens(shapes.context, shapes.vocabulary, 1000 * seed + number) for number in range(count)]
    offload = bench.offload
    before = None if offload is None else offload.status()
    wait(bench.device)
    bench.gaps = []
    cpu, begin = time.process_time() - time.thread_time(), time.perf_counter()
    for prompt in prompts:
        bench.add(prompt, shapes.decode)
    bench.finish()
    seconds = time.perf_counter() - begin
    gaps, bench.gaps = bench.gaps, None
    saved = dropped = 0
    if offload is not None and before is not None:
        offload.flush(20.0)
        after = offload.status()
        saved, dropped = after.saved - before.saved, after.dropped - before.dropped
    behind = time.perf_counter() - begin - seconds
    cpu = time.process_time() - time.thread_time() - cpu
    bench.cache.clear()
    return SavingRun(seconds, count * shapes.decode / seconds, gaps, cpu, saved, dropped, behind)


def _part_row(one: Part, parts: Sequence[Part], count: int, tokens: int, bench: Bench) -> Row:
    """A part beside those before it. `tokens`: of one sequence."""
    what = f"{count} at once, {one.name}"
    if one.failed or not one.runs:
        return row(what, "failed", one.failed)
    alone, number = parts[0], parts.index(one)
    rate, gaps = median(run.rate for run in one.runs), [gap for run in one.runs for gap in run.gaps]
    notes = []
    measured = {"rate": rate, "p50": median(gaps), "p99": percentile(gaps, 0.99), "count": count}
    if one is not alone and alone.runs:
        share = median(a.rate / b.rate for a, b in zip(one.runs, alone.runs, strict=False))
        more = median(a.seconds - b.seconds for a, b in zip(one.runs, alone.runs, strict=False))
        notes.append(f"{share:.1%} of alone, {more * 1e3:+.0f} ms")
        measured |= {"share": share, "more": more, "tokens": count * tokens}
        before = parts[number - 1]
        if number > 1 and before.runs and one.name.startswith("+"):
            added = median(a.seconds - b.seconds for a, b in zip(one.runs, before.runs, strict=False))
            notes.append(f"this part {added * 1e3:+.0f} ms")
            measured["added"] = added
    notes.append(f"ITL {milliseconds(gaps)}")
    saved, dropped = (sum(getattr(run, name) for run in one.runs) for name in ("saved", "dropped"))
    if saved or dropped:
        notes.append(f"{dropped / (saved + dropped):.1%} of {saved + dropped:,} blocks dropped")
        measured["dropped"] = dropped / (saved + dropped)
    if saved and alone.runs:
        cpu = sum(run.cpu for run in one.runs) - sum(run.cpu for run in alone.runs[: len(one.runs)])
        notes.append(f"{cpu / (saved * bench.runner.bytes_per_block / GIB):.2f} processor s per GiB")
    if (behind := median(run.behind for run in one.runs)) > 0.001:
        notes.append(f"written {behind * 1e3:.0f} ms after the last token")
    notes.append(f"{len(one.runs)} turns")
    return row(what, f"{rate:,.0f} tok/s", "; ".join(notes), **measured)


def _parts(context: Context, ends: contextlib.ExitStack, *, whole: bool) -> list[Part]:
    """Time saving, part after part: each does what the one before it does, and more."""
    from foreword.offload import writer

    memory = f"memory://?size={_room(context.shapes.kv_bytes * (1 << 12) if context.tiny else 4 * GIB)}"

    def opened(*stores: Any) -> Any:
        manager = context.manager(*stores)
        ends.callback(manager.close, 10.0)
        return manager

    def hooks() -> Any:
        manager = opened(memory)
        manager.save = lambda root, keys, parent, depth, blocks, *more, **how: len(blocks)
        return manager

    def without_writer() -> Any:
        manager = opened(memory)

        def give(batches: Any) -> None:
            for batch in batches:
                batch.pool.give(batch.slots)

        manager._writer.add = give
        return manager

    def without_checksum() -> Any:
        manager = opened(sink())
        staged = manager._writer._sealed

        def sealed(batch: Any) -> Any:
            names = vars(writer)
            real, names["seal"] = names["seal"], _unsummed
            try:
                return staged(batch)
            finally:
                names["seal"] = real

        manager._writer._sealed = sealed
        return manager

    def like_vllm() -> Any:
        copies = SavingLikeVllm(context)
        ends.callback(copies.close)
        manager = hooks()
        manager.save, manager.flush = copies.save, copies.flush
        return manager

    def with_disk() -> Any:
        folder = ends.enter_context(context.folder())
        return opened(memory, f"disk://{folder}/kv?size=16GiB")

    ways = {
        "saving nothing": lambda: None,
        "+ hooks: saving returns at once": hooks,
        "+ gather and copy to the host": without_writer,
        "+ the writer's thread, no checksum": without_checksum,
        "+ checksum": lambda: opened(sink()),
        "+ memory tier": lambda: opened(memory),
        "+ disk tier": with_disk,
        "vLLM's way of copying, no checks": like_vllm,
    }
    left = ways if whole else {"saving nothing", "+ memory tier", "+ disk tier", "vLLM's way of copying, no checks"}
    return [Part(name, way) for name, way in ways.items() if name in left]


class SavingLikeVllm:
    """Stands for a manager's `save` and `flush`: blocks are copied as `BatchCopies` does, to host blocks in rotation."""

    def __init__(self, context: Context) -> None:
        from benchmarks.gpu.batch_copies import BatchCopies, Transfer
        from foreword.engine.paged_layers import tensors_of

        tensors = tensors_of(context.engine().runner.layers)
        self._copies = BatchCopies(tensors, 64 if context.tiny else 2048)
        self._next = 0
        self._last: Transfer | None = None

    def save(
        self,
        root: bytes,
        keys: Sequence[bytes],
        parent: bytes,
        depth: int,
        blocks: Sequence[int],
        *more: Any,
        **how: Any,
    ) -> int:
        """As `OffloadManager.save`."""
        count = len(blocks)
        places = [(self._next + number) % self._copies.blocks for number in range(count)]
        self._next = (self._next + count) % self._copies.blocks
        self._last = self._copies.save(list(blocks), places)
        return count

    def flush(self, timeout: float = 30.0) -> bool:
        """Wait for the last copy, which ends after all others."""
        if self._last is not None:
            self._last.wait(timeout)
        return True

    def close(self) -> None:
        self._copies.close()


def sink() -> Any:
    """A store that takes blocks and keeps none."""
    from foreword.store.memory.memory_store import MemoryStore

    class Sink(MemoryStore):
        def put(self, frames: Sequence[Any], *, deadline: float) -> int:
            return len(frames)

    return Sink(16 << 20)


def _unsummed(header: Any, buffer: memoryview) -> Any:
    """`frame.seal` without its checksum."""
    from foreword.store.frame import HEADER_BYTES, Frame

    head = header.pack()
    buffer[header.length : header.length + len(head)] = head
    return Frame(header, buffer[: header.length + HEADER_BYTES])


# Copies


def step_copies(context: Context) -> Iterator[Row]:
    """Time copies alone: memory that CUDA has page-locked, memory registered in place, scattered slots in it, the staging
    arena, and vLLM's way."""
    import torch

    from benchmarks.gpu.batch_copies import BatchCopies, huge_memory, register, unregister
    from foreword.engine.paged_layers import tensors_of
    from foreword.offload.copy_calls import CopyCall

    device, bench, size = context.device, context.engine(), context.shapes.copy_bytes
    cuda = device.type == "cuda"
    there = torch.empty(size, dtype=torch.uint8, device=device)

    def both(here: Any) -> str:
        up = seconds_of(lambda: there.copy_(here, non_blocking=True), device)
        down = seconds_of(lambda: here.copy_(there, non_blocking=True), device)
        return f"{size / up / 1e9:.1f} / {size / down / 1e9:.1f} GB/s"

    def allocated() -> Row:
        return row(
            "load / save in one copy, memory that CUDA allocated",
            both(torch.empty(size, dtype=torch.uint8, pin_memory=cuda)),
        )

    def registered() -> Row:
        memory, begin = huge_memory(size), time.perf_counter()
        locked = register(memory, device)
        seconds = time.perf_counter() - begin
        try:
            note = (
                f"registering took {seconds / (size / GIB) * 1e3:.0f} ms per GiB"
                if locked
                else "not registered: no CUDA"
            )
            return row("the same, memory registered with cudaHostRegister", both(memory), note)
        finally:
            if locked:
                unregister(memory, device)

    def slots() -> Row:
        block = bench.runner.bytes_per_block
        stride, count = block + SLOT_PADDING, size // block
        memory, ring = huge_memory(stride * count), torch.empty(stride * count, dtype=torch.uint8, device=device)
        locked = register(memory, device)
        call, stream = CopyCall(device), torch.cuda.Stream() if cuda else None  # type: ignore[no-untyped-call]
        order = torch.randperm(count, generator=torch.Generator().manual_seed(1))
        here, over = (
            (memory.data_ptr() + stride * order).numpy(),
            (ring.data_ptr() + stride * torch.arange(count)).numpy(),
        )
        sizes = torch.full((count,), block).numpy()
        try:
            up = seconds_of(lambda: call(over, here, sizes, stream, in_order=True), device)
            down = seconds_of(lambda: call(here, over, sizes, stream, in_order=True), device)
            figure = f"{block * count / up / 1e9:.1f} / {block * count / down / 1e9:.1f} GB/s"
            return row(f"the same, {count} scattered frames of {block >> 10:,} KiB", figure, call.name)
        finally:
            if locked:
                unregister(memory, device)

    arena = context.arena()
    count = min(size // bench.runner.bytes_per_block, arena.slots, bench.blocks)
    blocks = random.Random(1).sample(range(bench.blocks), count)
    moved, places = count * bench.runner.bytes_per_block, list(range(count))

    def staged() -> Row:
        def save() -> None:
            arena.gather(blocks, places)
            arena.buffer(places[-1])

        down = seconds_of(save, device)
        up = seconds_of(functools.partial(arena.scatter, places, blocks), device)
        return row(
            "the same through the staging arena, 64 KiB and less to a layer",
            f"{moved / up / 1e9:.1f} / {moved / down / 1e9:.1f} GB/s",
        )

    def like_vllm() -> Row:
        copies = BatchCopies(tensors_of(bench.runner.layers), count)
        try:
            down = seconds_of(lambda: copies.save(blocks, places).wait(), device)
            up = seconds_of(lambda: copies.load(blocks, places).wait(), device)
            figure = f"{moved / up / 1e9:.1f} / {moved / down / 1e9:.1f} GB/s"
            return row(
                "the same, vLLM's way of copying",
                figure,
                f"{copies.call.name}, {copies.copies * count:,} copies, {_memory(copies)}",
            )
        finally:
            copies.close()

    yield part("load / save in one copy, memory that CUDA allocated", allocated)
    yield part("the same, memory registered with cudaHostRegister", registered)
    yield part("the same, scattered frames", slots)
    yield part("the same through the staging arena", staged)
    yield part("the same, vLLM's way of copying", like_vllm)


# Equality


def step_kernels(context: Context) -> Iterator[Row]:
    """Attention of the model's shape against PyTorch in float32, and the bytes that come back from the staging arena and from
    vLLM's way of copying."""
    import torch

    from benchmarks.gpu.batch_copies import BatchCopies
    from benchmarks.gpu.steps import CASES, LONG_STEPS, SHORT_STEPS, attention_error
    from foreword.engine.paged_layers import tensors_of

    bench = context.engine()
    tensors = tensors_of(bench.runner.layers)
    arena = context.arena()
    count = min(8 if context.tiny else 64, arena.slots, bench.blocks // 2)
    blocks, places = random.Random(2).sample(range(bench.blocks), count), list(range(count))

    def same(what: str, save: Callable[[], object], load: Callable[[], object]) -> Row:
        for tensor in tensors:
            tensor.normal_()
        wanted = [tensor[blocks].clone() for tensor in tensors]
        save()
        for tensor in tensors:
            tensor.zero_()
        load()
        wait(context.device)
        right = sum(torch.equal(tensor[blocks], before) for tensor, before in zip(tensors, wanted, strict=True))
        figure = f"{right} of {len(tensors)} tensors equal"
        if right < len(tensors):
            raise RuntimeError(f"{what}: {figure}")
        return row(what, figure, f"{count} blocks saved and loaded")

    def staged() -> Row:
        def save() -> None:
            arena.gather(blocks, places)
            for place in places:
                arena.buffer(place)

        return same("bytes through the staging arena", save, lambda: arena.scatter(places, blocks))

    def like_vllm() -> Row:
        copies = BatchCopies(tensors, count)
        try:
            return same(
                "bytes by vLLM's way of copying",
                lambda: copies.save(blocks, places).wait(),
                lambda: copies.load(blocks, places).wait(),
            )
        finally:
            copies.close()

    yield part("bytes through the staging arena", staged)
    yield part("bytes by vLLM's way of copying", like_vllm)
    bench.cache.clear()
    if context.device.type == "cuda":
        for name, allowed in (("bfloat16", 5e-2),):
            steps = [*SHORT_STEPS[:2], LONG_STEPS[1]]
            errors = [attention_error(CASES[0], step, 0, getattr(torch, name), context.device) for step in steps]
            yield row(f"largest error of attention, {name}", f"{max(errors):.2g}", f"allowed {allowed:g}")
            if not max(errors) <= allowed:
                raise RuntimeError(f"attention in {name} differs by {max(errors):.3g}")


def step_checksum(context: Context) -> Iterator[Row]:
    """The checksum of frames on the device (offload/device_checksum.py): right, and how fast."""
    import torch

    from foreword.offload.device_checksum import DeviceChecksums, heads
    from foreword.store.frame import HEADER_BYTES, RAW, Header, seal

    device, chance = context.device, random.Random(3)
    if device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        yield row("left out: Triton runs on CUDA, or interpreted", "TRITON_INTERPRET=1")
        return
    size = 600 if context.tiny else 2 << 20  # of a block of the 8B model
    stride = -(-(size + HEADER_BYTES) // 64) * 64
    count = 3 if context.tiny else 16
    host = torch.zeros(count, stride, dtype=torch.uint8)
    names = []
    for number in range(count):
        view = memoryview(cast(Any, host[number].numpy())).cast("B")
        view[:size] = chance.randbytes(size)
        layout, root, key, parent = (chance.randbytes(length) for length in (16, 16, 32, 32))
        header = Header(layout, root, key, parent, number, RAW, size, size)
        seal(header, view[: size + HEADER_BYTES])
        names.append(header.name)
    checksums, slots = DeviceChecksums(device), torch.arange(count, device=device)
    frames, wanted = host.to(device), heads(names).to(device)
    frames[:, size + HEADER_BYTES - 32 : size + HEADER_BYTES] = 9
    checksums.seal(frames, slots, size)
    same = int((frames.cpu() == host).all(dim=1).sum())
    frames[0, size // 2] += 1
    found = checksums.check(frames, slots, size, wanted).tolist()
    yield row(
        "frames sealed as the host seals them", f"{same} of {count}", f"one byte changed: {found.count(0)} refused"
    )
    if same < count or found != [0] + [1] * (count - 1):
        raise RuntimeError(f"{same} of {count} frames are sealed as on the host; of those checked {found}")
    if device.type != "cuda":
        return
    for many in (512, 16):  # a prefix of 8,192 tokens, and the 32 MiB that a load reads at once
        frames = torch.zeros(many, stride, dtype=torch.uint8, device=device)
        slots, wanted = torch.arange(many, device=device), torch.zeros(many, 72, dtype=torch.uint8, device=device)
        for how, one in (
            ("4 KiB ahead, 1 warp", checksums),
            ("8 KiB ahead, 2 warps", DeviceChecksums(device, ahead=8, warps=2)),
        ):
            if one is not checksums and context.left() < 4.0:
                break
            seconds = seconds_of(functools.partial(one.check, frames, slots, size, wanted), device)
            figure = f"{many * size / seconds / 1e9:,.0f} GB/s"
            yield row(f"checked on the device, {many} frames of 2 MiB, {how}", figure, f"{seconds * 1e3:.2f} ms")


# Straight between the device and the memory tier


def step_direct(context: Context) -> Iterator[Row]:
    """Blocks to the memory tier and back, with `store.direct` off and on: right, how fast, and with how much of the host."""
    bench = context.engine()
    if context.device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        yield row("left out: Triton runs on CUDA, or interpreted", "TRITON_INTERPRET=1")
        return
    block = bench.runner.bytes_per_block
    count = 4 if context.tiny else max(min(bench.blocks, context.shapes.copy_bytes // block, 512), 1)
    for way, direct in (("through the staging arena", False), ("straight, with store.direct", True)):
        yield part(f"{count} blocks {way}", functools.partial(_saved_and_loaded, context, count, way, direct=direct))
    if context.device.type == "cuda":
        from foreword.offload.pinned import CudaPinning

        way = "straight, in memory that CUDA allocates"
        with mock.patch.object(CudaPinning, "lock", return_value="refused, for this row"):
            yield part(f"{count} blocks {way}", functools.partial(_saved_and_loaded, context, count, way, direct=True))
    bench.cache.clear()


def _saved_and_loaded(context: Context, count: int, way: str, *, direct: bool) -> Row:
    """Save blocks and load them, and compare each byte. Raises RuntimeError for a wrong one."""
    import torch

    from foreword.blocks.keys import chain_keys
    from foreword.engine.paged_layers import tensors_of
    from foreword.offload.load import LoadPlan

    bench = context.engine()
    block, tokens = bench.runner.bytes_per_block, bench.config.block_size
    tensors, root, before = tensors_of(bench.runner.layers), os.urandom(32), taken(context.device)
    manager = context.manager(f"memory://?size={4 * count * (block + (64 << 10)) + (64 << 20)}", direct=direct)
    try:
        until = time.monotonic() + min(context.left(), 20.0)
        while direct and manager.direct_state == "" and time.monotonic() < until:
            time.sleep(0.01)
        if direct and manager.direct_state != "on":
            return row(
                f"{count} blocks {way}", "not used", manager.direct_state or "its memory was not page-locked in time"
            )
        chance = torch.Generator().manual_seed(5)
        best: dict[str, tuple[float, float]] = {}
        for number in range(2 if context.tiny else 3):
            kept = [
                torch.randint(0, 127, tuple(one[:count].shape), generator=chance).to(one.dtype) for one in tensors[:2]
            ]
            for one, values in zip(tensors, kept, strict=False):
                one[:count] = values.to(one.device)
            keys = chain_keys(root, [number] * tokens * count, tokens)
            for what, work in (
                ("save", functools.partial(_save_all, manager, root, keys)),
                ("load", functools.partial(_load_all, manager, root, keys, tokens, LoadPlan)),
            ):
                if what == "load":
                    for one in tensors:
                        one[:count] = 0
                if context.device.type == "cuda":
                    torch.cuda.synchronize(context.device)
                began, cpu = time.perf_counter(), time.process_time()
                work()
                took = time.perf_counter() - began, (time.process_time() - cpu) / count * 1e6
                best[what] = min(best.get(what, took), took)
            wrong = sum(not torch.equal(one[:count].cpu(), values) for one, values in zip(tensors, kept, strict=False))
            if wrong:
                raise RuntimeError(f"{wrong} of {len(kept)} tensors have other bytes {way}")
        rates = " / ".join(f"{count * block / best[what][0] / 1e9:.1f}" for what in ("save", "load"))
        host = " / ".join(f"{best[what][1]:.0f}" for what in ("save", "load"))
        beside = f"{host} us of processor time per block"
        if direct:
            beside += f", {(taken(context.device) - before) >> 20} MiB of GPU memory"
        return row(f"{count} blocks {way}, save / load", f"{rates} GB/s", beside)
    finally:
        manager.close(10.0)


def _save_all(manager: Any, root: bytes, keys: Sequence[bytes]) -> None:
    done = 0
    while done < len(keys):
        more = manager.save(root, keys[done:], keys[done - 1] if done else root, done, range(done, len(keys)))
        done += more
        if not more:
            manager.await_room(1.0)
    if not manager.flush(30.0):
        raise RuntimeError("blocks were not saved within 30 s")


def _load_all(manager: Any, root: bytes, keys: Sequence[bytes], tokens: int, plan: Any) -> None:
    places = {(0, number): 0 for number in range(len(keys))}
    load = manager.load(plan(0, len(keys) * tokens, places), root, keys, range(len(keys)), patient=True)
    while not load.done:
        manager.wait(manager.changes, 0.001)
    if load.loaded < len(keys):
        raise RuntimeError(f"{load.loaded} of {len(keys)} blocks were loaded")


# Bytes over the host's memory bus


def step_bytes(context: Context) -> Iterator[Row]:
    """How often a byte passes the host's memory bus when it is saved and loaded: counted, not timed. The device's copy and the
    checksum pass it once, a copy by the processor three times: it reads the source, reads the target, writes the target."""
    bench = context.engine()
    count = 8 if context.tiny else 128

    def count_in(url: str) -> dict[str, dict[str, float]]:
        manager = context.manager(url)
        try:
            return counted(manager, bench, count)
        finally:
            manager.close(10.0)

    yield from _bus_rows("memory", count_in("memory://?size=1GiB"))
    with context.folder() as folder:
        yield from _bus_rows("disk", count_in(f"disk://{folder}/kv?size=1GiB"))


def _bus_rows(tier: str, found: dict[str, dict[str, float]]) -> Iterator[Row]:
    weights = {"copied by the processor": 3, "copied by the kernel": 3}
    for what, passes in found.items():
        detail = ", ".join(f"{name} {share:.2f}" for name, share in passes.items() if share)
        bus = sum(share * weights.get(name, 1) for name, share in passes.items())
        yield row(f"{what} {tier}: bus bytes per byte", f"{bus:.1f}", detail, bus=bus)


def counted(manager: Any, bench: Bench, count: int) -> dict[str, dict[str, float]]:
    """Passes over a byte that is saved and loaded, by what makes them."""
    from foreword.offload import device
    from foreword.store import frame
    from foreword.store.disk import files
    from foreword.store.memory import memory_store

    size = bench.runner.bytes_per_block
    total: Counter[str] = Counter()
    real_hash, real_move, real_copy = frame._checksum, device.DeviceCopies._move, memory_store._copy
    real_write, real_read, real_many = memory_store.MemoryArena.write, files._read_all, files.BlockFiles.write_many

    def hashed(payload: memoryview, head: Any) -> bytes:
        total["hashed"] += payload.nbytes
        return real_hash(payload, head)

    def moved(self: Any, target: Any, source: Any, slots: Any) -> None:
        total["device's copy"] += len(slots) * size
        real_move(self, target, source, slots)

    def copied(data: memoryview, buffer: memoryview) -> None:
        total["copied by the processor"] += data.nbytes
        real_copy(data, buffer)

    def written(self: Any, offset: int, data: memoryview, length: int = 0) -> None:
        total["copied by the processor"] += length or data.nbytes
        real_write(self, offset, data, length)

    def read(handle: Any, buffer: memoryview, length: int) -> Any:
        total["copied by the kernel"] += length
        return real_read(handle, buffer, length)

    def many(self: Any, pairs: Any, *more: Any) -> Any:
        pairs = list(pairs)
        total["copied by the kernel"] += sum(len(data) for _, data in pairs)
        return real_many(self, iter(pairs), *more)

    found: dict[str, dict[str, float]] = {}
    with contextlib.ExitStack() as ends:
        for owner, name, new in (
            (frame, "_checksum", hashed),
            (device.DeviceCopies, "_move", moved),
            (memory_store, "_copy", copied),
            (memory_store.MemoryArena, "write", written),
            (files, "_read_all", read),
            (files.BlockFiles, "write_many", many),
        ):
            ends.callback(setattr, owner, name, getattr(owner, name))
            setattr(owner, name, new)
        root, keys, blocks = os.urandom(32), [os.urandom(32) for _ in range(count)], list(range(count))
        done = 0
        while done < count:  # the queue may be shorter
            before = keys[done - 1] if done else root
            done += manager.save(root, keys[done:], before, done, blocks[done:])
            if not manager.flush(30.0):
                raise RuntimeError("the blocks were not written within 30 s")
        found["saved to"] = _shares(total, count * size)
        search = manager.search(root, keys, 0, count * manager.block_size)
        until = time.monotonic() + 30.0
        while not search.answered and time.monotonic() < until:
            time.sleep(0.001)
        plan = None if search.found is None else manager.costs.best(search.found, 0, patient=True)
        if plan is None:
            raise RuntimeError(f"none of {count} blocks was found")
        load = manager.load(plan, root, keys, blocks)
        while not load.done and time.monotonic() < until:
            time.sleep(0.001)
        if load.loaded != count:
            raise RuntimeError(f"{load.loaded} of {count} blocks were loaded")
        found["loaded from"] = _shares(total, count * size)
    return found


def _shares(total: Counter[str], size: int) -> dict[str, float]:
    shares = {name: value / size for name, value in total.items()}
    total.clear()
    return shares
