"""Starts scripts in another interpreter, and talks to `worker.py` there over lines of JSON."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from foreword.errors import ForewordError

HERE = Path(__file__).resolve().parent
WORKER = HERE / "worker.py"
START = 300.0
_ANSWER = 900.0

# Modules that a vLLM imports until it has answered a first prompt; those that exist.
VLLM_MODULES = (
    "vllm",
    "vllm.entrypoints.llm",
    "vllm.v1.engine.core",
    "vllm.v1.executor.uniproc_executor",
    "vllm.v1.worker.gpu_worker",
    "vllm.v1.worker.cpu_worker",
    "vllm.v1.attention.backends.cpu_attn",
    "vllm.model_executor.model_loader",
    "vllm.model_executor.models.llama",
    "vllm.lora.request",
)
# Variables that it reads then.
VLLM_VARIABLES = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}

Answer = dict[str, Any]
# Tokens, or a text with images (`worker.py`).
Prompt = list[int] | dict[str, Any]


class Failed(ForewordError, code="process_failed"):
    """A process refused, crashed, or took too long."""


class Refused(Failed, code="process_refused"):
    """A process did not start with these settings."""


class Forked:
    """A script that `Forks` started, with the methods of a `subprocess.Popen` that are used here. `stdin` is a pipe."""

    def __init__(self, start: Callable[[Sequence[int]], None], stdout: int | None, stderr: int) -> None:
        given, mine = os.pipe()
        self.stdin: IO[str] = os.fdopen(mine, "w")
        mine, report = os.pipe()
        self._report = os.fdopen(mine, "rb", buffering=0)
        self.stdout: IO[str] | None = None
        theirs = [given, report]
        if stdout is None:
            mine, stdout = os.pipe()
            self.stdout = os.fdopen(mine)
            theirs.append(stdout)
        try:
            start([given, stdout, stderr, report])
        finally:
            for descriptor in theirs:
                os.close(descriptor)
        started = select.select([self._report], [], [], START)[0]
        self.pid = int(self._report.readline() or 0) if started else 0
        self.returncode: int | None = None

    def wait(self, timeout: float | None = None) -> int:
        """The exit status. Raises subprocess.TimeoutExpired."""
        if self.returncode is None:
            if not select.select([self._report], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(str(self.pid), timeout or 0.0)
            self.returncode = int(self._report.readline() or -signal.SIGKILL)
            self._report.close()
        return self.returncode

    def poll(self) -> int | None:
        """The exit status, or None if it runs."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Signal the process, if it runs."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        """End the process without warning (SIGKILL)."""
        self.send_signal(signal.SIGKILL)


class Forks:
    """A process that has imported what scripts need, and forks for each of them (`forks.py`). vLLM's imports take 8 s and more.

    Scripts share Python's hash seed. A connector whose names depend on it finds nothing after a restart, so a claim about
    restarts starts a process by itself.

    Args:
        environment: its variables; some are read only when a library is imported.
        modules: what it imports.
    """

    def __init__(self, python: str, environment: Mapping[str, str], modules: Sequence[str] = VLLM_MODULES) -> None:
        self._command = [python, "-P", str(HERE / "forks.py")]
        self._environment = dict(environment)
        self._modules = modules
        self._server: subprocess.Popen[bytes] | None = None

    def start(
        self,
        command: Sequence[str],
        *,
        stderr: IO[Any],
        stdout: IO[Any] | None = None,
        variables: Mapping[str, str] | None = None,
        path: Sequence[str] = (),
    ) -> Forked:
        """Run a script with its arguments. Raises Failed.

        Args:
            stdout: by default a pipe.
            variables: more environment variables.
            path: folders to search for modules first.
        """
        if self._server is None:
            self._serve()
        request = {"argv": list(command), "variables": dict(variables or {}), "path": list(path)}
        files = None if stdout is None else stdout.fileno(), stderr.fileno()
        found = Forked(lambda streams: self._send(json.dumps(request).encode(), streams), *files)
        if not found.pid:
            raise Failed(f"{command[0]} did not start: {self._last_words()}")
        return found

    def _last_words(self) -> str:
        """Why the process that forks did not fork."""
        assert self._server is not None
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._server.wait(1.0)  # its end closes the report a moment before it can be waited for
        status = self._server.returncode
        self._log.seek(0)
        said = self._log.read()
        if status is None:
            ended = f"its imports took longer than {START:.0f} s"
        else:
            ended = f"the process that forks ended with status {status}"
            self.close()  # the next script gets another one
        return f"{ended}: {last_line(said)}" if said else ended

    def _serve(self) -> None:
        self._socket, theirs = socket.socketpair()
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115
        with theirs:
            self._server = subprocess.Popen(
                [*self._command, str(theirs.fileno()), *self._modules],
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=self._log,
                env=self._environment,
                pass_fds=[theirs.fileno()],
            )

    def _send(self, request: bytes, streams: Sequence[int]) -> None:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            socket.send_fds(self._socket, [len(request).to_bytes(4)], list(streams))
            self._socket.sendall(request)

    def close(self) -> None:
        """End it; scripts continue."""
        if self._server is not None:
            self._socket.close()
            self._server.kill()
            self._server.wait()
            self._log.close()
            self._server = None


class Worker:
    """The driver's end of a `worker.py`.

    Attributes:
        transcript: what was sent, and a summary of each answer; for reports.
        cpu: processor seconds of the process until its last answer.
    """

    def __init__(self, process: Process, log: Path) -> None:
        self.process = process
        self.transcript: list[str] = []
        self.cpu = 0.0
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
        forks: Forks | None = None,
    ) -> Worker:
        """Start the script and wait until its engine is ready. Raises Failed.

        Args:
            forks: the script is started by these; by itself if None.
        """
        process: Process
        with log.open("w", encoding="utf-8") as file:
            if forks is not None:
                process = forks.start([str(script)], stderr=file, variables=variables)
            else:
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
        self.cpu = found.pop("cpu", self.cpu)
        self.transcript.append("  -> " + _summary(found))
        return found

    def ask(self, prompt: Prompt, new_tokens: int = 8) -> Answer:
        """A request alone."""
        return self.ask_all([prompt], new_tokens)[0]

    def ask_all(self, prompts: Sequence[Prompt], new_tokens: int = 8, **how: Any) -> list[Answer]:
        """Several requests: one after the other, or as `how`, `salt` and `adapter` say."""
        found: list[Answer] = self.tell({"ask": list(prompts), "new_tokens": new_tokens, **how})["results"]
        return found

    def ask_together(self, prompts: Sequence[Prompt], new_tokens: int) -> Answer:
        """All at once: `results`, and the `seconds` until the last has ended."""
        return self.tell({"ask": list(prompts), "new_tokens": new_tokens, "how": "together"})

    def settle(self, seconds: float = 1.0) -> float:
        """Wait for background writes; returns the seconds it took."""
        found: float = self.tell({"settle": seconds})["seconds"]
        return found

    def stored(self) -> Answer:
        """Bytes in Foreword's last tier, and the bytes per token of all blocks."""
        return self.tell({"stored": True})

    def metrics(self, start: str) -> list[tuple[str, dict[str, str], float]]:
        """vLLM's counters and gauges whose names begin so: name, labels and value of each."""
        return [tuple(one) for one in self.tell({"metrics": start})["metrics"]]

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


Process = subprocess.Popen[str] | Forked


def _summary(answer: Answer) -> str:
    if "results" not in answer:
        return json.dumps(answer)
    return json.dumps([{"cached": one["cached"], "tokens": one["tokens"]} for one in answer["results"]])


def end(process: Process) -> None:
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
    """The line of a log or a traceback that says most: the last one that names an error, or the last."""
    text = log if isinstance(log, str) else log.read_text(encoding="utf-8", errors="replace")
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    named = [line for line in lines if "Error" in line or "error:" in line.lower()]
    return (named or lines or ["it said nothing"])[-1][-300:]


def preload(python: str) -> dict[str, str]:
    """Intel's OpenMP library that vLLM's CPU build brings and wants loaded first, as an environment variable."""
    library = Path(python).parent.parent / "lib" / "libiomp5.so"
    return {"LD_PRELOAD": str(library)} if library.exists() and sys.platform == "linux" else {}
