"""Foreword's engine against vLLM and Transformers on the CPU: prefill, and decode at batch 1 and 16.

    python benchmarks/random_model.py 88m MODEL
    python benchmarks/engines.py MODEL --vllm-python PATH_TO_VLLM_ENVIRONMENT/bin/python

Each engine is measured by `engine_worker.py` in its own process, with its best settings, on the same model and the
same number of threads. Engines take turns, and who goes first changes with every round, so that whatever else the machine
does meets all of them. Where an engine has several modes, each one runs and the best one counts, figure by figure.
"""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine_worker import BATCHES, DECODE_NEW_TOKENS, DECODE_PROMPT_TOKENS, MODES, PREFILL_TOKENS, Times, environment
from engine_worker import speeds as speeds_of
from timing import cores, machine, median, ratio, set_up, table

OURS = "foreword"
FIGURES = ("prefill", *(f"decode_{batch}" for batch in BATCHES))

Result = dict[str, Any]


@dataclass(frozen=True)
class Contender:
    """One engine in one mode, and the interpreter that it runs under."""

    engine: str
    mode: str
    python: str

    @property
    def label(self) -> str:
        """Its name in tables."""
        return self.engine if len(MODES[self.engine]) == 1 else f"{self.engine} ({self.mode})"


@dataclass(frozen=True)
class Load:
    """What every contender has to do."""

    model: Path
    dtype: str
    threads: int
    repetitions: int


def contenders(engines: Sequence[str], modes: Sequence[str], vllm_python: str | None) -> list[Contender]:
    """All modes of the engines that can run here; says which ones cannot."""
    found = []
    for engine in engines:
        python = vllm_python if engine == "vllm" else sys.executable
        if python is None or not Path(python).exists():
            print(f"{engine} is left out: --vllm-python names no interpreter\n")
            continue
        chosen = [mode for mode in MODES[engine] if not modes or mode in modes] or MODES[engine][:1]
        found += [Contender(engine, mode, python) for mode in chosen]
    return found


def run_worker(contender: Contender, load: Load) -> Result:
    """One measurement in a fresh process."""
    worker = Path(__file__).resolve().parent / "engine_worker.py"
    command = [contender.python, str(worker), "--engine", contender.engine, "--mode", contender.mode]
    command += ["--model", str(load.model), "--dtype", load.dtype, "--threads", str(load.threads)]
    command += ["--repetitions", str(load.repetitions)]
    done = subprocess.run(
        command, env=variables(contender, load.threads), stdout=subprocess.PIPE, text=True, check=True
    )
    result: Result = json.loads(done.stdout)
    return result


def variables(contender: Contender, threads: int) -> dict[str, str]:
    """The environment of a contender: ours finds the checkout, whether or not it is installed."""
    wanted = environment(contender.engine, threads, Path(contender.python).parent.parent)
    if contender.engine == OURS:
        checkout = str(Path(__file__).resolve().parent.parent)
        wanted["PYTHONPATH"] = os.pathsep.join(filter(None, [checkout, os.environ.get("PYTHONPATH", "")]))
    return {**os.environ, **wanted}


def measure(field: Sequence[Contender], load: Load, rounds: int) -> dict[str, list[Result]]:
    """The results of every contender, by label, one for each round."""
    results: dict[str, list[Result]] = {contender.label: [] for contender in field}
    for number in range(rounds):
        for contender in turns(field, number):
            print(
                f"round {number + 1} of {rounds}: {contender.label}, {load.model.name}, {load.dtype}", file=sys.stderr
            )
            results[contender.label].append(run_worker(contender, load))
    return results


def turns(field: Sequence[Contender], number: int) -> Iterator[Contender]:
    """The order of a round: the one before, begun one later."""
    first = number % len(field)
    yield from [*field[first:], *field[:first]]


def pooled(results: Sequence[Result]) -> Times:
    """The times of all rounds together."""
    return {task: [taken for result in results for taken in result["seconds"][task]] for task in results[0]["seconds"]}


def report(model: str, dtype: str, results: dict[str, list[Result]]) -> str:
    """Tokens per second of each contender, and ours as a multiple of each peer's best mode."""
    speeds = {label: speeds_of(pooled(mine), median) for label, mine in results.items()}
    rows = [[label, *(f"{mine[figure]:,.1f}" for figure in FIGURES)] for label, mine in speeds.items()]
    peers = {result["engine"] for mine in results.values() for result in mine} - {OURS}
    if OURS in speeds:
        rows += [against(peer, speeds, results) for peer in sorted(peers)]
    return f"{model}, {dtype}, tokens per second\n\n{table(['engine', *FIGURES], rows)}"


def against(peer: str, speeds: dict[str, dict[str, float]], results: dict[str, list[Result]]) -> list[str]:
    """A row of ratios: ours over the best that a peer reached in any mode."""
    modes = [speeds[label] for label, mine in results.items() if mine[0]["engine"] == peer]
    best = {figure: max(mode[figure] for mode in modes) for figure in FIGURES}
    return [f"{OURS} / {peer}", *(f"{ratio(speeds[OURS][figure], best[figure]):.2f}x" for figure in FIGURES)]


def facts(field: Sequence[Contender], arguments: argparse.Namespace) -> dict[str, str]:
    """The set-up that does not depend on a result."""
    tasks = f"{PREFILL_TOKENS} tokens of prompt; {DECODE_NEW_TOKENS} new tokens after {DECODE_PROMPT_TOKENS}"
    return {
        **machine(),
        "threads": str(arguments.threads),
        "engines": ", ".join(contender.label for contender in field),
        "tasks": f"{tasks}, at batch {' and '.join(map(str, BATCHES))}",
        "samples": f"median of {arguments.rounds} rounds with {arguments.repetitions} repetitions each",
        **{f"model {model.name}": described(model) for model in arguments.models},
    }


def described(model: Path) -> str:
    """A model's size on disk and its shape."""
    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    size = sum(path.stat().st_size for path in model.glob("*.safetensors"))
    shape = ("num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads", "vocab_size")
    return f"{size / 1e6:,.0f} MB of weights, " + ", ".join(
        f"{name} {config[name]}" for name in shape if name in config
    )


def versions(results: Sequence[Result]) -> dict[str, str]:
    """What each engine is made of."""
    return {
        result["engine"]: ", ".join(f"{name} {version}" for name, version in result["versions"].items())
        for result in results
    }


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="Compare engines on the CPU.")
    parser.add_argument("models", type=Path, nargs="+", help="folders made by random_model.py")
    parser.add_argument("--dtypes", nargs="+", choices=["bfloat16", "float32"], default=["bfloat16"])
    parser.add_argument("--engines", nargs="+", choices=sorted(MODES), default=list(MODES))
    parser.add_argument("--modes", nargs="+", default=[], help=f"only these of {MODES}")
    parser.add_argument("--threads", type=int, default=cores())
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--vllm-python", help="interpreter of an environment with vLLM")
    parser.add_argument("--json", type=Path, help="also write all samples here")
    return parser.parse_args()


def main() -> None:
    """Measures every model in every dtype and prints a table for each."""
    arguments = parse()
    field = contenders(arguments.engines, arguments.modes, arguments.vllm_python)
    print(set_up(facts(field, arguments)), flush=True)
    everything: list[Result] = []
    for model in arguments.models:
        for dtype in arguments.dtypes:
            load = Load(model, dtype, arguments.threads, arguments.repetitions)
            results = measure(field, load, arguments.rounds)
            print(f"\n{report(model.name, dtype, results)}", flush=True)
            everything += [result for mine in results.values() for result in mine]
    print(f"\n{set_up(versions(everything))}")
    if arguments.json:
        stored = {"set_up": facts(field, arguments), "results": everything}
        arguments.json.write_text(json.dumps(stored, indent=2), encoding="utf-8")


if __name__ == "__main__":
    main()
