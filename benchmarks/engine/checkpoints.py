"""Which checkpoints to save for models with window or recurrent layers: hits against bytes, on recorded traffic.

    python -m benchmarks.engine.checkpoints TRACE... [--block-size 512] [--models recurrent,window-128] [--sizes 1,0.1]
        [--chunk 2048]
    python -m benchmarks.engine.checkpoints --sessions 40 --sizes 1,0.15,0.1 --models recurrent

All files are one trace. `--sessions` makes up sessions of agents instead: one system prompt, 25 turns on average, of 444
tokens of answer and 2,500 of tool output, all three exponentially distributed.

Requests come one after the other, in order of arrival. One store holds the blocks of all groups. A request continues at the
last resumable position that the store has (`foreword/blocks/resume.py`). It saves the full blocks of its prompt and answer:
all blocks of full attention, and the blocks of the other groups that the policy wants. Blocks of full attention are evicted
as chains, leaf first, the others one by one, all by last use (`foreword/store/chain_lru.py`).

    every block     all blocks of all groups
    prompt end      the last boundary of each prompt
    both ends       the last boundaries of each prompt and of each turn
    plan            `foreword/blocks/checkpoints.py`
    plan, replaced  the same, and checkpoints that a later turn replaces are deleted; recurrent layers only

All blocks are equally large: vLLM gives the pages of all groups one size. Sizes of stores are shares of the blocks that
`every block` stores in all. `points`, `written` and `held` compare with `every block` in a store of the same size. `written`
and `held` count the blocks of window and recurrent groups only; `held` is the mean over the requests.

With `--chunk`, recurrent state exists only where a chunk of that many tokens ends, at the last boundary of the prompt, and at
every boundary of the answer.
"""

from __future__ import annotations

import argparse
import random
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count, pairwise
from pathlib import Path
from typing import Final

from benchmarks.harness import machine, set_up, table
from foreword.blocks.checkpoints import CheckpointPlan, ReplacedCheckpoints
from foreword.blocks.keys import Scope, chain_keys
from foreword.blocks.resume import GroupKind, KVGroup, longest_resumable
from foreword.sim.trace import TraceRequest, read_trace
from foreword.store.chain_lru import ChainLru

Wanted = Callable[[int, int], bool]
POLICIES: Final = ("every block", "prompt end", "both ends", "plan", "plan, replaced")


@dataclass(frozen=True, slots=True)
class Request:
    """Numbers of the full blocks of prompt and answer, and their lengths in tokens."""

    blocks: Sequence[int]
    prompt_tokens: int
    tokens: int


@dataclass(slots=True)
class Result:
    """Sums over a trace: tokens, and blocks of the groups without full attention."""

    hit_tokens: int = 0
    written: int = 0
    held: int = 0


class Cache:
    """A store of a number of blocks under one policy."""

    def __init__(self, groups: Sequence[KVGroup], slots: int, policy: str, chunk: int = 0) -> None:
        self.groups, self.policy, self.chunk = groups, policy, chunk
        self.size = groups[0].block_size
        self.lru = ChainLru(slots)
        self.result = Result()
        self.held = 0
        self.replaced = ReplacedCheckpoints()

    def serve(self, request: Request) -> None:
        blocks, now = request.blocks, self.lru.tick()
        resumed = longest_resumable(self.groups, request.prompt_tokens - 1, lambda g, i: self._has(blocks[i], g))
        cached = self._cached(request)
        for g, group in enumerate(self.groups):
            for i in group.needed(resumed):
                self.lru.touch(self.lru.index[name_of(blocks[i], g)], now)
        self._save(request, resumed, self._wanted(request, resumed, cached), now)
        if self.policy == "plan, replaced":
            self._replace(request, resumed, cached)
        self.result.hit_tokens += resumed
        self.result.held += self.held

    def _has(self, block: int, group: int) -> bool:
        return name_of(block, group) in self.lru.index

    def _cached(self, request: Request) -> int:
        """Leading tokens of the prompt of which full attention has the blocks."""
        full = request.prompt_tokens // self.size
        return next((i for i in range(full) if not self._has(request.blocks[i], 0)), full) * self.size

    def _wanted(self, request: Request, resumed: int, cached: int) -> Wanted:
        if self.policy == "every block":
            return lambda group, block: True
        if self.policy.startswith("plan"):
            return self._plan(request, resumed, cached).wanted
        ends = [request.prompt_tokens, request.tokens] if self.policy == "both ends" else [request.prompt_tokens]
        found = [{block for end in ends for block in group.needed(end - end % self.size)} for group in self.groups]
        return lambda group, block: block in found[group]

    def _plan(self, request: Request, resumed: int, cached: int) -> CheckpointPlan:
        sizes = [1] * len(self.groups)
        plan = CheckpointPlan(self.groups, sizes, request.prompt_tokens, resumed=resumed, cached=cached)
        if self.chunk:
            for start, stop in pairwise(self._chunk_ends(request, resumed)):
                plan.offer(start, stop)
        if self.groups[-1].kind is not GroupKind.STATE:
            plan.end_turn(request.tokens)
        for end in self._answer(request):
            plan.answered(end)
        return plan

    def _answer(self, request: Request) -> range:
        """The boundaries in the answer, if there is recurrent state: it must be saved while they are computed."""
        if self.groups[-1].kind is not GroupKind.STATE:
            return range(0)
        first = request.prompt_tokens - request.prompt_tokens % self.size + self.size
        return range(first, request.tokens + 1, self.size)

    def _chunk_ends(self, request: Request, resumed: int) -> list[int]:
        end = request.prompt_tokens - request.prompt_tokens % self.size
        return [*range(resumed, end, self.chunk - self.chunk % self.size), end]

    def _exists(self, request: Request, resumed: int) -> Callable[[KVGroup, int], bool]:
        """Whether a block of a group can be saved."""
        if not self.chunk:
            return lambda group, block: True
        ends = {end // self.size - 1 for end in self._chunk_ends(request, resumed)}
        answer = request.prompt_tokens // self.size
        return lambda group, block: group.kind is not GroupKind.STATE or block >= answer or block in ends

    def _save(self, request: Request, resumed: int, wanted: Wanted, now: int) -> None:
        blocks, exists = request.blocks, self._exists(request, resumed)
        for i, block in enumerate(blocks):
            self._put(name_of(block, 0), name_of(blocks[i - 1] if i else block, 0), i, now)
            for g, group in enumerate(self.groups[1:], start=1):
                if i >= resumed // self.size and wanted(g, i) and exists(group, i):
                    self._put(name_of(block, g), name_of(block, g), 0, now)

    def _replace(self, request: Request, resumed: int, cached: int) -> None:
        size, blocks = self.size, request.blocks
        positions = [request.prompt_tokens // size, *(end // size for end in self._answer(request))]
        saved = {p * size: name_of(blocks[p - 1], 1) for p in positions if p and self._has(blocks[p - 1], 1)}
        first = name_of(blocks[resumed // size - 1], 1) if resumed and cached == resumed else b""
        for name in self.replaced.ended(saved, resumed, first):
            for group in range(1, len(self.groups)):
                self._delete(bytes((group,)) + name[1:])

    def _delete(self, name: bytes) -> None:
        slot = self.lru.index.get(name)
        if slot is not None:
            self.lru.remove(slot)
            self.lru.free(slot)
            self.held -= 1

    def _put(self, name: bytes, parent: bytes, depth: int, now: int) -> None:
        slot = self.lru.index.get(name)
        if slot is not None:
            self.lru.touch(slot, now)
            return
        slot = self.lru.allocate(now)
        if slot is None:
            return
        if self.lru.evicted is not None:
            self.held -= is_sparse(self.lru.evicted)
        self.lru.add(slot, name, parent, depth, now)
        self.held += is_sparse(name)
        self.result.written += is_sparse(name)


def name_of(block: int, group: int) -> bytes:
    return bytes((group,)) + block.to_bytes(4, "big")


def is_sparse(name: bytes) -> bool:
    """Whether the block belongs to a group without full attention."""
    return name[0] > 0


def requests_of(trace: Sequence[TraceRequest], size: int) -> list[Request]:
    """Each request's full blocks as numbers. Blocks of answers that the trace does not contain are unique."""
    root = Scope(b"checkpoints", size).root()
    numbers: dict[bytes, int] = {}
    unique = count(1 << 31)
    found: list[Request] = []
    for one in trace:
        known = one.prompt() + one.output()
        tokens = one.prompt_tokens + one.output_tokens
        blocks = [numbers.setdefault(key, len(numbers)) for key in chain_keys(root, known, size)]
        blocks += [next(unique) for _ in range(tokens // size - len(blocks))]
        found.append(Request(blocks, one.prompt_tokens, tokens))
    return found


def growing_sessions(number: int, seed: int = 1) -> list[TraceRequest]:
    """Sessions that grow up to 140,000 tokens. Each prompt repeats the one before, its answer, and the output of a tool."""
    rng = random.Random(seed)
    system, found = unique_tokens(rng, 4300), []
    for session in range(number):
        text = system + unique_tokens(rng, rng.randrange(300, 2500))
        now = rng.uniform(0, 3000)
        for _ in range(max(2, int(rng.expovariate(1 / 25)))):
            answer = unique_tokens(rng, max(20, int(rng.expovariate(1 / 444))))
            found.append(TraceRequest(now, text + answer, 1, len(text), len(answer), str(session)))
            text = text + answer + unique_tokens(rng, max(30, int(rng.expovariate(1 / 2500))))
            now += rng.expovariate(1 / 400)
            if len(text) > 140_000:
                break
    return sorted(found, key=lambda one: one.arrival)


def unique_tokens(rng: random.Random, number: int) -> array[int]:
    return array("I", (rng.randrange(1 << 30) for _ in range(number)))


def model(name: str, size: int) -> list[KVGroup]:
    """`recurrent`: three groups of recurrent layers and one of full attention. `window-N`: five groups with windows of N
    tokens, and one of full attention."""
    if name == "recurrent":
        return [KVGroup(GroupKind.FULL, size), *[KVGroup(GroupKind.STATE, size)] * 3]
    return [KVGroup(GroupKind.FULL, size), *[KVGroup(GroupKind.WINDOW, size, span=int(name.partition("-")[2]))] * 5]


def replay(requests: Sequence[Request], groups: Sequence[KVGroup], slots: int, policy: str, chunk: int = 0) -> Result:
    cache = Cache(groups, slots, policy, chunk)
    for request in requests:
        cache.serve(request)
    return cache.result


def rows(requests: Sequence[Request], groups: Sequence[KVGroup], share: float, chunk: int) -> Iterator[list[str]]:
    everything = len({block for request in requests for block in request.blocks}) * len(groups)
    longest = max(len(request.blocks) for request in requests) * len(groups)
    slots = max(int(everything * share), longest)
    total = sum(request.prompt_tokens for request in requests)
    base = replay(requests, groups, slots, POLICIES[0], chunk)
    for policy in POLICIES if groups[-1].kind is GroupKind.STATE else POLICIES[:-1]:
        result = replay(requests, groups, slots, policy, chunk) if policy != POLICIES[0] else base
        yield [
            f"{slots / everything:.0%}",
            policy,
            f"{result.hit_tokens / total:.2%}",
            f"{(result.hit_tokens - base.hit_tokens) / total * 100:+.2f}",
            f"{result.written / base.written:.3f}",
            f"{result.held / base.held:.3f}",
        ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("traces", nargs="*", type=Path)
    parser.add_argument("--sessions", type=int, default=0, help="number of made-up sessions, without traces")
    parser.add_argument("--block-size", type=int, default=512)
    parser.add_argument("--models", default="recurrent,window-128,window-1024")
    parser.add_argument("--sizes", default="1,0.25,0.1,0.03", help="sizes of the store, as shares of all blocks")
    parser.add_argument("--chunk", type=int, default=0, help="tokens per chunk of prefill; 0: state at every boundary")
    parser.add_argument("--limit", type=int, help="only the first requests")
    args = parser.parse_args()
    trace = (read_trace(args.traces) if args.traces else growing_sessions(args.sessions))[: args.limit]
    requests = requests_of(trace, args.block_size)
    facts = machine() | {
        "traces": ", ".join(path.name for path in args.traces) or f"{args.sessions} made-up sessions",
        "requests": f"{len(requests):,}, {sum(one.prompt_tokens for one in requests):,} prompt tokens",
        "block size": f"{args.block_size} tokens",
        "state": f"at the ends of chunks of {args.chunk} tokens" if args.chunk else "at every boundary",
    }
    print(set_up(facts))
    for name in args.models.split(","):
        groups = model(name, args.block_size)
        found = [
            row for share in map(float, args.sizes.split(",")) for row in rows(requests, groups, share, args.chunk)
        ]
        print(f"\n{name}\n\n" + table(["store", "policy", "hits", "points", "written", "held"], found), flush=True)


if __name__ == "__main__":
    main()
