"""The comparison with other routers' rules: it continues where it was stopped, and odd fleets are odd."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks.simulator import overload
from benchmarks.simulator.odd_fleets import LIAR, ODD, AllCached, ClaimsAll, ForgetsNothing, JumpingClock
from foreword.routing.directory import CacheTier
from foreword.routing.fleet import Fleet, PlacedRequest
from foreword.routing.placement import PlacementQuery

KEYS = [bytes([number]) * 16 for number in range(4)]


def compare(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[str, int]:
    """The tables, and how many simulations were run."""
    assert overload.main(["--sets", "odd", "--limit", "20", "--draws", "1", *arguments]) == 0
    out, err = capsys.readouterr()
    return out, len(err.splitlines())


def test_a_stopped_comparison_continues(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Results in the file are not computed again, but for a line that was cut, and those of other code; tables are the same."""
    out = tmp_path / "results.jsonl"
    asked = "--only", "^(joins|one-herd)$", "--out", str(out), "--policies"
    _, first = compare(capsys, *asked, "cost,llm-d")
    assert first == 4
    out.write_bytes(out.read_bytes()[:-40])
    whole, more = compare(capsys, *asked, "cost,llm-d,two-choices")
    assert more == 1 + 1 + 2  # one says that a line was cut
    assert compare(capsys, *asked, "cost,llm-d,two-choices", "--read", str(out))[1] == 2 * 1
    lines = [json.loads(line)["policy"] for line in out.read_text().splitlines() if line.endswith("}")]
    assert sorted(lines) == sorted(["cost", "llm-d", "two-choices"] * 2)

    monkeypatch.setattr(overload, "_code", lambda: "other")
    kept, none = compare(capsys, *asked, "cost,llm-d,two-choices", "--keep")
    assert none == 1 and kept.startswith(whole.rstrip()) and "6 of the 6 results are of other code" in kept
    assert compare(capsys, *asked, "cost,llm-d,two-choices")[1] == 1 + 6


def test_two_processes_find_the_same_as_one(capsys: pytest.CaptureFixture[str]) -> None:
    """The tables do not depend on the number of processes; they count each figure of each case."""
    asked = "--only", "^(joins|one-herd)$", "--policies", "cost,sglang"
    one, _ = compare(capsys, *asked)
    two, runs = compare(capsys, *asked, "--jobs", "2")
    assert one == two and runs == 4
    assert " of 10 figures (" in one and "| case (requests) | cost | sglang |" in one


def test_every_odd_fleet_serves_all(capsys: pytest.CaptureFixture[str]) -> None:
    """No oddness lets a simulation fail, or loses a request."""
    text, runs = compare(capsys, "--policies", "cost,dynamo")
    assert runs == 2 * len(ODD)
    assert all(f"| {name} (20) |" in text for name in ODD) and f" of {5 * len(ODD)} figures (" in text


def test_a_failed_simulation_is_named(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A rule that fails in one case neither stops the others nor passes unseen."""

    def made(name: str) -> object:
        if name == "llm-d":
            raise ZeroDivisionError("this rule")
        return built(name)

    built: Callable[[str], object] = overload.made
    monkeypatch.setattr(overload, "made", made)
    assert overload.main(
        ["--sets", "odd", "--limit", "5", "--only", "^plain$", "--draws", "1", "--policies", "cost,llm-d"]
    )
    out, err = capsys.readouterr()
    assert (
        "plain llm-d 1: failed: ZeroDivisionError" in err and "1 simulations failed" in out and "| plain (5) |" in out
    )


def served(fleet: Fleet) -> PlacedRequest:
    """A request on the only replica, from second 100 to 101, with nothing cached."""
    found: list[PlacedRequest] = []
    fleet.on_finished = found.append
    query = PlacementQuery(KEYS, 64, 16)
    fleet.sent("a", query, fleet.place(query, 100.0), 100.0)
    fleet.first_token("a", 100.5)
    fleet.finished("a", 101.0, cached_tokens=0, output_tokens=9)
    return found[0]


def test_odd_fleets_are_odd() -> None:
    """The clock jumps, false numbers reach the router, and blocks are claimed that others have or that are gone."""
    clock, usage = JumpingClock(), AllCached()
    for fleet in (clock, usage):
        fleet.add(LIAR)
    assert served(clock).finished_at == 101 + 3600
    assert served(usage).cached_tokens == 64
    for kind, claimed in ((ForgetsNothing, 0), (ClaimsAll, 4)):
        directory = kind().directory
        directory.stored("r0", CacheTier.DEVICE, b"", KEYS)
        assert directory.lookup(KEYS).of(LIAR)[0] == claimed
        directory.stored(LIAR, CacheTier.DEVICE, b"", KEYS)
        for name in ("r0", LIAR):
            directory.removed(name, CacheTier.DEVICE, KEYS)
        assert directory.lookup(KEYS).of(LIAR)[0] == 4 and directory.lookup(KEYS).of("r0")[0] == 0
