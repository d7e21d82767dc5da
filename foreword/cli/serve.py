"""`foreword serve` and `foreword route`."""

from __future__ import annotations

import typer

from foreword.cli.flags import described, with_config, with_router_config
from foreword.process_config import Config

_LISTENING = ("config", "host", "port", "api-keys", "log-level")
_SERVE = (
    *("device", "dtype", "kv-memory", "max-model-len", "max-num-seqs", "served-model-name"),
    *("tenant-secret", "tool-parser", "prefix-budget", "store"),
)
_ROUTE = (
    *("replica", "replica-file", "replica-dns", "replica-service", "replica-key", "policy", "tokenizer", "max-waiting"),
    *("prefix-file", "admin-key"),
)


def register(app: typer.Typer) -> None:
    """Add the commands."""
    examples = ("serve", "serve Qwen/Qwen3-0.6B --store 'disk:///var/cache/foreword?size=20GiB'")
    app.command(**described(*examples, common=_LISTENING + _SERVE))(with_config(serve))
    example = "route --replica http://127.0.0.1:8001 --replica http://127.0.0.1:8002"
    app.command(**described(example, common=_LISTENING + _ROUTE))(with_router_config(route))


def serve(config: Config) -> None:
    """Serve a model over HTTP with an OpenAI-compatible API."""
    from foreword.server.process import run

    raise typer.Exit(run(config))


def route(config: Config) -> None:
    """Route requests to several servers.

    A request goes to a server that has its prefix cached, unless waiting there costs more time.
    """
    from foreword.router.process import run

    if config.encryption.key_store is None:
        raise typer.Exit(run(config))
    from foreword.store.data_keys import DataKeys

    raise typer.Exit(run(config, DataKeys(config.encryption).current))
