"""`foreword explain`: follow a prompt's KV through a running server, and name the first link of the chain that is broken."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from foreword.cli.chain import DEFAULT_BLOCK, Chain, CheckedLink, ServerChain, until_broken
from foreword.cli.help import described
from foreword.cli.probe import NoAnswer, ProbedServer
from foreword.cli.server_client import check_url
from foreword.config import read_secret

if TYPE_CHECKING:
    from foreword.cli.chain import CheckedLink
    from foreword.cli.probe import ProbedServer

_REPLICAS: Final = 4
# Policies that place a prompt without a look at what is cached.
_BLIND: Final = ("random", "round-robin", "least-loaded", "least-tokens")


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
    api_key = api_key and read_secret(api_key, "--api-key")
    admin_key = admin_key and read_secret(admin_key, "--admin-key")
    target = ProbedServer(url, api_key, admin_key, time.monotonic() + within)
    target.model = model
    links = []
    for link in follow(target, reset=reset):
        links.append(link)
        if not as_json:
            mark = {True: "ok  ", False: "FAIL", None: "-   "}[link.ok]
            print(
                f"{mark}  {link.name:<9} {link.text}" + (f"\n      change    {link.setting}" if link.setting else ""),
                flush=True,
            )
    if as_json:
        print(json.dumps([asdict(link) for link in links], indent=2))
    raise typer.Exit(1 if any(link.ok is False for link in links) else 0)


def follow(target: ProbedServer, *, reset: bool = False) -> Iterator[CheckedLink]:
    """The links of the chain, up to the first that is broken."""
    from foreword.cli.chain import CheckedLink, until_broken
    from foreword.cli.explain import chain_of
    from foreword.cli.probe import NoAnswer

    try:
        chain = chain_of(target, reset=reset)
        if chain is None:
            yield CheckedLink("server", f"{target.url} is neither a vLLM nor of Foreword's", False, "the URL")
        else:
            yield from until_broken(chain)
    except NoAnswer as error:
        yield CheckedLink("server", error.message, False, "the URL; `--host` and `--port` of the server; its log")


class RouterChain(Chain):
    """A router: the same replica serves a prompt again, and each replica keeps it."""

    def links(self) -> Iterator[CheckedLink]:
        yield from self.ready()
        state = self.target.json("/v1/router/state", admin=True) or {}
        self.replicas: list[dict[str, Any]] = [
            one for one in state.get("replicas", ()) if self.target.model in one.get("models", (self.target.model,))
        ]
        self.policy = next(
            (one["policy"] for one in state.get("models", ()) if self.target.model in (one["model"],)), ""
        )
        self.block = max((one.get("block_size") or DEFAULT_BLOCK for one in self.replicas), default=DEFAULT_BLOCK)
        for step in (
            self.in_service,
            self.computed,
            self.found_again,
            self.kept_apart,
            self.tokens,
            self.events,
            self.behind,
        ):
            yield from step()

    def unready_setting(self, reason: str) -> str:
        return "`--replica`, and the replicas: are they up, and reachable from the router?"

    def in_service(self) -> Iterator[CheckedLink]:
        """All replicas take requests and have the same weights."""
        for one in self.replicas:
            if not one.get("takes_requests", True):
                yield CheckedLink(
                    "replicas", f"{one['replica']} takes no requests: {one.get('reason')}", False, _for_replica(one)
                )
                return
        if not self.replicas:
            yield CheckedLink(
                "replicas", "not looked at: the router shows them to its operator only (`--admin-key`)", None
            )
            return
        weights = {one["weights"] for one in self.replicas if one.get("weights") not in (None, "unknown")}
        if len(weights) > 1:
            text = f"the replicas of {self.target.model} have {len(weights)} different weights, and share nothing"
            yield CheckedLink("replicas", text, False, "the weights that the replicas serve: docs/guides/router.md")
            return
        yield CheckedLink("replicas", f"{len(self.replicas)} take requests")

    def found_again(self) -> Iterator[CheckedLink]:
        """The same prompt goes to the replica that has it, and is found."""
        answers = [self.ask(report=True) for _ in range(3)]
        best = max(answers, key=lambda one: one.cached or 0)
        named = next((name for name in _BLIND if f": {name}," in best.route), self.policy)
        if named in _BLIND and len(self.replicas) != 1:
            text = f"the policy {named} places prompts without a look at what replicas hold"
            yield CheckedLink("placed", text, False, "`--policy cost`")
        elif best.cached is None:
            text = f"{best.replica} does not say what was cached, so the router cannot learn it"
            yield CheckedLink("placed", text, False, "vLLM's `--enable-prompt-tokens-details`")
        elif best.cached >= self.block:
            text = f"the same prompt again went to {best.replica}: {best.cached} of {best.tokens} tokens found"
            yield CheckedLink("placed", text)
        else:
            yield from self.behind(best.replica)
            text = f"{best.replica} has it, and nothing was found through the router"
            yield CheckedLink("placed", text, False, "see `foreword explain` for that replica")

    def tokens(self) -> Iterator[CheckedLink]:
        """The router sees the replica's tokens."""
        yield from self.template()

    def untokenized(self, status: int) -> Iterator[CheckedLink]:
        if status == 503:
            text = "no replica tokenizes, so the router compares prompts as text"
            yield CheckedLink("tokens", text, False, "`--tokenizer` of the router")

    def events(self) -> Iterator[CheckedLink]:
        """Events arrive from the replicas that publish them."""
        metrics = self.target.metrics()
        for one in self.replicas:
            got = metrics.total("foreword:router_kv_events_total", replica=one["replica"], kind="messages")
            if one.get("kv_events") and not got and one["replica"] == self.first.replica:
                text = f"no KV events arrive from {one['replica']}: {', '.join(one['kv_events'])}"
                yield CheckedLink(
                    "events", text, False, "`--kv-events` of the replica, `events=` of `--replica`; ports between them"
                )

    def behind(self, only: str = "") -> Iterator[CheckedLink]:
        """The chain of each replica that can be reached from here."""
        for one in self.replicas[:_REPLICAS]:
            url = one["replica"]
            if only and url != only:
                continue
            target = self.target.other(url)
            try:
                kind = target.kind()
                if kind not in ("server", "vllm"):
                    continue
                for link in until_broken(ServerChain(target, kind)):
                    if link.name == "server" and link.ok is False:
                        yield CheckedLink(link.name, f"not looked at: {link.text}", None)
                        break
                    if link.ok is False or link.name in ("stores", "written", "loaded"):
                        yield CheckedLink(link.name, f"{url}: {link.text}", link.ok, link.setting)
            except NoAnswer as error:
                yield CheckedLink("server", f"not looked at: {error.message}", None)


def _for_replica(one: dict[str, Any]) -> str:
    if one.get("drained"):
        return "`POST /v1/router/undrain`"
    return "the replica: is it up, and reachable from the router? `--replica-key`, if it wants a key"


def chain_of(target: ProbedServer, *, reset: bool = False) -> Chain | None:
    """The chain of a server or router; None if it is none of them. Raises NoAnswer."""
    kind = target.kind()
    if kind is None:
        return None
    return RouterChain(target) if kind == "router" else ServerChain(target, kind, reset=reset)
