"""Sends random token ids to models with every kind of vocabulary, and compares the text of the answers with their bytes.

    python tests/serving/text_campaign.py --sequences 2000 --seed 1 [--kinds "byte fallback"]

For each kind a small random model is served twice behind a router. Half of the answers are drawn from a few given tokens, half
are sampled at a high temperature; streamed and whole; through a server, the router, and `LLM`. Prompts are random ids too, so
that many end inside of a character. Prints, for each kind: answers with another text, failed requests, and processes that have
ended.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import transformers
from router_parts import RouterProcess
from server_process import ServerProcess, kill

sys.path.append(str(Path(__file__).parents[1]))
sys.path.append(str(Path(__file__).parents[1] / "engine"))

import tiny
from vocabularies import KINDS, SCRIPTS, text_behind

from foreword.engine.request import SamplingParams
from foreword.entrypoints.llm import LLM

ROUTES = ("server", "router", "LLM")
CLIENTS = 6
LENGTH = 24


@dataclass(frozen=True)
class Case:
    """A prompt and how its answer is sampled."""

    prompt: list[int]
    allowed: list[int] | None
    seed: int
    skip_special: bool
    streamed: bool

    @property
    def options(self) -> dict[str, Any]:
        return {
            "max_tokens": LENGTH,
            "temperature": 2.0,
            "seed": self.seed,
            "ignore_eos": True,
            "skip_special_tokens": self.skip_special,
            "allowed_token_ids": self.allowed,
        }


def save(kind: str, folder: Path) -> Any:
    """A small random model with this kind of vocabulary, and some more ids than it. Returns its tokenizer."""
    tokenizer = KINDS[kind]()
    config = tiny.common(transformers.LlamaConfig, vocab_size=len(tokenizer) + 5, eos_token_id=tokenizer.eos_token_id)
    tiny.random_model(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return tokenizer


def draw(tokenizer: Any, seed: int) -> Case:
    dice = random.Random(seed)
    size = len(tokenizer) + 5
    text = dice.choice([*SCRIPTS.values()])
    prompt = tokenizer.encode(f"of {text}")
    prompt = prompt[: dice.randrange(1, len(prompt))] if dice.random() < 0.5 else []
    prompt += [dice.randrange(size) for _ in range(dice.randrange(0 if prompt else 1, 8))]
    few = [dice.randrange(size) for _ in range(4)] if dice.random() < 0.5 else None
    return Case(prompt, few, seed, dice.random() < 0.5, dice.random() < 0.5)


def ask(client: httpx.Client, case: Case) -> tuple[str, list[int]]:
    """Text and token ids of an answer over HTTP."""
    body = {"prompt": case.prompt, "stream": case.streamed, "return_token_ids": True, **case.options}
    answer = client.post("/v1/completions", json={key: value for key, value in body.items() if value is not None})
    answer.raise_for_status()
    if not case.streamed:
        [choice] = answer.json()["choices"]
        return choice["text"], choice["token_ids"]
    lines = (line.removeprefix("data: ") for line in answer.text.split("\n") if line.startswith("data: {"))
    events = [json.loads(line) for line in lines]
    assert not any("error" in event for event in events), events
    choices = [choice for event in events for choice in event["choices"]]
    tokens = [token for choice in choices for token in choice.get("token_ids") or ()]
    return "".join(choice["text"] for choice in choices), tokens


def in_process(folder: Path, cases: Sequence[Case]) -> list[tuple[str, list[int]] | Exception]:
    """Text and token ids of answers by `LLM`."""
    llm = LLM(str(folder), dtype="float32", kv_memory="8192 tokens", threads=1)
    given = [SamplingParams(**case.options) for case in cases]
    outputs = llm.generate([case.prompt for case in cases], given)
    return [output.error or (output.outputs[0].text, [*output.outputs[0].tokens]) for output in outputs]


def run(kind: str, sequences: int, seed: int, notes: bool = False) -> Counter[str]:
    """Counts by route: `differs`, `failed`, and `ended` processes."""
    found: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as folder:
        tokenizer = save(kind, Path(folder))
        cases = [draw(tokenizer, seed * 1_000_000 + number) for number in range(sequences)]
        servers = [ServerProcess(folder, "--dtype", "float32") for _ in range(2)]
        urls = [server.wait_ready() for server in servers]
        router = RouterProcess(*(part for url in urls for part in ("--replica", url))).wait_for(2)
        try:
            for route in ROUTES:
                for case, answer in zip(cases, _answers(route, folder, cases, urls[0], router.url), strict=True):
                    found[f"{route} answers"] += 1
                    if isinstance(answer, Exception):
                        found[f"{route} failed"] += 1
                        note = str(answer)
                    else:
                        text, tokens = answer
                        expected = text_behind(kind, tokenizer, case.prompt, tokens, case.skip_special)
                        found[f"{route} differs"] += text != expected
                        note = "" if text == expected else f"{text!r} is not {expected!r}"
                    if notes and note:
                        print(f"{kind}, {route}: {note}: {case}", file=sys.stderr)
            found["ended"] = sum(process.ended() for process in (*servers, router))
            found["ended"] += sum(httpx.get(f"{url}/health").status_code != 200 for url in urls)
        finally:
            kill(*servers, router)
    return found


def _answers(
    route: str, folder: str, cases: Sequence[Case], server: str, router: str
) -> Sequence[tuple[str, list[int]] | Exception]:
    if route == "LLM":
        return in_process(Path(folder), cases)
    with httpx.Client(base_url=server if route == "server" else router, timeout=120) as client:

        def one(case: Case) -> tuple[str, list[int]] | Exception:
            try:
                return ask(client, case)
            except (httpx.HTTPError, AssertionError, KeyError) as error:
                return error

        with ThreadPoolExecutor(CLIENTS) as threads:
            return list(threads.map(one, cases))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sequences", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--kinds", nargs="+", default=list(KINDS), choices=list(KINDS))
    given = parser.parse_args()
    bad = 0
    for kind in given.kinds:
        found = run(kind, given.sequences, given.seed, notes=True)
        bad += sum(count for name, count in found.items() if not name.endswith("answers"))
        print(f"{kind}: " + ", ".join(f"{name} {count}" for name, count in sorted(found.items())), flush=True)
    sys.exit(bool(bad))


if __name__ == "__main__":
    main()
