"""Why a recorded traffic missed the cache: causes by recomputed tokens, and what it would save to remove each of them.

A recording with causes (`--record` of a server or router) is counted. In one without them, the blocks tell which tokens were
recomputed although an earlier request had them. Agent sessions contain the texts: their causes are found as a server does
it, for a cache that keeps everything.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any, Final

from foreword.api.misses.causes import MissFinder
from foreword.api.request import GenerateRequest
from foreword.errors import ConfigError
from foreword.sim.trace import TraceRequest, read_lines

_BLOCK: Final = 16
_PLACES: Final = 3
# Share of the lost tokens that a larger cache has to bring back.
_MOST: Final = 0.9


@dataclass(frozen=True, slots=True)
class ExplainedRequest:
    """A request of the recording: what was cached, why the rest was not, and how many tokens that cost."""

    prompt_tokens: int
    cached_tokens: int
    cause: str
    where: str
    tokens_lost: int
    ttft: float | None = None
    distance: int | None = None


@dataclass(slots=True)
class CauseSummary:
    """A cause.

    Attributes:
        computed_tokens: prompt tokens that its requests computed. `saved_tokens`: those that are cached without it.
        hit_rate: of the whole recording without this cause.
        ttft: estimated mean without this cause, in seconds; None if the recording has no times.
        places: the fields that differ most often.
        capacity: of `evicted`: size of a cache, in tokens, that would have kept most of it; None if unknown.
    """

    cause: str
    requests: int = 0
    computed_tokens: int = 0
    saved_tokens: int = 0
    hit_rate: float = 0.0
    ttft: float | None = None
    places: list[tuple[str, int]] = field(default_factory=list)
    capacity: int | None = None


@dataclass(frozen=True, slots=True)
class TrafficReport:
    """All causes, the most expensive first."""

    requests: int
    prompt_tokens: int
    cached_tokens: int
    ttft: float | None
    causes: list[CauseSummary]

    @property
    def hit_rate(self) -> float:
        return self.cached_tokens / max(self.prompt_tokens, 1)


def traffic_report(paths: Iterable[Path]) -> TrafficReport:
    """Raises ConfigError for an invalid recording."""
    requests = [one for path in paths for one in _explained(path)]
    if not requests:
        raise ConfigError("the recording has no requests")
    return _summarize(requests)


def _explained(path: Path) -> Iterator[ExplainedRequest]:
    lines = sorted(read_lines(path, {}), key=lambda line: line[1].arrival)
    seen = _SeenBlocks()
    finder = MissFinder()
    for fields, request in lines:
        if "hash_ids" in fields:
            yield _of_blocks(fields, request, seen)
        else:
            yield _of_text(fields, request, seen, finder)


def _of_blocks(fields: Mapping[str, Any], request: TraceRequest, seen: _SeenBlocks) -> ExplainedRequest:
    common, distance = seen.add(request.ids, request.ids_tokens, str(fields.get("replica", "")))
    possible = min(common, request.prompt_tokens - 1)
    cached = min(_count(fields, "cached_tokens", possible), request.prompt_tokens)
    if isinstance(cause := fields.get("cause"), str):
        where, lost = str(fields.get("where", "")), _count(fields, "tokens_lost", 0)
    else:
        where, lost = "", max(possible - cached, 0)
        cause = ("evicted" if seen.same_replica else "other_replica") if lost >= request.ids_tokens else "new_text"
    ttft = fields.get("ttft")
    return ExplainedRequest(
        request.prompt_tokens,
        cached,
        cause,
        where,
        min(lost, request.prompt_tokens - cached),
        float(ttft) if isinstance(ttft, int | float) else None,
        distance,
    )


def _of_text(
    fields: Mapping[str, Any], request: TraceRequest, seen: _SeenBlocks, finder: MissFinder
) -> ExplainedRequest:
    common, _ = seen.add(_prefix_hashes(request.prompt()), _BLOCK, "")
    cached = min(common, request.prompt_tokens - 1)
    prompt = GenerateRequest("completions", prompts=(str(fields["input"]),), session=request.session)
    miss = finder.explain(finder.begin(prompt), request.prompt_tokens, cached)
    seen.add(_prefix_hashes([*request.prompt(), *request.output()]), _BLOCK, "")
    return ExplainedRequest(request.prompt_tokens, cached, miss.cause, miss.where, miss.tokens_lost)


def _count(fields: Mapping[str, Any], name: str, default: int) -> int:
    value = fields.get(name)
    return max(value, 0) if isinstance(value, int) else default


def _prefix_hashes(tokens: Sequence[int]) -> list[int]:
    """Hashes, one per full block; equal numbers mean equal prefixes."""
    found, before = [], 0
    for start in range(0, len(tokens) - _BLOCK + 1, _BLOCK):
        before = hash((before, *tokens[start : start + _BLOCK]))
        found.append(before)
    return found


class _SeenBlocks:
    """All blocks so far, and how many other blocks were used since."""

    def __init__(self) -> None:
        self._last_use: dict[int, int] = {}
        self._replica: dict[int, str] = {}
        self._used = 0
        self.same_replica = True

    def add(self, ids: Sequence[int], size: int, replica: str) -> tuple[int, int | None]:
        """Tokens of the longest prefix seen before, and the tokens used since its last block was used."""
        depth = next((i for i, one in enumerate(ids) if one not in self._last_use), len(ids))
        last = ids[depth - 1] if depth else None
        distance = None if last is None else self._used - self._last_use[last]
        self.same_replica = last is None or self._replica[last] == replica
        self._used += len(ids) * size
        for one in ids:
            self._last_use[one] = self._used
            self._replica[one] = replica
        return depth * size, distance


def _summarize(requests: Sequence[ExplainedRequest]) -> TrafficReport:
    prompts = sum(one.prompt_tokens for one in requests)
    cached = sum(one.cached_tokens for one in requests)
    times = [one.ttft for one in requests if one.ttft is not None]
    per_token = _seconds_per_token(requests)
    by_cause: defaultdict[str, list[ExplainedRequest]] = defaultdict(list)
    for one in requests:
        by_cause[one.cause].append(one)
    causes = [_cause(name, group, prompts, cached) for name, group in by_cause.items()]
    for cause in causes:
        if times and per_token is not None:
            cause.ttft = fmean(times) - per_token * cause.saved_tokens / len(requests)
    causes.sort(key=lambda one: (-one.saved_tokens, -one.computed_tokens))
    return TrafficReport(len(requests), prompts, cached, fmean(times) if times else None, causes)


def _cause(name: str, group: Sequence[ExplainedRequest], prompts: int, cached: int) -> CauseSummary:
    saved = sum(one.tokens_lost for one in group)
    places = Counter(one.where for one in group if one.where)
    return CauseSummary(
        name,
        len(group),
        sum(one.prompt_tokens - one.cached_tokens for one in group),
        saved,
        (cached + saved) / max(prompts, 1),
        places=places.most_common(_PLACES),
        capacity=_capacity(group) if name == "evicted" else None,
    )


def _capacity(group: Sequence[ExplainedRequest]) -> int | None:
    """The smallest cache that holds most of the lost tokens: everything used since, whether again or not, fits in it."""
    known = sorted((one.distance, one.tokens_lost) for one in group if one.distance is not None)
    wanted = _MOST * sum(lost for _, lost in known)
    for distance, lost in known:
        wanted -= lost
        if wanted <= 0:
            return distance
    return None


def _seconds_per_token(requests: Sequence[ExplainedRequest]) -> float | None:
    """Least squares of TTFT over computed tokens; never negative."""
    points = [(one.prompt_tokens - one.cached_tokens, one.ttft) for one in requests if one.ttft is not None]
    if len(points) < 2:
        return None
    x, y = fmean(a for a, _ in points), fmean(b for _, b in points)
    spread = sum((a - x) ** 2 for a, _ in points)
    return max(sum((a - x) * (b - y) for a, b in points) / spread, 0.0) if spread else None
