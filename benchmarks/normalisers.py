"""TTFT of an agent's session whose system prompt has a line that changes with every turn, through a router, with and without
`--drop-lines`.

    python benchmarks/normalisers.py [--turns 8] [--tokens 4000]
"""

from __future__ import annotations

import argparse
import json
import random
import re
import statistics
import subprocess
import sys
import time
from typing import IO

import httpx
from timing import machine, set_up

LISTENS = re.compile(r"(?:listens|routes) on (http://\S+:\d+)")


class Process:
    """`foreword` with these arguments. Its log is read up to the address."""

    def __init__(self, *arguments: str) -> None:
        command = [sys.executable, "-m", "foreword", *arguments, "--port", "0"]
        self.popen = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        assert self.popen.stderr is not None
        self.url = self._address(self.popen.stderr)
        self._discard = subprocess.Popen(["cat"], stdin=self.popen.stderr, stdout=subprocess.DEVNULL)

    @staticmethod
    def _address(log: IO[str]) -> str:
        found = next((match for line in log if (match := LISTENS.search(line))), None)
        if found is None:
            raise SystemExit("a process did not start")
        return found[1]

    def wait(self) -> None:
        while True:
            try:
                if httpx.get(f"{self.url}/ready", timeout=10).status_code == 200:
                    return
            except httpx.TransportError:
                pass
            time.sleep(0.1)

    def end(self) -> None:
        self.popen.terminate()
        self.popen.wait()
        self._discard.wait()


def session(url: str, name: str, turns: int, words: int) -> list[float]:
    """TTFT of each turn after the first, of a session with its own prompt."""
    draw = random.Random(name)
    rules = " ".join(f"{draw.choice(['read', 'write', 'list', 'check'])} {draw.randrange(1000)}" for _ in range(words))
    messages = [{"role": "system", "content": ""}]
    found = []
    with httpx.Client(base_url=url, timeout=600) as client:
        for turn in range(turns):
            messages[0]["content"] = f"Now it is {turn:02}:{turn * 7 % 60:02}.\n{name}\n{rules}"
            messages.append({"role": "user", "content": f"Step {turn}: go on."})
            began = time.perf_counter()
            text, first = "", None
            body = {"messages": messages, "max_tokens": 8, "temperature": 0, "stream": True}
            with client.stream("POST", "/v1/chat/completions", json=body) as response:
                for line in response.iter_lines():
                    if not line.startswith("data: {"):
                        continue
                    delta = json.loads(line[6:])["choices"][:1]
                    text += (delta[0]["delta"].get("content") or "") if delta else ""
                    first = first or (time.perf_counter() - began if text else None)
            messages.append({"role": "assistant", "content": text})
            found.append(first or time.perf_counter() - began)
    return found[1:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=4000, help="about this many tokens of system prompt")
    options = parser.parse_args()
    facts = {"model": "embedded", "turns": str(options.turns), "system prompt": f"about {options.tokens} tokens"}
    print(set_up(machine() | facts))
    server = Process("serve", "--kv-memory", "65536 tokens")
    server.wait()
    medians = []
    for name, flags in (("without", ()), ("with --drop-lines", ("--drop-lines", "^Now it is "))):
        router = Process("route", "--replica", server.url, *flags)
        router.wait()
        times = session(router.url, f"agent {name}", options.turns, options.tokens // 3)
        router.end()
        medians.append(statistics.median(times))
        shown = " ".join(f"{seconds * 1e3:.0f}" for seconds in times)
        print(f"{name:<18} median TTFT {medians[-1] * 1e3:7.1f} ms   turns: {shown}")
    server.end()
    print(f"{medians[0] / medians[1]:.1f} times lower")


if __name__ == "__main__":
    main()
