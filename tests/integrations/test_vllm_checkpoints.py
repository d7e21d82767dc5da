"""Checkpoints of windows and recurrent states under a real vLLM. Needs FOREWORD_VLLM_PYTHON; skipped without."""

from __future__ import annotations

import random
import time
from collections import Counter
from pathlib import Path

import pytest
from vllm_process import RemoteVllm, answers, disk, needs_vllm, prompts, vllm
from vllm_waits import WITHIN

from foreword.blocks.keys import FINGERPRINT_BYTES
from foreword.referee.models import KINDS
from foreword.store.layout_records import layouts
from foreword.store.urls import open_store

pytestmark = needs_vllm

TURNS = 5


def stored(folder: Path) -> Counter[str]:
    """Number of blocks in the store by the kind of their group."""
    store = open_store([disk(folder)])
    try:
        kinds = {fingerprint: record.group.kind.value for fingerprint, record in layouts(store).items()}
        scanned = store.scan(deadline=time.monotonic() + WITHIN)
        return Counter(kinds[entry.name[:FINGERPRINT_BYTES]] for entry in scanned)
    finally:
        store.close()


@pytest.mark.parametrize(("name", "step"), [("LFM2", 32), ("Gemma 3", 32), ("Granite 4", 96)])
def test_a_session_continues_from_the_end_of_its_last_turn(name: str, step: int, tmp_path: Path) -> None:
    """Each turn of a conversation continues in the stores where the last one ended, answer included, to the block; the second
    turn at the end of the first prompt. Groups with recurrent state keep a part of their blocks: those of replaced turns are
    deleted. The answers are those of vLLM alone."""
    kind, draw = KINDS[name], random.Random(5)
    folder = kind.build(tmp_path / "model")
    server = RemoteVllm(
        tmp_path / "log", {"VLLM_CPU_OMP_THREADS_BIND": "nobind"}, folder, [disk(tmp_path)], llm=kind.arguments()
    ).ready()
    try:
        said: list[int] = []
        turns: list[tuple[list[int], list[int]]] = []
        for turn in range(TURNS):
            before = len(said) - (40 if turn == 1 else 0)
            said += [draw.randrange(1, 500) for _ in range(draw.randrange(150, 250))]
            found = server.call("ask", prompt=said, count=40)
            if turn:
                assert found["cached"] >= (before - 1) // step * step
            turns.append((list(said), found["tokens"]))
            said += found["tokens"]
            server.call("idle")
            assert server.call("forget")["forgotten"]
    finally:
        server.end()
    if name != "LFM2":  # vLLM's own answers depend on the chunks in which it computes this kind
        alone = vllm(folder, None, [[prompt] for prompt, _ in turns], llm=kind.arguments(), max_tokens=40)["rounds"]
        assert [answers(one)[0] for one in alone] == [tokens for _, tokens in turns]
    counts = stored(tmp_path)
    assert counts["full"] >= len(said) // step - 1
    if "state" in counts:
        groups = sum(record.group.kind.value == "state" for record in _records(tmp_path))
        assert counts["state"] / groups <= counts["full"] * 2 / 3


def _records(folder: Path) -> list:  # type: ignore[type-arg]
    store = open_store([disk(folder)])
    try:
        return list(layouts(store).values())
    finally:
        store.close()


@pytest.mark.parametrize("name", ["Gemma 3", "LFM2"])
def test_blocks_under_wrong_names(name: str, tmp_path: Path) -> None:
    """If the files of two groups, or of two positions, are swapped in the store, or bits flip, the blocks are misses, and the
    answers stay the same."""
    kind, asked = KINDS[name], prompts(7, [500, 650])
    folder = kind.build(tmp_path / "model")
    first = vllm(folder, [disk(tmp_path)], [[prompt] for prompt in asked], llm=kind.arguments())
    found = [path for path in sorted((tmp_path / "kv").rglob("*")) if path.is_file()]
    files = [path for path in found if path.read_bytes()[-192:-188] == b"FWKV"]
    draw = random.Random(3)
    draw.shuffle(files)
    for one, other in zip(files[0:20:2], files[1:20:2], strict=True):  # of any group and position
        mine, theirs = one.read_bytes(), other.read_bytes()
        one.write_bytes(theirs)
        other.write_bytes(mine)
    for path in files[20:24]:
        data = bytearray(path.read_bytes())
        data[-100] ^= 8
        path.write_bytes(data)
    again = vllm(folder, [disk(tmp_path)], [[prompt] for prompt in asked], llm=kind.arguments())
    assert [answers(one) for one in again["rounds"]] == [answers(one) for one in first["rounds"]]
    assert sum(again["bad"]["disk"].values()) >= 1


@pytest.mark.parametrize("name", ["Gemma 3", "Granite 4"])
def test_positions_of_hits_on_the_device(name: str, tmp_path: Path) -> None:
    """A request that continues from vLLM's own cache saves the windows and states at that position if the store has lost them.
    Later requests continue from there in the store, with the answers of vLLM alone."""
    kind = KINDS[name]
    folder, [common, one, other] = kind.build(tmp_path / "model"), prompts(9, [600, 50, 60])
    asked = [common, common + one, common + other]
    alone = vllm(folder, None, [[prompt] for prompt in asked], llm=kind.arguments())["rounds"]
    server = RemoteVllm(
        tmp_path / "log", {"VLLM_CPU_OMP_THREADS_BIND": "nobind"}, folder, [disk(tmp_path)], llm=kind.arguments()
    ).ready()
    try:
        found = [server.ask(asked[0])]
        server.call("idle")
        assert server.call("write")["written"]
        assert lose_all_but_full_attention(tmp_path) > 0
        found.append(server.ask(asked[1]))
        server.call("idle")
        assert server.call("forget")["forgotten"]
        found.append(server.ask(asked[2]))
    finally:
        server.end()
    assert [one["tokens"] for one in found] == [answers(one)[0] for one in alone]
    assert found[2]["cached"] >= found[1]["cached"] > 500


def lose_all_but_full_attention(folder: Path) -> int:
    """Delete the blocks of windows and recurrent states from the store. Returns how many there were."""
    store = open_store([disk(folder)])
    try:
        whole = {fingerprint for fingerprint, record in layouts(store).items() if record.group.whole}
        names = [entry.name for entry in store.scan(deadline=time.monotonic() + WITHIN)]
        return store.delete(
            [name for name in names if name[:FINGERPRINT_BYTES] not in whole], deadline=time.monotonic() + WITHIN
        )
    finally:
        store.close()
