"""The timed workloads of `vllm/offload.py`: first-token, documents, chat, agents, restart, saving."""

import random
from collections.abc import Sequence

from benchmarks.harness import median
from benchmarks.vllm import workloads as workloads
from benchmarks.vllm.bench import PARTS, Bench, Record, compare, gib, of, percent, print_table, share, spread, two
from benchmarks.vllm.contenders import Contender
from benchmarks.vllm.processes import Running, busy, write_off
from foreword.referee.process import Answer

_REASONS = ("tier", "outcome")
_FEW = 4  # new tokens where only the first is timed


def first_token(bench: Bench) -> None:
    """TTFT of a long prompt, by where its KV is."""
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
            *(two(one.get(stage)) for stage in stages),
            percent(one.get("loaded")),
            of(one),
            gib(one["peak"]),
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
    times = [f"{one['ttft'][name]:,.0f} ms" for name, _ in PARTS]
    rest = [f"{one['seconds']:.1f}", f"{one['tokens_per_s']:,}", percent(one["loaded"]), of(one), gib(one["peak"])]
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


def restarts(bench: Bench) -> None:
    """Count blocks that new processes find on a disk while others keep the cores busy, and why they miss the rest."""
    arguments = bench.arguments
    draw = random.Random(arguments.seed)
    start = workloads.tokens(draw, 1700)
    lengths = [draw.choice((64, 129, 200, 333, 512, 700, 1024, 1500)) for _ in range(arguments.restart_prompts)]
    asked = [start[: length // 2] + workloads.tokens(draw, length - length // 2) for length in lengths]
    job = bench.job(2048, sum(lengths) + 64 * len(lengths))

    def measure(contender: Contender) -> Record:
        new: list[list[int]] = []
        counts: dict[str, float] = {}
        with bench.running(contender) as running:
            with running.worker(**job) as vllm:
                vllm.ask_all(asked)
                vllm.settle()
                vllm.forget()
                old = [one["cached"] for one in vllm.ask_all(asked)]
            with busy(arguments.busy):
                for _ in range(arguments.restarts):
                    with running.worker(warm_up=False, **job) as vllm:
                        new.append([one["cached"] for one in vllm.ask_all(asked)])
                        for name, labels, value in vllm.metrics("vllm:foreword_"):
                            if labels.get("outcome", "") or "loads" in name:
                                parts = (labels[part] for part in _REASONS if part in labels)
                                key = " ".join([name.removeprefix("vllm:foreword_"), *parts])
                                counts[key] = counts.get(key, 0) + value
                    print("  ", new[-1], flush=True)
        found = [sum(one) for one in new]
        missed = sum(cached < most for one in new for cached, most in zip(one, old, strict=True))
        total = round(sum(found) / (sum(old) * len(new)), 4)
        return {
            "old": sum(old),
            "new": found,
            "share": total,
            "fewer": missed,
            "counts": counts,
            "peak": running.memory.peak,
        }

    found = bench.each("restarts", measure, [one for one in bench.taking_part if one.transfer is not None])
    print_table(
        f"restarts: {len(asked)} prompts, {sum(lengths):,} tokens, asked in {arguments.restarts} new processes beside "
        f"{arguments.busy} busy ones",
        [
            "contender",
            "cached in the old process",
            "in a new one, least",
            "median",
            "share of the old",
            "requests with less",
        ],
        found,
        lambda one: [
            f"{one['old']:,}",
            f"{min(one['new']):,}",
            f"{median(one['new']):,.0f}",
            f"{one['share']:.2%}",
            f"{one['fewer']} of {len(one['new']) * len(asked)}",
        ],
    )
    for one in found:
        for name, value in sorted(one.get("counts", {}).items()):
            print(f"{one['contender']}: {name} {value:,.0f}")


def shared(bench: Bench) -> None:
    """64 prompts of 8 groups, each group with 1,500 tokens in common; the same starts again, and after a restart."""
    draw = random.Random(bench.arguments.seed)
    starts = [workloads.tokens(draw, 1500) for _ in range(8)]
    rounds = [workloads.shared(draw, starts, 64) for _ in range(3)]
    job = bench.job(2304, 3 * 64 * 2304)

    def measure(contender: Contender) -> Record:
        with bench.running(contender) as running:
            with running.worker(**job) as vllm:
                found = [[vllm.ask(prompt, 1) for prompt in asked] for asked in rounds[:2]]
                vllm.settle()
            with running.worker(**job) as vllm:
                found.append([vllm.ask(prompt, 1) for prompt in rounds[2]])
        hits = [sum(one["cached"] > 0 for one in answers) for answers in found]
        cached = [sum(one["cached"] for one in answers) for answers in found]
        seconds = [round(sum(one["ttft"] for one in answers) / len(answers), 3) for answers in found]
        return {"hits": hits, "cached": cached, "ttft": seconds, "peak": running.memory.peak}

    found = bench.each("shared", measure, bench.taking_part)
    print_table(
        "shared: 64 prompts of 8 groups with 1,500 common tokens and 700 of their own; again with other ends; after a restart",
        ["contender", "prompts with a hit", "cached tokens", "mean TTFT, s"],
        found,
        lambda one: [" / ".join(map(str, one[name])) for name in ("hits", "cached", "ttft")],
    )


def stored_bytes(bench: Bench) -> None:
    """Bytes in the store for each token of new prompts."""
    draw, tokens = random.Random(bench.arguments.seed), bench.arguments.tokens
    asked = [workloads.tokens(draw, tokens) for _ in range(bench.arguments.rounds)]
    job = bench.job(tokens + 16, 2 * tokens)

    def measure(contender: Contender) -> Record:
        with bench.running(contender) as running, running.worker(**job) as vllm:
            for prompt in asked:
                vllm.ask(prompt, 1)
            vllm.settle()
            stored = vllm.stored()
        per_token = stored["bytes"] / (tokens * len(asked))
        return {"per_token": round(per_token), "complete": round(stored["complete"]), "peak": running.memory.peak}

    found = bench.each("bytes", measure, [one for one in bench.taking_part if one.name.startswith("foreword")])
    print_table(
        f"bytes: {len(asked)} new prompts of {tokens} tokens",
        ["contender", "bytes stored per token", "all blocks of all groups", "share"],
        found,
        lambda one: [str(one["per_token"]), str(one["complete"]), percent(one["per_token"] / one["complete"])],
    )


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
