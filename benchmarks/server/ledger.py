"""The processor time that a usage ledger costs a request: of the event loop that reports it, and of the whole process.

    python -m benchmarks.server.ledger [--requests 3000] [--rounds 7]

A server, a router and vLLM's connector report requests to the same class (`UsageLedger.note`), with what they know: a server
also has tiers and the fingerprint of its weights. Requests end at a steady rate, or all at once. Before each, the body of a
chat is parsed, as a front does. The same loop without a ledger takes turns with it, and its time is taken off. Lines go to a
file in the temporary folder. Medians over the rounds.
"""

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from benchmarks.harness import machine, median, set_up, table
from foreword.ledger import UsageLedger
from foreword.usage import TokenUsage

RATES = (50, 500, 2000, 0)
BODY = json.dumps({"messages": [{"role": "user", "content": f"Turn {turn} of a chat."} for turn in range(100)]})
LIMIT = 20.0  # microseconds
CALLERS = {
    "server": TokenUsage(18_231, 412, 17_920, 0, {"memory": 12_288, "disk": 5_632}, "model-a", "0123456789abcdef" * 2),
    "router": TokenUsage(18_231, 412, 17_920, 96, model="model-a"),
}


class Cost(NamedTuple):
    """Seconds of processor time per request."""

    caller: float
    process: float


def spent(note: Callable[[int], object], requests: int, rate: int, close: Callable[[], object]) -> Cost:
    """Of requests that end at a rate per second, or all at once."""
    process, caller, begun = time.process_time(), time.thread_time(), time.perf_counter()
    for number in range(requests):
        if rate:
            time.sleep(max(0.0, begun + number / rate - time.perf_counter()))
        json.loads(BODY)
        note(number)
    caller = time.thread_time() - caller
    close()
    return Cost(caller / requests, (time.process_time() - process) / requests)


def measured(folder: Path, usage: TokenUsage, requests: int, rate: int) -> Cost:
    """Of a ledger alone."""
    path = folder / "usage.jsonl"
    path.unlink(missing_ok=True)
    ledger = UsageLedger(path)
    ids = [f"req-{number:032x}" for number in range(requests)]

    def note(number: int) -> None:
        ledger.note(ids[number], "tenant-of-a-name", "POST /v1/chat/completions", 200, 1.234567, usage)

    with_it = spent(note, requests, rate, ledger.close)
    assert not ledger.dropped and path.read_bytes().count(b"\n") == requests
    without = spent(lambda number: None, requests, rate, lambda: None)
    return Cost(with_it.caller - without.caller, with_it.process - without.process)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=3000, help="per round; of a slow rate, those of two seconds")
    parser.add_argument("--rounds", type=int, default=7)
    given = parser.parse_args()
    facts = machine() | {"requests": str(given.requests), "rounds": str(given.rounds)}
    print(set_up(facts), end="\n\n", flush=True)
    rows, worst = [], 0.0
    with tempfile.TemporaryDirectory() as folder:
        for caller, usage in CALLERS.items():
            for rate in RATES:
                requests = min(given.requests, 2 * rate or given.requests)
                found = [measured(Path(folder), usage, requests, rate) for _ in range(given.rounds)]
                own, whole = (1e6 * median(one[index] for one in found) for index in (0, 1))
                worst = max(worst, whole)
                rows.append([caller, f"{rate:,}/s" if rate else "at once", f"{own:.1f}", f"{whole:.1f}"])
    print(table(["reported by", "requests", "us of its thread", "us of the process"], rows))
    print(f"\nAt most {worst:.1f} us of processor time per request; the limit is {LIMIT:.0f}.")
    return int(worst > LIMIT)


if __name__ == "__main__":
    raise SystemExit(main())
