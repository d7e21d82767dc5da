"""Measures what the time of an answer tells one tenant about another's texts: the area under the curve, private and public.

    python -m benchmarks.server.timing_probes [--probes 1000] [--tokens 512]

A server with two tenants and an operator. Half of some seeded texts are sent by one tenant. Then the other one sends all of
them, in random order, each once, and measures the time to an answer of one token. The area under the curve is the probability
that a text that was sent before has the shorter time than one that was not: 0.5 is a guess. Four kinds of texts:

    private   those of the first tenant: the time must not tell
    behind    the same behind a public text
    own       the prober has sent them itself: what the time tells where the cache does hit
    public    marked by the operator, half of them; the others were not sent. Allowed: it is public

For each: the area, its standard error (that of a guess), medians, and cached tokens as the answers count them.
"""

import argparse
import asyncio
import random
import time
from collections.abc import Sequence

import aiohttp

from benchmarks.harness import machine, median, set_up, table
from foreword.api.http import bind, serving
from foreword.configuration import Config
from foreword.engine_config import EngineConfig, PrefixConfig
from foreword.entrypoints.async_engine import AsyncEngine
from foreword.process_config import ServerConfig
from foreword.server.app import ServerApp
from foreword.server.engine_metrics import PrometheusObserver

ENGINE = EngineConfig(max_model_len=1024, kv_memory="600000 tokens", threads=1, seed=0)
PREFIXES = PrefixConfig(budget="90%")
SERVER = ServerConfig(
    port=0, api_keys=("ann=anns-own-key-0001", "bob=bobs-own-key-0002"), admin_key="operators-key-003",
    tenant_secret="a secret of this benchmark",
)  # fmt: skip


def area(sent: Sequence[float], other: Sequence[float]) -> float:
    """The probability that one of the first is below one of the second."""
    return sum((a < b) + (a == b) / 2 for a in sent for b in other) / (len(sent) * len(other))


class Client:
    def __init__(self, session: aiohttp.ClientSession, url: str, key: str) -> None:
        self._session, self._url = session, url
        self._headers = {"authorization": f"Bearer {key}"}

    async def complete(self, tokens: list[int]) -> tuple[float, int]:
        """Seconds to the whole answer of one token, and cached tokens."""
        body = {"prompt": tokens, "max_tokens": 1, "temperature": 0}
        started = time.perf_counter()
        async with self._session.post(f"{self._url}/v1/completions", json=body, headers=self._headers) as answer:
            found = await answer.json()
        took = time.perf_counter() - started
        return took, found["usage"]["prompt_tokens_details"]["cached_tokens"]

    async def mark(self, name: str, text: str) -> None:
        path = f"{self._url}/v1/public/prefixes"
        async with self._session.post(path, json={"name": name, "content": text}, headers=self._headers) as answer:
            assert answer.status == 201, await answer.text()


async def measure(arguments: argparse.Namespace) -> list[list[str]]:
    engine = AsyncEngine.from_config(ENGINE, prefixes=PREFIXES)
    listener = bind(SERVER)
    app = ServerApp(engine, PrometheusObserver(), Config(ENGINE, SERVER, PREFIXES))
    url = "http://{}:{}".format(*listener.getsockname()[:2])
    drawn, rows = random.Random(arguments.seed), []

    def text() -> str:
        words: list[str] = []
        while len(engine.tokenizer.encode(" ".join(words))) < arguments.tokens:
            words += [f"v{drawn.randrange(10**6)}" for _ in range(8)]
        return " ".join(words)

    async with serving(app.front, listener, SERVER), aiohttp.ClientSession() as session:
        ann, bob, operator = (Client(session, url, key) for key in (*_keys(), SERVER.admin_key or ""))
        for kind, owner in (("private", ann), ("behind", ann), ("own", bob), ("public", operator)):
            before = text() if kind == "behind" else ""
            if before:
                await operator.mark("before", before)
            texts = [f"{before}{text()}" for _ in range(arguments.probes)]
            sent = set(drawn.sample(range(arguments.probes), arguments.probes // 2))
            for number in sorted(sent):
                if kind == "public":
                    await operator.mark(f"p{number}", texts[number])
                else:
                    await owner.complete(engine.tokenizer.encode(texts[number]))
            order = list(range(arguments.probes))
            drawn.shuffle(order)
            times: dict[bool, list[float]] = {True: [], False: []}
            cached: dict[bool, list[int]] = {True: [], False: []}
            for number in order:
                took, count = await bob.complete(engine.tokenizer.encode(texts[number]))
                times[number in sent].append(took)
                cached[number in sent].append(count)
            error = (1 / 12 * (1 / len(times[True]) + 1 / len(times[False]))) ** 0.5
            rows.append([
                kind, f"{area(times[True], times[False]):.3f}", f"{error:.3f}", f"{1000 * median(times[True]):.1f} ms",
                f"{1000 * median(times[False]):.1f} ms", f"{median(cached[True]):.0f}", f"{median(cached[False]):.0f}",
            ])  # fmt: skip
            print(rows[-1], flush=True)
    engine.close()
    return rows


def _keys() -> list[str]:
    return [one.partition("=")[2] for one in SERVER.api_keys]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--probes", type=int, default=1000)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    rows = asyncio.run(measure(arguments))
    facts = {"probes": str(arguments.probes), "tokens": f"{arguments.tokens} or a few more", **machine()}
    print(set_up(facts))
    head = ["texts", "area", "error", "sent before", "not sent", "cached", "not sent: cached"]
    print(table(head, rows))


if __name__ == "__main__":
    main()
