"""vLLM with and without a store behind it: time to first token, what was loaded, wrong answers, memory.

    python benchmarks/vllm_offload.py MODEL --vllm-python ENVIRONMENT/bin/python [--dtype float32] [--rounds 3]
        [--only reload documents chat agents] [--traces FOLDER]

MODEL is a folder (see random_model.py); the environment is made by `.ci/vllm FOLDER`. Contenders, each in a process of its own:

alone      vLLM and its own prefix cache
foreword   ForewordConnector over memory and disk, over tmpfs, over disk
example    vLLM's ExampleConnector, which writes files

Workloads:

reload     a prompt of 4,096 tokens, computed, hit in vLLM's own cache, and loaded after vLLM forgot it; then again in a fresh
           process with the same store
documents  long documents asked several times in turn, in a device cache too small for all of them
chat       conversations that take turns, each turn with all that was said
agents     the sessions in --traces (one JSON object a line with `input` and `output`), a byte as a token, in turn

In float32 every answer is compared with that of vLLM alone; a difference is a wrong answer.
"""

import argparse
import json
import os
import random
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from timing import machine, median, set_up, table

Prompt = list[int] | str
Result = dict[str, Any]


class Failed(Exception):
    """A contender did not come to its end; the others go on."""


@dataclass(frozen=True)
class Contender:
    """A vLLM with a connector, or none."""

    name: str
    transfer: dict[str, Any] | None
    folders: tuple[str, ...] = ()


def contenders(folder: Path) -> list[Contender]:
    """All of them, with stores below `folder` and in /dev/shm."""
    disk, shm = f"{folder}/kv", f"/dev/shm/{folder.name}"
    found = [Contender("alone", None)]
    for name, store, folders in (
        ("foreword memory + disk", ["memory://?size=2GiB", f"disk://{disk}?size=8GiB"], (disk,)),
        ("foreword tmpfs", [f"disk://{shm}?size=4GiB"], (shm,)),
        ("foreword disk", [f"disk://{disk}?size=8GiB"], (disk,)),
    ):
        found.append(
            Contender(
                name,
                {
                    "kv_connector": "ForewordConnector",
                    "kv_connector_module_path": "foreword.integrations.vllm",
                    "kv_role": "kv_both",
                    "kv_connector_extra_config": {"store": store},
                },
                folders,
            )
        )
    example = f"{folder}/example"
    settings = {"shared_storage_path": example}
    found.append(
        Contender(
            "example",
            {"kv_connector": "ExampleConnector", "kv_role": "kv_both", "kv_connector_extra_config": settings},
            (example,),
        )
    )
    return found


def run(arguments: argparse.Namespace, contender: Contender, prompts: Sequence[Prompt], **job: Any) -> Result:
    """One process."""
    given = {
        "model": str(arguments.model),
        "dtype": arguments.dtype,
        "transfer": contender.transfer,
        "prompts": list(prompts),
        "kv_bytes": 1 << 30,
        "max_model_len": 8192,
        **job,
    }
    checkout = str(Path(__file__).resolve().parent.parent)
    openmp = Path(arguments.vllm_python).parent.parent / "lib" / "libiomp5.so"
    variables = {**os.environ, "PYTHONPATH": checkout} | ({"LD_PRELOAD": str(openmp)} if openmp.exists() else {})
    worker = str(Path(__file__).resolve().parent / "vllm_worker.py")
    done = subprocess.run(
        [arguments.vllm_python, worker, "-"],
        input=json.dumps(given),
        capture_output=True,
        text=True,
        env=variables,
        check=False,
    )
    if done.returncode:
        reason = [line for line in done.stderr.splitlines() if line.strip()][-1:]
        raise Failed(f"{contender.name}: {' '.join(reason)[-300:]}")
    found: Result = json.loads(done.stdout.strip().splitlines()[-1])
    return found


def reload(arguments: argparse.Namespace, field: Sequence[Contender], draw: random.Random) -> list[list[str]]:
    """Time to first token of a long prompt, by where its KV lies."""
    rows = []
    for contender in field:
        try:
            rows.append(reload_one(arguments, contender, draw))
        except Failed as error:
            print(error, flush=True)
    return rows


def reload_one(arguments: argparse.Namespace, contender: Contender, draw: random.Random) -> list[str]:
    """One contender's row."""
    clean(contender)
    texts = [tokens(draw, 4096) for _ in range(arguments.rounds)]
    first: list[Prompt] = []
    for text in texts:
        first += [text, text, "forget", text, "forget"]
    results = run(arguments, contender, first)["results"]
    times = {name: [one["ttft"] for one in results[i::3]] for i, name in enumerate(("cold", "own", "again"))}
    fresh, loaded, wrong = "-", 0, 0
    if contender.transfer is not None:
        again = run(arguments, contender, texts)["results"]
        fresh = ms([one["ttft"] for one in again])
        loaded = sum(one["cached"] for one in again) // len(again)
        wrong = sum(a["tokens"] != b["tokens"] for a, b in zip(again, results[1::3], strict=True))
    row = [contender.name, *(ms(times[name]) for name in times), fresh, str(loaded), str(wrong)]
    print(row, flush=True)
    return row


def replay(
    arguments: argparse.Namespace, field: Sequence[Contender], prompts: Sequence[list[int]], kv_bytes: int
) -> list[list[str]]:
    """A list of requests, one after the other, in a device cache of `kv_bytes`."""
    rows, answers = [], None
    for contender in field:
        clean(contender)
        try:
            found = run(arguments, contender, prompts, kv_bytes=kv_bytes)
        except Failed as error:
            print(error, flush=True)
            continue
        results = found["results"]
        times = sorted(one["ttft"] for one in results)
        mine = [one["tokens"] for one in results]
        answers = answers or mine
        wrong = sum(a != b for a, b in zip(mine, answers, strict=True))
        asked = sum(map(len, prompts))
        rows.append(
            [
                contender.name,
                *(f"{times[min(int(len(times) * share), len(times) - 1)] * 1e3:,.0f} ms" for share in (0.5, 0.9, 0.99)),
                f"{sum(one['whole'] for one in results):.1f} s",
                f"{sum(one['cached'] for one in results) / asked:.0%}",
                f"{wrong} of {len(mine)}",
                f"{found['peak'] / 2**30:.1f} GiB",
            ]
        )
        print(rows[-1], flush=True)
    return rows


def documents(draw: random.Random) -> list[list[int]]:
    """Six documents, three questions each, asked in turn."""
    texts = [tokens(draw, length) for length in (2000, 3000, 4000, 5000, 6000, 7000)]
    return [[*text, *tokens(draw, 30)] for _ in range(3) for text in texts]


def chat(draw: random.Random) -> list[list[int]]:
    """Eight conversations of six turns, with a system prompt in common."""
    system = tokens(draw, 600)
    talks = [list(system) for _ in range(8)]
    asked = []
    for _ in range(6):
        for talk in talks:
            talk += tokens(draw, draw.randrange(60, 300))
            asked.append(list(talk))
            talk += tokens(draw, 100)
    return asked


def agents(folder: Path, longest: int) -> list[list[int]]:
    """Sessions taken from real traffic, taking turns; a byte is a token, what is too long is left out."""
    sessions = []
    for path in sorted(folder.glob("agent-*.jsonl"))[:6]:
        lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        steps = [[byte + 1 for byte in line["input"].encode()] for line in lines]
        sessions.append([step for step in steps if len(step) < longest])
    asked = []
    for number in range(max(map(len, sessions))):
        asked += [session[number] for session in sessions if number < len(session)]
    return asked


def tokens(draw: random.Random, count: int) -> list[int]:
    return [draw.randrange(1, 8000) for _ in range(count)]


def ms(seconds: Sequence[float]) -> str:
    return f"{median(seconds) * 1e3:,.0f} ms"


def clean(contender: Contender) -> None:
    for folder in contender.folders:
        shutil.rmtree(folder, ignore_errors=True)


def main() -> None:
    """Runs the workloads and prints a table for each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--vllm-python", required=True)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", nargs="+", default=["reload", "documents", "chat"])
    parser.add_argument("--contenders", nargs="+", help="names, or parts of them")
    parser.add_argument("--traces", type=Path)
    parser.add_argument("--kv-mib", type=int, default=256, help="the device's cache in replayed workloads")
    arguments = parser.parse_args()
    print(set_up({**machine(), "model": arguments.model.name, "dtype": arguments.dtype}), flush=True)
    draw = random.Random(3)
    replayed = ["contender", "TTFT p50", "p90", "p99", "all requests", "cached", "wrong answers", "peak memory"]
    with tempfile.TemporaryDirectory() as folder:
        field = contenders(Path(folder))
        if arguments.contenders:
            field = [one for one in field if any(part in one.name for part in arguments.contenders)]
        for name in arguments.only:
            print(f"\n{name}")
            if name == "reload":
                head = [
                    "contender",
                    "cold",
                    "own cache",
                    "forgotten",
                    "fresh process",
                    "tokens loaded",
                    "wrong answers",
                ]
                print(table(head, reload(arguments, field, draw)))
                continue
            asked = {"documents": lambda: documents(draw), "chat": lambda: chat(draw)}.get(
                name, lambda: agents(arguments.traces, 7000)
            )()
            print(table(replayed, replay(arguments, field, asked, arguments.kv_mib << 20)))
        for contender in field:
            clean(contender)


if __name__ == "__main__":
    main()
