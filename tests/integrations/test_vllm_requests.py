"""Requests that are aborted, preempted or finished at a critical moment, under a real vLLM with real stores."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from vllm_process import BLOCK, answers, make_model, needs_vllm, prompts, run, vllm

pytestmark = needs_vllm

MEMORY = ["memory://?size=64MiB"]
# 24 blocks of 32 tokens, one of them the null block: fewer than the prompts of a case need at once.
SMALL = 24 * 3 * 2 * 32 * 2 * 32 * 4
CASES = {
    "abort_during_load": prompts(11, [310, 300, 290, 280]),
    "abort_during_lookup": prompts(12, [200, 100]),
    "finish_while_saving": prompts(13, [200, 210, 200, 160]),  # 23 full blocks, which fit into the write queue
    "broken_in_the_middle": prompts(14, [300]),
    "never_delivered": prompts(15, [256]),
    "session": prompts(16, [70, 40, 90]),
    "not_cached": prompts(18, [100]),
    "refused": [],
    "retained": prompts(19, [150, 200]),
    "preempt": prompts(17, [150, 160, 170, 180]),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("vllm") / "model")


@pytest.fixture(scope="module")
def found(model: Path) -> dict[str, Any]:
    """All cases in one vLLM with few blocks."""
    return run("vllm_requests.py", {"model": str(model), "store": MEMORY, "kv_bytes": SMALL, "cases": CASES})


@pytest.fixture(scope="module")
def alone(model: Path, found: dict[str, Any]) -> Any:
    """Answers of vLLM without a connector, to any prompt of the cases."""
    known: dict[tuple[int, tuple[int, ...]], list[int]] = {}
    everything = [*(prompt for asked in CASES.values() for prompt in asked), found["session"]["whole"], *longer(found)]
    for max_tokens, asked in ((8, everything), (100, CASES["preempt"])):
        answered = answers(vllm(model, None, [asked], max_tokens=max_tokens)["rounds"][0])
        known.update({(max_tokens, tuple(prompt)): tokens for prompt, tokens in zip(asked, answered, strict=True)})

    def ask(asked: list[list[int]], max_tokens: int = 8) -> list[list[int]]:
        return [known[max_tokens, tuple(prompt)] for prompt in asked]

    return ask


def longer(found: dict[str, Any]) -> list[list[int]]:
    """The prompts that were preempted, and a part of what was answered."""
    case = found["preempt"]
    return [prompt + answer[:60] for prompt, answer in zip(CASES["preempt"], case["answers"], strict=True)]


def test_abort_during_a_load(found: dict[str, Any], alone: Any) -> None:
    """vLLM keeps an aborted request's blocks until nothing is written into them any more, and reuses them only then."""
    case = found["abort_during_load"]
    assert case["held"] and case["reused"] > 0 and case["free"] and case["left"] == 0
    assert case["answers"] == alone(CASES["abort_during_load"][1:])


def test_abort_during_a_lookup(found: dict[str, Any], alone: Any) -> None:
    """A request that is aborted before its lookup has ended leaves no state behind."""
    case = found["abort_during_lookup"]
    assert case["waiting"] == 1 and case["left"] == 0 and case["free"]
    assert case["answers"] == alone(CASES["abort_during_lookup"][1:])


def test_finish_before_blocks_are_written(found: dict[str, Any], alone: Any) -> None:
    """A request's KV is saved correctly although vLLM reuses its blocks before they are written."""
    case, asked = found["finish_while_saving"], CASES["finish_while_saving"]
    assert case["queued"] == sum(len(prompt) // BLOCK for prompt in asked)
    assert case["answers"] == alone(asked)
    assert case["cached"] == [len(prompt) // BLOCK * BLOCK for prompt in asked]


def test_retained_prefixes(found: dict[str, Any]) -> None:
    """A request's cache control, by `kv_hints` or `kv_transfer_params`, pins its blocks in the stores for its ttl; the answer
    says how many tokens. What is malformed is skipped."""
    case = found["retained"]
    assert case["answers"] == [
        [{"status": "accepted", "tokens": 128, "ttl": 600.0, "reason": ""}],
        [{"status": "accepted", "tokens": 64, "ttl": None, "reason": ""}],
        None,
    ]
    assert case["pinned"] == (128 + 64) // BLOCK
    assert case["released"] == [{"status": "accepted", "tokens": 128, "ttl": None, "reason": ""}]
    assert case["expired"] == 64 // BLOCK


def test_preempted(found: dict[str, Any], alone: Any) -> None:
    """Preempted requests give the same answers, and so do longer prompts that load the blocks that they have saved."""
    case, asked = found["preempt"], CASES["preempt"]
    assert case["preempted"] > 0 and case["loaded"] > 0
    assert case["answers"] == alone(asked, 100)
    assert case["later"] == alone(longer(found))
    assert case["cached"] == [len(prompt) // BLOCK * BLOCK for prompt in longer(found)]


def test_a_load_that_fails_in_the_middle(found: dict[str, Any], alone: Any) -> None:
    """Blocks before the one that fails are used, the others are recomputed and saved again: the next load is complete."""
    case = found["broken_in_the_middle"]
    assert case["asked"] == 9 and case["cut"] == 1
    assert [case["mended"]] == case["answers"] == alone(CASES["broken_in_the_middle"])
    assert case["cached"][1] == 288


def test_a_load_that_always_fails(found: dict[str, Any], alone: Any) -> None:
    """A request whose load has failed is computed; it does not load again."""
    case = found["never_delivered"]
    assert case["asked"] == 8
    assert case["answers"] == alone(CASES["never_delivered"])


def test_a_session_fed_in_parts(found: dict[str, Any], alone: Any) -> None:
    """Block keys of a streaming session come from computed tokens, not from those that the next part replaced."""
    case = found["session"]
    assert case["cached"] == len(case["whole"]) // BLOCK * BLOCK and case["left"] == 0
    assert case["answers"] == alone([case["whole"]])


def test_an_unknown_adapter(found: dict[str, Any]) -> None:
    """A request whose adapter cannot be identified is neither loaded nor saved."""
    case = found["not_cached"]
    assert case["plain"] == [96, True]
    assert case["lora"] == [0, False]
    assert case["left"] == 0


def test_unsupported_caches(found: dict[str, Any]) -> None:
    """Layers without prefix caching, non-causal attention and unknown kinds of layers are refused with an explanation."""
    case = found["refused"]
    assert "caches no prefixes" in case["uncached"]
    assert "later tokens" in case["non_causal"]
    assert "have a object" in case["other"]
