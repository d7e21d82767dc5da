"""What a placement decision costs, by the number of replicas, and how close it is to pricing every replica.

    python benchmarks/placement_scale.py [--replicas 8,64,512,1000,4000] [--requests 400]

Three kinds of traffic of 2,048-token prompts (blocks of 16 tokens) on replicas whose costs are known and differ by up to half:
all prompts new; all with a common prefix of 1,024 tokens; and questions about 200 documents of 1,792 tokens, on replicas that
send KV events. Requests arrive at 80 % of the rate that the replicas can compute without a cache. `place` is the decision,
`request` also what is noted when a request is sent, has its first token and ends. Times are processor time of this process.
Every fourth decision is compared with that of the same policy when it prices every replica: `longer` is the mean difference of
the expected times to first token (TTFT), relative to the mean of those with all priced, and `95 %` the relative difference that
95 % of the decisions do not exceed.
"""

from __future__ import annotations

import argparse
import copy
import heapq
import random
import sys
import time
from collections.abc import Sequence

from timing import machine, median, set_up, table

from foreword.blocks.keys import Scope, chain_keys
from foreword.routing.costs import ReplicaCosts
from foreword.routing.directory import CacheTier
from foreword.routing.fleet import Fleet
from foreword.routing.placement import PlacementQuery

BLOCK, TOKENS, OUTPUT = 16, 2048, 64
ROOT = Scope(b"model", BLOCK).root()
COMMON, DOCUMENT, DOCUMENTS = 1024, 1792, 200


def read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--replicas", default="8,64,512,1000,4000")
    parser.add_argument("--requests", type=int, default=400)
    given = parser.parse_args()
    given.replicas = [int(one) for one in given.replicas.split(",")]
    return given


def prompts(kind: str, rng: random.Random) -> Sequence[int]:
    def text(seed: object, length: int) -> list[int]:
        own = random.Random(str(seed))
        return [own.randrange(30_000) for _ in range(length)]

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


def main() -> int:
    given = read_arguments()
    print(set_up(machine()), flush=True)
    head = ["replicas", "prompts", "place ms", "request ms", "priced", "us each", "longer", "95 %"]
    rows = [
        measure(replicas, kind, given.requests)
        for replicas in given.replicas
        for kind in ("new", "common prefix", "documents")
    ]
    print(f"\nProcessor time per placement decision, median of {given.requests}\n\n{table(head, rows)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
