"""The simulator: small traces with results computed by hand, and properties that hold for any trace."""

from __future__ import annotations

import gzip
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
from foreword.routing.costs import LoadCost
from foreword.routing.policies import POLICIES
from foreword.sim.costs import EngineCosts, FleetSpec
from foreword.sim.report import page, quantile, summarize, table
from foreword.sim.run import SimulationResult, simulate
from foreword.sim.trace import TraceRequest, block_size_of, multiplied, read_trace, sampled

# Computing a token takes 1 ms, a step has no other cost; loading a token takes 0.1, 0.2 or 0.4 ms.
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
    """Conversations with several turns and a common prefix."""
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


def test_the_times_of_one_request() -> None:
    """A request takes 1 ms for each of 640 prompt tokens, then 10 ms for each of two output tokens."""
    result = simulate([request(0.0, list(range(10)), 3)], ONE, costs=COSTS)
    outcome = result.outcomes[0]
    assert outcome.ttft == pytest.approx(0.64)
    assert outcome.finished == pytest.approx(0.66)
    assert outcome.seconds_per_token == pytest.approx(0.01)
    one_token = simulate([request(0.0, [1], output=1), request(9.0, [2], output=11)], ONE, costs=COSTS)
    assert summarize(one_token).per_token == pytest.approx(0.01), "an output of one token has no ITL"


def test_a_prefix_on_the_device_is_cached() -> None:
    """The second request shares eight of ten blocks: 128 tokens are computed."""
    trace = [request(0.0, list(range(10))), request(10.0, [*range(8), 77, 78])]
    result = simulate(trace, ONE, costs=COSTS)
    assert result.outcomes[1].cached_tokens == result.outcomes[1].expected_cached == 512
    assert result.outcomes[1].ttft == pytest.approx(0.128)
    assert summarize(result).hit_share == pytest.approx(512 / 1280)


def test_a_prefix_off_the_device_is_loaded_if_that_is_faster() -> None:
    """A prefix that was evicted from the device is loaded from host memory, but not if loading is slower than computing."""
    spec = FleetSpec(replicas=1, device_tokens=64 * 12, host_tokens=64 * 100, block_size=64, max_batch_tokens=512)
    trace = [request(0.0, list(range(10))), request(10.0, list(range(20, 30))), request(20.0, list(range(10)))]
    outcome = simulate(trace, spec, costs=COSTS).outcomes[2]
    assert outcome.loaded_tokens == 511
    assert outcome.ttft == pytest.approx(512 * 1e-4 + 1e-2), "the last token is recomputed in a separate step"
    slow = EngineCosts(0.0, 1e-3, 0.0, 1e-2, 0.0, (LoadCost(2e-3), LoadCost(2e-3), LoadCost(2e-3)))
    assert simulate(trace, spec, costs=slow).outcomes[2].loaded_tokens == 0


def test_loads_from_one_tier_are_serialized() -> None:
    """Two prompts are loaded from host memory, 64 ms each: the second load waits for the first."""
    spec = FleetSpec(replicas=1, device_tokens=64 * 24, host_tokens=64 * 100, block_size=64, max_batch_tokens=2048)
    trace = [request(0.0, list(range(10))), request(10.0, list(range(10, 20))), request(20.0, list(range(20, 43)))]
    trace += [request(30.0, list(range(10))), request(30.0, list(range(10, 20)))]
    result = simulate(trace, spec, costs=COSTS)
    assert [outcome.loaded_tokens for outcome in result.outcomes[3:]] == [639, 639]
    assert result.outcomes[3].ttft == pytest.approx(0.064 + 0.01)
    assert result.outcomes[4].ttft == pytest.approx(0.128 + 0.01)


def test_replicas_share_a_store() -> None:
    """A replica loads from the shared store what another replica computed."""
    spec = FleetSpec(replicas=2, device_tokens=64 * 50, shared_tokens=64 * 100, block_size=64)
    trace = [request(0.0, list(range(10))), request(10.0, list(range(10)))]
    result = simulate(trace, spec, "round-robin", COSTS)
    assert [outcome.replica for outcome in result.outcomes] == ["r0", "r1"]
    assert result.outcomes[1].loaded_tokens == 639


def test_a_full_tier_evicts_old_chains_from_their_end() -> None:
    """Host memory of 15 blocks gets two chains of 10 blocks: the second is complete, of the first the leading part is left."""
    spec = FleetSpec(replicas=1, device_tokens=64 * 12, host_tokens=64 * 15, block_size=64, max_batch_tokens=1024)
    trace = [
        request(0.0, list(range(10))),
        request(10.0, list(range(20, 30))),
        request(20.0, list(range(40, 41))),
        request(30.0, list(range(10))),
    ]
    assert simulate(trace, spec, costs=COSTS).outcomes[3].cached_tokens == 64 * 4


def test_the_router_knows_what_replicas_hold() -> None:
    """The expected hit rate is the actual one with events, except for changes while requests wait."""
    result = simulate(random_trace(1, 300), FleetSpec(replicas=3, device_tokens=64 * 200, block_size=64), costs=COSTS)
    numbers = summarize(result)
    assert numbers.hit_share > 0.3
    assert numbers.expected_share == pytest.approx(numbers.hit_share, abs=0.02)


def test_memory_beyond_what_requests_fill_costs_nothing() -> None:
    """A device and tiers of 10^24 tokens give the same as large ones."""
    results = [
        simulate(
            random_trace(3, 40), replace(ONE, device_tokens=size, host_tokens=size, shared_tokens=size), costs=COSTS
        )
        for size in (10**6, 10**24)
    ]
    assert summarize(results[0]) == summarize(results[1])


def test_without_events_the_router_estimates() -> None:
    """Without events, the expected hit rate is within five points of the actual one."""
    spec = FleetSpec(replicas=3, device_tokens=64 * 200, block_size=64, events=False)
    numbers = summarize(simulate(random_trace(1, 300), spec, costs=COSTS))
    assert numbers.hit_share > 0.3
    assert numbers.expected_share == pytest.approx(numbers.hit_share, abs=0.05)


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 2**32), st.sampled_from(sorted(POLICIES)), st.integers(1, 3), st.booleans())
def test_every_request_ends_and_runs_are_repeatable(seed: int, policy: str, replicas: int, stores: bool) -> None:
    """All requests end with any policy and memory, and simulating the same trace again gives the same result."""
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


def test_steps_that_decode_grow_with_their_context() -> None:
    """Four tokens after a prompt of 64 take 10 ms each, and 0.01 ms for each token before them."""
    costs = replace(COSTS, decode_context=1e-5)
    outcome = simulate([request(0.0, [1], 5)], ONE, costs=costs).outcomes[0]
    assert outcome.finished - outcome.first_token == pytest.approx(4 * 0.01 + (64 + 65 + 66 + 67) * 1e-5)


def test_an_output_is_cached_for_the_next_turn() -> None:
    """The next turn starts with the prompt and output of the previous one: its full blocks are cached."""
    trace = [
        TraceRequest(0.0, array("I", [1, 2, 3, 4]), 64, 128, 128),
        TraceRequest(10.0, array("I", [1, 2, 3, 4, 5]), 64, 320, 1),
    ]
    assert simulate(trace, ONE, costs=COSTS).outcomes[1].cached_tokens == 192


def test_placement_by_cost_beats_round_robin() -> None:
    """Conversations over three replicas: lower TTFT, a higher hit rate, and less computation."""
    spec = FleetSpec(replicas=3, device_tokens=64 * 100, block_size=64)
    ours, turns = (summarize(simulate(random_trace(5, 300), spec, name, COSTS)) for name in ("cost", "round-robin"))
    assert ours.mean < 0.9 * turns.mean
    assert ours.hit_share > 1.5 * turns.hit_share
    assert ours.busy < 0.85 * turns.busy


# Traces


def test_mooncakes_format(tmp_path: Path) -> None:
    """Each number stands for 512 tokens, the last one for the rest; equal numbers give equal prefixes."""
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
    """Text becomes tokens of four bytes: a continued text shares its prefix. Sessions keep their names.

    Unicode's line separator in a text does not end the line.
    """
    lines = [
        {"timestamp": 10_000_000, "input": "Über uns der Himmel", "output": "ja", "session_id": "x"},
        {
            "timestamp": 11_500_000,
            "input": "Über uns der Himmel,\u2028unter uns",
            "output": "ja, ja, ja",
            "session_id": "x",
        },
    ]
    path = tmp_path / "agent.jsonl"
    path.write_text("\n".join(json.dumps(line, ensure_ascii=False) for line in lines), encoding="utf-8")
    first, second = read_trace([path])
    assert (first.arrival, second.arrival, second.session) == (0.0, 1.5, "x")
    assert (first.prompt_tokens, second.output_tokens) == (5, 2)
    assert second.prompt()[:5] == first.prompt()[:5]


def test_outputs_in_mooncakes_traces(tmp_path: Path) -> None:
    """The output of a request is taken from the prompt of its next turn; other prompts are not taken for a next turn."""
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
    """Hashes of 53 bits become small numbers, the same in every file; hashes of the output may follow those of the prompt."""
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


def test_copies_of_a_trace_share_only_common_blocks() -> None:
    """Each copy has the same lengths and repetitions as the trace, other blocks, and the same first block."""
    trace = [replace(one, ids=array("I", [0, *one.ids[1:]])) for one in random_trace(3, 30)]
    copies = multiplied(trace, 3)
    assert len(copies) == 90 and copies == sorted(copies, key=lambda one: one.arrival)
    blocks = {number for one in trace for number in one.ids}
    assert len({number for one in copies for number in one.ids}) == 3 * (len(blocks) - 1) + 1
    assert all(one.ids[0] == 0 for one in copies)
    with pytest.raises(ConfigError, match="only traces of blocks"):
        multiplied([TraceRequest(0.0, array("I", [1, 2]), 1, 2, 1)], 2)


def test_a_sample_has_whole_sessions() -> None:
    """About a third of the conversations with all their requests: those with a name, and those that share a document."""
    rng = random.Random(4)
    trace = [request(float(i), [0, 1 + i % 300, 1000 + i]) for i in range(900)]
    trace += [replace(one, session=f"s{rng.randrange(300)}") for one in trace[:600]]
    taken = sampled(trace, 3, seed=2)
    assert taken == [one for one in trace if one in taken]
    for name in (lambda one: one.session, lambda one: None if one.session else one.ids[1]):
        chosen = {name(one) for one in taken} - {None}
        assert 70 < len(chosen) < 130
        assert [one for one in taken if name(one) in chosen] == [one for one in trace if name(one) in chosen]
    assert sampled(trace, 1) == trace and sampled(trace, 3, seed=3) != taken
    with pytest.raises(ConfigError, match="no session is left"):
        sampled(trace[:1], 100, seed=1)
    with pytest.raises(ConfigError, match="session_id"):
        sampled([TraceRequest(0.0, array("I", [1, 2]), 1, 2, 1)], 2)


@pytest.mark.parametrize("seed", range(5))
def test_a_sample_has_its_share_of_the_work_at_each_time(seed: int) -> None:
    """An eighth of sessions whose lengths differ by a hundred times: about an eighth of the tokens, also of each quarter."""
    rng = random.Random(seed)
    trace = [
        replace(request(float(number), [0, 1 + number]), prompt_tokens=2 ** rng.randrange(6) * rng.randrange(8, 12))
        for number in range(1600)
    ]
    quarters = [[0, 0] for _ in range(4)]
    taken = set(map(id, sampled(trace, 8, seed=seed)))
    for one in trace:
        quarter = quarters[int(one.arrival // 400)]
        quarter[0] += one.prompt_tokens
        quarter[1] += 8 * one.prompt_tokens if id(one) in taken else 0
    assert all(share == pytest.approx(whole, rel=0.2) for whole, share in quarters)
    assert sum(share for _, share in quarters) == pytest.approx(sum(whole for whole, _ in quarters), rel=0.05)


@pytest.mark.slow
def test_a_part_of_a_fleet_answers_for_the_whole() -> None:
    """A quarter of the sessions on a quarter of the replicas: hit rate and TTFT of the whole fleet."""
    rng, trace = random.Random(9), []
    for number in range(400):
        start, talk = rng.uniform(0, 300), [0, 10 * number + 1]
        for turn in range(rng.randrange(2, 8)):
            trace.append(request(start + 12 * turn * rng.random(), list(talk), rng.randrange(1, 40)))
            talk += [10 * number + 2 + turn, 5000 + 10 * number + turn]
    trace.sort(key=lambda one: one.arrival)
    spec = replace(ONE, device_tokens=64 * 400, replicas=8)
    whole = summarize(simulate(trace, spec, costs=COSTS))
    parts = [
        summarize(simulate(sampled(trace, 4, seed=seed), replace(spec, replicas=2), costs=COSTS)) for seed in range(5)
    ]
    assert sum(one.hit_share for one in parts) / 5 == pytest.approx(whole.hit_share, abs=0.04)
    assert sum(one.mean for one in parts) / 5 == pytest.approx(whole.mean, rel=0.15)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "line 1: not a request of a known trace format"),
        ('{"timestamp": 1}', "'input' is missing"),
        ('{"timestamp": 1, "input_length": 600, "output_length": 1, "hash_ids": [1]}', "are 2 blocks of 512, not 1"),
        ('{"timestamp": NaN, "input_length": 1, "output_length": 1, "hash_ids": [1]}', "nan is not a time"),
        ("[]", "line 1"),
        ("", "no requests"),
    ],
)
def test_invalid_traces_are_refused(tmp_path: Path, text: str, message: str) -> None:
    """The error names file, line and reason."""
    path = tmp_path / "trace.jsonl"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        read_trace(path)


def test_mistakes_are_named(tmp_path: Path) -> None:
    """Errors for a missing file, a request longer than the device, an unknown policy and an impossible fleet."""
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
    """The table has a header, a rule and one row per simulation, all of one width."""
    lines = table(results).splitlines()
    assert len(lines) == 4 and len(set(map(len, lines))) == 1
    assert lines[2].startswith("| cost ") and lines[3].startswith("| round-robin ")


def test_the_page_is_self_contained(results: list[SimulationResult]) -> None:
    """The page has valid SVG with a curve for each simulation, and loads nothing."""
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


def test_time_outside_of_the_engine() -> None:
    """The `request` cost is part of each time to first token, and changes nothing else."""
    trace = [request(0.0, [1, 2]), request(5.0, [1, 2, 3])]
    with_cost, without = (summarize(simulate(trace, ONE, costs=replace(COSTS, request=cost))) for cost in (0.25, 0.0))
    assert with_cost.p50 == pytest.approx(without.p50 + 0.25) and with_cost.mean == pytest.approx(without.mean + 0.25)
    assert replace(with_cost, mean=0, p50=0, p90=0, p99=0) == replace(without, mean=0, p50=0, p90=0, p99=0)


def test_a_compressed_trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A trace that gzip has compressed, whatever its name, is read as the plain one is. One that is cut off or broken is
    refused, and so is one that would not end: it is read no further than the limit."""
    line = json.dumps({"timestamp": 5, "input_length": 600, "output_length": 9, "hash_ids": [1, 2]}) + "\n"
    plain, packed = tmp_path / "plain.jsonl", gzip.compress((line * 50).encode())
    plain.write_text(line * 50)
    for name in ("trace.jsonl.gz", "trace"):
        (tmp_path / name).write_bytes(packed)
        assert read_trace(tmp_path / name) == read_trace(plain)
    broken = tmp_path / "broken.gz"
    for data in (packed[: len(packed) // 2], packed[:12] + bytes(9) + packed[21:]):
        broken.write_bytes(data)
        with pytest.raises(ConfigError, match=r"cannot read the trace .*broken\.gz"):
            read_trace(broken)
    monkeypatch.setattr("foreword.sim.trace._MOST_BYTES", 1000)
    with pytest.raises(ConfigError, match="once decompressed"):
        read_trace(tmp_path / "trace")
    monkeypatch.setattr("foreword.sim.trace._MOST_LINE", 40)
    with pytest.raises(ConfigError, match="a line of more than"):
        read_trace(tmp_path / "trace")
