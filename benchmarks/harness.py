"""The parts that benchmarks share: medians, a description of the machine, tables, and the files of figures."""

import json
import os
import platform
import shlex
import statistics
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any


def median(values: Iterable[float]) -> float:
    """The middle of the values; not a number when there are none."""
    found = list(values)
    return statistics.median(found) if found else float("nan")


def ratio(ours: float, theirs: float) -> float:
    """How many times theirs fits into ours; not a number when theirs is zero."""
    return ours / theirs if theirs else float("nan")


def version_of(distribution: str) -> str:
    """The installed version of a distribution, or 'absent'."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return "absent"


def cores() -> int:
    """How many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def machine() -> dict[str, str]:
    """The CPU, its vector instructions, the memory and the interpreter, in words."""
    return {
        "cpu": _cpu_field("model name") or platform.processor() or platform.machine(),
        "instructions": _instructions(),
        "cores": str(cores()),
        "memory": _memory(),
        "load": _load(),
        "system": f"{platform.system()} {platform.release()}",
        "python": f"{platform.python_implementation()} {platform.python_version()}",
    }


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Rows as aligned Markdown: the first column to the left, the others to the right."""
    widths = [max(len(cell) for cell in column) for column in zip(head, *rows, strict=True)]
    rule = [f":{'-' * (widths[0] - 1)}", *(f"{'-' * (width - 1)}:" for width in widths[1:])]
    return "\n".join(_line(line, widths) for line in [head, rule, *rows])


def write_between(page: Path, command: str, text: str) -> None:
    """Replace what a command writes in a page, between its two marks. Raises ValueError if they are not there once."""
    begin, end = (f"<!-- Written by {command}: {word} -->" for word in ("begin", "end"))
    before, found = page.read_text(encoding="utf-8").split(begin)
    _, after = found.split(end)
    page.write_text(f"{before}{begin}\n\n{text}\n\n{end}{after}", encoding="utf-8")


def write_figures(
    path: Path,
    title: str,
    head: Sequence[str],
    rows: Sequence[Sequence[str]],
    facts: Mapping[str, str],
    **measured: Any,
) -> None:
    """Write a table as a file that docs/figures takes (docs/generate.py): with command, date, processor, and the facts of the
    run. `measured` are the numbers behind the table."""
    here = machine()
    figures = {
        "title": title,
        "text": "; ".join(f"{name} {value}" for name, value in facts.items() if name not in here) + ".",
        "head": list(head),
        "rows": [{"cells": list(row)} for row in rows],
        "processor": f"{here['cpu']}, {here['instructions']}",
        "date": time.strftime("%Y-%m-%d"),
        "command": shlex.join([str(_script()), *sys.argv[1:]]),
        "set_up": dict(facts),
        **({"measured": measured} if measured else {}),
    }
    path.write_text(json.dumps(figures, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def _script() -> Path:
    """The benchmark that runs, below this folder."""
    script, folder = Path(sys.argv[0]).resolve(), Path(__file__).resolve().parent
    return script.relative_to(folder) if script.is_relative_to(folder) else Path(script.name)


def set_up(facts: dict[str, str]) -> str:
    """Facts about a run, one per line."""
    width = max(map(len, facts))
    return "\n".join(f"{name:<{width}}  {value}" for name, value in facts.items())


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    first = f" {cells[0]:<{widths[0]}} "
    rest = (f" {cell:>{width}} " for cell, width in zip(cells[1:], widths[1:], strict=True))
    return f"|{'|'.join([first, *rest])}|"


def _cpu_field(name: str) -> str:
    """The first value of a field of /proc/cpuinfo; empty where there is no such file."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return ""
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(name)), "")


def _instructions() -> str:
    """The widest vector and matrix instructions the CPU has."""
    flags = set(_cpu_field("flags").split())
    known = ("avx2", "avx512f", "avx512_bf16", "amx_tile", "amx_bf16")
    return " ".join(flag for flag in known if flag in flags) or "unknown"


def _memory() -> str:
    if not hasattr(os, "sysconf"):
        return "unknown"
    return f"{os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / 2**30:.0f} GiB"


def _load() -> str:
    """The load average of the last minute: other work on the machine makes every number worse."""
    return f"{os.getloadavg()[0]:.1f}" if hasattr(os, "getloadavg") else "unknown"
