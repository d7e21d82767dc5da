"""Streams that break at every event, through a router, and whether the client has what an unbroken stream gives it.

    python tests/serving/stream_campaign.py [--cuts 1000] [--only NAME] [--seed 7] [--model FOLDER] [--kills 0] [--vllm]

Thirty kinds of requests to Foreword's servers; with `--vllm` those that a router continues between servers of vLLM
(FOREWORD_VLLM_PYTHON). Each is asked once undisturbed and then with breaks: before the head, behind each event, and again soon
after the failover. Compared are the text, calls, reasoning, token ids, log-probabilities and ending of each choice, the usage,
that there is one id and one end, and that the router's ledger has the request once, with the usage that the client got.

`--kills` asks this number of streams of three processes instead, and kills the one that writes it in its middle; it is started
again meanwhile. `--seed` is that of sampled requests, and chooses the prompt; `--model` a folder, such as of
benchmarks/engine/random_model.py.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx
from router_parts import Loop, Relay, RouterProcess, Scissors
from server_process import ServerProcess
from shared_server import until

for _folder in ("integrations", "store"):
    sys.path.append(str(Path(__file__).parents[1] / _folder))

CHAT, TEXT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"
ASK: list[dict[str, Any]] = [{"role": "user", "content": "def area(radius): return"}]
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 12}, "days": {"enum": [1, 3, 7]}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
FORMAT: Any = {"type": "json_schema", "json_schema": {"name": "w", "schema": SCHEMA, "strict": True}}
FUNCTION: dict[str, Any] = {"name": "weather", "parameters": SCHEMA}
TOOLS: Any = {"tools": [{"type": "function", "function": FUNCTION}], "tool_choice": "required"}
USAGE: Any = {"stream_options": {"include_usage": True}}
SIGNS = "漢字é😀ж"
SEEDED: Any = {"temperature": 0.9, "seed": 7}


def chat(**fields: Any) -> tuple[str, dict[str, Any]]:
    return CHAT, {"messages": ASK, "max_tokens": 24, "temperature": 0, **USAGE, **fields}


def completion(**fields: Any) -> tuple[str, dict[str, Any]]:
    return TEXT, {"prompt": "import os\n", "max_tokens": 24, "temperature": 0, **USAGE, **fields}


# Other servers than Foreword's continue those of them that `TEXTS` names.
CASES: Mapping[str, tuple[str, dict[str, Any]]] = {
    "plain": chat(),
    "ignore_eos": chat(ignore_eos=True),
    "logprobs": chat(logprobs=True, top_logprobs=2),
    "stop": chat(stop=["ret", "class "], ignore_eos=True),
    "stop included": chat(stop=["ret"], include_stop_str_in_output=True),
    "logit bias": chat(logit_bias={"50": 5}),
    "min_tokens": chat(min_tokens=20),
    "token ids": chat(return_token_ids=True),
    "no usage": chat(stream_options={}),
    "continuous usage": chat(stream_options={"include_usage": True, "continuous_usage_stats": True}),
    "completion": completion(),
    "completion, logprobs": completion(logprobs=1),
    "three choices": chat(n=3, **SEEDED),
    "three choices, ids": chat(n=3, return_token_ids=True, **SEEDED),
    "three choices, logprobs": chat(n=3, logprobs=True, **SEEDED),
    "three completions": completion(n=3, **SEEDED),
    "three completions, stop": completion(n=3, stop=["e", "("], **SEEDED),
    "three choices, no usage": chat(n=3, stream_options={}, **SEEDED),
    "seed": chat(**SEEDED),
    "penalties": chat(frequency_penalty=1.0, presence_penalty=0.5, ignore_eos=True),
    "tool": chat(**TOOLS, max_tokens=64),
    "schema": chat(response_format=FORMAT, max_tokens=64),
    "regex": chat(structured_outputs={"regex": "[a-f]{5}-[0-9]{6}-(yes|no)"}, max_tokens=40),
    "signs": chat(structured_outputs={"regex": "(漢字|é|😀|ж){8}"}, ignore_eos=True, max_tokens=30),
    "three schemas": chat(n=3, response_format=FORMAT, max_tokens=48, **SEEDED),
    "three tools": chat(n=3, **TOOLS, max_tokens=48, **SEEDED),
    "responses": (RESPONSES, {"input": "def area(", "max_output_tokens": 24, "temperature": 0, "store": False}),
    "messages": (MESSAGES, {"messages": ASK, "max_tokens": 24, "temperature": 0}),
    "messages, tool": (
        MESSAGES,
        {
            "messages": ASK,
            "max_tokens": 64,
            "temperature": 0,
            "tools": [{"name": "weather", "input_schema": SCHEMA}],
            "tool_choice": {"type": "any"},
        },
    ),
    "responses, tool": (
        RESPONSES,
        {
            "input": "weather?",
            "max_output_tokens": 64,
            "temperature": 0,
            "store": False,
            "tools": [{"type": "function", **FUNCTION}],
            "tool_choice": "required",
        },
    ),
}
TEXTS = [*CASES][:18]
_ASKED = (
    "def area(radius): return",
    "class Stack:",
    "import os, sys",
    "for line in open(path):",
    "while True:",
    "x = [",
)
_COUNTS = ("prompt_tokens", "completion_tokens", "input_tokens", "output_tokens")


def vary(seed: int) -> None:
    """Let sampled requests have this seed, and all of them a prompt that it chooses; the seed 7 is as they are."""
    asked = _ASKED[(seed - 7) % len(_ASKED)]
    for _, body in CASES.values():
        body.update({"seed": seed} if "seed" in body else {})
        body.update({"messages": [{"role": "user", "content": asked}]} if "messages" in body else {})


def heard(raw: str) -> dict[str, Any]:
    """The content that the client is promised: without ids, times, and how the text was cut into events."""
    choices: dict[int, dict[str, Any]] = {}
    events: dict[str, str] = {}
    found: dict[str, Any] = {"choices": choices, "events": events, "usage": {}, "ends": [], "error": None}
    ids: set[str] = set()
    for line in (line.removeprefix("data: ") for line in raw.split("\n") if line.startswith("data: ")):
        if line == "[DONE]":
            found["ends"].append(line)
            continue
        event = json.loads(line)
        kind = event.get("type", "")
        if event.get("error"):
            found["error"] = event["error"]
        ids |= {event["id"]} if "id" in event else set()
        for choice in event.get("choices") or ():
            _add(
                choices.setdefault(choice["index"], {"text": "", "calls": "", "ids": [], "odds": [], "roles": 0}),
                choice,
            )
        delta = event.get("delta")
        if kind.endswith(".delta") and isinstance(delta, str):
            events[kind] = events.get(kind, "") + delta
        elif isinstance(delta, dict):
            said = delta.get("text") or delta.get("partial_json") or ""
            events[kind] = events.get(kind, "") + said + (delta.get("stop_reason") or "")
        if kind in ("response.completed", "response.incomplete", "response.failed", "message_stop", "error"):
            found["ends"].append(kind)
        usage = event.get("usage") or (event.get("response") or {}).get("usage") or {}
        if "cache_read_input_tokens" in usage:  # Anthropic's input does not count them
            usage["input_tokens"] += usage["cache_read_input_tokens"] + (usage["cache_creation_input_tokens"] or 0)
        found["usage"] |= {name: usage[name] for name in _COUNTS if name in usage and kind != "message_start"}
    found["ids"] = len(ids)
    return found


def _add(entry: dict[str, Any], choice: dict[str, Any]) -> None:
    delta, odds = choice.get("delta") or {}, choice.get("logprobs") or {}
    entry["text"] += choice.get("text") or delta.get("content") or ""
    for call in delta.get("tool_calls") or ():
        entry["calls"] += f"{call['function'].get('name') or ''}({call['function'].get('arguments') or ''}"
    entry["ids"] += choice.get("token_ids") or []
    entry["odds"] += [round(one["logprob"], 3) for one in odds.get("content") or ()] or list(odds.get("tokens") or ())
    entry["roles"] += "role" in delta
    if choice.get("finish_reason"):
        assert "end" not in entry, "two ends of a choice"
        entry["end"] = (choice["finish_reason"], choice.get("stop_reason"))


def plain_calls(heard_here: dict[str, Any]) -> dict[str, Any]:
    """The calls of each choice without where their pieces begin."""
    for entry in heard_here["choices"].values():
        entry["calls"] = entry["calls"].replace("(", "")
    return heard_here


class Campaign:
    """Streams through one router. `told`: the usage that the client got, by the id of the request."""

    def __init__(self, router: RouterProcess, scissors: Scissors, ledger: Path, model: str) -> None:
        self._router, self._scissors, self._ledger, self._model = router, scissors, ledger, model
        self._client = router.http()
        self.told: dict[str, dict[str, int]] = {}
        self.wrong: list[str] = []
        self.cuts = 0

    def ask(self, name: str, *cuts: int) -> tuple[dict[str, Any], int]:
        """Asks, and returns what the client hears and the number of events."""
        path, body = CASES[name]
        request_id = f"{name.replace(' ', '-').replace(',', '')}-{len(self.told)}"
        self._scissors.cut_after(*cuts)
        asked = {"model": self._model, **body, "stream": True}
        answer = self._client.post(path, json=asked, headers={"x-request-id": request_id}, timeout=httpx.Timeout(300))
        self._scissors.cut_after()
        if answer.status_code != 200:
            self.wrong.append(f"{name} {cuts}: {answer.status_code} {answer.text[:200]}")
        found = plain_calls(heard(answer.text))
        self.told[request_id] = found["usage"]
        return found, answer.text.count("\n\n")

    def kill(self, name: str, servers: Sequence[Mortal], chance: random.Random) -> str:
        """Kill the server that writes a stream behind one of its events; returns a line of the report."""
        expected, events = self.ask(name)
        at = chance.randrange(max(events - 2, 1))
        path, body = CASES[name]
        request_id = f"killed-{len(self.told)}"
        asked, limit = {"model": self._model, **body, "stream": True}, httpx.Timeout(600)
        began, text, died = time.monotonic(), "", ""
        with self._client.stream(
            "POST", path, json=asked, headers={"x-request-id": request_id}, timeout=limit
        ) as answer:
            for piece in answer.iter_text():
                text += piece
                if not died and text.count("\n\n") >= at:
                    died = answer.headers["x-foreword-route"]
                    next(one for one in servers if died.startswith(f"{one.url}:")).die()
        found = plain_calls(heard(text))
        self.told[request_id] = found["usage"]
        self.cuts += 1
        if found != expected:
            differs = {key: (expected[key], found[key]) for key in expected if expected[key] != found[key]}
            self.wrong.append(f"{name} killed behind {at}: {differs}")
        return f"| {name} | {events} | {at} | {int(found != expected)} | {time.monotonic() - began:.1f} |"

    def run(self, name: str, most: int) -> str:
        """Break the stream of one kind at up to this many places; returns a line of the report."""
        expected, events = self.ask(name)
        assert expected["error"] is None and expected["ends"], (name, expected)
        plans = [(at,) for at in range(events)] + [(at, 1) for at in range(1, events, 3)] + [(2, 2), (3, 0), (1, 1)]
        step = max(len(plans) / most, 1.0)
        plans = [plans[int(number * step)] for number in range(int(len(plans) / step))]
        before, worst = len(self.wrong), 0.0
        for plan in plans:
            began = time.monotonic()
            found, _ = self.ask(name, *plan)
            worst = max(worst, time.monotonic() - began)
            if found != expected:
                differs = {key: (expected[key], found[key]) for key in expected if expected[key] != found[key]}
                self.wrong.append(f"{name} {plan}: {differs}")
        self.cuts += len(plans)
        return f"| {name} | {events} | {len(plans)} | {len(self.wrong) - before} | {worst:.1f} |"

    def check_bills(self) -> int:
        """Compare the ledger with what clients were told; returns the number of its lines."""
        until(lambda: len(self._lines()) >= len(self.told), 60)
        noted = self._lines()
        by_id: dict[str, list[dict[str, Any]]] = {}
        for line in noted:
            by_id.setdefault(line["id"], []).append(line["usage"])
        for request_id, usage in self.told.items():
            billed = by_id.get(request_id, [])
            told = (
                usage.get("prompt_tokens", usage.get("input_tokens")),
                usage.get("completion_tokens", usage.get("output_tokens")),
            )
            if len(billed) != 1:
                self.wrong.append(f"{request_id}: billed {len(billed)} times")
            elif usage and told != (billed[0].get("prompt"), billed[0].get("output")):
                self.wrong.append(f"{request_id}: told {told}, billed {billed[0]}")
            elif not billed[0].get("output"):
                self.wrong.append(f"{request_id}: billed {billed[0]}")
        return len(noted)

    def _lines(self) -> list[dict[str, Any]]:
        found = [json.loads(line) for line in self._ledger.read_bytes().split(b"\n")[:-1]]
        return [line for line in found if line["id"] in self.told]


class Mortal:
    """A server that can be killed, and is started again on its port."""

    def __init__(self, *flags: str) -> None:
        self._flags = flags
        self._process = ServerProcess(*flags)
        self.url = self._process.wait_ready()

    def die(self) -> None:
        self._process.kill()
        self._process = ServerProcess(*self._flags, "--port", self.url.rpartition(":")[2])

    def wait_ready(self) -> None:
        self._process.wait_ready()

    def kill(self) -> None:
        self._process.kill()


def run_kills(given: argparse.Namespace, names: Sequence[str], folder: Path, flags: Sequence[str], model: str) -> int:
    """The campaign with processes that are killed."""
    servers = [Mortal(*flags) for _ in range(3)]
    routed = [part for one in servers for part in ("--replica", one.url)]
    routed += ["--policy", "round-robin", "--failures", "1000000", "--usage-ledger", str(folder / "ledger.jsonl")]
    router = RouterProcess(*routed).wait_for(3)
    until(lambda: weights_are_known(router), 300)
    chance = random.Random(given.seed)
    try:
        campaign = Campaign(router, Scissors(), folder / "ledger.jsonl", model)
        print("| kind | events | killed behind | wrong | s |\n|---|---:|---:|---:|---:|")
        for number in range(given.kills):
            print(campaign.kill(names[number * 7 % len(names)], servers, chance), flush=True)
            for one in servers:
                one.wait_ready()
            until(lambda: weights_are_known(router), 300)
        return report(campaign, router, names)
    finally:
        router.kill()
        for one in servers:
            one.kill()


def report(campaign: Campaign, router: RouterProcess, names: Sequence[str]) -> int:
    lines = campaign.check_bills()
    continued = router.metric("foreword:router_continuations_total", outcome="continued")
    print(f"{campaign.cuts} cuts of {len(names)} kinds, {continued:.0f} continuations, {len(campaign.wrong)} wrong")
    print(f"{len(campaign.told)} requests, {lines} lines in the ledger")
    shown = {line.partition(" (")[0]: line for line in campaign.wrong}
    print("\n".join(line[:2000] for line in shown.values()))
    return int(bool(campaign.wrong))


def weights_are_known(router: RouterProcess) -> bool:
    with router.http() as client:
        return all(one.get("weights") for one in client.get("/v1/router/replicas").json()["data"])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cuts", type=int, default=1000, help="of all kinds together, about")
    parser.add_argument("--only", default="", help="kinds whose name contains this")
    parser.add_argument("--kills", type=int, default=0, help="of processes, instead of cuts")
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--model", help="a folder; by default the built-in model")
    parser.add_argument("--vllm", action="store_true")
    given = parser.parse_args()
    vary(given.seed)
    if given.vllm and "FOREWORD_VLLM_PYTHON" not in os.environ:
        parser.error("FOREWORD_VLLM_PYTHON names no interpreter with vLLM")
    names = [name for name in (TEXTS if given.vllm else CASES) if given.only in name]
    with tempfile.TemporaryDirectory(prefix="foreword-streams-") as text:
        folder, loop, scissors = Path(text), Loop(), Scissors()
        server: Any
        if given.vllm:
            from vllm_server import VllmServer, make_byte_model

            limits = ("--kv-cache-memory-bytes", str(64 << 20), "--max-num-seqs", "8")
            server, model = VllmServer(make_byte_model(folder / "model"), folder / "log", *limits), "tiny"
            until(server.healthy, 600)
            stop, url = server.stop, server.url
        else:
            flags = [given.model] if given.model else []
            flags += ["--dtype", "float32", "--no-self-check", "--served-model-name", "stdlib-nano"]
            if given.kills:
                return run_kills(given, names, folder, flags, "stdlib-nano")
            server, model = ServerProcess(*flags), "stdlib-nano"
            stop, url = server.kill, server.wait_ready()
        relays = [Relay(loop, url, scissors) for _ in range(3)]
        routed = [part for relay in relays for part in ("--replica", relay.url)]
        routed += ["--policy", "round-robin", "--failures", "1000000", "--usage-ledger", str(folder / "ledger.jsonl")]
        router = RouterProcess(*routed).wait_for(3)
        until(lambda: weights_are_known(router), 120)
        try:
            campaign = Campaign(router, scissors, folder / "ledger.jsonl", model)
            print("| kind | events | cuts | wrong | slowest, s |\n|---|---:|---:|---:|---:|")
            for name in names:
                print(campaign.run(name, -(-given.cuts // len(names))), flush=True)
            return report(campaign, router, names)
        finally:
            router.kill()
            stop()
            for relay in relays:
                relay.close()


if __name__ == "__main__":
    sys.exit(main())
