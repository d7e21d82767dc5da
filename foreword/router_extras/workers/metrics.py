"""The metrics of all workers as one page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from prometheus_client.parser import text_string_to_metric_families

_PREFIX: Final = "foreword:router_"
# Metrics of events that every worker sees: their largest value counts, not the sum.
_OF_ALL: Final = (
    "kv_events", "breaker_opened", "replica_deaths", "expected_cached_tokens", "actual_cached_tokens", "overestimated_tokens",
    "underestimated_tokens",
)  # fmt: skip
_SEEN_BY_ALL: Final = frozenset(_PREFIX + name for name in _OF_ALL)
# Gauges of which each worker has a part. The others are about the same replicas and blocks.
_PARTS: Final = frozenset(_PREFIX + name for name in ("queue_length",))
_SINCE: Final = "process_start_time_seconds"


def summed(pages: Sequence[bytes], restarts: Mapping[str, int], workers: Mapping[str, int]) -> bytes:
    """Pages in Prometheus' text format as one: counters and histograms are added up."""
    heads: dict[str, tuple[str, str]] = {}
    values: dict[str, dict[tuple[str, tuple[tuple[str, str], ...]], float]] = {}
    for page in pages:
        for family in text_string_to_metric_families(page.decode()):
            heads.setdefault(family.name, (family.type, family.documentation))
            found = values.setdefault(family.name, {})
            for sample in family.samples:
                key = sample.name, tuple(sorted(sample.labels.items()))
                found[key] = _combined(family.name, family.type, sample.name, found.get(key), sample.value)
    _add(heads, values, "worker_restarts", "counter", "Workers that were started again, by how they ended.", restarts)
    _add(heads, values, "workers", "gauge", "Workers that were asked for, and that have answered.", workers)
    lines: list[str] = []
    for name, (kind, text) in heads.items():
        shown = f"{name}_total" if kind == "counter" else name
        lines += [f"# HELP {shown} {text}", f"# TYPE {shown} {kind}"]
        for (sample_name, labels), value in values[name].items():
            inner = ",".join(f'{key}="{_escaped(one)}"' for key, one in labels)
            lines.append(f"{sample_name}{{{inner}}} {value}" if inner else f"{sample_name} {value}")
    return "\n".join([*lines, ""]).encode()


def _combined(family: str, kind: str, name: str, old: float | None, new: float) -> float:
    if old is None:
        return new
    if name.endswith("_created") or name == _SINCE:
        return min(old, new)
    if family in _SEEN_BY_ALL or (kind == "gauge" and family not in _PARTS and not name.startswith("process_")):
        return max(old, new)
    return old + new


def _add(
    heads: dict[str, tuple[str, str]],
    values: dict[str, dict[tuple[str, tuple[tuple[str, str], ...]], float]],
    name: str,
    kind: str,
    text: str,
    counts: Mapping[str, int],
) -> None:
    heads[_PREFIX + name] = kind, text
    label, suffix = ("reason", "_total") if kind == "counter" else ("state", "")
    values[_PREFIX + name] = {(_PREFIX + name + suffix, ((label, key),)): float(count) for key, count in counts.items()}


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')
