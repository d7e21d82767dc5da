"""`foreword route`."""

from __future__ import annotations

import typer

from foreword.cli.commands import described
from foreword.cli.flags import LISTENING, with_router_config
from foreword.configuration import Config

_COMMON = (
    *("replica", "replica-file", "replica-dns", "replica-service", "replica-key", "policy", "tokenizer", "max-waiting"),
    *("prefix-file", "admin-key"),
)


def register(app: typer.Typer) -> None:
    """Add the command."""
    example = "route --replica http://127.0.0.1:8001 --replica http://127.0.0.1:8002"
    app.command(**described(example, common=LISTENING + _COMMON))(with_router_config(route))


def route(config: Config) -> None:
    """Route requests to several servers.

    A request goes to a server that has its prefix cached, unless waiting there costs more time.
    """
    from foreword.router.process import run

    if config.encryption.key_store is None:
        raise typer.Exit(run(config))
    from foreword.store.store_keys import encryption

    raise typer.Exit(run(config, encryption().shared(config.encryption).current))
