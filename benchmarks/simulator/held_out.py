"""Cases of overload that were drawn before the price of a placement was changed last: other seeds, mixes, speeds, tenants and
arrivals than those of `overload`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from benchmarks.simulator.overload import LARGE, SMALL, Case, fleet, slow
from foreword.sim.changes import FleetChange
from foreword.sim.costs import ReplicaGroup


def pulses(low: float, high: float, period: float, share: float) -> Callable[[float], float]:
    """A rate that is high in the first share of each period of so many seconds, else low."""
    return lambda now: high if (now / period) % 1 < share else low


HELD_OUT: dict[str, Case] = {
    "agents-r5": Case(lambda d: d.coding(75, 650, 1100), fleet(5), "coding"),
    "agents-at-once-r7": Case(lambda d: d.coding(70, 30, 900), fleet(7), "coding"),
    "agents-small-model-r3": Case(
        lambda d: d.coding(160, 500, 1000, longest=250_000), fleet(3, device_tokens=1_500_000), "coding", SMALL
    ),
    "agents-two-fail-r8": Case(
        lambda d: d.coding(110, 500, 1100),
        fleet(
            8,
            changes=(
                *(FleetChange(300, "fail", name) for name in ("r2", "r5")),
                *(FleetChange(420, "start", name) for name in ("r2", "r5")),
                FleetChange(700, "fail", "r0"),
                FleetChange(760, "start", "r0"),
            ),
        ),
        "coding",
    ),
    "agents-scale-in-r8": Case(
        lambda d: d.coding(80, 400, 900),
        fleet(8, changes=tuple(FleetChange(200 + 150 * i, "remove", f"r{i}") for i in range(3))),
        "coding",
    ),
    "agents+reasoning-r8": Case(
        lambda d: [
            *d.coding(60, 200, 500, tenant="agents"),
            *d.chats(
                120, 250, turns=3, first=(2000, 0.9, 30_000), more=(500, 0.8, 8000), output=(2500, 0.6, 10_000),
                think=30,
            ),
        ],
        fleet(8),
        "coding",
    ),
    "three-tenants-r6": Case(
        lambda d: [
            *(replace(one, tenant="agents") for one in d.coding(40, 300, 500)),
            *(replace(one, tenant="readers") for one in d.documents(1.2, 400, 30, 20_000)),
            *(
                replace(one, tenant="chats")
                for one in d.chats(
                    80, 300, turns=6, first=(2000, 0.9, 20_000), more=(400, 0.9, 6000), output=(300, 0.8, 3000), think=15
                )
            ),
        ],
        fleet(6, device_tokens=1_200_000),
        "coding",
    ),
    "conversation-1.5x-r7": Case(lambda d: d.conversation(1500, 300, 1.5), fleet(7), "conversation"),
    "conversation-three-kinds-r6": Case(
        lambda d: d.conversation(2600, 400, 0.8),
        fleet(
            2, groups=(ReplicaGroup("mid", 2, costs=LARGE.scaled(1.6)), ReplicaGroup("old", 2, costs=LARGE.scaled(3)))
        ),
        "conversation",
    ),
    "synthetic-1.3x-r8": Case(lambda d: d.synthetic(900, 1.3), fleet(8, device_tokens=700_000), "synthetic"),
    "pulses-answers-r4": Case(
        lambda d: d.single(pulses(2.0, 22.0, 50, 0.3), 250, (800, 0.9, 10_000), (300, 0.8, 3000), common=512), fleet(4)
    ),
    "pulses-documents-r6": Case(
        lambda d: d.documents(pulses(0.8, 7.0, 60, 0.35), 300, 80, 14_000), fleet(6, device_tokens=500_000)
    ),
    "long-documents-r5": Case(lambda d: d.documents(2.2, 300, 40, 45_000), fleet(5, device_tokens=900_000)),
    "no-events-documents-r5": Case(
        lambda d: d.documents(3.5, 300, 70, 12_000), fleet(5, device_tokens=400_000, events=False)
    ),
    "shared-documents-r6": Case(
        lambda d: d.documents(5.0, 250, 150, 15_000),
        fleet(6, device_tokens=300_000, host_tokens=600_000, shared_tokens=20_000_000),
    ),
    "one-slow-r5": Case(
        lambda d: d.chats(
            220, 350, turns=7, first=(5000, 0.9, 50_000), more=(1500, 0.9, 20_000), output=(250, 0.8, 2500), think=12
        ),
        fleet(4, groups=(ReplicaGroup("slow", 1, costs=LARGE.scaled(5)),)),
    ),
    "drift-chats-r5": Case(
        lambda d: d.chats(
            260, 350, turns=7, first=(5000, 0.9, 50_000), more=(1500, 0.9, 20_000), output=(250, 0.8, 2500), think=12
        ),
        fleet(5, changes=slow((120, 260, "r1", 3), (200, 330, "r3", 3))),
    ),
    "host-chats-r4": Case(
        lambda d: d.chats(
            200, 300, turns=8, first=(6000, 0.8, 60_000), more=(1200, 0.8, 15_000), output=(250, 0.8, 2000), think=25,
            common=2048,
        ),
        fleet(4, device_tokens=350_000, host_tokens=2_500_000),
    ),
    "short-r6": Case(lambda d: d.single(34.0, 60, (250, 0.6, 2000), (180, 0.7, 1000), common=512), fleet(6)),
    "common-12k-r6": Case(
        lambda d: d.single(6.5, 250, (3500, 0.9, 40_000), (250, 0.8, 2000), common=12_288), fleet(6)
    ),
    "batch+answers-r5": Case(
        lambda d: [
            *d.single(6.0, 240, (700, 0.8, 8000), (350, 0.7, 3000), common=1024),
            *(
                replace(one, arrival=40.0 + i / 50)
                for i, one in enumerate(d.single(1.0, 80, (45_000, 0.4, 120_000), (300, 0.5, 1500)))
            ),
        ],
        fleet(5),
    ),
    "fan-outs+chats-r6": Case(
        lambda d: [
            *d.fan_outs(0.09, 300),
            *d.chats(
                100, 300, turns=6, first=(2500, 0.9, 30_000), more=(600, 0.9, 8000), output=(300, 0.8, 3000), think=15
            ),
        ],
        fleet(6, device_tokens=700_000),
    ),
    "small-model-chats-r4": Case(
        lambda d: d.chats(
            330, 150, turns=7, first=(4000, 0.9, 40_000), more=(900, 0.9, 12_000), output=(300, 0.8, 2500), think=8
        ),
        fleet(4, device_tokens=250_000),
        costs=SMALL,
    ),
    "small-model-pulses-r3": Case(
        lambda d: d.single(pulses(10, 90, 20, 0.3), 80, (900, 0.9, 12_000), (200, 0.8, 1500), common=1024),
        fleet(3),
        costs=SMALL,
    ),
}  # fmt: skip
