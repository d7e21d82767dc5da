"""KV that one release of vLLM saved, asked for by another: tokens found, wrong answers. And what a changed meaning finds.

    python -m benchmarks.vllm.upgrade --environment 0.31=/tmp/vllm-0.31/bin/python --environment 0.32=.venv-vllm/bin/python
        [--kinds Llama,Mistral,"Gemma 3",Qwen3-Next] [--prompts 200] [--planted] [--json FILE]

`.ci/vllm` makes the environments. Models are small and random, and prompts share prefixes (`foreword/referee/models.py`). Each
release saves all prompts' KV in a store of its own. Then each release, in a fresh process, asks the same prompts over each
store, which it only reads: what it finds is the writer's. What the writer itself finds after a restart is 100 %.

Answers are compared with those of the reader's own vLLM alone: in float32 all, else those with as many cached tokens.

`--planted`: the last release reads the first one's store with a change of meaning that no name, version or attribute shows
(`tests/integrations/vllm_plants.py`): nothing may be found.

Exit status 1 if a release finds less than 95 % of another's KV, if an answer is wrong, or if a planted change finds anything.
"""

import argparse
import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.harness import machine, set_up, table, write_figures
from foreword.referee.models import KINDS, Kind
from foreword.referee.process import preload
from foreword.referee.session import environment_note

TESTS = Path(__file__).resolve().parents[2] / "tests" / "integrations"
PLANTS = ("rope_base", "one_layer", "packing")
ENOUGH = 0.95
_WITHIN = 7_200

Answers = list[dict[str, Any]]
Row = dict[str, Any]


class Failed(Exception):
    """vLLM did not start, or ended early."""


class Upgrades:
    """All pairs of releases for one kind of model.

    Args:
        environments: interpreters by name, the oldest release first.
    """

    def __init__(self, kind: Kind, environments: dict[str, str], arguments: argparse.Namespace, folder: Path) -> None:
        self._kind = kind
        self._environments = environments
        self._given = arguments
        self._folder = folder
        self._model = kind.build(folder / "model")
        self._alone: dict[str, list[Answers]] = {}

    def rows(self) -> Iterator[Row]:
        """A row per pair, then one per planted change."""
        first, *_, last = self._environments
        for writer in self._environments:
            store = self._folder / f"store-{writer}"
            self._run(writer, [{"store": self._url(store), "passes": ["ask"]}])
            whole = self._read(writer, store)
            yield self._row(writer, writer, whole, whole)
            for reader in self._environments:
                if reader != writer:
                    yield self._row(writer, reader, whole, self._read(reader, store))
            if writer == first and self._given.planted:
                for plant in PLANTS:
                    yield self._row(writer, last, whole, self._read(last, store, plant), plant)
            shutil.rmtree(store)

    def _url(self, folder: Path) -> list[str]:
        return [f"disk://{folder}?size=16GiB"]

    def _read(self, reader: str, store: Path, plant: str = "") -> dict[str, Any]:
        """Blocks that a fresh process of this release finds in the store, to which it adds nothing."""
        [url] = self._url(store)
        return self._run(reader, [{"store": [f"{url}&read_only=1"], "passes": ["ask"]}], plant)[0]

    def _reference(self, reader: str, plant: str) -> list[Answers]:
        """The answers of this release alone: computed, and from its own cache."""
        key = f"{reader} {plant}"
        if key not in self._alone:
            self._alone[key] = self._run(reader, [{"store": None, "passes": ["ask", "ask"]}], plant)[0]["answers"]
        return self._alone[key]

    def _row(self, writer: str, reader: str, whole: dict[str, Any], found: dict[str, Any], plant: str = "") -> Row:
        computed, own = self._reference(reader, plant)
        exact = self._kind.exact
        pairs = [
            (mine["tokens"], theirs["tokens"])
            for mine, *both in zip(found["answers"][0], computed, own, strict=True)
            for theirs in (both[:1] if exact else [one for one in both if one["cached"] == mine["cached"]][:1])
        ]
        blocks, every = (sum(tier["hit"] for tier in one["tiers"]) for one in (found, whole))
        wrong = sum(mine != theirs for mine, theirs in pairs)
        share = blocks / every if every else 0.0
        return {
            "kind": self._kind.name, "writer": writer, "reader": reader, "plant": plant, "blocks": blocks, "every": every,
            "cached": sum(one["cached"] for one in found["answers"][0]), "share": share, "wrong": wrong,
            "compared": len(pairs), "good": not wrong and (not blocks if plant else share >= ENOUGH),
        }  # fmt: skip

    def _run(self, name: str, runs: list[dict[str, Any]], plant: str = "") -> list[dict[str, Any]]:
        """Raises Failed with the last line that vLLM wrote."""
        prompts = {"seed": self._given.seed, "count": self._given.prompts}
        job = {
            "model": str(self._model),
            "kv_bytes": 1 << 30,
            "llm": self._kind.arguments(),
            "prompts": prompts,
            "runs": runs,
        }
        python = self._environments[name]
        environment = {
            **os.environ, **preload(python), "PYTHONPATH": str(TESTS.parent.parent),
            "OMP_NUM_THREADS": str(self._given.threads), "XDG_CACHE_HOME": str(self._folder / "cache"),
        }  # fmt: skip
        command = [
            python,
            str(TESTS / "vllm_kinds_script.py"),
            json.dumps({**job, **({"plant": plant} if plant else {})}),
        ]
        done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=_WITHIN, check=False)
        if done.returncode:
            raise Failed(
                f"{name}: {next((line for line in reversed(done.stderr.splitlines()) if 'Error' in line), done.stderr[-300:])}"
            )
        found: list[dict[str, Any]] = json.loads(done.stdout.strip().splitlines()[-1])["results"]
        return found


HEAD = ("model", "saved by", "asked under", "blocks found", "of", "share", "cached tokens", "wrong", "compared", "")


def cells(row: Row) -> list[str]:
    """A line of the table."""
    reader = f"{row['reader']}, planted: {row['plant']}" if row["plant"] else row["reader"]
    counts = [f"{row['blocks']:,}", f"{row['every']:,}", f"{row['share']:.1%}", f"{row['cached']:,}"]
    verdict = "" if row["good"] else "NOT AS REQUIRED"
    return [row["kind"], row["writer"], reader, *counts, str(row["wrong"]), str(row["compared"]), verdict]


def _environments(given: list[str]) -> dict[str, str]:
    found = dict(one.split("=", 1) for one in given)
    if len(found) < 2:
        raise SystemExit("give at least two environments, NAME=PYTHON each, the oldest release first")
    return found


def main() -> None:
    """Try every kind, print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--environment", action="append", default=[], metavar="NAME=PYTHON")
    parser.add_argument("--kinds", default="Llama,Mistral,Gemma 3,Qwen3-Next", help="names with commas between")
    parser.add_argument("--prompts", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--threads", type=int, default=1, help="OpenMP threads of vLLM")
    parser.add_argument("--planted", action="store_true", help="also changes of meaning, which must find nothing")
    parser.add_argument("--json", type=Path, help="write everything measured to this file")
    arguments = parser.parse_args()
    environments = _environments(arguments.environment)
    versions = {f"release {name}": environment_note(python) for name, python in environments.items()}
    prompts = f"{arguments.prompts} of 20 to 1,500 tokens, 8 tokens generated, seed {arguments.seed}"
    set_up_facts = {**machine(), **versions, "prompts": prompts, "threads": str(arguments.threads)}
    print(set_up(set_up_facts), flush=True)
    rows: list[Row] = []
    failed = False
    for name in arguments.kinds.split(","):
        with tempfile.TemporaryDirectory() as folder:
            try:
                for row in Upgrades(KINDS[name], environments, arguments, Path(folder)).rows():
                    rows.append(row)
                    print(json.dumps(row), flush=True)
                    if arguments.json is not None:
                        lines = [cells(one) for one in rows]
                        write_figures(arguments.json, "Upgrades of vLLM", HEAD, lines, set_up_facts, releases=rows)
            except (Failed, subprocess.TimeoutExpired) as error:
                print(f"{name}: {error}", flush=True)
                failed = True
    print("\n" + table(HEAD, [cells(one) for one in rows]))
    raise SystemExit(int(failed or not all(one["good"] for one in rows)))


if __name__ == "__main__":
    main()
