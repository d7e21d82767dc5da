"""A minute of the seeded fault run over the whole system, with a new seed each time."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
from servers import redis_binary

SCRIPT = Path(__file__).with_name("system_run.py")


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_a_minute_of_faults_over_the_whole_system() -> None:
    """Under faults of servers, stores, connections and the router, every answer equals that of a server without a cache, no
    request is lost that was promised an answer, and nothing leaks. FOREWORD_SYSTEM_SEED repeats a seed."""
    redis_binary()
    seed = os.environ.get("FOREWORD_SYSTEM_SEED") or str(random.randrange(1 << 30))
    command = [sys.executable, str(SCRIPT), "--seconds", "60", "--seed", seed]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1400)
    print(done.stdout)
    assert done.returncode == 0, f"FOREWORD_SYSTEM_SEED={seed}\n{done.stdout[-8000:]}\n{done.stderr[-4000:]}"
