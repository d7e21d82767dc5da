"""`foreword explain` in tests, and the table of what it said: planted mistakes are named, and healthy set-ups are not accused.

python tests/integrations/explained.py        all set-ups, those with a real vLLM too if FOREWORD_VLLM_PYTHON is set
"""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from typer.testing import CliRunner

from foreword.cli import main as cli

_FILES = ("serving/test_explain.py", "integrations/test_explain_vllm.py", "serving/test_explain_router_vllm.py")


@dataclass
class Explained:
    """Answer of the command about a set-up, and how long it took.

    Attributes:
        planted: a mistake was planted; None if no test has said so yet.
        right: the mistake was named, or the healthy set-up was not accused.
    """

    test: str
    links: list[dict[str, Any]]
    seconds: float
    planted: bool | None = None
    right: bool = field(default=False, init=False)

    @property
    def names(self) -> list[str]:
        return [link["name"] for link in self.links]

    @property
    def last(self) -> dict[str, Any]:
        return self.links[-1]

    @property
    def accused(self) -> list[dict[str, Any]]:
        return [link for link in self.links if link["ok"] is False]


SEEN: list[Explained] = []


def explain(url: str, *options: str) -> Explained:
    """Run the command. The exit status is 1 if and only if a link is broken, which is the last."""
    began = time.monotonic()
    done = CliRunner().invoke(cli.app, ["explain", url, "--json", *options], catch_exceptions=False)
    seconds = time.monotonic() - began
    test = os.environ["PYTEST_CURRENT_TEST"].rpartition(" ")[0].rpartition("::")[2]
    said = Explained(test, json.loads(done.stdout), seconds)
    SEEN.append(said)
    assert said.accused in ([], [said.last])
    assert done.exit_code == len(said.accused)
    return said


def broken(said: Explained, name: str, words: str) -> None:
    """The last link has this name, and its text and setting have the words."""
    text = f"{said.last['text']} -> {said.last['setting']}"
    said.planted, said.right = True, said.accused != [] and said.last["name"] == name and words in text
    assert said.right, said.links


def sound(said: Explained) -> None:
    """No link is called broken."""
    said.planted, said.right = False, not said.accused
    assert said.right, said.links


def _table() -> None:
    for planted, title in ((True, "planted"), (False, "healthy")):
        rows = [one for one in SEEN if one.planted is planted]
        print(f"\n{title}, what was said, seconds")
        for one in rows:
            text = f"{one.last['name']}: {one.last['text']}" if one.accused else ", ".join(dict.fromkeys(one.names))
            print(f"{'' if one.right else 'WRONG '}{one.test}: {text}: {one.seconds:.1f} s")
    for planted, verb in ((True, "named"), (False, "accused")):
        rows = [one for one in SEEN if one.planted is planted]
        count = sum(one.right is planted for one in rows)
        print(f"{count} of {len(rows)} {verb}, at most {max((one.seconds for one in rows), default=0):.1f} s each")


if __name__ == "__main__":
    import explained  # the tests' module, not this script's
    import pytest

    status = pytest.main([*(str(Path(__file__).parents[1] / file) for file in _FILES), "-q", *sys.argv[1:]])
    explained._table()
    sys.exit(status)
