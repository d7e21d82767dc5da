"""Report of simulations: numbers, a table, and a self-contained HTML page with curves (SVG)."""

from __future__ import annotations

import html
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Final

from foreword.sim.plan import AXES
from foreword.sim.run import SimulationResult
from foreword.sim.sequence_tokens import RequestOutcome

_WIDTH: Final = 860
_HEIGHT: Final = 300
_LEFT: Final = 60
_BOTTOM: Final = 40
_COLORS: Final = ("#0b7a75", "#d1495b", "#edae49", "#30638e", "#8d6a9f", "#6a994e", "#bc6c25", "#555555")
_POINTS: Final = 200
_TIERS: Final = ("device", "host memory", "disk", "shared store")
_WINDOWS: Final = 40

Point = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Summary:
    """The numbers of one simulation.

    Attributes:
        tokens: of prompts and outputs.
        hit_share: hit rate: share of the prompt tokens that were cached.
        tier_shares: the parts of it from the device, host memory, disk and the shared store.
        expected_share: hit rate that the router expected.
        mean, p50, p90, p99: time to first token in seconds.
        per_token, per_token_p50, per_token_p90, per_token_p99: inter-token latency per request in seconds: mean and
            percentiles over requests with more than one output token; 0 if there are none.
        moved_share: share of the requests whose session or conversation was on another replica before.
        busiest: compute time of the busiest replica, divided by the mean of all.
        busy: compute time of all replicas in seconds.
        replica_hours: replica-hours per thousand requests, including idle time.
        failovers: how often requests were placed again because their replica failed.
        recomputed_tokens: tokens whose KV a failed replica had, and that the next one computed.
    """

    name: str
    requests: int
    tokens: int
    hit_share: float
    tier_shares: tuple[float, float, float, float]
    expected_share: float
    mean: float
    p50: float
    p90: float
    p99: float
    per_token: float
    per_token_p50: float
    per_token_p90: float
    per_token_p99: float
    moved_share: float
    busiest: float
    busy: float
    replica_hours: float
    preemptions: int
    failovers: int
    recomputed_tokens: int


def summarize(result: SimulationResult) -> Summary:
    """The numbers of one simulation."""
    outcomes = result.outcomes
    times = sorted(outcome.ttft + result.costs.request for outcome in outcomes)
    latencies = sorted(one.seconds_per_token for one in outcomes if one.request.output_tokens > 1) or [0.0]
    prompts = sum(outcome.request.prompt_tokens for outcome in outcomes)
    busy = [totals.busy for totals in result.replicas.values()]
    hits = sum(outcome.cached_tokens for outcome in outcomes) / prompts
    loaded = [sum(outcome.loaded[i] for outcome in outcomes) / prompts for i in range(3)]
    return Summary(
        name=result.name,
        requests=len(outcomes),
        tokens=prompts + sum(outcome.request.output_tokens for outcome in outcomes),
        hit_share=hits,
        tier_shares=(hits - sum(loaded), loaded[0], loaded[1], loaded[2]),
        expected_share=sum(outcome.expected_cached for outcome in outcomes) / prompts,
        mean=sum(times) / len(times),
        p50=quantile(times, 0.5),
        p90=quantile(times, 0.9),
        p99=quantile(times, 0.99),
        per_token=sum(latencies) / len(latencies),
        per_token_p50=quantile(latencies, 0.5),
        per_token_p90=quantile(latencies, 0.9),
        per_token_p99=quantile(latencies, 0.99),
        moved_share=result.moved / len(outcomes),
        busiest=max(busy) * len(busy) / sum(busy),
        busy=sum(busy),
        replica_hours=sum(totals.up for totals in result.replicas.values()) / 3600 / len(outcomes) * 1000,
        preemptions=sum(totals.preemptions for totals in result.replicas.values()),
        failovers=sum(outcome.failovers for outcome in outcomes),
        recomputed_tokens=sum(outcome.recomputed for outcome in outcomes),
    )


@dataclass(frozen=True, slots=True)
class Phase:
    """The requests that arrived between two changes of the fleet, from `start` to before `end` seconds.

    Attributes:
        changes: those at the start.
        mean, p90: time to first token in seconds.
        hit_share, failovers, recomputed_tokens: see `Summary`.
    """

    start: float
    end: float
    changes: tuple[str, ...]
    requests: int
    hit_share: float
    mean: float
    p90: float
    failovers: int
    recomputed_tokens: int


def phases(result: SimulationResult) -> list[Phase]:
    """The phases of a simulation with changes of its fleet, without those in which no request arrived; else none."""
    changes = sorted(result.spec.changes, key=lambda one: one.at)
    if not changes:
        return []
    starts = sorted({0.0, *(change.at for change in changes)})
    found = []
    for start, end in zip(starts, [*starts[1:], math.inf], strict=True):
        many = [one for one in result.outcomes if start <= one.request.arrival < end]
        if not many:
            continue
        times = sorted(one.ttft + result.costs.request for one in many)
        phase = Phase(
            start,
            min(end, result.seconds),
            tuple(one.text for one in changes if one.at == start),
            len(many),
            sum(one.cached_tokens for one in many) / sum(one.request.prompt_tokens for one in many),
            sum(times) / len(times),
            quantile(times, 0.9),
            sum(one.failovers for one in many),
            sum(one.recomputed for one in many),
        )
        found.append(phase)
    return found


@dataclass(frozen=True, slots=True)
class TenantSummary:
    """The requests of one tenant with one priority.

    Attributes:
        rejected: requests beyond the tenant's quota. They are not part of the other numbers.
        mean, p50, p90: time to first token in seconds; 0 if all requests were rejected.
        hit_share: see `Summary`.
    """

    tenant: str
    priority: int
    requests: int
    rejected: int
    hit_share: float
    mean: float
    p50: float
    p90: float


def tenants(result: SimulationResult) -> list[TenantSummary]:
    """The tenants and priorities of a simulation; none if all requests have no tenant and one priority."""
    served: defaultdict[tuple[str, int], list[RequestOutcome]] = defaultdict(list)
    for one in result.outcomes:
        served[one.request.tenant, one.request.priority].append(one)
    rejected = Counter((one.tenant, one.priority) for one in result.rejected)
    groups = sorted(served.keys() | rejected.keys())
    if not rejected and len(groups) == 1 and not groups[0][0]:
        return []
    found = []
    for group in groups:
        many = served[group]
        times = sorted(one.ttft + result.costs.request for one in many) or [0.0]
        cached, prompts = sum(one.cached_tokens for one in many), sum(one.request.prompt_tokens for one in many)
        latencies = sum(times) / len(times), quantile(times, 0.5), quantile(times, 0.9)
        found.append(TenantSummary(*group, len(many), rejected[group], cached / max(prompts, 1), *latencies))
    return found


def quantile(ordered: Sequence[float], share: float) -> float:
    """The smallest value of an ordered, non-empty sequence that at least this share of the values does not exceed."""
    return ordered[min(max(-int(-share * len(ordered) // 1) - 1, 0), len(ordered) - 1)]


_COLUMNS: Final[tuple[tuple[str, Callable[[Summary], str]], ...]] = (
    ("simulation", lambda one: one.name),
    ("hit", lambda one: f"{one.hit_share:.1%}"),
    ("device", lambda one: f"{one.tier_shares[0]:.1%}"),
    ("memory", lambda one: f"{one.tier_shares[1]:.1%}"),
    ("disk", lambda one: f"{one.tier_shares[2]:.1%}"),
    ("shared", lambda one: f"{one.tier_shares[3]:.1%}"),
    ("expected", lambda one: f"{one.expected_share:.1%}"),
    ("TTFT mean", lambda one: f"{one.mean:.3f} s"),
    ("p50", lambda one: f"{one.p50:.3f} s"),
    ("p90", lambda one: f"{one.p90:.3f} s"),
    ("p99", lambda one: f"{one.p99:.3f} s"),
    ("ITL", lambda one: f"{one.per_token * 1e3:.1f} ms"),
    ("ITL p90", lambda one: f"{one.per_token_p90 * 1e3:.1f} ms"),
    ("moved", lambda one: f"{one.moved_share:.1%}"),
    ("busiest", lambda one: f"{one.busiest:.2f}x"),
    ("replica-h/1k", lambda one: f"{one.replica_hours:.3f}"),
)
_TENANT_HEAD: Final = ("simulation", "tenant", "priority", "served", "rejected", "hit", "TTFT mean", "p50", "p90")
_PHASE_HEAD: Final = ("simulation", "phase", "requests", "hit", "TTFT mean", "p90", "failovers", "recomputed")


def rows(results: Iterable[SimulationResult]) -> tuple[list[str], list[list[str]]]:
    """Header and rows of the table."""
    found = [[text(summarize(result)) for _, text in _COLUMNS] for result in results]
    return [name for name, _ in _COLUMNS], found


def phase_rows(results: Iterable[SimulationResult]) -> tuple[Sequence[str], list[list[str]]]:
    """Header and rows of the table of phases; no rows if no fleet changed."""
    found = []
    for result in results:
        for one in phases(result):
            span = f"{one.start:.6g} to {one.end:.6g} s" + (f" ({', '.join(one.changes)})" if one.changes else "")
            times = [f"{one.mean:.3f} s", f"{one.p90:.3f} s"]
            counts = [str(one.failovers), f"{one.recomputed_tokens:,}"]
            found.append([result.name, span, str(one.requests), f"{one.hit_share:.1%}", *times, *counts])
    return _PHASE_HEAD, found


def tenant_rows(results: Iterable[SimulationResult]) -> tuple[Sequence[str], list[list[str]]]:
    """Header and rows of the table of tenants and priorities; no rows if there are none."""
    found = []
    for result in results:
        for one in tenants(result):
            times = [f"{value:.3f} s" for value in (one.mean, one.p50, one.p90)]
            counts = [str(one.priority), str(one.requests), str(one.rejected)]
            found.append([result.name, one.tenant or "-", *counts, f"{one.hit_share:.1%}", *times])
    return _TENANT_HEAD, found


def table(results: Sequence[SimulationResult]) -> str:
    """All simulations as a Markdown table, one of their phases if a fleet changed, and one of tenants if there are any."""
    more = [markdown_table(head, found) for head, found in (phase_rows(results), tenant_rows(results)) if found]
    return "\n\n".join([markdown_table(*rows(results)), *more])


def markdown_table(head: Sequence[str], body: Sequence[Sequence[str]]) -> str:
    """A Markdown table; all columns but the first are aligned to the right."""
    widths = [max(map(len, column)) for column in zip(head, *body, strict=True)]

    def line(cells: Sequence[str]) -> str:
        first = f" {cells[0]:<{widths[0]}} "
        return "|".join(["", first, *(f" {c:>{w}} " for c, w in zip(cells[1:], widths[1:], strict=True)), ""])

    rule = [":" + "-" * (widths[0] - 1), *("-" * (width - 1) + ":" for width in widths[1:])]
    return "\n".join([line(head), line(rule), *map(line, body)])


def page(results: Sequence[SimulationResult], title: str = "Simulation", about: str = "") -> str:
    """An HTML page with the table and curves. It has no scripts and loads nothing. `about` is printed above the table."""
    facts = "; ".join(filter(None, (about, f"{results[0].spec}; {results[0].costs}" if results else "")))
    curves = drawings(results)
    return (
        f"<!doctype html><html lang='en'><meta charset='utf-8'><title>{html.escape(title)}</title><style>{_STYLE}</style>"
        f"<h1>{html.escape(title)}</h1><p class='facts'>{html.escape(facts)}</p>"
        f"{_html_table(*rows(results))}{_html_table(*phase_rows(results))}{_html_table(*tenant_rows(results))}"
        f"{''.join(curves.values())}</html>"
    )


def _html_table(head: Sequence[str], body: Sequence[Sequence[str]]) -> str:
    if not body:
        return ""
    cells = "".join(f"<tr>{''.join(f'<td>{html.escape(cell)}</td>' for cell in row)}</tr>" for row in body)
    return f"<table><tr>{''.join(f'<th>{html.escape(name)}</th>' for name in head)}</tr>{cells}</table>"


def drawings(results: Sequence[SimulationResult]) -> dict[str, str]:
    """The curves as SVG elements, by a short name. `as_file` makes a document of one."""
    names = [result.name for result in results]
    found = {
        "ttft": svg("Share of requests by time to first token in seconds", names, [ttft_curve(o) for o in results]),
        "hits": svg("Hit rate by minute of the trace", names, [hit_curve(o) for o in results]),
        "waits": svg(
            "Mean time to first token in seconds, by minute of the trace", names, [wait_curve(o) for o in results]
        ),
        "tiers": bars("Hit rate by tier", [summarize(one) for one in results]),
    }
    for field, title in AXES.items():
        lines = _by_size(results, field)
        if lines:
            found[f"ttft-by-{title}"] = svg(f"Mean time to first token in seconds, by {title}", *_means(lines, "mean"))
            found[f"hits-by-{title}"] = svg(f"Hit rate by {title}", *_means(lines, "hit_share"))
    return found


def as_file(drawing: str) -> str:
    """An SVG element as a document."""
    return drawing.replace("<svg ", '<svg xmlns="http://www.w3.org/2000/svg" ', 1)


def _by_size(results: Sequence[SimulationResult], field: str) -> dict[str, list[tuple[float, Summary]]]:
    """Simulations that differ only in this field, grouped by the rest; empty if all have the same value."""
    groups: dict[str, list[tuple[float, Summary]]] = {}
    for result in results:
        spec = asdict(result.spec)
        value = float(spec.pop(field))
        differs = {name: spec[name] for name in AXES if name != field}
        varied = [name for name in differs if len({getattr(one.spec, name) for one in results}) > 1]
        common = ", ".join([result.policy, *(f"{AXES[name]} {differs[name]:,}" for name in varied)])
        groups.setdefault(common, []).append((value, summarize(result)))
    return groups if any(len(group) > 1 for group in groups.values()) else {}


def _means(lines: Mapping[str, list[tuple[float, Summary]]], field: str) -> tuple[list[str], list[list[Point]]]:
    curves = [sorted((value, float(getattr(one, field))) for value, one in group) for group in lines.values()]
    return list(lines), curves


_STYLE: Final = (
    "body{font:15px/1.5 system-ui,sans-serif;margin:2rem auto;max-width:1000px;color:#222}"
    "table{border-collapse:collapse;font-variant-numeric:tabular-nums}td,th{padding:.2rem .7rem;text-align:right;"
    "border-bottom:1px solid #ddd}td:first-child,th:first-child{text-align:left}.facts{color:#666;font-size:12px}"
    "svg{display:block;margin:1.5rem 0}text{font:12px system-ui,sans-serif;fill:#444}"
)


def ttft_curve(result: SimulationResult) -> list[Point]:
    """Share of requests by time to first token, up to the 99th percentile."""
    times = sorted(outcome.ttft for outcome in result.outcomes)
    shares = [i / _POINTS for i in range(1, int(_POINTS * 0.99) + 1)]
    return [(0.0, 0.0)] + [(quantile(times, share), share) for share in shares]


def hit_curve(result: SimulationResult) -> list[Point]:
    """Hit rate by minute of arrival."""
    return _windows(
        result, lambda many: sum(one.cached_tokens for one in many) / sum(one.request.prompt_tokens for one in many)
    )


def wait_curve(result: SimulationResult) -> list[Point]:
    """Mean time to first token by minute of arrival."""
    return _windows(result, lambda many: sum(one.ttft for one in many) / len(many))


def _windows(result: SimulationResult, value: Callable[[list[RequestOutcome]], float]) -> list[Point]:
    """`value` of the requests that arrived in each of _WINDOWS equal parts of the trace, by minute."""
    end = max(outcome.request.arrival for outcome in result.outcomes)
    wide = max(end / _WINDOWS, 1e-9)
    windows: list[list[RequestOutcome]] = [[] for _ in range(_WINDOWS + 1)]
    for outcome in result.outcomes:
        windows[int(outcome.request.arrival / wide)].append(outcome)
    return [((i + 0.5) * wide / 60, value(many)) for i, many in enumerate(windows) if many]


def svg(title: str, names: Sequence[str], curves: Sequence[Sequence[Point]]) -> str:
    """An SVG element with curves over common axes that start at 0."""
    right = max((x for curve in curves for x, _ in curve), default=1.0) or 1.0
    top = max((y for curve in curves for _, y in curve), default=1.0) or 1.0
    wide, high = _WIDTH - _LEFT - 330, _HEIGHT - _BOTTOM - 30

    def at(point: Point) -> str:
        return f"{_LEFT + point[0] / right * wide:.1f},{_HEIGHT - _BOTTOM - point[1] / top * high:.1f}"

    parts = [f"<text x='{_LEFT}' y='16' font-weight='600'>{html.escape(title)}</text>"]
    for i in range(5):
        x, y = _LEFT + wide * i / 4, _HEIGHT - _BOTTOM - high * i / 4
        parts.append(f"<line x1='{_LEFT}' x2='{_LEFT + wide}' y1='{y:.1f}' y2='{y:.1f}' stroke='#e5e5e5'/>")
        parts.append(f"<text x='{_LEFT - 8}' y='{y + 4:.1f}' text-anchor='end'>{top * i / 4:.3g}</text>")
        parts.append(f"<text x='{x:.1f}' y='{_HEIGHT - _BOTTOM + 18}' text-anchor='middle'>{right * i / 4:.3g}</text>")
    for i, (name, curve) in enumerate(zip(names, curves, strict=True)):
        color = _COLORS[i % len(_COLORS)]
        points = " ".join(map(at, curve))
        parts.append(f"<polyline points='{points}' fill='none' stroke='{color}' stroke-width='2'/>")
        y = 40 + 18 * i
        parts.append(f"<rect x='{_WIDTH - 310}' y='{y - 9}' width='12' height='4' fill='{color}'/>")
        parts.append(f"<text x='{_WIDTH - 292}' y='{y}'>{html.escape(name)}</text>")
    return _svg_element(title, _HEIGHT, parts)


def bars(title: str, summaries: Sequence[Summary]) -> str:
    """An SVG element with a stacked bar per simulation: its hit rate by tier."""
    height = 60 + 22 * len(summaries)
    wide = _WIDTH - _LEFT - 330
    parts = [f"<text x='{_LEFT}' y='16' font-weight='600'>{html.escape(title)}</text>"]
    for i, tier in enumerate(_TIERS):
        left = _LEFT + 130 * i
        parts.append(f"<rect x='{left}' y='26' width='12' height='8' fill='{_COLORS[i]}'/>")
        parts.append(f"<text x='{left + 18}' y='34'>{tier}</text>")
    for row, one in enumerate(summaries):
        y, x = 48 + 22 * row, float(_LEFT)
        for i, share in enumerate(one.tier_shares):
            parts.append(
                f"<rect x='{x:.1f}' y='{y}' width='{max(share, 0) * wide:.1f}' height='16' fill='{_COLORS[i]}'/>"
            )
            x += max(share, 0) * wide
        parts.append(f"<text x='{x + 8:.1f}' y='{y + 12}'>{one.hit_share:.1%} {html.escape(one.name)}</text>")
    return _svg_element(title, height, parts)


def _svg_element(title: str, height: int, parts: Sequence[str]) -> str:
    return (
        f"<svg viewBox='0 0 {_WIDTH} {height}' width='{_WIDTH}' height='{height}' role='img' "
        f"aria-label='{html.escape(title)}'>{''.join(parts)}</svg>"
    )
