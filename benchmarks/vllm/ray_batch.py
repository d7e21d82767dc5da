"""A Ray Data job with two vLLM workers that is killed half-way and run again by others: without a store, and with one on disk.

    python -m benchmarks.vllm.ray_batch --ray-python ENVIRONMENT/bin/python [--prompts 500] [--documents 5] [--tokens 4000]
        [--workers 2] [--model FOLDER] [--json FILE]

The environment is made by `.ci/ray`; the model is a random Llama of 16M parameters in float32. Every prompt is one of the
documents and a question of 16 tokens, in random order, and has 8 tokens of answer. vLLM's own cache has room for all. Three
jobs, each on a cluster of its own: alone without a store; with a store, all processes of the cluster killed (SIGKILL) when half
of the prompts are answered; and again from the start, over the same store. Prints for each the time and the processor seconds
from the first request to the last answer, the time with the starts of Ray and vLLM, and how many answers differ from the first.
"""

import argparse
import contextlib
import json
import os
import random
import signal
import subprocess
import tempfile
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.harness import machine, ratio, set_up, table, write_figures
from benchmarks.vllm.processes import ROOT, family

_QUESTION, _NEW = 16, 8


class JobFailed(Exception):
    """A job ended early, with the end of its log."""


def draw(documents: int, prompts: int, tokens: int, vocabulary: int, seed: int = 0) -> list[list[int]]:
    """Documents with a question each, in random order; every document as often as the others."""
    drawn = random.Random(seed)

    def text(length: int) -> list[int]:
        return [drawn.randrange(3, vocabulary) for _ in range(length)]

    texts = [text(tokens) for _ in range(documents)]
    found = [texts[number % documents] + text(_QUESTION) for number in range(prompts)]
    drawn.shuffle(found)
    return found


@dataclass
class Job:
    """A run of `ray_job.py`.

    Attributes:
        answers: by the number of their prompt.
        seconds: of the job, with the starts of Ray and vLLM.
        spent: processor seconds of all its processes until a moment of the monotonic clock, about once a second.
    """

    answers: dict[int, dict[str, Any]] = field(default_factory=dict)
    seconds: float = 0.0
    spent: list[tuple[float, float]] = field(default_factory=list)

    @property
    def began(self) -> float:
        """When the first request came to a worker."""
        return float(min(one["came"] for one in self.answers.values()))

    @property
    def working(self) -> float:
        """Seconds from the first request to the last answer."""
        return float(max(one["answered"] for one in self.answers.values())) - self.began

    @property
    def processor(self) -> float:
        """Processor seconds from the first request on."""
        return self.spent[-1][1] - max(amount for moment, amount in self.spent if moment <= self.began)

    @property
    def workers(self) -> int:
        """How many workers have answered: each counts its own requests."""
        requests = [one["request"] for one in self.answers.values()]
        return max(map(requests.count, set(requests)))

    def wrong(self, right: "Job") -> int:
        """Answers with other tokens."""
        return sum(one["tokens"] != right.answers[number]["tokens"] for number, one in self.answers.items())


def run(python: str, job: dict[str, Any], log: Path, *, until: int | None = None) -> Job:
    """Run a job on a cluster of its own; `until` is a number of answers, where all its processes are killed.

    Raises JobFailed if it ended before all prompts were answered.
    """
    environment = {
        **os.environ, "PYTHONPATH": str(ROOT), "RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "disabled",
        "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    command = [python, "-m", "benchmarks.vllm.ray_job", json.dumps(job)]
    started, found = time.perf_counter(), Job()
    with log.open("w") as file:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=file, text=True, env=environment)
    watch, done = threading.Event(), False
    watcher = threading.Thread(target=_watch, args=(process.pid, found.spent, watch))
    watcher.start()
    try:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith('{"came"'):
                answer = json.loads(line)
                found.answers[answer["number"]] = answer
                done = until is not None and len(found.answers) >= until
                if done:
                    break
        if not done and process.wait():
            raise JobFailed(log.read_text()[-3000:])
    finally:
        watch.set()
        watcher.join()
        if process.poll() is None:
            for pid in family(process.pid):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            process.wait()
    found.seconds = time.perf_counter() - started
    return found


def _watch(root: int, spent: list[tuple[float, float]], end: threading.Event) -> None:
    """Note what a process and all below it have computed. Those that have ended count with what was seen last."""
    ticks, seen = os.sysconf("SC_CLK_TCK"), dict[int, float]()
    while True:
        moment = time.monotonic()
        for pid in family(root):
            with contextlib.suppress(OSError):
                fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
                seen[pid] = (int(fields[11]) + int(fields[12])) / ticks
        spent.append((moment, sum(seen.values())))
        if end.wait(1.0):
            return


def make_model(folder: Path) -> Path:
    """A Llama of 16M parameters whose attention is sharp."""
    import torch
    import transformers

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=4096, hidden_size=384, intermediate_size=1024, num_hidden_layers=8, num_attention_heads=6,
        num_key_value_heads=2, head_dim=64, initializer_range=0.15, max_position_embeddings=32768,
        pad_token_id=0, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def main() -> None:
    """Run the three jobs, print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ray-python", required=True)
    parser.add_argument("--model", type=Path, help="a folder; by default a random model")
    parser.add_argument("--prompts", type=int, default=500)
    parser.add_argument("--documents", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=4000)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = given.model or make_model(folder / "model")
        vocabulary = json.loads((model / "config.json").read_text())["vocab_size"]
        prompts = folder / "prompts.json"
        prompts.write_text(json.dumps(draw(given.documents, given.prompts, given.tokens, vocabulary)))
        llm = {"max_model_len": given.tokens + 64, "kv_cache_memory_bytes": 1 << 30}
        job = {"model": str(model), "prompts": str(prompts), "workers": given.workers, "new_tokens": _NEW, "llm": llm}
        store = [f"disk://{folder}/kv?size=8GiB"]
        jobs: dict[str, dict[str, Any]] = {
            "no store": {"store": None},
            "disk store, killed": {"store": store, "until": given.prompts // 2},
            "disk store, again": {"store": store},
        }
        rows, runs = [], list[Job]()
        for title, one in jobs.items():
            made = run(given.ray_python, {**job, "store": one["store"]}, folder / "log", until=one.get("until"))
            runs.append(made)
            gains = [ratio(runs[0].working, made.working), ratio(runs[0].processor, made.processor)]
            shown = ["" if "until" in one else f"{gain:.1f}x" for gain in gains]
            times = [f"{made.working:.1f} s", shown[0], f"{made.processor:.1f} s", shown[1], f"{made.seconds:.1f} s"]
            rows.append([title, str(made.workers), *times, f"{made.wrong(runs[0])} of {len(made.answers)}"])
            print(rows[-1], flush=True)
    head = [
        "job",
        "workers",
        "first request to last answer",
        "faster",
        "processor",
        "less",
        "with starts",
        "wrong answers",
    ]
    facts = {
        "prompts": f"{given.prompts} over {given.documents} documents of {given.tokens:,} tokens",
        "workers": f"{given.workers} of one thread",
        **machine(),
    }
    print(set_up(facts))
    print(table(head, rows))
    if given.json is not None:
        write_figures(given.json, "A batch job killed half-way and run again", head, rows, facts)


if __name__ == "__main__":
    main()
