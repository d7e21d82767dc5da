"""Foreword's engine against vLLM, Transformers and llama.cpp on the CPU: prefill, and decode at batch 1, 16 and 64.

    python -m benchmarks.engine.random_model 88m MODEL88
    python -m benchmarks.engine.random_model 370m MODEL370
    python -m benchmarks.engine.engines MODEL88 MODEL370 --vllm-python PATH_TO_VLLM_ENVIRONMENT/bin/python --json FILE

Each engine is measured by `engine/worker.py` in its own process, on the same model and number of threads. Ours runs twice:
with the kernels that it chooses, and with `kernels=torch`. Shares are of the machine's own limits (`engine/limits.py`).

Results are kept in FILE after each row: another run measures only the rows that are missing, so that a long run can be made in
parts (`--only prefill`, `--seconds 600`). `--environment` sets variables for Foreword's processes, to measure other kinds of
processors on this one.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.engine.worker import MODES, environment, parse_row
from benchmarks.harness import cores, machine, median, ratio, set_up, table, write_figures

OURS = "foreword"
DEFAULT, TORCH = "foreword", "foreword (torch)"
# By size of the model, in bytes of weights: what fits into ten minutes on two cores.
ROWS = ("prefill-512", "prefill-2048", "decode-1x512", "decode-1x4096", "decode-16x512", "decode-64x512")
SMALL_ROWS = (*ROWS[:4], "decode-1x16384", "decode-16x512", "decode-16x2048", "decode-64x512")
SMALL = 250e6
# Engines without a prefix cache compute the prompts of each row; longer rows are left out.
LONGEST = {"transformers": 8_192, "llama.cpp": 16_384}
CONTENDERS = ("foreword", "foreword:torch", "vllm", "transformers", "llama.cpp")

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
        return self.engine if self.mode == MODES[self.engine][0] else f"{self.engine} ({self.mode})"

    def can_run(self, row: str) -> bool:
        """Whether this row takes it a reasonable time."""
        found = parse_row(row)
        return found.batch * found.context <= LONGEST.get(self.engine, 1 << 30)


class Results:
    """Measurements so far, in a file."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        stored = json.loads(path.read_text(encoding="utf-8")) if path is not None and path.exists() else {}
        self.rows: list[Result] = stored.get("results", [])
        self.limits: dict[str, dict[str, float]] = stored.get("limits", {})
        self.set_up: dict[str, str] = stored.get("set_up", {})

    def find(self, label: str, model: str, row: str) -> float | None:
        """Tokens per second: the median of what was measured."""
        wanted = (label, model, row)
        found = [one["tokens_per_s"] for one in self.rows if (one["label"], one["model"], one["row"]) == wanted]
        return median(found) if found else None

    def save(self) -> None:
        if self._path is not None:
            stored = {"set_up": self.set_up, "limits": self.limits, "results": self.rows}
            self._path.write_text(json.dumps(stored, indent=1), encoding="utf-8")


def contenders(names: Sequence[str], pythons: dict[str, str | None]) -> list[Contender]:
    """The engines and modes that can run here; says which ones cannot. `pythons`: interpreters other than this one."""
    found = []
    for name in names:
        engine, _, mode = name.partition(":")
        python = pythons.get(engine, sys.executable)
        if engine not in MODES or (mode and mode not in MODES[engine]):
            raise SystemExit(f"{name!r} is no engine; known are {MODES}")
        if python is None or not Path(python).exists():
            print(f"{engine} is left out: no interpreter is named for it\n")
            continue
        found.append(Contender(engine, mode or MODES[engine][0], python))
    return found


def rows_of(model: Path, only: Sequence[str]) -> list[str]:
    """The rows for a model; with `only`, those that begin with one of its words."""
    size = sum(path.stat().st_size for path in model.glob("*.safetensors"))
    rows = SMALL_ROWS if size < SMALL else ROWS
    return [row for row in rows if not only or row.startswith(tuple(only))]


def variables(contender: Contender, arguments: argparse.Namespace) -> dict[str, str]:
    """The environment of a contender: ours finds the checkout, whether or not it is installed."""
    wanted = environment(contender.engine, arguments.threads, Path(contender.python).parent.parent)
    if contender.engine == OURS:
        checkout = str(Path(__file__).resolve().parents[2])
        wanted["PYTHONPATH"] = os.pathsep.join(filter(None, [checkout, os.environ.get("PYTHONPATH", "")]))
        wanted |= dict(pair.split("=", 1) for pair in arguments.environment)
    return {**os.environ, **wanted}


def measure(contender: Contender, model: Path, rows: Sequence[str], arguments: argparse.Namespace) -> list[Result]:
    """The rows in a fresh process; fewer where it took longer than `--seconds` allow."""
    command = [
        contender.python,
        "-m",
        "benchmarks.engine.worker",
        "--engine",
        contender.engine,
        "--mode",
        contender.mode,
    ]
    command += ["--model", str(model), "--dtype", arguments.dtype, "--threads", str(arguments.threads)]
    command += ["--repetitions", str(arguments.repetitions), "--rows", *rows]
    command += ["--processor-time"] * arguments.processor_time
    print(f"{contender.label}, {model.name}: {' '.join(rows)}", file=sys.stderr)
    wanted = variables(contender, arguments)
    with subprocess.Popen(command, env=wanted, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            out, errors = process.communicate(timeout=max(arguments.deadline - time.monotonic(), 1.0))
        except subprocess.TimeoutExpired:
            process.kill()
            out, errors = process.communicate()
        else:
            if process.returncode:
                print(f"{contender.label} failed:\n{errors[-2000:]}", file=sys.stderr)
    lines = [line for line in out.splitlines() if line.endswith("}")]
    return [{**json.loads(line), "label": contender.label} for line in lines]


def measure_limits(model: Path, arguments: argparse.Namespace) -> dict[str, float]:
    """Bandwidth of the memory and oneDNN's rate for a model's products."""
    command = [
        sys.executable,
        "-m",
        "benchmarks.engine.limits",
        "--model",
        str(model),
        "--threads",
        str(arguments.threads),
    ]
    command += ["--processor-time"] * arguments.processor_time
    found: dict[str, float] = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)
    return found


def head_of(field: Sequence[Contender]) -> list[str]:
    """The columns after the model's name."""
    return [*(contender.label for contender in field), "default / torch", "default / best peer", "share of the limit"]


def lines_of(model: str, rows: Sequence[str], results: Results, field: Sequence[Contender]) -> list[list[str]]:
    """Tokens per second of each contender, ours as multiples, and as shares of the machine's limits."""
    labels = [contender.label for contender in field]
    lines = []
    for row in rows:
        speeds = {label: results.find(label, model, row) for label in labels}
        ours = speeds.get(DEFAULT)
        peers = [speed for label, speed in speeds.items() if speed is not None and not label.startswith(OURS)]
        cells = [f"{speed:,.1f}" if speed is not None else "-" for speed in speeds.values()]
        pairs = [times(ours, speeds.get(TORCH)), times(ours, max(peers, default=None))]
        lines.append([row, *cells, *pairs, share(row, ours, results.limits.get(model))])
    return lines


def times(ours: float | None, theirs: float | None) -> str:
    return "-" if ours is None or theirs is None else f"{ratio(ours, theirs):.2f}x"


def share(row: str, ours: float | None, limits: dict[str, float] | None) -> str:
    """Of oneDNN's product rate (prefill), or of the bandwidth of the memory (batch 1, weights and KV)."""
    found = parse_row(row)
    if ours is None or limits is None or found.batch > 1:
        return "-"
    if found.task == "prefill":
        return f"{100 * ours / limits['products']:.0f} % of oneDNN's products"
    read = limits["step_bytes"] + found.context * limits["token_bytes"]
    return f"{100 * ours * read / limits['bandwidth']:.0f} % of bandwidth"


def facts(arguments: argparse.Namespace) -> dict[str, str]:
    """The set-up that does not depend on a result."""
    return {
        **machine(),
        "threads": str(arguments.threads),
        "dtype": arguments.dtype,
        "samples": f"median of {arguments.repetitions}" + ", processor time" * arguments.processor_time,
        **({"variables": " ".join(arguments.environment)} if arguments.environment else {}),
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
    """The parts of each engine."""
    return {
        result["engine"]: ", ".join(f"{name} {version}" for name, version in result["versions"].items())
        for result in results
    }


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="Compare engines on the CPU.")
    parser.add_argument("models", type=Path, nargs="+", help="folders made by engine/random_model.py")
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument("--engines", nargs="+", default=CONTENDERS, help=f"ENGINE or ENGINE:MODE of {MODES}")
    parser.add_argument("--only", nargs="+", default=[], help="rows whose names begin so, as prefill or decode-1x")
    parser.add_argument("--threads", type=int, default=cores())
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument(
        "--seconds", type=float, default=86_400.0, help="begin nothing and stop what runs after this time"
    )
    parser.add_argument("--vllm-python", help="interpreter of an environment with vLLM")
    parser.add_argument(
        "--processor-time", action="store_true", help="count processor time instead: with --threads 1 on a busy machine"
    )
    parser.add_argument("--llama-python", help="interpreter of an environment with llama-cpp-python and gguf")
    parser.add_argument("--environment", nargs="+", default=[], metavar="NAME=VALUE", help="for Foreword's processes")
    parser.add_argument("--json", type=Path, help="keep results here, and measure only those that are missing")
    parser.add_argument("--figures", type=Path, help="write the table to this file (docs/figures)")
    found = parser.parse_args()
    found.deadline = time.monotonic() + found.seconds
    return found


def main() -> None:
    """Measures what is missing and prints a table for each model."""
    arguments = parse()
    pythons = {"vllm": arguments.vllm_python, "llama.cpp": arguments.llama_python}
    field = contenders(arguments.engines, pythons)
    results = Results(arguments.json)
    results.set_up = results.set_up or facts(arguments)
    print(set_up(results.set_up), flush=True)
    lines = []
    for model in arguments.models:
        rows = rows_of(model, arguments.only)
        if model.name not in results.limits:
            results.limits[model.name] = measure_limits(model, arguments)
        for contender in field:
            missing = [row for row in rows if contender.can_run(row)]
            missing = [row for row in missing if results.find(contender.label, model.name, row) is None]
            if missing and time.monotonic() < arguments.deadline:
                results.rows += measure(contender, model, missing, arguments)
            results.save()
        found = lines_of(model.name, rows, results, field)
        print(f"\nTokens per second\n\n{table([model.name, *head_of(field)], found)}", flush=True)
        lines += [[f"{model.name}, {row}", *cells] for row, *cells in found]
    print(f"\n{set_up(versions(results.rows))}")
    if arguments.figures is not None:
        title = f"The engine beside others, {results.set_up['instructions']}"
        about = {"tokens per second": f"in {arguments.dtype}"} | results.set_up | versions(results.rows)
        write_figures(arguments.figures, title, ["model, row", *head_of(field)], lines, about)


if __name__ == "__main__":
    main()
