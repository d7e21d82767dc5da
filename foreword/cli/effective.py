"""`foreword config`: the configuration that holds, and where each value comes from."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Annotated, Any

import typer

from foreword.cli.commands import described
from foreword.cli.flags import ConfigFlag, GivenConfig, router_flags, server_flags, with_given
from foreword.store.redact import redacted

_HIDDEN = "(not shown)"
# Keys that are secret for the passwords that their URLs may have.
_URLS = {("store", "urls"), ("encryption", "key_store")}


def register(app: typer.Typer) -> None:
    """Add the commands."""
    group = typer.Typer(
        no_args_is_help=True, help="Print the configuration that holds, and where each value comes from."
    )
    for known, command in ((server_flags(), serve), (router_flags(), route)):
        example = f"config {command.__name__} --config foreword.toml"
        group.command(command.__name__, **described(example, common=("config", "all", "as-json")))(
            with_given(command, known)
        )
    app.add_typer(group, name="config")


def serve(
    found: GivenConfig,
    *,
    show_all: Annotated[bool, typer.Option("--all", help="Also print the defaults.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Print what `foreword serve` would run with: the same arguments, environment and file. Nothing is started.

    Secrets are not shown, nor passwords in URLs. Status 2 for a configuration that `foreword serve` refuses.
    """
    _print(found, server_flags(), show_all=show_all, as_json=as_json)


def route(
    found: GivenConfig,
    *,
    show_all: Annotated[bool, typer.Option("--all", help="Also print the defaults.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Print what `foreword route` would run with: the same arguments, environment and file. Nothing is started.

    Secrets are not shown, nor passwords in URLs. Status 2 for a configuration that `foreword route` refuses.
    """
    from foreword.router.process import check

    known = router_flags()
    check(found.config({(flag.section, flag.key) for flag in known}))
    _print(found, known, show_all=show_all, as_json=as_json)


def _print(found: GivenConfig, known: Sequence[ConfigFlag], *, show_all: bool, as_json: bool) -> None:
    rows = list(_rows(found, known))
    shown = [row for row in rows if show_all or row[2] != "default"]
    if as_json:
        print(json.dumps({key: {"value": value, "from": source} for key, value, source in shown}, indent=1))
        return
    cells = [(key, value if isinstance(value, str) else json.dumps(value), source) for key, value, source in shown]
    widths = [max((len(row[column]) for row in cells), default=0) for column in (0, 1)]
    for key, value, source in cells:
        print(f"{key:{widths[0]}}  {value:{widths[1]}}  {source}")
    if left := len(rows) - len(shown):
        print(f"{left} other keys have their defaults (--all)")


def _rows(found: GivenConfig, known: Sequence[ConfigFlag]) -> Iterator[tuple[str, Any, str]]:
    """Name, value and place of each key that the command reads. Raises ConfigError."""
    merged = found.config({(flag.section, flag.key) for flag in known})
    for flag in known:
        source, name = found.source(flag), f"{flag.section}.{flag.key}"
        if flag.file_of:
            if source:
                yield name, str(found.value(flag)), source
            continue
        value = getattr(getattr(merged, flag.section), flag.key)
        if flag.secret and source:
            # A secret that is in a file is in the row of the file.
            value = [_shown(flag, one) for one in value] if isinstance(value, tuple) else _shown(flag, value)
        elif flag.secret and value:
            continue
        yield name, _without_passwords(value), source or "default"


def _without_passwords(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_without_passwords(one) for one in value]
    return redacted(value) if isinstance(value, str) and "://" in value else value


def _shown(flag: ConfigFlag, text: str) -> str:
    """A URL without its password and options that may be secret; nothing of any other secret."""
    return redacted(text) if (flag.section, flag.key) in _URLS else _HIDDEN
