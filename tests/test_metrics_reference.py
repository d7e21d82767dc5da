"""docs/reference/metrics.md lists exactly the metrics of the server, the router and the vLLM connector."""

from __future__ import annotations

import importlib
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.metrics import MetricWrapperBase
from vllm_stub import stubbed_vllm

from foreword.observability.metrics import PrometheusObserver
from foreword.offload.manager import OffloadStatus
from foreword.router.metrics import RouterMetrics
from foreword.router.state_metrics import RouterStateCollector
from foreword.store.base import StoreStatus
from foreword.store.tier_counters import TierCounters

PAGE = Path(__file__).parents[1] / "docs" / "reference" / "metrics.md"
# (name, type, labels)
Metrics = set[tuple[str, str, tuple[str, ...]]]


def documented(section: str) -> Metrics:
    """The rows of a section's tables."""
    text = PAGE.read_text(encoding="utf-8").split(f"## {section}\n")[1].split("\n## ")[0]
    rows = re.findall(r"^\| `([^`]+)` \| (\w+) \| ([^|]*)\| [^|]+ \|$", text, flags=re.MULTILINE)
    return {(name, kind, tuple(sorted(re.findall(r"`(\w+)`", labels)))) for name, kind, labels in rows}


def described(collectors: Iterator[Any]) -> Metrics:
    """Name as in /metrics, type and labels of each metric."""
    found: Metrics = set()
    for one in collectors:
        if isinstance(one, ProcessCollector):
            continue
        families = [one] if isinstance(one, MetricWrapperBase) else list(one.collect())
        for family in families:
            name, kind = (one._name, one._type) if family is one else (family.name, family.type)
            found.add((f"{name}_total" if kind == "counter" else name, kind, tuple(sorted(family._labelnames))))
    return found


def collectors(registry: CollectorRegistry) -> Iterator[Any]:
    yield from registry._collector_to_names


def server_engine() -> Any:
    """What the server's metrics read of an engine with a store and a role."""
    info = SimpleNamespace(
        name="m",
        max_model_len=100,
        fingerprint="f",
        dtype="float32",
        device="cpu",
        block_size=16,
        num_blocks=4,
        kv_bytes_per_block=8,
    )
    status = SimpleNamespace(
        running=0, waiting=0, kv_usage=0.0, free_blocks=4, cached_blocks=0, pinned_blocks=0, retained_blocks=0
    )
    tier = SimpleNamespace(
        label="memory",
        counters=TierCounters(errors=Counter(timeout=1), bad=Counter(checksum=1)),
        status=StoreStatus,
        breaker=SimpleNamespace(is_open=False),
        admission=SimpleNamespace(refused=Counter(rate=1)),
    )
    endpoint = SimpleNamespace(connections={}, transfers={}, queued_bytes=0, traffic={})
    return SimpleNamespace(
        info=info,
        status=lambda: status,
        prefixes=SimpleNamespace(pinned_bytes=0, budget_bytes=0),
        offload=SimpleNamespace(store=SimpleNamespace(tiers=[tier]), status=OffloadStatus),
        instance=SimpleNamespace(endpoint=SimpleNamespace(status=lambda: endpoint)),
        served=SimpleNamespace(status=lambda: SimpleNamespace(device=0, memory=0, missing=0)),
    )


def test_server() -> None:
    """The server's tables list every metric with its type and labels."""
    observer = PrometheusObserver()
    observer.watch(server_engine())
    assert described(collectors(observer._registry)) == documented("Server")


def test_router() -> None:
    """The router's table lists every metric with its type and labels."""
    metrics = RouterMetrics()
    router: Any = SimpleNamespace(upstreams={}, pools={}, subscriptions={})
    metrics.add_collector(RouterStateCollector(router))
    assert described(collectors(metrics._registry)) == documented("Router")


@pytest.fixture
def vllm_stub() -> Iterator[None]:
    with stubbed_vllm():
        yield


@pytest.mark.usefixtures("vllm_stub")
def test_vllm() -> None:
    """The connector's table lists every metric with its type and labels."""
    module = importlib.import_module("foreword.integrations.vllm.metrics")
    found: Metrics = set()

    def recorder(kind: str) -> Any:
        def make(*, name: str, labelnames: list[str], **_: Any) -> Any:
            shown = f"{name}_total" if kind == "counter" else name
            found.add((shown, kind, tuple(sorted(labelnames))))
            return SimpleNamespace(labels=lambda *_: None)

        return make

    kinds = {"_counter_cls": "counter", "_gauge_cls": "gauge", "_histogram_cls": "histogram"}
    for attribute, kind in kinds.items():
        setattr(module.ForewordPromMetrics, attribute, staticmethod(recorder(kind)))
    module.ForewordPromMetrics(None, None, ["model_name", "engine"], {})
    assert found == documented("vLLM connector")
