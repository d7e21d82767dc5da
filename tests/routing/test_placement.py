"""The default placement policy: worked examples, and properties that hold for all inputs."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest
from candidates import BLOCK, COSTS, candidate, keys_of, query
from hypothesis import given, settings
from hypothesis import strategies as st

from foreword.errors import ConfigError
from foreword.routing.costs import LoadCost
from foreword.routing.directory import NOTHING
from foreword.routing.placement import (
    Candidate,
    CostEstimate,
    CostPolicy,
    PlacementQuery,
    SessionAffinity,
    Surroundings,
    estimate_cost,
)
from foreword.routing.policies import POLICIES, policy_named


def test_parts_of_an_estimate_add_up() -> None:
    """1,600 tokens, 20 blocks on the device, 20 in host memory, 10 on disk, 100 tokens queued, 3 decoding sequences:
    0.1 s queued, 0.032 s + 0.08 s loading, 0.8 s computing, and 6 ms decode interference in two steps of 512
    tokens."""
    found = estimate_cost(query(1600), candidate("a", 20, 20, 10, queued_tokens=100, running=3))
    assert found.queue == pytest.approx(0.1)
    assert found.load == pytest.approx(320 * 1e-4 + 160 * 5e-4)
    assert found.compute == pytest.approx(0.8)
    assert found.decode == pytest.approx(2 * 3e-3)
    assert (found.reused, found.computed, found.from_tiers) == (800, 800, (320, 320, 160, 0))
    assert found.total == pytest.approx(0.1 + 0.112 + 0.8 + 0.006)


def test_prices_are_to_the_bit_those_of_plain_formulas() -> None:
    """Estimates are computed without calls. Of 2,000 seeded states of four replicas each is what the costs' own methods give:
    waiting, computing, what others lose, and what a long wait counts."""
    draw = random.Random(3)
    for number in range(500):
        costs = replace(COSTS, prefill=draw.uniform(1e-5, 1e-3), attention=draw.choice((0.0, 1e-8)))
        filling = draw.choice((0.0, 0.4))
        found = [
            candidate(
                name,
                draw.choice((0, 0, 5, 40)),
                costs=costs,
                queued=(queued := draw.choice((0, 0, 1, 7))),
                queued_tokens=float(queued * 300),
                queued_pairs=queued * 5e4,
                running=draw.choice((0, 3)),
                memory_wait=draw.choice((0.0, 0.2)),
                filling=filling,
            )
            for name in "abcd"
        ]
        asked = query(draw.choice((320, 1600)), number)
        queues = sorted(costs.compute_pairs(one.queued_tokens, one.queued_pairs) for one in found)
        wait = sum(costs.compute_pairs(one.queued_tokens, one.queued_pairs) for one in found) / 4
        to_come = math.expm1(sum(math.log1p(one.queued) for one in found) / 4)
        for one, estimate in zip(found, CostPolicy().choose(asked, found).estimates, strict=True):
            computed = max(asked.tokens - one.reach[0] * BLOCK, 1)
            queue = costs.compute_pairs(one.queued_tokens, one.queued_pairs)
            compute = costs.compute(computed, asked.tokens - computed)
            age = queue / (wait + costs.compute(asked.tokens, 0)) if queue else 0.0
            gap = max(queues[1] - queue, 0.0) if queue <= queues[0] else 0.0
            left = max(gap - compute, 0.0)
            assert (estimate.queue, estimate.compute) == (queue, compute)
            assert estimate.memory == max(queue, one.memory_wait) - queue
            assert estimate.behind == (one.queued + to_come) * (1 + age * age)
            assert estimate.ageing == queue * age * age / 3
            assert estimate.coming == one.filling * (gap * gap - left * left) / 2
            assert estimate.price == (
                estimate.total
                + estimate.behind * compute
                + estimate.slows * compute
                + estimate.ageing
                + estimate.coming
            )


def test_blocks_that_load_slower_than_they_compute_are_recomputed() -> None:
    """Blocks in a store at 2 ms per token are not loaded when computing takes 1 ms per token."""
    found = estimate_cost(query(1600), candidate("a", 10, shared=90))
    assert (found.reused, found.computed, found.load) == (160, 1440, 0.0)


def test_slow_blocks_are_loaded_if_fast_ones_follow() -> None:
    """A prefix is loaded from its start: 10 blocks that lose 0.16 s are worth it if the 90 blocks after them gain
    1.3 s."""
    costs = replace(COSTS, loads=(LoadCost(2e-3), LoadCost(1e-4), LoadCost(1e-4)))
    slow_first = candidate("a", 0, 10, 90)._replace(costs=costs)
    assert estimate_cost(query(1600), slow_first).from_tiers == (0, 160, 1440, 0)
    assert estimate_cost(query(1600), candidate("a", 0, 90, 10)._replace(costs=costs)).from_tiers == (0, 0, 0, 0)


def test_a_fully_cached_prompt_computes_its_last_token() -> None:
    """At least one token is computed, because the logits are needed."""
    found = estimate_cost(query(1600), candidate("a", 100))
    assert (found.computed, found.reused) == (1, 1599)


def test_a_cached_prefix_wins_until_the_queue_costs_more() -> None:
    """A holds 80 of 100 blocks (1.28 s of computing): it is chosen with 1,000 tokens queued, but not with 1,500."""
    policy = CostPolicy()
    here = policy.choose(query(1600), [candidate("a", 80, queued_tokens=1000), candidate("b")])
    there = policy.choose(query(1600), [candidate("a", 80, queued_tokens=1500), candidate("b")])
    assert (here.replica, there.replica) == ("a", "b")
    assert here.expected_cached == 1280 and there.expected_cached == 0


@given(blocks=st.integers(0, 100), queued=st.lists(st.integers(0, 5000), min_size=2, max_size=6))
def test_a_prefix_on_all_replicas_does_not_matter(blocks: int, queued: list[int]) -> None:
    """If all candidates hold the same blocks, the choice is the same as if none held any."""
    policy = CostPolicy(tie=0.0)
    without = [candidate(f"r{i}", queued_tokens=100.0 * tokens) for i, tokens in enumerate(queued)]
    having = [one._replace(reach=(blocks,) * 4) for one in without]
    best = {estimate_cost(query(1600), one).total: one.name for one in without}
    if len(set(queued)) == len(queued):
        assert (
            policy.choose(query(1600), having).replica == policy.choose(query(1600), without).replica == best[min(best)]
        )


def test_a_shared_store_reduces_the_advantage_of_the_holder() -> None:
    """Blocks in a shared store that loads faster than computing are available everywhere: a short queue at the
    holder decides."""
    costs = replace(COSTS, loads=(LoadCost(1e-4), LoadCost(1e-4), LoadCost(1e-4)))
    holder = Candidate("a", costs, (100, 100, 100, 100), queued_tokens=300)
    other = Candidate("b", costs, (0, 0, 0, 100))
    assert CostPolicy().choose(query(1600), [holder, other]).replica == "b"
    alone = other._replace(reach=(0, 0, 0, 0))
    assert CostPolicy().choose(query(1600), [holder, alone]).replica == "a"


@pytest.mark.parametrize(("waiting", "chosen"), [(0, "other"), (1, "holder"), (20, "holder")])
def test_work_that_others_wait_for_has_a_price(waiting: int, chosen: str) -> None:
    """The holder of 1,440 of 1,600 tokens has 2 s to compute first, another replica 0.1 s. Where nothing waits the request goes
    to the other, which computes all. Where requests wait everywhere, its 1.6 s there would delay each of them and as many that
    come later, at the holder 0.16 s; more as they wait longer than is usual."""
    holder = candidate("holder", 90, queued_tokens=2_000, queued=waiting)
    other = candidate("other", queued_tokens=100, queued=waiting)
    decision = CostPolicy().choose(query(1600), [holder, other])
    assert decision.replica == chosen
    assert decision.estimate is not None
    age = decision.estimate.queue / (1.05 + 1.6)
    assert decision.estimate.delays == pytest.approx(2 * waiting * (1 + age**2) * decision.estimate.prefill)
    assert ("for those that wait" in decision.in_words()) == (waiting > 0)
    assert ("together with what others wait" in decision.in_words()) == (waiting > 0)


def test_work_has_no_price_while_capacity_is_to_be_had() -> None:
    """Twenty requests wait at the only holder of a prefix, and the other replicas are idle: the request goes to one of them,
    although it computes there what the holder has."""
    holder = candidate("holder", 90, queued_tokens=5_000, queued=20)
    idle = [candidate(f"idle {number}") for number in range(3)]
    assert CostPolicy().choose(query(1600), [holder, *idle]).replica != "holder"
    busy = [candidate(f"busy {number}", queued=20) for number in range(3)]
    assert CostPolicy().choose(query(1600), [holder, *busy]).replica == "holder"


def test_a_session_stays_unless_that_costs_too_much() -> None:
    """The session's replica saves 1.28 s of computing and costs 1.17 s more than another, 0.70 s of it for the wait: within
    1.5 times 1.6 s plus 1 s, but not within 1.5 times 1.6 s plus 0.2 s."""
    found = [candidate("home", 80, queued_tokens=1750), candidate("other")]
    patient = CostPolicy(SessionAffinity(seconds=1.0, ratio=1.5)).choose(query(1600), found, "home")
    hasty = CostPolicy(SessionAffinity(seconds=0.2, ratio=1.5)).choose(query(1600), found, "home")
    assert (patient.replica, patient.reason) == ("home", "session")
    assert (hasty.replica, hasty.reason, hasty.home) == ("other", "moved", "home")


def test_a_session_pays_nothing_to_stay_where_its_cache_is_gone() -> None:
    """The session's replica holds one block, like the others, and has 0.18 s of work queued: the session moves to an
    idle replica."""
    found = [candidate("home", 1, queued_tokens=180), candidate("other", 1)]
    decision = CostPolicy().choose(query(2656), found, "home")
    assert (decision.replica, decision.reason) == ("other", "moved")
    idle = [candidate("home", 1, queued_tokens=20), candidate("other", 1)]
    assert CostPolicy().choose(query(2656), idle, "home").reason == "session", "nearly equal estimates do not move it"


@given(
    st.lists(st.tuples(st.integers(0, 100), st.integers(0, 3000)), min_size=2, max_size=5),
    st.floats(0, 3),
    st.floats(1, 5),
)
def test_staying_costs_at_most_what_home_saves(states: list[tuple[int, int]], seconds: float, ratio: float) -> None:
    """A session that stays costs at most as much more than elsewhere as it saves in computing, whatever the settings."""
    found = [candidate(f"r{i}", blocks, queued_tokens=queued) for i, (blocks, queued) in enumerate(states)]
    decision = CostPolicy(SessionAffinity(seconds, ratio)).choose(query(1600), found, "r0")
    if decision.reason == "session":
        cheapest = min(decision.estimates, key=lambda one: one.price)
        saved = max(cheapest.compute - decision.estimates[0].compute, 0.0)
        assert decision.estimates[0].price <= cheapest.price + max(saved, cheapest.price * 0.05 + 0.005) + 1e-9


def test_a_session_leaves_a_replica_that_takes_no_requests() -> None:
    """The session moves when its replica drains or was removed."""
    policy = CostPolicy()
    assert policy.choose(query(160), [candidate("home", excluded="draining"), candidate("b")], "home").replica == "b"
    assert policy.choose(query(160), [candidate("b")], "home").replica == "b"


def test_uncached_prompts_spread_and_return() -> None:
    """Prompts that no replica holds spread over all idle replicas, and each goes to the same one again."""
    policy, fleet = CostPolicy(), [candidate(f"r{i}") for i in range(4)]
    first = [policy.choose(query(800, number), fleet).replica for number in range(400)]
    again = [policy.choose(query(800, number), fleet[::-1]).replica for number in range(400)]
    assert first == again
    assert all(70 < first.count(one.name) < 130 for one in fleet)


def test_removing_a_replica_moves_only_its_own_prompts() -> None:
    """Without r3, prompts that went to other replicas still go there."""
    policy, fleet = CostPolicy(), [candidate(f"r{i}") for i in range(4)]
    for number in range(200):
        with_all = policy.choose(query(800, number), fleet).replica
        assert with_all in ("r3", policy.choose(query(800, number), fleet[:3]).replica)


def test_a_shared_system_prompt_does_not_attract_everything() -> None:
    """Prompts with a shared prefix that all replicas hold are spread by what follows it."""
    fleet = [candidate(f"r{i}", 10) for i in range(4)]
    shared = keys_of(-1, 10)
    asked = [PlacementQuery(shared + keys_of(number, 40), 800, BLOCK) for number in range(200)]
    chosen = [CostPolicy().choose(one, fleet).replica for one in asked]
    assert all(chosen.count(one.name) > 25 for one in fleet)


def test_a_short_cached_prefix_does_not_attract_a_new_session() -> None:
    """A prompt of which one replica holds a fifth goes to the least loaded replica. A replica that holds most of the
    prompt is chosen whatever its load."""
    fleet = [candidate("warm", 20, recent_tokens=5000), candidate("cold")]
    new = CostPolicy().choose(query(1600), fleet)
    assert (new.replica, new.reason) == ("cold", "spread")
    assert new.in_words().startswith("cold: spread: most of this prompt is on no replica")
    known = [candidate("warm", 60, recent_tokens=5000), candidate("cold")]
    assert CostPolicy().choose(query(1600), known).replica == "warm"


def test_a_session_stays_where_a_fifth_of_it_is() -> None:
    """A session of which a fifth is left goes to its replica, whatever others had to do. If that is busy, or nothing is left,
    it is placed like a new one, and says so."""
    loads = {"home": 5000.0, "other": 4000.0, "idle": 0.0}
    held = [candidate(name, 20 * (name != "idle"), recent_tokens=load) for name, load in loads.items()]
    stayed = CostPolicy().choose(query(1600), held, "home")
    assert (stayed.replica, stayed.reason) == ("home", "session")
    busy = [one._replace(queued_tokens=2000.0) if one.name == "home" else one for one in held]
    moved = CostPolicy().choose(query(1600), busy, "home")
    assert (moved.replica, moved.reason, moved.home) == ("idle", "spread", "home")
    lost = [one._replace(reach=NOTHING) if one.name == "home" else one for one in held]
    again = CostPolicy().choose(query(1600), lost, "home")
    assert again.replica == "idle"


def test_a_common_prefix_is_said_to_be_common() -> None:
    """A prompt that is sent away from most of its prefix, because too few replicas hold that, says so."""
    policy, fleet = CostPolicy(), [candidate("warm", 60, recent_tokens=5000), candidate("cold")]
    chosen = [policy.choose(query(1600), fleet) for _ in range(30)]
    assert chosen[0].replica == "warm"
    assert (chosen[-1].replica, chosen[-1].reason) == ("cold", "common")
    assert chosen[-1].in_words().startswith("cold: spread: too few replicas hold this common prefix")


def test_a_short_cached_prefix_wins_where_loads_are_equal() -> None:
    """The replica that holds a fifth of the prompt is chosen out of two with the same recent load; queueing is never traded for
    balance."""
    idle = [candidate("warm", 20), candidate("cold")]
    assert CostPolicy().choose(query(1600), idle).replica == "warm"
    queued = [candidate("warm", 20, recent_tokens=5000), candidate("cold", queued_tokens=500)]
    assert CostPolicy().choose(query(1600), queued).replica == "warm"


def test_new_sessions_spread_over_all_replicas() -> None:
    """Twelve sessions share a system prompt that one replica has served: each of three replicas gets four
    sessions."""
    policy, recent = CostPolicy(), {"a": 1600.0, "b": 0.0, "c": 0.0}
    served = {"a"}
    chosen = ["a"]
    for number in range(11):
        fleet = [candidate(name, 20 if name in served else 0, recent_tokens=recent[name]) for name in recent]
        chosen.append(policy.choose(query(1600, number), fleet).replica or "")
        served.add(chosen[-1])
        recent[chosen[-1]] += 1600
    assert sorted(chosen) == ["a"] * 4 + ["b"] * 4 + ["c"] * 4


def test_full_memory_is_waited_for() -> None:
    """The wait for KV memory counts as far as it exceeds the queue."""
    found = estimate_cost(query(1600), candidate("a", queued_tokens=500, memory_wait=2.0))
    assert found.queue + found.memory == pytest.approx(2.0)


def test_the_reason_in_words() -> None:
    """A decision explains itself in one sentence, with numbers and the runner-up."""
    found = [candidate("a", 10, 50, queued_tokens=100), candidate("b", excluded="draining"), candidate("c")]
    said = CostPolicy().choose(query(1600), found).in_words()
    assert said == (
        "a: lowest expected TTFT, 0.82 s (0.10 queued, 0.08 loading 800 from host memory, 0.64 computing 640 of 1600 tokens); "
        "next c at 1.60 s (1.60 computing 1600 of 1600 tokens)"
    )


def test_policies_have_their_names() -> None:
    """A policy says the name by which it is chosen."""
    assert [policy_named(name).name for name in POLICIES] == list(POLICIES)


def test_no_available_candidate_is_explained() -> None:
    """Without an available candidate the decision names no replica, and the reason for each."""
    found = [candidate("a", excluded="draining"), candidate("b", excluded="overloaded: 9 requests wait there")]
    for name in POLICIES:
        decision = policy_named(name).choose(query(160), found)
        assert decision.replica is decision.estimate is None
        assert decision.in_words() == "no replica takes requests: a: draining; b: overloaded: 9 requests wait there"
    assert policy_named("cost").choose(query(160), []).in_words() == "there is no replica"


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32), st.sampled_from(sorted(POLICIES)))
def test_every_policy_is_deterministic(seed: int, name: str) -> None:
    """Requests in the same order go to the same candidates, and only to available ones."""

    def run() -> list[str | None]:
        rng, policy = random.Random(seed), policy_named(name)
        chosen = []
        for _ in range(20):
            found = [
                candidate(
                    f"r{i}",
                    rng.randrange(60),
                    queued_tokens=rng.randrange(3000),
                    queued=rng.randrange(5),
                    excluded="draining" if rng.random() < 0.2 else "",
                )
                for i in range(rng.randrange(1, 6))
            ]
            decision = policy.choose(query(rng.randrange(1, 2000), rng.randrange(9)), found)
            usable = [one.name for one in found if not one.excluded]
            assert decision.replica in usable if usable else decision.replica is None
            chosen.append(decision.replica)
        return chosen

    assert run() == run()


def test_unknown_policies_are_refused() -> None:
    """A typo is answered with similar names."""
    with pytest.raises(ConfigError, match="cost"):
        policy_named("costs")


def test_session_affinity_out_of_range_is_refused() -> None:
    """A ratio below 1 is an error."""
    with pytest.raises(ConfigError, match="at least 1"):
        SessionAffinity(ratio=0.5)


def test_work_that_slows_decoding_has_a_price() -> None:
    """A prompt of 1.6 s would stop 40 sequences that decode, each for as long. A second of theirs counts as much as the share
    of the time to first token in all time: with a fifth, the prompt goes where it waits for 3 s; with a hundredth it does not.
    Where nothing is to be computed, decoding costs nothing. The explanation names it."""
    for weight, chosen in ((0.2, "waits"), (0.01, "decodes")):
        found = [candidate("decodes", running=40), candidate("waits", queued_tokens=3000)]
        decision = CostPolicy().choose(query(1600), [one._replace(decode_weight=weight) for one in found])
        assert decision.replica == chosen
        [busy, _] = decision.estimates
        assert busy.stalls == pytest.approx(40 * weight * 1.6) == busy.others
        assert f"{busy.stalls:.2f} s for those that decode" in decision.in_words()
    hit = CostPolicy().choose(query(1600), [candidate("decodes", 100, running=40), candidate("idle")])
    assert hit.replica == "decodes"


def test_decoding_sequences_end_before_a_long_queue_does() -> None:
    """When the turn of a prompt comes, behind a queue of as many steps as an output has tokens, about a third of what decoded
    is left, and most of what waited decodes."""
    steps, output = 256 * 512, 256.0
    none = estimate_cost(query(1600), candidate("a", running=90, queued_tokens=steps, output=output, decode_weight=1.0))
    assert none.slows == 90.0, "nothing waits there, although tokens do"
    some = estimate_cost(
        query(1600), candidate("a", running=90, queued_tokens=steps, queued=10, output=output, decode_weight=1.0)
    )
    assert some.slows == pytest.approx(90 / math.e + 10 * (1 - 1 / math.e))


@given(st.floats(0.0, 1e4), st.floats(0.0, 1e3), st.integers(0, 500))
def test_long_waits_weigh_more(wait: float, usual: float, behind: int) -> None:
    """A wait below the usual one counts little more than its seconds; one of three times the usual counts four times as much,
    and the seconds of those that wait there count more too. Twice the wait never costs less than twice."""
    around = Surroundings(0.0, usual)

    def at(seconds: float) -> CostEstimate:
        return estimate_cost(query(1600), candidate("a", queued_tokens=seconds * 1000, queued=behind), around)

    one, two = at(wait), at(2 * wait)
    age = wait / (usual + 1.6)
    assert one.ageing == pytest.approx(wait * age**2 / 3)
    assert one.delays == pytest.approx(behind * (1 + age**2) * one.prefill)
    assert two.queue + two.ageing >= 2 * (one.queue + one.ageing) * (1 - 1e-9)
    assert one.price >= one.total


def test_the_shortest_queue_is_kept_for_those_that_come() -> None:
    """Two come for each second of the gap of 2 s between the queues of 1 s and 3 s. A prompt of 4 s fills it, which costs them
    2 * 2² / 2 = 4 s, as the explanation says, so it waits longer behind others; one of 0.1 s costs them 0.37 s."""

    def placed(tokens: int, filling: float) -> tuple[str | None, CostEstimate, str]:
        found = [
            candidate(name, queued_tokens=queued, queued=1)._replace(filling=filling)
            for name, queued in (("a", 1000), ("b", 3000), ("c", 5000))
        ]
        decision = CostPolicy().choose(query(tokens), found)
        return decision.replica, decision.estimates[0], decision.in_words()

    replica, shortest, words = placed(4000, 2.0)
    assert shortest.coming == pytest.approx(4.0)
    assert replica == "b" and "4.00 s for those that will come" in words
    assert placed(4000, 0.5)[0] == "a"
    assert placed(4000, 0.0)[0] == placed(96, 2.0)[0] == "a"
    assert placed(96, 2.0)[1].coming == pytest.approx(2.0**2 - 1.904**2)
    assert all(one.coming == 0 for one in CostPolicy().choose(query(4000), [candidate("a"), candidate("b")]).estimates)


@pytest.mark.parametrize("idle", [1, 2])
def test_the_last_idle_replica_is_kept_for_short_prompts(idle: int) -> None:
    """While others are busy, a long prompt takes an idle replica if there is another one, or one that stands for several."""
    found = [candidate(f"busy-{i}", queued_tokens=6000, queued=1)._replace(filling=20.0) for i in range(3)]
    one = candidate("idle")._replace(filling=20.0)
    alone = CostPolicy().choose(query(20_000), [*found, one])
    more = CostPolicy().choose(query(20_000), [*found, one._replace(stands_for=2.0)])
    others = CostPolicy().choose(query(20_000), [*found, *(one._replace(name=f"idle-{i}") for i in range(idle))])
    assert alone.replica is not None and alone.replica.startswith("busy")
    assert more.replica == "idle"
    assert others.replica is not None and others.replica.startswith("idle" if idle > 1 else "busy")
