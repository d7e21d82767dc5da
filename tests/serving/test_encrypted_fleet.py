"""Encryption is switched on, and keys are changed, in a fleet of real servers that answers requests all the time.

    FOREWORD_FLEET_SECONDS=60 pytest -s tests/serving/test_encrypted_fleet.py

prints what it counted, with that many seconds in which servers with and without encryption run side by side.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import threading
import time
from collections import Counter
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import http_client
import httpx
import pytest
from server_process import ServerProcess
from servers import RedisServer
from shared_server import until

from foreword.blocks.layout import tenant_of
from foreword.blocks.salt import derive_salt
from foreword.conformance import soon
from foreword.store.data_keys import DataKeys, tenant_of_salt
from foreword.store.sealing import KeyRing
from foreword.store.urls import open_store
from foreword.store_config import EncryptionConfig

SECONDS = float(os.environ.get("FOREWORD_FLEET_SECONDS", "5"))
KEEP = 10.0  # seconds for which a tenant's old data key reads
SECRET = "a tenant secret of the tests"
KEYS = {"ann": "ann-key-of-these-tests", "bob": "bob-key-of-these-tests"}
TEXT = "def parse{}(text: str) -> list[str]:\n    return [part.strip() for part in text.split('{}')]\n\n"
PROMPTS = [TEXT.format(number, number) * 4 for number in range(3)]
OLD, NEW = f"old:{'11' * 32}", f"new:{'22' * 32}"


class Fleet:
    """Four servers over one folder and one Redis, and clients of two tenants."""

    def __init__(self, folder: Path, redis: RedisServer) -> None:
        self.folder, self.masters = folder, folder / "masters"
        self.urls = [f"disk://{folder}/kv?size=256MiB", redis.url]
        self.encryption = EncryptionConfig(
            key_store=str(folder / "keys"), master_key_file=str(self.masters), check_seconds=0.5
        )
        self.servers: list[ServerProcess | None] = [None] * 4
        self.answers: dict[tuple[str, str], str] = {}
        self.counts: Counter[str] = Counter()
        self.wrong: list[str] = []
        self._bad = 0.0
        self._clients: list[threading.Thread] = []
        self._ended = threading.Event()

    def restart(self, number: int, *flags: str) -> None:
        """End a server after its writes, and start it with other options."""
        server, self.servers[number] = self.servers[number], None
        if server is not None:
            url = server.url()
            _written(url)
            self._bad += _metric(url, "foreword:tier_bad_blocks_total")
            server.popen.send_signal(signal.SIGTERM)
            server.end()
        keys = [part for one in KEYS.items() for part in ("--api-keys", "=".join(one))]
        stores = [part for one in self.urls for part in ("--store", one)]
        patient = [f"--store-{name}" for name in ("lookup-timeout", "load-timeout", "flush-seconds")]
        fresh = ServerProcess(
            *("--dtype", "float32", "--no-self-check", "--kv-memory", "768 tokens"),
            *(*stores, *keys, "--tenant-secret", SECRET, *(part for one in patient for part in (one, "60")), *flags),
        )
        fresh.wait_ready()
        self.servers[number] = fresh

    def switched_on(self, *more: str) -> list[str]:
        one = self.encryption
        return [
            *("--encryption-key-store", str(one.key_store), "--encryption-master-key-file", str(one.master_key_file)),
            *("encryption.check_seconds=0.5", *more),
        ]

    def ask(self, number: int, tenant: str, prompt: str) -> None:
        """Count an answer, unless the server is being restarted. Under load, computing may be faster than loading."""
        server = self.servers[number]
        if server is None:
            return
        body = {"prompt": prompt, "temperature": 0, "max_tokens": 6}
        headers = {"authorization": f"Bearer {KEYS[tenant]}"}
        try:
            found = http_client.post(f"{server.url()}/v1/completions", json=body, headers=headers, timeout=120)
        except httpx.TransportError:
            assert self.servers[number] is not server, "a server that runs does not answer"
            return
        if found.status_code == 503 and self.servers[number] is not server:
            return
        answer: dict[str, Any] = found.json()
        text, usage = answer["choices"][0]["text"], answer["usage"]
        expected = self.answers.setdefault((tenant, prompt), text)
        self.counts["requests"] += 1
        self.counts["cached tokens"] += int(usage["prompt_tokens_details"]["cached_tokens"])
        if text != expected:
            self.wrong.append(f"{text!r} in place of {expected!r}")

    def begin_traffic(self) -> None:
        """Clients ask from now on, until `close`."""
        for seed in range(2):
            self._clients.append(threading.Thread(target=self.traffic, args=(random.Random(seed),), daemon=True))
            self._clients[-1].start()

    def traffic(self, draw: random.Random) -> None:
        while not self._ended.wait(0.05):
            self.ask(draw.randrange(4), draw.choice(list(KEYS)), draw.choice(PROMPTS))

    def everywhere(self) -> None:
        """Ask each server for every prompt of every tenant, and wait until all is written."""
        for number in range(4):
            for tenant in KEYS:
                for prompt in PROMPTS:
                    self.ask(number, tenant, prompt)
        self.stored()

    def readable(self, **more: Any) -> dict[str, set[bytes]]:
        return readable(self.urls, replace(self.encryption, **more))

    def stored(self) -> None:
        """Wait until all servers have written what they computed."""
        for server in filter(None, self.servers):
            _written(server.url())

    def close(self) -> float:
        """End all, the clients first: to them a killed server is an error. Returns the blocks that servers found damaged."""
        self._ended.set()
        for one in self._clients:
            one.join(120)
        for server in filter(None, self.servers):
            self._bad += _metric(server.url(), "foreword:tier_bad_blocks_total")
            server.kill()
        return self._bad


def _written(url: str) -> None:
    until(lambda: _metric(url, "foreword:store_queued_blocks") == 0)


def _metric(url: str, name: str) -> float:
    lines = http_client.get(f"{url}/metrics").text.splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith((f"{name}{{", f"{name} ")))


def readable(urls: list[str], encryption: EncryptionConfig) -> dict[str, set[bytes]]:
    """The names of each tenant's blocks that can be read with these keys, in any of the stores."""
    tenants = {tenant_of_salt(derive_salt(SECRET.encode(), name)): name for name in KEYS}
    found: dict[str, set[bytes]] = {name: set() for name in KEYS}
    with closing(DataKeys(encryption)) as keys:
        ring = KeyRing(data=keys, read_plain=encryption.read_plain)
        for url in urls:
            with closing(open_store([url], keys=ring)) as store:
                names = [name for batch in store.tiers[0].store.list_names(deadline=soon()) for name in batch]
                for name in names:
                    [one] = store.fetch([name], [memoryview(bytearray(1 << 20))], deadline=soon())
                    if one is not None:
                        found[tenants[tenant_of(name)]].add(name)
    return found


def lost(before: dict[str, set[bytes]], now: dict[str, set[bytes]]) -> int:
    """Blocks that were there before, of the tenants that are in `now`."""
    return sum(len(before[name] - found) for name, found in now.items())


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_keys_change_under_traffic(tmp_path: Path) -> None:
    """While clients ask all the time, four servers get encryption one by one, then a new master key, and a tenant a new data
    key, as docs/operations/security.md says it: every answer is the same, no block is lost that the keys of now read, none is
    damaged. After its end an old key reads nothing: neither in the stores nor in a copy of them."""
    redis = RedisServer(tmp_path / "redis")
    fleet = Fleet(tmp_path, redis)
    fleet.masters.write_text(OLD)
    try:
        for number in range(4):
            fleet.restart(number)
        for tenant in KEYS:
            for prompt in PROMPTS:
                fleet.ask(0, tenant, prompt)
        fleet.stored()
        plain = fleet.readable(read_plain=True)
        assert all(plain.values()) and not any(fleet.readable().values())
        fleet.begin_traffic()

        # Switched on, one by one: those with encryption read plain blocks too, and then no more.
        for number in range(4):
            fleet.restart(number, *fleet.switched_on("--encryption-read-plain"))
            time.sleep(SECONDS / 4)
        assert lost(plain, fleet.readable(read_plain=True)) == 0
        for number in range(4):
            fleet.restart(number, *fleet.switched_on())
        fleet.everywhere()
        mine = fleet.readable()
        assert all(mine.values())

        # A new master key: behind the old one, before it, alone. A restart forgets the old one at once.
        for masters in ((OLD, NEW), (NEW, OLD)):
            fleet.masters.write_text("\n".join(masters))
            fleet.everywhere()
            assert lost(mine, fleet.readable()) == 0
        with closing(DataKeys(fleet.encryption)) as keys:
            assert keys.wrap_again()[1] == 0
        fleet.masters.write_text(NEW)
        for number in range(4):
            fleet.restart(number, *fleet.switched_on())
        fleet.everywhere()
        alone = fleet.readable()
        assert lost(mine, alone) == 0
        mine = alone
        old = tmp_path / "old masters"
        old.write_text(OLD)
        assert not any(fleet.readable(master_key_file=str(old)).values())

        # A new data key for ann.
        copy = tmp_path / "copy"
        shutil.copytree(tmp_path / "kv", copy)
        copied = [f"disk://{copy}?size=256MiB"]
        before = readable(copied, fleet.encryption)
        with closing(DataKeys(fleet.encryption)) as keys:
            assert keys.rotate(tenant_of_salt(derive_salt(SECRET.encode(), "ann")), KEEP) is not None
        ends = time.monotonic() + KEEP
        assert lost(mine, fleet.readable()) == 0 or time.monotonic() > ends
        time.sleep(max(ends - time.monotonic(), 0) + 2 * fleet.encryption.check_seconds)
        after = readable(copied, fleet.encryption)
        assert all(before.values()) and after == {"ann": set(), "bob": before["bob"]}
        # Its blocks are misses, and are replaced when they are computed again.
        for number in range(4):
            fleet.restart(number, *fleet.switched_on())
        fleet.everywhere()
        now = fleet.readable()
        assert now["ann"] and not mine["bob"] - now["bob"]
    finally:
        damaged = fleet.close()
        redis.kill()
    sizes = {name: [len(one[name]) for one in (plain, mine, now, before, after)] for name in KEYS}
    print(f"\n{SECONDS:.0f} s mixed: {dict(fleet.counts)}, damaged {damaged:.0f}; blocks {sizes}")
    assert not fleet.wrong and not damaged and fleet.counts["requests"] > 100
