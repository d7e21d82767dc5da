"""Sessions of agents that fork, shorten their history and end, on a real `foreword serve`: hits, bytes written, time of an end.

    python -m benchmarks.server.lives [--sessions 6] [--policies today,seen,told]

The sessions of `benchmarks.simulator.lives`, shorter, as chats with a tiny random model whose device memory is a quarter of the
working set, behind it memory for all of it and a disk. Requests come in order of their times, one after the other, without
the times between them. `today` writes every block to the disk; the others hold half of the memory back: with `seen` the server
finds shortened histories itself, and to `told` the client says what the sessions do.
Bytes written are those that the server counts, and what it writes when it is stopped.
"""

from __future__ import annotations

import argparse
import random
import subprocess
import sys
import tempfile
import time
from array import array
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import httpx

from benchmarks.engine.random_model import SIZES, make
from benchmarks.harness import machine, set_up, table
from benchmarks.simulator.lives import BLOCK, Agents, Event, Keys, Prepared, length, sessions, working_set
from foreword.api.request import Message
from foreword.store.urls import open_store

AGENTS = Agents(
    system=500, task=(30, 150), result=(30, 200), answer=(10, 60), summary=(60, 150), steps=14, sub_steps=(3, 6), longest=2000
)  # fmt: skip


def written_out(message: Message) -> str:
    """A text of about as many tokens as the message stands for."""
    rng = random.Random(message.content)
    return " ".join(
        f"{rng.choice('bdfgklmnprst')}{rng.choice('aeiou')}{rng.randrange(10)}" for _ in range(length(message) // 3)
    )


class Server:
    """A `foreword serve` of its own."""

    def __init__(self, model: Path, folder: Path, device: int, memory: int, hold: int) -> None:
        self.disk = f"disk://{folder}?size=4GiB"
        more = f"&hold={hold}" if hold else ""
        stores = ["--store", f"memory://?size={memory}", "--store", f"{self.disk}{more}"]
        flags = ["--kv-memory", f"{device} tokens", "--port", "0", "--threads", "1", "--max-model-len", "4096"]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "foreword", "serve", str(model), *stores, *flags],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if "http://" in line:
                self.url = "http://" + line.split("http://")[1].split()[0].rstrip("/.,;")
                break
        self.client = httpx.Client(base_url=self.url, timeout=300)
        while self.client.get("/ready").status_code != 200:
            time.sleep(0.5)

    def metric(self, name: str, tier: str) -> float:
        lines = self.client.get("/metrics").text.splitlines()
        found = [line for line in lines if line.startswith(name) and f'tier="{tier}"' in line]
        return sum(float(line.rsplit(" ", 1)[1]) for line in found)

    def stop(self) -> int:
        """Bytes on the disk afterwards."""
        self.client.close()
        self.process.terminate()
        self.process.communicate(timeout=120)
        with closing(open_store([self.disk], only_read=True)) as store:
            time.sleep(1)
            return store.status().bytes


def run(server: Server, events: Sequence[Event], *, told: bool) -> dict[str, float]:
    prompt = cached = 0
    ends: list[float] = []
    for one in events:
        if one.what == "request":
            messages = [
                {"role": "user" if m.role == "tool" else m.role, "content": written_out(m)} for m in one.messages[:-1]
            ]
            headers = {"x-session-id": one.session} if told else {}
            body = {"messages": messages, "max_tokens": 1, "temperature": 0}
            answer = server.client.post("/v1/chat/completions", json=body, headers=headers)
            usage = answer.raise_for_status().json()["usage"]
            prompt += usage["prompt_tokens"]
            cached += usage["prompt_tokens_details"]["cached_tokens"]
        elif told:
            body = {"action": one.what, "session_id": one.session}
            began = time.perf_counter()
            server.client.post(
                "/v1/sessions", json=body | ({"parent_session_id": one.parent} if one.parent else {})
            ).raise_for_status()
            if one.what == "end":
                ends.append(time.perf_counter() - began)
    time.sleep(2)
    loaded = server.metric("foreword:tier_read_blocks_total", "disk")
    return {"hits": cached / prompt, "read": loaded, "slowest end": max(ends, default=0.0)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sessions", type=int, default=6)
    parser.add_argument("--policies", default="today,seen,told")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    events = sessions(args.sessions, 60.0, AGENTS, args.seed)
    rows = []
    with tempfile.TemporaryDirectory(prefix="foreword-lives-") as base:
        model = Path(base, "model")
        make(SIZES["tiny"], model)
        whole = working_set(prepared(events, model)) * BLOCK
        token_bytes = SIZES["tiny"].kv_bytes_per_token() * 2  # float32 on CPUs
        device = max(whole // 4, AGENTS.longest + 700)
        for policy in args.policies.split(","):
            memory = whole * token_bytes * 5 // 4
            folder = Path(base, policy)
            server = Server(model, folder, device, memory, 0 if policy == "today" else memory // 2)
            found = run(server, events, told=policy == "told")
            counted, before = (
                server.metric("foreword:tier_written_bytes_total", "disk"),
                server.metric("foreword:tier_bytes", "disk"),
            )
            refused = server.metric("foreword:tier_refused_blocks_total", "disk")
            left = server.stop()
            written = counted + max(left - before, 0)
            rows.append(
                [
                    policy,
                    f"{found['hits']:.1%}",
                    f"{written / 1e6:.1f} MB",
                    f"{left / 1e6:.1f} MB",
                    f"{refused:.0f}",
                    f"{found['slowest end'] * 1e3:.0f} ms",
                ]
            )
            print(rows[-1], flush=True)
    requests = sum(one.what == "request" for one in events)
    print(
        set_up(
            {
                "sessions": str(args.sessions),
                "requests": str(requests),
                "working set": f"{whole:,} tokens",
                "device": f"{device:,} tokens",
                **machine(),
            }
        )
    )
    print(table(["", "hits", "written to the disk", "left on it", "not written", "slowest end"], rows))


def prepared(events: Sequence[Event], model: Path) -> list[Prepared]:
    """The events with the keys of their tokens."""
    from transformers import AutoTokenizer

    keys, tokenizer = Keys(), AutoTokenizer.from_pretrained(model)
    texts = {m.content: m for one in events for m in one.messages}
    keys.tokens.update({name: array("I", tokenizer.encode(written_out(m))) for name, m in texts.items()})
    return [Prepared(one, keys=keys(one.messages[:-1])[1]) for one in events]


if __name__ == "__main__":
    main()
