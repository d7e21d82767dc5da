"""Plants defects, one at a time in a copy of the sources, and runs the tests that must catch each: `make mutants`.

    python tests/mutants/run.py [--only TEXT] [--first NUMBER] [--timeout SECONDS]

A mutant is caught if its tests fail, and its tests pass without it. Mutants of the connector need FOREWORD_VLLM_PYTHON, an
interpreter with vLLM, and are left out without it. Exit status 1 if a mutant is not caught.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from mutants import MUTANTS, Mutant

ROOT = Path(__file__).resolve().parents[2]
VLLM = os.environ.get("FOREWORD_VLLM_PYTHON", "")


class Copy:
    """A copy of the sources, in which defects are planted and removed again."""

    def __init__(self, folder: Path, timeout: float) -> None:
        self._folder = folder
        self._timeout = timeout
        self._passes: dict[tuple[str, ...], bool] = {}
        for name in ("foreword", "tests", "docs", "pyproject.toml"):
            source = ROOT / name
            if source.is_dir():
                shutil.copytree(source, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy(source, folder / name)

    def caught(self, mutant: Mutant) -> str:
        """How a mutant ended: "caught", or why not."""
        path = self._folder / mutant.file
        source = path.read_text(encoding="utf-8")
        if source.count(mutant.before) != 1:
            return f"does not apply: {source.count(mutant.before)} places"
        path.write_text(source.replace(mutant.before, mutant.after), encoding="utf-8")
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
        report = self._folder / "report.json"
        report.unlink(missing_ok=True)
        if mutant.claims:
            only = [part for claim in mutant.tests for part in ("--only", claim)]
            failures = ("--failures", str(self._folder / "failures"))
            command = [
                sys.executable,
                "-m",
                "foreword",
                "conform",
                "--python",
                VLLM,
                "--json",
                str(report),
                *only,
                *failures,
            ]
        else:
            chosen = ("-m", "not slow", "-x", "-q", "-p", "no:cacheprovider", "--timeout", "120")
            command = [sys.executable, "-m", "pytest", *chosen, *mutant.tests]
        cache = str(self._folder / "cache")
        given = {**os.environ, "PYTHONPATH": str(self._folder), "XDG_CACHE_HOME": cache, "PYTHONDONTWRITEBYTECODE": "1"}
        # What a failed test leaves running must not outlive it, nor hold a pipe that is waited for.
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
        if mutant.claims and report.exists():
            return all(one["result"] == "pass" for one in json.loads(report.read_text())["claims"])
        return status == 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="mutants whose name contains this text")
    parser.add_argument("--first", type=int, default=0, help="continue: how many mutants to pass over")
    parser.add_argument("--timeout", type=float, default=600, help="seconds for the tests of a mutant")
    arguments = parser.parse_args()
    chosen = [one for one in MUTANTS if arguments.only in one.name and (VLLM or not one.claims)][arguments.first :]
    results = []
    with tempfile.TemporaryDirectory(prefix="foreword-mutants-") as folder:
        copy = Copy(Path(folder), arguments.timeout)
        for mutant in chosen:
            began = time.monotonic()
            results.append(copy.caught(mutant))
            print(f"{results[-1]:<12} {mutant.name} ({time.monotonic() - began:.0f} s)", flush=True)
    caught = results.count("caught")
    left_out = len(MUTANTS) - len(chosen)
    print(f"\n{caught} of {len(results)} caught" + (f", {left_out} left out" if left_out else ""))
    sys.exit(caught < len(results))


if __name__ == "__main__":
    main()
