"""A real llama.cpp with Foreword's stores. Needs FOREWORD_LLAMA_PYTHON, an interpreter that has it; skipped without."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import pytest
from llama_process import (
    BLOCK,
    answers,
    disk,
    llama,
    loaded,
    make_kind,
    make_model,
    needs_llama,
    prompts,
    result,
    start,
)

pytestmark = needs_llama

LENGTHS = [10, 32, 33, 64, 65, 100, 200, 300]
FULL = [(length - 1) // BLOCK * BLOCK for length in LENGTHS]
# V is transposed without flash attention, and 8 is q8_0, whose numbers share scales.
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "flash": {"flash_attn": True},
    "quantized": {"flash_attn": True, "type_k": 8, "type_v": 8},
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("llama") / "model.gguf")


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_answers_after_a_restart(kind: str, model: Path, tmp_path: Path) -> None:
    """A new process loads all full blocks and gives the answers that are computed; also with V that is not transposed and with
    quantized KV, and with an own cache that was emptied in the same process."""
    asked, settings = prompts(1, LENGTHS), KINDS[kind]
    alone = llama(model, None, [asked], settings=settings)["rounds"][0]
    tiers = ["memory://?size=64MiB", disk(tmp_path)]
    first = llama(model, tiers, [asked, asked], settings=settings)
    second = llama(model, tiers, [asked], settings=settings)
    for found in (*first["rounds"], *second["rounds"]):
        assert answers(found) == answers(alone)
    assert loaded(first["rounds"][0]) == [0] * len(LENGTHS)
    assert loaded(first["rounds"][1]) == loaded(second["rounds"][0]) == FULL
    assert first["unsaved"] == second["unsaved"] == {}
    assert second["lookups"] == {"found": len(LENGTHS) - 2, "too_small": 2}


def test_quantized_answers_are_those_of_llama_cpps_own_hit(tmp_path: Path) -> None:
    """A load from another process gives the tokens of llama.cpp's own hit of the same length, with weights and KV in Q8_0 and
    flash attention, where a hit may end in other tokens than a computation."""
    model, asked = make_model(tmp_path / "model.gguf", exact=False), prompts(16, LENGTHS[1:] * 2)
    first = llama(model, [disk(tmp_path)], [asked], settings=KINDS["quantized"], count=32, own=BLOCK)
    second = llama(model, [disk(tmp_path)], [asked], settings=KINDS["quantized"], count=32)["rounds"][0]
    assert loaded(second) == FULL[1:] * 2
    assert answers(second) == [one["own"] for one in first["rounds"][0]]


def test_sessions_share_a_prefix(model: Path, tmp_path: Path) -> None:
    """20 sessions in two processes with one prefix store it once: at most 1.3x of one copy of each distinct token. Only the
    first computes it."""
    [prefix], endings = prompts(2, [600]), prompts(3, [40] * 20)
    asked = [prefix + ending for ending in endings]
    first = llama(model, [disk(tmp_path)], [asked[:10]])
    second = llama(model, [disk(tmp_path)], [asked[10:]])
    kept = 600 // BLOCK * BLOCK
    assert loaded(first["rounds"][0]) == [0] + [kept] * 9 and loaded(second["rounds"][0]) == [kept] * 10
    distinct = 600 + sum(40 + len(one["tokens"]) for one in first["rounds"][0] + second["rounds"][0])
    token_bytes = 4 * 2 * 64 * 2 * 2  # layers, KV heads, their size, K and V, float16
    assert second["bytes"] <= 1.3 * distinct * token_bytes


def test_processes_at_the_same_time(model: Path, tmp_path: Path) -> None:
    """Processes that save and load the same prompts in one folder at the same time give the right answers, and leave a whole
    cache."""
    asked = prompts(4, [200, 300, 250, 280])
    alone = llama(model, None, [asked])["rounds"][0]
    running = [start(model, [disk(tmp_path)], [asked[turn:] + asked[:turn]]) for turn in (0, 2)]
    for turn, process in zip((0, 2), running, strict=True):
        expected = answers(alone)
        assert answers(result(process)["rounds"][0]) == expected[turn:] + expected[:turn]
    after = llama(model, [disk(tmp_path)], [asked])
    assert loaded(after["rounds"][0]) == [192, 288, 224, 256] and after["saved"] == 0


def test_a_conversation(model: Path, tmp_path: Path) -> None:
    """A turn loads nothing where the context has more than the stores; another process continues from the answer's blocks."""
    [prompt, more, last] = prompts(5, [100, 50, 5])
    [first] = llama(model, None, [[prompt]], count=40)["rounds"][0]
    turn = prompt + first["tokens"] + more
    alone = llama(model, None, [[prompt, turn]], count=40)["rounds"][0]
    found = llama(model, [disk(tmp_path)], [[prompt, turn]], count=40, keep=True)
    assert answers(found["rounds"][0]) == answers(alone)
    assert loaded(found["rounds"][0]) == [0, 0] and found["lookups"] == {"absent": 1, "found": 1}
    longer = turn + alone[1]["tokens"] + last
    other = llama(model, [disk(tmp_path)], [[longer]], count=40)["rounds"][0]
    assert loaded(other) == [(len(turn) + len(alone[1]["tokens"])) // BLOCK * BLOCK]


def test_what_the_context_has_is_kept(model: Path, tmp_path: Path) -> None:
    """Only the blocks behind what the context already has are loaded, and the answers are the same."""
    [prompt] = prompts(15, [300])
    alone = llama(model, [disk(tmp_path)], [[prompt]])["rounds"][0]
    found = llama(model, [disk(tmp_path)], [[prompt[:100], prompt]], keep=True)["rounds"][0]
    assert loaded(found) == [96, 288 - 96] and answers(found)[1] == answers(alone)[0]


def test_windows(tmp_path: Path) -> None:
    """A model with sliding windows is cached like others. If it keeps only the windows (`swa_full=False`), a long prompt is
    not saved, and that is counted."""
    model, asked = make_kind("windows", tmp_path / "model.gguf"), prompts(14, [100, 400])
    alone = llama(model, None, [asked])["rounds"][0]
    for expected in ([0, 0], [96, 384]):
        found = llama(model, [disk(tmp_path)], [asked])
        assert answers(found["rounds"][0]) == answers(alone)
        assert loaded(found["rounds"][0]) == expected and found["unsaved"] == {}
    windows = {"swa_full": False, "n_batch": 32}
    alone = llama(model, None, [asked], settings=windows)["rounds"][0]
    found = llama(model, [f"disk://{tmp_path}/other"], [asked[1:]], settings=windows)
    assert answers(found["rounds"][0]) == answers(alone)[1:]
    assert found["saved"] == 0 and list(found["unsaved"].values()) == [1]


def test_recurrent(tmp_path: Path) -> None:
    """A model with a recurrent state is refused with the reason."""
    found = llama(make_kind("recurrent", tmp_path / "model.gguf"), [disk(tmp_path)], [])
    assert found["refused"] == "ModelUnsupported" and "recurrent" in found["why"]


def test_damaged_blocks_are_computed(model: Path, tmp_path: Path) -> None:
    """Flipped bits in the store are detected; the blocks before them are used, and the others computed and saved again."""
    asked = prompts(6, [200, 300])
    alone = llama(model, [disk(tmp_path)], [asked])["rounds"][0]
    files = [
        path for path in (tmp_path / "kv").rglob("*") if path.is_file() and path.read_bytes()[-192:-188] == b"FWKV"
    ]
    assert len(files) >= 15
    for path in files[::2]:
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 4
        path.write_bytes(data)
    found = llama(model, [disk(tmp_path)], [asked])
    assert answers(found["rounds"][0]) == answers(alone)
    assert found["bad"]["disk"]["checksum"] >= 1 and found["saved"] >= 1
    assert sum(loaded(found["rounds"][0])) < 192 + 288


OTHER: list[dict[str, Any]] = [
    {"rope_freq_base": 20_000.0},
    {"rope_freq_scale": 0.5},
    {"flash_attn": True},
    {"type_k": 1, "type_v": 0},
]


@pytest.mark.parametrize("other", OTHER, ids=str)
def test_other_settings_find_nothing(other: dict[str, Any], model: Path, tmp_path: Path) -> None:
    """KV that was computed with settings that change it is a miss."""
    asked = prompts(7, [200])
    llama(model, [disk(tmp_path)], [asked])
    found = llama(model, [disk(tmp_path)], [asked], settings=other)
    assert found["lookups"] == {"absent": 1} and loaded(found["rounds"][0]) == [0]


def test_settings_that_change_nothing(model: Path, tmp_path: Path) -> None:
    """Threads, batches, the size of the context and a copy of the file elsewhere are no other model."""
    asked = prompts(8, [200])
    llama(model, [disk(tmp_path)], [asked])
    copy = tmp_path / "elsewhere.gguf"
    copy.write_bytes(model.read_bytes())
    settings = {"n_threads": 2, "n_threads_batch": 2, "n_batch": 64, "n_ctx": 2048, "use_mmap": False}
    found = llama(copy, [disk(tmp_path)], [asked], settings=settings)
    assert loaded(found["rounds"][0]) == [192]


def test_other_weights_under_the_same_path(tmp_path: Path) -> None:
    """A file that replaces another does not hit the other's blocks."""
    path, asked = tmp_path / "model.gguf", prompts(9, [150])
    make_model(path, 1)
    llama(path, [disk(tmp_path)], [asked])
    path.unlink()
    make_model(path, 2)
    alone = llama(path, None, [asked])["rounds"][0]
    found = llama(path, [disk(tmp_path)], [asked])
    assert answers(found["rounds"][0]) == answers(alone) and found["lookups"] == {"absent": 1}


def test_tenants_and_block_sizes(model: Path, tmp_path: Path) -> None:
    """Caches with different salts share no block, nor do those with blocks of different sizes."""
    asked = prompts(10, [100])
    llama(model, [disk(tmp_path)], [asked], cache={"salt": "ann"})
    for cache, expected in (
        ({"salt": "bob"}, 0),
        ({}, 0),
        ({"salt": "ann", "block_size": 16}, 0),
        ({"salt": "ann"}, 96),
    ):
        assert loaded(llama(model, [disk(tmp_path)], [asked], cache=cache)["rounds"][0]) == [expected]


def test_budget(model: Path, tmp_path: Path) -> None:
    """A store never has more than its size; what was used last is found."""
    asked = prompts(11, [300] * 6)
    size = 2_500_000  # two prompts and a part
    alone = llama(model, None, [asked])["rounds"][0]
    found = llama(model, [disk(tmp_path, str(size))], [asked])
    assert answers(found["rounds"][0]) == answers(alone) and 0 < found["bytes"] <= size
    again = llama(model, [disk(tmp_path, str(size))], [asked[::-1]])["rounds"][0]
    assert loaded(again)[0] == 288 and answers(again) == answers(alone)[::-1]


def test_sealed(model: Path, tmp_path: Path) -> None:
    """Blocks are loaded with a secret only if they were sealed with it."""
    asked = prompts(12, [100])
    secret = {"FOREWORD_STORE_INTEGRITY_SECRETS": "1:" + "a" * 64}
    llama(model, [disk(tmp_path)], [asked], environment=secret)
    assert loaded(llama(model, [disk(tmp_path)], [asked], environment=secret)["rounds"][0]) == [96]
    other = {"FOREWORD_STORE_INTEGRITY_SECRETS": "1:" + "b" * 64}
    assert loaded(llama(model, [disk(tmp_path)], [asked], environment=other)["rounds"][0]) == [0]


def test_a_store_that_fails(model: Path, tmp_path: Path) -> None:
    """A store that is not there, or that does not answer, gives llama.cpp misses, each within the time limit."""
    asked = prompts(13, [100, 200])
    alone = llama(model, None, [asked])["rounds"][0]
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"redis://127.0.0.1:{silent.getsockname()[1]}"
        found = llama(model, [url], [asked], cache={"timeout": 0.5})
    assert answers(found["rounds"][0]) == answers(alone) and set(found["lookups"]) <= {"timed_out", "tier_off"}
    found = llama(model, ["redis://127.0.0.1:1"], [asked])
    assert answers(found["rounds"][0]) == answers(alone) and set(found["lookups"]) == {"tier_off"}


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"settings": {"logits_all": True}}, "ModelUnsupported"),
    ({"settings": {"embedding": True}}, "ModelUnsupported"),
    ({"images": True}, "ModelUnsupported"),
    ({"cache": {"block_size": 0}}, "BadRequest"),
    ({"cache": {"blocksize": 16}}, "TypeError"),
    ({"store": ["disk:///tmp/kv?sise=1GiB"]}, "StoreConfigError"),
    ({"store": ["memory://?size=1GiB&codec=int8"]}, "StoreConfigError"),
]


@pytest.mark.parametrize(("job", "error"), REFUSED, ids=str)
def test_refused(job: dict[str, Any], error: str, model: Path) -> None:
    """A model that cannot be cached rightly, and arguments and options that do not exist, are errors at the start."""
    assert llama(model, job.pop("store", ["memory://?size=64MiB"]), [], **job)["refused"] == error
