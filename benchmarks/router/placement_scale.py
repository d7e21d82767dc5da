"""Measures a placement decision's cost, by the number of replicas, and how close it is to pricing every replica.

    python -m benchmarks.router.placement_scale [--replicas 8,64,512,1000,4000] [--requests 400]

Three kinds of traffic of 2,048-token prompts (blocks of 16 tokens) on replicas whose costs are known and differ by up to half:
all prompts new; all with a common prefix of 1,024 tokens; and questions about 200 documents of 1,792 tokens, on replicas that
send KV events. Requests arrive at 80 % of the rate that the replicas can compute without a cache. `place` is the decision,
`request` also what is noted when a request is sent, has its first token and ends. Times are processor time of this process.
Every fourth decision is compared with that of the same policy when it prices every replica: `longer` is the mean difference of
the expected times to first token (TTFT), relative to the mean of those with all priced, and `95 %` the relative difference that
95 % of the decisions do not exceed.

The second table has other fleets, with what their replicas hold at the start; requests end 32 requests later:

    all hold it      all replicas hold the first 1,024 tokens, in device memory, host memory or on disk
    one holds it     one replica holds the whole prompt
    no costs         replicas without known costs that send no events
    prefill, decode  a third of the replicas only compute prompts, the others only decode
    block sizes      16, 32 and 128 tokens, a third of the replicas each; speeds differ by up to eight times
    parts of 32k     each replica holds a random part of a document of 30,000 tokens; prompts of 32,768 tokens
    none             all replicas are excluded: the decision gives the reason of each
"""

from __future__ import annotations

import argparse
import copy
import heapq
import random
import sys
import time
from collections.abc import Sequence

from benchmarks.harness import machine, median, set_up, table
from foreword.blocks.keys import Scope, chain_keys
from foreword.routing.costs import ReplicaCosts
from foreword.routing.directory import CacheTier
from foreword.routing.fleet import Fleet
from foreword.routing.placement import PlacementQuery

BLOCK, TOKENS, OUTPUT = 16, 2048, 64
ROOT = Scope(b"model", BLOCK).root()
COMMON, DOCUMENT, DOCUMENTS = 1024, 1792, 200
DOCUMENT_32K = 30_000
SHAPES = ("all hold it", "one holds it", "no costs", "prefill, decode", "block sizes", "parts of 32k", "none")


def read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--replicas", default="8,64,512,1000,4000")
    parser.add_argument("--requests", type=int, default=400)
    given = parser.parse_args()
    given.replicas = [int(one) for one in given.replicas.split(",")]
    return given


def text(seed: object, length: int) -> list[int]:
    own = random.Random(str(seed))
    return [own.randrange(30_000) for _ in range(length)]


def prompts(kind: str, rng: random.Random) -> Sequence[int]:
    if kind == "new":
        return text(rng.random(), TOKENS)
    if kind == "common prefix":
        return text("common", COMMON) + text(rng.random(), TOKENS - COMMON)
    return text(rng.randrange(DOCUMENTS), DOCUMENT) + text(rng.random(), TOKENS - DOCUMENT)


def fleet_of(replicas: int, *, events: bool) -> Fleet:
    fleet, rng = Fleet(), random.Random(1)
    for number in range(replicas):
        costs = ReplicaCosts(prefill=1e-4 * rng.uniform(0.8, 1.25))
        name = f"replica-{number}"
        fleet.add(name, costs=costs, sends_events=events, block_size=BLOCK, capacity_tokens=200_000, max_queued=32)
    return fleet


def measure(replicas: int, kind: str, requests: int) -> list[str]:
    fleet, rng = fleet_of(replicas, events=kind == "documents"), random.Random(2)
    now, pause = 0.0, 1.25 * (TOKENS * 1e-4 + 0.02) / replicas
    warm_up = min(4 * replicas, 2000)
    places, whole, priced, pairs = list[float](), list[float](), list[int](), list[tuple[float, float]]()
    pending: list[tuple[float, str]] = []
    for number in range(warm_up + requests):
        now += pause
        query = PlacementQuery(chain_keys(ROOT, prompts(kind, rng), BLOCK), TOKENS, BLOCK)
        name = str(number)
        if number >= warm_up and number % 4 == 0:
            policy = copy.deepcopy(fleet.policy)
            reference = policy.choose(query, fleet.candidates(query, now)).estimate
        else:
            reference = None
        began = time.process_time()
        decision = fleet.place(query, now)
        placed = time.process_time()
        fleet.sent(name, query, decision, now)
        while pending and pending[0][0] <= now:
            _, ended = heapq.heappop(pending)
            fleet.first_token(ended, now)
            fleet.finished(ended, now, output_tokens=OUTPUT)
        ended_at = time.process_time()
        assert decision.estimate is not None and decision.replica is not None
        heapq.heappush(pending, (now + decision.estimate.total, name))
        if kind == "documents":
            fleet.directory.stored(decision.replica, CacheTier.DEVICE, None, query.keys)
        if number >= warm_up:
            places.append(placed - began)
            whole.append(ended_at - began)
            priced.append(len(decision.estimates))
            if reference is not None:
                pairs.append((decision.estimate.total, reference.total))
    longer = sorted(ours / best - 1 for ours, best in pairs)
    mean = sum(ours for ours, _ in pairs) / sum(best for _, best in pairs) - 1
    each = median(places) / median(priced)
    return [
        str(replicas),
        kind,
        f"{1e3 * median(places):.3f}",
        f"{1e3 * median(whole):.3f}",
        f"{median(priced):.0f}",
        f"{1e6 * each:.1f}",
        f"{mean:.1%}",
        f"{longer[int(0.95 * len(longer))]:.1%}",
    ]


def fleet_shape(kind: str, replicas: int) -> Fleet:
    fleet, rng = Fleet(), random.Random(1)
    keys = chain_keys(ROOT, text("common", DOCUMENT_32K if kind == "parts of 32k" else TOKENS), BLOCK)
    for number in range(replicas):
        name = f"replica-{number}"
        fleet.add(
            name,
            role="both" if kind != "prefill, decode" else "prefill" if number % 3 == 0 else "decode",
            costs=None if kind == "no costs" else ReplicaCosts(prefill=1e-4 * rng.uniform(0.5, 4)),
            sends_events=kind != "no costs",
            block_size=(16, 32, 128)[number % 3] if kind == "block sizes" else BLOCK,
            capacity_tokens=200_000,
        )
        if kind == "all hold it":
            fleet.directory.stored(name, CacheTier(number % 3), None, keys[: COMMON // BLOCK])
        elif kind == "parts of 32k":
            fleet.directory.stored(name, CacheTier.DEVICE, None, keys[: rng.randrange(len(keys))])
        elif kind == "none":
            fleet.exclude(name, "draining")
    if kind == "one holds it":
        fleet.directory.stored("replica-3", CacheTier.DEVICE, None, keys)
    return fleet


def measure_shape(kind: str, replicas: int, requests: int) -> list[str]:
    fleet, rng = fleet_shape(kind, replicas), random.Random(2)
    length, common = (32_768, DOCUMENT_32K) if kind == "parts of 32k" else (TOKENS, COMMON)
    common = TOKENS if kind == "one holds it" else common
    sizes = (32, 128) if kind == "block sizes" else ()
    places, priced = list[float](), list[int]()
    for number in range(requests):
        now = 0.3 * number / replicas
        tokens = text("common", common) + text(rng.random(), length - common)
        others = {("", size): chain_keys(Scope(b"model", size).root(), tokens, size) for size in sizes}
        query = PlacementQuery(chain_keys(ROOT, tokens, BLOCK), length, BLOCK, other_keys=others)
        began = time.process_time()
        decision = fleet.place(query, now)
        places.append(time.process_time() - began)
        priced.append(len(decision.estimates))
        if decision.replica is not None:
            fleet.sent(str(number), query, decision, now)
        fleet.first_token(str(number - 32), now)
        fleet.finished(str(number - 32), now, output_tokens=OUTPUT)
    each = median(places) / median(priced)
    return [str(replicas), kind, f"{1e3 * median(places):.3f}", f"{median(priced):.0f}", f"{1e6 * each:.1f}"]


def main() -> int:
    given = read_arguments()
    print(set_up(machine()), flush=True)
    head = ["replicas", "prompts", "place ms", "request ms", "priced", "us each", "longer", "95 %"]
    rows = [
        measure(replicas, kind, given.requests)
        for replicas in given.replicas
        for kind in ("new", "common prefix", "documents")
    ]
    print(f"\nProcessor time per placement decision, median of {given.requests}\n\n{table(head, rows)}", flush=True)
    head = ["replicas", "fleet", "place ms", "priced", "us each"]
    rows = [measure_shape(kind, count, given.requests // 2) for kind in SHAPES for count in given.replicas]
    print(f"\nOther fleets, median of {given.requests // 2}\n\n{table(head, rows)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
