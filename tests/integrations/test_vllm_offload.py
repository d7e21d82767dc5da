"""Foreword's stores as a secondary tier of vLLM's own offloading, under vLLM's scheduler and managers."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from vllm_process import BLOCK, attempt, disk, make_model, needs_vllm, prompts, run

from foreword.blocks.salt import Salt
from foreword.store.frame import HEADER_BYTES, Header, read_header
from foreword.store.urls import open_store

pytestmark = needs_vllm
LENGTH = 300
PAGE = BLOCK * 2 * 2 * 32 * 4  # bytes of a block of a layer of the model with windows
FULL = LENGTH // BLOCK  # blocks of a prompt; answers are not saved by vLLM's offloading unless it is told to

RANKS = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}
CORES = {"VLLM_CPU_OMP_THREADS_BIND": "0|1"}


def offload(
    model: Path, store: list[str], *steps: list[Any], tier: dict[str, Any] | None = None, **job: Any
) -> list[Any]:
    """Runs the steps in a new vLLM with its own offloading, and returns what each found."""
    cores = CORES if job.get("llm") == RANKS else {}
    job = {"model": str(model), "tier": {"store": store, **(tier or {})}, "steps": steps, **job}
    found: list[Any] = run("vllm_offload_script.py", job, **cores)["found"]
    return found


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model") / "model")


def test_a_restart_finds_what_is_on_disk(model: Path, tmp_path: Path) -> None:
    """A new vLLM loads what another has saved, and answers as that one did; one with other weights finds nothing. Blocks with
    one flipped bit are computed, and counted."""
    first, second = prompts(1, [LENGTH, LENGTH])
    store, steps = [disk(tmp_path)], [["ask", first], ["ask", second]]
    one, two, _, about = offload(model, store, *steps, ["written", 2 * FULL], ["about"])
    assert one["cached"] == two["cached"] == 0 and about["counts"]["saved"] == 2 * FULL and not about["degraded"]
    again, twice, restarted = offload(model, store, *steps, ["about"])
    assert again == {**one, "cached": FULL * BLOCK} and twice == {**two, "cached": FULL * BLOCK}
    assert restarted["namespace"] == about["namespace"] and restarted["metrics"]["loaded"] == 2 * FULL
    found, different = offload(make_model(tmp_path / "other", seed=3), store, ["ask", first], ["about"])
    assert found["cached"] == 0 and different["namespace"] != about["namespace"]
    damage(tmp_path / "kv", seed=5)
    mended, counted = offload(model, store, ["ask", first], ["about"])
    assert mended["tokens"] == one["tokens"] and mended["cached"] < FULL * BLOCK
    assert counted["counts"]["damaged"] >= 1 and counted["metrics"]["damaged"] == counted["counts"]["damaged"]


def damage(folder: Path, seed: int) -> None:
    """Flip a bit in the payload of every block."""
    draw = random.Random(seed)
    files = [path for path in folder.rglob("*") if path.is_file() and b"FWKV" in path.read_bytes()]
    assert files
    for path in files:
        data = bytearray(path.read_bytes())
        found = data.find(b"FWKV")
        while found >= 0:
            data[found - 1 - draw.randrange(20_000)] ^= 1 << draw.randrange(8)
            found = data.find(b"FWKV", found + 1)
        path.write_bytes(data)


def frames(folder: Path) -> list[tuple[Header, bytes]]:
    """The blocks in the files of a folder."""
    found = []
    for data in (path.read_bytes() for path in folder.rglob("*") if path.is_file()):
        at = data.find(b"FWKV")
        while at >= 0:
            header = read_header(data[at : at + HEADER_BYTES])
            found.append((header, data[at - header.length : at]))
            at = data.find(b"FWKV", at + 1)
    return found


def forget(store: list[str], tenant: bytes) -> int:
    """Erase what a tenant has in these stores. Returns how many blocks that were."""
    tiers = open_store(store)
    erased = sum(tier.store.erase(root=Salt(tenant).prefix, deadline=1e12) for tier in tiers.tiers)
    tiers.close()
    return erased


def test_two_ranks(model: Path, tmp_path: Path) -> None:
    """A block has the KV of both ranks of tensor parallelism. A new vLLM with two ranks loads it and answers alike, what was
    erased or damaged is computed, and a vLLM with one rank finds nothing of theirs."""
    [prompt], store, mine = prompts(6, [LENGTH]), [disk(tmp_path)], Salt(b"mine").text
    steps: list[list[Any]] = [["ask", prompt], ["ask", prompt, mine]]
    one, two, *_ = offload(model, store, *steps, ["written", 2 * FULL], llm=RANKS)
    assert one["cached"] == two["cached"] == 0
    blocks = frames(tmp_path / "kv")
    halves = [(payload[: len(payload) // 2], payload[len(payload) // 2 :]) for _, payload in blocks]
    assert len(blocks) == 2 * FULL and all(any(a) and any(b) and a != b for a, b in halves)
    again, twice = offload(model, store, *steps, llm=RANKS)
    assert again == {**one, "cached": FULL * BLOCK} and twice == {**two, "cached": FULL * BLOCK}
    assert forget(store, b"mine") == FULL
    damage(tmp_path / "kv", seed=7)
    mended, gone, about = offload(model, store, *steps, ["about"], llm=RANKS)
    assert gone == two and mended["tokens"] == one["tokens"] and mended["cached"] < FULL * BLOCK
    assert about["counts"]["damaged"] >= 1 and not about["degraded"]
    [alone] = offload(model, store, ["ask", prompt])
    assert alone["cached"] == 0


def make_hybrid(folder: Path) -> Path:
    """Four layers with a window of 96 tokens and three with full attention: groups of different sizes."""
    torch.manual_seed(3)
    layers = ["sliding_attention", "full_attention"] * 3 + ["sliding_attention"]
    config = transformers.Gemma3TextConfig(
        vocab_size=512, hidden_size=128, intermediate_size=192, num_attention_heads=4, num_key_value_heads=2, head_dim=32,
        num_hidden_layers=7, layer_types=layers, sliding_window=96, query_pre_attn_scalar=32, initializer_range=0.2,
        max_position_embeddings=512, pad_token_id=0, bos_token_id=None, eos_token_id=None, tie_word_embeddings=False,
    )  # fmt: skip
    transformers.Gemma3ForCausalLM(config).save_pretrained(folder)
    return folder


def test_several_groups(tmp_path: Path) -> None:
    """A model with windows in some layers is found after a restart, and answers alike. Rows of host memory that several tenants
    have used leave nothing of one in another's blocks: once a tenant was erased no file has any of its KV."""
    model, store, mine, theirs = make_hybrid(tmp_path / "model"), [disk(tmp_path)], Salt(b"mine"), Salt(b"theirs")
    asked = [
        (prompt, mine.text if number < 2 else theirs.text) for number, prompt in enumerate(prompts(8, [LENGTH] * 8))
    ]
    steps = [step for prompt, salt in asked for step in (["ask", prompt, salt], ["settle"])]
    *found, about = offload(model, store, *steps, ["about"], host_bytes=2 << 20, tier={"queue": "2MiB"})
    answers = found[::2]
    assert not any(one["cached"] for one in answers) and not about["degraded"] and not about["counts"]["not_saved"]
    blocks = frames(tmp_path / "kv")
    assert len({header.group for header, _ in blocks}) >= 2
    pages = {
        payload[low : low + PAGE]
        for header, payload in blocks
        if header.root == mine.digest
        for low in range(0, len(payload), PAGE)
    } - {bytes(PAGE)}
    assert pages and forget(store, b"mine") == sum(header.root == mine.digest for header, _ in blocks)
    left = frames(tmp_path / "kv")
    assert left and not any(
        payload[low : low + PAGE] in pages for _, payload in left for low in range(0, len(payload), PAGE)
    )
    last, gone = offload(model, store, ["ask", *asked[-1]], ["ask", *asked[0]])
    assert last == {**answers[-1], "cached": FULL * BLOCK} and gone == answers[0]


def test_tenants_and_erasure(model: Path, tmp_path: Path) -> None:
    """Requests with other salts find nothing of each other. What is erased of one tenant is gone, and the other's blocks are
    found."""
    [prompt], store = prompts(2, [LENGTH]), [disk(tmp_path)]
    mine, theirs = Salt(b"mine").text, Salt(b"theirs").text
    one, two, _ = offload(model, store, ["ask", prompt, mine], ["ask", prompt, theirs], ["written", 2 * FULL])
    assert one["cached"] == two["cached"] == 0
    assert forget(store, b"mine") == FULL
    gone, kept = offload(model, store, ["ask", prompt, mine], ["ask", prompt, theirs])
    assert gone["cached"] == 0 and kept["cached"] == FULL * BLOCK and gone["tokens"] == kept["tokens"] == one["tokens"]


def test_budget(model: Path, tmp_path: Path) -> None:
    """A folder stays within its size while more than twice as much is saved, and what was saved last is found."""
    many, store = prompts(3, [LENGTH] * 12), [f"disk://{tmp_path}/kv?size=3MiB"]
    steps = [["ask", prompt] for prompt in many]
    *answers, _, about = offload(model, store, *steps, ["written", len(many) * FULL], ["about"])
    assert about["bytes"] <= about["budget"] == 3 << 20 and about["counts"]["saved"] == len(many) * FULL
    last, first = offload(model, store, ["ask", many[-1]], ["ask", many[0]])
    assert last == {**answers[-1], "cached": FULL * BLOCK} and first == answers[0]


def test_weights_that_change_in_place(model: Path, tmp_path: Path) -> None:
    """After a change of the weights nothing of the old ones is loaded, and nothing is saved before vLLM's caches are reset;
    under a name, KV of the new weights is found again by a server that starts with that name."""
    [prompt, other], store = prompts(4, [LENGTH, LENGTH]), [disk(tmp_path)]
    steps: list[list[Any]] = [
        ["ask", prompt], ["written", FULL], ["change_weights"], ["ask", other], ["written", 2 * FULL],
        ["reset"], ["name_weights", "two"], ["ask", prompt], ["ask", other], ["written", 4 * FULL], ["about"],
    ]  # fmt: skip
    found = offload(model, store, *steps)
    old, mixed, new = found[0], found[4], found[7]
    assert mixed["saved"] == FULL and mixed["refused"] == FULL
    assert new["cached"] == 0 and new["tokens"] != old["tokens"] and found[-1]["counts"]["saved"] == 3 * FULL
    [again] = offload(model, store, ["ask", prompt])
    assert again == {**old, "cached": FULL * BLOCK}
    after = [["change_weights"], ["ask", prompt]]
    unnamed, named = offload(model, store, *after), offload(model, store, *after, tier={"weights_version": "two"})
    assert unnamed[-1] == new and named[-1]["tokens"] == new["tokens"]


def test_rows_that_vllm_fills_in_part_are_refused(tmp_path: Path) -> None:
    """The start ends, and names the setting, where a row has several blocks: vLLM leaves out those before the window and says
    not which."""
    job = {
        "model": str(make_hybrid(tmp_path / "model")),
        "tier": {"store": [disk(tmp_path)]},
        "steps": [],
        "extra": {"blocks_per_chunk": 2},
    }
    done = attempt("vllm_offload_script.py", job)
    assert done.returncode and "remove block_size and blocks_per_chunk" in done.stderr


def test_hashes_that_clients_can_make_equal_are_refused(model: Path, tmp_path: Path) -> None:
    """A hash that is not cryptographic ends the start, which says which setting is wrong."""
    job = {
        "model": str(model),
        "tier": {"store": [disk(tmp_path)]},
        "steps": [],
        "llm": {"prefix_caching_hash_algo": "xxhash"},
    }
    done = attempt("vllm_offload_script.py", job)
    assert done.returncode and "--prefix-caching-hash-algo sha256" in done.stderr


def test_contract_of_tiers(model: Path, tmp_path: Path) -> None:
    """vLLM's manager gets back the bytes that it gave, from another tier object, too; lookups that need a call are retried;
    jobs end also where the store fails; the queue has a bound; a reset ends all jobs and everything found; a session is kept up
    to its second input; and each setting that changes KV gives another namespace."""
    found = run("vllm_offload_manager_script.py", {"model": str(model), "folder": str(tmp_path)})
    assert len(found["checks"]) == 6
