"""Sessions of agents that fork, shorten their history and end: what a cache gains from being told, or from seeing it itself.

    python -m benchmarks.simulator.lives [--sessions 60] [--device 0.25] [--memory 0] [--seed 1]

Sessions share a system prompt with tools and begin at random within the time given. Each step has the history before it, an
answer and the result of a tool. A share of them has sub-agents, which go on from the history so far (a fork) for some steps
and report; when a history gets too long, the agent asks for a summary and continues from that. The shape is that of public
agent traffic (`vllm.ai/blog/2026-09-08-vllm-agentx`: a median of 43 steps, sub-agents in 44 % of sessions), a tenth as long.

The device is the engine's own `PrefixCache`, and memory the stores' own `ChainLru`; requests come one after the other. `today`
knows nothing of sessions. to `told` clients say it; `seen` finds shortened histories as the server does, by
`foreword.api.misses`. The working set is what all sessions that live at one time have in their histories, at its most.
"""

from __future__ import annotations

import argparse
import itertools
import platform
import random
import time
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b

from benchmarks.simulator.workloads import drawn
from foreword.api.misses.causes import MissFinder
from foreword.api.misses.outline import first_difference
from foreword.api.request import CacheControl, GenerateRequest, Message, Role
from foreword.blocks.prefix_cache import PrefixCache
from foreword.blocks.session_book import Alone, SessionBook
from foreword.routing.directory import CacheTier
from foreword.sim.report import markdown_table
from foreword.sim.stores import SimulatedTier

BLOCK = 16
VOCABULARY = 32_000
TENANT = b"tenant"


@dataclass(frozen=True, slots=True)
class Event:
    """A step of a session: a `request` with these messages, of which the last is the answer; `fork`, `compact` or `end`."""

    at: float
    what: str
    session: str
    messages: tuple[Message, ...] = ()
    parent: str = ""


@dataclass(slots=True)
class Agents:
    """How agents behave. Lengths are tokens, times seconds.

    Attributes:
        system: the system prompt with tools, which all sessions share.
        task, result, answer, summary: ranges of lengths.
        steps: of a session, on average (log-normal). `sub_steps`: range of a sub-agent's.
        forking: share of the sessions that have sub-agents. `forks`: how many at most.
        longest: a history that is longer is replaced by a summary.
        think: mean time between an answer and the next request. `pause`: mean of the longer times, of which there is a share of
            `pausing`.
    """

    system: int = 1500
    task: tuple[int, int] = (100, 600)
    result: tuple[int, int] = (40, 500)
    answer: tuple[int, int] = (20, 120)
    summary: tuple[int, int] = (200, 500)
    steps: float = 43.0
    sub_steps: tuple[int, int] = (3, 12)
    forking: float = 0.44
    forks: int = 4
    longest: int = 12_000
    think: float = 6.0
    pause: float = 60.0
    pausing: float = 0.1


def sessions(count: int, seconds: float, agents: Agents, seed: int) -> list[Event]:
    """The events of `count` sessions that begin within `seconds`, in order of time."""
    events: list[Event] = []
    for number in range(count):
        rng = random.Random(f"{seed}/{number}")
        events += _Session(f"s{number}", agents, rng, rng.uniform(0, seconds)).run()
    return sorted(events, key=lambda one: one.at)


class _Session:
    def __init__(self, name: str, agents: Agents, rng: random.Random, now: float) -> None:
        self.name, self.agents, self.rng, self.now = name, agents, rng, now
        self.texts = 0
        self.system = self.text("system", agents.system, "system")

    def text(self, role: Role, tokens: int, seed: str = "") -> Message:
        """A message whose text stands for its tokens, by its length too."""
        self.texts += 1
        seed = blake2b((seed or f"{self.name}/{self.texts}").encode(), digest_size=8).hexdigest()
        return Message(role, "".join(chr(ord("a") + int(one, 16)) for one in seed) + "y" * tokens)

    def some(self, bounds: tuple[int, int]) -> int:
        return self.rng.randint(*bounds)

    def wait(self) -> None:
        mean = self.agents.pause if self.rng.random() < self.agents.pausing else self.agents.think
        self.now += self.rng.expovariate(1 / mean)

    def run(self) -> Iterator[Event]:
        agents, rng = self.agents, self.rng
        history = [self.system, self.text("user", self.some(agents.task))]
        yield Event(self.now, "open", self.name)
        steps = max(int(rng.lognormvariate(0, 0.6) * agents.steps), 3)
        forks = set(rng.sample(range(1, steps), min(rng.randint(1, agents.forks), steps - 1)))
        forks = forks if rng.random() < agents.forking else set()
        for step in range(steps):
            answer = self.text("assistant", self.some(agents.answer))
            yield Event(self.now, "request", self.name, (*history, answer))
            history.append(answer)
            if step in forks:
                yield from self.fork(history, f"{self.name}.{step}")
            self.wait()
            history.append(self.text("tool", self.some(agents.result)))
            if sum(map(length, history)) > agents.longest:
                ask, summary = self.text("user", 30), self.text("user", self.some(agents.summary))
                yield Event(self.now, "request", self.name, (*history, ask, summary))
                yield Event(self.now, "compact", self.name)
                history = [history[0], summary, *history[-2:]]
        yield Event(self.now, "end", self.name)

    def fork(self, history: Sequence[Message], name: str) -> Iterator[Event]:
        """A sub-agent, for which the session waits."""
        own = [*history, self.text("user", self.some(self.agents.task))]
        yield Event(self.now, "fork", name, parent=self.name)
        for _ in range(self.some(self.agents.sub_steps)):
            answer = self.text("assistant", self.some(self.agents.answer))
            yield Event(self.now, "request", name, (*own, answer))
            self.now += self.rng.expovariate(1 / self.agents.think)
            own += [answer, self.text("tool", self.some(self.agents.result))]
        yield Event(self.now, "end", name)


def length(message: Message) -> int:
    return len(message.content) - 16


class Keys:
    """The keys of the full blocks of messages."""

    def __init__(self) -> None:
        self.tokens: dict[str, array[int]] = {}

    def __call__(self, messages: Sequence[Message]) -> tuple[int, list[bytes]]:
        tokens: array[int] = array("I")
        for one in messages:
            if one.content not in self.tokens:
                seed = int.from_bytes(blake2b(one.content.encode(), digest_size=6).digest(), "little")
                self.tokens[one.content] = drawn(seed, length(one), VOCABULARY)
            tokens.extend(self.tokens[one.content])
        key, found, raw = b"", [], tokens.tobytes()
        for at in range(0, len(tokens) // BLOCK * BLOCK * 4, BLOCK * 4):
            key = blake2b(key + raw[at : at + BLOCK * 4], digest_size=32).digest()
            found.append(key)
        return len(tokens), found


@dataclass(slots=True)
class Prepared:
    """An event with the keys of its prompt and of prompt and answer."""

    event: Event
    prompt: int = 0
    prompt_keys: Sequence[bytes] = ()
    keys: Sequence[bytes] = ()


def prepared(events: Sequence[Event]) -> list[Prepared]:
    keys = Keys()
    found = []
    for one in events:
        if one.what != "request":
            found.append(Prepared(one))
            continue
        prompt, prompt_keys = keys(one.messages[:-1])
        found.append(Prepared(one, prompt, prompt_keys, keys(one.messages)[1]))
    return found


def working_set(events: Sequence[Prepared]) -> int:
    """Blocks of the histories of all sessions that live at one time, at its most."""
    living: dict[str, Sequence[bytes]] = {}
    uses: dict[bytes, int] = {}
    most = 0

    def change(keys: Sequence[bytes], by: int) -> None:
        for key in keys:
            uses[key] = uses.get(key, 0) + by
            if not uses[key]:
                del uses[key]

    for one in events:
        name = one.event.session
        if one.event.what == "request":
            change(living.get(name, ()), -1)
            living[name] = one.keys
            change(one.keys, 1)
        elif one.event.what in ("compact", "end"):
            change(living.pop(name, ()), -1)
        most = max(most, len(uses))
    return most


@dataclass(slots=True)
class Result:
    """Prompt blocks, those found on the device, and those loaded; blocks written to memory and to the disk; seconds that an end
    took."""

    prompts: int = 0
    hits: int = 0
    loaded: int = 0
    to_memory: int = 0
    to_disk: int = 0
    ended: list[float] = field(default_factory=list)


class Replay:
    """One replica with a disk without bounds. `policy`: `today`, `told` or `seen`. What is computed is written to the disk
    when more waits than `hold` of memory, the oldest first, if memory still has it and it was not dropped."""

    def __init__(self, device: int, memory: int, policy: str, hold: float) -> None:
        self.cache = PrefixCache(device, BLOCK, partial_reuse=False)
        self.memory = SimulatedTier(CacheTier.HOST, memory) if memory else None
        self.disk: set[bytes] = set()
        self.late: dict[bytes, None] = {}
        self.book = SessionBook(most_noted=1024)
        self.finder = MissFinder()
        self.policy, self.held = policy, int(memory * hold)
        self.result = Result()
        self.requests = 0
        self.supersedes = ""

    def run(self, events: Sequence[Prepared]) -> Result:
        for one in events:
            event = one.event
            self.write_late()
            if event.what == "request":
                self.request(one)
            elif self.policy == "told":
                began = time.perf_counter()
                if event.what in ("open", "fork"):
                    self.book.open(TENANT, event.session, event.parent)
                else:
                    self.retire(getattr(self.book, event.what)(TENANT, event.session))
                if event.what == "end":
                    self.result.ended.append(time.perf_counter() - began)
        self.write_late(0)
        return self.result

    def request(self, one: Prepared) -> None:
        self.requests += 1
        name, self.supersedes = f"r{self.requests}", ""
        if self.policy == "seen":
            self.look(one, name)
        table = self.cache.open(array("I", bytes(4 * BLOCK * len(one.keys))))
        table.chain.keys = list(one.keys)
        match = self.cache.lookup(table)
        found = min(len(match.blocks), len(one.prompt_keys))
        known = found
        while self.memory is not None and known < len(one.prompt_keys) and self.has(one.prompt_keys[known]):
            known += 1
        self.cache.admit(table, match)
        if not self.cache.advance(table, len(one.keys) * BLOCK):
            raise SystemExit("a history does not fit into the device")
        self.cache.release(table)
        self.result.prompts += len(one.prompt_keys)
        self.result.hits += found
        self.result.loaded += known - found
        if self.memory is not None:
            self.store(one.keys, known)
        if self.policy != "today":
            session = one.event.session if self.policy == "told" else ""
            used = TENANT, name, b"root", one.keys, known
            for alone in self.book.note(*used, session=session, supersedes=self.supersedes):
                self.retire(alone)

    def has(self, key: bytes) -> bool:
        return (self.memory is not None and key in self.memory) or key in self.disk

    def store(self, keys: Sequence[bytes], known: int) -> None:
        """Put blocks that were computed, or loaded from the disk, into memory."""
        assert self.memory is not None
        self.result.to_memory += sum(key not in self.memory for key in keys)
        for key in keys[known:]:
            if key not in self.disk:
                self.late[key] = None
        self.memory.put(b"root", 0, keys, lambda *_: None, lambda *_: None)

    def write_late(self, most: int = -1) -> None:
        """Write the oldest of what waits, until no more of it waits than the disk's tier holds back."""
        most = self.held if most < 0 else most
        while len(self.late) > most:
            key = next(iter(self.late))
            del self.late[key]
            if self.memory is not None and (not self.held or key in self.memory):
                self.disk.add(key)
                self.result.to_disk += 1

    def look(self, one: Prepared, name: str) -> None:
        """Serve a request: find the conversation that it is nearest to."""
        request = GenerateRequest("chat", messages=one.event.messages[:-1], cache=CacheControl())
        conversation = self.finder.begin(request, "tenant")
        conversation.request = name
        old = conversation.nearest
        if old is not None:
            difference = first_difference(old, conversation)
            if difference is not None and difference.change == "compacted":
                self.supersedes = old.request
        self.finder.explain(conversation, one.prompt, 0)

    def retire(self, alone: Alone) -> None:
        self.cache.retire(alone.keys, drop=alone.drop)
        for key in reversed(alone.keys):
            self.late.pop(key, None)
            if alone.drop:
                self.disk.discard(key)
                if self.memory is not None and key in self.memory:
                    slot = self.memory.chains.index[key]
                    self.memory.chains.remove(slot)
                    self.memory.chains.free(slot)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sessions", type=int, default=60)
    parser.add_argument("--seconds", type=float, default=1200.0, help="within which they begin")
    parser.add_argument("--device", default="0.25", help="shares of the working set")
    parser.add_argument("--memory", default="0,0.5", help="shares of the working set")
    parser.add_argument("--hold", default="0,0.5", help="shares of memory whose blocks wait to be written to the disk")
    parser.add_argument("--policies", default="today,seen,told")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    events = prepared(sessions(args.sessions, args.seconds, Agents(), args.seed))
    requests = [one for one in events if one.event.what == "request"]
    whole = working_set(events)
    counts = {what: sum(one.event.what == what for one in events) for what in ("fork", "compact", "end")}
    print(
        f"{args.sessions} sessions, {len(requests)} requests, {counts}, working set {whole * BLOCK:,} tokens; all: "
        f"{len({key for one in requests for key in one.keys}) * BLOCK:,}. {platform.machine()}, {time.strftime('%F')}\n"
    )
    rows = []
    sizes = (map(float, one.split(",")) for one in (args.device, args.memory, args.hold))
    for device, memory, hold in itertools.product(*sizes):
        if hold and not memory:
            continue
        for policy in args.policies.split(","):
            one = Replay(int(whole * device), int(whole * memory), policy, hold).run(events)
            slowest = f"{max(one.ended) * 1e3:.1f} ms" if one.ended else "-"
            found = (one.hits / one.prompts, (one.hits + one.loaded) / one.prompts)
            written = (one.to_memory * BLOCK, one.to_disk * BLOCK)
            where = f"{policy}, device {device:.0%}, memory {memory:.0%}, hold {hold:.0%}"
            shown = [*(f"{share:.1%}" for share in found), *(f"{tokens:,}" for tokens in written), slowest]
            rows.append([where, *shown])
            print(rows[-1], flush=True)
    print(markdown_table(["", "hits on the device", "hits", "tokens to memory", "to the disk", "slowest end"], rows))


if __name__ == "__main__":
    main()
