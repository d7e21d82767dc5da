"""The simulator: small traces whose results can be reckoned by hand, and what must hold for any."""

from __future__ import annotations

import json
import random
import xml.etree.ElementTree as ET
from array import array
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foreword.errors import ConfigError
from foreword.routing.baselines import POLICIES
from foreword.routing.costs import LoadCost
from foreword.sim import replica
from foreword.sim.costs import EngineCosts, FleetSpec
from foreword.sim.report import page, quantile, summarize, table
from foreword.sim.run import SimulationResult, simulate
from foreword.sim.trace import TraceRequest, block_size_of, read_trace

# A token computed takes 1 ms, a step nothing besides; loading a token takes 0.1, 0.2 or 0.4 ms.
COSTS = EngineCosts(
    base=0.0,
    prefill=1e-3,
    attention=0.0,
    decode_each=1e-2,
    decode_context=0.0,
    loads=(LoadCost(1e-4), LoadCost(2e-4), LoadCost(4e-4)),
)
ONE = FleetSpec(replicas=1, device_tokens=64 * 100, block_size=64, max_batch_tokens=64 * 8)


def request(arrival: float, ids: list[int], output: int = 1, *, tokens: int | None = None) -> TraceRequest:
    return TraceRequest(arrival, array("I", ids), 64, tokens or 64 * len(ids), output)


def random_trace(seed: int, count: int) -> list[TraceRequest]:
    """Conversations that go on, over a common beginning."""
    rng, talks, found = random.Random(seed), [[0] for _ in range(6)], []
    for i in range(count):
        talk = rng.choice(talks)
        if len(talk) > 14:
            del talk[1:]
        talk += [rng.randrange(1, 2**30) for _ in range(rng.randrange(1, 5))]
        found.append(
            request(i * rng.random(), list(talk), rng.randrange(1, 20), tokens=64 * len(talk) - rng.randrange(20))
        )
    return sorted(found, key=lambda one: one.arrival)


def test_one_request_takes_what_it_costs() -> None:
    """640 tokens at 1 ms each, then two tokens at 10 ms each."""
    result = simulate([request(0.0, list(range(10)), 3)], ONE, costs=COSTS)
    outcome = result.outcomes[0]
    assert outcome.ttft == pytest.approx(0.64)
    assert outcome.finished == pytest.approx(0.66)
    assert outcome.seconds_per_token == pytest.approx(0.01)


def test_a_prefix_on_the_device_is_not_computed() -> None:
    """The second request shares eight of ten blocks: 128 tokens are computed."""
    asked = [request(0.0, list(range(10))), request(10.0, [*range(8), 77, 78])]
    result = simulate(asked, ONE, costs=COSTS)
    assert result.outcomes[1].cached_tokens == result.outcomes[1].expected_cached == 512
    assert result.outcomes[1].ttft == pytest.approx(0.128)
    assert summarize(result).hit_share == pytest.approx(512 / 1280)


def test_a_prefix_off_the_device_is_loaded_where_that_is_sooner() -> None:
    """A device of 12 blocks, of which others left two: eight of ten blocks come back from host memory at 0.1 ms a token, and
    none from one that is slower than computing."""
    spec = FleetSpec(replicas=1, device_tokens=64 * 12, host_tokens=64 * 100, block_size=64, max_batch_tokens=512)
    asked = [request(0.0, list(range(10))), request(10.0, list(range(20, 30))), request(20.0, list(range(10)))]
    outcome = simulate(asked, spec, costs=COSTS).outcomes[2]
    assert outcome.loaded_tokens == 511
    assert outcome.ttft == pytest.approx(512 * 1e-4 + 1e-2), "the last token is computed again, as a step of its own"
    slow = EngineCosts(0.0, 1e-3, 0.0, 1e-2, 0.0, (LoadCost(2e-3), LoadCost(2e-3), LoadCost(2e-3)))
    assert simulate(asked, spec, costs=slow).outcomes[2].loaded_tokens == 0


def test_loads_from_one_tier_follow_each_other() -> None:
    """Two prompts of which all comes from host memory at 64 ms each: the second waits for the first one's load."""
    spec = FleetSpec(replicas=1, device_tokens=64 * 24, host_tokens=64 * 100, block_size=64, max_batch_tokens=2048)
    asked = [request(0.0, list(range(10))), request(10.0, list(range(10, 20))), request(20.0, list(range(20, 43)))]
    asked += [request(30.0, list(range(10))), request(30.0, list(range(10, 20)))]
    result = simulate(asked, spec, costs=COSTS)
    assert [outcome.loaded_tokens for outcome in result.outcomes[3:]] == [639, 639]
    assert result.outcomes[3].ttft == pytest.approx(0.064 + 0.01)
    assert result.outcomes[4].ttft == pytest.approx(0.128 + 0.01)


def test_what_one_computed_another_loads_from_the_shared_store() -> None:
    """Two replicas that take turns: the second finds in the shared store what the first one wrote."""
    spec = FleetSpec(replicas=2, device_tokens=64 * 50, shared_tokens=64 * 100, block_size=64)
    asked = [request(0.0, list(range(10))), request(10.0, list(range(10)))]
    result = simulate(asked, spec, "round-robin", COSTS)
    assert [outcome.replica for outcome in result.outcomes] == ["r0", "r1"]
    assert result.outcomes[1].loaded_tokens == 639


def test_a_full_tier_gives_up_tails_of_old_chains() -> None:
    """Host memory of 15 blocks after 10 of one chain and 10 of another: the second is whole, of the first half is left."""
    spec = FleetSpec(replicas=1, device_tokens=64 * 12, host_tokens=64 * 15, block_size=64, max_batch_tokens=1024)
    asked = [
        request(0.0, list(range(10))),
        request(10.0, list(range(20, 30))),
        request(20.0, list(range(40, 41))),
        request(30.0, list(range(10))),
    ]
    assert simulate(asked, spec, costs=COSTS).outcomes[3].cached_tokens == 64 * 4


def test_the_router_knows_what_replicas_hold() -> None:
    """With events, what the router expects is what requests find, but for what changes while they wait."""
    result = simulate(random_trace(1, 300), FleetSpec(replicas=3, device_tokens=64 * 200, block_size=64), costs=COSTS)
    numbers = summarize(result)
    assert numbers.hit_share > 0.3
    assert numbers.expected_share == pytest.approx(numbers.hit_share, abs=0.02)


def test_without_events_the_router_estimates() -> None:
    """Estimates come within five points of the truth, and lose little."""
    spec = FleetSpec(replicas=3, device_tokens=64 * 200, block_size=64, events=False)
    numbers = summarize(simulate(random_trace(1, 300), spec, costs=COSTS))
    assert numbers.hit_share > 0.3
    assert numbers.expected_share == pytest.approx(numbers.hit_share, abs=0.05)


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 2**32), st.sampled_from(sorted(POLICIES)), st.integers(1, 3), st.booleans())
def test_every_request_ends_and_runs_are_repeatable(seed: int, policy: str, replicas: int, stores: bool) -> None:
    """Whatever the policy and the memory, all requests end, after they came, and the same trace gives the same result."""
    spec = FleetSpec(
        replicas=replicas,
        device_tokens=64 * 40,
        host_tokens=64 * 60 if stores else 0,
        disk_tokens=64 * 200 if stores else 0,
        shared_tokens=64 * 300 if stores else 0,
        block_size=64,
        max_batch_tokens=300,
        max_num_seqs=5,
        events=bool(seed % 2),
    )
    trace = random_trace(seed, 40)

    def run() -> list[tuple[object, ...]]:
        result = simulate(trace, spec, policy, COSTS)
        for outcome in result.outcomes:
            assert outcome.request.arrival < outcome.first_token <= outcome.finished
            assert 0 <= outcome.cached_tokens < outcome.request.prompt_tokens
        return [
            (one.replica, one.first_token, one.finished, one.cached_tokens, one.loaded_tokens)
            for one in result.outcomes
        ]

    assert run() == run()


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 2**32), st.booleans())
def test_steps_taken_together_change_nothing(seed: int, stores: bool) -> None:
    """Decoding steps that the scheduler would repeat are taken at once: the same as one after the other."""
    costs = replace(COSTS, base=1e-2, decode_context=1e-5)
    spec = FleetSpec(
        replicas=2, device_tokens=64 * 60, host_tokens=64 * 100 if stores else 0, block_size=64, max_num_seqs=6
    )
    trace = [replace(one, output_tokens=one.output_tokens * 7) for one in random_trace(seed, 40)]

    def run() -> tuple[list[float], list[object]]:
        result = simulate(trace, spec, costs=costs)
        steps = [totals.steps for totals in result.replicas.values()]
        found = [(one.replica, one.cached_tokens, one.loaded) for one in result.outcomes]
        return [time for one in result.outcomes for time in (one.first_token, one.finished)], [*steps, *found]

    together = run()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(replica, "_MAX_REPEATS", 0)
        one_by_one = run()
    assert together[0] == pytest.approx(one_by_one[0])
    assert together[1] == one_by_one[1]


def test_steps_that_decode_grow_with_their_context() -> None:
    """After 64 tokens: four more at 10 ms each, and 0.01 ms for each token before them."""
    costs = replace(COSTS, decode_context=1e-5)
    outcome = simulate([request(0.0, [1], 5)], ONE, costs=costs).outcomes[0]
    assert outcome.finished - outcome.first_token == pytest.approx(4 * 0.01 + (64 + 65 + 66 + 67) * 1e-5)


def test_an_answer_is_found_by_the_next_turn() -> None:
    """A prompt of 128 tokens, an answer of 128, a next turn that begins with both: 192 tokens were computed for it already, as
    blocks of 64 that were full before the last token."""
    asked = [
        TraceRequest(0.0, array("I", [1, 2, 3, 4]), 64, 128, 128),
        TraceRequest(10.0, array("I", [1, 2, 3, 4, 5]), 64, 320, 1),
    ]
    assert simulate(asked, ONE, costs=COSTS).outcomes[1].cached_tokens == 192


def test_placement_by_cost_beats_taking_turns() -> None:
    """Conversations over three replicas: first tokens come sooner, more is found, and less is computed."""
    spec = FleetSpec(replicas=3, device_tokens=64 * 100, block_size=64)
    ours, turns = (summarize(simulate(random_trace(5, 300), spec, name, COSTS)) for name in ("cost", "round-robin"))
    assert ours.mean < 0.9 * turns.mean
    assert ours.hit_share > 1.5 * turns.hit_share
    assert ours.busy < 0.85 * turns.busy


# Traces


def test_mooncakes_format(tmp_path: Path) -> None:
    """Numbers stand for 512 tokens each, the last for what is left; equal numbers give equal prefixes."""
    lines = [
        {"timestamp": 5000, "input_length": 1100, "output_length": 7, "hash_ids": [0, 1, 2]},
        {"timestamp": 2000, "input_length": 1024, "output_length": 0, "hash_ids": [0, 1]},
        {
            "timestamp": 5000,
            "input_length": 30,
            "output_length": 2,
            "hash_ids": [9, 8],
            "block_size": 16,
            "session": "s",
        },
    ]
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)) + "\n")
    first, second, third = read_trace(path, speed=2.0)
    assert (first.arrival, second.arrival, third.session) == (0.0, 1.5, "s")
    assert (len(second.prompt()), second.output_tokens, first.output_tokens) == (1100, 7, 1)
    assert second.prompt()[:1024] == first.prompt()
    assert third.prompt().tolist() == [9] * 16 + [8] * 14


def test_agent_sessions(tmp_path: Path) -> None:
    """Text becomes tokens of four bytes, so that a text that goes on shares its prefix; sessions keep their names."""
    lines = [
        {"timestamp": 10_000_000, "input": "Über uns der Himmel", "output": "ja", "session_id": "x"},
        {"timestamp": 11_500_000, "input": "Über uns der Himmel, unter uns", "output": "ja, ja", "session_id": "x"},
    ]
    path = tmp_path / "agent.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)))
    first, second = read_trace([path])
    assert (first.arrival, second.arrival, second.session) == (0.0, 1.5, "x")
    assert (first.prompt_tokens, second.output_tokens) == (5, 2)
    assert second.prompt()[:5] == first.prompt()[:5]


def test_answers_of_mooncakes_turns(tmp_path: Path) -> None:
    """What stands in a next turn after an earlier prompt is its answer; what shares less, or is too short, is no next turn."""
    lines = [
        {"timestamp": 0, "input_length": 1100, "output_length": 600, "hash_ids": [0, 1, 2]},
        {"timestamp": 1, "input_length": 1100, "output_length": 600, "hash_ids": [0, 9, 8]},
        {"timestamp": 2, "input_length": 1200, "output_length": 5, "hash_ids": [0, 9, 7]},
        {"timestamp": 3, "input_length": 2000, "output_length": 5, "hash_ids": [0, 1, 3, 4]},
    ]
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)))
    first, second, _, last = read_trace(path)
    assert first.prompt() + first.output() == last.prompt()[:1700]
    assert len(second.prompt()) == 1100 and len(second.output()) < 600


def test_recordings_with_large_numbers(tmp_path: Path) -> None:
    """Hashes of 53 bits become smaller numbers, the same in every file; those of the answer may follow the prompt's."""
    lines = [
        {
            "timestamp": 0,
            "input_length": 40,
            "output_length": 24,
            "hash_ids": [2**52, 2**52 + 1, 5, 6],
            "block_size": 16,
        },
        {
            "timestamp": 9,
            "input_length": 64,
            "output_length": 1,
            "hash_ids": [2**52, 2**52 + 1, 5, 7],
            "block_size": 16,
        },
    ]
    paths = [tmp_path / "a", tmp_path / "b"]
    for path, line in zip(paths, lines, strict=True):
        path.write_text(json.dumps(line))
    first, second = read_trace(paths)
    assert first.prompt() == second.prompt()[:40] and first.output()[:8] == second.prompt()[40:48]
    assert first.output()[8:] != second.prompt()[48:]
    assert block_size_of([first, second], None) == 16


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "line 1: not a request of a known trace format"),
        ('{"timestamp": 1}', "'input' is missing"),
        ('{"timestamp": 1, "input_length": 600, "output_length": 1, "hash_ids": [1]}', "are 2 blocks of 512, not 1"),
        ("[]", "line 1"),
        ("", "no requests"),
    ],
)
def test_what_is_no_trace_is_refused(tmp_path: Path, text: str, said: str) -> None:
    """File, line and reason are named."""
    path = tmp_path / "trace.jsonl"
    path.write_text(text)
    with pytest.raises(ConfigError, match=said):
        read_trace(path)


def test_mistakes_are_named(tmp_path: Path) -> None:
    """A missing file, a prompt longer than the device, an unknown policy, a fleet without replicas."""
    with pytest.raises(ConfigError, match="cannot read the trace"):
        read_trace(tmp_path / "none.jsonl")
    with pytest.raises(ConfigError, match="more than a device"):
        simulate([request(0.0, list(range(200)))], ONE, costs=COSTS)
    with pytest.raises(ConfigError, match="unknown policy"):
        simulate([request(0.0, [1])], ONE, "luck", COSTS)
    with pytest.raises(ConfigError, match="no requests"):
        simulate([], ONE)
    with pytest.raises(ConfigError, match="at least one replica"):
        FleetSpec(replicas=0)
    with pytest.raises(ConfigError, match="negative"):
        EngineCosts(prefill=-1.0)


# Reports


@pytest.fixture(scope="module")
def results() -> list[SimulationResult]:
    spec = FleetSpec(replicas=2, device_tokens=64 * 100, block_size=64)
    return [simulate(random_trace(2, 60), spec, name, COSTS) for name in ("cost", "round-robin")]


def test_the_table_has_a_row_for_each(results: list[SimulationResult]) -> None:
    """Head, rule, one row per simulation, all of one width."""
    lines = table(results).splitlines()
    assert len(lines) == 4 and len(set(map(len, lines))) == 1
    assert lines[2].startswith("| cost ") and lines[3].startswith("| round-robin ")


def test_the_page_stands_alone(results: list[SimulationResult]) -> None:
    """Valid drawings with a curve for each simulation, and nothing that is fetched from elsewhere."""
    text = page(results, "A <title>")
    assert "A &lt;title&gt;" in text and "http" not in text and "<script" not in text
    drawings = [ET.fromstring("<svg" + part.split("</svg>")[0] + "</svg>") for part in text.split("<svg")[1:]]
    assert len(drawings) == 4
    assert all(len(drawing.findall("polyline")) == 2 for drawing in drawings[:3])


@given(st.lists(st.floats(allow_nan=False), min_size=1, max_size=50), st.floats(0.01, 1.0))
def test_quantiles(values: list[float], share: float) -> None:
    """At least this share of the values does not exceed the quantile, and fewer do not exceed any smaller value."""
    ordered = sorted(values)
    found = quantile(ordered, share)
    assert sum(value <= found for value in ordered) >= share * len(ordered) - 1e-9
    assert sum(value < found for value in ordered) < share * len(ordered)
