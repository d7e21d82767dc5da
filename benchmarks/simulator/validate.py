"""Does the simulator tell the truth? Traffic through real servers and a real router, and through the simulator.

    python -m benchmarks.simulator.validate mooncake TRACE [--replicas 3] [--policies cost,round-robin] [--requests 1500]
    python -m benchmarks.simulator.validate agents TRACE... [--copies 4]
    python -m benchmarks.simulator.validate documents
    python -m benchmarks.simulator.validate sessions

Starts `foreword serve` (one thread each, a small model) and `foreword route` for each policy anew, sends the requests at their
time, streaming, and compares what the clients saw with what `simulate` expects of the same tokens. The status is 1 if the
shares of cached tokens differ by more than two points, or the median or the 90th percentile of the time to first token (TTFT)
by more than 20 %. With --rounds all of it is repeated with other seeds, and the means are compared.

The servers, the router and the clients share the machine's cores: a server that computes delays the others, which no
simulation of separate machines knows. With --cores each server has only that share of a core, so that all have theirs at any
time (as long as the shares of all leave something for the router and the clients); it needs root and Linux's control groups.

The costs are those of the servers under this load: in each round, before the comparison, the first requests of the trace
(--calibrate) go round robin through such servers, and the costs of their steps are fitted to the metrics of all rounds
(`foreword calibrate --metrics`). What the clients waited beyond the servers' own TTFT is the cost of a request. --costs takes
a file instead, --idle-costs what `foreword calibrate` measures on an idle machine. `cores` in the table is the mean number of
cores that servers, router and clients used.

One request that goes elsewhere changes where later ones go, in the servers and in the simulator. So the simulation is repeated
with costs that differ by up to a tenth; the mean counts, and the ranges are shown. If about a tenth of the requests are
computed, the 90th percentile is between the TTFT of hits and of computed prompts, and needs many rounds.
"""

import argparse
import asyncio
import json
import os
import queue
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx

from benchmarks.harness import machine, set_up, table
from benchmarks.simulator.workloads import documents, growing, scaled, sessions, spread
from foreword.sim.costs import EngineCosts, FleetSpec, Profile, read_profile
from foreword.sim.report import Summary, quantile, summarize
from foreword.sim.run import simulate
from foreword.sim.serving_metrics import Snapshot, calibrate, sample
from foreword.sim.trace import TraceRequest

START_SECONDS = 180.0
WITHIN = 0.02
TTFT_WITHIN = 0.2
NEARLY = tuple(0.9 + 0.02 * i for i in range(11))
STEP_TOKENS = 512
SESSIONS = 18
PERIOD = 5000  # microseconds in which a limited server may compute for its share


@dataclass
class Seen:
    """One answer as the client saw it."""

    prompt_tokens: int
    cached_tokens: int
    ttft: float
    itl: float
    status: int


@dataclass
class Measured:
    """A trace through real servers: what the clients saw, the servers' metrics and the cores in use."""

    trace: Sequence[TraceRequest]
    seen: Sequence[Seen]
    series: dict[str, list[Snapshot]]
    cores: float


def main() -> int:
    arguments = read_arguments()
    with tempfile.TemporaryDirectory(prefix="foreword-validate-") as folder:
        idle = arguments.idle_costs or not (arguments.seconds or arguments.costs)
        given = (
            read_profile(arguments.costs or calibrated(arguments, Path(folder))) if arguments.costs or idle else None
        )
    policies, loaded = arguments.policies.split(","), not (arguments.costs or arguments.idle_costs)
    calibrations: list[Measured] = []
    runs: dict[str, list[Measured]] = {policy: [] for policy in policies}
    for number in range(arguments.rounds):
        trace = workload(arguments, given, number + 1)
        if not number:
            print(set_up(facts(arguments, trace)) + "\n", flush=True)
        if given is None or loaded:
            calibrations.append(asyncio.run(measured(arguments, trace[: arguments.calibrate], "round-robin")))
        for policy in policies:
            runs[policy].append(asyncio.run(measured(arguments, trace, policy)))
        print(f"round {number + 1} of {arguments.rounds}: done", flush=True)
    costs = under_load(calibrations) if calibrations or given is None else given.costs
    print(f"{costs}\n", flush=True)
    rows, within = [], True
    for policy in policies:
        found, good = compared(policy, runs[policy], [simulated(arguments, one, policy, costs) for one in runs[policy]])
        rows += found
        within = within and good
    head = ["policy", "", "hits", "range", "TTFT mean", "p50", "p90", "ITL mean", "cores", "failed"]
    print("\n" + table(head, rows))
    print(
        f"\nAllowed: hits {WITHIN * 100:.0f} points, TTFT p50 and p90 {TTFT_WITHIN:.0%}. "
        + ("Met." if within else "NOT met.")
    )
    return 0 if within else 1


def facts(arguments: argparse.Namespace, trace: Sequence[TraceRequest]) -> dict[str, str]:
    prompts = sum(one.prompt_tokens for one in trace)
    return machine() | {
        "model": arguments.model or "embedded",
        "replicas": f"{arguments.replicas} servers of {arguments.device} tokens, one thread each, and a router",
        "traffic": f"{arguments.workload}: {len(trace)} requests, {prompts:,} prompt tokens in {trace[-1].arrival:.0f} s",
        "rounds": str(arguments.rounds),
    }


def compared(
    policy: str, runs: Sequence[Measured], expected: Sequence[Sequence[Summary]]
) -> tuple[list[list[str]], bool]:
    """Rows of the table: measured and simulated in each round, and the difference of the means; and whether that is as
    small as it must be."""
    rows, ours, theirs = [], [], []
    for run, found in zip(runs, expected, strict=True):
        times = sorted(one.ttft for one in run.seen)
        share = sum(one.cached_tokens for one in run.seen) / sum(one.prompt_tokens for one in run.seen)
        itl = sum(one.itl for one in run.seen) / len(run.seen)
        ours.append([share, sum(times) / len(times), quantile(times, 0.5), quantile(times, 0.9), itl])
        values = [(one.hit_share, one.mean, one.p50, one.p90, one.per_token) for one in found]
        theirs.append([sum(column) / len(values) for column in zip(*values, strict=True)])
        hits, late = sorted(one.hit_share for one in found), sorted(one.p90 for one in found)
        bounds = f"{hits[0]:.1%} to {hits[-1]:.1%}, p90 {late[0] * 1e3:.0f} to {late[-1] * 1e3:.0f} ms"
        failed = str(sum(one.status != 200 for one in run.seen))
        rows += [
            [policy, "measured", *in_words(ours[-1], ""), f"{run.cores:.2f}", failed],
            ["", "simulated", *in_words(theirs[-1], bounds), "", ""],
        ]
    means = [[sum(column) / len(runs) for column in zip(*side, strict=True)] for side in (ours, theirs)]
    points = means[1][0] - means[0][0]
    changes = [their / our - 1 for our, their in zip(means[0][1:], means[1][1:], strict=True)]
    rows.append(["", "difference", f"{points * 100:+.2f}", "", *(f"{value:+.0%}" for value in changes), "", ""])
    return rows, abs(points) <= WITHIN and max(map(abs, changes[1:3])) <= TTFT_WITHIN


def in_words(values: Sequence[float], bounds: str) -> list[str]:
    return [f"{values[0]:.1%}", bounds, *(f"{value * 1e3:.1f} ms" for value in values[1:])]


def read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workload", choices=("mooncake", "agents", "documents", "sessions"))
    parser.add_argument("traces", nargs="*", type=Path)
    parser.add_argument("--model", help="a folder; the embedded model if not given")
    parser.add_argument("--replicas", type=int, default=3)
    parser.add_argument("--policies", default="cost,round-robin")
    parser.add_argument("--requests", type=int, default=1500)
    parser.add_argument("--copies", type=int, default=4, help="of each agent's session")
    parser.add_argument("--device", type=int, default=16384, help="tokens of KV memory of each server")
    parser.add_argument("--cores", type=float, help="limit each server to so much of a core, as if on its own machine")
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--longest", type=int, default=6000, help="longer prompts are left out")
    parser.add_argument("--answer", type=int, default=24, help="answers are cut to so many tokens")
    parser.add_argument(
        "--seconds", type=float, help="how long the traffic takes; else as long as keeps 40 %% of the cores busy"
    )
    parser.add_argument("--calibrate", type=int, default=300, help="requests that the costs under load are fitted to")
    parser.add_argument("--rounds", type=int, default=1, help="each with other seeds; the means are compared")
    parser.add_argument("--idle-costs", action="store_true", help="costs of an idle machine")
    parser.add_argument("--costs", type=Path)
    return parser.parse_args()


def calibrated(arguments: argparse.Namespace, folder: Path) -> Path:
    out = folder / "costs.json"
    command = [sys.executable, "-m", "foreword", "calibrate", *([arguments.model] if arguments.model else [])]
    command += ["--threads", "1", "--longest", "1024", "--rounds", "1", "--out", str(out)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env=environment())
    return out


def under_load(calibrations: Sequence[Measured]) -> EngineCosts:
    """The costs of servers that share the machine, from their metrics while the first requests went round robin."""
    series = {f"{i} {url}": found for i, one in enumerate(calibrations) for url, found in one.series.items()}
    profile = calibrate(series, STEP_TOKENS)
    ttft = "vllm:time_to_first_token_seconds"
    totals = [
        sum(found[-1].values[f"{ttft}_{part}"] - found[0].values[f"{ttft}_{part}"] for found in series.values())
        for part in ("sum", "count")
    ]
    seen = [one.ttft for calibration in calibrations for one in calibration.seen]
    outside = sum(seen) / len(seen) - totals[0] / totals[1]
    print(
        f"costs under load: {len(seen)} requests, {profile.about['periods']} periods, {profile.about['terms']}",
        flush=True,
    )
    return replace(profile.costs, request=max(outside, 0.0))


def simulated(arguments: argparse.Namespace, run: Measured, policy: str, costs: EngineCosts) -> list[Summary]:
    """With slightly different costs."""
    spec = FleetSpec(
        replicas=arguments.replicas,
        device_tokens=arguments.device,
        block_size=arguments.block_size,
        max_batch_tokens=STEP_TOKENS,
        max_num_seqs=64,
        partial_reuse=True,
        lookahead_blocks=4,
    )
    return [summarize(simulate(run.trace, spec, policy, costs.scaled(factor))) for factor in NEARLY]


def workload(arguments: argparse.Namespace, profile: Profile | None, seed: int) -> list[TraceRequest]:
    # Numbers that every small model's vocabulary has.
    vocabulary = 4000
    if arguments.workload == "mooncake":
        trace = scaled(arguments.traces[0], arguments.block_size, vocabulary)
    elif arguments.workload == "agents":
        trace = sessions(arguments.traces, arguments.copies, 300.0, vocabulary, seed=seed)
    elif arguments.workload == "sessions":
        trace = growing(SESSIONS, -(-arguments.requests // SESSIONS), 10.0, vocabulary, seed=seed)
    else:
        lengths = (arguments.longest // 8, arguments.longest // 2)
        trace = documents(
            arguments.requests, 1.0, vocabulary, number=24, system=512, lengths=lengths, question=(20, 80), seed=seed
        )
    kept = [replace(one, output_tokens=min(one.output_tokens, arguments.answer)) for one in trace]
    kept = [one for one in kept if one.prompt_tokens <= arguments.longest]
    if arguments.workload != "agents":
        kept = kept[: arguments.requests]
    return spread(kept, arguments.seconds or seconds_of(kept, arguments.replicas, profile))


def seconds_of(trace: Sequence[TraceRequest], replicas: int, profile: Profile | None) -> float:
    """How long traffic takes that keeps 40 % of the cores busy."""
    costs = profile.costs if profile is not None else EngineCosts()
    work = sum(costs.prefill * one.prompt_tokens + costs.base * one.output_tokens for one in trace)
    return work / min(replicas, os.cpu_count() or 1) / 0.4


# Real servers


def environment() -> dict[str, str]:
    own = {key: value for key, value in os.environ.items() if not key.startswith("FOREWORD_")}
    return own | {"OMP_NUM_THREADS": "1"}


@contextmanager
def started(*command: str, says: str) -> Iterator[tuple[str, int]]:
    """A process of `foreword`: the URL that it says and its id."""
    process = subprocess.Popen(
        [sys.executable, "-m", "foreword", *command], stderr=subprocess.PIPE, text=True, env=environment()
    )
    lines: queue.Queue[str] = queue.Queue()

    def read() -> None:
        assert process.stderr is not None
        for line in process.stderr:
            lines.put(line)
        lines.put("")

    threading.Thread(target=read, daemon=True).start()
    try:
        yield until_said(lines, says), process.pid
    finally:
        process.terminate()
        process.wait()


@contextmanager
def limited(process: int, cores: float) -> Iterator[None]:
    """The process in a control group of its own, with the weight of this one. Needs root; raises OSError without it."""
    first, second = Path("/sys/fs/cgroup/cpu"), Path("/sys/fs/cgroup")
    is_first, quota = first.is_dir(), round(cores * PERIOD)
    weight = 1.25 ** -os.getpriority(os.PRIO_PROCESS, 0)
    group = (first if is_first else second) / f"foreword-validate-{process}"
    group.mkdir()
    try:
        if is_first:
            (group / "cpu.cfs_period_us").write_text(str(PERIOD))
            (group / "cpu.cfs_quota_us").write_text(str(quota))
            (group / "cpu.shares").write_text(str(round(1024 * weight)))
        else:
            (group / "cpu.max").write_text(f"{quota} {PERIOD}")
            (group / "cpu.weight").write_text(str(min(max(round(100 * weight), 1), 10_000)))
        (group / "cgroup.procs").write_text(str(process))
        yield
        (group.parent / "cgroup.procs").write_text(str(process))
    finally:
        group.rmdir()


def until_said(lines: "queue.Queue[str]", says: str) -> str:
    said = ""
    while True:
        line = lines.get(timeout=START_SECONDS)
        said += line
        if not line:
            raise SystemExit(f"a process ended:\n{said}")
        if found := re.search(rf"{says} (http://[^\s;]+)", line):
            return found[1]


def until_ready(url: str) -> None:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        try:
            if httpx.get(f"{url}/ready").status_code == 200:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.2)
    raise SystemExit(f"{url} is not ready after {START_SECONDS:.0f} s")


def processor_seconds(processes: Sequence[int]) -> float:
    """Of these processes and of this one."""
    used = [Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[11:13] for process in processes]
    return sum(int(one) for times in used for one in times) / os.sysconf("SC_CLK_TCK") + time.process_time()


async def measured(arguments: argparse.Namespace, trace: Sequence[TraceRequest], policy: str) -> Measured:
    """The trace through fresh servers."""
    model = [arguments.model] if arguments.model else []
    flags = ["--port", "0", "--threads", "1", "--kv-memory", f"{arguments.device} tokens"]
    flags += ["--block-size", str(arguments.block_size), "--kv-events", "tcp://127.0.0.1:0", "--log-level", "info"]
    flags += ["--max-queue", str(len(trace) + 1), "--no-self-check"]
    with ExitStack() as stack:
        servers = [
            stack.enter_context(started("serve", *model, *flags, says="listens on")) for _ in range(arguments.replicas)
        ]
        urls = [url for url, _ in servers]
        for url in urls:
            until_ready(url)
        if arguments.cores:
            for _, one in servers:
                stack.enter_context(limited(one, arguments.cores))
        replicas = [part for url in urls for part in ("--replica", url)]
        waiting = ["--max-waiting", str(len(trace) + 1)]
        router, process = stack.enter_context(
            started("route", "--port", "0", "--policy", policy, *waiting, *replicas, says="routes on")
        )
        until_ready(router)
        until_all(router, len(urls))
        processes = [process, *(one for _, one in servers)]
        began, used = time.perf_counter(), processor_seconds(processes)
        metrics = asyncio.create_task(asyncio.to_thread(sample, urls, trace[-1].arrival))
        seen = await send_all(router, trace)
        cores = (processor_seconds(processes) - used) / (time.perf_counter() - began)
        series = await metrics
        # The last requests end after the trace.
        for url, snapshots in (await asyncio.to_thread(sample, urls, 0.0)).items():
            series[url] += snapshots
        return Measured(trace, seen, series, cores)


def until_all(router: str, count: int) -> None:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        listed = httpx.get(f"{router}/v1/router/replicas").json()["data"]
        if sum(one["takes_requests"] for one in listed) >= count:
            return
        time.sleep(0.2)
    raise SystemExit("not all replicas are ready")


async def send_all(url: str, trace: Sequence[TraceRequest]) -> list[Seen]:
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=600, limits=limits) as client:
        model = (await client.get("/v1/models")).json()["data"][0]["id"]
        began = time.perf_counter()

        async def at(one: TraceRequest) -> Seen:
            await asyncio.sleep(one.arrival - (time.perf_counter() - began))
            return await send(client, model, one)

        return await asyncio.gather(*(at(one) for one in trace))


async def send(client: httpx.AsyncClient, model: str, one: TraceRequest) -> Seen:
    body = {
        "model": model,
        "prompt": one.prompt().tolist(),
        "max_tokens": one.output_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if one.session is not None:
        body["prompt_cache_key"] = one.session
    sent, first, last = time.perf_counter(), 0.0, 0.0
    usage: dict[str, Any] = {}
    async with client.stream("POST", "/v1/completions", json=body) as answer:
        async for line in answer.aiter_lines():
            if not line.startswith("data: {"):
                continue
            event = json.loads(line[6:])
            if event.get("choices"):
                last = time.perf_counter()
                first = first or last
            usage = event.get("usage") or usage
    details = usage.get("prompt_tokens_details") or {}
    return Seen(
        usage.get("prompt_tokens", one.prompt_tokens),
        details.get("cached_tokens", 0),
        (first or time.perf_counter()) - sent,
        (last - first) / max(one.output_tokens - 1, 1),
        answer.status_code,
    )


if __name__ == "__main__":
    sys.exit(main())
