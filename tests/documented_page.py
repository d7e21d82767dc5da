"""Runs the commands of a page of the documentation as a reader would: block after block, in one folder.

Blocks marked `sh` run in bash, blocks marked `python` in one interpreter; other languages are not commands. Comments of the
page, which its readers do not see, say the rest:

    <!-- not run: REASON -->      the next block is not run
    <!-- given: COMMAND -->       runs now: what the reader has, such as a server with traffic
    <!-- name: NAME -->           names the next block
    <!-- again: stop NAME ... --> what the text tells the reader to repeat; `stop` is Ctrl-C in the terminal of the server
    <!-- expect: REGEX -->        is found in what the block before, or the repetition, printed
    <!-- printed: exactly -->     the lines of the next block are in what was printed, in this order
    <!-- printed: such numbers -->  the same, but each number stands for any one with as many digits

A block whose last command is a server in the foreground is left running, as in a terminal of its own, until another block
starts a server on its port.

    python tests/documented_page.py README.md --section "The built-in model"      in this network; the tests have their own
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import re
import shlex
import signal
import subprocess
import sys
import time
import traceback
import urllib.error
import urllib.request
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
DIRECTIVES = ("given", "again", "expect", "printed")
LANGUAGES = {"sh", "python", "json", "yaml", "toml", "text", "nginx", "promql"}
BLOCK_SECONDS, START_SECONDS = 600, 900
_SERVERS = ("foreword serve", "foreword route", "vllm serve")
_DIRECTIVE = re.compile(r"^ *<!-- (not run|given|name|again|expect|printed): (.*?) -->$")


@dataclass
class Step:
    """A block of commands, or a directive that stands for itself (`DIRECTIVES`)."""

    kind: str
    text: str
    line: int
    section: str
    name: str = ""
    skipped: str = ""


def steps(text: str) -> list[Step]:
    """The blocks and directives of a page, in order."""
    found: list[Step] = []
    section, name, skipped, printed, lines = "", "", "", "", iter(enumerate(text.splitlines(), 1))
    for number, line in lines:
        if line.startswith("#"):
            section = line.strip("# ")
        elif directive := _DIRECTIVE.match(line):
            kind, said = directive.groups()
            if kind == "name":
                name = said
            elif kind == "not run":
                skipped = said
            elif kind == "printed":
                printed = said
            else:
                found.append(Step(kind, said, number, section))
        elif fence := re.match(r"^( *)(```+)(\w*)", line):
            indent, mark, language = fence.groups()
            body = []
            for _, inner in lines:
                if inner.strip() == mark:
                    break
                body.append(inner.removeprefix(indent))
            block = "\n".join(body) + "\n"
            if printed:
                found.append(Step("printed", block, number, section, printed))
            else:
                found.append(Step(language, block, number, section, name, skipped))
            name = skipped = printed = ""
    return found


def first_absent(shown: str, printed: str, *, exactly: bool) -> str | None:
    """The first line of a page's output that is not in what was printed behind the lines before it. Unless `exactly`, a number
    stands for any one with as many digits: 0 for none, 2,048 for thousands."""
    at = 0
    for line in filter(None, map(str.strip, shown.splitlines())):
        pattern = re.escape(line)
        if not exactly:
            pattern = re.sub(r"\d+", lambda number: rf"(?<!\d)\d{{{len(number[0])}}}(?!\d)", pattern)
        if (found := re.compile(pattern).search(printed, at)) is None:
            return line
        at = found.end()
    return None


def foreground_server(code: str) -> str | None:
    """The last command of a block if it is a server that keeps the terminal."""
    command = re.sub(r"\\\n", " ", code).strip()
    with contextlib.suppress(ValueError):
        # A server with a long argument in quotes over several lines.
        last = command[max(command.rfind(f"\n{one} ") for one in _SERVERS) + 1 :] if "\n" in command else command
        words = shlex.split(last, comments=True)
        plain = " ".join(words[:2])
        if plain in _SERVERS and "&" not in words:
            return last
    return None


def port_of(command: str) -> int:
    """The port on which a server's command listens."""
    found = re.search(r"--port[ =](\d+)", command)
    return int(found.group(1)) if found else 8000


class BlockFailed(Exception):
    """A block did not do what the page says."""


@dataclass
class Session:
    """The terminals of a reader."""

    folder: Path
    replaced: dict[str, str] = field(default_factory=dict)
    running: dict[int, tuple[subprocess.Popen[bytes], Path]] = field(default_factory=dict)
    last_port: int = 0
    printed: str = ""
    names: dict[str, Any] = field(default_factory=dict)

    def run_page(self, page: list[Step]) -> None:
        named = {step.name: step for step in page if step.name and step.kind != "printed"}
        for step in page:
            if step.kind == "again":
                self.printed = ""
                for word in step.text.split():
                    if word == "stop":
                        self.stop(self.last_port)
                    else:
                        before = self.printed
                        self.run(named[word])
                        self.printed = before + self.printed
            elif step.kind == "expect":
                if not re.search(step.text, self.printed):
                    raise BlockFailed(f"line {step.line}: {step.text!r} is not in:\n{self.printed[-4000:]}")
            elif step.kind == "printed":
                line = first_absent(step.text, self.printed, exactly=step.name == "exactly")
                if line is not None:
                    raise BlockFailed(f"line {step.line}: {line!r} is not in:\n{self.printed[-4000:]}")
            elif step.kind in ("sh", "python", "given") and not step.skipped:
                self.run(step)

    def run(self, step: Step) -> None:
        code = step.text
        for old, new in self.replaced.items():
            code = code.replace(old, new)
        print(f"line {step.line}: {code.strip().splitlines()[0][:100]}", flush=True)
        started = time.monotonic()
        if step.kind == "python":
            self._python(code, step.line)
        else:
            self._shell(code, step.line)
        print(f"    {time.monotonic() - started:.1f} s", flush=True)

    def stop(self, port: int) -> None:
        """Ctrl-C for the server on this port."""
        if port in self.running:
            process, _ = self.running.pop(port)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGINT)
            process.wait(120)

    def close(self) -> None:
        for port in list(self.running):
            self.stop(port)

    def _python(self, code: str, line: int) -> None:
        printed = io.StringIO()
        try:
            with contextlib.redirect_stdout(printed):
                exec(compile("\n" * line + code, "page", "exec"), self.names)
        except Exception as error:
            raise BlockFailed(f"line {line}: {traceback.format_exc()}") from error
        self.printed = printed.getvalue()

    def _shell(self, code: str, line: int) -> None:
        state, log = self.folder / ".state", self.folder / f".line{line}.log"
        state.touch()
        script = f"trap 'export -p > {state}' EXIT\nsource {state}\nset -eo pipefail\n{code}"
        server = foreground_server(code)
        if server is not None:
            self.stop(port_of(server))
        with log.open("wb") as output:
            process = subprocess.Popen(
                ["bash", "-c", script], cwd=self.folder, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
            )
        if server is None:
            try:
                status = process.wait(BLOCK_SECONDS)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                status = -1
            self.printed = log.read_text(encoding="utf-8", errors="replace")
            if status:
                logs = "".join(f"\n--- server on {port}:\n{_end(path)}" for port, (_, path) in self.running.items())
                raise BlockFailed(f"line {line}: status {status}\n{code}\n{self.printed[-6000:]}{logs}")
            return
        self.last_port = port_of(server)
        self.running[self.last_port] = (process, log)
        self._wait_ready(process, log, line)
        self.printed = log.read_text(encoding="utf-8", errors="replace")

    def _wait_ready(self, process: subprocess.Popen[bytes], log: Path, line: int) -> None:
        path = "health" if "vllm serve" in " ".join(map(str, process.args)) else "ready"  # type: ignore[arg-type]
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline:
            if process.poll() is not None:
                raise BlockFailed(f"line {line}: the server ended with status {process.returncode}:\n{_end(log)}")
            with (
                contextlib.suppress(OSError, urllib.error.URLError),
                urllib.request.urlopen(f"http://127.0.0.1:{self.last_port}/{path}", timeout=10) as answer,
            ):
                if answer.status == 200:
                    return
            time.sleep(0.2)
        raise BlockFailed(f"line {line}: the server was not ready after {START_SECONDS} s:\n{_end(log)}")


def _end(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace")[-6000:]


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("page", type=Path)
    parser.add_argument("--folder", type=Path, default=Path.cwd())
    parser.add_argument("--section", action="append", help="only these sections")
    parser.add_argument("--replace", action="append", default=[], metavar="TEXT=OTHER")
    parser.add_argument("--loopback", action="store_true", help="bring up the loopback interface of a new network")
    given = parser.parse_args()
    if given.loopback:
        subprocess.run([sys.executable, "-c", _LOOPBACK], check=True)
    page = steps(given.page.read_text(encoding="utf-8"))
    if given.section:
        page = [step for step in page if step.section in given.section]
    session = Session(given.folder, dict(one.split("=", 1) for one in given.replace))
    os.chdir(given.folder)
    try:
        session.run_page(page)
    except BlockFailed as error:
        print(f"FAILED {given.page}: {error}", flush=True)
        return 1
    finally:
        session.close()
    return 0


# SIOCGIFFLAGS, SIOCSIFFLAGS with IFF_UP: what `ip link set lo up` does, without iproute2.
_LOOPBACK = """
import fcntl, socket, struct
with socket.socket() as handle:
    request = bytearray(struct.pack("16sh22x", b"lo", 0))
    fcntl.ioctl(handle, 0x8913, request)
    name, flags = struct.unpack("16sh22x", request)
    fcntl.ioctl(handle, 0x8914, struct.pack("16sh22x", b"lo", flags | 1))
"""

if __name__ == "__main__":
    sys.exit(main())
