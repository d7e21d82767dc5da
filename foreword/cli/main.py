"""The `foreword` command. torch, transformers and the web frameworks are imported by the commands that need them."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from foreword import __version__
from foreword.cli import audit, conform, demo, doctor, prefix, serve, simulate, store, traffic
from foreword.errors import ForewordError

app = typer.Typer(
    name="foreword",
    help="A KV cache for LLM serving: offload, prefix-aware routing, named prefixes, and a small serving engine.",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
for _group in (serve, doctor, prefix, demo, store, simulate, traffic, conform, audit):
    _group.register(app)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"foreword {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    pass


def main() -> None:
    """Run the command. Exit status: 0, 2 for an error of the caller, 1 for any other error."""
    try:
        app()
    except ForewordError as error:
        print(f"foreword: {error.message}", file=sys.stderr)
        sys.exit(1 if error.fault == "server" else 2)


if __name__ == "__main__":
    main()
