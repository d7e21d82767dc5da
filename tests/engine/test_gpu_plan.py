"""`make gpu` on a machine without a GPU: all steps run with tiny shapes; what fails, hangs or is killed costs its own rows."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import benchmarks.gpu.plan as plan_module
from benchmarks.gpu.batch_copies import BatchCopies
from benchmarks.gpu.decisions import forget_pages, resident_share
from benchmarks.gpu.plan import DECISIONS, LONG, STEPS, TOTAL, Plan, PlanStep
from benchmarks.gpu.verdicts import verdicts

ROOT = Path(__file__).parents[2]
# Packages that a machine for experiments may not have: importing them fails.
ABSENT = ["zstandard", "starlette", "uvicorn", "zmq", "aiohttp", "prometheus_client"]
BLOCK = f"import sys; sys.modules.update(dict.fromkeys({ABSENT}))"
# The rows of a tiny run, by step, as their words begin.
ROWS = {
    "setup": ["one core of the host: memcpy", "one core of the host: XXH3-128"],
    "engine": ["start", "KV pool", "prefill of 24", "a step in which 2 decode", "GPU memory"],
    "ttft-memory": [
        *(
            f"{length} tokens, {how}"
            for length in (64, 32, 96)
            for how in ("computed, idle", "own hit", "from memory, idle", "computed, 2 decode", "from memory, 2 decode")
        ),
        "memory: blocks saved",
    ],
    "saving-few": [
        f"2 at once, {how}"
        for how in (
            "saving nothing",
            "+ hooks",
            "+ gather",
            "+ the writer's thread",
            "+ checksum",
            "+ memory tier",
            "+ disk tier",
            "vLLM's way",
        )
    ],
    "ttft-copies": [
        *(f"{length} tokens, vLLM's way of copying, {how}" for length in (64, 32, 96) for how in ("idle", "2 decode")),
        "its call",
    ],
    "saving-many": [f"3 at once, {how}" for how in ("saving nothing", "+ memory tier", "+ disk tier", "vLLM's way")],
    "ttft-disk": [
        "the disk tier's file system",
        *(
            f"{length} tokens, {how}"
            for length in (64, 32, 96)
            for how in ("computed, idle", "own hit", "from disk, idle", "computed, 2 decode", "from disk, 2 decode")
        ),
        "left in the page cache",
        "disk: blocks saved",
    ],
    "copies": ["load / save in one copy", *["the same"] * 4],
    "direct": ["left out"],
    "bytes": ["saved to memory", "loaded from memory", "saved to disk", "loaded from disk"],
    "checksum": ["left out"],
    "kernels": ["bytes through the staging arena", "bytes by vLLM's way of copying"],
}


def plan_process(folder: Path, *options: str, interpret: bool = False, more: str = "") -> subprocess.Popen[str]:
    (folder / "sitecustomize.py").write_text(BLOCK + more)
    # No GPU is seen, whatever there is.
    hidden = {"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1"}
    hidden["TRITON_INTERPRET"] = str(int(interpret))
    command = [sys.executable, "-m", "benchmarks.gpu.plan", "--out", str(folder), *options]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, env=os.environ | hidden, stdout=pipe, stderr=pipe, text=True, cwd=ROOT)


def run_plan(folder: Path, *options: str, interpret: bool = False) -> tuple[int, str]:
    process = plan_process(folder, *options, interpret=interpret)
    out, error = process.communicate(timeout=850)
    log = folder / "gpu-plan.log"
    return process.returncode, out + error + (log.read_text()[-4000:] if log.exists() else "")


def results_of(folder: Path) -> dict[str, Any]:
    return {one["step"]: one for one in json.loads((folder / "gpu-plan.json").read_text())["results"]}


def assert_rows(found: dict[str, Any], step: str, expected: list[str]) -> None:
    words = [row["what"] for row in found[step]["rows"]]
    assert len(words) == len(expected), (step, words)
    assert all(word.startswith(start) for word, start in zip(words, expected, strict=True)), (step, words)


def test_steps_end_within_eight_minutes() -> None:
    """The steps that run without vLLM end together within the time of a machine that is lent for eight minutes."""
    assert TOTAL <= 480
    assert sum(step.seconds for step in DECISIONS.values()) <= TOTAL
    assert not any(step.more for step in DECISIONS.values())
    assert list(STEPS) == [*DECISIONS, "vllm", *LONG]


@pytest.mark.extended
def test_each_row_is_there_and_a_broken_disk_costs_its_own(tmp_path: Path) -> None:
    """Rows of the plan are all there with tiny shapes, without packages that the plan is not to need, and with a disk folder
    that is a file."""
    bad = tmp_path / "file"
    bad.write_text("")
    status, said = run_plan(tmp_path, "--device", "cpu", "--tiny", "--disk", str(bad))
    found = results_of(tmp_path)
    assert status == 1 and list(found) == list(DECISIONS), said
    assert {step for step, one in found.items() if one["error"]} == {"ttft-disk", "bytes"}, said
    for step in DECISIONS.keys() - {"ttft-disk", "bytes"}:
        assert_rows(found, step, ROWS[step])
    assert_rows(found, "bytes", ROWS["bytes"][:2])
    assert not found["ttft-disk"]["rows"]
    failed = [row["what"] for one in found.values() for row in one["rows"] if row["figure"] == "failed"]
    assert failed == ["2 at once, + disk tier", "3 at once, + disk tier"], said
    lines = json.loads((tmp_path / "gpu-plan.json").read_text())["verdicts"]
    for words in (
        "64 tokens from memory, idle: ",
        "computing ",
        "Decision, memory, 2 decode",
        "2 at once, saving to memory",
        "Decision, 3 at once, memory tier",
        "ttft-disk",
    ):
        assert any(words in line for line in lines), (words, lines)
    page = (tmp_path / "gpu-plan.md").read_text()
    assert all(line in page for line in lines)

    figures = tmp_path / "figures.json"
    figures.write_text((ROOT / "docs" / "figures" / "65-gpu-plan.json").read_text())
    text = json.loads(figures.read_text())["text"]
    assert run_plan(tmp_path, "--publish", str(tmp_path / "gpu-plan.json"), "--figures", str(figures))[0] == 0
    published = json.loads(figures.read_text())
    assert published["text"] == text and len(published["rows"]) == 2 + sum(len(one["rows"]) for one in found.values())
    assert all(len(row["cells"]) == len(published["head"]) for row in published["rows"])
    assert "torch" in published["run"][0] and any("Decision" in line for line in published["run"])


def run_with(load: float, saving: float) -> list[dict[str, Any]]:
    """Rows of a run in which computing takes 0.4 s: seconds of a load, and those that saving 1,000 tokens adds."""
    ttft = {"p50": load, "p99": load, "computed": 0.4, "length": 1000, "loaded": 1.0}
    alone = {"rate": 1.0, "p50": 0.1, "p99": 0.1, "count": 4}
    rows = {
        "ttft-memory": [("1,000 tokens, from memory, 4 decode", ttft)],
        "saving-few": [
            ("4 at once, saving nothing", alone),
            ("4 at once, + memory tier", alone | {"share": 0.9, "more": saving, "tokens": 1000}),
        ],
    }
    return [
        {"step": step, "error": None, "rows": [{"what": what, "figure": "", "measured": one} for what, one in some]}
        for step, some in rows.items()
    ]


@pytest.mark.parametrize(
    ("load", "saving", "pays", "decision"),
    [
        (0.1, 0.03, "from 1,000 tokens on", "saving pays if 10.0% of the saved tokens are loaded once"),
        (0.1, 0.6, "from 1,000 tokens on", "does not pay, unless a token is loaded 2.0 times"),
        (0.1, -0.01, "from 1,000 tokens on", "saving costs no time"),
        (0.5, 0.03, "for no length that was tried", "does not pay, since loading"),
    ],
)
def test_verdicts(load: float, saving: float, pays: str, decision: str) -> None:
    """A tier pays for prompts that load faster than they are computed, and as often as saving costs less than that."""
    lines = verdicts(run_with(load, saving))
    assert any(line.startswith("Decision, memory, 4 decode:") and pays in line for line in lines), lines
    assert any(line.startswith("Decision, 4 at once, memory tier:") and decision in line for line in lines), lines
    assert not any("vLLM" in line or "disk" in line for line in lines)


SCRIPT = """
    import json, os, subprocess, sys, time

    def tell(**event):
        print(json.dumps(event), flush=True)

    tell(facts={"card": "none"})
    for name in sys.argv[1].split(","):
        tell(begin=name)
        tell(row={"what": f"{name}, first", "figure": "0"})
        tell(row={"what": f"{name}, first", "figure": str(os.getpid())})
        if name == "hangs":
            child = subprocess.Popen(["sleep", "1000"], start_new_session=True)
            tell(row={"what": "hangs, started", "figure": str(child.pid)})
            time.sleep(1000)
        if name == "dies":
            os.kill(os.getpid(), 9)
        tell(row={"what": f"{name}, second", "figure": "2"})
        tell(end=name, seconds=0.0, error="ValueError: wrong" if name in ("raises", "breaks") else None)
        if name == "breaks":
            sys.exit("the device is unusable")
"""


class Clock:
    """The clock of a plan: a minute is over when the step that hangs has told its rows."""

    perf_counter = staticmethod(time.perf_counter)

    def __init__(self) -> None:
        self.plan: Plan | None = None
        self._passed = 0.0

    def monotonic(self) -> float:
        if self.plan is not None and len(self.plan.table.results["hangs"]["rows"]) == 2:
            self._passed = 60.0
        return time.monotonic() + self._passed


def scripted(
    folder: Path, patch: pytest.MonkeyPatch, names: Sequence[str], total: float = TOTAL, alone: tuple[str, ...] = ()
) -> Plan:
    """A plan whose steps are those of a script: what each does, its name says. Each may take a minute."""
    script = folder / "worker.py"
    script.write_text(textwrap.dedent(SCRIPT))

    def never(context: object) -> list[dict[str, Any]]:
        raise AssertionError("steps run in another process")

    known = {name: PlanStep(never, 60.0, alone=name in alone) for name in names}
    command, clock = [sys.executable, "-S", "-E", str(script)], Clock()
    patch.setattr(plan_module, "time", clock)
    clock.plan = Plan(names, folder, folder, lambda some: [*command, ",".join(some)], known, total)
    return clock.plan


def test_a_package_that_is_missing_is_said_first(tmp_path: Path) -> None:
    """Nothing is run, and the status and the message say so: most steps would fail, one after the other."""
    process = plan_process(tmp_path, "--device", "cpu", "--tiny", more="; sys.modules['msgspec'] = None")
    said, _ = process.communicate(timeout=120)
    assert process.returncode == 3 and "msgspec" in said and not list(tmp_path.glob("gpu-plan*"))


def test_a_step_that_hangs_dies_or_raises_costs_its_own_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that a step has found stay when it hangs, dies or raises; the others run, in a new process where the old one is
    gone."""
    names = ("hangs", "works", "dies", "raises", "ends", "breaks", "follows", "lone")
    plan = scripted(tmp_path, monkeypatch, names, alone=("lone",))
    assert plan.run() == 1
    found = results_of(tmp_path)
    rows = {name: [row["what"] for row in one["rows"]] for name, one in found.items()}
    more = dict.fromkeys(found, "second") | {"hangs": "started", "dies": ""}
    assert rows == {name: [f"{name}, first", *([f"{name}, {more[name]}"] if more[name] else [])] for name in found}
    assert not alive(int(found["hangs"]["rows"][1]["figure"]))
    errors = {name: one["error"] for name, one in found.items() if one["error"]}
    assert set(errors) == {"hangs", "dies", "raises", "breaks"}
    assert "cut off" in errors["hangs"] and "-9" in errors["dies"] and errors["raises"] == "ValueError: wrong"
    # A row replaces the one with the same words. Its figure is the process: what hangs, dies or breaks is the last of one.
    process = {name: one["rows"][0]["figure"] for name, one in found.items()}
    groups = (("hangs",), ("works", "dies"), ("raises", "ends", "breaks"), ("follows",), ("lone",))
    assert [{process[name] for name in group} for group in groups] == [{process[group[0]]} for group in groups]
    assert len(set(process.values())) == len(groups)
    assert not any(alive(int(pid)) for pid in process.values())


def test_what_does_not_fit_into_the_time_is_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step that hangs to the end of the plan's time leaves none for the others, which the table says."""
    plan = scripted(tmp_path, monkeypatch, ("hangs", "works"), total=60.0)
    assert plan.run() == 1
    found = results_of(tmp_path)
    assert "cut off" in found["hangs"]["error"] and len(found["hangs"]["rows"]) == 2
    assert found["works"]["error"] == "not run" and not found["works"]["rows"]


@pytest.mark.parametrize("number", [signal.SIGKILL, pytest.param(signal.SIGTERM, marks=pytest.mark.extended)])
def test_a_plan_that_is_killed_keeps_its_rows(tmp_path: Path, number: signal.Signals) -> None:
    """Its table is whole, with each row that was found, and the process that ran the steps ends too."""
    process = plan_process(tmp_path, "--device", "cpu", "--tiny", "--steps", "setup,engine,ttft-memory")
    assert process.stdout is not None
    found = next(line for line in process.stdout if line.startswith("setup: "))
    [worker] = children(process.pid)
    process.send_signal(number)
    process.communicate(timeout=60)
    rows = results_of(tmp_path)["setup"]["rows"]
    assert rows and rows[0]["what"] in found
    assert rows[0]["what"] in (tmp_path / "gpu-plan.md").read_text()
    until = time.monotonic() + 60
    while alive(worker) and time.monotonic() < until:
        time.sleep(0.05)
    assert not alive(worker)


def children(pid: int) -> list[int]:
    return [int(one) for one in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_batches_come_back_and_what_fails_is_raised() -> None:
    """Blocks that are saved and loaded in random order have their bytes; a thread's error reaches the caller."""
    tensors = [torch.randint(0, 1000, (12, 5), dtype=torch.int32), torch.randint(0, 99, (12, 3, 7), dtype=torch.int16)]
    copies = BatchCopies(tensors, 6)
    try:
        assert copies.block_bytes == 5 * 4 + 21 * 2 and not copies.registered
        wanted = [tensor[[7, 0, 11]].clone() for tensor in tensors]
        copies.save([7, 0, 11], [5, 2, 0]).wait()
        for tensor in tensors:
            tensor.zero_()
        copies.load([7, 0, 11], [5, 2, 0]).wait()
        assert all(torch.equal(tensor[[7, 0, 11]], before) for tensor, before in zip(tensors, wanted, strict=True))
        assert not any(tensor[[1, 2, 3]].any() for tensor in tensors)
        with pytest.raises(ValueError, match="4 targets, 6 sources"):
            copies.load([1, 2], [0, 1, 2]).wait()
    finally:
        copies.close()


def test_forgotten_pages_are_counted(tmp_path: Path) -> None:
    """A file that was just written is in the page cache, all of it; an empty folder says that it knows nothing."""
    assert forget_pages(tmp_path) == -1.0
    path = tmp_path / "block"
    path.write_bytes(os.urandom(1 << 20))
    assert resident_share(path) == 1.0
    assert 0.0 <= forget_pages(tmp_path) <= 1.0


@pytest.mark.slow
def test_says_that_there_is_no_gpu(tmp_path: Path) -> None:
    """Without a GPU nothing runs, and the status says so."""
    status, said = run_plan(tmp_path)
    assert status == 2 and "no GPU" in said
    assert not list(tmp_path.glob("gpu-plan*"))


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_steps_run_on_a_cpu_with_the_kernels_of_the_device(tmp_path: Path) -> None:
    """Every step, the long ones too, in Triton's interpreter."""
    pytest.importorskip("triton")
    status, said = run_plan(tmp_path, "--device", "cpu", "--tiny", "--all", interpret=True)
    assert status == 0, said
    found = results_of(tmp_path)
    assert list(found) == [*DECISIONS, *LONG]
    ways = ["4 blocks through the staging arena", "4 blocks straight, with store.direct"]
    interpreted = {"checksum": ["frames sealed as the host seals them"], "direct": ways}
    for step, expected in (ROWS | interpreted).items():
        assert_rows(found, step, expected)
    assert all(one["rows"] and not one["error"] for one in found.values())
    assert not any(row["figure"] == "failed" for one in found.values() for row in one["rows"])
