"""`foreword explain`: follow a prompt's KV through a running server, and name the first step that fails."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

import typer

from foreword.cli.commands import described
from foreword.cli.server_client import check_url
from foreword.config_layers import read_secret
from foreword.errors import ConfigError

if TYPE_CHECKING:
    from foreword.cli.explain_checks import CheckResult
    from foreword.cli.probe import ProbedServer


def register(app: typer.Typer) -> None:
    """Add the command."""
    examples = ("explain", "explain http://router:8080 --api-key KEY")
    app.command("explain", **described(*examples))(explain)


def explain(
    url: Annotated[
        str, typer.Argument(metavar="[URL]", help="URL of a vLLM with Foreword's connector, a server or a router.")
    ] = "http://127.0.0.1:8000",
    *,
    model: Annotated[str | None, typer.Option("--model", help="The model, if there are several.")] = None,
    api_key: Annotated[str | None, typer.Option("--api-key", help="API key, if one is required.")] = None,
    admin_key: Annotated[
        str | None, typer.Option("--admin-key", help="The operator's key, to look at a router's replicas.")
    ] = None,
    reset: Annotated[
        bool,
        typer.Option(
            "--reset", help="Empty vLLM's own cache, for all requests, to see that blocks come from the stores."
        ),
    ] = False,
    within: Annotated[float, typer.Option("--within", help="Seconds that the command may take.")] = 60.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Find out why prompts are not cached.

    Sends a few prompts with a salt of their own, which shares nothing with other requests, and follows their KV: computed,
    found on the device, kept apart from another salt, written to the stores, loaded from there. Prints the first link that is
    broken and the setting to change; status 1 then.
    """
    from foreword.cli.probe import ProbedServer

    check_url(url)
    if not 0 < within < math.inf:
        raise ConfigError(f"--within is a number of seconds, not {within}")
    api_key = api_key and read_secret(api_key, "--api-key")
    admin_key = admin_key and read_secret(admin_key, "--admin-key")
    target = ProbedServer(url, api_key, admin_key, time.monotonic() + within)
    target.model = model
    results = []
    for result in follow(target, reset=reset):
        results.append(result)
        if not as_json:
            mark = {True: "ok  ", False: "FAIL", None: "-   "}[result.ok]
            print(
                f"{mark}  {result.name:<9} {result.text}"
                + (f"\n      change    {result.setting}" if result.setting else ""),
                flush=True,
            )
    if as_json:
        print(json.dumps([asdict(result) for result in results], indent=2))
    raise typer.Exit(1 if any(result.ok is False for result in results) else 0)


def follow(target: ProbedServer, *, reset: bool = False) -> Iterator[CheckResult]:
    """The results, up to the first failed check."""
    from foreword.cli.explain_checks import CheckResult, checks_of, until_failed
    from foreword.cli.probe import NoAnswer

    try:
        kind = target.kind()
        if kind is None:
            text = f"{target.url} is neither a vLLM nor of Foreword's, or something in front of it hides `/metrics`"
            yield CheckResult("server", text, False, "the server's own URL")
        elif kind == "sglang":
            yield CheckResult(
                "server", f"{target.url} is an SGLang, which is not followed: docs/guides/sglang.md", None
            )
        else:
            yield from until_failed(checks_of(target, kind, reset=reset))
    except NoAnswer as error:
        setting = error.setting or "the URL; `--host` and `--port` of the server; its log"
        parts = urlsplit(target.url)
        if (proxy := getproxies().get(parts.scheme)) and not proxy_bypass(parts.hostname or ""):
            setting = (
                f"`NO_PROXY={parts.hostname}`, or `{parts.scheme.upper()}_PROXY`: requests go to the proxy {proxy}"
            )
        yield CheckResult("server", error.message, False, setting)
