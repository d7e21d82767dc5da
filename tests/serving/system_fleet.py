"""The system of a fault run: servers with stores behind a router, all real processes, that can be killed and started again on
their ports and folders."""

from __future__ import annotations

import re
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import http_client
import httpx
import psutil
from ports import free_port
from router_parts import Loop, Relay, RouterProcess
from server_process import ServerProcess
from servers import RedisServer
from shared_server import until

import foreword

MODEL = Path(foreword.__file__).parent / "models" / "stdlib-nano"
ENGINE = ["--dtype", "float32", "--batch-invariant", "on", "--no-self-check"]
# The device holds less than the prompts of a round, each tier less than the next.
SMALL = ["--kv-memory", "2560 tokens", "--max-num-seqs", "8", "--max-batch-tokens", "128"]
MEMORY, DISK, FILE_SYSTEM, REDIS = "8MiB", "32MiB", 48 << 20, "64mb"
TRANSFER = {"answer_timeout": 3, "connect_timeout": 3, "beat_seconds": 1}
ROUTER = ["--health-interval", "0.5", "router.health_timeout=5", "router.connect_timeout=5", "--stall-timeout", "10"]
ROUTER += ["--min-prefill", "96", "--tokenizer", str(MODEL)]
PATIENCE = 300.0  # a start takes minutes on a machine that does other work


class Server:
    """`foreword serve` on a fixed port, behind a relay that can cut the router's connections to it."""

    def __init__(self, name: str, loop: Loop, flags: Sequence[str]) -> None:
        self.name = name
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.relay = Relay(loop, self.url)
        self._flags = [*ENGINE, *SMALL, "--port", str(self.port), *flags]
        self._past = ""
        self.process: ServerProcess | None = None

    def start(self) -> None:
        self.process = ServerProcess(*self._flags)

    def wait_ready(self) -> None:
        assert self.process is not None
        self.process.wait_ready()

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.popen.pid

    @property
    def text(self) -> str:
        """The logs of all its processes."""
        return self._past + (self.process.text if self.process else "")

    def send(self, number: int) -> None:
        assert self.process is not None
        self.process.popen.send_signal(number)

    def end(self, number: int = signal.SIGKILL) -> int:
        """End the process. Returns its exit status."""
        if self.process is None:
            return 0
        self.send(number)
        status = self.process.end(PATIENCE)
        self._past, self.process = self.text[-200_000:], None
        return status

    def metric(self, name: str) -> float:
        return metric(self.url, name)


def metric(url: str, name: str) -> float:
    """The sum of a metric's series."""
    lines = http_client.get(f"{url}/metrics").text.splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if re.match(rf"{re.escape(name)}({{|\s)", line))


class Fleet:
    """Three servers with memory, disk and Redis, two of them on one folder; a prefill server; a router; and a server without
    any cache, whose answers are the reference.

    Attributes:
        replicas: the three servers.
        disks: the folders of the disk tiers, small file systems if they can be mounted.
    """

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="foreword-system-"))
        self.mounted: list[Path] = []
        self.disks = [self._small_disk(name) for name in ("ab", "c")]
        self.segments = shared_memory()
        self.redis = RedisServer(self.folder / "redis", "--maxmemory", REDIS, "--maxmemory-policy", "allkeys-lru")
        loop = Loop()
        timeouts = [f"transfer.{name}={value}" for name, value in TRANSFER.items()]
        timeouts += ["--transfer-progress-timeout", "3", "--transfer-lease-seconds", "10", "--drain-seconds", "20"]

        shared = [*timeouts, "--store", self.redis.url]
        self.replicas = [
            Server(f"replica {number}", loop, ["--role", "both", *_tiers(self.disks[number // 2]), *shared])
            for number in range(3)
        ]
        self.transfer = f"127.0.0.1:{free_port()}"
        self.prefill = Server("prefill", loop, ["--role", "prefill", "--transfer-bind", self.transfer, *shared])
        self.reference = Server("reference", loop, ["--no-enable-prefix-caching", "--kv-memory", "8192 tokens"])
        self.router: RouterProcess | None = None
        self.router_port = free_port()
        self.router_url = f"http://127.0.0.1:{self.router_port}"
        self._router_past = ""

    @property
    def servers(self) -> list[Server]:
        return [*self.replicas, self.prefill]

    def start(self) -> None:
        for server in (*self.servers, self.reference):
            server.start()
        for server in (*self.servers, self.reference):
            server.wait_ready()
        self.start_router()
        self.wait_routed()

    def start_router(self) -> None:
        named = [word for one in self.replicas for word in ("--replica", one.relay.url)]
        named += ["--prefill", self.prefill.relay.url, "--prefix-file", str(self.folder / "prefixes")]
        self.router = RouterProcess(*ROUTER, *named, "--port", str(self.router_port))

    def kill_router(self) -> None:
        if self.router is not None:
            self.router.popen.kill()
            self.router.end(PATIENCE)
            self._router_past, self.router = (self._router_past + self.router.text)[-200_000:], None

    @property
    def router_text(self) -> str:
        return self._router_past + (self.router.text if self.router else "")

    def routed(self) -> bool:
        """Whether the router sends requests to all servers."""
        try:
            listed = http_client.get(f"{self.router_url}/v1/router/replicas").json()["data"]
        except httpx.TransportError:
            return False
        return sum(one["takes_requests"] for one in listed) == len(self.servers)

    def wait_routed(self) -> None:
        """Wait until the router sends requests to all servers."""
        until(self.routed, PATIENCE)

    def logs(self) -> str:
        """Logs of all servers and routers."""
        return (
            "".join(f"--- {one.name} {one.relay.url}\n{one.text}" for one in self.servers)
            + f"--- router\n{self.router_text}"
        )

    def close(self) -> None:
        """End everything and remove the folders."""
        with suppress(Exception):
            self.kill_router()
        for server in (*self.servers, self.reference):
            with suppress(Exception):
                server.end()
        self.redis.kill()
        while self.mounted:
            subprocess.run(["umount", "-l", str(self.mounted.pop())], check=False)
        shutil.rmtree(self.folder, ignore_errors=True)

    def _small_disk(self, name: str) -> Path:
        folder = self.folder / name
        folder.mkdir(mode=0o700)
        command = ["mount", "-t", "tmpfs", "-o", f"size={FILE_SYSTEM},mode=0700", "foreword-test", str(folder)]
        if shutil.which("mount") and not subprocess.run(command, capture_output=True).returncode:
            self.mounted.append(folder)
        return folder


def _tiers(disk: Path) -> list[str]:
    stores = ["--store", f"memory://?size={MEMORY}", "--store", f"disk://{disk}/kv?size={DISK}"]
    return [*stores, "--kv-events", "tcp://127.0.0.1:0"]


def shared_memory() -> set[str]:
    """Segments of this machine's shared memory that a transfer made."""
    return {one.name for one in Path("/dev/shm").glob("foreword-" + 32 * "[0-9a-f]")}


def levels(pid: int) -> dict[str, int]:
    """Open files, threads and MiB of a process."""
    process = psutil.Process(pid)
    return {
        "files": process.num_fds(),
        "threads": process.num_threads(),
        "MiB": process.memory_info().rss >> 20,
    }
