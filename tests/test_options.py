"""Each option has a test, a sentence that an operator understands, and a unit."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from foreword.cli.flags import ConfigFlag, config_flags

pytestmark = pytest.mark.extended

TESTS = Path(__file__).parent
# A file with a secret has no key of its own: `file_keys` makes one of each secret, and `test_config.py` tests them all.
OPTIONS = {f"{one.section}.{one.key}": one for one in config_flags() if not one.file_of}
UNIT = re.compile(
    r"\b(seconds?|bytes?|KiB|MiB|GiB|memory|size|tokens?|blocks?|requests?|number|shares?|budget|port|threads|streams|secret|"
    r"prefixes|weights?|one .* in N|cores|seed|failures)\b",
    re.IGNORECASE,
)


def sources() -> list[str]:
    return [path.read_text(encoding="utf-8") for path in sorted(TESTS.rglob("*.py")) if path != Path(__file__)]


def names(flag: ConfigFlag) -> re.Pattern[str]:
    """The ways to set an option or to read it: flag, key in TOML or Python, variable."""
    key = flag.key
    ways = (
        rf"--(?:no-)?{re.escape(flag.name)}\b(?!-)", rf"\b{key}=", rf"\b{key} = ", rf"\.{key}\b", rf"[\"']{key}[\"']",
        rf"FOREWORD_{flag.section.upper()}_{key.upper()}\b",
    )  # fmt: skip
    return re.compile("|".join(ways))


def test_options_have_a_test() -> None:
    """A test names each option. What no test and no user sets is a constant."""
    texts = sources()
    assert not {name for name, flag in OPTIONS.items() if not any(names(flag).search(text) for text in texts)}


@pytest.mark.parametrize("name", OPTIONS)
def test_options_have_a_sentence_and_a_unit(name: str) -> None:
    """The description of an option is a sentence of at least four words, which does not only repeat its name; that of a number
    names the unit, and that of a choice each value."""
    flag = OPTIONS[name]
    words = re.findall(r"[\w.-]+", flag.text)
    assert len(words) >= 4 and not {word.lower() for word in words} <= set(flag.key.split("_")), flag.text
    numbers = {int, float, int | None, float | None}
    assert flag.kind not in numbers or UNIT.search(flag.text), f"{flag.text}: in what?"
