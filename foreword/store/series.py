"""Series of metrics: a counter is declared once, with its text, unit and names, as a field of the class that has it. Servers,
vLLM, SGLang, `foreword explain`, `foreword top` and docs/reference/metrics.md read these declarations."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import Field, dataclass, field, fields, replace
from functools import cache
from typing import Any, Final, Literal

UNITS: Final = (
    *("blocks", "bytes", "calls", "distance", "hits", "loads", "lookups", "prefixes", "prompts", "requests"),
    *("seconds", "sides", "tokens"),
)


@dataclass(frozen=True, slots=True)
class Series:
    """A counter or gauge, the same for all that show it. Raises ValueError for one that cannot be shown.

    Attributes:
        text: what is counted, a sentence: the help of the metrics.
        server: name of a Foreword server's metric after `foreword:`; None if only a connector counts it. `engine`: after
            `vllm:foreword_` and `sglang:foreword_`.
        by: a label; "" for one number. `values`: its values that are shown from the start.
        summed: engines show the sum over the values of the label.
        field: the counter's name in its class.
    """

    text: str
    unit: str
    server: str | None
    engine: str
    kind: Literal["counter", "gauge"] = "counter"
    by: str = ""
    values: Sequence[str] = ()
    summed: bool = False
    field: str = ""

    def __post_init__(self) -> None:
        named = (self.server is None or self.server.isidentifier()) and self.engine.isidentifier()
        if not (named and self.text.endswith(".") and self.unit in UNITS and self.kind in ("counter", "gauge")):
            raise ValueError(f"a series has a sentence, a unit, a kind and its names: {self}")

    def labels(self, *, engine: bool) -> tuple[str, ...]:
        return () if not self.by or (engine and self.summed) else (self.by,)

    def amounts(self, counters: object, *, engine: bool) -> dict[tuple[str, ...], float]:
        """By the values of its labels; a server shows those that were not counted yet, too."""
        found = getattr(counters, self.field)
        if not self.by:
            return {(): found}
        counts = dict(found)  # at once: another thread may add a value
        if engine and self.summed:
            return {(): sum(counts.values())}
        if not engine:
            counts = {**dict.fromkeys(self.values, 0), **counts}
        return {(str(value),): count for value, count in counts.items()}


def counted(text: str, unit: str, server: str | None, engine: str = "", **more: Any) -> Any:
    """A field that counts. `engine` is `server` without its first word if it is not given."""
    series = Series(text, unit, server, engine or (server or "").partition("_")[2], **more)
    return field(metadata={"series": series}, **({"default_factory": Counter} if series.by else {"default": 0}))


@cache
def series_of(counters: type) -> tuple[Series, ...]:
    """The series of a class. Raises ValueError for a field that no series describes: no reader would have it."""
    given = {one.name: one.metadata.get("series", one) for one in fields(counters)}
    if unsaid := [name for name, series in given.items() if isinstance(series, Field)]:
        raise ValueError(f"{counters.__name__} counts what no series describes: {', '.join(unsaid)}")
    return tuple(replace(series, field=name) for name, series in given.items() if series is not None)
