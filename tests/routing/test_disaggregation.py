"""Disaggregated prefill: which prompts one replica computes and another decodes."""

from __future__ import annotations

import pytest
from candidates import candidate
from candidates import query as prompt
from example_counts import examples
from hypothesis import settings
from test_fleet import COSTS, Machine, prompt_for, query, text

from foreword.routing.costs import ReplicaCosts
from foreword.routing.disaggregation import DisaggregationPolicy
from foreword.routing.fleet import Fleet
from foreword.routing.placement import CostPolicy


def test_a_long_prompt_uses_disaggregated_prefill() -> None:
    """1,600 tokens with 2,000 queued at the decode replica: 3.6 s there, against 1.6 s elsewhere plus 0.17 s of KV
    transfer."""
    decision = DisaggregationPolicy().choose(
        prompt(1600), [candidate("p")], [candidate("d", queued_tokens=2000)], CostPolicy()
    )
    assert (decision.replica, decision.prefill) == ("d", "p")
    assert decision.estimate is not None and decision.estimate.total == pytest.approx(1.6 + 0.16 + 0.01)
    assert "after p" in decision.in_words() and "KV transfer" in decision.in_words()


def test_a_mostly_cached_prompt_is_not_split() -> None:
    """1,500 of 1,600 tokens are cached: 100 tokens do not justify a second replica, however busy the first one is."""
    busy = candidate("d", 94, queued_tokens=2000, running=50)
    assert DisaggregationPolicy().choose(prompt(1600), [candidate("p")], [busy], CostPolicy()).prefill is None


def test_many_decoding_sequences_justify_a_separate_prefill() -> None:
    """A separate prefill is chosen where 20 sequences decode: with empty queues computing in place is faster by the transfer,
    but not worth it then."""
    rule, policy = DisaggregationPolicy(stall=0.1), CostPolicy()
    quiet = rule.choose(prompt(1600), [candidate("p")], [candidate("d")], policy)
    crowded = rule.choose(prompt(1600), [candidate("p")], [candidate("d", running=20)], policy)
    assert (quiet.prefill, crowded.prefill) == (None, "p")


def test_only_missing_blocks_are_transferred() -> None:
    """A decode replica that holds 50 of 100 blocks receives the KV of 800 tokens."""
    decision = DisaggregationPolicy().choose(
        prompt(1600), [candidate("p", 60)], [candidate("d", 50, queued_tokens=9000)], CostPolicy()
    )
    assert decision.estimate is not None
    assert decision.estimate.transfer == pytest.approx(800 * 1e-4 + 0.01)
    assert decision.estimate.compute == pytest.approx(640 * 1e-3)


def test_an_empty_prefill_or_decode_pool() -> None:
    """Without a prefill replica, the decode replica serves alone, and the other way round. Without both the reasons
    are given."""
    rule, policy = DisaggregationPolicy(), CostPolicy()
    down = candidate("p", excluded="unhealthy")
    assert rule.choose(prompt(1600), [down], [candidate("d")], policy).replica == "d"
    assert rule.choose(prompt(1600), [candidate("p")], [candidate("d", excluded="draining")], policy).replica == "p"
    none = rule.choose(prompt(1600), [down], [candidate("d", excluded="draining")], policy)
    assert none.in_words() == "no replica takes requests: d: draining; p: unhealthy"


def test_disaggregated_prefill_moves_the_load() -> None:
    """A prefill replica computes a long prompt; its load ends with the first token, when the decode replica's
    begins."""
    fleet = Fleet(disaggregation=DisaggregationPolicy().choose)
    fleet.add("p", role="prefill", costs=COSTS)
    fleet.add("d", role="decode", costs=COSTS)
    waiting = query(text(9, 3000))
    alone = CostPolicy().choose(waiting, [c for c in fleet.candidates(waiting, 0.0) if c.name == "d"])
    fleet.sent("0", waiting, alone, 0.0)
    asked = query(text(1, 2000))
    decision = fleet.place(asked, 0.0)
    assert (decision.prefill, decision.replica) == ("p", "d")
    fleet.sent("1", asked, decision, 0.0)
    assert [len(fleet.replicas[name].load.waiting) for name in "pd"] == [1, 1]
    fleet.first_token("1", 2.0)
    assert [len(fleet.replicas[name].load.waiting) for name in "pd"] == [0, 1]
    assert [len(fleet.replicas[name].load.running) for name in "pd"] == [0, 1]
    fleet.finished("1", 5.0, cached_tokens=0, output_tokens=100)
    assert len(fleet.replicas["d"].load.running) == 0
    assert fleet.replicas["d"].load.resident == waiting.tokens + 256


def test_a_prompt_is_computed_by_the_same_weights() -> None:
    """A prompt is only split between replicas that are known to have equal weights, however much faster another would be."""
    fleet = Fleet(CostPolicy(), disaggregation=DisaggregationPolicy().choose)
    fast = ReplicaCosts(prefill=1e-5, first=0.0, decode_each=0.0)
    for name, weights in (("prefill-1", "1"), ("prefill-2", "2"), ("prefill-unknown", None)):
        fleet.add(name, role="prefill", costs=fast, weights=weights)
    for decode, weights, prefill in (("d1", "1", "prefill-1"), ("d3", "3", None), ("d-unknown", None, None)):
        fleet.add(decode, role="decode", costs=COSTS, weights=weights)
        decision = fleet.place(prompt_for(text(1, 4000), "1", "2", "3", ""), 0.0)
        assert (decision.replica, decision.prefill) == (decode, prefill)
        fleet.remove(decode)


def test_both_roles_are_considered() -> None:
    """In a large fleet with prefill and decode replicas, a long prompt is computed on one and decoded on the other."""
    fleet = Fleet(disaggregation=DisaggregationPolicy().choose)
    for number in range(60):
        fleet.add(f"p{number}", role="prefill", costs=ReplicaCosts(prefill=1e-4))
        fleet.add(f"d{number}", role="decode", costs=ReplicaCosts(prefill=1e-3))
    decision = fleet.place(query(text(5, 4000)), 0.0)
    assert decision.prefill is not None and decision.prefill.startswith("p")
    assert decision.replica is not None and decision.replica.startswith("d")


class SplitMachine(Machine):
    """Sequences of operations where prompts are split between replicas."""

    def made(self) -> Fleet:
        return Fleet(disaggregation=DisaggregationPolicy().choose)


TestNothingIsLeft = SplitMachine.TestCase
TestNothingIsLeft.settings = settings(max_examples=examples(60), stateful_step_count=40, deadline=None)
