"""`foreword serve` with the built-in model, from its start until it is ready: without torch's compiler, and with it, by turns.

python -m benchmarks.server.start [--rounds 3]
"""

import argparse
import socket
import subprocess
import sys
import time

import httpx
import psutil

from benchmarks.harness import machine, median, table

_SERVE = "from foreword.cli.main import main; main()"
# A process that has imported the compiler loads with it.
_WAYS = {"without the compiler": _SERVE, "with the compiler": f"import torch._dynamo; {_SERVE}"}


def start(code: str) -> tuple[float, float, float]:
    """Seconds until it is ready, its processor seconds, and its memory in MiB."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    begin = time.perf_counter()
    command = [sys.executable, "-c", code, "serve", "--port", port]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        while True:
            try:
                if httpx.get(f"http://127.0.0.1:{port}/ready", timeout=1).is_success:
                    break
            except httpx.TransportError:
                if process.poll() is not None:
                    raise RuntimeError("the server ended before it was ready") from None
            time.sleep(0.05)
        seconds, used = time.perf_counter() - begin, psutil.Process(process.pid)
        return seconds, sum(used.cpu_times()[:2]), used.memory_info().rss / (1 << 20)
    finally:
        process.terminate()
        process.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    print(*(f"{name}: {value}" for name, value in machine().items()), sep=", ")
    found: dict[str, list[tuple[float, float, float]]] = {name: [] for name in _WAYS}
    for _ in range(options.rounds):
        for name, code in _WAYS.items():
            found[name].append(start(code))
    rows = []
    for name, runs in found.items():
        seconds, processor, memory = (median(run[i] for run in runs) for i in range(3))
        rows.append([name, f"{seconds:.1f} s", f"{processor:.1f} s", f"{memory:.0f} MiB"])
    print(table(["", "ready", "processor", "memory"], rows))


if __name__ == "__main__":
    main()
