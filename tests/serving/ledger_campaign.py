"""Requests of twenty tenants through a router to servers that keep usage ledgers, and whether the ledgers are right.

    python tests/serving/ledger_campaign.py --requests 10000 --seed 1 [--vllm]

Of a hundred requests, ten lose their client in the middle of a stream, five the connection to their server, and two migrate to
another server (not with `--vllm`, which puts real vLLMs behind the router and needs FOREWORD_VLLM_PYTHON). Checked are:

- the router's ledger has each request once, under its tenant, with the tokens that its client was told;
- the ledger of each server has the tokens that its engine counted.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import http_client
import httpx
from router_parts import Loop, Relay, RouterProcess, Scissors
from server_process import ServerProcess
from shared_server import until

for _folder in ("integrations", "store"):
    sys.path.append(str(Path(__file__).parents[1] / _folder))

TENANTS, SERVERS, CLIENTS = 20, 3, 8
LEAVES, BREAKS, MIGRATES = 0.10, 0.05, 0.02
KEY, ADMIN = "the key of the router", "the key of the operator"
PATHS = ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages")
_TEXTS = [f"Chapter {number}. " + "The cache keeps what was computed once. " * 8 for number in range(8)]
_COUNTERS = {
    "prompt": "vllm:prompt_tokens_total",
    "output": "vllm:generation_tokens_total",
    "cached": "vllm:prompt_tokens_cached_total",
}


@dataclass
class Asked:
    """A request. `told`: its tokens of the prompt, the answer and the cache as the client was told; None if it left. `failure`:
    the answer, if it was an error."""

    id: str
    tenant: str
    told: tuple[int, int, int] | None = None
    left: bool = False
    moved: bool = False
    failure: str = ""


@dataclass
class Fleet:
    """Servers with ledgers, each behind a relay, and a router with one."""

    model: str
    urls: list[str]
    ledgers: list[Path]
    routed: Path
    router: RouterProcess
    scissors: Scissors
    stops: list[Any] = field(default_factory=list)
    relays: list[Relay] = field(default_factory=list)

    @property
    def vllm(self) -> bool:
        return self.model == "tiny"

    def close(self) -> None:
        self.router.kill()
        for stop in self.stops:
            stop()


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_bytes().split(b"\n")[:-1]]


def sums(path: Path) -> Counter[str]:
    """The tokens of a ledger."""
    found: Counter[str] = Counter()
    for line in lines(path):
        found.update({name: line["usage"].get(name, 0) for name in _COUNTERS})
    return found


def counted(url: str) -> Counter[str]:
    """The tokens that the engine counted."""
    text = http_client.get(f"{url}/metrics").text
    rows = {key: re.findall(rf"^{name}{{.*}} (\S+)$", text, re.M) for key, name in _COUNTERS.items()}
    return Counter({key: round(sum(map(float, found))) for key, found in rows.items()})


def native(folder: Path) -> Fleet:
    """Foreword's servers."""
    ledgers = [folder / f"server{number}.jsonl" for number in range(SERVERS)]
    flags = [
        "--role",
        "both",
        "--router-key",
        KEY,
        "--admin-key",
        ADMIN,
        "--dtype",
        "float32",
        "--max-num-seqs",
        "8",
        "--no-self-check",
    ]
    servers = [ServerProcess(*flags, "--usage-ledger", str(path)) for path in ledgers]
    return _routed(folder, "stdlib-nano", [one.wait_ready() for one in servers], ledgers, [one.kill for one in servers])


def with_vllm(folder: Path) -> Fleet:
    """Real vLLMs with the connector."""
    from vllm_server import VllmServer, make_byte_model

    model, servers, ledgers = make_byte_model(folder / "model"), [], []
    for number in range(2):
        ledgers.append(folder / f"vllm{number}.jsonl")
        extra = {"store": [f"disk://{folder}/kv{number}?size=64MiB"], "usage_ledger": str(ledgers[-1])}
        connector = {
            "kv_connector": "ForewordConnector",
            "kv_connector_module_path": "foreword.integrations.vllm",
            "kv_role": "kv_both",
            "kv_connector_extra_config": extra,
        }
        flags = ["--kv-transfer-config", json.dumps(connector), "--block-size", "32", "--shutdown-timeout", "30"]
        flags += ["--kv-cache-memory-bytes", str(64 << 20), "--max-num-seqs", "8"]
        servers.append(VllmServer(model, folder / f"log{number}", *flags, core=number))
    for one in servers:
        until(one.healthy, 600)
    return _routed(folder, "tiny", [one.url for one in servers], ledgers, [one.stop for one in servers])


def _routed(folder: Path, model: str, urls: list[str], ledgers: list[Path], stops: list[Any]) -> Fleet:
    loop, scissors = Loop(), Scissors()
    relays = [Relay(loop, url, scissors) for url in urls]
    keys = [argument for number in range(TENANTS) for argument in ("--api-keys", f"tenant{number}=key{number}")]
    named = [argument for relay in relays for argument in ("--replica", relay.url)]
    routed = folder / "router.jsonl"
    flags = ["--replica-key", KEY, "--usage-ledger", str(routed), "--failures", "1000000", "--max-attempts", "8"]
    router = RouterProcess(*named, *keys, *flags).wait_for(len(urls))
    return Fleet(model, urls, ledgers, routed, router, scissors, stops, relays)


def body_of(path: str, draw: random.Random, model: str, streams: bool, tokens: int) -> dict[str, Any]:
    text = draw.choice(_TEXTS)[: draw.randint(20, 300)] + f" Question {draw.randrange(9)}."
    body: dict[str, Any] = {
        "model": model,
        "stream": streams,
        "temperature": draw.choice((0, 1)),
        "seed": draw.randrange(99),
    }
    if path == "/v1/responses":
        return body | {"input": text, "max_output_tokens": tokens}
    if path == "/v1/completions":
        body |= {"prompt": text, "ignore_eos": True}
    else:
        body |= {"messages": [{"role": "user", "content": text}]}
    if streams and path != "/v1/messages":
        body["stream_options"] = {"include_usage": True}
    return body | {"max_tokens": tokens}


def tokens_of(usage: dict[str, Any]) -> tuple[int, int, int]:
    """Counts tokens of the prompt, of the answer, and of the prompt from the cache, as any dialect tells them."""
    if "prompt_tokens" in usage:
        cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        return usage["prompt_tokens"], usage["completion_tokens"], cached
    if "input_tokens_details" in usage:
        return usage["input_tokens"], usage["output_tokens"], usage["input_tokens_details"]["cached_tokens"]
    read = usage.get("cache_read_input_tokens") or 0
    return usage["input_tokens"] + read + (usage.get("cache_creation_input_tokens") or 0), usage["output_tokens"], read


def events(answer: httpx.Response) -> Iterator[dict[str, Any]]:
    rest = b""
    for piece in answer.iter_bytes():
        *lines, rest = (rest + piece).split(b"\n")  # httpx ends lines at other characters, too
        yield from (json.loads(line.removeprefix(b"data: ")) for line in lines if line.startswith(b"data: {"))


class Campaign:
    """Sends the requests."""

    def __init__(self, fleet: Fleet, seed: int) -> None:
        self.fleet = fleet
        self._seed = seed
        self._clients = [
            httpx.Client(base_url=fleet.router.url, headers={"authorization": f"Bearer key{number}"}, timeout=600)
            for number in range(TENANTS)
        ]

    def ask(self, number: int) -> Asked:
        """Request `number`."""
        draw = random.Random(f"{self._seed}-{number}")
        tenant = draw.randrange(TENANTS)
        asked = Asked(f"request-{number}", f"tenant{tenant}")
        path, fate = draw.choice(PATHS), draw.random()
        asked.left = fate < LEAVES
        breaks = LEAVES <= fate < LEAVES + BREAKS
        moves = not self.fleet.vllm and 0 <= fate - LEAVES - BREAKS < MIGRATES
        if breaks or moves:
            path = PATHS[0] if moves else draw.choice(PATHS[:2])
        streams = asked.left or moves or draw.random() < 0.5
        body = body_of(
            path, draw, self.fleet.model, streams, 1500 if moves else 200 if asked.left else draw.randint(1, 16)
        )
        if breaks:
            self.fleet.scissors.cut_after(draw.randrange(4))
        headers = {"x-request-id": asked.id}
        if not streams:
            answer = self._clients[tenant].post(path, json=body, headers=headers)
            if answer.is_success:
                asked.told = tokens_of(answer.json()["usage"])
            else:
                asked.failure = answer.text
            return asked
        with self._clients[tenant].stream("POST", path, json=body, headers=headers) as answer:
            if not answer.is_success:
                asked.failure = answer.read().decode()
                return asked
            usage: dict[str, Any] = {}
            for count, event in enumerate(events(answer)):
                if "error" in event:
                    asked.failure = json.dumps(event)
                    return asked
                if asked.left and count >= draw.randrange(2, 6):
                    return asked
                if moves and count == 1:
                    asked.moved = self._move(answer.headers)
                usage |= event.get("usage") or (event.get("response") or event.get("message") or {}).get("usage") or {}
            asked.told = tokens_of(usage)
        return asked

    def _move(self, headers: httpx.Headers) -> bool:
        """Let a request migrate. False if it has ended or no server takes it."""
        relays = [relay.url for relay in self.fleet.relays]
        source = next((one for one in relays if headers.get("x-foreword-route", "").startswith(one)), None)
        if source is None:  # the head was sent before the replica was chosen, or it is another one
            return False
        where = random.choice([one for one in relays if one != source])
        path = f"{source}/v1/requests/{headers['x-request-id']}/migrate"
        answer = http_client.post(path, json={"to": where}, headers={"authorization": f"Bearer {ADMIN}"})
        return answer.status_code == 200


def settled(fleet: Fleet) -> None:
    """Wait until no ledger grows any more."""
    paths = [fleet.routed, *fleet.ledgers]
    since, sizes = time.monotonic(), [0]
    while time.monotonic() - since < 5:
        now = [path.stat().st_size for path in paths] + [sum(counted(url).values()) for url in fleet.urls]
        if now != sizes:
            since, sizes = time.monotonic(), now
        time.sleep(0.2)


def wrong(fleet: Fleet, asked: list[Asked]) -> list[str]:
    """Faults in the ledgers."""
    found: list[str] = []
    by_id: dict[str, list[dict[str, Any]]] = {}
    for line in lines(fleet.routed):
        by_id.setdefault(line["id"], []).append(line)
    found += [f"failed: {one}" for one in asked if one.failure]
    for one in asked:
        own = by_id.pop(one.id, [])
        if len(own) != 1:
            found.append(f"{one}: {len(own)} lines of the router: {own}")
            continue
        usage = own[0]["usage"]
        noted = usage.get("prompt", 0), usage.get("output", 0), usage.get("cached", 0)
        if own[0]["tenant"] != one.tenant or (one.told is not None and noted != one.told):
            found.append(f"{one}: {own[0]}")
        if one.left and not (own[0]["status"] in (200, 499) and usage.get("prompt") and usage.get("output")):
            found.append(f"{one}: {own[0]}")
    found += [f"not asked: {one}" for one in by_id]
    # The prompt of a request that migrates is counted by the engine that it went to, and charged by the server that it came to.
    noted, engines = (
        sum(map(read, where), Counter()) for read, where in ((sums, fleet.ledgers), (counted, fleet.urls))
    )
    for name in ("prompt", "output") if fleet.vllm else ():
        # vLLM counts what its front has received, and clients that leave receive no more.
        ended = [one["usage"] for path in fleet.ledgers for one in lines(path) if one["status"] == 200]
        if sum(usage.get(name, 0) for usage in ended) <= engines[name] <= noted[name]:
            engines[name] = noted[name]
    if noted != engines:
        found.append(f"{dict(noted)} in the ledgers of the servers, {dict(engines)} counted by the engines")
    return found


def ask_all(fleet: Fleet, requests: int, seed: int) -> list[Asked]:
    """Send the requests, and wait until the ledgers are complete."""
    campaign = Campaign(fleet, seed)
    with ThreadPoolExecutor(CLIENTS) as pool:
        asked = list(pool.map(campaign.ask, range(requests)))
    settled(fleet)
    return asked


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--vllm", action="store_true")
    given = parser.parse_args()
    if given.vllm and "FOREWORD_VLLM_PYTHON" not in os.environ:
        parser.error("FOREWORD_VLLM_PYTHON names no interpreter with vLLM")
    with tempfile.TemporaryDirectory(prefix="foreword-ledger-") as folder:
        fleet = (with_vllm if given.vllm else native)(Path(folder))
        try:
            begin = time.monotonic()
            asked = ask_all(fleet, given.requests, given.seed)
            seconds = time.monotonic() - begin
            found = wrong(fleet, asked)
            retried = sum(fleet.router.metric(f"foreword:router_{name}_total") for name in ("retries", "continuations"))
            moved = sum(one.moved for one in asked)
            print(
                "| requests | left | failed over | migrated | seconds | lines of the router | of the servers | wrong |"
            )
            print("| ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |")
            print(
                f"| {len(asked)} | {sum(one.left for one in asked)} | {retried:.0f} | {moved} | {seconds:.0f} "
                f"| {len(lines(fleet.routed))} | {sum(len(lines(path)) for path in fleet.ledgers)} | {len(found)} |"
            )
            print(*found[:20], sep="\n")
        finally:
            fleet.close()
    return 1 if found else 0


if __name__ == "__main__":
    raise SystemExit(main())
