"""docs/reference/metrics.md lists exactly the metrics of the server, the router and the vLLM connector, and the dashboard
and alert rules in deploy/ use no others."""

from __future__ import annotations

import importlib
import json
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.metrics import MetricWrapperBase
from vllm_stub import stubbed_vllm

from foreword.engine.hit_audit import AuditCounts
from foreword.offload.manager import OffloadStatus
from foreword.router.router_metrics import RouterMetrics
from foreword.router.state_metrics import RouterStateCollector
from foreword.server.engine_metrics import PrometheusObserver
from foreword.store.base import StoreStatus
from foreword.store.tier_counters import PER_TIER, TierCounters, TierState

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "reference" / "metrics.md"
# Labels that Prometheus adds.
SCRAPED = {"instance", "job", "le"}
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
        suspended=False,
        breaker=SimpleNamespace(is_open=False),
        state=TierState.OK,
        selective=True,
        refused=Counter(rate=1),
    )
    endpoint = SimpleNamespace(connections={}, transfers={}, queued_bytes=0, traffic={})
    return SimpleNamespace(
        info=info,
        status=lambda: status,
        prefixes=SimpleNamespace(pinned_bytes=0, budget_bytes=0),
        audit=SimpleNamespace(counts=AuditCounts(Counter(disk=1), Counter(disk=1), Counter(disk=1))),
        quarantine=SimpleNamespace(chains=[]),
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
    audit = SimpleNamespace(results={"equal": 0}, quarantined=0)
    router: Any = SimpleNamespace(
        upstreams={}, pools={}, subscriptions={}, audit=audit, suspects=SimpleNamespace(refused=0)
    )
    metrics.add_collector(RouterStateCollector(router))
    assert described(collectors(metrics._registry)) == documented("Router")


@pytest.fixture
def vllm_stub() -> Iterator[None]:
    with stubbed_vllm():
        yield


@pytest.mark.usefixtures("vllm_stub")
def test_vllm() -> None:
    """The connector's table lists every metric with its type and labels."""
    module = importlib.import_module("foreword.integrations.vllm.connector_metrics")
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


def dashboard_queries() -> Iterator[tuple[str, str]]:
    """Each query of the Grafana dashboard with its legend."""
    dashboard = json.loads((ROOT / "deploy" / "grafana" / "foreword.json").read_text())
    for panel in dashboard["panels"]:
        for target in panel.get("targets", ()):
            yield target["expr"].replace("$__rate_interval", "5m"), target["legendFormat"]


def alert_queries() -> Iterator[tuple[str, str]]:
    """The expression of each alert rule with its texts."""
    rules = yaml.safe_load((ROOT / "deploy" / "prometheus" / "foreword.yaml").read_text())
    for group in rules["groups"]:
        for rule in group["rules"]:
            assert set(rule) <= {"alert", "expr", "for", "labels", "annotations"}
            yield rule["expr"], " ".join(rule["annotations"].values())


def test_runbooks() -> None:
    """Each alert links to a section of the documentation with its name, which exists; there is no section of another alert."""
    rules = yaml.safe_load((ROOT / "deploy" / "prometheus" / "foreword.yaml").read_text())
    page = ROOT / "docs" / "operations" / "alerts.md"
    sections = re.findall(r"^## (\w+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    alerts = {rule["alert"]: rule["annotations"]["runbook_url"] for group in rules["groups"] for rule in group["rules"]}
    assert sorted(alerts) == sorted(sections)
    for name, url in alerts.items():
        assert url.endswith(f"/{page.relative_to(ROOT).as_posix()}#{name.lower()}"), name


def selected(node: Any, grouped: frozenset[str] = frozenset()) -> Iterator[tuple[str, set[str]]]:
    """The metrics of a parsed PromQL expression, each with the labels that the expression uses of it."""
    if hasattr(node, "matchers"):
        yield node.name, {one.name for one in node.matchers.matchers} | grouped
        return
    if getattr(node, "modifier", None) is not None and hasattr(node, "param"):
        grouped |= frozenset(node.modifier.labels)
    for name in ("vector_selector", "expr", "lhs", "rhs"):
        if getattr(node, name, None) is not None:
            yield from selected(getattr(node, name), grouped)
    for argument in getattr(node, "args", ()):
        yield from selected(argument, grouped)


def test_hicache() -> None:
    """The table of the backend for SGLang lists what it shows of each tier (tests/integrations/sglang_suite.py shows one)."""
    shown = {(f"sglang:foreword_{name}_total", "counter", ("tier",)) for name, _, _ in PER_TIER}
    assert documented("HiCache backend") == shown


@pytest.mark.parametrize("queries", [dashboard_queries, alert_queries])
def test_dashboard_and_alerts(queries: Any) -> None:
    """Every query is valid PromQL; its metrics exist with the labels that the query and its texts use."""
    promql = pytest.importorskip("promql_parser")
    known: dict[str, set[str]] = {}
    for name, kind, labels in documented("Server") | documented("Router") | documented("vLLM connector"):
        suffixes = ("_bucket", "_sum", "_count") if kind == "histogram" else ("",)
        for suffix in suffixes:
            known.setdefault(name + suffix, set()).update(labels)
    checked = 0
    for query, text in queries():
        used: set[str] = set()
        for name, labels in selected(promql.parse(query)):
            assert name in known, f"{name} in {query}"
            assert labels <= known[name] | SCRAPED, f"labels of {name} in {query}"
            used |= known[name] | SCRAPED
            checked += 1
        assert set(re.findall(r"\{\{\s*(?:\$labels\.)?(\w+)", text)) <= used, text
    assert checked > 10


@pytest.mark.parametrize("page", sorted((ROOT / "docs").rglob("*.md")), ids=lambda page: page.name)
def test_pages_name_metrics_that_exist(page: Path) -> None:
    """Each metric of Foreword's that a page of the documentation names is in the reference."""
    reference = PAGE.read_text(encoding="utf-8")
    known = set(re.findall(r"\b(?:vllm:foreword_|foreword:)\w+", reference))
    named = set(re.findall(r"\b(?:vllm:foreword_|foreword:)[a-z]\w*(?![\w.]|\*)", page.read_text(encoding="utf-8")))
    ends = ("_bucket", "_sum", "_count", "_")
    assert not {name for name in named - known if not name.endswith(ends)}
