"""A real vLLM behind the router, for tests that need FOREWORD_VLLM_PYTHON, an interpreter with vLLM."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

import httpx
from router_parts import RouterProcess
from shared_server import until

PYTHON = os.environ.get("FOREWORD_VLLM_PYTHON", "")


@contextlib.contextmanager
def vllm_behind_router(model: Path, log: Path, *flags: str, route: Sequence[str] = ()) -> Iterator[RouterProcess]:
    """A router with the flags `route` in front of one `vllm serve`, which serves the model as `tiny`."""
    with socket.create_server(("127.0.0.1", 0)) as found:
        port = found.getsockname()[1]
    command = [
        PYTHON, "-m", "vllm.entrypoints.cli.main", "serve", str(model), "--served-model-name", "tiny",
        "--host", "127.0.0.1", "--port", str(port), "--dtype", "float32", "--enforce-eager",
        "--kv-cache-memory-bytes", str(256 << 20), "--max-num-seqs", "4", "--enable-prompt-tokens-details", *flags,
    ]  # fmt: skip
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
    url = f"http://127.0.0.1:{port}"
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, env=environment)

    def healthy() -> bool:
        assert process.poll() is None, log.read_text()[-4000:]
        with contextlib.suppress(httpx.TransportError):
            return httpx.get(f"{url}/health", timeout=60).status_code == 200
        return False

    try:
        until(healthy, 400)
        started = RouterProcess("--replica", url, *route).wait_for(1)
        yield started
        started.kill()
        started.end()
    finally:
        process.terminate()
        process.wait(60)
