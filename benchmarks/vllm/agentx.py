"""Agents' traffic through real `vllm serve`: alone, with LMCache, with Foreword's stores, and behind routers.

    python -m benchmarks.vllm.agentx MODEL --traces FOLDER --vllm-python ENVIRONMENT/bin/python [--lmcache-python PYTHON]
        [--vllm-router COMMAND] [--steps 8] [--longest 5000] [--device-share 0.25] [--figures FILE]

FOLDER has sessions of real agents (`agent-*.jsonl`, each line a step with its whole `input`), whose text becomes tokens with
MODEL's tokenizer.json. Each session is a client that asks its steps one after the other, and --concurrency of them run at
once; all together they come --rounds times, as an agent's tools do. vLLM's own cache has room for --device-share of all
distinct tokens. One set-up after the other gets the same requests, with empty stores.

Hit share: cached of all prompt tokens, as vLLM counts them. Written: bytes that the set-up's processes wrote to a file system
on a device, by cached token. Wrong: answers other than those of vLLM alone (float32).
"""

import argparse
import asyncio
import dataclasses
import json
import secrets
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import aiohttp

from benchmarks.harness import machine, set_up, table, write_figures
from benchmarks.vllm.bench import BLOCK, Record, spread, token_bytes
from benchmarks.vllm.contenders import Contender, Places, Server, contenders, free_port
from benchmarks.vllm.offload import versions
from benchmarks.vllm.processes import Running, family
from benchmarks.vllm.workloads import Prompt, agent_sessions
from foreword.referee.process import Failed

_NEW = 8
_REQUEST_SECONDS = 900.0


@dataclasses.dataclass(frozen=True)
class SetUp:
    """A contender with its `vllm serve` processes, and the port that clients talk to."""

    contender: Contender
    port: int


def set_ups(arguments: argparse.Namespace, places: Places, device_tokens: int) -> Iterator[SetUp]:
    known = {one.name: one for one in contenders(places)}
    disk = known["foreword-memory"]
    yield _served(arguments, known["alone"], 1, device_tokens)
    if arguments.lmcache_python:
        yield _served(arguments, known["lmcache"], 1, device_tokens)
    memory = _stores(disk, "foreword, memory", [_urls(disk)[0]])
    yield _served(arguments, memory, 1, device_tokens)
    yield _served(arguments, _stores(disk, "foreword, memory and disk", _urls(disk)), 1, device_tokens)
    masters = places.memory / "masters"
    masters.write_text(f"bench:{secrets.token_hex(32)}\n", encoding="utf-8")
    keys = {"key_store": str(places.memory / "keys"), "master_key_file": str(masters)}
    encrypted = _stores(disk, "foreword, memory and disk, encrypted", _urls(disk), encryption=keys)
    yield _served(arguments, encrypted, 1, device_tokens)
    two = _served(arguments, _stores(disk, "two, foreword's router", _urls(disk)), 2, device_tokens)
    yield _routed(two, lambda urls, port: _foreword_router(arguments, urls, port))
    if arguments.vllm_router:
        two = _served(arguments, _stores(disk, "two, vllm-router", _urls(disk)), 2, device_tokens)
        yield _routed(two, lambda urls, port: _vllm_router(arguments, urls, port))


def _urls(contender: Contender) -> list[str]:
    assert contender.transfer is not None
    urls: list[str] = contender.transfer["kv_connector_extra_config"]["store"]
    return urls


def _stores(base: Contender, name: str, urls: list[str], **more: Any) -> Contender:
    assert base.transfer is not None
    transfer = {**base.transfer, "kv_connector_extra_config": {"store": urls, **more}}
    return dataclasses.replace(base, name=name, transfer=transfer)


def _served(arguments: argparse.Namespace, contender: Contender, count: int, device_tokens: int) -> SetUp:
    servers = []
    blocks = -(-device_tokens // BLOCK) + 2
    for _ in range(count):
        port = free_port()
        command = [
            contender.python, "-m", "vllm.entrypoints.cli.main", "serve", str(arguments.model), "--served-model-name", "model",
            "--host", "127.0.0.1", "--port", str(port), "--dtype", "float32", "--enforce-eager",
            "--max-model-len", str(arguments.longest + 2 * _NEW), "--block-size", str(BLOCK), "--seed", "0",
            "--kv-cache-memory-bytes", str(blocks * BLOCK * token_bytes(arguments.model, "float32")),
            "--max-num-batched-tokens", "2048", "--enable-prompt-tokens-details",
        ]  # fmt: skip
        if contender.transfer is not None:
            command += ["--kv-transfer-config", json.dumps(contender.transfer)]
        servers.append(Server(tuple(command), port))
    variables = {
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
        **contender.variables,
    }
    changed = dataclasses.replace(contender, servers=(*contender.servers, *servers), variables=variables)
    return SetUp(changed, servers[-1].port)


def _routed(two: SetUp, router: Any) -> SetUp:
    port = free_port()
    urls = [f"http://127.0.0.1:{one.port}" for one in two.contender.servers]
    servers = (*two.contender.servers, Server(tuple(router(urls, port)), port))
    return SetUp(dataclasses.replace(two.contender, servers=servers), port)


def _foreword_router(arguments: argparse.Namespace, urls: Sequence[str], port: int) -> list[str]:
    replicas = [word for url in urls for word in ("--replica", url)]
    return [
        *(sys.executable, "-m", "foreword", "route", "--log-level", "warning", "--port", str(port), *replicas),
        *("--tokenizer", str(arguments.model)),
    ]


def _vllm_router(arguments: argparse.Namespace, urls: Sequence[str], port: int) -> list[str]:
    return [
        *(arguments.vllm_router, "--host", "127.0.0.1", "--port", str(port), "--policy", "cache_aware"),
        *("--prometheus-port", str(free_port()), "--worker-urls", *urls),
    ]


async def ask(session: aiohttp.ClientSession, port: int, prompt: Prompt) -> Record:
    body = {
        "model": "model", "prompt": prompt, "max_tokens": _NEW, "temperature": 0, "stream": True, "ignore_eos": True,
        "stream_options": {"include_usage": True}, "logprobs": 0, "return_token_ids": True,
    }  # fmt: skip
    began = time.perf_counter()
    found: Record = {"ttft": 0.0, "tokens": [], "asked": len(prompt), "cached": 0}
    async with session.post(f"http://127.0.0.1:{port}/v1/completions", json=body) as answer:
        if answer.status != 200:
            raise Failed(f"status {answer.status}: {(await answer.text())[:300]}")
        async for line in answer.content:
            if not line.startswith(b"data: {"):  # comments keep a connection open while a request waits
                continue
            event = json.loads(line.removeprefix(b"data: "))
            for choice in event.get("choices") or ():
                found["ttft"] = found["ttft"] or time.perf_counter() - began
                found["tokens"] += choice.get("token_ids") or ()
            if event.get("usage"):
                found["cached"] = (event["usage"].get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    if len(found["tokens"]) != _NEW:
        raise Failed(f"an answer has {len(found['tokens'])} tokens: {found}")
    return found


async def replay(port: int, sessions: Sequence[Sequence[Prompt]], concurrency: int, rounds: int) -> list[list[Record]]:
    """The answers of each session, in its order."""
    places = asyncio.Semaphore(concurrency)
    timeout = aiohttp.ClientTimeout(total=_REQUEST_SECONDS)
    answers: list[list[Record]] = [[] for _ in sessions]
    # Servers close connections that were idle for seconds, as those of waiting sessions are.
    async with aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(force_close=True)) as client:

        async def run(number: int) -> None:
            for prompt in sessions[number]:
                async with places:
                    answers[number].append(await ask(client, port, prompt))

        for _ in range(rounds):
            await asyncio.gather(*(run(number) for number in range(len(sessions))))
    return answers


async def until_ready(port: int, prompt: Prompt) -> None:
    """Wait until a request is answered, through the router if there is one."""
    deadline = time.monotonic() + 240
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=60)) as client:
        while True:
            try:
                await ask(client, port, prompt)
                return
            except (Failed, aiohttp.ClientError, TimeoutError) as error:
                if time.monotonic() > deadline:
                    raise Failed(f"no answer: {type(error).__name__} {error}") from error
                await asyncio.sleep(0.5)


def written(pids: Sequence[int]) -> int:
    """Bytes that these processes and their children have written to devices."""
    total = 0
    for pid in {one for first in pids for one in family(first)}:
        try:
            fields = dict(line.split(": ") for line in Path(f"/proc/{pid}/io").read_text().splitlines())
        except OSError:
            continue
        total += int(fields["write_bytes"]) - int(fields["cancelled_write_bytes"])
    return total


def measure(one: SetUp, sessions: Sequence[Sequence[Prompt]], arguments: argparse.Namespace, logs: Path) -> Record:
    with Running(one.contender, logs) as running:
        asyncio.run(until_ready(one.port, list(range(20, 60))))
        before = written(running.pids)
        began = time.perf_counter()
        answers = asyncio.run(replay(one.port, sessions, arguments.concurrency, arguments.rounds))
        seconds = time.perf_counter() - began
        time.sleep(2)  # what is queued is written
        wrote = written(running.pids) - before
        peak = running.memory.peak
    flat = [answer for some in answers for answer in some]
    cached, asked = (sum(answer[name] for answer in flat) for name in ("cached", "asked"))
    ttft = [answer["ttft"] for answer in flat]
    return {
        "requests": len(flat),
        "ttft_mean": round(1e3 * sum(ttft) / len(ttft), 1),
        "ttft": spread(ttft),
        "hit": round(cached / asked, 4),
        "requests_per_s": round(len(flat) / seconds, 3),
        "written": wrote,
        "written_per_cached_token": round(wrote / cached) if cached else None,
        "peak": peak,
        "tokens": [answer["tokens"] for answer in flat],
    }


def distinct_tokens(sessions: Sequence[Sequence[Prompt]]) -> int:
    """Tokens in distinct blocks, as if no cache ever forgot."""
    blocks = {
        hash(tuple(prompt[: first + BLOCK]))
        for some in sessions
        for prompt in some
        for first in range(0, len(prompt) - BLOCK + 1, BLOCK)
    }
    return BLOCK * len(blocks)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--traces", type=Path, required=True)
    parser.add_argument("--vllm-python", required=True)
    parser.add_argument("--lmcache-python", help="an interpreter with vLLM and LMCache (that of vLLM)")
    parser.add_argument("--vllm-router", help="the command of the package vllm-router; without it that row is left out")
    parser.add_argument("--only", default="", help="names of set-ups with semicolons between (all)")
    parser.add_argument("--steps", type=int, default=8, help="of each session")
    parser.add_argument("--longest", type=int, default=5000, help="longer steps are left out")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--concurrency", type=int, default=3)
    parser.add_argument("--device-share", type=float, default=0.25)
    parser.add_argument("--folder", type=Path, help="where stores on disk are made (the temporary folder)")
    parser.add_argument("--figures", type=Path, help="write the table for docs/figures to this file")
    arguments = parser.parse_args()
    sessions, about = agent_sessions(arguments.traces, arguments.model, arguments.steps, arguments.longest)
    distinct = distinct_tokens(sessions)
    device_tokens = max(int(arguments.device_share * distinct), arguments.longest + 2 * _NEW)
    facts = {
        **machine(),
        "vLLM": versions(arguments.vllm_python),
        "LMCache": versions(arguments.lmcache_python) if arguments.lmcache_python else "not taking part",
        "traffic": f"{about}; {arguments.rounds} rounds, {arguments.concurrency} at once",
        "device cache": f"{device_tokens:,} of {distinct:,} distinct tokens",
        "model": f"{arguments.model.name}, float32",
    }
    print(set_up(facts), flush=True)
    found: list[tuple[str, Record]] = []
    with (
        tempfile.TemporaryDirectory(dir=arguments.folder) as disk,
        tempfile.TemporaryDirectory(dir="/dev/shm") as memory,
    ):
        python = arguments.vllm_python
        places = Places(Path(disk), Path(memory), python, arguments.lmcache_python or python, python, 2, 256)
        for one in set_ups(arguments, places, device_tokens):
            name = one.contender.name
            if arguments.only and name not in arguments.only.split(";"):
                continue
            try:
                record = measure(one, sessions, arguments, Path(disk))
            except (Failed, aiohttp.ClientError) as error:
                print(f"{name}: {type(error).__name__}: {error}", flush=True)
                continue
            first = found[0][1]["tokens"] if found else record["tokens"]
            record["wrong"] = sum(mine != theirs for mine, theirs in zip(record["tokens"], first, strict=True))
            found.append((name, record))
            print(f"  {name}: { {key: value for key, value in record.items() if key != 'tokens'} }", flush=True)
    head = ["set-up", "TTFT mean", "TTFT p90", "hit share", "requests/s", "written per cached token", "wrong"]
    rows = [
        [
            name,
            f"{one['ttft_mean']:,.0f} ms",
            f"{one['ttft']['p90']:,.0f} ms",
            f"{one['hit']:.1%}",
            f"{one['requests_per_s']:.2f}",
            "-" if one["written_per_cached_token"] is None else f"{one['written_per_cached_token']:,} B",
            f"{one['wrong']} of {one['requests']}",
        ]
        for name, one in found
    ]
    print(table(head, rows))
    if arguments.figures:
        measured = {name: {key: value for key, value in one.items() if key != "tokens"} for name, one in found}
        write_figures(arguments.figures, "Agents' traffic through vLLM", head, rows, facts, set_ups=measured)


if __name__ == "__main__":
    main()
