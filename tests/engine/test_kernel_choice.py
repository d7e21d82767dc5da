"""Choice of a kernel for a shape: the rule over recorded and random times, the file of times, and measuring."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path

import pytest
from example_counts import represented
from hypothesis import given
from hypothesis import strategies as st

from foreword.engine import measure
from foreword.engine.kernels import kernel_choice
from foreword.engine.kernels.kernel_choice import (
    ATTENTION_SHAPES,
    COMPILED,
    ONEDNN,
    PLAIN,
    ROWS,
    TOLERANCE,
    WIDE,
    AttentionChoice,
    Times,
    TimesFile,
    attention_bucket,
    choose,
    row_bucket,
)
from foreword.engine.model import load_model
from foreword.engine.self_check import self_check
from foreword.engine_config import EngineConfig

BFLOAT16 = {COMPILED: 2, ONEDNN: 2, WIDE: 4, PLAIN: 2}


def from_rates(**rates: tuple[float, ...]) -> Times:
    """Times from billions of operations per second at 1, 4, 16, 64 and 256 rows."""
    return {
        kind: [rows / rate if rate else math.inf for rows, rate in zip(ROWS, of_kind, strict=True)]
        for kind, of_kind in rates.items()
    }


# 768 x 4096 in bfloat16, one thread. Intel with AMX: 1, 16, 64 and 512 rows were measured, 4 is between.
AMX = from_rates(
    compiled=(20, 45, 69, 68, 65),
    onednn=(14, 60, 229, 390, 956),
    wide=(7, 25, 70, 100, 104),
    plain=(9, 40, 180, 340, 900),
)
AMD = from_rates(
    compiled=(23, 113, 206, 214, 214),
    onednn=(21, 79, 161, 192, 212),
    wide=(11, 43, 88, 99, 106),
    plain=(9, 35, 92, 158, 200),
)
AVX512 = from_rates(
    compiled=(17, 56, 89, 101, 104), onednn=(9, 16, 28, 0, 0), wide=(7, 24, 67, 91, 106), plain=(9, 16, 29, 0, 0)
)


@pytest.mark.parametrize(
    ("times", "expected"),
    [
        (AMX, (COMPILED, ONEDNN, ONEDNN, ONEDNN, ONEDNN)),
        (AMD, (COMPILED,) * 5),
        (AVX512, (COMPILED,) * 5),
        ({ONEDNN: AMX[ONEDNN], PLAIN: AMX[PLAIN]}, (ONEDNN,) * 5),
    ],
)
def test_recorded_processors(times: Times, expected: tuple[str, ...]) -> None:
    """Rates of real processors decide: with AMX the compiled product serves single rows only; elsewhere it serves all, and no
    second copy of the weights is kept."""
    assert choose(times, BFLOAT16) == expected


def test_room() -> None:
    """Where only one copy fits, the one that loses the least is kept, and the plain weight serves beside it."""
    assert choose(AMX, BFLOAT16, room=2) == (COMPILED, COMPILED, PLAIN, PLAIN, PLAIN)
    assert choose(AMX, BFLOAT16, room=1) == (PLAIN,) * 5


RATES = st.lists(st.floats(1, 1000), min_size=len(ROWS), max_size=len(ROWS))


@given(st.fixed_dictionaries(dict.fromkeys(BFLOAT16, RATES)), st.integers(0, 12))
def test_never_slower_than_it_must_be(times: dict[str, list[float]], room: int) -> None:
    """For any times and room: the copies fit; no other set of kinds that fits is nowhere slower than the tolerance and smaller;
    with room for all, every shape is served by the best kind within the tolerance."""
    served = choose(times, BFLOAT16, room)
    best = [min(column) for column in zip(*times.values(), strict=True)]

    def worst(kinds: set[str]) -> float:
        chosen = (min(times[kind][place] for kind in kinds) for place in range(len(ROWS)))
        return max(t / fastest for t, fastest in zip(chosen, best, strict=True))

    def size(kinds: set[str]) -> int:
        return sum(BFLOAT16[kind] for kind in kinds)

    assert size(set(served) - {PLAIN}) <= room
    slowest = max(times[kind][place] / best[place] for place, kind in enumerate(served))
    if room >= 8:
        assert slowest <= TOLERANCE + 1e-9
    for count in range(1, 5):
        for kinds in map(set, itertools.combinations(BFLOAT16, count)):
            if size(kinds - {PLAIN}) <= room and worst(kinds) <= 1.0:
                assert slowest <= TOLERANCE + 1e-9
                assert size(set(served)) <= size(kinds)


def test_buckets() -> None:
    """Every number of rows is served by the nearest measured one, by ratio."""
    assert [ROWS[row_bucket(rows)] for rows in (0, 1, 2, 3, 8, 9, 31, 33, 127, 129, 5000)] == [
        1, 1, 4, 4, 16, 16, 16, 64, 64, 256, 256,
    ]  # fmt: skip
    shapes = [ATTENTION_SHAPES[attention_bucket(*work)] for work in [(False, 1, 100), (False, 9, 9e9), (True, 1, 5000)]]
    assert shapes == [(1, 512), (16, 1024), (256, 4096)]
    chosen = AttentionChoice({3: ("torch",) * 6})
    assert chosen.compiled(2, 5) and not chosen.compiled(3, 0)


def test_the_file_of_times(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Times come back as they were saved, under the same conditions only. A damaged file, or one of anything else, counts as
    absent; a folder that cannot be written keeps nothing; old files are deleted."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    times = {"one": AMX, "two": {"torch": [0.5] * 6, COMPILED: [math.inf] * 6}}
    TimesFile(["a", "b"]).save(times)
    assert TimesFile(["a", "b"]).load() == times
    assert TimesFile(["a", "c"]).load() is None
    (path,) = (tmp_path / "foreword").iterdir()
    good = json.loads(path.read_text(encoding="utf-8"))
    for key, wrong in (
        ("times", [1]), ("times", {"one": {COMPILED: [1.0]}}), ("times", {"one": {COMPILED: ["x"] * 5}}),
        ("times", {"one": {COMPILED: [None] * 5}}), ("times", {"one": {COMPILED: [-1.0] * 5}}), ("conditions", ["x"]),
        ("times", {"one": {COMPILED: [float("nan")] * 5}}), ("times", {"one": {}}), ("times", {"one": 3}),
    ):  # fmt: skip
        path.write_text(json.dumps(good | {key: wrong}), encoding="utf-8")
        assert TimesFile(["a", "b"]).load() is None
    for text in ("", "[" * 100_000, "{", "3", "x" * (2 << 20)):
        path.write_text(text, encoding="utf-8")
        assert TimesFile(["a", "b"]).load() is None
    for number in range(80):
        TimesFile([str(number)]).save(times)
    assert len(list((tmp_path / "foreword").iterdir())) == 64
    (tmp_path / "file").write_text("", encoding="utf-8")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    TimesFile(["a", "b"]).save(times)
    assert TimesFile(["a", "b"]).load() is None


@pytest.mark.parametrize("dtype", represented(["float32", "bfloat16"], "bfloat16"))
def test_measured_once(dtype: str, llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model is measured at its first load, and every kind that this machine computes has a time; later loads read the file.
    Every mixture of kernels passes the self-check."""
    monkeypatch.setattr(kernel_choice, "cache_folder", lambda: tmp_path)
    config = EngineConfig(model=str(llama), dtype=dtype)
    first = load_model(config)
    (path,) = tmp_path.glob("times-*.json")
    assert any("product" in line for line in first.backends)
    found = json.loads(path.read_text(encoding="utf-8"))
    swapped = dict(found["times"])
    monkeypatch.setattr(measure, "_measure_product", None)
    assert load_model(config).backends == first.backends
    limit = 1e-4 if dtype == "float32" else 0.15
    for turn in range(3):
        for name, times in swapped.items():
            kinds = list(times)
            best = [kinds[(place + turn) % len(kinds)] for place in range(len(times[kinds[0]]))]
            found["times"][name] = {kind: [1.0 if kind == one else 2.0 for one in best] for kind in kinds}
        path.write_text(json.dumps(found), encoding="utf-8")
        assert self_check(load_model(config), 4) < limit
