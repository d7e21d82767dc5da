"""Processes that commands start: none outlives its command, whichever way that ends."""

from __future__ import annotations

import json
import multiprocessing
import os
import select
import signal
import subprocess
import sys
import time
from array import array
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest
from example_counts import represented

from foreword import children
from foreword.sim.costs import EngineCosts, FleetSpec
from foreword.sim.plan import SimulationCase
from foreword.sim.sizing import Sizing, parse_objective
from foreword.sim.trace import TraceRequest

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="children are found in /proc")

ENDS = (signal.SIGKILL, signal.SIGTERM, signal.SIGHUP, signal.SIGINT)


def ticks(process: str) -> int:
    """Processor time of a process, in hundredths of a second."""
    user, system = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[11:13]
    return int(user) + int(system)


def left_after(end: signal.Signals, command: Sequence[str], count: int) -> int:
    """Start a command, and end it alone once it has this many children. Returns how many of them did not end."""
    with ExitStack() as stack:
        process = stack.enter_context(
            subprocess.Popen(
                [sys.executable, "-m", "foreword", *command],
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
                preexec_fn=lambda: [signal.signal(one, signal.SIG_DFL) for one in ENDS[1:]],
            )
        )
        stack.callback(process.kill)
        listed = Path(f"/proc/{process.pid}/task/{process.pid}/children")
        limit = time.monotonic() + 60
        # A signal on the way out of fork() is lost in Python: the command has gone on when the children compute.
        while len(found := listed.read_text().split()) < count or min(map(ticks, found)) < 10:
            assert process.poll() is None and time.monotonic() < limit
            time.sleep(0.01)
        started = [os.pidfd_open(int(one)) for one in found]
        process.send_signal(end)
        assert process.wait(60)
        left = [one for one in started if not select.select([one], [], [], 60)[0]]
        for one in left:
            signal.pidfd_send_signal(one, signal.SIGKILL)
        for one in started:
            os.close(one)
        return len(left)


@pytest.mark.parametrize("end", represented(ENDS, signal.SIGKILL, signal.SIGTERM))
def test_demo(end: signal.Signals) -> None:
    """The server that `foreword demo` starts ends with it."""
    assert left_after(end, ["demo"], 1) == 0


@pytest.mark.parametrize("end", represented(ENDS, signal.SIGKILL, signal.SIGINT))
def test_simulate(end: signal.Signals, tmp_path: Path) -> None:
    """Processes that simulate at the same time (`--jobs`) end with the command, which does not wait for what was submitted."""
    trace = tmp_path / "trace.jsonl"
    line = {"input_length": 6000, "output_length": 200, "hash_ids": list(range(12))}
    lines = [json.dumps({"timestamp": 20 * number, **line}) for number in range(3_000)]
    trace.write_text("\n".join(lines) + "\n")
    command = ["simulate", str(trace), "--slo", "p99 ttft < 1 ms", "--jobs", "3", "--runs", "7"]
    assert left_after(end, command, 3) == 0


def grandchildren(process: int) -> list[str]:
    """The processes that children of this one have started."""
    found = []
    for child in Path(f"/proc/{process}/task/{process}/children").read_text().split():
        with suppress(FileNotFoundError):  # it has ended
            found += Path(f"/proc/{child}/task/{child}/children").read_text().split()
    return found


def mounted(folder: Path) -> list[str]:
    """Where file systems are mounted below a folder."""
    places = [line.split()[1] for line in Path("/proc/mounts").read_text().splitlines()]
    return [one for one in places if one.startswith(str(folder))]


@pytest.mark.extended
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("claim", "end"),
    [
        ("reuse.cold", signal.SIGTERM),
        ("reuse.cold", signal.SIGKILL),
        pytest.param("fault.full-disk", signal.SIGTERM, marks=pytest.mark.slow),
    ],
)
def test_conform(claim: str, end: signal.Signals, tmp_path: Path) -> None:
    """The engine that a `foreword conform` has started ends with it. One that is told to end leaves nothing: what it mounts and
    the folders of its models go."""
    scratch, mounts = tmp_path / "scratch", claim == "fault.full-disk"
    scratch.mkdir()
    if mounts:
        if subprocess.run(["mount", "-t", "tmpfs", "foreword-test", str(scratch)], check=False).returncode:
            pytest.skip("nothing can be mounted here")
        subprocess.run(["umount", str(scratch)], check=True)
    command = ["conform", "--engine", "--only", claim, "--reproducers", str(tmp_path / "found")]
    with subprocess.Popen(
        [sys.executable, "-m", "foreword", *command],
        env={**os.environ, "TMPDIR": str(scratch)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    ) as process:
        limit = time.monotonic() + 300
        while not (mounted(scratch) if mounts else grandchildren(process.pid)):
            assert process.poll() is None and time.monotonic() < limit
            time.sleep(0.01)
        engines = [os.pidfd_open(int(one)) for one in grandchildren(process.pid)]
        process.send_signal(end)
        assert process.wait(60) == (-end if end is signal.SIGKILL else 128 + end)
    left = mounted(scratch)
    for place in left:
        subprocess.run(["umount", "-l", place], check=True)
    assert not left
    assert end is signal.SIGKILL or not list(scratch.glob("foreword-*"))
    for engine in engines:
        assert select.select([engine], [], [], 60)[0]
        os.close(engine)


def test_a_second_signal() -> None:
    """A command that has got a signal to end finishes what it does on its way out, however many come then: a terminal that is
    closed sends two."""
    program = (
        "import sys\n"
        "from foreword.children import ended_by_signals\n"
        "with ended_by_signals():\n"
        "    try:\n"
        "        print('begun', flush=True)\n"
        "        sys.stdin.readline()\n"
        "    finally:\n"
        "        print('ending', flush=True)\n"
        "        sys.stdin.readline()\n"
        "        print('ended', flush=True)\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        preexec_fn=lambda: [signal.signal(one, signal.SIG_DFL) for one in ENDS[1:]],
    ) as process:
        assert process.stdin is not None and process.stdout is not None
        assert process.stdout.readline() == "begun\n"
        process.send_signal(signal.SIGHUP)
        assert process.stdout.readline() == "ending\n"
        process.send_signal(signal.SIGTERM)
        process.send_signal(signal.SIGHUP)
        process.stdin.write("\n")
        process.stdin.flush()
        assert process.stdout.readline() == "ended\n"
    assert process.returncode == 128 + signal.SIGHUP


def test_a_process_of_another_thread() -> None:
    """A process that another thread than the main one starts does not end with that thread."""
    with ThreadPoolExecutor(1) as threads:
        process = threads.submit(children.start, ["cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE).result()
    assert process.communicate(b"there", 60)[0] == b"there" and process.returncode == 0


def test_workers_of_others() -> None:
    """A search for fleet sizes that is interrupted ends its own processes, and none that the program has started before."""
    context = multiprocessing.get_context("fork")
    mine, theirs = context.Pipe()
    other = context.Process(target=lambda: theirs.send(theirs.recv()), daemon=True)
    other.start()

    def interrupted(line: str) -> None:
        raise KeyboardInterrupt

    trace = [TraceRequest(0.0, array("I", [1]), 64, 64, 2)]
    costs = EngineCosts(1e-3, 1e-6, 0.0, 1e-3, 0.0)
    sizing = Sizing(trace, costs, [parse_objective("p50 ttft < 1 s")], runs=2, jobs=2, progress=interrupted)
    fleet = FleetSpec(replicas=1, device_tokens=6400, block_size=64, max_batch_tokens=512)
    with pytest.raises(KeyboardInterrupt):
        sizing.search([SimulationCase("one", fleet, "longest-prefix")], [1])
    limit = time.monotonic() + 60
    while set(multiprocessing.active_children()) - {other}:
        assert time.monotonic() < limit
        time.sleep(0.01)
    mine.send("there")
    assert mine.poll(60) and mine.recv() == "there"
    other.join(60)
    assert other.exitcode == 0
