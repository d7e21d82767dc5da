"""Blocks that are copied straight between a vLLM's KV and a memory tier (`store.direct`), on a device that vllm_direct.py makes
of host memory: the real engine, connector and kernels, in Triton's interpreter."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from vllm_process import BLOCK, answers, disk, make_model, needs_vllm, prompts, run, vllm

pytestmark = needs_vllm
MEMORY = "memory://?size=64MiB"
ASKED = prompts(71, [300, 200])
BLOCKS = sum(len(prompt) // BLOCK for prompt in ASKED)
WHOLE = [len(prompt) // BLOCK * BLOCK for prompt in ASKED]
OTHERS = prompts(72, [150, 260])
RUNNING = prompts(73, [150, 160, 170, 180])
SMALL = 24 * 3 * 2 * BLOCK * 2 * 32 * 4  # bytes of KV: 24 blocks
LATER = 60


def direct(model: Path, store: list[str], *cases: list[Any], **job: Any) -> list[Any]:
    """Runs the cases in a new vLLM, and returns what each found."""
    given = {"model": str(model), "store": store, "cases": cases, **job}
    found: list[Any] = run("vllm_direct_script.py", given, TRITON_INTERPRET="1")["found"]
    return found


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("vllm") / "model")


@pytest.fixture(scope="module")
def alone(model: Path) -> list[list[int]]:
    """Answers of a vLLM without a connector to the prompts."""
    return answers(vllm(model, None, [[*ASKED, *OTHERS]])["rounds"][0])


def test_saved_loaded_and_found_after_a_restart(model: Path, tmp_path: Path, alone: list[list[int]]) -> None:
    """Answers are those of vLLM alone: computed, loaded from memory by the device, and, in a new process, loaded from disk and
    then from memory. All blocks that were saved went straight into memory, and from there to the disk; none was dropped."""
    store, right = [MEMORY, disk(tmp_path)], alone[: len(ASKED)]
    first, again, about = direct(model, store, ["ask", ASKED], ["ask", ASKED], ["about"])
    assert about["state"] == "on", about["state"]
    assert first == {"answers": right, "cached": [0, 0], "read": [0, 0]}
    assert again == {"answers": right, "cached": WHOLE, "read": [BLOCKS, 0]}
    assert about["directly"] == about["saved"] >= BLOCKS and not about["dropped"] + about["failed"]
    other, from_memory, restarted = direct(model, store, ["ask", ASKED], ["ask", ASKED], ["about"])
    assert other == {"answers": right, "cached": WHOLE, "read": [0, BLOCKS]}
    assert from_memory == {"answers": right, "cached": WHOLE, "read": [BLOCKS, 0]}
    assert restarted["bad"] == [0, 0]


def test_damage_is_a_miss(model: Path, alone: list[list[int]]) -> None:
    """A flipped bit in memory, in a payload, a header or a checksum: what is before it is loaded, the rest is computed and
    saved again, and the answer is that of vLLM alone."""
    [prompt], right = ASKED[:1], alone[:1]
    size = 3 * 2 * BLOCK * 2 * 32 * 4
    flips = [(3, 5), (0, size - 1), (7, size + 20), (5, size + 160)]
    cases: list[list[Any]] = [["ask", [prompt]]]
    for number, place in flips:
        cases += [["flip", prompt, number, place], ["ask", [prompt]]]
    *found, last, about = direct(model, [MEMORY], *cases, ["ask", [prompt]], ["about"])
    damaged = found[2::2]
    assert [one["answers"] for one in (found[0], *damaged, last)] == [right] * (len(flips) + 2)
    assert [one["read"] for one in damaged] == [[number] for number, _ in flips]
    assert last["cached"] == WHOLE[:1] and about["bad"] == [len(flips)]


def test_saves_follow_the_model_of_their_step(model: Path) -> None:
    """The stream that computes gets a step's copies when it has the step's model, and before it gets the next one's."""
    [launched] = direct(model, [MEMORY], ["order", ASKED[0]], llm={"max_num_batched_tokens": 128})
    assert launched == ["model", "copies"] * -(-len(ASKED[0]) // 128)


def test_an_abort_while_the_device_copies(model: Path, alone: list[list[int]]) -> None:
    """vLLM keeps the blocks until nothing is written into them any more; who gets them then answers right."""
    [_, case, about] = direct(model, [MEMORY], ["ask", ASKED], ["abort", ASKED[0], OTHERS], ["about"], kv_bytes=SMALL)
    assert case["held"] > 0 and case["answers"] == alone[len(ASKED) :]
    assert about["bad"] == [0]


def test_preempted(model: Path) -> None:
    """Requests that are preempted while the device saves, of which it is behind: they answer as vLLM alone, and so do longer
    prompts, which load all that was saved."""
    [case, about] = direct(model, [MEMORY], ["preempt", RUNNING, 2 * LATER], ["about"], kv_bytes=SMALL)
    longer = [prompt + answer[:LATER] for prompt, answer in zip(RUNNING, case["answers"], strict=True)]
    assert case["preempted"] and about["state"] == "on"
    assert case["answers"] == answers(vllm(model, None, [RUNNING], max_tokens=2 * LATER)["rounds"][0])
    assert case["later"] == answers(vllm(model, None, [longer])["rounds"][0])
    assert case["cached"] == [len(prompt) // BLOCK * BLOCK for prompt in longer]


def test_ranks(model: Path) -> None:
    """Two ranks, each in a process with a ring and a memory of its own: both copy directly, and load all that they have saved;
    the answers are those of two ranks alone."""
    ranked = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}
    cores = {"VLLM_CPU_OMP_THREADS_BIND": "0|1", "VLLM_ALLOW_INSECURE_SERIALIZATION": "1"}
    job = {"model": str(model), "store": [MEMORY], "llm": ranked, "ranks": ASKED}
    found = run("vllm_direct_script.py", job, TRITON_INTERPRET="1", **cores)
    computed, loaded = found["rounds"]
    alone = {"model": str(model), "store": None, "llm": ranked, "rounds": [ASKED]}
    assert answers(computed) == answers(loaded) == answers(run("vllm_script.py", alone, **cores)["rounds"][0])
    assert [one["cached"] for one in loaded] == WHOLE
    assert [one["state"] for one in found["states"]] == ["on", "on"]
    assert all(one["directly"] >= BLOCKS and one["loaded"] == BLOCKS for one in found["states"])
