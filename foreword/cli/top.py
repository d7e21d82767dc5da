"""`foreword top`: what servers do right now, in a terminal, from what they publish at `/metrics`."""

from __future__ import annotations

import asyncio
import json
import math
import os
import sys
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from foreword.cli.commands import described
from foreword.cli.server_client import check_url
from foreword.config_layers import read_secret
from foreword.errors import ConfigError, reason_of
from foreword.observability.scrape import COUNTED, Kind, Period, Scrape, metric
from foreword.offload.counters import OffloadStatus
from foreword.store.tier_counters import TierCounters

if TYPE_CHECKING:
    import aiohttp
    from rich.console import Group

_MOST_SERVERS: Final = 64
_MOST_BYTES: Final = 8 << 20
_ANSWER_SECONDS: Final = 5.0
# Scrapes that are kept of each server, evenly over the period that is shown.
_KEPT: Final = 4
_NAMES: Final[dict[Kind, str]] = {"vllm": "vLLM", "sglang": "SGLang", "server": "Foreword", "router": "router"}
# Names of tiers' metrics, by the kind of a server.
_TIERS: Final = {
    kind: {
        name: metric(kind, TierCounters, name)
        for name in ("read_bytes", "written_bytes", "hit_blocks", "missed_blocks", "bad")
    }
    for kind in COUNTED
}
_DROPPED: Final = tuple(metric(kind, OffloadStatus, "dropped") for kind in COUNTED)
# States of tiers that are problems: rank, 0 for the worst, and a sentence.
_BAD_STATES: Final = {
    "off": (1, "is skipped after repeated errors"),
    "suspended": (1, "is not read: an audit found a wrong block in it"),
    "full": (4, "has no room for blocks"),
    "read_only": (4, "takes no blocks"),
}


@dataclass(frozen=True, slots=True)
class ServerRow:
    """A server: requests now, and of the period tokens per second, medians in seconds and shares. None: not published."""

    url: str
    kind: str
    running: float
    waiting: float
    prompt_tokens_per_s: float | None
    output_tokens_per_s: float | None
    ttft_p50: float | None
    itl_p50: float | None
    cached_share: float | None
    kv_used_share: float | None


@dataclass(frozen=True, slots=True)
class TierRow:
    """A tier of a server: its state, and of the period bytes per second, the share of blocks found and damaged blocks."""

    url: str
    tier: str
    state: str
    read_bytes_per_s: float | None
    written_bytes_per_s: float | None
    found_share: float | None
    damaged: float
    bytes: float | None
    budget_bytes: float | None


@dataclass(frozen=True, slots=True)
class ReplicaRow:
    """A replica behind a router, as the router sees it."""

    url: str
    replica: str
    up: bool
    in_flight: float
    waiting: float
    ttft_p50: float | None
    cached_share: float | None
    failed: float


@dataclass(slots=True)
class View:
    """All that is shown.

    Attributes:
        problems: sentences, the worst first.
    """

    servers: list[ServerRow] = field(default_factory=list)
    tiers: list[TierRow] = field(default_factory=list)
    replicas: list[ReplicaRow] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


class WatchedServer:
    """A server whose metrics are read again and again.

    Attributes:
        problem: why the last scrape brought nothing; "" if it brought something.
    """

    def __init__(self, url: str, window: float) -> None:
        self.url = url.rstrip("/").removesuffix("/v1")
        self.problem = "not asked yet"
        self._window = window
        self._scrapes: deque[tuple[float, Scrape]] = deque()
        self._latest: tuple[float, Scrape] | None = None

    async def scrape(self, session: aiohttp.ClientSession) -> None:
        """Read the metrics once."""
        import aiohttp

        try:
            async with session.get(f"{self.url}/metrics") as answer:
                if not answer.ok:
                    self.problem = f"/metrics answers with HTTP {answer.status}"
                    return
                body = bytearray()
                async for part in answer.content.iter_any():
                    body += part
                    if len(body) > _MOST_BYTES:
                        self.problem = f"its metrics have more than {_MOST_BYTES >> 20} MiB"
                        return
            found = await asyncio.to_thread(Scrape, body.decode(errors="replace"))
        except TimeoutError:
            self.problem = f"no answer within {_ANSWER_SECONDS:.0f} s"
        except (aiohttp.ClientError, OSError) as error:
            # The system's words: aiohttp's have an address as Python prints it.
            number = getattr(error, "errno", None) or 0
            self.problem = f"no connection: {os.strerror(number) if number > 0 else reason_of(error)}"
        except ValueError:
            self.problem = "its /metrics is not Prometheus' text format"
        else:
            self.problem = "" if found.kind else "it is no vLLM, SGLang, Foreword server or router"
            if found.kind:
                self.add(time.monotonic(), found)

    def add(self, now: float, found: Scrape) -> None:
        """Remember a scrape. Those of an earlier process of the server are forgotten."""
        started = "process_start_time_seconds"
        if self._latest and self._latest[1].total(started) != found.total(started):
            self._scrapes.clear()
        self._latest = (now, found)
        if not self._scrapes or now - self._scrapes[-1][0] >= self._window / _KEPT:
            self._scrapes.append((now, found))
        # One that is older than the period stays: it is what the period begins with.
        while len(self._scrapes) > 1 and now - self._scrapes[1][0] >= self._window:
            self._scrapes.popleft()

    def period(self) -> Period | None:
        """Growth within the window; with one scrape, since the process started."""
        if self.problem or self._latest is None:
            return None
        now, latest = self._latest
        begun, first = self._scrapes[0]
        return Period(first, latest, now - begun) if first is not latest else Period(None, latest, None)


def _share(part: float, whole: float) -> float | None:
    return min(part / whole, 1.0) if whole > 0 else None


def _server_row(url: str, kind: Kind, period: Period) -> ServerRow:
    now = period.after
    if kind == "router":
        asked = period.grown("foreword:router_usage_prompt_tokens_total")
        return ServerRow(
            url,
            _NAMES[kind],
            now.total("foreword:router_in_flight"),
            now.total("foreword:router_queue_length"),
            period.rate("foreword:router_usage_prompt_tokens_total"),
            None,
            period.quantile(0.5, "foreword:router_time_to_first_token_seconds"),
            period.quantile(0.5, "foreword:router_time_per_output_token_seconds"),
            _share(period.grown("foreword:router_usage_cached_tokens_total"), asked),
            None,
        )
    if kind == "sglang":
        cached, prompt = period.grown("sglang:cached_tokens_total"), period.grown("sglang:prompt_tokens_total")
        running, waiting, usage = "sglang:num_running_reqs", "sglang:num_queue_reqs", "sglang:token_usage"
        engine = "sglang"
    else:
        # vLLM counts a prompt token that the connector brought as missed on the device, and as an external hit.
        hits = ("vllm:prefix_cache_hits_total", "vllm:external_prefix_cache_hits_total")
        cached, prompt = sum(map(period.grown, hits)), period.grown("vllm:prefix_cache_queries_total")
        running, waiting, usage = "vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc"
        engine = "vllm"
    return ServerRow(
        url,
        _NAMES[kind],
        now.total(running),
        now.total(waiting),
        period.rate(f"{engine}:prompt_tokens_total"),
        period.rate(f"{engine}:generation_tokens_total"),
        period.quantile(0.5, f"{engine}:time_to_first_token_seconds"),
        period.quantile(0.5, f"{engine}:inter_token_latency_seconds"),
        _share(cached, prompt),
        now.total(usage) if usage in now else None,
    )


def _tier_rows(url: str, period: Period) -> Iterator[TierRow]:
    now, states = period.after, period.after.tier_states()
    for names in _TIERS.values():
        for tier in sorted({*now.by("tier", names["hit_blocks"]), *now.by("tier", names["written_bytes"])}):
            hits = period.grown(names["hit_blocks"], tier=tier)
            bad = sorted(states.get(tier, set()) - {"ok"}, key=lambda state: _BAD_STATES.get(state, (9, ""))[0])
            yield TierRow(
                url,
                tier,
                bad[0] if bad else "ok",
                period.rate(names["read_bytes"], tier=tier),
                period.rate(names["written_bytes"], tier=tier),
                _share(hits, hits + period.grown(names["missed_blocks"], tier=tier)),
                period.grown(names["bad"], tier=tier),
                now.by("tier", "foreword:tier_bytes").get(tier),
                now.by("tier", "foreword:tier_budget_bytes").get(tier),
            )


def _replica_rows(url: str, period: Period) -> Iterator[ReplicaRow]:
    now = period.after
    for replica, up in sorted(now.by("replica", "foreword:router_replica_up").items()):
        asked = period.grown("foreword:router_usage_prompt_tokens_total", replica=replica)
        cached = period.grown("foreword:router_usage_cached_tokens_total", replica=replica)
        yield ReplicaRow(
            url,
            replica,
            up > 0,
            now.total("foreword:router_in_flight", replica=replica),
            now.total("foreword:router_waiting", replica=replica),
            period.quantile(0.5, "foreword:router_time_to_first_token_seconds", replica=replica),
            _share(cached, asked),
            period.grown("foreword:router_failures_total", replica=replica),
        )


def view_of(watched: Sequence[WatchedServer]) -> View:
    """Tables of the last scrapes of the servers."""
    view, problems = View(), list[tuple[int, str]]()
    for server in watched:
        period = server.period()
        kind = period.after.kind if period else None
        if period is None or kind is None:
            problems.append((0, f"{server.url}: {server.problem}"))
            continue
        view.servers.append(_server_row(server.url, kind, period))
        tiers, replicas = list(_tier_rows(server.url, period)), list(_replica_rows(server.url, period))
        view.tiers += tiers
        view.replicas += replicas
        if period.after.total("vllm:foreword_degraded_total") > 0:
            stopped = "the connector stopped after an error: no KV is saved or loaded until vLLM restarts"
            problems.append((1, f"{server.url}: {stopped}"))
        problems += [
            (2, f"{server.url}: the replica {row.replica} takes no requests") for row in replicas if not row.up
        ]
        for tier in tiers:
            if tier.damaged > 0:
                problems.append(
                    (3, f"{server.url}: {tier.damaged:.0f} damaged blocks in the tier {tier.tier}, none used")
                )
            if tier.state in _BAD_STATES:
                rank, meaning = _BAD_STATES[tier.state]
                problems.append((rank, f"{server.url}: the tier {tier.tier} {meaning}"))
        if (dropped := sum(map(period.grown, _DROPPED))) > 0:
            problems.append((5, f"{server.url}: {dropped:.0f} blocks were not saved, the write queue was full"))
    view.problems = [text for _, text in sorted(problems, key=lambda one: one[0])]
    return view


def _count(value: float | None) -> str:
    if value is None:
        return "-"
    for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1e4)):
        if value >= size:
            return f"{value / (1e3 if unit == 'k' else size):.1f}{unit}"
    return f"{value:.0f}"


def _bytes(value: float | None) -> str:
    if value is None or value < 0:
        return "-"
    units = iter(("B", "KiB", "MiB", "GiB", "TiB"))
    unit = next(units)
    while value >= 1024 and unit != "TiB":
        value, unit = value / 1024, next(units)
    return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"


def _seconds(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value * 1e3:.0f} ms" if value < 1 else f"{value:.1f} s"


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value * 100:.0f} %"


def _rendered(view: View, period: str) -> Group:
    """The view as tables."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    parts: list[Any] = [
        Text(text, style="bold red" if number == 0 else "red") for number, text in enumerate(view.problems)
    ] or [Text("no problem found", style="green")]

    def table(names: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        made = Table(box=None, pad_edge=False, header_style="bold")
        for number, name in enumerate(names):
            made.add_column(name, justify="left" if number < 2 else "right", overflow="fold")
        for row in rows:
            # Names come from other processes: nothing in them is markup.
            made.add_row(*map(Text, row))
        parts.extend((Text(""), made))

    if view.servers:
        table(
            (
                *("server", "kind", "running", "waiting", "prompt tok/s", "output tok/s"),
                *("TTFT p50", "ITL p50", "cached", "KV used"),
            ),
            [
                (
                    *(row.url, row.kind, _count(row.running), _count(row.waiting)),
                    *(_count(row.prompt_tokens_per_s), _count(row.output_tokens_per_s)),
                    *(_seconds(row.ttft_p50), _seconds(row.itl_p50), _percent(row.cached_share), _percent(row.kv_used_share)),
                )
                for row in view.servers
            ],
        )  # fmt: skip
    if view.tiers:
        table(
            ("server", "tier", "state", "loaded/s", "saved/s", "found", "used", "of"),
            [
                (
                    *(row.url, row.tier, row.state, _bytes(row.read_bytes_per_s), _bytes(row.written_bytes_per_s)),
                    *(_percent(row.found_share), _bytes(row.bytes), _bytes(row.budget_bytes or None)),
                )
                for row in view.tiers
            ],
        )
    if view.replicas:
        table(
            ("router", "replica", "state", "in flight", "waiting", "TTFT p50", "cached", "failed"),
            [
                (
                    *(row.url, row.replica, "up" if row.up else "down", _count(row.in_flight), _count(row.waiting)),
                    *(_seconds(row.ttft_p50), _percent(row.cached_share), _count(row.failed)),
                )
                for row in view.replicas
            ],
        )
    parts.append(Text(f"\nrates, medians and shares: {period}", style="dim"))
    return Group(*parts)


def _finite(value: Any) -> Any:
    """The value of a document in JSON, with None for numbers that JSON does not have."""
    if isinstance(value, dict):
        return {name: _finite(one) for name, one in value.items()}
    if isinstance(value, list):
        return [_finite(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


async def _watch(
    watched: Sequence[WatchedServer],
    headers: Mapping[str, str],
    interval: float,
    window: float,
    once: bool,
    as_json: bool,
) -> View:
    import aiohttp

    timeout = aiohttp.ClientTimeout(total=_ANSWER_SECONDS)
    async with aiohttp.ClientSession(headers=headers, timeout=timeout) as session:

        async def scraped() -> View:
            await asyncio.gather(*(server.scrape(session) for server in watched))
            return view_of(watched)

        view = await scraped()
        if once or as_json:
            # Rates need a period.
            await asyncio.sleep(interval)
            view = await scraped()
            if as_json:
                print(json.dumps(_finite(asdict(view)), indent=2, allow_nan=False))
            else:
                from rich.console import Console

                Console().print(_rendered(view, f"of the last {interval:g} s"))
            return view
        from rich.live import Live

        with Live(_rendered(view, "since each process started"), screen=True, auto_refresh=False) as live:
            while True:
                await asyncio.sleep(interval)
                view = await scraped()
                live.update(_rendered(view, f"of the last {window:g} s, or since this command started"), refresh=True)


def top(
    urls: Annotated[
        list[str] | None, typer.Argument(metavar="[URL]...", help="Servers: vLLM, SGLang, Foreword servers, routers.")
    ] = None,
    *,
    interval: Annotated[float, typer.Option("--interval", min=0.2, help="Seconds between two looks.")] = 2.0,
    window: Annotated[float, typer.Option("--window", min=1, help="Seconds that rates and medians are of.")] = 60.0,
    once: Annotated[bool, typer.Option("--once", help="Print the tables once, and exit.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, once.")] = False,
    api_key: Annotated[str | None, typer.Option("--api-key", help="API key, if the server requires one.")] = None,
) -> None:
    """Show what servers do right now: load, TTFT, tokens from the cache, and the state of each tier and replica.

    Nothing is changed, and nothing but `/metrics` is read. With --once and --json the status is 1 if there is a problem.
    """
    given = urls or ["http://127.0.0.1:8000"]
    if len(given) > _MOST_SERVERS:
        raise ConfigError(f"at most {_MOST_SERVERS} servers; a router's URL shows all replicas behind it")
    for url in given:
        check_url(url)
    headers = {"authorization": f"Bearer {read_secret(api_key, '--api-key')}"} if api_key else {}
    watched = [WatchedServer(url, window) for url in given]
    once = once or not sys.stdout.isatty()
    try:
        view = asyncio.run(_watch(watched, headers, interval, window, once, as_json))
    except KeyboardInterrupt:
        return
    raise typer.Exit(1 if view.problems else 0)


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("top", **described("top http://gpu-1:8000 http://gpu-2:8000", "top http://router:8080 --once"))(top)
