"""A short campaign of erasures over every mixture of tiers, and tests of the campaign itself."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import erasure_campaign
import pytest
from erasure_campaign import MIXTURES, Campaign, run

from foreword.blocks.keys import FINGERPRINT_BYTES
from foreword.store.base import Erased, Name, Store
from foreword.store.disk.disk_store import DiskStore
from foreword.store.types import Reach, StoreUrl
from foreword.store.urls import open_store


@pytest.mark.slow
def test_a_short_campaign() -> None:
    """200 erasures in all mixtures: no false receipt, nothing is left, nothing comes back, no other tenant loses anything."""
    rows = run(200, seed=20)
    assert {row.label for row in rows} == set(MIXTURES)
    for row in rows:
        assert row.erasures >= 10 and row.good, row
        assert row.at_once + row.later + row.asked_again == row.erasures, row


class Hiding(DiskStore):
    """Says that it has erased everything."""

    def erase_steps(self, *_: Any, **__: Any) -> Iterator[Erased]:
        yield from ()


class Eager(DiskStore):
    """Deletes the blocks of other tenants with each call."""

    def delete(self, names: Sequence[Name], *, deadline: float) -> int:
        mine = {name[FINGERPRINT_BYTES:][:12] for name in names}
        every = [name for listed in super().list_names(deadline=deadline) for name in listed]
        others = [name for name in every if name[FINGERPRINT_BYTES:][:12] not in mine]
        return super().delete([*names, *others], deadline=deadline)


@pytest.mark.parametrize(("store", "column"), [(Hiding, "false"), (Eager, "sound_deleted")])
def test_the_campaign_notices(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, store: type[DiskStore], column: str
) -> None:
    """A tier that erases nothing and says that it has, and one that deletes those of another, are reported."""

    def opened(url: StoreUrl, _: object) -> Store:
        return store(url.path, 64 << 20)

    monkeypatch.setattr(erasure_campaign, "open_store", partial(open_store, openers={Reach.HOST: opened}))
    monkeypatch.setattr(erasure_campaign, "WITHIN", 0.2)
    monkeypatch.setattr(erasure_campaign, "FAULTS", {**dict.fromkeys(erasure_campaign.FAULTS, 0), "none": 1})
    row = Campaign("disk", tmp_path, 1).run(6)
    assert getattr(row, column) > 0 and not row.good
