"""Makes the pictures of the dashboard: a real server under requests for a while, looked at by a headless Chromium.

    python docs/pictures/dashboard.py [--seconds 120]

Needs Chromium with its driver (Debian: `apt-get install chromium chromium-driver`) and the development dependencies.
"""

from __future__ import annotations

import argparse
import random
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
from selenium import webdriver

HERE = Path(__file__).parent
TOPICS = (
    "parse a date",
    "read a table",
    "open a socket",
    "sort the rows",
    "count the words",
    "draw a line",
    "walk a tree",
)
GUIDE = "# Style guide\n" + "".join(
    f"def rule_{number}(line: str) -> bool:\n    return len(line) < {80 + number}\n\n" for number in range(9)
)
FLAGS = ["--kv-memory", "6144 tokens", "--threads", "1", "--max-model-len", "2048"]


@contextmanager
def program(*arguments: str) -> Iterator[str]:
    """A `foreword` command that listens; its URL."""
    command = [sys.executable, "-m", "foreword", *arguments, "--port", "0"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    url = ""
    for line in process.stderr:
        found = re.search(r"http://\S+:\d+", line)
        if found and ("listens" in line or "routes" in line):
            url = found[0]
            break
    threading.Thread(target=process.stderr.read, daemon=True).start()
    try:
        deadline = time.monotonic() + 120
        while httpx.get(f"{url}/ready").status_code != 200:
            if time.monotonic() > deadline:
                raise SystemExit(f"{url} does not become ready")
            time.sleep(0.2)
        yield url
    finally:
        process.terminate()
        process.wait(30)


def code(draw: random.Random, functions: int) -> str:
    """A text of about 20 tokens per function."""
    names = [f"step_{draw.randrange(10**6)}" for _ in range(functions)]
    return "".join(f"def {name}(value, key={draw.randrange(99)}):\n    return value\n" for name in names)


def talk(url: str, until: float, seed: int) -> None:
    """Conversations that grow, some requests behind the named prefix, and new texts."""
    draw = random.Random(seed)
    texts = {topic: f"# How to {topic}\n{code(draw, 30)}" for topic in TOPICS}
    with httpx.Client(base_url=url, timeout=120) as client:
        while time.time() < until:
            topic = draw.choice(TOPICS[: 3 + int(time.time() / 20) % 5])
            texts[topic] += code(draw, 4)
            if len(texts[topic]) > 3600:
                texts[topic] = texts[topic][:2000]
            body: dict[str, Any] = {
                "prompt": texts[topic],
                "max_tokens": draw.randrange(8, 40),
                "user": f"{topic} {seed}",
            }
            kind = draw.random()
            if kind < 0.2:
                body = {"prompt": f"def {topic.replace(' ', '_')}(", "max_tokens": 24, "prefix": "style-guide"}
            elif kind < 0.35:
                body = {"prompt": code(draw, 40), "max_tokens": 8}
            with client.stream("POST", "/v1/completions", json={**body, "stream": True}) as answer:
                answer.raise_for_status()
                answer.read()
            time.sleep(2 * draw.random())


def look(url: str, name: str) -> None:
    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium") or ""
    for flag in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars"):
        options.add_argument(flag)
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(shutil.which("chromedriver")))
    try:
        driver.get(f"{url}/ui")
        for shot, width, height, scheme, wait in (
            (name, 1280, 1180, "light", 20),
            (f"{name}-dark", 1280, 1180, "dark", 2),
            (f"{name}-phone", 390, 1180, "light", 2),
        ):
            driver.execute_cdp_cmd(
                "Emulation.setDeviceMetricsOverride",
                {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600},
            )
            features = [{"name": "prefers-color-scheme", "value": scheme}]
            driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
            time.sleep(wait)
            driver.save_screenshot(str(HERE / f"{shot}.png"))
    finally:
        driver.quit()


def under_load(url: str, seconds: float, name: str) -> None:
    """Talk to `url` and take the pictures near the end."""
    until = time.time() + seconds
    talkers = [threading.Thread(target=talk, args=(url, until, seed)) for seed in range(2)]
    for talker in talkers:
        talker.start()
    time.sleep(max(0.0, seconds - 30))
    look(url, name)
    for talker in talkers:
        talker.join()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seconds", type=float, default=120)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        stores = [f"disk://{folder}/{number}?size=256MiB" for number in range(2)]
        serve = ["serve", *FLAGS, "--store", "memory://?size=24MiB", "--store"]
        with program(*serve, stores[0]) as one:
            name_guide(one)
            under_load(one, given.seconds, "dashboard")
            with program(*serve, stores[1]) as other:
                name_guide(other)
                with program("route", "--replica", one, "--replica", other) as router:
                    under_load(router, given.seconds, "dashboard-router")


def name_guide(url: str) -> None:
    body = {"content": GUIDE}
    httpx.put(f"{url}/v1/prefixes/style-guide", json=body, timeout=60).raise_for_status()


if __name__ == "__main__":
    main()
