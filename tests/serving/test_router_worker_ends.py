"""Workers of a router that hang or end while something is asked of all."""

from __future__ import annotations

import errno
import fcntl
import os
import re
import select
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import http_client
import httpx
import pytest
from aiohttp import web
from router_parts import Loop, RouterProcess
from scripted_replica import ScriptedReplica
from shared_server import until
from test_router_workers import ADMIN, children

from foreword.errors import ConfigError
from foreword.router_extras.workers.socket_folder import socket_folder

KEYS = ("--api-keys", "alice=a", "--replica-key", "r", "--admin-key", ADMIN)
ALICE, OPERATOR = {"authorization": "Bearer a"}, {"authorization": f"Bearer {ADMIN}"}


class Eraser(ScriptedReplica):
    """A server of Foreword that erases, or says that it cannot."""

    def __init__(self, loop: Loop, able: bool = True) -> None:
        self.able, self.asked = able, 0
        super().__init__(loop, owner="foreword")

    def routes(self) -> list[web.RouteDef]:
        return [web.delete("/v1/cache", self._erase)]

    async def _models(self, request: web.Request) -> web.Response:
        card = {"id": "m", "object": "model", "owned_by": self.owner, "max_model_len": 8192}
        return web.json_response({"object": "list", "data": [card], "salt_from": "router"})

    async def _erase(self, request: web.Request) -> web.Response:
        self.asked += 1
        if not self.able:
            return web.json_response({"error": {"message": "the disk does not answer"}}, status=500)
        return web.json_response({"id": "1", "what": "tenant", "complete": True, "left": 0, "device_blocks": 3})


@contextmanager
def routed(*replicas: Eraser) -> Iterator[RouterProcess]:
    named = [part for one in replicas for part in ("--replica", one.url)]
    router = RouterProcess(*named, "--workers", "2", *KEYS).wait_for(2 * len(replicas))
    try:
        until(lambda: router.metric("foreword:router_workers", state="answering") == 2)
        yield router
    finally:
        router.kill()


def test_an_open_erasure_whose_worker_ends() -> None:
    """Its receipt stays at the other worker, and at the one that is started: it says that a replica has not erased. Where the
    client repeats the erasure, it is completed."""
    loop = Loop()
    able, unable = Eraser(loop), Eraser(loop, able=False)
    with routed(able, unable) as router:

        def receipts() -> list[tuple[int, object]]:
            found = [
                http_client.get(f"{router.url}/v1/cache/erasures/{receipt['id']}", headers=ALICE) for _ in range(12)
            ]
            return [(one.status_code, one.json()) for one in found]

        answer = http_client.delete(f"{router.url}/v1/cache", headers=ALICE)
        receipt = answer.json()
        assert answer.status_code == 207 and receipt["unreachable"] == {unable.url: "HTTP 500"}
        until(lambda: re.search(r"worker \d: DELETE /v1/cache", router.text) is not None)
        eraser = re.search(r"worker (\d): DELETE /v1/cache", router.text)
        assert eraser is not None
        os.kill(children(router)[int(eraser.group(1))], signal.SIGKILL)
        until(lambda: router.metric("foreword:router_worker_restarts_total", reason="signal") == 1)
        assert receipts() == [(207, receipt)] * 12
        until(lambda: router.metric("foreword:router_workers", state="answering") == 2)
        until(lambda: len(set(re.findall(r"worker \d: GET /v1/cache/erasures", router.text))) == 2 or not receipts())
        assert receipts() == [(207, receipt)] * 12
        unable.able = True
        assert http_client.delete(f"{router.url}/v1/cache", headers=ALICE).status_code == 200


@pytest.mark.slow
def test_what_a_hung_worker_has_not_done() -> None:
    """An erasure is open, and an operator's change is an error, while a worker does not answer; both reach it when it runs
    again, and the erasure is complete then."""
    eraser = Eraser(Loop())
    with routed(eraser) as router, ThreadPoolExecutor(2) as pool:
        hung = children(router)[1]
        os.kill(hung, signal.SIGSTOP)
        until(lambda: "State:\tT" in Path(f"/proc/{hung}/status").read_text())
        try:
            drain = pool.submit(
                httpx.post, f"{router.url}/v1/router/drain", json={"replica": eraser.url}, headers=OPERATOR, timeout=60
            )
            answer = httpx.delete(f"{router.url}/v1/cache", headers=ALICE, timeout=60)
            receipt = answer.json()
            assert answer.status_code == 207 and not receipt["complete"] and list(receipt["replicas"]) == [eraser.url]
            assert receipt["unreachable"] == {"the router's other processes": "workers 1 have not answered"}
            assert drain.result().status_code == 502 and "workers 1 have not said so" in drain.result().text
        finally:
            os.kill(hung, signal.SIGCONT)
        path = f"{router.url}/v1/cache/erasures/{receipt['id']}"
        until(lambda: http_client.get(path, headers=ALICE).status_code == 200)
        until(lambda: f"worker 1: replica {eraser.url} drained" in router.text)
        assert eraser.asked == 1


class Workers:
    """Two workers that wait, and their supervisor, with a temporary folder."""

    def __init__(self, folder: Path) -> None:
        script = """
import logging, os, signal, sys
from foreword.router_extras.workers.supervisor import Supervisor
logging.basicConfig(level=logging.INFO)
def serve(seat):
    os.write(1, f"{os.getpid()} {seat.folder}\\n".encode())
    signal.pause()
sys.exit(Supervisor(2, serve).run())
"""
        environ = {**os.environ, "TMPDIR": str(folder)}
        self.popen = subprocess.Popen([sys.executable, "-c", script], env=environ, stdout=subprocess.PIPE, text=True)
        assert self.popen.stdout is not None
        lines = [self.popen.stdout.readline().split() for _ in range(2)]
        self.processes, [self.folder] = [int(one) for one, _ in lines], {Path(own) for _, own in lines}

    def end(self) -> None:
        self.popen.terminate()
        assert self.popen.wait(60) == 0

    def kill(self) -> None:
        """Kill the supervisor, which leaves its workers as they are."""
        self.popen.kill()
        self.popen.wait(60)


def kill(process: int) -> None:
    """Kill an orphan, and wait until it has ended."""
    with open(os.pidfd_open(process)) as ended:
        os.kill(process, signal.SIGKILL)
        assert select.select([ended], [], [], 60)[0]


def test_what_a_killed_router_leaves(tmp_path: Path) -> None:
    """The folder of a router that was killed with all its workers is removed at the next start. That of a router of which any
    process runs stays, and so does what is no such folder."""
    (tmp_path / "foreword-workers-of-an-earlier-version").mkdir()
    (tmp_path / "foreword-workers-file").write_text("")
    others = set(tmp_path.iterdir())

    def left() -> set[Path]:
        return set(tmp_path.iterdir()) - others

    living, killed = Workers(tmp_path), Workers(tmp_path)
    killed.kill()
    first, second = killed.processes
    kill(first)
    following = Workers(tmp_path)
    assert left() == {living.folder, killed.folder, following.folder}
    following.end()
    kill(second)
    assert left() == {living.folder, killed.folder}
    last = Workers(tmp_path)
    assert left() == {living.folder, last.folder}
    last.end()
    living.end()
    assert not left() and others == set(tmp_path.iterdir())


def test_a_file_system_without_locks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Where files cannot be locked, a router starts all the same, with one warning. No other one removes its folder, which goes
    when it ends."""

    def refuse(*given: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    lock = fcntl.flock
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(fcntl, "flock", refuse)
    with socket_folder() as folder:
        assert list(tmp_path.iterdir()) == [folder] and caplog.text.count("cannot lock") == 1
        monkeypatch.setattr(fcntl, "flock", lock)
        with socket_folder():
            assert folder.is_dir()
    assert not list(tmp_path.iterdir())


def test_a_folder_that_cannot_be_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder in which no file can be made, or that cannot be made at all, is a wrong configuration: the error says what to
    set, and nothing is left."""
    real = os.open

    def refuse(path: Any, *given: Any, **named: Any) -> int:
        if str(path).endswith("lock"):
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(path, *given, **named)

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with monkeypatch.context() as full:
        full.setattr(os, "open", refuse)
        with pytest.raises(ConfigError, match=r"No space left.*TMPDIR"), socket_folder():
            pass
    assert not list(tmp_path.iterdir())
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "none"))
    with pytest.raises(ConfigError, match="TMPDIR"), socket_folder():
        pass
