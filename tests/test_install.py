"""Packages that the documented `pip install` lines bring: no CUDA on a machine without a GPU, and only what is used."""

from __future__ import annotations

import functools
import json
import os
import re
import shutil
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest
from documented_page import steps

ROOT = Path(__file__).parents[1]
PAGES = ("README.md", "docs/quickstart.md", "docs/guides/engine.md")
CPU_LINE = "pip install torch --index-url https://download.pytorch.org/whl/cpu"
LARGEST = 400e6


def install_lines(page: str) -> list[str]:
    """The `pip install` lines in the blocks of a page."""
    blocks = "\n".join(step.text for step in steps((ROOT / page).read_text(encoding="utf-8")) if step.kind == "sh")
    return [line.partition("#")[0].strip() for line in blocks.splitlines() if line.startswith("pip install")]


def test_pages_show_the_build_for_cpus() -> None:
    """README, quickstart and the engine's guide name the index of CPU builds, right before the server's line."""
    for page in PAGES:
        lines = install_lines(page)
        assert lines.index("pip install '.[server]'") == lines.index(CPU_LINE) + 1, page


@pytest.mark.skipif(shutil.which("make") is None, reason="needs make")
def test_make_demo_installs_the_server_only(tmp_path: Path) -> None:
    """In a fresh clone `make demo` makes an environment with the extra `server`; the tests' packages are left out."""
    shown = subprocess.run(
        ["make", "--dry-run", "demo", f"VENV={tmp_path / 'venv'}"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    assert re.findall(r"install .*?--editable '?([^'\n]+)", shown) == [".[server]"]
    assert ".ci/torch" in shown and "--group" not in shown


@pytest.fixture(autouse=True)
def authorities(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here an index outside is asked: with the authorities that this machine trusts (conftest.py)."""
    monkeypatch.delenv("SSL_CERT_FILE")
    if "PIP_CERT" in os.environ:
        monkeypatch.setenv("SSL_CERT_FILE", os.environ["PIP_CERT"])


@functools.cache
def resolved(*requirements: str) -> tuple[dict[str, Any], ...]:
    """Packages that pip would install into an empty environment. Skips the test where pip reaches no index."""
    command = [sys.executable, "-m", "pip", "install", "--dry-run", "--quiet", "--ignore-installed", "--report", "-"]
    reaches = subprocess.run([*command, "--retries=0", "--no-deps", "xxhash"], cwd=ROOT, capture_output=True, text=True)
    if reaches.returncode:
        pytest.skip(f"pip reaches no package index: {reaches.stderr.strip().splitlines()[-1]}")
    done = subprocess.run([*command, *requirements], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return tuple(json.loads(done.stdout)["install"])


@functools.cache
def cpu_build() -> tuple[str, ...]:
    """Requirements for the CPU build of torch: a wheel that pip finds here, or PyTorch's index."""
    command = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--dry-run",
        "--quiet",
        "--ignore-installed",
        "--no-deps",
        "--retries=0",
    ]
    for more in ((), ("--extra-index-url", CPU_LINE.split()[-1])):
        wanted = ("torch==2.13.0+cpu", *more)
        if subprocess.run([*command, "--timeout=10", *wanted], capture_output=True).returncode == 0:
            return wanted
    pytest.skip("neither a local wheel nor PyTorch's index gives the CPU build of torch")


def size(package: dict[str, Any]) -> int:
    """Bytes to download. A checkout and what the index does not tell count as nothing."""
    url = package["download_info"]["url"]
    if url.startswith("file:"):
        path = Path(unquote(urlsplit(url).path))
        return path.stat().st_size if path.is_file() else 0
    with urllib.request.urlopen(urllib.request.Request(url, method="HEAD"), timeout=60) as answer:
        return int(answer.headers.get("content-length") or 0)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_cpu_lines_bring_no_cuda() -> None:
    """After the line for CPUs, `pip install '.[server]'` brings no NVIDIA package, and both less than 400 MB."""
    packages = resolved(*cpu_build(), ".[server]")
    names = {package["metadata"]["name"].lower() for package in packages}
    assert "torch" in names and "aiohttp" in names
    assert not [name for name in names if name.startswith(("nvidia", "cuda", "triton"))]
    assert sum(map(size, packages)) < LARGEST


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("extra", ["vllm", "router", "conform"])
def test_light_lines_bring_no_torch(extra: str) -> None:
    """The connector, the router and the referee need no torch of their own."""
    names = {package["metadata"]["name"].lower() for package in resolved(f".[{extra}]")}
    assert "foreword" in names
    assert not [name for name in names if name.startswith(("torch", "nvidia", "triton"))]
