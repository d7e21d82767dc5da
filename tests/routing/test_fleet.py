"""A fleet of replicas: placement request by request."""

from __future__ import annotations

import random

import pytest
from example_counts import examples
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from msgspec.structs import replace

from foreword.blocks.keys import Scope, chain_keys
from foreword.errors import ConfigError, NotFound
from foreword.routing.costs import ReplicaCosts
from foreword.routing.directory import CacheTier, Directory
from foreword.routing.fleet import Fleet, Role
from foreword.routing.placement import CostPolicy, Decision, PlacementQuery, SessionAffinity
from foreword.routing.sessions import SessionHome, SessionTable

BLOCK = 16
ROOT = Scope(b"model", BLOCK).root()
COSTS = ReplicaCosts(prefill=1e-3, first=0.0, decode_each=0.0)


def query(tokens: list[int], session: str | None = None) -> PlacementQuery:
    return PlacementQuery(chain_keys(ROOT, tokens, BLOCK), len(tokens), BLOCK, session)


def text(seed: int, length: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(1000) for _ in range(length)]


def fleet_of(*names: str, **more: object) -> Fleet:
    fleet = Fleet(CostPolicy(SessionAffinity(seconds=0.2, ratio=1.5)))
    for name in names:
        fleet.add(name, costs=COSTS, **more)  # type: ignore[arg-type]
    return fleet


def serve(fleet: Fleet, request: str, asked: PlacementQuery, now: float, cached: int | None = None) -> Decision:
    """Send a request and finish it at once."""
    decision = fleet.place(asked, now)
    fleet.sent(request, asked, decision, now)
    assert decision.estimate is not None
    fleet.first_token(request, now + decision.estimate.total)
    fleet.finished(request, now + decision.estimate.total, cached_tokens=cached, output_tokens=1)
    return decision


def test_a_fleet_uses_the_directory_and_the_sessions_that_it_was_given() -> None:
    """Their limits apply although both are empty when the fleet is made."""
    directory, sessions = Directory(64), SessionTable(ttl=1.0)
    fleet = Fleet(directory=directory, sessions=sessions)
    assert fleet.directory is directory
    assert fleet.sessions is sessions


def test_a_conversation_stays_where_its_prefix_is() -> None:
    """Without events and session names, each turn goes to the replica of the turn before and is expected to be
    cached."""
    fleet = fleet_of("a", "b", "c", "d")
    for number in range(20):
        tokens, home = text(number, 400), None
        for turn in range(4):
            decision = serve(fleet, f"{number}/{turn}", query(tokens), now=float(number * 10 + turn))
            assert home in (None, decision.replica)
            assert (decision.expected_cached > 0) == (turn > 0)
            home = decision.replica
            tokens = tokens + text(number * 100 + turn, 200)
    assert fleet.sessions_moved == 0
    assert len(fleet._requests) == 0


def test_a_turn_that_a_template_renders_otherwise_is_at_home() -> None:
    """A prompt whose bytes continue another's goes where that was sent, although it shares only a third of its tokens and not
    the last block; a replica that is gone is no home, and a session's own place counts before the bytes."""
    for number in range(8):
        fleet = fleet_of("a", "b", "c")
        first = serve(fleet, "1", query(text(number, 160) + text(1, 160)), 0.0)
        assert first.replica is not None
        second = replace(query(text(number, 160) + text(2, 340)), continues=first.replica)
        decision = fleet.place(second, 1.0)
        assert (decision.replica, decision.reason, decision.home) == (first.replica, "session", first.replica)
        assert fleet.place(replace(second, continues=""), 1.0).reason == "spread"
        fleet.sessions.record("s", (), "elsewhere", 1.0)
        assert fleet.home(replace(second, session="s"), 1.0) == SessionHome("elsewhere")
        fleet.remove(first.replica)
        assert fleet.place(second, 1.0).home is None


def test_a_prompt_in_flight_attracts_the_same_prefix() -> None:
    """A second request with a long prefix that is being computed follows it, although no event has reported it
    yet."""
    fleet = fleet_of("a", "b", sends_events=True)
    document = text(1, 4000)
    first = query(document + text(2, 100))
    place = fleet.place(first, 0.0)
    fleet.sent("1", first, place, 0.0)
    second = query(document + text(3, 100))
    # Three of four seconds are over: 1 s of waiting and 0.1 s of computing, against 4.1 s.
    decision = fleet.place(second, 3.0)
    assert decision.replica == place.replica
    assert decision.expected_cached == 4000
    fleet.first_token("1", 4.1)
    assert fleet.place(second, 5.0).expected_cached == 0, "by now the replica would have reported it"


def test_a_queue_shrinks_with_time() -> None:
    """Queued tokens shrink as time passes; the first token ends the prompt's work."""
    fleet = fleet_of("a")
    asked = query(text(1, 1000))
    fleet.sent("1", asked, fleet.place(asked, 0.0), 0.0)
    queued = [fleet.candidates(asked, now)[0].queued_tokens for now in (0.0, 0.4, 50.0)]
    assert queued == [pytest.approx(1000), pytest.approx(600), pytest.approx(0)]
    fleet.first_token("1", 0.5)
    assert fleet.candidates(asked, 0.5)[0].queued_tokens == 0
    assert fleet.candidates(asked, 0.5)[0].running == 1


def test_queued_work_includes_attention() -> None:
    """A queued prompt of 2,000 tokens counts more than two of 1,000 where attention costs, and half of its work half as
    much."""
    costs = ReplicaCosts(prefill=1e-3, first=0.0, decode_each=0.0, attention=1e-6)
    fleet = Fleet()
    for name in ("a", "b"):
        fleet.add(name, costs=costs)
    for name, to, length in (("1", "a", 2000), ("2", "b", 1000), ("3", "b", 1000)):
        asked = query(text(int(name), length))
        decision = fleet.place(asked, 0.0, avoid=("b",) if to == "a" else ("a",))
        fleet.sent(name, asked, decision, 0.0)
    short = query(text(9, 10))
    assert fleet.place(short, 0.0).replica == "b"
    prices = {price.replica: price.queue for price in fleet.place(short, 0.0).estimates}
    assert prices == {"a": pytest.approx(4.0), "b": pytest.approx(3.0)}
    later = {price.replica: price.queue for price in fleet.place(short, 2.0).estimates}
    assert later["a"] == pytest.approx(2.0)


def test_the_second_in_the_queue_starts_after_the_first() -> None:
    """The first of two prompts of 1,000 tokens was done after 0.5 s: at 0.6 s the second has been computing for 0.1
    s."""
    fleet = fleet_of("a")
    first, second = query(text(1, 1000)), query(text(2, 1000))
    for name, asked in (("1", first), ("2", second)):
        fleet.sent(name, asked, fleet.place(asked, 0.0), 0.0)
    assert fleet.candidates(first, 0.2)[0].queued_tokens == pytest.approx(1800)
    fleet.first_token("1", 0.5)
    assert fleet.candidates(first, 0.6)[0].queued_tokens == pytest.approx(900)


def test_queued_work_of_the_fleet() -> None:
    """The work of all replicas and of prompts that no replica has yet, in seconds; finished and done work does not count."""
    fleet = fleet_of("a", "b")
    assert fleet.queued_seconds(0.0) == 0
    for name in ("1", "2", "3"):
        asked = query(text(int(name), 1000))
        fleet.sent(name, asked, fleet.place(asked, 0.0), 0.0)
    assert fleet.queued_seconds(0.0) == pytest.approx(3.0)
    assert fleet.queued_seconds(0.0, unplaced=500) == pytest.approx(3.5)
    assert fleet.queued_seconds(0.5) == pytest.approx(2.0), "both heads are half done"
    for name in ("1", "2", "3"):
        fleet.failed(name, 0.6)
    assert fleet.queued_seconds(0.6) == 0


def test_events_replace_estimates() -> None:
    """For a replica with events the directory says what it holds, and removed blocks are not expected any more."""
    fleet = fleet_of("a", "b", sends_events=True)
    asked = query(text(1, 800))
    fleet.directory.stored("b", CacheTier.DEVICE, ROOT, asked.keys)
    assert fleet.place(asked, 0.0).replica == "b"
    assert fleet.place(asked, 0.0).expected_cached == 799
    fleet.directory.removed("b", CacheTier.DEVICE, asked.keys[10:])
    assert fleet.place(asked, 0.0).expected_cached == 160
    fleet.directory.cleared("b")
    assert fleet.place(asked, 0.0).expected_cached == 0


def test_responses_correct_the_estimate() -> None:
    """A replica that finds less than expected is estimated to keep less; expected and actual tokens are counted."""
    fleet = fleet_of("a", capacity_tokens=16_000)
    asked = query(text(1, 800))
    for turn in range(5):
        serve(fleet, str(turn), asked, float(turn), cached=0)
    replica = fleet.replicas["a"]
    assert replica.estimated_blocks is not None and replica.estimated_blocks.limit < 1000
    assert replica.accuracy.expected_tokens == 4 * 799 and replica.accuracy.actual_tokens == 0


def test_costs_are_learned_from_ttft() -> None:
    """A replica that computes 2,000 tokens per second is estimated so after forty requests, whatever the prior
    was."""
    fleet = fleet_of("a")
    rng = random.Random(1)
    now = 0.0
    for number in range(40):
        asked = query(text(number, rng.randrange(200, 4000)))
        fleet.sent(str(number), asked, fleet.place(asked, now), now)
        fleet.first_token(str(number), now + 0.05 + asked.tokens / 2000)
        now += 10
        fleet.finished(str(number), now, cached_tokens=0, output_tokens=100)
    assert fleet.replicas["a"].cost_model.costs.prefill == pytest.approx(1 / 2000, rel=0.1)


def test_a_failed_request_leaves_no_load() -> None:
    """After a failure nothing is queued at the replica, and the next attempt avoids it."""
    fleet = fleet_of("a", "b")
    asked = query(text(1, 800))
    decision = fleet.place(asked, 0.0)
    fleet.sent("1", asked, decision, 0.0)
    fleet.failed("1", 0.1)
    assert len(fleet._requests) == 0
    assert all(one.queued_tokens == one.queued == 0 for one in fleet.candidates(asked, 0.1))
    again = fleet.place(asked, 0.1, avoid=[decision.replica or ""])
    assert again.replica not in (None, decision.replica)


def test_draining_overloaded_and_removed_replicas() -> None:
    """A replica that drains or has a full queue gets no requests and the reason is given; requests of a removed
    replica end without harm."""
    fleet = fleet_of("a", "b", max_queued=2)
    fleet.exclude("a", "draining")
    for number in range(2):
        asked = query(text(number, 800))
        decision = fleet.place(asked, 0.0)
        assert (decision.replica, decision.reason) == ("b", "only")
        fleet.sent(str(number), asked, decision, 0.0)
    said = fleet.place(asked, 0.0).in_words()
    assert said == "no replica takes requests: a: draining; b: overloaded: 2 requests wait there"
    fleet.exclude("a", "")
    assert fleet.place(asked, 0.0).replica == "a"
    fleet.remove("b")
    fleet.first_token("0", 1.0)
    fleet.finished("0", 2.0, cached_tokens=5)
    fleet.failed("1", 2.0)
    fleet.finished("never sent", 2.0)
    assert len(fleet._requests) == 0


def test_a_replica_that_is_added_again_is_new() -> None:
    """Requests of a removed replica do not touch a new one of the same name."""
    fleet = fleet_of("a")
    asked = query(text(1, 800))
    fleet.sent("old", asked, fleet.place(asked, 0.0), 0.0)
    fleet.remove("a")
    fleet.add("a", costs=COSTS)
    fleet.sent("new", asked, fleet.place(asked, 1.0), 1.0)
    fleet.first_token("old", 1.1)
    fleet.finished("old", 1.2, cached_tokens=0)
    assert fleet.candidates(asked, 1.2)[0].queued == 1
    assert fleet.place(asked, 1.2).expected_cached == 799


class Machine(RuleBasedStateMachine):
    """Whatever happens in whatever order, finished requests leave nothing behind."""

    def __init__(self) -> None:
        super().__init__()
        self.fleet = self.made()
        self.fleet.add("p", role="prefill")
        self.now = 0.0
        self.number = 0
        self.open: list[str] = []

    def made(self) -> Fleet:
        return Fleet()

    names = st.sampled_from(["a", "b", "c"])
    picks = st.integers(0, 1000)

    @rule(name=names, events=st.booleans(), role=st.sampled_from(["both", "decode"]))
    def come(self, name: str, events: bool, role: Role) -> None:
        if name not in self.fleet.replicas:
            self.fleet.add(name, sends_events=events, role=role, capacity_tokens=5000)

    @rule(name=names)
    def go(self, name: str) -> None:
        if name in self.fleet.replicas:
            self.fleet.remove(name)

    @rule(name=names, reason=st.sampled_from(["", "draining"]))
    def exclude(self, name: str, reason: str) -> None:
        if name in self.fleet.replicas:
            self.fleet.exclude(name, reason)

    @rule(seed=st.integers(0, 3), length=st.integers(1, 2000), session=st.none() | st.sampled_from(["s", "t"]))
    def send(self, seed: int, length: int, session: str | None) -> None:
        asked = query(text(seed, length), session)
        decision = self.fleet.place(asked, self.now)
        assert decision.in_words()
        if decision.replica is not None:
            self.number += 1
            self.fleet.sent(str(self.number), asked, decision, self.now)
            self.open.append(str(self.number))

    @rule(pick=picks)
    def begin(self, pick: int) -> None:
        if self.open:
            self.fleet.first_token(self.open[pick % len(self.open)], self.now)

    @rule(pick=picks, well=st.booleans(), cached=st.none() | st.integers(0, 2000))
    def end(self, pick: int, well: bool, cached: int | None) -> None:
        if self.open:
            request = self.open.pop(pick % len(self.open))
            if well:
                self.fleet.finished(request, self.now, cached_tokens=cached, output_tokens=20)
            else:
                self.fleet.failed(request, self.now)

    @rule(seconds=st.floats(0, 5))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @invariant()
    def sane(self) -> None:
        assert len(self.fleet._requests) == len(self.open)
        for one in self.fleet.candidates(query(text(0, 100)), self.now):
            assert 0 <= one.queued_tokens < 1e9 and one.memory_wait >= 0

    def teardown(self) -> None:
        for request in self.open:
            self.fleet.finished(request, self.now)
        for replica in self.fleet.replicas.values():
            load = replica.load
            assert not load.waiting and not load.running and load.resident == 0 and len(replica.in_flight_prefixes) == 0
            assert load.queued(self.now, COSTS).tokens == 0


TestNothingIsLeft = Machine.TestCase
TestNothingIsLeft.settings = settings(max_examples=examples(60), stateful_step_count=40, deadline=None)


def test_a_session_that_moves_is_counted() -> None:
    """A session leaves a replica where it would wait ten seconds."""
    fleet = fleet_of("a", "b")
    first = query(text(1, 320), "chat")
    home = serve(fleet, "1", first, 0.0).replica
    assert home is not None
    busy = query(text(2, 10_000))
    fleet.sent("busy", busy, CostPolicy().choose(busy, [c for c in fleet.candidates(busy, 1.0) if c.name == home]), 1.0)
    decision = fleet.place(first, 1.0)
    assert decision.reason == "moved" and decision.replica != home
    fleet.sent("2", first, decision, 1.0)
    assert fleet.sessions_moved == 1
    assert fleet.place(first, 20.0).home == decision.replica


def test_full_memory_makes_others_cheaper() -> None:
    """A replica with full KV memory is avoided although it has nothing to compute."""
    fleet = fleet_of("a", "b", capacity_tokens=10_000)
    for number in range(3):
        asked = query(text(number, 3000))
        to_a = CostPolicy().choose(asked, [c for c in fleet.candidates(asked, 0.0) if c.name == "a"])
        fleet.sent(str(number), asked, to_a, 0.0)
        fleet.first_token(str(number), 3.0)
    fleet.finished("0", 20.0, output_tokens=100)
    asked = query(text(7, 5000))
    by_name = {one.replica: one for one in fleet.place(asked, 21.0).estimates}
    assert by_name["a"].memory > 0 == by_name["b"].memory
    assert fleet.place(asked, 21.0).replica == "b"


def test_a_prefix_that_requests_share_is_in_memory_once() -> None:
    """Requests in flight with one prefix need its KV memory once, until the last of them has ended, and another one with that
    prefix waits for no more memory than its own part takes."""
    fleet = fleet_of("a", capacity_tokens=5000)
    document = text(1, 3200)
    for number in range(3):
        asked = query(document + text(number, 160))
        fleet.sent(str(number), asked, fleet.place(asked, 0.0), 0.0)
        fleet.first_token(str(number), 4.0)
    replica = fleet.replicas["a"]
    assert 3200 <= replica.load.resident <= 3200 + 3 * (160 + 256 + 256)
    for number in range(2):
        fleet.finished(str(number), 20.0, output_tokens=100)
    assert 3360 <= replica.load.resident <= 3200 + 160 + 256 + 256
    fits, waits = (fleet.place(query(asked), 21.0).estimates[0].memory for asked in (document, text(9, 3200)))
    assert fits == 0 < waits
    fleet.failed("2", 22.0)
    assert replica.load.resident == 0


@pytest.mark.parametrize("shared", [0, 1440, 120_000])
def test_memory_that_others_share_is_not_freed(shared: int) -> None:
    """Eleven prompts fill a replica's memory; one ends after 10 s. If one ends each second and frees what it alone held, a new
    prompt waits for as many ends as that takes: one where prompts are different, more where they share a start. Where they
    share nearly all of it, the wait is bounded: 16 lifetimes for as much memory as there is."""
    fleet, asked = fleet_of("a"), [query(text(1, shared) + text(seed, 160)) for seed in range(2, 13)]
    for number, one in enumerate(asked):
        fleet.sent(str(number), one, fleet.place(one, 0.0), 0.0)
        fleet.first_token(str(number), 0.1)
    load = fleet.replicas["a"].load
    before = load.resident
    fleet.finished("0", 10.0, cached_tokens=0, output_tokens=20)
    left, freed = load.resident, before - load.resident
    assert freed == 160 + 256 + shared % 256
    fleet.replicas["a"].capacity_tokens = left
    [found] = fleet.candidates(query(text(99, 160)), 10.0)
    assert found.memory_wait == pytest.approx(416 / max(freed, left / 160))
    assert (freed < left / 160) == (shared > 1440)


@pytest.mark.parametrize("capacity", [3000, 100_000])
def test_a_wait_for_memory_is_not_the_speed_of_a_replica(capacity: int) -> None:
    """Where the requests in flight need more KV memory than there is, neither a head that is overdue nor the TTFTs of those
    sent meanwhile make the replica seem slow. Where memory is free, both do."""
    fleet = fleet_of("a", capacity_tokens=capacity)
    model, seconds = fleet.replicas["a"].cost_model, 0.5
    for number in range(60):  # its costs are measured before, on an empty replica
        asked = query(text(number, 300 + 40 * number))
        fleet.sent("before", asked, fleet.place(asked, 100.0 * number), 100.0 * number)
        fleet.first_token("before", 100.0 * number + asked.tokens * 1e-3)
        fleet.finished("before", 100.0 * number + 90, cached_tokens=0, output_tokens=1)
    assert model.prefill_measured
    now, asked = 6100.0, query(text(700, 500))
    for number in range(60):
        one = query(text(1000 + number, 2000 + 10 * number))
        fleet.sent(f"holds {number}", one, fleet.place(one, now), now)
        fleet.first_token(f"holds {number}", now + 2)
        late = query(text(2000 + number, 1000 + 10 * number))
        fleet.sent(f"late {number}", late, fleet.place(late, now + 3), now + 3)
        if not number:
            [found] = fleet.place(asked, now + 40).estimates
            assert (found.compute > 2 * seconds) == (capacity > 3000)
        fleet.first_token(f"late {number}", now + 50)
        fleet.finished(f"late {number}", now + 51, cached_tokens=0, output_tokens=1)
        fleet.failed(f"holds {number}", now + 51)
        now += 52
    [found] = fleet.place(asked, now + 1).estimates
    assert (found.total > 2 * seconds) == (capacity > 3000)


def test_those_that_fill_the_shortest_queue_are_counted() -> None:
    """Candidates say how many requests come while the shortest queue becomes a second longer against the next one: the time
    between them and their own prefill fill it. A prompt that goes to a longer queue does not count, nor do those long ago."""
    fleet = fleet_of("a", "b")
    for number in range(1200):
        serve(fleet, str(number), query(text(number, 160)), now=number / 2)
    asked = query(text(1, 16))
    one, other = fleet.candidates(asked, 600.0)
    assert one.filling == other.filling == pytest.approx(1 / (0.5 + 0.16), rel=0.05)
    for number in range(2):
        busy = query(text(5000 + number, 3000))
        to_a = CostPolicy().choose(busy, fleet.candidates(busy, 600.0)[:1])
        fleet.sent(f"busy {number}", busy, to_a, 600.0)
    assert fleet.candidates(asked, 600.0)[0].filling < one.filling
    before = fleet.candidates(asked, 600.0)[0].filling
    longer = query(text(7000, 3000))
    both = fleet.place(longer, 600.0)
    fleet.sent("longer", longer, replace(both, replica="a"), 600.0)
    assert fleet.candidates(asked, 600.0)[0].filling == before
    assert fleet.candidates(asked, 1200.0)[0].filling < 0.01


def test_replicas_with_other_block_sizes() -> None:
    """A replica with blocks of 32 tokens is looked up by keys of that size; without such keys nothing counts as
    cached."""
    fleet = fleet_of("a")
    fleet.add("b", costs=COSTS, block_size=32)
    tokens = text(1, 800)
    wide = chain_keys(Scope(b"model", 32).root(), tokens, 32)
    fleet.directory.stored("b", CacheTier.DEVICE, None, wide)
    asked = query(tokens)
    assert {one.reused for one in fleet.place(asked, 0.0).estimates} == {0}
    both = PlacementQuery(asked.keys, 800, BLOCK, other_keys={("", 32): wide})
    assert fleet.place(both, 0.0).replica == "b"
    assert fleet.place(both, 0.0).expected_cached == 799


def test_mistakes_are_explained() -> None:
    """Duplicate and unknown replicas and duplicate requests raise errors that say what is wrong."""
    fleet = fleet_of("replica-1")
    asked = query(text(1, 100))
    with pytest.raises(ConfigError, match="already"):
        fleet.add("replica-1")
    with pytest.raises(NotFound, match="Did you mean 'replica-1'"):
        fleet.exclude("replica-2", "draining")
    with pytest.raises(ConfigError, match="role"):
        fleet.add("x", role="boss")  # type: ignore[arg-type]
    fleet.sent("1", asked, fleet.place(asked, 0.0), 0.0)
    with pytest.raises(ConfigError, match="in flight already"):
        fleet.sent("1", asked, fleet.place(asked, 0.0), 0.0)
    fleet.exclude("replica-1", "draining")
    with pytest.raises(NotFound, match="draining"):
        fleet.sent("2", asked, fleet.place(asked, 0.0), 0.0)


def test_sessions_are_bounded_and_expire() -> None:
    """The table keeps the most recently used sessions, and none beyond its TTL."""
    sessions = SessionTable(size=3, ttl=10.0)
    for number in range(5):
        sessions.record(f"s{number}", (), "a", float(number))
    assert len(sessions) == 3
    assert sessions.find("s0", (), 5.0) is None
    assert sessions.find("s4", (), 5.0) == SessionHome("a")
    assert sessions.find("s4", (), 14.0) is None
    sessions.remove_replica("a")
    assert len(sessions) == 0
    with pytest.raises(ConfigError):
        SessionTable(size=0)


def test_a_prompt_is_found_by_its_last_block_exactly_while_that_is_known() -> None:
    """A seeded walk: sessions are recorded, displaced, expire and lose their replicas. A prompt continues one exactly if a
    session of that name would be found."""
    draw = random.Random(7)
    sessions, names = SessionTable(size=48, ttl=60.0), keys_of_blocks(160)
    found = 0
    for step in range(4000):
        now, name = float(step), draw.choice(names)
        if draw.random() < 0.5:
            sessions.record(None, (draw.choice(names), name), draw.choice("abc"), now, draw.choice(("", "weights")))
        elif draw.random() < 0.01:
            sessions.remove_replica(draw.choice("abc"))
        by_name = sessions.find(name, (), now)  # type: ignore[arg-type]
        assert sessions.find(None, (name,), now) == (by_name and by_name._replace(blocks=1))
        found += by_name is not None
    assert 500 < found < 3500


def keys_of_blocks(count: int) -> list[bytes]:
    return chain_keys(ROOT, range(count * BLOCK), BLOCK)


def test_a_new_replica_gets_typical_costs() -> None:
    """The others turned out to be a hundred times faster than the default costs. A new replica is estimated with
    their costs."""
    fleet = Fleet()
    for name in ("a", "b"):
        fleet.add(name, sends_events=True)
    for number in range(12):
        asked = query(text(number, 1600))
        decision = fleet.place(asked, float(number))
        fleet.sent(str(number), asked, decision, float(number))
        fleet.first_token(str(number), number + 0.004)
        fleet.finished(str(number), number + 0.01, cached_tokens=0, output_tokens=2)
    fleet.add("c", sends_events=True)
    decision = fleet.place(query(text(99, 1600)), 20.0)
    assert decision.replica == "c"
    assert decision.estimate is not None and decision.estimate.total < 0.05


def test_a_replica_that_looked_slow_gets_another_chance() -> None:
    """Its first requests took a hundred times as long. After an idle minute it is estimated like the others, and new
    observations count from the first one."""
    fleet = Fleet()
    for name in ("a", "b", "c"):
        fleet.add(name, sends_events=True)

    def ask(number: int, now: float, seconds: dict[str, float]) -> str | None:
        asked = query(text(number, 1600))
        decision = fleet.place(asked, now)
        assert decision.replica is not None
        fleet.sent(str(number), asked, decision, now)
        fleet.first_token(str(number), now + seconds[decision.replica])
        fleet.finished(str(number), now + seconds[decision.replica], cached_tokens=0, output_tokens=1)
        return decision.replica

    slow = [ask(number, number * 5.0, {"a": 0.1, "b": 0.1, "c": 10.0}) for number in range(40)]
    assert 1 <= slow.count("c") <= 6
    even = [ask(number, number * 5.0, {"a": 0.1, "b": 0.1, "c": 0.1}) for number in range(40, 80)]
    assert even.count("c") >= 10


def test_without_events_the_next_turn_is_expected_cached() -> None:
    """Without events each turn of a chat is expected to find the previous prompt and its output, except for blocks
    that were not full."""
    fleet, tokens = fleet_of("a", "b"), text(1, 400)
    for turn in range(5):
        asked = query(tokens)
        decision = fleet.place(asked, float(turn))
        assert (
            decision.expected_cached == (len(tokens) - 60 - 1) // BLOCK * BLOCK
            if turn
            else not decision.expected_cached
        )
        fleet.sent(str(turn), asked, decision, float(turn))
        fleet.first_token(str(turn), turn + 0.1)
        fleet.finished(str(turn), turn + 0.5, cached_tokens=decision.expected_cached, output_tokens=200)
        tokens = [*tokens, *text(100 + turn, 200), *text(200 + turn, 60)]


def prompt_for(
    tokens: list[int], *weights: str, required: str | None = None, session: str | None = None
) -> PlacementQuery:
    """A query with keys for replicas with each of these weights."""
    keys = [chain_keys(Scope(b"model" + one.encode(), BLOCK).root(), tokens, BLOCK) for one in weights]
    others = {(one, BLOCK): keys[number] for number, one in enumerate(weights) if number}
    return PlacementQuery(keys[0], len(tokens), BLOCK, session, None, others, weights[0], required)


def test_blocks_of_other_weights_do_not_count() -> None:
    """Blocks in a store that all replicas share count only for those with the weights that computed them."""
    fleet = fleet_of("a", "b", sends_events=True, weights="1")
    fleet.add("c", costs=COSTS, sends_events=True, weights="2")
    tokens = text(1, 800)
    asked = prompt_for(tokens, "1", "2")

    def reused(at: float) -> dict[str, int]:
        return {one.replica: one.reused for one in fleet.place(asked, at).estimates}

    fleet.directory.stored("a", CacheTier.SHARED, None, asked.keys)
    assert reused(0.0) == {"a": 799, "b": 799, "c": 0}
    fleet.directory.removed("a", CacheTier.SHARED, asked.keys)
    fleet.directory.stored("c", CacheTier.SHARED, None, asked.keys_in(("2", BLOCK)))
    assert reused(1.0) == {"a": 0, "b": 0, "c": 799}


@pytest.mark.parametrize("size", [3, 40])
def test_a_response_that_has_begun_stays_with_its_weights(size: int) -> None:
    """Only replicas that are known to have the same weights are chosen, also in a large fleet, and also if all others are idle;
    if none of them takes requests, none is chosen."""
    fleet = fleet_of("same", weights="1")
    for number in range(size):
        fleet.add(f"other{number}", costs=COSTS, weights=("2", None)[number % 2])
    for number in range(20):
        asked = prompt_for(text(number, 800), "1", "2", "", required="1")
        decision = fleet.place(asked, 0.0)
        assert decision.replica == "same"
        fleet.sent(str(number), asked, decision, 0.0)
    fleet.exclude("same", "unhealthy: it is gone")
    decision = fleet.place(prompt_for(text(1, 800), "1", "2", "", required="1"), 0.0)
    assert decision.replica is None and "weights that began the response" in decision.in_words()
    assert fleet.place(prompt_for(text(1, 800), "1", "2", ""), 0.0).replica is not None


@pytest.mark.parametrize("named", [True, False])
def test_a_session_stays_with_its_weights(named: bool) -> None:
    """Its replica drains, and is then removed: the session goes to another replica with the same weights, and to others if
    there is none. It then stays with theirs."""
    fleet = fleet_of("a", "b", weights="1")
    for name in ("c", "d", "e"):
        fleet.add(name, costs=COSTS, weights="2")
    conversations: dict[str, list[int]] = {}

    def turn(name: str, now: float) -> str:
        conversations[name] = [*conversations.get(name, ()), *text(int(name) * 100 + int(now), 100)]
        asked = prompt_for(conversations[name], "1", "2", session=name if named else None)
        decision = serve(fleet, f"{name} {now}", asked, now)
        assert decision.replica is not None
        return decision.replica

    first = {name: turn(name, 0.0) for name in map(str, range(30))}
    old, new = {"a", "b"}, {"c", "d", "e"}
    assert set(first.values()) == old | new
    fleet.exclude("a", "draining")
    second = {name: turn(name, 1.0) for name in first}
    assert all(second[name] == ("b" if where in old else where) for name, where in first.items())
    fleet.remove("a")
    fleet.remove("b")
    third = {name: turn(name, 2.0) for name in first}
    assert set(third.values()) == new
    fleet.add("f", costs=COSTS, weights="1")
    assert {turn(name, 3.0) for name in first} == new


@pytest.mark.parametrize(("replicas", "prompts", "own"), [(4, 200, 0), (4, 200, 20), (8, 400, 0), (2, 60, 40)])
def test_a_burst_is_computed_once_by_each_replica(replicas: int, prompts: int, own: int) -> None:
    """Prompts that wait for a prefix that is being computed do not fill a replica's queue, and it is not computed again there.
    It is wanted everywhere, since all of them will decode, whether they are equal or only begin alike."""
    fleet = fleet_of(*(f"r{number}" for number in range(replicas)), max_queued=32)
    shared = text(1, 4000)
    for number in range(prompts):
        asked = query([*shared, *text(2 + number, own)])
        decision = fleet.place(asked, 0.0)
        fleet.sent(str(number), asked, decision, 0.0)
    states = fleet.replicas.values()
    computed = sum(one.load.queued(0.0, COSTS).tokens for one in states) - prompts * own
    assert len(shared) <= computed < (replicas + 1) * len(shared) + prompts * BLOCK
    waiting = [len(one.load.waiting) for one in states]
    assert sum(waiting) == prompts and max(waiting) < 2 * min(waiting)


@pytest.mark.parametrize("size", [BLOCK, 2 * BLOCK])
def test_a_prompt_without_an_answer_has_no_next_turn(size: int) -> None:
    """Prompts that begin as one that still waits for its first token do not continue it: they have no home until then, also
    where the replica has other blocks than the query. A named session keeps its own."""
    fleet, wide = fleet_of("a", "b", block_size=size), Scope(b"model", 2 * BLOCK).root()
    first, longer = (
        replace(query(tokens), other_keys={("", 2 * BLOCK): chain_keys(wide, tokens, 2 * BLOCK)})
        for tokens in (text(1, 800), text(1, 800) + text(2, 200))
    )
    decision = fleet.place(first, 0.0)
    fleet.sent("1", first, decision, 0.0)
    for asked in (first, longer):
        assert fleet.place(asked, 0.5).home is None
    fleet.sessions.record("s", (), str(decision.replica), 0.5)
    assert fleet.place(replace(first, session="s"), 0.5).home == decision.replica
    fleet.first_token("1", 0.8)
    for asked in (first, longer):
        assert fleet.place(asked, 1.0).home == decision.replica


def test_equal_prompts_take_no_more_of_a_replica_than_others() -> None:
    """A flood of equal prompts ends in the router's queue when their own work is that of as many prompts as may wait; prompts
    of others are still taken until then, and again when it is over."""
    fleet, flood = fleet_of("a", max_queued=4), query(text(1, 1600))
    sent = 0
    while fleet.place(flood, 0.0).replica is not None:
        fleet.sent(str(sent), flood, fleet.place(flood, 0.0), 0.0)
        sent += 1
        if sent == 16:
            other = query(text(2, 1600))
            fleet.sent("other", other, fleet.place(other, 0.0), 0.0)
    assert sent == 1 + 2 * 16
    assert fleet.replicas["a"].load.queued(0.0, COSTS).tokens <= 4 * 1600
    for number in range(sent):
        fleet.first_token(str(number), 2.0)
    assert fleet.replicas["a"].load.places == 1
    assert fleet.place(flood, 2.0).replica == "a"


@pytest.mark.parametrize("back", [False, True])
def test_a_replica_that_joins_an_idle_fleet_gets_its_share(back: bool) -> None:
    """New prompts are spread over all replicas alike when one joins, or comes back after it was excluded."""
    fleet, now = fleet_of("a", "b", "c"), 0.0
    counts = dict.fromkeys(("a", "b", "c", "d"), 0)
    if back:
        fleet.add("d", costs=COSTS)
        fleet.exclude("d", "draining")
    for number in range(60):
        now += 5.0
        serve(fleet, f"before {number}", query(text(number, 800)), now)
    if back:
        fleet.exclude("d", "")
    else:
        fleet.add("d", costs=COSTS)
    for number in range(80):
        now += 5.0
        decision = serve(fleet, f"after {number}", query(text(1000 + number, 800)), now)
        counts[str(decision.replica)] += 1
        assert counts["d"] <= number // 4 + 2, "it gets no burst of requests"
    assert min(counts.values()) >= 15
