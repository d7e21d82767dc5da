"""`foreword simulate` and `foreword calibrate`."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer

from foreword.cli.commands import check_file, described
from foreword.config_layers import read_secret
from foreword.errors import ConfigError

if TYPE_CHECKING:
    from foreword.engine_config import Dtype
    from foreword.sim.costs import EngineCosts, Profile
    from foreword.sim.plan import SimulationCase
    from foreword.sim.run import SimulationResult
    from foreword.sim.trace import TraceRequest

_RUNS = 3
_LIST = "one or several, separated by commas"
_SIZE = "in tokens, or in bytes (40GiB)"
Traces = Annotated[list[Path], typer.Argument(metavar="TRACE...", help="Trace files (docs/reference/formats.md).")]
Replicas = Annotated[
    str | None, typer.Option("--replicas", help=f"Number of replicas: {_LIST}. [default: 8]", show_default=False)
]
Prefill = Annotated[
    str,
    typer.Option(
        "--prefill",
        help=f"Number of further replicas that only compute prompts, for the others, which decode: {_LIST}.",
    ),
]
_PERIOD = "60s"
Policies = Annotated[str, typer.Option("--policy", help=f"Routing policies: {_LIST}; `all` for all of them.")]
Groups = Annotated[
    list[str] | None,
    typer.Option(
        "--group",
        help="Further replicas, with values of their own: 'fast replicas=2 costs=fast.json device=80GiB memory=0 disk=0'. "
        "Can be repeated.",
    ),
]
Changes = Annotated[
    list[str] | None,
    typer.Option(
        "--change",
        help="Change of the fleet during the trace: '120s fail r3', '180s start r3', '2m slow r3 10', '5m remove r0', "
        "'5m add 2' or '5m add 2 GROUP'. Can be repeated.",
    ),
]
Tenants = Annotated[
    list[str] | None,
    typer.Option(
        "--tenant",
        help="Tenant that sends a share of the sessions: 'team-a share=3 priority=5'. Lower priorities are more urgent, as in "
        "vLLM. Can be repeated.",
    ),
]
TenantQuotas = Annotated[
    list[str] | None,
    typer.Option(
        "--quota", help="Limits of a tenant, as for a router: 'team-a requests=60 tokens=100000 concurrent=8'."
    ),
]
Device = Annotated[str, typer.Option("--device", help=f"KV memory on each replica's device, {_SIZE}; {_LIST}.")]
Memory = Annotated[str, typer.Option("--memory", help="Host memory tier of each replica, in the same format.")]
Disk = Annotated[str, typer.Option("--disk", help="Disk tier of each replica, in the same format.")]
Shared = Annotated[str, typer.Option("--shared", help="Tier that all replicas share, in the same format.")]
Costs = Annotated[
    Path | None,
    typer.Option("--costs", help="File with the times of steps and loads, from `foreword calibrate`."),
]
KvBytes = Annotated[int | None, typer.Option("--kv-bytes", min=1, help="Bytes of KV per token.")]
BlockSize = Annotated[
    int | None,
    typer.Option("--block-size", min=1, help="Tokens per block; by default that of the --costs file or of the trace."),
]
Batch = Annotated[
    int | None, typer.Option("--max-batch-tokens", min=1, help="Maximum number of tokens in a step. [default: 2048]")
]
Seqs = Annotated[
    int | None, typer.Option("--max-num-seqs", min=1, help="Maximum number of sequences in a step. [default: 256]")
]
Events = Annotated[
    bool,
    typer.Option("--events/--no-events", help="Replicas publish KV events, or the router estimates them."),
]
Learn = Annotated[bool, typer.Option("--learn/--know", help="The router learns the costs, or knows them.")]
Speed = Annotated[
    float, typer.Option("--speed", help="Factor for the arrival rate: 2 halves the time between requests.")
]
Copies = Annotated[
    int,
    typer.Option("--copies", help="Replay a trace of blocks this many times at once, each copy with other prompts."),
]
Limit = Annotated[
    int | None, typer.Option("--limit", min=1, help="Number of requests to simulate, from the start of the trace.")
]
Out = Annotated[Path | None, typer.Option("--out", help="Write an HTML page with charts to this file.")]
Svg = Annotated[Path | None, typer.Option("--svg", help="Write the charts as SVG files to this folder.")]
Slo = Annotated[
    list[str] | None,
    typer.Option(
        "--slo",
        help="Find the smallest fleet that meets this service level, such as 'p90 ttft < 1 s'. Can be repeated. "
        "--replicas then lists the numbers to choose from. [default: 1 to 256]",
    ),
]
Price = Annotated[float | None, typer.Option("--price", help="With --slo: price of a replica per hour.")]
Runs = Annotated[
    int, typer.Option("--runs", help="With --slo: simulations of each fleet, with costs that differ by up to 10 %.")
]
Jobs = Annotated[int, typer.Option("--jobs", help="With --slo: number of processes that simulate at the same time.")]
Sample = Annotated[
    int,
    typer.Option(
        "--sample",
        help="With N: one in N of the sessions, on one in N of the replicas. --replicas, --prefill and --shared are those of "
        "the whole fleet.",
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]


def register(app: typer.Typer) -> None:
    """Add the commands."""
    common = (
        *(
            "replicas",
            "policy",
            "device",
            "memory",
            "disk",
            "shared",
            "costs",
            "block-size",
            "speed",
            "limit",
            "tenant",
        ),
        *("slo", "price", "out", "json"),
    )
    example = "simulate trace.jsonl --replicas 4,8 --policy all --out fleet.html"
    app.command("simulate", **described(example, common=common))(simulate)
    app.command("calibrate", **described("calibrate Qwen/Qwen3-0.6B --out costs.json"))(calibrate)


def simulate(
    traces: Traces,
    *,
    replicas: Replicas = None,
    prefill: Prefill = "0",
    group: Groups = None,
    change: Changes = None,
    tenant: Tenants = None,
    quota: TenantQuotas = None,
    policy: Policies = "cost",
    device: Device = "1000000",
    memory: Memory = "0",
    disk: Disk = "0",
    shared: Shared = "0",
    costs: Costs = None,
    kv_bytes: KvBytes = None,
    block_size: BlockSize = None,
    max_batch_tokens: Batch = None,
    max_num_seqs: Seqs = None,
    events: Events = True,
    learn: Learn = True,
    speed: Speed = 1.0,
    copies: Copies = 1,
    limit: Limit = None,
    sample: Sample = 1,
    out: Out = None,
    svg: Svg = None,
    slo: Slo = None,
    price: Price = None,
    runs: Runs = _RUNS,
    jobs: Jobs = 1,
    as_json: AsJson = False,
) -> None:
    """Simulate hit rate, TTFT and cost for a trace.

    Runs the real scheduler, block pool, eviction and routing in virtual time, for every combination of the given values.
    """
    from foreword.routing.policies import POLICIES
    from foreword.sim.changes import parse_change
    from foreword.sim.costs import EngineCosts, FleetSpec, Profile, read_profile
    from foreword.sim.plan import counts, parse_group, simulation_cases, sizes
    from foreword.sim.trace import block_size_of, multiplied, parse_tenant, read_trace, sampled, with_tenants

    check_file("--out", out)
    trace = sampled(multiplied(read_trace(traces, speed=speed), copies)[:limit], sample)
    trace = with_tenants(trace, list(map(parse_tenant, tenant or ())))
    profile = read_profile(costs) if costs is not None else Profile(EngineCosts())
    per_token = kv_bytes or profile.kv_bytes_per_token
    axes = {
        "replicas": [(1, "1")] if slo else counts(replicas or f"{8 * sample}", "--replicas", sample),
        "prefill_replicas": counts(prefill, "--prefill", sample),
        "device_tokens": sizes(device, "--device", per_token),
        "host_tokens": sizes(memory, "--memory", per_token),
        "disk_tokens": sizes(disk, "--disk", per_token),
        "shared_tokens": [(tokens // sample, text) for tokens, text in sizes(shared, "--shared", per_token)],
    }
    block_tokens = block_size or block_size_of(trace, profile.block_size)
    base = FleetSpec(
        device_tokens=max(1_000_000, block_tokens),
        block_size=block_tokens,
        max_batch_tokens=max_batch_tokens or profile.max_batch_tokens or 2048,
        max_num_seqs=max_num_seqs or profile.max_num_seqs or 256,
        events=events,
        learns=learn,
        groups=tuple(parse_group(text, per_token) for text in group or ()),
        changes=tuple(map(parse_change, change or ())),
        quotas=tuple(quota or ()),
    )
    policies = list(POLICIES) if policy == "all" else [part.strip() for part in policy.split(",") if part.strip()]
    cases, about = simulation_cases(base, axes, policies), _about(traces, trace, costs, profile, sample)
    if not cases:
        raise ConfigError(f"--policy names no policy; choose from {', '.join((*POLICIES, 'all'))}")
    if price is not None and not (slo and 0 <= price < float("inf")):
        raise ConfigError("--price is a number that is not negative, and needs --slo")
    if not slo and (runs != _RUNS or jobs != 1):
        raise ConfigError("--runs and --jobs need --slo: one simulation of each fleet gives the table")
    if sample > 1 and (group or change or quota):
        raise ConfigError("--sample divides a fleet of equal replicas: no --group, --change and --quota")
    if slo:
        if group or change:
            raise ConfigError(
                "--slo chooses the number of equal replicas that run all the time: no --group and --change"
            )
        if out is not None or svg is not None:
            raise ConfigError("--slo prints a table or JSON; simulate the fleet that it finds for --out and --svg")
        numbers = [number for number, _ in counts(replicas, "--replicas", sample)] if replicas else range(1, 257)
        _size_fleets(cases, numbers, sample, trace, profile.costs, slo, price, runs, jobs, about, as_json)
        return
    _write_results(_run(cases, trace, profile), about, out, svg, as_json)


def _size_fleets(
    cases: Sequence[SimulationCase],
    numbers: Sequence[int],
    sample: int,
    trace: Sequence[TraceRequest],
    costs: EngineCosts,
    slo: Sequence[str],
    price: float | None,
    runs: int,
    jobs: int,
    about: str,
    as_json: bool,
) -> None:
    from foreword.sim.sizing import Sizing, parse_objective, sizes_table

    objectives = [parse_objective(text) for text in slo]
    sizing = Sizing(
        trace, costs, objectives, runs=runs, jobs=jobs, progress=lambda text: print(text, file=sys.stderr, flush=True)
    )
    found = sizing.search(cases, numbers)
    if as_json:
        plain = [dataclasses.asdict(one) | {"price": one.hours * price if price is not None else None} for one in found]
        print(json.dumps({"about": about, "sample": sample, "fleets": plain}, indent=2))
    else:
        print(f"{about}\n\n{sizes_table(found, objectives, price, sample)}")
    if all(one.replicas is None for one in found):
        raise typer.Exit(1)


def _run(cases: Sequence[SimulationCase], trace: Sequence[TraceRequest], profile: Profile) -> list[SimulationResult]:
    from foreword.sim.run import simulate as run

    with _progress(len(cases) * len(trace)) as step:
        return [_one(run, case, trace, profile, step) for case in cases]


def _one(
    run: Callable[..., SimulationResult],
    case: SimulationCase,
    trace: Sequence[TraceRequest],
    profile: Profile,
    step: Callable[[int, str], None],
) -> SimulationResult:
    seen = 0

    def progress(arrived: int) -> None:
        nonlocal seen
        step(arrived - seen, case.name)
        seen = arrived

    result = run(trace, case.spec, case.policy, profile.costs, name=case.name, progress=progress)
    progress(len(trace))
    return result


@contextmanager
def _progress(total: int) -> Iterator[Callable[[int, str], None]]:
    """A progress bar on standard error, if that is a terminal and tqdm is installed."""
    try:
        from tqdm import tqdm
    except ImportError:
        yield lambda count, name: None
        return
    with tqdm(total=total, unit="request", disable=None, leave=False) as bar:

        def step(count: int, name: str) -> None:
            bar.set_description_str(name[:40], refresh=False)
            bar.update(count)

        yield step


def _about(
    traces: Sequence[Path], trace: Sequence[TraceRequest], costs: Path | None, profile: Profile, sample: int
) -> str:
    tokens = sum(one.prompt_tokens for one in trace)
    names = ", ".join(path.name for path in traces)
    where = "default costs (about a model of 70 billion parameters on eight accelerators)"
    if costs is not None:
        about = "; ".join(
            f"{key}: {value}" for key, value in profile.about.items() if isinstance(value, str | int | float)
        )
        where = f"costs from {costs.name} ({about})"
    if sample > 1:
        names = f"one in {sample} sessions of {names}, on as many times fewer replicas"
    return f"{names}: {len(trace)} requests, {tokens:,} prompt tokens in {trace[-1].arrival:,.0f} s; {where}"


def _write_results(
    results: Sequence[SimulationResult], about: str, out: Path | None, svg: Path | None, as_json: bool
) -> None:
    from foreword.sim.report import as_file, drawings, page, phases, summarize, table, tenants

    if as_json:
        found = [
            {
                **dataclasses.asdict(summarize(one)),
                "phases": [dataclasses.asdict(phase) for phase in phases(one)],
                "tenants": [dataclasses.asdict(tenant) for tenant in tenants(one)],
                "spec": dataclasses.asdict(one.spec),
                "wall_seconds": one.wall,
            }
            for one in results
        ]
        print(json.dumps({"about": about, "simulations": found}, indent=2))
    else:
        print(f"{about}\n\n{table(results)}")
    try:
        if out is not None:
            out.write_text(page(results, about=about), encoding="utf-8")
        if svg is not None:
            svg.mkdir(parents=True, exist_ok=True)
            for name, drawing in drawings(results).items():
                (svg / f"{name}.svg").write_text(as_file(drawing), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot write {error.filename}: {error.strerror}") from error


def calibrate(
    model: Annotated[
        str | None,
        typer.Argument(metavar="MODEL", help="Folder or Hugging Face name; by default the embedded model."),
    ] = None,
    *,
    out: Annotated[Path, typer.Option("--out", help="File to write.")] = Path("costs.json"),
    metrics: Annotated[
        list[str] | None,
        typer.Option(
            "--metrics",
            help="URL of a running vLLM or Foreword server: fit the costs to its metrics instead of loading a model. Can be "
            "repeated, for servers of one kind.",
        ),
    ] = None,
    period: Annotated[
        str, typer.Option("--for", help="With --metrics: period to sample, such as 60s or 10m.")
    ] = _PERIOD,
    api_key: Annotated[str | None, typer.Option("--api-key", help="With --metrics: API key of the servers.")] = None,
    store: Annotated[
        list[str] | None,
        typer.Option("--store", help="URL of a store whose loads are measured; by default memory and disk."),
    ] = None,
    threads: Annotated[int | None, typer.Option("--threads", help="CPU threads.")] = None,
    dtype: Annotated[str, typer.Option("--dtype", help="See `foreword serve`.")] = "auto",
    block_size: Annotated[int, typer.Option("--block-size", help="Tokens per block.")] = 16,
    max_batch_tokens: Annotated[
        int | None,
        typer.Option(
            "--max-batch-tokens",
            min=1,
            help="Maximum number of tokens in a step; with --metrics that of the servers. [default: 512, with --metrics 2048]",
        ),
    ] = None,
    longest: Annotated[int, typer.Option("--longest", help="Longest context to measure, in tokens.")] = 4096,
    rounds: Annotated[int, typer.Option("--rounds", help="Number of measurements of each value.")] = 3,
) -> None:
    """Measure an engine's costs for `foreword simulate`.

    Measures the times of its steps and loads on this machine, or fits the times of steps to the metrics of running servers. The
    file is for `foreword simulate --costs`.
    """
    from foreword.sim.calibrate import CalibrationSetup, measure
    from foreword.store.urls import check_stores

    if out.exists():
        raise ConfigError(f"{out} exists already; name a new file with --out")
    check_file("--out", out)
    check_stores(store or ())

    def report(text: str) -> None:
        print(text, flush=True)

    if metrics:
        if model is not None or store:
            raise ConfigError(
                "--metrics samples running servers: MODEL and --store are for a measurement on this machine"
            )
        key = api_key and read_secret(api_key, "--api-key")
        profile = _from_metrics(metrics, period, key, max_batch_tokens or 2048, report)
    else:
        if api_key is not None or period != _PERIOD:
            raise ConfigError("--for and --api-key are for --metrics, the URL of a running server")
        sizes = block_size, max_batch_tokens or 512, longest, rounds
        profile = measure(CalibrationSetup(model, tuple(store or ()), threads, cast("Dtype", dtype), *sizes), report)
    try:
        out.write_text(profile.to_json(), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot write {out}: {error.strerror}") from error
    print(f"written to {out}")


def _from_metrics(
    urls: Sequence[str], period: str, api_key: str | None, max_batch_tokens: int, report: Callable[[str], None]
) -> Profile:
    from foreword.sim.changes import parse_seconds
    from foreword.sim.serving_metrics import calibrate, sample

    seconds = parse_seconds(period, "--for")
    if not seconds:
        raise ConfigError("--for must be more than 0")
    profile = calibrate(sample(urls, seconds, api_key, report), max_batch_tokens)
    about, costs = profile.about, profile.costs
    report(
        f"{about['periods']} periods with {about['requests']} requests, {about['prompt']} computed prompt tokens and "
        f"{about['output']} output tokens; steps fitted within {about['steps_median_error']:.1%} at the median"
    )
    for name in ("base", "prefill", "attention", "decode_each", "decode_context"):
        report(f"{name}: {getattr(costs, name):.3g} s" + (f" ({note})" if (note := about["terms"].get(name)) else ""))
    return profile
