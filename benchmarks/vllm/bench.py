"""Parts that the workloads of `vllm/offload.py` share: contenders in turn, records, comparisons, tables."""

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.harness import table
from benchmarks.vllm.contenders import Contender
from benchmarks.vllm.processes import Running
from foreword.referee.process import Answer, Failed

BLOCK = 32
PARTS = (("p50", 0.5), ("p90", 0.9), ("p99", 0.99))

Record = dict[str, Any]


@dataclass
class Bench:
    """One run of the script: what was asked for, and what came out so far."""

    arguments: argparse.Namespace
    alone: Contender
    taking_part: list[Contender]
    logs: Path
    facts: dict[str, str]
    records: list[Record] = field(default_factory=list)
    answers: dict[str, list[Answer]] = field(default_factory=dict)

    def running(self, contender: Contender) -> Running:
        return Running(contender, self.logs, private=self.arguments.private_network)

    def job(self, longest: int, device_tokens: int) -> dict[str, Any]:
        """Arguments of a vLLM: requests of at most `longest` tokens, and a device cache of so many tokens."""
        blocks = -(-max(device_tokens, longest) // BLOCK) + 2
        return {
            "model": str(self.arguments.model),
            "dtype": self.arguments.dtype,
            "max_model_len": longest,
            "kv_cache_memory_bytes": blocks * BLOCK * token_bytes(self.arguments.model, self.arguments.dtype),
        }

    def each(self, workload: str, measure: Callable[[Contender], Record], among: Iterable[Contender]) -> list[Record]:
        """Measures one contender after the other. One that fails gets a record that says why."""
        found = []
        for contender in among:
            began = time.monotonic()
            try:
                record = measure(contender)
            except Failed as error:
                record = {"failed": str(error)}
            taken = round(time.monotonic() - began, 1)
            record = {"workload": workload, "contender": contender.name, **record, "took": taken}
            print("  ", json.dumps({key: value for key, value in record.items() if key != "samples"}), flush=True)
            found.append(record)
            self.records.append(record)
            self.write()
        return found

    def write(self) -> None:
        if self.arguments.json:
            command = [Path(sys.argv[0]).name, *sys.argv[1:]]
            given = {"set_up": self.facts, "command": command, "records": self.records}
            self.arguments.json.write_text(json.dumps(given, indent=1) + "\n", encoding="utf-8")

    def wrong(self, workload: str, contender: Contender, results: list[Answer]) -> Record:
        """Compares with vLLM alone, whose answers are kept when it has its turn."""
        reference = self.answers.get(workload)
        if contender.transfer is None:
            self.answers[workload], reference = results, None
        if reference is None:
            return {"wrong": None, "answers": len(results)}
        return compare(results, reference)


def compare(results: Sequence[Answer], reference: Sequence[Answer]) -> Record:
    """Answers with other tokens, and how far the log-probabilities of equal ones are apart at most."""
    wrong, apart = 0, 0.0
    for mine, theirs in zip(results, reference, strict=True):
        if mine["tokens"] != theirs["tokens"]:
            wrong += 1
            continue
        apart = max(apart, *(abs(a - b) for a, b in zip(mine["logprobs"], theirs["logprobs"], strict=True)))
    return {"wrong": wrong, "answers": len(results), "logprob_apart": apart}


def spread(values: Sequence[float]) -> Record:
    """Milliseconds at the median, the 90th and the 99th percentile (nearest rank: of few values that is the worst)."""
    ordered = sorted(values)
    places = {name: ordered[min(int(len(ordered) * part), len(ordered) - 1)] for name, part in PARTS}
    return {"n": len(ordered), **{name: round(value * 1e3, 1) for name, value in places.items()}}


def share(results: Sequence[Answer]) -> float:
    """Of the prompts' tokens, those that were not computed."""
    cached: int = sum(one["cached"] for one in results)
    asked: int = sum(one["asked"] for one in results)
    return round(cached / asked, 4)


def token_bytes(model: Path, dtype: str) -> int:
    """Bytes of keys and values per token."""
    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    heads = config.get("num_key_value_heads") or config["num_attention_heads"]
    head = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    return int(config["num_hidden_layers"] * heads * head * 2 * {"float32": 4, "bfloat16": 2, "float16": 2}[dtype])


def print_table(title: str, head: list[str], found: list[Record], row: Callable[[Record], list[str]]) -> None:
    """Those that came to their end, and below them why the others did not."""
    rows = [[one["contender"], *row(one)] for one in found if "failed" not in one]
    print(f"\n{title}\n")
    if rows:
        print(table(head, rows))
    for one in found:
        if "failed" in one:
            print(f"{one['contender']}: {one['failed']}")
    print(flush=True)


def two(stage: Record | None) -> str:
    return f"{stage['p50']:,.0f} / {stage['p99']:,.0f}" if stage else "-"


def percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.0%}"


def of(one: Record) -> str:
    return "-" if one.get("wrong") is None else f"{one['wrong']} of {one['answers']}"


def gib(size: int) -> str:
    return f"{size / 2**30:.1f} GiB"
