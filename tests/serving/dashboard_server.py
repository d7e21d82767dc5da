"""Engines over two tiers behind two HTTP servers, for tests of the dashboard."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import uvicorn
from prometheus_client.parser import text_string_to_metric_families

from foreword.api.http import bind
from foreword.configuration import Config
from foreword.engine_config import EngineConfig, PrefixConfig
from foreword.entrypoints.async_engine import AsyncEngine
from foreword.process_config import ServerConfig
from foreword.server.app import ServerApp
from foreword.server.engine_metrics import PrometheusObserver
from foreword.store_config import StoreConfig

# Every place where a stranger's text reaches the page has this in it.
HOSTILE = "<img/src=x/onerror=window.hacked=1>"
MODEL = f'nano"\\{HOSTILE}'
# So small that prompts of other tests push blocks out to the tiers.
ENGINE = EngineConfig(
    dtype="float32",
    max_model_len=1024,
    kv_memory="2048 tokens",
    max_num_seqs=4,
    threads=1,
    seed=0,
    served_model_name=MODEL,
)


@dataclass(frozen=True)
class DashboardServer:
    """An engine over two tiers. `url` serves without API keys, `keyed` with them."""

    url: str
    keyed: str
    engine: AsyncEngine

    def complete(self, prompt: str, key: str | None = None, request_id: str = "", **body: Any) -> dict[str, Any]:
        headers = {"authorization": f"Bearer {key}"} if key else {}
        headers |= {"x-request-id": request_id} if request_id else {}
        url = f"{self.keyed if key else self.url}/v1/completions"
        given = {"prompt": prompt, "max_tokens": 4, "temperature": 0, **body}
        answer = httpx.post(url, json=given, headers=headers, timeout=60)
        assert answer.status_code == 200, answer.text
        found: dict[str, Any] = answer.json()
        return found

    def name_prefix(self, name: str, content: str, key: str | None = None) -> None:
        headers = {"authorization": f"Bearer {key}"} if key else {}
        url = f"{self.keyed if key else self.url}/v1/prefixes/{name}"
        httpx.put(url, json={"content": content}, headers=headers, timeout=60).raise_for_status()

    def now(self, key: str | None = None) -> dict[str, Any]:
        headers = {"authorization": f"Bearer {key}"} if key else {}
        answer = httpx.get(f"{self.keyed if key else self.url}/ui/data/now", headers=headers, timeout=60)
        found: dict[str, Any] = answer.raise_for_status().json()
        return found

    def metric(self, name: str, **labels: str) -> float:
        text = httpx.get(f"{self.url}/metrics", timeout=60).text
        wanted = labels.items()
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                if sample.name == name and wanted <= sample.labels.items():
                    return float(sample.value)
        raise AssertionError(f"no metric {name} with {labels}")


@contextmanager
def open_dashboard_server(folder: Path) -> Iterator[DashboardServer]:
    """Load an engine that keeps blocks in memory and in `folder`, and serve it."""
    urls = ("memory://?size=8MiB", f"disk://{folder}?size=64MiB")
    store = StoreConfig(urls=urls, lookup_timeout=60.0, load_timeout=60.0)
    registry = PrometheusObserver()
    engine = AsyncEngine.from_config(ENGINE, prefixes=PrefixConfig(), store=store, observers=[registry])
    assert engine.offload is not None
    # Blocks that are found are loaded, however slow this machine is at the moment.
    engine.offload.costs.prefill_rate = float
    registry.watch(engine)
    keyed = ServerConfig(port=0, api_keys=("ann=k1", "bob=k2"), tenant_secret="a secret of the tests")
    servers, urls = [], []
    for config in (ServerConfig(port=0), keyed):
        listener = bind(config)
        app = ServerApp(engine, registry, Config(ENGINE, config))
        settings = uvicorn.Config(app, log_config=None, lifespan="off", timeout_graceful_shutdown=1)
        servers.append((uvicorn.Server(settings), listener))
        urls.append("http://{}:{}".format(*listener.getsockname()[:2]))

    async def run() -> None:
        await asyncio.gather(*(server.serve([listener]) for server, listener in servers))

    thread = threading.Thread(target=lambda: asyncio.run(run()), daemon=True)
    thread.start()
    yield DashboardServer(*urls, engine)
    for server, _ in servers:
        server.should_exit = True
    thread.join(60)
    engine.close()
