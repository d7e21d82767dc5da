"""Starts `worker.py` in another interpreter and talks to it over lines of JSON."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from foreword.errors import ForewordError

HERE = Path(__file__).resolve().parent
WORKER = HERE / "worker.py"
START = 300.0
_ANSWER = 900.0

Answer = dict[str, Any]


class Failed(ForewordError, code="process_failed"):
    """A process refused, crashed, or took too long."""


class Refused(Failed, code="process_refused"):
    """A process did not start with these settings."""


class Worker:
    """The driver's end of a `worker.py`.

    Attributes:
        transcript: what was sent, and a summary of each answer; for reports.
    """

    def __init__(self, process: subprocess.Popen[str], log: Path) -> None:
        self.process = process
        self.transcript: list[str] = []
        self._log = log

    @classmethod
    def start(
        cls,
        python: str,
        job: Mapping[str, Any],
        log: Path,
        *,
        script: Path = WORKER,
        variables: Mapping[str, str] | None = None,
    ) -> Worker:
        """Start the script and wait until its engine is ready. Raises Failed."""
        with log.open("w", encoding="utf-8") as file:
            process = subprocess.Popen(
                [python, "-P", str(script)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=file,
                text=True,
                env={**os.environ, **preload(python), **(variables or {})},
                start_new_session=True,
            )
        worker = cls(process, log)
        try:
            worker.tell(dict(job), START)
        except BaseException:
            end(process)
            raise
        return worker

    def tell(self, line: dict[str, Any], limit: float = _ANSWER) -> Answer:
        """Send a line, wait for its answer. Raises Failed if none comes."""
        self.send(line)
        return self.receive(limit)

    def send(self, line: dict[str, Any]) -> None:
        """Send a line without waiting. Raises Failed."""
        assert self.process.stdin is not None
        self.transcript.append(json.dumps(line))
        try:
            self.process.stdin.write(self.transcript[-1] + "\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            raise Failed(f"vLLM crashed: {last_line(self._log)}") from None

    def receive(self, limit: float = _ANSWER) -> Answer:
        """The answer to the line that was sent. Raises Failed."""
        assert self.process.stdout is not None
        ready, _, _ = select.select([self.process.stdout], [], [], limit)
        text = self.process.stdout.readline() if ready else ""
        if not text:
            raise Failed(f"vLLM {'crashed' if ready else 'is stuck'}: {last_line(self._log)}")
        found: Answer = json.loads(text)
        self.transcript.append("  -> " + _summary(found))
        return found

    def ask(self, prompt: list[int], new_tokens: int = 8) -> Answer:
        """One request alone."""
        return self.ask_all([prompt], new_tokens)[0]

    def ask_all(self, prompts: Sequence[list[int]], new_tokens: int = 8, **how: Any) -> list[Answer]:
        """Several requests: one after the other, or as `how`, `salt` and `adapter` say."""
        found: list[Answer] = self.tell({"ask": list(prompts), "new_tokens": new_tokens, **how})["results"]
        return found

    def ask_together(self, prompts: Sequence[list[int]], new_tokens: int) -> Answer:
        """All at once: `results`, and the `seconds` until the last has ended."""
        return self.tell({"ask": list(prompts), "new_tokens": new_tokens, "how": "together"})

    def settle(self, seconds: float = 1.0) -> float:
        """Wait for background writes; returns the seconds it took."""
        found: float = self.tell({"settle": seconds})["seconds"]
        return found

    def stored(self) -> Answer:
        """Bytes in Foreword's last tier, and the bytes per token of all blocks."""
        return self.tell({"stored": True})

    def forget(self) -> None:
        """Reset vLLM's own prefix cache. Raises Failed if a request still holds blocks."""
        if not self.tell({"forget": True})["done"]:
            raise Failed("vLLM would not drop its prefix cache: a request holds blocks")

    def close(self) -> None:
        """End the process; background writes are finished first if it still answers."""
        with contextlib.suppress(Failed):
            self.tell({"end": True}, 60)
        end(self.process)

    def kill(self) -> None:
        """End the process without warning (SIGKILL)."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        end(self.process)


def _summary(answer: Answer) -> str:
    if "results" not in answer:
        return json.dumps(answer)
    return json.dumps([{"cached": one["cached"], "tokens": one["tokens"]} for one in answer["results"]])


def end(process: subprocess.Popen[str]) -> None:
    """End a process and its group, which is its own."""
    for what, patience in ((signal.SIGTERM, 10), (signal.SIGKILL, 10)):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, what)
        try:
            process.wait(patience)
        except subprocess.TimeoutExpired:
            continue
    # Intel's OpenMP leaves a note behind when a process does not end by itself.
    Path(f"/dev/shm/__KMP_REGISTERED_LIB_{process.pid}_0").unlink(missing_ok=True)
    for stream in (process.stdin, process.stdout):
        if stream is not None:
            with contextlib.suppress(BrokenPipeError):
                stream.close()


def last_line(log: Path | str) -> str:
    """Of a log or a traceback, the line that says most: the last one that names an error, or the last."""
    text = log if isinstance(log, str) else log.read_text(encoding="utf-8", errors="replace")
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    named = [line for line in lines if "Error" in line or "error:" in line.lower()]
    return (named or lines or ["it said nothing"])[-1][-300:]


def preload(python: str) -> dict[str, str]:
    """Intel's OpenMP library that vLLM's CPU build brings and wants loaded first, as an environment variable."""
    library = Path(python).parent.parent / "lib" / "libiomp5.so"
    return {"LD_PRELOAD": str(library)} if library.exists() and sys.platform == "linux" else {}
