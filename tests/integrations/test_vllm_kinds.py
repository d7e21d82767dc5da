"""Models of many kinds under a real vLLM. Needs FOREWORD_VLLM_PYTHON, an interpreter with vLLM; skipped without."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from vllm_process import answers, disk, needs_vllm, run

from foreword.referee.models import KINDS, Kind, fresh_prompts

pytestmark = needs_vllm

# One of each way to keep KV. `foreword conform --models all` runs the others.
DIFFERENT = [
    "Llama", "MiniCPM 3", "Mistral", "Gemma 3", "Gemma 4", "gpt-oss", "Llama 4", "LFM2", "Qwen3-Next", "Mamba2", "Falcon-H1",
    "DeepSeek V3",
]  # fmt: skip

Answers = list[dict[str, Any]]
Runs = list[dict[str, Any]]


def vllms(folder: Path, kind: Kind, prompts: Any, runs: Runs) -> Runs:
    """Runs one vLLM after the other in one process; see `vllm_kinds_script.py`."""
    job = {
        "model": str(folder),
        "kv_bytes": 256 << 20,
        "llm": kind.arguments(),
        "prompts": prompts,
        "runs": runs,
    }
    found: Runs = run("vllm_kinds_script.py", job)["results"]
    return found


def no_fewer(found: Answers, than: Answers) -> bool:
    """Whether every prompt had at least as many cached tokens."""
    return all(mine["cached"] >= theirs["cached"] for mine, theirs in zip(found, than, strict=True))


def agree(found: Answers, others: Answers, exact: bool) -> int:
    """Compare the answers, unless `exact` only those with the same number of cached tokens. Return how many these are."""
    pairs = [(a, b) for a, b in zip(found, others, strict=True) if exact or a["cached"] == b["cached"]]
    assert [mine["tokens"] for mine, _ in pairs] == [theirs["tokens"] for _, theirs in pairs]
    return len(pairs)


@pytest.mark.parametrize("name", DIFFERENT)
def test_every_kind_of_model(name: str, tmp_path: Path) -> None:
    """A model of each kind gives vLLM's own answers with a store: computed, from vLLM's own cache, from the store after a reset
    of that cache, and from the store after a restart. No prompt has fewer cached tokens than under vLLM alone.

    Some models' answers depend on what is computed together (all in bfloat16): they give the answers of vLLM's own cache with
    as many cached tokens. Where vLLM computes whole prompts only, nothing is loaded."""
    kind, prompts, store = KINDS[name], {"seed": 1, "count": 8}, [disk(tmp_path)]
    runs: Runs = [
        {"store": None, "passes": ["ask", "ask"]},
        {"store": store, "passes": ["ask", "ask", "forget", "ask"]},
        {"store": store, "passes": ["ask"]},
    ]
    alone, first, restarted = vllms(kind.build(tmp_path / "model"), kind, prompts, runs)
    cold, warm = alone["answers"]
    computed, *reused = [*first["answers"], *restarted["answers"]]
    # vLLM's CPU build reuses prefixes of these only on processors with AMX.
    needs_amx = kind.layers.startswith("latent attention") and kind.dtype == "bfloat16"
    if needs_amx and not any(one["cached"] for one in warm):
        assert all(found == cold for found in (computed, *reused))
        return
    assert agree(computed, cold, kind.exact) >= 4
    assert all(agree(found, cold if kind.exact else warm, kind.exact) >= 4 for found in reused)
    assert no_fewer(computed, cold)
    assert all(no_fewer(found, warm) for found in reused)
    assert restarted["tiers"][0]["hit"] > 0
    assert not any(tier["bad"] or tier["errors"] for one in (first, restarted) for tier in one["tiers"])


@pytest.mark.parametrize("name", ["Gemma 3", "Granite 4"])
def test_another_process(name: str, tmp_path: Path) -> None:
    """Blocks that one process has stored are hits of another process: the same answers, and no fewer cached tokens than in the
    first."""
    kind, prompts, store = KINDS[name], {"seed": 2, "count": 8}, [disk(tmp_path)]
    folder = kind.build(tmp_path / "model")
    [first] = vllms(folder, kind, prompts, [{"store": store, "passes": ["ask", "forget", "ask"]}])
    [other] = vllms(folder, kind, prompts, [{"store": store, "passes": ["ask"]}])
    cold, stored = first["answers"]
    assert answers(stored) == answers(other["answers"][0]) == answers(cold)
    assert no_fewer(other["answers"][0], stored) and other["tiers"][0]["hit"] > 0


@pytest.mark.parametrize("name", ["Llama", "Gemma 3", "Granite 4"])
def test_disturbed(name: str, tmp_path: Path) -> None:
    """Requests that run together give the answers of vLLM alone when requests are preempted, when requests are aborted and
    asked again, when prompts are computed in small chunks, and with drafted tokens. So do the hits on what was stored then.

    vLLM's CPU build drafts no tokens for models with recurrent layers."""
    kind = KINDS[name]
    together = {"do": "together", "count": 40}
    preempt = {"do": "preempt", "count": 40}
    abort = {"do": "abort", "count": 40}
    drafts = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 2, "prompt_lookup_max": 4}

    def with_store(which: str, asking: Any, **llm: Any) -> dict[str, Any]:
        llm["max_model_len"] = 512
        return {"store": [disk(tmp_path / which)], "llm": llm, "passes": [asking, "forget", asking]}

    runs: Runs = [
        {"store": None, "llm": {"max_model_len": 512}, "passes": [together]},
        with_store("preempted", preempt),
        with_store("aborted", abort, max_num_batched_tokens=64),
    ]
    if name != "Granite 4":
        runs.append(with_store("drafted", together, speculative_config=drafts))
    alone, *found = vllms(kind.build(tmp_path / "model"), kind, fresh_prompts(3, 6, 400), runs)
    for one in found:
        for each in one["answers"]:
            assert answers(each) == answers(alone["answers"][0])
        assert sum(answer["cached"] for answer in one["answers"][1]) > 0
    assert found[0]["preempted"] >= 6
    assert all(one["drafted"] > 0 for one in found[2:])
