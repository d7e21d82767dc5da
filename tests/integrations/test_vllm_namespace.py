"""Whose KV a block is under vLLM: servers share a namespace exactly if what they resolve and measure agrees."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import threading
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file
from vllm_process import PYTHON, disk, run

import foreword
from foreword.blocks.layout import LayerLayout, Layout
from foreword.errors import BadRecord, StoreError
from foreword.integrations.model_identity import weights_digest
from foreword.integrations.vllm.namespace import (
    CODE,
    NAMESPACES,
    Observations,
    ProbeSample,
    announce,
    announced,
    base_digest,
    choose,
    configured_attributes,
    layout_words,
    note_unmeasured,
    plain_dtype,
    resolved_config,
    tolerance,
)
from foreword.integrations.vllm_middleware.recorded_namespace import recorded
from foreword.referee.models import KINDS, fresh_prompts
from foreword.store.frame import HEADER_BYTES, RAW, Header, seal
from foreword.store.tiered import TieredStore
from foreword.store.urls import open_store

BASE = bytes(range(32))
EMBEDDED_MODEL = Path(foreword.__file__).parent / "models" / "stdlib-nano"
LAYOUT = "layout 0011 0"


def evidence(
    seed: int = 1, version: str = "0.32.0", settings: str = "5e", noise: float = 0.0, rows: int = 4, **resolved: str
) -> Observations:
    """The measurements of a server. `noise`: distance from what another one with this seed measures, as a share of the norm."""
    draw = np.random.default_rng(seed)
    values = draw.standard_normal((4, 64)).astype(np.float32)
    values += noise * np.random.default_rng(seed + 1_000).standard_normal(values.shape).astype(np.float32)
    far = np.outer(np.arange(1, 7), np.ones(8)).astype(np.float32)[:rows]
    measured = {LAYOUT: ProbeSample.of(values, 0.01), "rotary 0": ProbeSample.of(far, 0.01, open=True)}
    return Observations(version, (settings * 32)[:64], {"RMSNorm.eps": "1e-06", **resolved}, measured)


def store_in(folder: Path) -> TieredStore:
    return open_store([f"disk://{folder}?size=64MiB"])


@pytest.mark.parametrize(
    "other",
    [
        evidence(),
        evidence(noise=0.002),
        evidence(rows=6),
        evidence(version="0.33.0", settings="77"),
        evidence(version="0.33.0", settings="77", **{"Attention.new": "True"}),
        evidence(version="0.33.0", settings="77", **{"Attention.soft_cap": "0"}),
    ],
    ids=[
        "equal",
        "rounding",
        "more positions",
        "another version",
        "an attribute of that version",
        "not set, in another way",
    ],
)
def test_servers_that_agree_share_a_namespace(tmp_path: Path, other: Observations) -> None:
    """Servers that differ by what rounding explains, by more positions, by version and by an attribute that only that version
    has, have the same KV."""
    store = store_in(tmp_path)
    first = choose(
        store,
        BASE,
        evidence(**{"Attention.soft_cap": "None"}) if "Attention.soft_cap" in other.resolved else evidence(),
    )
    assert choose(store, BASE, other) == first
    assert recorded(store, BASE, other.settings) == first
    store.close()


def laid_out(*layouts: Layout) -> Observations:
    """The measurements of a server with these layouts."""
    seen = evidence()
    measured = {f"layout {one.fingerprint.hex()} 0": seen.measured[LAYOUT] for one in layouts}
    return dataclasses.replace(seen, measured=measured, layouts=layout_words(layouts))


_ONE = LayerLayout(2, 32, 32)
_WHOLE = Layout(b"", 32, (_ONE,) * 6, "float32", order="vllm/float32/LBHNC/cpu-amx")
_HYBRID = [
    dataclasses.replace(_WHOLE, layers=(_ONE,) * 2, group=f"{number}/3 {kind} {number:016x}")
    for number, kind in enumerate(("full", "window", "window"))
]


@pytest.mark.parametrize(
    ("others", "reason"),
    [
        (
            _HYBRID,
            "the only group (6), 0/3 full (2) and 1/3 window (2) and 2/3 window (2) in the store",
        ),
        ([dataclasses.replace(_WHOLE, block_size=16)], "tokens of a block (--block-size) are 32, 16 in the store"),
        (
            [dataclasses.replace(_WHOLE, shard=(rank, 2)) for rank in (0, 1)],
            "ranks (--tensor-parallel-size) are (0, 1), (0, 2) and (1, 2)",
        ),
        ([dataclasses.replace(_WHOLE, dtype="bfloat16")], "dtype (--kv-cache-dtype) are float32, bfloat16"),
        ([dataclasses.replace(_WHOLE, loss="int8")], "lossy codecs are"),
        (
            [dataclasses.replace(_WHOLE, order="vllm/float32/BLHNC/cpu-amx")],
            "packing are vllm/float32/LBHNC/cpu-amx, vllm/",
        ),
    ],
    ids=["groups", "block size", "ranks", "dtype", "loss", "packing"],
)
def test_the_log_says_how_layouts_differ(
    tmp_path: Path, others: list[Layout], reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Blocks that are laid out otherwise are not shared, and the log names the attribute on both sides. A record of a build
    that said nothing of its layouts is compared, too."""
    store = store_in(tmp_path)
    theirs = choose(store, BASE, laid_out(*others))
    with caplog.at_level("WARNING", "vllm.foreword"):
        assert choose(store, BASE, laid_out(_WHOLE)) != theirs
    assert reason in caplog.text
    silent = dataclasses.replace(laid_out(*others), layouts={})
    assert "is on one side only" in laid_out(_WHOLE).difference(silent)
    store.close()


@pytest.mark.parametrize(
    ("other", "reason"),
    [
        (evidence(seed=2), LAYOUT),
        (evidence(noise=0.05), LAYOUT),
        (evidence(noise=0.05, version="0.33.0", settings="77"), LAYOUT),
        (evidence(**{"RMSNorm.eps": "1e-05"}), "RMSNorm.eps"),
        (evidence(version="0.33.0", settings="77", **{"RMSNorm.eps": "1e-05"}), "RMSNorm.eps"),
        (evidence(**{"Attention.window": "128"}), "Attention.window"),
    ],
    ids=[
        "other weights",
        "1 of 20",
        "another version computes otherwise",
        "eps",
        "eps there",
        "an attribute, same version",
    ],
)
def test_servers_that_differ_do_not(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, other: Observations, reason: str
) -> None:
    """Another value of anything that was measured or resolved is another namespace, the log says why, and each server finds its
    own namespace again."""
    store = store_in(tmp_path)
    first = choose(store, BASE, evidence())
    with caplog.at_level("WARNING", "vllm.foreword"):
        second = choose(store, BASE, other)
    assert first != second
    assert reason in caplog.text and "is not used" in caplog.text
    assert (choose(store, BASE, evidence()), choose(store, BASE, other)) == (first, second)
    store.close()


def rounded(values: np.ndarray[Any, Any]) -> ProbeSample:
    """Rounds to bfloat16: eight bits, to the nearest."""
    bits = values.astype(np.float32).view(np.uint32)
    return ProbeSample.of(((bits + 0x8000) & 0xFFFF0000).view(np.float32), 0.01)


@pytest.mark.parametrize("seed", range(20))
def test_a_change_of_one_direction_is_seen_below_rounding(seed: int) -> None:
    """In bfloat16 keys that are 1 % longer are within the rounding of each value, and other than rounding in their sum: where
    keys and values take turns, too. Rounding alone, of any size below the tolerance, is no difference."""
    draw = np.random.default_rng(seed)
    values = draw.standard_normal((8, 1024)) * draw.uniform(0.1, 10.0, (8, 1))
    sample = rounded(values)
    for noise in (0.0, 1e-4, 0.003, 0.006):
        assert not sample.difference(rounded(values * (1.0 + noise * draw.standard_normal(values.shape))))
    longer = values.copy()
    longer[3, :512] *= 1.01
    assert "longer or shorter" in sample.difference(rounded(longer))
    turns = values.copy()
    turns[3, ::4] *= 1.01
    turns[3, 1::4] *= 1.01
    assert "longer or shorter" in sample.difference(rounded(turns))
    assert "distance" in sample.difference(rounded(values * (1.0 + 0.02 * draw.standard_normal(values.shape))))


def test_without_records_equal_settings_agree(tmp_path: Path) -> None:
    """Servers that share no store, such as prefill and decode instances, agree if settings and attributes are equal; another
    base, setting or attribute gives another namespace."""
    namespaces = [
        choose(store_in(tmp_path / str(number)), base, one)
        for number, (base, one) in enumerate([
            (BASE, evidence()), (BASE, evidence(noise=0.001)), (bytes(32), evidence()), (BASE, evidence(settings="77")),
            (BASE, evidence(**{"RMSNorm.eps": "1e-05"})),
        ])
    ]  # fmt: skip
    assert namespaces[0] == namespaces[1]
    assert len(set(namespaces)) == 4
    assert choose(TieredStore([]), BASE, evidence()) == namespaces[0]


def test_servers_that_start_at_the_same_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two servers with equal settings that compute other KV, and find no record because both have just started, get two
    namespaces."""
    store = store_in(tmp_path)
    put = store.put_record
    seen: list[bytes] = []

    def put_after_the_other(key: str, data: bytes, *, deadline: float) -> None:
        monkeypatch.setattr(store, "put_record", put)
        # The whole start of the other, between reading and writing of this one.
        seen.append(choose(store, BASE, evidence(seed=2)))
        put(key, data, deadline=deadline)

    monkeypatch.setattr(store, "put_record", put_after_the_other)
    mine = choose(store, BASE, evidence(seed=1))
    assert mine != seen[0]
    assert choose(store, BASE, evidence(seed=1)) == mine
    assert choose(store, BASE, evidence(seed=2)) not in (mine, seen[0])
    store.close()


def test_a_store_that_does_not_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the records of a store nothing is shared by mistake: the namespace is that of exactly these measurements. What
    another store says is used."""
    store = store_in(tmp_path / "a")
    known = choose(store, BASE, evidence())
    inner = store.tiers[0].store

    def fails(*_: object, **__: object) -> Any:
        raise StoreError("the store is stopped")

    monkeypatch.setattr(inner, "records", fails)
    alone = choose(store, BASE, evidence(noise=0.002))
    assert alone != known
    assert alone == choose(store, BASE, evidence(noise=0.002)) != choose(store, BASE, evidence(noise=0.003))
    store.close()
    both = open_store([f"disk://{tmp_path / 'b'}?size=64MiB", f"disk://{tmp_path / 'c'}?size=64MiB"])
    known = choose(both, BASE, evidence())
    monkeypatch.setattr(both.tiers[1].store, "records", fails)
    assert choose(both, BASE, evidence(noise=0.002)) == known
    both.close()


@pytest.mark.parametrize("damage", [b"", b"{}", b"[]", b'{"format": 1}', b"\xff", b'{"format": 1, "measured": 5}'])
def test_damaged_records_are_skipped(tmp_path: Path, damage: bytes) -> None:
    """A record that cannot be read is no evidence, and stops no server."""
    store = store_in(tmp_path)
    first = choose(store, BASE, evidence())
    [key] = store.records("namespaces/", deadline=float("inf"))
    store.put_record(key, damage, deadline=float("inf"))
    with pytest.raises(BadRecord):
        NAMESPACES.decode(key, damage)
    assert choose(store, BASE, evidence()) == first
    store.close()


@pytest.mark.parametrize("lost", ["deleted", "damaged", "among too many"])
def test_blocks_whose_record_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, lost: str
) -> None:
    """Where the record is lost of those who saved the blocks of a namespace, a server with equal settings does not take it,
    since nothing says that it computes the same; it finds its own again. In a store without such blocks it does."""
    store, layout = store_in(tmp_path), Layout(b"", 16, (LayerLayout(1, 8, 8),), "float32")
    first = choose(store, BASE, evidence(), [layout])
    saved = dataclasses.replace(layout, model=first)
    header = Header(saved.fingerprint, bytes(16), bytes(32), bytes(32), 0, RAW, saved.block_bytes, saved.block_bytes)
    assert store.put([seal(header, memoryview(bytearray(saved.block_bytes + HEADER_BYTES)))], deadline=float("inf"))
    assert choose(store, BASE, evidence(), [layout]) == first
    [key] = store.records("namespaces/", deadline=float("inf"))
    if lost == "deleted":
        store.delete_record(key, deadline=float("inf"))
    elif lost == "damaged":
        store.put_record(key, b"{}", deadline=float("inf"))
    else:
        monkeypatch.setattr("foreword.integrations.vllm.namespace.NAMESPACES", dataclasses.replace(NAMESPACES, most=0))
    other = choose(store, BASE, evidence(seed=2), [layout])
    assert other != first
    assert "without a record of who saved it" in caplog.text
    assert choose(store, BASE, evidence(seed=2), [layout]) == other
    assert choose(store_in(tmp_path / "new"), BASE, evidence(seed=2), [layout]) == first
    store.close()


def test_a_store_that_hangs_while_blocks_are_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A store that does not say which blocks it has keeps no server from starting: it takes a namespace of its own."""
    first, gate = choose(store_in(tmp_path / "one"), BASE, evidence()), threading.Event()
    store, layout = store_in(tmp_path / "two"), Layout(b"", 16, (LayerLayout(1, 8, 8),), "float32")
    monkeypatch.setattr("foreword.integrations.vllm.namespace._WITHIN", 0.2)

    def hangs(*_: Any, **__: Any) -> Any:
        gate.wait()
        yield from ()

    monkeypatch.setattr(store.record_tiers[0].store, "list_names", hangs)
    other = choose(store, BASE, evidence(), [layout])
    gate.set()
    assert other != first
    store.close()


# The base


def folder_with(folder: Path, config: dict[str, Any], value: float = 1.0) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    save_file({"weight": np.full(8, value, np.float32)}, folder / "model.safetensors")
    return folder


def configured(folder: Path, load_format: str = "auto", drafts: Path | None = None, **more: Any) -> Any:
    model = {"model": str(folder), "revision": None, "dtype": "float32", "quantization": None, **more}
    draft = None if drafts is None else SimpleNamespace(draft_model_config=SimpleNamespace(model=str(drafts)))
    load = SimpleNamespace(load_format=load_format, model_loader_extra_config={})
    return SimpleNamespace(model_config=SimpleNamespace(**model), speculative_config=draft, load_config=load)


def base_of(folder: Path, **more: Any) -> bytes:
    return base_digest(configured(folder, **more), None)


def test_the_base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The base is the weights, wherever they stand. What is configured about them, the checkpoint's code if that is run, and a
    draft model are attributes, so that the log names the one that differs."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    one = folder_with(tmp_path / "one", {"rope_theta": 10_000.0})
    two = folder_with(tmp_path / "two", {"rope_theta": 500.0, "_name_or_path": "x"})
    three = folder_with(tmp_path / "three", {}, 2.0)
    assert base_of(one) == base_of(two) == base_of(one, dtype="bfloat16", hf_overrides={"a": 1}) != base_of(three)
    assert base_digest(configured(one), "ab" * 32) == base_digest(configured(three), "ab" * 32) != base_of(one)
    usual = configured_attributes(configured(one))
    for changed, name in [
        (configured(one, dtype="bfloat16"), "dtype"),
        (configured(one, quantization="fp8"), "quantization"),
        (configured(one, quantization_config={"linear": "e5m2"}), "quantization.arguments"),
        (configured(one, drafts=three), "draft.weights"),
    ]:
        found = configured_attributes(changed)
        assert [key for key in usual if usual[key] != found[key]] == [name]
    (one / "modeling_own.py").write_text("LIMIT = 100")
    assert configured_attributes(configured(one)) == usual, "code that is not run"
    ran = configured_attributes(configured(one, trust_remote_code=True))["code"]
    (one / "modeling_own.py").write_text("LIMIT = 200")
    assert configured_attributes(configured(one, trust_remote_code=True))["code"] != ran


def test_a_server_that_could_not_measure(tmp_path: Path) -> None:
    """Its record is no evidence for others, and tells its own API server its namespace; that of another process does not.
    Where its operator trusts its settings, any API server with these settings finds it."""
    store = store_in(tmp_path)
    mine = evidence()
    note_unmeasured(store, BASE, mine.settings, bytes(32), "engine 1")
    assert recorded(store, BASE, mine.settings, "engine 1") == bytes(32)
    assert recorded(store, BASE, mine.settings, "engine 2") is None
    assert choose(store, BASE, mine) != bytes(32)
    note_unmeasured(store, BASE, "77" * 32, BASE, "")
    assert recorded(store, BASE, "77" * 32, "engine 2") == BASE
    store.close()


def test_a_namespace_that_no_handshake_tells(tmp_path: Path) -> None:
    """The workers announce it to their own scheduler in the stores: once, and to no other."""
    store = store_in(tmp_path)
    for number, engine in enumerate(("engine 1", "engine 2")):
        announce(store, BASE, "5e" * 32, bytes([number]) * 32, engine)
    known = choose(store, BASE, evidence())
    assert announced(store, BASE, "5e" * 32, "engine 3") == b""
    assert [announced(store, BASE, "5e" * 32, "engine 1") for _ in range(2)] == [bytes(32), b""]
    assert announced(store, BASE, "5e" * 32, "engine 2") == bytes([1]) * 32
    assert choose(store, BASE, evidence()) == known and len(store.records("namespaces/", deadline=float("inf"))) == 1
    store.close()


def test_code_is_compared_between_equal_versions(tmp_path: Path) -> None:
    """Layers with other code have a namespace of their own, and the log says so; another version's code is not compared."""
    store = store_in(tmp_path)
    here, there = (f"{CODE}{version} 3.12" for version in ("0.32.0", "0.33.0"))
    first = choose(store, BASE, evidence(**{here: "aa"}))
    assert choose(store, BASE, evidence(**{here: "bb"})) != first
    assert choose(store, BASE, evidence(version="0.33.0", settings="77", **{there: "cc"})) == first
    store.close()


def test_a_dtype_of_kv_is_resolved() -> None:
    """`auto` is the model's dtype, spelled out or not."""
    found = {plain_dtype("auto", "torch.bfloat16"), plain_dtype("bfloat16", "torch.float32")}
    assert found == {"bfloat16"} and plain_dtype("half", "") == "float16" and plain_dtype("fp8_e5m2", "") == "fp8_e5m2"


@pytest.mark.parametrize(
    ("config", "same"),
    [
        ({"eos_token_id": [2, 5], "id2label": {"0": "a"}, "temperature": 0.5}, True),
        ({"text_config": {"rope_theta": 1.0, "eos_token_id": 7}}, True),
        ({"rope_theta": 500.0}, False),
        ({"rope_parameters": {"temperature": 2.0}}, False),
        ({"top_k": 3}, False),
        ({"text_config": {"rope_theta": 2.0}}, False),
    ],
)
def test_keys_of_a_configuration(config: dict[str, Any], same: bool) -> None:
    """Names and what generates do not count, at the top and in the configurations of parts; anything else does, also under
    such a name in another object."""

    def resolved(given: dict[str, Any]) -> dict[str, str]:
        full = {"eos_token_id": 2, "temperature": 1.0, "text_config": {"rope_theta": 1.0, "eos_token_id": 2}, **given}
        return resolved_config(SimpleNamespace(hf_config=SimpleNamespace(to_dict=lambda: full)))

    assert (resolved({}) == resolved(config)) == same


def test_batch_invariance_is_part_of_the_identity(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch-invariant vLLM shares KV with others of its kind only, and only where each bit of the measurement is equal: its
    hits give the bits of a computation."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    vllm, usual = configured(folder_with(tmp_path / "model", {})), tolerance("bfloat16")
    without = configured_attributes(vllm)
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    assert configured_attributes(vllm) != without
    values = np.random.default_rng(5).standard_normal((4, 64)).astype(np.float32)
    other = values.copy()
    other[3, 63] = np.nextafter(other[3, 63], np.float32(9))
    exact = tolerance("bfloat16")
    assert not ProbeSample.of(values, exact).difference(ProbeSample.of(values.copy(), exact))
    assert ProbeSample.of(values, exact).difference(ProbeSample.of(other, exact))
    assert not ProbeSample.of(values, usual).difference(ProbeSample.of(other, usual))
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "0")
    assert configured_attributes(vllm) == without and tolerance("bfloat16") == usual > 0


def test_weights_replaced_in_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A weight file that is rewritten in place, with its old size and modification time, has another digest."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = folder_with(tmp_path / "model", {})
    file, before = folder / "model.safetensors", weights_digest(folder)
    times = file.stat()
    with file.open("r+b") as weights:
        weights.seek(-4, os.SEEK_END)
        weights.write(b"\x00\x00\x00\x41")
    os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert file.stat().st_mtime_ns == times.st_mtime_ns
    assert weights_digest(folder) != before


# Under vLLM

_LONG_ROPE = {
    "rope_type": "longrope", "rope_theta": 10_000.0, "original_max_position_embeddings": 512,
    "short_factor": [1.0 + 0.05 * n for n in range(16)], "long_factor": [1.0 + n for n in range(16)],
}  # fmt: skip


def servers(
    folder: Path, kind: str, store: Path, settings: Sequence[dict[str, Any]], plant: str = "", **environment: str
) -> list[list[int]]:
    """Ask vLLMs with these settings, one after the other, the same prompts over one store: for each, the cached tokens of each
    prompt when it is asked first, and again after a reset of vLLM's own cache."""
    asks = ["ask", "forget", "ask"]
    runs = [{"store": [disk(store)], "passes": asks, "llm": one} for one in settings]
    job = {"model": str(folder), "llm": KINDS[kind].arguments(), "runs": runs, "prompts": fresh_prompts(3, 3, 300)}
    job |= {"plant": plant} if plant else {}
    found = run("vllm_kinds_script.py", job, **environment)["results"]
    return [[answer["cached"] for answers in one["answers"] for answer in answers] for one in found]


# vLLM has 8-bit KV on CPUs with AVX-512 only.
_OTHER_DTYPE = {"kv_cache_dtype": "fp8"} if "avx512f" in Path("/proc/cpuinfo").read_text() else {"dtype": "bfloat16"}


@pytest.mark.parametrize(
    ("kind", "config", "same", "other"),
    [
        (
            "Llama",
            {},
            [{"max_model_len": 1_024, "max_num_seqs": 4}, {"served_model_name": "another"}],
            [{"hf_overrides": {"rms_norm_eps": 1e-2}}, {"hf_config_path": "THETA"}, _OTHER_DTYPE],
        ),
        (
            "Phi-3",
            {"rope_parameters": _LONG_ROPE, "original_max_position_embeddings": 512, "max_position_embeddings": 2_048},
            [{"max_model_len": 1_536}],
            [{"max_model_len": 512}],
        ),
    ],
    ids=["llama", "longrope"],
)
@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.skipif(not PYTHON, reason="FOREWORD_VLLM_PYTHON names no interpreter with vLLM")
def test_settings_under_vllm(
    kind: str, config: dict[str, Any], same: list[dict[str, Any]], other: list[dict[str, Any]], tmp_path: Path
) -> None:
    """A server finds nothing of a server whose settings give other KV, and everything of one whose settings give the same."""
    folder = KINDS[kind].build(tmp_path / "model")
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **config}), encoding="utf-8")
    theta = tmp_path / "theta"
    theta.mkdir()
    rope = {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}}
    (theta / "config.json").write_text(json.dumps({**json.loads(file.read_text()), **rope}), encoding="utf-8")
    other = [{key: str(theta) if value == "THETA" else value for key, value in one.items()} for one in other]
    first, *found = servers(folder, kind, tmp_path / "store", [{}, *same, *other])
    assert first[:3] == [0, 0, 0] and min(first[3:]) >= 256
    for settings, cached in zip([*same, *other], found, strict=True):
        expected = first[3:] if settings in same else [0, 0, 0]
        assert cached[:3] == expected, settings
        assert min(cached[3:]) > 0, "its own KV is found again"


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.skipif(not PYTHON, reason="FOREWORD_VLLM_PYTHON names no interpreter with vLLM")
def test_a_batch_invariant_vllm_keeps_to_itself(tmp_path: Path) -> None:
    """A batch-invariant server finds what others of its kind have saved, also in a fresh process, and nothing that others have;
    nor do they. The setting is real, its kernels are not: they need a GPU."""
    folder = KINDS["Llama"].build(tmp_path / "model")
    store, invariant = tmp_path / "store", {"VLLM_BATCH_INVARIANT": "1"}
    [usual] = servers(folder, "Llama", store, [{}])
    first, second = servers(folder, "Llama", store, [{}, {}], "usual_kernels", **invariant)
    [again] = servers(folder, "Llama", store, [{}])
    assert usual[:3] == first[:3] == [0, 0, 0] and min(first[3:]) >= 256
    assert second[:3] == first[3:] and again[:3] == usual[3:]


@pytest.mark.parametrize("pooling", ["MEAN", "LAST"])
@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.skipif(not PYTHON, reason="FOREWORD_VLLM_PYTHON names no interpreter with vLLM")
def test_embeddings_under_vllm(pooling: str, tmp_path: Path) -> None:
    """An embeddings server survives equal texts and returns vLLM's own vectors, whether vLLM may continue a prompt (LAST) or
    not (MEAN)."""
    folder = KINDS["Llama"].build(tmp_path / "model")
    for file in EMBEDDED_MODEL.glob("tokenizer*"):
        shutil.copy(file, folder)
    llm = {"runner": "pooling", "convert": "embed", "pooler_config": {"seq_pooling_type": pooling}}
    settings = {**KINDS["Llama"].arguments(), **llm, "skip_tokenizer_init": False, "max_num_batched_tokens": 2_048}
    runs = [
        {"store": None, "passes": ["embed"]},
        {"store": [disk(tmp_path)], "passes": ["embed", "embed", "forget", "embed"]},
    ]
    job = {"model": str(folder), "llm": settings, "prompts": fresh_prompts(5, 3, 200), "runs": runs}
    alone, connected = run("vllm_kinds_script.py", job)["results"]
    [expected] = alone["vectors"]
    for found in connected["vectors"]:
        np.testing.assert_allclose(found, expected, atol=1e-5)
    assert (connected["tiers"][0]["hit"] > 0) == (pooling == "LAST")


@pytest.mark.parametrize("plant", ["rope_base", "one_layer", "packing"])
@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.skipif(not PYTHON, reason="FOREWORD_VLLM_PYTHON names no interpreter with vLLM")
def test_planted_changes_of_meaning(plant: str, tmp_path: Path) -> None:
    """A vLLM that computes or packs KV in another way, without a sign of it in its version, configuration or attributes, finds
    nothing of what another has saved. It finds its own, and its answers are right."""
    kind = KINDS["Gemma 3"]
    job = {"model": str(kind.build(tmp_path / "model")), "llm": kind.arguments(), "prompts": fresh_prompts(7, 3, 300)}
    connected = {"store": [disk(tmp_path)], "passes": ["ask", "forget", "ask"]}
    [usual] = run("vllm_kinds_script.py", {**job, "runs": [connected]})["results"]
    runs = [{"store": None, "passes": ["ask"]}, connected]
    alone, planted = run("vllm_kinds_script.py", {**job, "plant": plant, "runs": runs})["results"]
    [expected] = alone["answers"]
    for found in planted["answers"]:
        assert [one["tokens"] for one in found] == [one["tokens"] for one in expected]
    assert [one["cached"] for one in planted["answers"][0]] == [0, 0, 0]
    again = [one["cached"] for one in planted["answers"][1]]
    assert again == [one["cached"] for one in usual["answers"][1]] and min(again) >= 256
