"""Results of simulations in a file: one line each, as soon as it is there, so that a long comparison can be stopped."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple


class Run(NamedTuple):
    """One simulation by its arguments.

    Attributes:
        draw: number of the traffic.
        known: the router knows the costs of replicas from the start.
        limit: only so many requests; None for all.
    """

    case: str
    policy: str
    draw: int
    known: bool
    limit: int | None


class Results:
    """The newest result of each run.

    Args:
        out: the file that new results are appended to. A line that was cut when a command was stopped is ignored.
        read: other files, which are older.
        code: digest of the code that computes new results.
    """

    def __init__(self, out: Path | None, read: Iterable[Path], code: str) -> None:
        self._out, self._code = out, code
        self._found: dict[Run, dict[str, Any]] = {}
        self._done: set[Run] = set()
        for path in read:
            self._found |= _results(path)
        if out is not None and out.exists():
            own = _results(out)
            self._found |= own
            self._done.update(own)

    def has(self, run: Run, *, any_code: bool) -> bool:
        """Whether the file has the result of this run; with `any_code` also if that is of other code."""
        return run in self._done and (any_code or self._found[run]["code"] == self._code)

    def add(self, result: dict[str, Any]) -> None:
        """Keep a result, and append it to the file."""
        result = result | {"code": self._code}
        run = _run(result)
        self._found[run] = result
        if self._out is None:
            return
        with self._out.open("ab+") as file:
            size = file.tell()
            if size:
                file.seek(size - 1)
                if file.read(1) != b"\n":
                    file.write(b"\n")
            file.write(json.dumps(result).encode() + b"\n")
        self._done.add(run)

    def of(self, runs: Sequence[Run]) -> list[dict[str, Any]]:
        """The results of these runs, as far as there are any."""
        return [self._found[run] for run in runs if run in self._found]

    def all(self) -> list[dict[str, Any]]:
        return [*self._found.values()]


def _run(result: dict[str, Any]) -> Run:
    return Run(result["case"], result["policy"], result["draw"], result["known"], result["limit"])


def _results(path: Path) -> dict[Run, dict[str, Any]]:
    found: dict[Run, dict[str, Any]] = {}
    for number, line in enumerate(path.read_bytes().splitlines(), 1):
        try:
            result = json.loads(line)
        except ValueError:
            print(f"{path}:{number} was cut and is ignored", file=sys.stderr)
            continue
        found[_run(result)] = result
    return found
