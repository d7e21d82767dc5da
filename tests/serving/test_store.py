"""Server processes over a shared store: blocks and named prefixes survive restarts and kills."""

from __future__ import annotations

import io
import json
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any
from unittest.mock import patch

import http_client
import pytest
from server_process import ServerProcess
from servers import RedisServer
from shared_server import until

from foreword.cli import main as cli

pytestmark = pytest.mark.timeout(300)

Start = Callable[..., ServerProcess]
TEXT = "def parse(text: str) -> list[str]:\n    return [part.strip() for part in text.split(',')]\n\n" * 12


def post(url: str, key: str | None = None, **body: Any) -> dict[str, Any]:
    headers = {"authorization": f"Bearer {key}"} if key else {}
    given = {"temperature": 0, "max_tokens": 8, "cache_report": True, **body}
    answer = http_client.post(f"{url}/v1/completions", json=given, headers=headers, timeout=120)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def cached(answer: dict[str, Any]) -> int:
    return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])


def metric(url: str, name: str, **labels: str) -> float:
    for line in http_client.get(f"{url}/metrics").text.splitlines():
        if line.startswith(name + "{") and all(f'{key}="{value}"' in line for key, value in labels.items()):
            return float(line.rsplit(" ", 1)[1])
    raise AssertionError(name)


def store(folder: Path) -> list[str]:
    flags = ["--store", f"disk://{folder}/kv?size=256MiB", "--dtype", "float32"]
    return [*flags, "--store-lookup-timeout", "60", "--store-load-timeout", "60", "--store-flush-seconds", "60"]


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs `foreword ARGUMENTS` in this process."""
    out, err = io.StringIO(), io.StringIO()
    with patch.object(sys, "argv", ["foreword", *arguments]), redirect_stdout(out), redirect_stderr(err):
        try:
            cli.main()
            status = 0
        except SystemExit as end:
            status = int(end.code or 0)
    return subprocess.CompletedProcess(arguments, status, out.getvalue(), err.getvalue())


@pytest.mark.slow
def test_killed_and_started_again(start: Start, tmp_path: Path) -> None:
    """A killed server is warm after a restart. A second server hits with its first request. Both know the named
    prefixes and give the same answers."""
    first = start(*store(tmp_path))
    url = first.wait_ready()
    answer = post(url, prompt=TEXT)
    made = http_client.post(f"{url}/v1/prefixes", json={"name": "rules", "content": TEXT}, timeout=120)
    assert made.status_code == 201
    named = post(url, prompt="x = parse(", prefix="rules")
    until(lambda: metric(url, "foreword:store_queued_blocks") == 0)
    first.popen.send_signal(signal.SIGKILL)
    first.end()

    second, third = start(*store(tmp_path)), start(*store(tmp_path))
    for process in (second, third):
        url = process.wait_ready()
        again = post(url, prompt=TEXT)
        assert again["choices"][0]["text"] == answer["choices"][0]["text"]
        assert cached(again) >= again["usage"]["prompt_tokens"] - 16
        assert again["cache_report"]["loaded_tokens"]["disk"] > 0
        assert metric(url, "vllm:prompt_tokens_cached_by_source_total", source="disk") > 0
        other = post(url, prompt="x = parse(", prefix="rules")
        assert other["choices"][0]["text"] == named["choices"][0]["text"]
        [listed] = http_client.get(f"{url}/v1/prefixes").json()["data"]
        assert (listed["name"], listed["version"]) == ("rules", 1)


@pytest.mark.slow
def test_a_store_that_is_gone_asks_for_a_retry(start: Start, tmp_path: Path) -> None:
    """While the store of a named prefix cannot be reached, removing it fails with 503 and Retry-After. Later it works."""
    redis = RedisServer(tmp_path)
    try:
        url = start("--store", redis.url, "--dtype", "float32").wait_ready()
        made = http_client.post(f"{url}/v1/prefixes", json={"name": "rules", "content": TEXT}, timeout=120)
        assert made.status_code == 201
        redis.kill()
        refused = http_client.request("DELETE", f"{url}/v1/prefixes/rules", timeout=120)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "store_unavailable")
        assert int(refused.headers["retry-after"]) >= 1
        redis.start()
        until(lambda: http_client.request("DELETE", f"{url}/v1/prefixes/rules", timeout=120).status_code in (200, 404))
        assert http_client.get(f"{url}/v1/prefixes").json()["data"] == []
    finally:
        redis.kill()


@pytest.mark.slow
def test_prefixes_are_shared_and_versioned(start: Start, tmp_path: Path) -> None:
    """A prefix that one server registers, replaces or removes is up to date soon on another server with the same
    store."""
    one, other = start(*store(tmp_path)), start(*store(tmp_path))
    here, there = one.wait_ready(), other.wait_ready()
    http_client.post(f"{here}/v1/prefixes", json={"name": "p", "content": TEXT}, timeout=120).raise_for_status()
    assert http_client.get(f"{there}/v1/prefixes/p").json()["content"] == TEXT
    clash = http_client.post(f"{there}/v1/prefixes", json={"name": "p", "content": "y"}, timeout=120)
    assert clash.status_code == 400 and "exists" in clash.json()["error"]["message"]
    http_client.put(f"{there}/v1/prefixes/p", json={"content": TEXT * 2}, timeout=120).raise_for_status()
    until(lambda: http_client.get(f"{here}/v1/prefixes/p").json().get("version") == 2)
    assert http_client.get(f"{here}/v1/prefixes/p").json()["content"] == TEXT * 2
    assert http_client.delete(f"{here}/v1/prefixes/p").status_code == 200
    found = run("inspect", f"disk://{tmp_path}/kv", "--json")
    assert json.loads(found.stdout)["prefixes"] == []


@pytest.mark.slow
def test_tenants_in_a_store(start: Start, tmp_path: Path) -> None:
    """A tenant's blocks survive a restart for that tenant only. `forget` removes them from disk and server, with a
    receipt, and no other tenant's."""
    flags = [*store(tmp_path), "--api-keys", "ann=k1", "--api-keys", "bob=k2"]
    refused = start(*flags)
    assert refused.end() == 2 and "--tenant-secret" in refused.text
    flags += ["--tenant-secret", "a long random text"]
    process = start(*flags)
    url = process.wait_ready()
    for key in ("k1", "k2"):
        assert cached(post(url, key, prompt=TEXT)) == 0
    process.popen.send_signal(signal.SIGTERM)
    assert process.end() == 0

    url_ = f"disk://{tmp_path}/kv"
    wrong = run("forget", url_, "--tenant", "ann", "--tenant-secret", "another long random text")
    assert json.loads(wrong.stdout)["blocks"] == 0
    receipt = json.loads(run("forget", url_, "--tenant", "ann", "--tenant-secret", "a long random text").stdout)
    assert receipt["blocks"] == receipt["removed"]["disk"] > 0 and receipt["left"] == 0

    process = start(*flags)
    url = process.wait_ready()
    assert cached(post(url, "k1", prompt=TEXT)) == 0
    assert cached(post(url, "k2", prompt=TEXT)) > 100
    assert cached(post(url, "k2", prompt=TEXT, cache_salt="session 1")) == 0
    until(lambda: cached(post(url, "k2", prompt=TEXT, cache_salt="session 1")) > 100)
    session = ["--server", url, "--api-key", "k2", "--cache-salt", "session 1"]
    assert json.loads(run("forget", *session).stdout)["blocks"] > 0
    assert (
        cached(post(url, "k2", prompt=TEXT)) > 100 and cached(post(url, "k2", prompt=TEXT, cache_salt="session 1")) == 0
    )
    until(lambda: cached(post(url, "k2", prompt=TEXT, cache_salt="session 2")) > 100)
    for _ in range(2):
        gone = http_client.delete(f"{url}/v1/cache", headers={"authorization": "Bearer k2"}).json()
        assert gone["left"] == 0
    assert cached(post(url, "k2", prompt=TEXT)) == cached(post(url, "k2", prompt=TEXT, cache_salt="session 2")) == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    "tier", ["memory://?size=24MiB", "disk://{}/kv?size=24MiB", "memory://?size=24MiB&tenant_quota=40%"]
)
def test_a_client_with_many_salts_is_one_tenant(start: Start, tmp_path: Path, tier: str) -> None:
    """Beside a tenant that sends every request under a new `cache_salt`, another tenant, whose prompts fit into its share of
    the tier and are long gone from the device, loses at most five points of what it finds alone. Bob gets no hit from it."""
    waits = ["--store-lookup-timeout", "60", "--store-load-timeout", "60"]
    flags = [
        "--store",
        tier.format(tmp_path),
        "--kv-memory",
        "3000 tokens",
        *waits,
        "--tenant-secret",
        "a long random text",
    ]
    url = start(*flags, "--api-keys", "ann=k1", "--api-keys", "bob=k2").wait_ready()

    def share(prompts: list[str]) -> float:
        answers = [post(url, "k1", prompt=one, max_tokens=1)["usage"] for one in prompts]
        found = sum(one["prompt_tokens_details"]["cached_tokens"] for one in answers)
        return found / sum(one["prompt_tokens"] for one in answers)

    mine = [f"# document {number}\n" + "import os\n" * 60 for number in range(8)]
    share(mine)
    alone = share(mine)
    assert alone > 0.9
    shares: list[float] = []

    def declined() -> float:
        """Prompts that were found, and computed because that was faster on this machine."""
        return metric(url, "foreword:store_declined_loads_total")

    before = declined()
    for number in range(80):
        flood = "# of bob\n" + "def f():\n" * 90
        assert cached(post(url, "k2", prompt=flood, max_tokens=1, cache_salt=f"salt {number}")) == 0
        if number % 10 == 9:
            shares.append(share([mine[number // 10]]))
    assert (sum(shares) + alone * (declined() - before)) / len(shares) >= alone - 0.05, shares


@pytest.mark.extended
def test_tools(start: Start, tmp_path: Path) -> None:
    """`inspect` lists the contents of a store, `verify` finds a damaged block, and `--repair` removes it."""
    process = start(*store(tmp_path))
    url = process.wait_ready()
    answer = post(url, prompt=TEXT)
    process.popen.send_signal(signal.SIGTERM)
    assert process.end() == 0
    where = f"disk://{tmp_path}/kv"
    [tier] = json.loads(run("inspect", where, "--json").stdout)["tiers"]
    [layout] = tier["layouts"]
    blocks = (answer["usage"]["total_tokens"] - 1) // layout["block_size"]
    assert (layout["model"], layout["blocks"], layout["chains"], layout["unreachable"]) == ("stdlib-nano", blocks, 1, 0)
    assert "stdlib-nano" in run("inspect", where).stdout

    assert run("verify", where).returncode == 0
    files = [path for path in (tmp_path / "kv").rglob("*") if path.is_file() and path.stat().st_size > 10_000]
    victim = next(path for path in files if path.read_bytes()[-192:-188] == b"FWKV")
    damaged = bytearray(victim.read_bytes())
    damaged[5000] ^= 1
    victim.write_bytes(damaged)
    found = run("verify", where, "--json")
    assert found.returncode == 1 and json.loads(found.stdout)["disk"]["bad"] == {"checksum": 1}
    assert run("verify", where, "--repair").returncode == 0
    assert json.loads(run("verify", where, "--json").stdout)["disk"] == {
        "sound": blocks - 1, "bad": {}, "gone": 0, "unread": 0, "foreign": 0, "bytes": found_bytes(where), "removed": 0
    }  # fmt: skip
    for arguments in (["inspect", "nonsense://x"], ["forget", where], ["forget", where, "--prefix", "none"]):
        failed = run(*arguments)
        assert failed.returncode == 2 and failed.stderr.startswith("foreword: ") and "Traceback" not in failed.stderr


def found_bytes(where: str) -> int:
    [tier] = json.loads(run("inspect", where, "--json").stdout)["tiers"]
    return int(tier["bytes"])


@pytest.mark.slow
def test_forget_a_prefix_and_a_model(start: Start, tmp_path: Path) -> None:
    """`forget --prefix` removes a named prefix and the blocks that continue it; `--model` removes the rest."""
    process = start(*store(tmp_path))
    url = process.wait_ready()
    other = "import os\nimport sys\n" * 40
    http_client.post(f"{url}/v1/prefixes", json={"name": "p", "content": TEXT}, timeout=120).raise_for_status()
    post(url, prompt="x = 1\n" * 20, prefix="p")
    post(url, prompt=other)
    process.popen.send_signal(signal.SIGTERM)
    assert process.end() == 0
    where = f"disk://{tmp_path}/kv"
    receipt = json.loads(run("forget", where, "--prefix", "p").stdout)
    assert receipt["blocks"] > 0 and receipt["left"] == 0 and len(receipt["records"]) == 1
    process = start(*store(tmp_path))
    url = process.wait_ready()
    assert cached(post(url, prompt=other)) > 100
    assert cached(post(url, prompt=TEXT)) == 0
    process.popen.send_signal(signal.SIGTERM)
    assert process.end() == 0
    receipt = json.loads(run("forget", where, "--model", "stdlib-nano").stdout)
    assert receipt["blocks"] > 0 and receipt["left"] == 0
    assert found_bytes(where) == 0
