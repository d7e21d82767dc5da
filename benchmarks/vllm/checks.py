"""The workloads of `vllm/offload.py` that ask whether answers are right: identity, faults."""

import random
import shutil

from benchmarks.vllm import workloads as workloads
from benchmarks.vllm.bench import BLOCK, Bench, Record, compare, of, percent, print_table, share
from benchmarks.vllm.contenders import Contender
from foreword.referee.damage import flip_bytes, swap_layers
from foreword.referee.process import Answer, Failed


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
            of(one),
            str(one["hits"]),
            percent(one["loaded"]),
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
        ("faults: damaged", damaged, "a byte in 1,532 flipped in what was saved, while vLLM runs; then asked again"),
        ("faults: replaced", replaced, "other weights under the same path, vLLM started again"),
    ):
        found = bench.each(name, measure, [*alone, *others])
        print_table(
            f"{name}: {title}",
            ["contender", "tokens loaded", "wrong", "logprob apart"],
            [one for one in found if "reference" not in one],
            lambda one: [percent(one["loaded"]), of(one), f"{one.get('logprob_apart', 0):.1e}"],
        )
    shutil.rmtree(home)


def against(answers: dict[str, list[Answer]], name: str, results: list[Answer]) -> Record:
    reference = answers.get(name)
    return compare(results, reference) if reference else {"wrong": None, "answers": len(results)}
