"""Processes that commands start: none outlives its command, whichever way that ends."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import pytest
from example_counts import represented

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
        children = [os.pidfd_open(int(one)) for one in found]
        process.send_signal(end)
        assert process.wait(60)
        left = [one for one in children if not select.select([one], [], [], 60)[0]]
        for one in left:
            signal.pidfd_send_signal(one, signal.SIGKILL)
        for one in children:
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


def test_conform(tmp_path: Path) -> None:
    """A `foreword conform` that is told to end leaves nothing behind: what it mounts and the folders of its models go."""
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    command = ["conform", "--engine", "--only", "reuse", "--reproducers", str(tmp_path / "found")]
    with subprocess.Popen(
        [sys.executable, "-m", "foreword", *command],
        env={**os.environ, "TMPDIR": str(scratch)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    ) as process:
        limit = time.monotonic() + 60
        while not any(scratch.glob("foreword-conform-kv-*")):
            assert process.poll() is None and time.monotonic() < limit
            time.sleep(0.01)
        process.terminate()
        assert process.wait(60) == 128 + signal.SIGTERM
    assert not list(scratch.iterdir())
