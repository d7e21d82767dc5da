"""`foreword serve` as a process of its own."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading

import httpx
from doors import until

FLAGS = ["--port", "0", "--kv-memory", "8192 tokens", "--threads", "1"]


class Process:
    """`foreword serve` with what it wrote to stderr."""

    def __init__(self, *arguments: str) -> None:
        environ = {key: value for key, value in os.environ.items() if not key.startswith("FOREWORD_")}
        command = [sys.executable, "-m", "foreword", "serve", *FLAGS, *arguments]
        self.popen = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environ)
        self.lines: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.popen.stderr is not None
        with self.popen.stderr as stream:
            self.lines.extend(iter(stream.readline, ""))

    @property
    def text(self) -> str:
        return "".join(self.lines)

    def url(self) -> str:
        until(lambda: "listens on" in self.text or self.popen.poll() is not None, 60)
        found = re.search(r"http://\S+:\d+", self.text)
        assert found is not None, self.text
        return found[0]

    def wait_ready(self) -> str:
        url = self.url()
        until(lambda: self.popen.poll() is not None or httpx.get(f"{url}/ready", timeout=60).status_code == 200, 200)
        assert self.popen.poll() is None, self.text
        return url

    def end(self, seconds: float = 30) -> int:
        status = self.popen.wait(seconds)
        self._reader.join(5)
        return status
