"""How many files and functions of the package one streamed chat request passes: computed, loaded from a store, and through a
router.

    python -m benchmarks.server.request_path [--files]        with the names of the files, as JSON

Everything is in this process: a profile function sees each call in each thread, also of what runs beside a request, such as
probes of the router.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib
import json
import os
import sys
import tempfile
import threading
import urllib.request
from collections.abc import Callable
from pathlib import Path
from types import FrameType

from benchmarks.harness import table

ROOT = Path(__file__).parents[2]
PACKAGE = f"{ROOT / 'foreword'}{os.sep}"
TEXT = "Explain the module textwrap in one sentence. " * 12

# Files of the package, and names of functions in them.
seen: set[tuple[str, str]] = set()
recording = threading.Event()


def profile(frame: FrameType, event: str, _argument: object) -> None:
    if event == "call" and frame.f_code.co_filename.startswith(PACKAGE) and recording.is_set():
        seen.add((frame.f_code.co_filename[len(PACKAGE) :], frame.f_code.co_qualname))


def functions_of(call: Callable[[], object]) -> set[tuple[str, str]]:
    """Files and functions that run while the call does."""
    seen.clear()
    recording.set()
    call()
    recording.clear()
    return set(seen)


def chat(url: str, text: str) -> None:
    body = {"messages": [{"role": "user", "content": text}], "max_tokens": 4, "stream": True}
    headers = {"content-type": "application/json"}
    request = urllib.request.Request(url + "/v1/chat/completions", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=120) as answer:
        answer.read()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--files", action="store_true")
    given = parser.parse_args()
    threading.setprofile(profile)
    sys.setprofile(profile)
    # The router on a thread is that of the tests.
    sys.path[:0] = [str(ROOT / "tests" / "serving")]
    router_parts = importlib.import_module("router_parts")

    from foreword.api.http import bind, serving
    from foreword.configuration import Config
    from foreword.engine_config import EngineConfig
    from foreword.entrypoints.async_engine import AsyncEngine
    from foreword.process_config import ServerConfig
    from foreword.server.app import ServerApp
    from foreword.server.engine_metrics import PrometheusObserver
    from foreword.store_config import StoreConfig

    observer = PrometheusObserver()
    store = StoreConfig(urls=("memory://?size=64MiB", f"disk://{tempfile.mkdtemp()}?size=64MiB"))
    engine = AsyncEngine.from_config(
        EngineConfig(dtype="float32", threads=1, max_model_len=1024, kv_memory="4096 tokens"),
        store=store,
        observers=[observer],
    )
    config = Config(server=ServerConfig(port=0))
    listener = bind(config.server)
    front = ServerApp(engine, observer, config).front

    async def serve() -> None:
        async with serving(front, listener, config.server):
            await asyncio.Event().wait()

    threading.Thread(target=lambda: asyncio.run(serve()), daemon=True).start()
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"

    # Work that is done once, as loading a compiled library, belongs to the warm-up, and so do its blocks behind its answer.
    chat(url, f"warm-up {TEXT}")
    engine._parts.flush(60)
    found = {"computed": functions_of(lambda: chat(url, TEXT))}
    engine._parts.flush(60)
    asyncio.run(engine.clear_cache())
    found["loaded"] = functions_of(lambda: chat(url, TEXT))
    router = router_parts.RouterThread("--replica", url)
    router.wait_for(1)
    chat(router.url, f"warm-up {TEXT}")
    found["routed"] = functions_of(lambda: chat(router.url, TEXT))
    router.kill()
    files = {name: sorted({file for file, _ in functions}) for name, functions in found.items()}
    if given.files:
        print(json.dumps(files))
    else:
        print(table(["request", "files", "functions"], [[n, str(len(files[n])), str(len(found[n]))] for n in found]))
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
