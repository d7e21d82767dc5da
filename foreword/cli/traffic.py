"""`foreword traffic report`."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from foreword.cli.commands import described

if TYPE_CHECKING:
    from foreword.sim.miss_report import CauseSummary, TrafficReport

traffic_app = typer.Typer(help="Look at recorded traffic.", no_args_is_help=True, rich_markup_mode=None)

Recordings = Annotated[
    list[Path], typer.Argument(metavar="RECORDING...", help="Recordings or traces (docs/reference/formats.md).")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]


def register(app: typer.Typer) -> None:
    """Add the commands."""
    app.add_typer(traffic_app, name="traffic")


@traffic_app.callback()
def _group() -> None:
    """Keeps `report` a command of its own while it is the only one."""


@traffic_app.command("report", **described("traffic report recording.jsonl"))
def report(recordings: Recordings, *, as_json: AsJson = False) -> None:
    """Rank the causes of cache misses by recomputed tokens, and estimate what it saves to remove each of them."""
    from foreword.sim.miss_report import traffic_report

    found = traffic_report(recordings)
    if as_json:
        print(json.dumps({**dataclasses.asdict(found), "hit_rate": found.hit_rate}, indent=2))
    else:
        print(_table(found))


def _table(found: TrafficReport) -> str:
    ttft = "" if found.ttft is None else f", mean TTFT {found.ttft:.3f} s"
    lines = [
        f"{found.requests} requests, {found.prompt_tokens:,} prompt tokens, hit rate {found.hit_rate:.1%}{ttft}",
        "",
        f"{'cause':<22}{'requests':>9}{'computed':>13}{'avoidable':>13}{'hit rate':>10}{'TTFT':>9}  where",
        *map(_row, found.causes),
        "",
        "computed: prompt tokens of these requests that were not cached; avoidable: those that an earlier request had",
        "computed. Hit rate and TTFT (mean, seconds) are estimates for this traffic without the cause.",
    ]
    return "\n".join(lines)


def _row(cause: CauseSummary) -> str:
    ttft = "" if cause.ttft is None else f"{cause.ttft:.3f}"
    places = ", ".join(f"{where} ({count})" for where, count in cause.places)
    if cause.capacity is not None:
        places = f"a cache of {cause.capacity:,} tokens keeps 90 % of it"
    numbers = f"{cause.requests:>9}{cause.computed_tokens:>13,}{cause.saved_tokens:>13,}{cause.hit_rate:>10.1%}"
    return f"{cause.cause:<22}{numbers}{ttft:>9}  {places}".rstrip()
