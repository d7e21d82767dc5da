"""Requests that end, wait or lose their blocks at a bad moment, under a real vLLM over real stores."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from vllm_process import BLOCK, answers, make_model, needs_vllm, prompts, run, vllm

pytestmark = needs_vllm

MEMORY = ["memory://?size=64MiB"]
# 24 blocks of 32 tokens, one of them vLLM's own: fewer than the prompts of a case need at once.
SMALL = 24 * 3 * 2 * 32 * 2 * 32 * 4
CASES = {
    "abort_while_loading": prompts(11, [310, 300, 290, 280]),
    "abort_while_searching": prompts(12, [200, 100]),
    "finish_while_saving": prompts(13, [200, 210, 200, 160]),  # 23 full blocks, which the queue of writes holds
    "broken_in_the_middle": prompts(14, [300]),
    "never_delivered": prompts(15, [256]),
    "session": prompts(16, [70, 40, 90]),
    "left_alone": prompts(18, [100]),
    "refused": [],
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
    """What vLLM without a connector answers, to any prompt of the cases."""
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


def test_aborted_while_its_blocks_come(found: dict[str, Any], alone: Any) -> None:
    """vLLM keeps an aborted request's blocks until nothing is written into them any more, then gives them to others; what is
    read late is not written into those."""
    case = found["abort_while_loading"]
    assert case["held"] and case["reused"] > 0 and case["free"] and case["left"] == 0
    assert case["answers"] == alone(CASES["abort_while_loading"][1:])


def test_aborted_while_it_is_searched(found: dict[str, Any], alone: Any) -> None:
    """A request that is aborted before its search has ended leaves nothing behind."""
    case = found["abort_while_searching"]
    assert case["waiting"] == 1 and case["left"] == 0 and case["free"]
    assert case["answers"] == alone(CASES["abort_while_searching"][1:])


def test_ended_before_its_blocks_are_written(found: dict[str, Any], alone: Any) -> None:
    """What a request computed is in the stores as it was, although its blocks went to others before it was written."""
    case, asked = found["finish_while_saving"], CASES["finish_while_saving"]
    assert case["queued"] == sum(len(prompt) // BLOCK for prompt in asked)
    assert case["answers"] == alone(asked)
    assert case["cached"] == [len(prompt) // BLOCK * BLOCK for prompt in asked]


def test_preempted(found: dict[str, Any], alone: Any) -> None:
    """Requests that lose their blocks and start again answer as if they had not, and so does what goes on from the blocks
    that they left in the stores."""
    case, asked = found["preempt"], CASES["preempt"]
    assert case["preempted"] > 0 and case["loaded"] > 0
    assert case["answers"] == alone(asked, 100)
    assert case["later"] == alone(longer(found))
    assert case["cached"] == [len(prompt) // BLOCK * BLOCK for prompt in longer(found)]


def test_a_load_that_breaks_off(found: dict[str, Any], alone: Any) -> None:
    """Blocks up to the one that does not come are used, the others computed and saved again: the next load is whole."""
    case = found["broken_in_the_middle"]
    assert case["asked"] == 9 and case["cut"] == 1
    assert [case["mended"]] == case["answers"] == alone(CASES["broken_in_the_middle"])
    assert case["cached"][1] == 288


def test_a_store_that_only_promises(found: dict[str, Any], alone: Any) -> None:
    """A request whose load failed does not load again, over and over: it computes."""
    case = found["never_delivered"]
    assert case["asked"] == 8
    assert case["answers"] == alone(CASES["never_delivered"])


def test_a_session_fed_in_parts(found: dict[str, Any], alone: Any) -> None:
    """Blocks of a session are named after the tokens that were computed, not after those that a next part replaced."""
    case = found["session"]
    assert case["cached"] == len(case["whole"]) // BLOCK * BLOCK and case["left"] == 0
    assert case["answers"] == alone([case["whole"]])


def test_more_than_tokens(found: dict[str, Any]) -> None:
    """Requests with an adapter, images or embeddings are left to vLLM: nothing is loaded for them, nothing saved."""
    case = found["left_alone"]
    assert case["plain"] == [96, True]
    assert case["lora"] == case["image"] == case["embeddings"] == [0, False]
    assert case["left"] == 0


def test_caches_that_are_not_held(found: dict[str, Any]) -> None:
    """Several groups of caches, keys and values that later tokens change, and layers that keep something else are refused with
    a sentence each."""
    case = found["refused"]
    assert "2 groups" in case["groups"] and "--disable-hybrid-kv-cache-manager" in case["groups"]
    assert "tokens that come later" in case["non_causal"]
    assert "keep a object" in case["other"]
