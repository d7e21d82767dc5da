"""TTFT of memory hits while another tier hangs for ever, against the same engine without that tier, in one run.

    python -m benchmarks.store.faults MODEL [--rounds 40] [--prompt 2048]

MODEL is a folder (see engine/random_model.py). One engine has a memory tier. The other has a memory and a disk tier, and from
some moment on no call of the disk tier returns. Prompts were computed before that moment and lie in the memory tiers, not on
the device. Each round asks both engines, in an order drawn anew:

whole  for a prompt that lies wholly in memory,
tail   for a prompt whose last 64 tokens are new: the hung tier may have them, so it would be asked.

A ratio is the median over the rounds with the hung tier by that without it. The first requests after the moment are shown by
themselves: they find out that the tier hangs.
"""

import argparse
import random
import tempfile
import time
from contextlib import ExitStack

from benchmarks.harness import machine, median, set_up, table, version_of
from foreword import LLM, SamplingParams
from foreword.conformance import FlakyStore

TAIL = 64
FIRST = 4


class Engines:
    """The two engines, and prompts that lie in their memory tiers."""

    def __init__(self, arguments: argparse.Namespace, stack: ExitStack) -> None:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        memory, disk = "memory://?size=2GiB", f"disk://{folder}/kv?size=4GiB"
        self._random = random.Random(1)
        self.engines = {
            name: LLM(
                arguments.model,
                kv_memory=f"{3 * arguments.prompt} tokens",
                store=urls,
                threads=arguments.threads,
                self_check=False,
            )
            for name, urls in (("alone", (memory,)), ("hung", (memory, disk)))
        }
        self.prompts = [self.draw(arguments.prompt) for _ in range(arguments.prompts)]
        for llm in self.engines.values():
            for prompt in self.prompts:
                llm.generate(prompt, ONE)
                llm.flush()
        offload = self.engines["hung"].offload
        assert offload is not None
        self.tier = offload.store.tiers[1]
        self.flaky = FlakyStore(self.tier.store)
        self.tier.store = self.flaky

    def draw(self, count: int) -> list[int]:
        return [self._random.randrange(1, 4000) for _ in range(count)]

    def ttft(self, name: str, prompt: list[int]) -> float:
        llm = self.engines[name]
        llm.clear_cache()
        started = time.perf_counter()
        [output] = llm.generate(prompt, ONE)
        seconds = time.perf_counter() - started
        if output.cached_tokens < len(prompt) - TAIL - 32:
            raise RuntimeError(f"{name}: only {output.cached_tokens} of {len(prompt)} tokens were cached")
        return seconds

    def measure(self, rounds: int, *, tail: bool) -> dict[str, list[float]]:
        samples: dict[str, list[float]] = {name: [] for name in self.engines}
        for _ in range(rounds):
            prompt = self._random.choice(self.prompts) + (self.draw(TAIL) if tail else [])
            for name in self._random.sample(list(samples), len(samples)):
                samples[name].append(self.ttft(name, prompt))
        return samples


ONE = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)


def row(what: str, samples: dict[str, list[float]]) -> list[str]:
    alone, hung = (median(samples[name]) for name in ("alone", "hung"))
    return [what, f"{alone * 1e3:.1f} ms", f"{hung * 1e3:.1f} ms", f"{hung / alone:.3f}"]


def main() -> None:
    """Measures and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--prompt", type=int, default=2048)
    parser.add_argument("--prompts", type=int, default=6)
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    print(set_up({**machine(), "rounds": str(arguments.rounds), "torch": version_of("torch")}), flush=True)
    with ExitStack() as stack:
        engines = Engines(arguments, stack)
        rows = [row(f"{kind}, no tier hangs", engines.measure(arguments.rounds, tail=kind == "tail")) for kind in KINDS]
        engines.flaky.stick()
        rows.append(row(f"tail, first {FIRST} requests", engines.measure(FIRST, tail=True)))
        rows += [
            row(f"{kind}, the disk tier hangs", engines.measure(arguments.rounds, tail=kind == "tail"))
            for kind in KINDS
        ]
        errors, skipped = dict(engines.tier.counters.errors), engines.tier.counters.skipped
        engines.flaky.release()
        for llm in engines.engines.values():
            llm.close()
    print(table(["TTFT", "memory", "memory and disk", "ratio"], rows))
    print(f"disk tier: errors {errors}, {skipped} calls skipped")


KINDS = ("whole", "tail")

if __name__ == "__main__":
    main()
