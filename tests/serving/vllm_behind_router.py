"""A real vLLM behind the router, for tests that need FOREWORD_VLLM_PYTHON, an interpreter with vLLM."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path

from router_parts import RouterProcess
from shared_server import until
from vllm_server import VllmServer


@contextlib.contextmanager
def vllm_behind_router(model: Path, log: Path, *flags: str, route: Sequence[str] = ()) -> Iterator[RouterProcess]:
    """A router with the flags `route` in front of one `vllm serve`, which serves the model as `tiny`."""
    server = VllmServer(model, log, "--kv-cache-memory-bytes", str(256 << 20), "--max-num-seqs", "4", *flags)
    try:
        until(server.healthy, 400)
        started = RouterProcess("--replica", server.url, *route).wait_for(1)
        yield started
        started.kill()
        started.end()
    finally:
        server.kill()
