"""dev/paths.md names every file that a request passes."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# Files, with a few that run beside a request now and then: which of them do is a matter of time, so that two runs differ by up
# to eight. Lower them when modules that read as one subject become one, not by joining two subjects: a file that several share,
# as `blocks/bounded.py`, was a part of each of them before.
BUDGETS = {"computed": 90, "loaded": 91, "routed": 105}
# Files of features that this chat does not ask for, or that its server does not have switched on. They are behind one question
# each, so that none of them is entered.
SWITCHED_OFF = {
    "api/breakpoints.py",  # no cache control
    "api/quotas.py",  # no tenant has a quota
    "api/tools/parser.py",  # neither tools nor reasoning
    "api/tools/reader.py",
    "engine/hit_audit.py",  # audit_every is 0
    "engine/prompt_leases.py",  # nothing is retained
    "router/disaggregated.py",  # no replica has a role
    "tokens/stops.py",  # no stop strings
}


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_paths_name_every_file() -> None:
    """A streamed chat, computed, loaded and behind a router, passes no file that is missing in the list of dev/paths.md, no
    file of a feature that is not switched on, and no more files than its budget."""
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.server.request_path", "--files"], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]
    page = (ROOT / "dev" / "paths.md").read_text(encoding="utf-8")
    named = set(re.findall(r"^\| `([^`]+)` \|", page, re.MULTILINE))
    for situation, files in json.loads(done.stdout.splitlines()[-1]).items():
        assert 50 < len(files) <= BUDGETS[situation]
        assert not SWITCHED_OFF & set(files), situation
        assert not set(files) - named, f"{situation}: add them to dev/paths.md, then run docs/generate.py"
