"""Tenants in the simulator: isolation, quotas, priorities, and the rule that divides a trace between tenants."""

from __future__ import annotations

import json
import sys
from array import array
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from foreword.cli import main as cli
from foreword.errors import ConfigError
from foreword.sim.costs import EngineCosts, FleetSpec
from foreword.sim.report import page, table, tenants
from foreword.sim.run import simulate
from foreword.sim.trace import TenantRule, TraceRequest, parse_tenant, read_trace, with_tenants

# Computing a token of a prompt takes 1 ms, a step that decodes 10 ms. A step has 512 tokens.
COSTS = EngineCosts(0.0, 1e-3, 0.0, 1e-2, 0.0)
ONE = FleetSpec(replicas=1, device_tokens=64 * 200, block_size=64, max_batch_tokens=512)


def request(arrival: float, first: int, tenant: str = "", priority: int = 0, output: int = 1) -> TraceRequest:
    """A request with a prompt of 512 tokens."""
    return TraceRequest(arrival, array("I", range(first, first + 8)), 64, 512, output, None, tenant, priority)


def test_tenants_share_no_blocks() -> None:
    """A prompt is a hit only for the tenant that sent it before."""
    trace = [request(10.0 * i, 0, tenant) for i, tenant in enumerate(("a", "b", "a", ""))]
    assert [one.cached_tokens for one in simulate(trace, ONE, costs=COSTS).outcomes] == [0, 0, 511, 0]


def test_urgent_requests_are_admitted_first() -> None:
    """Three requests wait for a step: they are served by priority, then by arrival, and the step is not interrupted."""
    trace = [request(i * 0.01, 8 * i, "" if priority else "x", priority) for i, priority in enumerate((0, 5, 0, -3, 5))]
    result = simulate(trace, ONE, costs=COSTS)
    order = sorted(range(5), key=lambda number: result.outcomes[number].first_token)
    assert order == [0, 3, 2, 1, 4]
    assert result.outcomes[3].first_token == pytest.approx(1.024)
    rows = [(one.tenant, one.priority, one.requests) for one in tenants(result)]
    assert rows == [("", -3, 1), ("", 5, 2), ("x", 0, 2)]


@pytest.mark.parametrize(
    ("quota", "rejected"),
    [
        ("a requests=2", [2, 3]),  # the bucket has filled again with one request after 30 s
        ("a tokens=600", [4]),  # charged at their ends, so the first four run, and overdraw
        ("* concurrent=1", [1, 2, 3]),
        ("c concurrent=1", []),
    ],
)
def test_requests_beyond_a_quota_are_rejected(quota: str, rejected: list[int]) -> None:
    """Rejected requests are counted, and do not take part in the other numbers. Requests of other tenants are served."""
    times = (0.0, 0.1, 0.2, 0.3, 31.0)
    trace = [request(at, 8 * i, "a", output=10) for i, at in enumerate(times)] + [request(40.0, 800, "b")]
    result = simulate(trace, replace(ONE, quotas=(quota,)), costs=COSTS)
    assert list(result.rejected) == [trace[i] for i in rejected]
    assert [one.request for one in result.outcomes] == [one for i, one in enumerate(trace) if i not in rejected]
    first, second = tenants(result)
    assert (first.requests, first.rejected, second.requests) == (5 - len(rejected), len(rejected), 1)
    assert first.p50 >= 0.512


def test_sessions_are_divided_by_shares() -> None:
    """All turns of a conversation belong to one tenant, and the shares are about those of the rules."""
    trace = [
        TraceRequest(
            float(i), array("I", [0, *range(1000 * (i % 400) + 1, 1000 * (i % 400) + 2 + i // 400)]), 64, 70, 1
        )
        for i in range(1200)
    ]
    found = with_tenants(trace, [TenantRule("big", 3, 5), TenantRule("small")])
    assert found == with_tenants(trace, [TenantRule("big", 3, 5), TenantRule("small")])
    assert all(found[i].tenant == found[i % 400].tenant for i in range(1200))
    assert 0.68 < Counter(one.tenant for one in found)["big"] / 1200 < 0.82
    assert {(one.tenant, one.priority) for one in found} == {("big", 5), ("small", 0)}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "write NAME"),
        ("share=2", "write NAME"),
        ("a share=0", "more than 0"),
        ("a share=much", "takes a number"),
        ("a priority=1.5", "takes a number"),
        ("a weigth=2", "not a key"),
    ],
)
def test_wrong_tenants_are_refused(text: str, message: str) -> None:
    """The message says what is wrong."""
    with pytest.raises(ConfigError, match=message):
        parse_tenant(text)


def test_contradictions_are_refused() -> None:
    """Two tenants of one name, and a rule for a trace that names its tenants."""
    with pytest.raises(ConfigError, match="one name"):
        with_tenants([request(0.0, 0)], [TenantRule("a"), TenantRule("a")])
    with pytest.raises(ConfigError, match="names the tenants"):
        with_tenants([request(0.0, 0, "a")], [TenantRule("b")])


def test_the_command_reports_tenants(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """A trace names tenants and priorities; `--quota` limits one of them. Table, page and JSON have a line for each."""
    fields = {"input_length": 512, "output_length": 1}
    lines = [
        {"timestamp": 100 * i, "hash_ids": [i], "tenant": "ab"[i % 2], "priority": i % 2} | fields for i in range(20)
    ]
    path, out = tmp_path / "trace.jsonl", tmp_path / "page.html"
    path.write_text("\n".join(map(json.dumps, lines)))

    def run(*arguments: str) -> str:
        monkeypatch.setattr(sys, "argv", ["foreword", "simulate", str(path), "--quota", "b requests=4", *arguments])
        with pytest.raises(SystemExit) as caught:
            cli.main()
        assert not caught.value.code
        return capsys.readouterr().out

    [one] = json.loads(run("--json"))["simulations"]
    assert [(row["tenant"], row["priority"], row["requests"], row["rejected"]) for row in one["tenants"]] == [
        ("a", 0, 10, 0),
        ("b", 1, 4, 6),
    ]
    assert "| b |" in " ".join(run("--out", str(out)).split()) and "<td>b</td>" in out.read_text()
    lines[0]["priority"] = "high"
    path.write_text("\n".join(map(json.dumps, lines)))
    with pytest.raises(ConfigError, match="priority a whole number"):
        read_trace(path)


def test_without_tenants_the_report_does_not_change() -> None:
    """No table of tenants for a trace without them."""
    result = simulate([request(0.0, 0)], ONE, costs=COSTS)
    assert not tenants(result) and "tenant" not in table([result]) + page([result]).split("</p>")[1]
