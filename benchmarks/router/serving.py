"""Does the router pay? Three real servers, a real router and streaming clients, all on this machine.

    python -m benchmarks.router.serving [MODEL] --workload agents --traces FILE...
    python -m benchmarks.router.serving [MODEL] --workload system-prompts [--policies cost,round-robin,least-loaded]
    python -m benchmarks.router.serving [MODEL] --workload kill

MODEL is a folder; without it, the embedded model. `--quick` is for a look; it measures nothing.

agents          sessions of a tool-using agent from --traces (real text), several times each. Closed loop: each sends its next
                step after a time of thinking.
system-prompts  shared system prompts of real text, which one follows Zipf's law, each with its own short question. Open
                loop: Poisson arrivals.
kill            1,000 greedy streams, 40 at a time, over a disk store that the servers share. One server is killed with SIGKILL
                in the middle and started again. Every stream must be complete and say what a single undisturbed server says.

The first two compare time to first token between policies, which take turns; each starts with empty devices and a new router.
The load is --load of what round robin manages at most, found first from the first requests: so no policy is compared when
saturated. The ratio depends on what the devices can hold: --kv-memory is such that each holds the prefixes of its share of the
sessions or system prompts, more or less, and not those of all; where every device holds everything, any policy will do. With
--pace, servers do not share the machine's cores, so that what one computes needlessly is lost for its own requests only.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from tokenizers import Tokenizer

import foreword
from benchmarks.harness import machine, median, set_up, table, version_of
from benchmarks.router.fleet import Answer, Client, Process, Request, in_turn, library, router, servers

SYSTEM_TOKENS = 1500
KV_TOKENS = {"agents": 12288, "system-prompts": 8192, "kill": 8192}
CALIBRATED, CALIBRATION_CLIENTS = 48, 6
MARK_AFTER = 600
NEAR_TIE = 0.01
Report = dict[str, Any]


@dataclass
class Bench:
    """The servers and settings of all workloads."""

    given: argparse.Namespace
    folder: Path
    model: Path
    tokenizer: Tokenizer
    chat: bool
    random: random.Random = field(default_factory=lambda: random.Random(1))

    def count(self, text: str) -> int:
        return len(self.tokenizer.encode(text, add_special_tokens=False).ids)

    def cut(self, text: str, tokens: int) -> str:
        """The first tokens of the text."""
        found = self.tokenizer.encode(text, add_special_tokens=False)
        return text if len(found.ids) <= tokens else text[: found.offsets[tokens][0]]

    def body(self, **more: Any) -> dict[str, Any]:
        common = {"model": "bench", "max_tokens": self.given.answer, "temperature": 0, "ignore_eos": True}
        return common | more

    def flags(self, *more: str) -> list[str]:
        kv = f"{self.given.kv_memory} tokens"
        given = [str(self.model), "--served-model-name", "bench", "--kv-memory", kv, "--dtype", self.given.dtype]
        return [*given, "--kv-events", "tcp://127.0.0.1:0", *more]

    def routed(self, *more: str) -> list[str]:
        return ["--tokenizer", str(self.model), *more]


def main() -> int:
    given = read_arguments()
    model = given.model or Path(foreword.__file__).parent / "models" / "stdlib-nano"
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    chat = "chat_template" in json.loads((model / "tokenizer_config.json").read_text())
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="foreword-router-") as folder:
        bench = Bench(given, Path(folder), model, tokenizer, chat)
        print(set_up(facts(bench)), flush=True)
        found, status = kill(bench) if given.workload == "kill" else compare(bench)
    print(f"\nAll of it took {time.monotonic() - began:.0f} s.")
    if given.json:
        given.json.write_text(json.dumps({"set_up": facts(bench), given.workload: found}, indent=1), encoding="utf-8")
    return status


def read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", type=Path, metavar="MODEL")
    parser.add_argument("--workload", choices=tuple(KV_TOKENS), required=True)
    parser.add_argument("--traces", nargs="+", type=Path, default=[], metavar="FILE")
    parser.add_argument("--policies", default="cost,round-robin", help="of `foreword route`; the first one is compared")
    parser.add_argument("--rounds", type=int, default=2, help="of each policy, in turn")
    parser.add_argument("--replicas", type=int, default=3)
    parser.add_argument("--kv-memory", type=int, help="tokens of each device; 12288 for agents, else 8192")
    parser.add_argument("--dtype", help="float32 for kill, so that batches of any size compute alike; else auto")
    parser.add_argument("--answer", type=int, default=24, help="tokens of every answer")
    parser.add_argument("--load", type=float, default=0.6, help="share of what round robin manages")
    parser.add_argument("--rate", type=float, help="requests per second, instead of --load")
    parser.add_argument("--pace", type=float, default=0.0, help="microseconds per computed token, at least (paced.py)")
    parser.add_argument("--copies", type=int, default=2, help="agents: of each session, different after 600 characters")
    parser.add_argument("--steps", type=int, default=12, help="agents: the first so many steps of a session")
    parser.add_argument("--longest", type=int, default=3072, help="agents: tokens of a prompt; the rest is cut off")
    parser.add_argument("--no-session-key", action="store_true", help="agents: without prompt_cache_key")
    parser.add_argument("--prompts", type=int, default=32, help="system-prompts: how many")
    parser.add_argument("--zipf", type=float, default=1.0, help="system-prompts: exponent of their frequency")
    parser.add_argument("--requests", type=int, default=120, help="system-prompts: per policy and round")
    parser.add_argument("--streams", type=int, default=1000, help="kill: in all")
    parser.add_argument("--at-a-time", type=int, default=40, help="kill: streams side by side")
    parser.add_argument("--kills", type=int, default=1, help="kill: one after the other, each another server")
    parser.add_argument("--down", type=float, default=3.0, help="kill: seconds until it is started again")
    parser.add_argument(
        "--quick", action="store_true", help="half a minute, to see that it works; overrides the amounts"
    )
    parser.add_argument("--json", type=Path, metavar="FILE")
    given = parser.parse_args()
    if given.workload == "agents" and not given.traces:
        parser.error("--workload agents needs --traces FILE...: one request per line with timestamp, input, output")
    if given.quick:
        given.rounds, given.copies, given.steps, given.requests, given.streams = 1, 1, 6, 30, 100
    given.kv_memory = given.kv_memory or KV_TOKENS[given.workload]
    given.dtype = given.dtype or ("float32" if given.workload == "kill" else "auto")
    return given


def facts(bench: Bench) -> dict[str, str]:
    given = bench.given
    versions = ", ".join(f"{name} {version_of(name)}" for name in ("torch", "transformers", "aiohttp"))
    return machine() | {
        "libraries": versions,
        "model": f"{bench.model.name}, {given.dtype}",
        "servers": f"{given.replicas} x foreword serve, one thread and {given.kv_memory:,} tokens of KV memory each"
        + (f"; a token takes {given.pace:g} us, as on a device of its own" if given.pace else ""),
        "router": "foreword route with the tokenizer and KV events; it, servers and clients share the cores",
        "answers": f"{given.answer} tokens each, greedy, streamed",
    }


# Prompts


def agents(bench: Bench) -> list[list[Request]]:
    """The sessions, each a list of its steps."""
    given, found = bench.given, []
    for copy, path in itertools.product(range(given.copies), given.traces):
        lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
        texts = [one["input"] for one in sorted(lines, key=lambda one: one["timestamp"]) if one["input"]][: given.steps]
        name = f"{path.stem}-{copy}"
        marked = [f"{text[:MARK_AFTER]} [session {name}] {text[MARK_AFTER:]}" for text in texts]
        key = {} if given.no_session_key else {"prompt_cache_key": name}
        found.append([Request(bench.body(prompt=bench.cut(text, given.longest), **key), name) for text in marked])
    return found


def question(bench: Bench, number: int) -> str:
    """Unique text in the first 15 to 60 tokens."""
    words = [
        bench.random.choice(("list", "file", "path", "code", "name", "value", "error", "class")) for _ in range(40)
    ]
    return f"\n\nQuestion {number}: what about {' '.join(words[: bench.random.randrange(5, 40)])}?\n"


def asked(bench: Bench, system: str, own: str, **more: Any) -> Request:
    if not bench.chat:
        return Request(bench.body(prompt=system + own, **more))
    messages = [{"role": "system", "content": system}, {"role": "user", "content": own}]
    return Request(bench.body(messages=messages, **more))


def system_prompts(bench: Bench) -> list[Request]:
    given = bench.given
    texts = [bench.cut(text, SYSTEM_TOKENS) for text in library()[: given.prompts]]
    if len(texts) < given.prompts:
        raise SystemExit(f"the standard library has {len(texts)} modules, not {given.prompts}: fewer --prompts")
    weights = [1 / (place + 1) ** given.zipf for place in range(len(texts))]
    chosen = bench.random.choices(texts, weights, k=given.requests)
    return [asked(bench, text, question(bench, number)) for number, text in enumerate(chosen)]


# Policies against each other


@dataclass
class Run:
    """One policy, once."""

    policy: str
    answers: list[Answer]
    seconds: float
    moved: int


def compare(bench: Bench) -> tuple[Report, int]:
    given = bench.given
    traffic = Traffic(bench)
    print(f"{'traffic':<12}  {traffic.words()}", flush=True)
    policies = given.policies.split(",")
    with servers(bench.folder, [f"s{i}" for i in range(given.replicas)], *bench.flags(), pace=given.pace) as fleet:
        rate = given.rate or given.load * capacity(bench, fleet, traffic.calibration)
        print(f"{'load':<12}  {traffic.load_in_words(rate)}", flush=True)
        runs = []
        for number in range(given.rounds):
            for policy in policies if number % 2 == 0 else policies[::-1]:
                runs.append(once(bench, fleet, policy, traffic, rate))
                print(f"round {number + 1}, {in_words(runs[-1])}", flush=True)
    return report(bench, fleet, runs, policies, rate), int(any(one.wrong() for run in runs for one in run.answers))


def once(bench: Bench, fleet: list[Process], policy: str, traffic: Traffic, rate: float) -> Run:
    for one in fleet:
        one.forget()
    with router(bench.folder, fleet, *bench.routed("--policy", policy)) as front:
        began = time.perf_counter()
        answers = asyncio.run(traffic.send(front.url, rate))
        took = time.perf_counter() - began
    return Run(policy, answers, took, moved(answers))


def capacity(bench: Bench, fleet: list[Process], requests: Sequence[Request]) -> float:
    """Requests per second through round robin with as many clients as keep all servers busy, from cold caches."""
    warm = [Request(bench.body(prompt="def main():\n" * 100))] * 2 * len(fleet)

    async def send(url: str) -> float:
        async with Client(url) as client:
            await in_turn(client, warm, len(fleet))
            began = time.perf_counter()
            answers = await in_turn(client, requests, CALIBRATION_CLIENTS)
            for one in answers:
                if one.wrong():
                    raise SystemExit(f"a request of the calibration failed: {one.wrong()}")
            return len(answers) / (time.perf_counter() - began)

    with router(bench.folder, fleet, *bench.routed("--policy", "round-robin")) as front:
        return asyncio.run(send(front.url))


class Traffic:
    """A workload: the same requests, and the same draws of chance, for every policy."""

    def __init__(self, bench: Bench) -> None:
        self._bench = bench
        self._sessions = agents(bench) if bench.given.workload == "agents" else []
        self._requests = [] if self._sessions else system_prompts(bench)
        steps = itertools.zip_longest(*self._sessions)
        flat = self._requests or [one for step in steps for one in step if one is not None]
        self.calibration = flat[:CALIBRATED]
        self._all = flat

    def words(self) -> str:
        given = self._bench.given
        texts = {id(one): one.body.get("prompt") or one.body["messages"][0]["content"] for one in self._all}
        lengths = sorted(self._bench.count(text) for text in texts.values())
        if self._sessions:
            held = sum(max(self._bench.count(one.body["prompt"]) for one in steps) for steps in self._sessions)
            return (
                f"{len(given.traces)} agent sessions of real text x {given.copies} copies, all at once, the first "
                f"{given.steps} steps of each, {len(self._all)} requests; prompts of {lengths[0]} to {lengths[-1]} tokens "
                f"(median {lengths[len(lengths) // 2]}; cut at {given.longest}); the longest of each session are "
                f"{held:,} tokens together; {'no' if given.no_session_key else 'with'} prompt_cache_key"
            )
        kind = "chat" if self._bench.chat else "completions"
        return (
            f"{given.prompts} system prompts of {lengths[len(lengths) // 2]} tokens ({given.prompts * SYSTEM_TOKENS:,} in "
            f"all), Zipf {given.zipf:g}, {len(self._all)} short questions, {kind}"
        )

    def load_in_words(self, rate: float) -> str:
        given = self._bench.given
        source = "as given" if given.rate else f"{given.load:.0%} of what round robin manages here"
        if not self._sessions:
            return f"open loop, Poisson, {rate:.2f} requests/s ({source})"
        think = len(self._sessions) / rate
        return (
            f"closed loop, {len(self._sessions)} sessions that think {think:.1f} s on average (exponential) between an "
            f"answer and the next step: at most {rate:.2f} requests/s ({source})"
        )

    async def send(self, url: str, rate: float, seed: int = 7) -> list[Answer]:
        """`seed`: of the times at which requests come."""
        rng = random.Random(seed)
        async with Client(url) as client:
            if not self._sessions:
                times = itertools.accumulate(rng.expovariate(rate) for _ in self._requests)
                await asyncio.gather(*(_at(client, one, when) for one, when in zip(self._requests, times, strict=True)))
            else:
                think = len(self._sessions) / rate
                pauses = [
                    [rng.uniform(0, think), *(rng.expovariate(1 / think) for _ in steps)] for steps in self._sessions
                ]
                await asyncio.gather(
                    *(_session(client, steps, pause) for steps, pause in zip(self._sessions, pauses, strict=True))
                )
            return client.answers


async def _at(client: Client, request: Request, seconds: float) -> None:
    await asyncio.sleep(seconds)
    await client.ask(request)


async def _session(client: Client, steps: Sequence[Request], pauses: Sequence[float]) -> None:
    for step, pause in zip(steps, pauses, strict=False):
        await asyncio.sleep(pause)
        await client.ask(step)


def moved(answers: Sequence[Answer]) -> int:
    """Steps that went to another replica than the session's step before."""
    last: dict[str, str] = {}
    count = 0
    for one in sorted(answers, key=lambda one: one.sent):
        if one.request.session and one.replica:
            count += last.get(one.request.session, one.replica) != one.replica
            last[one.request.session] = one.replica
    return count


# Tables of policies


def quantile(values: Sequence[float], share: float) -> float:
    found = sorted(values)
    return found[min(int(len(found) * share), len(found) - 1)] if found else float("nan")


def hit_share(answers: Sequence[Answer]) -> float:
    prompts = sum(one.prompt_tokens for one in answers)
    return sum(one.cached_tokens for one in answers) / prompts if prompts else 0.0


def in_words(run: Run) -> str:
    times = [one.ttft for one in run.answers if not one.wrong()]
    return f"{run.policy}: TTFT p50 {1e3 * median(times):.0f} ms, hit share {hit_share(run.answers):.1%}, {run.seconds:.0f} s"


def report(bench: Bench, fleet: list[Process], runs: list[Run], policies: list[str], rate: float) -> Report:
    found: Report = {"rate": rate, "policies": {}}
    rows = []
    for policy in policies:
        own = [run for run in runs if run.policy == policy]
        one = summary(own, fleet)
        found["policies"][policy] = one
        rows.append(
            [
                policy,
                *(f"{1e3 * one['ttft'][name]:.0f}" for name in ("p50", "p90", "p99", "mean")),
                f"{one['hit_share']:.1%}",
                str(one["moved"]),
                " ".join(map(str, one["per_replica"])),
                f"{one['rate']:.2f}",
                str(one["failed"]),
            ]
        )
    head = ["TTFT in ms", "p50", "p90", "p99", "mean", "hit share", "moved", "per replica", "requests/s", "failed"]
    print(f"\n{table(head, rows)}")
    first = policies[0]
    for policy in policies[1:]:
        pairs = zip(found["policies"][policy]["p50s"], found["policies"][first]["p50s"], strict=True)
        ratios = [theirs / ours for theirs, ours in pairs]
        whole = found["policies"][policy]["ttft"]["p50"] / found["policies"][first]["ttft"]["p50"]
        found["policies"][policy]["p50_ratio"] = whole
        by_round = ", ".join(f"{one:.2f}" for one in ratios)
        print(f"TTFT p50 of {policy} is {whole:.2f} times that of {first} (by round: {by_round})")
    for said in {answer.wrong() for run in runs for answer in run.answers} - {""}:
        print(f"failed: {said}")
    return found


def summary(runs: list[Run], fleet: list[Process]) -> Report:
    answers = [one for run in runs for one in run.answers]
    good = [one for one in answers if not one.wrong()]
    times = [one.ttft for one in good]
    where = Counter(one.replica for one in good)
    return {
        "requests": len(answers),
        "failed": len(answers) - len(good),
        "ttft": {
            **{f"p{share}": quantile(times, share / 100) for share in (50, 90, 99)},
            "mean": sum(times) / max(len(times), 1),
        },
        "p50s": [median(one.ttft for one in run.answers if not one.wrong()) for run in runs],
        "hit_share": hit_share(good),
        "hit_shares": [hit_share(run.answers) for run in runs],
        "moved": sum(run.moved for run in runs),
        "per_replica": [where[one.url] for one in fleet],
        "rate": len(answers) / sum(run.seconds for run in runs),
    }


# A server is killed


@dataclass
class Death:
    """One kill: what was under way there when it came. Times are of `time.perf_counter`."""

    url: str
    at: float
    cut: list[Answer]
    waiting: list[Answer]
    ready: float = 0.0


def mixed(bench: Bench) -> list[Request]:
    """A quarter as many prompts as streams: common prefixes of 100 to 2,000 tokens, text and chat, each asked four times."""
    lengths = (2000, 1500, 1000, 700, 400, 200, 100) * 2
    texts = [bench.cut(text, length) for text, length in zip(library(), lengths, strict=False)]
    found = []
    for number in range(-(-bench.given.streams // 4)):
        system, own = bench.random.choice(texts), question(bench, number)
        made = asked(bench, system, own, return_token_ids=True)
        if number % 3:
            made = Request(bench.body(prompt=system + own, return_token_ids=True))
        found.append(made)
    return found


def kill(bench: Bench) -> tuple[Report, int]:
    given = bench.given
    prompts = mixed(bench)
    streams = [prompts[number % len(prompts)] for number in range(given.streams)]
    print(
        f"{'traffic':<12}  {len(streams)} streams, {given.at_a_time} at a time (closed loop), of {len(prompts)} prompts with "
        f"14 common prefixes, text and chat; disk store shared by all; {given.kills} kill(s), each {given.down:g} s down",
        flush=True,
    )
    store = ["--store", f"disk://{bench.folder}/kv?size=4GiB"]
    with ExitStack() as stack:
        [alone] = stack.enter_context(servers(bench.folder, ["alone"], *bench.flags()))
        expected = {id(one.request): one for one in asyncio.run(undisturbed(alone.url, prompts))}
        print(f"the texts of an undisturbed server are known: {len(expected)}", flush=True)
        names = [f"s{i}" for i in range(given.replicas)]
        fleet = stack.enter_context(servers(bench.folder, names, *bench.flags(*store)))
        front = stack.enter_context(router(bench.folder, fleet, *bench.routed()))
        began = time.perf_counter()
        answers, deaths = asyncio.run(disturbed(bench, front.url, fleet, streams))
        took = time.perf_counter() - began
        verdicts = [verdict(alone, one, expected[id(one.request)]) for one in answers]
        return summarize(front, fleet, answers, deaths, verdicts, took)


async def undisturbed(url: str, prompts: Sequence[Request]) -> list[Answer]:
    async with Client(url) as client:
        answers = await in_turn(client, prompts, 8)
    for one in answers:
        if one.wrong():
            raise SystemExit(f"a request to the undisturbed server failed: {one.wrong()}")
    return answers


async def disturbed(
    bench: Bench, url: str, fleet: list[Process], streams: Sequence[Request]
) -> tuple[list[Answer], list[Death]]:
    """Kills come when equal shares of the streams have begun."""
    given, deaths = bench.given, list[Death]()
    async with Client(url) as client:
        sending = asyncio.ensure_future(in_turn(client, streams, given.at_a_time))
        for number in range(given.kills):
            while len(client.answers) < len(streams) * (number + 1) // (given.kills + 1) and not sending.done():
                await asyncio.sleep(0.01)
            if sending.done():
                break
            deaths.append(await killed(client, fleet[(number + 1) % len(fleet)], given.down))
        return await sending, deaths


async def killed(client: Client, server: Process, down: float) -> Death:
    """Waits for a moment when several of its streams are in the middle, kills it, and starts it again."""
    for _ in range(200):
        if sum(one.replica == server.url and 2 <= len(one.events) < 16 for one in client.under_way()) >= 3:
            break
        await asyncio.sleep(0.01)
    server.kill()
    live = client.under_way()
    here = [one for one in live if one.replica == server.url and not one.finishes]
    death = Death(server.url, time.perf_counter(), here, [one for one in live if not one.replica])
    await asyncio.sleep(down)
    server.start()
    await asyncio.to_thread(server.wait_ready)
    death.ready = time.perf_counter()
    return death


def verdict(alone: Process, one: Answer, expected: Answer) -> str:
    """`same`, or in a word what is wrong with a stream."""
    if one.wrong():
        return "failed"
    if len(one.ids) != len(expected.ids) or one.usage.get("completion_tokens") != len(one.ids):
        return "tokens doubled or missing"
    if one.ids == expected.ids:
        return "same" if one.text == expected.text else "other text"
    at = next(i for i, (ours, theirs) in enumerate(zip(one.ids, expected.ids, strict=True)) if ours != theirs)
    if shifted(one.ids[at:], expected.ids[at:]) or shifted(expected.ids[at:], one.ids[at:]):
        return "tokens doubled or missing"
    gap = margin(alone, expected, at)
    return "near tie" if gap < NEAR_TIE else "other tokens"


def shifted(ids: list[int], others: list[int]) -> bool:
    """Whether these are the others with up to four tokens left out at the start."""
    return any(len(others) - by >= 3 and ids[: len(others) - by] == others[by:] for by in range(1, 5))


def margin(alone: Process, expected: Answer, at: int) -> float:
    """How much likelier the best next token is than the second, in log-probability, after so many tokens of the answer."""
    prompt = expected.prompt_ids + expected.ids[:at]
    body = {"model": "bench", "prompt": prompt, "max_tokens": 1, "temperature": 0, "ignore_eos": True, "logprobs": 2}
    answer = httpx.post(f"{alone.url}/v1/completions", json=body, timeout=60).raise_for_status().json()
    best, second = sorted(answer["choices"][0]["logprobs"]["top_logprobs"][0].values(), reverse=True)[:2]
    return float(best - second)


def summarize(
    front: Process, fleet: list[Process], answers: list[Answer], deaths: list[Death], verdicts: list[str], took: float
) -> tuple[Report, int]:
    cut = {id(one) for death in deaths for one in death.cut}
    waiting = {id(one) for death in deaths for one in death.waiting}
    rest = [one for one in answers if id(one) not in cut | waiting]
    groups = {
        "cut in the middle": [one for one in answers if id(one) in cut],
        "waiting for the first token at the kill": [one for one in answers if id(one) in waiting],
        "all others": rest,
    }
    counts = Counter(verdicts)
    found: Report = {
        "streams": len(answers),
        "seconds": took,
        "verdicts": dict(counts),
        "cut": len(cut),
        "continuations": front.metric("foreword:router_continuations_total", outcome="continued"),
        "impossible": front.metric("foreword:router_continuations_total", outcome="impossible"),
        "retries": front.metric("foreword:router_retries_total"),
        "groups": {name: timings(ones) for name, ones in groups.items()},
        "per_replica": [sum(one.replica == server.url for one in answers) for server in fleet],
        "deaths": [back(death, answers) for death in deaths],
    }
    say(found, answers, verdicts)
    return found, int(counts["same"] + counts["near tie"] != len(answers) or not cut)


def timings(answers: list[Answer]) -> Report:
    gaps, times = [one.longest_gap for one in answers], [one.end - one.sent for one in answers]
    cached = hit_share(answers)
    return {
        "streams": len(answers),
        "hit_share": cached,
        "ttft_p50": quantile([one.ttft for one in answers], 0.5),
        "gap_p50": quantile(gaps, 0.5),
        "gap_max": max(gaps, default=float("nan")),
        "all_p50": quantile(times, 0.5),
        "all_max": max(times, default=float("nan")),
    }


def back(death: Death, answers: list[Answer]) -> Report:
    after = [one for one in answers if one.replica == death.url and one.sent > death.at]
    first = min((one.sent for one in after), default=None)
    pauses = [pause for one in death.cut if (pause := across(one, death.at))]
    return {
        "cut": len(death.cut),
        "cut_after_tokens": sorted(sum(at < death.at for at in one.events) for one in death.cut),
        "ready_again": death.ready - death.at,
        "first_request_again": None if first is None else first - death.at,
        "pause_p50": quantile(pauses, 0.5),
        "pause_max": max(pauses, default=float("nan")),
        "requests_since": len(after),
    }


def across(one: Answer, at: float) -> float:
    """Seconds from the last token before a kill to the first one after it; 0.0 if there is none."""
    before = [time for time in one.events if time < at]
    after = [time for time in one.events if time >= at]
    return after[0] - before[-1] if before and after else 0.0


def say(found: Report, answers: list[Answer], verdicts: list[str]) -> None:
    shown = ("failed", "tokens doubled or missing", "other tokens", "other text", "near tie", "same")
    print("\n" + table(["streams", "count"], [[name, str(found["verdicts"].get(name, 0))] for name in shown]))
    print(
        f"cut in the middle {found['cut']}, continued {found['continuations']:.0f}, impossible {found['impossible']:.0f}, "
        f"retries before the first byte {found['retries']:.0f}; per replica {' '.join(map(str, found['per_replica']))}; "
        f"{found['streams'] / found['seconds']:.1f} streams/s"
    )
    for one in found["deaths"]:
        again = one["first_request_again"]
        since = (
            f"{one['requests_since']} requests since, the first after {again:.1f} s" if again else "no request since"
        )
        print(
            f"killed: {one['cut']} streams cut after {one['cut_after_tokens']} tokens, silent for "
            f"{1e3 * one['pause_p50']:.0f} ms (median; longest {1e3 * one['pause_max']:.0f}); the server was ready again "
            f"after {one['ready_again']:.1f} s, {since}"
        )
    rows = [
        [name, str(one["streams"]), *(f"{1e3 * one[key]:.0f}" for key in one if key.endswith(("p50", "max")))]
        for name, one in found["groups"].items()
    ]
    print("\n" + table(["ms", "streams", "TTFT p50", "gap p50", "gap max", "whole p50", "whole max"], rows))
    for one, word in zip(answers, verdicts, strict=True):
        if word not in ("same", "near tie"):
            print(f"{word}: {one.wrong() or one.text!r} ({one.route[:60]}, {len(one.ids)} tokens)")


if __name__ == "__main__":
    sys.exit(main())
