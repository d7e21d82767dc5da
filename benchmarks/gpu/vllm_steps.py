"""The step `vllm` of the GPU plan: vLLM with Foreword's connector against vLLM alone and vLLM's SimpleCPUOffloadConnector.

Every vLLM is a process of its own; its log lies in the folder `FOREWORD_GPU_LOGS`, or in a temporary one. Where vLLM has its
compiled kernels it runs as it is installed; otherwise with Triton's, and without what has no such kernel.
"""

import contextlib
import importlib.util
import os
import random
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.gpu.bench import Row, Rows, Shapes, milliseconds, random_tokens, row
from benchmarks.harness import median, version_of
from foreword.referee.process import Failed, Worker

SCRIPT = Path(__file__).with_name("vllm_worker.py")
ROOT = Path(__file__).resolve().parents[2]
# Llama 3.2 1B, with fewer tokens in the vocabulary.
LARGE = Shapes(16, 2048, 32, 8, 64, 8192, 32_000, (32,), 512, 8192, 96, ())
TINY = Shapes(2, 128, 4, 2, 32, 192, 512, (4,), 64, 256, 8, ())
# Without vLLM's compiled kernels: Triton's attention, and torch for the rest.
_PLAIN = {"mode": 0, "custom_ops": ["none"]}
_GRAPHS = {"cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": [1, 2, 4, 8, 16, 32]}
_TRITON = {"attention_backend": "TRITON_ATTN"}


@dataclass(frozen=True)
class Rung:
    """A way to run vLLM; the first that works is used."""

    name: str
    llm: dict[str, Any]
    variables: dict[str, str]


_RUNGS = (
    Rung(
        "Triton's kernels, runner V2, CUDA graphs",
        {**_TRITON, "compilation_config": {**_PLAIN, **_GRAPHS}, "enforce_eager": False},
        {"VLLM_USE_V2_MODEL_RUNNER": "1"},
    ),
    Rung("Triton's kernels, runner V2", {**_TRITON, "compilation_config": _PLAIN}, {"VLLM_USE_V2_MODEL_RUNNER": "1"}),
    Rung("Triton's kernels, runner V1", {**_TRITON, "compilation_config": _PLAIN}, {"VLLM_USE_V2_MODEL_RUNNER": "0"}),
)
_INSTALLED = Rung("as installed", {"enforce_eager": False}, {})
_EAGER = {"enforce_eager": True}


class Vllms:
    """Starts vLLMs over one model and one folder of a store."""

    def __init__(self, folder: Path, shapes: Shapes, tiny: bool, logs: Path) -> None:
        import torch

        self.folder, self.shapes, self.logs, self.tiny = folder, shapes, logs, tiny
        self.model = _model(folder / "model", shapes, "float32" if tiny else "bfloat16")
        self.rungs = list(_rungs())
        # The attention of vLLM's CPU build takes no other.
        self._more = {**(_EAGER if tiny else {}), "block_size": 16 if torch.cuda.is_available() else 32}
        self._count = 0

    @contextlib.contextmanager
    def start(
        self, name: str, transfer: dict[str, Any] | None, *, load_all: bool = False, only_loaded: bool = False
    ) -> Iterator[Worker]:
        """Start one with a connector on the first rung that works. With `load_all`, all that is found is loaded; else the load
        policy is the default. With `only_loaded`, blocks that it saves are not compared with the stores. Raises Failed with the
        log's last error if none works."""
        longest = self.shapes.prefill + 256
        llm = {
            "dtype": "auto", "max_model_len": longest, "max_num_batched_tokens": longest, "max_num_seqs": 64,
            "kv_cache_memory_bytes": 20 * longest * self.shapes.kv_bytes, "gpu_memory_utilization": 0.3,
        }  # fmt: skip
        while True:
            rung, self._count = self.rungs[0], self._count + 1
            log = self.logs / f"vllm-{self._count}-{name}.log"
            job = {
                "model": str(self.model),
                "transfer": transfer,
                "llm": {**llm, **rung.llm, **self._more},
                "load_all": load_all,
                "only_loaded": only_loaded,
            }
            path = os.pathsep.join((str(ROOT), os.environ.get("PYTHONPATH", "")))
            variables = {"PYTHONPATH": path, "VLLM_LOGGING_LEVEL": "INFO", **rung.variables}
            if importlib.util.find_spec("flashinfer") is None:
                variables["VLLM_USE_FLASHINFER_SAMPLER"] = "0"
            try:
                worker = Worker.start(sys.executable, job, log, script=SCRIPT, variables=variables)
                break
            except Failed as error:
                print(f"{name}, {rung.name}: {error}\n{log.read_text(errors='replace')[-6000:]}", file=sys.stderr)
                if len(self.rungs) == 1 or transfer is RIVAL:  # what is not ours decides nothing about ours
                    raise
                del self.rungs[0]
        try:
            yield worker
        except Failed:
            print(f"{name}: {log.read_text(errors='replace')[-6000:]}", file=sys.stderr)
            raise
        finally:
            worker.close()


def _rungs() -> Iterator[Rung]:
    spec = importlib.util.find_spec("vllm")
    where = Path(next(iter(spec.submodule_search_locations or ()), "")) if spec is not None else Path()
    if any(where.glob("_C*.so")):
        yield _INSTALLED
    yield from _RUNGS


def _model(folder: Path, shapes: Shapes, dtype: str) -> Path:
    """A Llama with random weights, so large that attention tells tokens apart."""
    import torch
    from transformers import AutoModelForCausalLM

    settings = shapes.config()
    settings.initializer_range = 0.05 * (2048 / shapes.hidden) ** 0.5
    torch.manual_seed(0)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = AutoModelForCausalLM.from_config(settings, dtype=getattr(torch, dtype))
    model.cpu().save_pretrained(folder)
    return folder


@dataclass
class Seen:
    """Answers and times of one vLLM."""

    tokens: dict[str, list[list[int]]]
    cached: dict[str, int]
    ttft: dict[str, list[float]]
    rate: float = 0.0

    def ask(self, name: str, worker: Worker, prompts: list[list[int]], new_tokens: int, **how: Any) -> None:
        answers = worker.ask_all(prompts, new_tokens, **how)
        self.tokens[name] = [one["tokens"] for one in answers]
        self.cached[name] = sum(one["cached"] for one in answers)
        self.ttft[name] = [one["ttft"] for one in answers]

    def equal(self, name: str, other: "Seen", theirs: str) -> str:
        """Tokens that are at the same place in both."""
        pairs = [
            pair
            for a, b in zip(self.tokens[name], other.tokens[theirs], strict=True)
            for pair in zip(a, b, strict=True)
        ]
        return f"{sum(a == b for a, b in pairs)} of {len(pairs)}"


def step_vllm(device: Any, tiny: bool) -> Rows:
    """Tokens, bytes, TTFT and throughput. Raises RuntimeError if nothing was loaded, or if stored bytes are not vLLM's."""
    if importlib.util.find_spec("vllm") is None:
        yield row("left out: not installed here", "vllm")
        return
    shapes = TINY if tiny else LARGE
    with tempfile.TemporaryDirectory() as folder:
        logs = Path(os.environ.get("FOREWORD_GPU_LOGS", folder))
        logs.mkdir(parents=True, exist_ok=True)
        yield from _rows(Vllms(Path(folder), shapes, tiny, logs), _Prompts(shapes, tiny))


def connector(store: list[str], *, direct: bool = False) -> dict[str, Any]:
    """Foreword's, as a server sets it. `direct`: blocks are to be copied straight between the device and memory."""
    return {
        "kv_connector": "ForewordConnector",
        "kv_connector_module_path": "foreword.integrations.vllm",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"store": store, "lookup_timeout": 10.0, "direct": direct},
    }


# vLLM's own, into host memory.
RIVAL = {
    "kv_connector": "SimpleCPUOffloadConnector",
    "kv_role": "kv_both",
    "kv_connector_extra_config": {"cpu_bytes_to_use": 8 << 30},
}


class _Prompts:
    """Token ids. `several` are asked one after the other, `together` at once; `long` and `decode` are timed."""

    def __init__(self, shapes: Shapes, tiny: bool) -> None:
        chance = random.Random(0)
        count, new = (3, 4) if tiny else (24, 24)
        lengths = [chance.randrange(shapes.prefill // 40 + 96, shapes.prefill // 6 + 140) for _ in range(2 * count)]
        draw = [random_tokens(length, shapes.vocabulary, number) for number, length in enumerate(lengths)]
        self.several, self.together, self.new_tokens = draw[:count], draw[count:], new
        self.long = [random_tokens(shapes.prefill, shapes.vocabulary, 1000 + n) for n in range(1 if tiny else 8)]
        self.decode = [
            [random_tokens(shapes.context, shapes.vocabulary, 2000 + 100 * turn + n) for n in range(shapes.batches[0])]
            for turn in range(3)
        ]
        self.steps = shapes.steps


def _common(worker: Worker, prompts: _Prompts) -> Seen:
    """Time the steps that vLLM does alone, too."""
    seen = Seen({}, {}, {})
    worker.ask_all([prompts.long[0][::-1]], 4)  # compiles the kernels
    seen.ask("computed", worker, prompts.several, prompts.new_tokens)
    seen.ask("own hit", worker, prompts.several, prompts.new_tokens)
    seen.ask("together", worker, prompts.together, prompts.new_tokens, how="together")
    return seen


def _timed(seen: Seen, worker: Worker, prompts: _Prompts) -> None:
    seen.ask("long, computed", worker, prompts.long, 2)
    seen.ask("long, own hit", worker, prompts.long, 2)
    rates = []
    for turn in prompts.decode:
        began = worker.ask_together(turn, prompts.steps)["seconds"]
        rates.append(len(turn) * prompts.steps / began)
    seen.rate = median(rates)
    _interrupt(seen, worker, prompts)


def _interrupt(seen: Seen, worker: Worker, prompts: _Prompts) -> None:
    # Every second one leaves after some steps and comes back. (vLLM cannot preempt all on request where it schedules
    # asynchronously beside a connector: it frees their blocks a step later, and then says that it failed.)
    seen.ask("interrupted", worker, [one[::-1] for one in prompts.together], prompts.new_tokens, how="abort")


def _rows(vllms: Vllms, prompts: _Prompts) -> Rows:
    """Timed first: vLLM alone, with Foreword through the staging arena and directly, with its own connector. Then tokens and
    bytes, with all loaded that is found: directly, if that was possible."""
    memory = "memory://?size=8GiB"
    with vllms.start("alone", None) as worker:
        alone = _common(worker, prompts)
        _timed(alone, worker, prompts)
    yield row(f"vLLM {version_of('vllm')}", vllms.rungs[0].name)
    yield _tokens("vLLM alone, own hit and computed", alone, "own hit", alone, "computed")
    for key in ("computed", "own hit"):
        yield _ttft(f"vLLM alone, {key}", alone, key, alone)
    yield _rate("vLLM alone", alone, alone, prompts)
    with vllms.start("foreword-timed", connector([memory, f"disk://{vllms.folder}/timed?size=16GiB"])) as worker:
        timed = _after_forgetting(worker, prompts)
        counts = _counts(worker)
    for key in ("computed", "own hit", "memory"):
        yield _ttft(f"Foreword, {key}", timed, key, alone)
    yield _rate("saving with Foreword", timed, alone, prompts)
    yield row("blocks saved, loaded, loads cut, blocks dropped", _shown(counts))
    on: list[bool] = []
    yield from _direct(vllms, prompts, alone, on)
    if not vllms.tiny:  # copies of CUDA and ROCm only
        yield from _rival(vllms, prompts, alone)
    yield from _equal(vllms, prompts, alone, memory, direct=bool(on))


def _direct(vllms: Vllms, prompts: _Prompts, alone: Seen, on: list[bool]) -> Rows:
    """The same with `store.direct`, over the same stores. `on` gets an item if the device passed the test at the start."""
    name = "Foreword with store.direct"
    stores = ["memory://?size=8GiB", f"disk://{vllms.folder}/direct?size=16GiB"]
    try:
        with vllms.start("direct", connector(stores, direct=True)) as worker:
            [(_, said, _)] = worker.metrics("direct")
            if (state := said["state"]) != "on":
                yield row(name, "not used", state)
                return
            seen, counts = _after_forgetting(worker, prompts), _counts(worker)
    except Failed as error:
        yield row(name, "failed", str(error)[:300])
        return
    on.append(True)
    for key in ("computed", "own hit", "memory"):
        yield _ttft(f"{name}, {key}", seen, key, alone)
    yield _rate(f"saving with {name}", seen, alone, prompts)
    yield row(f"{name}: blocks saved, loaded, loads cut, blocks dropped", _shown(counts))


def _rival(vllms: Vllms, prompts: _Prompts, alone: Seen) -> Rows:
    """vLLM's own connector. Where it does not run, the rows after it are still worth having."""
    try:
        with vllms.start("rival", RIVAL) as worker:
            seen = _after_forgetting(worker, prompts)
    except Failed as error:
        yield row("vLLM's SimpleCPUOffloadConnector", "failed", str(error)[:300])
        return
    for key in ("computed", "own hit", "memory"):
        yield _ttft(f"vLLM's SimpleCPUOffloadConnector, {key}", seen, key, alone)
    yield _rate("saving with vLLM's SimpleCPUOffloadConnector", seen, alone, prompts)


def _after_forgetting(worker: Worker, prompts: _Prompts) -> Seen:
    """The timed prompts, and again after vLLM's own cache was reset: from memory."""
    seen = Seen({}, {}, {})
    worker.ask_all([prompts.long[0][::-1]], 4)
    _timed(seen, worker, prompts)
    worker.settle()
    worker.forget()
    seen.ask("long, memory", worker, prompts.long, 2)
    return seen


def _equal(vllms: Vllms, prompts: _Prompts, alone: Seen, memory: str, *, direct: bool) -> Rows:
    """Tokens and bytes. Raises RuntimeError if nothing was loaded, or blocks have other bytes."""
    disk = f"disk://{vllms.folder}/kv?size=16GiB"
    yield row("tokens and bytes below", "with store.direct" if direct else "through the staging arena")
    with vllms.start("foreword", connector([memory, disk], direct=direct), load_all=True) as worker:
        ours = _common(worker, prompts)
        worker.settle()
        stored = [worker.stored()]
        worker.forget()
        ours.ask("memory", worker, prompts.several, prompts.new_tokens)
        loaded = _counts(worker)["loaded"]
        stored.append(worker.stored())
        _interrupt(ours, worker, prompts)
        worker.settle()
        worker.forget()
        ours.ask("together, memory", worker, prompts.together, prompts.new_tokens, how="together")
    for key in ("computed", "own hit", "together", "interrupted"):
        yield _tokens(f"{key}, and vLLM alone", ours, key, alone, key)
    yield _tokens("from memory, and vLLM's own hit", ours, "memory", alone, "own hit")
    yield _tokens("from memory, and own hit", ours, "memory", ours, "own hit")
    yield _tokens("from memory together, and vLLM alone", ours, "together, memory", alone, "together")
    yield row("stored bytes as vLLM's: computed, loaded", ", ".join(map(_same, stored)))
    with vllms.start("fresh", connector([disk]), load_all=True, only_loaded=True) as worker:
        fresh = Seen({}, {}, {})
        fresh.ask("disk", worker, prompts.several, prompts.new_tokens)
        worker.settle()
        counts = _counts(worker)
        stored.append(worker.stored())
    yield _tokens("from disk in a fresh process, and vLLM's own hit", fresh, "disk", alone, "own hit")
    yield row("fresh process: blocks saved, loaded, loads cut, blocks dropped", _shown(counts))
    yield row("loaded bytes as vLLM's, fresh process", _same(stored[-1]))
    cached = ((alone, "own hit"), (ours, "own hit"), (ours, "memory"), (fresh, "disk"))
    yield row(
        "cached tokens: own hit alone, own hit, memory, disk",
        ", ".join(f"{seen.cached[key]:,}" for seen, key in cached),
    )
    if not loaded or not counts["loaded"] or any(one["different"] or not one["compared"] for one in stored):
        raise RuntimeError(f"nothing was loaded, or blocks have other bytes: {stored}, {loaded}, {counts}")


def _tokens(what: str, seen: Seen, name: str, other: Seen, theirs: str) -> Row:
    return row(f"equal tokens: {what}", seen.equal(name, other, theirs))


def _ttft(what: str, seen: Seen, key: str, alone: Seen) -> Row:
    seconds, computed = seen.ttft[f"long, {key}"], median(alone.ttft["long, computed"])
    return row(
        f"TTFT of a long prompt: {what}",
        milliseconds(seconds),
        f"{median(seconds) / computed:.0%} of computing by vLLM alone; {len(seconds)} prompts",
    )


def _rate(what: str, seen: Seen, alone: Seen, prompts: _Prompts) -> Row:
    name = f"{len(prompts.decode[0])} prompts at once, {what}"
    return row(name, f"{seen.rate:.0f} tok/s", f"{seen.rate / alone.rate:.1%} of vLLM alone")


def _same(stored: dict[str, Any]) -> str:
    return f"{stored['compared'] - stored['different']} of {stored['compared']}"


def _counts(worker: Worker) -> dict[str, float]:
    return {name: value for name, _, value in worker.metrics("")}


def _shown(counts: dict[str, float]) -> str:
    return ", ".join(f"{counts[name]:.0f}" for name in ("saved", "loaded", "cut", "dropped"))
