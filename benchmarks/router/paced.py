"""`foreword serve` at a fixed pace, as on a device of its own: several of them on one machine do not share its cores.

    python -m benchmarks.router.paced MICROSECONDS serve ...

Every step of the engine takes at least this time for each token that it computes, and 5 ms. The rest of that time
the server waits, as it waits for a GPU. Scheduler, caches, answers, and what the router hears of them, are those of any server.
"""

from __future__ import annotations

import sys
import time
from typing import Any

from foreword.cli import main as cli
from foreword.server import process

STEP_SECONDS = 0.005


def main() -> None:
    token_seconds = float(sys.argv.pop(1)) * 1e-6
    load = process.load_engine

    def paced(*arguments: Any, **named: Any) -> Any:
        engine: Any = load(*arguments, **named)
        runner = engine._core._runner
        run = runner.run

        def at_pace(step: Any, draws: Any) -> Any:
            until = time.perf_counter() + STEP_SECONDS + step.num_tokens * token_seconds
            found = run(step, draws)
            time.sleep(max(until - time.perf_counter(), 0.0))
            return found

        runner.run = at_pace
        return engine

    process.load_engine = paced
    cli.main()


if __name__ == "__main__":
    main()
