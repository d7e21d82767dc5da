"""Runs the contract of engines under each engine that is here, and writes what came of it to docs/engines.json, from which
docs/generate.py makes README's table:

    python tests/integrations/engine_suites.py                  all engines whose interpreter is there
    python tests/integrations/engine_suites.py vLLM llama.cpp   these

A file with an engine's subclass of the contract says so itself, in a literal `ENGINES`, which is read without importing the
file: that may need the engine. An engine's interpreter is this one, or what FOREWORD_VLLM_PYTHON, FOREWORD_SGLANG_PYTHON and
FOREWORD_LLAMA_PYTHON name. It needs no pytest: this one's is lent to it. What is not run keeps its row.
"""

from __future__ import annotations

import argparse
import ast
import datetime
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple
from xml.etree import ElementTree

from foreword.conformance.engine_contract import EngineContract

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
TABLE = ROOT / "docs" / "engines.json"
CONTRACT = sorted(name for name in vars(EngineContract) if name.startswith("test_"))
_LENT = (
    "pytest", "_pytest", "pluggy", "iniconfig", "packaging", "py", "pygments", "hypothesis", "_hypothesis_globals",
    "_hypothesis_ftz_detector", "sortedcontainers",
)  # fmt: skip


class Suite(NamedTuple):
    """Where an engine's subclass of the contract is, and what it runs in.

    Attributes:
        file: with the name of the class behind `::` where the file has other tests, too.
        guide: its page in docs/guides.
        how: what Foreword is under this engine.
        variable: names the engine's interpreter; "" for this one.
        package: its distribution, whose version is shown; "" for none.
        inside: the tests run in the engine's interpreter, and not in this one.
    """

    file: str
    guide: str
    how: str
    variable: str = ""
    package: str = ""
    inside: bool = True

    @property
    def python(self) -> str:
        return os.environ.get(self.variable, "") if self.variable else sys.executable


def _known() -> dict[str, Any]:
    """The rows of the table, by engine."""
    rows = json.loads(TABLE.read_text(encoding="utf-8"))["rows"] if TABLE.exists() else ()
    return {row["engine"]: row for row in rows}


def _suites() -> dict[str, Suite]:
    """Suites that files of tests declare, in the order of the table; new engines come behind the others, and before those
    without a distribution."""
    found: dict[str, Suite] = {}
    for path in sorted(HERE.glob("*.py")):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.Assign) and [ast.unparse(one) for one in node.targets] == ["ENGINES"]:
                for engine, row in ast.literal_eval(node.value).items():
                    place = "::".join(filter(None, (path.name, row.pop("tests", ""))))
                    assert engine not in found, f"two files declare {engine}"
                    found[engine] = Suite(place, **row)
    order = list(_known())
    return dict(
        sorted(
            found.items(), key=lambda one: (not one[1].package, order.index(one[0]) if one[0] in order else len(order))
        )
    )


SUITES = _suites()


class Ran(NamedTuple):
    """Results of a suite: its engine's version, the outcome of each test of the contract, and what pytest said."""

    version: str
    tests: dict[str, str]
    said: str


def run(engine: str) -> Ran:
    """Run an engine's suite in its interpreter."""
    suite = SUITES[engine]
    with tempfile.TemporaryDirectory() as folder:
        report, lent = Path(folder, "report.xml"), Path(folder, "lent")
        lent.mkdir()
        foreign = bool(suite.variable) and suite.inside
        for name in _LENT if foreign else ():
            found = importlib.util.find_spec(name)
            assert found is not None and found.origin is not None, name
            path = Path(found.origin)
            path = path.parent if path.name == "__init__.py" else path
            (lent / path.name).symlink_to(path)
        paths = map(str, [ROOT, HERE, ROOT / "tests", lent])
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
        options = ["-q", "-c", os.devnull, "--noconftest", "-p", "no:cacheprovider", f"--junitxml={report}"]
        command = [
            suite.python if foreign else sys.executable,
            "-m",
            "pytest",
            *options,
            f"--rootdir={ROOT}",
            str(HERE / suite.file),
        ]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=ROOT, check=False)
        cases = ElementTree.parse(report).iter("testcase") if report.exists() else ()
        tests: dict[str, str] = {}
        for case in cases:
            name = case.attrib["name"].partition("[")[0]
            skipped = case.find("skipped")
            failed = case.find("failure") is not None or case.find("error") is not None
            outcome = "failed" if failed else "passed" if skipped is None else skipped.attrib["message"]
            if name in CONTRACT and tests.get(name, "passed") == "passed":
                tests[name] = outcome
        return Ran(_version(suite), dict(sorted(tests.items())), done.stdout[-8000:] + done.stderr[-2000:])


def _version(suite: Suite) -> str:
    if not suite.package:
        return ""
    code = f"from importlib.metadata import version; print(version({suite.package!r}).partition('+')[0])"
    return subprocess.run([suite.python, "-c", code], capture_output=True, text=True, check=True).stdout.strip()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("engines", nargs="*", metavar="ENGINE", help=", ".join(SUITES))
    given = parser.parse_args()
    fresh: dict[str, Any] = {}
    failed = False
    for engine in given.engines or [name for name, suite in SUITES.items() if suite.python]:
        ran, suite = run(engine), SUITES[engine]
        bad = [name for name in CONTRACT if ran.tests.get(name, "failed") == "failed"]
        print(f"{engine} {ran.version}: {len(ran.tests)} of {len(CONTRACT)} ran, {len(bad)} failed", flush=True)
        if bad:
            failed = True
            print(ran.said, flush=True)
            continue
        date = datetime.datetime.now(datetime.UTC).date().isoformat()
        about = {"engine": engine, "version": ran.version, "date": date, "how": suite.how, "guide": suite.guide}
        fresh[engine] = {**about, "tests": ran.tests}
    rows = _known() | fresh
    table = {
        "command": "python tests/integrations/engine_suites.py",
        "rows": [rows[name] for name in SUITES if name in rows],
    }
    TABLE.write_text(json.dumps(table, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
