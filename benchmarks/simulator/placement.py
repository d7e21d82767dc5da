"""Placement by cost against every other policy, in several fleets.

    python -m benchmarks.simulator.placement mooncake-conversation.jsonl [--agents agent-*.jsonl] [--only A B] [--limit N]

Virtual time: what the machine does meanwhile makes no difference. For each setting a table of all policies, and how much lower
first tokens come with ours, mean and 90th percentile, than with `least-loaded` and than with the best of the others in that
number. `--speeds` replays the trace at other speeds too, so that nothing is tuned to one.
"""

import argparse
import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.simulator.workloads import documents, growing, sessions, system_prompts
from foreword.routing.policies import POLICIES
from foreword.sim.costs import EngineCosts, FleetSpec, read_profile
from foreword.sim.report import Summary, summarize, table
from foreword.sim.run import simulate
from foreword.sim.trace import TraceRequest, read_trace

# An 88M-parameter model on one CPU core, about; --costs takes a measured one.
SMALL = EngineCosts(base=0.008, prefill=7e-4, attention=2e-8, decode_each=1e-3, decode_context=1e-7)

# The embedded model on one CPU core, about; the three settings below are about `router/serving.py`.
NANO = EngineCosts(base=0.005, prefill=8e-5, attention=1.7e-7, decode_each=4e-4, decode_context=0.0)


@dataclass(frozen=True)
class Setting:
    """A fleet and its traffic."""

    text: str
    trace: Callable[[], Sequence[TraceRequest]]
    spec: FleetSpec
    costs: EngineCosts


def settings(arguments: argparse.Namespace) -> dict[str, Setting]:
    large, small = EngineCosts(), read_profile(arguments.costs).costs if arguments.costs else SMALL

    def at(speed: float) -> Callable[[], Sequence[TraceRequest]]:
        return lambda: read_trace(arguments.trace, speed=speed)[: arguments.limit]

    trace = at(1.0)
    tiers = FleetSpec(host_tokens=2_000_000, disk_tokens=6_000_000)
    shared = FleetSpec(host_tokens=2_000_000, shared_tokens=50_000_000)
    three = FleetSpec(replicas=3, device_tokens=40_000, block_size=32, max_batch_tokens=512)
    found = {
        "eight": Setting("Mooncake, 8 replicas", trace, FleetSpec(), large),
        "twelve": Setting("Mooncake, 12 replicas", trace, FleetSpec(replicas=12), large),
        "tiers": Setting("Mooncake, 8 replicas with host memory and disk", trace, tiers, large),
        "shared": Setting("Mooncake, 8 replicas with host memory and a shared store", trace, shared, large),
        "estimates": Setting("Mooncake, 8 replicas that send no events", trace, FleetSpec(events=False), large),
        "documents": Setting(
            "documents under one system prompt, 3 small replicas",
            lambda: documents(2000, 0.55, 32000),
            FleetSpec(replicas=3, device_tokens=200_000, block_size=64, max_batch_tokens=512),
            small,
        ),
    }
    nano = FleetSpec(replicas=3, device_tokens=16_384, block_size=16, max_batch_tokens=512)
    little = replace(nano, device_tokens=8192)
    for seed in arguments.seeds:
        found |= {
            f"growing-{seed}": Setting(
                f"12 agents' sessions that grow, at once, 3 tiny replicas, seed {seed}",
                lambda seed=seed: growing(12, 12, 3.0, 30_000, seed=seed),  # type: ignore[misc]
                nano,
                NANO,
            ),
            f"prompts-{seed}": Setting(
                f"32 system prompts by Zipf's law, 3 tiny replicas, seed {seed}",
                lambda seed=seed: system_prompts(240, 6.0, 30_000, seed=seed),  # type: ignore[misc]
                little,
                NANO,
            ),
            f"one-prompt-{seed}": Setting(
                f"one system prompt and longer questions, 3 tiny replicas, seed {seed}",
                lambda seed=seed: system_prompts(240, 15.0, 30_000, prompts=1, own=(200, 400), seed=seed),  # type: ignore[misc]
                little,
                NANO,
            ),
        }
    for speed in arguments.speeds:
        found[f"speed-{speed:g}"] = Setting(
            f"Mooncake at {speed:g} times the speed, 8 replicas", at(speed), FleetSpec(), large
        )
    if arguments.agents:
        found["agents"] = Setting(
            "agents' sessions, 3 small replicas", lambda: sessions(arguments.agents, 12, 1200.0, None), three, small
        )
    return {name: one for name, one in found.items() if not arguments.only or name in arguments.only}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path)
    parser.add_argument("--agents", nargs="*", type=Path, default=[])
    parser.add_argument("--only", nargs="*", default=[], help="settings to run")
    parser.add_argument("--policies", default=",".join(POLICIES))
    parser.add_argument("--limit", type=int, help="the first so many requests of the trace")
    parser.add_argument("--speeds", nargs="*", type=float, default=[])
    parser.add_argument("--seeds", nargs="*", type=int, default=[], help="of the tiny replicas' workloads")
    parser.add_argument("--costs", type=Path, help="of the small replicas, from `foreword calibrate`")
    arguments = parser.parse_args()
    print(f"{platform.python_implementation()} {platform.python_version()}, {time.strftime('%F')}; virtual time")
    for name, setting in settings(arguments).items():
        trace = setting.trace()
        tokens = sum(one.prompt_tokens for one in trace)
        print(
            f"\n## {name}: {setting.text}\n\n{len(trace)} requests, {tokens:,} prompt tokens in {trace[-1].arrival:,.0f} s\n"
        )
        results = [simulate(trace, setting.spec, policy, setting.costs) for policy in arguments.policies.split(",")]
        print(table(results), flush=True)
        compare([summarize(one) for one in results])


def compare(found: Sequence[Summary]) -> None:
    """How much lower TTFT is with placement by cost, in percent."""
    ours = next((one for one in found if one.name == "cost"), None)
    others = [one for one in found if one.name != "cost"]
    if ours is None or not others:
        return
    print()
    for field in ("mean", "p50", "p90"):
        mine = getattr(ours, field)
        best = min(others, key=lambda one: getattr(one, field))
        loaded = next((one for one in others if one.name == "least-loaded"), None)
        said = [f"{1 - mine / getattr(best, field):.1%} below the best other ({best.name})"]
        if loaded is not None:
            said.insert(0, f"{1 - mine / getattr(loaded, field):.1%} below least-loaded")
        turns = next((one for one in others if one.name == "round-robin"), None)
        if turns is not None:
            said.append(f"round-robin's is {getattr(turns, field) / max(mine, 1e-9):.2f} times ours")
        print(f"TTFT {field}: {', '.join(said)}")


if __name__ == "__main__":
    main()
