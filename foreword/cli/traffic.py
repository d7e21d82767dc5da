"""`foreword traffic report` and `foreword traffic clients`."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from foreword.cli.commands import described

if TYPE_CHECKING:
    from foreword.sim.client_report import ClientHits
    from foreword.sim.miss_report import CauseSummary, TrafficReport

traffic_app = typer.Typer(help="Look at recorded traffic.", no_args_is_help=True, rich_markup_mode=None)

Recordings = Annotated[
    list[Path], typer.Argument(metavar="RECORDING...", help="Recordings or traces (docs/reference/formats.md).")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]


def register(app: typer.Typer) -> None:
    """Add the commands."""
    app.add_typer(traffic_app, name="traffic")


@traffic_app.command("report", **described("traffic report recording.jsonl"))
def report(recordings: Recordings, *, as_json: AsJson = False) -> None:
    """Rank the causes of cache misses by recomputed tokens, and estimate what it saves to remove each of them."""
    from foreword.sim.miss_report import traffic_report

    found = traffic_report(recordings)
    if as_json:
        print(json.dumps({**dataclasses.asdict(found), "hit_rate": found.hit_rate}, indent=2))
    else:
        print(_table(found))


@traffic_app.command("clients", **described("traffic clients requests.jsonl"))
def clients(
    recordings: Annotated[
        list[Path], typer.Argument(metavar="RECORDING...", help="Whole requests (docs/reference/formats.md).")
    ],
    *,
    tokenizer: Annotated[
        str | None, typer.Option(help="Folder or hub name of the tokenizer; by default that of the built-in model.")
    ] = None,
    template_order: Annotated[list[str] | None, typer.Option(help="As for a server. May be repeated.")] = None,
    volatile_lines: Annotated[
        list[str] | None, typer.Option(help="As for a server; by default `profiles`. May be repeated.")
    ] = None,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print a table in Markdown.")] = False,
    as_json: AsJson = False,
) -> None:
    """Show what another order of prompts would give each client: the cached share of a next turn and of a new session."""
    from foreword.engine.model import embedded_model
    from foreword.prompt_order import PromptOrder
    from foreword.sim.client_report import client_report
    from foreword.tokens.tokenizer import Tokenizer

    order = PromptOrder.parse(template_order or (), ("profiles",) if volatile_lines is None else volatile_lines)
    found = client_report(recordings, Tokenizer.load(tokenizer or str(embedded_model())), order)
    if as_json:
        print(json.dumps([dataclasses.asdict(one) for one in found], indent=2))
    else:
        print(clients_markdown(found) if markdown else _clients_table(found))


def clients_markdown(found: Sequence[ClientHits]) -> str:
    """A row for each client."""
    head = "| Client | prompt tokens | next turn | new session | next turn, ordered | new session, ordered |"
    rows = ["| " + " | ".join((one.client, f"{one.prompt_tokens:,}", *_shares(one))) + " |" for one in found]
    return "\n".join([head, "|---|---|---|---|---|---|", *rows])


def _clients_table(found: Sequence[ClientHits]) -> str:
    lines = [f"{'client':<20}{'tokens':>8}{'next turn':>11}{'new session':>13}{'ordered: next':>15}{'new session':>13}"]
    for one in found:
        now, new, then, after = _shares(one)
        lines.append(f"{one.client:<20}{one.prompt_tokens:>8,}{now:>11}{new:>13}{then:>15}{after:>13}")
    lines += ["", *(f"{one.client}, a new session: {one.where}: {one.advice}" for one in found if one.where)]
    return "\n".join(lines).rstrip()


def _shares(one: ClientHits) -> tuple[str, ...]:
    shares = (one.next_turn, one.new_session, one.next_turn_ordered, one.new_session_ordered)
    return tuple("-" if share is None else f"{share:.1%}" for share in shares)


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
