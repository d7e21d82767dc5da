"""`foreword traffic report`: causes in the order of what they cost, and what a recording without them still shows."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from foreword.blocks.keys import Scope, chain_keys
from foreword.cli.main import app
from foreword.errors import ConfigError
from foreword.observability.recording import RequestRecord, TraceRecorder
from foreword.sim.miss_report import TrafficReport, traffic_report
from foreword.usage import MissExplained

ROOT = Scope(b"model", 16).root()
RULES = "".join(f"Rule {name}: cite what you read, and do not guess.\n" for name in "abcdefghijklmnop")


def record(path: Path, *requests: tuple[list[int], int, MissExplained | None], seconds: float = 0.001) -> Path:
    """Requests of these tokens, some of them cached; TTFT is `seconds` per computed token."""
    recorder = TraceRecorder(path, clock=lambda: 0.0)
    for number, (tokens, cached, miss) in enumerate(requests):
        keys = chain_keys(ROOT, tokens, 16)
        ttft = seconds * (len(tokens) - cached)
        recorder.add(RequestRecord(number, keys, 16, len(tokens), 1, cached, ttft, ttft + 1, "s", "r", miss))
    recorder.close()
    return path


def causes(report: TrafficReport) -> list[str]:
    return [one.cause for one in report.causes]


def test_recorded_causes_are_ranked(tmp_path: Path) -> None:
    """The cause that costs most comes first; without it, as many tokens more are cached and TTFT is as much lower."""
    path = record(
        tmp_path / "trace.jsonl",
        (list(range(160)), 0, MissExplained("", "new_conversation", "", 0)),
        (list(range(1000, 1160)), 0, MissExplained("", "volatile_line", "messages[0].content line 2", 120)),
        (list(range(2000, 2160)), 0, MissExplained("", "volatile_line", "messages[0].content line 2", 120)),
        (list(range(3000, 3160)), 96, MissExplained("", "tools_reordered", "tools[0]", 60)),
    )
    report = traffic_report([path])
    assert causes(report) == ["volatile_line", "tools_reordered", "new_conversation"]
    first = report.causes[0]
    assert (first.requests, first.computed_tokens, first.saved_tokens) == (2, 320, 240)
    assert first.places == [("messages[0].content line 2", 2)]
    assert report.hit_rate == 96 / 640 and first.hit_rate == (96 + 240) / 640
    assert report.ttft is not None and first.ttft == pytest.approx(report.ttft - 0.001 * 240 / 4)


def test_a_recording_without_causes(tmp_path: Path) -> None:
    """Blocks that were recomputed after an earlier request are evictions, and the report says how large a cache is that
    keeps them."""
    one, other = list(range(320)), list(range(1000, 1320))
    path = record(tmp_path / "trace.jsonl", (one, 0, None), (other, 0, None), (one, 0, None), (other, 319, None))
    report = traffic_report([path])
    assert causes(report) == ["evicted", "new_text"]
    assert report.causes[0].saved_tokens == 319
    assert report.causes[0].capacity == 320, "the other prompt came in between"


def test_agent_sessions(tmp_path: Path) -> None:
    """In a trace with texts, the line that differs is found."""
    path = tmp_path / "agent.jsonl"
    turns = [f"Agent.\nIt is {hour}:00 o'clock.\n{RULES}" for hour in (10, 11, 12)]
    lines = [
        {"timestamp": i * 1_000_000, "input": text, "output": "yes", "session_id": "s"} for i, text in enumerate(turns)
    ]
    path.write_text("\n".join(map(json.dumps, lines)))
    report = traffic_report([path])
    assert causes(report) == ["volatile_line", "new_conversation"]
    assert report.causes[0].places == [("prompt line 2", 2)]
    assert report.causes[0].saved_tokens > 300


def test_command(tmp_path: Path) -> None:
    """The command prints a table, or the same as JSON; a file that is no recording is an error that names the line."""
    path = record(tmp_path / "trace.jsonl", (list(range(160)), 0, MissExplained("", "compacted", "messages[1]", 16)))
    shown = CliRunner().invoke(app, ["traffic", "report", str(path)])
    assert shown.exit_code == 0 and "compacted" in shown.output and "messages[1] (1)" in shown.output
    found = json.loads(CliRunner().invoke(app, ["traffic", "report", "--json", str(path)]).output)
    assert found["causes"][0]["saved_tokens"] == 16
    path.write_text("{}\n")
    with pytest.raises(ConfigError, match="line 1"):
        traffic_report([path])
    path.write_text("")
    with pytest.raises(ConfigError, match="no requests"):
        traffic_report([path])
