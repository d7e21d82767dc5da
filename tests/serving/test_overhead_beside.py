"""`benchmarks.router.overhead --beside`: two versions of the router by turns."""

from __future__ import annotations

from benchmarks.router.beside import HEAD, row


def test_a_row_has_the_ratios_of_turns_and_not_of_times() -> None:
    """The ratio is the median of those of the turns: load that meets both in one turn changes it little. Turns in which the
    other version did nothing are left out."""
    turns = [(2e-6, 1e-6), (30e-6, 20e-6), (3e-6, 3e-6), (1e-6, 0.0)]
    cells = dict(zip(HEAD, row("plain", "event", turns), strict=True))
    assert (cells["ratio"], cells["least"], cells["greatest"], cells["turns"]) == ("1.500", "1.000", "2.000", "3")
    assert (cells["this code, us"], cells["the other, us"]) == ("2.5", "2.0")


def test_no_turn_is_no_ratio() -> None:
    """Without a turn there is no figure, and no error."""
    assert row("plain", "event", [])[2:] == ["nan"] * 5 + ["0"]
