"""Retentions in the stores: they survive restarts and evictions, are shared between instances, and end everywhere."""

from __future__ import annotations

import json
import sqlite3
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from example_counts import represented
from patience import patient, unhurried
from servers import wait_until
from tiny import greedy, prompt

from foreword.blocks.retention import Retention
from foreword.blocks.salt import NO_SALT
from foreword.entrypoints.llm import LLM
from foreword.prefixes import lease_follower
from foreword.prefixes.erasure import forget_tenant
from foreword.store import shared_records

Make = Callable[..., LLM]
each_kind = pytest.mark.parametrize("family", represented(["llama", "mistral", "gpt_oss", "gemma3_5to1"], "llama"))


def disk(path: Path, size: str = "64MiB") -> str:
    return f"disk://{path}/store?size={size}"


def pinned(llm: LLM) -> int:
    """Bytes that are pinned in the stores."""
    assert llm.flush()
    assert llm.offload is not None
    return llm.offload.store.status().pinned_bytes


def flood(llm: LLM, count: int = 40, length: int = 60, together: int = 10) -> None:
    for first in range(1000, 1000 + count, together):
        llm.generate([prompt(length, seed) for seed in range(first, first + together)], greedy(2))
        assert llm.flush()


@each_kind
def test_a_restart_keeps(family: str, engine: Make, tmp_path: Path) -> None:
    """After a restart, and a flood that fills the disk, a retained prefix is loaded, and kept on the device again; the same
    prefix without a retention is gone."""
    tokens, other = prompt(81, 1), prompt(81, 2)
    room = {"llama": "320KiB", "mistral": "320KiB", "gpt_oss": "512KiB", "gemma3_5to1": "1MiB"}[family]
    with engine(family, store=disk(tmp_path, room)) as llm:
        assert llm.generate(tokens, greedy(1), retain=[Retention(80, 600.0)])[0].retained[0].status == "accepted"
        llm.generate(other, greedy(1))
        assert pinned(llm) > 0
        flood(llm)
        assert llm.offload is not None and llm.offload.store.status().evictions > 0
    with engine(family, store=disk(tmp_path, room)) as llm:
        [again, gone] = llm.generate([tokens, other], greedy(1))
        assert (again.cached_tokens, gone.cached_tokens) == (80, 0)
        flood(llm)
        [third] = llm.generate(tokens, greedy(1), cache_report=True)
        assert third.cache_report is not None and third.cache_report.device_tokens == 80
        llm.check()


def break_index(folder: Path) -> None:
    with (folder / "store" / "index.sqlite").open("r+b") as file:
        file.write(bytes(200))


def of_an_earlier_build(folder: Path) -> None:
    """The index has an old format, so it is rebuilt."""
    with closing(sqlite3.connect(folder / "store" / "index.sqlite")) as index:
        index.execute("PRAGMA user_version = 3")


@pytest.mark.parametrize("lose", [break_index, of_an_earlier_build])
@pytest.mark.parametrize("kept", ["named", "retained", "named and removed"])
def test_pins_follow_from_records(kept: str, lose: Callable[[Path], None], engine: Make, tmp_path: Path) -> None:
    """Pins lie in the index of a disk store. When it was rebuilt, what the records say is kept is pinned again, also if no
    request names it, and survives a flood. What is not kept any more is not pinned."""
    text, room = "import os\nimport sys\n" * 4, "320KiB"
    with engine("llama", store=disk(tmp_path, room)) as llm:
        tokens = llm.tokenizer.encode(text)
        if kept == "retained":
            llm.retain(tokens, 600.0)
        else:
            llm.add_prefix("base", text)
        before = pinned(llm)
        assert before > 0
        if kept == "named and removed":
            llm.remove_prefix("base")
    lose(tmp_path)
    with engine("llama", store=disk(tmp_path, room)) as llm:
        # A store that does not answer in time is asked again about every second.
        kept_bytes = 0 if kept == "named and removed" else before
        wait_until(lambda: pinned(llm) == kept_bytes, "the pins to be back")
        flood(llm)
        assert llm.offload is not None and llm.offload.store.status().evictions > 0
        [again] = llm.generate([[*tokens, 1, 2, 3]], greedy(1))
        assert (again.cached_tokens > 0) == (kept != "named and removed")


def test_pins_come_back_while_a_server_runs(engine: Make, tmp_path: Path) -> None:
    """An index that is lost under a running server is rebuilt with the pins of all instances' records."""
    with engine("llama", store=disk(tmp_path)) as llm:
        llm.add_prefix("base", "import os\nimport sys\n" * 4)
        llm.retain(prompt(40, 1), 600.0)
        before = pinned(llm)
        (tmp_path / "store" / "index.sqlite").unlink()
        llm.generate([prompt(60, 2)], greedy(1))
        wait_until(lambda: pinned(llm) == before, "the pins to be back")


def test_what_ends_is_unpinned(engine: Make, tmp_path: Path) -> None:
    """A release and an expiry unpin the blocks in the stores, except those that another retention or a named prefix shares."""
    with engine("llama", store=disk(tmp_path)) as llm:
        llm.add_prefix("base", "import os\nimport sys\n" * 3)
        named = pinned(llm)
        text = llm.tokenizer.encode("import os\nimport sys\n" * 3)
        llm.retain([*text, *prompt(40, 1)], 600.0)
        llm.retain([*text, *prompt(20, 1)], 600.0)
        assert pinned(llm) > named
        assert len(llm.release([*text, *prompt(40, 1)])) == 2
        wait_until(lambda: pinned(llm) == named, "what is released to be unpinned")
        llm.retain([*text, *prompt(40, 1)], 0.2)
        llm.remove_prefix("base")
        assert llm.flush()
        wait_until(lambda: pinned(llm) == 0, "what expired to be unpinned")
        assert llm.offload is not None
        assert llm.offload.store.records("retained/", deadline=time.monotonic() + 60) == []


class Hours:
    """The clock of retentions, which the test moves on; replaces the module `time`. The time of day is wrong."""

    def __init__(self) -> None:
        self.passed = 0.0

    def monotonic(self) -> float:
        return time.monotonic() + self.passed

    def time(self) -> float:
        return time.time() - 86_400.0 + 3 * self.passed


def test_an_expiry_while_nothing_runs(engine: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pin that expired while no process ran is removed by the next one."""
    hours = Hours()
    monkeypatch.setattr(lease_follower, "time", hours)
    monkeypatch.setattr(shared_records, "time", hours)
    with engine("llama", store=disk(tmp_path)) as llm:
        llm.retain(prompt(80, 1), 6000.0)
        assert pinned(llm) > 0
    hours.passed += 7000.0
    with engine("llama", store=disk(tmp_path)) as llm:
        wait_until(lambda: pinned(llm) == 0, "what expired to be unpinned")


def test_instances_share_retentions(
    folder: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A retention of one instance is known to the other one, which renews it by using it; a release reaches it too."""
    hours = Hours()
    monkeypatch.setattr(lease_follower, "time", hours)
    monkeypatch.setattr(shared_records, "time", hours)
    options: dict[str, Any] = {"dtype": "float32", "kv_memory": "1024 tokens", "block_size": 4, "threads": 1}
    path, tokens = str(folder("llama")), prompt(81, 1)
    with LLM(path, store=patient(disk(tmp_path)), **options) as one:
        one._core.leases.book._clock = hours.monotonic
        one.retain(tokens, 6000.0)
        [begun] = [kept.expires for kept in one._core.leases.book.all()]
        assert one.flush()
        with unhurried(LLM(path, store=patient(disk(tmp_path)), **options)) as two:
            two._core.leases.book._clock = hours.monotonic
            hours.passed += 4000.0
            [output] = two.generate(tokens, greedy(1))
            assert output.cached_tokens == 80
            assert two.flush()
            hours.passed += 4000.0
            wait_until(
                lambda: [kept.expires > begun for kept in one._core.leases.book.all()] == [True],
                "one learns of the renewal",
            )
            assert pinned(two) > 0, "renewed by its use there"
            stored = one._parts.retentions, two._parts.retentions
            assert stored[0] is not None and stored[1] is not None
            assert [kept.tokens for kept in one._core.leases.book.all()] == [80], "and known here"
            assert len(two.release()) == 1
            assert two.flush()
            stored[0]._records._written.clear()  # so long ago that listings have it
            stored[0].scan()
            assert one.release() == []
            wait_until(lambda: pinned(one) == 0, "what is released to be unpinned")


def test_records_of_strangers(engine: Make, tmp_path: Path) -> None:
    """Malformed records, and records with wrong numbers, are ignored."""
    with engine("llama", store=disk(tmp_path)) as llm:
        llm.retain(prompt(80, 1), 600.0)
        assert llm.flush()
        assert llm.offload is not None
        store, deadline = llm.offload.store, time.monotonic() + 60
        [name] = store.records("retained/", deadline=deadline)
        good = json.loads(store.get_record(name, deadline=deadline) or b"")
        del good["checksum"]  # as version 0.1 wrote it: the numbers alone decide
        changes: list[dict[str, Any]] = [
            {"ttl": "x"}, {"ttl": -1}, {"expires": None}, {"num_tokens": 7}, {"keys": "%"}, {"priority": 1e9}, {"root": "ab"},
            {"block_size": 5}, {"format": 3}, {"keys": ""},
            {"block_size": 0}, {"ttl": float("nan")}, {"expires": "x"},
        ]  # fmt: skip
        llm.release()
        assert llm.flush()
        bad = [json.dumps(good | change).encode() for change in changes]
        for data in [*bad, b"", b"[]", b"{", b"\xff", b"[" * 100_000]:
            store.put_record(name, data, deadline=deadline)
            assert llm._parts.retentions is not None
            llm._parts.retentions.scan()
            assert llm.release() == [], data[:200]
        other = name.rpartition("/")[0] + "/" + "0" * 64
        store.put_record(other, json.dumps(good).encode(), deadline=deadline)
        llm._parts.retentions.scan()
        assert llm.release() == [], "a record under a wrong name"


def test_erasure(engine: Make, tmp_path: Path) -> None:
    """Erasing a tenant removes the records of its retentions."""
    with engine("llama", store=disk(tmp_path)) as llm:
        llm.pin(prompt(80, 1))
        assert llm.flush()
        assert llm.offload is not None
        receipt = forget_tenant(llm.offload.store, NO_SALT)
        assert [key.split("/")[0] for key in receipt.records] == ["retained"]
        assert (receipt.left, llm.offload.store.status().pinned_bytes) == (0, 0)
