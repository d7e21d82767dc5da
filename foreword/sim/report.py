"""What simulations gave, as numbers, as a table, and as a page with curves that needs no network."""

from __future__ import annotations

import dataclasses
import html
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from foreword.sim.replica import RequestOutcome
from foreword.sim.run import SimulationResult

_WIDTH: Final = 860
_HEIGHT: Final = 300
_LEFT: Final = 60
_BOTTOM: Final = 40
_COLOURS: Final = ("#0b7a75", "#d1495b", "#edae49", "#30638e", "#8d6a9f", "#6a994e", "#bc6c25", "#555555")
_POINTS: Final = 200
_TIERS: Final = ("device", "host memory", "disk", "shared store")
_SIZES: Final = {
    "replicas": "replicas",
    "device_tokens": "device",
    "host_tokens": "memory",
    "disk_tokens": "disk",
    "shared_tokens": "shared",
}
_WINDOWS: Final = 40

Point = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Summary:
    """One simulation in numbers.

    Attributes:
        hit_share: prompt tokens that were not computed, of all.
        tier_shares: those of them that came from the device, from host memory, disk and the shared store.
        expected_share: what the router expected to be found.
        mean, p50, p90, p99: seconds to the first token.
        per_token, per_token_p90: seconds between tokens of a request, mean over requests, and what nine in ten do not exceed.
        busiest: busy share of the busiest replica, divided by the mean of all.
        busy: replica-seconds of computing.
        replica_hours: per thousand requests: what the traffic cost, idle time included.
    """

    name: str
    requests: int
    hit_share: float
    tier_shares: tuple[float, float, float, float]
    expected_share: float
    mean: float
    p50: float
    p90: float
    p99: float
    per_token: float
    per_token_p90: float
    moved_share: float
    busiest: float
    busy: float
    replica_hours: float
    preemptions: int

    @property
    def loaded_share(self) -> float:
        """Prompt tokens that came from below the device, of all."""
        return sum(self.tier_shares[1:])


def summarize(result: SimulationResult) -> Summary:
    """The numbers of one simulation."""
    outcomes = result.outcomes
    times = sorted(outcome.ttft for outcome in outcomes)
    between = sorted(outcome.seconds_per_token for outcome in outcomes)
    prompts = sum(outcome.request.prompt_tokens for outcome in outcomes)
    busy = [totals.busy for totals in result.replicas.values()]
    found = sum(outcome.cached_tokens for outcome in outcomes) / prompts
    loaded = [sum(outcome.loaded[i] for outcome in outcomes) / prompts for i in range(3)]
    return Summary(
        name=result.name,
        requests=len(outcomes),
        hit_share=found,
        tier_shares=(found - sum(loaded), loaded[0], loaded[1], loaded[2]),
        expected_share=sum(outcome.expected_cached for outcome in outcomes) / prompts,
        mean=sum(times) / len(times),
        p50=quantile(times, 0.5),
        p90=quantile(times, 0.9),
        p99=quantile(times, 0.99),
        per_token=sum(between) / len(between),
        per_token_p90=quantile(between, 0.9),
        moved_share=result.moved / len(outcomes),
        busiest=max(busy) * len(busy) / sum(busy),
        busy=sum(busy),
        replica_hours=len(busy) * result.seconds / 3600 / len(outcomes) * 1000,
        preemptions=sum(totals.preemptions for totals in result.replicas.values()),
    )


def quantile(ordered: Sequence[float], share: float) -> float:
    """The value that this share of an ordered, non-empty sequence does not exceed."""
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


def rows(results: Iterable[SimulationResult]) -> tuple[list[str], list[list[str]]]:
    """Head and rows of the table."""
    found = [[text(summarize(result)) for _, text in _COLUMNS] for result in results]
    return [name for name, _ in _COLUMNS], found


def table(results: Iterable[SimulationResult]) -> str:
    """All simulations as a Markdown table."""
    head, body = rows(results)
    widths = [max(map(len, column)) for column in zip(head, *body, strict=True)]

    def line(cells: Sequence[str]) -> str:
        first = f" {cells[0]:<{widths[0]}} "
        return "|".join(["", first, *(f" {c:>{w}} " for c, w in zip(cells[1:], widths[1:], strict=True)), ""])

    rule = [":" + "-" * (widths[0] - 1), *("-" * (width - 1) + ":" for width in widths[1:])]
    return "\n".join([line(head), line(rule), *map(line, body)])


def page(results: Sequence[SimulationResult], title: str = "Simulation", about: str = "") -> str:
    """One HTML page: what was simulated, the table, TTFT and hit share as curves. No script, nothing from elsewhere. `about`
    is said above the table."""
    head, body = rows(results)
    cells = "".join(f"<tr>{''.join(f'<td>{html.escape(cell)}</td>' for cell in row)}</tr>" for row in body)
    facts = "; ".join(filter(None, (about, f"{results[0].spec}; {results[0].costs}" if results else "")))
    curves = drawings(results)
    return (
        f"<!doctype html><html lang='en'><meta charset='utf-8'><title>{html.escape(title)}</title><style>{_STYLE}</style>"
        f"<h1>{html.escape(title)}</h1><p class='facts'>{html.escape(facts)}</p>"
        f"<table><tr>{''.join(f'<th>{html.escape(name)}</th>' for name in head)}</tr>{cells}</table>"
        f"{''.join(curves.values())}</html>"
    )


def drawings(results: Sequence[SimulationResult]) -> dict[str, str]:
    """The curves as SVG, by a short name. To stand in a file of its own, each needs the namespace (`as_file`)."""
    names = [result.name for result in results]
    found = {
        "ttft": svg(
            "Requests that had their first token within so many seconds", names, [ttft_curve(o) for o in results]
        ),
        "hits": svg("Share of prompt tokens found, over the trace's minutes", names, [hit_curve(o) for o in results]),
        "waits": svg(
            "Mean seconds to the first token, over the trace's minutes", names, [wait_curve(o) for o in results]
        ),
        "tiers": bars("Share of prompt tokens found, by where", [summarize(one) for one in results]),
    }
    for field, title in _SIZES.items():
        lines = _by_size(results, field)
        if lines:
            found[f"ttft-by-{title}"] = svg(f"Mean seconds to the first token, by {title}", *_means(lines, "mean"))
            found[f"hits-by-{title}"] = svg(f"Share of prompt tokens found, by {title}", *_means(lines, "hit_share"))
    return found


def as_file(drawing: str) -> str:
    """A drawing as a document of its own."""
    return drawing.replace("<svg ", '<svg xmlns="http://www.w3.org/2000/svg" ', 1)


def _by_size(results: Sequence[SimulationResult], field: str) -> dict[str, list[tuple[float, Summary]]]:
    """Simulations that differ in this field alone, by what they have in common; empty if all have the same value."""
    groups: dict[str, list[tuple[float, Summary]]] = {}
    for result in results:
        spec = dataclasses.asdict(result.spec)
        value = float(spec.pop(field))
        differs = {name: spec[name] for name in _SIZES if name != field}
        varied = [name for name in differs if len({getattr(one.spec, name) for one in results}) > 1]
        common = ", ".join([result.policy, *(f"{_SIZES[name]} {differs[name]:,}" for name in varied)])
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
    """Share of requests by seconds to the first token, up to the 99th percentile."""
    times = sorted(outcome.ttft for outcome in result.outcomes)
    shares = [i / _POINTS for i in range(1, int(_POINTS * 0.99) + 1)]
    return [(0.0, 0.0)] + [(quantile(times, share), share) for share in shares]


def hit_curve(result: SimulationResult) -> list[Point]:
    """Share of prompt tokens found, by minute of arrival."""
    return _windows(
        result, lambda many: sum(one.cached_tokens for one in many) / sum(one.request.prompt_tokens for one in many)
    )


def wait_curve(result: SimulationResult) -> list[Point]:
    """Mean seconds to the first token, by minute of arrival."""
    return _windows(result, lambda many: sum(one.ttft for one in many) / len(many))


def _windows(result: SimulationResult, value: Callable[[list[RequestOutcome]], float]) -> list[Point]:
    """`value` of the requests that arrived in each of forty stretches of the trace, by minutes."""
    end = max(outcome.request.arrival for outcome in result.outcomes)
    wide = max(end / _WINDOWS, 1e-9)
    windows: list[list[RequestOutcome]] = [[] for _ in range(_WINDOWS + 1)]
    for outcome in result.outcomes:
        windows[int(outcome.request.arrival / wide)].append(outcome)
    return [((i + 0.5) * wide / 60, value(many)) for i, many in enumerate(windows) if many]


def svg(title: str, names: Sequence[str], curves: Sequence[Sequence[Point]]) -> str:
    """Curves over common axes that begin at 0."""
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
        colour = _COLOURS[i % len(_COLOURS)]
        points = " ".join(map(at, curve))
        parts.append(f"<polyline points='{points}' fill='none' stroke='{colour}' stroke-width='2'/>")
        y = 40 + 18 * i
        parts.append(f"<rect x='{_WIDTH - 310}' y='{y - 9}' width='12' height='4' fill='{colour}'/>")
        parts.append(f"<text x='{_WIDTH - 292}' y='{y}'>{html.escape(name)}</text>")
    return _document(title, _HEIGHT, parts)


def bars(title: str, summaries: Sequence[Summary]) -> str:
    """A bar for each simulation, in pieces: where what it found was."""
    height = 60 + 22 * len(summaries)
    wide = _WIDTH - _LEFT - 330
    parts = [f"<text x='{_LEFT}' y='16' font-weight='600'>{html.escape(title)}</text>"]
    for i, tier in enumerate(_TIERS):
        left = _LEFT + 130 * i
        parts.append(f"<rect x='{left}' y='26' width='12' height='8' fill='{_COLOURS[i]}'/>")
        parts.append(f"<text x='{left + 18}' y='34'>{tier}</text>")
    for row, one in enumerate(summaries):
        y, x = 48 + 22 * row, float(_LEFT)
        for i, share in enumerate(one.tier_shares):
            parts.append(
                f"<rect x='{x:.1f}' y='{y}' width='{max(share, 0) * wide:.1f}' height='16' fill='{_COLOURS[i]}'/>"
            )
            x += max(share, 0) * wide
        parts.append(f"<text x='{x + 8:.1f}' y='{y + 12}'>{one.hit_share:.1%} {html.escape(one.name)}</text>")
    return _document(title, height, parts)


def _document(title: str, height: int, parts: Sequence[str]) -> str:
    return (
        f"<svg viewBox='0 0 {_WIDTH} {height}' width='{_WIDTH}' height='{height}' role='img' "
        f"aria-label='{html.escape(title)}'>{''.join(parts)}</svg>"
    )
