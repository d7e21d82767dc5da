"""Equal prompts at once, and traffic over two routers: real servers, real routers, streaming clients, all on this machine.

    python -m benchmarks.router.burst [MODEL] [--only burst|routers]

MODEL is a folder; without it, the embedded model.

burst     equal prompts arrive together at a fleet that has never seen them. With `cost` the fleet should compute the prompt
          about once, with `round-robin` each replica does, and without prefix caching each prompt is computed (one round,
          which takes more than a minute). Policies take turns; devices are empty before each burst.
routers   questions after shared system prompts, through one router, and split at random between two that know nothing of each
          other. Both ways take turns. Each router learns from KV events what all replicas hold.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

import foreword
from benchmarks.harness import machine, median, set_up, table, version_of
from benchmarks.router.fleet import Answer, Client, Process, Request, library, router, servers

EMBEDDED = Path(foreword.__file__).parent / "models" / "stdlib-nano"
SYSTEM_TOKENS = 1000


def main() -> int:
    given = read_arguments()
    tokenizer = Tokenizer.from_file(str(given.model / "tokenizer.json"))
    facts = machine() | {
        "libraries": ", ".join(f"{name} {version_of(name)}" for name in ("torch", "transformers", "aiohttp")),
        "servers": f"{given.replicas} x foreword serve {given.model.name}, one thread each; all processes share the cores",
    }
    print(set_up(facts), flush=True)
    kv = max(2 * given.prompt_tokens, given.kv_memory)
    failed = False
    with tempfile.TemporaryDirectory(prefix="foreword-burst-") as made:
        folder, names = Path(made), [f"s{i}" for i in range(given.replicas)]
        given.model = long_context(given.model, folder, given.prompt_tokens + 64)
        flags = [str(given.model), "--served-model-name", "bench", "--kv-memory", f"{kv} tokens"]
        flags += ["--kv-events", "tcp://127.0.0.1:0"]
        bursts: dict[str, list[Burst]] = {}
        with servers(folder, names, *flags) as fleet:
            if given.only != "routers":
                bursts = burst(given, folder, tokenizer, fleet, ("cost", "round-robin"), given.rounds)
            if given.only != "burst":
                failed |= routers(given, folder, tokenizer, fleet)
        if given.only != "routers":
            with servers(folder, names, *flags, "--no-enable-prefix-caching") as fleet:
                [without] = burst(given, folder, tokenizer, fleet, ("round-robin",), rounds=1).values()
            failed |= report_bursts(given, bursts | {"round-robin, no prefix cache": without})
    return int(failed)


def read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", type=Path, metavar="MODEL", default=EMBEDDED)
    parser.add_argument("--only", choices=("burst", "routers"))
    parser.add_argument("--replicas", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--prompts", type=int, default=50, help="burst: equal prompts at once")
    parser.add_argument("--prompt-tokens", type=int, default=10_000, help="burst: length of the prompt")
    parser.add_argument("--requests", type=int, default=200, help="routers: in each round")
    parser.add_argument("--rate", type=float, default=4.0, help="routers: requests per second")
    parser.add_argument("--answer", type=int, default=8, help="routers: tokens of every answer")
    parser.add_argument("--systems", type=int, default=24, help="routers: number of system prompts")
    parser.add_argument("--kv-memory", type=int, default=8192, help="tokens of each device, for routers")
    return parser.parse_args()


def cut(tokenizer: Tokenizer, text: str, tokens: int) -> list[int]:
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
    return ids[:tokens]


def body(prompt: Sequence[int], tokens: int) -> dict[str, Any]:
    return {"model": "bench", "prompt": list(prompt), "max_tokens": tokens, "temperature": 0, "ignore_eos": True}


def computed(answers: Sequence[Answer]) -> int:
    """Prompt tokens that were not cached."""
    return sum(one.prompt_tokens - one.cached_tokens for one in answers)


def hit_share(answers: Sequence[Answer]) -> float:
    return 1 - computed(answers) / max(sum(one.prompt_tokens for one in answers), 1)


def failures(answers: Sequence[Answer]) -> list[str]:
    return [one.wrong() for one in answers if one.wrong()]


# Equal prompts at once


@dataclass(frozen=True)
class Burst:
    """One burst. Seconds of the clock, processor seconds of all servers, and how many prompts they computed."""

    seconds: float
    processor: float
    computed: float
    answers: list[Answer]


def burst(
    given: argparse.Namespace,
    folder: Path,
    tokenizer: Tokenizer,
    fleet: list[Process],
    policies: Sequence[str],
    rounds: int,
) -> dict[str, list[Burst]]:
    text = "\n".join(library()[:8])
    found: dict[str, list[Burst]] = {policy: [] for policy in policies}
    for number in range(rounds):
        # The first token differs, so that no round finds another's blocks.
        for place, policy in enumerate(found):
            prompt = [200 + 2 * number + place, *cut(tokenizer, text, given.prompt_tokens - 1)]
            for one in fleet:
                one.forget()
            with router(folder, fleet, "--tokenizer", str(given.model), "--policy", policy) as front:
                before = processor_seconds(fleet)
                began = time.perf_counter()
                answers = asyncio.run(at_once(front.url, [Request(body(prompt, 4))] * given.prompts))
                took = time.perf_counter() - began
            spent = processor_seconds(fleet) - before
            found[policy].append(Burst(took, spent, computed(answers) / len(prompt), answers))
            print(f"  {policy}: {took:.1f} s, {found[policy][-1].computed:.2f} prompts computed", flush=True)
    return found


def processor_seconds(fleet: Sequence[Process]) -> float:
    return sum(one.metric("process_cpu_seconds_total") for one in fleet)


def report_bursts(given: argparse.Namespace, found: Mapping[str, Sequence[Burst]]) -> bool:
    print(f"\n{given.prompts} equal prompts of {given.prompt_tokens:,} tokens at once, nothing cached:")
    rows = [
        [
            name,
            f"{median(one.seconds for one in runs):.1f}",
            f"{median(one.processor for one in runs):.1f}",
            f"{median(one.computed for one in runs):.2f}",
            str(len({answer.replica for one in runs for answer in one.answers})),
            str(sum(len(failures(one.answers)) for one in runs)),
        ]
        for name, runs in found.items()
    ]
    head = ["policy", "seconds", "processor seconds", "prompts computed", "replicas used", "failed"]
    print(table(head, rows), flush=True)
    return any(failures(one.answers) for runs in found.values() for one in runs)


def long_context(model: Path, folder: Path, tokens: int) -> Path:
    """A copy of the model whose configuration allows prompts of this length. It costs the same; its answers mean nothing."""
    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    if config.get("max_position_embeddings", tokens) >= tokens:
        return model
    made = folder / model.name
    shutil.copytree(model, made)
    (made / "config.json").write_text(json.dumps(config | {"max_position_embeddings": tokens}), encoding="utf-8")
    return made


async def at_once(url: str, requests: Sequence[Request]) -> list[Answer]:
    async with Client(url) as client:
        return list(await asyncio.gather(*(client.ask(request) for request in requests)))


# Two routers


def routers(given: argparse.Namespace, folder: Path, tokenizer: Tokenizer, fleet: list[Process]) -> bool:
    shares: dict[int, list[float]] = {1: [], 2: []}
    failed: list[str] = []
    requests = questions(given, tokenizer)
    for number in range(given.rounds):
        for count in (1, 2) if number % 2 == 0 else (2, 1):
            for one in fleet:
                one.forget()
            with ExitStack() as stack:
                flags = ("--tokenizer", str(given.model))
                fronts = [stack.enter_context(router(folder, fleet, *flags)) for _ in range(count)]
                answers = asyncio.run(split(given, [front.url for front in fronts], requests))
            shares[count].append(hit_share(answers))
            print(f"  {count} router(s): hit share {shares[count][-1]:.1%}", flush=True)
            failed += failures(answers)
    print(
        f"\n{len(requests)} questions after {given.systems} system prompts of {SYSTEM_TOKENS} tokens, {given.rate:g}/s:"
    )
    rows = [[str(count), *(f"{share:.1%}" for share in found)] for count, found in shares.items()]
    print(table(["routers", *(f"hit share, round {i + 1}" for i in range(given.rounds))], rows))
    print(f"failed: {len(failed)} {failed[:3] if failed else ''}", flush=True)
    return bool(failed)


def questions(given: argparse.Namespace, tokenizer: Tokenizer) -> list[Request]:
    chance = random.Random(given.seed)
    systems = [cut(tokenizer, text, SYSTEM_TOKENS) for text in library()[: given.systems]]
    weights = [1 / (place + 1) for place in range(len(systems))]
    own = [[chance.randrange(100, 4000) for _ in range(chance.randrange(10, 60))] for _ in range(given.requests)]
    chosen = chance.choices(systems, weights, k=given.requests)
    return [Request(body([*system, *question], given.answer)) for system, question in zip(chosen, own, strict=True)]


async def split(given: argparse.Namespace, urls: Sequence[str], requests: Sequence[Request]) -> list[Answer]:
    """Open loop with Poisson arrivals; each request goes to one of the routers by chance."""
    chance = random.Random(given.seed + 1)
    async with AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(Client(url)) for url in urls]
        running = []
        for request in requests:
            running.append(asyncio.ensure_future(chance.choice(clients).ask(request)))
            await asyncio.sleep(chance.expovariate(given.rate))
        return list(await asyncio.gather(*running))


if __name__ == "__main__":
    sys.exit(main())
