"""Placement: worked examples, and what must hold for any."""

from __future__ import annotations

import random
from dataclasses import replace
from hashlib import sha256

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foreword.errors import ConfigError
from foreword.routing.baselines import POLICIES, policy_named
from foreword.routing.costs import LoadCost, ReplicaCosts
from foreword.routing.disaggregation import Disaggregation
from foreword.routing.placement import Candidate, CheapestFirstToken, Query, Stickiness, price

BLOCK = 16
# 1 ms for each token computed, 0.1 ms from host memory, 0.5 ms from disk, 2 ms from a shared store: slower than computing.
COSTS = ReplicaCosts(
    prefill=1e-3,
    first=0.0,
    decode_each=1e-3,
    step_tokens=512,
    loads=(LoadCost(1e-4), LoadCost(5e-4), LoadCost(2e-3)),
    transfer=LoadCost(1e-4, 0.01),
)


def keys_of(number: int, blocks: int) -> list[bytes]:
    return [sha256(f"{number}/{i}".encode()).digest() for i in range(blocks)]


def query(tokens: int, number: int = 0, session: str | None = None) -> Query:
    return Query(keys_of(number, tokens // BLOCK), tokens, BLOCK, session)


def candidate(name: str, device: int = 0, host: int = 0, disk: int = 0, shared: int = 0, **more: object) -> Candidate:
    reach = (device, device + host, device + host + disk, device + host + disk + shared)
    return replace(Candidate(name, COSTS, reach), **more)  # type: ignore[arg-type]


def test_waiting_computing_and_loading_add_up() -> None:
    """1,600 tokens, 20 blocks on the device, 20 in host memory, 10 on disk, 100 tokens queued, 3 sequences that decode:
    0.1 s queued, 0.032 s + 0.08 s loading, 0.8 s computing, and in two steps of 512 tokens 6 ms for the others."""
    found = price(query(1600), candidate("a", 20, 20, 10, queued_tokens=100, running=3))
    assert found.queue == pytest.approx(0.1)
    assert found.load == pytest.approx(320 * 1e-4 + 160 * 5e-4)
    assert found.compute == pytest.approx(0.8)
    assert found.decode == pytest.approx(2 * 3e-3)
    assert (found.reused, found.computed, found.from_tiers) == (800, 800, (320, 320, 160, 0))
    assert found.total == pytest.approx(0.1 + 0.112 + 0.8 + 0.006)


def test_what_is_slower_to_load_than_to_compute_is_computed() -> None:
    """Blocks in a store at 2 ms a token are left there when computing takes 1 ms."""
    found = price(query(1600), candidate("a", 10, shared=90))
    assert (found.reused, found.computed, found.load) == (160, 1440, 0.0)


def test_a_slow_stretch_is_loaded_if_a_quick_one_behind_it_pays_for_it() -> None:
    """A prefix is loaded from the front: 10 blocks that lose 0.16 s are worth it for 90 behind them that gain 1.3 s."""
    costs = replace(COSTS, loads=(LoadCost(2e-3), LoadCost(1e-4), LoadCost(1e-4)))
    slow_first = replace(candidate("a", 0, 10, 90), costs=costs)
    assert price(query(1600), slow_first).from_tiers == (0, 160, 1440, 0)
    assert price(query(1600), replace(candidate("a", 0, 90, 10), costs=costs)).from_tiers == (0, 0, 0, 0)


def test_a_prompt_that_is_all_there_computes_its_last_token() -> None:
    """Something must be computed for the logits."""
    found = price(query(1600), candidate("a", 100))
    assert (found.computed, found.reused) == (1, 1599)


def test_the_prefix_draws_until_the_queue_costs_more() -> None:
    """A holds 80 of 100 blocks (1.28 s of computing): it is chosen with 1,000 tokens queued, and not with 1,500."""
    policy = CheapestFirstToken()
    here = policy.choose(query(1600), [candidate("a", 80, queued_tokens=1000), candidate("b")])
    there = policy.choose(query(1600), [candidate("a", 80, queued_tokens=1500), candidate("b")])
    assert (here.replica, there.replica) == ("a", "b")
    assert here.expected_cached == 1280 and there.expected_cached == 0


@given(blocks=st.integers(0, 100), queued=st.lists(st.integers(0, 5000), min_size=2, max_size=6))
def test_a_prefix_that_everyone_has_draws_no_one(blocks: int, queued: list[int]) -> None:
    """If all hold the same blocks, the choice is the same as if nobody held any."""
    policy = CheapestFirstToken(tie=0.0)
    without = [candidate(f"r{i}", queued_tokens=100.0 * tokens) for i, tokens in enumerate(queued)]
    having = [replace(one, reach=(blocks,) * 4) for one in without]
    best = {price(query(1600), one).total: one.name for one in without}
    if len(set(queued)) == len(queued):
        assert (
            policy.choose(query(1600), having).replica == policy.choose(query(1600), without).replica == best[min(best)]
        )


def test_a_shared_store_makes_the_holder_less_special() -> None:
    """What lies in a shared store that is quicker than computing can be had anywhere: a short queue at the holder is enough."""
    costs = replace(COSTS, loads=(LoadCost(1e-4), LoadCost(1e-4), LoadCost(1e-4)))
    holder = Candidate("a", costs, (100, 100, 100, 100), queued_tokens=300)
    other = Candidate("b", costs, (0, 0, 0, 100))
    assert CheapestFirstToken().choose(query(1600), [holder, other]).replica == "b"
    alone = replace(other, reach=(0, 0, 0, 0))
    assert CheapestFirstToken().choose(query(1600), [holder, alone]).replica == "a"


def test_a_session_stays_unless_that_costs_too_much() -> None:
    """Home saves 1.28 s of computing and costs 1.22 s more than elsewhere: within 1.5 times 1.6 s and 1 s on top, but not
    within 0.2 s on top."""
    found = [candidate("home", 80, queued_tokens=2500), candidate("other")]
    patient = CheapestFirstToken(Stickiness(seconds=1.0, ratio=1.5)).choose(query(1600), found, "home")
    hasty = CheapestFirstToken(Stickiness(seconds=0.2, ratio=1.5)).choose(query(1600), found, "home")
    assert (patient.replica, patient.reason) == ("home", "session")
    assert (hasty.replica, hasty.reason, hasty.home) == ("other", "moved", "home")


def test_a_session_pays_nothing_to_stay_where_nothing_is_left_of_it() -> None:
    """Home has one block of the prompt, as the others have, and 0.18 s to do: the session goes where it is served at once."""
    found = [candidate("home", 1, queued_tokens=180), candidate("other", 1)]
    decision = CheapestFirstToken().choose(query(2656), found, "home")
    assert (decision.replica, decision.reason) == ("other", "moved")
    idle = [candidate("home", 1, queued_tokens=20), candidate("other", 1)]
    assert CheapestFirstToken().choose(query(2656), idle, "home").reason == "session", "nearly equal prices move no one"


@given(
    st.lists(st.tuples(st.integers(0, 100), st.integers(0, 3000)), min_size=2, max_size=5),
    st.floats(0, 3),
    st.floats(1, 5),
)
def test_staying_costs_at_most_what_home_saves(states: list[tuple[int, int]], seconds: float, ratio: float) -> None:
    """However patient: a session that stays waits at most as much longer than elsewhere as computing takes less at home."""
    found = [candidate(f"r{i}", blocks, queued_tokens=queued) for i, (blocks, queued) in enumerate(states)]
    decision = CheapestFirstToken(Stickiness(seconds, ratio)).choose(query(1600), found, "r0")
    if decision.replica == "r0":
        cheapest = min(decision.prices, key=lambda one: one.total)
        saved = max(cheapest.compute - decision.prices[0].compute, 0.0)
        assert decision.prices[0].total <= cheapest.total + max(saved, cheapest.total * 0.05 + 0.005) + 1e-9


def test_a_session_leaves_a_replica_that_takes_no_requests() -> None:
    """Draining, and gone: the session goes on elsewhere."""
    policy = CheapestFirstToken()
    assert policy.choose(query(160), [candidate("home", excluded="draining"), candidate("b")], "home").replica == "b"
    assert policy.choose(query(160), [candidate("b")], "home").replica == "b"


def test_cold_prompts_spread_and_come_back() -> None:
    """Prompts that nobody holds are spread over all idle replicas, and each goes to the same one again."""
    policy, fleet = CheapestFirstToken(), [candidate(f"r{i}") for i in range(4)]
    first = [policy.choose(query(800, number), fleet).replica for number in range(400)]
    again = [policy.choose(query(800, number), fleet[::-1]).replica for number in range(400)]
    assert first == again
    assert all(70 < first.count(one.name) < 130 for one in fleet)


def test_when_a_replica_goes_only_what_was_there_moves() -> None:
    """Without r3, whatever went elsewhere still goes there."""
    policy, fleet = CheapestFirstToken(), [candidate(f"r{i}") for i in range(4)]
    for number in range(200):
        with_all = policy.choose(query(800, number), fleet).replica
        assert with_all in ("r3", policy.choose(query(800, number), fleet[:3]).replica)


def test_a_common_system_prompt_does_not_gather_everything() -> None:
    """Prompts that share blocks that all hold are spread by what comes behind these."""
    fleet = [candidate(f"r{i}", 10) for i in range(4)]
    shared = keys_of(-1, 10)
    asked = [Query(shared + keys_of(number, 40), 800, BLOCK) for number in range(200)]
    chosen = [CheapestFirstToken().choose(one, fleet).replica for one in asked]
    assert all(chosen.count(one.name) > 25 for one in fleet)


def test_a_beginning_that_some_have_does_not_draw_what_is_new() -> None:
    """A prompt of which one replica has a fifth goes where less was sent of late: the difference is computed there once, and
    the session stays for long. Who has most of the prompt draws it, however much was sent there."""
    fleet = [candidate("warm", 20, recent_tokens=5000), candidate("cold")]
    new = CheapestFirstToken().choose(query(1600), fleet)
    assert (new.replica, new.reason) == ("cold", "spread")
    assert new.in_words().startswith("cold: least was sent there of late")
    known = [candidate("warm", 60, recent_tokens=5000), candidate("cold")]
    assert CheapestFirstToken().choose(query(1600), known).replica == "warm"


def test_a_beginning_draws_where_nothing_is_to_be_balanced() -> None:
    """Of two replicas that were sent as much, the one that has a fifth of the prompt takes it; and waiting is not balanced."""
    idle = [candidate("warm", 20), candidate("cold")]
    assert CheapestFirstToken().choose(query(1600), idle).replica == "warm"
    queued = [candidate("warm", 20, recent_tokens=5000), candidate("cold", queued_tokens=500)]
    assert CheapestFirstToken().choose(query(1600), queued).replica == "warm"


def test_new_sessions_take_turns_whoever_has_their_beginning() -> None:
    """Twelve sessions under one system prompt, of which one replica has served the first: each of three gets four."""
    policy, recent = CheapestFirstToken(), {"a": 1600.0, "b": 0.0, "c": 0.0}
    served = {"a"}
    chosen = ["a"]
    for number in range(11):
        fleet = [candidate(name, 20 if name in served else 0, recent_tokens=recent[name]) for name in recent]
        chosen.append(policy.choose(query(1600, number), fleet).replica or "")
        served.add(chosen[-1])
        recent[chosen[-1]] += 1600
    assert sorted(chosen) == ["a"] * 4 + ["b"] * 4 + ["c"] * 4


def test_full_memory_is_waited_for() -> None:
    """Time until there is room counts, as far as it is longer than the queue."""
    found = price(query(1600), candidate("a", queued_tokens=500, memory_wait=2.0))
    assert found.queue + found.memory == pytest.approx(2.0)


def test_the_reason_in_words() -> None:
    """A decision explains itself in one sentence, with numbers, and with what came second."""
    found = [candidate("a", 10, 50, queued_tokens=100), candidate("b", excluded="draining"), candidate("c")]
    said = CheapestFirstToken().choose(query(1600), found).in_words()
    assert said == (
        "a: soonest first token, 0.82 s (0.10 queued, 0.08 loading 800 from host memory, 0.64 computing 640 of 1600 tokens); "
        "next c at 1.60 s (1.60 computing 1600 of 1600 tokens)"
    )


def test_nobody_to_send_to_is_said_in_words() -> None:
    """Without a usable candidate the decision names no replica, and each one's reason."""
    found = [candidate("a", excluded="draining"), candidate("b", excluded="overloaded: 9 requests wait there")]
    for name in POLICIES:
        decision = policy_named(name).choose(query(160), found)
        assert decision.replica is decision.price is None
        assert decision.in_words() == "no replica takes requests: a: draining; b: overloaded: 9 requests wait there"
    assert policy_named("cost").choose(query(160), []).in_words() == "there is no replica"


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32), st.sampled_from(sorted(POLICIES)))
def test_every_policy_is_a_function_of_its_state(seed: int, name: str) -> None:
    """The same requests in the same order go to the same places, always to a candidate that takes requests."""

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
    """A typo is answered with close names."""
    with pytest.raises(ConfigError, match="round-robin"):
        policy_named("roundrobin")


def test_stickiness_out_of_range_is_refused() -> None:
    """A ratio below 1 would drive sessions away from where they are cheapest."""
    with pytest.raises(ConfigError, match="at least 1"):
        Stickiness(ratio=0.5)


# Baselines


def test_round_robin_takes_turns() -> None:
    """One after the other, those that take no requests left out."""
    policy = policy_named("round-robin")
    fleet = [candidate("a"), candidate("b", excluded="draining"), candidate("c")]
    assert [policy.choose(query(16), fleet).replica for _ in range(4)] == ["a", "c", "a", "c"]


def test_least_loaded_counts_requests() -> None:
    """The fewest requests in flight; equals take turns."""
    policy = policy_named("least-loaded")
    busy = [candidate("a", queued=1, running=3), candidate("b", running=2), candidate("c", queued=2)]
    assert {policy.choose(query(16), busy).replica for _ in range(4)} == {"b", "c"}


def test_least_tokens_counts_tokens() -> None:
    """One long prompt weighs more than two short ones."""
    fleet = [candidate("a", queued=1, queued_tokens=9000), candidate("b", queued=2, queued_tokens=500)]
    assert policy_named("least-tokens").choose(query(16), fleet).replica == "b"


def test_longest_prefix_looks_at_nothing_else() -> None:
    """The longest prefix wins however long the queue is."""
    fleet = [candidate("a", 50, queued=100, queued_tokens=1e6), candidate("b", 49)]
    assert policy_named("longest-prefix").choose(query(1600), fleet).replica == "a"


def test_consistent_hashing_is_bounded() -> None:
    """One prefix goes to one replica until that has 1.25 times its share, then to the next on the ring."""
    policy = policy_named("consistent-hashing")
    idle = [candidate(f"r{i}") for i in range(4)]
    first = policy.choose(query(1600), idle).replica
    assert policy.choose(query(1600), idle).replica == first
    loaded = [replace(one, running=10 if one.name == first else 1) for one in idle]
    assert policy.choose(query(1600), loaded).replica != first


def test_two_choices_keeps_to_two() -> None:
    """One prefix goes to two replicas at most, to the less loaded of them."""
    policy = policy_named("two-choices")
    rng = random.Random(1)
    fleets = [[candidate(f"r{i}", running=rng.randrange(9)) for i in range(8)] for _ in range(50)]
    assert len({policy.choose(query(1600), fleet).replica for fleet in fleets}) == 2


# Prefill here, decode there


def test_a_long_prompt_is_computed_apart_where_that_is_sooner() -> None:
    """1,600 tokens with 2,000 queued at the decoding replica: 3.6 s there, 1.6 s elsewhere plus 0.17 s for sending."""
    decision = Disaggregation().choose(
        query(1600), [candidate("p")], [candidate("d", queued_tokens=2000)], CheapestFirstToken()
    )
    assert (decision.replica, decision.prefill) == ("d", "p")
    assert decision.price is not None and decision.price.total == pytest.approx(1.6 + 0.16 + 0.01)
    assert "after p" in decision.in_words() and "sending the KV over" in decision.in_words()


def test_a_short_rest_is_computed_where_it_decodes() -> None:
    """1,500 of 1,600 tokens are there: 100 tokens are not worth a second replica, however busy the first one is."""
    busy = candidate("d", 94, queued_tokens=2000, running=50)
    assert Disaggregation().choose(query(1600), [candidate("p")], [busy], CheapestFirstToken()).prefill is None


def test_many_that_decode_are_spared() -> None:
    """Idle queues: computing in place is sooner by the transfer, but not worth it where 20 sequences decode."""
    rule, policy = Disaggregation(stall=0.1), CheapestFirstToken()
    quiet = rule.choose(query(1600), [candidate("p")], [candidate("d")], policy)
    crowded = rule.choose(query(1600), [candidate("p")], [candidate("d", running=20)], policy)
    assert (quiet.prefill, crowded.prefill) == (None, "p")


def test_only_what_is_missing_travels() -> None:
    """A decoding replica that has 50 of 100 blocks is sent 800 tokens' KV."""
    decision = Disaggregation().choose(
        query(1600), [candidate("p", 60)], [candidate("d", 50, queued_tokens=9000)], CheapestFirstToken()
    )
    assert decision.price is not None
    assert decision.price.transfer == pytest.approx(800 * 1e-4 + 0.01)
    assert decision.price.compute == pytest.approx(640 * 1e-3)


def test_a_pool_without_replicas_is_done_without() -> None:
    """No prefill pool: decoders do all. No decoder: a prefilling replica does. Nobody: that is said."""
    rule, policy = Disaggregation(), CheapestFirstToken()
    down = candidate("p", excluded="unhealthy")
    assert rule.choose(query(1600), [down], [candidate("d")], policy).replica == "d"
    assert rule.choose(query(1600), [candidate("p")], [candidate("d", excluded="draining")], policy).replica == "p"
    nobody = rule.choose(query(1600), [down], [candidate("d", excluded="draining")], policy)
    assert nobody.in_words() == "no replica takes requests: d: draining; p: unhealthy"
