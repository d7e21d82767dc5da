"""Which files of the package one streamed chat request passes: computed, loaded from a store, and behind a router.

    python tests/serving/traced_request.py        prints them as JSON, by situation

Everything is in this process: a profile function sees each call in each thread.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import tempfile
import threading
import urllib.request
from collections.abc import Callable
from pathlib import Path
from types import FrameType

HERE = Path(__file__).parent
PACKAGE = f"{HERE.parent.parent / 'foreword'}{os.sep}"
TEXT = "Explain the module textwrap in one sentence. " * 12

seen: set[str] = set()
recording = threading.Event()


def profile(frame: FrameType, event: str, _argument: object) -> None:
    if event == "call" and frame.f_code.co_filename.startswith(PACKAGE) and recording.is_set():
        seen.add(frame.f_code.co_filename[len(PACKAGE) :])


def files_of(call: Callable[[], object]) -> list[str]:
    """The files that run while the call does."""
    seen.clear()
    recording.set()
    call()
    recording.clear()
    return sorted(seen)


def chat(url: str, text: str) -> None:
    body = {"messages": [{"role": "user", "content": text}], "max_tokens": 4, "stream": True}
    headers = {"content-type": "application/json"}
    request = urllib.request.Request(url + "/v1/chat/completions", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=120) as answer:
        answer.read()


def main() -> None:
    threading.setprofile(profile)
    sys.setprofile(profile)
    sys.path.insert(0, str(HERE))
    import uvicorn
    from router_parts import RouterThread

    from foreword.api.listener import bind
    from foreword.config import Config, EngineConfig, ServerConfig, StoreConfig
    from foreword.entrypoints.async_engine import AsyncEngine
    from foreword.observability.metrics import PrometheusObserver
    from foreword.server.app import ServerApp
    from foreword.server.process import limited_connections

    observer = PrometheusObserver()
    store = StoreConfig(urls=("memory://?size=64MiB", f"disk://{tempfile.mkdtemp()}?size=64MiB"))
    engine = AsyncEngine.from_config(
        EngineConfig(dtype="float32", threads=1, max_model_len=1024, kv_memory="4096 tokens"),
        store=store,
        observers=[observer],
    )
    config = Config(server=ServerConfig(port=0))
    listener = bind(config.server)
    application = ServerApp(engine, observer, config)
    protocol = limited_connections(config.server).protocol
    server = uvicorn.Server(uvicorn.Config(application, http=protocol, log_config=None, lifespan="off"))
    threading.Thread(target=lambda: asyncio.run(server.serve(sockets=[listener])), daemon=True).start()
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"

    chat(url, f"warm-up {TEXT}")
    found = {"computed": files_of(lambda: chat(url, TEXT))}
    engine._parts.flush(60)
    asyncio.run(engine.clear_cache())
    found["loaded"] = files_of(lambda: chat(url, TEXT))
    router = RouterThread("--replica", url)
    router.wait_for(1)
    chat(router.url, f"warm-up {TEXT}")
    found["routed"] = files_of(lambda: chat(router.url, TEXT))
    router.kill()
    print(json.dumps(found), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
