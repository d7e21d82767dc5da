"""The claims over several environments: with each, one after the other; then a table with a column for each."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from foreword import __version__
from foreword.compiled_code import processor_field
from foreword.errors import ConfigError
from foreword.referee.check_claims import Plan, Result, conform
from foreword.referee.session import environment_note

BEGIN = "<!-- Written by foreword conform --matrix: begin -->"
END = "<!-- Written by foreword conform --matrix: end -->"
_WRONG = re.compile(r"(\d+ of \d+) answers wrong")


@dataclass(frozen=True)
class Environment:
    """An interpreter with vLLM.

    Attributes:
        name: heads its column.
        versions: of what it has.
    """

    name: str
    python: str
    versions: str


def environments(given: Sequence[str]) -> list[Environment]:
    """Read `PYTHON` or `NAME=PYTHON`; without a name it is vLLM's version. Raises ConfigError before anything runs."""
    found: list[Environment] = []
    for text in given:
        name, mark, python = text.partition("=")
        if not mark or "/" in name:
            name, python = "", text
        versions = environment_note(python)
        version = re.search(r"\bvllm ([^,]+)", versions)
        if version is None:
            raise ConfigError(f"--matrix: {python} has no vLLM")
        found.append(Environment(name or f"vLLM {version[1].partition('+')[0]}", python, versions))
    names = [one.name for one in found]
    if len(set(names)) < len(names):
        raise ConfigError(
            f"--matrix: give environments with the same vLLM names, NAME=PYTHON; found {', '.join(names)}"
        )
    return found


def conform_matrix(
    plan: Plan,
    given: Sequence[Environment],
    target: Callable[[Environment], Mapping[str, Any]],
    say: Callable[[str], None],
) -> dict[str, list[Result]]:
    """Check all claims with each environment. `target`: what of `Target` is the environment's own.

    Each environment has a report of its own, next to the plan's: `results-vLLM-0.32.0.json`. Raises ConfigError, Failed.
    """
    found = {}
    for number, one in enumerate(given, 1):
        say(f"== {one.name} ({number} of {len(given)}): {one.versions}")
        plain = re.sub(r"[^\w.]+", "-", one.name)
        report = plan.report and plan.report.with_name(f"{plan.report.stem}-{plain}{plan.report.suffix}")
        own = replace(plan.target, python=one.python, **target(one))
        found[one.name] = conform(replace(plan, target=own, report=report, failures=plan.failures / plain), say)
    return found


def matrix_table(results: Mapping[str, Sequence[Result]]) -> str:
    """A row for each claim, a column for each environment, as Markdown."""
    claims = {one.claim: one.text for some in results.values() for one in some}
    cells = {(name, one.claim): _cell(one) for name, some in results.items() for one in some}
    rows = [["claim", "what", *results]]
    rows += [
        [f"`{claim}`", text, *(cells.get((name, claim), "") for name in results)] for claim, text in claims.items()
    ]
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join([lines[0], "|---" * len(rows[0]) + "|", *lines[1:]])


def _cell(one: Result) -> str:
    wrong = _WRONG.search(one.figure)
    result = "**FAIL**" if one.result == "FAIL" else one.result
    return f"{result}, {wrong[1]} wrong" if wrong else result


def write_page(page: Path, plan: Plan, given: Sequence[Environment], results: Mapping[str, Sequence[Result]]) -> None:
    """Replace what is between the two marks of a Markdown page. If only some claims were checked, rows of other claims stay,
    and so does the text about them, if the columns are the same. Raises ConfigError if it has no marks."""
    text = page.read_text(encoding="utf-8")
    before, begun, rest = text.partition(BEGIN)
    there, ended, after = rest.partition(END)
    if not begun or not ended:
        raise ConfigError(f"{page} must have the lines {BEGIN} and {END}")
    when = f"{int(time.strftime('%d'))} {time.strftime('%B %Y')}"
    which = f"Claims `{'`, `'.join(plan.only)}`:\n" if plan.only else ""
    about = (
        f"{which}{when}, Foreword {__version__}, {plan.target.name}, seed {plan.seed}, "
        f"{processor_field('model name') or 'unknown processor'}."
    )
    versions = "\n".join(f"- {one.name}: {one.versions}" for one in given)
    seconds = [f"{name} {sum(one.seconds for one in some) / 60:.1f} min" for name, some in results.items()]
    table = matrix_table(results)
    earlier, rows = _others(there, table) if plan.only else ("", [])
    earlier = re.sub(rf"{re.escape(which)}.*?(?=Claims `|\Z)", "", earlier, flags=re.DOTALL).strip() if which else ""
    parts = [begun, earlier, about, versions, f"Time: {', '.join(seconds)}.", "\n".join([table, *rows]), ended]
    page.write_text(before + "\n\n".join(filter(None, parts)) + after, encoding="utf-8")


def _others(there: str, table: str) -> tuple[str, list[str]]:
    """Rows of a table that is there: the text before it, and the rows of claims that the new table lacks. Neither if its
    columns are others."""
    head, *rows = table.splitlines()
    text, found, rest = there.partition(f"{head}\n")
    if not found:
        return "", []
    new = {row.split("|")[1] for row in rows}
    others = [row for row in rest.splitlines() if row.startswith("| `") and row.split("|")[1] not in new]
    return text.strip() if others else "", others
