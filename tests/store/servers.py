"""Real servers for tests of stores, started and stopped by the tests in temporary folders."""

import http.client
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import redis
from ports import free_port

PATIENCE = 60.0


def redis_binary() -> str:
    """The path of a Redis or Valkey server. Skips the test if there is none."""
    for program in ("redis-server", "valkey-server"):
        found = shutil.which(program)
        if found:
            return found
    pytest.skip("no redis-server: apt-get install -y redis-server")


def wait_until(what: Callable[[], bool], name: str) -> None:
    """Wait until a condition holds."""
    deadline = time.monotonic() + PATIENCE
    while not what():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{name} did not come about within {PATIENCE:.0f} s")
        time.sleep(0.02)


class RedisServer:
    """A Redis server on a port and a Unix socket, without persistence."""

    def __init__(self, folder: Path, *options: str, password: str | None = None) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.port = free_port()
        self.socket = folder / "redis.sock"
        self.password = password
        self._folder = folder
        self._options = [*options, *(["--requirepass", password] if password else [])]
        self._process: subprocess.Popen[bytes] | None = None
        self.start()

    @property
    def url(self) -> str:
        return f"redis://{f':{self.password}@' if self.password else ''}127.0.0.1:{self.port}"

    def client(self) -> "redis.Redis":
        """A redis-py client, to inspect and change the data of the store under test."""
        return redis.Redis(port=self.port, password=self.password)

    def start(self) -> None:
        command = [redis_binary(), "--port", str(self.port), "--bind", "127.0.0.1", "--dir", str(self._folder)]
        command += ["--unixsocket", str(self.socket), "--save", "", "--appendonly", "no", *self._options]
        with (self._folder / "log").open("ab") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log, cwd=self._folder)
        wait_until(self._answers, "redis-server")

    def kill(self) -> None:
        """Kill the server with SIGKILL."""
        self.signal(signal.SIGKILL)
        assert self._process is not None
        self._process.wait()

    def restart(self) -> None:
        self.kill()
        self.start()

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """Stop the process: connections stay open and nothing is answered."""
        self.signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self.signal(signal.SIGCONT)

    def signal(self, number: int) -> None:
        assert self._process is not None
        self._process.send_signal(number)

    def _answers(self) -> bool:
        assert self._process is not None
        if self._process.poll() is not None:
            raise RuntimeError((self._folder / "log").read_text())
        try:
            with self.client() as client:
                return bool(client.ping())
        except redis.exceptions.RedisError:
            return False


class RedisCluster:
    """Three nodes that share the slots."""

    def __init__(self, folder: Path, *more: str) -> None:
        self.nodes = []
        try:
            for number in range(3):
                options = [*more, "--cluster-enabled", "yes", "--cluster-port", str(free_port())]
                self.nodes.append(RedisServer(folder / str(number), *options))
            self._meet()
        except BaseException:
            self.kill()
            raise

    @property
    def url(self) -> str:
        return "redis+cluster://" + ",".join(f"127.0.0.1:{node.port}" for node in self.nodes)

    def kill(self) -> None:
        for node in self.nodes:
            node.kill()

    def names_on(self, number: int, prefix: str) -> set[bytes]:
        """The names of the blocks on one node."""
        with self.nodes[number].client() as client:
            return {bytes.fromhex(key.decode().rpartition(":")[2]) for key in client.keys(f"{prefix}:b:*")}

    def move(self, key: bytes) -> tuple[int, str, str]:
        """Start to migrate the slot of a key, and the key, to the next node. Its owner then replies ASK. Returns the
        slot and the ids of the two nodes."""
        slot = int(self.command(0, "CLUSTER", "KEYSLOT", key))
        old = min(slot * 3 // 16384, 2)
        new = (old + 1) % 3
        ids = [self.command(number, "CLUSTER", "MYID").decode() for number in (old, new)]
        self.command(new, "CLUSTER", "SETSLOT", slot, "IMPORTING", ids[0])
        self.command(old, "CLUSTER", "SETSLOT", slot, "MIGRATING", ids[1])
        self.command(old, "MIGRATE", "127.0.0.1", self.nodes[new].port, key, 0, 5000)
        return slot, ids[0], ids[1]

    def settle(self, slot: int, owner: str) -> None:
        """Finish the migration. The old owner then replies MOVED."""
        for number in range(3):
            self.command(number, "CLUSTER", "SETSLOT", slot, "NODE", owner)

    def command(self, number: int, *words: Any) -> Any:
        """The raw reply of one node."""
        with self.nodes[number].client() as client:
            connection = client.connection_pool.get_connection()
            connection.send_command(*words)
            return connection.read_response()

    def _meet(self) -> None:
        for number, node in enumerate(self.nodes):
            first, last = -(-16384 * number // 3), -(-16384 * (number + 1) // 3) - 1
            self.command(number, "CLUSTER", "ADDSLOTSRANGE", first, last)
            self.command(number, "CLUSTER", "SET-CONFIG-EPOCH", number + 1)
            bus = int(node._options[node._options.index("--cluster-port") + 1])
            self.command(0, "CLUSTER", "MEET", "127.0.0.1", node.port, bus)
        wait_until(lambda: all(self._agrees(number) for number in range(3)), "the cluster")

    def _agrees(self, number: int) -> bool:
        state = self.command(number, "CLUSTER", "INFO")
        return b"cluster_state:ok" in state and len(self.command(number, "CLUSTER", "SLOTS")) == 3


class Sentinel(RedisServer):
    """A Sentinel that watches one primary called `main` and replaces it after a second."""

    def __init__(self, folder: Path, primary: int) -> None:
        folder.mkdir()
        lines = [f"sentinel monitor main 127.0.0.1 {primary} 1", "sentinel down-after-milliseconds main 1000"]
        (folder / "sentinel.conf").write_text("\n".join([*lines, "sentinel failover-timeout main 5000", ""]))
        super().__init__(folder)

    @property
    def replicas(self) -> int:
        """The number of replicas that it has found."""
        with self.client() as client:
            return int(client.sentinel_master("main")["num-slaves"])

    def start(self) -> None:
        command = [redis_binary(), str(self._folder / "sentinel.conf"), "--sentinel", "--port", str(self.port)]
        with (self._folder / "log").open("ab") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log, cwd=self._folder)
        wait_until(self._answers, "Sentinel")


class ScriptedServer:
    """A server that sends given bytes on each connection and closes it. With None it stays silent."""

    def __init__(self, answers: Sequence[bytes | None]) -> None:
        self._answers = list(answers)
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.port = self._socket.getsockname()[1]
        self.connections = 0
        self._silent: list[socket.socket] = []
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}"

    def wait_for_disconnects(self) -> None:
        """Wait until the client has closed every connection that was not answered."""
        for connection in list(self._silent):
            connection.settimeout(PATIENCE)
            while connection.recv(1 << 16):
                pass

    def close(self) -> None:
        self._socket.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        for connection in [*self._silent, self._socket]:
            connection.close()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return
            answer = self._answers[min(self.connections, len(self._answers) - 1)]
            self.connections += 1
            if answer is None:
                self._silent.append(connection)
                continue
            with connection, suppress(OSError):
                connection.settimeout(PATIENCE)
                connection.recv(1 << 16)
                connection.sendall(answer)
                connection.shutdown(socket.SHUT_WR)
                while connection.recv(1 << 16):  # unread data would turn the close into a reset
                    pass


class S3Server:
    """The S3 server of moto in a separate process, with one bucket."""

    bucket = "blocks"

    def __init__(self, folder: Path) -> None:
        pytest.importorskip("moto.server", reason="no S3 server: pip install 'moto[s3]' flask flask-cors")
        folder.mkdir(parents=True, exist_ok=True)
        self.port = free_port()
        self._folder = folder
        self._process: subprocess.Popen[bytes] | None = None
        self.start()

    def url(self, path: str = "") -> str:
        options = f"endpoint=http://127.0.0.1:{self.port}&region=us-east-1&access_key_id=tests&secret_access_key=tests"
        return f"s3://{self.bucket}{path}?{options}"

    def start(self) -> None:
        command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(self.port)]
        with (self._folder / "log").open("ab") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log)
        wait_until(self._listens, "moto")
        make = urllib.request.Request(f"http://127.0.0.1:{self.port}/{self.bucket}", method="PUT")
        urllib.request.urlopen(make, timeout=PATIENCE).close()

    def kill(self) -> None:
        assert self._process is not None
        self._process.kill()
        self._process.wait()

    def _listens(self) -> bool:
        assert self._process is not None
        if self._process.poll() is not None:
            raise RuntimeError((self._folder / "log").read_text())
        try:
            socket.create_connection(("127.0.0.1", self.port), 1).close()
        except OSError:
            return False
        return True


class QuietHandler(BaseHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        pass


class ThreadedServer:
    """An HTTP server on a free port and threads of this process."""

    def __init__(self, handler: type[BaseHTTPRequestHandler]) -> None:
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self.port = self._server.server_port
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


class HttpServer(ThreadedServer):
    """A web server that answers every request with a status and a body, which may depend on the request."""

    def __init__(self, status: int | Callable[[BaseHTTPRequestHandler], int], body: bytes = b"") -> None:
        class Handler(QuietHandler):
            def answer(self) -> None:
                self.rfile.read(int(self.headers.get("Content-Length", 0)))
                self.send_response(status if isinstance(status, int) else status(self))
                self.send_header("Content-Length", str(len(body)))
                self.send_header("ETag", '"tag"')
                self.end_headers()
                if self.command != "HEAD":
                    self.wfile.write(body)

            do_GET = do_PUT = do_HEAD = do_DELETE = do_POST = answer

        super().__init__(Handler)


class CountingProxy(ThreadedServer):
    """A proxy in front of an HTTP server that counts requests.

    Attributes:
        before: called with the method of each request before it is passed on.
        change: what becomes of the body of an answer to this method and path.
    """

    def __init__(self, port: int) -> None:
        self.requests = 0
        self.before: Callable[[str], None] = lambda method: None
        self.change: Callable[[str, str, bytes], bytes] = lambda method, path, data: data
        proxy = self

        class Handler(QuietHandler):
            protocol_version = "HTTP/1.1"
            disable_nagle_algorithm = True

            def forward(self) -> None:
                proxy.requests += 1
                body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                proxy.before(self.command)
                backend = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE)
                backend.request(self.command, self.path, body, dict(self.headers))
                answer = backend.getresponse()
                data = proxy.change(self.command, self.path, answer.read())
                self.send_response(answer.status)
                for name, value in answer.getheaders():
                    if name.lower() not in ("connection", "transfer-encoding", "content-length", "server", "date"):
                        self.send_header(name, value)
                length = answer.getheader("Content-Length", "0") if self.command == "HEAD" else str(len(data))
                self.send_header("Content-Length", length)
                self.end_headers()
                self.wfile.write(data)
                backend.close()

            do_GET = do_PUT = do_HEAD = do_DELETE = do_POST = forward

        super().__init__(Handler)


class FaultyWire:
    """A TCP proxy that injects faults into what a server sends.

    Args:
        faults: kinds by the number of bytes that the server has sent when they occur, each once: `stall`, the connection passes
            nothing more; `cut`, it ends; `down`, all end, and later ones end at once, until `mend` is called.
    """

    def __init__(self, port: int, faults: dict[int, str]) -> None:
        self.left = sorted(faults.items())
        self.passed = 0
        self._port, self._down, self._closed = port, False, False
        self._lock = threading.Lock()
        self._sockets: list[socket.socket] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        self._thread = threading.Thread(target=self._accept, daemon=True)
        self._thread.start()

    def mend(self) -> None:
        self._down = False

    def close(self) -> None:
        self._closed = True
        self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._listener.close()
        self._end(list(self._sockets))

    @staticmethod
    def _end(sockets: Sequence[socket.socket]) -> None:
        for one in sockets:
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)

    def _accept(self) -> None:
        while not self._closed:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            if self._down:
                client.close()
                continue
            server = socket.create_connection(("127.0.0.1", self._port))
            self._sockets += [client, server]
            for source, target, spoiled in ((client, server, False), (server, client, True)):
                threading.Thread(target=self._pump, args=(source, target, spoiled), daemon=True).start()

    def _pump(self, source: socket.socket, target: socket.socket, spoiled: bool) -> None:
        stalled = False
        with suppress(OSError):
            while data := source.recv(1 << 16):
                fault = self._fault(len(data)) if spoiled and not stalled else ""
                if fault == "down":
                    self._end(list(self._sockets))
                elif fault == "cut":
                    self._end([source, target])
                stalled = stalled or fault == "stall"
                if not stalled:
                    target.sendall(data)
        self._end([source, target])

    def _fault(self, size: int) -> str:
        with self._lock:
            self.passed += size
            if not self.left or self.passed < self.left[0][0]:
                return ""
            fault = self.left.pop(0)[1]
            self._down = self._down or fault == "down"
            return fault
