"""Plants defects, one at a time, and runs the tests or claims that must catch each: `make mutants`.

    python tests/mutants/run.py [--only TEXT] [--first NUMBER] [--timeout SECONDS]

A mutant of `mutants.py`, in a copy of the sources, is caught if its tests fail, and its tests pass without it. A connector of
`connectors.py` or `crossed_connectors.py` is caught if its claim of `foreword conform` fails, and passes with Foreword's own.
Connectors need FOREWORD_VLLM_PYTHON, an interpreter with vLLM, and are left out without it. Exit status 1 if a mutant is not
caught.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from mutants import MUTANTS, Mutant

from foreword.referee.check_claims import Plan, attempt
from foreword.referee.models import KINDS
from foreword.referee.session import Evidence, RandomPrompts, Session, Target

ROOT = Path(__file__).resolve().parents[2]
_MODULES = ("connectors", "crossed_connectors")
VLLM = os.environ.get("FOREWORD_VLLM_PYTHON", "")


class Copy:
    """A copy of the sources, in which defects are planted and removed again."""

    def __init__(self, folder: Path, timeout: float) -> None:
        self._folder = folder
        self._timeout = timeout
        self._passes: dict[tuple[str, ...], bool] = {}
        # All that git knows, or would: a test may read any of it, and a part that is missing fails tests without a mutant.
        listed = subprocess.check_output(("git", "ls-files", "-z", "-co", "--exclude-standard"), cwd=ROOT, text=True)
        for name in filter(None, listed.split("\0")):
            if (ROOT / name).is_file():
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(ROOT / name, folder / name)

    def caught(self, mutant: Mutant) -> str:
        """How a mutant ended: "caught", or why not."""
        path = self._folder / mutant.file
        try:
            source = path.read_text(encoding="utf-8")
            planted = mutant.planted(source)
        except (OSError, ValueError) as error:
            return str(error)
        path.write_text(planted, encoding="utf-8")
        try:
            failed = not self._check(mutant)
        finally:
            path.write_text(source, encoding="utf-8")
        if not failed:
            return "NOT CAUGHT"
        if mutant.tests not in self._passes:
            self._passes[mutant.tests] = self._check(mutant)
        return "caught" if self._passes[mutant.tests] else "its tests fail without it too"

    def _check(self, mutant: Mutant) -> bool:
        """Whether the mutant's tests pass. A test that takes too long fails."""
        chosen = ("-m", "not slow", "-x", "-q", "-p", "no:cacheprovider", "--timeout", "120")
        command = [sys.executable, "-m", "pytest", *chosen, *mutant.tests]
        cache = str(self._folder / "cache")
        given = {**os.environ, "PYTHONPATH": str(self._folder), "XDG_CACHE_HOME": cache, "PYTHONDONTWRITEBYTECODE": "1"}
        # Processes that a failed test leaves must not outlive it, nor hold a pipe that is waited for.
        quiet: dict[str, Any] = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.DEVNULL)
        process = subprocess.Popen(command, cwd=self._folder, env=given, start_new_session=True, **quiet)
        try:
            status = process.wait(self._timeout)
        except subprocess.TimeoutExpired:
            return False
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        return status == 0


class Connectors:
    """Foreword's connector and broken ones under one vLLM, which computes the right answers for all of them."""

    def __init__(self, folder: Path) -> None:
        # Inside vLLM, the broken connectors are imported by name.
        os.environ["PYTHONPATH"] = os.pathsep.join(map(str, (ROOT, Path(__file__).parent)))
        os.environ["XDG_CACHE_HOME"] = str(folder / "cache")
        self._folder = folder
        self._claims = Plan(self._target("ForewordConnector"), 0, models=tuple(KINDS), long=True).claims()
        self._session = Session(self._target("ForewordConnector"), folder)
        self._passes: dict[str, Evidence] = {}

    def _target(self, name: str) -> Target:
        files = self._folder / "kv" / name
        module = "foreword.integrations.vllm" if name == "ForewordConnector" else module_of(name)
        extra = {"store": [f"disk://{files}?size=1GiB"], "lookup_timeout": 60, "load_timeout": 120}
        transfer = {"kv_connector": name, "kv_connector_module_path": module, "kv_role": "kv_both"}
        return Target({**transfer, "kv_connector_extra_config": extra}, VLLM, files)

    def check(self, name: str, claim: str) -> Evidence:
        """Runs a claim with a connector, and returns what it shows."""
        self._session.use(self._target(name))
        evidence, _ = attempt(self._session, self._claims[claim], RandomPrompts(f"1/{claim}"))
        self._session.end(connected=True, kill=True)
        shutil.rmtree(self._folder / "kv" / name, ignore_errors=True)
        return evidence

    def caught(self, name: str, claim: str) -> str:
        """How a mutant ended: "caught", or why not; with the evidence."""
        evidence = self.check(name, claim)
        if evidence.result != "FAIL":
            return f"NOT CAUGHT by {claim}: {evidence.result}: {evidence.figure}"
        if claim not in self._passes:
            self._passes[claim] = self.check("ForewordConnector", claim)
        right = self._passes[claim]
        return (
            f"caught by {claim}: {evidence.figure}"
            if right.result == "pass"
            else f"{claim} fails without it too: {right.figure}"
        )

    def close(self) -> None:
        self._session.close()


def connectors() -> dict[str, str]:
    """The broken connectors and the claim that must catch each. They are not imported, because they need vLLM."""
    return {name: claim for module in _MODULES for name, claim in _claims_of(module).items()}


def module_of(connector: str) -> str:
    """The module that has a broken connector."""
    return next(module for module in _MODULES if connector in _claims_of(module))


def _claims_of(module: str) -> dict[str, str]:
    tree = ast.parse((Path(__file__).parent / f"{module}.py").read_text(encoding="utf-8"))
    return {
        one.name: ast.literal_eval(item.value)
        for one in tree.body
        if isinstance(one, ast.ClassDef)
        for item in one.body
        if isinstance(item, ast.Assign) and ast.unparse(item.targets[0]) == "claim"
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", help="mutants whose name contains this text; may be repeated")
    parser.add_argument("--first", type=int, default=0, help="continue: how many mutants to pass over")
    parser.add_argument("--timeout", type=float, default=600, help="seconds for the tests of a mutant")
    arguments = parser.parse_args()
    texts = arguments.only or [""]
    planted = [one for one in MUTANTS if any(text in one.name for text in texts)]
    broken = [item for item in connectors().items() if any(text in item[0] for text in texts)] if VLLM else []
    results: list[str] = []

    def run(name: str, how: Callable[[], str]) -> None:
        began = time.monotonic()
        results.append(how())
        print(f"{name} ({time.monotonic() - began:.0f} s): {results[-1]}", flush=True)

    with tempfile.TemporaryDirectory(prefix="foreword-mutants-") as folder:
        copy = Copy(Path(folder), arguments.timeout)
        for mutant in planted[arguments.first :]:
            run(mutant.name, partial(copy.caught, mutant))
    with (
        tempfile.TemporaryDirectory(prefix="foreword-mutants-") as folder,
        contextlib.closing(Connectors(Path(folder))) as under,
    ):
        for name, claim in broken[max(arguments.first - len(planted), 0) :]:
            run(name, partial(under.caught, name, claim))
    caught = sum(one.startswith("caught") for one in results)
    print(f"\n{caught} of {len(results)} caught" + ("" if VLLM else f", {len(connectors())} left out without vLLM"))
    sys.exit(caught < len(results))


if __name__ == "__main__":
    main()
