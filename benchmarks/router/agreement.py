"""Do two routers decide alike? Real servers, and two routers that share nothing but the servers' KV events.

    python -m benchmarks.router.agreement [MODEL]

MODEL is a folder; without it, the embedded model. The second router starts --late seconds after the first one, under load, and
from then on each request goes to one of them at random. The other one is asked for its decision at the same moment, with what
it knows. Conversations after shared system prompts, half of them with a session's name; their next turn follows after a time of
thinking. The same with one router, for comparison: how often conversations change their replica, and how often they go back to
one that they left.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

from tokenizers import Tokenizer

from benchmarks.harness import machine, set_up, table, version_of
from benchmarks.router.burst import EMBEDDED, SYSTEM_TOKENS, body, cut, failures, hit_share
from benchmarks.router.fleet import Answer, Client, Process, Request, library, servers
from foreword.api.http import bind, url_of
from foreword.blocks.salt import NO_SALT
from foreword.configuration import Config
from foreword.process_config import RouterConfig, ServerConfig
from foreword.router.discovery import configured_replicas
from foreword.router.process import serving
from foreword.router.prompts import TokenizedPrompt
from foreword.router.replicas import clock
from foreword.router.router import Router
from foreword.routing.placement import Decision


def main() -> int:
    given = read_arguments()
    tokenizer = Tokenizer.from_file(str(given.model / "tokenizer.json"))
    facts = machine() | {
        "libraries": ", ".join(f"{name} {version_of(name)}" for name in ("torch", "transformers", "aiohttp")),
        "servers": f"{given.replicas} x foreword serve {given.model.name}, one thread and KV memory for {given.kv_memory} "
        "tokens each; all processes share the cores",
        "requests": f"{given.conversations} conversations of {given.turns} turns, {given.at_a_time} at a time, after one of "
        f"{given.systems} system prompts of {SYSTEM_TOKENS} tokens, {given.think:g} s between turns",
    }
    print(set_up(facts), flush=True)
    runs: list[Run] = []
    with tempfile.TemporaryDirectory(prefix="foreword-agreement-") as folder:
        flags = [str(given.model), "--served-model-name", "bench", "--kv-memory", f"{given.kv_memory} tokens"]
        names = [f"s{i}" for i in range(given.replicas)]
        with servers(Path(folder), names, *flags, "--kv-events", "tcp://127.0.0.1:0") as fleet:
            for number in range(given.rounds):
                for count in (2, 1) if number % 2 == 0 else (1, 2):
                    for one in fleet:
                        one.forget()
                    runs.append(asyncio.run(measure(given, fleet, conversations(given, tokenizer), count)))
                    print(f"  {count} routers: {runs[-1].in_words()}", flush=True)
    report(runs)
    return int(any(failures(run.answers) for run in runs))


def read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", type=Path, metavar="MODEL", default=EMBEDDED)
    parser.add_argument("--replicas", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=2, help="with one router and with two, each")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--conversations", type=int, default=60)
    parser.add_argument("--turns", type=int, default=6)
    parser.add_argument("--at-a-time", type=int, default=12)
    parser.add_argument("--think", type=float, default=2.0, help="mean seconds between an answer and the next turn")
    parser.add_argument("--systems", type=int, default=8, help="number of system prompts")
    parser.add_argument("--kv-memory", type=int, default=32768, help="tokens of each device")
    parser.add_argument("--late", type=float, default=10.0, help="seconds until the second router starts")
    return parser.parse_args()


def conversations(given: argparse.Namespace, tokenizer: Tokenizer) -> list[list[Request]]:
    """The prompts of each, every one a continuation of the one before."""
    chance = random.Random(given.seed)
    systems = [cut(tokenizer, text, SYSTEM_TOKENS) for text in library()[: given.systems]]
    weights = [1 / (place + 1) for place in range(len(systems))]
    found = []
    for number in range(given.conversations):
        prompt, turns = chance.choices(systems, weights)[0], []
        named = {"prompt_cache_key": f"conversation {number}"} if number % 2 else {}
        for _ in range(given.turns):
            prompt = [*prompt, *(chance.randrange(100, 4000) for _ in range(chance.randrange(40, 200)))]
            turns.append(Request(body(prompt, 8) | named, named.get("prompt_cache_key", "")))
        found.append(turns)
    return found


@dataclass
class Run:
    """The results of one run.

    Attributes:
        paths: the replicas of each conversation, turn by turn.
        compared: for each request of which two decisions are known, both.
    """

    routers: int
    answers: list[Answer] = field(default_factory=list)
    paths: dict[int, list[str]] = field(default_factory=dict)
    compared: list[tuple[str, Decision]] = field(default_factory=list)

    @property
    def equal(self) -> int:
        return sum(replica == decision.replica for replica, decision in self.compared)

    @property
    def moves(self) -> int:
        """How often a turn went to another replica than the turn before."""
        return sum(one != last for path in self.paths.values() for last, one in pairwise(path))

    @property
    def returns(self) -> int:
        """How often a conversation came back to a replica that it had left."""
        return sum(
            one != path[place] and one in path[:place]
            for path in self.paths.values()
            for place, one in enumerate(path[1:])
        )

    def in_words(self) -> str:
        reasons = Counter(decision.reason for replica, decision in self.compared if replica != decision.replica)
        return (
            f"{self.equal} of {len(self.compared)} decisions equal, others {dict(reasons)}; {self.moves} moves, {self.returns} "
            f"returns, hit share {hit_share(self.answers):.1%}, failed {len(failures(self.answers))}"
        )


async def measure(
    given: argparse.Namespace, fleet: Sequence[Process], talks: Sequence[list[Request]], count: int
) -> Run:
    run, chance = Run(count), random.Random(given.seed + 1)
    queue = iter(enumerate(talks))
    async with AsyncExitStack() as stack:
        routers = [await started(given, stack, fleet)]

        async def add_late() -> None:
            await asyncio.sleep(given.late)
            routers.append(await started(given, stack, fleet))

        async def converse() -> None:
            for number, turns in queue:
                path = run.paths.setdefault(number, [])
                for request in turns:
                    chosen = chance.choice(routers)
                    others = [decide(one.router, request) for one in routers if one is not chosen]
                    answer = await chosen.client.ask(request)
                    run.answers.append(answer)
                    path.append(answer.replica)
                    run.compared += [(answer.replica, other) for other in others]
                    await asyncio.sleep(chance.expovariate(1 / given.think))

        late = asyncio.create_task(add_late()) if count == 2 else None
        await asyncio.gather(*(converse() for _ in range(given.at_a_time)))
        if late is not None:
            await late
    return run


@dataclass(frozen=True)
class Front:
    router: Router
    client: Client


async def started(given: argparse.Namespace, stack: AsyncExitStack, fleet: Sequence[Process]) -> Front:
    """A router in this process, once it knows all servers."""
    config = Config(
        server=ServerConfig(port=0),
        router=RouterConfig(replicas=tuple(one.url for one in fleet), tokenizer=str(given.model)),
    )
    listener = bind(config.server)
    url = url_of(listener)
    router = await stack.enter_async_context(serving(listener, configured_replicas(config.router), Router(config)))
    began = time.monotonic()
    while len(router.healthy()) < len(fleet):
        if time.monotonic() - began > 60:
            raise SystemExit(f"not all servers are replicas: {router.ready()}")
        await asyncio.sleep(0.05)
    return Front(router, await stack.enter_async_context(Client(url)))


def decide(router: Router, request: Request) -> Decision:
    """The decision of this router for a request now."""
    pool = router.pool("bench")
    prompt = TokenizedPrompt(request.body["prompt"], "client")
    session = f"{router.auth.rights.tenant({}).name}/{request.session}" if request.session else None
    query = pool.query(prompt, "bench", NO_SALT, session, request.body["max_tokens"])
    return pool.fleet.place(query, clock())


def report(runs: Sequence[Run]) -> None:
    rows = [
        [
            str(run.routers),
            str(len(run.answers)),
            f"{run.equal / len(run.compared):.1%}" if run.compared else "",
            str(run.moves),
            str(run.returns),
            f"{hit_share(run.answers):.1%}",
            str(len(failures(run.answers))),
        ]
        for run in runs
    ]
    head = [
        "routers",
        "requests",
        "equal decisions",
        "turns on another replica",
        "of these back",
        "hit share",
        "failed",
    ]
    print("\n" + table(head, rows), flush=True)


if __name__ == "__main__":
    sys.exit(main())
