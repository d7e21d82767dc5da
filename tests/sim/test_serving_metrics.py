"""Costs fitted to the metrics of running servers."""

from __future__ import annotations

import itertools
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from metered_server import MeteredServer
from typer.testing import CliRunner

from foreword.cli.main import app
from foreword.errors import ConfigError
from foreword.sim.costs import EngineCosts
from foreword.sim.serving_metrics import Snapshot, calibrate, parse

COSTS = EngineCosts(0.008, 6e-5, 2e-9, 2e-4, 0.0)
BUDGET = 2048


def snapshots(server: MeteredServer, seconds: float = 90) -> list[Snapshot]:
    return [parse(text, at)[""] for at, text in server.pages(seconds)]


def step(costs: EngineCosts, tokens: int, decoding: int) -> float:
    return costs.base + costs.prefill * tokens + costs.attention * tokens**2 / 2 + costs.decode_each * decoding


@pytest.mark.parametrize(
    ("rate", "own_steps"),
    [
        (2, False),
        (0.5, True),
        *(pytest.param(*one, marks=pytest.mark.extended) for one in [(0.5, False), (5, False), (5, True)]),
    ],
    ids=str,
)
def test_known_costs_are_recovered(rate: float, own_steps: bool) -> None:
    """From an idle to a busy server, of vLLM's metrics and of Foreword's, the times of the steps of the traffic are right
    within 10 %, and so are the fixed cost and, within 15 %, the cost of a token. What cannot be seen is named."""
    server = MeteredServer(COSTS, rate, prompts=(100, 6000), outputs=(32, 300), budget=BUDGET, own_steps=own_steps)
    profile = calibrate({"one": snapshots(server)}, BUDGET)
    found = profile.costs
    busy = 1 if rate < 1 else 8
    for tokens, decoding in ((300, 0), (2000, 0), (1000, busy), (0, 1), (0, busy)):
        assert step(found, tokens, decoding) == pytest.approx(step(COSTS, tokens, decoding), rel=0.1)
    assert found.base == pytest.approx(COSTS.base, rel=0.1)
    assert found.prefill == pytest.approx(COSTS.prefill, rel=0.15)
    zero = {name for name in ("base", "attention", "decode_each", "decode_context") if not getattr(found, name)}
    assert set(profile.about["terms"]) == zero


def test_foreword_servers_show_what_the_context_costs() -> None:
    """Hits with a long context and computed prompts in one period: the costs of attention are told from those of tokens."""
    costs = EngineCosts(6e-4, 4e-5, 4e-8, 1e-4, 3e-7)
    server = MeteredServer(costs, 3, (20, 3000), (8, 24), budget=512, own_steps=True, cached=(0, 3000))
    found = calibrate({"one": snapshots(server, 60)}, 512).costs
    assert found.prefill == pytest.approx(costs.prefill, rel=0.1)
    assert found.attention == pytest.approx(costs.attention, rel=0.1)
    assert found.decode_context == pytest.approx(costs.decode_context, rel=0.2)


def test_several_servers_are_one_fit() -> None:
    """Servers of one kind under different loads give one file of costs."""
    servers = [
        MeteredServer(COSTS, rate, (100, 3000), budget=BUDGET, seed=number) for number, rate in enumerate((1, 3))
    ]
    profile = calibrate({str(number): snapshots(one, 60) for number, one in enumerate(servers)}, BUDGET)
    assert step(profile.costs, 1000, 2) == pytest.approx(step(COSTS, 1000, 2), rel=0.1)


def test_what_cannot_be_fitted_is_an_error() -> None:
    """No traffic, counters that went back, a short period, and prompts of one length beside nothing else."""
    idle = snapshots(MeteredServer(COSTS, 1e-6, (100, 200)), 5)
    with pytest.raises(ConfigError, match="had no traffic"):
        calibrate({"one": idle}, BUDGET)
    found = snapshots(MeteredServer(COSTS, 2, (100, 3000)), 20)
    later = [Snapshot(one.at + 30, one.values) for one in found]
    with pytest.raises(ConfigError, match="restarted"):
        calibrate({"one": found + later}, BUDGET)
    with pytest.raises(ConfigError, match="--for"):
        calibrate({"one": found[:8]}, BUDGET)


def test_equal_prompts_are_not_split() -> None:
    """Prompts of one length and outputs of one token show what a prompt takes, not which part of it is fixed."""
    server = MeteredServer(COSTS, 2, (1000, 1000), outputs=(1, 1), budget=BUDGET)
    profile = calibrate({"one": snapshots(server)}, BUDGET)
    assert step(profile.costs, 1000, 0) == pytest.approx(step(COSTS, 1000, 0), rel=0.1)
    assert "part of the cost of a token" in profile.about["terms"]["base"]


@contextmanager
def served(pages: Iterator[tuple[int, str]]) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status, text = next(pages)
            self.send_response(status)
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.mark.parametrize(
    ("status", "text", "expected"),
    [
        (200, "up 1\n", "not the metrics page"),
        (404, "", "status 404"),
        (200, "x" * (1 << 24) + "y", "more than 16 MiB"),
    ],
)
def test_other_servers_are_refused(status: int, text: str, expected: str, tmp_path: Path) -> None:
    """A page of other metrics, a missing page and a huge page are errors that name the address; no file is written."""
    with served(itertools.repeat((status, text))) as url:
        command = ["calibrate", "--metrics", url, "--for", "1s", "--out", str(tmp_path / "costs.json")]
        result = CliRunner().invoke(app, command)
    assert result.exit_code != 0 and not list(tmp_path.iterdir())
    assert isinstance(result.exception, ConfigError) and url in str(result.exception)
    assert expected in str(result.exception)


def test_the_command_polls_a_server(tmp_path: Path) -> None:
    """A silent server is an error; a period that is no time, and a model beside the URL, as well. One failed poll is not."""
    [(_, page)] = itertools.islice(MeteredServer(COSTS, 1, (100, 200)).pages(1), 1)
    with served(itertools.chain([(200, page), (503, "")], itertools.repeat((200, page)))) as url:
        for more, expected in (
            (["--for", "0.2s"], "had no traffic"),
            (["--for", "soon"], "--for needs a time"),
            (["some-model"], "MODEL and --store"),
        ):
            command = ["calibrate", "--metrics", url, "--out", str(tmp_path / "costs.json"), *more]
            result = CliRunner().invoke(app, command)
            assert result.exit_code != 0 and re.search(expected, str(result.exception))
