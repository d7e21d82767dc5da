"""`foreword serve` and other commands as processes, forked from one that has imported their modules: that takes most of the
time of a start."""

from __future__ import annotations

import atexit
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import config_constants
import http_client
from config_constants import split
from shared_server import until

import foreword
from foreword.referee.process import Forked, Forks

FLAGS = ["--port", "0", "--kv-memory", "8192 tokens", "--threads", "1"]
_ENVIRONMENT = {key: value for key, value in os.environ.items() if not key.startswith("FOREWORD_")}
_MODULES = (
    *("foreword.cli.main", "pydantic.types", "pydantic.type_adapter", "foreword.server.app", "foreword.server.process"),
    *("foreword.entrypoints.async_engine", "foreword.router.process", "uvloop", "httpx"),
    *("transformers.models.llama.modeling_llama", "transformers.models.auto.modeling_auto"),
    *("transformers.tokenization_utils_tokenizers", "transformers.generation"),
)
_forks = Forks(sys.executable, _ENVIRONMENT, _MODULES)
atexit.register(_forks.close)


class CommandProcess:
    """A command of `foreword` with what it writes to stderr.

    Args:
        forked: it shares the imports, and so the limits and the hash seed, of the process that it is forked from.
    """

    program: tuple[str, ...] = (str(Path(foreword.__file__).with_name("__main__.py")),)

    def __init__(self, *arguments: str, forked: bool = True) -> None:
        given, own = split(arguments)
        command = [*self.program, *own]
        if given:
            command = [config_constants.__file__, *given, *command]
        self.popen: Forked | subprocess.Popen[str]
        said, stderr = os.pipe()
        with os.fdopen(stderr, "w") as theirs, open(os.devnull, "w") as nothing:
            if forked:
                self.popen = _forks.start(command, stdout=nothing, stderr=theirs)
            else:
                self.popen = subprocess.Popen(
                    [sys.executable, "-P", *command], stderr=theirs, text=True, env=_ENVIRONMENT
                )
        self._said = said
        self.lines: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        with os.fdopen(self._said) as stream:
            self.lines.extend(iter(stream.readline, ""))

    @property
    def text(self) -> str:
        return "".join(self.lines)

    def ended(self) -> bool:
        return self.popen.poll() is not None

    def end(self, seconds: float = 120) -> int:
        status = self.popen.wait(seconds)
        self._reader.join(60)
        return status

    def kill(self) -> None:
        self.popen.kill()
        self.popen.wait()


class ServerProcess(CommandProcess):
    """`foreword serve`."""

    def __init__(self, *arguments: str, forked: bool = True) -> None:
        super().__init__("serve", *FLAGS, *arguments, forked=forked)

    def url(self) -> str:
        until(lambda: "listens on" in self.text or self.ended(), 120)
        found = re.search(r"http://\S+:\d+", self.text)
        assert found is not None, self.text
        return found[0]

    def wait_ready(self) -> str:
        url = self.url()
        until(lambda: self.ended() or http_client.get(f"{url}/ready").status_code == 200, 200)
        assert not self.ended(), self.text
        return url


class ControlledProcess(ServerProcess):
    """A server whose speed and loading a test controls (controlled_server.py)."""

    def __init__(self, *arguments: str, loading: bool = True) -> None:
        self._folder = Path(tempfile.mkdtemp())
        self.program = (str(Path(__file__).with_name("controlled_server.py")), str(self._folder))
        if not loading:
            (self._folder / "loading").touch()
        super().__init__(*arguments)

    def load(self) -> None:
        """The model may be loaded now."""
        (self._folder / "loading").unlink()

    def pace(self, seconds: float | None) -> None:
        """From now on every step takes at least so long; None: as long as it takes."""
        if seconds is None:
            (self._folder / "pace").unlink(missing_ok=True)
        else:
            (self._folder / "next").write_text(str(seconds))
            (self._folder / "next").replace(self._folder / "pace")

    def __del__(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)


@contextmanager
def running(*flags: str) -> Iterator[list[ControlledProcess]]:
    """Two servers with these flags, once they are ready; killed in the end."""
    started = [ControlledProcess(*flags) for _ in range(2)]
    for process in started:
        process.wait_ready()
    yield started
    kill(*started)


def kill(*processes: CommandProcess) -> None:
    """Kill what still runs."""
    for process in processes:
        process.kill()


@contextmanager
def slow(*processes: ControlledProcess, step: float = 0.05) -> Iterator[Callable[[], None]]:
    """Every step of these takes at least so long: answers of hundreds of tokens outlast whatever the test does meanwhile. Gives
    what ends that before the block does, for answers that are to be read to their end."""

    def fast() -> None:
        for process in processes:
            process.pace(None)

    for process in processes:
        process.pace(step)
    try:
        yield fast
    finally:
        fast()
