"""Measures the worth of a tier of KV on a GPU, in one command below eight minutes, offline: models are made on the spot.

    python -m benchmarks.gpu.plan [--out results] [--disk FOLDER] [--steps engine,ttft-memory] [--all]      (make gpu)
    python -m benchmarks.gpu.plan --publish results/gpu-plan.json                                          (make gpu-page)

It needs PyTorch with CUDA, Triton, Transformers and what `pip install '.[engine]'` installs, which it looks for before it
starts anything: to a machine that reaches no registry, take along the wheels of what is missing there. Where vLLM is installed,
a step with vLLM itself follows, seven minutes more. `--all` adds the long steps: all kernels, tokens, a server, Transformers.

The table is in `gpu-plan.md` and `gpu-plan.json` of the output folder, and is written again with each row: a run that is killed
keeps what it has found. Steps run in one process, which keeps the engine. A step that raises costs its own rows; a step that
outlasts its time, or whose process dies, is cut off, and a new process runs the others. `gpu-plan.log` has all messages. Ends
with status 2 where there is no GPU, 3 where a package is missing, and 1 if a step failed.

`--publish` runs nothing: it puts a table into docs/figures, from which `docs/generate.py` makes docs/benchmarks.md.

With `--device cpu --tiny` the same steps run on a CPU with tiny shapes, which tries the script; with TRITON_INTERPRET=1 the
device's copies run too.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib.util
import json
import os
import queue
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.gpu import decisions, steps
from benchmarks.gpu.bench import Row, Rows
from benchmarks.gpu.decisions import Context
from benchmarks.gpu.verdicts import verdicts
from benchmarks.harness import table

ROOT = Path(__file__).resolve().parents[2]
FIGURES = ROOT / "docs" / "figures" / "65-gpu-plan.json"
TOTAL = 480.0  # seconds, for all steps without vLLM and the long ones
NEEDED = (
    "torch", "numpy", "transformers", "tokenizers", "safetensors", "xxhash", "msgspec", "llguidance", "psutil", "jinja2",
)  # fmt: skip
_SOFT = 0.85  # the share of a step's time after which it begins nothing more


@dataclass(frozen=True)
class PlanStep:
    """A step, and the seconds that it may take.

    Attributes:
        alone: runs in a process of its own.
        more: not one of the steps that must end together within TOTAL.
    """

    run: Callable[[Context], Rows]
    seconds: float
    alone: bool = False
    more: bool = False


def _long(step: Callable[..., Rows], seconds: float) -> PlanStep:
    return PlanStep(lambda context: step(context.shapes, context.device, context.tiny), seconds, alone=True, more=True)


def _vllm(context: Context) -> Rows:
    from benchmarks.gpu.vllm_steps import step_vllm

    return step_vllm(context.device, context.tiny)


# In the order in which they run: what decides most is found first.
DECISIONS = {
    "setup": PlanStep(decisions.step_setup, 45),
    "engine": PlanStep(decisions.step_engine, 70),
    "ttft-memory": PlanStep(decisions.step_ttft_memory, 80),
    "saving-few": PlanStep(functools.partial(decisions.step_saving, 0), 75),
    "ttft-copies": PlanStep(decisions.step_ttft_copies, 25),
    "saving-many": PlanStep(functools.partial(decisions.step_saving, 1), 50),
    "ttft-disk": PlanStep(decisions.step_ttft_disk, 50),
    "copies": PlanStep(decisions.step_copies, 20),
    "direct": PlanStep(decisions.step_direct, 20),
    "bytes": PlanStep(decisions.step_bytes, 10),
    "checksum": PlanStep(decisions.step_checksum, 10),
    "kernels": PlanStep(decisions.step_kernels, 25),
}
LONG = {
    "kernels-float32": _long(functools.partial(steps.step_kernels, "float32", 1e-4), 200),
    "kernels-bfloat16": _long(functools.partial(steps.step_kernels, "bfloat16", 5e-2), 150),
    "kernels-float16": _long(functools.partial(steps.step_kernels, "float16", 1e-2), 150),
    "tokens": _long(steps.step_tokens, 100),
    "serve": _long(steps.step_serve, 120),
    "decode": _long(steps.step_decode, 130),
    "transformers": _long(steps.step_transformers, 120),
}
STEPS = {**DECISIONS, "vllm": PlanStep(_vllm, 420, alone=True, more=True), **LONG}


# The process that runs steps


def work(names: Sequence[str], device_name: str, tiny: bool, disk: Path) -> int:
    """Run steps one after the other; each row is a line of JSON. Returns the exit status: not 0 if the device is unusable."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is for the log

    def tell(**event: Any) -> None:
        answers.write(json.dumps(event) + "\n")
        answers.flush()

    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    import torch

    if device_name.startswith("cuda") and not torch.cuda.is_available():
        tell(no_gpu=True)
        return 0
    device = torch.device("cuda:0" if device_name == "cuda" else device_name)  # some calls need its number
    context = Context(device, tiny, disk)
    tell(facts=decisions.facts_of(device, tiny))
    for name in names:
        step, begin, error = STEPS[name], time.perf_counter(), None
        context.begin(step.seconds * _SOFT)
        tell(begin=name)
        try:
            for found in step.run(context):
                tell(row=found)
        except Exception as failure:  # noqa: BLE001 - one step of a benchmark, which says so; the others run
            error = f"{type(failure).__name__}: {failure}".replace("\n", " ")[:400]
            sys.excepthook(type(failure), failure, failure.__traceback__)
        tell(end=name, seconds=round(time.perf_counter() - begin, 1), error=error)
        if error is not None and device.type == "cuda":
            torch.cuda.synchronize()  # raises if the step has broken the context: a new process runs the others
    return 0


def _end_with(parent: int) -> None:
    """End this process, which has a session of its own, when its parent is gone."""
    while os.getppid() == parent:
        time.sleep(0.5)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(os.getpgid(0), signal.SIGKILL)


class Worker:
    """A process that runs steps.

    Args:
        log: file for what it says beside its rows.
    """

    def __init__(self, command: Sequence[str], log: Any) -> None:
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=log, text=True, start_new_session=True, cwd=ROOT
        )
        self._events: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            with contextlib.suppress(json.JSONDecodeError):  # the last line of a process that was killed
                self._events.put(json.loads(line))
        self._events.put(None)

    def next(self, seconds: float) -> dict[str, Any] | None:
        """The next event; None at the end. Raises queue.Empty if none comes in time."""
        return self._events.get(timeout=max(seconds, 0.01))

    def close(self) -> int:
        """End it and what it started; its exit status."""
        if self.process.poll() is None:
            for pid in [*descendants(self.process.pid), self.process.pid]:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        try:
            return self.process.wait(10.0)
        except subprocess.TimeoutExpired:  # the system still writes what it had in its cache
            return -signal.SIGKILL


def descendants(pid: int) -> list[int]:
    """The processes that a process has started, and those that they have; they may have sessions of their own."""
    found = []
    for tasks in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            for child in map(int, tasks.read_text().split()):
                found += [child, *descendants(child)]
    return found


# The table


class Table:
    """Results so far. The file is written with each row."""

    def __init__(self, folder: Path, names: Sequence[str]) -> None:
        self._folder = folder
        self.facts: dict[str, str] = {}
        self.results: dict[str, dict[str, Any]] = {
            name: {"step": name, "seconds": 0.0, "error": "not run", "rows": []} for name in names
        }

    def add(self, name: str, found: Row) -> None:
        """A row; it replaces one with the same words."""
        rows = self.results[name]["rows"]
        at = next((number for number, one in enumerate(rows) if one["what"] == found["what"]), len(rows))
        rows[at : at + 1] = [found]
        self.write()

    def end(self, name: str, seconds: float, error: str | None) -> None:
        """A step has ended."""
        self.results[name] |= {"seconds": round(seconds, 1), "error": error}
        self.write()

    def as_json(self) -> dict[str, Any]:
        results = list(self.results.values())
        return {"facts": self.facts, "verdicts": verdicts(results), "results": results}

    def write(self) -> None:
        """Each file is replaced whole: what reads it, or a kill, finds the old one or the new one."""
        self._folder.mkdir(parents=True, exist_ok=True)
        run = self.as_json()
        for name, text in (("gpu-plan.json", json.dumps(run, indent=1) + "\n"), ("gpu-plan.md", markdown(run) + "\n")):
            new = self._folder / f"{name}.new"
            new.write_text(text, encoding="utf-8")
            new.replace(self._folder / name)


def markdown(run: dict[str, Any]) -> str:
    """The results as a page."""
    facts = run["facts"]
    lines = [
        f"# GPU plan: {facts.get('card', '')}",
        "",
        ", ".join(f"{k} {v}" for k, v in facts.items() if k != "card"),
        "",
    ]
    lines += [f"- {line}" for line in run["verdicts"]] + [""]
    for result in run["results"]:
        outcome = f"FAILED: {result['error']}" if result["error"] else "done"
        lines += [f"## {result['step']}: {outcome} ({result['seconds']} s)", ""]
        if result["rows"]:
            cells = [[one["what"], one["figure"], one.get("beside", "")] for one in result["rows"]]
            lines += [table(["", "figure", "beside"], cells), ""]
    return "\n".join(lines)


def publish(source: Path, target: Path) -> None:
    """A run as a table of docs/benchmarks.md. The text of the file that is there stays."""
    run = json.loads(source.read_text(encoding="utf-8"))
    facts = run["facts"]
    old = json.loads(target.read_text(encoding="utf-8"))
    rows = []
    for result in run["results"]:
        failed = [{"what": f"failed: {result['error'][:120]}", "figure": ""}] if result["error"] else []
        rows += [
            {"cells": [result["step"], one["what"], one["figure"], one.get("beside", "")]}
            for one in result["rows"] + failed
        ]
    new = {
        **old,
        "run": ["Set-up: " + ", ".join(f"{name} {value}" for name, value in facts.items()) + "."]
        + [f"- {line}" for line in run["verdicts"]],
        "head": ["step", "what", "figure", "beside"],
        "processor": facts["card"],
        "date": facts["date"],
        "command": "gpu/plan.py",
        "rows": rows,
    }
    target.write_text(json.dumps(new, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


# The plan


class Plan:
    """Runs steps in processes, each step within its time.

    Args:
        names: the steps.
        command: gives the command of a process that runs some of them.
        disk: where they make folders.
        known: the steps by name.
    """

    def __init__(
        self,
        names: Sequence[str],
        out: Path,
        disk: Path,
        command: Callable[[Sequence[str]], Sequence[str]],
        known: Mapping[str, PlanStep] = STEPS,
        total: float = TOTAL,
    ) -> None:
        self._steps, self._out, self._disk, self._command = known, out, disk, command
        self._left = list(names)
        self.table = Table(out, names)
        self._start = time.monotonic()
        self._ends: dict[str, float] = {}
        end = self._start
        for name in names:
            end += known[name].seconds
            self._ends[name] = end
        self._last = self._start + total + sum(known[name].seconds for name in names if known[name].more)
        self.no_gpu = False

    def run(self) -> int:
        """The exit status."""
        self._out.mkdir(parents=True, exist_ok=True)
        path = self._out / "gpu-plan.log"
        with path.open("w", encoding="utf-8") as log:
            while self._left and not self.no_gpu:
                names = list(self._batch())
                worker = Worker(self._command(names), log)
                try:
                    self._follow(worker, names)
                finally:
                    worker.close()
                    self._remove_folders()
        if self.no_gpu:
            path.unlink()
            print("There is no GPU here: PyTorch sees no CUDA device. Nothing was run.")
            return 2
        self.table.write()
        print("\n".join(self.table.as_json()["verdicts"]), flush=True)
        return int(any(result["error"] for result in self.table.results.values()))

    def _remove_folders(self) -> None:
        """Remove folders of steps that were cut off from the disk."""
        with contextlib.suppress(OSError):
            for path in list(self._disk.glob(decisions.folder_prefix(os.getpid()) + "*")):
                shutil.rmtree(path, ignore_errors=True)

    def _batch(self) -> Iterator[str]:
        """The steps of the next process."""
        for number, name in enumerate(self._left):
            if number and self._steps[name].alone:
                return
            yield name
            if self._steps[name].alone:
                return

    def _limit(self, name: str) -> float:
        """When a step that begins now is cut off. It may use what the steps before it have not."""
        return min(max(self._ends[name], time.monotonic() + self._steps[name].seconds), self._last)

    def _follow(self, worker: Worker, names: list[str]) -> None:
        """Take the rows of a process until its end, or until a step is cut off."""
        begun, limit = time.monotonic(), self._limit(names[0])
        started = True  # the time of a process's start is that of its first step
        while names:
            try:
                event = worker.next(limit - time.monotonic())
            except queue.Empty:
                return self._failed(names[0], begun, f"cut off after {time.monotonic() - begun:.0f} s")
            if event is None and not started:
                return None  # a step that failed has made the device unusable for this process
            if event is None:
                return self._failed(
                    names[0], begun, f"the process ended with status {worker.close()}: see gpu-plan.log"
                )
            if "no_gpu" in event:
                self.no_gpu = True
                return None
            if "facts" in event:
                self.table.facts = event["facts"]
                print(", ".join(f"{name} {value}" for name, value in event["facts"].items()), flush=True)
                self.table.write()
            elif "begin" in event:
                begun, limit, started = time.monotonic(), self._limit(event["begin"]), True
            elif "row" in event:
                self.table.add(names[0], event["row"])
                print(
                    f"{names[0]}: {' | '.join(event['row'].get(key, '') for key in ('what', 'figure', 'beside'))}",
                    flush=True,
                )
            else:
                self.table.end(names[0], event["seconds"], event["error"])
                self._left.remove(names.pop(0))
                limit, started = self._last, False
                if event["error"]:
                    print(f"{event['end']}: FAILED: {event['error']}", flush=True)
        return None

    def _failed(self, name: str, begun: float, error: str) -> None:
        self.table.end(name, time.monotonic() - begun, error)
        self._left.remove(name)
        print(f"{name}: FAILED: {error}", flush=True)
        if time.monotonic() >= self._last:
            self._left.clear()


def main() -> int:
    """0 if all steps succeeded, 1 if one failed, 2 without a GPU, 3 without a package."""
    parser = argparse.ArgumentParser(description="What a tier of KV is worth on a GPU.")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="tiny shapes, to try this script")
    parser.add_argument("--steps", help=f"which steps, separated by commas, of {', '.join(STEPS)}")
    parser.add_argument("--all", action="store_true", help="also the long steps")
    parser.add_argument("--out", type=Path, default=ROOT / "results")
    parser.add_argument("--disk", type=Path, help="folder for the disk tier, on the disk that is to be measured")
    parser.add_argument(
        "--publish", type=Path, metavar="FILE", help="put a gpu-plan.json into docs/figures, and run nothing"
    )
    parser.add_argument("--figures", type=Path, default=FIGURES, help=argparse.SUPPRESS)
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.publish:
        publish(options.publish, options.figures)
        return 0
    if options.worker:
        return work(options.worker.split(","), options.device, options.tiny, options.disk)
    names = [*DECISIONS, *(["vllm"] if importlib.util.find_spec("vllm") else []), *(LONG if options.all else ())]
    if options.steps:
        names = options.steps.split(",")
        if unknown := [name for name in names if name not in STEPS]:
            parser.error(f"unknown steps: {', '.join(unknown)}")
    if missing := missing_packages():
        print(f"Nothing was run: {sys.executable} has no {', '.join(missing)}, which most steps need.")
        return 3
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    disk = options.disk or default_disk(options.out)

    def command(some: Sequence[str]) -> list[str]:
        given = ["--worker", ",".join(some), "--device", options.device, "--disk", str(disk)]
        return [sys.executable, "-m", "benchmarks.gpu.plan", *given, *(["--tiny"] if options.tiny else [])]

    return Plan(names, options.out, disk, command).run()


def missing_packages() -> list[str]:
    """Packages that the engine imports and that are not installed. Finding out step by step takes a lent machine's time."""
    return [name for name in NEEDED if importlib.util.find_spec(name) is None]


def default_disk(out: Path) -> Path:
    """The folder for temporary files, unless it is in memory: then beside the results."""
    folder = Path(tempfile.gettempdir())
    return out.absolute() if "memory" in decisions.file_system(folder) else folder


if __name__ == "__main__":
    raise SystemExit(main())
