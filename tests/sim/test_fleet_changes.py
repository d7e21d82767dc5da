"""Simulated fleets that change, and replicas that differ: results computed by hand, and properties."""

from __future__ import annotations

import random
from array import array
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foreword.errors import ConfigError
from foreword.routing.costs import LoadCost
from foreword.routing.policies import POLICIES
from foreword.sim.changes import parse_change
from foreword.sim.costs import EngineCosts, FleetSpec, Profile, ReplicaGroup
from foreword.sim.plan import parse_group
from foreword.sim.report import page, phases, summarize, table
from foreword.sim.run import SimulationResult, simulate
from foreword.sim.trace import TraceRequest

# Computing a token of a prompt takes 1 ms, a step that decodes 10 ms.
COSTS = EngineCosts(0.0, 1e-3, 0.0, 1e-2, 0.0, (LoadCost(1e-4), LoadCost(2e-4), LoadCost(4e-4)))
TWO = FleetSpec(replicas=2, device_tokens=64 * 100, block_size=64, max_batch_tokens=64 * 8)


def request(arrival: float, ids: list[int], output: int = 1) -> TraceRequest:
    return TraceRequest(arrival, array("I", ids), 64, 64 * len(ids), output)


def run(
    trace: list[TraceRequest], *changes: str, spec: FleetSpec = TWO, policy: str = "round-robin"
) -> SimulationResult:
    return simulate(trace, replace(spec, changes=tuple(map(parse_change, changes))), policy, COSTS)


def test_a_request_continues_on_another_replica() -> None:
    """r0 has computed six tokens when it fails. r1 prefills 640 + 6 tokens, and decodes the other 33 of 40."""
    result = run([request(0.0, list(range(10)), 40)], "0.695s fail r0")
    outcome = result.outcomes[0]
    assert (outcome.replica, outcome.failovers) == ("r1", 1)
    assert outcome.ttft == pytest.approx(0.64), "the first token was sent before the failure"
    assert outcome.finished == pytest.approx(0.695 + 0.646 + 33 * 0.01)
    assert outcome.recomputed == 645, "the KV of the last token was not computed"
    assert result.replicas["r0"].up == pytest.approx(0.695)


def test_a_request_without_a_token_starts_from_the_beginning() -> None:
    """r0 fails after one of two chunks. r1 has eight of ten blocks cached, so it recomputes nothing that r0 had."""
    trace = [request(0.0, [0]), request(1.0, list(range(10))), request(10.0, list(range(10)))]
    outcome = run(trace, "10.2s fail r0").outcomes[2]
    assert (outcome.replica, outcome.cached_tokens, outcome.recomputed) == ("r1", 639, 0)
    assert outcome.ttft == pytest.approx(0.2 + 0.01)


def test_tokens_that_the_next_replica_loads_are_not_recomputed() -> None:
    """The next replica loads from a shared store the full blocks that the failed one had saved."""
    spec = replace(TWO, shared_tokens=64 * 100)
    outcome = run([request(0.0, list(range(10)), 40)], "0.695s fail r0", spec=spec).outcomes[0]
    assert outcome.recomputed == 5
    assert outcome.finished == pytest.approx(0.695 + 640 * 4e-4 + 0.006 + 33 * 0.01)


def test_a_replica_comes_back_cold() -> None:
    """After a failure the device and the own tiers are empty, and the router knows it."""
    trace = [request(0.0, list(range(10))), request(30.0, list(range(10)))]
    spec = replace(TWO, replicas=1, host_tokens=64 * 100)
    assert run(trace, spec=spec).outcomes[1].cached_tokens == 639
    again = run(trace, "10s fail r0", "20s start r0", spec=spec)
    assert (again.outcomes[1].cached_tokens, again.outcomes[1].expected_cached) == (0, 0)
    assert again.replicas["r0"].up == pytest.approx(again.seconds - 10)


def test_requests_wait_while_no_replica_runs() -> None:
    """A request that arrives at 15 s waits until the replica starts at 20 s. It is an error if none ever starts."""
    trace, spec = [request(15.0, list(range(10)))], replace(TWO, replicas=1)
    assert run(trace, "10s fail r0", "20s start r0", spec=spec).outcomes[0].ttft == pytest.approx(5.64)
    with pytest.raises(ConfigError, match="1 requests were not finished"):
        run(trace, "10s fail r0", spec=spec)


def test_a_replica_that_is_removed_finishes_its_requests() -> None:
    """r0 gets no requests after 0.1 s and ends with its last one at 0.64 s. One that is added takes the next requests."""
    trace = [request(0.0, list(range(10))), request(0.2, [7]), request(0.3, [8]), request(0.4, [9])]
    result = run(trace, "0.1s remove r0", "0.25s add 1")
    assert not any(outcome.failovers for outcome in result.outcomes)
    assert result.outcomes[0].finished == pytest.approx(0.64) == result.replicas["r0"].up
    assert {outcome.replica for outcome in result.outcomes[1:]} == {"r1", "r2"}
    assert result.replicas["r2"].up == pytest.approx(result.seconds - 0.25)


def test_a_replica_that_is_slow_for_a_while() -> None:
    """From 5 s to 25 s r0 takes three times as long for each token; a step that has begun ends as it began."""
    trace = [request(at, [int(at * 10) + i for i in range(10)]) for at in (0.0, 4.9, 10.0, 30.0)]
    result = run(trace, "5s slow r0 3", "25s slow r0 1", spec=replace(TWO, replicas=1))
    # The second prompt has 512 tokens in its first step, which began before, and 128 in the other.
    assert [one.ttft for one in result.outcomes] == pytest.approx([0.64, 0.512 + 3 * 0.128, 3 * 0.64, 0.64])
    for text in ("5s slow r0", "5s slow r0 x", "5s slow r9 2", "5s slow r0 5000"):
        with pytest.raises(ConfigError):
            run(trace, text, spec=replace(TWO, replicas=1))


def test_groups_have_their_own_costs_and_memory() -> None:
    """A group that is twice as fast computes 640 tokens in half of the time, and its small device caches less."""
    fast = ReplicaGroup("fast", 1, device_tokens=64 * 12, costs=COSTS.scaled(0.5))
    spec = replace(TWO, replicas=1, groups=(fast,))
    trace = [request(10.0 * i, list(range(20 * (i // 2 % 2), 20 * (i // 2 % 2) + 10))) for i in range(6)]
    outcomes = run(trace, spec=spec).outcomes
    assert [one.replica for one in outcomes[:2]] == ["r0", "fast-0"]
    assert [one.ttft for one in outcomes[:2]] == pytest.approx([0.64, 0.32])
    assert [one.cached_tokens for one in outcomes[4:]] == [639, 128], "two chains do not fit into the small device"


def test_a_prompt_computed_elsewhere() -> None:
    """While one replica computes a prompt, the next prompt is computed by the prefill replica: 640 ms, then 256 ms of transfer,
    then its last token. If that replica fails, the decode replica computes it."""
    spec = replace(TWO, replicas=1, prefill_replicas=1, max_batch_tokens=64 * 16, learns=False)
    trace = [request(0.0, list(range(10)), 3), request(0.1, list(range(100, 110)), 3)]
    outcomes = run(trace, spec=spec, policy="cost").outcomes
    assert [one.replica for one in outcomes] == ["r0", "r0"]
    assert [one.first_token for one in outcomes] == pytest.approx([0.64, 0.64 + 0.64 + 0.256 + 0.01])
    result = run(trace, "1s fail prefill-0", spec=spec, policy="cost")
    assert result.outcomes[1].first_token == pytest.approx(1.64)
    assert result.replicas["prefill-0"].up == pytest.approx(1.0)


@settings(max_examples=12, deadline=None)
@given(st.integers(0, 2**32), st.sampled_from(sorted(POLICIES)), st.booleans())
def test_no_request_is_lost(seed: int, policy: str, stores: bool) -> None:
    """Whatever fails, starts, is added or removed: all requests end with all their tokens, at most as many blocks as there are
    in memory are cached, and combined decoding steps give the same result as single ones."""
    rng = random.Random(seed)
    trace = [
        request(rng.random() * 20, [0, *(rng.randrange(6) for _ in range(rng.randrange(8)))], rng.randrange(1, 80))
        for _ in range(25)
    ]
    trace.sort(key=lambda one: one.arrival)
    tokens = 64 * 90 if stores else 0
    spec = replace(TWO, device_tokens=64 * 30, host_tokens=tokens, shared_tokens=tokens, events=bool(seed % 2))
    spec = replace(spec, groups=(ReplicaGroup("slow", 1, costs=COSTS.scaled(2.0)),))
    lines = ["r0", "r1", "slow-0"]
    if seed % 3 == 0:
        spec = replace(spec, prefill_replicas=1)
        lines.append("prefill-0")
    changes = [f"{20 + i}s start {name}" for i, name in enumerate(lines)] + [f"{rng.random() * 20:.7f}s add 1 slow"]
    for name in lines:
        at = rng.random() * 15
        changes += [f"{at:.7f}s {rng.choice(['fail', 'remove'])} {name}", f"{at + 3:.7f}s start {name}"]
        changes.append(f"{19 + rng.random():.7f}s fail {name}")

    def numbers() -> list[object]:
        result = run(trace, *changes, spec=spec, policy=policy)
        for one in result.outcomes:
            assert one.request.arrival < one.first_token <= one.finished
            assert 0 <= one.cached_tokens < one.request.prompt_tokens and one.recomputed >= 0
        return [
            (one.replica, one.first_token, one.finished, one.cached_tokens, one.loaded, one.failovers, one.recomputed)
            for one in result.outcomes
        ]

    assert numbers() == numbers()


def test_the_report_has_phases() -> None:
    """Requests by phase, with what a failure cost; the table and the page name the changes."""
    trace = [request(0.0, list(range(10)), 40), request(5.0, [1]), request(6.0, [2])]
    result = run(trace, "0.695s fail r0", "4s start r0")
    first, last = phases(result)
    assert (first.requests, first.failovers, first.recomputed_tokens) == (1, 1, 645)
    assert (last.requests, last.failovers, last.changes) == (2, 0, ("4s start r0",))
    assert (summarize(result).failovers, summarize(result).recomputed_tokens) == (1, 645)
    assert "4s start r0" in table([result]) and "4s start r0" in page([result])
    assert phases(run(trace)) == []


def test_a_group_as_text(tmp_path: Path) -> None:
    """Sizes may be in bytes; a file of costs also gives the largest step, unless there is a key for it."""
    path = tmp_path / "fast.json"
    path.write_text(Profile(COSTS, max_batch_tokens=4096, max_num_seqs=64).to_json())
    found = parse_group(f"fast max-num-seqs=8 replicas=3 device=1GiB memory=500 role=decode costs={path}", 1 << 20)
    assert found == ReplicaGroup("fast", 3, 1024, 500, None, 4096, 8, COSTS, "decode")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("120s", "is not a change of the fleet"),
        ("120s explode r0", "is not a change of the fleet"),
        ("120s add r0", "is not a change of the fleet"),
        ("soon fail r0", "needs a time"),
        ("120s fail r9", "no such replica"),
        ("120s start r0", "runs already"),
        ("120s add 2 fast", "no such group"),
        ("120s add 0", "from 1 to"),
    ],
)
def test_wrong_changes_are_refused(change: str, message: str) -> None:
    """The error names the change and the reason, before anything is simulated."""
    with pytest.raises(ConfigError, match=message):
        run([request(0.0, [1])], change)


@pytest.mark.parametrize(
    ("group", "message"),
    [
        ("", "name has letters"),
        ("fast-1", "name has letters"),
        ("fast speed=2", "speed is not a key"),
        ("fast replicas=some", "takes one number"),
        ("fast device=1,2", "takes one number"),
        ("fast device=1GiB", "bytes of KV per token are unknown"),
        ("fast role=both,prefill", "role is both, prefill or decode"),
        ("prefill replicas=1", "two groups have one name"),
        ("fast costs=none.json", "cannot read the costs"),
        ("fast max-num-seqs=0", "room for at least one"),
        ("fast device=10", "must hold at least one block"),
    ],
)
def test_wrong_groups_are_refused(group: str, message: str) -> None:
    """The error names the key and the value."""
    with pytest.raises(ConfigError, match=message):
        replace(TWO, prefill_replicas=1, groups=(parse_group(group, None),))
