"""Dictionaries of what was set last."""

import copy

from foreword.newest import Newest


def test_the_newest_entries_are_kept() -> None:
    """An entry that is set again is new again, however it is set. Reading and removing change no order."""
    kept: Newest[str, int] = Newest(3)
    for number, key in enumerate("abca"):
        kept[key] = number
    assert kept["b"] == 1 and kept.get("c") == 2
    kept["d"] = 4
    assert list(kept.items()) == [("c", 2), ("a", 3), ("d", 4)]
    assert kept.pop("c") == 2
    kept |= {"e": 5, "f": 6}
    assert list(kept) == ["d", "e", "f"]
    assert kept.setdefault("g", 7) == 7 and list(kept) == ["e", "f", "g"]
    again = copy.deepcopy(kept)
    again["h"] = 8
    assert list(again) == ["f", "g", "h"] and list(kept) == ["e", "f", "g"]
