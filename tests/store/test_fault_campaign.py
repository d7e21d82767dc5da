"""A short fault campaign over every tier, and tests of the campaign itself."""

from __future__ import annotations

import fault_campaign
import pytest
from fault_campaign import Campaign, MemoryPlace, PeerPlace, StallWatch, run

from foreword.conformance import make_frames
from foreword.store.frame import frame


@pytest.mark.slow
def test_a_short_campaign() -> None:
    """600 faults in all tiers: no wrong byte, no crash, every block heals, and sound blocks beside bad ones are served."""
    rows = run(600, seed=20)
    tiers = {"memory", "disk files", "disk index", "disk pieces", "Redis", "Redis cluster", "S3", "peer"}
    assert {row.label for row in rows} == tiers
    for row in rows:
        assert row.faults >= 10 and (row.wrong, row.crash, row.not_healed, row.sound_deleted) == (0, 0, 0, 0), row
        assert row.sound_served >= 0.99 * row.sound, row


def test_the_campaign_notices_wrong_bytes() -> None:
    """A tier that serves other bytes under a name, with a valid checksum, is reported."""
    chain = make_frames(1, 6, 500)
    other = [frame(one.header, bytes(500)) for one in chain]
    place = PeerPlace(other)
    row = Campaign(place, [chain], 1, StallWatch()).run(10)
    assert row.wrong > 10


def test_the_campaign_notices_late_puts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A put that returns after its deadline is reported."""
    monkeypatch.setattr(fault_campaign, "PUT", -1.0)
    assert Campaign(MemoryPlace(), [make_frames(1, 6, 500)], 1, StallWatch()).run(1).late > 0


def test_the_campaign_notices_blocks_that_do_not_heal() -> None:
    """A tier whose bad blocks are not deleted is reported."""

    class Kept(MemoryPlace):
        special = ("bad",)
        outages = ()

    campaign = Campaign(Kept(), [make_frames(1, 6, 500)], 1, StallWatch())
    campaign.store.tiers[0].writable = False
    assert campaign.run(10).not_healed > 0
