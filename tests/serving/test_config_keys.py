"""Every key of the configuration that a command offers is read by its process."""

from __future__ import annotations

import ast
import json
import subprocess
from collections.abc import Sequence
from contextlib import closing
from functools import cache
from pathlib import Path

import http_client
import pytest
from config_reads import __file__ as PROGRAM
from ports import free_port
from router_parts import QUICK, RunningRouter
from server_process import CommandProcess, ServerProcess
from shared_server import SharedServers
from test_fronts import Gateway

from foreword.cli.flags import ConfigFlag, router_flags, server_flags

BODY = {"prompt": "once upon a time", "max_tokens": 2, "stream": True}


@cache
def named(file: str) -> frozenset[str]:
    """The attributes that the code of a file names."""
    tree = ast.parse(Path(file).read_text(encoding="utf-8"))
    return frozenset(node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute))


def read_keys(out: Path) -> set[tuple[str, str]]:
    """The keys that a process has read, and those that the files name in which it has read others of their section: what is
    done with a key may wait for a failure."""
    found, files = set(), set()
    for line in out.read_text(encoding="utf-8").splitlines():
        place, _, file = line.partition(" ")
        section, _, key = place.partition(".")
        found.add((section, key))
        if not file.endswith(("/process_config.py", "/foreword/config.py")):
            files.add((section, file))
    return found | {(section, name) for section, file in files for name in named(file)}


class ReadingProcess(CommandProcess):
    """A command that notes what it reads."""

    def __init__(self, out: Path, *arguments: str) -> None:
        self.program = (PROGRAM, str(out))
        super().__init__(*arguments)


class ReadingServer(ReadingProcess, ServerProcess):
    """`foreword serve`."""


class ReadingRouter(ReadingProcess, RunningRouter):
    """`foreword route`."""


def encryption(folder: Path) -> list[str]:
    masters = folder / "masters"
    masters.write_text(f"a:{'5a' * 32}\n")
    return ["--encryption-key-store", str(folder / "keys"), "--encryption-master-key-file", str(masters)]


def certificate(folder: Path) -> str:
    """A file with a certificate and its key."""
    made = str(folder / "certificate.pem")
    command = [
        "openssl",
        "req",
        "-x509",
        "-newkey",
        "ec",
        "-pkeyopt",
        "ec_paramgen_curve:P-256",
        "-nodes",
        "-days",
        "1",
    ]
    subprocess.run(
        [*command, "-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost", "-keyout", made, "-out", made],
        check=True,
        capture_output=True,
    )
    return made


def check(offered: Sequence[ConfigFlag], out: Path) -> None:
    # A file with a secret is read when the configuration is made, and is the secret then.
    unread = {(flag.section, flag.key) for flag in offered if not flag.file_of} - read_keys(out)
    assert not unread, f"nothing in the process reads {sorted(unread)}"


@pytest.mark.extended
def test_keys_of_a_router(shared: SharedServers, tmp_path: Path) -> None:
    """A router reads every key that `foreword route` offers."""
    pytest.importorskip("grpc")
    made, port = certificate(tmp_path), free_port()
    picker = ["--picker", f"127.0.0.1:{port}", "--picker-tls-certificate-file", made]
    (tmp_path / "token").write_text("x")
    given = ["--replica", shared.open.url, "--record", str(tmp_path / "record"), *picker, *encryption(tmp_path)]
    given += ["--replica-service", "a/b:http", "--kubernetes-api", "http://127.0.0.1:1"]
    given += [f"router.kubernetes_credentials={tmp_path}", "--audit-every", "1000"]
    given += ["--tenant-secret", "a secret of the tests"]
    router = ReadingRouter(tmp_path / "reads", "route", "--port", "0", *QUICK, *given)
    try:
        router.wait_for(1)
        assert http_client.post(f"{router.url}/v1/completions", json=BODY).status_code == 200
        assert http_client.post(f"{router.url}/tokenize", json={"prompt": "x"}).status_code == 200
        with closing(Gateway(port, Path(made).read_bytes())) as gateway:
            head = {"content-type": "application/json"}
            assert (
                gateway.send("POST", "/v1/completions", head, json.dumps({**BODY, "stream": False}).encode()).status
                == 200
            )
        check(router_flags(), tmp_path / "reads")
    finally:
        router.kill()


@pytest.mark.extended
def test_keys_of_a_server(tmp_path: Path) -> None:
    """A server reads every key that `foreword serve` offers."""
    secret = ["--transfer-secret", "a secret of the tests", "--transfer-bind", "127.0.0.1:0", "--transfer-tls"]
    secret += ["--transfer-tls-certificate-file", certificate(tmp_path)]
    given = ["--store", f"disk://{tmp_path}/store?size=64MiB", "--record", str(tmp_path / "record"), "--role", "both"]
    given += ["--kv-events", "tcp://127.0.0.1:0", *secret, *encryption(tmp_path), "--audit-every", "1000"]
    given += ["--audit-reports", str(tmp_path / "audits"), "--tenant-secret", "a secret of the tests"]
    server = ReadingServer(tmp_path / "reads", *given)
    try:
        url = server.wait_ready()
        assert http_client.post(f"{url}/v1/completions", json=BODY).status_code == 200
        check(server_flags(), tmp_path / "reads")
    finally:
        server.kill()
