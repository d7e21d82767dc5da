"""Faults of a fault run: what is done to servers, stores, connections and the router while requests run."""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import http_client
import httpx
import redis
from fault_campaign import MUTATIONS
from system_fleet import Fleet, Server

DAMAGE = ("flip", "header flip", "flips", "cut", "longer", "empty", "zeros", "garbage", "field")
# Statuses of a migration: done, the request has ended, it cannot migrate now, the other server cannot be reached.
MIGRATION = (200, 404, 409, 502, 503, 504)


@dataclass
class Window:
    """The time of a fault, until the router sends requests to all servers again. `subject` is a server, `router` or `store`."""

    kind: str
    subject: str
    began: float
    ended: float = float("inf")


@dataclass
class Faults:
    """Faults by name, in three groups that run beside each other: one server at a time, so that another one is always up; the
    stores; and what an operator does."""

    fleet: Fleet
    windows: list[Window] = field(default_factory=list)
    odd: list[str] = field(default_factory=list)

    def run(self, kind: str, draw: random.Random) -> None:
        """Runs one fault, from its begin to its repair."""
        subject = "router" if kind.startswith("router ") else "store" if kind in STORES else "server"
        window = Window(kind, subject, time.monotonic())
        self.windows.append(window)
        try:
            SERVERS.get(kind, STORES.get(kind, OPERATIONS.get(kind)))(self, draw, window)  # type: ignore[misc]
        except Exception as error:  # noqa: BLE001
            self.odd.append(f"{kind}: {type(error).__name__}: {error}")
        finally:
            window.ended = time.monotonic()

    def overlapping(self, began: float, ended: float, *subjects: str) -> list[Window]:
        """Faults of these subjects during a time; a store's or operator's are none of them."""
        found = [one for one in self.windows if one.began < ended and one.ended > began]
        return [one for one in found if one.subject in subjects]

    # Servers

    def kill(self, draw: random.Random, window: Window) -> None:
        server = self._server(draw, window)
        server.end()
        time.sleep(draw.choice([0.0, 0.5, 2.0]))
        server.start()
        self._wait(server)

    def kill_prefill(self, draw: random.Random, window: Window) -> None:
        window.subject = "prefill"
        self.fleet.prefill.end()
        self.fleet.prefill.start()
        self._wait(self.fleet.prefill)

    def stop(self, draw: random.Random, window: Window) -> None:
        server = draw.choice(self.fleet.servers)
        window.subject = server.name
        server.send(signal.SIGSTOP)
        time.sleep(draw.choice([0.3, 2.0, 14.0]))
        server.send(signal.SIGCONT)
        self._wait(server)

    def cut(self, draw: random.Random, window: Window) -> None:
        server = self._server(draw, window)
        server.relay.close()
        time.sleep(draw.choice([0.0, 0.0, 1.0, 3.0]))
        server.relay.open()
        self._wait(server)

    def drain(self, draw: random.Random, window: Window) -> None:
        server = self._server(draw, window)
        others = [one.relay.url for one in self.fleet.replicas if one is not server]
        draw.shuffle(others)
        drained = http_client.post(f"{server.url}/v1/drain", json={"to": others})
        if drained.status_code != 200:
            self.odd.append(f"drain: {drained.status_code} {drained.text[:200]}")
        status = server.end(signal.SIGTERM)
        if status:
            self.odd.append(f"drain: {server.name} ended with status {status}")
        server.start()
        self._wait(server)

    def kill_router(self, draw: random.Random, window: Window) -> None:
        self.fleet.kill_router()
        self.fleet.start_router()
        self.fleet.wait_routed()

    def _server(self, draw: random.Random, window: Window) -> Server:
        server = draw.choice(self.fleet.replicas)
        window.subject = server.name
        return server

    def _wait(self, server: Server) -> None:
        server.wait_ready()
        self.fleet.wait_routed()

    # Stores

    def damage_files(self, draw: random.Random, window: Window) -> None:
        for path in self._some_files(draw, 24):
            with suppress(FileNotFoundError):
                data = bytearray(path.read_bytes())
                path.write_bytes(MUTATIONS[draw.choice(DAMAGE)](draw, data, ()) if data else b"")

    def swap_files(self, draw: random.Random, window: Window) -> None:
        paths = self._some_files(draw, 24)
        for one, two in zip(paths[::2], paths[1::2], strict=False):
            with suppress(FileNotFoundError):
                here, there = one.read_bytes(), two.read_bytes()
                one.write_bytes(there)
                two.write_bytes(here)

    def remove_files(self, draw: random.Random, window: Window) -> None:
        for path in self._some_files(draw, 24):
            path.unlink(missing_ok=True)

    def fill_disk(self, draw: random.Random, window: Window) -> None:
        folder = draw.choice(self.fleet.disks)
        if folder not in self.fleet.mounted:
            return
        filler = folder / "filler"
        with suppress(OSError), filler.open("wb") as file:
            while True:
                file.write(bytes(1 << 20))
        time.sleep(draw.choice([0.5, 3.0]))
        filler.unlink()

    def damage_redis(self, draw: random.Random, window: Window) -> None:
        self._change_redis(draw, lambda here, there: (MUTATIONS[draw.choice(DAMAGE)](draw, bytearray(here), ()), there))

    def swap_redis(self, draw: random.Random, window: Window) -> None:
        self._change_redis(draw, lambda here, there: (there, here))

    def kill_redis(self, draw: random.Random, window: Window) -> None:
        self.fleet.redis.kill()
        time.sleep(draw.choice([0.0, 1.0, 4.0]))
        self.fleet.redis.start()

    def stop_redis(self, draw: random.Random, window: Window) -> None:
        with self.fleet.redis.stopped():
            time.sleep(draw.choice([0.2, 1.0, 4.0]))

    def _some_files(self, draw: random.Random, count: int) -> list[Path]:
        folder = draw.choice(self.fleet.disks)
        found = sorted(path for path in folder.glob("kv/*/*/*/*") if len(path.name) == 64)
        return draw.sample(found, min(count, len(found)))

    def _change_redis(self, draw: random.Random, change: Callable[[bytes, bytes], tuple[bytes, bytes]]) -> None:
        with suppress(redis.RedisError), self.fleet.redis.client() as client:
            keys = sorted(client.keys("*:b:*"))
            for _ in range(min(12, len(keys) // 2)):
                one, two = draw.sample(keys, 2)
                here, there = client.get(one), client.get(two)
                if here and there:
                    new = change(here, there)
                    client.mset({one: bytes(new[0]), two: bytes(new[1])})

    # The work of an operator

    def migrate(self, draw: random.Random, window: Window) -> None:
        source, target = draw.sample(self.fleet.replicas, 2)
        with suppress(httpx.TransportError):
            running = httpx.get(f"{source.url}/v1/requests", timeout=5).json()["data"]
            for one in running[:3]:
                body = {"to": target.relay.url}
                moved = httpx.post(f"{source.url}/v1/requests/{one['id']}/migrate", json=body, timeout=30)
                if moved.status_code not in MIGRATION:
                    self.odd.append(f"migrate: {moved.status_code} {moved.text[:200]}")

    def pause_in_router(self, draw: random.Random, window: Window) -> None:
        body = {"replica": draw.choice(self.fleet.replicas).relay.url}
        with suppress(httpx.TransportError):
            self._expect("drain", httpx.post(f"{self.fleet.router_url}/v1/router/drain", json=body, timeout=30))
        time.sleep(draw.choice([0.1, 1.0]))
        with suppress(httpx.TransportError):
            self._expect("undrain", httpx.post(f"{self.fleet.router_url}/v1/router/undrain", json=body, timeout=30))

    def _expect(self, name: str, response: httpx.Response) -> None:
        if response.status_code not in (200, 503):
            self.odd.append(f"{name}: {response.status_code} {response.text[:200]}")


SERVERS = {
    "kill a server": Faults.kill,
    "kill the prefill server": Faults.kill_prefill,
    "stop a server": Faults.stop,
    "cut connections": Faults.cut,
    "drain a server": Faults.drain,
    "router killed": Faults.kill_router,
}
STORES = {
    "damage files": Faults.damage_files,
    "swap files": Faults.swap_files,
    "remove files": Faults.remove_files,
    "fill a disk": Faults.fill_disk,
    "damage Redis": Faults.damage_redis,
    "swap in Redis": Faults.swap_redis,
    "kill Redis": Faults.kill_redis,
    "stop Redis": Faults.stop_redis,
}
OPERATIONS = {
    "migrate requests": Faults.migrate,
    "pause a server in the router": Faults.pause_in_router,
}
