"""Real vLLMs that read each other's blocks, with models of several KV groups: disaggregated prefill, and memory tiers of other
instances. Needs FOREWORD_VLLM_PYTHON; skipped without."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from vllm_process import RemoteVllm, answers, needs_vllm, prompts, vllm

from foreword.referee.models import KINDS

pytestmark = needs_vllm

ENVIRONMENT = {"FOREWORD_TEST_SECRET": "a secret of the right length for tests", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
# Generous, for a busy machine.
PATIENCE = {"progress_timeout": 300.0}
TRANSFER = {"secret_env": "FOREWORD_TEST_SECRET", "lease_seconds": 30, **PATIENCE}
LENGTHS = [600, 770, 640]


@pytest.fixture
def running() -> Iterator[list[RemoteVllm]]:
    """Instances that end with the test."""
    found: list[RemoteVllm] = []
    yield found
    for each in found:
        each.end()


@pytest.mark.parametrize("name", ["Gemma 3", "LFM2", "Granite 4"])
def test_groups_are_handed_off(name: str, tmp_path: Path, running: list[RemoteVllm]) -> None:
    """A decode instance continues from the last position that every group of the producer has, with the answers of one vLLM
    alone. Another instance reads the same blocks from the decode instance's memory. No lease stays unread."""
    kind = KINDS[name]
    folder, asked = kind.build(tmp_path / "model"), prompts(81, LENGTHS)
    rounds = vllm(folder, None, [[prompt] for prompt in asked], llm=kind.arguments())["rounds"]
    alone = [one for found in rounds for one in answers(found)]
    extra = {"transfer": TRANSFER}
    producer = RemoteVllm(
        tmp_path / "producer.log", ENVIRONMENT, folder, [], role="kv_producer", extra=extra, llm=kind.arguments()
    )
    store = ["memory://?size=64MiB"]
    consumer = RemoteVllm(tmp_path / "consumer.log", ENVIRONMENT, folder, store, extra=extra, llm=kind.arguments())
    running += [producer, consumer]
    producer.ready(), consumer.ready()
    for prompt, expected in zip(asked, alone, strict=True):
        before = consumer.call("state")["read"][-1]
        params = producer.prefill(prompt)
        assert params["do_remote_prefill"]
        assert consumer.ask(prompt, params)["tokens"] == expected
        assert consumer.call("state")["read"][-1] > before
    assert producer.call("idle")["leases_unread"] == 0
    assert len(prompt) - params["foreword"]["tokens"] <= 2 * 128
    address = consumer.call("state")["address"]
    reader = RemoteVllm(
        tmp_path / "reader.log",
        ENVIRONMENT,
        folder,
        [f"peer://{address}?secret_env=FOREWORD_TEST_SECRET"],
        llm=kind.arguments(),
    )
    running.append(reader)
    reader.ready()
    for prompt, expected in zip(asked, alone, strict=True):
        found = reader.ask(prompt)
        assert found["tokens"] == expected and found["cached"] >= params["foreword"]["tokens"] // 2
    assert reader.call("state")["read"][0] > 0
