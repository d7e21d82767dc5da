"""Cases in which something is odd: clocks that jump, replicas that report wrong numbers or claim blocks, replicas that join
late, and many equal prompts at once. A rule that believes a false report sees it too; the traffic needs no trace of others."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from benchmarks.simulator.overload import LARGE, Case, Draw, Trace, fleet
from foreword.routing.directory import CacheTier
from foreword.routing.fleet import Fleet
from foreword.routing.placement import Decision, PlacementQuery
from foreword.sim.changes import FleetChange
from foreword.sim.costs import ReplicaGroup

LIAR = "r1"


class JumpingClock(Fleet):
    """The router's clock jumps forward by one hour after 80 s, and by two more after 140 s."""

    @staticmethod
    def clock(now: float) -> float:
        return now + (3600 if now > 80 else 0) + (7200 if now > 140 else 0)

    def place(self, query: PlacementQuery, now: float, *, avoid: Sequence[str] = ()) -> Decision:
        return super().place(query, self.clock(now), avoid=avoid)

    def sent(self, name: str, query: PlacementQuery, decision: Decision, now: float) -> None:
        super().sent(name, query, decision, self.clock(now))

    def first_token(self, name: str, now: float) -> None:
        super().first_token(name, self.clock(now))

    def failed(self, name: str, now: float) -> None:
        super().failed(name, self.clock(now))

    def finished(self, name: str, now: float, **usage: Any) -> None:
        super().finished(name, self.clock(now), **usage)


class FalseUsage(Fleet):
    """One replica reports wrong numbers in its usage."""

    def usage(self, prompt: int, cached: int, output: int) -> tuple[int, int]:
        """The cached and the output tokens that it reports."""
        raise NotImplementedError

    def finished(
        self,
        name: str,
        now: float,
        *,
        cached_tokens: int | None = None,
        output_tokens: int | None = None,
        guessed: bool = False,
    ) -> None:
        request = self._requests.get(name)
        if request is not None and request.computing.name == LIAR and None not in (cached_tokens, output_tokens):
            cached_tokens, output_tokens = self.usage(request.tokens, cached_tokens or 0, output_tokens or 0)
        super().finished(name, now, cached_tokens=cached_tokens, output_tokens=output_tokens, guessed=guessed)


class AllCached(FalseUsage):
    def usage(self, prompt: int, cached: int, output: int) -> tuple[int, int]:
        return prompt, output


class NoneCached(FalseUsage):
    def usage(self, prompt: int, cached: int, output: int) -> tuple[int, int]:
        return 0, output


class VastOutputs(FalseUsage):
    def usage(self, prompt: int, cached: int, output: int) -> tuple[int, int]:
        return cached, output * 10**6


class TinyOutputs(FalseUsage):
    def usage(self, prompt: int, cached: int, output: int) -> tuple[int, int]:
        return cached, 1


class ForgetsNothing(Fleet):
    """One replica sends no events of blocks that it evicts. With `claims` it sends those of all others' blocks as its own."""

    claims = False

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        stored, removed = self.directory.stored, self.directory.removed

        def kept(replica: str, tier: CacheTier, keys: Iterable[bytes]) -> None:
            if replica != LIAR:
                removed(replica, tier, keys)

        def claimed(
            replica: str, tier: CacheTier, parent: bytes | None, keys: Iterable[bytes], *, counted: bool = False
        ) -> None:
            blocks = [*keys]
            stored(replica, tier, parent, blocks, counted=counted)
            if replica != LIAR:
                stored(LIAR, tier, parent, blocks, counted=counted)

        self.directory.removed = kept  # type: ignore[method-assign]
        if self.claims:
            self.directory.stored = claimed  # type: ignore[method-assign]


class ClaimsAll(ForgetsNothing):
    claims = True


def chats(draw: Draw) -> Trace:
    return draw.chats(
        200, 240, turns=6, first=(5000, 0.9, 40_000), more=(1000, 0.9, 15_000), output=(250, 0.8, 2500), think=12,
        common=512,
    )  # fmt: skip


def few_chats(draw: Draw, sessions: int, seconds: float) -> Trace:
    return draw.chats(
        sessions, seconds, turns=4, first=(3000, 0.9, 30_000), more=(700, 0.9, 9000), output=(300, 0.8, 2500), think=12
    )


def documents(draw: Draw) -> Trace:
    return draw.documents(4.0, 240, 60, 14_000)


def herds(draw: Draw, number: int, every: float, size: int, median: float) -> Trace:
    """Bursts of about `size` equal prompts within a quarter of a second, each burst of another prompt."""
    found = []
    for i in range(number):
        tokens = draw.lognormal(median, 0.5, 80_000)
        ids, start = draw.blocks(tokens), 5 + i * every + draw.rng.uniform(0, every / 4)
        for _ in range(int(size * draw.rng.uniform(0.5, 1.5))):
            now = start + draw.rng.uniform(0, 0.25)
            found.append(draw.request(now, ids, tokens, draw.lognormal(200, 0.7, 1500)))
    return found


CHATS = fleet(5, device_tokens=600_000)
ODD: dict[str, Case] = {
    "plain": Case(chats, CHATS),
    "clock-forward": Case(chats, CHATS, knows=JumpingClock),
    "all-cached": Case(chats, CHATS, knows=AllCached),
    "all-cached-no-events": Case(chats, replace(CHATS, events=False), knows=AllCached),
    "none-cached-no-events": Case(chats, replace(CHATS, events=False), knows=NoneCached),
    "vast-outputs": Case(chats, CHATS, knows=VastOutputs),
    "tiny-outputs": Case(chats, CHATS, knows=TinyOutputs),
    "forgets-nothing": Case(documents, fleet(5, device_tokens=250_000), knows=ForgetsNothing),
    "claims-all": Case(documents, fleet(5, device_tokens=250_000), knows=ClaimsAll),
    "claims-all-chats": Case(chats, CHATS, knows=ClaimsAll),
    "attention-25x": Case(
        lambda d: [
            *few_chats(d, 90, 240),
            *d.single(0.5, 240, (40_000, 0.5, 120_000), (200, 0.6, 1000)),
        ],
        fleet(4, groups=(ReplicaGroup("odd", 1, costs=replace(LARGE, attention=LARGE.attention * 25)),)),
    ),
    "joins": Case(chats, fleet(3, device_tokens=600_000, changes=(FleetChange(100, "add"), FleetChange(160, "add")))),
    "slow-joins": Case(
        chats,
        fleet(
            4,
            device_tokens=600_000,
            groups=(ReplicaGroup("late", 0, costs=LARGE.scaled(4)),),
            changes=(FleetChange(100, "add", count=1, group="late"),),
        ),
    ),
    "herds": Case(lambda d: herds(d, 16, 12, 60, 16_000), fleet(4, device_tokens=900_000)),
    "herds-no-events": Case(lambda d: herds(d, 16, 12, 60, 16_000), fleet(4, device_tokens=900_000, events=False)),
    "one-herd": Case(
        lambda d: [*herds(d, 1, 30, 400, 30_000), *few_chats(d, 60, 100)], fleet(6, device_tokens=900_000)
    ),
}
