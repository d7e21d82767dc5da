"""`foreword serve` and `foreword route`."""

from __future__ import annotations

import typer

from foreword.cli.flags import GroupedCommand, with_config, with_router_config
from foreword.config import Config


def register(app: typer.Typer) -> None:
    """Add the commands."""
    app.command(cls=GroupedCommand)(with_config(serve))
    app.command(cls=GroupedCommand)(with_router_config(route))


def serve(config: Config) -> None:
    """Serve a model over HTTP with an OpenAI-compatible API."""
    from foreword.server.process import run

    raise typer.Exit(run(config))


def route(config: Config) -> None:
    """Route requests to several servers.

    A request goes to a server that has its prefix cached, unless waiting there costs more time.
    """
    from foreword.router.process import run

    raise typer.Exit(run(config))
