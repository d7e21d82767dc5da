"""`foreword simulate`: from a trace file to a table, an HTML page and SVG files."""

from __future__ import annotations

import json
import sys
import xml.etree.ElementTree as ET
from array import array
from pathlib import Path
from typing import Any

import pytest

from foreword.cli import main as cli
from foreword.routing.costs import LoadCost
from foreword.sim.costs import EngineCosts, FleetSpec, Profile, read_profile
from foreword.sim.report import summarize
from foreword.sim.run import simulate
from foreword.sim.sizing import parse_objective
from foreword.sim.trace import TraceRequest

LOAD = '{"per_token": 0, "latency": 0}'


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    """The command's exit status."""
    monkeypatch.setattr(sys, "argv", ["foreword", "simulate", *arguments])
    with pytest.raises(SystemExit) as caught:
        cli.main()
    return int(caught.value.code or 0)


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """Forty turns of four conversations with blocks of 512 tokens."""
    lines, talks = [], [[0, 100 * number + 1] for number in range(4)]
    for i in range(40):
        talk = talks[i % 4]
        lines.append(
            {"timestamp": 500 * i, "input_length": 512 * len(talk), "output_length": 10, "hash_ids": list(talk)}
        )
        talk.append(1000 + i)
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)))
    return path


def test_every_combination_is_simulated(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], trace: Path, tmp_path: Path
) -> None:
    """Two fleets and two policies give four rows and curves, curves over the number of replicas, and valid SVG."""
    out, svg = tmp_path / "page.html", tmp_path / "svg"
    arguments = ["--replicas", "1,2", "--policy", "cost,round-robin", "--out", str(out), "--svg", str(svg)]
    assert run(monkeypatch, str(trace), *arguments) == 0
    printed = capsys.readouterr().out
    rows = [line for line in printed.splitlines() if line.startswith("| ")]
    assert [row.split("|")[1].strip() for row in rows if not row.startswith("| :")] == [
        "simulation",
        "cost, replicas 1",
        "round-robin, replicas 1",
        "cost, replicas 2",
        "round-robin, replicas 2",
    ]
    assert "40 requests" in printed
    assert out.read_text().count("<polyline") == 3 * 4 + 2 * 2
    assert {path.stem for path in svg.iterdir()} == {
        "ttft",
        "hits",
        "waits",
        "tiers",
        "ttft-by-replicas",
        "hits-by-replicas",
    }
    for path in svg.iterdir():
        assert ET.parse(path).getroot().tag == "{http://www.w3.org/2000/svg}svg"


def test_json_output(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], trace: Path) -> None:
    """`--json` prints the hit rate by tier, which adds up to the total, and the simulated fleet."""
    assert run(monkeypatch, str(trace), "--device", "8192", "--memory", "1000000", "--replicas", "1", "--json") == 0
    output = json.loads(capsys.readouterr().out)
    [one] = output["simulations"]
    assert one["hit_share"] == pytest.approx(sum(one["tier_shares"]))
    assert one["tier_shares"][1] > 0.1 and one["tier_shares"][2] == 0
    assert one["spec"]["host_tokens"] == 1_000_000 and one["spec"]["block_size"] == 512
    assert one["replica_hours"] > 0


def test_groups_and_changes(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], trace: Path) -> None:
    """A fleet of one group, of which a replica fails: the output has the requests of each phase."""
    fleet = ["--replicas", "0", "--group", "fast replicas=2 device=100000", "--change", "8s fail fast-1"]
    assert run(monkeypatch, str(trace), *fleet, "--json") == 0
    [one] = json.loads(capsys.readouterr().out)["simulations"]
    assert [phase["requests"] for phase in one["phases"]] == [16, 24]
    assert one["spec"]["groups"][0]["device_tokens"] == 100_000 and one["failovers"] <= 16


def test_sizes_in_bytes_need_the_size_of_a_token(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], trace: Path, tmp_path: Path
) -> None:
    """1 GiB at 1 MiB per token is 1,024 tokens. The size of a token comes from --kv-bytes or --costs, else it is an error."""
    arguments = [str(trace), "--replicas", "1", "--memory", "1GiB", "--json"]
    assert run(monkeypatch, *arguments) == 2
    assert "--kv-bytes" in capsys.readouterr().err
    assert run(monkeypatch, *arguments, "--kv-bytes", str(1 << 20)) == 0
    assert json.loads(capsys.readouterr().out)["simulations"][0]["spec"]["host_tokens"] == 1024
    costs = tmp_path / "costs.json"
    costs.write_text(Profile(EngineCosts(), 1 << 19, about={"model": "a model"}).to_json())
    assert run(monkeypatch, *arguments, "--costs", str(costs)) == 0
    output = json.loads(capsys.readouterr().out)
    assert output["simulations"][0]["spec"]["host_tokens"] == 2048
    assert "a model" in output["about"]


@pytest.mark.extended
def test_the_smallest_fleet_for_a_service_level(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], trace: Path
) -> None:
    """`--slo` finds the number of replicas that meets the limit while one replica less does not, and its price; the same with
    two processes. Where no number meets it, the exit status is 1."""

    def sized(*more: str) -> dict[str, Any]:
        assert run(monkeypatch, str(trace), "--speed", "40", "--slo", "p90 ttft < 400 ms", "--json", *more) == 0
        [found] = json.loads(capsys.readouterr().out)["fleets"]
        return dict(found)

    def p90s(replicas: int) -> float:
        assert run(monkeypatch, str(trace), "--speed", "40", "--replicas", str(replicas), "--json") == 0
        return float(json.loads(capsys.readouterr().out)["simulations"][0]["p90"])

    found = sized("--runs", "1", "--price", "20")
    assert found["replicas"] > 1
    assert p90s(found["replicas"]) < 0.4 <= p90s(found["replicas"] - 1)
    assert found["price"] == pytest.approx(20 * found["hours"])
    careful = sized("--runs", "2")
    assert careful["replicas"] >= found["replicas"] and careful == sized("--runs", "2", "--jobs", "2")
    assert run(monkeypatch, str(trace), "--slo", "p99 ttft < 1 ms", "--replicas", "1,2") == 1
    assert "more than 2" in capsys.readouterr().out


def test_a_sample_is_of_the_whole_fleet(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], trace: Path
) -> None:
    """Numbers of replicas with `--sample 2`, also those that `--slo` finds, are those of the whole fleet."""
    assert run(monkeypatch, str(trace), "--sample", "2", "--replicas", "4,8", "--json") == 0
    answer = json.loads(capsys.readouterr().out)
    assert [one["spec"]["replicas"] for one in answer["simulations"]] == [2, 4]
    assert [one["name"] for one in answer["simulations"]] == ["replicas 4", "replicas 8"]
    assert "one in 2 sessions" in answer["about"]
    assert run(monkeypatch, str(trace), "--sample", "2", "--slo", "p90 ttft < 900 s", "--replicas", "6,8") == 0
    assert "| 6 |" in " ".join(capsys.readouterr().out.split())


def test_a_limit_may_be_inclusive() -> None:
    """A value equal to the limit meets `<=` and not `<`."""
    exact = summarize(simulate([TraceRequest(0.0, array("I", [1]), 64, 64, 1)], FleetSpec(replicas=1, block_size=64)))
    assert parse_objective(f"mean ttft <= {exact.mean!r} s").is_met(exact)
    assert not parse_objective(f"mean ttft < {exact.mean!r} s").is_met(exact)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--slo", "ttft < 1"], "not a service level"),
        (["--slo", "p90 ttft < 1 s", "--runs", "0"], "--runs must be from 1"),
        (["--slo", "p90 ttft < 1 s", "--jobs", "0"], "--jobs must be from 1"),
        (["--slo", "p99 itl < 9 ms", "--price", "nan"], "--price is a number"),
        (["--slo", "p90 ttft < 1 s", "--out", "page.html"], "--out"),
        (["--slo", "p90 ttft < 1 s", "--change", "1s fail r0"], "no --group and --change"),
        (["--price", "3"], "needs --slo"),
        (["--change", "1s fail r8"], "no such replica"),
        (["--sample", "2", "--change", "1s fail r0"], "--sample divides a fleet of equal replicas"),
        (["--sample", "3", "--replicas", "3,8"], "--replicas takes multiples of 3, not 8"),
        (["--sample", "0"], "--sample must be at least 1"),
        (["--group", "fast speed=2"], "speed is not a key"),
        (["--policy", "least-load"], "least-loaded"),
        (["--replicas", "many"], "--replicas takes whole numbers"),
        (["--replicas", "0"], "at least one replica"),
        (["--replicas", "100000000"], "at most 20,000 replicas"),
        (["--device", "100"], "must hold at least one block"),
        (["--memory", "big"], "not a size"),
        (["--speed", "nan"], "speed of a trace"),
        (["--limit", "0"], "--limit"),
        (["--max-batch-tokens", "0"], "--max-batch-tokens"),
        (["--costs", "none.json"], "cannot read the costs"),
        (["--out", "/nowhere/page.html"], "there is no folder /nowhere"),
    ],
)
def test_mistakes_are_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], trace: Path, arguments: list[str], message: str
) -> None:
    """Wrong arguments give exit status 2 and a message that names the flag or the value."""
    assert run(monkeypatch, str(trace), *arguments) == 2
    assert message in capsys.readouterr().err


def test_a_profile_survives_its_file(tmp_path: Path) -> None:
    """A profile that is written and read again is equal."""
    costs = EngineCosts(0.1, 2e-4, 3e-9, 4e-4, 5e-8, (LoadCost(1e-5, 1e-3), LoadCost(2e-5, 2e-3), LoadCost(3e-5, 3e-3)))
    profile = Profile(costs, 1234, 16, 512, 64, {"machine": "here", "loads": {"disk": "measured"}})
    path = tmp_path / "costs.json"
    path.write_text(profile.to_json())
    assert read_profile(path) == profile


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[", "cannot read the costs"),
        ("{}", "format 1"),
        ('{"format": 1}', "'costs' is missing"),
        ('{"format": 1, "costs": {"loads": []}}', "three tiers"),
        ('{"format": 1, "costs": {"prefil": 1, "loads": []}}', "'prefill'"),
        ('{"format": 1, "costs": {"base": NaN, "loads": [' + ", ".join([LOAD] * 3) + "]}}", "not negative"),
        ('{"format": 1, "block_size": 0, "costs": {"loads": [' + ", ".join([LOAD] * 3) + "]}}", "at least 1, not 0"),
        ('{"format": 1, "costs": {"base": "much", "loads": []}}', "float"),
    ],
)
def test_invalid_profiles_are_refused(tmp_path: Path, text: str, message: str) -> None:
    """The error names the file and the reason."""
    from foreword.errors import ConfigError

    path = tmp_path / "costs.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message) as caught:
        read_profile(path)
    assert str(path) in str(caught.value)
