"""Tenants with one system prompt under `vllm serve` with a salt each: tokens that are computed, alone and with a public prefix.

    python -m benchmarks.vllm.public MODEL --vllm-python ENVIRONMENT/bin/python [--tenants 50] [--prompt 2048] [--private 200]

Three servers, one after the other: vLLM alone; with Foreword's connector (memory), nothing marked; with the connector, the
system prompt marked public by the middleware. Every tenant sends the system prompt and private tokens of its own once. Prints
what each server computed: prompt tokens less those that vLLM reports as cached, and what marking the prompt has computed; and
whether all answers are those of vLLM alone.
"""

import argparse
import json
import random
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any

from benchmarks.harness import machine, median, set_up, table
from benchmarks.vllm.serve import Server, serving
from foreword.blocks.salt import Salt

BLOCK = 32


def post(server: Server, path: str, body: dict[str, Any]) -> Any:
    request = urllib.request.Request(
        f"http://127.0.0.1:{server.port}{path}", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=600) as answer:
        return json.load(answer)


def ask(server: Server, tokens: list[int], salt: str) -> tuple[list[int], int, float]:
    """Answer, cached tokens, seconds."""
    body = {"model": "model", "prompt": tokens, "max_tokens": 8, "temperature": 0, "ignore_eos": True}
    started = time.perf_counter()
    found = post(server, "/v1/completions", {**body, "cache_salt": salt, "return_token_ids": True})
    details = found["usage"]["prompt_tokens_details"] or {}
    return found["choices"][0]["token_ids"], details.get("cached_tokens") or 0, time.perf_counter() - started


def text_of(server: Server, count: int) -> tuple[str, list[int]]:
    """A text of at least this many tokens, cut where its tokens can be."""
    drawn, words = random.Random(0), list[str]()
    while True:
        words += [f"w{drawn.randrange(1000)}" for _ in range(count // 4)]
        tokens = post(server, "/tokenize", {"model": "model", "prompt": " ".join(words)})["tokens"]
        if len(tokens) >= count:
            break
    low, high = 0, len(" ".join(words))
    text = " ".join(words)
    while low < high:  # the longest text with at most `count` tokens
        middle = (low + high + 1) // 2
        if len(post(server, "/tokenize", {"model": "model", "prompt": text[:middle]})["tokens"]) <= count:
            low = middle
        else:
            high = middle - 1
    return text[:low], post(server, "/tokenize", {"model": "model", "prompt": text[:low]})["tokens"]


def run(server: Server, arguments: argparse.Namespace, *, mark: bool) -> dict[str, Any]:
    text, system = text_of(server, arguments.prompt)
    drawn, marked = random.Random(1), 0
    vocabulary = sorted(set(system))
    if mark:
        made = post(server, "/v1/public/prefixes", {"name": "system", "content": text})
        marked = made["num_tokens"]
        probes = (Salt(f"probe {number}".encode()).text for number in range(1000))
        while ask(server, system, next(probes))[1] < len(system) // BLOCK * BLOCK - BLOCK:
            time.sleep(0.2)  # the connector reads the record within two seconds
    answers, computed, seconds = [], 0, []
    for tenant in range(arguments.tenants):
        prompt = system + [drawn.choice(vocabulary) for _ in range(arguments.private)]
        tokens, cached, took = ask(server, prompt, Salt(f"tenant {tenant}".encode()).text)
        answers.append(tokens)
        computed += len(prompt) - cached
        seconds.append(took)
    return {"system": len(system), "computed": computed + marked, "seconds": median(seconds), "answers": answers}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--vllm-python", required=True)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--tenants", type=int, default=50)
    parser.add_argument("--prompt", type=int, default=2048)
    parser.add_argument("--private", type=int, default=200)
    arguments = parser.parse_args()
    rows, found = [], dict[str, dict[str, Any]]()
    kinds = {"vLLM alone": [], "connector": ["memory://?size=4GiB"], "connector, public": ["memory://?size=4GiB"]}
    with tempfile.TemporaryDirectory() as folder:
        for name, store in kinds.items():
            public = name.endswith("public")
            # The record of a name needs a store that outlives the engine's process.
            urls = [*store, f"disk://{folder}/kv?size=4GiB"] if public else store
            more = ["--middleware", "foreword.integrations.vllm.NamedPrefixes"] if public else []
            with serving(arguments, Path(folder), urls, "--enable-prompt-tokens-details", *more) as server:
                found[name] = one = run(server, arguments, mark=public)
            same = sum(a == b for a, b in zip(one["answers"], found["vLLM alone"]["answers"], strict=True))
            rows.append([name, f"{one['computed']:,}", f"{one['seconds']:.2f} s", f"{same} of {arguments.tenants}"])
            print(rows[-1], flush=True)
    system = found["vLLM alone"]["system"]
    print(set_up({"model": str(arguments.model), "system prompt": f"{system} tokens", **machine()}))
    print(table(["", "computed tokens", "request, median", "answers as alone"], rows))
    bound = system + arguments.tenants * (arguments.private + BLOCK)
    print(f"bound: {system} + {arguments.tenants} x ({arguments.private} + {BLOCK}) = {bound:,}")


if __name__ == "__main__":
    main()
