"""`foreword serve`."""

from __future__ import annotations

import typer

from foreword.cli.commands import described
from foreword.cli.flags import LISTENING, with_config
from foreword.configuration import Config

_COMMON = (
    *("device", "dtype", "kv-memory", "max-model-len", "max-num-seqs", "served-model-name"),
    *("tenant-secret", "tool-parser", "prefix-budget", "store"),
)


def register(app: typer.Typer) -> None:
    """Add the command."""
    examples = ("serve", "serve Qwen/Qwen3-0.6B --store 'disk:///var/cache/foreword?size=20GiB'")
    app.command(**described(*examples, common=LISTENING + _COMMON))(with_config(serve))


def serve(config: Config) -> None:
    """Serve a model over HTTP with an OpenAI-compatible API."""
    from foreword.server.process import run

    raise typer.Exit(run(config))
