"""Errors inside of the connector, under a real vLLM."""

from __future__ import annotations

from pathlib import Path

import pytest
from failure_campaign import PHASES, failures
from vllm_process import make_model, needs_vllm

pytestmark = needs_vllm


@pytest.mark.parametrize("phase", PHASES)
def test_no_error_of_the_connector_reaches_vllm(phase: str, tmp_path: Path) -> None:
    """Whatever call inside of the connector raises, at its start, while it serves or stops, on vLLM's thread or its own: vLLM
    serves on, all answers are right, no block of its cache is lost, no request waits for ever, and one line says that the
    connector is degraded. Each call that vLLM makes is guarded, or does nothing that can fail."""
    found = failures(phase, 20, 7, tmp_path, make_model(tmp_path / "model"))
    assert len(found["failures"]) == 20
    assert not found["wrong"] and not found["lines"] and not found["blocks"]
    if phase in ("start", "serve"):
        assert found["threads"] < 40, "a degraded connector is closed: 20 of them leave no threads behind"
    assert found["degraded"] >= {"start": 15, "serve": 15}.get(phase, 0)
    assert found["unguarded"] == [
        "bind_gpu_block_pool",
        "get_finished",
        "request_finished",
        "save_kv_layer",
        "shutdown",
        "wait_for_layer_load",
    ]
