"""An engine in a separate process that others read blocks from. Commands and results are JSON lines.

python peer_process.py '{"engine": {...}, "store": [...], "transfer": {...}}'
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

PATIENCE = 120.0


class Process:
    """The parent's end."""

    def __init__(self, engine: dict[str, Any], store: list[str], transfer: dict[str, Any]) -> None:
        environ = {key: value for key, value in os.environ.items() if not key.startswith("FOREWORD_")}
        told = json.dumps({"engine": engine, "store": store, "transfer": transfer})
        command = [sys.executable, str(Path(__file__)), told]
        self.popen = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environ | {"OMP_NUM_THREADS": "1"}
        )
        self.buffer = b""
        self._address = ""

    @property
    def address(self) -> str:
        """Waits until it listens."""
        if not self._address:
            self._address = self._answer()["address"]
        return self._address

    def ask(self, what: str, **more: Any) -> Any:
        assert self.address and self.popen.stdin is not None
        self.popen.stdin.write(json.dumps({"do": what, **more}).encode() + b"\n")
        self.popen.stdin.flush()
        return self._answer()

    def _answer(self) -> Any:
        assert self.popen.stdout is not None
        ends = time.monotonic() + PATIENCE
        while b"\n" not in self.buffer:
            ready, _, _ = select.select([self.popen.stdout], [], [], max(ends - time.monotonic(), 0))
            assert ready, "the other engine does not answer"
            data = os.read(self.popen.stdout.fileno(), 1 << 20)
            assert data, "the other engine has ended"
            self.buffer += data
        line, _, self.buffer = self.buffer.partition(b"\n")
        return json.loads(line)

    def signal(self, number: int) -> None:
        self.popen.send_signal(number)

    def kill(self) -> None:
        self.popen.send_signal(signal.SIGCONT)
        self.popen.kill()
        self.popen.wait(PATIENCE)
        for pipe in (self.popen.stdin, self.popen.stdout):
            if pipe is not None:
                # A block that was not written any more is not missed.
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()


def main() -> None:
    import torch

    from foreword.engine_config import EngineConfig
    from foreword.entrypoints.async_engine import AsyncEngine
    from foreword.store_config import StoreConfig
    from foreword.transfer_config import TransferConfig

    torch.set_num_threads(1)
    told = json.loads(sys.argv[1])
    transfer = TransferConfig(**told["transfer"])
    stores = StoreConfig(urls=tuple(told["store"]))
    engine = AsyncEngine.from_config(EngineConfig(**told["engine"]), store=stores, transfer=transfer, role="both")
    assert engine.instance is not None
    say({"address": engine.instance.address})
    for line in sys.stdin:
        say(asyncio.run(answer(engine, json.loads(line))))


def say(what: Any) -> None:
    print(json.dumps(what), flush=True)


async def answer(engine: Any, told: dict[str, Any]) -> Any:
    from foreword.engine.request import Request, SamplingParams

    if told["do"] == "generate":
        params = SamplingParams(temperature=0.0, max_tokens=told["count"], ignore_eos=True)
        request = Request("request", tuple(told["tokens"]), params)
        return [token async for delta in engine.generate(request) for token in delta.tokens]
    if told["do"] == "clear":
        if engine.offload is not None:
            assert await asyncio.to_thread(engine.offload.flush)
        return await engine.clear_cache()
    assert told["do"] == "status"
    await engine.check_integrity()
    return {**dataclasses.asdict(engine.served.status()), "kv_usage": engine.status().kv_usage}


if __name__ == "__main__":
    main()
