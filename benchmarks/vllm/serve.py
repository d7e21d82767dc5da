"""`vllm serve` alone against `vllm serve` with Foreword's connector, where vLLM's own prefix cache has everything, or nothing.

    python -m benchmarks.vllm.serve MODEL --vllm-python ENVIRONMENT/bin/python [--dtype float32] [--pairs 5]
        [--concurrency 1,2,8] [--new] [--store memory://?size=1GiB,disk:///tmp/kv?size=4GiB] [--json FILE]

Measures what an attached connector costs when it brings nothing; with `--new` also what saving costs: no prompt is asked twice.
Both servers are up all the time, and one of them works. `vllm bench serve --dataset-name prefix_repetition` asks both for the
same prompts, in turn. A first run of each does not count: without `--new`, vLLM's own cache has the prompts after it.
`--busy N` keeps N other processes busy.
"""

import argparse
import contextlib
import json
import multiprocessing
import os
import re
import signal
import socket
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.harness import machine, median, set_up, table

_START_SECONDS = 300.0
_FIGURES = {"duration": r"Benchmark duration \(s\):\s+([\d.]+)", "ttft": r"Median TTFT \(ms\):\s+([\d.]+)"}


@dataclass
class Server:
    """One `vllm serve`."""

    name: str
    port: int
    process: subprocess.Popen[bytes]


@contextlib.contextmanager
def serving(arguments: argparse.Namespace, folder: Path, store: list[str], *more: str) -> Iterator[Server]:
    """A server; with the connector if there are stores, and with more arguments of vLLM."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [
        *vllm(arguments), "serve", str(arguments.model), "--served-model-name", "model", "--host", "127.0.0.1",
        "--port", str(port), "--dtype", arguments.dtype, "--enforce-eager", "--max-model-len", "4096",
        "--block-size", "32", "--kv-cache-memory-bytes", str(1 << 30), "--seed", "0", *more,
    ]  # fmt: skip
    name = "alone"
    if store:
        name = "connector"
        extra = {"kv_connector": "ForewordConnector", "kv_connector_module_path": "foreword.integrations.vllm"}
        transfer = {**extra, "kv_role": "kv_both", "kv_connector_extra_config": {"store": store}}
        command += ["--kv-transfer-config", json.dumps(transfer)]
    with (folder / f"{name}.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, env=environment(), start_new_session=True)
    try:
        wait_until_ready(port, process, folder / f"{name}.log")
        yield Server(name, port, process)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(60)


def vllm(arguments: argparse.Namespace) -> list[str]:
    return [arguments.vllm_python, "-m", "vllm.entrypoints.cli.main"]


def environment() -> dict[str, str]:
    checkout = str(Path(__file__).resolve().parents[2])
    # Without a setting vLLM binds the threads of the two servers to cores in different ways.
    given = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", **os.environ}
    return {**given, "PYTHONPATH": checkout, "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}


def wait_until_ready(port: int, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + _START_SECONDS
    while time.monotonic() < deadline and process.poll() is None:
        with contextlib.suppress(urllib.error.URLError, OSError):
            urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5)
            return
        time.sleep(0.5)
    raise SystemExit(f"the server did not start:\n{log.read_text(errors='replace')[-3000:]}")


def ask(arguments: argparse.Namespace, server: Server, concurrency: int, seed: int) -> dict[str, float]:
    """One run of vLLM's own benchmark: its duration in seconds and its median TTFT in milliseconds."""
    prefixes = arguments.prompts if arguments.new else 4
    command = [
        *vllm(arguments), "bench", "serve", "--backend", "openai", "--base-url", f"http://127.0.0.1:{server.port}",
        "--model", "model", "--tokenizer", str(arguments.model), "--dataset-name", "prefix_repetition",
        "--prefix-repetition-prefix-len", str(arguments.prefix), "--prefix-repetition-suffix-len", "64",
        "--prefix-repetition-num-prefixes", str(prefixes), "--prefix-repetition-output-len", str(arguments.output),
        "--num-prompts", str(arguments.prompts), "--max-concurrency", str(concurrency), "--seed", str(seed), "--ignore-eos",
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, env=environment(), check=False)
    found = {name: re.search(pattern, done.stdout) for name, pattern in _FIGURES.items()}
    missing = [name for name, match in found.items() if match is None]
    if missing or done.returncode:
        raise SystemExit(f"vllm bench serve printed no {missing}:\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}")
    return {name: float(match.group(1)) for name, match in found.items() if match is not None}


def compare(
    arguments: argparse.Namespace, alone: Server, connector: Server, concurrency: int
) -> dict[str, list[dict[str, float]]]:
    """Runs in turn, the order changing from pair to pair."""
    runs: dict[str, list[dict[str, float]]] = {"alone": [], "connector": []}
    for server in (alone, connector):
        ask(arguments, server, concurrency, 1)
    for number in range(arguments.pairs):
        seed = (number + 2) * 100 + concurrency if arguments.new else 1
        for server in (alone, connector) if number % 2 else (connector, alone):
            runs[server.name].append(ask(arguments, server, concurrency, seed))
            print(f"  concurrency {concurrency}, {server.name}: {runs[server.name][-1]}", flush=True)
    return runs


def row(concurrency: int, runs: dict[str, list[dict[str, float]]]) -> list[str]:
    cells = [str(concurrency)]
    for name, unit in (("duration", "s"), ("ttft", "ms")):
        base, ours = (median(one[name] for one in runs[which]) for which in ("alone", "connector"))
        pairs = zip(runs["alone"], runs["connector"], strict=True)
        paired = median(theirs[name] / own[name] for own, theirs in pairs)
        cells += [f"{base:.2f} {unit}", f"{ours:.2f} {unit}", f"{ours / base:.3f}", f"{paired:.3f}"]
    return cells


def spin() -> None:
    while True:
        pass


def main() -> None:
    """Prints a table with a line for each concurrency."""
    parser = argparse.ArgumentParser(description="vllm serve alone and with Foreword's connector.")
    parser.add_argument("model", type=Path)
    parser.add_argument("--vllm-python", required=True)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--concurrency", default="1,2,8", help="numbers with commas between")
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--prefix", type=int, default=1024)
    parser.add_argument("--new", action="store_true", help="new prompts in each pair")
    parser.add_argument("--output", type=int, default=16)
    parser.add_argument("--store", default="", help="URLs with commas between (memory and disk)")
    parser.add_argument("--busy", type=int, default=0)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    others = [multiprocessing.Process(target=spin, daemon=True) for _ in range(arguments.busy)]
    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as running:
        folder = Path(name)
        store = [url for url in arguments.store.split(",") if url]
        store = store or ["memory://?size=1GiB", f"disk://{folder}/kv?size=4GiB"]
        alone = running.enter_context(serving(arguments, folder, []))
        connector = running.enter_context(serving(arguments, folder, store))
        for one in others:
            one.start()
        found: dict[int, Any] = {}
        for concurrency in map(int, arguments.concurrency.split(",")):
            found[concurrency] = compare(arguments, alone, connector, concurrency)
    facts = {
        **machine(),
        "model": arguments.model.name,
        "dtype": arguments.dtype,
        "prompts": f"{arguments.prompts} of {arguments.prefix + 64} tokens{', new in each pair' if arguments.new else ''}",
        "busy processes": str(arguments.busy),
    }
    print(set_up(facts))
    head = ["concurrency"]
    for what in ("duration", "median TTFT"):
        head += [f"{what}, alone", "with connector", "ratio of medians", "median of ratios"]
    print(table(head, [row(concurrency, runs) for concurrency, runs in found.items()]))
    if arguments.json:
        arguments.json.write_text(json.dumps({"set_up": facts, "runs": found}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
