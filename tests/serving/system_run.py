"""A seeded run of faults over the whole system: servers with memory, disk and Redis, a prefill server, a router, all real.

    make faults-system [SECONDS=3600] [SEED=1]
    python tests/serving/system_run.py --seed 1 --round 17

Clients send completions and chats over shared prefixes, with and without streams, with aborts, several choices, salts, sessions
and named prefixes, while servers are killed, stopped, drained and cut off, requests migrate, and stores are damaged, filled,
killed and stopped. After each round everything is repaired. The table counts:

- wrong: answers with another token, text, finish reason or usage than a server without a cache gives, also of broken streams;
  and blocks that a request with a new salt found,
- lost: requests that ended with an error although the router ran and another server was up; `_excuse` has the rules,
- odd: calls of an operator and processes that ended otherwise than documented; tracebacks in the logs,
- leak: blocks, requests, transfers, files, threads and memory that a process still has after a round.

The traffic and the faults of a round come from the seed and its number. The times do not, and neither does what earlier rounds
have stored.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import random
import re
import signal
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    for folder in ("serving", "store", "transfer"):
        sys.path.append(str(Path(__file__).parents[1] / folder))

import http_client
import httpx
from system_faults import OPERATIONS, SERVERS, STORES, Faults
from system_fleet import Fleet, levels, metric, shared_memory
from system_traffic import Answer, Ask, Client, Library, Reference, difference, drawn

CLIENTS = 6
EPOCH = 6  # rounds with the same prompts
KEPT = "kept"
KEPT_CONTENT = [{"role": "system", "content": "def answer(question): return the shortest true answer. " * 6}]
PATIENCE = 60.0
BLOCK_TOKENS = 16
BLOCK_BYTES = BLOCK_TOKENS * 4608  # of the embedded model in float32
# The most that a process may have beyond its level after its first round: idle connections and threads.
SLACK = {"files": 64, "threads": 48, "MiB": 192}
QUIET = (
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "foreword:transfer_under_way",
    "foreword:store_queued_blocks",
)
# Counters that show that the paths under test were taken; of processes that were not killed in the same round.
EVENTS = {
    "blocks loaded from stores": "foreword:store_loaded_blocks_total",
    "damaged blocks refused": "foreword:tier_bad_blocks_total",
    "blocks evicted from tiers": "foreword:tier_evictions_total",
    "failed calls of tiers": "foreword:tier_errors_total",
    "KV transfers": "foreword:transfer_transfers_total",
}
ROUTER_EVENTS = {
    "retries": "foreword:router_retries_total",
    "continued streams": "foreword:router_continuations_total",
    "migrated streams": "foreword:router_moved_total",
}
ROUTER_QUIET = ("foreword:router_in_flight", "foreword:router_waiting", "foreword:router_queue_length")


@dataclass
class Round:
    """Results of a round."""

    number: int
    began: str = field(default_factory=lambda: time.strftime("%H:%M:%S"))
    requests: int = 0
    right: int = 0
    aborted: int = 0
    failed: int = 0
    faults: Counter[str] = field(default_factory=Counter)
    errors: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    excused: list[str] = field(default_factory=list)
    odd: list[str] = field(default_factory=list)
    leaks: list[str] = field(default_factory=list)
    cached: int = 0
    prompt: int = 0
    levels: dict[str, dict[str, int]] = field(default_factory=dict)
    events: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0

    def line(self) -> str:
        errors = ", ".join(f"{count} {name}" for name, count in sorted(self.errors.items())) or "none"
        return (
            f"round {self.number} at {self.began}: {self.requests} requests, {self.right} right, {self.aborted} aborted, "
            f"{sum(self.faults.values())} faults, cached {self.cached / max(self.prompt, 1):.0%}, wrong {len(self.wrong)}, "
            f"lost {len(self.lost)}, odd {len(self.odd)}, leaks {len(self.leaks)}, errors: {errors}, {self.seconds:.0f} s"
        )


class Run:
    """Rounds of one seed on one fleet."""

    def __init__(self, fleet: Fleet, client: Client, seed: int) -> None:
        self.fleet = fleet
        self.client = client
        self.seed = seed
        self.reference = Reference(client, fleet.reference.url)
        self.reference.contents[KEPT] = KEPT_CONTENT
        self._first: dict[int, dict[str, int]] = {}
        self._counted: dict[tuple[int, str], float] = {}
        self._seen = 0
        self.names: dict[str, list[tuple[str, float, float]]] = {}
        self._uncertain: set[str] = set()  # names whose last change has failed

    async def begin(self) -> None:
        self.faults = Faults(self.fleet)
        self.result = Round(-1)
        await self._register(KEPT, KEPT_CONTENT)

    async def round(self, number: int) -> Round:
        """Traffic and faults at a time; then repair, and look for what is left."""
        began = self.began = time.monotonic()
        self.result = Round(number)
        self.faults = Faults(self.fleet)
        self.library = Library(f"{self.seed}/library/{number // EPOCH}")
        self.reference.contents.update(self.library.named)
        self.names = {name: [] for name in self.library.named}
        self._ended = asyncio.Event()
        self._sent = 0
        workers = [asyncio.create_task(self._clients()) for _ in range(CLIENTS)]
        workers.append(asyncio.create_task(self._conversations()))
        try:
            await asyncio.gather(*(self._schedule(group) for group in (SERVERS, STORES, OPERATIONS)), self._prefixes())
        finally:
            self._ended.set()
        await asyncio.gather(*workers)
        await self._check()
        self.result.odd += self.faults.odd
        self.result.faults.update(window.kind for window in self.faults.windows)
        self.result.seconds = time.monotonic() - began
        return self.result

    # Traffic

    async def _clients(self) -> None:
        while not self._ended.is_set():
            self._sent += 1
            draw = random.Random(f"{self.seed}/{self.result.number}/{self._sent}")
            await self._send(drawn(draw, self.library, KEPT))

    async def _conversations(self) -> None:
        draw = random.Random(f"{self.seed}/{self.result.number}/chats")
        while not self._ended.is_set():
            system, *questions = draw.choice(self.library.chats)
            messages = [{"role": "system", "content": system}]
            for question in questions:
                messages = [*messages, {"role": "user", "content": question}]
                body = {"messages": messages, "max_tokens": 40, "temperature": 0}
                answer = await self._send(Ask("/v1/chat/completions", body, draw.random() < 0.7, session=system[:20]))
                if answer.error:
                    break
                messages.append({"role": "assistant", "content": answer.texts[0]})

    async def _send(self, ask: Ask) -> Answer:
        if "kv_transfer_params" in ask.body:
            ask.body["kv_transfer_params"] = {"prefill": self.fleet.transfer}
        url = self.fleet.router_url if ask.direct < 0 else self.fleet.replicas[ask.direct].url
        answer = await self.client.send(url, ask)
        await self._judge(ask, answer)
        if not answer.status:
            await asyncio.sleep(0.2)  # the router or a server is down
        return answer

    async def _judge(self, ask: Ask, answer: Answer) -> None:
        result = self.result
        result.requests += 1
        what = self._described(ask, answer)
        wrong = difference(answer, await self.reference.of(ask))
        if ask.alone and answer.cached:
            wrong = f"{answer.cached} tokens of another salt"
        if wrong:
            result.wrong.append(f"{wrong}: {what}")
        elif answer.left:
            result.aborted += 1
        elif not answer.error:
            result.right += 1
            result.cached += answer.cached
            result.prompt += int(answer.usage["prompt_tokens"])
        else:
            result.failed += 1
            result.errors[f"{answer.status} {answer.code or answer.error.partition(':')[0]}"] += 1
            excuse = self._excuse(ask, answer)
            (result.excused if excuse else result.lost).append(f"{excuse}: {what}")

    def _described(self, ask: Ask, answer: Answer) -> str:
        """The request without its text, the answer, and the faults of that time; times in seconds of the round."""
        body = {name: value for name, value in ask.body.items() if name not in ("prompt", "messages")}
        found = {name: getattr(answer, name) for name in ("status", "code", "error", "route", "finishes", "usage")}
        found["tokens"] = {index: len(ids) for index, ids in answer.ids.items()}
        near = [
            f"{one.kind}, {one.subject}, {one.began - self.began:.1f} to {one.ended - self.began:.1f}"
            for one in self.faults.windows
            if one.began < answer.ended and one.ended > answer.began - 5
        ]
        times = f"{answer.began - self.began:.1f} to {answer.ended - self.began:.1f}"
        how = {"path": ask.path, "stream": ask.stream, "direct": ask.direct, "session": ask.session}
        return json.dumps([times, how, body, found, near])

    def _excuse(self, ask: Ask, answer: Answer) -> str:
        """Why a request was not promised an answer; empty if it was. The router sends a request that a server fails to
        another one, and continues its stream there, if it has one choice. A second failure may end it."""
        began, ended = answer.began, answer.ended
        servers = self.faults.overlapping(began - 0.5, ended, *(server.name for server in self.fleet.servers))
        if answer.code == "prefix_not_found" and ask.prefix in self.names:
            return "" if self._registered(ask.prefix, began, ended) else "the prefix was not registered all the time"
        if ask.direct >= 0:
            return "a server failed, without a router" if servers else ""
        if self.faults.overlapping(began, ended, "router"):
            return "the router was killed"
        if len({window.subject for window in servers}) > 1:
            return "two servers failed"
        return (
            "a stream with several choices, and a server failed" if servers and ask.stream and "n" in ask.body else ""
        )

    # Named prefixes

    async def _prefixes(self) -> None:
        draw = random.Random(f"{self.seed}/{self.result.number}/prefixes")
        for _ in range(8):
            name = draw.choice(list(self.names))
            started = time.monotonic()
            registered = [kind for kind, _, _ in self.names[name]][-1:] == ["register"]
            kind = "delete" if registered else "register"
            self.names[name].append((kind, started, float("inf")))
            done = await (self._delete(name) if registered else self._register(name, self.library.named[name]))
            self.names[name][-1] = (kind if done else "unknown", started, time.monotonic())
            await asyncio.sleep(draw.random() * 2)

    def _registered(self, name: str, began: float, ended: float) -> bool:
        """Whether a prefix was registered before a time and until its end."""
        before = [change for change in self.names[name] if change[1] < ended]
        return bool(before) and before[-1][0] == "register" and before[-1][2] < began

    async def _register(self, name: str, messages: list[dict[str, str]]) -> bool:
        return await self._call("PUT", name, {"messages": messages})

    async def _delete(self, name: str) -> bool:
        return await self._call("DELETE", name, None)

    async def _call(self, method: str, name: str, body: Any) -> bool:
        """Change a named prefix through the router; false if that failed. It may fail while the router or a server does."""
        began = time.monotonic()
        url = f"{self.fleet.router_url}/v1/prefixes/{name}"
        try:
            done = await asyncio.to_thread(http_client.request, method, url, json=body)
            failure = "" if done.status_code in (200, 201, 404) else f"{done.status_code} {done.text[:300]}"
        except httpx.TransportError as error:
            failure = f"{type(error).__name__}: {error}"
        excuses = ["router", *(server.name for server in self.fleet.servers)]
        if failure.startswith("503"):  # what a named prefix is recorded in does not answer
            excuses.append("store")
        (self._uncertain.add if failure else self._uncertain.discard)(name)
        full = "prefix_budget_exceeded" in failure
        if full:  # a store that does not answer does not say which names were removed elsewhere
            excuses.append("store")
        accounted = full and await self._accounted(done.text)
        if failure and not accounted and not self.faults.overlapping(began, time.monotonic(), *excuses):
            self.result.odd.append(f"{method} of a prefix: {failure}")
        return not failure and done.status_code != 404

    async def _accounted(self, refusal: str) -> bool:
        """Whether names take all that is pinned where a budget is spent: those that are registered, or whose last change has
        failed, in this round or before. Else a server keeps what no name has."""
        said = re.search(r"of the ([0-9,]+) bytes that named prefixes may pin ([0-9,]+) are left", refusal)
        budget, left = (int(one.replace(",", "")) for one in said.groups()) if said else (1, 0)
        removed = {name for name, changes in self.names.items() if [kind for kind, _, _ in changes[-1:]] == ["delete"]}
        for server in self.fleet.replicas:
            try:
                listed = (await asyncio.to_thread(http_client.get, f"{server.url}/v1/prefixes")).json()["data"]
            except (httpx.HTTPError, ValueError, KeyError):  # it was killed meanwhile
                continue
            names = {one["id"]: one["num_tokens"] // BLOCK_TOKENS * BLOCK_BYTES for one in listed}
            if sum(size for name, size in names.items() if name not in removed - self._uncertain) >= budget - left:
                return True
        return False

    # Faults

    async def _schedule(self, group: dict[str, Any]) -> None:
        """A few faults of a group, one after the other, each at a number of requests."""
        draw = random.Random(f"{self.seed}/{self.result.number}/{min(group)}")
        count = 3 if group is SERVERS else 5
        for kind in draw.choices(list(group), k=count):
            after = self._sent + draw.randrange(1, 12)
            while self._sent < after:
                await asyncio.sleep(0.02)
            await asyncio.to_thread(self.faults.run, kind, draw)

    # After a round

    async def _check(self) -> None:
        for name in self.library.named:
            await self._call("DELETE", name, None)
        try:
            await asyncio.to_thread(self.fleet.wait_routed)
        except AssertionError:
            self.result.odd.append("the router does not send requests to all servers again")
        for number in range(len(self.fleet.replicas)):
            await self._check_salts(number)
        await self._until_quiet()
        self._check_levels()
        await asyncio.to_thread(self._count_events)
        text = self.fleet.logs()
        found = text.count("Traceback")
        if found > self._seen:
            self.result.odd.append("a traceback: " + text[text.rindex("Traceback") :][:2000])
        self._seen = found

    async def _check_salts(self, replica: int) -> None:
        """A new salt finds nothing, then its own blocks, and another new salt nothing of them. Nothing is damaged now, so no
        request may fail."""
        body = {"prompt": self.library.prompts[0]["prompt"], "max_tokens": 12, "temperature": 0}
        one, two = ({"cache_salt": f"{self.result.number}-{random.randrange(1 << 60):x}"} for _ in range(2))
        await self._send(Ask("/v1/completions", body | one, True, direct=replica, alone=True))
        answer = await self._send(Ask("/v1/completions", body | one, False, direct=replica))
        if not answer.cached and not answer.error:
            self.result.odd.append(f"replica {replica} finds nothing of a prompt that it has just computed")
        await self._send(Ask("/v1/completions", body | two, True, direct=replica, alone=True))
        await self._send(Ask("/v1/chat/completions", {**QUESTION, "prefix": KEPT}, False, direct=replica, prefix=KEPT))

    async def _until_quiet(self) -> None:
        """No request, transfer or write is left, and every block is free but those that named prefixes pin and the
        router retains for a server that has joined."""
        deadline = time.monotonic() + PATIENCE
        while left := await asyncio.to_thread(self._left):
            if time.monotonic() > deadline:
                self.result.leaks += left
                return
            await asyncio.sleep(0.2)

    def _left(self) -> list[str]:
        left = [f"router: {name}" for name in ROUTER_QUIET if metric(self.fleet.router_url, name)]
        for server in self.fleet.servers:
            left += [f"{server.name}: {name} {server.metric(name)}" for name in QUIET if server.metric(name)]
            total, free, pinned, retained = (
                server.metric(f"foreword:{name}")
                for name in ("blocks", "blocks_free", "blocks_pinned", "prefix_retained_bytes")
            )
            kept = pinned + retained / BLOCK_BYTES
            if total - free > kept:
                left.append(f"{server.name}: {total - free:.0f} blocks in use, {kept:.0f} pinned or retained")
        return left

    def _count_events(self) -> None:
        assert self.fleet.router is not None
        sources = [(one.pid, one.url, EVENTS) for one in self.fleet.servers]
        for pid, url, names in [*sources, (self.fleet.router.popen.pid, self.fleet.router_url, ROUTER_EVENTS)]:
            for name, counter in names.items():
                now = metric(url, counter)
                self.result.events[name] += int(now - self._counted.get((pid, name), 0))
                self._counted[pid, name] = now

    def _check_levels(self) -> None:
        assert self.fleet.router is not None
        pids = {server.name: server.pid for server in self.fleet.servers} | {"router": self.fleet.router.popen.pid}
        for name, pid in pids.items():
            now = self.result.levels[name] = levels(pid)
            first = self._first.setdefault(pid, now)
            self.result.leaks += [
                f"{name}: {now[kind]} {kind}, {first[kind]} after its first round"
                for kind, slack in SLACK.items()
                if now[kind] > first[kind] + slack
            ]
        for folder in self.fleet.disks:
            used = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
            if used > 40 << 20:
                self.result.leaks.append(f"{folder.name}: {used >> 20} MiB of files in a disk tier of 32 MiB")


QUESTION = {"messages": [{"role": "user", "content": "def main"}], "max_tokens": 24, "temperature": 0}


async def campaign(seconds: float, seed: int, only: int | None, report: Path | None) -> list[Round]:
    """Rounds until the time is over, or one round."""
    fleet = Fleet()
    results: list[Round] = []
    began = time.monotonic()
    try:
        fleet.start()
        print(f"seed {seed}, started in {time.monotonic() - began:.0f} s", flush=True)
        async with Client() as client:
            run = Run(fleet, client, seed)
            await run.begin()
            number = only or 0
            while not results or (only is None and time.monotonic() - began < seconds):
                results.append(await run.round(number))
                number += 1
                tell(results[-1])
                if report:
                    report.write_text(json.dumps([vars(one) for one in results], indent=1))
        segments = shared_memory() - fleet.segments
        fleet.close()
        if left := {name for name in segments if name in shared_memory()}:
            results[-1].leaks.append(f"shared memory: {sorted(left)}")
            print(f"  leaks: {results[-1].leaks[-1]}", flush=True)
    finally:
        if report:
            report.with_suffix(".logs").write_text(fleet.logs())
        fleet.close()
    return results


def tell(result: Round) -> None:
    print(result.line(), flush=True)
    for kind in ("wrong", "lost", "odd", "leaks"):
        for one in getattr(result, kind)[:5]:
            print(f"  {kind}: {one}", flush=True)


def main() -> int:
    """Run it, print the table. Status 1 if a figure that must be 0 is not."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--round", type=int, help="this round only")
    parser.add_argument("--json", type=Path, help="file for the figures of all rounds; beside it one for the logs")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    logging.getLogger("httpx").setLevel(logging.WARNING)
    results = asyncio.run(campaign(arguments.seconds, arguments.seed, arguments.round, arguments.json))
    print(summary(results))
    return int(any(one.wrong or one.lost or one.odd or one.leaks for one in results))


def summary(results: list[Round]) -> str:
    """Markdown tables: the figures, the faults, the errors."""
    figures = {name: sum(getattr(one, name) for one in results) for name in ("requests", "right", "aborted", "failed")}
    figures |= {name: sum(len(getattr(one, name)) for one in results) for name in ("wrong", "lost", "odd", "leaks")}
    totals: dict[str, Counter[str]] = {name: Counter() for name in ("faults", "events", "errors")}
    for one in results:
        for name, total in totals.items():
            total.update(getattr(one, name))
    lines = [f"| rounds | faults | {' | '.join(figures)} |", "|---:" * (len(figures) + 2) + "|"]
    counts = " | ".join(f"{value:,}" for value in figures.values())
    lines += [f"| {len(results)} | {totals['faults'].total():,} | {counts} |", ""]
    for name, total in totals.items():
        lines.append(f"{name}: " + (", ".join(f"{what} {count:,}" for what, count in sorted(total.items())) or "none"))
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
