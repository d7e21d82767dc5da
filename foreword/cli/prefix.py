"""`foreword prefix`: named prefixes of a running server."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from foreword.cli.commands import described
from foreword.cli.server_client import call_server, plural
from foreword.config import read_text
from foreword.errors import ConfigError

prefix_app = typer.Typer(help="Named prefixes of a running server.", no_args_is_help=True, rich_markup_mode=None)

ServerOption = Annotated[str, typer.Option("--server", help="URL of the server.")]
KeyOption = Annotated[str | None, typer.Option("--api-key", help="API key, if the server requires one.")]
PublicOption = Annotated[
    bool,
    typer.Option("--public", help="Of the prefixes that all tenants share; to change them takes the operator's key."),
]
PrefixName = Annotated[str, typer.Argument(metavar="NAME", help="Name of the prefix.")]
DEFAULT_SERVER = "http://127.0.0.1:8000"


def register(app: typer.Typer) -> None:
    """Add the commands."""
    app.add_typer(prefix_app, name="prefix")


@prefix_app.command("add", **described("prefix add manual --file manual.md"))
def prefix_add(
    name: PrefixName,
    *,
    text: Annotated[str | None, typer.Option("--text", help="The prefix as text.")] = None,
    file: Annotated[Path | None, typer.Option("--file", help="File with the prefix; - reads standard input.")] = None,
    messages: Annotated[Path | None, typer.Option("--messages", help="JSON file with a list of chat messages.")] = None,
    replace: Annotated[bool, typer.Option("--replace", help="Make a new version if the name exists.")] = False,
    public: PublicOption = False,
    server: ServerOption = DEFAULT_SERVER,
    api_key: KeyOption = None,
) -> None:
    """Compute a prefix on the server, pin its blocks and give it a name."""
    body = _prefix_body(text, file, messages)
    made = call_server(server, api_key, "POST", _path(public), {"name": name, "replace": replace, **body})
    print(_summary(made))


@prefix_app.command("list", **described("prefix list --server http://127.0.0.1:8000"))
def prefix_list(
    *, public: PublicOption = False, server: ServerOption = DEFAULT_SERVER, api_key: KeyOption = None
) -> None:
    """List the named prefixes with their size and use."""
    found = call_server(server, api_key, "GET", _path(public))
    for prefix in found["data"]:
        print(_summary(prefix))
    budget = found["budget_bytes"]
    limit = "no budget: the stores set none" if budget is None else f"of a budget of {budget}"
    print(f"{found['pinned_bytes']} bytes pinned, {limit}")


@prefix_app.command("show", **described("prefix show manual"))
def prefix_show(
    name: PrefixName, *, public: PublicOption = False, server: ServerOption = DEFAULT_SERVER, api_key: KeyOption = None
) -> None:
    """Show one prefix with its content, as JSON."""
    print(json.dumps(call_server(server, api_key, "GET", _path(public, name)), indent=2, ensure_ascii=False))


@prefix_app.command("remove", **described("prefix remove manual"))
def prefix_remove(
    name: PrefixName, *, public: PublicOption = False, server: ServerOption = DEFAULT_SERVER, api_key: KeyOption = None
) -> None:
    """Remove a prefix and unpin its blocks."""
    removed = call_server(server, api_key, "DELETE", _path(public, name))
    print(f"removed {removed['id']} (version {removed['version']})")


def _prefix_body(text: str | None, file: Path | None, messages: Path | None) -> dict[str, Any]:
    if sum(source is not None for source in (text, file, messages)) != 1:
        raise ConfigError("give the prefix with exactly one of --text, --file and --messages")
    if text is not None:
        return {"content": text}
    if file is not None:
        return {"content": _read(file)}
    assert messages is not None
    try:
        return {"messages": json.loads(_read(messages))}
    except json.JSONDecodeError as error:
        raise ConfigError(f"{messages} is not valid JSON: {error}") from error


def _read(path: Path) -> str:
    return sys.stdin.read() if str(path) == "-" else read_text(path, "the prefix from")


def _path(public: bool, *names: str) -> str:
    from urllib.parse import quote

    base = "/v1/public/prefixes" if public else "/v1/prefixes"
    return "/".join([base, *(quote(name, safe="") for name in names)])


def _summary(prefix: Mapping[str, Any]) -> str:
    size = f"{prefix['num_tokens']} tokens, {prefix['bytes']} bytes"
    used = f"{plural(prefix['uses'], 'use')}, {prefix['hit_tokens']} cached tokens"
    return f"{prefix['name']}  version {prefix['version']}  {prefix['kind']}  {size}  {used}"
