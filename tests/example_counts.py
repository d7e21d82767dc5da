"""How much a test tries in the fast set of tests, and what only the slow set tries."""

import os
from collections.abc import Iterable
from typing import Any

import pytest

_EXPLORES = os.environ.get("HYPOTHESIS_PROFILE") == "explore"


def examples(most: int) -> int:
    """The most with `HYPOTHESIS_PROFILE=explore`, else a fifth: the same ones in every run, which find nothing new."""
    return most if _EXPLORES else -(-most // 5)


def represented(values: Iterable[Any], *fast: Any) -> list[Any]:
    """Parameters of a test: the fast tests run those that stand for the others, the slow ones the rest."""
    values = list(values)
    assert fast and set(fast) <= set(values)
    return [value if value in fast else pytest.param(value, marks=pytest.mark.slow) for value in values]
