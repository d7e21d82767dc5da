"""Which block should go: ours (LRU over leaves first) against the offline optimum, and against cleverer policies.

    python -m benchmarks.simulator.eviction TRACE... [--sizes 500000,1000000,...] [--svg FILE]

One pool, requests one after the other, in order of arrival; a request's full blocks are looked up from the front and those that
are missing are stored. The share of prompt blocks found is what counts.

`pool` is the engine's own PrefixCache and `store` the stores' ChainLru. `optimum` is Belady's MIN: it knows the future and
may decline to store: the block whose next use is farthest goes. Every use of a block is a use of the blocks before it, so a
parent is never needed later than its child: among those whose next use is farthest there is always a leaf, and the chains' rule
that tails go first costs the optimum nothing. It is a bound for the pool, which must hold a prompt while it is computed, and
exact for a store that may decline.

`lfu` takes the leaf with the fewest uses, ageing as in GreedyDual (Cao and Irani, 1997; a block's worth is the worth of what
went last at the time of its last use, plus its uses); `slru` takes leaves that were never found again first (Karedla, Love
and Wherry, 1994), with at most four fifths for the others; `depth` takes the leaf with the least of last use plus a bonus for
its depth, because what lies deep costs more attention.
"""

from __future__ import annotations

import argparse
import heapq
import math
import platform
import time
from array import array
from collections import OrderedDict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from foreword.blocks.prefix_cache import PrefixCache
from foreword.routing.directory import CacheTier
from foreword.sim.report import as_file, svg
from foreword.sim.stores import SimulatedTier
from foreword.sim.trace import block_size_of, read_trace

Block = int
NEVER = 1 << 60


class Policy(Protocol):
    """A pool of a number of blocks. `request` returns how many leading blocks were found."""

    def request(self, blocks: Sequence[Block], first_access: int) -> int: ...


class Pool:
    """The engine's own."""

    def __init__(self, size: int, names: Sequence[bytes]) -> None:
        self.cache = PrefixCache(size, 1, partial_reuse=False)
        self.names = names

    def request(self, blocks: Sequence[Block], first_access: int) -> int:
        table = self.cache.open(array("I", bytes(4 * len(blocks))))
        table.chain.keys = [self.names[block] for block in blocks]
        match = self.cache.lookup(table)
        self.cache.admit(table, match)
        if not self.cache.advance(table, len(blocks)):
            raise SystemExit("a prompt does not fit into the pool")
        self.cache.release(table)
        return len(match.blocks)


class Stored:
    """The stores' own."""

    def __init__(self, size: int, names: Sequence[bytes]) -> None:
        self.tier = SimulatedTier(CacheTier.HOST, size)
        self.names = names

    def request(self, blocks: Sequence[Block], first_access: int) -> int:
        keys = [self.names[block] for block in blocks]
        found = leading(keys, self.tier.chains.index)
        self.tier.put(b"", 0, keys, lambda *_: None, lambda *_: None)
        return found


class Optimum:
    """Belady's MIN. `next_use[i]` is when the block of access i is used again."""

    def __init__(self, size: int, next_use: Sequence[int]) -> None:
        self.size, self.next_use = size, next_use
        self.held: dict[Block, int] = {}
        self.heap: list[tuple[int, int, Block]] = []

    def request(self, blocks: Sequence[Block], first_access: int) -> int:
        found = leading(blocks, self.held)
        for depth, block in enumerate(blocks):
            use = self.next_use[first_access + depth]
            if block not in self.held:
                if use == NEVER:
                    continue
                if len(self.held) >= self.size and not self._evict(use, depth):
                    continue
            self.held[block] = use
            heapq.heappush(self.heap, (-use, -depth, block))
        return found

    def _evict(self, use: int, depth: int) -> bool:
        """Room for a block that is used again at `use`; False if it is the one that should go."""
        while self.heap:
            farthest, deepest, block = self.heap[0]
            if self.held.get(block) != -farthest:
                heapq.heappop(self.heap)
                continue
            if (farthest, deepest) >= (-use, -depth):
                return False
            heapq.heappop(self.heap)
            del self.held[block]
            return True
        return False


class Leaves:
    """Takes the leaf with the least worth. `worth(uses, age, now, depth)` is computed when a block is used; `age` is the worth
    of what went last."""

    def __init__(self, size: int, worth: Callable[[int, float, int, int], float]) -> None:
        self.size, self.worth = size, worth
        self.now, self.age = 0, 0.0
        self.held: dict[Block, tuple[float, int]] = {}
        self.parents: dict[Block, Block] = {}
        self.children: dict[Block, int] = {}
        self.heap: list[tuple[float, int, Block]] = []

    def request(self, blocks: Sequence[Block], first_access: int) -> int:
        self.now += 1
        found = leading(blocks, self.held)
        path = set(blocks)
        for depth, block in enumerate(blocks):
            uses = 1
            if block in self.held:
                uses = self.held[block][1] + 1
            else:
                if len(self.held) >= self.size and not self._evict(path):
                    break
                if depth:
                    self.parents[block] = blocks[depth - 1]
                    self.children[blocks[depth - 1]] = self.children.get(blocks[depth - 1], 0) + 1
            self.held[block] = (self.worth(uses, self.age, self.now, depth), uses)
        for depth, block in enumerate(blocks):
            if block in self.held and not self.children.get(block):
                heapq.heappush(self.heap, (self.held[block][0], -depth, block))
        return found

    def _evict(self, path: set[Block]) -> bool:
        kept: list[tuple[float, int, Block]] = []
        done = False
        while self.heap and not done:
            entry = heapq.heappop(self.heap)
            worth, depth, block = entry
            if block not in self.held or self.held[block][0] != worth or self.children.get(block):
                continue
            if block in path:
                kept.append(entry)
                continue
            self._forget(block, worth, depth)
            done = True
        for entry in kept:
            heapq.heappush(self.heap, entry)
        return done

    def _forget(self, block: Block, worth: float, depth: int) -> None:
        self.age = max(self.age, worth)
        del self.held[block]
        parent = self.parents.pop(block, None)
        if parent is not None:
            self.children[parent] -= 1
            if not self.children[parent] and parent in self.held:
                heapq.heappush(self.heap, (self.held[parent][0], depth + 1, parent))


def leading(blocks: Sequence[object], held: object) -> int:
    count = 0
    for block in blocks:
        if block not in held:  # type: ignore[operator]
            break
        count += 1
    return count


class Segmented(Leaves):
    """SLRU: what was found again is protected, up to a share of the pool; the oldest of those fall back."""

    def __init__(self, size: int, share: float = 0.8) -> None:
        super().__init__(size, self._worth)
        self.protected: OrderedDict[Block, None] = OrderedDict()
        self.most = int(size * share)

    def _worth(self, uses: int, age: float, now: int, depth: int) -> float:
        return now + (1e9 if uses > 1 else 0)

    def request(self, blocks: Sequence[Block], first_access: int) -> int:
        found = super().request(blocks, first_access)
        for block in reversed(blocks[:found]):
            self.protected[block] = None
            self.protected.move_to_end(block)
        while len(self.protected) > self.most:
            block, _ = self.protected.popitem(last=False)
            if block in self.held:
                self.held[block] = (self.held[block][0] % 1e9, 1)
                if not self.children.get(block):
                    heapq.heappush(self.heap, (self.held[block][0], 0, block))
        return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("traces", nargs="+", type=Path)
    parser.add_argument("--sizes", default="250000,500000,1000000,2000000,4000000,8000000,16000000,32000000")
    parser.add_argument("--limit", type=int)
    parser.add_argument("--svg", type=Path)
    args = parser.parse_args()
    trace = read_trace(args.traces)[: args.limit]
    size = block_size_of(trace, 16)
    requests, names = as_blocks(trace, size)
    next_use = next_uses(requests)
    total = sum(map(len, requests))
    longest = max(map(len, requests))
    infinite = found_in(Optimum(NEVER, next_use), requests) / total
    print(
        f"{', '.join(path.name for path in args.traces)}: {len(requests)} requests, {total:,} full blocks of {size} tokens,"
    )
    print(
        f"longest {longest:,} blocks; {infinite:.1%} found in a pool without end. {platform.machine()}, {time.strftime('%F')}\n"
    )
    makers: dict[str, Callable[[int], Policy]] = {
        "pool": lambda blocks: Pool(blocks, names),
        "store": lambda blocks: Stored(blocks, names),
        "optimum": lambda blocks: Optimum(blocks, next_use),
        "lfu": lambda blocks: Leaves(blocks, lambda uses, age, now, depth: age + uses),
        "slru": lambda blocks: Segmented(blocks),
        "depth": lambda blocks: Leaves(blocks, lambda uses, age, now, depth: now + 2.0 * depth),
    }
    print("| tokens | " + " | ".join(makers) + " | pool of optimum |")
    print("|---:|" + "---:|" * (len(makers) + 1))
    curves: dict[str, list[tuple[float, float]]] = {name: [] for name in makers}
    for tokens in map(int, args.sizes.split(",")):
        blocks = tokens // size
        if blocks < longest:
            print(f"| {tokens:,} | a prompt does not fit |")
            continue
        shares = {name: found_in(make(blocks), requests) / total for name, make in makers.items()}
        for name, share in shares.items():
            curves[name].append((math.log2(tokens / 1e6), share))
        cells = " | ".join(f"{share:.2%}" for share in shares.values())
        print(
            f"| {tokens:,} | {cells} | {shares['pool'] / shares['optimum'] if shares['optimum'] else 1:.1%} |",
            flush=True,
        )
    if args.svg is not None:
        least = min(x for curve in curves.values() for x, _ in curve)
        shifted = [[(x - least, y) for x, y in curve] for curve in curves.values()]
        title = f"Share of blocks found, by doublings of the pool from {2**least:g} million tokens"
        args.svg.write_text(as_file(svg(title, list(curves), shifted)), encoding="utf-8")


def as_blocks(trace: Sequence[object], size: int) -> tuple[list[list[Block]], list[bytes]]:
    """Each request's full blocks as numbers, and their names."""
    from foreword.blocks.keys import Scope, chain_keys
    from foreword.sim.trace import TraceRequest

    root = Scope(b"eviction", size).root()
    numbers: dict[bytes, Block] = {}
    names: list[bytes] = []
    requests: list[list[Block]] = []
    for one in trace:
        assert isinstance(one, TraceRequest)
        found: list[Block] = []
        for key in chain_keys(root, one.prompt(), size):
            if key not in numbers:
                numbers[key] = len(names)
                names.append(key)
            found.append(numbers[key])
        requests.append(found)
    return requests, names


def next_uses(requests: Sequence[Sequence[Block]]) -> list[int]:
    """For each access, in order, the number of the next request that uses the same block."""
    found: list[int] = []
    later: dict[Block, int] = {}
    for number in range(len(requests) - 1, -1, -1):
        for block in reversed(requests[number]):
            found.append(later.get(block, NEVER))
        for block in requests[number]:
            later[block] = number
    return found[::-1]


def found_in(policy: Policy, requests: Sequence[Sequence[Block]]) -> int:
    found = access = 0
    for blocks in requests:
        found += policy.request(blocks, access)
        access += len(blocks)
    return found


if __name__ == "__main__":
    main()
