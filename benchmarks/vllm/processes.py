"""The processes of `vllm/offload.py`: a contender's servers, its vLLM, what they hold in memory, and their end."""

import contextlib
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.vllm.contenders import Contender, Server
from foreword.referee.process import WORKER, Failed, Worker, end, last_line, preload

ROOT = Path(__file__).resolve().parents[2]
_START = 300.0  # seconds; a busy machine needs most of them


class Running:
    """A contender's processes, from `with` to its end; nothing of it is left behind.

    `private`: its own network namespace with nothing but loopback (needs root), since some servers listen everywhere.
    """

    def __init__(self, contender: Contender, logs: Path, *, private: bool = False) -> None:
        self.contender = contender
        self.memory = MemoryWatch()
        self._logs = logs
        self._private = private
        self._prefix: list[str] = []
        self._started: list[subprocess.Popen[str]] = []

    def __enter__(self) -> "Running":
        wipe(self.contender)
        try:
            self._check()
            if self._private:
                self._isolate()
            self.memory.start()
            for number, server in enumerate(self.contender.servers):
                self._serve(server, self._logs / f"{self.contender.name}-server{number}.log")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for process in reversed(self._started):
            end(process)
        self.memory.stop()
        wipe(self.contender)

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self._started]

    def _check(self) -> None:
        """Raises Failed, with the way to get it, where a contender is not installed."""
        for module in self.contender.imports:
            done = subprocess.run(
                [self.contender.python, "-c", f"import {module}"],
                capture_output=True,
                text=True,
                env=self._environment(),
                check=False,
                timeout=_START,
            )
            if done.returncode:
                raise Failed(f"not installed ({last_line(done.stderr)}); get it with: {self.contender.install}")

    def _environment(self) -> dict[str, str]:
        given = preload(self.contender.python)
        return {**os.environ, "PYTHONPATH": str(ROOT), **self.contender.variables, **given}

    def _isolate(self) -> None:
        holder = self._start(
            ["unshare", "--net", "sh", "-c", "ip link set lo up && echo up && exec sleep 86400"], stdout=subprocess.PIPE
        )
        assert holder.stdout is not None
        if holder.stdout.readline().strip() != "up":
            raise Failed("no network namespace to be had; --private-network needs root, unshare and ip")
        self._prefix = ["nsenter", f"--net=/proc/{holder.pid}/ns/net"]

    def _serve(self, server: Server, log: Path) -> None:
        with log.open("w") as file:
            process = self._start([*self._prefix, *server.command], stdout=file.fileno(), stderr=file.fileno())
        self.memory.add(process.pid)
        deadline = time.monotonic() + _START
        while not listens(process.pid, server.port):
            if process.poll() is not None or time.monotonic() > deadline:
                raise Failed(f"a server did not come up: {last_line(log)}")
            time.sleep(0.1)

    def _start(
        self,
        command: Sequence[str],
        *,
        stdin: int = subprocess.DEVNULL,
        stdout: int = subprocess.DEVNULL,
        stderr: int = subprocess.DEVNULL,
    ) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            command,
            stdin=stdin,
            stdout=stdout,
            stderr=stderr,
            text=True,
            env=self._environment(),
            start_new_session=True,
        )
        self._started.append(process)
        return process

    @contextlib.contextmanager
    def worker(self, *, warm_up: bool = True, **job: Any) -> Iterator["Worker"]:
        """A vLLM; several after each other meet the same store. `warm_up`: a prompt before the first that counts."""
        log = self._logs / f"{self.contender.name}-vllm.log"
        with log.open("w") as file:
            process = self._start(
                [*self._prefix, self.contender.python, "-P", str(WORKER)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=file.fileno(),
            )
        self.memory.add(process.pid)
        worker = Worker(process, log)
        llm = {"max_num_batched_tokens": 2048, "block_size": 32, **job}
        if self.contender.whole:
            llm["max_num_batched_tokens"] = job["max_model_len"]
        try:
            start = {"model": llm.pop("model"), "transfer": self.contender.transfer, "warm_up": warm_up}
            worker.tell({**start, "llm": llm}, _START)
            yield worker
            worker.tell({"end": True}, 60)
        finally:
            end(process)


class MemoryWatch:
    """The most memory that processes held at once: private and file pages of each, and what shared memory grew by.

    Shared pages are counted once, as the machine's: segments that several processes map, and files on tmpfs. So nothing else on
    the machine should make or drop such files meanwhile.
    """

    def __init__(self) -> None:
        self.peak = 0
        self._roots: list[int] = []
        self._base = _shared_bytes()
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def start(self) -> None:
        self._base = _shared_bytes()
        self._thread.start()

    def add(self, pid: int) -> None:
        self._roots.append(pid)

    def stop(self) -> None:
        self._done.set()

    def _watch(self) -> None:
        while not self._done.wait(0.5):
            own = sum(_resident(pid) for root in list(self._roots) for pid in family(root))
            self.peak = max(self.peak, own + max(_shared_bytes() - self._base, 0))


def _fields(path: str) -> dict[str, int]:
    """`Name: 123 kB` lines, in bytes."""
    try:
        lines = Path(path).read_text().splitlines()
    except OSError:
        return {}
    pairs = (line.split(":", 1) for line in lines if line.endswith(" kB"))
    return {name: int(value.split()[0]) * 1024 for name, value in pairs}


def _shared_bytes() -> int:
    return _fields("/proc/meminfo").get("Shmem", 0)


def _resident(pid: int) -> int:
    found = _fields(f"/proc/{pid}/status")
    return found.get("RssAnon", 0) + found.get("RssFile", 0)


def family(pid: int) -> list[int]:
    """A process and all below it."""
    found = [pid]
    for one in found:
        with contextlib.suppress(OSError):
            for task in Path(f"/proc/{one}/task").iterdir():
                found += map(int, (task / "children").read_text().split())
    return found


def listens(pid: int, port: int) -> bool:
    """Whether a TCP port in the network namespace of a process is open."""
    for name in ("tcp", "tcp6"):
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/{pid}/net/{name}").read_text().splitlines()[1:]:
                _, local, _, state = line.split()[:4]
                if state == "0A" and int(local.rsplit(":", 1)[1], 16) == port:
                    return True
    return False


def wipe(contender: Contender) -> None:
    """Removes what a contender has stored."""
    if contender.store is None:
        return
    if contender.store.is_dir():
        shutil.rmtree(contender.store, ignore_errors=True)
    else:
        contender.store.unlink(missing_ok=True)


@contextlib.contextmanager
def busy(count: int) -> Iterator[None]:
    """So many processes that only compute."""
    started = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for process in started:
            process.kill()
            process.wait()


def write_off(folder: Path) -> None:
    """Writes a folder's files to the device and drops them from the page cache, so that the next read is from the device."""
    for path in folder.rglob("*"):
        if path.is_file():
            handle = os.open(path, os.O_RDONLY)
            try:
                os.fsync(handle)
                os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(handle)
