"""docs/reference/metrics.md lists exactly the metrics of the server, the router and the vLLM connector, and the dashboard
and alert rules in deploy/ use no others."""

from __future__ import annotations

import importlib
import json
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import field, make_dataclass, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest, metrics
from prometheus_client.metrics import MetricWrapperBase
from vllm_stub import stubbed_vllm

import foreword
from foreword.engine.audit_counts import AuditCounts
from foreword.observability.scrape import Scrape, metric
from foreword.offload.counters import LookupCounts, OffloadStatus
from foreword.router.router_metrics import RouterMetrics
from foreword.router.state_metrics import RouterStateCollector
from foreword.server.engine_metrics import PrometheusObserver
from foreword.store.base import StoreStatus
from foreword.store.series import counted as declared
from foreword.store.series import series_of
from foreword.store.tier_counters import TierCounters, TierState

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "reference" / "metrics.md"
# Labels that Prometheus adds.
SCRAPED = {"instance", "job", "le"}
# (name, type, labels)
Metrics = set[tuple[str, str, tuple[str, ...]]]


def documented(section: str) -> Metrics:
    """The rows of a section's tables, and those of what it counts of stores."""
    text = PAGE.read_text(encoding="utf-8").split(f"## {section}\n")[1].split("\n## ")[0]
    rows = re.findall(r"^\| `([^`]+)` \| (\w+) \| ([^|]*)\| [^|]+ \|$", text, flags=re.MULTILINE)
    found = {(name, kind, tuple(sorted(re.findall(r"`(\w+)`", labels)))) for name, kind, labels in rows}
    written = re.findall(r"^\| `([\w:]+)(?:\{([\w,]+)\})?` \| (\w+) \| [^|]+ \|$", text, flags=re.MULTILINE)
    found |= {(name, kind, tuple(sorted(labels.split(",")) if labels else ())) for name, labels, kind in written}
    return found | counted(section)


def counted(section: str) -> Metrics:
    """The columns of the tables of what stores count that are about a section."""
    always = {"Server": ("model_name",), "vLLM connector": ("model_name", "engine"), "HiCache backend": ()}.get(section)
    if always is None:
        return set()
    text = PAGE.read_text(encoding="utf-8").split("## Counters of stores\n")[1].split("\n## ")[0]
    tiers, requests = (part.split("\n### ")[0] for part in text.split("\n### Of ")[1:])
    found: Metrics = set()
    for part, of in ((tiers, ("tier",)), (requests, ())):
        for server, engine, label in re.findall(
            r"^\| `(foreword:\w+)` \| `(vllm:\w+)` \| ([^|]*)\| ", part, re.MULTILINE
        ):
            own = re.findall(r"`(\w+)`", label) if section == "Server" or "(servers)" not in label else []
            name = server if section == "Server" else engine
            if section != "HiCache backend":
                found.add((name, "counter", tuple(sorted((*always, *of, *own)))))
            elif of:
                found.add((name.replace("vllm:", "sglang:"), "counter", tuple(sorted((*of, *own)))))
    return found


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
    """An engine as the server's metrics read it, with a store and a role."""
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
        counters=TierCounters(errors=Counter(timeout=1), bad=Counter(checksum=1), refused=Counter(rate=1)),
        status=StoreStatus,
        suspended=False,
        breaker=SimpleNamespace(is_open=False),
        state=TierState.OK,
    )
    endpoint = SimpleNamespace(connections={}, transfers={}, queued_bytes=0, traffic={})
    return SimpleNamespace(
        info=info,
        status=lambda: status,
        prefixes=SimpleNamespace(pinned_bytes=0, budget_bytes=0),
        audit=SimpleNamespace(counts=AuditCounts()),
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


def test_a_server_shows_its_state() -> None:
    """Each number of the engine, of a tier, of its endpoint, of what peers read and of the audit is shown under its own name,
    with its labels."""
    engine = server_engine()
    names = ("running", "waiting", "kv_usage", "free_blocks", "cached_blocks", "pinned_blocks", "retained_blocks")
    engine.status = lambda: SimpleNamespace(**dict(zip(names, range(2, 9), strict=True)))
    engine.prefixes.budget_bytes = 9
    engine.quarantine.chains = range(10)
    (tier,) = engine.offload.store.tiers
    tier.suspended, tier.breaker.is_open, tier.state = True, False, TierState.FULL
    tier.status = lambda: StoreStatus(blocks=11, bytes=12, budget=13, pinned_bytes=14, evictions=15)
    traffic = {"tcp": SimpleNamespace(bytes_sent=16, bytes_received=17, seconds=18)}
    endpoint = SimpleNamespace(
        connections={"shm": 19}, transfers={"source, sending": 20}, queued_bytes=21, traffic=traffic
    )
    engine.instance.endpoint.status = lambda: endpoint
    engine.served.status = lambda: SimpleNamespace(device=22, memory=23, missing=24)
    engine.audit.counts = AuditCounts(Counter(disk=25), Counter(disk=26), Counter(disk=27), 28, 29, 30, 31.0, 32.0)
    observer = PrometheusObserver()
    observer.watch(engine)
    scrape = Scrape(observer.render("")[0].decode())
    for name, labels, amount in (
        ("vllm:num_requests_running", {}, 2),
        ("vllm:num_requests_waiting", {}, 3),
        ("vllm:kv_cache_usage_perc", {}, 4),
        ("foreword:blocks", {}, 4),
        ("foreword:blocks_free", {}, 5),
        ("foreword:blocks_cached", {}, 6),
        ("foreword:blocks_pinned", {}, 7),
        ("foreword:prefix_pinned_bytes", {}, 7 * 8),
        ("foreword:prefix_retained_bytes", {}, 8 * 8),
        ("foreword:prefix_budget_bytes", {}, 9),
        ("foreword:quarantined_chains", {}, 10),
        ("foreword:tier_blocks", {"tier": "memory"}, 11),
        ("foreword:tier_bytes", {"tier": "memory"}, 12),
        ("foreword:tier_budget_bytes", {"tier": "memory"}, 13),
        ("foreword:tier_pinned_bytes", {"tier": "memory"}, 14),
        ("foreword:tier_evictions_total", {"tier": "memory"}, 15),
        ("foreword:tier_suspended", {"tier": "memory"}, 1),
        ("foreword:tier_open", {"tier": "memory"}, 0),
        ("foreword:tier_state", {"tier": "memory", "state": "full"}, 1),
        ("foreword:tier_state", {"tier": "memory"}, 1),
        ("foreword:transfer_link_bytes_total", {"link": "tcp", "direction": "sent"}, 16),
        ("foreword:transfer_link_bytes_total", {"link": "tcp", "direction": "received"}, 17),
        ("foreword:transfer_link_seconds_total", {"link": "tcp"}, 18),
        ("foreword:transfer_connections", {"link": "shm"}, 19),
        ("foreword:transfer_under_way", {"state": "source, sending"}, 20),
        ("foreword:transfer_queued_bytes", {}, 21),
        ("foreword:served_blocks_total", {"source": "device"}, 22),
        ("foreword:served_blocks_total", {"source": "memory"}, 23),
        ("foreword:served_missing_blocks_total", {}, 24),
        ("foreword:audit_hits_total", {"source": "disk"}, 25),
        ("foreword:audit_audited_hits_total", {"source": "disk"}, 26),
        ("foreword:audit_different_hits_total", {"source": "disk"}, 27),
        ("foreword:audit_skipped_hits_total", {}, 28),
        ("foreword:audit_blocks_total", {}, 29),
        ("foreword:audit_exact_blocks_total", {}, 30),
        ("foreword:audit_seconds_total", {}, 31),
        ("foreword:audit_largest_distance", {}, 32),
    ):
        assert scrape.total(name, model_name="m", **labels) == amount, name
    assert scrape.labels("foreword:model_info")["fingerprint"] == "f"
    assert scrape.labels("vllm:cache_config_info")["num_gpu_blocks"] == "4"


def test_router() -> None:
    """The router's table lists every metric with its type and labels."""
    counts = RouterMetrics()
    audit = SimpleNamespace(results={"equal": 0}, quarantined=0)
    router: Any = SimpleNamespace(
        upstreams={}, pools={}, subscriptions={}, audit=audit, suspects=SimpleNamespace(refused=0)
    )
    counts.add_collector(RouterStateCollector(router))
    assert described(collectors(counts._registry)) == documented("Router")


def numbered(counters: type, first: int) -> Any:
    """Counters with numbers that differ, from `first` on."""
    numbers = enumerate(series_of(counters), first)
    return counters(**{one.field: Counter({next(iter(one.values), "x"): n}) if one.by else n for n, one in numbers})


def test_a_server_shows_every_counter() -> None:
    """Each number that is counted of tiers, loads and requests is in a server's metrics, under the name of its series."""
    engine = server_engine()
    tier, lookups = numbered(TierCounters, 100), numbered(LookupCounts, 200)
    engine.offload.store.tiers[0].counters = tier
    loads = replace(numbered(OffloadStatus, 300), lookups=lookups)
    engine.offload.status = lambda: loads
    observer = PrometheusObserver()
    observer.watch(engine)
    scrape = Scrape(observer.render("")[0].decode())
    for one in (tier, lookups, loads):
        for series in series_of(type(one)):
            assert scrape.total(metric("server", type(one), series.field)) == sum(
                series.amounts(one, engine=False).values()
            ), series.field


def test_counters_that_no_reader_could_show() -> None:
    """A counter without a sentence, a unit, a kind or a name is an error where it is declared; a number beside the series is
    one where they are read."""
    declared("Bytes read.", "bytes", "tier_read_bytes", "loaded_bytes")
    for wrong in (
        {"text": "bytes read"},
        {"text": ""},
        {"unit": ""},
        {"unit": "parsecs"},
        {"kind": ""},
        {"server": ""},
        {"server": "tier", "engine": ""},
    ):
        with pytest.raises(ValueError, match="a series has a sentence"):
            declared(
                **{"text": "Bytes read.", "unit": "bytes", "server": "tier_bytes", "engine": "read_bytes", **wrong}
            )
    with pytest.raises(TypeError):
        declared("Bytes read.")
    for kind in (int, Counter):
        more = make_dataclass("More", [("forgotten", kind, field(default_factory=kind))], bases=(TierCounters,))
        with pytest.raises(ValueError, match="forgotten"):
            series_of(more)


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


@pytest.mark.usefixtures("vllm_stub")
def test_vllm_shows_every_counter() -> None:
    """Each number that is counted of tiers, loads and requests, by the connector itself, and of leases is in vLLM's metrics,
    under the name of its series."""
    module = importlib.import_module("foreword.integrations.vllm.connector_metrics")
    counts = importlib.import_module("foreword.integrations.vllm.connector_counts")
    own, leases = numbered(counts.ConnectorCounts, 400), numbered(counts.HandoffCounts, 500)
    tier, lookups, loads = numbered(TierCounters, 100), numbered(LookupCounts, 200), numbered(OffloadStatus, 300)
    tiers = [SimpleNamespace(label="a b", counters=tier, state=TierState.OK)]
    reader = module.StatsReader(
        "worker 0",
        SimpleNamespace(tiers=tiers),
        SimpleNamespace(counts=lambda: lookups, total=1),
        SimpleNamespace(declined=0, too_small=0, fixed=SimpleNamespace(measured={})),
        SimpleNamespace(status=lambda: loads, stamp=(), queued=loads.queued),
        SimpleNamespace(counted=lambda: leases),
    )
    registry = CollectorRegistry()
    for name, kind in (
        ("_counter_cls", metrics.Counter),
        ("_gauge_cls", metrics.Gauge),
        ("_histogram_cls", metrics.Histogram),
    ):
        setattr(module.ForewordPromMetrics, name, staticmethod(partial(kind, registry=registry)))
    config = SimpleNamespace(kv_transfer_config=SimpleNamespace(kv_connector_extra_config={}))
    shown = module.ForewordPromMetrics(config, None, ["model_name", "engine"], {0: ["m", "0"]})
    shown.per_engine_labelvalues = {0: ["m", "0"]}
    shown.observe(json.loads(json.dumps(reader.read([]).count(own).data)), 0)
    scrape = Scrape(generate_latest(registry).decode())
    for one in (tier, lookups, loads, own, leases):
        for series in series_of(type(one)):
            assert scrape.total(metric("vllm", type(one), series.field)) == sum(
                series.amounts(one, engine=True).values()
            ), series.field


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
    shown = {
        (metric("sglang", TierCounters, one.field), "counter", tuple(sorted(("tier", *one.labels(engine=True)))))
        for one in series_of(TierCounters)
    }
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


PACKAGE = Path(foreword.__file__).parent  # also where it is installed from wheels
READERS = [*sorted(PACKAGE.rglob("*.py")), *sorted((PACKAGE / "dashboard" / "static").glob("*.js"))]


def test_code_reads_metrics_that_exist() -> None:
    """Each metric of Foreword's that the package or its dashboard names is in the reference, by its whole name or by how it
    begins: a renamed one is not looked for under its old name."""
    known = set(re.findall(r"\b(?:vllm:foreword_|foreword:)\w+", PAGE.read_text(encoding="utf-8")))
    ends = ("_bucket", "_sum", "_count", "_total")
    read = 0
    for path in READERS:
        for name in re.findall(r"\b(?:vllm:foreword_|(?<!vllm:)foreword:)[a-z]\w+", path.read_text(encoding="utf-8")):
            plain = next((name.removesuffix(end) for end in ends if name.endswith(end)), name)
            begins = any(one.startswith(name) for one in known) if name.endswith("_") else False
            assert begins or name in known or {plain, f"{plain}_total"} & known, f"{name} in {path.name}"
            read += 1
    assert read > 50
